"""A function of parameters at many draws: several at once where it allows, one after the other where not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from isosgd.potential import Params

Tree = Tensor | dict[str, Tensor]
MOST_AT_ONCE = 64
HELD = 1 << 23  # numbers that draws worked on at once may take


class Mapped:
    """``function(params)`` over a leading dimension of draws, by `torch.func.vmap` where it gives the same.

    Whether it does is found out at the first call. Filters of convolutions are never mapped over: that turns one large
    convolution into many small ones.

    Args:
        function: from the parameters of a draw, and further arguments, to a tensor or a dict of tensors.
        dims: 0 for each further argument that has a leading dimension of draws, too, None for one that has not.
    """

    def __init__(self, function: Callable[..., Any], dims: tuple[int | None, ...] = (None,)) -> None:
        self.function, self.dims = function, dims
        self.at_once: bool | None = None  # not known yet

    def __call__(self, block: Params, *more: Any) -> Tree:
        """Results with a leading dimension of draws."""
        if self.at_once is None:
            self.at_once = self._try(block, *more)
        count = len(next(iter(block.values())))
        if self.at_once and count > 1:
            return self._map(block, *more)
        return _stack([self._single(block, k, *more) for k in range(count)])

    def _map(self, block: Params, *more: Any) -> Tree:
        found: Tree = vmap(self.function, (0, *self.dims[: len(more)]))(block, *more)
        return found

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
            found = self._map(two, *further)
        except Exception:  # whatever a user's code may raise under vmap
            return False
        return _same(alone, found)


def at_once(shapes: Collection[Sequence[int]], inputs: Any) -> int:
    """How many draws to work on at once, by what each takes: its parameters, and the widest layer for all inputs.

    Args:
        shapes: of the parameters of a draw.
        inputs: those for all draws.
    """
    sizes = [math.prod(shape) for shape in shapes]
    widest = max((max(shape, default=1) for shape in shapes), default=1)
    rows = rows_of(inputs) or 1
    held = max(sum(sizes), sum(t.numel() for t in tensors_of(inputs)), rows * widest)
    return max(1, min(MOST_AT_ONCE, HELD // max(1, held)))


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        every = (tree_map(function, value) for value in tree)
        return list(every) if isinstance(tree, list) else tuple(every)
    return tree


def _at(tree: Any, k: int) -> Any:
    return tree_map(lambda t: t[k], tree)


def _twice(tree: Any) -> Any:
    """The first entry of every tensor, two times."""
    return tree_map(lambda t: t[:1].expand(2, *t.shape[1:]), tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dicts."""
    found: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        found.append(t)
        return t

    tree_map(keep, tree)
    return found


def rows_of(tree: Any) -> int | None:
    """Number of examples: length of the first tensor that has one."""
    return next((len(t) for t in tensors_of(tree) if t.ndim), None)


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
