"""Lambdas that know directions: how much noise and curvature the posterior has in each.

A form of H, the curvature of ``f / N``, is a subclass of `Geometry`: diagonal, low-rank, Kronecker, or full. It is
estimated in the warm-up and constant afterwards, as Theorem 1 asks. ``Lambda = q H``, and `isosgd.geometry.rule` says
what q is and why.

What that rule assumes is measured: the true top of ``rate * curvature`` enlarges Lambda when the Fisher information is
too small (see `isosgd.engine.curvature.Stiffness`), and so does gradient noise that the form cannot express.

Chains run side by side, each with a Lambda of its own: every tensor has a leading chain dimension, of length 1 when
there is but one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.geometry.rule import Rule
from isosgd.noise.model import dot, flat

FIRST_RATIO = 4.0  # curvature over H that is assumed first: at a mode, where chains start, both are less than elsewhere
MOST_EXCESS = 0.1  # temperature that noise which is not expressed may add in the worst direction
MEMORY = 0.01  # weight of a new vector in the search for that direction, once a hundred have been seen
LEAST_RATIO = 0.25  # true curvature over Fisher information, at the least that is believed
SLACK = 1.2  # by how much Lambda may be too small before it is made larger between two windows
MOST_RELAXED = 10.0  # factor by which Lambda may shrink when its curvature ratio was too large


class Geometry(ABC):
    """A Lambda for each chain. It works on flat tensors ``[chains, d]``; numbers are ``[chains]``.

    A subclass keeps the noise it has seen in its own form and turns it into Lambda.

    Attributes:
        kept: names of what a chain needs to go on: numbers, tensors, lists of tensors, and parts that have ``kept``
            themselves. A subclass adds its own.
        curvature_ratio: the true curvature over H, in the direction where it is largest.
        factor: q.
        scale: ``T / N``.
    """

    name: ClassVar[str]
    kappa: ClassVar[float] = 2.0  # room for noise that is larger elsewhere than where it was measured
    kept: ClassVar[tuple[str, ...]] = (
        "alive", "seen", "curvature_ratio", "known", "factor", "scale", "noise_weight", "fallback",
    )  # fmt: skip

    def bind(self, groups: Sequence[dict[str, Any]], chains: int | None = None, sets: int = 1) -> None:
        """Learn the shapes of the parameters; called once, by the sampler, whose arguments these are."""
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
        self.curvature_ratio = self.full(FIRST_RATIO)
        self.factor, self.scale = self.full(math.nan), math.nan
        self.noise_weight = 1.0  # of gradient noise in what is injected; 0 for gradients of all data, which have none
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

    @abstractmethod
    def prepare(self) -> None:
        """Allocate what is kept."""

    @property
    def min_vectors(self) -> int:
        """Noise vectors needed for a first estimate."""
        return 50

    @property
    def extra_innovations(self) -> int:
        """Innovations that a step takes beyond one for each parameter."""
        return 0

    # -- the noise, and the Hessian along axes --------------------------------------------------------------------

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

    # -- Lambda ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        """Set Lambda from the noise seen, by the rule; rates rise at most by a factor of ``rise``.

        ``prior`` is the curvature of the prior's part of ``f / N`` for each parameter, flat.
        """

    @abstractmethod
    def slow(self, factor: Tensor) -> None:
        """Multiply each chain's Lambda by a factor."""

    def resize(
        self, rule: Rule, curvature: Sequence[Number] | None, rise: float, prior: Sequence[Tensor] | None
    ) -> None:
        """Lambda from the noise seen and the curvature; the arguments are those of `isosgd.samplers.isgd.ISGD.adapt`.

        The rule says how large Lambda should be; here is what is believed of the curvature, and how fast Lambda may
        change.
        """
        if not self.known and self.seen < self.min_vectors:
            raise RuntimeError(
                f"structure {self.name!r} has seen {self.seen} noise vectors and needs {self.min_vectors} for a first "
                "Lambda: pass more to observe() before adapt()"
            )
        if curvature is not None:
            found = torch.stack([torch.as_tensor(h).to(self.factor).expand_as(self.factor) for h in curvature], -1)
            if self.known:
                self._compare(rule, found, rise)
            else:
                for i, slot in enumerate(self.slots):
                    self.fallback[:, slot] = found[:, i : i + 1]
        if rise > 1.0 and self.seen >= self.min_vectors:
            own = torch.zeros_like(self.fallback) if prior is None else self.flatten(prior) / rule.num_data
            self.settle(rule, own, rise)

    def _compare(self, rule: Rule, curvature: Tensor, rise: float) -> None:
        """Take in how much larger the curvature is than the Fisher information says, in the worst direction."""
        ratio = (curvature * self.group_rates().to(curvature)).amax(-1) / self.unit_rate
        ratio = torch.where(self.unit_rate > 0, ratio, self.curvature_ratio)
        if rise > 1.0:
            self.curvature_ratio = ratio.clamp_min(LEAST_RATIO)
        if rise == 1.0 or self.seen < self.min_vectors:
            needed = rule.factor(ratio)
            late = needed > SLACK * self.factor
            self.curvature_ratio = torch.where(late, ratio, self.curvature_ratio)
            if bool(late.any()):
                self.slow(torch.where(late, needed / self.factor, 1.0))

    def relax(self, rule: Rule, curvature_ratio: Tensor) -> None:
        """Take back what a new Lambda was enlarged too much: its ratio was measured against the old one."""
        ratio = torch.minimum(curvature_ratio.to(self.curvature_ratio).clamp_min(LEAST_RATIO), self.curvature_ratio)
        self.slow((rule.factor(ratio) / rule.factor(self.curvature_ratio)).clamp_min(1.0 / MOST_RELAXED))
        self.curvature_ratio = ratio

    def change_temperature(self, rule: Rule) -> None:
        """Go to the temperature of a rule, with the noise and the curvature that are known."""
        self.scale = rule.scale
        self.slow(rule.factor(self.curvature_ratio) / self.factor)

    def excess_temperature(self) -> Tensor:
        """By how much noise that is not expressed raises the temperature in the worst direction."""
        return torch.zeros_like(self.factor)

    def limit_excess(self) -> None:
        """Slow down where noise that is not expressed would raise the temperature."""
        self.slow((self.excess_temperature() / MOST_EXCESS).clamp_min(1.0))

    @abstractmethod
    def clipped(self) -> Tensor:
        """Share of directions in which gradient noise exceeds Lambda, so that nothing is injected."""

    # -- the step -------------------------------------------------------------------------------------------------

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 g``."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a step takes; `displace` is a function of them alone, so that it can be compiled."""

    @abstractmethod
    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 (g + w)``, w from the innovations: what a step subtracts."""

    def reads_rows(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a compiled step of these tensors is one operation, which reads rows as they lie."""
        return False

    # -- rates ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def rates(self) -> Tensor:
        """The rate of each parameter alone: the diagonal of ``(T / N) Lambda^-1``."""

    def principal_rates(self) -> Tensor:
        """Rates along the principal directions of Lambda, or of its parts, ``[chains, directions]`` in any order."""
        return self.rates()

    def rate_curvatures(self) -> Tensor:
        """``rate * curvature`` along directions, as far as it is known: by H alone, where no curvature was measured."""
        return self.unit_rate.unsqueeze(-1)

    def group_rates(self) -> Tensor:
        """One number for each group, ``[chains, groups]``: the geometric mean of its parameters' rates."""
        logs = self.rates().double().log()
        return torch.stack([logs[:, slot].mean(-1).exp() for slot in self.slots], dim=-1)

    # -- saving ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a chain needs to go on."""
        return dict(state_of(self))

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        load_into(self, state, self.device)


