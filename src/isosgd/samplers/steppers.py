"""The two steppers of the library, in mean-gradient units. A sampler only says what its rate, C and friction are.

Theorem 1 (no momentum): ``theta -= rate (g + w)``, ``w ~ N(0, 2 C)``. With gradient noise ``Var(g) = 2 B`` it targets
``exp(-f / T)`` when ``rate = T / (N Sigma)``, ``Sigma = B + C`` constant.

Theorem 2 (momentum, in velocity form): ``v <- (1 - a) v - rate (g + w)``, ``theta += v``. It targets ``exp(-f / T)``
when ``Sigma = a T / (N rate)``. At ``a = 1`` it is the first stepper.

Both are discrete: for curvature ``h`` of ``f / N`` the stationary variance is larger than it should be by
`variance_inflation`.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

# A number for a whole group: a float, a scalar tensor (capturable), or a tensor [chains].
Number = float | Tensor
N_ = TypeVar("N_", float, Tensor)


def over_chains(value: Number) -> Number:
    """A group's number in the form that broadcasts against flat tensors ``[chains, d]``."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() else value


def spread(value: Number, tensors: list[Tensor]) -> float | Tensor | list[Tensor]:
    """A group's number in the form that foreach operations take; ``[chains]`` is shaped to each tensor."""
    if isinstance(value, float | int):
        return float(value)
    if value.dim() == 0:
        return value
    return [value.view(-1, *([1] * (t.dim() - 1))) for t in tensors]


def scale_(tensors: list[Tensor], value: Number) -> None:
    """``tensors *= value``."""
    torch._foreach_mul_(tensors, spread(value, tensors))


def add_scaled_(y: list[Tensor], x: list[Tensor], factor: list[float]) -> None:
    """``y_i += factor_i x_i`` for floats, in one call."""
    if factor.count(factor[0]) == len(factor):
        torch._foreach_add_(y, x, alpha=factor[0])
    else:  # of the foreach operations only this one takes a factor for each tensor
        torch._foreach_addcmul_(y, x, [torch.ones((), dtype=x[0].dtype, device=x[0].device)] * len(x), factor)


def langevin_(
    theta: list[Tensor],
    grad: list[Tensor],
    xi: list[Tensor],
    rate: Number | list[float],
    amplitude: Number | list[float] = 1.0,
    scale: list[Tensor] | None = None,
) -> None:
    """``theta -= rate (grad + amplitude * scale * xi)`` in place; ``xi`` may be overwritten.

    Rate and amplitude are one number for all tensors, or a list of floats, one for each.
    """
    if not isinstance(rate, Tensor) and not isinstance(amplitude, Tensor):  # two passes over memory
        rates = rate if isinstance(rate, list) else [rate] * len(theta)
        amplitudes = amplitude if isinstance(amplitude, list) else [amplitude] * len(theta)
        add_scaled_(theta, grad, [-r for r in rates])
        factors = [-r * a for r, a in zip(rates, amplitudes, strict=True)]
        if scale is not None:
            torch._foreach_addcmul_(theta, xi, scale, factors)
        elif any(factors):
            add_scaled_(theta, xi, factors)
        return
    assert not isinstance(rate, list) and not isinstance(amplitude, list)
    if scale is not None:
        torch._foreach_mul_(xi, scale)
    scale_(xi, amplitude)
    torch._foreach_add_(xi, grad)
    scale_(xi, rate)
    torch._foreach_sub_(theta, xi)


def hamiltonian_(
    theta: list[Tensor],
    velocity: list[Tensor],
    grad: list[Tensor],
    xi: list[Tensor],
    rate: Number | list[float],
    friction: float,
    amplitude: Number | list[float] = 1.0,
    scale: list[Tensor] | None = None,
) -> None:
    """``v <- (1 - friction) v - rate (grad + amplitude * scale * xi)``, ``theta += v``; ``xi`` may be overwritten."""
    torch._foreach_mul_(velocity, 1.0 - friction)
    langevin_(velocity, grad, xi, rate, amplitude, scale)
    torch._foreach_add_(theta, velocity)


def variance_inflation(rate_curvature: N_, friction: float = 1.0) -> N_:
    """Stationary variance over target variance for a quadratic potential: ``1 / (1 - rate h / (2 (2 - friction)))``.

    Exact for both steppers (the recursion is linear); infinite where the step is unstable.

    Example:
        >>> round(variance_inflation(0.04), 4)
        1.0204
    """
    room = 1.0 - rate_curvature / (2.0 * (2.0 - friction))
    if isinstance(room, Tensor):
        return torch.where(room > 0, 1.0 / room, torch.inf)
    return 1.0 / room if room > 0 else float("inf")


def allowed_rate_curvature(bias: float, friction: float = 1.0) -> float:
    """The largest ``rate * h`` whose relative variance bias is ``bias``: the inverse of `variance_inflation`."""
    return 2.0 * (2.0 - friction) * bias / (1.0 + bias)
