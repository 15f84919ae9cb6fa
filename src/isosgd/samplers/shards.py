"""Parameters that are sharded over ranks: DTensors, as FSDP2's `torch.distributed.fsdp.fully_shard` makes them.

Each rank steps its own rows of every parameter. What a step needs of a group as a whole (norms, products of noise
vectors) is summed over the ranks. Injected noise is that of the whole parameters: a block of it follows from the step,
the number of the parameter and the offset in it, and a rank draws the blocks that it has rows of. So a chain is the
same on any number of ranks, but for rounding. Gradients are already the mean over ranks, and noise vectors differences
of successive ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isosgd.noise import Whole
from isosgd.samplers.groups import Group

BLOCK = 1 << 14  # numbers that are drawn at once


def is_sharded(p: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this rank has a part."""
    return hasattr(p, "device_mesh")


def take_shards(groups: list[Group]) -> Whole:
    """Put this rank's parts in the place of sharded parameters, and say how sums over all of them are made."""
    every = [p for group in groups for p in group["params"]]
    if not any(is_sharded(p) for p in every):
        return Whole()
    if not all(is_sharded(p) for p in every):
        raise ValueError("some parameters are sharded over ranks (DTensors) and others are not: shard the whole model")
    shards = Shards(every)
    for group in groups:
        group["params"] = [shards.part_of[p] for p in group["params"]]
    return shards


class Shards(Whole):
    """This rank's parts of sharded parameters.

    Args:
        wholes: the DTensors.

    Attributes:
        part_of: the part, a plain tensor in the same memory, of each DTensor.
    """

    sharded = True

    def __init__(self, wholes: Sequence[Any]) -> None:
        from torch.distributed.tensor import Shard  # takes its time

        self.mesh = wholes[0].device_mesh
        for p in wholes:
            if p.device_mesh != self.mesh or self.mesh.ndim != 1 or tuple(p.placements) != (Shard(0),):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is placed as {tuple(p.placements)} on {p.device_mesh}: "
                    "only parameters that one mesh of one dimension shards by rows, as fully_shard does, are supported"
                )
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"sharded parameters of dtype {p.dtype} are not supported: keep them in float32")
        self.group, ranks, rank = self.mesh.get_group(), self.mesh.size(), self.mesh.get_local_rank()
        self.part_of: dict[Any, Tensor] = {}
        self._places: dict[Tensor, tuple[int, int, int]] = {}  # number, offset and size of the whole
        for number, p in enumerate(wholes):
            part = p.detach().to_local().requires_grad_(p.requires_grad)
            rows = -(-p.shape[0] // ranks)
            first = min(rank * rows, p.shape[0])
            assert part.shape[0] == min(first + rows, p.shape[0]) - first  # rows are cut as by torch.chunk
            self.part_of[p] = part
            self._places[part] = number, first * (p.numel() // p.shape[0]), p.numel()

    def align(self, generator: torch.Generator) -> None:
        word = torch.tensor(generator.initial_seed(), device=self.mesh.device_type)
        dist.broadcast(word, group=self.group, group_src=0)
        generator.manual_seed(int(word))

    def take_gradients(self) -> None:
        for whole, part in self.part_of.items():
            part.grad = None if whole.grad is None else whole.grad.to_local()

    def zero_grad(self, set_to_none: bool) -> None:
        for whole in self.part_of:
            if set_to_none or whole.grad is None:
                whole.grad = None
            else:
                whole.grad.zero_()

    def total(self, x: Tensor) -> Tensor:
        found = x.detach().clone()
        dist.all_reduce(found, group=self.group)
        return found

    def largest(self, x: Tensor) -> Tensor:
        found = x.detach().clone()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return found

    def norm(self, x: Tensor) -> Tensor:
        return self.total(x.square().sum()).sqrt()

    def size(self, width: int, params: Sequence[Tensor]) -> int:
        return sum(self._places[p][2] for p in params)

    def mean(self, x: Tensor, params: Sequence[Tensor]) -> Tensor:
        return self.total(x.sum()) / self.size(x.numel(), params)

    def normal_(self, out: Tensor, params: Sequence[Tensor], generator: torch.Generator) -> None:
        step = int(torch.empty(1, dtype=torch.int64, device=generator.device).random_(generator=generator))
        source = torch.Generator(device=out.device)
        for part, p in zip(torch.split(out, [p.numel() for p in params]), params, strict=True):
            number, begin, size = self._places[p]
            end = begin + part.numel()
            for first in range(begin - begin % BLOCK, end, BLOCK):
                word = np.random.SeedSequence((step, number, first)).generate_state(1, np.uint64)[0]
                source.manual_seed(int(word >> np.uint64(1)))
                block = out.new_empty(min(BLOCK, size - first)).normal_(generator=source)
                a, b = max(begin, first), min(end, first + len(block))
                part[a - begin : b - begin] = block[a - first : b - first]
