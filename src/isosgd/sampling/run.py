"""Sampling at one known temperature: check the settings, set up chains, and draw from them.

`draw_at` makes the `Schedule` of chains and the plan of their draws; `isosgd.sampling.loop.draw_all` takes the steps,
and a recorder (`isosgd.sampling.recorders`) stores each draw and makes the `Posterior`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from isosgd.baselines import BASELINES, BaselineRun
from isosgd.data.sources import Data, Transform, as_data
from isosgd.diagnostics import Log
from isosgd.engine.ranks import Ranks
from isosgd.engine.schedule import Schedule, Start, start_of
from isosgd.posterior import Posterior
from isosgd.progress import Progress
from isosgd.samplers import ISGD, METHODS
from isosgd.samplers.schedules import STAGE_DRAWS
from isosgd.sampling.loop import check_warmup, draw_all
from isosgd.sampling.parallel import check_request, check_sampler, draw_over_ranks
from isosgd.sampling.plan import ChainsResult, DrawPlan, gradients_of, report_end, why_stopped
from isosgd.sampling.recorders import InMemory, OnDisk, keep_at_once
from isosgd.sampling.request import RunRequest, described
from isosgd.sampling.settings import (
    check_room,
    check_settings,
    compile_after,
    is_heated,
    most_draws,
    noise_every,
    resolve_method,
    sampler_factory,
    versions,
)
from isosgd.sampling.stored import load
from isosgd.target import Target
from isosgd.target.batches import tensors_of, tree_map, with_tensors
from isosgd.target.heads import Head
from isosgd.warmup.windows import MOST_STEPS

GUESSED_HEATING = 400  # gradients before the cycles, until they are known
only_check: ContextVar[bool] = ContextVar("only_check", default=False)


class Checked(Exception):
    """Raised in place of the first step when `only_check` is set and all checks passed."""


@contextmanager
def checking() -> Iterator[None]:
    """Within it, sampling ends before its first step, when all checks have passed."""
    token = only_check.set(True)
    try:
        with suppress(Checked):
            yield
    finally:
        only_check.reset(token)


def draw_at(
    target: Target,
    data: Any,
    *,
    init: Start,
    method: str,
    draws: int | Literal["auto"],
    chains: int,
    batch_size: int | Literal["all"] | None,
    keep_every: int | Literal["auto"],
    warmup: int | Literal["auto"],
    temperature: float,
    seed: int,
    device: torch.device | str | None,
    progress: bool = True,
    store: str | Path | None = None,
    resume: bool = False,
    store_dtype: Literal["float32", "bfloat16"] | None = None,
    log: str | Path | None = None,
    budget: int | None = None,
    held_out: Any = None,
    transform: Transform | None = None,
    trained: bool = False,
    deadline: float | None = None,
    latest: float | None = None,
    scoring: float = 0.0,
    about_choice: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
    first_chain: int | None = None,
    begin: Mapping[int, dict[str, Any]] | None = None,
    ends: dict[int, dict[str, Any]] | None = None,
    reached: dict[tuple[int, int], dict[str, Any]] | None = None,
    starts: Sequence[Mapping[str, Any]] = (),
    label: str = "",
    **options: Any,
) -> Posterior:
    """`sample` at one temperature.

    Args (beside those of `sample`):
        trained: whether chains start at trained networks.
        deadline: when to end, by `time.monotonic`.
        latest: when to give up a warm-up that cannot draw yet; by default at the deadline.
        scoring: seconds before the deadline to reserve for each draw, to score it.
        about_choice: added to ``info``.
        first_chain: index of the first chain, if these chains are a part of a run over several processes.
        begin: states of chains at another temperature to start from, by the first chain.
        ends: takes the states in which the chains end.
        reached: takes the rates that heating reaches; chains that are in it are not heated again.
        starts: trained networks to write to the store.
    """
    check_settings(method, draws, chains, keep_every, warmup, temperature)
    given_method, (method, batch_size) = method, resolve_method(method, batch_size)
    if "tempered" in options:
        target = target.tempered(options["tempered"])
    most = most_draws(draws, budget, held_out, method)
    leaf = next(iter(target.initial(start_of(init, 0), device=device).values()))
    data = as_data(data, batch_size, leaf.device, leaf.dtype)
    held_out = with_tensors(held_out, leaf.dtype)
    settings = {
        "method": method,
        "draws": draws,
        "chains": chains,
        "batch_size": batch_size,
        "keep_every": keep_every,
        "warmup": warmup,
        "temperature": temperature,
        "seed": seed,
        **({"budget": budget} if draws == "auto" else {}),
        **({} if first_chain is None else {"first_chain": first_chain}),
    }
    request = RunRequest(
        target, data, init, leaf.device, settings, options, store, resume, store_dtype, held_out, transform, starts
    )
    if ranks is not None:
        ranks.arrange(chains)
        check_request(ranks, request)
    check_sampler(ranks, data)
    # With draws="auto" there may be far fewer draws than the limit.
    in_memory = most if draws != "auto" and (store is None or method in BASELINES) else 0
    check_room(request.start(0), request.count, in_memory)
    remaining = dict(options)
    after = compile_after(remaining, deadline if leaf.device.type == "cpu" else None)
    heated = is_heated(remaining, method, warmup)
    if method in BASELINES:
        assert not isinstance(batch_size, str)  # `resolve_method` refuses it
        described_run = {
            "method": method,
            "options": {name: described(value) for name, value in options.items()},
            "seed": seed,
            "temperature": temperature,
            "density": f"none: {BASELINES[method].kind.targets}",
            "target": target.describe(),
            "versions": versions(),
        }
        baseline = BaselineRun(
            method, target, data, init, most, chains, batch_size, keep_every, warmup, temperature, seed, leaf.device,
            after, progress, remaining, transform,
        )  # fmt: skip
        return keep_at_once(request, described_run, lambda: baseline.posterior(described_run))
    remaining.pop("tempered", None)
    numbers = ranks.own(chains) if ranks is not None else None
    if first_chain is not None:
        numbers = list(range(first_chain, first_chain + chains))
    _check_all_rows(request)
    if held_out is not None and target.module is not None:
        target.module.check_inputs(target.constrain(request.start(0)), held_out)
    head = None if ranks is not None else _on_features(request)
    part, its_data, watched = head or (target, data, held_out)
    schedule = Schedule(part, its_data, init, chains, batch_size, seed, leaf.device, after, transform, numbers, ranks)
    schedule.engine_note = "" if head is None else ", features of the head computed once"
    plan = DrawPlan(
        most, keep_every, warmup, noise_every(remaining), schedule.count, after, auto=draws == "auto",
        chains_per_set=schedule.chains, held_out=watched, trained=trained, deadline=deadline,
        latest=next((end for end in (latest, deadline) if end is not None), math.inf),
        here=None if numbers is None else len(numbers), begin=begin or {}, ends=ends, scoring=scoring,
        heated=({} if reached is None else reached) if heated else None, most_side_by_side=schedule.most_side_by_side,
    )  # fmt: skip
    if METHODS[method] is ISGD:
        remaining.setdefault("budget", None if warmup == "auto" else warmup)
    make_sampler = sampler_factory(
        method, schedule.num_data, temperature, schedule.batch_size, schedule.together_sets, remaining
    )
    leads = ranks is None or ranks.leads
    board = None if log is None or not leads else Log(log)  # before the store is made: TensorBoard may be missing
    note = None if board is None else board.step
    if only_check.get():
        request.check_store()
        check_warmup(next(schedule.runs(make_sampler))[1], plan)
        raise Checked
    each = (MOST_STEPS // 5 if warmup == "auto" else warmup) + most * plan.spacing
    if heated and "cycle" in options:
        each = GUESSED_HEATING + options["cycle"] * -(-most // STAGE_DRAWS)
    total = (len(numbers) if numbers is not None else schedule.count) * each
    show, beat = progress and (ranks is None or ranks.rank == 0), None if ranks is None else ranks.beat
    bar = Progress(total, show, beat=beat, label=label)
    if given_method != method:
        bar.note("batch_size = 'all': the method is HMC (method='hmc')")
    info = partial(_info, schedule, plan, about_choice or {})
    with closing(board) if board is not None else nullcontext():
        if ranks is not None:
            return draw_over_ranks(ranks, request, schedule, plan, make_sampler, info, bar, note)
        recorder: InMemory | OnDisk
        if store is None:
            recorder = InMemory(request, partial(info, request))
        else:
            writer = request.open(info(request, []))
            if writer is None:  # the run has all draws
                return load(store, target, data=request.tensors, as_drawn=True)
            recorder = OnDisk(request, partial(info, request), writer)
        with closing(recorder):
            try:
                with bar:
                    draw_all(((first, run, recorder) for first, run in schedule.runs(make_sampler)), plan, bar, note)
                report_end(plan, recorder.failures(), recorder.results)
                return recorder.posterior()
            except KeyboardInterrupt:
                raise recorder.interrupted() from None


def _check_all_rows(request: RunRequest) -> None:
    """Check all rows of a module's data if they are on the device of the parameters; else batches are checked."""
    tensors, start = request.tensors, request.start(0)
    if tensors is None or request.transform is not None or request.target.module is None:
        return
    if len({t.device for t in (*tensors_of(tensors), *start.values())}) == 1:
        request.target.check(start, tensors)


