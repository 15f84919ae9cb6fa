"""What streaming draws to the disk costs, as a share of sampling alone.

    python -m benchmarks.store [--rounds 5] [--steps 600] [--every 1] [--threads 1] [--folder DIR]

A network of a million parameters (784-1000-210-10), minibatches of 128, SGLD. Every round takes the same steps twice,
once with a draw of 4 MB stored every ``--every`` steps, once with nothing kept before the last step; which comes first
changes from round to round. All that the store does counts, from the first look at the data to the last manifest.

Shown are medians over rounds of ratios, less one: of the time on the clock; of the time that the thread which samples
has a core (what streaming costs where another core is free for the thread that writes); and of that of all threads
(what it costs where none is).
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import isosgd


def make_target(seed: int = 0) -> tuple[isosgd.Target, tuple[Tensor, Tensor]]:
    """The posterior of the network, and data for it."""
    torch.manual_seed(seed)
    layers = [nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 210), nn.ReLU(), nn.Linear(210, 10)]
    data = (torch.randn(5000, 784), torch.randint(10, (5000,)))
    return isosgd.Target.from_module(nn.Sequential(*layers), "categorical"), data


class Spent(NamedTuple):
    """Seconds on the clock, of the thread that samples, and of all threads."""

    clock: float
    sampling: float
    all: float

    @staticmethod
    def now() -> Spent:
        return Spent(time.perf_counter(), time.thread_time(), time.process_time())


def spent(target: isosgd.Target, data: tuple[Tensor, Tensor], **settings: Any) -> Spent:
    """What these steps take."""
    began = Spent.now()
    isosgd.sample(
        target, data, method="sgld", lr=1e-6, warmup=0, batch_size=128, progress=False, compile=False, **settings
    )
    return Spent(*(end - begin for begin, end in zip(began, Spent.now(), strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of each part of a round (%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="steps between draws (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's folder for such files)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", isosgd.SamplingWarning)
    target, data = make_target()
    spent(target, data, draws=1, keep_every=10)  # memory is asked for, and threads begin
    found: list[tuple[Spent, Spent]] = []
    for turn in range(args.rounds):
        times: dict[bool, Spent] = {}
        for stored in (turn % 2 == 0, turn % 2 == 1):
            if stored:
                folder = Path(tempfile.mkdtemp(dir=args.folder))
                draws = args.steps // args.every
                times[stored] = spent(target, data, draws=draws, keep_every=args.every, store=folder)
                shutil.rmtree(folder)
            else:
                times[stored] = spent(target, data, draws=1, keep_every=args.steps)
        found.append((times[True], times[False]))
    print(f"torch {torch.__version__}, isosgd {isosgd.__version__}, {platform.machine()}, {args.threads} threads")
    step = statistics.median(alone.sampling for _, alone in found) / args.steps
    print(f"a step has a core for {1e3 * step:.1f} ms; a draw of 4 MB is stored every {args.every} steps")
    print(f"streaming costs, over {args.rounds} rounds of {args.steps} steps (median, least, most)")
    for which, words in enumerate(("on the clock", "the sampling thread", "all threads")):
        ratios = [stored[which] / alone[which] - 1 for stored, alone in found]
        print(f"  {words:<20} {statistics.median(ratios):6.1%} {min(ratios):7.1%} {max(ratios):7.1%}")


if __name__ == "__main__":
    main()
