"""Adam's steps, for the way down: each as long as a share of what the parameters of its group are.

References:
    Kingma, Ba (2015), Adam.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from isosgd.engine.chains import Chains

SIZE = 0.2  # of parameters that start at zero
MEMORY = 0.9, 0.99  # of the gradient and its square


class Adam:
    """Steps for all chains.

    Args:
        chains: they are moved.
        share: length of a step, over the size of a group's parameters, which has the unit.
        held: names of parameters that stay where they are.
    """

    def __init__(self, chains: Chains, share: float, held: Collection[str]) -> None:
        self.leaves, self.count = chains.leaves, 0
        self.mean = [torch.zeros_like(leaf) for leaf in chains.leaves]
        self.square = [torch.zeros_like(leaf) for leaf in chains.leaves]
        self.lengths: list[Tensor] = []
        flat = chains.flat(chains.leaves)
        for group, slot in zip(chains.sampler.param_groups, chains.slots, strict=True):
            size = flat[:, slot].square().mean(-1).sqrt()
            length = share * torch.where(size > 0, size, SIZE)
            self.lengths += [chains.wide(length, p) for p in group["params"]]
        for i, name in enumerate(chains.params):
            if name in held:
                self.lengths[i] = torch.zeros_like(self.lengths[i])

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], pace: float = 1.0) -> None:
        """One step.

        Args:
            gradients: like the parameters.
            pace: times the length of a step.
        """
        self.count += 1
        torch._foreach_lerp_(self.mean, list(gradients), 1.0 - MEMORY[0])
        torch._foreach_lerp_(self.square, torch._foreach_mul(list(gradients), list(gradients)), 1.0 - MEMORY[1])
        pace = pace / (1.0 - MEMORY[0] ** self.count)
        for leaf, length, m, s in zip(self.leaves, self.lengths, self.mean, self.square, strict=True):
            leaf.sub_(pace * length * m / ((s / (1.0 - MEMORY[1] ** self.count)).sqrt() + 1e-20))


def falling(step: int, steps: int) -> float:
    """The pace of a step of so many, which are numbered from 1: even in the first half, then down to nothing.

    Example:
        >>> [round(falling(i, 9), 1) for i in (1, 5, 9)]
        [1.0, 1.0, 0.2]
    """
    return min(1.0, 2.0 * (1.0 - step / (steps + 1.0)))
