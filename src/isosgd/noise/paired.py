"""Centred noise from one minibatch: the gradients of its two halves.

With ``g1``, ``g2`` the mean gradients of two disjoint parts of ``n1`` and ``n2`` examples, the minibatch gradient is
``g = (n1 g1 + n2 g2) / n`` and the difference ``D = sqrt(n1 n2) / n (g1 - g2)`` has mean zero and the covariance of
``g``, whatever the gradient itself is. The prior's gradient is the same in both and cancels. For equal halves
``D = (g1 - g2) / 2``. It costs no extra gradient work: the two halves together are the minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def join_halves(
    first: Sequence[Tensor], second: Sequence[Tensor], sizes: tuple[int, int] = (1, 1)
) -> tuple[list[Tensor], list[Tensor]]:
    """Minibatch gradient and noise vector from the mean gradients of its two parts.

    Args:
        first: mean gradients over the first part.
        second: mean gradients over the second part.
        sizes: examples in each part (only their ratio matters).

    Example:
        >>> g, d = join_halves([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 2.0])])
        >>> g[0].tolist(), d[0].tolist()
        ([2.0, 2.0], [-1.0, 0.0])
    """
    n1, n2 = sizes
    if min(n1, n2) < 1:
        raise ValueError(
            f"sizes = {sizes}: each part of a minibatch needs at least one example; use a batch of 2 or more"
        )
    n = n1 + n2
    difference = torch._foreach_sub(list(first), list(second))
    gradient = torch._foreach_add(list(second), difference, alpha=n1 / n)
    # Nothing in place: a compiled loop over steps takes no such lists.
    return list(gradient), list(torch._foreach_mul(difference, math.sqrt(n1 * n2) / n))


def paired_backward(
    params: Sequence[Tensor], first: Callable[[], Tensor], second: Callable[[], Tensor], sizes: tuple[int, int] = (1, 1)
) -> list[Tensor]:
    """For a training loop of your own: backward both halves, leave the mean in ``.grad``, return the noise vector.

    Args:
        params: the parameters, in the order the sampler was given them.
        first: returns the loss of the first half (mean over its examples).
        second: returns the loss of the second half.
        sizes: examples in each half.

    Returns:
        The noise vector, to be handed to ``sampler.step(noise=...)``.
    """
    params = list(params)
    a = torch.autograd.grad(first(), params)
    b = torch.autograd.grad(second(), params)
    gradient, difference = join_halves(a, b, sizes)
    for p, g in zip(params, gradient, strict=True):
        p.grad = g
    return difference
