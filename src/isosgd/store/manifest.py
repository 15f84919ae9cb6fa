"""The manifest: what a run is, and its files. Only files in the manifest belong to a run.

It contains its own SHA-256, against accidents. File names have a fixed form, so that none leads out of the folder.
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

FORMAT = 2  # format 1 had one checkpoint for all chains
NAME = "manifest.json"
FROZEN = "frozen.safetensors"
FILE_NAME = re.compile(r"(?:(?:draws|checkpoint|start)-[0-9]{6,9}(?:-[0-9]{4,6})?|frozen)\.safetensors")
PART_NAME = re.compile(r"part-[0-9]{4,6}")
DTYPE_NAMES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
BUFFER = "buffer:"
"""Prefix of the names of buffers in a shard."""


@dataclass(frozen=True)
class File:
    """A file of the run."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Shard(File):
    """Draws ``start`` to ``stop`` of ``count`` chains from ``first`` on, which run together.

    Its tensors are ``[stop - start, count, *shape]``; ``step`` is the number of gradients of each chain so far.

    If ranks share a model by rows, each has written its own rows: this file has those of rank 0 and the buffers, and
    ``others`` are the files of the other ranks. `rows_of` gives the rows of a rank.
    """

    first: int
    count: int
    start: int
    stop: int
    step: int
    others: tuple[File, ...] = ()

    @property
    def files(self) -> tuple[File, ...]:
        """The files of all ranks."""
        return (self, *self.others)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {key: value for key, value in asdict(self).items() if key != "others" or value}


F = TypeVar("F", bound=File)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor of a draw, and the dtype in which it is stored."""

    shape: tuple[int, ...]
    dtype: str
    stored: str


def specs_of(tensors: Mapping[str, Tensor], stored: torch.dtype | None = None) -> dict[str, Spec]:
    """The specs of tensors; floating-point ones are stored in dtype ``stored``."""
    return {
        name: Spec(
            tuple(x.shape), dtype_name(x.dtype), dtype_name(stored if stored and x.is_floating_point() else x.dtype)
        )
        for name, x in tensors.items()
    }


@dataclass
class Manifest:
    """A stored run.

    Attributes:
        info: how the draws were made, as far as it is known.
        identity: what must not change when the run is resumed.
        tensors: the tensors of a draw.
        buffers: tensors of the network that change between draws and are stored with them.
        complete: whether all draws are there.
        shards: the files of the draws.
        lost: number of finite draws of dropped chains.
        frozen: tensors of the network that do not change.
        starts: the trained networks at which chains started.
        checkpoints: by the first of chains that run together; in a loop, by rank.
        seconds: time so far.
        number: of the next checkpoint.
        parts: subfolders that are runs of their own and make up this run, which then has no files.
        weights: what held-out examples say of the draws and the starts (`isosgd.sampling.weights`); empty if nothing.
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
    weights: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replace the manifest file."""
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
            **({"weights": plain(self.weights)} if self.weights else {}),
            "shards": [shard.as_dict() for shard in self.shards],
        }
        write_file(folder / NAME, [b'{"sha256":"', _digest(body).encode(), b'",\n', _lines(body)[1:], b"\n"])

    @property
    def files(self) -> list[File]:
        """All files of the run except the manifest."""
        shards = [file for shard in self.shards for file in shard.files]
        return [*shards, *self.checkpoints.values(), *([self.frozen] if self.frozen else []), *self.starts]

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether a folder holds a run with draws or a checkpoint, which must not be overwritten."""
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
        weights=unpack(body.get("weights", {})),
    )


def _ours(form: re.Pattern[str], name: str) -> str:
    """A file name from a manifest, checked against our form, since anyone may have edited the manifest."""
    if form.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a file of ours")
    return name


def _lines(body: dict[str, Any]) -> bytes:
    """Readable JSON, with a line for each item and each shard."""
    *items, (last, shards) = body.items()
    text = b",\n".join(to_json(key) + b":" + to_json(value) for key, value in items)
    rows = b",\n".join(to_json(shard) for shard in shards)
    return b"{" + text + b",\n" + to_json(last) + b":[" + (b"\n" + rows if rows else b"") + b"]}"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(body)).hexdigest()
