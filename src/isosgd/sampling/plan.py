"""What to draw from chains (`DrawPlan`), and what came of it (`ChainsResult`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isosgd.engine.chains import Chains
from isosgd.engine.state import failure_from, failure_state
from isosgd.errors import DivergedError, warn_caller
from isosgd.warmup.reports import GroupReport, WarmupReport

GUESSED_SPACING = 100  # steps between draws, for the progress bar, until the spacing is known
NOISE_EVERY = 16  # while drawing, one step in 16 measures the noise ...
SHAPED_EVERY = 128  # ... one in 128 if Lambda averages all noise vectors

State = dict[str, Any]
Auto = Literal["auto"]


@dataclass(frozen=True)
class DrawPlan:
    """What to draw from all chains.

    Attributes:
        draws: of each chain; a maximum with ``auto``.
        keep_every: steps between draws.
        warmup: gradients of the warm-up.
        noise_every: steps between measurements of the noise while drawing; chosen by `noise_interval` when None.
        total: number of chains.
        compile_after: gradients after which it pays to compile; None for never.
        auto: whether to stop when predictions have converged.
        chains_per_set: chains of one data set.
        held_out: inputs at which the convergence of predictions is judged.
        trained: whether chains start at trained networks.
        deadline: when to end, by `time.monotonic`; chains that run in turn share the remaining time equally.
        latest: when to give up a warm-up that cannot draw yet.
        scoring: seconds to reserve before the deadline for each draw of a chain, to score it.
        here: number of chains that this process draws; all when None.
        begin: states to start from, by the first chain.
        ends: takes the states in which chains end, by the first chain.
        heated: what heating has come to, by first chain and count; None if cycles do not find their rates by heating.
        most_side_by_side: chains that may run at the same time, each on its own CUDA stream.
    """

    draws: int
    keep_every: int | Auto
    warmup: int | Auto
    noise_every: int | None
    total: int
    compile_after: int | None = None
    auto: bool = False
    chains_per_set: int = 1
    held_out: Any = None
    trained: bool = False
    deadline: float | None = None
    here: int | None = None
    begin: Mapping[int, State] = field(default_factory=dict)
    ends: dict[int, State] | None = None
    latest: float = math.inf
    scoring: float = 0.0
    heated: dict[tuple[int, int], State] | None = None
    most_side_by_side: int = 1

    @property
    def ends_early(self) -> bool:
        """Whether there may be fewer draws than `draws`."""
        return self.auto or self.deadline is not None

    def deadline_of(self, count: int, first: int, drawn: int) -> float:
        """When ``count`` chains from ``first`` on must end, if ``drawn`` draws of earlier chains are to be scored."""
        if self.deadline is None:
            return math.inf
        now = time.monotonic()
        return now + (self.deadline - drawn * self.scoring - now) * count / max(self.total - first, count)

    @property
    def spacing(self) -> int:
        """Steps between draws, guessed until the warm-up has measured it."""
        return GUESSED_SPACING if self.keep_every == "auto" else self.keep_every

    def noise_interval(self, chains: Chains) -> int:
        """Steps between measurements of the noise."""
        return self.noise_every or (NOISE_EVERY if chains.geometry is None else SHAPED_EVERY)


@dataclass
class ChainsResult:
    """The result of chains that ran together.

    Attributes:
        first: index of the first chain.
        count: number of chains.
        reports: of the warm-up, one per chain.
        lengths: number of finite draws of chains that were dropped, by position.
        failures: why they were dropped.
        gradients: of each chain.
        compiled: how steps were taken, appended to the name of the engine.
        batches: final state of the source of minibatches.
        drawn: draws of each chain.
        stopped: why drawing ended early; empty if it did not.
        side_by_side: number of such runs at the same time.
    """

    first: int
    count: int
    reports: list[WarmupReport] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    failures: dict[int, DivergedError] = field(default_factory=dict)
    gradients: int = 0
    compiled: str = ""
    batches: State = field(default_factory=dict)
    drawn: int = 0
    stopped: str = ""
    side_by_side: int = 1

    def is_end(self, plan: DrawPlan) -> bool:
        """Whether nothing is left to draw by a plan, which may ask for more draws than these had."""
        failed, converged = len(self.failures) == self.count, self.stopped.startswith("converged")
        return failed or self.drawn >= plan.draws or (plan.auto and converged)

    def state(self) -> State:
        """As nested tensors and plain values."""
        return {
            **vars(self),
            "reports": [report.as_dict() for report in self.reports],
            "failures": {k: failure_state(error) for k, error in self.failures.items()},
        }

    @staticmethod
    def from_state(state: State) -> ChainsResult:
        """The inverse of `state`."""
        reports = [report_from(report) for report in state["reports"]]
        failures = {k: failure_from(saved) for k, saved in state["failures"].items()}
        return ChainsResult(**{**state, "reports": reports, "failures": failures})


MakeInfo = Callable[[list[ChainsResult]], dict[str, Any]]


def why_stopped(results: list[ChainsResult]) -> str:
    """Why drawing ended early; empty if it did not."""
    return next((result.stopped for result in results if result.stopped), "")


def gradients_of(results: list[ChainsResult]) -> int:
    """Gradients of all chains, including dropped ones."""
    return sum(result.gradients * result.count for result in results)


def report_end(
    plan: DrawPlan, failures: Mapping[int, DivergedError], results: list[ChainsResult], warns: bool = True
) -> None:
    """Raise if every chain has failed; warn of dropped chains, and of draws that have not converged."""
    if len(failures) == plan.total:
        error = next(iter(failures.values()))
        error.gradients = gradients_of(results)
        raise error
    if not warns:
        return
    for chain, failure in sorted(failures.items()):
        warn_caller(f"chain {chain} was dropped: {failure}")
    if plan.auto and not (stopped := why_stopped(results)).startswith("converged"):
        warn_caller(f"draws = 'auto': {stopped}")


def report_from(state: State) -> WarmupReport:
    """The inverse of `WarmupReport.as_dict`."""
    unknown = sorted(set(state) - set(WarmupReport.__dataclass_fields__))
    if unknown:
        raise ValueError(
            f"a report of the warm-up has {unknown[0]!r}: the run was begun by another version of isosgd; finish it "
            "with that version"
        )
    return WarmupReport(**{**state, "groups": [GroupReport(**group) for group in state["groups"]]})
