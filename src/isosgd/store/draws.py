"""Stored draws, read when they are needed."""

from __future__ import annotations

import operator
import os
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from isosgd.errors import SamplingWarning
from isosgd.samplers.shards import rows_of
from isosgd.store.files import DamagedError, Entry, read_header, sha256_of
from isosgd.store.manifest import BUFFER, DTYPE_NAMES, File, Manifest, Shard, Spec

OPEN_BYTES = 1 << 26  # of shards kept open, since mapped pages count as memory of the process

Damaged = Literal["refuse", "drop"]
Rows = Mapping[str, tuple[int, int]]
"""First row and end, by name of a tensor."""


def rectangle(lengths: Mapping[int, int]) -> tuple[list[int], int]:
    """The chains and the common number of draws that give the most draws in all.

    Example:
        >>> rectangle({0: 100, 1: 100, 2: 30})
        ([0, 1], 100)
    """
    best: tuple[int, int, list[int]] = (0, 0, [])
    for length in {n for n in lengths.values() if n}:
        chains = [chain for chain, n in lengths.items() if n >= length]
        best = max(best, (length * len(chains), len(chains), chains))
    return best[2], best[0] // max(best[1], 1)


class Shards:
    """The shards of a run, checked at first use and mapped into memory while in use.

    ``damaged="refuse"`` raises `DamagedError` at the first use of a shard that has changed. ``"drop"`` checks all
    shards now, warns of changed ones and leaves them out. ``verify`` also checks all now.
    """

    def __init__(self, folder: Path, manifest: Manifest, damaged: Damaged = "refuse", verify: bool = False) -> None:
        self.folder, self.manifest = folder, manifest
        self._checked: set[str] = set()
        self._open: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self.good: list[Shard] = []
        for shard in manifest.shards:
            try:
                for file in shard.files:
                    look(folder, file)
                if verify or damaged == "drop":
                    self.check(shard)
            except DamagedError as error:
                if damaged == "refuse":
                    raise
                number = (shard.stop - shard.start) * shard.count
                warnings.warn(f"{number} draws are left out: {error}", SamplingWarning, stacklevel=5)
            else:
                self.good.append(shard)

    def check(self, shard: Shard) -> None:
        """Compare SHA-256 and header of its files with the manifest."""
        for rank in range(len(shard.files)):
            self._check_file(shard, rank)

    def _check_file(self, shard: Shard, rank: int) -> None:
        about = shard.files[rank]
        if about.file in self._checked:
            return
        path = self.folder / about.file
        check_file(path, about)
        header, _ = read_header(path)
        lead, expected = (shard.stop - shard.start, shard.count), {}
        for name, spec in self.specs.items():
            first, last = self._held(shard, rank, name)
            if rank == 0 or not name.startswith(BUFFER):
                shape = (last - first, *spec.shape[1:]) if shard.others else spec.shape
                expected[name] = Entry(DTYPE_NAMES[spec.stored], (*lead, *shape))
        if header != expected:
            raise DamagedError(about.file, "it holds other tensors than the manifest says")
        self._checked.add(about.file)

    def _held(self, shard: Shard, rank: int, name: str) -> tuple[int, int]:
        """First row and end of the rows of a tensor in a file of a shard."""
        shape = self.specs[name].shape
        if name.startswith(BUFFER) or not shape:
            return (0, shape[0] if shape else 1) if rank == 0 else (0, 0)
        return rows_of(shape[0], rank, len(shard.files))

    @property
    def specs(self) -> dict[str, Spec]:
        """All tensors of a shard."""
        buffers = {BUFFER + name: spec for name, spec in self.manifest.buffers.items()}
        return {**self.manifest.tensors, **buffers}

    def read(
        self, shard: Shard, names: Iterable[str], place: tuple[Any, Any], rows: Rows | None = None
    ) -> dict[str, Tensor]:
        """Parts of tensors of a shard, in the dtype in which they were drawn.

        Args:
            place: which draws, and which chains.
            rows: first row and end, for tensors of which only some rows are read. Files without them stay closed.
        """
        found = {}
        for name in names:
            spec, parts = self.specs[name], []
            for rank in range(len(shard.files)):
                begin, end = self._held(shard, rank, name)
                first, last = (rows or {}).get(name, (begin, end))
                first, last = max(first, begin), min(last, end)
                if first < last or not (rows or shard.others):
                    part = place if last - first == end - begin else (*place, slice(first - begin, last - begin))
                    parts.append(self._opened(shard, rank).get_slice(name)[part])
            parts = parts or [torch.empty(0, *spec.shape[1:], dtype=DTYPE_NAMES[spec.stored])]  # a draw without rows
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, parts[0].ndim - len(spec.shape))
            found[name] = whole if spec.stored == spec.dtype else whole.to(DTYPE_NAMES[spec.dtype])
        return found

    def _opened(self, shard: Shard, rank: int) -> Any:
        self._check_file(shard, rank)
        about = shard.files[rank]
        if about.file in self._open:
            self._open.move_to_end(about.file)
        else:
            self._open[about.file] = safe_open(str(self.folder / about.file), "pt"), about.bytes
            while len(self._open) > 1 and sum(size for _, size in self._open.values()) > OPEN_BYTES:
                self._open.popitem(last=False)
        return self._open[about.file][0]


