"""Draws at a temperature that is known: what was asked for is checked, chains are set up, drawn from, and kept.

`draw_at` makes the `Schedule` of chains and the plan of their draws; `isosgd.sampling.loop.draw_all` takes the steps,
and a keeper (`isosgd.sampling.recorders`) takes each draw and makes the `Posterior` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from isosgd.sampling.loop import ChainsResult, DrawPlan, check_warmup, draw_all, gradients_of, report_end, why_stopped
from isosgd.sampling.parallel import check_request, check_sampler, draw_over_ranks
from isosgd.sampling.recorders import InMemory, OnDisk, keep_at_once
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
from isosgd.sampling.stored import RunRequest, described, load
from isosgd.target import Target
from isosgd.target.batches import tensors_of, tree_map, with_tensors
from isosgd.target.heads import Head
from isosgd.warmup.windows import MOST_STEPS

only_check: ContextVar[bool] = ContextVar("only_check", default=False)


class Checked(Exception):
    """All that can be checked before the first step is good."""


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
    scoring: float = 0.0,
    about_choice: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
    first_chain: int | None = None,
    begin: Mapping[int, dict[str, Any]] | None = None,
    ends: dict[int, dict[str, Any]] | None = None,
    starts: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Posterior:
    """`sample` at a temperature that is known; ``about_choice`` goes into ``info``.

    After the draws each of them takes ``scoring`` seconds, which count before the ``deadline``.
    ``first_chain`` is given where chains are a part of a run that several processes drew, each on its own. ``begin``
    and ``ends`` are states of chains at another temperature, to go on from and to leave behind. ``starts`` are trained
    networks that a store is to hold.
    """
    check_settings(method, draws, chains, keep_every, warmup, temperature)
    given_method, (method, batch_size) = method, resolve_method(method, batch_size)
    if "tempered" in options:
        target = target.tempered(options["tempered"])
    most = most_draws(draws, budget, held_out, method)
    leaf = next(iter(target.initial(start_of(init, 0), device=device).values()))
    place = leaf.device  # where all parameters go, and the data with them
    data = as_data(data, batch_size, place, leaf.dtype)
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
    asked = RunRequest(
        target, data, init, place, settings, options, store, resume, store_dtype, held_out, transform, starts
    )
    if ranks is not None:
        ranks.arrange(chains)
        check_request(ranks, asked)
    check_sampler(ranks, data)
    # Draws that end by themselves may be far fewer than their limit.
    in_memory = most if draws != "auto" and (store is None or method in BASELINES) else 0
    check_room(asked.start(0), asked.count, in_memory)
    given = dict(options)
    after = compile_after(given)
    heated = is_heated(given, method, warmup)
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
            method, target, data, init, most, chains, batch_size, keep_every, warmup, temperature, seed, place,
            after, progress, given, transform,
        )  # fmt: skip
        return keep_at_once(asked, described_run, lambda: baseline.posterior(described_run))
    given.pop("tempered", None)
    numbers = ranks.own(chains) if ranks is not None else None
    if first_chain is not None:
        numbers = list(range(first_chain, first_chain + chains))
    _check_all_rows(asked)
    head = None if ranks is not None else _on_features(asked)
    part, its_data, watched = head or (target, data, held_out)
    schedule = Schedule(part, its_data, init, chains, batch_size, seed, place, after, transform, numbers, ranks)
    schedule.engine_note = "" if head is None else ", features of the head computed once"
    plan = DrawPlan(
        most, keep_every, warmup, noise_every(given), schedule.count, after, draws == "auto", schedule.chains, watched,
        trained, deadline, None if numbers is None else len(numbers), begin or {}, ends, scoring, heated,
        schedule.most_side_by_side,
    )  # fmt: skip
    if METHODS[method] is ISGD:
        given.setdefault("budget", None if warmup == "auto" else warmup)
    make_sampler = sampler_factory(
        method, schedule.num_data, temperature, schedule.batch_size, schedule.together_sets, given
    )
    leads = ranks is None or ranks.leads
    board = None if log is None or not leads else Log(log)  # before a folder is taken: TensorBoard may not be there
    note = None if board is None else board.step
    if only_check.get():
        asked.check_store()
        check_warmup(next(schedule.runs(make_sampler))[1], plan)
        raise Checked
    total = (len(numbers) if numbers is not None else schedule.count) * (
        (MOST_STEPS // 5 if warmup == "auto" else warmup) + most * plan.spacing
    )
    bar = Progress(total, progress and (ranks is None or ranks.rank == 0), beat=None if ranks is None else ranks.beat)
    if given_method != method:
        bar.note("batch_size = 'all': the method is HMC (method='hmc')")
    about = partial(_info, schedule, plan, about_choice or {})
    if ranks is not None:
        try:
            return draw_over_ranks(ranks, asked, schedule, plan, make_sampler, about, bar, note)
        finally:
            if board is not None:
                board.close()
    known = partial(about, asked)
    keeper: InMemory | OnDisk
    if store is None:
        keeper = InMemory(asked, known)
    else:
        writer = asked.open(known([]))
        if writer is None:  # nothing is left to do
            return load(store, target, data=asked.tensors)
        keeper = OnDisk(asked, known, writer)
    try:
        with bar:
            draw_all(((first, run, keeper) for first, run in schedule.runs(make_sampler)), plan, bar, note)
        report_end(plan, keeper.failures(), keeper.outcomes)
        return keeper.posterior()
    except KeyboardInterrupt:
        raise keeper.interrupted() from None
    finally:
        keeper.close()
        if board is not None:
            board.close()


def _check_all_rows(asked: RunRequest) -> None:
    """Look at all rows of a module's data, where they and the parameters are on one device: later on, at the first."""
    tensors, start = asked.tensors, asked.start(0)
    if tensors is None or asked.transform is not None or asked.target.module is None:
        return
    if len({t.device for t in (*tensors_of(tensors), *start.values())}) == 1:
        asked.target.check(start, tensors)


