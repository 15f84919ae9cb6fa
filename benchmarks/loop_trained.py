"""I-SGD in a plain loop from a trained network of digits: test NLL of the network and of the average over draws.

    python -W ignore -m benchmarks.loop_trained [--seeds 1]

A 64-32-10 network is trained by Adam on 1,400 images. Then come 4,000 steps of warm-up without an initial optimisation
and 3,000 steps with a draw at every thirtieth. The other 397 images are predicted. A minute a seed on one core.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from isosgd import ISGD

N, SIZE, WARMUP, STEPS, EVERY = 1_400, 64, 4_000, 3_000, 30
TEMPERATURES = (1.0, 0.1, 0.01, 0.001)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], count: int) -> None:
    for _ in range(count):
        rows = torch.randint(N, (SIZE,))
        optimizer.zero_grad()
        F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        optimizer.step()


def run(epochs: int, temperature: float, seed: int) -> tuple[float, float]:
    """Test NLL before and after."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    steps(model, torch.optim.Adam(model.parameters(), 3e-3), (x, y), epochs * N // SIZE)
    with torch.no_grad():
        before = float(F.cross_entropy(model(x[N:]), y[N:]))
    settings = {"weight_decay": 1e-4, "temperature": temperature, "warmup": WARMUP, "trained": True}
    sampler = ISGD(model.parameters(), num_data=N, batch_size=SIZE, **settings)
    steps(model, sampler, (x, y), WARMUP)
    assert sampler.phase == "sampling"
    mean = torch.zeros(len(x) - N, 10)
    for _ in range(STEPS // EVERY):
        steps(model, sampler, (x, y), EVERY)
        with torch.no_grad():
            mean += model(x[N:]).softmax(-1) * EVERY / STEPS
    return before, float(F.nll_loss(mean.log(), y[N:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = range(parser.parse_args().seeds)
    for epochs in (40, 200):
        for temperature in TEMPERATURES:
            pairs = torch.tensor([run(epochs, temperature, seed) for seed in seeds])
            print(f"{epochs:4} epochs, T = {temperature:<6g}", *(f"{a:.3f} -> {b:.3f}" for a, b in pairs.tolist()))


if __name__ == "__main__":
    main()
