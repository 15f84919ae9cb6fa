"""Full curvature matrices: changed along the axes that one has in common with another, and how they are conditioned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isosgd.samplers.rule import Rule

BELIEVED = 3.0  # ratio of curvature and Fisher information that is put down to the direction; less may be chance
SAFE = 2.0  # times the curvature that was measured in a direction, for its own part of Lambda
RANK = 20  # directions of a low rank
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


def condition_numbers(h: Tensor) -> dict[str, float]:
    """Condition numbers of curvatures ``[chains, d, d]``, the median over chains: what simpler shapes leave of them.

    About so many times longer the slowest direction would take to forget. ``single``: with one rate; ``diagonal``: with
    one for each parameter; ``lowrank``: and for each of the strongest directions, as many as `LowRank` has.

    Example:
        >>> found = condition_numbers(torch.diag(torch.logspace(0, 6, 30, dtype=torch.float64)).unsqueeze(0))
        >>> {name: round(value) for name, value in found.items()}
        {'single': 1000000, 'diagonal': 1, 'lowrank': 1}
    """
    unit = h.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(h.dtype).tiny).rsqrt()
    raw, scaled = torch.linalg.eigvalsh(h), torch.linalg.eigvalsh(unit.unsqueeze(-1) * h * unit.unsqueeze(-2))
    tiny = torch.finfo(h.dtype).eps
    tops = {"single": (raw, 1), "diagonal": (scaled, 1), "lowrank": (scaled, min(RANK + 1, h.shape[-1]))}
    return {name: float((v[:, -k] / torch.maximum(v[:, 0], tiny * v[:, -1])).median()) for name, (v, k) in tops.items()}
