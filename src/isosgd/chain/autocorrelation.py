"""How many steps apart must draws be? The integrated autocorrelation time of what the chain predicts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def integrated_time(trace: NDArray[np.float64]) -> float:
    """``1 + 2 sum rho_k`` of a trace ``[steps]``, cut where sums of adjacent pairs stop being positive (Geyer 1992).

    A constant trace counts as uncorrelated.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = np.zeros(100_000)
        >>> for t in range(1, x.size):
        ...     x[t] = 0.9 * x[t - 1] + rng.standard_normal()
        >>> bool(abs(integrated_time(x) - 19) < 3)
        True
    """
    x = np.asarray(trace, dtype=np.float64)
    n = x.size
    x = x - x.mean()
    variance = float(x @ x) / max(n, 1)
    if n < 4 or variance < 1e-300:
        return 1.0
    spectrum = np.fft.rfft(x, 2 * n)
    rho = np.fft.irfft(spectrum * spectrum.conj())[:n].real / (n * variance)
    pairs = rho[0 : n - 1 : 2] + rho[1:n:2]
    negative = np.nonzero(pairs <= 0)[0]
    pairs = np.minimum.accumulate(pairs[: negative[0]] if negative.size else pairs)
    return max(1.0, 2.0 * float(pairs.sum()) - 1.0)
