"""How near draws come to posteriors that are known, at equal gradients: I-SGD by structure and its rivals.

    python benchmarks/posteriors.py [--problems 'toy-*,kidiq-*'] [--methods isgd:layer sgld] [--gradients 100000]
        [--seeds 2] [--data-root DIR] [--cache DIR] [--oracle] [--json FILE]
    python benchmarks/posteriors_tables.py FILE     # tables and plots of what was written

Every method goes through `isosgd.sample` with nothing set but draws, chains and batch size: eight chains, the automatic
warm-up counted in. A method is a name of `isosgd.METHODS`, for I-SGD with a structure after a colon; ``isgd-all`` is
I-SGD with ``batch_size="all"``, which ``isgd`` takes too where a minibatch is as large as the data. With ``--oracle``
the rivals are also run at each rate of a grid around the one they chose themselves, which goes on where the best is at
an end of it, and the rate with the smallest 2-Wasserstein distance is shown as ``NAME@oracle``: knowledge that nobody
has who does not know the posterior.

Columns are those of `isosgd.experiments.suite.score`: the error of the means in posterior standard deviations, of the
standard deviations as a ratio, the 2-Wasserstein distance over the posterior's scale, effective draws for every 1,000
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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

import isosgd
from isosgd.experiments import posteriordb, suite
from isosgd.geometry.choice import StructureName
from isosgd.samplers import METHODS

CHAINS = 8
LEAST_DRAWS = 4  # of each chain, even where the budget does not hold them
WHOLE = "isgd-all"  # I-SGD on all data
ORACLE_RATES = 7
MOST_BEYOND = 8  # further rates, beyond the ends of that grid
CURVE_POINTS = 15
RIVALS = ("sgld", "sghmc", "adaptive-sghmc", "psgld")
Row = dict[str, Any]


def default_methods() -> list[str]:
    """I-SGD with every structure it has, on all data, and the rivals."""
    return [*(f"isgd:{name}" for name in get_args(StructureName)), f"{WHOLE}:auto", *RIVALS]


def spend(problem: suite.Problem, method: str, options: dict[str, Any], gradients: int, seed: int) -> isosgd.Posterior:
    """Sample with so many gradients in all, warm-up included: the one place where a budget becomes a number of draws.

    A first call for one draw says what the warm-up costs and how far apart draws are; the second, of the same seed,
    does the same again and draws as often as the budget allows. A warm-up that would take more than half of the budget
    is told to take half (``info["capped"]``).
    """
    whole = method == WHOLE or (method == "isgd" and problem.batch_size >= len(problem.data[0]))

    def sample(draws: int, warmup: Any) -> isosgd.Posterior:
        return isosgd.sample(
            problem.target,
            problem.data,
            init=problem.init,
            method="isgd" if whole else method,
            draws=draws,
            chains=CHAINS,
            batch_size="all" if whole else problem.batch_size,
            warmup=warmup,
            seed=seed,
            progress=False,
            **options,
        )

    share, warmup = gradients // CHAINS, "auto"
    pilot = sample(1, warmup).info
    if capped := pilot["warmup"][0]["steps"] > share // 2:
        warmup = share // 2
        pilot = sample(1, warmup).info
    draws = (share - pilot["warmup"][0]["steps"]) // pilot["keep_every"][0]
    posterior = sample(max(LEAST_DRAWS, draws), warmup)
    posterior.info["capped"] = capped
    return within(posterior, share)


def within(posterior: isosgd.Posterior, share: int) -> isosgd.Posterior:
    """The draws that so many gradients of each chain bought: a run may space them wider than its pilot did."""
    info = posterior.info
    steps, gap = info["warmup"][0]["steps"], info["keep_every"][0]
    most = max(LEAST_DRAWS, (share - steps) // gap)
    if most >= posterior.num_draws:
        return posterior
    spent = info["gradients"] - sum(info["keep_every"]) * (posterior.num_draws - most)
    draws = {name: x[:, :most] for name, x in posterior.draws.items()}
    return isosgd.Posterior(posterior.target, draws, info | {"gradients": spent})


def curve(problem: suite.Problem, posterior: isosgd.Posterior) -> list[Row]:
    """Scores of the first few draws, of more, and of all, with the gradients spent until then."""
    total, gap, most = posterior.info["gradients"], sum(posterior.info["keep_every"]), posterior.num_draws
    counts = np.unique(np.geomspace(min(4, most), most, CURVE_POINTS).astype(int))
    rows = []
    for count in map(int, counts):
        spent = total - gap * (most - count)
        draws = {name: x[:, :count] for name, x in posterior.draws.items()}
        rows.append({"gradients": spent, **suite.score(problem, draws, spent)})
    return rows


def measure(problem: suite.Problem, label: str, options: dict[str, Any], gradients: int, seed: int) -> Row:
    """One run: its scores, or why there are none."""
    method, _, structure = label.partition("@")[0].partition(":")
    given = options | ({"structure": structure} if structure else {})
    row: Row = {"problem": problem.name, "method": label, "options": given, "seed": seed}
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            posterior = spend(problem, method, given, gradients, seed)
        except isosgd.DivergedError as error:
            return row | {"failed": str(error), "seconds": time.monotonic() - started}
    points = curve(problem, posterior)
    if not math.isfinite(points[-1]["w2"]):
        return row | {"failed": "the draws are not finite", "seconds": time.monotonic() - started}
    return row | points[-1] | {
        "curve": points,
        "draws": posterior.num_draws,
        "chains": posterior.num_chains,
        "keep_every": posterior.info["keep_every"],
        "rates": posterior.info["rates"],
        "warmup_capped": posterior.info["capped"],
        "warnings": sorted({str(warning.message) for warning in heard}),
        "sampling_seconds": posterior.info["seconds"],
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def oracle(
    problem: suite.Problem, method: str, options: dict[str, Any], found: list[Row], gradients: int, seeds: int
) -> list[Row]:
    """Runs at the best rate of a grid that spans the rates a method set for its groups, and four times beyond.

    While the best is the lowest or the highest of them, the grid goes on in that direction.
    """
    rates = [rate for row in found for chain in row.get("rates", []) for rate in chain.values()]
    if not rates:
        return []

    def error(lr: float) -> float:
        given = options | {"lr": lr}
        tried[lr] = [measure(problem, f"{method}@oracle", given, gradients, seed) for seed in range(seeds)]
        return mean(tried[lr], "w2") if all("w2" in row for row in tried[lr]) else math.inf

    tried: dict[float, list[Row]] = {}
    grid = np.geomspace(min(rates) / 4, max(rates) * 4, ORACLE_RATES).tolist()
    best = walk(error, grid)
    return [] if best is None else tried[best]


def walk(error: Callable[[float], float], grid: Sequence[float]) -> float | None:
    """The rate with the least error, on a grid that grows at an end for as long as the best is there.

    Example:
        >>> round(walk(lambda lr: (math.log2(lr) - 5) ** 2, [1.0, 2.0, 4.0]))
        32
    """
    ratio = grid[1] / grid[0]
    errors = {lr: error(lr) for lr in grid}
    for _ in range(MOST_BEYOND):
        best = min(errors, key=lambda lr: errors[lr])
        if best not in (min(errors), max(errors)) or math.isinf(errors[best]):
            break
        further = best * ratio if best == max(errors) else best / ratio
        errors[further] = error(further)
    best = min(errors, key=lambda lr: errors[lr])
    return None if math.isinf(errors[best]) else best


def mean(rows: list[Row], key: str) -> float:
    """Mean of a column."""
    return float(np.mean([row[key] for row in rows]))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        "command": shlex.join(["python", "benchmarks/posteriors.py", *given]),
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