def look(folder: Path, about: File) -> None:
    """Check that a file is there and has the right length, and is not a link or pipe."""
    try:
        found = os.lstat(folder / about.file).st_size
    except OSError as error:
        raise DamagedError(about.file, f"it cannot be opened ({error.strerror})") from error
    if found != about.bytes:
        raise DamagedError(about.file, f"it has {found:,} bytes, {about.bytes:,} were written")


def check_file(path: Path, about: File) -> None:
    """Compare a file's SHA-256 with the manifest."""
    found = sha256_of(path)
    if found != about.sha256:
        raise DamagedError(about.file, f"its SHA-256 is {found[:12]}..., {about.sha256[:12]}... was written")


def read_tensors(folder: Path, about: File) -> dict[str, Tensor]:
    """All tensors of a file, after a check."""
    look(folder, about)
    check_file(folder / about.file, about)
    read_header(folder / about.file)
    return dict(load_file(folder / about.file))


class StoredState(Mapping[str, Tensor]):
    """The tensors of a file, read at first access."""

    def __init__(self, folder: Path, about: File) -> None:
        self._folder, self._about = folder, about

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return read_tensors(self._folder, self._about)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class StoredDraws(Mapping[str, Tensor]):
    """Stored tensors ``[chains, draws, *shape]`` by name.

    ``draws[name]`` reads a whole tensor; ``draws.draw(chain, index)`` reads one draw.

    Args:
        chains: numbers of the chains to show. By default chains that were not dropped, with the common number of draws
            that gives the most draws in all (chains that run in turn may have stopped at different lengths).
        buffers: show the buffers of the network instead of the draws.

    Attributes:
        chains: their numbers in the run.
        num_draws: draws of each shown chain.
        lengths: draws of each chain of the run that has any.
    """

    def __init__(self, shards: Shards, chains: Sequence[int] | None = None, buffers: bool = False) -> None:
        manifest = shards.manifest
        self._shards = shards
        self._prefix = BUFFER if buffers else ""
        self._specs = manifest.buffers if buffers else manifest.tensors
        self._runs: dict[int, list[Shard]] = {}  # by the first of chains that ran together
        for shard in shards.good:
            self._runs.setdefault(shard.first, []).append(shard)
        # Draws of a shard after damaged ones are left out.
        self._ends = {first: list(accumulate(s.stop - s.start for s in run)) for first, run in self._runs.items()}
        self._first = {c: first for first, run in sorted(self._runs.items()) for c in _chains_of(run[0])}
        self.lengths = {
            chain: min(self._ends[first][-1], manifest.lost.get(chain, 1 << 48)) for chain, first in self._first.items()
        }
        living = {chain: n for chain, n in self.lengths.items() if chain not in manifest.lost}
        if chains is None:
            self.chains, self.num_draws = rectangle(living)
        elif chains and all(chain in self.lengths for chain in chains):
            self.chains, self.num_draws = list(chains), min(self.lengths[chain] for chain in chains)
        else:
            raise ValueError(f"chains = {list(chains)!r} must name some of those with draws: {list(self.lengths)}")

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return len(self.chains)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``draws[name]``, without reading it."""
        return (self.num_chains, self.num_draws, *self._specs[name].shape)

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {list(spec.shape)}" for name, spec in self._specs.items())
        return f"StoredDraws({self.num_chains} chains x {self.num_draws} draws of {names})"

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        for shard in self._shards.good:
            self._shards.check(shard)  # before memory is allocated
        out = torch.empty(self.shape(name), dtype=DTYPE_NAMES[spec.dtype])
        inner = self._prefix + name
        rows = {chain: row for row, chain in enumerate(self.chains)}
        filled = [0] * self.num_chains
        for shard in self._shards.good:
            for chain in _chains_of(shard):
                row = rows.get(chain)
                take = 0 if row is None else min(shard.stop - shard.start, self.num_draws - filled[row])
                if row is not None and take:
                    place = (slice(0, take), chain - shard.first)
                    out[row, filled[row] : filled[row] + take] = self._shards.read(shard, [inner], place)[inner]
                    filled[row] += take
        return out

    def draw(self, chain: int, index: int, rows: Rows | None = None) -> dict[str, Tensor]:
        """One of the shown draws; negative indices count from the end.

        Of tensors in ``rows`` only some rows are read.
        """
        chain, index = _place("chain", chain, self.num_chains), _place("draw", index, self.num_draws)
        number = self.chains[chain]
        first = self._first[number]
        ends = self._ends[first]
        at = bisect_right(ends, index)
        row = index - (ends[at - 1] if at else 0)
        names = [self._prefix + name for name in self._specs]
        some = {self._prefix + name: part for name, part in (rows or {}).items()}
        found = self._shards.read(self._runs[first][at], names, (row, number - first), some)
        return {name: found[self._prefix + name] for name in self._specs}


def _chains_of(shard: Shard) -> range:
    return range(shard.first, shard.first + shard.count)


def _place(what: str, index: int, count: int) -> int:
    index = operator.index(index)
    if not -count <= index < count:
        raise IndexError(f"{what} {index} of {count}")
    return index % count
