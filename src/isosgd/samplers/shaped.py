"""Lambdas that know directions: how much noise and curvature the posterior has in each.

A shape of H, the curvature of ``f / N``, is a subclass of `Shaped`: diagonal (`isosgd.samplers.rotated`), low-rank,
Kronecker, or full. It is estimated in the warm-up and constant afterwards, as Theorem 1 asks. ``Lambda = q H``, and
`isosgd.samplers.rule` says what q is and why.

What that rule assumes is measured: the true top of ``rate * curvature`` stretches Lambda when the Fisher information is
too small (see `isosgd.chain.curvature.Stiffness`), and so does gradient noise that the shape cannot express.

Chains run side by side, each with a Lambda of its own: every tensor has a leading chain dimension, of length 1 when
there is but one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from isosgd.noise import flat
from isosgd.samplers.rule import Rule
from isosgd.samplers.structure import Structure

CAUTION = 4.0  # at a mode, where chains often start, noise and curvature are less than elsewhere
EXCESS = 0.1  # temperature that noise outside of a shape may add in the worst direction


class Shaped(Structure):
    """A Lambda with a shape, for each chain. It works on flat tensors ``[chains, d]``; numbers are ``[chains]``.

    A subclass keeps the noise it has seen in the form of its shape and turns it into Lambda.

    Attributes:
        kept: names of what a chain needs to go on: numbers, tensors, and lists of tensors. A subclass adds its own.
    """

    name: ClassVar[str]
    kappa: ClassVar[float] = 2.0  # room for noise that is larger elsewhere than where it was measured
    kept: ClassVar[tuple[str, ...]] = ("alive", "seen", "stretch", "known", "factor", "scale", "weight", "fallback")

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
        self.total, self.device = end, params[0].device
        self.dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
        self.alive = torch.ones(self.chains, dtype=torch.bool, device=self.device)  # chains that count
        self.seen, self.known = 0, False  # noise vectors, and whether there is a Lambda
        self.stretch = self.full(CAUTION)
        self.factor, self.scale = self.full(math.nan), math.nan  # q and T / N
        self.weight = 1.0  # of gradient noise in what is injected; 0 where a batch is all of the data, and has none
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

    def forget(self, void: bool = False) -> None:
        """Start the noise estimate anew, of which nothing is kept if it is ``void``; Lambda stays as it is."""
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

    def displace_(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        """The same; gradient and innovations may be written over."""
        return self.displace(tensors, gradient, xi)

    @abstractmethod
    def rates(self) -> Tensor:
        """The rate of each parameter alone: the diagonal of ``(T / N) Lambda^-1``."""

    def principal_rates(self) -> Tensor:
        """Rates along the principal directions of Lambda, or of its parts, ``[chains, directions]`` in any order."""
        return self.rates()

    def rate_curvatures(self) -> Tensor:
        """``rate * curvature`` along directions, as far as it is known: by H alone, where no curvature was measured."""
        return self.unit_rate.unsqueeze(-1)

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
