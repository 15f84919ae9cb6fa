"""Chain-steps per second of `isosgd.sample` with many chains, at another commit and here, in turns.

    python -m benchmarks.two_commits --before c9ca49b [--chains 10 100] [--rounds 5] [--core 0]

The posterior is that of `benchmarks.chains`: an MLP 13-50-1, minibatches of 128 out of 455 rows. Only the public API is
used, since it is what both commits share. Each process takes a short run and a long one of the same settings; the steps
by which they differ, over the seconds by which they differ, are the speed, so that compiling and warm-up do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = """
import sys, time, warnings
import torch
from isosgd import Target, sample
warnings.simplefilter("ignore")
torch.set_num_threads(1)
method, chains, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
g = torch.Generator().manual_seed(0)
x = torch.randn(455, 13, generator=g)
y = x[:, :1].sin() + 0.5 * torch.randn(455, 1, generator=g)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(13, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
target = Target.from_module(net, "gaussian")
options = {"lr": 1e-6, "warmup": 0} if method == "sgld" else {"warmup": 1000, "structure": "diagonal"}
seconds = []
for length in (steps, steps, 3 * steps):
    began = time.perf_counter()
    sample(target, (x, y), method=method, chains=chains, draws=10, keep_every=length // 10, batch_size=128, seed=0,
           progress=False, compile=True, **options)
    seconds.append(time.perf_counter() - began)
print(2 * steps * chains / (seconds[2] - seconds[1]))
"""


def speed(tree: Path, method: str, chains: int, steps: int, core: int) -> float:
    """Chain-steps per second with the package of a tree."""

    def one_core() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    found = subprocess.run(
        [sys.executable, "-c", RUN, method, str(chains), str(steps)],
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, preexec_fn=one_core,
    )  # fmt: skip
    return float(found.stdout.split()[-1])


def main(argv: list[str] | None = None) -> int:
    """Time both, and print medians and the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="commit to compare with")
    parser.add_argument("--methods", nargs="+", default=["isgd", "sgld"])
    parser.add_argument("--chains", nargs="+", type=int, default=[10, 100])
    parser.add_argument("--steps", type=int, default=200_000, help="of all chains together, in the short run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", before, args.before], cwd=ROOT, check=True)
        try:
            for method in args.methods:
                for chains in args.chains:
                    steps = max(100, args.steps // chains)
                    pairs = [
                        [speed(tree, method, chains, steps, args.core) for tree in (before, ROOT)]
                        for _ in range(args.rounds)
                    ]
                    old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
                    ratio = statistics.median(b / a for a, b in pairs)
                    print(
                        f"{method}, {chains} chains: {old:,.0f} before, {new:,.0f} now, ratio {ratio:.3f}", flush=True
                    )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
