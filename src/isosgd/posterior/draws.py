"""Draws in memory or in a store, read in blocks, and functions mapped over them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from isosgd.errors import check_integer
from isosgd.store.draws import Rows
from isosgd.target import Params
from isosgd.target.batches import batch_length, tensors_of, tree_map

Device = torch.device | str | None

Draws = Mapping[str, Tensor]
"""Tensors ``[chains, draws, *shape]`` by name, in memory or read when needed."""

Tree = Tensor | dict[str, Tensor]
MOST_AT_ONCE = 64
HELD = 1 << 23  # numbers of a block of draws at most


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` evenly spaced indices of ``count`` items.

    Example:
        >>> evenly(9, 3), evenly(2, 3)
        (array([0, 4, 8]), array([0, 1]))
    """
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.int64))


class Stack:
    """The draws of all chains, and the buffers of the network at each draw.

    Args:
        draws: tensors ``[chains, draws, *shape]`` by name. A mapping with methods ``draw(chain, index, rows)`` and
            ``shape(name)`` is read one draw at a time.
        buffers: likewise; none for most models.
    """

    def __init__(self, draws: Draws, buffers: Draws | None = None) -> None:
        self.draws = draws
        self.buffers: Draws = {} if buffers is None else buffers

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        found = getattr(self.draws, "num_chains", None)
        return int(next(iter(self.draws.values())).shape[0] if found is None else found)

    @property
    def num_draws(self) -> int:
        """Draws of each chain."""
        found = getattr(self.draws, "num_draws", None)
        return int(next(iter(self.draws.values())).shape[1] if found is None else found)

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        if not len(self):
            return {}
        if hasattr(self.draws, "shape"):  # a store knows shapes without reading
            return {name: tuple(self.draws.shape(name)[2:]) for name in self.draws}
        return {name: tuple(value.shape[2:]) for name, value in self.draws.items()}

    def draw(self, chain: int, index: int, rows: Rows | None = None) -> Params:
        """One draw without buffers; of parameters in ``rows`` only these rows."""
        return _one_of(self.draws, chain, index, rows)

    def select(self, chains: Sequence[int], draws: Sequence[int]) -> Stack:
        """Some chains and some of their draws."""
        return Stack(*(_part_of(source, chains, draws) for source in (self.draws, self.buffers)))

    def blocks(
        self, inputs: Any, size: int | None = None, device: torch.device | None = None
    ) -> Iterator[tuple[Params, int]]:
        """Blocks of draws ``[draws, *shape]`` with their buffers, in order, and how often each counts.

        That is once, except for the head of a chain (`Headed`).

        Args:
            inputs: what the draws will be evaluated at.
            size: draws in a block; by default as many as fit in bounded memory.
            device: where to put blocks; by default where the inputs are.
        """
        size = size or at_once(list(self.shapes.values()), inputs)
        place, draws, runs = device or device_of(inputs), self.num_draws, [(0, len(self), 1)]
        if isinstance(self.draws, Headed):
            copies, starts = self.draws.copies, range(0, len(self), draws)
            runs = [run for at in starts for run in ((at, at + 1, copies), (at + copies, at + draws, 1))]
        for begin, end, times in runs:
            for first in range(begin, end, size):
                last = min(first + size, end)
                block = _between(self.draws, first, last, draws) | _between(self.buffers, first, last, draws)
                yield moved(block, place), times


