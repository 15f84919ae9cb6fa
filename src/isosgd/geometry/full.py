"""Lambda as a full matrix, for small models: a rate for every direction.

With a root R of the inverse of H, ``R R^T = H^-1``, Lambda is q I in the coordinates ``R^-1 theta``, and gradient noise
is nearly a multiple of I.

*The level of the noise.* With few data the noise varies over the posterior. Its form hardly changes, but its level
does, above all if a noise scale is sampled. So the level can be tracked: the squared length ``d . H^-1 d`` of the last
few noise vectors over its average. B times this level is subtracted from the injected noise, which is correct on
average at each point, as Theorem 1 requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry, WorstDirection
from isosgd.geometry.linalg import times
from isosgd.geometry.lowrank import RANK
from isosgd.geometry.rule import Rule

SINGULAR = 1e-12  # eigenvalues of H, scaled to a unit diagonal, below which a direction has no measurable noise
BELIEVED = 3.0  # least significant ratio of curvature and Fisher information, either way
SAFE = 2.0  # factor on the curvature that was measured in a direction, for Lambda there
LEAST = 0.01  # least credible curvature over Fisher information
LEVEL_WEIGHT = 0.25  # of a new noise vector in the level


class Full(Geometry):
    """One matrix over all parameters, for up to a few hundred of them.

    The Fisher information is compared with the Hessian, axis by axis in the basis in which H is the identity, and
    replaced by it where they differ much: there may be curvature without noise, or noise without curvature. Lambda
    covers such noise, but is no larger, since without curvature there is no bias.

    Chains of one data set share their noise vectors, since a full matrix takes many vectors to estimate.

    All is in float64, since regressions on raw data have condition numbers of 1e11 and more. Lambda is constant after
    the warm-up, but the average of the noise covariance goes on, so that ``C = Lambda - B`` improves.
    """

    name = "full"
    kappa = 1.25  # its correlations are known
    kept = (
        *Geometry.kept,
        *("worst", "cov", "root", "inverse_root", "pull", "push", "share", "level", "shares", "sight"),
        *("hessian", "probed", "cover"),
    )

    def prepare(self) -> None:
        self.worst, d = WorstDirection(self), self.total
        self.cov = self.full(0.0, d, d).double()  # of the noise
        self.root, self.inverse_root = torch.zeros_like(self.cov), torch.zeros_like(self.cov)
        self.pull, self.push = torch.zeros_like(self.cov), torch.zeros_like(self.cov)
        self.share = self.full(0.0)
        self.level = self.full(1.0)  # of the noise, over its average
        # Shares of the noise in Lambda, and the map that measures its level; empty if the level is not tracked.
        self.shares = self.sight = self.full(0.0, 0)
        self.hessian = torch.eye(d).to(self.cov).repeat(self.chains, 1, 1)  # in the basis of each chain's axes
        self.probed = [0] * d
        self.cover = 0.0  # least Lambda over Var(g)

    @property
    def min_vectors(self) -> int:
        # With four vectors for each parameter, eigenvalues are correct within a factor of (1 - 1/2)^2.
        return max(20, -(-4 * self.total * self.sets // self.chains))

    def _shared(self, x: Tensor) -> Tensor:
        """Averages over the chains of each data set."""
        each = x.view(self.sets, -1, *x.shape[1:])
        alive = self.alive.view(self.sets, -1, *([1] * (x.dim() - 1)))
        weight, each = alive.to(x.dtype), torch.where(alive, each, 0.0)  # dropped chains may not be finite
        mean = each.sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1.0)
        return mean.expand_as(each).reshape(x.shape)

    def update(self, noise: Tensor) -> None:
        d = noise.double()
        self.cov.lerp_(self._shared(d.unsqueeze(-1) * d.unsqueeze(-2)), 1.0 / (self.seen + 1))
        count = self.seen + 1
        if self.known:
            self.worst.update(d)
        if self.tracks_level:
            self.track_level(noise)
        if self.known and count >= self.min_vectors and count & (count - 1) == 0:
            self._inject()

    # -- the Hessian ----------------------------------------------------------------------------------------------

    @property
    def axes(self) -> int:
        return self.total

    def axis(self, i: int) -> Tensor:
        return self.root[..., i]

    def observe_hessian(self, i: int, change: Tensor) -> None:
        self.probed[i] += 1
        self.hessian[..., i].lerp_(times(self.root.mT, change.double()), 1.0 / self.probed[i])

    def _measured(self) -> Tensor:
        """The Hessian in parameter coordinates, averaged over the chains of a data set."""
        one = 0.5 * (self.hessian + self.hessian.mT)
        return self._shared(self.inverse_root.mT @ one @ self.inverse_root)

    def _curvature(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """A root R of the inverse of H, ``R R^T = H^-1``, and its own inverse."""
        # Scaled to a unit diagonal first: units of parameters may be many powers of ten apart.
        diagonal = h.diagonal(dim1=-2, dim2=-1)
        unit = torch.where(diagonal > 0, diagonal, self.fallback.double()).rsqrt()
        values, vectors = torch.linalg.eigh(unit.unsqueeze(-1) * h * unit.unsqueeze(-2))
        values = torch.where(values > SINGULAR, values, 1.0).unsqueeze(-2)
        return unit.unsqueeze(-1) * vectors * values.rsqrt(), (vectors * values.sqrt()).mT / unit.unsqueeze(-2)

    def conditioning(self) -> dict[str, float]:
        """`condition_numbers` of H."""
        return condition_numbers((self.inverse_root.mT @ self.inverse_root)[self.alive])

    def set_lambda(self, rule: Rule, prior: Tensor, rise: float) -> None:
        fisher = rule.batch_size * self.cov
        root, inverse = self._curvature(fisher + torch.diag_embed(self._shared(prior.double())))
        before = self.worst.direction() if self.worst.count else None
        if self.known:
            old = self.inverse_root
            if all(self.probed):
                found = self._measured()
                root, inverse = rescale(root, inverse, found, believed)
                root, inverse = rescale(root, inverse, fisher, at_least_one)
                root, inverse = rescale(root, inverse, found, partial(soft, rule, self.curvature_ratio))
            root, inverse = rescale(root, inverse, old.mT @ old / rise, at_least_one)
        self.root, self.inverse_root = root, inverse
        self._forget_axes()
        self.factor, self.scale, self.known = rule.factor(self.curvature_ratio), rule.scale, True
        self.cover = 0.0 if rule.full_batch else rule.cover
        self.worst.rescale(before)
        self._inject(rule.tracks_level)
        self.worst.limit_excess()

    def slow(self, factor: Tensor) -> None:
        before = self.worst.direction() if self.worst.count else None
        self.factor = self.factor * factor
        if self.cover and bool((factor < 1.0).any()):  # it must still cover the noise
            least = self.cover / self.factor.double().view(-1, 1, 1) * self.cov
            self.root, self.inverse_root = rescale(self.root, self.inverse_root, least, at_least_one)
            self._forget_axes()
        self.worst.rescale(before)
        self._inject()

    def forget(self, void: bool = False) -> None:
        if void:
            self._forget_axes()
            self.level = self.full(1.0)
        self.worst.forget(void)
        super().forget(void)

    def _forget_axes(self) -> None:
        """Restart the measurement of the Hessian, along new axes."""
        self.hessian = torch.eye(self.total).to(self.root).repeat(self.chains, 1, 1)
        self.probed = [0] * self.total

    def rate_curvatures(self) -> Tensor:
        if not all(self.probed):
            return super().rate_curvatures()
        ratios: Tensor = torch.linalg.eigvalsh(self.root.mT @ self._measured() @ self.root).clamp_min(LEAST)
        return ratios * self.unit_rate.double().unsqueeze(-1)

    def _inject(self, track_level: bool | None = None) -> None:
        """Compute the matrices of a step; with None, ``track_level`` is as before."""
        track_level = self.tracks_level if track_level is None else track_level
        values, vectors = torch.linalg.eigh(self.root.mT @ self.cov @ self.root)
        room = 2.0 * self.factor.double().unsqueeze(-1)
        shares = self.noise_weight * values.clamp_min(0.0) / room
        self.share = (shares > 1.0).to(self.dtype).mean(-1)
        rate = self.unit_rate.double().view(-1, 1, 1)
        self.pull = rate * (self.root @ self.root.mT)
        if track_level:
            self.push = rate * (self.root @ vectors) * room.sqrt().unsqueeze(-1)
            length = values.clamp_min(0.0).sum(-1).clamp_min(torch.finfo(self.dtype).tiny)
            self.shares, self.sight = shares, (self.root.mT * length.rsqrt().view(-1, 1, 1)).contiguous()
        else:
            missing = (vectors * (room * (1.0 - shares)).clamp_min(0.0).sqrt().unsqueeze(-2)) @ vectors.mT
            self.push = rate * (self.root @ missing)
            self.shares = self.sight = self.full(0.0, 0)

    # -- the step -----------------------------------------------------------------------------------------------------

    def direction(self, gradient: Tensor) -> Tensor:
        return times(self.pull, gradient.double())

    def tensors(self) -> tuple[Tensor, ...]:
        level = (self.shares, self.sight, self.level) if self.tracks_level else ()
        return self.pull, self.push, *level

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        pull, push, *local = tensors
        xi = xi.double()
        if local:
            shares, _, level = local
            xi = (1.0 - level.unsqueeze(-1) * shares).clamp_min(0.0).sqrt() * xi
        return times(pull, gradient.double()) + times(push, xi)

    def rates(self) -> Tensor:
        return self.pull.diagonal(dim1=-2, dim2=-1)

    def principal_rates(self) -> Tensor:
        rates: Tensor = torch.linalg.eigvalsh(self.pull)
        return rates

    def clipped(self) -> Tensor:
        return self.share

    # -- the level of the noise ---------------------------------------------------------------------------------------

    @property
    def tracks_level(self) -> bool:
        """Whether every step measures the level of the noise."""
        return self.sight.numel() > 0

    def levels(self, tensors: Sequence[Tensor], level: Tensor, noise: Tensor) -> Tensor:
        """Levels ``[chains]`` after one more flat noise vector: a pure function of tensors, as `displace`."""
        found = times(tensors[3], noise.double()).square().sum(-1)
        return torch.lerp(level, found.to(level), LEVEL_WEIGHT)

    def set_level(self, level: Tensor) -> None:
        self.level = level.to(self.level, copy=True).contiguous()  # not a view of the chains' state

    def track_level(self, noise: Tensor) -> None:
        """Update the level by a flat noise vector of each chain."""
        self.set_level(self.levels(self.tensors(), self.level, noise))

    # -- along a direction --------------------------------------------------------------------------------------------

    def inverse(self, x: Tensor) -> Tensor:
        return times(self.root, times(self.root.mT, x.double())) / self.factor.double().unsqueeze(-1)

    def lambda_along(self, t: Tensor) -> Tensor:
        return self.factor * times(self.inverse_root, t).square().sum(-1)

    def noise_along(self, t: Tensor) -> Tensor:
        return (t * times(self.cov, t)).sum(-1)

    def excess_temperature(self) -> Tensor:
        worst = self.worst
        by_chance: Tensor = self.noise_weight * worst.chance * worst.ratio
        return worst.excess_temperature() - by_chance


def rescale(root: Tensor, inverse: Tensor, other: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Rescale H, given as a root of its inverse and the inverse of that, along its common axes with another matrix.

    ``choose`` gives the factors, from the other matrix over H along each axis.
    """
    values, vectors = torch.linalg.eigh(root.mT @ other @ root)
    values = choose(values).unsqueeze(-2)
    return root @ (vectors * values.rsqrt()), (vectors * values.sqrt()).mT @ inverse


