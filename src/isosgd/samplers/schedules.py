"""Rates that change from step to step: annealed, or in cycles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.samplers.groups import Group


class Schedule(Protocol):
    """From the rate that a group has to that of its next step."""

    def settings(self) -> dict[str, float]:
        """What is kept in every group."""

    def rate(self, group: Group, rate: Number) -> Number:
        """The rate of the next step."""

    def changes(self, groups: Sequence[Group]) -> bool:
        """Whether rates change from step to step now."""


class Annealing:
    """``rate (1 + t / offset)^-decay`` after t steps (Welling and Teh 2011).

    Args:
        decay: 0 for a fixed rate.
        offset: steps after which the annealing sets in.
    """

    def __init__(self, decay: float, offset: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay = {decay} must lie in [0, 1]; 0 keeps the rate fixed")
        if not offset > 0:
            raise ValueError(f"offset = {offset} must be positive")
        self.decay, self.offset = decay, offset

    def settings(self) -> dict[str, float]:
        """What is kept in every group."""
        return {"decay": self.decay, "offset": self.offset}

    def rate(self, group: Group, rate: Number) -> Number:
        """The rate of the next step."""
        return rate * float((1.0 + group["step"] / group["offset"]) ** -group["decay"])

    def changes(self, groups: Sequence[Group]) -> bool:
        """Whether rates change from step to step now."""
        return any(group["decay"] for group in groups)


def cosine(position: float) -> float:
    """The shape of a cycle, from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * position))


class Cycles:
    """Cycles of a cosine, each with an exploration and a sampling stage (see `isosgd.samplers.cyclical`).

    Args:
        cycle: steps in a cycle.
        exploration: the share of exploration in a cycle.
        within: a further schedule.
    """

    def __init__(self, cycle: int, exploration: float, within: Schedule | None = None) -> None:
        if cycle < 2:
            raise ValueError(f"cycle = {cycle} must be at least 2 steps: it has two stages")
        if not 0 <= exploration < 1 or math.ceil(exploration * cycle) >= cycle:
            raise ValueError(f"exploration = {exploration} must lie in [0, 1) and leave steps of {cycle} to sample")
        self.cycle, self.exploration, self.within = cycle, exploration, within

    def settings(self) -> dict[str, float]:
        """What is kept in every group, beside ``start`` and ``peak`` (see `prepare`)."""
        return {} if self.within is None else self.within.settings()

    def prepare(self, group: Group, begun: bool) -> None:
        """Keep in a group the step at which cycles began, if they have, and the highest rate over that of sampling."""
        group["start"] = 0 if begun else None
        group["peak"] = 1.0 / cosine(self.exploration)

    def position(self, group: Group, step: int) -> float | None:
        """Where in its cycle a step is, in [0, 1); None before cycles begin."""
        return None if group["start"] is None else (step - group["start"]) % self.cycle / self.cycle

    def explores(self, group: Group) -> bool:
        """Whether the next step is one of exploration, without injected noise."""
        position = self.position(group, group["step"])
        return position is not None and position < self.exploration

    def sampled(self, group: Group) -> bool:
        """Whether the last step belonged to a sampling stage. Before the cycles begin all steps sample."""
        position = self.position(group, group["step"] - 1)
        return group["step"] > 0 and (position is None or position >= self.exploration)

    def stable_peak(self, group: Group, rate: Number, curvature: Number) -> Tensor:
        """The highest rate of exploration over that of sampling where steps are stable."""
        rate = rate if self.within is None else self.within.rate(group, rate)
        stable = 1.0 / torch.as_tensor(curvature * rate)  # twice that a step no longer is
        return stable.clamp(1.0, 1.0 / cosine(self.exploration))

    def rate(self, group: Group, rate: Number) -> Number:
        """The rate of the next step."""
        rate = rate if self.within is None else self.within.rate(group, rate)
        position = self.position(group, group["step"])
        if position is None:
            return rate
        factor, peak = cosine(position) / cosine(self.exploration), group["peak"]
        return rate * (peak.clamp(max=factor) if isinstance(peak, Tensor) else min(peak, factor))

    def changes(self, groups: Sequence[Group]) -> bool:
        """Whether rates change from step to step now."""
        return groups[0]["start"] is not None or (self.within is not None and self.within.changes(groups))
