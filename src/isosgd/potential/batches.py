"""How many examples there are: in all, and in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import SequentialSampler


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
    # Of a fixed order the rest that fills no batch is never seen; of a shuffled one every example has its turn.
    size = getattr(data, "batch_size", None)
    if getattr(data, "drop_last", False) and isinstance(sampler, SequentialSampler) and isinstance(size, int):
        return len(examples) // size * size
    return len(examples)


def batch_length(batch: Any) -> int | None:
    """Number of examples in a batch: the rows of its first tensor; None when there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((length for part in batch if (length := batch_length(part)) is not None), None)
    return None
