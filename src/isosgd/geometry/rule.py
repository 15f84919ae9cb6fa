"""The size of Lambda: the discretisation bias of a step, and the rule of every `Geometry`.

The Fisher information of one example, ``F = n Var(g)``, is the curvature of the log likelihood if the model fits.
With the prior's, ``H = n Var(g) + (prior Hessian) / N`` is the curvature of ``f / N``, and

    Lambda = q H,    q = max(what the noise requires, what the allowed bias requires)

makes ``rate * curvature = T / (N q)`` the same in every direction and ``C = Lambda - Var(g) / 2`` positive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

N_ = TypeVar("N_", float, Tensor)

HIGHEST = 0.2  # largest rate * curvature with averaged innovations, for any predicted bias
CHANGE = 11.5  # bias of variances from varying noise, over its share of Lambda and T / N, for a sampled scale
TRACKED = 3.0  # factor on that share, at about the same bias, if the level of the noise is tracked ...
ROOM = 2.0  # ... but least Lambda over B, since measured levels scatter
WORTH = 1.3  # least factor by which tracking must reduce Lambda
WIDE = 0.15  # sqrt(T / N) above which a posterior is too wide for expansions


def variance_inflation(rate_curvature: N_, friction: float = 1.0, share: float = 1.0) -> N_:
    """Stationary variance over target variance for a quadratic potential: ``1 / (1 - rate h / (2 (2 - friction)))``.

    Exact for both steppers (the recursion is linear); infinite if the step is unstable. Injected noise that is averaged
    over two steps adds no bias (Leimkuhler and Matthews 2013): then ``share`` is that of gradient noise in the
    composite noise.

    Example:
        >>> round(variance_inflation(0.04), 4)
        1.0204
    """
    room = 1.0 - rate_curvature / (2.0 * (2.0 - friction))
    if isinstance(room, Tensor):
        return torch.where(room > 0, 1.0 - share + share / room, torch.inf)
    return 1.0 - share + share / room if room > 0 else float("inf")


def allowed_rate_curvature(bias: float, friction: float = 1.0) -> float:
    """The largest ``rate * h`` whose relative variance bias is ``bias``: the inverse of `variance_inflation`."""
    return 2.0 * (2.0 - friction) * bias / (1.0 + bias)


@dataclass(frozen=True)
class Rule:
    """The size of Lambda as a multiple of H.

    Args:
        num_data: N.
        batch_size: n.
        temperature: T.
        bias: the relative error of the posterior variance that the step size may cause.
        averaged: whether innovations are averaged over two steps, so that only the gradient noise causes a bias.
        kappa: least Lambda over the gradient noise B.
        full_batch: whether gradients are those of all data, which have no noise.
        trackable: whether the level of the noise can be tracked from step to step.
    """

    num_data: int
    batch_size: int
    temperature: float
    bias: float
    averaged: bool
    kappa: float = 2.0
    full_batch: bool = False
    trackable: bool = False

    @property
    def scale(self) -> float:
        """``T / N``: rates are this over Lambda, posterior variances this over the curvature."""
        return self.temperature / self.num_data

    @property
    def change(self) -> float:
        """Least Lambda over B because the noise varies over the posterior."""
        # Linear variation averages out, and the quadratic one is of the order of the squared width, T / N.
        return CHANGE * min(self.scale, WIDE * math.sqrt(self.scale)) / self.bias

    @property
    def tracks_level(self) -> bool:
        """Whether to track the level of the noise."""
        if not self.trackable or self.full_batch:
            return False
        one = torch.ones(())
        return bool(self._factor(one, self._average) > WORTH * self._factor(one, self._local))

    @property
    def _average(self) -> float:
        """Least Lambda over B if the average noise is subtracted."""
        return max(self.kappa, self.change)

    @property
    def _local(self) -> float:
        """Least Lambda over B if the level of the noise is tracked."""
        return max(self.kappa, ROOM, self.change / TRACKED)

    @property
    def cover(self) -> float:
        """Least Lambda over ``Var(g)``."""
        return 0.5 * (self._local if self.tracks_level else self._average)

    def factor(self, curvature_ratio: Tensor) -> Tensor:
        """q, if the true curvature is up to ``curvature_ratio`` times H."""
        if self.full_batch:  # so that the step is 1 if the curvature is H
            return torch.full_like(curvature_ratio, 2.0 * self.scale)
        return self._factor(curvature_ratio, 2.0 * self.cover)

    def _factor(self, curvature_ratio: Tensor, cover: float) -> Tensor:
        """q, for a least Lambda over B of ``cover``."""
        noise, variance = 0.5 * cover / self.batch_size, self.scale * curvature_ratio
        if not self.averaged:
            return (variance / allowed_rate_curvature(self.bias)).clamp_min(noise)
        # Gradient noise has the share s = 1 / (2 n q) of Lambda and inflates variances by s a / 2, a = variance / q.
        by_bias = (variance / (4.0 * self.batch_size * self.bias)).sqrt()
        return torch.maximum(variance / HIGHEST, by_bias).clamp_min(noise)


def damped(h: Tensor, damping: float, slots: Sequence[slice]) -> Tensor:
    """Curvatures ``[chains, d]`` plus a share of each layer's mean."""
    out = h.clone()
    for slot in slots:
        out[:, slot] += damping * h[:, slot].mean(-1, keepdim=True)
    return out
