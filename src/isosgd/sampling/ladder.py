"""A ladder of temperatures: short runs from trained networks, scored on examples that these were not trained on.

Each run is hotter than the last and goes on from where that one ended, until it gets clearly worse; then one beside the
best. Where no temperature is better than the starts by a standard error, the choice is none.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import Tensors
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.posterior import Posterior
from isosgd.posterior.comparison import STARTS, stacked
from isosgd.progress import LOGGER
from isosgd.target import Target
from isosgd.target.batches import tensors_of
from isosgd.target.likelihoods import Bernoulli, Categorical, Tokens

COLDER = 10.0  # a rung so much colder than the coldest is tried where that one was best
CLOSE = 5.0  # times a temperature: nothing is tried in between
SURE = 1.0  # standard errors by which the average must be better than the starts
WORSE = 0.1  # of the start's NLL, by which a rung must be worse for hotter ones not to be tried
SCORED = 1_000  # examples that are predicted at once
SCALES = 33  # of the noise, tried at once

State = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where chains are: networks, one for each chain in turn, and what was measured on the way, if it can be used."""

    states: Sequence[State]
    measured: Mapping[int, State] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """A temperature that was tried: its mean NLL on held-out data, and the difference to the starts' with its error."""

    temperature: float
    nll: float
    difference: float
    error: float

    @classmethod
    def of(cls, temperature: float, before: Tensor, after: Tensor) -> Rung:
        """From log densities of examples under the starts and under the draws."""
        difference = before - after
        error = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else math.inf
        return cls(temperature, float(-after.mean()), float(difference.mean()), error)

    def better(self, sure: float = SURE) -> bool:
        """Than the starts, by so many standard errors."""
        return self.difference + sure * self.error < 0


@dataclass(frozen=True)
class Choice:
    """How a temperature was chosen; ``temperature`` is 0 where none helps, so that the draws are the starts."""

    temperature: float
    reason: str
    start_nll: float = math.nan
    held_out: int = 0
    rungs: tuple[Rung, ...] = field(default=())
    diverged: tuple[float, ...] = field(default=())
    seconds: float = 0.0

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
        raise ValueError(f"ladder = {ladder!r} must have one positive temperature at least")
    return tuple(found)


def has_classes(target: Target) -> bool:
    """Whether the likelihood is one of classes, so that its NLL has a zero and labels must be known ones."""
    likelihood = None if target.module is None else target.module.likelihood
    return isinstance(likelihood, Categorical | Bernoulli | Tokens)


def log_predictive(posterior: Posterior, examples: Tensors, device: Any) -> Tensor:
    """Log density of each held-out example under the average, in float64 on the CPU."""
    return posterior.log_predictive(examples, batch_size=SCORED, device=device).double().cpu()


def with_noise_scales(target: Target, starts: Sequence[State], examples: Tensors, device: Any) -> list[State]:
    """Starts with the scales of the noise that a network has none of: those under which it predicts best.

    Otherwise a regression's start would be scored under an arbitrary scale, and anything would be better.
    """
    return [_with_scales(target, start, examples, device) for start in starts]


def _with_scales(target: Target, start: State, examples: Tensors, device: Any) -> State:
    for name in target.noise_scales():
        if name in start:
            continue
        spread, here = 1e4, 1.0  # a grid over eight decades, then ever finer ones around the best
        for _ in range(4):
            scales = here * torch.logspace(-math.log10(spread), math.log10(spread), SCALES, dtype=torch.float64)
            one = start_posterior(target, [start])
            shape = one.draws[name].shape[2:]
            draws = {key: x.expand(1, SCALES, *x.shape[2:]) for key, x in one.draws.items()}
            draws[name] = scales.to(one.draws[name]).view(1, SCALES, *[1] * len(shape)).expand(1, SCALES, *shape)
            buffers = {key: x.expand(1, SCALES, *x.shape[2:]) for key, x in one.buffers.items()}
            grid = Posterior(target, draws, {}, buffers=buffers)
            likely = grid.log_likelihood(examples, batch_size=SCORED, device=device).double().sum((0, 2))
            here, spread = float(scales[int(likely.nan_to_num(-math.inf).argmax())]), spread ** (4 / SCALES)
        start = {**start, name: torch.full(shape, here, dtype=one.draws[name].dtype, device=target.device)}
    return start


def start_posterior(target: Target, starts: Sequence[State]) -> Posterior:
    """The starts as draws, one for each chain."""
    draws, buffers = stacked(starts, target, {})
    return Posterior(target, draws, {"method": STARTS, "temperature": 0.0}, buffers=buffers)


def last_draws(posterior: Posterior) -> list[State]:
    """Where each chain ended, with its buffers."""
    parts = {**posterior.draws, **posterior.buffers}
    assert posterior.target is not None
    place = posterior.target.device  # draws are on the CPU, and a chain runs where its start is
    return [{name: x[k, -1].to(place) for name, x in parts.items()} for k in range(posterior.num_chains)]


