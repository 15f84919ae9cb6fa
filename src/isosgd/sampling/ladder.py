"""A ladder of temperatures: short runs from trained networks (the starts), scored on held-out examples.

The score is that of an average over draws and starts, with the weights that predict the examples best: draws at a high
temperature alone predict worse than the starts, but add what the starts lack. Trials are scored uncalibrated, since
they are too short to beat calibrated starts. The final run and the starts alone are scored at the width of predictions
that suits the examples best (`isosgd.posterior.calibration`).

By default a high temperature is tried first, and colder ones only if it does harm, since short runs cannot tell
temperatures apart unless they are too high. Given temperatures are tried from cold to hot, each run continuing the last
one, until draws alone get clearly worse; then one more next to the best.

If the draws of the first trial are far better than the starts, the networks were not fully trained, and chains begin
with an initial optimisation.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import Tensors
from isosgd.errors import DivergedError, OutOfTimeError, SamplingWarning
from isosgd.posterior import Posterior
from isosgd.posterior.calibration import FEW, Densities, best_width
from isosgd.posterior.draws import place_of
from isosgd.posterior.starts import State
from isosgd.progress import tell
from isosgd.sampling.weights import start_posterior
from isosgd.target import Target
from isosgd.target.batches import tensors_of
from isosgd.target.likelihoods import has_classes

COLDER = 10.0  # if the coldest rung was best, one colder by this factor is tried
COOLER = 10**0.5  # factor between temperatures that fall
DESCENTS = 3  # the most temperatures that fall
CLOSE = 5.0  # no rung between temperatures closer than this factor
UNTRAINED = 5.0  # if the first draws are better by so many standard errors, the network was not fully trained
WORSE = 0.1  # share of the start's NLL by which draws alone must be worse to stop rising temperatures
HARM = 0.25  # the same, to try a lower one of falling temperatures
SHARES = tuple(k / 20 for k in range(1, 19))  # weights of the starts; a larger one would make the draws useless
BOTH = 2.0  # pseudo-examples in favour of the starts, and as many in favour of the draws
SCORED, SCORED_ON_CPU = 1_000, 250  # examples predicted at once; larger batches of images are slower on a CPU


@dataclass(frozen=True)
class Place:
    """Where chains are: networks, at which chains start in turn, and what the chains have measured."""

    states: Sequence[State]
    measured: Mapping[int, State] = field(default_factory=dict)


def pooled(before: Tensor, after: Tensor, share: float) -> Tensor:
    """Log densities of examples under the average of starts, with weight ``share``, and draws.

    Example:
        >>> pooled(torch.tensor([0.5]).log(), torch.tensor([0.1]).log(), 0.25).exp()
        tensor([0.2000])
    """
    return torch.logaddexp(before + math.log(share), after + math.log1p(-share))


def best_share(before: Tensor, after: Tensor) -> float:
    """The weight of the starts that predicts the examples best.

    This is stacking (Yao, Vehtari, Simpson and Gelman, 2018), with `BOTH` pseudo-examples in favour of 1/2.

    Example:
        >>> right, wrong = torch.tensor([0.9]).log(), torch.tensor([0.1]).log()
        >>> first, second = torch.cat([right, wrong] * 500), torch.cat([wrong, right] * 500)
        >>> round(best_share(first, second), 2)
        0.5
        >>> best_share(right.expand(1000), wrong.expand(1000)), best_share(right, wrong)
        (0.9, 0.6)
    """

    def total(share: float) -> float:
        return float(pooled(before, after, share).sum()) + BOTH * (math.log(share) + math.log1p(-share))

    return max(SHARES, key=total)


def best_pool(before: Densities, after: Densities) -> tuple[int, int, float]:
    """The average over draws that predicts the examples best, with its width and the weight of the starts.

    The first average is over all draws; another one must be better by `BOTH` in log likelihood.

    Returns:
        Index of the average, index of the width, weight.

    Example:
        >>> right, wrong = torch.tensor([0.9]).log(), torch.tensor([0.1]).log()
        >>> before, after = torch.full((1, 1, 100), -2.3), torch.stack([wrong.expand(100), right.expand(100)])[None]
        >>> best_pool(Densities(before, torch.zeros(1), (1.0,)), Densities(after, torch.zeros(1), (1.0,)))
        (1, 0, 0.05)
    """
    found = []
    for part in range(after.values.shape[1]):
        for index in range(len(after.widths)):
            starts, draws = before.values[index, 0], after.values[index, part]
            share = best_share(starts, draws)
            total = float(pooled(starts, draws, share).sum()) - BOTH * bool(part)
            if index != after.one:
                plain = pooled(before.values[after.one, 0], after.values[after.one, part], share)
                total -= after.unlikely(index, pooled(starts, draws, share) - plain)
            found.append((total, part, index, share))
    _, part, index, share = max(found, key=lambda one: one[0])
    return part, index, share


@dataclass(frozen=True)
class Rung:
    """The score of a temperature.

    Attributes:
        temperature: of the draws.
        nll: mean NLL of held-out examples under starts and draws together.
        difference: of that to the starts alone; below zero is better.
        error: standard error of the difference.
        rest: the difference without the `FEW` examples that gain most.
        share: weight of the starts.
        alone: NLL under the draws alone, at width 1.
        part: index of the average over draws that predicts best.
        width: of predictions by starts and draws together: softmax temperature, or factor of the noise scale.
    """

    temperature: float
    nll: float
    difference: float
    error: float
    rest: float
    share: float
    alone: float
    part: int = 0
    width: float = 1.0

    @classmethod
    def of(
        cls, temperature: float, starts: Densities, beside: Densities, after: Densities, apart: bool = False
    ) -> Rung:
        """From log densities of examples under the starts alone, and under the starts and draws to be averaged.

        With ``apart`` each half of the examples is scored with what the other half chooses, since a choice looks
        better than it is on the examples that made it. The starts' width is chosen in the same way.
        """
        part, index, share = best_pool(beside, after)
        together = pooled(beside.values[index, 0], after.values[index, part], share)
        before = starts.values[best_width(starts), 0].clone()
        for half in (slice(0, None, 2), slice(1, None, 2)) if apart and len(before) > 1 else ():
            other = slice(1 - (half.start or 0), None, 2)
            i, w, weight = best_pool(beside.some(other), after.some(other))
            together[half] = pooled(beside.values[w, 0, half], after.values[w, i, half], weight)
            before[half] = starts.values[best_width(starts.some(other)), 0, half]
        change = before - together
        error = float(change.std() / math.sqrt(len(change))) if len(change) > 1 else math.inf
        rest = float(change.sort().values[FEW:].mean()) if len(change) > FEW else math.inf
        nll, alone = float(-together.mean()), float(-after.values[after.one, part].mean())
        return cls(temperature, nll, float(change.mean()), error, rest, share, alone, part, after.widths[index])

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Rung:
        """From stored values, of which those of other versions are left out."""
        return cls(**{each.name: stored[each.name] for each in fields(cls) if each.name in stored})

    def better(self, sure: float, without_few: bool, short: float = 0.0) -> bool:
        """Whether it is better than the starts by ``sure`` standard errors.

        Args:
            without_few: whether it must also be better without the `FEW` examples that gain most.
            short: the NLL may be higher by so much; if negative, it must be lower.
        """
        sure_enough = math.isfinite(self.error) and self.difference + sure * self.error < short
        return sure_enough and not (without_few and self.rest >= max(short, 0.0))


@dataclass(frozen=True)
class Choice:
    """How the temperature was chosen.

    Attributes:
        temperature: 0 if none helps, so that the draws are the starts.
        start_width: of predictions by the starts alone.
        calibrated_nll: of the starts alone.
        held_out: number of held-out examples.
        rungs: scores of the trials, with differences to the uncalibrated starts.
        judged: score of the run, with the difference to the calibrated starts.
        runs: scores of all runs.
    """

    temperature: float
    reason: str
    start_nll: float = math.nan
    start_width: float = 1.0
    calibrated_nll: float = math.nan
    held_out: int = 0
    rungs: tuple[Rung, ...] = field(default=())
    diverged: tuple[float, ...] = field(default=())
    seconds: float = 0.0
    judged: Rung | None = None
    runs: tuple[Rung, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def check_ladder(ladder: Any) -> tuple[float, ...]:
    """Temperatures in ascending order."""
    try:
        found = sorted({float(t) for t in ladder})
    except (TypeError, ValueError):
        raise TypeError(f"ladder = {ladder!r} must be a list of temperatures") from None
    if not found or not all(math.isfinite(t) and t > 0 for t in found):
        raise ValueError(f"ladder = {ladder!r} must hold positive temperatures, one at least")
    return tuple(found)


def of_classes(target: Target) -> bool:
    """Whether the likelihood is one of classes: its NLL is at least 0, and held-out labels must be known."""
    return target.module is not None and has_classes(target.module.likelihood)


def densities(posterior: Posterior, examples: Tensors, device: Any, counts: Sequence[int] = ()) -> Densities:
    """Log densities of held-out examples, in batches."""
    place = place_of(device, None if posterior.target is None else posterior.target.device, examples)
    size = SCORED_ON_CPU if place.type == "cpu" else SCORED
    return posterior.densities(examples, counts, batch_size=size, device=device)


def last_draws(posterior: Posterior) -> list[State]:
    """The last draw and buffers of each chain."""
    parts = {**posterior.draws, **posterior.buffers}
    assert posterior.target is not None
    place = posterior.target.device  # draws are on the CPU, but a chain runs on the device of its start
    return [{name: x[k, -1].to(place) for name, x in parts.items()} for k in range(posterior.num_chains)]


class Ladder:
    """Tries temperatures one after the other.

    Args:
        run: samples at a temperature from a place, with or without an initial optimisation; returns where it ended.
        target: what is sampled.
        starts: the trained networks, one per chain.
        networks: number of different networks, the first of ``starts``.
        held_out: examples that score.
        deadline: after which no further rung begins.
        device: where to score.
        optimises: whether chains begin with an initial optimisation if networks were not fully trained. If False, only
            the reason says so; None if a run trains them further anyway.
        shows: whether results are shown where `logging` is not configured.
    """

    def __init__(
        self, run: Callable[[float, Place, bool], tuple[Posterior, Place]], target: Target, starts: Sequence[State],
        networks: int, held_out: Tensors, deadline: float, device: Any, optimises: bool | None = True,
        shows: bool = True,
    ) -> None:  # fmt: skip
        self.run, self.starts, self.held_out, self.device, self.optimises = run, starts, held_out, device, optimises
        self.began, self.deadline, self.shows = time.monotonic(), deadline, shows
        try:
            alike = len(starts) % networks == 0  # then the average over chains is that over networks
            self.beside = self.alone = self._scored(start_posterior(target, starts[:networks] if alike else starts))
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = [list(t.shape) for t in tensors_of(held_out)]
            raise ValueError(
                f"held_out of shapes {shapes} cannot be predicted by the start ({error}): pass examples as the network "
                "takes them"
            ) from error
        now, one = time.monotonic(), self.beside.values[0, 0]
        best_share(one, one)
        self.pooling = (time.monotonic() - now) * len(self.beside.widths)  # seconds to weight an average
        if not alike:  # some have more chains than others; returned alone, each counts once
            self.alone = self._scored(start_posterior(target, starts[:networks]))
        calibrated = best_width(self.alone)
        self.width = self.alone.widths[calibrated]
        self.calibrated_nll = -float(self.alone.values[calibrated, 0].mean())
        self.start_nll = -float(self.beside.values[self.beside.one, 0].mean())
        self.unit = abs(self.start_nll) if of_classes(target) else 1.0  # the NLL of a density may be 0
        self.found: dict[float, Rung] = {}
        self.places: dict[float, Place] = {}
        self.drawn: dict[float, Posterior] = {}
        self.last = self.beside  # log densities of the last trial
        self.diverged: list[float] = []
        self.undertrained = self.optimised = False  # whether the networks were; whether chains began with optimisation

    def _scored(self, posterior: Posterior) -> Densities:
        """Log densities of the held-out examples; also measures the time."""
        now = time.monotonic()
        found = densities(posterior, self.held_out, self.device)
        self.scoring = (time.monotonic() - now) / len(posterior)  # seconds per draw
        return found

    @property
    def about_starts(self) -> dict[str, Any]:
        """The scores of the starts alone."""
        return {
            "start_nll": self.start_nll,
            "start_width": self.width,
            "calibrated_nll": self.calibrated_nll,
        }

    def climb(self, temperatures: Sequence[float]) -> Choice:
        """Try temperatures from cold to hot, a colder one if the coldest was best, and one next to the best."""
        place = Place(self.starts)
        for temperature in temperatures:
            rung = self._try(temperature, place)
            if rung is not None and temperature == temperatures[0] and self._untrained(rung):
                rung = self._optimise(rung)
            if rung is None or self._harm(rung) > WORSE * self.unit:
                break
            place = self.places[temperature]
        if not self.found or self._best.temperature == temperatures[0]:
            begin = self.places[temperatures[0]] if self.optimised else Place(self.starts)
            self._try(temperatures[0] / COLDER, begin)
        if len(self.found) > 1:
            self._refine()
        return self._choice(self._best if self.found else None)

    def descend(self, temperature: float) -> Choice:
        """Try a temperature, then colder ones, until draws alone are not much worse than the starts."""
        place = Place(self.starts)
        for k in range(DESCENTS):
            if k and self._late():
                best, more = (self._best, "; max_seconds ended before a colder one") if self.found else (None, "")
                return self._choice(best, more=more)
            rung = self._try(temperature, place)
            if rung is not None and not k and self._untrained(rung):
                rung = self._optimise(rung)
                place = self.places[temperature] if self.optimised else place
            if rung is not None and self._harm(rung) <= HARM * self.unit:
                return self._choice(rung, tried_enough=False)
            temperature /= COOLER
        return self._choice(self._best if self.found else None)

    def _untrained(self, first: Rung) -> bool:
        """Whether the first draws are far better than the starts, and these are not overconfident from overfitting."""
        if self.width > 1 or self.optimises is None:
            return False
        return Rung.of(first.temperature, self.alone, self.beside, self.last).better(UNTRAINED, without_few=True)

    def _optimise(self, cold: Rung) -> Rung:
        """The rung after an initial optimisation, if that is better and the run can continue from it."""
        self.undertrained = not self.optimises
        if self.undertrained:
            return cold
        temperature = cold.temperature
        kept = self.places[temperature], self.drawn[temperature]
        tell("the network was not trained to the end: an initial optimisation comes first", self.shows)
        rung = self._try(temperature, Place(self.starts), optimise=True)
        self.optimised = rung is not None and rung.nll < cold.nll
        if rung is not None and self.optimised:
            return rung
        self.found[temperature], (self.places[temperature], self.drawn[temperature]) = cold, kept
        return cold

    def _harm(self, rung: Rung) -> float:
        """By how much draws alone are worse than the starts, or than the best draws."""
        return rung.alone - min(self.start_nll, *(found.alone for found in self.found.values()))

    def _refine(self) -> None:
        """Try a temperature between the best and the better of its neighbours, unless they are close."""
        order = sorted(self.found)
        i = order.index(self._best.temperature)
        beside = min(order[max(0, i - 1) : i] + order[i + 1 : i + 2], key=lambda t: self.found[t].nll)
        if max(beside, order[i]) < CLOSE * min(beside, order[i]):
            return
        between = math.sqrt(beside * order[i])
        below = max((t for t in order if t < between), default=None)
        self._try(between, Place(self.starts) if below is None else self.places[below])

    @property
    def _best(self) -> Rung:
        return min(self.found.values(), key=lambda rung: rung.nll)

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _try(self, temperature: float, place: Place, optimise: bool = False) -> Rung | None:
        if self.found and self._late():
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SamplingWarning)  # a rung is short by design
                posterior, end = self.run(temperature, place, optimise)
            after = self._scored(posterior)
        except OutOfTimeError:
            return None
        except DivergedError:
            after = None
        if after is None or not bool(after.values.isfinite().all()):
            self.diverged.append(temperature)
            tell(f"temperature {temperature:.3g} diverged and is left out", self.shows)
            return None
        rung = Rung.of(temperature, self.beside.plain(), self.beside.plain(), after.plain())
        self.found[temperature], self.places[temperature], self.drawn[temperature] = rung, end, posterior
        self.last = after
        tell(
            f"temperature {temperature:.3g}: held-out NLL {rung.alone:.4g}, with the start {rung.nll:.4g}, start "
            f"{self.start_nll:.4g}",
            self.shows,
        )
        return rung

    def _choice(self, best: Rung | None, tried_enough: bool = True, more: str = "") -> Choice:
        """The choice of the best rung; with ``tried_enough``, none if it does not help. ``more`` ends the reason."""
        of_start = f"of the start {self.start_nll:.4g}"
        if self.width != 1:
            of_start += f", calibrated {self.calibrated_nll:.4g}"
        known: dict[str, Any] = {
            **self.about_starts,
            "held_out": len(self.beside),
            "rungs": tuple(self.found[t] for t in sorted(self.found)),
            "diverged": tuple(sorted(self.diverged)),
            "seconds": time.monotonic() - self.began,
        }
        if best is None and not self.diverged:
            reason = "max_seconds was over before a first trial could draw: the draws are the starts"
            return Choice(0.0, reason, **known)
        if best is None:
            tried = ", ".join(f"{t:.3g}" for t in sorted(self.diverged))
            return Choice(0.0, f"every temperature of {tried} diverged: the draws are the starts{more}", **known)
        if best.difference >= 0 and tried_enough:
            reason = (
                f"at no temperature do draws help to predict {len(self.beside)} held-out examples (the best, T = "
                f"{best.temperature:.3g}, has an NLL of {best.nll:.4g}, {of_start}): the draws are the starts{more}"
            )
            return Choice(0.0, reason, **known)
        reason = f"T = {best.temperature:.3g} by {len(self.beside)} held-out examples: NLL {best.nll:.4g}, {of_start}"
        if self.optimised or self.undertrained:
            reason += "; the network was not trained to the end"
        if self.undertrained:
            reason += ", and such a run does not begin with an optimisation: train it further first"
        return Choice(best.temperature, reason + more, **known)
