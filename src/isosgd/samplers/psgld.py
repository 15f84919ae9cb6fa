"""Preconditioned SGLD (Li, Chen, Carlson, Carin 2016).

    V <- alpha V + (1 - alpha) g^2,    P = 1 / (eps + sqrt(V))
    theta <- theta - lr P (g + w),    w ~ N(0, 2 T / (N lr P))

In the notation of Theorem 1: P is that of RMSprop, C = T / (N lr P). Their step epsilon_t is ``2 lr_t / N`` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.noise.estimators import MovingAverage, state_dtype
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.metric import DiagonalMetric, check_eps, rms_metric
from isosgd.samplers.program import StepProgram, Tensors
from isosgd.samplers.schedules import Annealing


class PSGLD(Sampler):
    """SGLD with the preconditioner of RMSprop, without the drift for its dependence on theta.

    Targets ``exp(-f / T)`` only if V hardly depends on theta, that is if gradient noise exceeds the gradient.
    Otherwise, as ``lr -> 0`` and for independent parameters, the density is ``exp(-f / T) / P(theta)``, which is too
    wide, since P is smallest far from the mode: without gradient noise a Gaussian's variance doubles. The errors of
    SGLD at a fixed rate, ``rate h / 2`` and ``rate N b / T`` in the metric, add to this; `adapt` keeps each below
    ``bias``.

    Departures from the paper: V starts as a plain average, so that its start value has no effect; its gradients
    include the prior's.

    Args:
        alpha: memory of V.
        eps: the paper's lambda, which bounds P, in the units of a mean gradient.
        decay: exponent of the annealing, 0 for a fixed rate.
        offset: steps after which the rate begins to fall.
        settings: those of every `Sampler`.
    """

    targets = "exp(-f / T) / P(theta), near exp(-f / T) where gradient noise exceeds the gradient"
    paper = "Li et al. 2016"
    departures = "V starts as a plain average; the prior is part of its gradient"

    def __init__(
        self,
        params: ParamsLike,
        *,
        alpha: float = 0.99,
        eps: float = 1e-5,
        decay: float = 0.0,
        offset: float = 1000.0,
        **settings: Any,
    ) -> None:
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha = {alpha} must lie in [0, 1): the memory of the preconditioner")
        self.average, self.eps = MovingAverage(alpha), check_eps(eps)
        counter = {"gradients": 0}  # averaged in V
        super().__init__(params, schedule=Annealing(decay, offset), extra=counter, **settings)
        self.metric = DiagonalMetric(self.noise, self._metric, self._learn)

    def square(self, p: Tensor) -> Tensor:
        return self.kept_like(p, "square", state_dtype(p))

    def _metric(self, p: Tensor) -> Tensor:
        return rms_metric(self.square(p), self.eps)

    def _learn(self, group: Group, params: list[Tensor]) -> None:
        squares = [{"variance": self.square(p)} for p in params]
        self.average.update(squares, [p.grad for p in params], group["gradients"])  # type: ignore[misc]
        group["gradients"] += 1

    def _program(self) -> StepProgram | str:
        if any(p.dtype.itemsize < 4 for group in self.param_groups for p in group["params"]):
            return "the preconditioner needs float32"
        if len({group["gradients"] for group in self.param_groups}) > 1:
            return "groups have seen different numbers of gradients"
        return RMSProgram(self)


class RMSProgram(StepProgram):
    """Steps of `PSGLD`. The state also has V and the number of gradients in it."""

    def __init__(self, sampler: PSGLD) -> None:
        super().__init__(sampler)
        self.eps, self.least_weight = sampler.eps, 1.0 - sampler.average.momentum
        self.squares = [sampler.square(p) for p in self.params]

    def memory(self) -> list[list[Tensor]]:
        return [self.squares]

    def numbers(self) -> list[Tensor]:
        return [torch.full((self.chains,), self.sampler.param_groups[0]["gradients"])]

    def count(self, steps: int) -> None:
        super().count(steps)
        for group in self.sampler.param_groups:
            group["gradients"] += steps

    def tensors(self) -> Tensors:
        return (self.rates(),)

    def move(self, state: Tensor, gradient: Tensor, noise: Tensor | None, xi: Tensor, tensors: Tensors) -> Tensor:
        theta, square, seen = torch.split(state, [self.dim, self.dim, 1], -1)
        square = torch.lerp(square, gradient.square(), (1.0 / (seen + 1.0)).clamp_min(self.least_weight))
        metric = rms_metric(square, self.eps)
        theta = theta - tensors[0] * (metric * gradient) - metric.sqrt() * xi
        return torch.cat([theta, square, seen + 1.0], -1).to(state.dtype)
