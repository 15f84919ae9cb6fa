"""`sample`: a target and data in, posterior draws out."""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import torch

from isosgd.chain.batches import Batches, as_tensors, batch_length, make_batches
from isosgd.chain.chain import Chain, MakeSampler
from isosgd.chain.progress import Progress
from isosgd.chain.warmup import MOST_STEPS, WarmupReport, warm_up
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.potential import Params, Target
from isosgd.predictive import Posterior
from isosgd.samplers import ISGD, METHODS, PRESETS, Sampler

NOISE_EVERY = 8  # in sampling the noise is followed, not found: every so many steps are split in halves
GUESSED_SPACING = 100  # for the progress bar, until the spacing is known
CLIPPED_ALARM = 0.05
LOADER_ALARM = 0.02
RISE_ALARM = 5.0  # standard deviations of a minibatch's loss


def sample(
    target: Target,
    data: Any,
    *,
    init: Mapping[str, Any] | None = None,
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
        data: a tuple of tensors, one row an example (minibatches are drawn independently where they live), or any
            iterable of batches such as a DataLoader.
        init: start values in natural parameters; where the target says by default.
        method: ``isgd``, ``sgld``, ``sghmc`` or ``vsgd``.
        draws: draws to keep from each chain.
        chains: independent chains.
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
    tensors = as_tensors(data)
    data = tensors if tensors is not None else data
    num_data = target.resolve_num_data(data)
    noise_every = options.pop("noise_every", NOISE_EVERY)
    if isinstance(noise_every, bool) or not isinstance(noise_every, int) or noise_every < 1:
        raise ValueError(f"noise_every = {noise_every!r} must be an integer of at least 1")
    batches = make_batches(data, batch_size, 0, place)
    given = dict(options)
    if METHODS[method] is ISGD:
        given.setdefault("budget", None if warmup == "auto" else warmup)
    make_sampler = _sampler_factory(method, num_data, temperature, _check_batch(batches, num_data), given)

    spacing = GUESSED_SPACING if keep_every == "auto" else keep_every
    expected_warmup = MOST_STEPS // 5 if warmup == "auto" else warmup
    bar = Progress(chains * (expected_warmup + draws * spacing), progress)
    kept: list[Params] = []
    reports: list[WarmupReport] = []
    failures: dict[int, DivergedError] = {}
    gradients = 0
    for index in range(chains):
        chain_seed, batch_seed = (int(s) for s in np.random.SeedSequence((seed, index)).generate_state(2, np.uint32))
        batches = make_batches(data, batch_size, batch_seed, place)
        chain = Chain(target, target.initial(init, device=place), batches, num_data, make_sampler, chain_seed)
        label = f"chain {index + 1}/{chains} " if chains > 1 else ""
        stored: list[Params] = []
        try:
            report = _find_rates(chain, warmup, bar, keep_every == "auto")
            gap = report.keep_every or spacing
            bar.total = chains * (report.steps + draws * gap)
            done, late = 0, []
            for number in range(draws):
                for _ in range(gap):
                    chain.step(split=chain.sampler.estimator.centred and done % noise_every == 0)
                    done += 1
                    bar.advance(label + "sampling")
                if number >= draws // 2:
                    late.append(chain.loss)
                stored.append({name: value.cpu() for name, value in chain.natural().items()})
            kept.append({name: torch.stack([draw[name] for draw in stored]) for name in stored[0]})
            reports.append(report)
            _warn_of(chain, report, index)
            _warn_of_rise(report, late, index)
        except DivergedError as error:
            error.draws = {name: torch.stack([draw[name] for draw in stored]) for name in stored[0]} if stored else {}
            failures[index] = error
        gradients += chain.gradients
    bar.close()
    if not kept:
        raise next(iter(failures.values()))
    for index, failure in failures.items():
        warnings.warn(f"chain {index} was dropped: {failure}", SamplingWarning, stacklevel=2)
    info = {
        "method": method,
        "options": {name: _plain(value) for name, value in options.items()},
        "temperature": temperature,
        "num_data": num_data,
        "batch_size": getattr(batches, "batch_size", None),
        "draws": draws,
        "chains": len(kept),
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
    ordered = list(target.initial(init))
    return Posterior(target, {name: torch.stack([k[name] for k in kept]) for name in ordered}, info)


def _find_rates(chain: Chain, warmup: int | str, bar: Progress, measure_spacing: bool) -> WarmupReport:
    if warmup == 0:
        if any(group["rate"] is None for group in chain.sampler.param_groups):
            raise ValueError("warmup = 0 leaves no rate: give lr (or lam) to the method, or let warmup be 'auto'")
        if measure_spacing:
            raise ValueError("keep_every='auto' is measured in the warm-up: give a number, or let warmup be 'auto'")
        return WarmupReport(True, "", 0, 0, None)
    return warm_up(chain, None if warmup == "auto" else int(warmup), bar, measure_spacing)


def _sampler_factory(
    method: str, num_data: int, temperature: float, batch_size: int, options: dict[str, Any]
) -> MakeSampler:
    kind = METHODS[method]
    preset = options.pop("preset", None)
    if preset is not None:
        if method != "isgd" or preset not in PRESETS:
            raise ValueError(f"preset = {preset!r} is not one of the I-SGD rows {sorted(PRESETS)}")
        options = {**PRESETS[preset], **options}
    if kind is ISGD:
        options.setdefault("batch_size", batch_size)
        options.setdefault("structure", "auto")

    def make(groups: list[dict[str, Any]], generator: torch.Generator) -> Sampler:
        try:
            return kind(groups, num_data=num_data, temperature=temperature, generator=generator, **options)
        except TypeError as error:
            raise TypeError(f"method {method!r} does not take these options: {error}") from error

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


def _check_batch(batches: Batches, num_data: int) -> int:
    n = getattr(batches, "batch_size", None)
    if n is None:
        n = batch_length(batches.next())
    if n < 2:
        raise ValueError(
            f"batches of {n} example: noise is measured between the halves of a batch, give it at least 2 (batch_size=)"
        )
    if n > num_data:
        raise ValueError(
            f"num_data = {num_data} is smaller than a batch of {n} examples: it is the number of examples "
            "in the whole data set"
        )
    return int(n)


def _warn_of(chain: Chain, report: WarmupReport, index: int) -> None:
    """Say what may be wrong with a chain that ran to its end."""
    where = f"chain {index}: "
    if not report.settled:
        warnings.warn(f"{where}the warm-up did not settle; {report.reason}.", SamplingWarning, stacklevel=3)
    for group in chain.sampler.param_groups:
        clipped = getattr(chain.sampler, "clipped_share", lambda _: 0.0)(group)
        if clipped > CLIPPED_ALARM:
            warnings.warn(
                f"{where}{100 * clipped:.0f}% of the gradient noise of group {group['name']!r} exceeds "
                "lambda where the chain now "
                "is, so that the draws are too widely spread. Use scheme='windowed', a longer warmup= or "
                "a lower temperature.",
                SamplingWarning,
                stacklevel=3,
            )
    limit = 2.0 * chain.sampler.bias
    corrected = isinstance(chain.sampler, ISGD) or getattr(chain.sampler, "corrected", False)
    for found in report.groups if chain.sampler.targets == Sampler.targets else []:
        heat = 0.0 if corrected else found.noise_share
        excess = found.predicted_bias + heat
        if excess > 2.0 * limit or found.predicted_bias > limit:
            warnings.warn(
                f"{where}posterior variances of group {found.name!r} come out too large by about "
                f"{100 * excess:.0f}%: its rate of "
                f"{found.rate:.3g} is too high for its curvature or its gradient noise. Lower it, or let "
                "the warm-up set it.",
                SamplingWarning,
                stacklevel=3,
            )
    share = max((g.noise_share for g in report.groups), default=0.0)
    if not chain.batches.independent and share > LOADER_ALARM:
        warnings.warn(
            f"{where}the batches are not drawn independently (a shuffled loader goes through the data "
            "without replacement), so "
            f"their noise cancels over an epoch. It is {100 * share:.0f}% of the composite noise: "
            "posterior variances may come out "
            "too small by up to that. Pass the tensors themselves, or a DataLoader with "
            "RandomSampler(replacement=True).",
            SamplingWarning,
            stacklevel=3,
        )


def _warn_of_rise(report: WarmupReport, late: list[float], index: int) -> None:
    """Say that a chain has left the place where its rates were found."""
    if report.loss is None:
        return
    before, spread = report.loss
    now = float(np.mean(late))
    if now > before + RISE_ALARM * max(spread, 1e-3 * abs(before)):
        warnings.warn(
            f"chain {index}: the mean loss rose from {before:.4g} in the warm-up to {now:.4g} in the second half "
            "of the draws: the rates were found elsewhere, and the draws are not to be trusted. A longer warmup= or a "
            "smaller bias= would help.",
            SamplingWarning,
            stacklevel=3,
        )


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _versions() -> dict[str, str]:
    try:
        ours = version("isosgd")
    except PackageNotFoundError:
        ours = "not installed (run from its sources)"
    return {"isosgd": ours, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
