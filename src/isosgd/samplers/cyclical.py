"""Cyclical SGLD and SGHMC (Zhang, Li, Zhang, Chen, Wilson 2020).

    rate_t = lr min(peak, c(r) / c(beta)),    c(r) = (1 + cos(pi r)) / 2,    r = (t mod cycle) / cycle

Each cycle begins with *exploration* (r < beta): steps at a high rate without injected noise, towards another mode. Then
comes *sampling*: steps of SGLD or SGHMC while the rate falls from ``lr`` towards zero. Draws are taken in this second
stage only. The paper's alpha_0 is ``lr / c(beta)``. The schedule is `isosgd.samplers.schedules.Cycles`.
"""

from __future__ import annotations

from typing import Any

from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import ParamsLike
from isosgd.samplers.schedules import Annealing, Cycles


class CSGLD(Sampler):
    """SGLD in cycles.

    Targets ``exp(-f / T)`` within the modes it visits, as ``lr -> 0`` with many relaxation times in every sampling
    stage. Exploration ends at temperature zero, so variances of short stages are too small. How often a mode is visited
    does not depend on its mass.

    Departures from the paper: ``lr`` is the largest rate of the sampling stage, which `adapt` can set by theory, not
    that of the cycle; `adapt` also limits the rate of exploration to a stable one; cycles begin when rates are frozen
    (at the end of the warm-up of `isosgd.sample`), or with the first step if ``lr`` is given. In `isosgd.sample` a
    stage is long enough for the chain to spread again and then give ten draws, equally spaced in the sum of rates, not
    in steps.

    Args:
        cycle: steps in a cycle. By default `isosgd.sample` sets it from the spacing of draws, or to 5,000 if that is
            not measured.
        exploration: beta, the share of exploration in a cycle; the paper has .25 for mixtures and .8 for networks.
        decay: exponent of an annealing over all cycles, 0 for none.
        offset: steps after which the rate begins to fall.
        corrected: subtract the measured gradient noise from the injected noise, as in `Sampler`.
        settings: those of every `Sampler`.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> sampler = CSGLD(net.named_parameters(), num_data=100, lr=1e-3, cycle=4, exploration=0.5)
        >>> found = []
        >>> for step in range(8):
        ...     net(torch.ones(5, 2)).square().mean().backward()
        ...     _ = sampler.step()
        ...     found.append(sampler.sampling)
        >>> found
        [False, False, True, True, False, False, True, True]
    """

    targets = "exp(-f / T) within the modes visited, for long cycles"
    paper = "Zhang et al. 2020"
    departures = "lr is that of the sampling stage; cycles begin after the warm-up"

    def __init__(
        self,
        params: ParamsLike,
        *,
        cycle: int | None = None,
        exploration: float = 0.25,
        decay: float = 0.0,
        offset: float = 1000.0,
        corrected: bool | None = None,
        **settings: Any,
    ) -> None:
        schedule = Cycles(cycle, exploration, Annealing(decay, offset))
        super().__init__(params, schedule=schedule, corrected=corrected, **settings)


class CSGHMC(Sampler):
    """SGHMC in cycles; the velocity is kept from stage to stage.

    Targets ``exp(-f / T)`` within the modes it visits, with the errors of `CSGLD` and `isosgd.samplers.sghmc.SGHMC`.

    Departures from the paper, ``cycle`` and ``exploration``: see `CSGLD`; ``friction`` and ``corrected``: see `SGHMC`.
    """

    family = "hamiltonian"
    targets, paper, departures = CSGLD.targets, CSGLD.paper, CSGLD.departures

    def __init__(
        self,
        params: ParamsLike,
        *,
        cycle: int | None = None,
        exploration: float = 0.25,
        friction: float = 0.1,
        corrected: bool | None = None,
        **settings: Any,
    ) -> None:
        schedule = Cycles(cycle, exploration)
        super().__init__(params, schedule=schedule, friction=friction, corrected=corrected, **settings)
