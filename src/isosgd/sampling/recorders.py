"""Where draws go as they come: into memory, or onto the disk."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.engine.ranks import Ranks
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.posterior import Posterior
from isosgd.sampling.plan import ChainsResult, DrawPlan, MakeInfo, State
from isosgd.sampling.stored import RunRequest, info_of, load
from isosgd.store import Shards, StoredDraws, Writer, rectangle
from isosgd.store.files import dtype_name
from isosgd.store.manifest import Spec, specs_of
from isosgd.target import Params

Info = dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while draws were taken. Draws taken so far are kept.

    Attributes:
        posterior: the draws so far; None when there were none.
    """

    def __init__(self, message: str, posterior: Posterior | None) -> None:
        super().__init__(message)
        self.posterior = posterior


class Recorder:
    """Takes draws, and knows where chains resume. This one keeps no draws: another rank has those of a shared chain.

    Args:
        request: what is drawn from.
        about: says how the draws come about, from what has been found out so far.
    """

    def __init__(self, request: RunRequest, about: MakeInfo) -> None:
        self.request, self.make_info = request, about
        self.ended: dict[int, ChainsResult] = {}  # by the first of chains that run side by side
        self.current: dict[int, ChainsResult] = {}
        self.saved: dict[int, State] = {}  # from where chains go on
        self.started = time.monotonic()

    @property
    def results(self) -> list[ChainsResult]:
        """Of chains that have come to their end."""
        return [self.ended[first] for first in sorted(self.ended)]

    def every(self) -> list[ChainsResult]:
        """Of all chains that have been warmed up."""
        both = {**self.current, **self.ended}
        return [both[first] for first in sorted(both)]

    def adopt(self, saved: dict[int, State]) -> None:
        """Take checkpoints for where chains go on from, or have come to their end."""
        self.saved = saved
        results = {first: state["outcome"] for first, state in saved.items() if state["outcome"] is not None}
        self.ended = {first: ChainsResult.from_state(state) for first, state in results.items()}

    def restored(self, first: int, run: Chains, plan: DrawPlan) -> tuple[ChainsResult | None, State | None]:
        """What came of these chains, if they have come to their end already, or from where they go on."""
        saved = self.saved.get(first)
        if first in self.ended and self.ended[first].is_end(plan):
            run.batches.load_state(self.ended[first].batches)  # what follows takes its data from where they ended
            return self.ended[first], None
        self.ended.pop(first, None)
        return None, None if saved is None else saved["current"]

    def warmed(self, result: ChainsResult) -> None:
        """These chains are being drawn from."""
        self.current[result.first] = result

    def keep(self, run: Chains, first: int, number: int) -> None:
        """Take draw ``number``, where the chains are now, and the buffers that go with it."""

    def mark(self, first: int, state: Callable[[], State]) -> None:
        """Chains could go on from here later, from their state."""

    def finished(self, result: ChainsResult, state: Callable[[], State] | None) -> None:
        """These chains have come to their end, in a state; None when all of them failed."""
        self.ended[result.first] = result
        self.current.pop(result.first, None)

    def failures(self) -> dict[int, DivergedError]:
        """Why chains were given up, with the draws they had."""
        found = {}
        for result in self.results:
            for k, error in result.failures.items():
                error.draws = self.draws_of(result, k)
                found[result.first + k] = error
        return found

    def draws_of(self, result: ChainsResult, k: int) -> Params:
        """The good draws of a chain that was given up, ``[draws, *shape]``."""
        return {}

    def close(self) -> None:
        """Let go of everything."""


