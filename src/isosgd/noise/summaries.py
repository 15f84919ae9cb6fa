"""From noise in each parameter to one number for a group: how large must lambda be?

``b = v / 2`` is the paper's noise covariance (diagonal). All summaries are in its units. With ``chains=K`` every tensor
carries a leading chain dimension and a summary is a tensor ``[K]``; otherwise it is a scalar tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Summary = Literal["max", "sum", "mean", "top"]


def flat(tensor: Tensor, batched: bool) -> Tensor:
    """Everything behind the chain dimension as one axis; without chains one flat axis."""
    return tensor.reshape(tensor.shape[0], -1) if batched else tensor.reshape(-1)


def join(tensors: Sequence[Tensor], batched: bool = False) -> Tensor:
    """A group's tensors as one flat vector ``[d]``, or ``[chains, d]``."""
    return flat(tensors[0], batched) if len(tensors) == 1 else torch.cat([flat(t, batched) for t in tensors], dim=-1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of flat vectors, for each chain."""
    return (a * b).sum(-1)  # not torch.dot, whose threads fight with torch's own: 30 times slower on two busy cores


def summarise(variances: Sequence[Tensor], how: Summary, batched: bool = False) -> Tensor:
    """Max, sum or mean of ``b = v / 2`` over the parameters of a group.

    ``max`` is the paper's choice for independent noise components; ``sum`` bounds the largest eigenvalue of any
    covariance with that diagonal.
    """
    parts = [flat(v, batched) for v in variances]
    if how == "max":
        return 0.5 * torch.stack([p.amax(-1) for p in parts]).amax(0)
    total = 0.5 * torch.stack([p.sum(-1) for p in parts]).sum(0)
    if how == "sum":
        return total
    if how == "mean":
        return total / sum(p.shape[-1] for p in parts)
    raise ValueError(f"summary = {how!r} is unknown; choose 'max', 'sum', 'mean' or 'top'")


def power_step(image: Tensor, noise: Tensor, weight: float) -> None:
    """One step of stochastic power iteration on flat noise vectors ``d``, in place on ``image``.

    ``image`` tracks ``V u`` for the unit vector ``u = image / |image|``: ``image <- (1 - w) image + w d (d . u)``, so
    that its length tends to the largest eigenvalue of ``V = E[d d^T]`` and its direction to that eigenvector.
    """
    norm = dot(image, image).sqrt().clamp_min(torch.finfo(image.dtype).tiny)
    along = (dot(image, noise) / norm).unsqueeze(-1)
    image.lerp_(noise * along, weight)


def top_eigenvalue(image: Tensor) -> Tensor:
    """Largest eigenvalue of ``B = V / 2`` from the vector that `power_step` keeps."""
    return 0.5 * dot(image, image).sqrt()
