"""Stochastic gradient Langevin dynamics (Welling and Teh 2011).

    theta <- theta - lr_t (g + w),    w ~ N(0, 2 T / (N lr_t)),    lr_t = lr (1 + t / offset)^-decay

In the notation of Theorem 1: P = I, C = T / (N lr). Their step epsilon_t is ``2 lr_t / N`` here, because g is the
gradient of the mean loss.
"""

from __future__ import annotations

from typing import Any

from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import ParamsLike
from isosgd.samplers.schedules import Annealing


class SGLD(Sampler):
    """SGLD at a fixed or an annealed rate.

    Targets ``exp(-f / T)`` as ``lr -> 0``. At a fixed rate the variance is too large by ``rate h / 2``
    (discretisation) and by ``rate N b / T`` (gradient noise, which it ignores); `adapt` keeps each below ``bias``.

    Departures from the paper: the rate is fixed by default, and set by the warm-up if none is given; in a loop the
    gradient noise is subtracted from the injected noise if that allows larger rates; there is a temperature.

    Args:
        decay: exponent of the annealing, 0 for a fixed rate; Welling and Teh take a value in (0.5, 1].
        offset: steps after which the rate begins to fall.
        corrected: subtract the measured gradient noise from the injected noise, as in `Sampler`.
        settings: those of every `Sampler`.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> sampler = SGLD(net.named_parameters(), num_data=100, lr=1e-3)
        >>> net(torch.ones(5, 2)).square().mean().backward()
        >>> _ = sampler.step()
    """

    paper = "Welling, Teh 2011"
    departures = "the rate is fixed by default, and set by `adapt`"
    shardable = True

    def __init__(
        self,
        params: ParamsLike,
        *,
        decay: float = 0.0,
        offset: float = 1000.0,
        corrected: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(params, schedule=Annealing(decay, offset), corrected=corrected, **settings)
