"""The noise vectors of groups so large that they keep a single one, renewed all at once.

A model of many layers would otherwise take several calls for each of them at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.groups import Group


class LastVectors:
    """Where such vectors lie, group by group and parameter by parameter.

    Args:
        groups: all groups, in order, each with what is known of its noise (see `NoiseFollower.group_noise`), or None
            for one that is not to be served.
    """

    def __init__(self, groups: Sequence[tuple[Group, dict[str, Any] | None]]) -> None:
        self.groups: list[Group] = []
        self.parts: list[tuple[int, Tensor]] = []  # index of a parameter, and its part of a ring
        self.rings: list[Tensor] = []
        self.longest: list[Tensor] = []
        position = 0
        for group, known in groups:
            sizes = [p.numel() for p in group["params"]]
            if known is not None and tuple(known["ring"].shape) == (1, sum(sizes)):
                parts = zip(group["params"], torch.split(known["ring"][0], sizes), strict=True)
                self.parts.extend((position + i, part.view(p.shape)) for i, (p, part) in enumerate(parts))
                self.groups.append(group)
                self.rings.append(known["ring"])
                self.longest.append(known["longest"])
            position += len(sizes)

    def renew(self, noise: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Take in a noise vector, in the order of all parameters.

        Returns:
            The spectra of the rings (see `isosgd.samplers.structure.ring_spectrum`), by the identity of the group.
        """
        if not self.groups:
            return {}
        torch._foreach_copy_([part for _, part in self.parts], [noise[i] for i, _ in self.parts])
        squares = torch.stack(torch._foreach_norm(self.rings)).square()
        one = squares.new_ones((1, 1))
        found = {}
        for group, square, kept in zip(self.groups, squares.view(-1, 1).unbind(), self.longest, strict=True):
            found[id(group)] = square, one
            kept[max(group["seen"] - 1, 0) % len(kept)] = square[0]
            group["seen"] += 1
            group["vectors"] += 1
        return found
