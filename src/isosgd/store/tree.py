"""Nested states as JSON and tensors, without pickle.

Dicts, lists, tuples, strings, numbers, None, tensors and numpy arrays, nested in any way, become plain values that JSON
can hold and a dict of tensors; and come back the same, bit for bit. Nothing else is taken, in either direction.

What JSON does not have is written as a dict with one key that begins with ``$``: ``{"$tensor": "0"}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isosgd.store.errors import StoreError

DEEPEST = 64


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Plain values and tensors for any nested state.

    Example:
        >>> plain, tensors = pack({"rate": float("nan"), "shape": (2, 3), "state": {0: torch.ones(2)}})
        >>> plain
        {'rate': {'$float': 'nan'}, 'shape': {'$tuple': [2, 3]}, 'state': {'$items': [[0, {'$tensor': '0'}]]}}
        >>> unpack(plain, tensors)["state"]
        {0: tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, tensors, 0), tensors


def plain(value: Any) -> Any:
    """`pack` for what holds no tensors."""
    packed, tensors = pack(value)
    if tensors:
        raise TypeError("a tensor stands where only plain values belong")
    return packed


def _pack(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"a state is nested more than {DEEPEST} deep: does it hold itself?")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.ndarray):
        return {"$array": _name(torch.from_numpy(np.array(value, order="C")), tensors)}
    if isinstance(value, Tensor):
        # In the order in which it lies in memory: products of matrices round otherwise in another.
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda i: -strides[i])
        turned = value.detach().permute(order)
        if value.is_contiguous() or not turned.is_contiguous():
            return {"$tensor": _name(value.detach(), tensors)}
        return {"$permuted": [_name(turned, tensors), *order]}
    if isinstance(value, list):
        return [_pack(item, tensors, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, tensors, depth + 1) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, tensors, depth + 1) for key, item in value.items()}
        pairs = [[_pack(part, tensors, depth + 2) for part in pair] for pair in value.items()]
        return {"$items": pairs}
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be written to a store, which holds tensors, numbers and text"
    )


def _name(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    key = str(len(tensors))
    tensors[key] = tensor
    return key


def unpack(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """What `pack` was given."""
    try:
        return _unpack(value, tensors or {}, 0)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"a stored state cannot be read: {type(error).__name__}: {error}") from error


def _unpack(value: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > 2 * DEEPEST:
        raise StoreError("a stored state is nested too deeply")
    if isinstance(value, list):
        return [_unpack(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: _unpack(item, tensors, depth + 1) for name, item in value.items()}
    inner = value[key]
    if len(value) > 1:
        raise StoreError(f"a stored state has {key!r} beside other keys")
    if key == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if key == "$tensor":
        return tensors[inner]
    if key == "$permuted":
        name, *order = inner
        return tensors[name].permute([order.index(i) for i in range(len(order))])
    if key == "$array":
        return tensors[inner].numpy()
    if key == "$tuple":
        return tuple([_unpack(item, tensors, depth + 1) for item in inner])
    if key == "$items":
        return {_unpack(k, tensors, depth + 1): _unpack(v, tensors, depth + 1) for k, v in inner}
    raise StoreError(f"a stored state has the unknown mark {key[:20]!r}")
