"""Tensors in safetensors files: written without a copy, and checked before they are opened.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header with
dtype, shape and place of each tensor, the tensors. Any library that reads safetensors reads these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isosgd.store.errors import DamagedError, StoreError
from isosgd.store.files import from_json, open_plain, write_file

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
MOST_HEADER = 1 << 25
MOST_DIMENSIONS = 32
METADATA = "__metadata__"


class Entry(NamedTuple):
    """What a header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor; those of a copy where it does not lie in memory one after the other, on the CPU."""
    found = x.detach().cpu().contiguous()
    return found.as_strided((found.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Sequence[Tensor]], metadata: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Write tensors; one that is given as a list of its rows is written as ``[rows, *shape]``.

    Returns:
        The SHA-256 and the length of the file.
    """
    rows = {name: [x] if isinstance(x, Tensor) else list(x) for name, x in tensors.items()}
    # Those of larger elements first, as the format asks for, so that each is aligned.
    order = sorted(rows, key=lambda name: -rows[name][0].element_size())
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        parts, shape = rows[name], list(rows[name][0].shape)
        if name == METADATA:
            raise ValueError(f"a tensor cannot have the name {METADATA!r}; rename it")
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
    if len(text) > MOST_HEADER:
        raise StoreError(f"{path.name} would have a header of {len(text):,} bytes: more than {MOST_HEADER:,}")
    every = (part for name in order for part in rows[name] if part.numel())
    return write_file(path, chain([len(text).to_bytes(8, "little"), text], (raw(part).numpy() for part in every)))


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """What a file holds: its tensors and its metadata. A file that is not in order is refused, in little memory."""
    with open_plain(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MOST_HEADER, size - 8):
            raise DamagedError(path.name, f"its header of {length:,} bytes does not fit into {size:,}")
        header = from_json(file.read(length), path.name)
    if not isinstance(header, dict):
        raise DamagedError(path.name, "its header is no object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DamagedError(path.name, "its metadata is not text")
    found, places = {}, []
    for name, about in header.items():
        entry, begin, end = _entry(about)
        if entry is None or end - begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise DamagedError(path.name, f"its header is wrong about tensor {name[:80]!r}")
        found[name] = entry
        places.append((begin, end))
    reached = 0
    for begin, end in sorted(places):
        if begin != reached:
            raise DamagedError(path.name, "its tensors overlap or leave gaps")
        reached = end
    if reached != size - 8 - length:
        raise DamagedError(path.name, f"it has {size:,} bytes where its header says {8 + length + reached:,}")
    return found, metadata


def _entry(about: Any) -> tuple[Entry | None, int, int]:
    """An entry of a header, and where the tensor lies; None when it is not in order."""
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        return None, 0, 0
    code, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES or not counts(shape) or not counts(offsets):
        return None, 0, 0
    if len(shape) > MOST_DIMENSIONS or len(offsets) != 2:
        return None, 0, 0
    return Entry(DTYPES[code], tuple(shape)), offsets[0], offsets[1]


def counts(value: Any) -> bool:
    """Whether this is a list of numbers that count something."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)
