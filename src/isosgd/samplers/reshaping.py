"""Changes of a full curvature matrix along the axes that it has in common with another one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isosgd.samplers.rule import Rule

BELIEVED = 3.0  # ratio of curvature and Fisher information that is put down to the direction; less may be chance
SAFE = 2.0  # times the curvature that was measured in a direction, for its own part of Lambda
LEAST = 0.01  # curvature over Fisher information, at the least that is believed


def reshape(root: Tensor, inverse: Tensor, other: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """H, as a root of its inverse and the inverse of that, changed along the axes that it has in common with a matrix.

    ``choose`` says by what factor, given the other matrix over H along each of them.
    """
    values, vectors = torch.linalg.eigh(root.mT @ other @ root)
    values = choose(values).unsqueeze(-2)
    return root @ (vectors * values.rsqrt()), (vectors * values.sqrt()).mT @ inverse


def at_least_one(ratio: Tensor) -> Tensor:
    """Only upwards."""
    return ratio.clamp_min(1.0)


def believed(ratio: Tensor) -> Tensor:
    """A ratio far from 1, else 1."""
    near = (ratio < BELIEVED) & (ratio > 1.0 / BELIEVED)
    return torch.where(near, 1.0, ratio.clamp_min(LEAST))


def soft(rule: Rule, stretch: Tensor, ratio: Tensor) -> Tensor:
    """How much smaller Lambda may be where the curvature is below H, so that noise bounds it rather than the bias."""
    wanted = torch.minimum(SAFE * ratio.clamp_min(0.0), stretch.to(ratio).unsqueeze(-1))
    return rule.factor(wanted) / rule.factor(stretch.to(ratio)).unsqueeze(-1)
