"""Checks of the arguments of scores, and the reduction over examples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "none"]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SUM_TOLERANCE = 1e-2  # of sums of probabilities: bfloat16 has two to three digits


def numbers(name: str, value: Tensor, *dims: str) -> Tensor:
    """The tensor in float64; raises unless it has these dimensions and finite values.

    Example:
        >>> numbers("y", torch.ones(2, 1), "n")
        Traceback (most recent call last):
        ValueError: y has shape [2, 1] but must be [n]; squeeze or reshape it
    """
    _check_shape(name, value, dims)
    if value.is_complex():
        raise TypeError(f"{name} has complex values; scores need real ones")
    if not bool(value.isfinite().all()):
        where = (~value.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name} is {float(value[tuple(where)])} at {where}; drop what diverged before it is scored")
    return value.detach().double()


def probabilities(value: Tensor, *dims: str) -> Tensor:
    """Class probabilities in float64; raises unless they sum to 1 along the last dimension."""
    found = numbers("probabilities", value, *dims)
    sums = found.sum(-1)
    if bool((found < 0).any()) or bool(((sums - 1).abs() > SUM_TOLERANCE).any()):
        low, high = float(sums.min()), float(sums.max())
        raise ValueError(
            f"probabilities must be at least 0 and sum to 1 along the last dimension: the least is "
            f"{float(found.min()):g}, sums go from {low:g} to {high:g}; take the softmax of logits first"
        )
    return found


def labels(value: Tensor, like: Tensor) -> Tensor:
    """Class labels ``[n]``; raises unless they fit the probabilities ``like``, ``[n, classes]``."""
    _check_shape("y", value, ("n",))
    if value.dtype not in INTEGERS:
        raise TypeError(f"y of dtype {value.dtype} must be class labels, integers from 0")
    same_length("y", value, len(like))
    classes = like.shape[-1]
    if bool(((value < 0) | (value >= classes)).any()):
        raise ValueError(
            f"y goes from {int(value.min())} to {int(value.max())}; {classes} classes are 0 to {classes - 1}"
        )
    return value.long()


def same_length(name: str, value: Tensor, length: int) -> None:
    """Raise if a tensor has another number of examples than the predictions."""
    if len(value) != length:
        raise ValueError(f"{name} has {len(value)} examples, the predictions have {length}; they must be the same ones")


def reduce(values: Tensor, reduction: Reduction) -> Tensor:
    """The mean over examples, or the score of each."""
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction = {reduction!r} must be 'mean' or 'none'")
    return values.mean() if reduction == "mean" else values


def between_0_and_1(name: str, value: float) -> float:
    """The number; raises unless it is strictly between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} = {value!r} must lie between 0 and 1, both excluded")
    return float(value)


def _check_shape(name: str, value: Tensor, dims: tuple[str, ...]) -> None:
    expected = f"[{', '.join(dims)}]"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} of type {type(value).__name__}: pass a tensor {expected}")
    if value.ndim != len(dims):
        raise ValueError(f"{name} has shape {list(value.shape)} but must be {expected}; squeeze or reshape it")
    if not value.numel():
        raise ValueError(f"{name} of shape {list(value.shape)} is empty; there is nothing to score")
