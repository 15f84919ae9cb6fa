"""Minibatches without replacement: how much of their noise is left."""

from __future__ import annotations

import math


def share_left(forgets: float, steps: int) -> float:
    """Variance that the noise of an epoch's minibatches causes, over that of independent minibatches.

    The noise sums to zero over an epoch of E steps, so that two of its steps are correlated by ``-1 / (E - 1)``. A
    chain that forgets by ``k`` in a step weighs the noise of i steps ago by ``(1 - k)^i``: its variance is

        E / (E - 1) sum_i (1 - k)^2i - 1 / (E - 1) sum_epochs (sum of (1 - k)^i over the epoch)^2.

    Both sums are geometric. Averaged over the places in an epoch and divided by ``sum_i (1 - k)^2i``, that is
    ``(E - B (2 - k) / k) / (E - 1)`` with ``B = 1 - (1 - (1 - k)^E) 2 (1 - k) / ((2 - k) k E)``; ``k (E + 1) / 3`` for
    a slow chain.

    Args:
        forgets: k.
        steps: E.

    Example:
        >>> round(share_left(1e-4, 20) / (1e-4 * 21 / 3), 3)
        1.0
    """
    if steps < 2:
        return 0.0
    k = min(forgets, 1.0)
    lost = -math.expm1(steps * math.log1p(-k)) if k < 1.0 else 1.0
    b = 1.0 - lost * 2.0 * (1.0 - k) / ((2.0 - k) * k * steps)
    return max((steps - b * (2.0 - k) / k) / (steps - 1), 0.0)
