"""How far apart draws should be: by the autocorrelation of what the model says of a few examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isosgd.diagnostics.traces import integrated_time
from isosgd.engine.chains import Chains
from isosgd.target.batches import tree_map

EXAMPLES, LENGTH = 16, 400
GRAPH_LENGTH = 100  # of a trace beside a CUDA graph: a look is then as long as several steps
DRAWS_A_TIME = 2  # draws in an autocorrelation time: one would lose a quarter of what the chain knows, two lose 7%


class Traces:
    """Log likelihoods of a few fixed examples, step by step: functions mix even where weights do not.

    Args:
        chains: that are traced.
    """

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

        Args:
            step: its number.
            count: of steps since the last look, all of which left the chains where they are now.
        """
        times = sum((step + k) % self.every == 0 for k in range(count))
        if not times:
            return
        if self.examples is None:
            cut = (slice(EXAMPLES),) if self.chains.many is None else (slice(None), slice(EXAMPLES))
            self.examples = tree_map(lambda t: t[cut] if t.dim() >= len(cut) else t, self.chains.batch)
        self.found += times * [self.chains.log_likelihood(self.examples).double().cpu().numpy()]

    def spacing(self) -> int | None:
        """Steps between draws: half of the integrated autocorrelation time of the slowest traced example.

        Of many chains, which have the same or similar posteriors, the median: each one's is a noisy estimate.
        None when nothing was traced.
        """
        if not self.found:
            return None
        times = integrated_time(np.stack(self.found))  # [chains, examples]
        told = times[np.isfinite(times).all(1)]  # a chain that was dropped has no numbers
        slowest = float(np.median(told.max(1))) if len(told) else 1.0
        return max(1, math.ceil(slowest * self.every / DRAWS_A_TIME))

    def state(self) -> dict[str, Any]:
        """What is needed to go on."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        for name in self.kept:
            setattr(self, name, state[name])
