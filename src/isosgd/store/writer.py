"""Writes a run to disk while it goes on.

Draws are gathered and written in shards, with a checkpoint from time to time. Both count once they are in the manifest.
A crash loses the draws after the last checkpoint; the resumed chains repeat them bit for bit.

One thread writes everything in order while the chains go on, so that a checkpoint never precedes its draws. While that
thread is busy it owns the manifest's shards, checkpoints and number; the chains own the rest of the manifest.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from isosgd.store.draws import Shards, check_file, look
from isosgd.store.files import HALF_WRITTEN, StoreError, pack, raw, read_header, to_json, unpack, write_tensors
from isosgd.store.manifest import BUFFER, DTYPE_NAMES, FILE_NAME, FROZEN, NAME, File, Manifest, Shard

SHARD_BYTES = 1 << 25  # the most gathered draws; half of that ...
EARLY = 256  # ... in the first shards: a run waits for the last shard at its end
# of a checkpoint; chains wait while a larger one is written, so that it need not be copied
MOST_COPIED = 8 * SHARD_BYTES
LEAST_WAIT = 1.0  # least seconds between two shards, unless memory is full; for checkpoints five times that
STORED = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}

Params = Mapping[str, Tensor]
MOST_WAIT = 60.0  # seconds between two writes
WAIT_SHARE = 0.02  # of the time of the run so far, which limits the number of shards of a long run
SHARED = "store= must be a folder on a file system that all ranks share"
COST_SHARE = 0.03  # of the time, for writes that can wait
LOCK_WAIT = 5.0  # seconds: workers of a data loader hold the lock a little longer than a killed process


class Writer:
    """Writes one run to a folder that holds no other run."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._gathered: list[dict[str, Tensor]] = []
        self._free: list[dict[str, Tensor]] = []  # memory of written draws, to be reused
        self._about = (0, 0, 0)  # first chain, count and start of the gathered draws
        self._bytes = self._step = 0
        self._background = Background()
        self._lock = lock(folder)
        self._flushes = Waiting(LEAST_WAIT)
        self._checkpoints: dict[int, Waiting] = {}  # by the first of chains that run together
        self._adopt(manifest)

    def _adopt(self, manifest: Manifest) -> None:
        """Use a manifest as that of the run."""
        self.manifest = manifest
        self._reached: dict[int, int] = {}  # draws by first chain, including those not yet written
        for shard in manifest.shards:
            self._reached[shard.first] = shard.stop
        self._shards = Shards(self.folder, manifest)
        self._before, self._began = manifest.seconds, time.monotonic()

    @classmethod
    def create(cls, folder: Path, manifest: Manifest, frozen: Params, starts: Sequence[Params] = ()) -> Writer:
        """Begin a run; ``starts`` are trained networks."""
        make_folder(folder)
        writer = cls(folder, manifest)
        with writer.closed_on_error():
            check_new(folder)  # after the lock, since another process may have begun it
            if frozen:
                manifest.frozen = new_file(folder, FROZEN, frozen)
            for k, start in enumerate(starts):
                manifest.starts.append(new_file(folder, f"start-{k:06d}.safetensors", start))
            writer._write_manifest(manifest)
        return writer

    @classmethod
    def reopen(cls, folder: Path) -> Writer:
        """Continue a run; removes what a crash left behind."""
        writer = cls(folder, Manifest.read(folder))
        with writer.closed_on_error():
            # After the lock: a process that was still ending may have written more.
            writer._adopt(Manifest.read(folder))
            writer._clean()
        return writer

    def extend(self, identity: Mapping[str, Any]) -> None:
        """Record a new identity with more draws, before the first of them."""
        self.manifest.identity, self.manifest.complete = dict(identity), False
        self._write_manifest(self.manifest)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Release the folder on an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder; gathered draws that were not flushed are lost."""
        self._background.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- draws --------------------------------------------------------------------------------------------------------

    def stored(self, first: int) -> int:
        """How many draws of the chains from ``first`` on are on the disk, or will be."""
        return self._reached.get(first, 0)

    def add(self, first: int, draw: Params, buffers: Params, step: int) -> None:
        """Take the next draw of the chains from ``first`` on, tensors ``[chains, *shape]``.

        It is written with others, in a thread of its own, while the chains go on.
        """
        parts = self._copied(self._named(draw, buffers))
        if self._gathered and self._about[0] != first:
            self._send()
        if not self._gathered:
            self._about = (first, len(next(iter(draw.values()))), self.stored(first))
        self._gathered.append(parts)
        self._step, self._reached[first] = step, self._about[2] + len(self._gathered)
        self._bytes += sum(x.numel() * x.element_size() for x in parts.values())
        enough = SHARD_BYTES // (2 if len(self.manifest.shards) < EARLY else 1)
        if self._bytes >= enough or self._flushes.due():
            self._send()

    def _named(self, draw: Params, buffers: Params) -> Params:
        """All tensors of a draw, by their name in a shard."""
        every = {**draw, **{BUFFER + name: x for name, x in buffers.items()}}
        if every.keys() != self._shards.specs.keys():
            raise StoreError(f"a draw has the tensors {list(every)}, this run has {list(self._shards.specs)}")
        return every

    @torch.no_grad()
    def _copied(self, every: Params) -> dict[str, Tensor]:
        """A copy on the CPU in the stored dtype, in memory of written draws where there is some: new memory is slow."""
        try:
            held = self._free.pop()
        except IndexError:
            held = {}
        specs = self._shards.specs
        for name, x in every.items():
            if name not in held or held[name].shape != x.shape:
                held[name] = torch.empty(x.shape, dtype=DTYPE_NAMES[specs[name].stored])
            held[name].copy_(x)
        return held

    def differs(self, first: int, index: int, draw: Params, buffers: Params) -> str:
        """The name of a tensor in which a draw differs from the stored one; empty when they agree bit for bit."""
        shard = next(s for s in self.manifest.shards if s.first == first and s.start <= index < s.stop)
        parts = self._copied(self._named(draw, buffers))
        found = self._shards.read(shard, parts, (index - shard.start, slice(None)))
        same = {name: torch.equal(raw(found[name].to(x.dtype)), raw(x)) for name, x in parts.items()}
        self._free.append(parts)
        return next((name for name, equal in same.items() if not equal), "")

    def flush(self) -> None:
        """Write the gathered draws and the manifest, and wait for it."""
        self._send()
        self._background.wait()

    def _send(self) -> None:
        """Hand the gathered draws to the writing thread."""
        self._background.wait()  # before anything is taken, since Ctrl-C may come meanwhile
        self._background.give(self._taken())

    def _taken(self) -> Callable[[], None]:
        """A job that writes the gathered draws."""
        if not self._gathered:
            return lambda: None
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        about, manifest = (*self._about, self._step), self._manifest_now()
        self._flushes.sent()
        return lambda: self._write_shard(manifest, gathered, *about)

    def _write_shard(
        self, manifest: Manifest, gathered: list[dict[str, Tensor]], first: int, count: int, start: int, step: int
    ) -> None:
        """Write a shard, and a manifest with it.

        The writing thread records the shard, so that Ctrl-C in the main thread cannot lose it.
        """
        with self._flushes.timed():
            tensors = {key: [draw[key] for draw in gathered] for key in gathered[0]}
            about = {"first": str(first), "start": str(start)}
            name = f"draws-{len(self.manifest.shards):06d}.safetensors"
            file = new_file(self.folder, name, tensors, about)
            self._name(manifest, Shard(**asdict(file), first=first, count=count, start=start,
                                       stop=start + len(gathered), step=step))  # fmt: skip
            self._free += gathered

    def _name(self, manifest: Manifest, shard: Shard) -> None:
        """Write a manifest with the shard."""
        self._write_named(manifest, [*self.manifest.shards, shard], self.manifest.checkpoints)
        self._shards.good.append(shard)
        self.manifest.shards.append(shard)

    def add_files(self, files: Sequence[File], step: int) -> None:
        """Add files that ranks have written, each with its rows, as the next draw of chain 0 (see `Shard`)."""
        self._look(files)
        self.flush()
        start = self.stored(0)
        self._name(self._manifest_now(), Shard(**asdict(files[0]), first=0, count=1, start=start, stop=start + 1,
                                               step=step, others=tuple(files[1:])))  # fmt: skip
        self._reached[0] = start + 1

    def _look(self, files: Sequence[File]) -> None:
        for file in files:
            try:
                look(self.folder, file)
            except StoreError as error:
                raise StoreError(f"a file of another rank is not seen here ({error}). {SHARED}") from error

    def cut(self, draws: int) -> None:
        """Keep the first ``draws`` draws of chain 0; the others came from another state."""
        self.flush()
        kept = [shard for shard in self.manifest.shards if shard.stop <= draws]
        if (kept[-1].stop if kept else 0) != draws:
            raise StoreError(
                f"{self.folder} has no file that ends with draw {draws}, and cannot be cut there: go back to a state "
                "that was saved while draws were collected, or give another store="
            )
        manifest = replace(self.manifest, shards=kept, complete=False)
        self._write_manifest(manifest)  # first, so that all its files exist at every instant
        self._adopt(manifest)
        self._clean()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def mark(self, first: int, state: Callable[[], Any], now: bool = False) -> None:
        """Write a checkpoint from which chains from ``first`` on can be resumed, if one is due or ``now``."""
        due = self._checkpoints.setdefault(first, Waiting(5.0 * LEAST_WAIT))
        if not (now or due.due()):
            return
        packed, tensors = pack(state())
        self._background.wait()
        write_draws, manifest = self._taken(), self._manifest_now()
        large = sum(x.numel() * x.element_size() for x in tensors.values()) > MOST_COPIED
        if not large:  # the chains go on and change them
            tensors = {name: x.to("cpu", copy=True) for name, x in tensors.items()}

        def write() -> None:
            write_draws()  # before the checkpoint that follows them
            with due.timed():
                file = new_state(self.folder, f"checkpoint-{self.manifest.number:06d}.safetensors", packed, tensors)
                self._name_checkpoints(manifest, {**self.manifest.checkpoints, first: file})

        self._background.give(write)
        due.sent()
        if large:
            self._background.wait()

    def _name_checkpoints(self, manifest: Manifest, checkpoints: dict[int, File]) -> None:
        """Write a manifest with these checkpoints, then delete the previous ones."""
        self.manifest.number += 1
        old = self.manifest.checkpoints
        self._write_named(manifest, self.manifest.shards, checkpoints)
        self.manifest.checkpoints = checkpoints
        for file in {file.file for file in old.values()} - {file.file for file in checkpoints.values()}:
            (self.folder / file).unlink(missing_ok=True)

    def mark_files(self, files: Sequence[File]) -> None:
        """Use files that ranks have written, each with its state, as the checkpoint of all draws so far."""
        self._look(files)
        self.flush()
        self._name_checkpoints(self._manifest_now(), dict(enumerate(files)))

    def checkpoints(self) -> dict[int, Any]:
        """The states of the last checkpoints, by the first of chains that run together."""
        return {first: read_state(self.folder, about) for first, about in self.manifest.checkpoints.items()}

    # -- the manifest -------------------------------------------------------------------------------------------------

    def finish(self, info: Mapping[str, Any]) -> None:
        """Mark the run as complete. Checkpoints stay, so that it can be extended."""
        self.flush()
        self.manifest.complete = True
        self.manifest.info = dict(info)
        self._write_manifest(self.manifest)

    def _clean(self) -> None:
        """Remove what a crash left behind: files that the manifest lacks, and half-written ones."""
        manifest = self.manifest
        named = {file.file for file in manifest.files}
        for path in self.folder.iterdir():
            half = path.name.startswith(".") and path.name.endswith(HALF_WRITTEN)
            if half or (FILE_NAME.fullmatch(path.name) and path.name not in named):
                path.unlink(missing_ok=True)

    def _manifest_now(self) -> Manifest:
        """A copy of the manifest, which may change before it is written."""
        return replace(self.manifest, lost=dict(self.manifest.lost))

    def _write_named(self, manifest: Manifest, shards: list[Shard], checkpoints: dict[int, File]) -> None:
        """Write a copy of the manifest with the current shards and checkpoints."""
        self._write_manifest(replace(manifest, shards=shards, checkpoints=checkpoints, number=self.manifest.number))

    def _write_manifest(self, manifest: Manifest) -> None:
        manifest.seconds = self._before + time.monotonic() - self._began
        try:
            manifest.write(self.folder)
        except OSError as error:
            raise _failed(self.folder / NAME, error) from error


def new_file(
    folder: Path, name: str, tensors: Mapping[str, Tensor | Sequence[Tensor]], metadata: Mapping[str, str] | None = None
) -> File:
    """Write a file; it belongs to the run once the manifest has it."""
    try:
        return File(name, *write_tensors(folder / name, tensors, metadata))
    except OSError as error:
        raise _failed(folder / name, error) from error


def new_state(folder: Path, name: str, packed: Any, tensors: Params) -> File:
    """Write a packed nested state."""
    return new_file(folder, name, tensors, {"state": to_json(packed).decode()})


def _failed(path: Path, error: OSError) -> OSError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    why = "the disk is full" if full else f"{error.strerror or error}"
    return type(error)(
        error.errno,
        f"{path} cannot be written: {why}. What the manifest names is safe and isosgd.load reads it; "
        "make room, then go on with resume=True",
    )


def make_folder(folder: Path) -> None:
    """Make the folder of a run if needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(error.errno, f"store = {str(folder)!r} cannot be made: {error.strerror}") from error


