"""How good the predictions of a regression are: figures and scores on held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isosgd.metrics import mixture_cdf, mixture_coverage, mixture_crps, mixture_interval, mixture_mnll, rmse
from isosgd.predictive import Posterior
from isosgd.report.numbers import limits, number
from isosgd.report.subject import Figure, Subject, Tile
from isosgd.report.svg import Plot

SHOWN = 250  # points of a scatter plot
GRID = 321
LEVELS = np.linspace(0.05, 0.95, 19)


@dataclass(frozen=True)
class Regression:
    """Predictions of rows whose targets are known, in the units of the data.

    Attributes:
        means: of each draw, ``[chains, draws, n]``.
        variances: of the noise, ``[chains, draws, n]``.
        y: what was observed, ``[n]``.
    """

    means: Tensor
    variances: Tensor
    y: Tensor

    @property
    def traces(self) -> Tensor:
        """What to follow over draws."""
        return self.means

    def tiles(self) -> list[Tile]:
        """Scores."""
        mean, variance = self.means.flatten(0, 1), self.variances.flatten(0, 1)
        error, plain = float(rmse(mean.mean(0), self.y)), float(self.y.std(correction=0))
        covered = float(mixture_coverage(mean, variance, self.y))
        return [
            Tile("RMSE", number(error), f"{number(plain)} if the mean were predicted"),
            Tile("in 95% intervals", f"{100 * covered:.1f}%", f"of {len(self.y):,} rows"),
            Tile("MNLL", number(float(mixture_mnll(mean, variance, self.y))), "nats a row, lower is better"),
            Tile("CRPS", number(float(mixture_crps(mean[:: _thin(mean)], variance[:: _thin(mean)], self.y)))),
        ]

    def figures(self, subject: Subject) -> list[Figure]:
        """Predictions against truth, residuals, coverage of intervals, and where in its prediction each target fell."""
        mean, variance = self.means.flatten(0, 1), self.variances.flatten(0, 1)
        low, high = mixture_interval(mean, variance)
        below = mixture_cdf(mean, variance, self.y).numpy()
        middle, y = mean.mean(0).numpy(), self.y.numpy()
        sd = (variance.mean(0) + mean.var(0, correction=0)).sqrt().numpy()
        shown = np.unique(np.linspace(0, len(y) - 1, min(SHOWN, len(y))).round().astype(int))
        return [
            _against_truth(subject, middle[shown], y[shown], low.numpy()[shown], high.numpy()[shown]),
            _coverage(below),
            _residuals(subject, middle[shown], (y[shown] - middle[shown]) / sd[shown]),
            _places(below),
        ]


def evaluate(posterior: Posterior, data: Any, subject: Subject) -> Regression | None:
    """Predict held-out rows; None where the predictions are not those of a normal regression of one number."""
    x, y = data[0] if len(data) == 2 else tuple(data[:-1]), data[-1]
    found = posterior.predict(x, return_draws=True)
    if found.draws is None or found.draw_variances is None or not found.normal:
        return None
    y = y.cpu()
    means, variances = found.draws.cpu(), found.draw_variances.expand_as(found.draws).cpu()
    if means.ndim == 4 and means.shape[-1] == 1:
        means, variances = means.squeeze(-1), variances.squeeze(-1)
    if means.ndim != 3 or y.numel() != means.shape[-1]:
        return None
    scaled = means.double() * subject.y_scale + subject.y_mean
    return Regression(
        scaled, variances.double() * subject.y_scale**2, y.double().flatten() * subject.y_scale + subject.y_mean
    )


def bands(posterior: Posterior, data: Any, subject: Subject, label: str) -> Figure | None:
    """Predictions over a single input; None where there are more."""
    x, y = data[0], data[-1]
    if len(data) != 2 or not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() != len(x):
        return None
    low, high = limits(x.cpu().numpy(), margin=0.15)
    grid = torch.linspace(low, high, GRID, dtype=x.dtype, device=x.device).reshape(-1, *x.shape[1:])
    found = posterior.predict(grid)
    if found.mean.numel() != GRID:
        return None
    middle = found.mean.double().cpu().flatten().numpy() * subject.y_scale + subject.y_mean
    model = 2 * found.model_variance.double().cpu().sqrt().flatten().numpy() * subject.y_scale
    at = grid.double().cpu().flatten().numpy() * subject.x_scale + subject.x_mean
    truth = y.double().cpu().flatten().numpy() * subject.y_scale + subject.y_mean
    place = x.double().cpu().flatten().numpy() * subject.x_scale + subject.x_mean
    shown = np.unique(np.linspace(0, len(truth) - 1, min(SHOWN, len(truth))).round().astype(int))
    whole = 2 * found.std.double().cpu().flatten().numpy() * subject.y_scale
    name = subject.inputs[0] if subject.inputs else "x"
    drawn = []
    for width in (940, 440):
        plot = Plot(
            (float(at[0]), float(at[-1])), limits(middle - whole, middle + whole, truth),
            xlabel=name, ylabel=subject.target, width=width, height=330,
        )  # fmt: skip
        if found.noise_variance is not None:
            plot.band(at, middle - whole, middle + whole, "a", label="with noise, ± 2 sd", style="faint")
        plot.band(at, middle - model, middle + model, "a", label="of the mean, ± 2 sd")
        plot.dots(place[shown], truth[shown], "grey", label=label)
        plot.line(at, middle, "a", label="predicted mean")
        drawn.append(
            plot.svg(f"Predicted mean of {subject.target} over {name}, with bands of two standard deviations.")
        )
    caption = (
        "The inner band is what more data would narrow; the outer one adds the noise of single observations. Where "
        "there are no data the inner band should widen."
    )
    return Figure(f"Prediction of {subject.target} over {name}", drawn[0], caption, drawn[1])


def _against_truth(subject: Subject, middle: Any, y: Any, low: Any, high: Any) -> Figure:
    ends = limits(y, middle)
    plot = Plot(ends, limits(low, high, y), xlabel=f"observed {subject.target}", ylabel="predicted")
    inside = (low <= y) & (y <= high)
    plot.line(ends, ends, "grey", style="dashed", label="prediction = truth")
    plot.rods(y[inside], low[inside], high[inside], "a", label="95% interval")
    plot.rods(y[~inside], low[~inside], high[~inside], "b", label="one that misses")
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
    plot.line(LEVELS, share, "a", label="found")
    plot.dots(LEVELS, share, "a")
    return Figure(
        "Coverage of intervals",
        plot.svg("Share of rows inside central intervals against their probability."),
        "Above the diagonal intervals are too wide, below it too narrow. Within the grey band it may be chance.",
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
        "A bend or a funnel shows what the model has missed; about one in twenty lies beyond ± 2.",
    )


def _places(below: Any) -> Figure:
    count = int(np.clip(len(below) // 12, 5, 20))
    heights, edges = np.histogram(below, bins=count, range=(0, 1))
    mean = len(below) / count
    error = 2 * math.sqrt(mean * (1 - 1 / count))
    plot = Plot(
        (0, 1), (0, max(float(heights.max()), mean + error) * 1.08), xlabel="probability predicted below the truth",
        ylabel="rows",
    )  # fmt: skip
    plot.band((0, 1), (max(mean - error, 0),) * 2, (mean + error,) * 2, "grey", label="even, ± 2 standard errors")
    plot.bars(edges, heights, "a")
    plot.line((0, 1), (mean, mean), "grey", style="dashed")
    return Figure(
        "Where the truth falls in its prediction",
        plot.svg("Histogram of the probability integral transform."),
        "Even bars: predicted distributions are right. A heap in the middle: too wide; heaps at the ends: too narrow.",
    )


def _thin(draws: Tensor) -> int:
    """The CRPS meets every draw with every other: a hundred are enough."""
    return max(1, len(draws) // 100)
