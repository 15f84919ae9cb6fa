"""Recorders store the draws of chains: in memory (`InMemory`) or on disk (`OnDisk`)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import closing
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.engine.ranks import Ranks
from isosgd.errors import DivergedError, OutOfTimeError, SamplingWarning, warn_caller
from isosgd.posterior import Posterior
from isosgd.sampling.plan import ChainsResult, DrawPlan, MakeInfo, State
from isosgd.sampling.request import RunRequest
from isosgd.sampling.stored import info_of, load
from isosgd.store import Shards, StoredDraws, Writer, rectangle
from isosgd.store.files import dtype_name
from isosgd.store.manifest import Spec, specs_of
from isosgd.target import Params

Info = dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """Raised on Ctrl-C while sampling; the draws so far are kept.

    Attributes:
        posterior: the draws so far; None when there were none.
    """

    def __init__(self, message: str, posterior: Posterior | None) -> None:
        super().__init__(message)
        self.posterior = posterior


class Recorder:
    """Records results without draws. It serves ranks that share a chain whose draws another rank stores.

    Chains that run together are named by the index of their first chain.

    Args:
        request: what `sample` was asked for.
        make_info: makes ``info`` from the results so far.
    """

    def __init__(self, request: RunRequest, make_info: MakeInfo) -> None:
        self.request, self.make_info = request, make_info
        self.ended: dict[int, ChainsResult] = {}
        self.current: dict[int, ChainsResult] = {}
        self.saved: dict[int, State] = {}  # checkpoints to resume from
        self.out_of_time: dict[int, OutOfTimeError] = {}  # chains that have not come to a draw, and can go on
        self.started = time.monotonic()

    @property
    def results(self) -> list[ChainsResult]:
        """Of finished chains."""
        return [self.ended[first] for first in sorted(self.ended)]

    def every(self) -> list[ChainsResult]:
        """Results so far of all chains that have been warmed up."""
        both = {**self.current, **self.ended}
        return [both[first] for first in sorted(both)]

    def adopt(self, saved: dict[int, State]) -> None:
        """Resume from checkpoints."""
        self.saved = saved
        results = {first: state["outcome"] for first, state in saved.items() if state["outcome"] is not None}
        self.ended = {first: ChainsResult.from_state(state) for first, state in results.items()}

    def restored(self, first: int, chains: Chains, plan: DrawPlan) -> tuple[ChainsResult | None, State | None]:
        """The result of these chains if they are finished, and the state to resume from if they have one."""
        saved = self.saved.get(first)
        if first in self.ended and self.ended[first].is_end(plan):
            chains.batches.load_state(self.ended[first].batches)  # the next chains take their data from there
            return self.ended[first], None
        self.ended.pop(first, None)
        return None, None if saved is None else saved["current"]

    def warmed(self, result: ChainsResult) -> None:
        """Called after the warm-up."""
        self.current[result.first] = result

    def keep(self, chains: Chains, first: int, number: int) -> None:
        """Store draw ``number``, the current parameters and buffers of the chains."""

    def mark(self, first: int, state: Callable[[], State]) -> None:
        """Called where the chains could be resumed from ``state()``."""

    def finished(self, result: ChainsResult, state: Callable[[], State] | None) -> None:
        """Called at the end of the chains; ``state`` is None if all of them failed."""
        self.ended[result.first] = result
        self.current.pop(result.first, None)

    def failures(self) -> dict[int, DivergedError]:
        """Errors of dropped chains, by index, with their draws."""
        found = {}
        for result in self.results:
            for k, error in result.failures.items():
                error.draws = self.draws_of(result, k)
                found[result.first + k] = error
        return found

    def draws_of(self, result: ChainsResult, k: int) -> Params:
        """The finite draws of a dropped chain, ``[draws, *shape]``."""
        return {}

    def close(self) -> None:
        """Release the store."""


class InMemory(Recorder):
    """Keeps draws in memory."""

    def __init__(self, request: RunRequest, make_info: MakeInfo) -> None:
        super().__init__(request, make_info)
        self._draws: dict[int, list[Params]] = {}
        self._buffers: dict[int, list[Params]] = {}

    def keep(self, chains: Chains, first: int, number: int) -> None:
        buffers = {name: x.cpu() for name, x in chains.draw_buffers(number).items()}
        self._buffers.setdefault(first, []).append(buffers)
        self._draws.setdefault(first, []).append({name: x.cpu() for name, x in chains.natural().items()})

    def share(self, ranks: Ranks) -> None:
        """Give every rank the draws of all ranks."""
        own = {
            first: (result.state(), self._draws.get(first, []), self._buffers.get(first, []))
            for first, result in self.ended.items()
        }
        for found in ranks.gather(own if ranks.leads else {}):
            for first, (state, draws, buffers) in found.items():
                self.ended[first] = ChainsResult.from_state(state)
                self._draws[first], self._buffers[first] = draws, buffers

    def draws_of(self, result: ChainsResult, k: int) -> Params:
        return _chain(self._draws.get(result.first, [])[: result.lengths[k]], k)

    def _places(self) -> dict[int, tuple[int, int]]:
        """For each chain that has draws and was not dropped, the first chain of its group and its position in it."""
        alive = {o.first + k: (o.first, k) for o in self.every() for k in range(o.count) if k not in o.lengths}
        return {chain: place for chain, place in alive.items() if self._draws.get(place[0])}

    def posterior(self) -> Posterior:
        """The draws; if chains have different lengths, those that make the largest rectangle."""
        place = self._places()
        lengths = {chain: len(self._draws[first]) for chain, (first, _) in place.items()}
        chains, length = rectangle(lengths)
        if any(result.stopped.startswith("max_seconds") for result in self.every()):
            chains, length = sorted(lengths), min(lengths.values())  # keep every network, even one with little time
        parts = []
        for source in (self._draws, self._buffers):
            own = [_chain(source[place[c][0]][:length], place[c][1]) for c in chains]
            parts.append({name: _stacked([part.pop(name) for part in own]) for name in list(own[0])})
        ordered = {name: parts[0][name] for name in self.request.target.describe()["parameters"]}
        info = {
            **info_of(self.make_info(self.every()), chains),
            "complete": not self.current,
            "seconds": time.monotonic() - self.started,
        }
        return Posterior(self.request.target, ordered, info, self.request.tensors, parts[1])

    def interrupted(self) -> Interrupted:
        """The error to raise on Ctrl-C."""
        found = self.posterior() if self._places() else None
        drawn = "nothing had been drawn yet" if found is None else f"{len(found)} draws are in .posterior of this error"
        return Interrupted(f"sampling was stopped; {drawn}", found)


def _stacked(parts: list[Tensor]) -> Tensor:
    """One tensor of all chains; without a copy if there is one chain, whose draws may be gigabytes."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _chain(draws: list[Params], k: int) -> Params:
    return {name: torch.stack([draw[name][k] for draw in draws]) for name in draws[0]} if draws else {}


