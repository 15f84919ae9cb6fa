"""Lambdas that know directions: how much noise and curvature the posterior has in each, by one rule.

The Fisher information of one example, ``F = n Var(g)``, is the curvature of the log likelihood where the model fits.
With the prior's, ``H = n Var(g) + (prior Hessian) / N`` is the curvature of ``f / N``, and

    Lambda = q H,    q = max(what noise asks for, what the allowed bias asks for)

makes ``rate * curvature = T / (N q)`` the same in *every* direction, so that none is left unmixed, and leaves ``C =
Lambda - Var(g) / 2`` positive by construction. `Rule` says what q is. A shape of H (diagonal, low-rank, Kronecker,
full) is a subclass of `Shaped`; it is estimated in the warm-up and constant afterwards, as Theorem 1 asks.

What the rule assumes is measured: the true top of ``rate * curvature`` stretches Lambda when the Fisher information is
too small (see `isosgd.chain.curvature.Stiffness`), and so does gradient noise that the shape cannot express.

Chains run side by side, each with a Lambda of its own: every tensor has a leading chain dimension, of length 1 when
there is but one.
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

CAUTION = 4.0  # at a mode, where chains often start, noise and curvature are less than elsewhere
HIGHEST = 0.2  # rate * curvature of averaged innovations, whatever bias is predicted
CHANGE = 1.7  # of gradient noise, relative to it, over a unit of sqrt(T / N); half of what a sampled scale shows
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

    @property
    def scale(self) -> float:
        """``T / N``: rates are this over Lambda, posterior variances this over the curvature."""
        return self.temperature / self.num_data

    def factor(self, stretch: Tensor) -> Tensor:
        """q, where the true curvature is up to ``stretch`` times H."""
        # Noise that is not the same over the posterior, whose width is sqrt(T / N), must be a small share of Lambda.
        change = CHANGE * math.sqrt(self.scale) / self.bias
        noise = max(self.kappa, change) / (2.0 * self.batch_size)
        heat = self.scale * stretch
        if not self.averaged:
            return (heat / allowed_rate_curvature(self.bias)).clamp_min(noise)
        # Gradient noise has the share s = 1 / (2 n q) of Lambda and inflates variances by s a / 2, a = heat / q.
        return torch.maximum(heat / HIGHEST, (heat / (4.0 * self.batch_size * self.bias)).sqrt()).clamp_min(noise)

    def rate_curvature(self, stretch: Tensor) -> Tensor:
        """The top of ``rate * curvature`` that this gives."""
        return self.scale * stretch / self.factor(stretch)


class Shaped(Structure):
    """A Lambda with a shape, for each chain. It works on flat tensors ``[chains, d]``; numbers are ``[chains]``.

    A subclass keeps the noise it has seen in the form of its shape and turns it into Lambda.

    Attributes:
        kept: names of what a chain needs to go on: numbers, tensors, and lists of tensors. A subclass adds its own.
    """

    name: ClassVar[str]
    kappa: ClassVar[float] = 2.0  # room for noise that is larger elsewhere than where it was measured
    kept: ClassVar[tuple[str, ...]] = ("alive", "seen", "stretch", "known", "factor", "scale", "fallback")

    def bind(self, groups: Sequence[dict[str, Any]], chains: int | None = None, sets: int = 1) -> None:
        """Learn the shapes of the parameters; called once, by the sampler.

        Args:
            groups: of parameters.
            chains: how many chains the parameters' first dimension holds; None when they have no such dimension.
            sets: of how many data sets they are, one after the other.
        """
        self.batched, self.chains, self.sets = chains is not None, chains or 1, sets
        params = [p for group in groups for p in group["params"]]
        self.shapes = [tuple(p.shape[1:] if self.batched else p.shape) for p in params]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.slots: list[slice] = []  # of the groups
        sizes, end = iter(self.sizes), 0
        for group in groups:
            start, end = end, end + sum(next(sizes) for _ in group["params"])
            self.slots.append(slice(start, end))
        self.total = end
        self.device = params[0].device
        self.dtype = torch.float32
        for p in params:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.alive = torch.ones(self.chains, dtype=torch.bool, device=self.device)  # chains that count
        self.seen = 0
        self.known = False  # whether there is a Lambda
        self.stretch = self.full(CAUTION)
        self.factor, self.scale = self.full(math.nan), math.nan  # q and T / N
        self.fallback = self.full(1.0, self.total)  # curvature where none is known
        self.prepare()

    def full(self, value: float, *shape: int) -> Tensor:
        """A tensor ``[chains, *shape]`` of one value."""
        return torch.full((self.chains, *shape), value, dtype=self.dtype, device=self.device)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors like the parameters as one ``[chains, d]``; a copy, always."""
        joined = torch.cat([flat(t, self.batched) for t in tensors], dim=-1).to(self.dtype)
        return joined.view(self.chains, self.total)

    @property
    def unit_rate(self) -> Tensor:
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
    def extra(self) -> int:
        """Innovations that a step takes beyond one for each parameter."""
        return 0

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
        """Take in a noise vector of each chain."""
        self.take(self.flatten(noise))
        self.seen += 1

    @abstractmethod
    def take(self, noise: Tensor) -> None:
        """Take in one flat noise vector of each chain."""

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
    def slow(self, factor: Tensor) -> None:
        """Multiply each chain's Lambda by a factor."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 g``."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a step takes; `displace` is a function of them alone, so that it can be compiled."""

    @abstractmethod
    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 (g + w)``, w from the innovations: what a step subtracts."""

    @abstractmethod
    def rates(self) -> Tensor:
        """The rate of each parameter alone: the diagonal of ``(T / N) Lambda^-1``."""

    def excess(self) -> Tensor:
        """By how much noise that the shape does not express raises the temperature in the worst direction."""
        return torch.zeros_like(self.factor)

    @abstractmethod
    def clipped(self) -> Tensor:
        """Share of directions in which gradient noise exceeds Lambda, so that nothing is injected."""

    def group_rates(self) -> Tensor:
        """One number for each group, ``[chains, groups]``: the geometric mean of its parameters' rates."""
        logs = self.rates().double().log()
        return torch.stack([logs[:, slot].mean(-1).exp() for slot in self.slots], dim=-1)

    def state(self) -> dict[str, Any]:
        """All that a chain needs to go on."""
        return {name: getattr(self, name) for name in self.kept}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        for name in self.kept:
            setattr(self, name, _copied(state[name], self.device))


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

    def forget(self) -> None:
        super().forget()
        self.looks = 0

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        h = rule.batch_size * self.v + self.turned_prior(prior)
        for slot in self.slots:
            h[:, slot] += self.damping * h[:, slot].mean(-1, keepdim=True)
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
            self.amplitude = self.speed * (2.0 * self.lam - self.v).clamp_min(0.0).sqrt()

    def direction(self, gradient: Tensor) -> Tensor:
        return self.back(self.speed * self.turn(gradient))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.speed, self.amplitude

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        speed, amplitude = tensors
        return speed * gradient + amplitude * xi

    def rates(self) -> Tensor:
        return self.speed

    def excess(self) -> Tensor:
        if self.looks < 2:
            return torch.zeros_like(self.heat)
        return self.heat - dot(self.top.square(), self.v / (2.0 * self.lam)) / self._length()

    def clipped(self) -> Tensor:
        return (self.v > 2.0 * self.lam).to(self.dtype).mean(-1) if self.known else torch.zeros_like(self.heat)


class Diagonal(Rotated):
    """One rate for each parameter."""

    name = "diagonal"

    def __init__(self, damping: float = 0.1) -> None:
        self.damping = damping
