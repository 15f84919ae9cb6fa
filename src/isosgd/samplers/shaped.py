"""Lambdas that know directions: how much noise and curvature the posterior has in each, by one rule.

The Fisher information of one example, ``F = n Var(g)``, is the curvature of the log likelihood where the model fits.
With the prior's, ``H = n Var(g) + (prior Hessian) / N`` is the curvature of ``f / N``, and

    Lambda = q H,    q = max(what noise asks for, what the allowed bias asks for)

makes ``rate * curvature = T / (N q)`` the same in *every* direction, so that none is left unmixed, and leaves ``C =
Lambda - Var(g) / 2`` positive by construction. `Rule` says what q is. A shape of H (diagonal, low-rank, Kronecker,
full) is a subclass of `Shaped`; it is estimated in the warm-up and constant afterwards, as Theorem 1 asks.

What the rule assumes is measured: the true top of ``rate * curvature`` stretches Lambda when the Fisher information is
too small (see `isosgd.chain.curvature.Stiffness`), and so does gradient noise that the shape cannot express.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from isosgd.noise import dot, flat, power_step
from isosgd.samplers.steppers import allowed_rate_curvature
from isosgd.samplers.structure import Structure

CAUTION = 4.0
HIGHEST = 0.2  # rate * curvature of averaged innovations, whatever bias is predicted
CHANGE = 1.7  # of gradient noise, relative to it, over a unit of sqrt(T / N); half of what a sampled scale shows
FIXED = {"batched", "shapes", "sizes", "slots", "total", "device", "dtype", "matrices"}  # known from the parameters
EXCESS = 0.1  # temperature that noise outside of a shape may add in the worst direction


@dataclass(frozen=True)
class Rule:
    """How large Lambda must be, as a multiple of H.

    Args:
        num_data: N.
        batch_size: n.
        temperature: T.
        bias: the relative error of the posterior variance that the step size may cause.
        averaged: whether innovations are averaged over two steps, which leaves only the bias of the gradient noise.
        kappa: Lambda over the gradient noise B, at the least.
    """

    num_data: int
    batch_size: int
    temperature: float
    bias: float
    averaged: bool
    kappa: float = 2.0

    def factor(self, stretch: float = 1.0) -> float:
        """q, where the true curvature is up to ``stretch`` times H."""
        # Noise that is not the same over the posterior, whose width is sqrt(T / N), must be a small share of Lambda.
        change = CHANGE * math.sqrt(self.temperature / self.num_data) / self.bias
        noise = max(self.kappa, change) / (2.0 * self.batch_size)
        heat = self.temperature * stretch / self.num_data
        if not self.averaged:
            return max(noise, heat / allowed_rate_curvature(self.bias))
        # Gradient noise has the share s = 1 / (2 n q) of Lambda and inflates variances by s a / 2, a = heat / q.
        return max(noise, heat / HIGHEST, math.sqrt(heat / (4.0 * self.batch_size * self.bias)))

    def rate_curvature(self, stretch: float = 1.0) -> float:
        """The top of ``rate * curvature`` that this gives."""
        return self.temperature * stretch / (self.num_data * self.factor(stretch))


class Shaped(Structure):
    """A Lambda with a shape. It works on flat tensors ``[d]`` or ``[chains, d]``; chains share it.

    A subclass keeps the noise it has seen in the form of its shape and turns it into Lambda.
    """

    name: ClassVar[str]
    kappa: ClassVar[float] = 2.0  # room for noise that is larger elsewhere than where it was measured
    sizes: list[int]  # of the parameters
    slots: list[slice]  # of the groups
    batched: bool

    def bind(self, groups: Sequence[dict[str, Any]], batched: bool) -> None:
        """Learn the shapes of the parameters; called once, by the sampler."""
        self.batched = batched
        params = [p for group in groups for p in group["params"]]
        self.shapes = [tuple(p.shape[1:] if batched else p.shape) for p in params]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        ends: list[int] = [
            sum(math.prod(p.shape[1:] if batched else p.shape) for p in group["params"]) for group in groups
        ]
        starts = [sum(ends[:i]) for i in range(len(ends))]
        self.slots = [slice(a, a + n) for a, n in zip(starts, ends, strict=True)]
        self.groups_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        self.total: int = sum(ends)
        self.device = params[0].device
        self.dtype = torch.float32
        for p in params:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.seen = 0
        self.stretch = CAUTION  # at a mode, where chains often start, noise and curvature are less than elsewhere
        self.known = False  # whether there is a Lambda
        self.factor = self.scale = math.nan  # q and T / N
        self.fallback = torch.ones(self.total, dtype=self.dtype, device=self.device)  # curvature where none is known
        self.prepare()

    @property
    def unit_rate(self) -> float:
        """``rate * curvature`` where the curvature is H."""
        return self.scale / self.factor

    def solve(self, noise: Sequence[Tensor], guard: Sequence[Tensor]) -> list[Tensor]:
        raise TypeError(f"structure {self.name!r} has no lambda of its own for each group")

    @abstractmethod
    def prepare(self) -> None:
        """Allocate what is kept."""

    @property
    def least(self) -> int:
        """Noise vectors needed for a first estimate."""
        return 50

    @property
    def axes(self) -> int:
        """How many axes the Hessian is measured along, besides its stiffest direction."""
        return 0

    def axis(self, i: int) -> Tensor:
        """An axis, of the length at which H says that the curvature is 1."""
        raise NotImplementedError

    def learn(self, i: int, change: Tensor) -> None:
        """Take in the change of the gradient along an axis: the Hessian times it."""
        raise NotImplementedError

    def observe(self, noise: Sequence[Tensor]) -> None:
        """Take in a noise vector, or one for each chain."""
        vector = torch.cat([flat(d, self.batched) for d in noise], dim=-1).to(self.dtype)  # a copy, always
        for one in vector if self.batched else [vector]:
            self.take(one)
            self.seen += 1

    @abstractmethod
    def take(self, noise: Tensor) -> None:
        """Take in one flat noise vector."""

    def forget(self) -> None:
        """Start the noise estimate anew; Lambda stays as it is."""
        self.seen = 0

    @abstractmethod
    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        """Set Lambda from the noise seen.

        Args:
            rule: how large it must be.
            prior: curvature of the prior's part of ``f / N`` for each parameter, flat.
            rise: rates rise at most by this factor.
        """

    @abstractmethod
    def slow(self, factor: float) -> None:
        """Multiply Lambda by a factor of at least 1."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 g``."""

    @abstractmethod
    def displacement(self, gradient: Tensor, xi: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 (g + w)``, w from the innovations."""

    @abstractmethod
    def rates(self) -> Tensor:
        """The rate of each parameter alone: the diagonal of ``(T / N) Lambda^-1``."""

    def excess(self) -> float:
        """By how much noise that the shape does not express raises the temperature in the worst direction."""
        return 0.0

    @abstractmethod
    def clipped(self) -> float:
        """Share of directions in which gradient noise exceeds Lambda, so that nothing is injected."""

    def group_rates(self) -> list[float]:
        """One number for each group: the geometric mean of its parameters' rates."""
        logs = self.rates().double().log()
        return [float(logs[slot].mean().exp()) for slot in self.slots]

    def state(self) -> dict[str, Any]:
        """All that a chain needs to go on: numbers, tensors, and lists of tensors."""
        return {name: value for name, value in vars(self).items() if name not in FIXED}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        for name, value in state.items():
            setattr(self, name, _copied(value, self.device))


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, device) for item in value)
    return value


