"""Sampling around trained networks, at a temperature that held-out examples choose.

The posterior at T = 1 has most of its mass far from a trained network, and draws of a short run at T = 1 predict worse
than the network. Colder densities concentrate around it. Short runs at several temperatures (`isosgd.sampling.ladder`)
show which one predicts best, and the run continues from there. The networks stay among the draws with a weight that
held-out examples choose. If draws do not help, only the networks are returned.

A regression also samples the scale of its noise. A colder density favours the scale that fits the training data best
and is overconfident, so there T is 1, and held-out examples only decide whether the draws are better than the networks.
With few rows the method is HMC, which reaches T = 1 in some thousand gradients.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isosgd.baselines import BASELINES
from isosgd.data.sources import DataSets, Tensors, as_tensors, size_of
from isosgd.engine.state import AS_IS
from isosgd.errors import DivergedError, OutOfTimeError, warn_caller
from isosgd.posterior import Posterior
from isosgd.posterior.calibration import FEW, name_of_width, warn_of_end
from isosgd.posterior.starts import State, with_noise_scale
from isosgd.progress import tell
from isosgd.samplers.schedules import STAGE_DRAWS
from isosgd.sampling.ladder import (
    COLDER,
    COOLER,
    SCORED,
    Choice,
    Ladder,
    Place,
    Rung,
    check_ladder,
    densities,
    last_draws,
    of_classes,
)
from isosgd.sampling.run import Checked, checking, draw_at
from isosgd.sampling.settings import HEATED, check_heating
from isosgd.sampling.starts import set_aside
from isosgd.sampling.weights import (
    Weights,
    examples_identity,
    scales_of,
    start_posterior,
    starts_alone,
    weighted,
    with_scales,
)
from isosgd.store import Manifest
from isosgd.store.writer import check_new, make_folder
from isosgd.target import Target
from isosgd.target.batches import batch_length, tree_map, with_tensors
from isosgd.target.likelihoods import Bernoulli, Categorical, Heteroscedastic

HOT = 0.3  # first temperature; with cycles CYCLE_TEMPERATURE
COLD = 1e-3  # temperature without held-out examples; docs/trained-evidence.md has results
# Standard errors by which draws must predict held-out examples better than the starts, if these examples chose the
# temperature, and if T is 1. In the second case some dozens of rows cannot show that the average is better, so only
# draws that are clearly worse are rejected. In the first case the gain must also exceed a share of the calibrated
# start's NLL: a smaller gain may be luck, and is not worth predictions by all draws.
SURE_CHOSEN, SURE, LEAST_GAIN = 1.0, -1.0, 0.005
EPOCHS, LEAST = 10, 2_000  # epochs of gradients of the whole call, and its least number of gradients
LADDER_SHARE, RUNGS, TRIAL_SHARE = 1 / 3, 5, 0.1
# The most runs. A second, colder run follows a first one that is not better, but only if an NLL lower by this share of
# the calibrated start's would be better (docs/trained-evidence.md has the figures).
RUNS, COLDER_GAIN = 2, 0.03
RUNG_DRAWS, RUNG_WARMUP = 8, 200  # draws of a rung, and gradients that measure its noise
WARMUP_SHARE, DRAWS = 0.3, 30  # of the run itself
# Gradients of the warm-up of a rung that continues another one, in which rates at most double. The run itself has a
# full warm-up, in which rates can rise further. Cycles continue without a warm-up.
CONTINUED = 60
LARGE = 1 << 20  # parameters from which Lambda is one number for each layer
# Cycles of classifiers: the first temperature, epochs of a cycle, its least number of steps, share of steps without
# noise. The trial is the first cycle.
CYCLE_TEMPERATURE, CYCLE_EPOCHS, CYCLE_STEPS, EXPLORATION = 0.03, 8, 400, 0.8
CYCLE_SIZE = 5_000  # least number of parameters for cycles
HMC_ROWS, HMC_SIZE = 5_000, 50_000  # the most rows and parameters of a regression for HMC
HMC_LENGTHS, HMC_RUNG = {"warmup": 1_600, "keep_every": 100}, {"warmup": 700, "keep_every": 20}

# -- lengths, method and options --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Gradients of each chain in a rung that continues another one, and in the run.

    With cycles a rung is one cycle of ``cycle`` steps, which also sets the spacing of draws; otherwise it is 0.
    """

    rung: int
    run: int
    cycle: int = 0

    @classmethod
    def of(cls, num_data: int, batch_size: int, descends: bool = False) -> Lengths:
        """About `EPOCHS` epochs, a third of them on the ladder; a ladder that ``descends`` usually has one trial."""
        total = max(LEAST, EPOCHS * -(-num_data // batch_size))
        each = CONTINUED + round(TRIAL_SHARE * total) if descends else round(LADDER_SHARE * total / RUNGS)
        rung = max(CONTINUED + 5 * RUNG_DRAWS, each)
        return cls(rung, round((1 - LADDER_SHARE) * total))

    @classmethod
    def in_cycles(cls, num_data: int, batch_size: int) -> Lengths:
        """The lengths of cycles."""
        return cls(0, 0, max(CYCLE_STEPS, CYCLE_EPOCHS * -(-num_data // batch_size)))

    def settings(self, draws: int, hmc: bool = False, continued: bool = False) -> dict[str, Any]:
        """Warm-up, draws and steps between them of the run."""
        if self.cycle:
            return {"warmup": "auto", "draws": draws, "keep_every": "auto"}
        if hmc:  # a step is a pass through the data
            return {"draws": draws, **HMC_LENGTHS}
        warmup = max(CONTINUED if continued else 2 * RUNG_WARMUP, round(WARMUP_SHARE * self.run))
        return {"warmup": warmup, "draws": draws, "keep_every": max(1, (self.run - warmup) // draws)}

    def rung_settings(self, hmc: bool = False, continued: bool = False) -> dict[str, Any]:
        """The same for a rung."""
        if self.cycle:
            return self.settings(STAGE_DRAWS)
        if hmc:
            return {"draws": RUNG_DRAWS, **HMC_RUNG}
        warmup = CONTINUED if continued else max(RUNG_WARMUP, self.rung // 3)
        return {"warmup": warmup, "draws": RUNG_DRAWS, "keep_every": (self.rung - CONTINUED) // RUNG_DRAWS}


def learns_noise(target: Target) -> bool:
    """Whether the scale of the noise is sampled, or an output of the network."""
    likelihood = None if target.module is None else target.module.likelihood
    return bool(target.noise_scales()) or isinstance(likelihood, Heteroscedastic)


def default_method(
    target: Target, data: Any, transform: Any, batch_size: Any, options: Mapping[str, Any], chosen: bool
) -> str:
    """The default method around a trained network.

    HMC for a regression with few rows; cycles for a classifier that is not small, if held-out examples choose the
    temperature (``chosen``), since cycles leave the network and only such examples show whether that helps; else I-SGD.
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
    free = batch_size is None and options.keys() <= {"compile", "tempered"}  # other options may be of I-SGD only
    return "hmc" if free and fits and learns_noise(target) and _size(target) <= HMC_SIZE else "isgd"


def default_options(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """The default options of I-SGD around a trained network.

    With BatchNorm the curvature along the scale of a layer's weights is large and meaningless, and the curvature guard
    would stop the chain. There, and in networks of more than a million weights, the noise of each layer sets its rate
    (the preset ``windowed``). Otherwise Lambda is of low rank, and the curvature limits the rate.
    """
    if {"preset", "structure", "scheme", "lam", "noise"} & options.keys():
        return {}
    return {"preset": "windowed"} if target.ties_examples or _size(target) > LARGE else {"structure": "lowrank"}


def _size(target: Target) -> int:
    return sum(x.numel() for x in target.initial().values())


# -- sampling around networks -----------------------------------------------------------------------------------------


class TrainedRun:
    """A run around trained networks: `posterior` tries temperatures, samples at the best one, and judges the draws.

    Args (beside those of `sample`):
        common: settings of both trials and runs.
        of_run: settings of runs only.
        options: of the method.
    """

    def __init__(
        self, target: Target, data: Any, starts: Sequence[State], temperature: Any, chains: int, held_out: Any,
        ladder: Any, keep_every: Any, warmup: Any, common: Mapping[str, Any], of_run: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        method: str | None = common["method"]
        if method in BASELINES:
            raise ValueError(f"starts= is for samplers; method = {method!r} trains networks of its own: pass init=")
        if isinstance(data, DataSets):
            raise ValueError(
                "starts= with isosgd.DataSets: networks are trained on one data set; sample each on its own"
            )
        if isinstance(held_out, float) and common["transform"] is not None:
            raise ValueError(
                f"held_out = {held_out} with a transform: predictions do not go through it, so pass held_out=(x, y) as "
                "the network takes them"
            )
        self.target, self.device, self.temperature, self.chains = target, common["device"], temperature, chains
        self.store, self.ranks, self.deadline = of_run["store"], of_run["ranks"], of_run["deadline"]
        self.begun = self.store is not None and of_run["resume"] and Manifest.begun(Path(self.store))
        if self.store is not None and Path(self.store).exists():  # before the trials
            make_folder(Path(self.store))
            if not of_run["resume"]:
                check_new(Path(self.store))
        self.shows = of_run["progress"] and (self.ranks is None or self.ranks.rank == 0)
        # A run with a store begins at the networks rather than where a trial ended, so that it can be resumed without
        # the trials; so does a run over several processes.
        self.alone = self.store is None and self.ranks is None
        self.keep_every, self.warmup = keep_every, warmup
        self.data, self.held_out = set_aside(held_out, data, target, common["seed"])
        self.of_run = dict(of_run)
        if of_run["draws"] == "auto" and self.held_out is not None:
            self.of_run["held_out"] = target.inputs_of(self.held_out)
        self.starts = self.given = list(starts)
        self.spent = {"gradients": 0, "seconds": 0.0}  # of trials and runs
        scored = self.held_out or (None if common["transform"] is not None else _some(self.data, target))
        if self.begun:  # chains must begin where they did
            known = Manifest.read(Path(self.store)).info.get("start_scales")
            self.starts = list(with_scales(starts, known, target))
        if scored is not None:
            try:
                self.starts = [with_noise_scale(target, start, scored, self.device) for start in self.starts]
            except ValueError as error:
                raise ValueError(f"{'the data' if self.held_out is None else 'held_out'}: {error}") from error
        self.choosing = temperature in (None, "auto")  # the temperature
        self.width_name = name_of_width(of_classes(target))
        self.by_noise = learns_noise(target)  # then T is 1, and held-out examples do not choose it
        if method is None:
            chosen = self.choosing and ladder is None and self.held_out is not None
            method = default_method(target, self.data, common["transform"], common["batch_size"], options, chosen)
        plain = method == "isgd" and common["batch_size"] != "all"
        self.cycles = options.get("lr") == HEATED or (method == "csghmc" and common["method"] is None)
        if self.cycles:
            check_heating(warmup)
            if ladder is not None:
                raise ValueError(f"ladder = {ladder!r} with lr = {HEATED!r}: give method='isgd', or leave ladder out")
        # Whether a run takes over what a rung has measured.
        self.continues = self.cycles or (plain and not {"preset", "scheme", "lam"} & options.keys())
        self.place = Place(self.starts)
        self.settings = {**common, "method": method, **(default_options(target, options) if plain else {}), **options}
        num_data = target.resolve_num_data(as_tensors(self.data, target.dtype) or self.data)
        size = common["batch_size"] if as_tensors(self.data) is not None else _loaded_size(self.data)
        self.hmc = method == "hmc" or common["batch_size"] == "all"
        own = 1.0 if self.by_noise else CYCLE_TEMPERATURE if self.cycles else HOT
        self.temperatures = check_ladder([own] if ladder is None else ladder)
        self.descends = ladder is None and not self.by_noise
        size = size_of("all" if self.hmc else size, num_data)
        self.lengths = Lengths.of(num_data, size, self.descends)
        if self.cycles:
            self.lengths = Lengths.in_cycles(num_data, size)
            cycles = {"lr": HEATED, "cycle": self.lengths.cycle, "exploration": EXPLORATION}
            self.settings = {**cycles, **self.settings}
            if target.prior_is_empirical:  # its scales are those of the weights: tempered, it would shrink them all
                self.settings.setdefault("tempered", "likelihood")
        self.tried, self.engine = 0, ""  # steps of all trials, and the engine of the last one
        self.reached: dict[tuple[int, int], Any] = {}  # by heating, at any temperature
        self.early: Posterior | None = None  # the draws of the rung that the run continues

    def posterior(self) -> Posterior:
        """Draws at the chosen temperature: those of its rung, and more from where it ended.

        A rung is short, and a longer run may reach weights that predict worse. So held-out examples judge the run, too:
        they say how many draws to keep and the weight of the starts among them. A run that does not help is replaced by
        a colder one, or by the starts.
        """
        choice = Choice(1.0 if self.choosing else self.temperature, "")
        # A warm-up that is too short is refused before the trials; a run that continues one may have a shorter one.
        if self.choosing and self.held_out is not None and not (self.alone and self.continues):
            self._check()
        with suppress(Checked):  # the settings of a rung are good; those of the run are checked next
            choice = self.choose()
        choice = replace(choice, temperature=self._of_rank_0(choice.temperature))
        begin = self.place.measured if self.alone else {}
        while choice.temperature > 0:
            began = time.monotonic()
            try:
                with warnings.catch_warnings(record=True) as held_back:  # of a run that is not kept they would mislead
                    found, early, warmup = self._run(choice, begin)
            except DivergedError as error:
                if not choice.held_out or self.store is not None:
                    raise
                if isinstance(error, OutOfTimeError):
                    late = "max_seconds was over before the run could draw: the draws are the starts"
                    choice = replace(choice, temperature=0.0, reason=late)
                    continue
                choice, begin = self._in_time(self._colder(choice, "diverged"), began), {}
                continue
            if not choice.held_out:
                _repeat(held_back)
                kept = Weights.read(Manifest.read(Path(self.store))) if self.begun else None
                return weighted(found, kept) if self.begun else found
            choice, judged, count, good = self._judged(choice, found)
            if good or self.store is not None:
                _repeat(held_back)
            if good:
                if begin and self.ladder.optimised:
                    choice = replace(choice, reason=f"{choice.reason}; chains began with an initial optimisation")
                return self._with_starts(choice, judged, found, early, count)
            if self.store is not None:  # a second run would begin another store
                return self._starts_alone(self._after(choice, judged, 0), found)
            choice, begin = self._in_time(self._after(choice, judged, warmup), began), {}
            choice = replace(choice, temperature=self._of_rank_0(choice.temperature))
        return self._starts_alone(choice)

    def _check(self) -> None:
        """Raise what a run that begins at the networks would raise before its first step, as its warm-up is given."""
        if self.warmup == "auto":
            return
        lengths = {"warmup": self.warmup, "keep_every": 1 if self.keep_every == "auto" else self.keep_every}
        with torch.random.fork_rng(devices=[]), checking():  # loaders take global random numbers
            self._draw(
                self.starts, starts=self.given, chains=self.chains, trained=True, temperature=1.0, begin={},
                **{**self.of_run, **lengths},
            )  # fmt: skip

    def weighted(self, drawn: Posterior, temperature: float) -> Posterior:
        """The draws of a stored run that was begun before, as held-out examples weight them."""
        assert self.held_out is not None
        self.ladder = self._make_ladder()
        known = drawn.info.get("temperature_choice", {})
        more = {"rungs": tuple(map(Rung.read, known.get("rungs", ()))), "seconds": known.get("seconds", 0.0)}
        about = {**more, "held_out": len(self.ladder.beside), **self.ladder.about_starts}
        choice = Choice(temperature, known.get("reason", "given"), **about)
        choice, judged, count, good = self._judged(choice, drawn)
        if good:
            return self._with_starts(choice, judged, drawn, None, count)
        return self._starts_alone(self._after(choice, judged, 0), drawn)

    # -- the temperature ----------------------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """The temperature: as given, or chosen by held-out data."""
        if not self.choosing:
            return Choice(self.temperature, "given")
        if self.held_out is None:
            own = 1.0 if self.by_noise else COLD
            return Choice(own, f"T = {own:g} by default: no examples were held out (held_out=) to choose by")
        coldest, hottest = self.temperatures[0], self.temperatures[-1]
        tried = f"temperatures from {coldest:g} to" if coldest < hottest else "T ="
        tell(f"trying {tried} {hottest:g} on {batch_length(self.held_out):,} held-out examples", self.shows)
        self.ladder = self._make_ladder()
        if coldest < hottest or self.descends:
            choice = self.ladder.descend(coldest) if self.descends else self.ladder.climb(self.temperatures)
            self.place = self.ladder.places.get(choice.temperature, self.place)
            if (self.keep_every, self.warmup) == ("auto", "auto"):  # else a rung has another spacing
                self.early = self.ladder.drawn.get(choice.temperature)
            return choice
        reason = f"T = {coldest:g}, the only one to try"
        return Choice(coldest, reason, held_out=len(self.ladder.beside), **self.ladder.about_starts)

    def _make_ladder(self) -> Ladder:
        """The ladder, which has scored the starts."""
        assert self.held_out is not None
        now = time.monotonic()
        late = math.inf if self.deadline is None else now + LADDER_SHARE * (self.deadline - now)
        chains = len(self.starts) if self.ranks else self.chains
        starts = [self.starts[k % len(self.starts)] for k in range(chains)]  # of each chain
        optimises = None if self.cycles else self.continues and self.alone

        def trial(temperature: float, place: Place, optimise: bool) -> tuple[Posterior, Place]:
            return self._trial(temperature, place, optimise, chains, late)

        return Ladder(
            trial, self.target, starts, len(self.starts), self.held_out, late, self.device, optimises, self.shows
        )

    def _trial(
        self, temperature: float, place: Place, optimise: bool, chains: int, late: float
    ) -> tuple[Posterior, Place]:
        """The draws of a rung, and where it ended."""
        ends: dict[int, Any] = {}
        lengths = self.lengths.rung_settings(self.hmc, bool(place.measured))
        if optimise:
            lengths["warmup"] = max(lengths["warmup"], self.lengths.run // 2)
        if not self.cycles:  # cycles fit themselves into the time
            self.tried += lengths["warmup"] + lengths["draws"] * lengths["keep_every"]
        found = self._draw(
            place.states, chains=chains, temperature=temperature, trained=not optimise, progress=self.shows,
            label=f"trial at T = {temperature:.3g}: ",
            deadline=late if math.isfinite(late) else None, begin=place.measured,
            ends=ends if self.continues else None, reached=self.reached, latest=self.deadline, **lengths,
        )  # fmt: skip
        whole = not found.info["dropped"]  # else later runs would lack these chains
        return found, Place(last_draws(found), ends if whole else {})

    def _draw(self, states: Sequence[State], **settings: Any) -> Posterior:
        """Draws of chains that start at these networks in turn; adds their cost to `spent`."""
        began = time.monotonic()
        # Chains that continue from others continue to count their gradients.
        before = sum(state["gradients"] * len(state["alive"]) for state in settings["begin"].values())

        def count(gradients: int) -> None:
            self.spent["gradients"] += gradients - before
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
        """The value of rank 0: the ranks of a run must decide alike, and their machines may round differently."""
        return value if self.ranks is None else self.ranks.gather(value)[0]

    # -- a run --------------------------------------------------------------------------------------------------------

    def _run(self, choice: Choice, begin: Mapping[int, Any]) -> tuple[Posterior, Posterior | None, Any]:
        """Draws at a temperature; if chains continue from its trial, those of the trial come first.

        Returns:
            All draws, those of the trial if they are among them, and the setting of the warm-up.
        """
        draws = self.of_run["draws"]
        least = STAGE_DRAWS + 1 if self.cycles else 2 * RUNG_DRAWS
        early = self.early if begin and isinstance(draws, int) and draws >= least else None
        if early is not None:
            draws -= early.num_draws
        lengths = self._steps(choice, draws if isinstance(draws, int) else DRAWS, bool(begin))
        if self.cycles:
            begin = {first: {**state, AS_IS: state["reports"]} for first, state in begin.items()}
        settings = {**self.of_run, "draws": draws, **lengths}
        if choice.held_out and self.deadline is not None:  # judging the run takes time, too
            drawn, total = 1 if early is None else 1 + early.num_draws, self.of_run["draws"]
            judging = self._judging(drawn, total if isinstance(total, int) else DRAWS)
            settings |= {"deadline": self.deadline - judging, "scoring": self.ladder.scoring}
        about = self._about(choice)
        if self.store is not None and self.target.noise_scales():
            about["start_scales"] = scales_of(self.starts, self.target)
        if self.begun and (known := Manifest.read(Path(self.store)).info.get("temperature_choice")):
            about["temperature_choice"] = known  # of the call that began the run
        found = self._draw(
            self.starts, starts=self.given, chains=self.chains, trained=True, temperature=choice.temperature,
            about_choice=about, begin=begin, reached=self.reached if self.alone else None, **settings,
        )  # fmt: skip
        if early is not None and early.num_chains != found.num_chains:
            early = None
        if early is not None:
            found = _followed_by(early, found)
        found.starts = list(self.given)
        return found, early, lengths["warmup"]

    def _steps(self, choice: Choice, draws: int, continued: bool) -> dict[str, Any]:
        """Warm-up and spacing of the run, as given or as they fit into the time at the ladder's speed."""
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
        """Seconds to score ``draws`` draws of each chain by held-out examples, and averages over ``total`` draws."""
        return draws * self.chains * self.ladder.scoring + 2 * len(parts_of(total)) * self.ladder.pooling

    # -- judgement by held-out examples -------------------------------------------------------------------------------

    def _judged(self, choice: Choice, found: Posterior) -> tuple[Choice, Rung, int | None, bool]:
        """Held-out examples judge starts and draws together.

        Returns:
            The choice with the score, the score, how many first draws predict best (None for all), and whether the
            result is surely better than the starts.
        """
        assert self.held_out is not None
        counts = [found.num_draws] if self.by_noise else parts_of(found.num_draws)
        after, beside = densities(found, self.held_out, self.device, counts), self.ladder.beside
        if self.by_noise:  # among draws a start has their noise scale; alone, the one that suits it best
            beside = densities(found.start_draws(), self.held_out, self.device)
        judged = Rung.of(choice.temperature, self.ladder.alone, beside, after, apart=True)
        choice = replace(choice, judged=judged, runs=(*choice.runs, judged))
        found.info |= self._about(choice)
        count = counts[judged.part] if judged.part else None
        return choice, judged, count, self._of_rank_0(self._is_better(choice, judged))

    def _is_better(self, choice: Choice, judged: Rung, short: float = 0.0, by_few: bool = False) -> bool:
        """Whether it is surely better than the starts, or would be if its NLL were lower by ``short`` of theirs.

        With ``by_few`` a gain from only `FEW` examples suffices.
        """
        unit = choice.calibrated_nll if of_classes(self.target) else 1.0
        if self.by_noise:
            return judged.better(SURE, False, short * unit)
        return judged.better(SURE_CHOSEN, not by_few, (short - LEAST_GAIN) * unit)

    def _after(self, choice: Choice, judged: Rung, warmup: Any) -> Choice:
        """The choice after a run that is not better: a colder run, or the starts."""
        useless = not judged.difference < 0
        fault = "did not help to predict held-out examples"
        if not useless:
            fault += f" surely ({-judged.difference:.2g} ± {judged.error:.2g} better"
            fault += f", by {FEW} examples alone)" if self._is_better(choice, judged, by_few=True) else ")"
        # A colder run stays closer to the start: it helps if draws are worse than the start, and may be surer.
        last = len(choice.runs) >= RUNS or (useless and judged.alone <= choice.start_nll)
        last |= not self._is_better(choice, judged, COLDER_GAIN)
        last |= warmup == 0 or not self._can_begin_anew()  # then there would be no rates
        return self._colder(choice, fault, COLDER if useless else COOLER, last)

    def _can_begin_anew(self) -> bool:
        """Whether the warm-up is long enough for a run that does not continue a trial."""
        try:
            self._check()
        except ValueError:
            return False
        return True

    def _colder(self, choice: Choice, fault: str, factor: float = COLDER, last: bool = False) -> Choice:
        """The choice of a lower temperature; 0 if this was the ``last`` run, or no rung would be so cold."""
        temperature = choice.temperature / factor
        if last or not choice.rungs or temperature < min(self.temperatures[0] / COLDER, COLD) / 2:
            temperature = 0.0
        what = f"T = {temperature:.3g} was taken" if temperature else "the draws are the starts"
        reason = f"the run at T = {choice.temperature:.3g} {fault}: {what}"
        if temperature:  # else a warning says so
            tell(reason, self.shows)
        diverged = choice.diverged + ((choice.temperature,) if fault == "diverged" else ())
        return replace(choice, temperature=temperature, reason=reason, diverged=diverged)

    def _in_time(self, choice: Choice, began: float) -> Choice:
        """The choice, or the starts if less than half of the time is left that the run since ``began`` took."""
        now = time.monotonic()
        if choice.temperature and self.deadline is not None and self.deadline - now < (now - began) / 2:
            late = "max_seconds ended before a colder one: the draws are the starts"
            choice = replace(choice, temperature=0.0, reason=choice.reason.partition(": ")[0] + f", and {late}")
        return choice

    # -- results ------------------------------------------------------------------------------------------------------

    def _with_starts(
        self, choice: Choice, judged: Rung, found: Posterior, early: Posterior | None, count: int | None
    ) -> Posterior:
        """The draws, or the first ``count`` of each chain, with the starts among them, calibrated."""
        part = found if count is None else self._first(count, found, early)
        share, width = judged.share, judged.width
        copies = part.with_starts(share)
        real = copies.info.get("from_start", 0) / copies.num_draws
        what = f"the starts have a weight of {real:.2g} in predictions; after the run NLL {judged.nll:.4g}"
        if width != 1:
            what += f" at the {self.width_name} {width:.2g}"
        if count is not None:
            what += f", by the first {count} of {found.num_draws} draws"
        what += f" (the start {judged.nll - judged.difference:.4g}; each half is scored by the choices of the other)"
        warn_of_end(width, of_classes(self.target))
        tell(f"held-out examples: {what}", self.shows)
        about = self._about(replace(choice, reason=f"{choice.reason}; {what}"))
        self._keep(Weights(share, width, count, found.num_draws, about["temperature_choice"]))
        both = copies if width == 1 else copies.at_width(width)
        both.info |= {**self.spent, **about} if self.store is None else about
        return both

    def _first(self, count: int, found: Posterior, early: Posterior | None) -> Posterior:
        """The first ``count`` draws of each chain; ``info`` is that of the trial if they are all from the trial."""
        part = (found if early is None or count > early.num_draws else early).select(draws=slice(count))
        part.starts = list(self.given)
        part.info.pop("stopped", None)  # it is about all draws
        return part

    def _keep(self, weights: Weights) -> None:
        """Write to the store how to predict with its draws."""
        if self.store is not None and (self.ranks is None or self.ranks.rank == 0):
            assert self.held_out is not None
            replace(weights, examples=examples_identity(self.held_out)).write(Path(self.store))
        if self.ranks is not None:
            self.ranks.gather(None)  # then all may load it

    def _starts_alone(self, choice: Choice, drawn: Posterior | None = None) -> Posterior:
        """The starts, calibrated, since no draws are better; ``drawn`` are in the store."""
        stored = "" if self.store is None else f"; nothing was written to {self.store}"
        if drawn is not None:
            stored = f"; isosgd.load({str(self.store)!r}, target, as_drawn=True) has the draws of the chains"
        if (width := choice.start_width) != 1:
            scaled = f"predicted at the {self.width_name} {width:.2g} (NLL {choice.calibrated_nll:.4g})"
            choice = replace(choice, reason=f"{choice.reason}, {scaled}")
        warn_of_end(width, of_classes(self.target))
        warn_caller(choice.reason + stored)
        about, engine = self._about(choice), {"engine": self.engine} if self.engine else {}
        if drawn is not None:
            weights = Weights(1.0, width, None, drawn.num_draws, about["temperature_choice"])
            self._keep(weights)
            return weights.applied(drawn)
        info = {**self.spent, **engine, "complete": True, **about}
        found = starts_alone(start_posterior(self.target, self.starts), info, as_tensors(self.data), width)
        found.starts = list(self.given)
        return found

    def _about(self, choice: Choice) -> dict[str, Any]:
        return {"temperature_choice": choice.as_dict(), "starts": len(self.starts)}


def _repeat(held_back: Sequence[warnings.WarningMessage]) -> None:
    """Issue warnings that were held back."""
    for warning in held_back:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def parts_of(draws: int) -> list[int]:
    """Numbers of first draws of a chain that may be kept, since later draws may predict worse.

    Example:
        >>> parts_of(30), parts_of(9)
        ([30, 15, 8], [9])
    """
    found = [draws]
    while -(-found[-1] // 2) >= RUNG_DRAWS:
        found.append(-(-found[-1] // 2))
    return found


def _followed_by(early: Posterior, late: Posterior) -> Posterior:
    """The draws of chains followed by their later draws."""
    draws, buffers = (
        {name: torch.cat([first[name], x], 1) for name, x in second.items()}
        for first, second in ((early.draws, late.draws), (early.buffers, late.buffers))
    )
    counts = {"draws": early.num_draws + late.num_draws, "from_rung": early.num_draws}
    return Posterior(late.target, draws, {**late.info, **counts}, late.data, buffers)


def _some(data: Any, target: Target) -> Tensors | None:
    """Some of the training data, if they are tensors."""
    tensors = as_tensors(data, target.dtype)
    return None if tensors is None else tree_map(lambda t: t[:SCORED], tensors)


def _loaded_size(data: Any) -> int | None:
    """Examples in a batch of a loader."""
    first = next(iter(data), None)
    return None if first is None else batch_length(with_tensors(first))
