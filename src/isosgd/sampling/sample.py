"""`sample` draws from the posterior of a target given data; `resume` continues a stored run.

Without trained networks, `sample` is one call of `isosgd.sampling.run.draw_at`. Around trained networks it is several
(`isosgd.sampling.trained.TrainedRun`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from isosgd.data.sources import Transform, as_tensors
from isosgd.engine.ranks import TIMEOUT, Parallel, Ranks, shared
from isosgd.engine.schedule import Start
from isosgd.errors import warn_caller
from isosgd.posterior import Posterior
from isosgd.sampling.parallel import check_call
from isosgd.sampling.request import described
from isosgd.sampling.run import checking, draw_at
from isosgd.sampling.settings import check_device, check_seconds, check_settings, takes_numpy_numbers
from isosgd.sampling.starts import as_starts, own_network, set_aside
from isosgd.sampling.stored import load, settings_of
from isosgd.sampling.trained import DRAWS, TrainedRun
from isosgd.sampling.weights import Weights, as_drawn, examples_identity, weighted
from isosgd.store import Manifest, StoredState
from isosgd.target import Target


def check_sample(target: Target, data: Any, **settings: Any) -> None:
    """Raise the errors that `sample` would raise before its first step, without sampling."""
    with checking():
        sample(target, data, **settings)


@takes_numpy_numbers
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
        data: a tuple or list of tensors, numpy arrays, or pandas or polars frames, one row per example (floating-point
            arrays are cast to the parameters' dtype, and minibatches are drawn independently); a dict of those, for a
            model that takes inputs by name; an iterable of batches, such as a DataLoader; or `isosgd.DataSets`.
        init: start values of parameters, and of buffers if there are any, such as the ``state_dict`` of a trained
            network; by default those of the target. A function from the chain's index to such values gives each chain
            its own start.
        starts: trained networks or their ``state_dict``s. Chains start at them in turn, without an initial
            optimisation; there are at least as many chains as networks. The run takes about ten epochs of gradients
            (24 with cycles), unless ``warmup``, ``draws`` or ``keep_every`` is given.
        method: a name of `isosgd.methods`, ``isgd`` by default. ``hmc`` takes all data for every gradient and accepts
            or rejects its trajectories (see `isosgd.samplers.hmc`), so it has no discretisation bias. It pays up to
            some thousand examples, and is the default around ``starts`` of a regression of at most 5,000 rows if
            ``batch_size`` is not given. ``csghmc`` leaves the network in cycles of momentum descent and draws at their
            ends. It is the default around ``starts`` of classifiers with at least 5,000 weights, or with BatchNorm in
            training mode, if ``held_out`` examples choose the temperature; there it has ``lr="heated"``, which raises
            the rate until the loss of the network rises.
        draws: draws to keep from each chain; 100 by default, 30 with ``starts``. ``auto`` stops when predictions have
            converged (R-hat at most 1.01 and 400 effective draws, over all chains) or at the ``budget``;
            ``info["stopped"]`` says which.
        chains: independent chains of each data set. They run in one batched computation if the model allows it;
            ``info["engine"]`` says so, or why not.
        batch_size: examples in a minibatch; by default half of the data, between 8 and 128. ``all`` means
            ``method="hmc"``.
        keep_every: steps between draws; ``auto`` measures the autocorrelation of predictions in the warm-up.
        warmup: gradients before the first draw; ``auto`` continues until the chain has settled.
        temperature: T; 1, the posterior, by default. ``auto``, the default with ``starts``, tries temperatures on
            ``held_out`` examples (see ``ladder``) and keeps the draws of each chain up to where they predict best. If
            they are not better than the starts by a standard error, the starts are returned. Without held-out examples
            T is 1e-3, or 1 for a regression. ``info["temperature_choice"]`` says how T was chosen. If the scales of
            the prior are fixed, the density is ``(likelihood * prior)^(1/T)``. If they are sampled
            (`HierarchicalNormal`, `Relevance`), or with ``tempered="likelihood"``, only the likelihood is tempered,
            ``likelihood^(1/T) * prior``, as if there were N/T examples. ``info["density"]`` says which.
        seed: same seed and settings, same draws.
        device: where to sample; by default where the parameters are. Data are moved there.
        progress: show a progress line on a terminal; elsewhere log each stage, and a line every 30 seconds with the
            time left (logger ``isosgd``, to standard error unless `logging` is configured).
        store: a folder to write draws to while sampling, so that they take no memory and survive a crash; read it with
            `isosgd.load`.
        resume: continue the run in ``store``, or begin it if there is none. On a CPU the draws are bit for bit those
            of a run that was never stopped. More ``draws`` or a larger ``budget`` than before extend the run (see
            `isosgd.resume`); other changes of model, data or settings are an error.
        store_dtype: dtype in which draws are written; their own by default.
        log: a folder for TensorBoard, which shows loss and rates at every draw (needs the extra ``tensorboard``).
        budget: with ``draws="auto"``, the most draws of each chain; 2,000 by default.
        held_out: with ``temperature="auto"``, examples that the starts were not trained on: ``(x, y)``, a loader, or a
            fraction of the data to set aside, such as 0.1. They also calibrate predictions
            (`Posterior.softmax_temperature`, `Posterior.noise_factor`). With ``draws="auto"``, inputs at which the
            convergence of predictions is judged; some of the training data by default.
        ladder: temperatures to try with ``temperature="auto"``, by I-SGD. By default 0.3 (0.03 with cycles), and lower
            ones if that does harm; only 1 if the likelihood samples the scale of its noise, which a lower temperature
            would make too small.
        max_seconds: limit on the time of the whole call: initial optimisation, warm-up and sampling end early, with at
            least one draw of each chain. A chain that cannot draw two seconds after the limit is dropped; in a store it
            can go on. HMC always comes to a draw.
        transform: a function ``(batch, generator) -> batch`` that is applied to every minibatch on its device, such as
            augmentation or a change of dtype. It must keep the number of examples and take its random numbers from the
            generator. It is not applied in predictions.
        parallel: how the processes of `torch.distributed`, which must all make this call, share the run: ``chains``
            distributes the chains; ``data`` distributes every minibatch of a chain, by parts of the tensors or a
            DistributedSampler. Every rank returns all draws. See the page "Beyond one machine".
        rank_timeout: seconds without a heartbeat after which the other ranks raise an error that names the rank.
        options: settings of the method (for instance ``noise``, ``scheme``, ``structure``, ``bias``, ``lr``);
            ``preset``, a row of the paper (``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also ``-slr``) or
            ``windowed`` (from a trained start, lambda is four times the noise of each layer); ``noise_every``; and
            ``tempered``, what the temperature acts on, ``both`` likelihood and prior or the ``likelihood``.

    Returns:
        The draws; ``info`` says how they were made.

    Raises:
        DivergedError: when the loss or gradient of every chain became non-finite.
        OutOfTimeError: when ``max_seconds`` was over before a draw was possible.
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
    check_device(device)
    ranks = cast(Ranks | None, parallel)  # `shared` has replaced the name
    deadline = None if max_seconds is None else time.monotonic() + check_seconds(max_seconds)
    networks = as_starts(starts, target, init)
    if temperature == "auto" and networks is None:
        networks = as_starts(own_network(target, init), target, None)
    if ladder is not None and temperature not in (None, "auto"):
        raise ValueError(f"ladder= goes with temperature='auto', not with temperature = {temperature!r}")
    common: dict[str, Any] = {  # of trials at several temperatures and of the run itself
        "method": method, "batch_size": batch_size, "seed": seed, "device": device, "transform": transform,
    }  # fmt: skip
    of_run: dict[str, Any] = {
        "draws": draws, "store": store, "resume": resume, "store_dtype": store_dtype, "log": log, "budget": budget,
        "progress": progress, "deadline": deadline, "ranks": ranks,
    }  # fmt: skip
    tried = networks is not None and temperature in (None, "auto") and held_out is not None
    if ranks is not None:
        check_call(ranks, data, max_seconds, tried)
    if ladder is not None and (networks is None or held_out is None):
        lacks = (
            "starts=, trained networks to try them around" if networks is None else "held_out=, examples to score by"
        )
        raise ValueError(f"ladder = {ladder!r}: temperatures are tried where there is {lacks}")
    if networks is None:
        assert temperature != "auto"
        return draw_at(
            target, data, init=init, chains=chains, temperature=1.0 if temperature is None else temperature,
            keep_every=keep_every, warmup=warmup, held_out=held_out,
            **{**common, "method": method or "isgd"}, **{**of_run, "draws": 100 if draws is None else draws}, **options,
        )  # fmt: skip
    of_run["draws"] = DRAWS if draws is None else draws
    number = max(chains, len(networks))
    if 1 < chains < number:
        warn_caller(f"chains = {chains} are fewer than the {number} starts: there are {number} chains, one around each")
    known = 1.0 if temperature is None or temperature == "auto" else temperature
    check_settings(method or "isgd", of_run["draws"], chains, keep_every, warmup, known)
    if temperature not in (None, "auto") and held_out is not None and draws != "auto":
        raise ValueError(
            f"held_out= goes with temperature='auto' or draws='auto', not with temperature = {temperature!r}"
        )
    drawn: Posterior | None = None
    if resume and store is not None and temperature in (None, "auto") and Manifest.begun(Path(store)):
        # The temperature is known: the run goes on as it was begun.
        if ranks is not None or draws == "auto":
            what = "parallel=" if ranks is not None else "draws='auto'"
            raise ValueError(
                f"{store} holds a run, and its temperature was chosen by held-out examples: with {what} go on with "
                f"temperature={settings_of(store)[0].get('temperature')}, and without held_out="
            )
        given = {**common, "keep_every": keep_every, "warmup": warmup, "store_dtype": store_dtype, **options}
        _check_as_begun(store, given | {"chains": number})
        every = {"transform": transform, "max_seconds": max_seconds, "log": log}
        more: dict[str, Any] = {name: value for name, value in every.items() if value is not None}
        rest, examples = set_aside(held_out, data, target, seed)
        with as_drawn():
            found = _continued(
                store, target, rest, starts=starts, device=device, progress=progress, draws=draws, **more
            )
        weights = Weights.read(Manifest.read(Path(store)))
        if examples is None or not len(found):
            return weighted(found, weights)
        if weights is not None and (weights.of, weights.examples) == (found.num_draws, examples_identity(examples)):
            return weighted(found, weights)
        drawn = found
    run = TrainedRun(
        target, data, networks, temperature, number, held_out, ladder, keep_every, warmup, common, of_run, options
    )
    return run.posterior() if drawn is None else run.weighted(drawn, settings_of(cast(str, store))[0]["temperature"])


def _check_as_begun(store: str | Path, given: dict[str, Any]) -> None:
    """Raise if a stored run was begun with other settings than those given; ``None`` and "auto" stand for any."""
    settings = settings_of(store)[0]
    stored = {**settings.pop("options"), **settings}
    for name in sorted(given.keys() - {"device", "transform"}):
        value = given[name]
        if value not in (None, "auto") and described(value) != stored.get(name):
            raise ValueError(
                f"{name} = {value!r}, but the run in {store} was begun with {stored.get(name)!r}: leave {name}= as it "
                "was, or give another store="
            )


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
    """Continue a stopped run, or extend a finished one, with the settings in its manifest.

    Args:
        path: folder of the run, the ``store`` of `sample`; or of merged runs, each of which is continued.
        target: as in the first call.
        data: as in the first call.
        init: as in the first call.
        starts: as in the first call; those of the store by default.
        device: where to sample; of the same kind as before.
        progress: show a progress line on a terminal.
        draws: the new number of draws of each chain, to extend the run. On a CPU the draws are bit for bit those of a
            single run of this length, unless that would compile several steps in a call, or chains in turn share a
            loader.
        budget: the new limit of a run with ``draws="auto"``.
        options: settings of the method that are objects rather than numbers or text; a manifest cannot hold those.

    Returns:
        The draws, as from `sample`; at once if they are all there.

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
    with as_drawn():
        drawn = _continued(
            path, target, data, init=init, starts=starts, device=device, progress=progress, draws=draws, budget=budget,
            **options,
        )  # fmt: skip
    return weighted(drawn, Weights.read(Manifest.read(Path(path))))


