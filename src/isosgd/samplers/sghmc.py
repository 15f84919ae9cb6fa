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

    Targets ``exp(-f / T)`` up to the discretisation bias ``rate h / (2 (2 - a))``, and without the correction as the
    rate tends to zero only: gradient noise then heats it by ``rate N b / (a T)``.

    Departures from the paper: B^ is measured, correlations included, where theirs is the user's; the velocity is never
    drawn anew; `adapt` sets the rate where none is given; there is a temperature.

    Args:
        params: as of every `Sampler`.
        friction: a in (0, 1]; at 1 it is SGLD.
        corrected: subtract the measured gradient noise from the injected noise, correlations included. It needs centred
            noise vectors. Chen et al. take a user's B^. Left out it is 0, but measured in a loop where that allows
            larger rates.
        settings: ``num_data``, ``temperature``, ``lr`` and others, see `Sampler`.
    """

    family = "hamiltonian"
    paper = "Chen, Fox, Guestrin 2014"
    departures = "the correction is measured, correlations included"
    shardable = True

    def __init__(
        self, params: ParamsLike, *, friction: float = 0.1, corrected: bool | None = None, **settings: Any
    ) -> None:
        super().__init__(params, friction=friction, corrected=corrected, **settings)
