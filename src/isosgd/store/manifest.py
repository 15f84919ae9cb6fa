"""The manifest: what a run is, and which files hold it. It is the only file that says what belongs to a run.

Everything in it may be anyone's, so it is checked item by item before anything is done with it. Files have names that
are ours to give; nothing in a manifest leads out of the folder.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from isosgd.store.errors import StoreError
from isosgd.store.files import (
    DTYPES,
    MOST_DIMENSIONS,
    counts,
    dtype_name,
    plain,
    read_json,
    to_json,
    unpack,
    write_file,
)

FORMAT = 2  # 1 had one checkpoint for all chains
NAME = "manifest.json"
FROZEN = "frozen.safetensors"
FILE_NAME = re.compile(r"(?:draws|checkpoint)-[0-9]{6,9}\.safetensors|frozen\.safetensors")
DIGEST = re.compile(r"[0-9a-f]{64}")
DTYPE_NAMES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
MOST_CHAINS = 1_000_000
MEND = "put back a copy of it, or begin another run"
BUFFER = "buffer:"
"""What the name of a buffer in a shard begins with."""


@dataclass(frozen=True)
class File:
    """A file of the run."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Shard(File):
    """Draws ``start`` to ``stop`` of ``count`` chains from ``first`` on, which run side by side.

    Its tensors are ``[stop - start, count, *shape]``. ``step`` is the number of gradients that each chain had taken.
    """

    first: int
    count: int
    start: int
    stop: int
    step: int


@dataclass(frozen=True)
class Spec:
    """A tensor of a draw: its shape, its dtype, and the dtype in which it is written."""

    shape: tuple[int, ...]
    dtype: str
    stored: str

    @property
    def bytes(self) -> int:
        """Of one of them."""
        return math.prod(self.shape) * DTYPE_NAMES[self.stored].itemsize


def specs_of(tensors: Mapping[str, Tensor], stored: torch.dtype | None = None) -> dict[str, Spec]:
    """What tensors are; floating-point ones are to be written in dtype ``stored``."""
    return {
        name: Spec(
            tuple(x.shape), dtype_name(x.dtype), dtype_name(stored if stored and x.is_floating_point() else x.dtype)
        )
        for name, x in tensors.items()
    }


@dataclass
class Manifest:
    """A run on the disk.

    Attributes:
        info: how the draws come about, as far as is known.
        identity: what must be the same for the run to be resumed.
        tensors: what a draw consists of.
        buffers: tensors of the network that change from draw to draw and go with it.
        complete: whether all draws are there.
        shards: where they are.
        lost: chains that were given up, with the number of their good draws.
        frozen: tensors of the network that do not change.
        checkpoints: from where to go on, by the first of chains that run side by side.
        seconds: spent so far.
        number: of the next file.
    """

    info: dict[str, Any]
    identity: dict[str, Any]
    tensors: dict[str, Spec]
    buffers: dict[str, Spec] = field(default_factory=dict)
    complete: bool = False
    shards: list[Shard] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    frozen: File | None = None
    checkpoints: dict[int, File] = field(default_factory=dict)
    seconds: float = 0.0
    number: int = 0

    def write(self, folder: Path) -> None:
        """Put it in the place of the old one."""
        body = {
            "format": FORMAT,
            "complete": self.complete,
            "info": plain(self.info),
            "identity": plain(self.identity),
            "tensors": {name: asdict(spec) for name, spec in self.tensors.items()},
            "buffers": {name: asdict(spec) for name, spec in self.buffers.items()},
            "lost": [list(pair) for pair in self.lost.items()],
            "frozen": None if self.frozen is None else asdict(self.frozen),
            "checkpoints": [[first, asdict(file)] for first, file in self.checkpoints.items()],
            "seconds": self.seconds,
            "number": self.number,
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_file(folder / NAME, [b'{"sha256":"', _digest(body).encode(), b'",\n', _lines(body)[1:], b"\n"])

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether a folder holds a run that would be lost: one with draws, or with a checkpoint."""
        if not (folder / NAME).exists():
            return False
        found = Manifest.read(folder)
        return bool(found.shards or found.checkpoints or found.complete)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder, checked."""
        path = folder / NAME
        if not path.exists():
            raise StoreError(f"{folder} holds no run: there is no {NAME} in it; sample(..., store=...) writes one")
        try:
            found = read_json(path)
        except StoreError as error:
            raise StoreError(f"{path} cannot be used: {error}; {MEND}") from error
        try:
            return _parse(found)
        except StoreError as error:
            raise StoreError(f"{path} cannot be used: {error}") from error


def _lines(body: dict[str, Any]) -> bytes:
    """JSON with a line for each item and each shard, so that it can be looked at."""
    *items, (last, shards) = body.items()
    text = b",\n".join(to_json(key) + b":" + to_json(value) for key, value in items)
    rows = b",\n".join(to_json(shard) for shard in shards)
    return b"{" + text + b",\n" + to_json(last) + b":[" + (b"\n" + rows if rows else b"") + b"]}"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(body)).hexdigest()


# -- reading what may be anyone's ----------------------------------------------------------------------------------


def _wrong(what: str) -> NoReturn:
    raise StoreError(f"it is damaged or was not written by isosgd ({what}); {MEND}")


