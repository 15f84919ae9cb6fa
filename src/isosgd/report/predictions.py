"""Figures and scores of predictions on held-out rows, for regressions and classifications."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isosgd.metrics import (
    accuracy,
    auroc,
    brier,
    categorical_mnll,
    ece,
    fpr95,
    mixture_cdf,
    mixture_coverage,
    mixture_crps,
    mixture_interval,
    mixture_mnll,
    predictive_entropy,
    rmse,
)
from isosgd.posterior import Posterior
from isosgd.posterior.calibration import sharpened
from isosgd.posterior.draws import evenly
from isosgd.report.page import Figure, Subject, Tile
from isosgd.report.plot import Array, Plot, limits, number

SHOWN = 250  # points in a scatter plot
GRID = 321
LEVELS = np.linspace(0.05, 0.95, 19)
MOST_ROWS = 2_000  # rows to predict
MOST_SHOWN = 10  # classes in a confusion matrix
BINS = 24


def some(rows: Any) -> Any:
    """At most `MOST_ROWS` evenly spaced rows of a tuple of tensors; None for anything else."""
    if not isinstance(rows, tuple | list) or not all(isinstance(x, Tensor) and x.ndim for x in rows) or not rows:
        return None
    if len(rows[0]) <= MOST_ROWS:
        return tuple(rows)
    at = torch.from_numpy(evenly(len(rows[0]), MOST_ROWS))
    return tuple(x[at.to(x.device)] for x in rows)


def evaluate(
    posterior: Posterior, rows: Any, subject: Subject, outside: Any = None
) -> Regression | Classification | None:
    """Predictions of rows with known targets, and of out-of-distribution inputs of a classification.

    None unless predictions are class probabilities with one label per row, or a regression of one number with normal or
    Student-t noise.
    """
    x, y = rows[0] if len(rows) == 2 else tuple(rows[:-1]), rows[-1].cpu()
    found = posterior.predict(x, return_draws=True)
    if found.draws is None:
        return None
    draws = found.draws.cpu()
    if found.expected_entropy is not None and y.ndim == 1 and (each := _all_classes(draws)) is not None:
        outer = None if outside is None else _all_classes(posterior.predict(outside).mean.cpu()[None, None])
        scale = subject.softmax_temperature
        beyond = None if outer is None else sharpened(outer[0, 0].double(), scale)
        return Classification(each, y.long(), beyond, scale)
    if found.draw_variances is None or found.df is None:
        return None
    means, variances = draws.double(), found.draw_variances.expand_as(found.draws).cpu().double()
    if means.ndim == 4 and means.shape[-1] == 1:
        means, variances = means.squeeze(-1), variances.squeeze(-1)
    if means.ndim != 3 or y.numel() != means.shape[-1]:
        return None
    scale, mean = subject.y_scale, subject.y_mean
    outcomes = posterior.simulate(x).cpu().double().reshape(-1, y.numel()) if found.df < math.inf else None
    return Regression(
        means * scale + mean, variances * scale**2, y.double().flatten() * scale + mean, found.df,
        None if outcomes is None else outcomes * scale + mean,
    )  # fmt: skip


def _all_classes(draws: Tensor) -> Tensor | None:
    """Probabilities of all classes ``[chains, draws, n, classes]``; a binary output gets the other class."""
    if draws.ndim == 4 and draws.shape[-1] > 1:
        return draws
    if draws.ndim == 4:
        draws = draws.squeeze(-1)
    return torch.stack([1 - draws, draws], -1) if draws.ndim == 3 else None


# -- regression -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression:
    """Predictions of rows with known targets, in the units of the data."""

    means: Tensor  # of each draw, [chains, draws, n]
    variances: Tensor  # of the noise, [chains, draws, n]
    y: Tensor  # observed, [n]
    df: float = math.inf  # degrees of freedom of the noise
    outcomes: Tensor | None = None  # simulated, if the CRPS has no closed form, [m, n]

    @property
    def traces(self) -> Tensor:
        """Values for convergence diagnostics."""
        return self.means

    def crps(self) -> float:
        """Continuous ranked probability score."""
        if self.outcomes is not None:
            x, count = self.outcomes.sort(0).values, len(self.outcomes)
            rank = torch.arange(1.0 - count, count, 2.0, dtype=x.dtype).unsqueeze(-1)  # of ordered pairs
            return float(((x - self.y).abs().mean(0) - (rank * x).sum(0) / count**2).mean())
        mean, variance = self.means.flatten(0, 1), self.variances.flatten(0, 1)
        thin = max(1, len(mean) // 100)  # all pairs of draws are compared, so a hundred suffice
        return float(mixture_crps(mean[::thin], variance[::thin], self.y))

    def scores(self) -> dict[str, float]:
        """Scores of the predictions."""
        mean, variance = self.means.flatten(0, 1), self.variances.flatten(0, 1)
        return {
            "rmse": float(rmse(mean.mean(0), self.y)),
            "mnll": float(mixture_mnll(mean, variance, self.y, df=self.df)),
            "coverage95": float(mixture_coverage(mean, variance, self.y, df=self.df)),
        }

    def tiles(self) -> list[Tile]:
        """Scores for the top of the page."""
        found, plain = self.scores(), float(self.y.std(correction=0))
        return [
            Tile("RMSE", number(found["rmse"]), f"{number(plain)} for predicting the mean"),
            Tile("in 95% intervals", f"{100 * found['coverage95']:.1f}%", f"of {len(self.y):,} rows"),
            Tile("MNLL", number(found["mnll"]), "nats per row, lower is better"),
            Tile("CRPS", number(self.crps())),
        ]

    def figures(self, subject: Subject) -> list[Figure]:
        """Predictions against truth, residuals, and coverage of intervals."""
        mean, variance = self.means.flatten(0, 1), self.variances.flatten(0, 1)
        low, high = mixture_interval(mean, variance, df=self.df)
        below = mixture_cdf(mean, variance, self.y, df=self.df).numpy()
        middle, y = mean.mean(0).numpy(), self.y.numpy()
        sd = (variance.mean(0) + mean.var(0, correction=0)).sqrt().numpy()
        shown = evenly(len(y), SHOWN)
        return [
            _against_truth(subject, middle[shown], y[shown], low.numpy()[shown], high.numpy()[shown]),
            _coverage(below),
            _residuals(subject, middle[shown], (y[shown] - middle[shown]) / sd[shown]),
        ]


def bands(posterior: Posterior, data: Any, subject: Subject) -> Figure | None:
    """Predictions over a single input; None if there are several."""
    x, y = data[0], data[-1]
    if len(data) != 2 or not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() != len(x):
        return None
    low, high = limits(x.cpu().numpy(), margin=0.15)
    grid = torch.linspace(low, high, GRID, dtype=x.dtype, device=x.device).reshape(-1, *x.shape[1:])
    found = posterior.predict(grid)
    if found.mean.numel() != GRID:
        return None
    shown = evenly(len(x), SHOWN)
    at, place = (_flat(v) * subject.x_scale + subject.x_mean for v in (grid, x))
    middle, truth = (_flat(v) * subject.y_scale + subject.y_mean for v in (found.mean, y))
    whole, model = (2 * _flat(v) * subject.y_scale for v in (found.std, found.model_variance.double().sqrt()))
    name = subject.inputs[0] if subject.inputs else "x"
    ends = limits(middle - whole, middle + whole, truth)
    plot = Plot((float(at[0]), float(at[-1])), ends, xlabel=name, ylabel=subject.target)
    if found.noise_variance is not None:
        plot.band(at, middle - whole, middle + whole, "a", label="with noise, ± 2 sd", style="faint")
    plot.band(at, middle - model, middle + model, "a", label="of the mean, ± 2 sd")
    plot.dots(place[shown], truth[shown], "grey", label="data")
    plot.line(at, middle, "a", label="predicted mean")
    return Figure(
        f"Prediction of {subject.target} over {name}",
        plot.svg(f"Predicted mean of {subject.target} over {name}, with bands of two standard deviations."),
        "The inner band is the uncertainty of the mean, which more data would reduce; the outer one adds the noise of "
        "single observations. Away from the data the inner band should widen.",
    )


def _against_truth(subject: Subject, middle: Any, y: Any, low: Any, high: Any) -> Figure:
    ends = limits(y, middle)
    plot = Plot(ends, limits(low, high, y), xlabel=f"observed {subject.target}", ylabel="predicted")
    inside = (low <= y) & (y <= high)
    plot.line(ends, ends, "grey", style="dashed", label="prediction = truth")
    plot.rods(y[inside], low[inside], high[inside], "a", label="95% interval")
    plot.rods(y[~inside], low[~inside], high[~inside], "b", label="misses the truth")
    plot.dots(y[inside], middle[inside], "a")
    plot.dots(y[~inside], middle[~inside], "b")
    share = f"{int(inside.sum())} of {len(y)}"
    return Figure(
        "Predicted and observed",
        plot.svg(f"Predictions with 95% intervals against observations; {share} intervals hold the truth."),
        f"{share} of the intervals shown cross the dashed line, where prediction and truth are equal.",
    )


def _coverage(below: Any) -> Figure:
    tails = (1 - LEVELS) / 2
    share = np.array([np.mean((below >= t) & (below <= 1 - t)) for t in tails])
    error = 2 * np.sqrt(LEVELS * (1 - LEVELS) / len(below))
    plot = Plot((0, 1), (0, 1), xlabel="probability that the interval claims", ylabel="share of rows inside")
    plot.band(LEVELS, np.clip(LEVELS - error, 0, 1), np.clip(LEVELS + error, 0, 1), "grey", label="± 2 standard errors")
    plot.line([0, 1], [0, 1], "grey", style="dashed")
    plot.line(LEVELS, share, "a", label="measured")
    plot.dots(LEVELS, share, "a")
    return Figure(
        "Coverage of intervals",
        plot.svg("Share of rows inside central intervals against their probability."),
        "Above the diagonal intervals are too wide, below it too narrow. The grey band is what chance allows.",
    )


def _residuals(subject: Subject, middle: Any, residual: Any) -> Figure:
    top = max(3.2, float(np.abs(residual).max()) * 1.06)
    plot = Plot(limits(middle), (-top, top), xlabel=f"predicted {subject.target}", ylabel="residual / predicted sd")
    ends = limits(middle)
    plot.band(ends, (-2, -2), (2, 2), "grey", label="± 2")
    plot.line(ends, (0, 0), "grey", style="dashed")
    plot.dots(middle, residual, "a")
    return Figure(
        "Residuals",
        plot.svg("Residuals in units of the predicted standard deviation against the prediction."),
        "A bend or a funnel shows what the model misses; about one in twenty lies beyond ± 2.",
    )


def _flat(x: Tensor) -> Array:
    flat: Array = x.double().cpu().flatten().numpy()
    return flat


# -- classification ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classification:
    """Predictions of rows with a known class."""

    draws: Tensor  # of each draw, [chains, draws, n, classes]
    y: Tensor  # classes [n]
    outside: Tensor | None = None  # mean probabilities [m, classes] of out-of-distribution inputs
    softmax_temperature: float = 1.0  # of averages

    @property
    def mean(self) -> Tensor:
        """Probabilities averaged over draws, ``[n, classes]``."""
        return sharpened(self.draws.double().flatten(0, 1).mean(0), self.softmax_temperature)

    @property
    def traces(self) -> Tensor:
        """Values for convergence diagnostics: the probability of each row's own class."""
        index = self.y.expand(*self.draws.shape[:2], -1).unsqueeze(-1)
        return self.draws.gather(-1, index).squeeze(-1).double()

    def scores(self) -> dict[str, float]:
        """Scores of the predictions."""
        each = {"accuracy": accuracy, "mnll": categorical_mnll, "ece": ece, "brier": brier}
        return {name: float(score(self.mean, self.y)) for name, score in each.items()}

    def tiles(self) -> list[Tile]:
        """Scores for the top of the page."""
        scores, most = self.scores(), float(self.y.bincount().max()) / len(self.y)
        found = [
            Tile("accuracy", f"{100 * scores['accuracy']:.1f}%", f"{100 * most:.1f}% for the most frequent class"),
            Tile("MNLL", number(scores["mnll"]), "nats per row, lower is better"),
            Tile("calibration error", number(scores["ece"]), f"ECE over {len(self.y):,} rows"),
        ]
        if self.outside is None:
            return [*found, Tile("Brier score", number(scores["brier"]))]
        inner, outer = predictive_entropy(self.mean), predictive_entropy(self.outside)
        note = f"FPR95 {100 * float(fpr95(inner, outer)):.0f}%"
        return [*found, Tile("AUROC, out of distribution", number(float(auroc(inner, outer))), note)]

    def figures(self, subject: Subject) -> list[Figure]:
        """Reliability, confusion matrix, and entropies."""
        mean, y = self.mean.numpy(), self.y.numpy()
        entropy = predictive_entropy(self.mean).numpy()
        right = mean.argmax(1) == y
        found = [_reliability(mean, y), _confusion(mean, y, subject)]
        most = math.log(mean.shape[1])
        found.append(
            _histograms(
                "Entropy of correct and wrong predictions",
                {f"correct ({right.sum():,})": entropy[right], f"wrong ({(~right).sum():,})": entropy[~right]},
                most,
                "Errors should be where the entropy is high.",
            )
        )
        if self.outside is not None:
            outer = predictive_entropy(self.outside).numpy()
            found.append(
                _histograms(
                    "Entropy in and out of distribution",
                    {f"held-out rows ({len(entropy):,})": entropy, f"{subject.outside} ({len(outer):,})": outer},
                    most,
                    "Inputs unlike the training data should have a higher entropy.",
                )
            )
        return found


