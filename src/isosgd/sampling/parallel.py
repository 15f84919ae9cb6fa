"""A run over several processes: they check that they agree, draw their chains, and share the draws."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DistributedSampler

from isosgd.data.sources import DataSets, as_tensors
from isosgd.differences import check_ranks
from isosgd.engine.chains import MakeSampler
from isosgd.engine.ranks import Ranks
from isosgd.engine.schedule import Schedule
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.posterior import Posterior
from isosgd.progress import Progress
from isosgd.samplers import METHODS
from isosgd.sampling.loop import Note, draw_all
from isosgd.sampling.plan import ChainsResult, DrawPlan, report_end
from isosgd.sampling.recorders import InMemory, Interrupted, OnDisk, Recorder
from isosgd.sampling.request import RunRequest
from isosgd.sampling.settings import versions
from isosgd.sampling.stored import load, write_parts
from isosgd.store import Manifest, StoreError
from isosgd.store.files import plain, unpack
from isosgd.store.writer import SHARED, check_new, lock, read_state

Info = dict[str, Any]
MakeInfo = Callable[[RunRequest, list[ChainsResult]], Info]


def check_call(ranks: Ranks, data: Any, max_seconds: float | None, tries_temperatures: bool) -> None:
    """Check the arguments of `sample` that do not go with ``parallel``."""
    if max_seconds is not None:
        raise ValueError(f"max_seconds does not go with parallel = {ranks.parallel!r}: ranks have clocks of their own")
    if tries_temperatures and as_tensors(data) is None:
        raise ValueError(
            f"temperature='auto' with parallel = {ranks.parallel!r} and a loader: every rank tries the temperatures "
            "by itself, and their loaders would give them other batches. Pass the data as tensors, or a temperature, "
            "such as the one that a run of one process has chosen (info['temperature_choice'])"
        )


def check_request(ranks: Ranks, request: RunRequest) -> None:
    """Check that method and data can be shared out over ranks."""
    parallel, method = ranks.parallel, request.settings["method"]
    if method not in METHODS:
        raise ValueError(f"parallel = {parallel!r} shares out chains, and {method} has none: leave parallel out")
    if isinstance(request.data, DataSets):
        raise ValueError(f"parallel = {parallel!r} does not go with DataSets: their chains run in one computation")
    sampler = getattr(request.data, "sampler", None)
    if ranks.shares > 1 and as_tensors(request.data) is None and not isinstance(sampler, DistributedSampler):
        raise ValueError(
            "parallel = 'data' with a loader: it must have a DistributedSampler, so that each rank has other examples "
            f"(its sampler is {type(sampler).__name__}); or pass tensors, of which each rank takes its part"
        )


def check_sampler(ranks: Ranks | None, data: Any) -> None:
    """Check that a DistributedSampler is for the ranks that share the data of a chain."""
    sampler = getattr(data, "sampler", None)
    place, shares = (0, 1) if ranks is None else (ranks.place, ranks.shares)
    if isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank) != (shares, place):
        raise ValueError(
            f"the loader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
            f"{place} of the {shares} that share the data of a chain: make it with num_replicas={shares}, "
            f"rank={place}, or share data by parallel='data'"
        )


def check_agreement(ranks: Ranks, request: RunRequest) -> None:
    """Check that all ranks have the same settings, target and data."""
    own = {**request.identity(), "parallel": ranks.parallel, "versions": versions()}
    own |= {"store=": request.store is not None, "resume=": request.resume}
    check_ranks(
        ranks.gather(unpack(plain(own))),
        "all ranks must make the same call; seed torch before a model is made, or load its state_dict",
    )


def draw_over_ranks(
    ranks: Ranks,
    request: RunRequest,
    schedule: Schedule,
    plan: DrawPlan,
    make_sampler: MakeSampler,
    make_info: MakeInfo,
    bar: Progress,
    note: Note | None,
) -> Posterior:
    """Draw the chains of this rank's team; returns the draws of all ranks."""
    check_agreement(ranks, request)
    ranks.connect(next(iter(request.start(0).values())).device)
    with ExitStack() as open_ones:
        recorders = _recorders(ranks, request, make_info, open_ones)
        for recorder in recorders.values():
            open_ones.callback(recorder.close)
        if not ranks.leads:
            open_ones.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", SamplingWarning)  # the first rank of the team warns
        schedule.numbers = [chain for chain in ranks.own(schedule.count) if chain in recorders]
        runs = ((first, run, recorders[first]) for first, run in schedule.runs(make_sampler))
        try:
            with bar:
                draw_all(runs, plan, bar, note, ranks)
        except KeyboardInterrupt:
            raise Interrupted(
                "sampling was stopped; with store= it goes on by resume=True, on as many ranks as you like", None
            ) from None
        return _shared(ranks, request, plan, make_info, list(recorders.values()))


