"""Step size schedules: constant, annealed, or in cycles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.samplers.groups import Group

CYCLE = 5000  # steps, if the spacing of draws is not known
LEAST_CYCLE = 500  # steps, if it is
SPREAD = 0.2  # share of a sampling stage, at its start, without draws: the chain spreads from the mode
STAGE_DRAWS = 10  # draws of a stage, if its length follows from the spacing of draws


class Schedule:
    """Turns the rate of a group into that of its next step; by default it is constant."""

    def settings(self, begun: bool = False) -> dict[str, float | None]:
        """Entries of every group; ``begun``: whether the first step already samples."""
        return {}

    def begin(self, groups: Sequence[Group]) -> None:
        """Called when rates are frozen and sampling begins."""

    def changes(self, groups: Sequence[Group]) -> bool:
        """Whether rates now change from step to step."""
        return False

    def rate(self, group: Group, rate: Number) -> Number:
        return rate

    def factors(self, group: Group, steps: int) -> Tensor:
        """The next steps' rates over that of the group, ``[steps, 1]`` or ``[steps, chains]``."""
        return torch.ones(steps, 1, dtype=torch.float64)

    def explores(self, group: Group) -> bool:
        """Whether the next step explores, without injected noise."""
        return False

    def exploring(self, group: Group, steps: int) -> Tensor:
        """Which of the next steps explore, ``[steps, 1]``."""
        return torch.zeros(steps, 1, dtype=torch.bool)

    def sampled(self, group: Group) -> bool:
        """Whether the last step belongs to a sampling stage."""
        return True

    def limit_peak(self, group: Group, curvature: Number) -> Tensor | None:
        """The largest stable rate of exploration over that of sampling; None without exploration."""
        return None

    def fit(self, groups: Sequence[Group], spacing: float) -> None:
        """Fit the schedule to the spacing of draws, in steps at the rates of the groups."""

    def steps_to(self, group: Group, spacing: float, draws: int = 1) -> int:
        """Steps to the next draw, or to the last of several; ``spacing`` is in steps at the rate of the group."""
        return math.ceil(draws * spacing)


