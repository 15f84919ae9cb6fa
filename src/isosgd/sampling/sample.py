"""`sample`: a target and data in, posterior draws out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from isosgd.baselines import BASELINES, BaselineRun
from isosgd.data.sources import Data, Transform, as_data
from isosgd.diagnostics import Log
from isosgd.engine.ranks import TIMEOUT, Parallel, Ranks, shared
from isosgd.engine.schedule import Schedule, Start, start_of
from isosgd.posterior import Posterior
from isosgd.progress import Progress
from isosgd.samplers import ISGD, METHODS
from isosgd.sampling.ladder import Choice
from isosgd.sampling.loop import ChainsResult, DrawPlan, check_warmup, draw_all, gradients_of, report_end, why_stopped
from isosgd.sampling.parallel import check_call, check_request, check_sampler, draw_over_ranks
from isosgd.sampling.recorders import InMemory, OnDisk, keep_at_once
from isosgd.sampling.settings import (
    check_heating,
    check_room,
    check_seconds,
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
from isosgd.sampling.trained import DRAWS, TrainedRun, as_starts, own_network
from isosgd.target import Target
from isosgd.target.batches import tensors_of, tree_map, with_tensors
from isosgd.target.heads import Head
from isosgd.warmup.windows import MOST_STEPS

_only_check: ContextVar[bool] = ContextVar("only_check", default=False)


class _Checked(Exception):
    """All that can be checked before the first step is good."""


def check_sample(target: Target, data: Any, **settings: Any) -> None:
    """Raise what `sample` would raise before its first step: of settings, options, data and store."""
    token = _only_check.set(True)
    try:
        sample(target, data, **settings)
    except _Checked:
        pass
    finally:
        _only_check.reset(token)


@shared
def sample(
    target: Target,
    data: Any,
    *,
    init: Start = None,
    starts: Any = None,
    method: str | None = None,
    draws: int | Literal["auto"] | None = None,
    chains: int = 1,
    batch_size: int | Literal["all"] | None = None,
    keep_every: int | Literal["auto"] = "auto",
    warmup: int | Literal["auto"] = "auto",
    temperature: float | Literal["auto"] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    store: str | Path | None = None,
    resume: bool = False,
    store_dtype: Literal["float32", "bfloat16"] | None = None,
    log: str | Path | None = None,
    budget: int | None = None,
    held_out: Any = None,
    ladder: Sequence[float] | None = None,
    max_seconds: float | None = None,
    transform: Transform | None = None,
    parallel: Parallel | None = None,
    rank_timeout: float = TIMEOUT,
    **options: Any,
) -> Posterior:
    """Draw from a posterior with stochastic gradients. Nothing needs to be tuned.

    Args:
        target: what to sample.
        data: tensors, numpy arrays, or frames of pandas or polars, as a tuple or list, one row an example (minibatches
            are drawn independently; arrays of floats become of the parameters' dtype); a dict of those, for a model
            that takes them by name; any other iterable of batches such as a DataLoader or a list of tuples or dicts; or
            `isosgd.DataSets`, several data sets at once.
        init: start values in natural parameters, and of buffers where there are, such as the ``state_dict`` of a
            trained network; where the target says by default. A function from the number of a chain to such values
            gives each chain a start of its own.
        starts: trained networks, or their ``state_dict``s: chains begin there, in turns, without an initial
            optimisation, and their number is at least that of the networks. The run then takes about ten epochs of
            gradients, in cycles 24, unless ``warmup``, ``draws`` or ``keep_every`` say otherwise.
        method: a name of `isosgd.methods`: ``isgd``, the default, ``sgld``, ``sghmc`` and so on. ``hmc``, the default
            around ``starts`` of a regression of at most 5,000 rows unless ``batch_size`` is given, takes all data for
            every gradient and accepts or rejects its trajectories (see `isosgd.samplers.hmc`): nothing is left of the
            discretisation bias. It pays up to some thousand examples, above all for networks. ``csghmc``, the default
            around ``starts`` of classifiers of 5,000 weights or with BatchNorm in training mode, where ``held_out``
            examples choose the temperature, leaves the network in cycles of momentum descent, and draws at their ends;
            ``lr="heated"``, which it has there, finds their highest rate where the loss of the network rises.
        draws: draws to keep from each chain, 100 by default, 30 with ``starts``; ``auto`` goes on until predictions
            have converged (R-hat of at most 1.01 and 400 effective draws, over all chains) or the ``budget`` ends;
            ``info["stopped"]`` says which.
        chains: independent chains, of each data set. They run in one batched computation where the model allows it
            (``info["engine"]`` says so, or why not).
        batch_size: examples in a minibatch; half of the data, between 8 and 128, by default. ``all`` is a short way to
            ``method="hmc"``, and ``info["method"]`` then says ``hmc``.
        keep_every: steps between draws; ``auto`` measures the autocorrelation of predictions in the warm-up.
        warmup: gradients to spend before the first draw; ``auto`` goes on until the chain has settled.
        temperature: T; 1, the posterior, by default. ``auto``, the default with ``starts``, tries temperatures from the
            start on ``held_out`` examples (see ``ladder``), and keeps of the draws those up to where they predict
            best; where they are not better than the start by a standard error, the draws are the starts. Without
            held-out examples T is 1e-3, of a regression 1.
            ``info["temperature_choice"]`` says how it was chosen. With a prior whose scales are fixed the density is
            ``(likelihood * prior)^(1/T)``, that is ``exp(-f / T)``. Where scales of the prior are sampled
            (`HierarchicalNormal`, `Relevance`), or with ``tempered="likelihood"`` (see ``options``), the likelihood
            alone is tempered, ``likelihood^(1/T) * prior``: as if there were N/T examples. ``info["density"]`` says
            which.
        seed: same seed and settings, same draws.
        device: where to sample; where the parameters are by default. Data go there.
        progress: show a progress line on a terminal; elsewhere log each stage, and a line every 30 seconds, with the
            time left (logger ``isosgd``: to standard error, unless `logging` is configured).
        store: a folder to write draws to as they come, so that memory does not grow with them and a crash takes none;
            `isosgd.load` reads it.
        resume: go on with the run in ``store`` where it was stopped. On a CPU its draws are bit for bit those of a run
            that was never stopped. With more ``draws`` (or a larger ``budget``) than before the run is extended (see
            `isosgd.resume`). A changed model, data or other setting is refused. Where there is no run, one is begun.
        store_dtype: dtype in which draws are written; their own by default.
        log: a folder for TensorBoard, which shows loss and rates at every draw (needs the extra ``tensorboard``).
        budget: with ``draws="auto"``, draws of each chain at most; 2,000 by default.
        held_out: with ``temperature="auto"``, examples that the starts were not trained on: ``(x, y)``, a loader, or a
            share of the data such as 0.1 that is set aside. Predictions of classes are then calibrated by them, too
            (`Posterior.softmax_temperature`). With ``draws="auto"``, inputs at which predictions are
            watched; some of the training data by default.
        ladder: temperatures to try with ``temperature="auto"``, from cold to hot, by I-SGD. By default 0.3, with cycles
            0.03, and colder ones where that does harm; 1 alone where the likelihood samples a scale of its noise, which
            a colder density would believe too small.
        max_seconds: bound on the time of the whole call: the warm-up and the draws end early. At least one draw of each
            chain is taken. The initial optimisation does not watch it.
        transform: a function ``(batch, generator) -> batch`` that every minibatch goes through on its device, such as
            augmentation or a change of type: images may so lie on a GPU as bytes. It must keep the number of examples,
            take its random numbers from the generator, and is not applied in predictions.
        parallel: how the processes of `torch.distributed`, each of which makes this call, share the run: ``chains``
            shares the chains out; ``data`` shares every minibatch of a chain, which takes a part of the tensors or the
            batches of a DistributedSampler. Every rank has all draws then. See the page "Beyond one machine".
        rank_timeout: seconds without a sign of life, after which a rank is given up and the others raise its number.
        options: settings of the method (for instance ``noise``, ``scheme``, ``structure``, ``bias``, ``lr``),
            ``preset`` for a row of the paper (``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also ``-slr``) or
            ``windowed`` (from a trained start, lambda is four times the noise of each layer), ``noise_every``, and
            ``tempered``, what a temperature acts on: ``both``, likelihood and prior, or the ``likelihood`` alone.

    Returns:
        The draws, with how they came about in ``info``.

    Raises:
        DivergedError: when every chain met a loss or gradient that is not finite.
        isosgd.Interrupted: on Ctrl-C, a `KeyboardInterrupt` with the draws so far in ``.posterior``.

    Example:
        >>> from isosgd import Target, priors, sample
        >>> y = torch.randn(200, generator=torch.Generator().manual_seed(0)) + 3.0
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
        >>> posterior = sample(target, (y,), draws=20, keep_every=20, warmup=1000, progress=False)
        >>> posterior.draws["mu"].shape
        torch.Size([1, 20])
        >>> bool(abs(posterior.draws["mu"].mean() - y.mean()) < 0.2)
        True
    """
    if not isinstance(target, Target):
        raise TypeError(
            f"target of type {type(target).__name__}: pass an isosgd.Target; Target.from_module makes one from a model"
        )
    ranks = cast(Ranks | None, parallel)  # which `shared` has put there
    deadline = None if max_seconds is None else time.monotonic() + check_seconds(max_seconds)
    networks = as_starts(starts, target, init)
    if temperature == "auto" and networks is None:
        networks = as_starts(own_network(target, init), target, None)
    if ladder is not None and temperature not in (None, "auto"):
        raise ValueError(f"ladder= goes with temperature='auto', not with temperature = {temperature!r}")
    given: dict[str, Any] = {
        "method": method, "batch_size": batch_size, "seed": seed, "device": device, "transform": transform,
    }  # fmt: skip
    more: dict[str, Any] = {
        "store": store, "resume": resume, "store_dtype": store_dtype, "log": log, "budget": budget,
        "progress": progress, "deadline": deadline, "ranks": ranks,
    }  # fmt: skip
    tried = networks is not None and temperature in (None, "auto") and held_out is not None
    if ranks is not None:
        check_call(ranks, data, max_seconds, tried)
    if networks is None:
        assert temperature != "auto"
        more |= {"draws": 100 if draws is None else draws, "keep_every": keep_every, "warmup": warmup}
        return _draw(
            target, data, init=init, chains=chains, temperature=1.0 if temperature is None else temperature,
            held_out=held_out, **{**given, "method": method or "isgd"}, **more, **options,
        )  # fmt: skip
    known = 1.0 if temperature in (None, "auto") else temperature
    assert known != "auto" and known is not None
    check_settings(method or "isgd", DRAWS if draws is None else draws, chains, keep_every, warmup, known)
    if temperature not in (None, "auto") and held_out is not None and draws != "auto":
        raise ValueError(
            f"held_out= goes with temperature='auto' or draws='auto', not with temperature = {temperature!r}"
        )
    if resume and temperature in (None, "auto"):
        raise ValueError(
            "resume=True with temperature='auto': isosgd.resume(store, target, data, starts=...) goes on with a run as "
            "it was begun"
        )
    around = TrainedRun(
        target, data, networks, held_out, ladder, given, options, store is None and ranks is None,
        temperature in (None, "auto"),
    )  # fmt: skip
    if around.cycles:
        check_heating(warmup)
    if draws == "auto" and around.held_out is not None:
        more["held_out"] = target.inputs_of(around.held_out)
    all_chains = max(chains, len(networks))
    more["draws"] = DRAWS if draws is None else draws
    choice = Choice(known, "")
    with suppress(_Checked):  # a rung of the ladder can be drawn: now for the run itself
        choice = around.choose(
            "auto" if temperature is None else temperature, _draw, len(networks) if ranks else all_chains, deadline
        )
    if ranks is not None and tried:  # each has tried them; where machines round otherwise, rank 0 has its way
        choice = replace(choice, temperature=ranks.gather(choice.temperature)[0])

    if (keep_every, warmup) != ("auto", "auto"):
        around.early = None  # a rung has others

    def steps(count: int, continued: bool) -> dict[str, Any]:
        lengths = around.lengths.settings(count, around.hmc, continued)
        if deadline is not None and (keep_every, warmup) == ("auto", "auto"):
            lengths |= around.shortened(choice, lengths, count, deadline)
        given = (("keep_every", keep_every), ("warmup", warmup))
        return {name: lengths[name] if value == "auto" else value for name, value in given}

    return around.posterior(choice, _draw, all_chains, more, steps)


def _draw(
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
    )  # fmt: skip
    if METHODS[method] is ISGD:
        given.setdefault("budget", None if warmup == "auto" else warmup)
    make_sampler = sampler_factory(
        method, schedule.num_data, temperature, schedule.batch_size, schedule.together_sets, given
    )
    leads = ranks is None or ranks.leads
    board = None if log is None or not leads else Log(log)  # before a folder is taken: TensorBoard may not be there
    note = None if board is None else board.step
    if _only_check.get():
        asked.check_store()
        check_warmup(next(schedule.runs(make_sampler))[1], plan)
        raise _Checked
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
        "engine": schedule.engine + "".join(o.compiled for o in outcomes) + schedule.engine_note,
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