def check_new(folder: Path) -> None:
    """Check that a folder holds no run."""
    if Manifest.begun(folder):
        raise FileExistsError(
            f"{folder} already holds a run: pass resume=True to go on with it, or another folder; isosgd.load reads it"
        )


def read_state(folder: Path, about: File) -> Any:
    """The nested state of a checkpoint, in memory."""
    path = folder / about.file
    check_file(path, about)
    _, metadata = read_header(path)
    tensors = {name: x.clone() for name, x in load_file(path).items()}
    return unpack(json.loads(metadata["state"]), tensors)


# -- timing, lock and thread ------------------------------------------------------------------------------------------


class Waiting:
    """Decides when the next write of a kind is due, from the time it takes; at least ``least`` seconds apart."""

    def __init__(self, least: float) -> None:
        self.least, self.started = least, time.monotonic()
        self.last, self.cost = self.started, 0.0

    def due(self) -> bool:
        """Whether a write is due."""
        now = time.monotonic()
        wait = min(max(self.least, WAIT_SHARE * (now - self.started)), MOST_WAIT)
        return not self.least or now - self.last >= max(wait, self.cost / COST_SHARE)

    def sent(self) -> None:
        """A write has started."""
        self.last = time.monotonic()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Context of a write, which measures its time."""
        began = time.monotonic()
        yield
        self.cost = time.monotonic() - began


def lock(folder: Path) -> int | None:
    """Lock the folder against other writers until it is closed or the process ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    handle, end = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError as error:
            if time.monotonic() > end:
                os.close(handle)
                raise StoreError(f"{folder} is being written by another process: let it end, or end it") from error
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return handle


class Background:
    """Runs one job at a time in a thread. After a job has failed, every later call raises its error."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def give(self, job: Callable[[], None]) -> None:
        """Start a job when the previous one is done."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="isosgd-store")
        self._under_way = self._pool.submit(job)

    def wait(self) -> None:
        """Wait for the running job and raise its error, if any."""
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        """End the thread when all jobs are done."""
        if self._pool is not None:
            self._pool.shutdown()