class InMemory(Recorder):
    """Keeps draws in memory."""

    def __init__(self, request: RunRequest, about: MakeInfo) -> None:
        super().__init__(request, about)
        self._draws: dict[int, list[Params]] = {}
        self._with: dict[int, list[Params]] = {}

    def keep(self, run: Chains, first: int, number: int) -> None:
        """Take a draw, and the buffers that go with it."""
        buffers = {name: x.cpu() for name, x in run.draw_buffers(number).items()}
        self._with.setdefault(first, []).append(buffers)
        self._draws.setdefault(first, []).append({name: x.cpu() for name, x in run.natural().items()})

    def share(self, ranks: Ranks) -> None:
        """Have the draws of all ranks on each of them."""
        own = {
            first: {"outcome": result.state(), "draws": self._draws.get(first, []), "with": self._with.get(first, [])}
            for first, result in self.ended.items()
        }
        for found in ranks.gather(own if ranks.leads else {}):
            for first, parts in found.items():
                self.ended[first] = ChainsResult.from_state(parts["outcome"])
                self._draws[first], self._with[first] = parts["draws"], parts["with"]

    def draws_of(self, result: ChainsResult, k: int) -> Params:
        return _chain(self._draws.get(result.first, [])[: result.lengths[k]], k)

    def _places(self) -> dict[int, tuple[int, int]]:
        """Where the draws of each living chain that has any are: the first of its run, and its place in it."""
        living = {o.first + k: (o.first, k) for o in self.every() for k in range(o.count) if k not in o.lengths}
        return {chain: place for chain, place in living.items() if self._draws.get(place[0])}

    def posterior(self) -> Posterior:
        """What was drawn. Of chains that were stopped at different lengths, as much as makes a rectangle."""
        place = self._places()
        lengths = {chain: len(self._draws[first]) for chain, (first, _) in place.items()}
        chains, length = rectangle(lengths)
        if any(result.stopped.startswith("max_seconds") for result in self.every()):
            chains, length = sorted(lengths), min(lengths.values())  # no network is lost because its turn was short
        parts = []
        for source in (self._draws, self._with):
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
        """What to raise on Ctrl-C."""
        found = self.posterior() if self._places() else None
        drawn = "nothing had been drawn yet" if found is None else f"{len(found)} draws are in .posterior of this error"
        return Interrupted(f"sampling was stopped; {drawn}", found)