class OnDisk(Recorder):
    """Writes draws and checkpoints to a store."""

    def __init__(self, request: RunRequest, make_info: MakeInfo, writer: Writer) -> None:
        super().__init__(request, make_info)
        self.writer = writer
        with writer.closed_on_error():
            self.adopt(writer.checkpoints())
        self._agrees = True  # repeated draws with stored ones

    def keep(self, chains: Chains, first: int, number: int) -> None:
        """Store a draw. A resumed run repeats stored draws after its checkpoint; these are compared."""
        manifest, draw = self.writer.manifest, chains.natural(copy=False)  # the writer copies it
        buffers = chains.draw_buffers(number)
        if not manifest.shards and not self.writer.stored(first):
            manifest.buffers = specs_of({name: x[0] for name, x in buffers.items()})
        for k in chains.failures:
            manifest.lost.setdefault(first + k, number)
        if number >= self.writer.stored(first):
            self.writer.add(first, {name: draw[name] for name in manifest.tensors}, buffers, chains.gradients)
        elif self._agrees:
            self._agrees = _is_repeated(self.writer, first, number, draw, buffers)

    def warmed(self, result: ChainsResult) -> None:
        """Put what the warm-up found into the manifest."""
        super().warmed(result)
        self.writer.manifest.info = self.make_info(self.every())

    def mark(self, first: int, state: Callable[[], State]) -> None:
        """Write a checkpoint if one is due."""
        self.writer.mark(first, lambda: self._state(state(), None))

    def finished(self, result: ChainsResult, state: Callable[[], State] | None) -> None:
        """Write a last checkpoint, from which the run can be extended."""
        super().finished(result, state)
        self.writer.manifest.lost |= {result.first + k: n for k, n in result.lengths.items()}
        self.writer.manifest.info = self.make_info(self.every())
        self.writer.mark(result.first, lambda: self._state(None if state is None else state(), result), now=True)

    def _state(self, current: State | None, result: ChainsResult | None) -> State:
        return {"outcome": None if result is None else result.state(), "current": current}

    def draws_of(self, result: ChainsResult, k: int) -> Params:
        if not result.lengths[k]:
            return {}
        self.writer.flush()
        found = StoredDraws(Shards(self.writer.folder, self.writer.manifest), [result.first + k])
        return {name: found[name][0] for name in found}

    def posterior(self) -> Posterior:
        """The stored draws; the run is complete unless ``max_seconds`` ended it."""
        info = self.make_info(self.results)
        if self.out_of_time or any(result.stopped.startswith("max_seconds") for result in self.results):
            self.writer.manifest.info = info
            self.writer.flush()
        else:
            self.writer.finish(info)
        if self.out_of_time and not self.writer.manifest.shards:
            raise next(iter(self.out_of_time.values()))
        for first, error in self.out_of_time.items():
            warn_caller(f"chain {first} has no draws: {error}; isosgd.resume goes on with it")
        return self._load()

    def _load(self) -> Posterior:
        return load(self.writer.folder, self.request.target, data=self.request.tensors, as_drawn=True)

    def interrupted(self) -> Interrupted:
        """The error to raise on Ctrl-C, after pending draws have been written."""
        self.writer.flush()
        found = self._load() if self.writer.manifest.shards else None
        return Interrupted(
            f"sampling was stopped; go on with isosgd.resume({str(self.request.store)!r}, target, data)", found
        )

    def close(self) -> None:
        self.writer.close()


