"""What a warm-up says at its end."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PARTS = 10  # of a window, whose means are compared
SURE = 4.0  # standard errors


@dataclass
class GroupReport:
    """What the warm-up found for one group (layer)."""

    name: str
    rate: float
    lam: float
    curvature: float
    rate_curvature: float
    predicted_bias: float
    tail_index: float
    noise_share: float
    clipped_share: float


@dataclass
class WarmupReport:
    """Outcome of a warm-up.

    Attributes:
        settled: whether rates and loss stopped changing.
        reason: why not, and what would help; empty when settled.
        steps: gradients spent.
        descent: of them in the descent.
        keep_every: spacing of draws measured from the autocorrelation of predictions (None when not measured).
        loss: mean and standard deviation of the minibatches' loss in the last window (None when not measured).
        groups: one report for each layer.
        directions: rates along the directions of a Lambda that knows them, and how long they take to forget (see
            `isosgd.chain.forgetting`); None where it knows none.
        batch_sizes: what minibatches of other sizes would cost and gain; empty where Lambda knows no directions.
        structure: the shape of Lambda.
        brought_back: how often the chain ran away and was brought back (see `isosgd.chain.runaway`).
        conditioning: of a full matrix, the condition number that simpler shapes would leave (see `Full.conditioning`).
    """

    settled: bool
    reason: str
    steps: int
    descent: int
    keep_every: int | None
    groups: list[GroupReport] = field(default_factory=list)
    loss: tuple[float, float] | None = None
    directions: dict[str, Any] | None = None
    batch_sizes: list[dict[str, float]] = field(default_factory=list)
    structure: str | None = None
    brought_back: int = 0
    conditioning: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def drifting(losses: Array) -> str:
    """Whether the losses of a window differ from its first to its second half, in words; empty when they do not."""
    parts = np.array([part.mean() for part in np.array_split(losses, PARTS)])
    first, second = parts[: PARTS // 2], parts[PARTS // 2 :]
    drift = float(second.mean() - first.mean())
    deviation = math.sqrt(float(first.var(ddof=1) + second.var(ddof=1)) / len(first))
    if abs(drift) <= SURE * deviation:
        return ""
    return (
        f"the mean loss still drifts (by {drift:+.3g}, {abs(drift) / deviation:.0f} standard errors, in the last "
        f"window of {len(losses)} steps): a longer warmup= or a start closer to a mode (init=) would help"
    )
