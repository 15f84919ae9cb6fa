"""Every method on posteriors that are known, at equal numbers of gradients: at its defaults, and at an oracle's rate.

    python benchmarks/family.py [--problems 'toy-*,logistic-*'] [--methods isgd swag] [--gradients 100000] [--seeds 2]
        [--rates 7] [--jobs 8] [--data-root DIR] [--cache DIR] [--out FILE.json]
    python benchmarks/family.py --export DIR      # write the data that come with scikit-learn, for a machine without it
    python benchmarks/family.py --show FILE.json  # print the tables of a run again

Problems: the exact toy (``toy-well-200``), two dimensions of correlation .99 whose gradient noise has a shape of its
own (``gauss-anisotropic``), and the logistic regressions on real data of `isosgd.experiments.logistic`, whose reference
is a long run of Hamiltonian Monte Carlo. What has no data is left out, and said so.

Eight chains share the gradients; warm-up, training and looks at noise and curvature are counted in. The oracle runs a
method at each rate of a grid around the one it chose and keeps the smallest 2-Wasserstein distance: knowledge that
nobody has who does not know the posterior. Where a method has no rate it tunes what it has: ``lam`` of momentum I-SGD,
``p`` of MC-dropout, the rate of Adam for ensembles. I-SGD and V-SGD are rules for a rate and have nothing to tune.

Columns: error of the means in posterior standard deviations, the largest over entries; of the covariance, Frobenius
norm of the difference over that of the truth; 2-Wasserstein distance over the posterior's scale; effective draws, the
least over entries, in all and for every 1,000 gradients (those of MC-dropout and SWAG cost nothing: their number is our
choice). Mean over seeds. A job is one run; each takes one core.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import platform
import shlex
import sys
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from posteriors import CHAINS, LEAST_DRAWS, spend

import isosgd
from isosgd.chain.progress import clock
from isosgd.data.root import data_root
from isosgd.experiments import logistic, suite

EXACT = ["toy-well-200", "gauss-anisotropic"]
UNITS = {"toy-well-200": {"w": 0}, "gauss-anisotropic": {"theta": 0}}  # what MC-dropout may leave out
TUNED = {"isgd-momentum": "lam", "mcdropout": "p", "ensemble": "train_lr", "isgd": None, "vsgd": None}  # others: lr
MASKS = 250  # draws of MC-dropout and SWAG: they cost no gradients
Row = dict[str, Any]


class Job(NamedTuple):
    """One run: what, how, and where its data and reference are."""

    problem: str
    method: str
    options: dict[str, Any]
    gradients: int
    seed: int
    where: tuple[str, str | None]


@cache
def problem_of(name: str, root: str, kept: str | None) -> suite.Problem:
    """A problem by its name, from the data under a root and the references in a cache; each process makes it once."""
    return (logistic if name in logistic.NAMES else suite).make(name, root, kept)


# ---------------------------------------------------------------- one run


def draw(problem: suite.Problem, method: str, options: dict[str, Any], gradients: int, seed: int) -> isosgd.Posterior:
    """Draws for so many gradients in all: the one place where a budget becomes settings."""
    if next(row for row in isosgd.methods() if row["name"] == method)["family"] != "baseline":
        return spend(problem, method, options, gradients, seed)
    share = gradients // CHAINS
    epoch = math.ceil(len(problem.data[0]) / problem.batch_size)
    training = min(max(3000, 40 * epoch), share // 2)
    given = {"init": problem.init, "chains": CHAINS, "batch_size": problem.batch_size, "seed": seed, "progress": False}
    if method == "mcdropout":
        own = {"units": UNITS.get(problem.name, {"w": 0}), "draws": MASKS, "warmup": share}
    elif method == "ensemble":
        own = {"draws": max(1, share // training), "warmup": training}
    elif method == "swag":
        own = {"draws": MASKS, "warmup": training, "snapshots": max(2, (share - training - 70) // epoch)}
    else:
        cycle = max(100, 2 * epoch)
        own = {"draws": max(LEAST_DRAWS, (share - training - 70) // cycle), "warmup": training, "keep_every": cycle}
    return isosgd.sample(problem.target, problem.data, method=method, **{**given, **own, **options})


def run(job: Job) -> Row:
    """The scores of one run, or why there are none."""
    torch.set_num_threads(1)
    problem, started = problem_of(job.problem, *job.where), time.monotonic()
    row: Row = {"problem": job.problem, "method": job.method, "options": job.options, "seed": job.seed}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            posterior = draw(problem, job.method, job.options, job.gradients, job.seed)
        except isosgd.DivergedError as error:
            return row | {"failed": str(error), "seconds": time.monotonic() - started}
    found = suite.score(problem, dict(posterior.draws), posterior.info["gradients"])
    if not math.isfinite(found["w2"]):
        return row | {"failed": "the draws are not finite", "seconds": time.monotonic() - started}
    entries, true = problem.entries(dict(posterior.draws)).double().flatten(0, 1), problem.reference.covariance
    spent = posterior.info["gradients"]
    return row | found | {
        "covariance_error": float((entries.T.cov() - true).norm() / true.norm()),
        "min_ess": found["ess_per_1000"] * spent / 1000,
        "gradients": spent,
        "num_data": posterior.info["num_data"],
        "draws": len(posterior),
        "rates": [rate for chain in posterior.info["rates"] for rate in chain.values()],
        "warnings": sorted({str(warning.message) for warning in heard}),
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def grid(method: str, found: list[Row], rates: int) -> list[dict[str, Any]]:
    """What the oracle tries, around what a method chose."""
    name = TUNED.get(method, "lr")
    if name is None:
        return []
    if name == "p":
        return [{name: float(p)} for p in np.geomspace(0.001, 0.5, rates)]
    chosen = [rate for row in found for rate in row.get("rates", [])] or ([0.01] if name == "train_lr" else [])
    if not chosen:
        return []
    values = np.geomspace(min(chosen) / 8, max(chosen) * 8, rates)
    if name == "lam":
        values = 1.0 / (found[0]["num_data"] * values)  # of a rate
    return [{name: float(value)} for value in values]


# ---------------------------------------------------------------- all runs


class Board:
    """All rows so far; the oracle's jobs follow from a method's own runs.

    Args:
        args: of the command line.
        about: what is written beside the rows.
    """

    def __init__(self, args: argparse.Namespace, about: Row) -> None:
        self.args, self.about = args, about
        self.rows: list[Row] = []
        self.started = time.monotonic()
        self.expected = self.done = 0

    def jobs(self, problem: str, method: str, options: dict[str, Any]) -> list[Job]:
        """A method with options, once for each seed."""
        args = self.args
        return [Job(problem, method, options, args.gradients, seed, args.where) for seed in range(args.seeds)]

    def first(self) -> list[Job]:
        """Every method at its defaults."""
        pairs = [(problem, method) for problem in self.args.problems for method in self.args.methods]
        tuned = sum(TUNED.get(method, "lr") is not None for _, method in pairs)
        self.expected = self.args.seeds * (len(pairs) + tuned * self.args.rates)
        return [job for pair in pairs for job in self.jobs(*pair, {})]

    def take(self, row: Row) -> list[Job]:
        """Keep a row; returns the jobs that follow from it."""
        self.rows.append(row)
        self.done += 1
        self._say(row)
        if self.args.out:
            whole = self.about | {"seconds": time.monotonic() - self.started, "results": self.rows}
            self.args.out.write_text(json.dumps(whole, indent=1) + "\n")
        own = [r for r in self.rows if (r["problem"], r["method"], r["options"]) == (row["problem"], row["method"], {})]
        if row["options"] or len(own) < self.args.seeds or not self.args.rates:
            return []
        tried = grid(row["method"], [r for r in own if "w2" in r], self.args.rates)
        if not tried:  # every seed failed
            self.expected -= self.args.seeds * self.args.rates * (TUNED.get(row["method"], "lr") is not None)
        return [job for options in tried for job in self.jobs(row["problem"], row["method"], options)]

    def _say(self, row: Row) -> None:
        spent = time.monotonic() - self.started
        left = clock(spent / self.done * max(self.expected - self.done, 0))
        what = f"W2 {row['w2']:.4f}" if "w2" in row else f"failed: {row['failed'][:60]}"
        own = ", ".join(f"{key} {value:.3g}" for key, value in row["options"].items())
        text = f"{self.done}/{self.expected} {row['problem']} {row['method']} {own or 'defaults'}: {what}; {left} left"
        begin, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        print(begin + text[:150], end=end, file=sys.stderr, flush=True)


def best(rows: list[Row], problem: str, method: str) -> tuple[list[Row], list[Row]]:
    """Rows of a method at its defaults, and at the option with the least mean W2 over seeds that all went well."""
    mine = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
    own = [row for row in mine if not row["options"]]
    tried: dict[str, list[Row]] = {}
    for row in mine:
        tried.setdefault(json.dumps(row["options"]), []).append(row)
    good = [group for group in tried.values() if all("w2" in row for row in group)]
    return own, min(good, key=lambda group: np.mean([row["w2"] for row in group]), default=[])


COLUMNS = {  # what is shown, its head, and its form
    "mean_error": ("mean/sd", "8.3f"), "covariance_error": ("cov", "8.3f"), "w2": ("W2", "8.4f"),
    "min_ess": ("min ESS", "9.1f"), "ess_per_1000": ("ESS/1k", "9.2f"), "gradients": ("gradients", "9.0f"),
}  # fmt: skip


def show(rows: list[Row]) -> None:
    """One table for each problem."""
    heads = " ".join(f"{head:>{form.split('.')[0]}}" for head, form in COLUMNS.values())
    for problem in dict.fromkeys(row["problem"] for row in rows):
        print(f"\n{problem}\n{'method':<15} {'':<16} {heads} {'seconds':>8}")
        for method in dict.fromkeys(row["method"] for row in rows if row["problem"] == problem):
            own, tuned = best(rows, problem, method)
            line(method, "defaults", own)
            if tuned and tuned[0]["options"]:
                line(method, ", ".join(f"{key} {value:.3g}" for key, value in tuned[0]["options"].items()), tuned)


def line(method: str, label: str, group: list[Row]) -> None:
    """One line: the mean over seeds that went well."""
    done = [row for row in group if "w2" in row]
    cells = [
        f"{np.mean([row[key] for row in done]) if done else math.nan:{form}}" for key, (_, form) in COLUMNS.items()
    ]
    failed = f"  {len(group) - len(done)} of {len(group)} failed" if len(done) < len(group) else ""
    print(f"{method:<15} {label:<16} {' '.join(cells)} {np.mean([row['seconds'] for row in group]):8.1f}{failed}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, checked."""
    every = [row["name"] for row in isosgd.methods()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="*", help="patterns of problems, with commas between (default all)")
    parser.add_argument("--methods", nargs="+", default=every, help="default: all of isosgd.methods()")
    parser.add_argument("--gradients", type=int, default=100_000, help="in all chains (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each (%(default)s)")
    parser.add_argument("--rates", type=int, default=7, help="that the oracle tries; 0 for no oracle (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread (%(default)s)")
    parser.add_argument("--data-root", type=Path, help="folder with uci/ and breast_cancer.npz (default: ISOSGD_DATA)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the moments of the references")
    parser.add_argument("--out", type=Path, help="write all results to this file")
    parser.add_argument("--export", type=Path, help="only write breast_cancer.npz into this folder")
    parser.add_argument("--show", type=Path, help="only print the tables of this file")
    args = parser.parse_args(arguments)
    if args.export or args.show:
        return args
    unknown = sorted(set(args.methods) - set(every))
    if unknown:
        parser.error(f"method {unknown[0]!r} is unknown; choose from {every}")
    for name, least in (("gradients", 8000), ("seeds", 1), ("rates", 0), ("jobs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    args.data_root = data_root(args.data_root)
    args.where = str(args.data_root), str(args.cache) if args.cache else None
    patterns = args.problems.split(",")
    known = [*EXACT, *logistic.names(args.data_root)]
    for name in sorted({*logistic.NAMES} - {*known}):
        print(f"{name} is left out: its data are not under {args.data_root}", file=sys.stderr)
    args.problems = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not args.problems:
        parser.error(f"no problem fits {patterns}; there are {known}")
    if args.jobs > 1 and args.cache is None and {*args.problems} & {*logistic.NAMES}:
        parser.error("--jobs needs --cache DIR, so that the references of logistic regressions are made only once")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    if args.show:
        show(json.loads(args.show.read_text())["results"])
        return
    if args.export:
        print(logistic.export(args.export))
        return
    about: Row = {
        "command": shlex.join(["python", "benchmarks/family.py", *given]),
        "versions": {"isosgd": isosgd.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"kind": platform.machine(), "cores": os.cpu_count(), "jobs": args.jobs},
        "gradients": args.gradients,
        "chains": CHAINS,
    }
    for name in args.problems:  # references first, once, so that no two processes make the same
        known = problem_of(name, *args.where).reference
        about.setdefault("references", {})[name] = {"ess": known.ess if math.isfinite(known.ess) else None}
    board = Board(args, about)
    if args.jobs == 1:
        waiting = board.first()
        while waiting:
            waiting += board.take(run(waiting.pop(0)))
    else:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            running: set[Future[Row]] = {pool.submit(run, job) for job in board.first()}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(run, job) for one in finished for job in board.take(one.result())}
    print(file=sys.stderr)
    show(board.rows)


if __name__ == "__main__":
    main()
