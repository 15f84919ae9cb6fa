"""The base class of warm-ups: budget, state between windows, and traces that give the spacing of draws."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from isosgd.diagnostics.traces import integrated_time
from isosgd.engine.chains import Chains
from isosgd.geometry.base import load_into, state_of
from isosgd.noise.stable import TailMeter
from isosgd.progress import Progress
from isosgd.samplers.groups import Group
from isosgd.target.batches import tree_map
from isosgd.warmup.reports import WarmupReport

EXAMPLES, LENGTH = 16, 400
GRAPH_LENGTH = 100  # of a trace next to a CUDA graph, where a point takes as long as several steps
DRAWS_A_TIME = 2  # draws in an autocorrelation time: one would lose a quarter of the effective draws, two lose 7%

TAILS_EVERY = 16  # steps between updates of the tail index, which cost more than a captured gradient
PROBES = 20  # power iterations for a first curvature

Array = NDArray[np.float64]
State = dict[str, Any]
Mark = Callable[[Callable[[], State]], None]


class Traces:
    """Log likelihoods of a few fixed examples, step by step: functions mix even if weights do not."""

    kept = ("found", "every", "examples")

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.found: list[NDArray[np.float64]] = []
        self.every = 1
        self.examples: Any = None

    def begin(self, steps: int) -> None:
        """Start a new trace of the next ``steps`` steps, with about `LENGTH` points."""
        length = LENGTH if self.chains.graph is None else GRAPH_LENGTH
        self.found, self.every = [], max(1, steps // length)

    def add(self, step: int, count: int = 1) -> None:
        """Add points to the trace if due at ``step``, counted from 0, or the ``count - 1`` steps after it.

        The chains must not have moved in these steps.
        """
        times = sum((step + k) % self.every == 0 for k in range(count))
        if not times:
            return
        if self.examples is None:
            cut = (slice(EXAMPLES),) if self.chains.many is None else (slice(None), slice(EXAMPLES))
            self.examples = tree_map(lambda t: t[cut] if t.dim() >= len(cut) else t, self.chains.batch)
            if self.chains.ranks is not None:  # each may have other data
                self.examples = self.chains.ranks.of_lead(self.examples)
        self.found += times * [self.chains.log_likelihood(self.examples).double().cpu().numpy()]

    def spacing(self) -> int | None:
        """Steps between draws: half the integrated autocorrelation time of the slowest example; None without a trace.

        Of several chains, the median.
        """
        if not self.found:
            return None
        times = integrated_time(np.stack(self.found))  # [chains, examples]
        finite = times[np.isfinite(times).all(1)]  # without dropped chains
        slowest = float(np.median(finite.max(1))) if len(finite) else 1.0
        return max(1, math.ceil(slowest * self.every / DRAWS_A_TIME))


def update_tails(tails: Sequence[TailMeter], groups: Sequence[Group], noise: Sequence[Any]) -> None:
    """Update the tail index of each group with a noise vector."""
    vectors = iter(noise)
    for meter, group in zip(tails, groups, strict=True):
        meter.update([next(vectors) for _ in group["params"]])


class Warmup:
    """A warm-up of chains; afterwards they are ready to sample, at fixed rates.

    Args:
        budget: gradients to spend on each chain.
        exact: whether to spend all of them; otherwise the warm-up ends when the chains have settled.
        mark: called between windows with a function that returns the state of the warm-up.

    Attributes:
        gives_up: whether it ends without a draw where time is over before it has measured enough.
        kept: names of the attributes in that state.
        spent: gradients so far.
        length: of the next window.
        reasons: why each chain has not settled; empty for those that have.
        loss: mean and standard deviation of each chain's loss in the last window.
    """

    gives_up: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("stage", "spent", "length", "reasons", "loss", "traces")

    def __init__(self, chains: Chains, budget: int, exact: bool, progress: Progress, mark: Mark) -> None:
        self.chains, self.progress, self._mark = chains, progress, mark
        self.budget = self.total = budget
        self.exact, self.stage, self.spent, self.length = exact, "start", 0, 0
        self.reasons = [""] * chains.count
        self.loss: tuple[Array, Array] | None = None
        self.traces = Traces(chains)
        self._began, self._before = time.monotonic(), 0

    def gradients_in_time(self) -> float:
        """The number of gradients left before the chains' deadline, at the speed so far."""
        if math.isinf(self.chains.deadline):
            return math.inf
        now, spent = time.monotonic(), self.spent - self._before
        left = self.chains.deadline - now
        if not spent:  # in this session, whose speed is not known yet
            return math.inf if left > 0 else 0.0
        return left * spent / max(now - self._began, 1e-9)

    def check(self) -> None:
        """Raise if the budget is certainly too small, before any gradient is computed."""

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        """Warm up; a report for each chain. ``measure_spacing``: whether to measure the spacing of draws."""
        raise NotImplementedError

    def mark(self) -> None:
        """Mark a point from which the warm-up can be resumed."""
        self._mark(lambda: state_of(self))

    def load(self, state: State) -> None:
        """Load a state; that of the chains must be loaded, too."""
        load_into(self, state, self.chains.alive.device)
        self._before = self.spent

    def count(self, stage: str, steps: int = 1) -> None:
        """Count gradients of each chain and report progress; raise if there is no time left."""
        self.spent += steps
        if self.gives_up and time.monotonic() > self.chains.latest:
            self.chains.give_up(stage)
        self.progress.advance(stage, steps * self.chains.count)