class Part(Mapping[str, Tensor]):
    """Some chains and draws of a store, read when needed."""

    def __init__(self, source: Any, chains: Sequence[int], draws: Sequence[int]) -> None:
        self._source, self._chains, self._draws = source, chains, draws
        self.num_chains, self.num_draws = len(chains), len(draws)

    def draw(self, chain: int, index: int, rows: Rows | None = None) -> Params:
        """One draw, or some rows of it."""
        found: Params = self._source.draw(self._chains[chain], self._draws[index], rows)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``part[name]``, without reading it."""
        return (self.num_chains, self.num_draws, *self._source.shape(name)[2:])

    def __getitem__(self, name: str) -> Tensor:
        return torch.as_tensor(self._source[name][self._chains][:, list(self._draws)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


class Headed(Mapping[str, Tensor]):
    """Draws with a head in front of each chain that is stored once but counts several times.

    Args:
        head: tensors ``[chains, 1, *shape]`` by name.
        copies: how often the head counts.
        rest: the draws after it.
    """

    def __init__(self, head: Draws, copies: int, rest: Draws) -> None:
        self.head, self.copies, self.rest = head, copies, rest

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return Stack(self.rest).num_chains

    @property
    def num_draws(self) -> int:
        """Draws of each chain, with all copies."""
        return self.copies + Stack(self.rest).num_draws

    def draw(self, chain: int, index: int, rows: Rows | None = None) -> Params:
        """One draw, or some rows of it."""
        place = range(self.num_draws)[index] - self.copies
        return _one_of(self.head, chain, 0, rows) if place < 0 else _one_of(self.rest, chain, place, rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``draws[name]``, without building it."""
        return (self.num_chains, self.num_draws, *Stack(self.head).shapes[name])

    def select(self, chains: Sequence[int], draws: Sequence[int]) -> Draws:
        """Some chains and some of their draws."""
        rest = [i - self.copies for i in draws if i >= self.copies]
        copies = len(draws) - len(rest)
        if not rest or any(i >= self.copies for i in draws[:copies]):
            return Part(self, chains, draws)
        part = _part_of(self.rest, chains, rest)
        return Headed(_part_of(self.head, chains, [0]), copies, part) if copies else part

    def __getitem__(self, name: str) -> Tensor:
        rest = self.rest[name]
        return torch.cat([self.head[name].to(rest).expand(-1, self.copies, *rest.shape[2:]), rest], 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rest)

    def __len__(self) -> int:
        return len(self.rest)


def _part_of(source: Draws, chains: Sequence[int], draws: Sequence[int]) -> Draws:
    if isinstance(source, Headed):
        return source.select(chains, draws)
    if hasattr(source, "draw"):
        return Part(source, chains, draws)
    return {name: x[chains][:, list(draws)] for name, x in source.items()}


def _one_of(source: Draws, chain: int, index: int, rows: Rows | None = None) -> Params:
    """One draw; a store reads nothing else."""
    read = getattr(source, "draw", None)
    if read is not None:
        found: Params = read(chain, index, rows)
        return found
    draw = {name: value[chain, index] for name, value in source.items()}
    return draw | {name: draw[name][first:last] for name, (first, last) in (rows or {}).items()}


def _between(source: Draws, first: int, last: int, draws: int) -> Params:
    """Draws ``first`` to ``last``, counted chain after chain with ``draws`` in each, ``[last - first, *shape]``."""
    if isinstance(source, Headed):
        chain, index = divmod(first, draws)
        if index < source.copies:
            return _between(source.head, chain, chain + 1, 1)
        begin = first - (chain + 1) * source.copies
        return _between(source.rest, begin, begin + last - first, draws - source.copies)
    if not len(source) or not hasattr(source, "draw"):
        return {name: value.flatten(0, 1)[first:last] for name, value in source.items()}
    every = [_one_of(source, *divmod(i, draws)) for i in range(first, last)]
    return {name: torch.stack([one[name] for one in every]) for name in every[0]}


def place_of(device: Device, home: torch.device | None, inputs: Any) -> torch.device:
    """Where to evaluate a target at draws.

    Args:
        device: the user's choice, if any.
        home: the device of the target's own values; used if it is an accelerator.
        inputs: what it is evaluated at; else their device is used.
    """
    if device is not None:
        return torch.device(device)
    if home is not None and home.type != "cpu":
        return home
    return device_of(inputs)


def device_of(inputs: Any) -> torch.device:
    """Device of the first tensor of some inputs; the CPU if there is none."""
    return next((t.device for t in tensors_of(inputs)), torch.device("cpu"))


def moved(tree: Any, device: torch.device) -> Any:
    """Nested tuples, lists and dicts with their tensors moved to a device."""
    return tree_map(lambda t: t.to(device), tree)


