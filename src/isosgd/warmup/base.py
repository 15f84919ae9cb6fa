"""What all warm-ups share: a budget, a state between windows, and traces from which the spacing of draws follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from isosgd.diagnostics.traces import integrated_time
from isosgd.engine.chains import Chains
from isosgd.geometry.base import load_into, state_of
from isosgd.progress import Progress
from isosgd.target.batches import tree_map
from isosgd.warmup.reports import WarmupReport

EXAMPLES, LENGTH = 16, 400
GRAPH_LENGTH = 100  # of a trace beside a CUDA graph: a look is then as long as several steps
DRAWS_A_TIME = 2  # draws in an autocorrelation time: one would lose a quarter of what the chain knows, two lose 7%

Array = NDArray[np.float64]
State = dict[str, Any]
Mark = Callable[[Callable[[], State]], None]


class Traces:
    """Log likelihoods of a few fixed examples, step by step: functions mix even where weights do not."""

    kept = ("found", "every", "examples")

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.found: list[NDArray[np.float64]] = []
        self.every = 1
        self.examples: Any = None

    def begin(self, steps: int) -> None:
        """Trace anew, every k-th of the steps to come, so that it does not get too long."""
        length = LENGTH if self.chains.graph is None else GRAPH_LENGTH
        self.found, self.every = [], max(1, steps // length)

    def take(self, step: int, count: int = 1) -> None:
        """Look at the chains around a step, counted from 0, if it is time.

        The ``count`` steps since the last look all left the chains where they are now.
        """
        times = sum((step + k) % self.every == 0 for k in range(count))
        if not times:
            return
        if self.examples is None:
            cut = (slice(EXAMPLES),) if self.chains.many is None else (slice(None), slice(EXAMPLES))
            self.examples = tree_map(lambda t: t[cut] if t.dim() >= len(cut) else t, self.chains.batch)
            if self.chains.ranks is not None:  # which may have parts of the data
                self.examples = self.chains.ranks.of_lead(self.examples)
        self.found += times * [self.chains.log_likelihood(self.examples).double().cpu().numpy()]

    def spacing(self) -> int | None:
        """Steps between draws: half of the integrated autocorrelation time of the slowest traced example.

        Of many chains, which have the same or similar posteriors, the median: each one's is a noisy estimate.
        None when nothing was traced.
        """
        if not self.found:
            return None
        times = integrated_time(np.stack(self.found))  # [chains, examples]
        finite = times[np.isfinite(times).all(1)]  # a chain that was dropped has no numbers
        slowest = float(np.median(finite.max(1))) if len(finite) else 1.0
        return max(1, math.ceil(slowest * self.every / DRAWS_A_TIME))


class Warmup:
    """A warm-up of chains; it leaves them where sampling starts, at fixed rates.

    Args:
        budget: gradients to spend on each.
        exact: whether to spend all of them; otherwise the warm-up ends when the chains have settled.
        mark: called between windows, with what gives the state of the warm-up there.

    Attributes:
        kept: names of what is needed to go on from between two windows, beside the chains.
        spent: gradients so far.
        length: of the next window.
        reasons: why each chain has not settled; empty for those that have.
        loss: mean and standard deviation of each chain's in the last window.
    """

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
        """How many more gradients fit before the chains' deadline, at the speed so far."""
        if math.isinf(self.chains.deadline):
            return math.inf
        now = time.monotonic()
        return (self.chains.deadline - now) * (self.spent - self._before) / max(now - self._began, 1e-9)

    def check(self) -> None:
        """Refuse a budget that is surely too small, before a gradient is taken."""

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        """Warm chains up; a report for each. ``measure_spacing``: whether to measure how far apart draws should be."""
        raise NotImplementedError

    def mark(self) -> None:
        """Here the warm-up can be taken up again."""
        self._mark(lambda: state_of(self))

    def load(self, state: State) -> None:
        """Go on from a state; the chains must have been brought to where they were."""
        load_into(self, state, self.chains.alive.device)
        self._before = self.spent

    def count(self, stage: str, steps: int = 1) -> None:
        """So many gradients of each chain were taken."""
        self.spent += steps
        self.progress.advance(stage, steps * self.chains.count)
