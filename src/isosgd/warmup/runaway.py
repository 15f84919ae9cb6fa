"""Restarts chains that diverge in a window of the warm-up, at the start of that window and with smaller rates.

Rates follow from average noise and curvature. A few outliers, whose minibatches have a hundred times the average
curvature, can make a chain diverge that is stable on average. This shows in the loss: at temperature T it is above that
of a mode by ``d T / (2 N)``, and by many times as much only if the chain has left the posterior.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.geometry.base import Geometry
from isosgd.samplers import ISGD

LOSSES = 20  # whose median is checked, so that one bad minibatch does not count
BEYOND = 20.0  # factor on the expected excess of the loss over that of the mode, and on the error of the median
LEAST_BEYOND = 1e-3  # least excess over the loss: less may be rounding error
SCATTER = 1.7  # factor on the deviation of minibatches' losses over the posterior: six deviations of the median
SLOWER = 4.0  # factor by which rates fall when a chain is restarted
MOST = 10  # restarts


class WindowStart(NamedTuple):
    """The chains and the curvature estimates at the start of a window."""

    place: list[Tensor]
    factor: Tensor
    curvature_ratio: Tensor
    image: Tensor
    length: Tensor | None


class Runaway:
    """Restarts diverging chains after the initial optimisation; does nothing without a geometry."""

    kept = ("limit", "least", "restarts")

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.limit = chains.each(torch.inf)  # loss above which a chain has diverged
        self.least = torch.zeros_like(self.limit)  # least factor of Lambda, after restarts
        self.restarts = torch.zeros_like(self.limit)  # number of them
        self.start: WindowStart | None = None

    def set_limit(self, at_mode: Sequence[Tensor]) -> None:
        """Set the limit from losses ``[chains]`` of minibatches at the end of the initial optimisation."""
        group, losses = self.chains.sampler.param_groups[0], torch.stack(list(at_mode)).double()
        thermal = 0.5 * sum(self.chains.layout.sizes) * group["temperature"] / self.chains.num_data
        middle = losses.quantile(0.5, dim=0)
        spread = (losses - middle).abs().quantile(0.5, dim=0)  # 0.67 standard deviations of normal ones
        beyond = BEYOND * (thermal + 1.5 * spread / LOSSES**0.5)
        self.limit = middle + torch.maximum(beyond, LEAST_BEYOND * middle.abs())

    def begin(self) -> None:
        """Save the start of a window."""
        chains, geometry, stiffness = self.chains, self.chains.geometry, self.chains.stiffness
        if geometry is not None:
            sizes = geometry.factor.clone(), geometry.curvature_ratio.clone()
            self.start = WindowStart(chains.snapshot(), *sizes, stiffness.image.clone(), stiffness.length)

    def restart_runaways(self, losses: Sequence[Tensor]) -> bool:
        """Restart chains that have diverged, judging by the last losses of a window; returns whether there were any.

        If so, all chains discard the measurements of the window.
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
        """Upper bound of the deviation of minibatches' losses over the posterior.

        Along a direction in which ``rate * curvature`` is a and the noise is the share s of Lambda, the deviation is
        ``(T / N) sqrt(2 s / a)``: large if there is noise without curvature.
        """
        pulls, d = geometry.rate_curvatures().to(self.limit), sum(self.chains.layout.sizes)
        return geometry.scale * (2.0 * d / pulls).mean(-1).sqrt()

    def keep_slow(self) -> None:
        """Keep the rates of restarted chains low, after new rates have been set."""
        chains, geometry = self.chains, self.chains.geometry
        if geometry is None or not isinstance(chains.sampler, ISGD) or not bool(self.restarts.any()):
            return
        least = self.least.to(geometry.factor)
        geometry.slow((least / geometry.factor).clamp_min(1.0))
        chains.sampler.limit_excess()
