"""Lambda as a matrix: noise and curvature of the posterior in each direction.

A form of H, the curvature of ``f / N``, is a subclass of `Geometry`: diagonal, low-rank, Kronecker, or full. It is
estimated in the warm-up and constant afterwards, as Theorem 1 requires. ``Lambda = q H``, with q from
`isosgd.geometry.rule`.

The assumptions of that rule are checked by measurement: Lambda grows if the Fisher information underestimates the
largest curvature (see `isosgd.engine.curvature.Stiffness`), or if there is gradient noise that the form cannot express.

Every chain has a Lambda: all tensors have a leading chain dimension, also for one chain.
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

FIRST_RATIO = 4.0  # first curvature over H: chains start at a mode, where both are smaller than elsewhere
MOST_EXCESS = 0.1  # excess temperature allowed in the worst direction
MEMORY = 0.01  # least weight of a new vector in the search for that direction
LEAST_RATIO = 0.25  # least credible true curvature over Fisher information
SLACK = 1.2  # factor by which Lambda may be too small before it grows within a window
MOST_RELAXED = 10.0  # factor by which Lambda may shrink if its curvature ratio was too large


class Geometry(ABC):
    """A Lambda for each chain, in terms of flat tensors ``[chains, d]`` and numbers ``[chains]``.

    A subclass keeps statistics of the noise in its form and computes Lambda from them.

    Attributes:
        kept: names of the attributes to save: numbers, tensors, lists of tensors, and objects that have ``kept``, too.
        curvature_ratio: the true curvature over H, in the direction where this is largest.
        factor: q.
        scale: ``T / N``.
    """

    name: ClassVar[str]
    kappa: ClassVar[float] = 2.0  # least Lambda over B: noise may be larger away from where it was measured
    kept: ClassVar[tuple[str, ...]] = (
        "alive", "seen", "curvature_ratio", "known", "factor", "scale", "noise_weight", "fallback",
    )  # fmt: skip

    def bind(self, groups: Sequence[dict[str, Any]], chains: int | None = None, sets: int = 1) -> None:
        """Adopt the shapes of a sampler's parameters; called once."""
        self.batched, self.chains, self.sets = chains is not None, chains or 1, sets
        params = [p for group in groups for p in group["params"]]
        self.shapes = [tuple(p.shape[1:] if self.batched else p.shape) for p in params]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.slots: list[slice] = []  # of the groups, in flat tensors
        sizes, end = iter(self.sizes), 0
        for group in groups:
            start, end = end, end + sum(next(sizes) for _ in group["params"])
            self.slots.append(slice(start, end))
        self.total, self.device = end, params[0].device
        self.dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
        self.alive = torch.ones(self.chains, dtype=torch.bool, device=self.device)  # chains that were not dropped
        self.seen, self.known = 0, False  # number of noise vectors; whether Lambda has been set
        self.curvature_ratio = self.full(FIRST_RATIO)
        self.factor, self.scale = self.full(math.nan), math.nan
        self.noise_weight = 1.0  # share of gradient noise to correct for; 0 for gradients of all data
        self.fallback = self.full(1.0, self.total)  # curvature where the noise says nothing
        self.prepare()

    def full(self, value: float, *shape: int) -> Tensor:
        """A tensor ``[chains, *shape]`` of one value."""
        return torch.full((self.chains, *shape), value, dtype=self.dtype, device=self.device)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as one ``[chains, d]``, a copy."""
        joined = torch.cat([flat(t, self.batched) for t in tensors], dim=-1).to(self.dtype)
        return joined.view(self.chains, self.total)

    @property
    def unit_rate(self) -> Tensor:
        """``rate * curvature`` if the curvature is H."""
        return self.scale / self.factor

    @abstractmethod
    def prepare(self) -> None:
        """Allocate state; called by `bind`."""

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
        """Update with a noise vector, in the shapes of the parameters."""
        self.update(self.flatten(noise))
        self.seen += 1

    @abstractmethod
    def update(self, noise: Tensor) -> None:
        """Update with a flat noise vector of each chain."""

    def forget(self, void: bool = False) -> None:
        """Restart the noise estimate, and discard the old one if ``void``; Lambda is unchanged."""
        self.seen = 0

    @property
    def axes(self) -> int:
        """Number of axes along which the Hessian is measured, besides its stiffest direction."""
        return 0

    def axis(self, i: int) -> Tensor:
        """An axis, scaled to curvature 1 by H."""
        raise NotImplementedError

    def observe_hessian(self, i: int, change: Tensor) -> None:
        """Update with the product of the Hessian and an axis: the change of the gradient along it."""
        raise NotImplementedError

    # -- Lambda ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_lambda(self, rule: Rule, prior: Tensor, rise: float) -> None:
        """Set Lambda from the noise by the rule; rates rise by at most a factor of ``rise``.

        ``prior``: the flat curvature of the prior's part of ``f / N``.
        """

    @abstractmethod
    def slow(self, factor: Tensor) -> None:
        """Multiply each chain's Lambda by a factor."""

    def resize(
        self, rule: Rule, curvature: Sequence[Number] | None, rise: float, prior: Sequence[Tensor] | None
    ) -> None:
        """Set Lambda from the noise and the curvature; the arguments are those of `isosgd.samplers.isgd.ISGD.adapt`."""
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
            self.set_lambda(rule, own, rise)

    def _compare(self, rule: Rule, curvature: Tensor, rise: float) -> None:
        """Compare the curvature with the Fisher information, in the worst direction."""
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
        """Shrink a Lambda whose curvature ratio, measured against the old Lambda, is too large."""
        ratio = torch.minimum(curvature_ratio.to(self.curvature_ratio).clamp_min(LEAST_RATIO), self.curvature_ratio)
        self.slow((rule.factor(ratio) / rule.factor(self.curvature_ratio)).clamp_min(1.0 / MOST_RELAXED))
        self.curvature_ratio = ratio

    def change_temperature(self, rule: Rule) -> None:
        """Adopt the temperature of a rule, keeping noise and curvature."""
        self.scale = rule.scale
        self.slow(rule.factor(self.curvature_ratio) / self.factor)

    def excess_temperature(self) -> Tensor:
        """The relative rise of the temperature by noise that the form cannot express, in the worst direction."""
        return torch.zeros_like(self.factor)

    def limit_excess(self) -> None:
        """Reduce the rates of chains whose excess temperature is too high."""
        self.slow((self.excess_temperature() / MOST_EXCESS).clamp_min(1.0))

    @abstractmethod
    def clipped(self) -> Tensor:
        """Share of directions in which gradient noise exceeds Lambda."""

    # -- the step -------------------------------------------------------------------------------------------------

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """``(T / N) Lambda^-1 g``."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `displace` reads: it is a pure function of tensors, to be compiled."""

    @abstractmethod
    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        """What a step subtracts: ``(T / N) Lambda^-1 (g + w)``, with w from the innovations."""

    def along_directions(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """S, ``back`` and ``rate`` where `direction` is ``rate g + S^T back S g`` with few rows of S; else None."""
        return None

    # -- rates ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def rates(self) -> Tensor:
        """The diagonal of ``(T / N) Lambda^-1``."""

    def principal_rates(self) -> Tensor:
        """Rates along the principal directions of Lambda, or of its parts, ``[chains, directions]``, in any order."""
        return self.rates()

    def rate_curvatures(self) -> Tensor:
        """``rate * curvature`` along directions; by H if the curvature was not measured."""
        return self.unit_rate.unsqueeze(-1)

    def group_rates(self) -> Tensor:
        """The geometric mean of each group's rates, ``[chains, groups]``."""
        logs = self.rates().double().log()
        return torch.stack([logs[:, slot].mean(-1).exp() for slot in self.slots], dim=-1)

    # -- saving ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state to save."""
        return dict(state_of(self))

    def load(self, state: dict[str, Any]) -> None:
        load_into(self, state, self.device)


class WorstDirection:
    """The direction in which gradient noise is largest relative to Lambda.

    It shows noise that the form cannot express or that has grown since it was measured. It is found by power iteration
    on ``Lambda^-1 B``; the noise along it is measured on vectors before they enter the iteration: ``ratio`` is B over
    Lambda there, ``image`` the iterate, and ``count`` the number of vectors.

    The geometry must have ``inverse(x)``, ``Lambda^-1 x``; ``lambda_along(t)``, ``t . Lambda t``; and
    ``noise_along(t)``, its estimate of ``t . Var(g) t``.
    """

    kept = ("image", "ratio", "count")

    def __init__(self, geometry: Any) -> None:
        self.geometry = geometry
        self.image = geometry.full(0.0, 0)
        self.ratio, self.count = geometry.full(0.0), 0

    def update(self, noise: Tensor) -> None:
        """Update with a flat noise vector."""
        if not self.count:
            self.image = noise.clone()
        else:
            along = dot(noise, self.direction())
            self.ratio = torch.lerp(self.ratio, (0.5 * along.square()).to(self.ratio), max(1.0 / self.count, MEMORY))
            self.image.lerp_(noise * along.unsqueeze(-1), max(1.0 / (self.count + 1), MEMORY))
        self.count += 1

    def direction(self) -> Tensor:
        """The direction t, normalised to ``t . Lambda t = 1``."""
        t: Tensor = self.geometry.inverse(self.image)
        return t / dot(self.image, t).clamp_min(torch.finfo(self.geometry.dtype).tiny).sqrt().unsqueeze(-1)

    def rescale(self, t: Tensor | None) -> None:
        """Adjust the ratio to a new Lambda; t is the direction before it changed."""
        if t is not None:
            now = self.geometry.lambda_along(t).to(self.ratio)
            self.ratio = torch.where(now > 0, self.ratio / now, 0.0)  # a dropped chain has no direction

    def forget(self, void: bool) -> None:
        """Restart the measurement; if ``void``, the search for the direction, too."""
        self.count = 0 if void else min(self.count, 1)

    def excess_temperature(self) -> Tensor:
        """The excess temperature by noise that is not in the geometry's estimate."""
        if self.count < 2:
            return torch.zeros_like(self.ratio)
        known = 0.5 * self.geometry.noise_along(self.direction()).to(self.ratio)
        return torch.where(self.geometry.alive, self.geometry.noise_weight * (self.ratio - known), 0.0)

    def limit_excess(self) -> None:
        """As `Geometry.limit_excess`, but Lambda is left alone if no chain is too hot."""
        beyond = self.geometry.excess_temperature() / MOST_EXCESS
        if bool((beyond > 1.0).any()):
            self.geometry.slow(beyond.clamp_min(1.0))

    @property
    def chance(self) -> float:
        """Two relative standard errors of the measured noise."""
        weight = max(1.0 / max(self.count, 1), MEMORY)
        return 2.0 * math.sqrt(2.0 * weight / (2.0 - weight))


def state_of(item: Any) -> Any:
    """The attributes named in ``kept``, by name; objects with ``kept`` of their own become dicts."""
    if hasattr(item, "kept"):
        return {name: state_of(getattr(item, name)) for name in item.kept}
    return [state_of(part) for part in item] if isinstance(item, list) else item


def load_into(item: Any, state: dict[str, Any], device: torch.device) -> None:
    """Restore what `state_of` returned."""
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
