"""Parameters sharded over ranks: DTensors, as FSDP2's `torch.distributed.fsdp.fully_shard` makes them.

Each rank steps its own rows of every parameter. Quantities of whole groups (norms, products of noise vectors) are
summed over ranks. Injected noise is drawn in blocks, each seeded by the step, the parameter and its offset in it; a
rank draws the blocks of its rows, so that a chain is the same on any number of ranks, up to rounding. Gradients are
already means over ranks, and noise vectors are differences of successive gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isosgd.errors import RankError, RankValueError
from isosgd.noise.model import Whole
from isosgd.samplers.groups import Group

BLOCK = 1 << 14  # random numbers of one seed


def is_sharded(p: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(p, "device_mesh")


def rows_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """First row and end of a rank's rows, split as by `torch.chunk`: the last ranks may have none.

    Example:
        >>> [rows_of(5, rank, 4) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // ranks)
    return min(rank * size, length), min((rank + 1) * size, length)


def rows_here(p: Any) -> tuple[int, int]:
    """First row and end of this rank's rows of a DTensor; raises if its placement is not supported."""
    from torch.distributed.tensor import Shard  # slow to import

    mesh = p.device_mesh
    if mesh.ndim != 1 or tuple(p.placements) != (Shard(0),):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is placed as {tuple(p.placements)} on {mesh}: only parameters that "
            "one mesh of one dimension shards by rows, as fully_shard does, are supported"
        )
    return rows_of(p.shape[0], mesh.get_local_rank(), mesh.size())


def together(mesh: Any, call: Callable[[], Any]) -> list[Any]:
    """Make a call on every rank of a mesh; returns all results, through JSON. An error on one is raised on all."""
    error: Exception | None = None
    try:
        text = json.dumps({"got": call()}, default=str)
    except Exception as met:  # any error, for the other ranks wait
        error, text = met, json.dumps({"text": str(met), "wrong": isinstance(met, ValueError | TypeError)})
    own, group = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), mesh.get_group()
    longest = torch.tensor(len(own), device=mesh.device_type)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    own = torch.nn.functional.pad(own, (0, int(longest) - len(own)), value=32).to(mesh.device_type)
    every = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(every, own, group=group)
    answers = [json.loads(bytes(one.tolist())) for one in every]
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if "got" not in answer:
            raise (RankValueError if answer["wrong"] else RankError)(f"on rank {rank}: {answer['text']}", rank)
    return [answer["got"] for answer in answers]


def take_shards(groups: list[Group]) -> Whole:
    """Replace sharded parameters by this rank's shards; returns how to sum over all of them."""
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
    """This rank's shards of parameters.

    Args:
        wholes: the DTensors.

    Attributes:
        part_of: the shard of each DTensor, a plain tensor in the same memory.
    """

    sharded = True

    def __init__(self, wholes: Sequence[Any]) -> None:
        self.mesh = wholes[0].device_mesh
        rows = [rows_here(p) for p in wholes]
        for p in wholes:
            if p.device_mesh != self.mesh:
                raise ValueError(f"parameters are sharded by two meshes, {self.mesh} and {p.device_mesh}: use one")
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"sharded parameters of dtype {p.dtype} are not supported: keep them in float32")
        self.group, self.rank, self.ranks = self.mesh.get_group(), self.mesh.get_local_rank(), self.mesh.size()
        self.part_of: dict[Any, Tensor] = {}
        self._places: dict[Tensor, tuple[int, int, int]] = {}  # number, offset and size of the whole
        for number, p in enumerate(wholes):
            part = p.detach().to_local().requires_grad_(p.requires_grad)
            first, last = rows[number]
            assert part.shape[0] == last - first
            self.part_of[p] = part
            self._places[part] = number, first * (p.numel() // p.shape[0]), p.numel()

    def align(self, generator: torch.Generator) -> None:
        word = torch.tensor(generator.initial_seed(), device=self.mesh.device_type)
        dist.broadcast(word, group=self.group, group_src=0)
        generator.manual_seed(int(word))

    def together(self, call: Callable[[], Any]) -> list[Any]:
        return together(self.mesh, call)

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
