"""`sample`: a target and data in, posterior draws out."""

from __future__ import annotations

import math
import platform
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import torch

from isosgd.chain.alarms import warn_of
from isosgd.chain.backend import fastest_products
from isosgd.chain.batches import as_data
from isosgd.chain.chain import Chains, MakeSampler
from isosgd.chain.compiled import COMPILE_AFTER
from isosgd.chain.progress import Progress
from isosgd.chain.team import Start, Team, start_of
from isosgd.chain.warmup import MOST_STEPS, WarmupReport, warm_up
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.potential import Params, Target
from isosgd.predictive import Posterior
from isosgd.samplers import ISGD, METHODS, PRESETS, REGISTRY, Sampler

NOISE_EVERY = 8  # in sampling the noise is followed, not found: every so many steps are split in halves
OURS = {"batch_size", "warmup", "budget", "sets"}  # settings that `sample` gives
GUESSED_SPACING = 100  # for the progress bar, until the spacing is known


def sample(
    target: Target,
    data: Any,
    *,
    init: Start = None,
    method: str = "isgd",
    draws: int = 100,
    chains: int = 1,
    batch_size: int | None = None,
    keep_every: int | Literal["auto"] = "auto",
    warmup: int | Literal["auto"] = "auto",
    temperature: float = 1.0,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Any,
) -> Posterior:
    """Draw from a posterior with stochastic gradients. Nothing needs to be tuned.

    Args:
        target: what to sample.
        data: a tuple of tensors, one row an example (minibatches are drawn independently where they live); any
            iterable of batches such as a DataLoader; or `isosgd.DataSets`, several data sets at once.
        init: start values in natural parameters; where the target says by default. A function from the number of a
            chain to such values gives each chain a start of its own.
        method: a name of `isosgd.methods`: ``isgd``, ``sgld``, ``sghmc`` and so on.
        draws: draws to keep from each chain.
        chains: independent chains, of each data set. They run in one batched computation where the model allows it
            (``info["engine"]`` says so, or why not).
        batch_size: examples in a minibatch; half of the data, between 8 and 128, by default.
        keep_every: steps between draws; ``auto`` measures the autocorrelation of predictions in the warm-up.
        warmup: gradients to spend before the first draw; ``auto`` goes on until the chain has settled.
        temperature: T; the target is ``exp(-f / T)``, so that 1 is the posterior.
        seed: same seed and settings, same draws.
        device: where to sample; where the parameters are by default.
        progress: show a progress line on a terminal.
        options: settings of the method (for instance ``noise``, ``scheme``, ``structure``, ``bias``, ``lr``),
            ``preset`` for a row of the paper (``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also ``-slr``), and
            ``noise_every``.

    Returns:
        The draws, with how they came about in ``info``.

    Raises:
        DivergedError: when every chain met a loss or gradient that is not finite.

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
    started = time.monotonic()
    _check_settings(method, draws, chains, keep_every, warmup, temperature)
    if not isinstance(target, Target):
        raise TypeError(
            f"target of type {type(target).__name__}: pass an isosgd.Target; Target.from_module makes one from a model"
        )
    place = torch.device(device) if device is not None else None
    data = as_data(data, batch_size, place)
    given = dict(options)
    noise_every = given.pop("noise_every", NOISE_EVERY)
    if isinstance(noise_every, bool) or not isinstance(noise_every, int) or noise_every < 1:
        raise ValueError(f"noise_every = {noise_every!r} must be an integer of at least 1")
    team = Team(target, data, init, chains, batch_size, seed, place, _compile_after(given))
    if METHODS[method] is ISGD:
        given.setdefault("budget", None if warmup == "auto" else warmup)
    make_sampler = _sampler_factory(method, team.num_data, temperature, team.batch_size, team.together_sets, given)

    spacing = GUESSED_SPACING if keep_every == "auto" else keep_every
    expected_warmup = MOST_STEPS // 5 if warmup == "auto" else warmup
    bar = Progress(team.count * (expected_warmup + draws * spacing), progress)
    kept: dict[int, Params] = {}
    reports: list[WarmupReport] = []
    failures: dict[int, DivergedError] = {}
    gradients, engine = 0, team.engine
    for first, run in team.runs(make_sampler):
        run.say(bar.note)
        with fastest_products(run.alive.device):
            found, stored, lengths = _run(run, draws, keep_every, warmup, noise_every, bar, first, team.count)
        for k in range(run.count):
            mine = stored[: lengths.get(k, len(stored))]
            own = {name: torch.stack([draw[name][k] for draw in mine]) for name in mine[0]} if mine else {}
            if k in run.failures:
                failures[first + k] = run.failures[k]
                failures[first + k].draws = own
            else:
                kept[first + k] = own
                reports.append(found[k])
        gradients += run.gradients * run.count
        engine += run.compiled
    bar.close()
    if not kept:
        raise next(iter(failures.values()))
    for index, failure in failures.items():
        warnings.warn(f"chain {index} was dropped: {failure}", SamplingWarning, stacklevel=2)
    info = {
        "method": method,
        "options": {name: _plain(value) for name, value in options.items()},
        "temperature": temperature,
        "num_data": team.num_data,
        "batch_size": team.batch_size if team.tensors is not None else None,
        "draws": draws,
        "chains": len(kept),
        "chain_indices": list(kept),
        "sets": team.sets,
        "engine": engine,
        "keep_every": [report.keep_every or spacing for report in reports],
        "seed": seed,
        "warmup": [report.as_dict() for report in reports],
        "rates": [{group.name: group.rate for group in report.groups} for report in reports],
        "dropped": {index: str(failure) for index, failure in failures.items()},
        "gradients": gradients,
        "seconds": time.monotonic() - started,
        "target": target.describe(),
        "versions": _versions(),
    }
    ordered = list(target.initial(start_of(init, 0)))
    return Posterior(target, {name: torch.stack([k[name] for k in kept.values()]) for name in ordered}, info)


def _run(
    run: Chains,
    draws: int,
    keep_every: int | Literal["auto"],
    warmup: int | Literal["auto"],
    noise_every: int,
    bar: Progress,
    first: int,
    total: int,
) -> tuple[list[WarmupReport], list[Params], dict[int, int]]:
    """Warm up chains and draw from them.

    Returns:
        The report of each chain; the draws ``[chains, *shape]``, one after the other; and how many of them are good for
        the chains that were given up before the end (see ``run.failures``).
    """
    label = f"chain {first + 1}/{total} " if run.many is None and total > 1 else ""
    stored: list[Params] = []
    lengths: dict[int, int] = {}
    reports: list[WarmupReport] = []
    try:
        reports = _find_rates(run, warmup, bar, keep_every == "auto")
        gap = reports[0].keep_every or (GUESSED_SPACING if keep_every == "auto" else keep_every)
        bar.total = total * (reports[0].steps + draws * gap)
        done, late = 0, []
        for number in range(draws):
            left = gap
            while left:
                run.step(split=run.sampler.estimator.centred and done % noise_every == 0)
                done += 1
                left -= run.sampler.sampling
                bar.advance(label + "sampling", run.count)
            if number >= draws // 2:
                late.append(run.loss)
            stored.append({name: value.cpu() for name, value in run.natural().items()})
            for k in run.failures:  # draws of a chain end where it was given up
                lengths.setdefault(k, number)
        warn_of(run, reports, late, first)
    except DivergedError:
        pass  # every chain has
    return reports, stored, lengths


def _compile_after(options: dict[str, Any]) -> int | None:
    chosen = options.pop("compile", "auto")
    if chosen not in ("auto", True, False):
        raise ValueError(f"compile = {chosen!r} is unknown; choose 'auto', True or False")
    return COMPILE_AFTER if chosen == "auto" else (0 if chosen else None)


def _find_rates(run: Chains, warmup: int | str, bar: Progress, measure_spacing: bool) -> list[WarmupReport]:
    if warmup == 0:
        if any(group["rate"] is None for group in run.sampler.param_groups):
            raise ValueError("warmup = 0 leaves no rate: give lr (or lam) to the method, or let warmup be 'auto'")
        if measure_spacing:
            raise ValueError("keep_every='auto' is measured in the warm-up: give a number, or let warmup be 'auto'")
        return [WarmupReport(True, "", 0, 0, None) for _ in range(run.count)]
    return warm_up(run, None if warmup == "auto" else int(warmup), bar, measure_spacing)


def _sampler_factory(
    method: str, num_data: int, temperature: float, batch_size: int, sets: int, options: dict[str, Any]
) -> MakeSampler:
    kind = METHODS[method]
    preset = options.pop("preset", None)
    if preset is not None:
        if method != "isgd" or preset not in PRESETS:
            raise ValueError(f"preset = {preset!r} is not one of the I-SGD rows {sorted(PRESETS)}")
        options = {**PRESETS[preset], **options}
    known = REGISTRY[method].settings
    unknown = sorted(set(options) - set(known))
    if unknown:
        names = [name for name in known if name not in OURS]
        raise TypeError(f"method {method!r} has no option {unknown[0]!r}; it takes {', '.join(names)}")
    ours = {"batch_size": batch_size, "structure": "auto", "sets": sets}
    options = {**{name: value for name, value in ours.items() if name in known}, **REGISTRY[method].options, **options}

    def make(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> Sampler:
        return kind(groups, num_data=num_data, temperature=temperature, generator=generator, chains=chains, **options)

    return make


def _check_settings(method: str, draws: int, chains: int, keep_every: Any, warmup: Any, temperature: float) -> None:
    if method not in METHODS:
        raise ValueError(f"method = {method!r} is unknown; choose one of {sorted(METHODS)}")
    for name, value, least in (
        ("draws", draws, 1),
        ("chains", chains, 1),
        ("keep_every", keep_every, 1),
        ("warmup", warmup, 0),
    ):
        if value == "auto" and name in ("keep_every", "warmup"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            auto = " or 'auto'" if name in ("keep_every", "warmup") else ""
            raise ValueError(f"{name} = {value!r} must be an integer of at least {least}{auto}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature = {temperature} must be positive and finite; 1 is the Bayesian posterior")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _versions() -> dict[str, str]:
    try:
        ours = version("isosgd")
    except PackageNotFoundError:
        ours = "not installed (run from its sources)"
    return {"isosgd": ours, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
