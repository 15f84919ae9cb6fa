"""Shapes of Lambda that are diagonal, in the parameters' own basis or in one that is found.

Subclasses of `Rotated` say what the basis is: that of the parameters here (`Diagonal`), one for each side of each
weight matrix in `isosgd.samplers.kronecker`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.noise import dot, power_step
from isosgd.samplers.rule import Rule, damped
from isosgd.samplers.shaped import EXCESS, Shaped


class Rotated(Shaped):
    """Shapes that are diagonal in a basis of their own: ``H = R diag(h) R^T``.

    Subclasses say how to turn a flat vector into that basis and back. ``v`` is the noise variance there, and Lambda is
    q h, with h kept above a share of its layer's mean (``damping``): a unit that was dead in the warm-up and wakes up
    must not meet an enormous rate.
    """

    damping: float
    kept = (*Shaped.kept, "v", "lam", "speed", "amplitude", "top", "heat", "looks")

    def prepare(self) -> None:
        self.v = self.full(0.0, self.total)
        self.lam, self.speed, self.amplitude = self.v.clone(), self.v.clone(), self.v.clone()
        self.top = self.v.clone()  # the direction in which noise exceeds Lambda most, and how hot it is there
        self.heat = self.full(0.0)
        self.looks = 0

    def turn(self, x: Tensor) -> Tensor:
        """Into the basis."""
        return x

    def back(self, z: Tensor) -> Tensor:
        """Out of it."""
        return z

    def take(self, noise: Tensor) -> None:
        z = self.turn(noise)
        self.v.lerp_(z.square(), 1.0 / (self.seen + 1))
        if self.known:
            self._follow(z * (2.0 * self.lam).rsqrt())
        self.changed()

    def _follow(self, white: Tensor) -> None:
        """Find the direction in which noise exceeds Lambda most, and how hot it is there.

        What a vector says of a direction that it helped to find is chance; so heat is measured before it is taken in.
        """
        if not self.looks:
            self.top = white.clone()
        else:
            along = dot(self.top, white).square() / self._length()
            self.heat = torch.lerp(self.heat, along, max(1.0 / self.looks, 0.02))
            power_step(self.top, white, max(1.0 / (self.looks + 1), 0.01))
        self.looks += 1

    def _length(self) -> Tensor:
        return dot(self.top, self.top).clamp_min(1e-30)

    def forget(self, void: bool = False) -> None:
        super().forget(void)
        self.looks = 0

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        h = damped(rule.batch_size * self.v + self.turned_prior(prior), self.damping, self.slots)
        self.factor, self.scale = rule.factor(self.stretch), rule.scale
        lam = self.factor[:, None] * h.clamp_min(torch.finfo(self.dtype).tiny)
        lam = torch.maximum(lam, self.lam / rise) if self.known else lam
        if self.looks > 1:  # heat was measured against the Lambda there was
            self.heat = self.heat * dot(self.top.square(), self.lam / lam) / self._length()
        self.lam, self.known = lam, True
        self.slow((self.excess() / EXCESS).clamp_min(1.0))

    def turned_prior(self, prior: Tensor) -> Tensor:
        """The prior's curvature along the axes of the basis."""
        return prior

    def slow(self, factor: Tensor) -> None:
        self.factor = self.factor * factor
        self.lam = self.lam * factor[:, None]
        self.heat = self.heat / factor
        self.changed()

    def changed(self) -> None:
        """Work out rates and the scale of injected noise."""
        if self.known:
            self.speed = self.scale / self.lam
            self.amplitude = self.speed * (2.0 * self.lam - self.weight * self.v).clamp_min(0.0).sqrt()

    def direction(self, gradient: Tensor) -> Tensor:
        return self.back(self.speed * self.turn(gradient))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.speed, self.amplitude

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        speed, amplitude = tensors
        return speed * gradient + amplitude * xi

    def rates(self) -> Tensor:
        return self.speed

    def principal_rates(self) -> Tensor:
        return self.speed

    def excess(self) -> Tensor:
        if self.looks < 2:
            return torch.zeros_like(self.heat)
        return self.weight * (self.heat - dot(self.top.square(), self.v / (2.0 * self.lam)) / self._length())

    def clipped(self) -> Tensor:
        over = self.weight * self.v > 2.0 * self.lam
        return over.to(self.dtype).mean(-1) if self.known else torch.zeros_like(self.heat)


class Diagonal(Rotated):
    """One rate for each parameter."""

    name = "diagonal"

    def __init__(self, damping: float = 0.1) -> None:
        self.damping = damping