def _want(good: bool, what: str) -> None:
    if not good:
        _wrong(what)


def _parse(found: Any) -> Manifest:
    _want(isinstance(found, dict), "no object")
    digest = found.pop("sha256", None)
    if found.get("format") != FORMAT:
        raise StoreError(
            f"it has format {str(found.get('format'))[:20]}, this version of isosgd reads {FORMAT}: use the version it "
            "was written with"
        )
    _want(digest == _digest(found), "its own SHA-256 is another")
    names = {"format", "complete", "info", "identity", "tensors", "buffers", "lost", "frozen", "checkpoints", "seconds",
             "number", "shards"}  # fmt: skip
    _want(set(found) == names, "items are missing or unknown")
    for name in ("lost", "shards", "checkpoints"):
        _want(isinstance(found[name], list), name)
    for name, kind in (("complete", bool), ("info", dict), ("identity", dict)):
        _want(isinstance(found[name], kind), name)
    for name in ("tensors", "buffers"):
        _want(isinstance(found[name], dict), name)
    _want(counts([found["number"]]) and isinstance(found["seconds"], int | float), "number")
    _want(all(counts(pair) and len(pair) == 2 for pair in found["lost"]), "lost")
    manifest = Manifest(
        info=unpack(found["info"]),
        identity=unpack(found["identity"]),
        tensors={name: _spec(about) for name, about in found["tensors"].items()},
        buffers={name: _spec(about) for name, about in found["buffers"].items()},
        complete=found["complete"],
        shards=[_shard(about) for about in found["shards"]],
        lost={chain: length for chain, length in found["lost"]},
        frozen=None if found["frozen"] is None else _file(found["frozen"], lambda name: name == FROZEN),
        checkpoints=dict(_checkpoint(pair) for pair in found["checkpoints"]),
        seconds=float(found["seconds"]),
        number=found["number"],
    )
    _want(isinstance(manifest.info, dict) and isinstance(manifest.identity, dict), "info or identity")
    _check_draws(manifest)
    return manifest


def _numbered(kind: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(kind)


def _file(about: Any, allowed: Callable[[str], bool]) -> File:
    _want(isinstance(about, dict) and set(about) == {"file", "sha256", "bytes"}, "a file")
    name, digest, length = about["file"], about["sha256"], about["bytes"]
    _want(isinstance(name, str) and FILE_NAME.fullmatch(name) is not None and allowed(name), "the name of a file")
    _want(isinstance(digest, str) and DIGEST.fullmatch(digest) is not None, "the SHA-256 of a file")
    _want(counts([length]), "the length of a file")
    return File(name, digest, length)


def _checkpoint(pair: Any) -> tuple[int, File]:
    _want(isinstance(pair, list) and len(pair) == 2 and counts(pair[:1]), "a checkpoint")
    return pair[0], _file(pair[1], _numbered("checkpoint"))


def _shard(about: Any) -> Shard:
    extra = ("first", "count", "start", "stop", "step")
    _want(isinstance(about, dict) and all(name in about for name in extra), "a shard")
    numbers = [about.pop(name) for name in extra]
    _want(counts(numbers), "the numbers of a shard")
    file = _file(about, _numbered("draws"))
    return Shard(file.file, file.sha256, file.bytes, *numbers)


def _spec(about: Any) -> Spec:
    _want(isinstance(about, dict) and set(about) == {"shape", "dtype", "stored"}, "a tensor")
    shape = about["shape"]
    _want(counts(shape) and len(shape) <= MOST_DIMENSIONS, "the shape of a tensor")
    for name in (about["dtype"], about["stored"]):
        _want(isinstance(name, str) and name in DTYPE_NAMES, "the dtype of a tensor")
    dtypes = {DTYPE_NAMES[about["dtype"]], DTYPE_NAMES[about["stored"]]}
    _want(len(dtypes) == 1 or all(dtype.is_floating_point for dtype in dtypes), "the dtype a tensor is stored in")
    return Spec(tuple(shape), about["dtype"], about["stored"])


def _check_draws(manifest: Manifest) -> None:
    """Draws of a chain follow one another, none is there twice, and files can be as long as they must be."""
    each = sum(spec.bytes for spec in (*manifest.tensors.values(), *manifest.buffers.values()))
    reached: dict[int, tuple[int, int]] = {}
    for shard in manifest.shards:
        count, stop = reached.get(shard.first, (shard.count, 0))
        _want(shard.start == stop < shard.stop and shard.count == count > 0, "the order of shards")
        _want(shard.bytes > (shard.stop - shard.start) * shard.count * each, "the length of a shard")
        reached[shard.first] = (count, shard.stop)
    _want(sum(count for count, _ in reached.values()) <= MOST_CHAINS, "the number of chains")
    _want(all(spec.bytes for spec in manifest.tensors.values()), "a tensor without elements")
    ends = sorted((first, first + count) for first, (count, _) in reached.items())
    _want(all(a[1] <= b[0] for a, b in pairwise(ends)), "chains that overlap")
    _want(len({shard.file for shard in manifest.shards}) == len(manifest.shards), "shards in one file")
    _want(bool(manifest.tensors) or not manifest.shards, "draws of nothing")
