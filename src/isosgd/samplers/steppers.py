"""The two steppers of the library, in mean-gradient units. A sampler only says what its rate, C and friction are.

Theorem 1 (no momentum): ``theta -= rate (g + w)``, ``w ~ N(0, 2 C)``. With gradient noise ``Var(g) = 2 B`` it targets
``exp(-f / T)`` when ``rate = T / (N Sigma)``, ``Sigma = B + C`` constant.

Theorem 2 (momentum, in velocity form): ``v <- (1 - a) v - rate (g + w)``, ``theta += v``. It targets ``exp(-f / T)``
when ``Sigma = a T / (N rate)``. At ``a = 1`` it is the first stepper.

Both are discrete: for curvature ``h`` of ``f / N`` the stationary variance is larger than it should be by
`variance_inflation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

# A number for a whole group: a float, a scalar tensor (capturable), or a tensor [chains].
Number = float | Tensor
N_ = TypeVar("N_", float, Tensor)


def over_chains(value: Number) -> Number:
    """A group's number in the form that broadcasts against flat tensors ``[chains, d]``."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() else value


def spread(value: Number, tensors: Sequence[Tensor]) -> float | Tensor | list[Tensor]:
    """A group's number in the form that foreach operations take; ``[chains]`` is shaped to each tensor."""
    if isinstance(value, float | int):
        return float(value)
    if value.dim() == 0:
        return value
    return [value.view(-1, *([1] * (t.dim() - 1))) for t in tensors]


def scale_(tensors: Sequence[Tensor], value: Number) -> None:
    """``tensors *= value``."""
    torch._foreach_mul_(list(tensors), spread(value, tensors))


def _subtract_scaled_(theta: Sequence[Tensor], x: Sequence[Tensor], rate: Number) -> None:
    """``theta -= rate * x``; ``x`` may be overwritten."""
    if isinstance(rate, float | int):
        torch._foreach_add_(list(theta), list(x), alpha=-rate)
    else:
        scale_(x, rate)
        torch._foreach_sub_(list(theta), list(x))


def langevin_(theta: Sequence[Tensor], grad: Sequence[Tensor], w: Sequence[Tensor], rate: Number) -> None:
    """``theta -= rate (grad + w)`` in place; ``w`` is overwritten."""
    torch._foreach_add_(list(w), list(grad))
    _subtract_scaled_(theta, w, rate)


def hamiltonian_(
    theta: Sequence[Tensor],
    velocity: Sequence[Tensor],
    grad: Sequence[Tensor],
    w: Sequence[Tensor],
    rate: Number,
    friction: float,
) -> None:
    """``v <- (1 - friction) v - rate (grad + w)``, ``theta += v`` in place; ``w`` is overwritten."""
    torch._foreach_mul_(list(velocity), 1.0 - friction)
    torch._foreach_add_(list(w), list(grad))
    _subtract_scaled_(velocity, w, rate)
    torch._foreach_add_(list(theta), list(velocity))


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
