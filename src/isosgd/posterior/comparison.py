"""Scores of the average over draws against those of the trained networks at which chains started."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from isosgd.metrics import accuracy, brier, ece, rmse

SURE = 2.0  # standard errors that make a difference significant
ROUNDING = 1e-6  # differences up to this are rounding errors
ALL_CHOICES = 6  # for more networks, only some ensembles are scored


@dataclass(frozen=True)
class Scores:
    """Scores of predictions; those that do not apply to the kind of y are None.

    Attributes:
        nll: mean negative log likelihood of an example.
        accuracy: of classifications.
        brier: Brier score of classifications.
        ece: expected calibration error of classifications.
        rmse: root mean square error of the mean of other predictions.
    """

    nll: float
    accuracy: float | None = None
    brier: float | None = None
    ece: float | None = None
    rmse: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The average over draws against the trained networks at which chains started, on the same examples.

    Attributes:
        start: scores of the start; of the ensemble if there are several networks.
        single: mean scores of one network, if there are several.
        average: scores of the average over all draws.
        difference: mean difference in NLL, average minus start; negative is better.
        standard_error: of ``difference``, over examples.
        examples: number of examples.
        starts: number of networks.
        draws: number of draws.
        curve: NLL of ensembles of 1, 2, ... networks.
        worth: number of networks whose ensemble has the NLL of the average, interpolated linearly in 1/k: 0 if one
            network is better, all networks if the average is at least as good as their ensemble. None with one network.
        density: whether y is continuous; its NLL then has no natural zero.
    """

    start: Scores
    single: Scores | None
    average: Scores
    difference: float
    standard_error: float
    examples: int
    starts: int
    draws: int
    curve: tuple[float, ...] = ()
    worth: float | None = None
    density: bool = False

    @property
    def ratio(self) -> float:
        """NLL of the average over that of the start, or ``exp(difference)`` for a density; below 1 is better."""
        if self.density:
            return math.exp(min(self.difference, 700.0))
        return self.average.nll / self.start.nll if self.start.nll > 0 else math.inf if self.average.nll > 0 else 1.0

    @property
    def helps(self) -> bool:
        """Whether the NLL of the average is lower by two standard errors."""
        return self.difference < -SURE * self.standard_error - ROUNDING

    def as_dict(self) -> dict[str, Any]:
        """All values, as JSON can hold them."""
        return {**asdict(self), "curve": list(self.curve), "ratio": self.ratio, "helps": self.helps}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of a table of all scores."""
        rows = {f"ensemble of {self.starts}" if self.starts > 1 else "start": self.start}
        if self.single is not None:
            rows = {"one of the starts": self.single, **rows}
        rows["average of draws"] = self.average
        names = [name for name in asdict(self.average) if getattr(self.average, name) is not None]
        return ["", *(_HEADS[name] for name in names)], [
            [label, *(_cell(name, getattr(scores, name)) for name in names)] for label, scores in rows.items()
        ]

    def summary(self) -> str:
        """The difference, its significance, and what the average is worth."""
        worse = self.difference > SURE * self.standard_error + ROUNDING
        change = "better" if self.helps else "worse" if worse else "no difference"
        text = (
            f"NLL {self.difference:+.4f} +- {self.standard_error:.4f} an example (ratio {self.ratio:.3f}): {change} "
            f"in the mean of {self.examples:,} examples, {self.draws:,} draw{'s' if self.draws != 1 else ''}"
        )
        if self.worth is None:
            return text
        least = "at least " if self.average.nll <= self.curve[-1] else ""
        return f"{text}\nworth {least}{self.worth:.1f} of the {self.starts} networks"

    def __str__(self) -> str:
        head, rows = self.table()
        width = max(len(row[0]) for row in rows)
        lines = [f"{label:<{width}}" + "".join(f"{cell:>10}" for cell in cells) for label, *cells in (head, *rows)]
        return "\n".join([*lines, self.summary()])


_HEADS = {"nll": "NLL", "accuracy": "accuracy", "brier": "Brier", "ece": "ECE", "rmse": "RMSE"}


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"


def compare(starts: Tensor, average: Tensor, predicted: Sequence[Tensor] | None, y: Any, classes: bool,
            draws: int) -> Comparison:  # fmt: skip
    """Compare by log likelihoods and predictions.

    Args:
        starts: log likelihood of each example under each network, ``[starts, n]``.
        average: log predictive density of each example, ``[n]``.
        predicted: predictions of each network and, last, of the average over draws; None if there are none.
        y: what was to be predicted.
        classes: whether predictions are probabilities of classes.
        draws: number of draws.
    """
    starts, average = starts.detach().double().cpu(), average.detach().double().cpu()
    count = len(starts)
    together = _log_mean(starts)
    change = together - average
    every = [_scores(x, None if predicted is None else predicted[i], y, classes) for i, x in enumerate(starts)]
    mean = None if predicted is None else torch.stack(list(predicted[:-1])).mean(0)
    found = _scores(average, None if predicted is None else predicted[-1], y, classes)
    curve = tuple(ensemble_curve(starts)) if count > 1 else ()
    return Comparison(
        start=_scores(together, mean, y, classes),
        single=_mean_scores(every) if count > 1 else None,
        average=found,
        difference=float(change.mean()),
        standard_error=float(change.std() / math.sqrt(len(change))) if len(change) > 1 else math.inf,
        examples=len(change),
        starts=count,
        draws=draws,
        curve=curve,
        worth=worth(found.nll, curve) if curve else None,
        density=not classes,
    )


def ensemble_curve(log_likelihoods: Tensor) -> list[float]:
    """NLL of ensembles of 1, 2, ... networks from ``[networks, n]``, averaged over choices of the networks.

    All choices of up to six networks; for more networks, neighbours in a ring.
    """
    count, curve = len(log_likelihoods), []
    for k in range(1, count + 1):
        if count <= ALL_CHOICES:
            choices = [list(some) for some in itertools.combinations(range(count), k)]
        else:
            choices = [[(first + i) % count for i in range(k)] for first in range(count if k < count else 1)]
        curve.append(statistics.fmean(float(-_log_mean(log_likelihoods[some]).mean()) for some in choices))
    return curve


def worth(nll: float, curve: Sequence[float]) -> float:
    """The number of networks whose ensemble has this NLL, given the NLL of ensembles of 1, 2, ... networks.

    Linear in 1 / k between them: 0 if worse than one network, the largest k if at least as good as all.

    Example:
        >>> worth(0.08, [0.1, 0.08, 0.07]), worth(0.2, [0.1, 0.08]), worth(0.01, [0.1, 0.08])
        (2.0, 0.0, 2.0)
    """
    if not nll <= curve[0]:
        return 0.0
    for k, (a, b) in enumerate(itertools.pairwise(curve), 1):
        if nll > b:
            share = (a - nll) / (a - b)
            return 1 / ((1 - share) / k + share / (k + 1))
    return float(len(curve))


def _log_mean(log_likelihoods: Tensor) -> Tensor:
    return log_likelihoods.logsumexp(0) - math.log(len(log_likelihoods))


def _scores(log_likelihood: Tensor, predicted: Tensor | None, y: Any, classes: bool) -> Scores:
    nll = float(-log_likelihood.mean())
    if predicted is None or not isinstance(y, Tensor):
        return Scores(nll)
    if not classes:
        fits = predicted.numel() == y.numel() and bool(predicted.isfinite().all())
        return Scores(nll, rmse=float(rmse(predicted.reshape(-1), y.reshape(-1)))) if fits else Scores(nll)
    if predicted.numel() == y.numel():  # binary: probabilities of both classes
        yes = predicted.reshape(-1).double()
        probabilities = torch.stack([1 - yes, yes], 1)
    else:
        probabilities = predicted.movedim(1, -1).flatten(0, -2)
    if not bool(probabilities.isfinite().all()):
        return Scores(nll)
    labels = y.reshape(-1).long()
    return Scores(
        nll,
        accuracy=float(accuracy(probabilities, labels)),
        brier=float(brier(probabilities, labels)),
        ece=float(ece(probabilities, labels)),
    )


def _mean_scores(every: Sequence[Scores]) -> Scores:
    found: dict[str, Any] = {}
    for name in asdict(every[0]):
        values = [getattr(one, name) for one in every]
        found[name] = None if None in values else statistics.fmean(values)
    return Scores(**found)
