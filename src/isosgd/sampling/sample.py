"""`sample`: a target and data in, posterior draws out; and `resume`, which calls it as it was called before.

Without trained networks it is one call of `isosgd.sampling.run.draw_at`; around them, several
(`isosgd.sampling.trained.TrainedRun`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch

from isosgd.data.sources import Transform, as_tensors
from isosgd.engine.ranks import TIMEOUT, Parallel, Ranks, shared
from isosgd.engine.schedule import Start
from isosgd.posterior import Posterior
from isosgd.sampling.parallel import check_call
from isosgd.sampling.run import Checked, draw_at, only_check
from isosgd.sampling.settings import check_seconds, check_settings
from isosgd.sampling.stored import load, settings_of
from isosgd.sampling.trained import DRAWS, TrainedRun, as_starts, own_network
from isosgd.store import Manifest
from isosgd.target import Target


def check_sample(target: Target, data: Any, **settings: Any) -> None:
    """Raise what `sample` would raise before its first step: of settings, options, data and store."""
    token = only_check.set(True)
    try:
        with suppress(Checked):
            sample(target, data, **settings)
    finally:
        only_check.reset(token)


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
        max_seconds: bound on the time of the whole call: the initial optimisation, the warm-up and the draws end early.
            The first measurement of the noise, some hundred gradients, and at least one draw of each chain are taken.
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
        return draw_at(
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
    more["draws"] = DRAWS if draws is None else draws
    return TrainedRun(
        target, data, networks, temperature, max(chains, len(networks)), held_out, ladder, keep_every, warmup,
        given, more, options,
    ).posterior()  # fmt: skip


def resume(
    path: str | Path,
    target: Target,
    data: Any,
    *,
    init: Start = None,
    starts: Any = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    draws: int | None = None,
    budget: int | None = None,
    **options: Any,
) -> Posterior:
    """Go on with a run where it was stopped, or extend it. The settings are those of its manifest.

    Args:
        path: folder of the run, the ``store`` of `sample`; or of merged runs, each of which then goes on.
        target: what is sampled, made as it was then.
        data: as they were then.
        init: as it was then, if it was given.
        starts: as they were then, if they were given.
        device: where to sample; the kind must be the same.
        progress: show a progress line on a terminal.
        draws: of each chain, where more are wanted than the run was begun with. On a CPU they are bit for bit those of
            a run that was asked for so many at once, unless so many make it pay to compile several steps in a call,
            or chains in turn share a loader.
        budget: of a run with ``draws="auto"``, where more draws are wanted at most.
        options: settings of the method that were objects, not numbers or text; a manifest does not hold those.

    Returns:
        The draws, as `sample` gives them; at once when all that are asked for are there.

    Example:
        >>> import tempfile
        >>> from isosgd import Target, priors, resume, sample
        >>> y = torch.randn(200, generator=torch.Generator().manual_seed(0))
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = sample(target, (y,), draws=20, keep_every=5, warmup=400, progress=False, store=folder.name)
        >>> len(resume(folder.name, target, (y,)))
        20
        >>> len(resume(folder.name, target, (y,), draws=30, progress=False))
        30
        >>> folder.cleanup()
    """
    if parts := Manifest.read(Path(path)).parts:
        if options.get("parallel") is not None:
            raise ValueError(
                f"{path} holds {len(parts)} parts, and parallel = {options['parallel']!r}: isosgd.resume goes on with "
                "them in one process; leave parallel out. A run that ranks have begun, not a merged one, goes on over "
                "ranks by sample(..., parallel=..., store=..., resume=True)"
            )
        for part in parts:
            resume(
                Path(path) / part, target, data, init=init, starts=starts, device=device, progress=progress,
                draws=draws, budget=budget, **options,
            )  # fmt: skip
        return load(path, target, data=as_tensors(data, target.dtype))
    settings, opaque = settings_of(path)
    given = settings.pop("options")
    if draws is not None:
        settings = {name: value for name, value in settings.items() if name != "budget"} | {"draws": draws}
    if budget is not None:
        settings |= {"budget": budget}
    missing = [name for name in opaque if name not in options]
    if missing:
        raise ValueError(
            f"the run was begun with {missing[0]}={given[missing[0]]}, an object that a manifest cannot hold: pass "
            f"{missing[0]}= as it was"
        )
    return sample(
        target, data, init=init, starts=starts, device=device, progress=progress, store=path, resume=True,
        **settings, **{**given, **options},
    )  # fmt: skip