def _is_repeated(writer: Writer, first: int, number: int, draw: Params, buffers: Params) -> bool:
    """Whether a draw equals the stored one bit for bit; warns if it does not."""
    name = writer.differs(first, number, draw, buffers)
    if name:
        warnings.warn(
            f"draw {number} did not come out as it is stored ({name!r} differs): another machine, device or version "
            "rounds otherwise. What is stored is kept, and the run goes on; its draws are as good, but not bit for bit "
            "those of a run that was never stopped",
            SamplingWarning,
            stacklevel=5,
        )
    return not name


def keep_at_once(request: RunRequest, info: Info, draw: Callable[[], Posterior]) -> Posterior:
    """The draws of a baseline, which come all at once; stored if there is a store. A stopped run starts anew."""
    try:
        if request.store is None:
            found = draw()
            info = {**found.info, "complete": True}
            return Posterior(found.target, found.draws, info, request.tensors, found.buffers)
        writer = request.open({**info, "threads": torch.get_num_threads()})
        if writer is not None:
            with closing(writer):
                _write_all(writer, draw())
        return load(request.store, request.target, data=request.tensors, as_drawn=True)
    except KeyboardInterrupt:
        raise Interrupted("stopped; baselines draw at the end, so that nothing had been drawn", None) from None


def _write_all(writer: Writer, found: Posterior) -> None:
    """Write draws and finish the run; draws that a stopped run has already written are compared."""
    manifest = writer.manifest
    dtypes = {name: spec.stored for name, spec in manifest.tensors.items()}
    manifest.tensors = {
        name: Spec(tuple(x.shape[2:]), dtype_name(x.dtype), dtypes.get(name, dtype_name(x.dtype)))
        for name, x in found.draws.items()
    }
    manifest.buffers = specs_of({name: x[0, 0] for name, x in found.buffers.items()})
    numbers, agrees = found.info["chain_indices"], True
    # Dropped chains leave gaps in the numbers; consecutive chains are written together.
    for _, together in groupby(range(len(numbers)), lambda place: numbers[place] - place):
        places = list(together)
        first, chains = numbers[places[0]], slice(places[0], places[-1] + 1)
        stored = writer.stored(first)
        for index in range(found.num_draws):
            draw, buffers = ({k: x[chains, index] for k, x in part.items()} for part in (found.draws, found.buffers))
            if index >= stored:
                writer.add(first, draw, buffers, 0)
            elif agrees:
                agrees = _is_repeated(writer, first, index, draw, buffers)
    writer.finish(found.info)
