"""The two steppers of the library, in mean-gradient units. A sampler only says what its rate, C and friction are.

Theorem 1 (no momentum): ``theta -= rate (g + w)``, ``w ~ N(0, 2 C)``. With gradient noise ``Var(g) = 2 B`` it targets
``exp(-f / T)`` when ``rate = T / (N Sigma)``, ``Sigma = B + C`` constant.

Theorem 2 (momentum, in velocity form): ``v <- (1 - a) v - rate (g + w)``, ``theta += v``. It targets ``exp(-f / T)``
when ``Sigma = a T / (N rate)``. At ``a = 1`` it is the first stepper.

Both take the injected part ready made, as the *kick* ``rate w``: how w is drawn is the sampler's affair.

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


def add_scaled_(y: list[Tensor], x: list[Tensor], factor: list[float]) -> None:
    """``y_i += factor_i x_i`` for floats, in one call."""
    if factor.count(factor[0]) == len(factor):
        torch._foreach_add_(y, x, alpha=factor[0])
    else:  # of the foreach operations only this one takes a factor for each tensor
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


def variance_inflation(rate_curvature: N_, friction: float = 1.0, share: float = 1.0) -> N_:
    """Stationary variance over target variance for a quadratic potential: ``1 / (1 - rate h / (2 (2 - friction)))``.

    Exact for both steppers (the recursion is linear); infinite where the step is unstable. Where injected noise is
    averaged over two steps it adds no bias of its own (Leimkuhler and Matthews 2013), and only the ``share`` of the
    composite noise that comes with the gradient counts.

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