def by_chain(values: Tensor, chains: int) -> Tensor:
    """Reshape ``[chains * draws, *shape]`` to ``[chains, draws, *shape]``."""
    return values.reshape(chains, len(values) // chains, *values.shape[1:])


def at_once(shapes: Collection[Sequence[int]], inputs: Any) -> int:
    """Number of draws to evaluate at once, from the size of a draw and of the widest layer over all inputs.

    Args:
        shapes: of the parameters of a draw.
        inputs: of all draws.
    """
    sizes = [math.prod(shape) for shape in shapes]
    widest = max((max(shape, default=1) for shape in shapes), default=1)
    rows = batch_length(inputs) or 1
    held = max(sum(sizes), sum(t.numel() for t in tensors_of(inputs)), rows * widest)
    return max(1, min(MOST_AT_ONCE, HELD // max(1, held)))


def batches_of(inputs: Any, size: int | None) -> Iterator[Any]:
    """Split inputs into batches of rows; tensors with as many rows as the first are split."""
    if size is None:
        yield inputs
        return
    check_integer("batch_size", size, 1)
    rows = batch_length(inputs)
    if rows is None:
        raise TypeError(f"batch_size = {size} needs inputs with rows, got {type(inputs).__name__}; leave it out")
    for first in range(0, max(rows, 1), size):
        part = slice(first, first + size)
        yield tree_map(lambda t, part=part: t[part] if t.ndim and len(t) == rows else t, inputs)


class Mapped:
    """``function(params)`` over a leading dimension of draws, by `torch.func.vmap` if that gives the same result.

    The first call tests this. Convolutions are never mapped, since one large convolution would become many small ones.

    Args:
        function: from the parameters of a draw and further arguments to a tensor or a dict of tensors.
        dims: for each further argument 0 if it has a leading dimension of draws, else None.
    """

    def __init__(self, function: Callable[..., Any], dims: tuple[int | None, ...] = (None,)) -> None:
        self.function, self.dims = function, dims
        self.at_once: bool | None = None  # unknown before the first call

    def __call__(self, block: Params, *more: Any) -> Any:
        """Results with a leading dimension of draws."""
        if self.at_once is None:
            self.at_once = self._try(block, *more)
        count = len(next(iter(block.values())))
        if self.at_once and count > 1:
            return self._map(block, *more)
        return _stack([self._single(block, k, *more) for k in range(count)])

    def _map(self, block: Params, *more: Any) -> Any:
        return vmap(self.function, (0, *self.dims[: len(more)]))(block, *more)

    def _single(self, block: Params, k: int, *more: Any) -> Any:
        further = [x if dim is None else _at(x, k) for x, dim in zip(more, self.dims, strict=False)]
        return self.function({name: x[k] for name, x in block.items()}, *further)

    def _try(self, block: Params, *more: Any) -> bool:
        if any(x.ndim > 3 for x in block.values()):
            return False
        alone = _stack([self._single(block, 0, *more)])
        two = _twice(block)
        further = [x if dim is None else _twice(x) for x, dim in zip(more, self.dims, strict=False)]
        try:
            with warnings.catch_warnings():
                # torch maps some operations, such as attention, by a loop; ours is faster.
                warnings.filterwarnings("error", message="There is a performance drop")
                found = self._map(two, *further)
        except Exception:  # users' code may raise anything under vmap
            return False
        return _same(alone, found)


def _at(tree: Any, k: int) -> Any:
    return tree_map(lambda t: t[k], tree)


def _twice(tree: Any) -> Any:
    """The first entry of every tensor, twice."""
    return tree_map(lambda t: t[:1].expand(2, *t.shape[1:]), tree)


def _stack(results: list[Any]) -> Tree:
    if isinstance(results[0], dict):
        return {key: torch.stack([r[key] for r in results]) for key in results[0]}
    if not isinstance(results[0], Tensor):
        raise TypeError(f"a prediction must be a tensor or a dict of tensors, got {type(results[0]).__name__}")
    return torch.stack(results)


def _same(alone: Tree, two: Any) -> bool:
    if isinstance(alone, dict):
        return isinstance(two, dict) and all(_same(x, two.get(key)) for key, x in alone.items())
    if not isinstance(two, Tensor) or two.shape[1:] != alone.shape[1:] or two.dtype != alone.dtype:
        return False
    return torch.allclose(two[:1], alone, rtol=1e-3, atol=1e-5, equal_nan=True)