class WorstDirection:
    """The direction with most noise for a Lambda, and how much that is: noise that the Lambda does not know.

    It is outside of what Lambda expresses, or larger where a chain is now than it was on average. It is found by power
    iteration on ``Lambda^-1 B``, and measured along a direction before a vector is taken into it: ``ratio`` is B over
    Lambda there, ``image`` the image of the direction, and ``count`` the number of vectors seen.

    It is of a geometry that has ``inverse(x)``, ``Lambda^-1 x``; ``lambda_along(t)``, ``t . Lambda t``; and
    ``noise_along(t)``, ``t . Var(g) t`` as far as it is known.
    """

    kept = ("image", "ratio", "count")

    def __init__(self, geometry: Any) -> None:
        self.geometry = geometry
        self.image = geometry.full(0.0, 0)
        self.ratio, self.count = geometry.full(0.0), 0

    def take(self, noise: Tensor) -> None:
        """Take in a flat noise vector."""
        if not self.count:
            self.image = noise.clone()
        else:
            along = dot(noise, self.direction())
            self.ratio = torch.lerp(self.ratio, (0.5 * along.square()).to(self.ratio), max(1.0 / self.count, MEMORY))
            self.image.lerp_(noise * along.unsqueeze(-1), max(1.0 / (self.count + 1), MEMORY))
        self.count += 1

    def direction(self) -> Tensor:
        """The direction t, ``t . Lambda t = 1``."""
        t: Tensor = self.geometry.inverse(self.image)
        return t / dot(self.image, t).clamp_min(torch.finfo(self.geometry.dtype).tiny).sqrt().unsqueeze(-1)

    def rescale(self, t: Tensor | None) -> None:
        """Lambda has changed: the noise along t, the direction before, was measured over what it was."""
        if t is not None:
            now = self.geometry.lambda_along(t).to(self.ratio)
            self.ratio = torch.where(now > 0, self.ratio / now, 0.0)  # a chain that was dropped has no direction

    def forget(self, void: bool) -> None:
        """Measure anew; along another direction if the old one is ``void``."""
        self.count = 0 if void else min(self.count, 1)

    def excess_temperature(self) -> Tensor:
        """What the noise that is not known adds to the temperature."""
        if self.count < 2:
            return torch.zeros_like(self.ratio)
        known = 0.5 * self.geometry.noise_along(self.direction()).to(self.ratio)
        return torch.where(self.geometry.alive, self.geometry.noise_weight * (self.ratio - known), 0.0)

    def limit_excess(self) -> None:
        """Slow chains down whose temperature is too high."""
        beyond = self.geometry.excess_temperature() / MOST_EXCESS
        if bool((beyond > 1.0).any()):
            self.geometry.slow(beyond.clamp_min(1.0))

    @property
    def chance(self) -> float:
        """Two standard errors of the noise that was measured, over itself."""
        weight = max(1.0 / max(self.count, 1), MEMORY)
        return 2.0 * math.sqrt(2.0 * weight / (2.0 - weight))


def state_of(item: Any) -> Any:
    """What an object keeps, by the names in its ``kept``; parts that keep something themselves are dicts."""
    if hasattr(item, "kept"):
        return {name: state_of(getattr(item, name)) for name in item.kept}
    return [state_of(part) for part in item] if isinstance(item, list) else item


def load_into(item: Any, state: dict[str, Any], device: torch.device) -> None:
    """Take up what `state_of` gave."""
    missing = [name for name in item.kept if name not in state]
    if missing:
        raise ValueError(
            f"the state of {type(item).__name__} lacks {missing}: it was saved by another version of isosgd; finish "
            "that run with it"
        )
    for name in item.kept:
        old, new = getattr(item, name), state[name]
        if hasattr(old, "kept"):
            load_into(old, new, device)
        elif isinstance(old, list) and old and hasattr(old[0], "kept"):
            for part, saved in zip(old, new, strict=True):
                load_into(part, saved, device)
        else:
            setattr(item, name, _copied(new, device))


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, device) for item in value)
    return value