def _reliability(mean: Any, y: Any) -> Figure:
    """Reliability in bins with equal numbers of rows."""
    sure, right = mean.max(1), (mean.argmax(1) == y).astype(float)
    count = int(np.clip(len(y) // 20, 1, 10))
    parts = [part for part in np.array_split(np.argsort(sure), count) if len(part)]
    confidence, share = (np.array([v[part].mean() for part in parts]) for v in (sure, right))
    # One pseudo-row of each kind keeps the error of a perfect bin above zero.
    error = np.array([
        2 * math.sqrt((k := right[p].sum() + 1) * (len(p) + 2 - k)) / (len(p) + 2) ** 1.5 for p in parts
    ])  # fmt: skip
    least = min(float(confidence.min()), float((share - error).min())) - 0.05
    ends = (max(0.0, least), 1.0)
    plot = Plot(ends, ends, xlabel="confidence", ylabel="share correct")
    plot.line(ends, ends, "grey", style="dashed", label="perfect")
    plot.rods(confidence, np.clip(share - error, *ends), np.clip(share + error, *ends), "a")
    plot.line(confidence, share, "a", label="measured, ± 2 standard errors")
    plot.dots(confidence, share, "a", radius=3.4)
    return Figure(
        "Reliability",
        plot.svg("Share of correct predictions against confidence."),
        "On the dashed line: of predictions made with 80% confidence, 80% are correct. Below it: overconfident.",
    )


def _confusion(mean: Any, y: Any, subject: Subject) -> Figure:
    guess, count = mean.argmax(1), mean.shape[1]
    kept = np.argsort(-np.bincount(y, minlength=count), kind="stable")[:MOST_SHOWN]
    kept = np.sort(kept)
    names = [subject.classes[k] if k < len(subject.classes) else str(k) for k in kept]
    short = [name if len(name) <= 9 else name[:8] + "…" for name in names]
    size = len(kept)
    ticks = [(float(k), name) for k, name in enumerate(short)]
    plot = Plot(
        (-0.5, size - 0.5), (-0.5, size - 0.5), xlabel="predicted", ylabel="true", xticks=ticks,
        yticks=[(size - 1 - at, name) for at, name in ticks], grid=False, height=330,
    )  # fmt: skip
    for row, true in enumerate(kept):
        total = max(int((y == true).sum()), 1)
        for column, predicted in enumerate(kept):
            cases = int(((y == true) & (guess == predicted)).sum())
            plot.cell(column, size - 1 - row, cases / total, f"{cases:,}" if cases else "")
    less = "" if size == count else f" The {size} most frequent of {count} classes are shown."
    return Figure(
        "Confusion of classes",
        plot.svg("Table of true and predicted classes."),
        f"Rows are true classes, columns predicted ones; the diagonal is correct.{less}",
    )


def _histograms(title: str, groups: dict[str, Any], most: float, caption: str) -> Figure:
    edges = np.linspace(0.0, most, BINS + 1)
    shares = {name: np.histogram(v, edges)[0] / max(len(v), 1) for name, v in groups.items()}
    top = max(float(share.max()) for share in shares.values()) * 1.06
    plot = Plot((0, most), (0, top), xlabel="entropy of the prediction (nats)", ylabel="share of each group")
    for (name, share), colour in zip(shares.items(), "ab", strict=False):
        plot.bars(edges, share, colour, label=name, style="overlaid")
    return Figure(title, plot.svg(f"{title}: histograms of entropy for {' and '.join(groups)}."), caption)
