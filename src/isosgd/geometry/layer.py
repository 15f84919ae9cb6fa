"""Lambda as one number for each group (``layer``, as in the paper) or for all groups (``single``, the paper's SLR).

Innovations of a group are a flat tensor ``[d]``, or ``[chains, d]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Correction = Literal["diagonal", "outer"]
Number = float | Tensor  # for a whole group: a float, a scalar tensor (capturable), or a tensor [chains]


def over_chains(value: Number) -> Number:
    """A group's number in a shape that broadcasts against flat tensors ``[chains, d]``."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() else value


class PerGroup(NamedTuple):
    """One lambda for each group of parameters (``layer``), or one for all of them (``single``)."""

    name: Literal["layer", "single"]

    def solve(self, noise: Sequence[Tensor], guard: Sequence[Tensor]) -> list[Tensor]:
        """The smallest lambda of each group that is above its noise bound and its curvature bound.

        A single one is above the sum of the groups' noise bounds (the paper's SLR) and the largest curvature bound.
        """
        if self.name == "layer":
            return [torch.maximum(b, h) for b, h in zip(noise, guard, strict=True)]
        lam = torch.maximum(torch.stack(list(noise)).sum(0), torch.stack(list(guard)).amax(0))
        return [lam.clone() for _ in noise]


def root(x: Number) -> Number:
    """Square root of a group's number."""
    return x.sqrt() if isinstance(x, Tensor) else x**0.5


def diagonal_scale(lam: Number, variance: Tensor) -> Tensor:
    """``sqrt(2 (lam - v/2))``, the scale of injected noise for uncorrelated gradient noise of (flat) variance v.

    Zero where the noise exceeds lambda.
    """
    return (2.0 * over_chains(lam) - variance).clamp_min_(0.0).sqrt_()


def outer_factor(ring: Tensor, spectrum: tuple[Tensor, Tensor], lam: Number, count: int) -> Tensor | float:
    """The factor ``Q = K M^T`` ``[(chains,) m, d]`` for `subtract_outer_`; ``count`` rows of the ring are filled.

    With ``M = [D_1 ... D_m]`` and ``M^T M = V diag(e) V^T`` it has ``K = V diag(c) V^T``, ``c = (1 - sqrt(1 - s)) /
    e``, ``s = e / (2 lam count)``, computed without cancellation; s is clipped at 1. For a single vector on the CPU it
    is the number c, with ``Q = c D^T``.
    """
    values, vectors = spectrum
    if ring.dim() == 2 and ring.shape[0] == 1 and ring.device.type == "cpu":
        value = float(values)
        most = max(value, 2.0 * count * float(lam))
        return 1.0 / (most * (1.0 + math.sqrt(1.0 - value / most)))
    longest = torch.clamp_min(values, 2.0 * count * over_chains(lam))
    c = 1.0 / (longest * (1.0 + (1.0 - values / longest).sqrt()))
    return (vectors * c.unsqueeze(-2)) @ (vectors.mT @ ring)


def subtract_outer_(
    xi: Tensor, ring: Tensor, factor: Tensor | float, total: Callable[[Tensor], Tensor] | None = None
) -> None:
    """``xi <- xi - Q^T M^T xi``, whose covariance, given m noise vectors, is ``I - (1/m) sum_i D_i D_i^T / (2 lam)``.

    Times ``sqrt(2 lam)``, and averaged over the ``D_i``, the covariance is ``2 lam I - Var(g)``: gradient noise and
    injected noise add up to exactly ``2 lam I`` for any correlations of the gradient noise, in O(d m). Q is that of
    `outer_factor`. ``2 lam`` must exceed the top eigenvalue of the ``1/m`` sum: with m = 1 that is ``|D|^2``, the
    paper's sum rule; with more vectors it tends to the top eigenvalue of Var(g). If xi and the ring are shards of
    longer vectors, ``total`` sums over the shards.
    """
    if isinstance(factor, float):  # in numpy, since this may run in a thread next to torch's
        x, d = xi.numpy(), ring[0].numpy()
        along = np.einsum("i,i->", d, x)
        x -= x.dtype.type(factor * (along if total is None else float(total(torch.tensor(along))))) * d
    elif xi.dim() > 1:
        xi.sub_((factor.mT @ (ring @ xi.unsqueeze(-1))).squeeze(-1))
    else:
        along = torch.mv(ring, xi)
        xi.addmv_(factor.mT, along if total is None else total(along), alpha=-1.0)