def _continued(
    path: str | Path, target: Target, data: Any, *, init: Start = None, starts: Any = None,
    device: torch.device | str | None = None, progress: bool = True, draws: int | None = None,
    budget: int | None = None, **options: Any,
) -> Posterior:  # fmt: skip
    """The draws of a stored run that goes on, as drawn."""
    if parts := Manifest.read(Path(path)).parts:
        if options.get("parallel") is not None:
            raise ValueError(
                f"{path} holds {len(parts)} parts, and parallel = {options['parallel']!r}: isosgd.resume goes on with "
                "them in one process; leave parallel out. A run that ranks have begun, not a merged one, goes on over "
                "ranks by sample(..., parallel=..., store=..., resume=True)"
            )
        for part in parts:
            _continued(
                Path(path) / part, target, data, init=init, starts=starts, device=device, progress=progress,
                draws=draws, budget=budget, **options,
            )  # fmt: skip
        return load(path, target, data=as_tensors(data, target.dtype), as_drawn=True)
    if starts is None and init is None and (kept := Manifest.read(Path(path)).starts):
        starts = [dict(StoredState(Path(path), about)) for about in kept]
    settings, opaque = settings_of(path)
    given = settings.pop("options")
    if fixed := sorted(settings.keys() & options.keys()):
        raise ValueError(
            f"{fixed[0]} = {options[fixed[0]]!r}: a run goes on with the settings it was begun with, here "
            f"{settings[fixed[0]]!r}; leave it out, or begin another run"
        )
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
