"""Processes that sample together, over `torch.distributed`: which rank draws which chain, and how they communicate.

The ranks form a grid: a *team* for each chain that is drawn at the same time, and in each team ranks that share every
minibatch. ``parallel="chains"`` has teams of one rank; ``parallel="data"`` has a team for each chain.

Ranks of a team sum gradients by an all-reduce. Everything else is small or rare, and goes through the key-value store
of the process group, which needs neither devices nor pickle and shows a waiting rank who is missing. Ranks with chains
of their own may wait for each other for hours. So each writes a heartbeat every second, and a rank without one for
``rank_timeout`` seconds is taken for dead.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from hashlib import sha256
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to
from torch import Tensor

from isosgd.errors import RankError, RankValueError, first_line
from isosgd.progress import LOGGER
from isosgd.store.files import pack, raw, to_json, unpack
from isosgd.target.batches import tree_map

Parallel = Literal["chains", "data"]
P = ParamSpec("P")
T = TypeVar("T")
TIMEOUT = 1_800.0  # seconds
CHUNK = 1 << 22  # bytes: a TCPStore refuses values of more than 8 MB
PART = 1 << 20  # numbers that a checksum copies at once
BEAT_EVERY, LOOK_EVERY = 1.0, 0.02  # seconds
GRACE = 10.0  # seconds in which ranks report that they are waiting too
_calls, _loops = itertools.count(), itertools.count()  # all ranks make the same calls in the same order


class Ranks:
    """The processes of one call of `isosgd.sample`. Inside ``with``, an error on one rank is reported to all.

    Args:
        parallel: what the ranks divide among them.
        timeout: seconds without a heartbeat after which a rank is taken for dead.

    Attributes:
        rank: number of this process.
        size: number of processes.
        teams: number of chains that are drawn at the same time.
        team: number of this process's team.
        shares: ranks in a team, which share every minibatch.
        place: number of this process in its team.
    """

    def __init__(self, parallel: Parallel, timeout: float) -> None:
        self.parallel, self.timeout = parallel, timeout
        if not (dist.is_available() and dist.is_initialized()):
            self._check()
            raise ValueError(
                f"parallel = {parallel!r} needs a process group: call torch.distributed.init_process_group('gloo') "
                "('nccl' on GPUs) first, and start the script with torchrun"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.teams, self.team, self.shares, self.place = self.size, self.rank, 1, 0
        self.group: dist.ProcessGroup | None = None
        self._store: Any = dist.distributed_c10d._get_default_store()  # there is no public access
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store when it restarts
        self._call, self._round, self._beats, self._last = f"isosgd/{attempt}/{next(_calls)}", 0, 0, 0.0
        self._told = False  # whether the other ranks know of an error

    def arrange(self, chains: int) -> None:
        """Find this rank's place in the grid."""
        if self.parallel == "chains":
            if chains < self.size:
                raise ValueError(
                    f"chains = {chains} are fewer than the {self.size} ranks of the process group: some would have "
                    "nothing to do. Take more chains or fewer processes, or share minibatches by parallel='data'"
                )
            return
        if self.size % chains:
            raise ValueError(
                f"chains = {chains} do not divide the {self.size} ranks of the process group: with parallel='data' "
                f"each chain has as many ranks. Take {self.size} ranks or chains that divide them"
            )
        self.teams, self.shares = chains, self.size // chains
        self.team, self.place = divmod(self.rank, self.shares)

    def connect(self, device: torch.device) -> None:
        """Create the process groups of the teams; called by all ranks."""
        if self.shares > 1:
            from torch.distributed.device_mesh import init_device_mesh  # a slow import

            mesh = init_device_mesh(device.type, (self.teams, self.shares), mesh_dim_names=("chains", "data"))
            self.group = mesh.get_group("data")

    @property
    def leads(self) -> bool:
        """Whether this rank keeps the draws of its team."""
        return self.place == 0

    def own(self, chains: int) -> list[int]:
        """Numbers of the chains that this rank's team draws."""
        return list(range(self.team, chains, self.teams))

    # -- communication of all ranks -----------------------------------------------------------------------------------

    def __enter__(self) -> Ranks:
        try:
            self._check()
        except ValueError as error:
            self._tell(error)
            raise
        return self

    def _check(self) -> None:
        """Refuse bad arguments; other ranks are told of the error."""
        if self.parallel not in ("chains", "data"):
            raise ValueError(f"parallel = {self.parallel!r} is unknown; choose 'chains', 'data' or None")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ValueError(f"rank_timeout = {self.timeout!r} must be a positive number of seconds")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not self._told:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        self._told = True
        wrong = isinstance(error, ValueError | TypeError)
        try:
            self._put("error", {"wrong": wrong, "text": f"{type(error).__name__}: {error}"})
        except RuntimeError:  # the store is gone, so nobody can be told
            return

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, in order: nested plain values and tensors. An error on one rank is raised on all."""
        self._round += 1
        name = f"round{self._round}"
        self._put(name, value)
        found = [value if rank == self.rank else self._take(name, rank) for rank in range(self.size)]
        self._drop(f"round{self._round - 1}")  # all ranks have read it, since they reached this round
        return found

    def beat(self) -> None:
        """Write a heartbeat, at most once a second."""
        now = time.monotonic()
        if now - self._last >= BEAT_EVERY:
            self._last, self._beats = now, self._beats + 1
            self._store.set(self._key("beat", self.rank), str(self._beats))

    def _key(self, name: str, rank: int) -> str:
        return f"{self._call}/{name}/{rank}"

    def _put(self, name: str, value: Any) -> None:
        packed, tensors = pack(value)
        text, content = to_json(packed), tensors_to(_apart(tensors))
        every, key = len(text).to_bytes(8, "little") + text + content, self._key(name, self.rank)
        chunks = range(0, len(every), CHUNK)
        for i, start in enumerate(chunks):
            self._store.set(f"{key}/{i}", every[start : start + CHUNK])
        self._store.set(key, str(len(chunks)))

    def _drop(self, name: str) -> None:
        key = self._key(name, self.rank)
        if self._there(key):
            for i in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{i}")
            self._store.delete_key(key)

    def _there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _take(self, name: str, rank: int) -> Any:
        """Wait for a rank's value."""
        key, beat = self._key(name, rank), self._key("beat", rank)
        seen, since = b"", time.monotonic()
        while not self._there(key):
            if told := self._told_of():
                if self._there(key):  # this round is complete; the error came later, and is met later
                    break
                self._told = True
                raise told
            now, last = time.monotonic(), self._store.get(beat) if self._there(beat) else b""
            if last != seen:
                seen, since = last, now
            if now - since > self.timeout:
                self._told = True
                raise RankError(
                    f"rank {rank} has given no sign of life for {self.timeout:g} s (rank_timeout=): it hangs, has "
                    "ended, or has not called sample. Look at its log; with store= and resume=True the run goes on",
                    rank,
                )
            self.beat()
            time.sleep(LOOK_EVERY)
        return self._read(key)

    def _read(self, key: str) -> Any:
        every = b"".join(self._store.get(f"{key}/{i}") for i in range(int(self._store.get(key))))
        end = 8 + int.from_bytes(every[:8], "little")
        return unpack(json.loads(every[8:end]), tensors_from(every[end:]))

    def _told_of(self) -> RankError | None:
        """The error that another rank reported, if any."""
        for rank in range(self.size):
            if rank != self.rank and self._there(key := self._key("error", rank)):
                found = self._read(key)
                return (RankValueError if found["wrong"] else RankError)(f"on rank {rank}: {found['text']}", rank)
        return None

    # -- communication within a team ----------------------------------------------------------------------------------

    def sum_(self, x: Tensor) -> Tensor:
        """Sum a tensor over the team, in place; the result is bitwise the same on all ranks."""
        self._wait(lambda: dist.all_reduce(x, group=self.group, async_op=True))
        return x

    def of_lead(self, batch: Any) -> Any:
        """A batch with the tensors of the team's first rank; shapes must be the same on all ranks."""
        if self.group is None:
            return batch
        source, group = dist.get_global_rank(self.group, 0), self.group

        def sent(t: Tensor) -> Tensor:
            t = t.clone().contiguous()
            self._wait(lambda: dist.broadcast(t, source, group=group, async_op=True))
            return t

        return tree_map(sent, batch)

    def check_equal(self, tensors: list[Tensor]) -> None:
        """Raise unless tensors are bitwise the same on all ranks of the team."""
        if self.group is None:
            return
        digest = checksum(tensors)
        ends = torch.stack([digest, -digest])
        self._wait(lambda: dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        if int(ends[0]) != -int(ends[1]):
            raise RuntimeError(
                f"the parameters of rank {self.rank} are no longer those of the others that share its chain: their "
                "machines round otherwise, or the model takes random numbers of its own. Use machines of one kind"
            )

    def _wait(self, begin: Any) -> None:
        try:
            begin().wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._missing(error) from error

    def _missing(self, error: RuntimeError) -> Exception:
        """The reason why the ranks of a team did not meet: another rank's error, or the rank that is missing."""
        end = time.monotonic() + min(GRACE, self.timeout)
        team = [self.team * self.shares + place for place in range(self.shares)]
        try:
            self._store.set(self._key("waits", self.rank), "1")
            while time.monotonic() < end:
                if told := self._told_of():
                    self._told = True
                    return told
                time.sleep(LOOK_EVERY)
            gone = [r for r in team if r != self.rank and not self._there(self._key("waits", r))]
        except RuntimeError:  # the store is gone too: its process has ended
            return RankError(
                f"rank 0, or the process that holds the store of the process group, has ended ({error})", 0
            )
        self._told = True
        if not gone:
            return error
        return RankError(
            f"rank {gone[0]} did not come to a step that the other ranks of its chain wait at (rank_timeout = "
            f"{self.timeout:g} s): it hangs or has ended. With store= and resume=True the run goes on ({error})",
            gone[0],
        )


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """A checksum of the bits of tensors, of which a small part is copied at a time."""
    digest: Tensor | None = None
    for t in tensors:
        bits = t.detach().reshape(-1).view(torch.int32 if t.element_size() % 4 == 0 else torch.uint8)
        weights = 2 * torch.arange(min(len(bits), PART), device=t.device) + 1  # odd, so that no bit is lost
        digest = weights.new_zeros(()) if digest is None else digest
        for part in torch.split(bits, PART):
            digest = digest * 1_000_003 + (part * weights[: len(part)]).sum()  # modulo 2^64
    assert digest is not None
    return digest


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, each with its own memory: safetensors refuses tensors that share it."""
    found = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    shared = Counter(x.untyped_storage().data_ptr() for x in found.values())
    return {name: x.clone() if shared[x.untyped_storage().data_ptr()] > 1 else x for name, x in found.items()}


class Replicas:
    """Ranks that hold replicas of the same parameters, as in DDP: checks at draws that these are bitwise the same.

    No rank waits for another here. Between two draws all ranks meet to sum gradients, so that the parameters of the
    previous draw are known to all, and all find a difference.

    Where a trainer holds the DDP wrapper, it cannot be seen whether a model is a replica. It is one if ranks whose
    parameters differ have bitwise the same gradients at the next draw, since those are means over all ranks. Ranks that
    run separate chains have different gradients.

    Args:
        group: the ranks, if the model is known to be in DDP; None for all ranks, if it may be.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.known = dist.get_rank(), group is not None
        self._others = dist.get_process_group_ranks(group)
        self._store: Any = dist.distributed_c10d._get_default_store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if group is None:
            which = f"loops/{next(_loops)}"
        else:  # tells several models apart: how often the ranks have met so far
            met: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # private, as the store
            which = f"{group.group_name}/{met}"
        self._name = f"isosgd/{attempt}/replicas/{which}"
        self._seen: list[tuple[int, list[str]]] = []  # of the last three draws

    def compare(self, step: int, tensors: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Record tensors and gradients at a draw, and raise if earlier draws differed between ranks."""
        self.look()
        slopes = [] if self.known else list(gradients)
        given = [x for x in slopes if x is not None and bool(x.any())]
        # Missing or zero gradients must not match those of other ranks.
        own = [_digest(tensors), _digest(given) if given or self.known else f"none of {self.rank}"]
        self._seen = [*self._seen[-2:], (step, own)]
        # One key a rank, written over and never deleted: to get one that was just deleted would wait for it.
        if self._store is not None:
            with self._while_it_lasts():
                self._store.set(f"{self._name}/{self.rank}", json.dumps(self._seen))

    def look(self) -> None:
        """Raise if parameters at the last draws are known to differ between ranks."""
        if self._store is not None:
            with self._while_it_lasts():
                self._look()

    @contextmanager
    def _while_it_lasts(self) -> Iterator[None]:
        """Ends the comparison where the store ends: rank 0 may end before ranks with chains of their own."""
        try:
            yield
        except dist.DistError as error:
            LOGGER.info("ranks are not compared any more, since their store is gone: %s", first_line(error))
            self._store = None

    def _look(self) -> None:
        draws = self._seen[-2:]
        if len(draws) < (1 if self.known else 2):
            return
        (step, (own, _)), (after, (_, slope)) = draws[-1 if self.known else 0], draws[-1]
        for rank in self._others:
            key = f"{self._name}/{rank}"
            theirs = dict(json.loads(self._store.get(key))) if self._store.check([key]) else {}
            if step not in theirs or after not in theirs:
                continue
            (params, _), (_, gradient) = theirs[step], theirs[after]
            if params != own and gradient == slope:
                raise RuntimeError(
                    f"after step {step} the parameters of ranks {self.rank} and {rank} were not the same: replicas "
                    "of DDP must draw the same noise, give the optimizer of each rank a generator= of the same "
                    "seed. Draws so far are of no chain"
                )


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = sha256()
    for x in tensors:
        digest.update(raw(x).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def shared(call: Callable[P, T]) -> Callable[P, T]:
    """Replace a function's argument ``parallel=`` by `Ranks`, which report an error on one rank to all."""

    @wraps(call)
    def wrapped(*args: P.args, **given: P.kwargs) -> T:
        parallel = given.get("parallel")
        if parallel is None:
            return call(*args, **given)
        with Ranks(parallel, given.get("rank_timeout", TIMEOUT)) as ranks:  # type: ignore[arg-type]
            given["parallel"] = ranks
            return call(*args, **given)

    return wrapped
