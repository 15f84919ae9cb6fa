"""Symmetric alpha-stable noise: its fit, and the nearest Gaussian.

A symmetric alpha-stable variable has characteristic function ``exp(-|c t|^alpha)``; ``alpha = 2`` is a
Gaussian of variance ``2 c^2``, smaller ``alpha`` has infinite variance. The Gaussian nearest in l2 has standard
deviation ``c / r(alpha)``. ``r`` minimises

    J(r) = r (sqrt(pi) - 2 sqrt(2 pi) E[exp(-|r T|^alpha)]),    T ~ N(0, 1).

The paper has half the second term and says "maximise", which gives r near 0.36. With the factor of 2, r is within 2% of
1/sqrt(2) for alpha >= 1, as its text says.

References:
    Franzese et al. (2020), Isotropic SGD, appendix B.3.
    Véhel, Philippe, Robet (2018), Explicit and combined estimators for parameters of stable distributions.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EULER_GAMMA = 0.5772156649015329
ALPHA_MIN, ALPHA_MAX = 0.3, 2.0
_TABLE_SIZE = 341  # a step of 0.005 in alpha: linear interpolation is then good to 1e-5
_TINY = 1e-30  # instead of zero, which has no logarithm


def match_gaussian(alpha: float) -> float:
    """``r(alpha)``: the Gaussian nearest in l2 to stable noise of scale ``c`` has standard deviation ``c / r``.

    Example:
        >>> round(match_gaussian(2.0), 4), round(match_gaussian(1.0), 3)
        (0.7071, 0.72)
    """
    if not ALPHA_MIN <= alpha <= ALPHA_MAX:
        raise ValueError(f"alpha = {alpha} is outside [{ALPHA_MIN}, {ALPHA_MAX}], the tail indices we tabulate")
    # t = s^4 smooths the cusp of |t|^alpha at zero, so that the trapezoid rule converges fast.
    s = np.linspace(0.0, 12.0**0.25, 4001)
    t = s**4
    weight = 2.0 * np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi) * 4.0 * s**3 * (s[1] - s[0])
    r = 0.7
    for _ in range(7):  # Newton; five steps suffice for every tabulated alpha
        z = (r * t) ** alpha
        density = 2.0 * math.sqrt(2.0 * math.pi) * weight * np.exp(-z)
        slope = math.sqrt(math.pi) - float(np.sum(density * (1.0 - alpha * z)))
        bend = float(np.sum(density * z * (1.0 + alpha - alpha * z))) * alpha / r
        r -= slope / bend
    return r


@lru_cache(maxsize=1)
def _table() -> NDArray[np.float64]:
    return np.array([match_gaussian(a) for a in np.linspace(ALPHA_MIN, ALPHA_MAX, _TABLE_SIZE)])


def matched_variance(alpha: Tensor, scale: Tensor) -> Tensor:
    """Variance ``c^2 / r(alpha)^2`` of the Gaussian nearest to stable noise, elementwise."""
    table = torch.as_tensor(_table(), dtype=scale.dtype, device=scale.device)
    position = (alpha.clamp(ALPHA_MIN, ALPHA_MAX) - ALPHA_MIN) * ((_TABLE_SIZE - 1) / (ALPHA_MAX - ALPHA_MIN))
    left = position.long().clamp(max=_TABLE_SIZE - 2)
    r = torch.lerp(table[left], table[left + 1], (position - left).to(scale.dtype))
    return (scale / r).square()


def log_abs(x: Tensor) -> Tensor:
    """``log |x|`` in float32 at least, finite at zero."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).abs().clamp_min(_TINY).log()


def fit_from_logs(mean_log: Tensor, mean_log_block: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Tail index and scale from ``E log|w|`` and ``E log|w_1 + ... + w_block|``, elementwise.

    A sum of ``m`` stable variables has scale ``m^(1/alpha) c``, and ``E log|w| = log c + (1/alpha - 1) gamma``.
    """
    inverse = ((mean_log_block - mean_log) / math.log(block)).clamp(1.0 / ALPHA_MAX, 1.0 / ALPHA_MIN)
    scale = torch.exp(mean_log - (inverse - 1.0) * EULER_GAMMA)
    return 1.0 / inverse, scale


class TailMeter:
    """The tail index of a group's noise, pooled over all parameters and successive noise vectors."""

    kept = ("_sum", "_logs", "_block_logs", "_count", "_blocks", "_position")

    def __init__(self, block: int = 10) -> None:
        self.block = block
        self._sum: list[Tensor] | None = None
        self._logs = self._block_logs = 0.0
        self._count = self._blocks = self._position = 0

    def update(self, noise: list[Tensor]) -> None:
        """Update with a noise vector. Entries without noise are left out."""
        if self._sum is None:
            self._sum = [torch.zeros_like(d) for d in noise]
        torch._foreach_add_(self._sum, noise)
        self._position += 1
        if self._position == 1:  # one vector of a block is enough for E log|w|
            total, count = _log_sum(noise)
            self._logs, self._count = self._logs + total, self._count + count
        if self._position == self.block:
            total, count = _log_sum(self._sum)
            self._block_logs, self._blocks = self._block_logs + total, self._blocks + count
            torch._foreach_zero_(self._sum)
            self._position = 0

    def tail_index(self) -> float:
        """Alpha in (0, 2]; 2 is Gaussian. NaN before the first complete block."""
        if not self._blocks or not self._count:
            return math.nan
        alpha, _ = fit_from_logs(
            torch.tensor(self._logs / self._count), torch.tensor(self._block_logs / self._blocks), self.block
        )
        return float(alpha)


def _log_sum(tensors: list[Tensor]) -> tuple[float, int]:
    values = torch.cat([t.detach().flatten() for t in tensors])
    values = values[values != 0]
    return float(log_abs(values).sum()), values.numel()
