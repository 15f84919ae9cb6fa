"""Files that are whole or not there, whenever a program or a machine stops; and files of others, read with care.

A file is written under another name, brought to the disk, and only then given its name; then the folder is brought to
the disk. Whoever opens the name finds the old file or the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from isosgd.store.errors import DamagedError, StoreError

MOST_JSON = 1 << 25  # bytes
MOST_ITEMS = 2_000_000  # in a JSON file, so that it does not take up far more memory than on the disk
DEEPEST_JSON = 200
BLOCK = 1 << 20
HALF_WRITTEN = ".part"


def write_file(path: Path, parts: Iterable[Any]) -> tuple[str, int]:
    """Write parts (bytes or buffers) to a file at once, or not at all.

    Returns:
        The SHA-256 and the length.
    """
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
        half.unlink(missing_ok=True)  # gives back the space on a disk that is full
        raise
    sync_folder(path.parent)
    return digest.hexdigest(), length


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading. Links, pipes and devices are refused: they may lead anywhere, or never end."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise DamagedError(path.name, f"it cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(path.name, "it is not a plain file")
    return open(path, "rb")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in little memory."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def to_json(value: Any) -> bytes:
    """Plain values as JSON, the same for the same values."""
    return json.dumps(value, allow_nan=False, sort_keys=False, ensure_ascii=True, separators=(",", ":")).encode()


_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]', re.DOTALL)


def from_json(text: bytes, name: str) -> Any:
    """Plain values from JSON that may be anyone's: its length, the number of items and the depth are bounded first."""
    if len(text) > MOST_JSON:
        raise StoreError(f"{name} has {len(text):,} bytes of JSON: more than {MOST_JSON:,} is not read")
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_ITEMS:
        raise StoreError(f"{name} has more than {MOST_ITEMS:,} items of JSON")
    depth = 0
    for match in _TOKEN.finditer(text):
        first = text[match.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > DEEPEST_JSON:
            raise StoreError(f"{name} is nested more than {DEEPEST_JSON} deep")
    try:
        return json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name} is not JSON as it is written here: {str(error)[:200]}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def read_json(path: Path) -> Any:
    """A JSON file."""
    with open_plain(path) as file:
        text = file.read(MOST_JSON + 1)
    return from_json(text, path.name)
