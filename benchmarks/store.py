"""What streaming draws to the disk costs, as a share of the time of sampling alone.

    python benchmarks/store.py [--rounds 9] [--steps 200] [--every 1] [--threads 1] [--folder DIR]

A network of a million parameters (784-1000-210-10), minibatches of 128, SGLD. Every round takes the same steps twice,
once with a draw of 4 MB stored every ``--every`` steps, once with nothing kept before the last step; which comes first
changes from round to round. What is shown is the median over rounds of the ratio of the two times, less one: all that
the store does is in it, from the first look at the data to the last manifest.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import isosgd


def make_target(seed: int = 0) -> tuple[isosgd.Target, tuple[Tensor, Tensor]]:
    """The posterior of the network, and data for it."""
    torch.manual_seed(seed)
    layers = [nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 210), nn.ReLU(), nn.Linear(210, 10)]
    data = (torch.randn(5000, 784), torch.randint(10, (5000,)))
    return isosgd.Target.from_module(nn.Sequential(*layers), "categorical"), data


def seconds(target: isosgd.Target, data: tuple[Tensor, Tensor], **settings: Any) -> float:
    """How long these steps take."""
    began = time.perf_counter()
    isosgd.sample(target, data, method="sgld", lr=1e-6, warmup=0, batch_size=128, progress=False, **settings)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of each part of a round (%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="steps between draws (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's folder for such files)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", isosgd.SamplingWarning)
    target, data = make_target()
    seconds(target, data, draws=1, keep_every=10)  # memory is asked for, and threads begin
    found: list[tuple[float, float]] = []
    for turn in range(args.rounds):
        times: dict[bool, float] = {}
        for stored in (turn % 2 == 0, turn % 2 == 1):
            if stored:
                folder = Path(tempfile.mkdtemp(dir=args.folder))
                times[stored] = seconds(
                    target, data, draws=args.steps // args.every, keep_every=args.every, store=folder
                )
                shutil.rmtree(folder)
            else:
                times[stored] = seconds(target, data, draws=1, keep_every=args.steps)
        found.append((times[True], times[False]))
    ratios = sorted(stored / alone - 1 for stored, alone in found)
    step = statistics.median(alone for _, alone in found) / args.steps
    print(f"torch {torch.__version__}, isosgd {isosgd.__version__}, {platform.machine()}, {args.threads} threads")
    print(f"a step takes {1e3 * step:.1f} ms; a draw of 4 MB is stored every {args.every} steps")
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(
        f"streaming takes {statistics.median(ratios):.1%} of the time of sampling (quarters {low:.1%} to {high:.1%}, "
        f"{args.rounds} rounds of {args.steps} steps)"
    )


if __name__ == "__main__":
    main()