class Rotated(Shaped):
    """Shapes that are diagonal in a basis of their own: ``H = R diag(h) R^T``.

    Subclasses say how to turn a flat vector into that basis and back. ``v`` is the noise variance there, and Lambda is
    q h, with h kept above a share of its layer's mean (``damping``): a unit that was dead in the warm-up and wakes up
    must not meet an enormous rate.
    """

    damping: float

    def prepare(self) -> None:
        self.v = torch.zeros(self.total, dtype=self.dtype, device=self.device)
        self.lam = torch.zeros(0)
        self.speed = torch.zeros(0)
        self.top = torch.zeros(0)
        self.heat = 0.0

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
        if not self.top.numel():
            self.top, self.heat, self.looks = white.clone(), 0.0, 0
            return
        along = float(dot(self.top, white)) ** 2 / max(float(dot(self.top, self.top)), 1e-30)
        self.looks += 1
        self.heat += (along - self.heat) * max(1.0 / self.looks, 0.02)
        power_step(self.top, white, max(1.0 / (self.looks + 1), 0.01))

    def forget(self) -> None:
        super().forget()
        self.top = torch.zeros(0)

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        h = rule.batch_size * self.v + self.turned_prior(prior)
        for slot in self.slots:
            h[slot] += self.damping * h[slot].mean()
        self.factor, self.scale = rule.factor(self.stretch), rule.temperature / rule.num_data
        lam = self.factor * h.clamp_min(torch.finfo(self.dtype).tiny)
        lam = torch.maximum(lam, self.lam / rise) if self.known else lam
        if self.top.numel():  # heat was measured against the Lambda there was
            axis = self.top.square() / max(float(dot(self.top, self.top)), 1e-30)
            self.heat *= float((axis * self.lam / lam).sum())
        self.lam, self.known = lam, True
        self.changed()
        outside = self.excess()
        if outside > EXCESS:
            self.slow(outside / EXCESS)

    def turned_prior(self, prior: Tensor) -> Tensor:
        """The prior's curvature along the axes of the basis."""
        return prior.to(self.dtype)

    def slow(self, factor: float) -> None:
        self.factor *= factor
        self.lam = self.lam * factor
        self.heat /= factor
        self.changed()

    def changed(self) -> None:
        """Work out rates and the scale of injected noise."""
        if self.known:
            self.speed = self.scale / self.lam
            self.amplitude = self.speed * (2.0 * self.lam - self.v).clamp_min(0.0).sqrt()

    def direction(self, gradient: Tensor) -> Tensor:
        return self.back(self.speed * self.turn(gradient))

    def displacement(self, gradient: Tensor, xi: Tensor) -> Tensor:
        return self.back(self.speed * self.turn(gradient) + self.amplitude * xi)

    def rates(self) -> Tensor:
        return self.speed

    def excess(self) -> float:
        if not self.top.numel() or not self.looks:
            return 0.0
        axis = self.top.square() / max(float(dot(self.top, self.top)), 1e-30)
        return self.heat - float((axis * self.v / (2.0 * self.lam)).sum())

    def clipped(self) -> float:
        return float((self.v > 2.0 * self.lam).double().mean()) if self.known else 0.0


class Diagonal(Rotated):
    """One rate for each parameter."""

    name = "diagonal"

    def __init__(self, damping: float = 0.1) -> None:
        self.damping = damping


def flat_prior(parts: Sequence[Tensor], batched: bool) -> Tensor:
    """The prior's curvature as one flat vector; chains are averaged."""
    joined = torch.cat([flat(p, batched) for p in parts], dim=-1)
    return joined.mean(0) if batched else joined
