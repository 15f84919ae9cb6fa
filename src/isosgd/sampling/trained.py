"""Sampling around trained networks, at a temperature that held-out examples choose.

Training ends at one point, and the posterior at T = 1 has most of its mass far from it: draws of a short run at T = 1
are worse than the network. Colder densities concentrate around it. Short runs at several temperatures
(`isosgd.sampling.ladder`) show which one predicts best; the run continues from there. The networks stay among the draws
with a weight that held-out examples choose. If draws do not help, the networks alone are returned.

A regression also samples the scale of its noise. A colder density favours the scale that fits the training data best
and is overconfident, so there T is 1, and held-out examples only decide whether the draws are better than the networks.
With few rows the method is HMC, which reaches T = 1 in some thousand gradients.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from isosgd.baselines import BASELINES
from isosgd.data.sources import DataSets, Tensors, as_tensors, joined, size_of
from isosgd.engine.state import AS_IS
from isosgd.errors import DivergedError, warn_caller
from isosgd.posterior import Posterior
from isosgd.posterior.calibration import FEW, warn_of_end
from isosgd.posterior.comparison import as_states
from isosgd.progress import LOGGER
from isosgd.samplers.schedules import STAGE_DRAWS
from isosgd.sampling.ladder import (
    COLDER,
    COOLER,
    SCORED,
    Choice,
    Ladder,
    Place,
    Rung,
    State,
    check_ladder,
    densities,
    has_classes,
    last_draws,
    start_posterior,
    with_noise_scales,
)
from isosgd.sampling.run import Checked, draw_at
from isosgd.sampling.settings import HEATED, check_heating
from isosgd.target import Target
from isosgd.target.batches import batch_length, tensors_of, tree_map, with_tensors
from isosgd.target.likelihoods import Bernoulli, Categorical, Heteroscedastic
from isosgd.target.space import refuse_sharded

HOT = 0.3  # tried first; with cycles CYCLE_TEMPERATURE
COLD = 1e-3  # with no held-out examples; docs/trained-evidence.md has results at this temperature
# Standard errors by which draws must predict held-out examples better than the starts: if these examples chose the
# temperature; and if T is that of the posterior. In the second case the average is better more often than some dozens
# of rows can show, so only draws that are clearly worse are rejected. In the first case the gain must also exceed a
# share of the calibrated start's NLL: a smaller gain may be luck, and is not worth predictions by all draws.
SURE_CHOSEN, SURE, LEAST_GAIN = 1.0, -1.0, 0.005
EPOCHS, LEAST = 10, 2_000  # of gradients in all, and gradients at least
LADDER_SHARE, RUNGS, TRIAL_SHARE = 1 / 3, 5, 0.1
# Runs at most. A second, colder run follows a first one that is not better, but only if lowering the NLL by this share
# of the calibrated start's would make it better (docs/trained-evidence.md has the figures).
RUNS, COLDER_GAIN = 2, 0.03
RUNG_DRAWS, RUNG_WARMUP = 8, 200  # draws of a rung, and gradients to measure its noise by
WARMUP_SHARE, DRAWS = 0.3, 30  # of the run itself
# Gradients of the warm-up of a rung that continues another one; rates at most double in it. The run itself has a full
# warm-up, in which rates can rise further. Cycles continue without a warm-up.
CONTINUED = 60
LARGE = 1 << 20  # parameters from which Lambda is one number for each layer
# Cycles of classifiers: the first temperature, epochs of a cycle, its least number of steps, and the share of steps
# without noise. A trial is the first cycle.
CYCLE_TEMPERATURE, CYCLE_EPOCHS, CYCLE_STEPS, EXPLORATION = 0.03, 8, 400, 0.8
CYCLE_SIZE = 5_000  # parameters at least
HMC_ROWS, HMC_SIZE = 5_000, 50_000  # rows and parameters of a regression, at most, for HMC
HMC_LENGTHS, HMC_RUNG = {"warmup": 1_600, "keep_every": 100}, {"warmup": 700, "keep_every": 20}

# -- what was given ---------------------------------------------------------------------------------------------------


def as_starts(starts: Any, target: Target, init: Any) -> list[State] | None:
    """Parameters and buffers of trained networks, checked; None where no network was given."""
    if starts is None:
        return None
    if init is not None:
        raise ValueError("starts= and init= both say where chains begin: pass the trained networks as starts= alone")
    return [_checked(state, i, target) for i, state in enumerate(as_states(starts))]


def _checked(state: State, number: int, target: Target) -> dict[str, Any]:
    """A network's state where the target is, refused unless it is of the target's architecture."""
    for name, x in state.items():
        refuse_sharded(name, x)
    found = {name: torch.as_tensor(x).detach().to(target.device) for name, x in target.without_aliases(state).items()}
    free = target.initial()
    here = {name: tuple(x.shape) for name, x in target.constrain(free).items()}
    here |= {name: tuple(x.shape) for part in (target.buffers, target.frozen) for name, x in part.items()}
    transient = set() if target.module is None else target.module.transient
    missing = sorted(here.keys() - found.keys() - set(target.extras(free)) - transient)
    unknown = sorted(found.keys() - here.keys())
    other = next((name for name in here if name in found and tuple(found[name].shape) != here[name]), None)
    what = ""
    if missing:
        what = f"lacks {missing[0]!r}"
    elif unknown:
        what = f"has {unknown[0]!r}, which the target lacks"
    elif other is not None:
        what = f"has {other!r} of shape {list(found[other].shape)}, the target {list(here[other])}"
    if what:
        raise ValueError(f"starts[{number}] {what}: all starts must be of the architecture that the target was made of")
    return found


def learns_noise(target: Target) -> bool:
    """Whether the size of the noise is learned: sampled along, or an output of the network."""
    likelihood = None if target.module is None else target.module.likelihood
    return bool(target.noise_scales()) or isinstance(likelihood, Heteroscedastic)


def set_aside(held_out: Any, data: Any, target: Target, seed: int) -> tuple[Any, Tensors | None]:
    """Data to sample from, and held-out examples, checked; a share of the data is taken out of them."""
    tensors = as_tensors(data, target.dtype)
    if held_out is None:
        return data, None
    if isinstance(held_out, int | float) and not isinstance(held_out, bool):
        if not 0 < held_out < 1:
            raise ValueError(f"held_out = {held_out} must lie between 0 and 1: the share of the data that is set aside")
        if tensors is None:
            raise ValueError(f"held_out = {held_out} takes a part of tensors, but the data are batches: pass (x, y)")
        if target.num_data is not None:
            raise ValueError(
                f"held_out = {held_out} leaves fewer examples than num_data = {target.num_data}: pass held_out=(x, y)"
            )
        count, place = len(tensors_of(tensors)[0]), tensors_of(tensors)[0].device
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(place)
        part = max(1, round(held_out * count))
        aside, rest = order[:part], order[part:]
        return tree_map(lambda t: t[rest], tensors), tree_map(lambda t: t[aside], tensors)
    found = as_tensors(held_out, target.dtype)
    if found is None and isinstance(held_out, Iterable) and not isinstance(held_out, str):
        found = joined(held_out, target, "held_out")
    if found is None:
        raise TypeError(f"held_out of type {type(held_out).__name__}: pass (x, y), a loader, or a share such as 0.1")
    _check_held_out(found, tensors, target)
    return data, found


def _equal(a: Tensors, b: Tensors) -> bool:
    """Whether both hold the same examples in the same order."""
    pairs = list(zip(tensors_of(a), tensors_of(b), strict=False))
    return len(tensors_of(a)) == len(tensors_of(b)) and all(
        x.shape == y.shape and torch.equal(x.cpu(), y.cpu()) for x, y in pairs
    )


def _check_held_out(found: Tensors, tensors: Tensors | None, target: Target) -> None:
    lengths = [len(t) for t in tensors_of(found)]
    if tensors is not None and _equal(found, tensors):
        warn_caller(
            "held_out are the training data, which the networks have seen, so that they cannot tell which temperature "
            "helps: pass examples that were not trained on"
        )
    if not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(f"held_out has tensors of {lengths} examples: give as many of each, some at all")
    y = target.labels_of(found)
    if tensors is None:
        return
    if isinstance(found, dict) != isinstance(tensors, dict) or len(found) != len(tensors):
        raise ValueError(f"held_out has {len(found)} tensors, the data {len(tensors)}: pass them alike, such as (x, y)")
    known = target.labels_of(tensors)
    if y.shape[1:] != known.shape[1:]:
        raise ValueError(f"held_out: targets of shape {list(y.shape[1:])}, in the data {list(known.shape[1:])}")
    if has_classes(target) and y.ndim < 2:  # a text may well have tokens that no other has
        new = sorted(set(y.flatten().tolist()) - set(known.flatten().tolist()))
        if new:
            raise ValueError(f"held_out has label {new[0]}, which the data never have: the networks cannot know it")


# -- how long, and by what --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """How many gradients each chain takes: in a rung that continues another one, and in the run.

    In cycles a rung is one cycle of ``cycle`` steps, and the cycle sets the spacing of draws; otherwise it is 0.
    """

    rung: int
    run: int
    cycle: int = 0

    @classmethod
    def of(cls, num_data: int, batch_size: int, descends: bool = False) -> Lengths:
        """About `EPOCHS` epochs, a third of them on the ladder; one that ``descends`` mostly has a single trial."""
        total = max(LEAST, EPOCHS * -(-num_data // batch_size))
        each = CONTINUED + round(TRIAL_SHARE * total) if descends else round(LADDER_SHARE * total / RUNGS)
        rung = max(CONTINUED + 5 * RUNG_DRAWS, each)
        return cls(rung, round((1 - LADDER_SHARE) * total))

    @classmethod
    def in_cycles(cls, num_data: int, batch_size: int) -> Lengths:
        """The same for cycles."""
        return cls(0, 0, max(CYCLE_STEPS, CYCLE_EPOCHS * -(-num_data // batch_size)))

    def settings(self, draws: int, hmc: bool = False, continued: bool = False) -> dict[str, Any]:
        """Warm-up, draws and steps between them of the run."""
        if self.cycle:
            return {"warmup": "auto", "draws": draws, "keep_every": "auto"}
        if hmc:  # whose passes through the data are steps
            return {"draws": draws, **HMC_LENGTHS}
        warmup = max(CONTINUED if continued else 2 * RUNG_WARMUP, round(WARMUP_SHARE * self.run))
        return {"warmup": warmup, "draws": draws, "keep_every": max(1, (self.run - warmup) // draws)}

    def rung_settings(self, hmc: bool = False, continued: bool = False) -> dict[str, Any]:
        """The same of a rung."""
        if self.cycle:
            return self.settings(STAGE_DRAWS)
        if hmc:
            return {"draws": RUNG_DRAWS, **HMC_RUNG}
        warmup = CONTINUED if continued else max(RUNG_WARMUP, self.rung // 3)
        return {"warmup": warmup, "draws": RUNG_DRAWS, "keep_every": (self.rung - CONTINUED) // RUNG_DRAWS}


def default_method(
    target: Target, data: Any, transform: Any, batch_size: Any, options: Mapping[str, Any], chosen: bool
) -> str:
    """The default method around a trained network.

    HMC for a regression with few rows. Cycles for a classifier that is not small, if held-out examples choose the
    temperature (``chosen``): cycles leave the network, and only such examples show whether that helps. Otherwise I-SGD.
    """
    likelihood = None if target.module is None else target.module.likelihood
    if (
        chosen and batch_size != "all" and options.keys() <= {"compile", "tempered"}
        and isinstance(likelihood, Categorical | Bernoulli)
        and (target.ties_examples or _size(target) >= CYCLE_SIZE)
    ):  # fmt: skip
        return "csghmc"
    rows = as_tensors(data)
    fits = rows is not None and (batch_length(rows) or 0) <= HMC_ROWS and transform is None and not target.ties_examples
    free = batch_size is None and options.keys() <= {"compile", "tempered"}  # others are meant for I-SGD, or for both
    return "hmc" if free and fits and learns_noise(target) and _size(target) <= HMC_SIZE else "isgd"


def default_options(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """The default options of I-SGD around a trained network.

    BatchNorm makes the curvature along the scale of a layer's weights large and meaningless, and the curvature guard
    would stop the chain. There, and in networks of more than a million weights, the noise of each layer sets its rate
    (the preset ``windowed``). Otherwise Lambda is of low rank, and the curvature guards the rate.
    """
    if {"preset", "structure", "scheme", "lam", "noise"} & options.keys():
        return {}
    return {"preset": "windowed"} if target.ties_examples or _size(target) > LARGE else {"structure": "lowrank"}


def _size(target: Target) -> int:
    return sum(x.numel() for x in target.initial().values())


# -- sampling around networks -----------------------------------------------------------------------------------------


def own_network(target: Target, init: Any) -> State:
    """The module's own weights, or those given as ``init``, as a trained network."""
    if callable(init):
        raise ValueError("temperature='auto' with init= a function: pass the trained networks as starts=")
    if target.module is None:
        raise ValueError(
            "temperature='auto' is for trained networks: make the target by Target.from_module, or give a number; 1 is "
            "the posterior"
        )
    values = {name: x.detach() for name, x in target.constrain(target.initial(init)).items()}
    buffers = target.initial_buffers(init, target.initial(init))
    return {**values, **buffers}