def _on_features(request: RunRequest) -> tuple[Target, Data, Any] | None:
    """Target, data and held-out inputs of a sampled head whose features can be computed once; None if there is none."""
    target, tensors, held_out = request.target, request.tensors, request.held_out
    if request.transform is not None or tensors is None or not target.frozen:
        return None
    few = target.inputs_of(tree_map(lambda t: t[:2], tensors))
    head = Head.of(target, few, (start_of(request.init, k) for k in range(request.count)))
    if head is None:
        return None
    params = {name: x.detach() for name, x in target.constrain(request.start(0)).items()}
    found = head.data(tensors, params)
    if found is None:
        return None
    if held_out is None:
        return head.target, found, None
    device = tensors_of(tensors)[0].device
    inputs = head.whole.as_inputs(tree_map(lambda t: t.to(device), held_out))
    return head.target, found, head.features(inputs, params)


def _engine(schedule: Schedule, results: list[ChainsResult]) -> str:
    """How chains ran (together, in turn or side by side) and how their steps were taken."""
    engine, most = schedule.engine, max((result.side_by_side for result in results), default=1)
    if most > 1:
        engine = engine.replace("in turn", f"{most} side by side", 1)
    return engine + "".join(dict.fromkeys(result.compiled for result in results)) + schedule.engine_note


