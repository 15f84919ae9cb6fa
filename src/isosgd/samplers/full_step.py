"""A Lambda that is a full matrix, and its step; `isosgd.samplers.full` finds it.

With a root R of the inverse of H, ``R R^T = H^-1``, Lambda is q I in the coordinates ``R^-1 theta``, and gradient noise
is nearly so.

*The level of the noise.* With few data the noise is not the same over the posterior, and B is not what it is on
average. Its shape hardly changes, but its level does, all the more where a noise scale is sampled. So the level may be
followed: the squared length ``d . H^-1 d`` of the noise vectors of the last few steps over what it is on average. So
many times B is left out of the injected noise, which is right for each place on average, and that is all that Theorem
1 asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.outside import Outside
from isosgd.samplers.rows import times

PACE = 0.25  # weight of a new noise vector in the level of the noise: that of the last few steps


class FullStep(Outside):
    """A full Lambda, and what a step makes of it. Everything is kept in float64.

    A subclass sets ``cov``, the covariance of the noise, ``root`` and ``inverse_root``, then calls `_inject`.
    """

    kept = (*Outside.kept, "cov", "root", "inverse_root", "pull", "push", "share", "level", "shares", "sight")

    def prepare(self) -> None:
        super().prepare()
        self.cov = self.full(0.0, self.total, self.total).double()
        self.root, self.inverse_root = torch.zeros_like(self.cov), torch.zeros_like(self.cov)
        self.pull, self.push = torch.zeros_like(self.cov), torch.zeros_like(self.cov)
        self.share = self.full(0.0)
        self.level = self.full(1.0)  # of the noise, over its average
        # Shares of the noise in Lambda, and what it is seen by; empty where its level is not followed.
        self.shares = self.sight = self.full(0.0, 0)

    def _inject(self, follow: bool | None = None) -> None:
        """The matrices of a step.

        Args:
            follow: whether the level of the noise is followed; as before, when not given.
        """
        follow = self.local if follow is None else follow
        values, vectors = torch.linalg.eigh(self.root.mT @ self.cov @ self.root)
        room = 2.0 * self.factor.double().unsqueeze(-1)
        shares = self.weight * values.clamp_min(0.0) / room
        self.share = (shares > 1.0).to(self.dtype).mean(-1)
        rate = self.unit_rate.double().view(-1, 1, 1)
        self.pull = rate * (self.root @ self.root.mT)
        if follow:
            self.push = rate * (self.root @ vectors) * room.sqrt().unsqueeze(-1)
            length = values.clamp_min(0.0).sum(-1).clamp_min(torch.finfo(self.dtype).tiny)
            self.shares, self.sight = shares, self.root.mT * length.rsqrt().view(-1, 1, 1)
        else:
            missing = (vectors * (room * (1.0 - shares)).clamp_min(0.0).sqrt().unsqueeze(-2)) @ vectors.mT
            self.push = rate * (self.root @ missing)
            self.shares = self.sight = self.full(0.0, 0)

    # -- the step -----------------------------------------------------------------------------------------------------

    def direction(self, gradient: Tensor) -> Tensor:
        return times(self.pull, gradient.double())

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.pull, self.push, self.shares, self.sight, self.level) if self.local else (self.pull, self.push)

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
    def local(self) -> bool:
        """Whether the level of the noise is followed, so that every step has to measure it."""
        return self.sight.numel() > 0

    def levels(self, tensors: Sequence[Tensor], level: Tensor, noise: Tensor) -> Tensor:
        """Levels after one more flat noise vector, ``[chains]``: a function of tensors alone, as `displace`.

        Of those that a step takes they are the last.
        """
        found = times(tensors[3], noise.double()).square().sum(-1)
        return torch.lerp(level, found.to(level), PACE)

    def take_level(self, level: Tensor) -> None:
        """Go on from such levels."""
        self.level = level.to(self.level, copy=True).contiguous()  # not a column of what chains are

    def attend(self, noise: Tensor) -> None:
        """Take in a flat noise vector of each chain for the level alone."""
        self.take_level(self.levels(self.tensors(), self.level, noise))

    def forget(self, void: bool = False) -> None:
        if void:
            self.level = self.full(1.0)
        super().forget(void)

    def load(self, state: dict[str, Any]) -> None:
        super().load({name: getattr(self, name) for name in ("level", "shares", "sight")} | state)  # some are older

    # -- along a direction --------------------------------------------------------------------------------------------

    def inverse(self, x: Tensor) -> Tensor:
        return times(self.root, times(self.root.mT, x.double())) / self.factor.double().unsqueeze(-1)

    def lambda_along(self, t: Tensor) -> Tensor:
        return self.factor * times(self.inverse_root, t).square().sum(-1)

    def noise_along(self, t: Tensor) -> Tensor:
        return (t * times(self.cov, t)).sum(-1)

    def excess(self) -> Tensor:
        return super().excess() - self.weight * self.chance * self.most
