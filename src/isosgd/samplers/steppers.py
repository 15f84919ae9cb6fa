"""The two steppers of all samplers, for gradients of the mean loss. A sampler provides its rate, C and friction.

Theorem 1 (no momentum): ``theta -= rate (g + w)``, ``w ~ N(0, 2 C)``. With gradient noise ``Var(g) = 2 B`` it targets
``exp(-f / T)`` when ``rate = T / (N Sigma)``, ``Sigma = B + C`` constant.

Theorem 2 (momentum, in velocity form): ``v <- (1 - a) v - rate (g + w)``, ``theta += v``. It targets ``exp(-f / T)``
when ``Sigma = a T / (N rate)``. At ``a = 1`` it is the first stepper.

Both take the injected noise as the *kick* ``rate w``. For curvature ``h`` of ``f / N`` the stationary variance is too
large by the factor `isosgd.geometry.rule.variance_inflation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.geometry.layer import Number


def spread(value: Number, tensors: list[Tensor]) -> float | Tensor | list[Tensor]:
    """A group's number as foreach operations take it; ``[chains]`` is broadcast to each tensor."""
    if isinstance(value, float | int):
        return float(value)
    if value.dim() == 0:
        return value
    return [value.view(-1, *([1] * (t.dim() - 1))) for t in tensors]


def add_scaled_(y: list[Tensor], x: list[Tensor], factor: list[float]) -> None:
    """``y_i += factor_i x_i`` for floats, in one call."""
    if factor.count(factor[0]) == len(factor):
        torch._foreach_add_(y, x, alpha=factor[0])
    else:  # the only foreach operation with a factor for each tensor
        torch._foreach_addcmul_(y, x, [torch.ones((), dtype=x[0].dtype, device=x[0].device)] * len(x), factor)


def langevin_(
    theta: list[Tensor], grad: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None = None
) -> None:
    """``theta -= rate grad + kick`` in place. The rate is one for all tensors, or a list of floats, one for each."""
    if isinstance(rate, Tensor):
        torch._foreach_sub_(theta, torch._foreach_mul(grad, spread(rate, grad)))
    else:
        rates = rate if isinstance(rate, list) else [rate] * len(theta)
        add_scaled_(theta, grad, [-r for r in rates])
    if kick is not None:
        torch._foreach_sub_(theta, kick)


def hamiltonian_(
    theta: list[Tensor],
    velocity: list[Tensor],
    grad: list[Tensor],
    rate: Number | list[float],
    friction: float,
    kick: list[Tensor] | None = None,
) -> None:
    """``v <- (1 - friction) v - rate grad - kick``, ``theta += v``, in place."""
    torch._foreach_mul_(velocity, 1.0 - friction)
    langevin_(velocity, grad, rate, kick)
    torch._foreach_add_(theta, velocity)