def _info(
    schedule: Schedule, plan: DrawPlan, more: dict[str, Any], request: RunRequest, results: list[ChainsResult]
) -> dict[str, Any]:
    """How the draws were made, as far as it is known."""
    kept = [(o, k) for o in results for k in range(o.count) if k not in o.failures and k not in o.lengths]
    reports = [o.reports[k] for o, k in kept]
    return {
        "method": request.settings["method"],
        "options": {name: described(value) for name, value in request.options.items()},
        "temperature": request.settings["temperature"],
        "density": request.target.density(request.start(0), request.settings["temperature"]),
        "num_data": schedule.num_data,
        "batch_size": schedule.batch_size if schedule.tensors is not None else None,
        "draws": max((o.drawn for o in results), default=0) if plan.ends_early else plan.draws,
        **({"stopped": why_stopped(results)} if plan.ends_early else {}),
        "chains": len(kept),
        "chain_indices": [o.first + k for o, k in kept],
        "sets": schedule.sets,
        "chains_per_set": schedule.chains,
        "engine": _engine(schedule, results),
        "keep_every": [report.keep_every or plan.spacing for report in reports],
        "seed": request.settings["seed"],
        "warmup": [report.as_dict() for report in reports],
        "rates": [{group.name: group.rate for group in report.groups} for report in reports],
        "dropped": {o.first + k: str(failure) for o in results for k, failure in o.failures.items()},
        "gradients": gradients_of(results),
        "target": request.target.describe(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **more,
    }
