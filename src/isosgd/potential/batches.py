"""Batches: the tensors in them, and how many examples there are, in all and in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor


def tree_map(function: Any, tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and dicts.

    Example:
        >>> import torch
        >>> tree_map(len, (torch.zeros(3, 2), [{"mask": torch.zeros(4)}, "text"]))
        (3, [{'mask': 4}, 'text'])
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        every = [tree_map(function, value) for value in tree]
        if isinstance(tree, list):
            return every
        return type(tree)(*every) if hasattr(tree, "_fields") else tuple(every)  # named tuples keep their names
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    tree_map(found.append, tree)
    return found


def batch_length(batch: Any) -> int | None:
    """Number of examples in a batch: the rows of its first tensor that has any; None when there is none."""
    return next((len(t) for t in tensors_of(batch) if t.ndim), None)


def count_examples(data: Any) -> int | None:
    """Number of examples in a tuple of tensors or in a loader's data set; None when it cannot be known for certain."""
    if isinstance(data, tuple) and data and all(isinstance(x, Tensor) for x in data):
        lengths = [x.shape[0] if x.ndim else 0 for x in data]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors of data have different lengths: {lengths}; one row is one example")
        return lengths[0]
    examples = getattr(data, "dataset", None)
    if not isinstance(examples, Sized):
        return None
    # A sampler that visits only a part, or some rows more often, leaves N open: the user has to say.
    sampler = getattr(data, "sampler", None)
    if isinstance(sampler, Sized) and len(sampler) != len(examples):
        return None
    return len(examples)
