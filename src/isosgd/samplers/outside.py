"""Noise that a Lambda does not know: outside of its shape, or larger where a chain is now than it was on average."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from isosgd.noise import dot
from isosgd.samplers.shaped import EXCESS, Shaped

MEMORY = 0.01  # weight of a new vector, once a hundred have been seen


class Outside(Shaped):
    """A shape that follows the direction with most noise for its Lambda, and how much that is.

    A subclass calls `look` for every noise vector while a Lambda is known.
    """

    kept = (*Shaped.kept, "top", "most", "looks")

    def prepare(self) -> None:
        self.top = self.full(0.0, 0)  # an image of the direction, and the noise there over that of Lambda
        self.most, self.looks = self.full(0.0), 0

    @abstractmethod
    def inverse(self, x: Tensor) -> Tensor:
        """``Lambda^-1 x``."""

    @abstractmethod
    def lambda_along(self, t: Tensor) -> Tensor:
        """``t . Lambda t``."""

    @abstractmethod
    def noise_along(self, t: Tensor) -> Tensor:
        """``t . Var(g) t``, as far as it is known."""

    def look(self, noise: Tensor) -> None:
        """Power iteration on ``Lambda^-1 B``, measured along a direction before the vector is taken into it."""
        if not self.looks:
            self.top = noise.clone()
        else:
            along = dot(noise, self.worst())
            self.most = torch.lerp(self.most, (0.5 * along.square()).to(self.most), max(1.0 / self.looks, MEMORY))
            self.top.lerp_(noise * along.unsqueeze(-1), max(1.0 / (self.looks + 1), MEMORY))
        self.looks += 1

    def worst(self) -> Tensor:
        """The direction t of most noise, ``t . Lambda t = 1``."""
        t = self.inverse(self.top)
        return t / dot(self.top, t).clamp_min(torch.finfo(self.dtype).tiny).sqrt().unsqueeze(-1)

    def measured_anew(self, t: Tensor) -> None:
        """Lambda has changed: the noise along t was measured over what it was."""
        now = self.lambda_along(t).to(self.most)
        self.most = torch.where(now > 0, self.most / now, 0.0)  # a chain that was given up has no direction

    def forget(self, void: bool = False) -> None:
        self.looks = 0 if void else min(self.looks, 1)
        super().forget(void)

    def excess(self) -> Tensor:
        if self.looks < 2:
            return torch.zeros_like(self.most)
        found = self.weight * (self.most - 0.5 * self.noise_along(self.worst()).to(self.most))
        return torch.where(self.alive, found, 0.0)

    def cool(self) -> None:
        """Slow chains down that are too hot."""
        beyond = self.excess() / EXCESS
        if bool((beyond > 1.0).any()):
            self.slow(beyond.clamp_min(1.0))

    @property
    def chance(self) -> float:
        """Two standard errors of the noise that was measured, over itself."""
        weight = max(1.0 / max(self.looks, 1), MEMORY)
        return 2.0 * math.sqrt(2.0 * weight / (2.0 - weight))
