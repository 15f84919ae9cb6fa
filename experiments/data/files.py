"""Reading streams that may be truncated, too long or hostile, and writing files whole or not at all."""

from __future__ import annotations

import lzma
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

CHUNK = 1 << 20
# What the decompressors of the standard library raise on broken input; gzip's own error is an OSError.
BROKEN = (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)


class Readable(Protocol):
    """What the readers need of a stream."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""


def read_exactly(stream: Readable, count: int, path: Path) -> bytearray:
    """Exactly ``count`` bytes, after which the stream must end.

    Memory grows with what arrives, not with what was promised, and at most one byte more than promised is taken: a
    small file can neither claim nor unpack to more than its reader allowed.

    Example:
        >>> import io
        >>> read_exactly(io.BytesIO(b"abc"), 3, Path("x"))
        bytearray(b'abc')
    """
    found = read_at_most(stream, count + 1, path)
    if len(found) > count:
        raise ValueError(f"{path} holds more than the {count:,} bytes that it should; it is not what it says it is")
    if len(found) < count:
        raise ValueError(f"{path} ends after {len(found):,} of {count:,} bytes: it is truncated; get it again")
    return found


def read_at_most(stream: Readable, limit: int, path: Path) -> bytearray:
    """What the stream holds, up to ``limit`` bytes; an error that names the file when it cannot be unpacked."""
    found = bytearray()
    try:
        while len(found) < limit and (chunk := stream.read(min(CHUNK, limit - len(found)))):
            found += chunk
    except BROKEN as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); get it again") from error
    return found


def write_whole(path: Path, chunks: Iterable[bytes | bytearray]) -> None:
    """Write a file that gets its name only when all of it is on the disk; an error on the way leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename is one step on one file system.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
