"""How near draws come to posteriors that are known, at equal gradients: I-SGD by structure and its rivals.

    python -m experiments.posteriors [--problems 'toy-*,kidiq-*'] [--methods isgd:layer sgld] [--gradients 100000]
        [--seeds 2] [--data-root DIR] [--cache DIR] [--oracle] [--json FILE]
    python -m experiments.posteriors.tables FILE # tables and plots of what was written

Every method goes through `isosgd.sample` with nothing set but draws, chains and batch size: eight chains, the automatic
warm-up counted in. A method is a name of `isosgd.METHODS`, for I-SGD with a structure after a colon; ``isgd-all`` is
I-SGD with ``batch_size="all"``, which ``isgd`` takes too where a minibatch is as large as the data. With ``--oracle``
the rivals are also run at each rate of a grid around the one they chose themselves, which goes on where the best is at
an end of it, and the rate with the smallest 2-Wasserstein distance is shown as ``NAME@oracle``: knowledge that nobody
has who does not know the posterior.

Columns are those of `suite.score`: the error of the means in posterior standard deviations, of the standard deviations
as a ratio, the 2-Wasserstein distance over the posterior's scale, effective draws for every 1,000
gradients, each the worst over entries; and R-hat. A star marks runs whose warm-up, left alone, would have taken more
than half of the budget, and was given half.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import isosgd
from experiments.posteriors import posteriordb, suite
from experiments.posteriors.runs import CHAINS, WHOLE, Row, default_methods, mean, measure, oracle
from isosgd.samplers import METHODS


def show(rows: list[Row]) -> None:
    """One line of the table: the mean over seeds."""
    name = f"{rows[0]['problem']:<42.42} {rows[0]['method']:<18}"
    done = [row for row in rows if "w2" in row]
    if len(done) < len(rows):
        name += f" ({len(rows) - len(done)} of {len(rows)} failed)"
    if done:
        star = "*" if any(row["warmup_capped"] for row in done) else " "
        name += f" {mean(done, 'gradients'):9.0f}{star} {mean(done, 'mean_error'):8.3f} {mean(done, 'sd_error'):8.3f}"
        name += f" {mean(done, 'w2'):8.4f} {mean(done, 'ess_per_1000'):8.2f} {mean(done, 'rhat'):6.2f}"
    print(f"{name} {mean(rows, 'seconds'):7.1f}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.posteriors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problems", default="*", help="patterns of problems, with commas between (default all)")
    parser.add_argument("--methods", nargs="+", help=f"default: {' '.join(default_methods())}")
    parser.add_argument("--gradients", type=int, default=100_000, help="in all chains, warm-up included")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each method")
    parser.add_argument("--batch-size", type=int, help="rows of a minibatch (default: a tenth of the data, or 32)")
    parser.add_argument("--data-root", type=Path, help="folder with posteriordb/ and uci/ (default: ISOSGD_DATA)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the reference moments of the networks")
    parser.add_argument("--oracle", action="store_true", help="also run the rivals at the best of a grid of rates")
    parser.add_argument("--no-compile", action="store_true", help="faster where runs are few and short")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args(arguments)
    args.data_root = args.data_root or posteriordb.default_root()
    args.methods = args.methods or default_methods()
    for label in args.methods:
        if label.partition(":")[0] not in {*METHODS, WHOLE}:
            parser.error(f"method {label!r} is unknown; choose from {default_methods()}")
    known = suite.names(args.data_root)
    patterns = args.problems.split(",")
    args.problems = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not args.problems:
        parser.error(f"no problem fits {patterns}; with this data root there are {known}")
    if args.gradients < 1 or args.seeds < 1:
        parser.error("--gradients and --seeds must be at least 1")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    torch.set_num_threads(args.threads)
    about = {
        "command": shlex.join(["python", "-m", "experiments.posteriors", *given]),
        "versions": {"isosgd": isosgd.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"kind": platform.machine(), "cores": os.cpu_count(), "threads": args.threads},
        "gradients": args.gradients,
        "chains": CHAINS,
    }
    print(f"{args.gradients:,} gradients in all, {CHAINS} chains, mean of {args.seeds} seeds; {about['versions']}")
    head = f"{'problem':<42} {'method':<18} {'gradients':>9}  {'mean/sd':>8} {'log sd':>8} {'W2':>8} {'ESS/1k':>8}"
    print(f"{head} {'R-hat':>6} {'seconds':>7}")
    started = time.monotonic()
    engine: dict[str, Any] = {"compile": False} if args.no_compile else {}
    rows: list[Row] = []
    references: dict[str, Row] = {}

    def keep(new: list[Row]) -> None:
        """Show and write at once: a run takes hours, and may be stopped."""
        if new:
            rows.extend(new)
            show(new)
        if args.json:
            whole = about | {"seconds": time.monotonic() - started, "references": references, "results": rows}
            args.json.write_text(json.dumps(whole, indent=1) + "\n")

    for name in args.problems:
        problem = suite.make(name, args.data_root, args.cache)
        if args.batch_size:
            problem = replace(problem, batch_size=min(args.batch_size, len(problem.data[0])))
        known = problem.reference
        references[name] = {"entries": len(known.mean), "ess": known.ess if math.isfinite(known.ess) else None}
        for label in args.methods:
            found = [measure(problem, label, engine, args.gradients, seed) for seed in range(args.seeds)]
            keep(found)
            if args.oracle and not label.startswith("isgd"):
                keep(oracle(problem, label, engine, found, args.gradients, args.seeds))


if __name__ == "__main__":
    main()
