"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox, Guestrin 2014), in velocity form.

    v <- (1 - a) v - lr (g + w),    theta <- theta + v,    Cov(w) = 2 a T / (N lr) I - [Var(g)]

In the notation of Theorem 2: P = I, A = a, C = a T / (N lr) - B^, with B^ = 0 or estimated. With step epsilon of the
underlying dynamics, ``lr = N epsilon^2`` and ``a`` is epsilon times the friction. The velocity has variance ``lr T /
N``.
"""

from __future__ import annotations

from typing import Any

from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import ParamsLike


class SGHMC(Sampler):
    """SGHMC, with or without the correction for gradient noise.

    Targets ``exp(-f / T)`` up to the discretisation bias ``rate h / (2 (2 - a))``. Without the correction, gradient
    noise raises the temperature by the share ``rate N b / (a T)``.

    Departures from the paper: B^ is measured, correlations included, not given by the user; the velocity is never
    resampled; `adapt` sets the rate if none is given; there is a temperature.

    Args:
        friction: a in (0, 1]; at 1 it is SGLD.
        corrected: subtract the measured gradient noise, correlations included, from the injected noise; needs centred
            noise vectors. By default in a loop if that allows larger rates, and not in `isosgd.sample`.
        settings: those of every `Sampler`.
    """

    family = "hamiltonian"
    paper = "Chen, Fox, Guestrin 2014"
    departures = "the correction is measured, correlations included"
    shardable = True

    def __init__(
        self, params: ParamsLike, *, friction: float = 0.1, corrected: bool | None = None, **settings: Any
    ) -> None:
        super().__init__(params, friction=friction, corrected=corrected, **settings)
