"""The manifest: what a run is and which files hold it. It alone says what belongs to a run.

It contains its own SHA-256, to detect accidents. File names have a fixed form, so that none leads out of the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from isosgd.store.files import DTYPES, StoreError, dtype_name, plain, to_json, unpack, write_file

FORMAT = 2  # 1 had one checkpoint for all chains
NAME = "manifest.json"
FROZEN = "frozen.safetensors"
FILE_NAME = re.compile(r"(?:(?:draws|checkpoint|start)-[0-9]{6,9}(?:-[0-9]{4,6})?|frozen)\.safetensors")
PART_NAME = re.compile(r"part-[0-9]{4,6}")
DTYPE_NAMES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
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

    Of a model that ranks shared by rows, each rank has written its own: this file holds those of rank 0, and the
    buffers; ``others`` are the files of the ranks after it. Which rows a rank has is what `rows_of` says.
    """

    first: int
    count: int
    start: int
    stop: int
    step: int
    others: tuple[File, ...] = ()

    @property
    def files(self) -> tuple[File, ...]:
        """One for each rank that wrote it."""
        return (self, *self.others)

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {key: value for key, value in asdict(self).items() if key != "others" or value}


F = TypeVar("F", bound=File)


@dataclass(frozen=True)
class Spec:
    """A tensor of a draw: its shape, its dtype, and the dtype in which it is written."""

    shape: tuple[int, ...]
    dtype: str
    stored: str


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
        identity: what must match for the run to be resumed.
        tensors: the tensors of a draw.
        buffers: tensors of the network that change from draw to draw and are stored with it.
        complete: whether all draws are there.
        shards: the files that hold them.
        lost: dropped chains, with the number of their good draws.
        frozen: tensors of the network that do not change.
        starts: the trained networks that chains began with, a file each.
        checkpoints: from where to go on, by the first of the chains that run side by side; in a loop, by rank.
        seconds: time spent so far.
        number: number of the next checkpoint.
        parts: subfolders, each a run of its own, that together make this run; it then has nothing else.
    """

    info: dict[str, Any]
    identity: dict[str, Any]
    tensors: dict[str, Spec]
    buffers: dict[str, Spec] = field(default_factory=dict)
    complete: bool = False
    shards: list[Shard] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    frozen: File | None = None
    starts: list[File] = field(default_factory=list)
    checkpoints: dict[int, File] = field(default_factory=dict)
    seconds: float = 0.0
    number: int = 0
    parts: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Replace the old one."""
        body = {
            "format": FORMAT,
            "complete": self.complete,
            "info": plain(self.info),
            "identity": plain(self.identity),
            "tensors": {name: asdict(spec) for name, spec in self.tensors.items()},
            "buffers": {name: asdict(spec) for name, spec in self.buffers.items()},
            "lost": [list(pair) for pair in self.lost.items()],
            "frozen": None if self.frozen is None else asdict(self.frozen),
            **({"starts": [asdict(file) for file in self.starts]} if self.starts else {}),
            "checkpoints": [[first, asdict(file)] for first, file in self.checkpoints.items()],
            "seconds": self.seconds,
            "number": self.number,
            **({"parts": self.parts} if self.parts else {}),
            "shards": [shard.as_dict() for shard in self.shards],
        }
        write_file(folder / NAME, [b'{"sha256":"', _digest(body).encode(), b'",\n', _lines(body)[1:], b"\n"])

    @property
    def files(self) -> list[File]:
        """All that belong to the run, this one apart."""
        shards = [file for shard in self.shards for file in shard.files]
        return [*shards, *self.checkpoints.values(), *([self.frozen] if self.frozen else []), *self.starts]

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether a folder holds a run that overwriting would lose: one with draws or a checkpoint."""
        if not (folder / NAME).exists():
            return False
        found = Manifest.read(folder)
        return bool(found.shards or found.checkpoints or found.complete or found.parts)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder, checked."""
        path = folder / NAME
        if not path.exists():
            raise StoreError(f"{folder} holds no run: there is no {NAME} in it; sample(..., store=...) writes one")
        try:
            body = json.loads(path.read_bytes())
            digest, version = body.pop("sha256"), body["format"]
            if version == FORMAT and digest != _digest(body):
                raise ValueError("its own SHA-256 is another")
            if version == FORMAT:
                return _parsed(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"{path} cannot be used: it is damaged or was not written by isosgd ({error}); put back a copy of it, "
                "or begin another run"
            ) from error
        raise StoreError(
            f"{path} cannot be used: it has format {version}, this version of isosgd reads {FORMAT}: use the version "
            "it was written with"
        )


def _parsed(body: dict[str, Any]) -> Manifest:
    def specs(found: dict[str, Any]) -> dict[str, Spec]:
        return {name: Spec(tuple(about["shape"]), about["dtype"], about["stored"]) for name, about in found.items()}

    def file(kind: type[F], about: dict[str, Any]) -> F:
        others = {"others": tuple(file(File, one) for one in about["others"])} if "others" in about else {}
        return kind(**{**about, "file": _ours(FILE_NAME, about["file"]), **others})

    return Manifest(
        info=unpack(body["info"]),
        identity=unpack(body["identity"]),
        tensors=specs(body["tensors"]),
        buffers=specs(body["buffers"]),
        complete=body["complete"],
        shards=[file(Shard, about) for about in body["shards"]],
        lost={chain: length for chain, length in body["lost"]},
        frozen=None if body["frozen"] is None else file(File, body["frozen"]),
        starts=[file(File, about) for about in body.get("starts", [])],
        checkpoints={first: file(File, about) for first, about in body["checkpoints"]},
        seconds=body["seconds"],
        number=body["number"],
        parts=[_ours(PART_NAME, name) for name in body.get("parts", [])],
    )


def _ours(form: re.Pattern[str], name: str) -> str:
    """A file name from a manifest, checked against the form of ours: anyone may have written the manifest."""
    if form.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a file of ours")
    return name


def _lines(body: dict[str, Any]) -> bytes:
    """JSON with a line for each item and each shard, so that people can read it."""
    *items, (last, shards) = body.items()
    text = b",\n".join(to_json(key) + b":" + to_json(value) for key, value in items)
    rows = b",\n".join(to_json(shard) for shard in shards)
    return b"{" + text + b",\n" + to_json(last) + b":[" + (b"\n" + rows if rows else b"") + b"]}"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(body)).hexdigest()
