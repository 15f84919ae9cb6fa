"""Reader of idx files, the format of MNIST: a header of sizes, then bytes.

Layout: two zero bytes, a byte for the type (8 is uint8), a byte for the number of dimensions, each dimension as a
big-endian 32-bit integer, and the values in row-major order. Files may be compressed by gzip.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from experiments.data.files import BROKEN, Readable, read_exactly

LIMIT = 1 << 30
"""Most bytes that a file may claim to hold by default; MNIST's largest holds 47 million."""

UINT8 = 8
GZIP_MAGIC = b"\x1f\x8b"
GZIP_RATIO = 1032  # deflate cannot pack more tightly than this


def read_idx(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Tensor:
    """The values of an idx file, compressed or not, as a uint8 tensor.

    Args:
        path: the file. Whether it is compressed is seen from its content, not its name.
        limit: refuse a header that promises more bytes than this.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an idx file of bytes, or its length is not what its header says.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "labels"
        ...     _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
        ...     read_idx(file)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of an idx file, plain or compressed by gzip")
    size = path.stat().st_size
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        if not packed:
            return _read(file, path, size, limit)
        with gzip.GzipFile(fileobj=file) as unpacked:
            return _read(unpacked, path, GZIP_RATIO * size, limit)


def _read(stream: Readable, path: Path, most: int, limit: int) -> Tensor:
    """Header, then values; ``most`` is what a file of this size can hold at all."""
    magic = _header(stream, 4, path)
    if magic[:2] != b"\0\0" or magic[3] == 0:
        raise ValueError(f"{path} is not an idx file: it starts with {magic.hex(' ')}, not 00 00 08 and dimensions")
    if magic[2] != UINT8:
        raise ValueError(f"{path} holds values of idx type {magic[2]:#04x}; only 0x08, uint8, is read")
    shape = struct.unpack(f">{magic[3]}I", _header(stream, 4 * magic[3], path))
    count = math.prod(shape)
    if count == 0:
        raise ValueError(f"{path} has sizes {shape}: it holds no values")
    if count > limit:
        raise ValueError(f"{path} claims {count:,} values, sizes {shape}; the limit is {limit:,}, see read_idx(limit=)")
    if count > most:
        raise ValueError(f"{path} claims {count:,} values, sizes {shape}, more than a file of its length can hold")
    return torch.frombuffer(read_exactly(stream, count, path), dtype=torch.uint8).reshape(shape)


def _header(stream: Readable, count: int, path: Path) -> bytes:
    try:
        found = stream.read(count)
    except BROKEN as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); get it again") from error
    if len(found) < count:
        raise ValueError(f"{path} ends inside its header: it is truncated or not an idx file; get it again")
    return found
