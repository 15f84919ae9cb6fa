"""LeNet-5 on MNIST, started from a trained model: does a structure of Lambda hold at this temperature?

    python -m experiments.lenet [--structures diagonal kronecker] [--temperatures 1 .1 .01] [--steps 3000]
        [--device cuda] [--data-root DIR] [--json FILE]

The model is trained by Adam for a few epochs; then every structure samples at every temperature from there, with the
automatic warm-up. Shown are accuracy and mean negative log likelihood of the test set, of the start and of the draws,
the mean loss in the second half of the draws, and whether anything was not finite.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import isosgd
from experiments.data import mnist
from experiments.models import lenet5
from isosgd.metrics import accuracy, categorical_mnll


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> None:
    """Adam with a falling rate."""
    generator = torch.Generator(x.device).manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    steps = epochs * len(x) // 128
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,), generator=generator, device=x.device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and mean negative log likelihood."""
    return {
        "accuracy": float(accuracy(probabilities, y)),
        "mnll": float(categorical_mnll(probabilities.clamp_min(1e-12), y)),
    }


def main() -> None:
    """Train, sample, print."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.lenet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--structures", nargs="+", default=["diagonal", "kronecker"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.1, 0.01])
    parser.add_argument("--warmup", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=3000, help="after the warm-up")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    sets = {}
    for part in ("train", "test"):
        images, labels = mnist(args.data_root, part)
        x = images.to(device).float().div(255).sub(0.1307).div(0.3081)
        sets[part] = x.view(-1, 1, 28, 28), labels.to(device).long()
    (x, y), (x_test, y_test) = sets["train"], sets["test"]
    torch.manual_seed(0)
    net = lenet5().to(device)
    train(net, x, y, args.epochs, seed=0)
    with torch.no_grad():
        start = scores(net(x_test).softmax(-1), y_test)
    print(f"trained: {100 * start['accuracy']:.2f}%, {start['mnll']:.4f}", flush=True)
    rows = []
    for structure in args.structures:
        for temperature in args.temperatures:
            began = time.monotonic()
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                target = isosgd.Target.from_module(net, "categorical")
                row = {"structure": structure, "temperature": temperature}
                try:
                    posterior = isosgd.sample(
                        target,
                        (x, y),
                        draws=20,
                        keep_every=args.steps // 20,
                        warmup=args.warmup,
                        batch_size=128,
                        temperature=temperature,
                        structure=structure,
                        progress=False,
                    )
                    probabilities = torch.zeros(len(x_test), 10, device=device)
                    for draw in posterior:
                        free = {name: value.to(device) for name, value in target.unconstrain(draw).items()}
                        probabilities += target.predictive(free, x_test)["mean"] / len(posterior)
                    row |= scores(probabilities, y_test) | {"diverged": False}
                except isosgd.DivergedError as error:
                    row |= {"diverged": True, "why": str(error)}
            row |= {
                "seconds": time.monotonic() - began,
                "warnings": sorted({str(w.message) for w in heard if issubclass(w.category, isosgd.SamplingWarning)}),
            }
            rows.append(row)
            said = "; ".join(str(w)[:90] for w in row["warnings"])
            what = "DIVERGED" if row["diverged"] else f"{100 * row['accuracy']:.2f}%, {row['mnll']:.4f}"
            print(f"{structure} T={temperature}: {what} in {row['seconds']:.0f} s. {said}", flush=True)
    if args.json:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        about = {"machine": where, "torch": torch.__version__, "warmup": args.warmup, "steps": args.steps}
        args.json.write_text(json.dumps({**about, "start": start, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
