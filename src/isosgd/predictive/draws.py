"""Draws in memory or in a store, and inputs, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.potential import Params
from isosgd.predictive.mapped import rows_of, tree_map

Draws = Mapping[str, Tensor]
"""Tensors ``[chains, draws, *shape]`` by name, in memory or read as they are needed."""


def batches_of(inputs: Any, size: int | None) -> Iterator[Any]:
    """Inputs, some rows at a time: every tensor that has as many rows as the first is cut."""
    if size is None:
        yield inputs
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"batch_size = {size!r} must be an integer of at least 1")
    rows = rows_of(inputs)
    if rows is None:
        raise TypeError(f"batch_size = {size} needs inputs with rows, got {type(inputs).__name__}; leave it out")
    for first in range(0, max(rows, 1), size):
        yield tree_map(_rows(first, size, rows), inputs)


def _rows(first: int, size: int, rows: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t[first : first + size] if t.ndim and len(t) == rows else t


class Part(Mapping[str, Tensor]):
    """Some chains and draws of a store, read as they are needed."""

    def __init__(self, source: Any, chains: Sequence[int], draws: Sequence[int]) -> None:
        self._source, self._chains, self._draws = source, chains, draws
        self.num_chains, self.num_draws = len(chains), len(draws)

    def draw(self, chain: int, index: int) -> Params:
        found: Params = self._source.draw(self._chains[chain], self._draws[index])
        return found

    def __getitem__(self, name: str) -> Tensor:
        return torch.as_tensor(self._source[name][self._chains][:, list(self._draws)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def part_of(source: Draws, chains: Sequence[int], draws: Sequence[int]) -> Draws:
    """Some chains and some draws of each."""
    if hasattr(source, "draw"):
        return Part(source, chains, draws)
    return {name: x[chains][:, list(draws)] for name, x in source.items()}


def one_of(source: Draws, chain: int, index: int) -> Params:
    """One draw: of a store by its own way, which reads nothing else."""
    read = getattr(source, "draw", None)
    if read is not None:
        found: Params = read(chain, index)
        return found
    return {name: value[chain, index] for name, value in source.items()}


def some_of(source: Draws, first: int, last: int, draws: int) -> Params:
    """Draws from one number to another, chain after chain, ``[last - first, *shape]``."""
    if not source:
        return {}
    if not hasattr(source, "draw"):
        return {name: value.flatten(0, 1)[first:last] for name, value in source.items()}
    every = [one_of(source, *divmod(i, draws)) for i in range(first, last)]
    return {name: torch.stack([one[name] for one in every]) for name in every[0]}