class TrainedRun:
    """A run around trained networks: `posterior` has temperatures tried, runs at the best one, and judges its draws.

    Args:
        target: what is sampled.
        data: as given to `sample`.
        starts: the networks.
        temperature: as given to `sample`.
        chains: of the run.
        held_out: as given to `sample`.
        ladder: temperatures to try; some by default.
        keep_every: as given to `sample`.
        warmup: as given to `sample`.
        given: settings of `sample` that trials and runs have.
        more: settings of `sample` that trials do not have.
        options: of the method.
    """

    def __init__(
        self, target: Target, data: Any, starts: Sequence[State], temperature: Any, chains: int, held_out: Any,
        ladder: Any, keep_every: Any, warmup: Any, given: Mapping[str, Any], more: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        method: str | None = given["method"]
        if method in BASELINES:
            raise ValueError(f"starts= is for samplers; method = {method!r} trains networks of its own: pass init=")
        if isinstance(data, DataSets):
            raise ValueError(
                "starts= with isosgd.DataSets: networks are trained on one data set; sample each on its own"
            )
        if isinstance(held_out, float) and given["transform"] is not None:
            raise ValueError(
                f"held_out = {held_out} with a transform: predictions do not go through it, so pass held_out=(x, y) as "
                "the network takes them"
            )
        self.target, self.device, self.temperature, self.chains = target, given["device"], temperature, chains
        self.store, self.ranks, self.deadline = more["store"], more["ranks"], more["deadline"]
        # A run that is stored begins at the networks, not where a trial ended, so that it can be resumed without the
        # trials; and so does one of several processes.
        self.alone = self.store is None and self.ranks is None
        self.keep_every, self.warmup = keep_every, warmup
        self.data, self.held_out = set_aside(held_out, data, target, given["seed"])
        self.more = dict(more)
        if more["draws"] == "auto" and self.held_out is not None:
            self.more["held_out"] = target.inputs_of(self.held_out)
        self.starts = self.given = list(starts)
        self.spent = {"gradients": 0, "seconds": 0.0}  # of trials and runs
        scored = self.held_out or (None if given["transform"] is not None else _some(self.data, target))
        if scored is not None:
            self.starts = with_noise_scales(target, starts, scored, self.device)
        self.choosing = temperature in (None, "auto")  # the temperature
        self.by_noise = learns_noise(target)  # so that T is 1, and held-out examples do not choose it
        if method is None:
            chosen = self.choosing and ladder is None and self.held_out is not None
            method = default_method(target, self.data, given["transform"], given["batch_size"], options, chosen)
        plain = method == "isgd" and given["batch_size"] != "all"
        self.cycles = options.get("lr") == HEATED or (method == "csghmc" and given["method"] is None)
        if self.cycles:
            check_heating(warmup)
            if ladder is not None:
                raise ValueError(f"ladder = {ladder!r} with lr = {HEATED!r}: give method='isgd', or leave ladder out")
        # With what a rung has measured.
        self.continues = self.cycles or (plain and not {"preset", "scheme", "lam"} & options.keys())
        self.place = Place(self.starts)
        self.settings = {**given, "method": method, **(default_options(target, options) if plain else {}), **options}
        num_data = target.resolve_num_data(as_tensors(self.data, target.dtype) or self.data)
        size = given["batch_size"] if as_tensors(self.data) is not None else _loaded_size(self.data)
        self.hmc = method == "hmc" or given["batch_size"] == "all"
        own = 1.0 if self.by_noise else CYCLE_TEMPERATURE if self.cycles else HOT
        self.temperatures = check_ladder([own] if ladder is None else ladder)
        self.descends = ladder is None and not self.by_noise
        size = size_of("all" if self.hmc else size, num_data)
        self.lengths = Lengths.of(num_data, size, self.descends)
        if self.cycles:
            self.lengths = Lengths.in_cycles(num_data, size)
            cycles = {"lr": HEATED, "cycle": self.lengths.cycle, "exploration": EXPLORATION}
            self.settings = {**cycles, **self.settings}
            if target.prior_is_empirical:  # as wide as the network is large: tempered, it would shrink all weights
                self.settings.setdefault("tempered", "likelihood")
        self.tried, self.engine = 0, ""  # steps of all trials, and what took the last ones
        self.early: Posterior | None = None  # what the rung that the run goes on from has drawn

    def posterior(self) -> Posterior:
        """Draws at the temperature that was chosen, those of its rung and more from where it ended.

        A rung is short, and a longer run may go on to where predictions are worse. So the held-out examples have the
        last word: they say how many of the draws are kept and what weight the starts have among them, and a run that is
        of no use gives way to a colder one, at last to the starts themselves.
        """
        choice = Choice(1.0 if self.choosing else self.temperature, "")
        with suppress(Checked):  # a rung can be drawn: now for the run itself
            choice = self.choose()
        choice = replace(choice, temperature=self._of_rank_0(choice.temperature))
        begin = self.place.measured if self.alone else {}
        while choice.temperature > 0:
            began = time.monotonic()
            try:
                with warnings.catch_warnings(record=True) as said:  # of a run that is not kept they would mislead
                    found, early, warmup = self._run(choice, begin)
            except DivergedError:
                if not choice.held_out or self.store is not None:
                    raise
                choice, begin = self._in_time(self._colder(choice, "diverged"), began), {}
                continue
            if not choice.held_out:
                _repeat(said)
                return found
            counts = [found.num_draws] if self.by_noise else parts_of(found.num_draws)
            judged = self._judged(choice.temperature, found, counts)
            count = counts[judged.part] if judged.part else None
            choice = replace(choice, judged=judged, runs=(*choice.runs, judged))
            found.info |= self._about(choice)
            good = self._of_rank_0(self._is_better(choice, judged))
            if self.store is not None:
                _repeat(said)
                self._advise(choice, judged, good, count)
                return found
            if good:
                _repeat(said)
                if begin and self.ladder.optimised:
                    choice = replace(choice, reason=f"{choice.reason}; chains began with an initial optimisation")
                return self._with_starts(choice, judged, found, early, count)
            choice, begin = self._in_time(self._after(choice, judged, warmup), began), {}
            choice = replace(choice, temperature=self._of_rank_0(choice.temperature))
        return self._starts_alone(choice)

    # -- the temperature ----------------------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """The temperature: as given, or by held-out data."""
        if not self.choosing:
            return Choice(self.temperature, "given")
        if self.held_out is None:
            own = 1.0 if self.by_noise else COLD
            return Choice(own, f"T = {own:g} by default: no examples were held out (held_out=) to choose by")
        now = time.monotonic()
        late = math.inf if self.deadline is None else now + LADDER_SHARE * (self.deadline - now)
        chains = len(self.starts) if self.ranks else self.chains
        coldest, hottest = self.temperatures[0], self.temperatures[-1]
        LOGGER.info("trying temperatures from %g to %g on held-out examples", coldest, hottest)
        heads = [self.starts[k % len(self.starts)] for k in range(chains)]  # as often as there are chains of each
        optimises = None if self.cycles else self.continues and self.alone

        def trial(temperature: float, place: Place, optimise: bool) -> tuple[Posterior, Place]:
            return self._trial(temperature, place, optimise, chains, late)

        self.ladder = Ladder(trial, self.target, heads, len(self.starts), self.held_out, late, self.device, optimises)
        if coldest < hottest or self.descends:
            choice = self.ladder.descend(coldest) if self.descends else self.ladder.climb(self.temperatures)
            self.place = self.ladder.places.get(choice.temperature, self.place)
            if (self.keep_every, self.warmup) == ("auto", "auto"):  # else a rung has others
                self.early = self.ladder.drawn.get(choice.temperature)
            return choice
        reason = f"T = {coldest:g}, the only one to try"
        return Choice(coldest, reason, held_out=len(self.ladder.beside), **self.ladder.about_starts)

    def _trial(
        self, temperature: float, place: Place, optimise: bool, chains: int, late: float
    ) -> tuple[Posterior, Place]:
        """A rung of the ladder, and where it ended."""
        ends: dict[int, Any] = {}
        lengths = self.lengths.rung_settings(self.hmc, bool(place.measured))
        if optimise:
            lengths["warmup"] = max(lengths["warmup"], self.lengths.run // 2)
        if not self.cycles:  # which fit themselves into the time
            self.tried += lengths["warmup"] + lengths["draws"] * lengths["keep_every"]
        found = self._draw(
            place.states, chains=chains, temperature=temperature, trained=not optimise, progress=False,
            deadline=late if math.isfinite(late) else None, begin=place.measured,
            ends=ends if self.continues else None, **lengths,
        )  # fmt: skip
        whole = not found.info["dropped"]  # else what was measured would leave chains out of all runs to come
        return found, Place(last_draws(found), ends if whole else {})

    def _draw(self, states: Sequence[State], **settings: Any) -> Posterior:
        """Draws of chains that take these networks in turns; what they cost is added to `spent`."""
        began, on = time.monotonic(), settings["begin"].values()  # chains that go on from others count on

        def count(gradients: int) -> None:
            self.spent["gradients"] += gradients - sum(state["gradients"] * len(state["alive"]) for state in on)
            self.spent["seconds"] += time.monotonic() - began

        try:
            found = draw_at(
                self.target, self.data, init=lambda chain: states[chain % len(states)], **settings, **self.settings
            )
        except DivergedError as error:
            count(error.gradients)
            raise
        count(found.info["gradients"])
        self.engine = found.info.get("engine", "")
        return found

    def _of_rank_0(self, value: Any) -> Any:
        """A decision: where processes share a run their machines may round otherwise, and rank 0 has its way."""
        return value if self.ranks is None else self.ranks.gather(value)[0]

    # -- a run --------------------------------------------------------------------------------------------------------

    def _run(self, choice: Choice, begin: Mapping[int, Any]) -> tuple[Posterior, Posterior | None, Any]:
        """Draws at a temperature, the first of them those of its trial where chains go on from there.

        Returns:
            All draws, those of the trial where they are among them, and the warm-up that was asked for.
        """
        draws = self.more["draws"]
        least = STAGE_DRAWS + 1 if self.cycles else 2 * RUNG_DRAWS
        early = self.early if begin and isinstance(draws, int) and draws >= least else None
        if early is not None:
            draws -= early.num_draws
        lengths = self._steps(choice, draws if isinstance(draws, int) else DRAWS, bool(begin))
        if self.cycles:
            begin = {first: {**state, AS_IS: state["reports"]} for first, state in begin.items()}
        settings = {**self.more, "draws": draws, **lengths}
        if choice.held_out and self.deadline is not None:  # to judge the run by them takes its time, too
            drawn, total = 1 if early is None else 1 + early.num_draws, self.more["draws"]
            judging = self._judging(drawn, total if isinstance(total, int) else DRAWS)
            settings |= {"deadline": self.deadline - judging, "scoring": self.ladder.scoring}
        found = self._draw(
            self.starts, starts=self.given, chains=self.chains, trained=True, temperature=choice.temperature,
            about_choice=self._about(choice), begin=begin, **settings,
        )  # fmt: skip
        if early is not None and early.num_chains != found.num_chains:
            early = None
        if early is not None:
            found = _followed_by(early, found)
        found.starts = list(self.given)
        return found, early, lengths["warmup"]

    def _steps(self, choice: Choice, draws: int, continued: bool) -> dict[str, Any]:
        """Warm-up of the run and steps between its draws, as given or as fit into the time, by the ladder's speed."""
        steps = self.lengths.settings(draws, self.hmc, continued)
        given = {"keep_every": self.keep_every, "warmup": self.warmup}
        if self.deadline is not None and self.tried and set(given.values()) == {"auto"}:
            fit = (self.deadline - self._judging(draws, draws) - time.monotonic()) * self.tried / choice.seconds
            share = min(1.0, max(0.0, fit / (steps["warmup"] + draws * steps["keep_every"])))
            warmup = max(min(RUNG_WARMUP, steps["warmup"]), int(share * steps["warmup"]))
            spacing = max(1, int((fit - warmup) / draws) if share < 1 else steps["keep_every"])
            steps = {"warmup": warmup, "keep_every": spacing}
        return {name: steps[name] if value == "auto" else value for name, value in given.items()}

    def _judging(self, draws: int, total: int) -> float:
        """Seconds that held-out examples take for so many draws of each chain, and for averages over all of them."""
        return draws * self.chains * self.ladder.scoring + 2 * len(parts_of(total)) * self.ladder.pooling

    # -- what held-out examples say of it -----------------------------------------------------------------------------

    def _judged(self, temperature: float, found: Posterior, counts: Sequence[int]) -> Rung:
        """Starts and draws together, of so many first draws as suit the held-out examples best."""
        assert self.held_out is not None
        after, beside = densities(found, self.held_out, self.device, counts), self.ladder.beside
        if self.by_noise:  # among draws a network has the noise scale that these found, alone that which suits it best
            beside = densities(found.start_draws(), self.held_out, self.device)
        return Rung.of(temperature, self.ladder.alone, beside, after, apart=True)

    def _is_better(self, choice: Choice, judged: Rung, short: float = 0.0, by_few: bool = False) -> bool:
        """Whether it is surely better than the starts, or would be if its NLL were lower by a share of theirs.

        ``by_few``: a gain from `FEW` examples alone will do.
        """
        unit = choice.calibrated_nll if has_classes(self.target) else 1.0
        if self.by_noise:
            return judged.better(SURE, False, short * unit)
        return judged.better(SURE_CHOSEN, not by_few, (short - LEAST_GAIN) * unit)

    def _after(self, choice: Choice, judged: Rung, warmup: Any) -> Choice:
        """What follows a run that is not better: a colder one, or the starts."""
        useless = not judged.difference < 0
        fault = "did not help to predict held-out examples"
        if not useless:
            fault += f" surely ({-judged.difference:.2g} ± {judged.error:.2g} better"
            fault += f", by {FEW} examples alone)" if self._is_better(choice, judged, by_few=True) else ")"
        # A colder run is closer to the start: it helps where draws are worse than that, and may be surer.
        last = len(choice.runs) >= RUNS or (useless and judged.alone <= choice.start_nll)
        last |= not self._is_better(choice, judged, COLDER_GAIN)
        last |= warmup == 0  # without a trial's rates there would be none
        return self._colder(choice, fault, COLDER if useless else COOLER, last)

    def _colder(self, choice: Choice, fault: str, factor: float = COLDER, last: bool = False) -> Choice:
        """A lower temperature; 0 where that is below what a rung would be, or nothing else is to be tried."""
        temperature = choice.temperature / factor
        if last or not choice.rungs or temperature < min(self.temperatures[0] / COLDER, COLD) / 2:
            temperature = 0.0
        what = f"T = {temperature:.3g} was taken" if temperature else "the draws are the starts"
        reason = f"the run at T = {choice.temperature:.3g} {fault}: {what}"
        LOGGER.info(reason)
        diverged = choice.diverged + ((choice.temperature,) if fault == "diverged" else ())
        return replace(choice, temperature=temperature, reason=reason, diverged=diverged)

    def _in_time(self, choice: Choice, began: float) -> Choice:
        """The same, but the starts where not even half of the time is left that the run took, which began then."""
        now = time.monotonic()
        if choice.temperature and self.deadline is not None and self.deadline - now < (now - began) / 2:
            late = "max_seconds ended before a colder one: the draws are the starts"
            choice = replace(choice, temperature=0.0, reason=choice.reason.partition(": ")[0] + f", and {late}")
        return choice

    # -- what comes back ----------------------------------------------------------------------------------------------

    def _with_starts(
        self, choice: Choice, judged: Rung, found: Posterior, early: Posterior | None, count: int | None
    ) -> Posterior:
        """The draws, or so many of the first of each chain, with the starts among them and calibrated."""
        part = found if count is None else self._first(count, found, early)
        both = part.with_starts(judged.share)
        share = both.info.get("from_start", 0) / both.num_draws
        what = f"the starts have a weight of {share:.2g} in predictions; after the run NLL {judged.nll:.4g}"
        if judged.softmax_temperature != 1:
            both = both.at_softmax_temperature(judged.softmax_temperature)
            what += f" at the softmax temperature {judged.softmax_temperature:.2g}"
        if count is not None:
            what += f", by the first {count} of {found.num_draws} draws"
        warn_of_end(judged.softmax_temperature)
        LOGGER.info("held-out examples: %s", what)
        both.info |= {**self.spent, **self._about(replace(choice, reason=f"{choice.reason}; {what}"))}
        return both

    def _first(self, count: int, found: Posterior, early: Posterior | None) -> Posterior:
        """The first draws of each chain, with what is known of them: those of the trial are described by it."""
        part = (found if early is None or count > early.num_draws else early).select(draws=slice(count))
        part.starts = list(self.given)
        part.info.pop("stopped", None)  # which is said of all draws
        return part

    def _advise(self, choice: Choice, judged: Rung, good: bool, count: int | None) -> None:
        """Say what predicts best: a stored run has its own draws alone."""
        some = "" if count is None else f".select(draws=slice({count}))"
        scale = judged.softmax_temperature if good else choice.start_softmax_temperature
        advice = f"posterior{some}.with_starts({judged.share:g}, starts)" if good else "the starts"
        advice += f" at the softmax temperature {scale:.2g}" if scale != 1 else ""
        warn_caller(f"the held-out examples are predicted best by {advice}: a stored run has its own draws alone")

    def _starts_alone(self, choice: Choice) -> Posterior:
        """The starts, calibrated: nothing that was drawn is better."""
        stored = "" if self.store is None else f"; nothing was written to {self.store}"
        size: dict[str, Any] = {"chains": len(self.starts), "draws": 1}
        if (scale := choice.start_softmax_temperature) != 1:
            size["softmax_temperature"] = scale
            scaled = f"predicted at the softmax temperature {scale:.2g} (NLL {choice.calibrated_nll:.4g})"
            choice = replace(choice, reason=f"{choice.reason}, {scaled}")
        warn_of_end(scale)
        warn_caller(choice.reason + stored)
        found = start_posterior(self.target, self.starts)
        engine = {"engine": self.engine} if self.engine else {}
        density = "none: no run was better, and the draws are the trained networks"
        info = {**found.info, **self.spent, **engine, **size, "density": density, "complete": True}
        info |= self._about(choice)
        return Posterior(self.target, found.draws, info, as_tensors(self.data), found.buffers, list(self.starts))

    def _about(self, choice: Choice) -> dict[str, Any]:
        return {"temperature_choice": choice.as_dict(), "starts": len(self.starts)}


def _repeat(said: Sequence[warnings.WarningMessage]) -> None:
    """Give warnings that were held back."""
    for warning in said:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def parts_of(draws: int) -> list[int]:
    """How many of the first draws of a chain may be kept: later ones may be where predictions are worse.

    Example:
        >>> parts_of(30), parts_of(9)
        ([30, 15, 8], [9])
    """
    found = [draws]
    while -(-found[-1] // 2) >= RUNG_DRAWS:
        found.append(-(-found[-1] // 2))
    return found


def _followed_by(early: Posterior, late: Posterior) -> Posterior:
    """Draws of chains, and those that they drew later."""
    draws, buffers = (
        {name: torch.cat([first[name], x], 1) for name, x in second.items()}
        for first, second in ((early.draws, late.draws), (early.buffers, late.buffers))
    )
    about = {"draws": early.num_draws + late.num_draws, "from_rung": early.num_draws}  # those are closer together
    return Posterior(late.target, draws, {**late.info, **about}, late.data, buffers)


def _some(data: Any, target: Target) -> Tensors | None:
    """Some of the training data, where they are tensors."""
    tensors = as_tensors(data, target.dtype)
    return None if tensors is None else tree_map(lambda t: t[:SCORED], tensors)


def _loaded_size(data: Any) -> int | None:
    """Examples in a batch of a loader."""
    first = next(iter(data), None)
    return None if first is None else batch_length(with_tensors(first))
