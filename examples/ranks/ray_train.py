"""Chains over the workers of Ray Train (``pip install "ray[train]"``): ``python ray_train.py``."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import isosgd


def work(config: dict[str, Any]) -> None:
    """What each worker does; Ray has made the process group."""
    torch.manual_seed(0)  # the same model and data on every rank
    x = torch.randn(500, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(500, 1)
    target = isosgd.Target.from_module(torch.nn.Linear(3, 1), "gaussian")
    isosgd.sample(target, (x, y), chains=4, parallel="chains", store=config["store"], resume=True, progress=False)


if __name__ == "__main__":
    store = Path(tempfile.mkdtemp()) / "run"  # on a cluster: a folder that all machines see
    TorchTrainer(work, train_loop_config={"store": str(store)}, scaling_config=ScalingConfig(num_workers=2)).fit()
    print(isosgd.load(store))
