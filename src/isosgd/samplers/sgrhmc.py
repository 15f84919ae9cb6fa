"""Stochastic gradient Riemannian HMC (Ma, Chen, Fox 2015), for a diagonal metric, in velocity form.

    v <- (1 - a P^2) v - lr (P g - c (T / N) div P + P w),    theta <- theta + P v,    P = G(theta)^-1/2

In the notation of Theorem 2: friction ``A = a P^2``, so that the composite noise ``a T / (N lr)`` that it requires is
constant, Cov(w) = 2 a T / (N lr) I - [Var(g)]; ``(div P)_i = d P_i / d theta_i`` by autograd. With step epsilon of the
underlying dynamics ``lr = N epsilon^2``, and their own friction is the case ``a = epsilon``, for which the weight c
tends to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.noise.model import Summary
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.metric import DiagonalMetric
from isosgd.samplers.program import StepProgram
from isosgd.samplers.sgrld import Field, Metric, scales
from isosgd.samplers.steppers import langevin_


class SGRHMC(Sampler):
    """SGHMC in a metric that the user gives as a function of theta.

    Targets ``exp(-f / T)`` as ``lr -> 0``. At a fixed rate the variance is too large by ``rate h P^2 / 2`` or less, and
    without the correction by ``rate N b / (a T)``; `adapt` keeps each below ``bias`` for the metric at the chain's
    position then. Without a metric it is SGHMC.

    Departures from the paper: theta moves with P at the midpoint, and the divergence has a weight (see
    `divergence_weight`), without which the error would not vanish with the rate at a fixed friction a; friction, with
    its noise, is clipped at 1 where the metric is large.

    Args:
        friction: a in (0, 1].
        metric: a function from a parameter to the diagonal of ``G^-1``, that is ``P^2``, in its shape; see
            `isosgd.samplers.sgrld.Field`. It is not saved.
        coupled: whether an entry of it depends on other entries of the parameter.
        corrected: subtract the measured gradient noise from the injected noise, as in `SGHMC`.
        settings: those of every `Sampler`.
    """

    family = "hamiltonian"
    paper = "Ma, Chen, Fox 2015"
    departures = "any diagonal metric; free friction, cut at 1"

    def __init__(
        self,
        params: ParamsLike,
        *,
        friction: float = 0.1,
        metric: Metric | None = None,
        coupled: bool = False,
        corrected: bool = False,
        **settings: Any,
    ) -> None:
        self.field = Field(metric, coupled, settings.get("chains") is not None)
        super().__init__(params, friction=friction, corrected=corrected, **settings)
        self.metric = DiagonalMetric(self.noise, self.field.value)

    def noise_summary(self, group: Group, how: Summary) -> Tensor:
        return self.noise.summary(group, how)  # the metric in the friction cancels it

    def _program(self) -> StepProgram | str:
        return "its metric depends on the position of the chain"

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        scale, fields = scales(self), [self.field.at(p, 0.5) for p in params]
        velocity = [self.velocity(p) for p in params]
        friction = [(self.friction * m.square()).clamp(max=1.0) for m, _ in fields]
        drift = [
            m * g - scale[p] * divergence_weight(f) * d
            for (m, d), g, p, f in zip(fields, grads, params, friction, strict=True)
        ]
        if kick is not None:
            kick = [k * (f / self.friction).sqrt() for k, f in zip(kick, friction, strict=True)]
        torch._foreach_mul_(velocity, [1.0 - f for f in friction])
        langevin_(velocity, drift, rate, kick)
        halfway = [p + 0.5 * m * v for p, (m, _), v in zip(params, fields, velocity, strict=True)]
        langevin_(params, [self.field.metric(x).sqrt() * v for x, v in zip(halfway, velocity, strict=True)], -1.0)


def divergence_weight(friction: Tensor) -> Tensor:
    """Factor of div P for a friction c per step that is not small: ``1 + 2 c / (2 - c)``, or 1 where it is clipped.

    Averaged over the velocity, whose variance is ``2 / (2 - c)`` of the continuous one, theta diffuses by ``P^2 / c``.
    For the drift to be the divergence of this it takes ``(T / N) (P' + P c' / (2 - c))``, here with ``c = a P^2``.
    """
    return torch.where(friction < 1.0, 1.0 + 2.0 * friction / (2.0 - friction), 1.0)