def at_least_one(ratio: Tensor) -> Tensor:
    """The ratio, if H is to grow only."""
    return ratio.clamp_min(1.0)


def believed(ratio: Tensor) -> Tensor:
    """The ratio if it is far from 1, else 1."""
    near = (ratio < BELIEVED) & (ratio > 1.0 / BELIEVED)
    return torch.where(near, 1.0, ratio.clamp_min(LEAST))


def soft(rule: Rule, curvature_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Factor of Lambda for directions in which the curvature is below H, so that only the noise bounds it."""
    needed = torch.minimum(SAFE * ratio.clamp_min(0.0), curvature_ratio.to(ratio).unsqueeze(-1))
    return rule.factor(needed) / rule.factor(curvature_ratio.to(ratio)).unsqueeze(-1)


def condition_numbers(h: Tensor) -> dict[str, float]:
    """Condition numbers that simpler structures leave of curvatures ``[chains, d, d]``; medians over chains.

    They are about the factors by which the slowest direction mixes more slowly. ``single``: one rate; ``diagonal``: one
    for each parameter; ``lowrank``: also one for each of the `RANK` strongest directions.

    Example:
        >>> found = condition_numbers(torch.diag(torch.logspace(0, 6, 30, dtype=torch.float64)).unsqueeze(0))
        >>> {name: round(value) for name, value in found.items()}
        {'single': 1000000, 'diagonal': 1, 'lowrank': 1}
    """
    unit = h.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(h.dtype).tiny).rsqrt()
    raw, scaled = torch.linalg.eigvalsh(h), torch.linalg.eigvalsh(unit.unsqueeze(-1) * h * unit.unsqueeze(-2))
    tiny = torch.finfo(h.dtype).eps
    tops = {"single": (raw, 1), "diagonal": (scaled, 1), "lowrank": (scaled, min(RANK + 1, h.shape[-1]))}
    return {name: float((v[:, -k] / torch.maximum(v[:, 0], tiny * v[:, -1])).median()) for name, (v, k) in tops.items()}
