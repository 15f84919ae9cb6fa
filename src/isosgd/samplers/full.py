"""Lambda as a full matrix: every direction of a small posterior at its own rate, exactly."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from isosgd.samplers.full_step import FullStep
from isosgd.samplers.reshaping import LEAST, at_least_one, believed, condition_numbers, reshape, soft
from isosgd.samplers.rows import times
from isosgd.samplers.rule import Rule

SINGULAR = 1e-12  # eigenvalues of H, scaled to a unit diagonal, below which the noise says nothing of a direction


class Full(FullStep):
    """One matrix over all parameters; for up to a few hundred of them.

    The Fisher information is checked against the Hessian, axis by axis of the basis in which H is the identity (see
    `learn`), and gives way to it where they are far apart: gradient noise may lack directions that the posterior has,
    or have directions of its own. Where it has, Lambda still covers it, but is no larger than that takes: without
    curvature there is no bias to fear.

    Chains of one data set share what they have seen: so many numbers take many noise vectors to estimate.

    Everything is kept in float64, since raw regressions have condition numbers of 1e11 and more. The noise covariance
    goes on being averaged while draws are taken, so that ``C = Lambda - B`` gets better and better; Lambda is fixed.
    """

    name = "full"
    kappa = 1.25  # all of the noise is known, and its correlations
    kept = (*FullStep.kept, "hessian", "probed", "cover")

    def prepare(self) -> None:
        super().prepare()
        d = self.total
        self.hessian = torch.eye(d).to(self.cov).repeat(self.chains, 1, 1)  # of each chain, in the basis of its axes
        self.probed = [0] * d
        self.cover = 0.0  # Lambda over Var(g), at the least

    @property
    def least(self) -> int:
        # With four times as many vectors as numbers, eigenvalues are right within a factor of (1 - 1/2)^2.
        return max(20, -(-4 * self.total * self.sets // self.chains))

    def _shared(self, x: Tensor) -> Tensor:
        """The mean over the chains of each data set, for each of them."""
        each = x.view(self.sets, -1, *x.shape[1:])
        alive = self.alive.view(self.sets, -1, *([1] * (x.dim() - 1)))
        weight, each = alive.to(x.dtype), torch.where(alive, each, 0.0)  # what a lost chain says may not be finite
        mean = each.sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1.0)
        return mean.expand_as(each).reshape(x.shape)

    def take(self, noise: Tensor) -> None:
        d = noise.double()
        self.cov.lerp_(self._shared(d.unsqueeze(-1) * d.unsqueeze(-2)), 1.0 / (self.seen + 1))
        count = self.seen + 1
        if self.known:
            self.look(d)
        if self.local:
            self.attend(noise)
        if self.known and count >= self.least and count & (count - 1) == 0:
            self._inject()

    # -- the Hessian ----------------------------------------------------------------------------------------------

    @property
    def axes(self) -> int:
        return self.total

    def axis(self, i: int) -> Tensor:
        return self.root[..., i]

    def learn(self, i: int, change: Tensor) -> None:
        self.probed[i] += 1
        self.hessian[..., i].lerp_(times(self.root.mT, change.double()), 1.0 / self.probed[i])

    def _measured(self) -> Tensor:
        """The Hessian as all chains of a data set have measured it, each along axes of its own."""
        one = 0.5 * (self.hessian + self.hessian.mT)
        return self._shared(self.inverse_root.mT @ one @ self.inverse_root)

    def _curvature(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """A root R of the inverse of H, ``R R^T = H^-1``, and its own inverse."""
        # Scaled to a unit diagonal first: parameters may have units that are many powers of ten apart.
        diagonal = h.diagonal(dim1=-2, dim2=-1)
        unit = torch.where(diagonal > 0, diagonal, self.fallback.double()).rsqrt()
        values, vectors = torch.linalg.eigh(unit.unsqueeze(-1) * h * unit.unsqueeze(-2))
        values = torch.where(values > SINGULAR, values, 1.0).unsqueeze(-2)
        return unit.unsqueeze(-1) * vectors * values.rsqrt(), (vectors * values.sqrt()).mT / unit.unsqueeze(-2)

    def conditioning(self) -> dict[str, float]:
        """Condition numbers that simpler shapes would leave."""
        return condition_numbers((self.inverse_root.mT @ self.inverse_root)[self.alive])

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        fisher = rule.batch_size * self.cov
        root, inverse = self._curvature(fisher + torch.diag_embed(self._shared(prior.double())))
        outside = self.worst() if self.looks else None
        if self.known:
            old = self.inverse_root
            if all(self.probed):
                found = self._measured()
                root, inverse = reshape(root, inverse, found, believed)
                root, inverse = reshape(root, inverse, fisher, at_least_one)
                root, inverse = reshape(root, inverse, found, partial(soft, rule, self.stretch))
            # Rates fall at once and rise slowly.
            root, inverse = reshape(root, inverse, old.mT @ old / rise, at_least_one)
        self.root, self.inverse_root = root, inverse
        self._forget_axes()
        self.factor, self.scale, self.known = rule.factor(self.stretch), rule.scale, True
        self.cover = 0.0 if rule.whole else rule.cover
        if outside is not None:
            self.measured_anew(outside)
        self._inject(rule.follows)
        self.cool()

    def slow(self, factor: Tensor) -> None:
        outside = self.worst() if self.looks else None
        self.factor = self.factor * factor
        if self.cover and bool((factor < 1.0).any()):  # where Lambda was as small as noise allows, it stays so
            least = self.cover / self.factor.double().view(-1, 1, 1) * self.cov
            self.root, self.inverse_root = reshape(self.root, self.inverse_root, least, at_least_one)
            self._forget_axes()
        if outside is not None:
            self.measured_anew(outside)
        self._inject()

    def forget(self, void: bool = False) -> None:
        if void:
            self._forget_axes()
        super().forget(void)

    def _forget_axes(self) -> None:
        """Measure the Hessian anew: the axes are others."""
        self.hessian = torch.eye(self.total).to(self.root).repeat(self.chains, 1, 1)
        self.probed = [0] * self.total

    def rate_curvatures(self) -> Tensor:
        if not all(self.probed):
            return super().rate_curvatures()
        ratios: Tensor = torch.linalg.eigvalsh(self.root.mT @ self._measured() @ self.root).clamp_min(LEAST)
        return ratios * self.unit_rate.double().unsqueeze(-1)