def _stacked(parts: list[Tensor]) -> Tensor:
    """One tensor of all chains; of a single chain, whose draws may be gigabytes, without a copy."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _chain(draws: list[Params], k: int) -> Params:
    return {name: torch.stack([draw[name][k] for draw in draws]) for name in draws[0]} if draws else {}


class OnDisk(Recorder):
    """Writes draws to a store as they come, and checkpoints."""

    def __init__(self, request: RunRequest, about: MakeInfo, writer: Writer) -> None:
        super().__init__(request, about)
        self.writer = writer
        with writer.closed_on_error():
            self.adopt(writer.checkpoints())
        self._agrees = True  # what comes again with what is stored

    def keep(self, run: Chains, first: int, number: int) -> None:
        """Take a draw. One that is on the disk already, since it came after the last checkpoint, is compared."""
        manifest, draw = self.writer.manifest, run.natural(copy=False)  # the writer copies it
        buffers = run.draw_buffers(number)
        if not manifest.shards and not self.writer.stored(first):
            manifest.buffers = specs_of({name: x[0] for name, x in buffers.items()})
        for k in run.failures:
            manifest.lost.setdefault(first + k, number)
        if number >= self.writer.stored(first):
            self.writer.add(first, {name: draw[name] for name in manifest.tensors}, buffers, run.gradients)
        elif self._agrees:
            self._agrees = comes_again(self.writer, first, number, draw, buffers)

    def warmed(self, result: ChainsResult) -> None:
        """Say in the manifest what the warm-up found."""
        super().warmed(result)
        self.writer.manifest.info = self.make_info(self.every())

    def mark(self, first: int, state: Callable[[], State]) -> None:
        """Write a checkpoint if one is due."""
        self.writer.mark(first, lambda: self._state(state(), None))

    def finished(self, result: ChainsResult, state: Callable[[], State] | None) -> None:
        """These chains have come to their end: so much need not be done again, and more may be asked for later."""
        super().finished(result, state)
        self.writer.manifest.lost |= {result.first + k: n for k, n in result.lengths.items()}
        self.writer.manifest.info = self.make_info(self.every())
        self.writer.mark(result.first, lambda: self._state(None if state is None else state(), result), now=True)

    def _state(self, current: State | None, result: ChainsResult | None) -> State:
        return {
            "outcome": None if result is None else result.state(),
            "current": current,
        }

    def draws_of(self, result: ChainsResult, k: int) -> Params:
        if not result.lengths[k]:
            return {}
        self.writer.flush()
        found = StoredDraws(Shards(self.writer.folder, self.writer.manifest), [result.first + k])
        return {name: found[name][0] for name in found}

    def posterior(self) -> Posterior:
        """What was drawn, as it is on the disk; the run is complete, unless its time was up."""
        if any(result.stopped.startswith("max_seconds") for result in self.results):
            self.writer.manifest.info = self.make_info(self.results)
            self.writer.flush()
            return self._load()
        self.writer.finish(self.make_info(self.results))
        return self._load()

    def _load(self) -> Posterior:
        return load(self.writer.folder, self.request.target, data=self.request.tensors)

    def interrupted(self) -> Interrupted:
        """What to raise on Ctrl-C; what is gathered is written."""
        self.writer.flush()
        found = self._load() if self.writer.manifest.shards else None
        return Interrupted(f"sampling was stopped; go on with store={str(self.request.store)!r}, resume=True", found)

    def close(self) -> None:
        self.writer.close()


def comes_again(writer: Writer, first: int, number: int, draw: Params, buffers: Params) -> bool:
    """Whether a draw is the one that is stored, bit for bit; warns when it is not."""
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


def keep_at_once(request: RunRequest, about: Info, draw: Callable[[], Posterior]) -> Posterior:
    """Draws that come all at once, in memory or as a run on the disk, which is begun again if it was stopped."""
    try:
        return _at_once(request, about, draw)
    except KeyboardInterrupt:
        raise Interrupted("stopped; baselines draw at the end, so that nothing had been drawn", None) from None


def _at_once(request: RunRequest, about: Info, make: Callable[[], Posterior]) -> Posterior:
    if request.store is None:
        found = make()
        return Posterior(found.target, found.draws, {**found.info, "complete": True}, request.tensors, found.buffers)
    writer = request.open({**about, "threads": torch.get_num_threads()})
    if writer is not None:
        try:
            found, manifest = make(), writer.manifest
            dtypes = {name: spec.stored for name, spec in manifest.tensors.items()}
            manifest.tensors = {
                name: Spec(tuple(x.shape[2:]), dtype_name(x.dtype), dtypes.get(name, dtype_name(x.dtype)))
                for name, x in found.draws.items()
            }
            manifest.buffers = specs_of({name: x[0, 0] for name, x in found.buffers.items()})
            _write_all(writer, found)
            writer.finish(found.info)
        finally:
            writer.close()
    return load(request.store, request.target, data=request.tensors)


def _write_all(writer: Writer, found: Posterior) -> None:
    """Write draws, those that a run which was stopped has written already apart: they are compared."""
    numbers, agrees = found.info["chain_indices"], True
    # Chains that were dropped leave gaps; those that follow one another are written side by side.
    for _, together in groupby(range(len(numbers)), lambda place: numbers[place] - place):
        places = list(together)
        first, chains = numbers[places[0]], slice(places[0], places[-1] + 1)
        stored = writer.stored(first)
        for index in range(found.num_draws):
            draw, buffers = ({k: x[chains, index] for k, x in part.items()} for part in (found.draws, found.buffers))
            if index >= stored:
                writer.add(first, draw, buffers, 0)
            elif agrees:
                agrees = comes_again(writer, first, index, draw, buffers)
