"""Atomic files: tensors and nested states, written completely or not at all, without pickle.

A file is written under another name, synced to disk and renamed; then the folder is synced. Whoever opens the name
finds the old file or the new one.

Tensors are in safetensors files (https://github.com/huggingface/safetensors). A nested state (dicts, lists, tuples,
strings, numbers, None, tensors and numpy arrays) becomes JSON values and a dict of tensors, and is restored bit for
bit; other types are refused. Types that JSON lacks are written as a dict with one key that begins with ``$``:
``{"$tensor": "0"}``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

BLOCK = 1 << 20
HALF_WRITTEN = ".part"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
DEEPEST = 64


class StoreError(ValueError):
    """A store, or a part of it, cannot be read: it is damaged, of another format, or no store."""


class DamagedError(StoreError):
    """A file of a store has changed since it was written.

    Attributes:
        file: its name in the folder.
    """

    def __init__(self, file: str, what: str) -> None:
        super().__init__(f"{file} is damaged: {what}")
        self.file = file


# -- files ------------------------------------------------------------------------------------------------------------


def write_file(path: Path, parts: Iterable[Any]) -> tuple[str, int]:
    """Write parts (bytes or buffers) to a file, completely or not at all; returns SHA-256 and length."""
    half = path.with_name(f".{path.name}{HALF_WRITTEN}")
    digest, length = hashlib.sha256(), 0
    try:
        with open(half, "wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
                length += memoryview(part).nbytes
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    except OSError:
        half.unlink(missing_ok=True)  # frees the space if the disk is full
        raise
    sync_folder(path.parent)
    return digest.hexdigest(), length


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, if the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise DamagedError(path.name, f"it cannot be opened ({error.strerror})") from error
    return digest.hexdigest()


def to_json(value: Any) -> bytes:
    """Canonical JSON: the same bytes for the same values."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


# -- tensors ----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The header of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor; copied if it is not contiguous or not on the CPU."""
    found = x.detach().cpu().contiguous()
    return found.as_strided((found.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Sequence[Tensor]], metadata: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Write tensors to a file without copying them; returns SHA-256 and length.

    A tensor given as a list of its rows is written as ``[rows, *shape]``.
    """
    rows = {name: [x] if isinstance(x, Tensor) else list(x) for name, x in tensors.items()}
    # Larger elements first, as the format requires for alignment.
    order = sorted(rows, key=lambda name: -rows[name][0].element_size())
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        parts, shape = rows[name], list(rows[name][0].shape)
        if parts[0].dtype not in CODES:
            raise ValueError(f"tensor {name!r} is {parts[0].dtype}, which a store does not hold")
        begin, end = end, end + sum(part.numel() * part.element_size() for part in parts)
        header[name] = {
            "dtype": CODES[parts[0].dtype],
            "shape": shape if isinstance(tensors[name], Tensor) else [len(parts), *shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    every = (part for name in order for part in rows[name] if part.numel())
    return write_file(path, chain([len(text).to_bytes(8, "little"), text], (raw(part).numpy() for part in every)))


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a file; the safetensors library checks the header."""
    try:
        with safe_open(str(path), "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: Entry(DTYPES[x.get_dtype()], tuple(x.get_shape())) for name, x in slices.items()}
            return found, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedError(path.name, f"its header is wrong: {str(error)[:200]}") from error


# -- nested states ----------------------------------------------------------------------------------------------------


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A nested state as JSON values and tensors.

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
    """`pack` for a state without tensors."""
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
        # Keep the memory layout: matrix products of another one round differently.
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
    """The inverse of `pack`."""
    try:
        return _unpack(value, tensors or {})
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StoreError(f"a stored state cannot be read: {type(error).__name__}: {error}") from error


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: _unpack(item, tensors) for name, item in value.items()}
    inner = value[key]
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
        return tuple([_unpack(item, tensors) for item in inner])
    if key == "$items":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in inner}
    raise ValueError(f"the mark {key!r} is unknown")