class Ladder:
    """Temperatures tried one after the other.

    Args:
        run: samples at a temperature from a place, and says where it ended.
        target: what is sampled.
        starts: the trained networks.
        held_out: examples to score by.
        deadline: after which no other rung is begun.
        device: where to score.
    """

    def __init__(
        self, run: Callable[[float, Place], tuple[Posterior, Place]], target: Target, starts: Sequence[State],
        held_out: Tensors, deadline: float, device: Any,
    ) -> None:  # fmt: skip
        self.run, self.starts, self.held_out, self.device = run, starts, held_out, device
        self.began, self.deadline = time.monotonic(), deadline
        try:
            self.before = log_predictive(start_posterior(target, starts), held_out, device)
        except (RuntimeError, IndexError) as error:
            shapes = [list(t.shape) for t in tensors_of(held_out)]
            raise ValueError(
                f"held_out of shapes {shapes} cannot be predicted by the start ({error}): pass examples as the network "
                "takes them"
            ) from error
        self.unit = abs(float(self.before.mean())) if has_classes(target) else 1.0  # a density has no zero of its NLL
        self.found: dict[float, tuple[Rung, Tensor]] = {}
        self.places: dict[float, Place] = {}
        self.drawn: dict[float, Posterior] = {}
        self.diverged: list[float] = []

    def climb(self, temperatures: Sequence[float]) -> Choice:
        """Try temperatures from cold to hot, colder ones if the coldest was best, and one beside the best."""
        place = Place(self.starts)
        for temperature in temperatures:
            rung = self._try(temperature, place)
            if rung is None or rung.nll - min(self._best.nll, -float(self.before.mean())) > WORSE * self.unit:
                break
            place = self.places[temperature]
        if not self.found or self._best.temperature == temperatures[0]:
            self._try(temperatures[0] / COLDER, Place(self.starts))
        if len(self.found) > 1:
            self._refine()
        return self._choice()

    def _refine(self) -> None:
        """Try a temperature between the best one and the better of its neighbours, unless they are close."""
        order = sorted(self.found)
        i = order.index(self._best.temperature)
        beside = min(order[max(0, i - 1) : i] + order[i + 1 : i + 2], key=lambda t: self.found[t][0].nll)
        if max(beside, order[i]) < CLOSE * min(beside, order[i]):
            return
        between = math.sqrt(beside * order[i])
        below = max((t for t in order if t < between), default=None)
        self._try(between, Place(self.starts) if below is None else self.places[below])

    @property
    def _best(self) -> Rung:
        return min((rung for rung, _ in self.found.values()), key=lambda rung: rung.nll)

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _try(self, temperature: float, place: Place) -> Rung | None:
        if self.found and self._late():
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SamplingWarning)  # a rung is short, and nobody looks at its draws
                posterior, end = self.run(temperature, place)
            after = log_predictive(posterior, self.held_out, self.device)
        except DivergedError:
            after = torch.full_like(self.before, -math.inf)
        if not bool(after.isfinite().all()):
            self.diverged.append(temperature)
            LOGGER.info("temperature %g diverged and is left out", temperature)
            return None
        rung = Rung.of(temperature, self.before, after)
        self.found[temperature], self.places[temperature], self.drawn[temperature] = (rung, after), end, posterior
        LOGGER.info("temperature %g: held-out NLL %.4g, start %.4g", temperature, rung.nll, float(-self.before.mean()))
        return rung

    def _choice(self) -> Choice:
        known: dict[str, Any] = {
            "start_nll": float(-self.before.mean()),
            "held_out": len(self.before),
            "rungs": tuple(self.found[t][0] for t in sorted(self.found)),
            "diverged": tuple(sorted(self.diverged)),
            "seconds": time.monotonic() - self.began,
        }
        if not self.found:
            tried = sorted(self.diverged)
            return Choice(0.0, f"every temperature of {tried} diverged: the draws are the starts", **known)
        best = self._best
        sure = [rung for rung, _ in self.found.values() if rung.better()]
        if not sure:
            reason = (
                f"no temperature is better than the start on {len(self.before)} held-out examples by a standard error "
                f"(the best, T = {best.temperature:.3g}, by {-best.difference:.3g} ± {best.error:.2g}): the draws are "
                "the starts"
            )
            return Choice(0.0, reason, **known)
        chosen = min(sure, key=lambda rung: rung.nll)
        reason = (
            f"T = {chosen.temperature:.3g} by {len(self.before)} held-out examples: NLL {chosen.nll:.4g}, of the start "
            f"{known['start_nll']:.4g}"
        )
        return Choice(chosen.temperature, reason, **known)
