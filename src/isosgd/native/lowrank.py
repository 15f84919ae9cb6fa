"""The step of a Lambda with a diagonal part and k directions as one operation (``lowrank.h``)."""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.native import build

LEAST = 50_000  # products: below, to call the operation takes longer than it saves


def ready(basis: Tensor, *others: Tensor) -> bool:
    """Whether the operation is there for such tensors, and worth its call."""
    return basis.shape[-1] >= build.FEWEST and basis.numel() >= LEAST and build.ready(basis, *others)


def displace(
    basis: Tensor,
    back: Tensor,
    add: Tensor,
    rate: Tensor,
    amplitude: Tensor,
    gradient: Tensor,
    own: Tensor,
    shared: Tensor,
) -> Tensor:
    """``rate force + S^T (back S force + add shared)`` with ``force = gradient + amplitude own``, S the basis.

    All tensors have a leading dimension of chains.
    """
    found: Tensor = torch.ops.isosgd.lowrank_displace(basis, back, add, rate, amplitude, gradient, own, shared)
    return found


@build.shapes("lowrank_displace")
def _displacement(
    basis: Tensor,
    back: Tensor,
    add: Tensor,
    rate: Tensor,
    amplitude: Tensor,
    gradient: Tensor,
    own: Tensor,
    shared: Tensor,
) -> Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)