class Annealing(Schedule):
    """``rate (1 + t / offset)^-decay`` after t steps (Welling and Teh 2011).

    Args:
        decay: 0 for a fixed rate.
        offset: steps after which the rate begins to fall.
    """

    def __init__(self, decay: float, offset: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay = {decay} must lie in [0, 1]; 0 keeps the rate fixed")
        if not offset > 0:
            raise ValueError(f"offset = {offset} must be positive")
        self.decay, self.offset = decay, offset

    def settings(self, begun: bool = False) -> dict[str, float | None]:
        return {"decay": self.decay, "offset": self.offset}

    def changes(self, groups: Sequence[Group]) -> bool:
        return any(group["decay"] for group in groups)

    def rate(self, group: Group, rate: Number) -> Number:
        return rate * float((1.0 + group["step"] / group["offset"]) ** -group["decay"])

    def factors(self, group: Group, steps: int) -> Tensor:
        step = group["step"] + torch.arange(steps, dtype=torch.float64)
        found: Tensor = (1.0 + step / group["offset"]) ** -group["decay"]
        return found.unsqueeze(-1)


def cosine(position: float) -> float:
    """The shape of a cycle, from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * position))


def area(position: float) -> float:
    """The integral of `cosine` from 0."""
    return 0.5 * position + math.sin(math.pi * position) / (2.0 * math.pi)


class Cycles(Schedule):
    """Cosine cycles, each with an exploration and a sampling stage (see `isosgd.samplers.cyclical`).

    Exploration ends at a mode, from which a chain spreads again in every sampling stage. The lower the rate, the less a
    chain moves, so draws are spaced in *time*: the sum of the steps' rates over that of the group.

    Each group stores the length of its ``cycle``, the step at which cycles ``start``, and ``peak``, the highest rate
    over that of sampling.

    Args:
        cycle: steps in a cycle; with None `fit` sets it, and it is `CYCLE` until then.
        exploration: the share of exploration in a cycle.
        within: a schedule over all cycles.
    """

    def __init__(self, cycle: int | None, exploration: float, within: Schedule | None = None) -> None:
        self.given, cycle = cycle is not None, CYCLE if cycle is None else cycle
        if cycle < 2:
            raise ValueError(f"cycle = {cycle} must be at least 2 steps: it has two stages")
        if not 0 <= exploration < 1 or math.ceil(exploration * cycle) >= cycle:
            raise ValueError(f"exploration = {exploration} must lie in [0, 1) and leave steps of {cycle} to sample")
        self.cycle, self.exploration, self.within = cycle, exploration, within or Schedule()
        self._clock = np.zeros(0)

    def settings(self, begun: bool = False) -> dict[str, float | None]:
        own = {"cycle": self.cycle, "start": 0 if begun else None, "peak": 1.0 / cosine(self.exploration)}
        return {**own, **self.within.settings(begun)}

    def begin(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group["start"] = group["step"]

    def changes(self, groups: Sequence[Group]) -> bool:
        return groups[0]["start"] is not None or self.within.changes(groups)

    def position(self, group: Group, step: int) -> float | None:
        """Position of a step in its cycle, in [0, 1); None before cycles begin."""
        return None if group["start"] is None else (step - group["start"]) % group["cycle"] / group["cycle"]

    def rate(self, group: Group, rate: Number) -> Number:
        rate = self.within.rate(group, rate)
        position = self.position(group, group["step"])
        if position is None:
            return rate
        factor, peak = cosine(position) / cosine(self.exploration), group["peak"]
        return rate * (peak.clamp(max=factor) if isinstance(peak, Tensor) else min(peak, factor))

    def factors(self, group: Group, steps: int) -> Tensor:
        found = self.within.factors(group, steps)
        if group["start"] is None:
            return found
        wave = 0.5 * (1.0 + torch.cos(math.pi * self._positions(group, steps))) / cosine(self.exploration)
        peak = torch.as_tensor(group["peak"], dtype=torch.float64, device="cpu")
        return torch.minimum(wave.unsqueeze(-1), peak.reshape(1, -1)) * found

    def explores(self, group: Group) -> bool:
        position = self.position(group, group["step"])
        return position is not None and position < self.exploration

    def exploring(self, group: Group, steps: int) -> Tensor:
        if group["start"] is None:
            return super().exploring(group, steps)
        return (self._positions(group, steps) < self.exploration).unsqueeze(-1)

    def _positions(self, group: Group, steps: int) -> Tensor:
        step: Tensor = (group["step"] - group["start"] + torch.arange(steps)) % group["cycle"]
        return step.double() / float(group["cycle"])

    def sampled(self, group: Group) -> bool:
        position = self.position(group, group["step"] - 1)
        return group["step"] > 0 and (position is None or position >= self.exploration)

    def limit_peak(self, group: Group, curvature: Number) -> Tensor | None:
        stable = 1.0 / torch.as_tensor(curvature * self.within.rate(group, group["rate"]))  # twice this is unstable
        return stable.clamp(1.0, 1.0 / cosine(self.exploration))

    def set_highest(self, group: Group, rate: Number) -> Number:
        """The group's rate for cycles whose highest rate is ``rate``."""
        group["peak"] = 1.0 / cosine(self.exploration)
        return rate * cosine(self.exploration)

    def stage(self, group: Group) -> float:
        """Time of a sampling stage."""
        return float(group["cycle"]) * (area(1.0) - area(self.exploration)) / cosine(self.exploration)

    def spacing(self, group: Group) -> float:
        """Time between draws for `STAGE_DRAWS` of them in a stage."""
        return max(1.0, (1.0 - 1e-6) * float(self._counted(group["cycle"])[-1]) / STAGE_DRAWS)

    def fit(self, groups: Sequence[Group], spacing: float) -> None:
        """Set the cycle so that the chain spreads and then gives `STAGE_DRAWS` draws in a stage."""
        if self.given:
            return
        stage = STAGE_DRAWS * spacing / (1.0 - SPREAD)
        cycle = max(LEAST_CYCLE, math.ceil(groups[0]["cycle"] * stage / self.stage(groups[0])))
        for group in groups:
            group["cycle"] = cycle

    def steps_to(self, group: Group, spacing: float, draws: int = 1) -> int:
        """Steps to the next draw, or to the last of several.

        Exploration and the first `SPREAD` of a stage do not count. Draws are due at multiples of the spacing since
        cycles began, so that rounding up to whole steps does not accumulate.
        """
        if group["start"] is None or spacing < 1:
            return math.ceil(draws * spacing)
        clock, cycle = self._counted(group["cycle"]), group["cycle"]
        taken = group["step"] - group["start"]
        cycles, here = divmod(taken, cycle)
        now = float(cycles * clock[-1] + clock[here]) / spacing
        due = (math.floor(now + 2e-9) + draws - 1e-9) * spacing  # against rounding
        whole = math.ceil(due / clock[-1]) - 1
        return int(whole * cycle + np.searchsorted(clock, due - whole * clock[-1]) - taken)

    def _counted(self, cycle: int) -> NDArray[np.float64]:
        """Time that counts for draws, from the start of a cycle to that of each of its steps, and to its end."""
        if len(self._clock) != cycle + 1:
            rates = 0.5 * (1.0 + np.cos(np.pi * np.arange(cycle) / cycle)) / cosine(self.exploration)
            rates[np.arange(cycle) / cycle < self.exploration] = 0.0
            time = np.cumsum(rates)
            rates[time < SPREAD * time[-1]] = 0.0
            self._clock = np.concatenate([[0.0], np.cumsum(rates)])
        return self._clock
