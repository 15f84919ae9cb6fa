"""One run: a method on a posterior that is known, for a number of gradients, and how near it came.

Chains run in blocks of eight, side by side in one call of `isosgd.sample`: repeats, and the settings that an oracle
tries. A block has as many gradients as it may spend; what else runs beside it does not change it, but for when the
automatic warm-up ends.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

import isosgd
from experiments.posteriors import logistic, suite
from experiments.posteriors.runs import CHAINS
from isosgd.progress import Progress
from isosgd.samplers import METHODS, REGISTRY
from isosgd.samplers.schedules import CYCLE, SPREAD, Cycles

UNITS = {"toy-well-200": {"w": 0}, "gauss-anisotropic": {"theta": 0}}  # what MC-dropout may leave out
MASKS = 250  # draws of MC-dropout and SWAG: they cost no gradients
MOST_DRAWS = 1000  # of a chain
MARGIN = 4  # steps: a warm-up may end as much later than it was told to
Row = dict[str, Any]


class Job(NamedTuple):
    """One run: a block of `CHAINS` chains for every repeat of a method, at its defaults or at values of a setting."""

    problem: str
    method: str
    name: str | None
    values: tuple[float, ...]
    repeats: int
    gradients: int
    where: tuple[str, str | None]

    @property
    def blocks(self) -> list[Row]:
        """What is known of each block before it is run."""
        options = [{self.name: value} for value in self.values] if self.name else [{}]
        about = {"problem": self.problem, "method": self.method}
        return [about | {"options": option, "repeat": repeat} for option in options for repeat in range(self.repeats)]


@cache
def problem_of(name: str, root: str, kept: str | None) -> suite.Problem:
    """A problem by its name, from the data under a root and the references in a cache; each process makes it once."""
    return (logistic if name in logistic.NAMES else suite).make(name, root, kept)


# ---------------------------------------------------------------- one run


class WarmedUp(Exception):
    """The warm-up is over, or takes more than it may; with what was spent on it in all chains."""


def warmup_cost(problem: suite.Problem, given: Row, most: int) -> int | None:
    """Gradients that the automatic warm-up takes in each chain; None when they are more than they may be.

    A call of `isosgd.sample` is given up when it has found out.
    """
    advance, limit = Progress.advance, most * given["chains"]

    def counted(self: Progress, stage: str, steps: int = 1) -> None:
        if stage.endswith("sampling") or self.done > limit:
            raise WarmedUp(self.done)
        advance(self, stage, steps)

    Progress.advance = counted  # type: ignore[method-assign]
    try:
        isosgd.sample(problem.target, problem.data, draws=1, **given)
    except WarmedUp as found:
        spent = int(found.args[0])
        return None if spent > limit else spent // int(given["chains"])
    finally:
        Progress.advance = advance  # type: ignore[method-assign]
    raise RuntimeError("isosgd.sample did not tell of its progress")


@contextmanager
def rates_by_block(job: Job) -> Iterator[None]:
    """Let `isosgd.sample` give each block of chains the rate that goes with its setting, where there are settings."""
    kind: Any = METHODS[job.method]

    class Blocks(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            each = torch.tensor(job.values).repeat_interleave(self.chains // len(job.values))
            for group in self.param_groups:
                if job.name == "lam":  # the rate is inverse to it
                    group["rate"] = self.number(group["rate"] * job.values[0] / each)
                else:
                    group["rate"] = self.number(each)
            self._lam = None

        def adapt(self, *args: Any, **settings: Any) -> None:
            if job.name != "rate":
                super().adapt(*args, **settings)

    if job.name:
        METHODS[job.method] = Blocks
    try:
        yield
    finally:
        METHODS[job.method] = kind


def sampling_steps(cycle: int, steps: int) -> int:
    """As how many steps at the full rate those count from which draws are taken; all where there is no cycle."""
    if not cycle:
        return steps
    schedule = Cycles(cycle, REGISTRY["csgld"].settings["exploration"])
    return int(steps // cycle * schedule.stage({"cycle": cycle}) * (1.0 - SPREAD))


def draw(problem: suite.Problem, job: Job) -> isosgd.Posterior:
    """Draws for so many gradients in every block: the one place where a budget becomes settings."""
    share = job.gradients // CHAINS
    given: Row = {"init": problem.init, "chains": CHAINS * len(job.blocks), "batch_size": problem.batch_size}
    given |= {"progress": False, "compile": False, "method": job.method}
    if job.method not in METHODS:
        given |= baseline_plan(problem, job.method, share) | ({job.name: job.values[0]} if job.name else {})
        return isosgd.sample(problem.target, problem.data, **given)
    given["keep_every"] = gap = max(1, share // MOST_DRAWS)
    cycle = min(CYCLE, share // 2) if "cycle" in REGISTRY[job.method].settings else 0  # two of them at the least
    given |= {"cycle": cycle} if cycle else {}
    if job.name:
        whole = cycle or 1
        spent = given["warmup"] = share - (share - share // 4) // whole * whole  # a quarter, and what fills no cycle
        given |= {job.name: job.values[0]} if job.name != "rate" else {}
    else:
        cost = warmup_cost(problem, given, share // 2)
        spent = share // 2 if cost is None else cost
        given["warmup"] = "auto" if cost is not None else spent
    given["draws"] = sampling_steps(cycle, share - spent) // gap - (MARGIN + gap - 1) // gap
    with rates_by_block(job):
        return isosgd.sample(problem.target, problem.data, **given)


def baseline_plan(problem: suite.Problem, method: str, share: int) -> Row:
    """Settings with which a baseline spends so many gradients in each chain."""
    epoch = math.ceil(len(problem.data[0]) / problem.batch_size)
    training = min(max(3000, 40 * epoch), share // 2)
    if method == "mcdropout":
        return {"units": UNITS.get(problem.name, {"w": 0}), "draws": MASKS, "warmup": share}
    if method == "ensemble":
        return {"draws": max(1, share // training), "warmup": training}
    left = share - training - 70  # looks at the noise
    if method == "swag":
        return {"draws": MASKS, "warmup": training, "snapshots": max(2, left // epoch)}
    cycle = max(100, 2 * epoch)
    return {"draws": max(1, left // cycle), "warmup": training, "keep_every": cycle}


def score(problem: suite.Problem, posterior: isosgd.Posterior, block: int, job: Job) -> Row:
    """How near the chains of a block came, or why they did not."""
    spent = posterior.info["gradients"] // len(job.blocks)
    assert spent <= job.gradients, f"{job.method} spent {spent} gradients of {job.gradients}"
    places = [place for place, index in enumerate(posterior.info["chain_indices"]) if index // CHAINS == block]
    if len(places) < CHAINS:
        return {"failed": f"{CHAINS - len(places)} of {CHAINS} chains diverged", "gradients": spent}
    draws = {name: x[places] for name, x in posterior.draws.items()}
    found = suite.score(problem, draws, spent)
    if not math.isfinite(found["w2"]):
        return {"failed": "the draws are not finite", "gradients": spent}
    entries, true = problem.entries(draws).double().flatten(0, 1), problem.reference.covariance
    rates = [rate for place in places for rate in posterior.info["rates"][place].values()]
    return found | {
        "covariance_error": float((entries.T.cov() - true).norm() / true.norm()),
        "min_ess": found["ess_per_1000"] * spent / 1000,
        "gradients": spent,
        "draws": len(entries),
        "rate": float(np.exp(np.mean(np.log(rates)))) if rates else None,
    }


def run(job: Job) -> list[Row]:
    """The scores of every block of a run, or why there are none; whatever goes wrong, other runs go on."""
    torch.set_num_threads(1)
    started, blocks = time.monotonic(), job.blocks
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            problem = problem_of(job.problem, *job.where)
            posterior = draw(problem, job)
            found = [score(problem, posterior, block, job) for block in range(len(blocks))]
        except Exception as error:
            found = [{"failed": f"{type(error).__name__}: {error}"[:200]} for _ in blocks]
    more: Row = {"seconds": (time.monotonic() - started) / len(blocks)}
    if not job.name:
        more["warnings"] = sorted({str(warning.message)[:150] for warning in heard})
    return [rounded(block | scores | more) for block, scores in zip(blocks, found, strict=True)]


def rounded(row: Row) -> Row:
    """The same, with as many digits as mean something."""
    short = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
    return short | {"options": {key: float(f"{value:.6g}") for key, value in row["options"].items()}}
