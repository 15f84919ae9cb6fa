"""How many steps ``isosgd fit`` takes, and on how many rows each: nothing but the size of the table decides.

Where a gradient of all rows is affordable, chains take trajectories on all of them, which have no bias, and which carry
a network's predictions through their posterior. Where it is not, they take minibatches.
"""

from __future__ import annotations

import math
from typing import Any

MOST_WORK = 5_000_000  # rows times weights up to which all rows are taken: some four minutes of a core
LITTLE_WORK = 400_000  # so little can be done twice as often in the same minute
WARMUP, APART = 6_000, 200  # steps on all rows before the first draw, and between two, at effort 1
LEAST_WARMUP, LEAST_APART = 1_300, 8  # below which nothing is found out, not even by one chain
LITTLE_EFFORT = 0.1  # below which to compile takes longer than it saves
FEW_WARMUP, FEW_APART = 5_000, 50  # steps on minibatches, at effort 1


def steps_for(method: str, rows: int, weights: int, effort: float) -> dict[str, Any]:
    """Settings of `isosgd.sample`.

    Args:
        method: a name of `isosgd.methods`.
        rows: to train on.
        weights: of the network.
        effort: times the usual number of steps.

    Example:
        >>> steps_for("isgd", rows=1_000, weights=751, effort=1.0)
        {'batch_size': 'all', 'warmup': 6000, 'keep_every': 200}
        >>> steps_for("isgd", rows=50_000, weights=751, effort=2.0)
        {'batch_size': None, 'warmup': 10000, 'keep_every': 100}
    """
    work = rows * weights
    if method != "isgd" or work > MOST_WORK:
        return {
            "batch_size": None,
            "warmup": math.ceil(FEW_WARMUP * effort),
            "keep_every": math.ceil(FEW_APART * effort),
        }
    apart = APART * (2 if work <= LITTLE_WORK else 1)
    return {
        "batch_size": "all",
        "warmup": max(LEAST_WARMUP, math.ceil(WARMUP * effort)),
        "keep_every": max(LEAST_APART, math.ceil(apart * effort)),
        **({"compile": False} if effort < LITTLE_EFFORT else {}),
    }
