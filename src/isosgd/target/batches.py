"""Batches as nested tuples and dicts of tensors, and numbers of examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

LABELS = ("labels", "label", "targets", "target", "y")
"""Names of labels in a dict batch, in order of precedence."""


def is_array(x: Any) -> bool:
    """Whether it is a tensor, a numpy array, or a frame or series of pandas or polars."""
    return isinstance(x, Tensor | np.ndarray) or hasattr(x, "to_numpy")


def as_tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An array or frame as a tensor; a tensor as it is.

    Args:
        x: as for `is_array`.
        dtype: of the model; floating-point arrays are cast to it. Integers stay integers.

    Example:
        >>> as_tensor(np.array([0.5, 1.0]), torch.float32), as_tensor(np.array([3, 1]), torch.float32)
        (tensor([0.5000, 1.0000]), tensor([3, 1]))
    """
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):
        x = np.stack([_numbers(x[name].to_numpy(), f"column {name!r}") for name in x.columns], 1)
    array = _numbers(x if isinstance(x, np.ndarray) else x.to_numpy(), f"the {type(x).__name__}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    # torch needs writable memory in native byte order.
    good = array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0
    tensor = torch.from_numpy(array if good else array.astype(array.dtype.newbyteorder("=")))
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _numbers(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{what} of the data is of type {array.dtype}, not of numbers (missing values make it so, too): leave it "
            "out, or encode it as numbers first"
        )
    return array.astype(np.float64) if array.dtype.itemsize > 8 else array


def with_tensors(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Nested tuples, lists and dicts with their arrays and frames as tensors."""
    if is_array(tree):
        return as_tensor(tree, dtype)
    if isinstance(tree, Mapping):
        return {key: with_tensors(value, dtype) for key, value in tree.items()} if _arrays_in(tree.values()) else tree
    if isinstance(tree, tuple | list) and _arrays_in(tree):
        every = [with_tensors(value, dtype) for value in tree]
        return every if isinstance(tree, list) else tuple(every)
    return tree


def _arrays_in(values: Iterable[Any]) -> bool:
    return any(not isinstance(x, Tensor) and (is_array(x) or isinstance(x, tuple | list | Mapping)) for x in values)


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
        return type(tree)(*every) if hasattr(tree, "_fields") else tuple(every)  # named tuples
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    tree_map(found.append, tree)
    return found


def finite_values(tree: Any) -> bool:
    """Whether all numbers in nested tuples, lists and dicts are finite."""
    return all(bool(t.isfinite().all()) for t in tensors_of(tree) if t.is_floating_point())


def batch_length(batch: Any) -> int | None:
    """Number of examples in a batch: the rows of its first tensor with rows; None if there is none."""
    return next((len(t) for t in tensors_of(batch) if t.ndim), None)


def label_name(batch: Mapping[str, Any], labels: str | None = None) -> str:
    """Name of the labels in a dict batch: the given one, or the first of `LABELS`."""
    name = labels if labels is not None else next((name for name in LABELS if name in batch), LABELS[0])
    if name not in batch:
        raise ValueError(
            f"a batch has no {name!r}, only {list(batch)}: name what is to be predicted, "
            "Target.from_module(..., labels='...')"
        )
    return name


def inputs_of(batch: Any, labels: str | None = None) -> Any:
    """A network's inputs in a batch: a dict without its labels, all but the last of a tuple, or the tensor itself.

    Example:
        >>> inputs_of({"input_ids": 1, "labels": 2}), inputs_of((1, 2, 3)), inputs_of(1)
        ({'input_ids': 1}, (1, 2), (1,))
    """
    if isinstance(batch, Mapping):
        names = LABELS if labels is None else (labels,)
        last = next((name for name in names if name in batch), None)
        return {name: x for name, x in batch.items() if name != last}
    if isinstance(batch, tuple | list):
        return tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
    return (batch,)


def labels_of(batch: Any, labels: str | None = None) -> Any:
    """The labels of a batch: the last of a tuple, or a dict's entry of that name."""
    return batch[label_name(batch, labels)] if isinstance(batch, Mapping) else batch[-1]


def with_labels(inputs: Any, y: Any, labels: str | None = None) -> Any:
    """Inputs and labels as a batch."""
    if isinstance(inputs, Mapping):
        return {**inputs_of(inputs, labels), labels or LABELS[0]: y}
    return (*inputs, y) if isinstance(inputs, tuple | list) else (inputs, y)


def count_examples(data: Any) -> int | None:
    """Number of examples in tensors or in a loader's data set; None if it is not certain."""
    values = list(data.values() if isinstance(data, Mapping) else data) if isinstance(data, tuple | Mapping) else []
    if values and all(isinstance(x, Tensor) for x in values):
        lengths = [x.shape[0] if x.ndim else 0 for x in values]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors of data have different lengths: {lengths}; one row is one example")
        return lengths[0]
    examples = getattr(data, "dataset", None)
    if not isinstance(examples, Sized):
        return None
    # N is unknown with a sampler that visits only a part, or some rows more often. Ranks that share the data visit all
    # of it together.
    sampler = getattr(data, "sampler", None)
    shared = isinstance(sampler, DistributedSampler)
    if isinstance(sampler, Sized) and len(sampler) != len(examples) and not shared:
        return None
    # With drop_last a fixed order never uses the last examples; a shuffled one does.
    size = getattr(data, "batch_size", None)
    if getattr(data, "drop_last", False) and isinstance(sampler, SequentialSampler) and isinstance(size, int):
        return len(examples) // size * size
    return len(examples)