def _on_features(asked: RunRequest) -> tuple[Target, Data, Any] | None:
    """Target, data and held-out inputs of a sampled head, where there is one and nothing random stands before it."""
    target, tensors, given = asked.target, asked.tensors, asked.held_out
    if asked.transform is not None or tensors is None or not target.frozen:
        return None
    few = target.inputs_of(tree_map(lambda t: t[:2], tensors))
    head = Head.of(target, few, (start_of(asked.init, k) for k in range(asked.count)))
    if head is None:
        return None
    params = {name: x.detach() for name, x in target.constrain(asked.start(0)).items()}
    found = head.data(tensors, params)
    if found is None:
        return None
    inputs = given if given is None else tree_map(lambda t: t.to(tensors_of(tensors)[0].device), given)
    return head.target, found, None if given is None else head.features(head.whole.as_inputs(inputs), params)


def _engine(schedule: Schedule, outcomes: list[ChainsResult]) -> str:
    """How chains were run: together, in turn or side by side, and how their steps were taken."""
    engine, most = schedule.engine, max((outcome.side_by_side for outcome in outcomes), default=1)
    if most > 1:
        engine = engine.replace("in turn", f"{most} side by side", 1)
    return engine + "".join(dict.fromkeys(outcome.compiled for outcome in outcomes)) + schedule.engine_note


def _info(
    schedule: Schedule, plan: DrawPlan, more: dict[str, Any], asked: RunRequest, outcomes: list[ChainsResult]
) -> dict[str, Any]:
    """How the draws came about, as far as it is known."""
    kept = [(o, k) for o in outcomes for k in range(o.count) if k not in o.failures and k not in o.lengths]
    reports = [o.reports[k] for o, k in kept]
    return {
        "method": asked.settings["method"],
        "options": {name: described(value) for name, value in asked.options.items()},
        "temperature": asked.settings["temperature"],
        "density": asked.target.density(asked.start(0), asked.settings["temperature"]),
        "num_data": schedule.num_data,
        "batch_size": schedule.batch_size if schedule.tensors is not None else None,
        "draws": max((o.drawn for o in outcomes), default=0) if plan.ends_early else plan.draws,
        **({"stopped": why_stopped(outcomes)} if plan.ends_early else {}),
        "chains": len(kept),
        "chain_indices": [o.first + k for o, k in kept],
        "sets": schedule.sets,
        "chains_per_set": schedule.chains,
        "engine": _engine(schedule, outcomes),
        "keep_every": [report.keep_every or plan.spacing for report in reports],
        "seed": asked.settings["seed"],
        "warmup": [report.as_dict() for report in reports],
        "rates": [{group.name: group.rate for group in report.groups} for report in reports],
        "dropped": {o.first + k: str(failure) for o in outcomes for k, failure in o.failures.items()},
        "gradients": gradients_of(outcomes),
        "target": asked.target.describe(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **more,
    }