def _recorders(ranks: Ranks, request: RunRequest, make_info: MakeInfo, open_ones: ExitStack) -> dict[int, Recorder]:
    """The recorder of each unfinished chain of this rank."""
    own = ranks.own(request.count)
    if request.store is None:
        kind = InMemory if ranks.leads else Recorder
        return dict.fromkeys(own, kind(request, partial(make_info, request)))
    folder = Path(request.store)
    if ranks.rank == 0:
        _take_folder(folder, request, open_ones)
    ranks.gather(None)  # the folder is checked before anything is written
    recorders: dict[int, Recorder] = {}
    for chain in own if ranks.leads else []:
        part = request.of_chain(chain)
        info_of_part = partial(make_info, part)
        writer = part.open(info_of_part([]))
        if writer is not None:
            open_ones.callback(writer.close)
            recorders[chain] = OnDisk(part, info_of_part, writer)
    every = [f"part-{chain:04d}" for chain in range(request.count)]
    ranks.gather(None)
    for name in every:
        if not (folder / name).is_dir():
            raise StoreError(f"rank {ranks.rank} does not see {folder / name}, which another rank has made: {SHARED}")
    if not ranks.leads:
        for chain in own:
            part = request.of_chain(chain)
            manifest = Manifest.read(folder / every[chain])
            if not manifest.complete:
                recorders[chain] = follower = Recorder(part, partial(make_info, part))
                states = {k: read_state(folder / every[chain], file) for k, file in manifest.checkpoints.items()}
                follower.adopt(states)
    ranks.gather(None)  # from here on checkpoints are overwritten
    if ranks.rank == 0:
        write_parts(folder, every)
    return recorders


def _take_folder(folder: Path, request: RunRequest, open_ones: ExitStack) -> None:
    """Lock the folder, and check that a run in it has one part per chain."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock(folder)
    open_ones.callback(lambda: None if handle is None else os.close(handle))
    if not Manifest.begun(folder):
        return
    found = Manifest.read(folder)
    if not request.resume:
        check_new(folder)
    begun = [Manifest.read(folder / part).identity.get("settings", {}) for part in found.parts]
    own = {(one.get("first_chain"), one.get("chains"), one.get("seed")) for one in begun}
    if begun and own != {(chain, 1, begun[0].get("seed")) for chain in range(len(begun))}:
        raise ValueError(
            f"{folder} holds merged runs, which are extended in one process: isosgd.resume(store, target, data, "
            "draws=...) without parallel="
        )
    if len(found.parts) != request.count:
        what = f"{len(found.parts)} chains, each a part" if found.parts else "chains that one process drew together"
        raise ValueError(
            f"{folder} holds a run of {what}, and chains = {request.count} are asked for: give what it was begun with, "
            "or another store="
        )


def _shared(
    ranks: Ranks, request: RunRequest, plan: DrawPlan, make_info: MakeInfo, recorders: list[Recorder]
) -> Posterior:
    """The draws of all ranks, on every rank."""
    if request.store is None:
        found = InMemory(request, partial(make_info, request))
        if isinstance(recorders[0], InMemory):
            found = recorders[0]
        found.share(ranks)
        report_end(plan, found.failures(), found.results, warns=ranks.rank == 0)
        return found.posterior()
    failures: dict[int, DivergedError] = {}
    for recorder in recorders:
        if isinstance(recorder, OnDisk):
            failures |= recorder.failures()
            recorder.writer.finish(recorder.make_info(recorder.results))
    results = [result for recorder in recorders for result in recorder.results] if ranks.leads else []
    every = ranks.gather([result.state() for result in results])
    all_results = [ChainsResult.from_state(state) for found in every for state in found]
    lost = {o.first: e for o in all_results for e in o.failures.values()}
    report_end(plan, {**lost, **failures}, all_results, warns=ranks.rank == 0)
    assert request.store is not None
    return load(request.store, request.target, data=request.tensors, as_drawn=True)
