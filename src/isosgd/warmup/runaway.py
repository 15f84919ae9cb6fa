"""Chains that run away while rates are being found are restarted where the window began, with smaller rates.

Rates follow from averages: of the noise, and of the curvature. A few examples far out, whose minibatches have a hundred
times the average curvature, can drive a chain away that is stable on average. Its loss tells: at temperature T it is
above that of a mode by ``d T / (2 N)``, and many times as much only where nothing holds the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.geometry.base import Geometry
from isosgd.samplers import ISGD

LOSSES = 20  # of which the median is looked at: one bad minibatch is none
BEYOND = 20.0  # times what the loss can be above that of the mode, and deviations of such a median
LEAST_BEYOND = 1e-3  # of the loss itself: less may be rounding
SCATTER = 1.7  # times the deviation of minibatches' losses over the posterior: six of such a median
SLOWER = 4.0  # times, when a chain is restarted ...
MOST = 10  # ... as often as this


class WindowStart(NamedTuple):
    """Where a window began, and what was believed of the curvature then."""

    place: list[Tensor]
    factor: Tensor
    curvature_ratio: Tensor
    image: Tensor
    length: Tensor | None


class Runaway:
    """Restarts chains whose Lambda knows directions, after the initial optimisation; with others it does nothing."""

    kept = ("limit", "least", "restarts")

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.limit = chains.each(torch.inf)  # the loss from which on a chain has run away
        self.least = torch.zeros_like(self.limit)  # factor of Lambda
        self.restarts = torch.zeros_like(self.limit)  # how often
        self.start: WindowStart | None = None

    def set_limit(self, at_mode: Sequence[Tensor]) -> None:
        """Take in losses ``[chains]`` where the initial optimisation ended."""
        group, losses = self.chains.sampler.param_groups[0], torch.stack(list(at_mode)).double()
        thermal = 0.5 * sum(self.chains.layout.sizes) * group["temperature"] / self.chains.num_data
        middle = losses.quantile(0.5, dim=0)
        spread = (losses - middle).abs().quantile(0.5, dim=0)  # 0.67 standard deviations of normal ones
        beyond = BEYOND * (thermal + 1.5 * spread / LOSSES**0.5)
        self.limit = middle + torch.maximum(beyond, LEAST_BEYOND * middle.abs())

    def begin(self) -> None:
        """A window begins: where chains are now they may be sent back to."""
        chains, geometry, stiffness = self.chains, self.chains.geometry, self.chains.stiffness
        if geometry is not None:
            sizes = geometry.factor.clone(), geometry.curvature_ratio.clone()
            self.start = WindowStart(chains.snapshot(), *sizes, stiffness.image.clone(), stiffness.length)

    def restart_runaways(self, losses: Sequence[Tensor]) -> bool:
        """Restart chains that have run away by the last losses of a window; whether there were any.

        What was measured on the way is forgotten, by all chains: it is not of the posterior.
        """
        chains, geometry, start = self.chains, self.chains.geometry, self.start
        if geometry is None or start is None or len(losses) < LOSSES:
            return False
        middle = torch.stack(list(losses[-LOSSES:])).double().median(0).values
        away = chains.alive & (middle > self.limit) & (self.restarts < MOST)
        if bool(away.any()):
            away &= middle > self.limit + SCATTER * self._scatter(geometry)
        if not bool(away.any()):
            return False
        chains.restore(start.place, away)
        chains.stiffness.image, chains.stiffness.length = start.image.clone(), start.length
        chains.stiffness.forget()
        chains.sampler.forget_noise(void=True)
        slower = SLOWER * torch.maximum(start.factor.to(self.least), self.least)
        self.restarts, self.least = self.restarts + away, torch.where(away, slower, self.least)
        geometry.curvature_ratio = torch.where(away, start.curvature_ratio, geometry.curvature_ratio)
        geometry.slow(torch.where(away, slower.to(geometry.factor) / geometry.factor, 1.0))
        self.keep_slow()
        return True

    def _scatter(self, geometry: Geometry) -> Tensor:
        """Deviation of minibatches' losses over the posterior, at the most.

        Over a direction in which ``rate * curvature`` is a and the noise has the share s of Lambda it is
        ``(T / N) sqrt(2 s / a)``; much where there is noise without curvature.
        """
        pulls, d = geometry.rate_curvatures().to(self.limit), sum(self.chains.layout.sizes)
        return geometry.scale * (2.0 * d / pulls).mean(-1).sqrt()

    def keep_slow(self) -> None:
        """Chains that ran away stay slower, whatever rates have been found since."""
        chains, geometry = self.chains, self.chains.geometry
        if geometry is None or not isinstance(chains.sampler, ISGD) or not bool(self.restarts.any()):
            return
        least = self.least.to(geometry.factor)
        geometry.slow((least / geometry.factor).clamp_min(1.0))
        chains.sampler.limit_excess()
