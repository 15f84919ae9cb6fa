"""Preconditioned SGLD (Li, Chen, Carlson, Carin 2016).

    V <- alpha V + (1 - alpha) g^2,    P = 1 / (eps + sqrt(V))
    theta <- theta - lr P (g + w),    w ~ N(0, 2 T / (N lr P))

In the notation of Theorem 1: P is that of RMSprop, C = T / (N lr P). Their step epsilon_t is ``2 lr_t / N`` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.noise import MovingAverage
from isosgd.noise.estimators import state_dtype
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.injection import Move
from isosgd.samplers.metric import DiagonalMetric, rms_metric
from isosgd.samplers.program import StepProgram
from isosgd.samplers.schedules import Annealing


class PSGLD(Sampler):
    """SGLD with the preconditioner of RMSprop, whose divergence it drops.

    Targets ``exp(-f / T)`` only where V hardly depends on theta, that is where gradient noise exceeds the gradient
    itself. Otherwise, as ``lr -> 0`` and for independent parameters, the density is ``exp(-f / T) / P(theta)``: too
    wide, since P is smallest far from the mode; without any gradient noise a Gaussian's variance doubles. On top of it
    come SGLD's errors of a fixed rate, ``rate h / 2`` and ``rate N b / T``, in the metric; `adapt` keeps each below
    ``bias``.

    Departures from the paper: V starts as a plain average, so that its start value leaves no trace; the gradient in it
    has the prior's part.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N.
        temperature: T.
        lr: the rate; left out, `adapt` sets it.
        alpha: memory of V.
        eps: the paper's lambda, which bounds P. It has the units of a mean gradient.
        decay: exponent of the annealing, 0 for a fixed rate.
        offset: steps after which the annealing sets in.
        settings: the settings common to all samplers, see `Sampler`.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> sampler = PSGLD(net.named_parameters(), num_data=100, lr=1e-3)
        >>> net(torch.ones(5, 2)).square().mean().backward()
        >>> _ = sampler.step()
    """

    targets = "exp(-f / T) / P(theta), near exp(-f / T) where gradient noise exceeds the gradient"

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        lr: float | None = None,
        alpha: float = 0.99,
        eps: float = 1e-5,
        decay: float = 0.0,
        offset: float = 1000.0,
        **settings: Any,
    ) -> None:
        if not eps > 0:
            raise ValueError(f"eps = {eps} must be positive: it bounds the preconditioner")
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha = {alpha} must lie in [0, 1): the memory of the preconditioner")
        self.average, self.eps = MovingAverage(alpha), eps
        super().__init__(
            params,
            num_data=num_data,
            temperature=temperature,
            lr=lr,
            schedule=Annealing(decay, offset),
            extra={"gradients": 0},  # that V is made of
            **settings,
        )
        self.metric = DiagonalMetric(self.noise, self._metric, self._learn)

    def _program(self) -> StepProgram | str:
        return "its metric is made of every gradient"

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        return self._plain(group)

    def _learn(self, group: Group, params: list[Tensor]) -> None:
        squares = [{"variance": self._square(p)} for p in params]
        self.average.update(squares, [p.grad for p in params], group["gradients"])  # type: ignore[misc]
        group["gradients"] += 1

    def _square(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "square" not in state:
            state["square"] = torch.zeros_like(p, dtype=state_dtype(p))
        square: Tensor = state["square"]
        return square

    def _metric(self, p: Tensor) -> Tensor:
        return rms_metric(self._square(p), self.eps)
