"""Every method on posteriors that are known, at equal numbers of gradients: at its defaults, and at an oracle's rate.

    python -m experiments.family [--problems 'toy-*,logistic-*'] [--methods isgd swag] [--gradients 100000]
        [--repeats 2] [--rates 9] [--jobs 8] [--limit SECONDS] [--data-root DIR] [--cache DIR] [--out FOLDER]
    python -m experiments.family --export DIR   # write the data of scikit-learn, for a machine without it
    python -m experiments.family.tables FOLDER  # print the tables of a run again, or put them into the documentation

Problems: the exact toy (``toy-well-200``), the logistic regressions on real data of `experiments.posteriors.logistic`,
whose reference is a long run of Hamiltonian Monte Carlo, and two dimensions of correlation .99 whose gradient noise has
a shape of its own (``gauss-anisotropic``). What has no data is left out, and said so.

Eight chains share the gradients. Warm-up, training, looks at noise and curvature and the exploration of cyclical
methods are counted in; nobody spends more, and what each has spent is shown. The automatic warm-up gets at most half.
A draw is kept every so many steps, the same for all, whatever a method would choose: thinning makes none better. A
cycle of the cyclical methods, by default 5000 steps, is at most half of a chain's.

The oracle runs a method at each rate of a grid over four decades around the one it chose and keeps the smallest
2-Wasserstein distance: knowledge that nobody has who does not know the posterior. A quarter of the gradients is its
warm-up. Chains of all rates run side by side, each at its own. Where a method has no rate the oracle tunes what it has:
``lam`` of momentum I-SGD, ``p`` of MC-dropout, the rate of Adam for ensembles. V-SGD, a rule for a rate, gets other
rates. I-SGD has nothing to tune.

Columns: error of the means in posterior standard deviations, the largest over entries; of the covariance, Frobenius
norm of the difference over that of the truth; 2-Wasserstein distance over the posterior's scale; effective draws, the
least over entries, in all and for every 1,000 gradients (those of MC-dropout and SWAG cost nothing: their number is our
choice). Mean over repeats. A job is one run; each takes one core. What is in the folder already is not run again, so
that a run can be done in parts.
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isosgd
from experiments.data.root import data_root
from experiments.family.runs import Job, problem_of, rounded, run
from experiments.family.tables import show
from experiments.posteriors import logistic
from experiments.posteriors.runs import CHAINS
from isosgd.progress import clock
from isosgd.samplers import METHODS, REGISTRY

EXACT = ["toy-well-200", "gauss-anisotropic"]
TUNED = {"isgd-momentum": "lam", "vsgd": "rate", "mcdropout": "p", "ensemble": "train_lr", "isgd": None}  # others: lr
DECADES = 4.0  # of the oracle's grid
TRIED_ALONE = 5  # settings of a baseline, which cannot run side by side
Row = dict[str, Any]


def grid(method: str, found: list[Row], rates: int) -> list[float]:
    """What the oracle tries, around what a method chose."""
    name, around = TUNED.get(method, "lr"), 0.01
    if name is None:
        return []
    rates = rates if method in METHODS else min(rates, TRIED_ALONE)
    if name == "p":
        return [float(p) for p in np.geomspace(0.5 / 10**DECADES, 0.5, rates)]
    chosen = [row["rate"] for row in found if row.get("rate")]
    if name != "train_lr" and chosen:  # else every repeat failed
        around = float(np.exp(np.mean(np.log(chosen))))
    values = around * np.geomspace(10 ** (-DECADES / 2), 10 ** (DECADES / 2), rates)
    return [float(value) for value in values]


class Board:
    """All rows so far, and the jobs that are left; the oracle's follow from a method's own runs.

    Args:
        args: of the command line.
        about: what is written beside the rows of each problem.
    """

    def __init__(self, args: argparse.Namespace, about: Row) -> None:
        self.args, self.about = args, about
        self.rows: list[Row] = [row for problem in args.problems for row in self._found(problem)]
        self.started = time.monotonic()
        self.done = 0
        self.waiting: list[Job] = []
        for job in [self.job(problem, method) for problem in args.problems for method in args.methods]:
            if self._is_done(job):
                self.waiting += self.oracle(job)
            else:
                self.waiting.append(job)

    def _found(self, problem: str) -> list[Row]:
        """What an earlier part of the run has found, less what went wrong for reasons other than its rates."""
        file = None if self.args.out is None else self.args.out / f"{problem}.json"
        if file is None or not file.is_file():
            return []
        part = json.loads(file.read_text())
        for name in ("gradients", "chains", "repeats"):
            if part[name] != self.about[name]:
                raise ValueError(f"{file} has {name} = {part[name]}, not {self.about[name]}: choose another --out")
        rows: list[Row] = part["results"]
        return [row for row in rows if "Error: " not in row.get("failed", "") or "DivergedError" in row["failed"]]

    def _is_done(self, job: Job) -> bool:
        def key(row: Row) -> str:
            return json.dumps([rounded(row)[name] for name in ("problem", "method", "options", "repeat")])

        return {key(block) for block in job.blocks} <= {key(row) for row in self.rows}

    def job(self, problem: str, method: str, name: str | None = None, values: tuple[float, ...] = ()) -> Job:
        """A run."""
        return Job(problem, method, name, values, self.args.repeats, self.args.gradients, self.args.where)

    def next(self) -> Job | None:
        """The job to start now: problems in their order; None when all are started, or time is up."""
        if not self.waiting or time.monotonic() - self.started > self.args.limit:
            return None
        self.waiting.sort(key=lambda job: self.args.problems.index(job.problem))
        return self.waiting.pop(0)

    def take(self, job: Job, rows: list[Row]) -> None:
        """Keep what a job found, and add those that follow from it."""
        self.rows += rows
        self.done += 1
        if not job.name:
            self.waiting += self.oracle(job)
        self._say(job, rows)
        if self.args.out:
            self._write(job.problem)

    def oracle(self, job: Job) -> list[Job]:
        """What tunes a method that has run at its defaults: all settings at once, or one after the other."""
        own = [row for row in self.rows if (row["problem"], row["method"]) == job[:2] and not row["options"]]
        name, values = TUNED.get(job.method, "lr"), grid(job.method, own, self.args.rates)
        if name == "lam":  # of a rate a T / (N lam)
            num_data = len(problem_of(job.problem, *self.args.where).data[0])
            values = [REGISTRY[job.method].settings["friction"] / (num_data * value) for value in values]
        parts = [tuple(values)] if job.method in METHODS and values else [(value,) for value in values]
        jobs = [self.job(job.problem, job.method, name, part) for part in parts]
        return [job for job in jobs if not self._is_done(job)]

    def _write(self, problem: str) -> None:
        mine = [json.dumps(row) for row in self.rows if row["problem"] == problem]
        head = json.dumps(
            self.about | {"problem": problem, "seconds": round(time.monotonic() - self.started)}, indent=1
        )
        text = head.removesuffix("\n}") + ',\n "results": [\n  ' + ",\n  ".join(mine) + "\n ]\n}\n"
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / f"{problem}.json").write_text(text)

    def _say(self, job: Job, rows: list[Row]) -> None:
        spent = time.monotonic() - self.started
        good = [row["w2"] for row in rows if "w2" in row]
        what = f"W2 {min(good):.4f}" if good else f"failed: {rows[0]['failed'][:60]}"
        own = f"{len(job.values)} of {job.name}" if job.name else "defaults"
        left = f"{self.done} runs in {clock(spent)}, {len(self.waiting)} wait"
        begin, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{begin}{job.problem} {job.method} {own}: {what}; {left}"[:150], end=end, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, checked."""
    every = [row["name"] for row in isosgd.methods()]
    parser = argparse.ArgumentParser(
        prog="python -m experiments.family",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problems", default="*", help="patterns of problems, with commas between (default all)")
    parser.add_argument("--methods", nargs="+", default=every, help="default: all of isosgd.methods()")
    parser.add_argument("--gradients", type=int, default=100_000, help="in all chains (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of each, side by side (%(default)s)")
    parser.add_argument("--rates", type=int, default=9, help="that the oracle tries; 0 for no oracle (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread (%(default)s)")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no run is started")
    parser.add_argument("--data-root", type=Path, help="folder with uci/ and breast_cancer.npz (default: ISOSGD_DATA)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the moments of the references")
    parser.add_argument("--out", type=Path, help="folder to write results to, one file for each problem")
    parser.add_argument("--export", type=Path, help="only write breast_cancer.npz into this folder")
    args = parser.parse_args(arguments)
    if args.export:
        return args
    unknown = sorted(set(args.methods) - set(every))
    if unknown:
        parser.error(f"method {unknown[0]!r} is unknown; choose from {every}")
    for name, least in (("gradients", 8000), ("repeats", 1), ("rates", 0), ("jobs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    args.data_root = data_root(args.data_root)
    args.where = str(args.data_root), str(args.cache) if args.cache else None
    patterns = args.problems.split(",")
    known = [EXACT[0], *logistic.names(args.data_root), EXACT[1]]
    for name in sorted({*logistic.NAMES} - {*known}):
        print(f"{name} is left out: its data are not under {args.data_root}", file=sys.stderr)
    args.problems = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not args.problems:
        parser.error(f"no problem fits {patterns}; there are {known}")
    if args.jobs > 1 and args.cache is None and {*args.problems} & {*logistic.NAMES}:
        parser.error("--jobs needs --cache DIR, so that the references of logistic regressions are made only once")
    return args


def command(given: list[str]) -> str:
    """How it was called, less the folders of one machine."""
    places = {"--data-root", "--cache", "--out"}
    shown = ["DIR" if before in places else word for before, word in zip(["", *given], given, strict=False)]
    return shlex.join(["python", "-m", "experiments.family", *shown])


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    if args.export:
        print(logistic.export(args.export))
        return
    about: Row = {
        "command": command(given),
        "versions": {"isosgd": isosgd.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"kind": platform.machine(), "cores": os.cpu_count(), "jobs": args.jobs},
        "gradients": args.gradients,
        "chains": CHAINS,
        "repeats": args.repeats,
    }
    for name in args.problems:  # references first, once, so that no two processes make the same
        known = problem_of(name, *args.where).reference
        about.setdefault("references", {})[name] = {"ess": known.ess if math.isfinite(known.ess) else None}
    board = Board(args, about)
    if args.jobs == 1:
        while job := board.next():
            board.take(job, run(job))
    else:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            running: dict[Future[list[Row]], Job] = {}
            while True:
                while len(running) < args.jobs and (job := board.next()):
                    running[pool.submit(run, job)] = job
                if not running:
                    break
                for one in wait(running, return_when=FIRST_COMPLETED).done:
                    board.take(running.pop(one), one.result())
    print(file=sys.stderr)
    if board.waiting:
        print(f"{len(board.waiting)} runs were not started in {args.limit:.0f} seconds", file=sys.stderr)
    for name in args.problems:
        show({"problem": name, "results": [row for row in board.rows if row["problem"] == name]})


if __name__ == "__main__":
    main()
