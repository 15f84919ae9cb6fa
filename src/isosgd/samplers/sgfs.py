"""Stochastic gradient Fisher scoring (Ahn, Korattikara, Welling 2012), with a diagonal matrix.

    theta <- theta - lr P (g + w),    P = Var(g)^-1,    Cov(w) = (2 T / (N lr) - 1 - n T / N) Var(g)

In the notation of Theorem 1: P ~ B^-1, C = (T / (N lr) - 1/2 - n T / (2 N)) Var(g). Their step is ``2 (gamma N I +
4 B / epsilon)^-1`` for the full gradient, with ``gamma = (n + N) / n`` and I the Fisher information: the same, with I =
n Var(g), T = 1 and the user's matrix B, which sets the rate, a multiple of I. The term ``n T / N`` is what makes it
exact, at any rate, where the curvature of f / N is I. With a full matrix: `isosgd.samplers.full_sgfs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.noise import join
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.planning import Move
from isosgd.samplers.preconditioned import Preconditioned
from isosgd.samplers.sgld import SGLD
from isosgd.samplers.steppers import Number
from isosgd.samplers.structure import diagonal_scale

TINY = 1e-30  # a variance that has no inverse


class Scoring(SGLD):
    """What the diagonal and the full form have in common, see `SGFS`."""

    targets = "exp(-f / T) where the curvature is the Fisher information"

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        lr: float | None = None,
        batch_size: int | None = None,
        floor: float = 0.01,
        **settings: Any,
    ) -> None:
        if not 0 < floor < 1:
            raise ValueError(f"floor = {floor} must lie in (0, 1): the least variance, over the mean of its tensor")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size = {batch_size} must be at least 1")
        self.batch_size, self.floor = batch_size, floor
        super().__init__(params, num_data=num_data, temperature=temperature, lr=lr, **settings)

    def _taken(self, group: Group) -> float:
        """What is subtracted from the injected noise, in units of Var(g): ``1 + n T / N``."""
        return 1.0 + float((self.batch_size or 0) * group["temperature"] / group["num_data"])


class SGFS(Preconditioned, Scoring):
    """Fisher scoring with the variance of each parameter's gradient noise.

    Targets ``exp(-f / T)`` when P is constant, gradient noise is independent between parameters, and the curvature k
    of f / N is the Fisher information ``n Var(g)``. Where it is not, variances are off by the factor
    ``(2 - rate n) / (2 - rate k)``, both in the metric (n = 0 when ``batch_size`` is not given); `adapt` keeps that,
    and the heat of correlated noise, below ``bias``.

    Departures from the paper: P comes from the noise vectors, of which every method here has a running mean, and is
    constant once rates are frozen; the matrix B is a multiple of Var(g), chosen by the rate; P has a floor; T.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N.
        temperature: T.
        lr: the rate, which must be below ``2 T / N``; left out, `adapt` sets it.
        batch_size: n. Without it the step is exact to first order in the rate only.
        floor: least variance in P, over the mean of its tensor (of the matrix), for directions without noise.
        settings: those of `SGLD` and the settings common to all samplers, see `Sampler`.
    """

    def _variance(self, p: Tensor) -> Tensor:
        if "variance" not in self.state.get(p, {}):
            self._seen_noise(next(group for group in self.param_groups if any(p is q for q in group["params"])))
        return self.estimator.variance([self.state[p]])[0]

    def _metric(self, p: Tensor) -> Tensor:
        v = self._variance(p)
        mean = v.reshape(len(v), -1).mean(1).view(-1, *([1] * (v.dim() - 1))) if self.batched else v.mean()
        return 1.0 / torch.maximum(v, self.floor * mean).clamp_min(TINY)

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        if self.given or curvature is None:
            super().adapt(curvature, rise)
            return
        for group, h in zip(self.param_groups, curvature, strict=True):
            noise = self._variances(group)
            taken = 0.5 * self._taken(group) * join(noise, self.batched).amax(-1)
            left = self.excess_noise(group, noise) / self.bias
            self._fit_rate(group, h * self.stretch(group), taken + left, rise)

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        noise = join([self._metric(p) * self._variance(p) for p in params], self.batched)
        return Move(self.rate(group), 1.0, scale=diagonal_scale(self.composite(group), self._taken(group) * noise))
