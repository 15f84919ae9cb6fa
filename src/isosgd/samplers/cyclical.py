"""Cyclical SGLD and SGHMC (Zhang, Li, Zhang, Chen, Wilson 2020).

    rate_t = lr min(peak, c(r) / c(beta)),    c(r) = (1 + cos(pi r)) / 2,    r = (t mod cycle) / cycle

In each cycle, first *exploration* (r < beta): steps at a high rate without injected noise, on the way to another mode;
then *sampling*: the steps of SGLD or SGHMC as the rate falls from ``lr`` towards zero. Only draws of the second stage
count. The paper's alpha_0 is ``lr / c(beta)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.planning import Move
from isosgd.samplers.sghmc import SGHMC
from isosgd.samplers.sgld import SGLD
from isosgd.samplers.steppers import Number


def cosine(position: float) -> float:
    """The schedule's shape, from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * position))


class Cyclical(Sampler):
    """A layer over `SGLD` or `SGHMC` (which stands behind it in the list of bases) that gives them cycles.

    Targets ``exp(-f / T)`` within the modes it visits, as ``lr -> 0`` with many relaxation times in every sampling
    stage. It is started cold by each exploration, so that short stages come out too narrow; and how often a mode is
    visited has nothing to do with its mass.

    Departures from the paper: ``lr`` is the largest rate of the sampling stage, which `adapt` can set by theory, and
    not that of the cycle; `adapt` also caps the rate of exploration where it would be unstable; and cycles begin
    when rates are frozen (at the end of the warm-up of `isosgd.sample`), or with the first step when ``lr`` is given.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N.
        temperature: T.
        lr: the largest rate of the sampling stage; left out, `adapt` sets it.
        cycle: steps in a cycle.
        exploration: beta, the share of exploration in a cycle.
        settings: those of `SGLD` or `SGHMC`, and the settings common to all samplers, see `Sampler`.

    Example:
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
    given: bool

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        lr: float | None = None,
        cycle: int = 5000,
        exploration: float = 0.8,
        **settings: Any,
    ) -> None:
        if cycle < 2:
            raise ValueError(f"cycle = {cycle} must be at least 2 steps: it has two stages")
        if not 0 <= exploration < 1 or math.ceil(exploration * cycle) >= cycle:
            raise ValueError(f"exploration = {exploration} must lie in [0, 1) and leave steps of {cycle} to sample")
        self.cycle, self.exploration = cycle, exploration
        own: dict[str, Any] = {"num_data": num_data, "temperature": temperature, "lr": lr}
        super().__init__(params, **own, **settings)
        for group in (self.defaults, *self.param_groups):
            group["start"] = 0 if self.given else None  # the step at which cycles began
            group["peak"] = 1.0 / cosine(exploration)

    def _position(self, group: Group, step: int) -> float | None:
        return None if group["start"] is None else (step - group["start"]) % self.cycle / self.cycle

    @property
    def sampling(self) -> bool:
        """Whether the last step belonged to a sampling stage. Before the cycles begin all steps sample."""
        group = self.param_groups[0]
        position = self._position(group, group["step"] - 1)
        return group["step"] > 0 and (position is None or position >= self.exploration)

    def freeze(self) -> None:
        """Rates stay as they are, and cycles begin."""
        super().freeze()
        for group in self.param_groups:
            group["start"] = group["step"]
        self.refresh()

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        super().adapt(curvature, rise)  # type: ignore[safe-super]
        if self.given or curvature is None:
            return
        for group, h in zip(self.param_groups, curvature, strict=True):
            stable = 1.0 / torch.as_tensor(h * super().rate(group))  # twice that a step no longer is
            group["peak"] = self.number(stable.clamp(1.0, 1.0 / cosine(self.exploration)))

    def rate(self, group: Group) -> Number:
        position, rate = self._position(group, group["step"]), super().rate(group)
        if position is None:
            return rate
        factor, peak = cosine(position) / cosine(self.exploration), group["peak"]
        return rate * (peak.clamp(max=factor) if isinstance(peak, Tensor) else min(peak, factor))

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        position = self._position(group, group["step"])
        if position is not None and position < self.exploration:
            return Move(self.rate(group), 0.0)
        return super()._move(group, params)  # type: ignore[safe-super]

    def _make_plan(self) -> None:
        if self.param_groups[0]["start"] is not None:
            self.refresh()  # the rate changes from step to step
        super()._make_plan()


class CSGLD(Cyclical, SGLD):
    """SGLD in cycles, see `Cyclical`."""


class CSGHMC(Cyclical, SGHMC):
    """SGHMC in cycles, see `Cyclical`. The velocity is kept from stage to stage."""
