"""The step of a Lambda with a diagonal part and k directions as one operation (``lowrank.h``)."""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.native import build

LEAST = 50_000  # products below which calling the operation costs more than it saves


def ready(basis: Tensor, *others: Tensor) -> bool:
    """Whether to use the operation for such tensors."""
    return basis.shape[-1] >= build.FEWEST and basis.numel() >= LEAST and build.ready(basis, *others)


def displace(*tensors: Tensor) -> Tensor:
    """``rate force + S^T (back S force + add shared)`` with ``force = gradient + amplitude own``, S the basis.

    The tensors are basis, back, add, rate, amplitude, gradient, own and shared; all have a leading dimension of chains.
    """
    found: Tensor = torch.ops.isosgd.lowrank_displace(*tensors)
    return found


@build.shapes("lowrank_displace")
def _displacement(basis: Tensor, back: Tensor, add: Tensor, rate: Tensor, amplitude: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty_like(rest[0], memory_format=torch.contiguous_format)  # like the gradient
