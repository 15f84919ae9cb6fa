"""How good the predictions of a classification are: figures and scores on held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isosgd.metrics import accuracy, auroc, brier, categorical_mnll, ece, fpr95, predictive_entropy
from isosgd.predictive import Posterior
from isosgd.report.numbers import number
from isosgd.report.subject import Figure, Subject, Tile
from isosgd.report.svg import Plot

MOST_SHOWN = 10  # classes of a table of confusions
BINS = 24


@dataclass(frozen=True)
class Classification:
    """Predictions of rows whose class is known.

    Attributes:
        draws: probabilities that each draw gives, ``[chains, draws, n, classes]``.
        y: classes ``[n]``.
        outside: mean probabilities ``[m, classes]`` of inputs unlike the training data, if any.
    """

    draws: Tensor
    y: Tensor
    outside: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """Probabilities of the model average, ``[n, classes]``."""
        return self.draws.double().flatten(0, 1).mean(0)

    @property
    def traces(self) -> Tensor:
        """What to follow over draws: the probability of each row's own class."""
        index = self.y.expand(*self.draws.shape[:2], -1).unsqueeze(-1)
        return self.draws.gather(-1, index).squeeze(-1).double()

    def tiles(self) -> list[Tile]:
        """Scores."""
        mean = self.mean
        most = float(self.y.bincount().max()) / len(self.y)
        found = [
            Tile(
                "accuracy", f"{100 * float(accuracy(mean, self.y)):.1f}%", f"{100 * most:.1f}% for the commonest class"
            ),
            Tile("MNLL", number(float(categorical_mnll(mean, self.y))), "nats a row, lower is better"),
            Tile("calibration error", number(float(ece(mean, self.y))), f"ECE over {len(self.y):,} rows"),
        ]
        if self.outside is None:
            found.append(Tile("Brier score", number(float(brier(mean, self.y)))))
        else:
            inner, outer = predictive_entropy(mean), predictive_entropy(self.outside)
            note = f"FPR95 {100 * float(fpr95(inner, outer)):.0f}%"
            found.append(Tile("AUROC, out of distribution", number(float(auroc(inner, outer))), note))
        return found

    def figures(self, subject: Subject) -> list[Figure]:
        """Reliability, confusions, and entropies."""
        mean, y = self.mean.numpy(), self.y.numpy()
        entropy = predictive_entropy(self.mean).numpy()
        right = mean.argmax(1) == y
        found = [_reliability(mean, y), _confusion(mean, y, subject)]
        most = math.log(mean.shape[1])
        found.append(
            _histograms(
                "How sure it is, where right and where wrong",
                {f"right ({right.sum():,})": entropy[right], f"wrong ({(~right).sum():,})": entropy[~right]},
                most,
                "Errors should sit where the entropy is high: then it knows what it does not know.",
            )
        )
        if self.outside is not None:
            outer = predictive_entropy(self.outside).numpy()
            found.append(
                _histograms(
                    "Entropy in and out of distribution",
                    {f"held-out rows ({len(entropy):,})": entropy, f"{subject.outside} ({len(outer):,})": outer},
                    most,
                    "Inputs unlike the training data should be predicted with more doubt.",
                )
            )
        return found


def evaluate(posterior: Posterior, data: Any, outside: Any, subject: Subject) -> Classification | None:
    """Predict held-out rows; None where predictions are not class probabilities, one label a row."""
    x, y = data[0] if len(data) == 2 else tuple(data[:-1]), data[-1]
    found = posterior.predict(x, return_draws=True)
    if found.draws is None or found.expected_entropy is None or y.ndim != 1:
        return None
    draws = _both(found.draws, y)
    if draws is None:
        return None
    outer = None
    if outside is not None:
        outer = _both(posterior.predict(outside).mean[None, None], y)
        outer = None if outer is None else outer[0, 0].double().cpu()
    return Classification(draws.cpu(), y.long().cpu(), outer)


def _both(draws: Tensor, y: Tensor) -> Tensor | None:
    """Probabilities of all classes ``[chains, draws, n, classes]``: of one outcome alone the other is added."""
    if draws.ndim == 4 and draws.shape[-1] > 1:
        return draws
    if draws.ndim == 4:
        draws = draws.squeeze(-1)
    return torch.stack([1 - draws, draws], -1) if draws.ndim == 3 else None


def _reliability(mean: Any, y: Any) -> Figure:
    """In bins of equally many rows, so that every dot has the same weight."""
    sure, right = mean.max(1), (mean.argmax(1) == y).astype(float)
    count = int(np.clip(len(y) // 20, 1, 10))
    parts = [part for part in np.array_split(np.argsort(sure), count) if len(part)]
    confidence, share = (np.array([v[part].mean() for part in parts]) for v in (sure, right))
    # One row more of each kind keeps the error of an all-right bin from being zero.
    error = np.array([
        2 * math.sqrt((k := right[p].sum() + 1) * (len(p) + 2 - k)) / (len(p) + 2) ** 1.5 for p in parts
    ])  # fmt: skip
    least = min(float(confidence.min()), float((share - error).min())) - 0.05
    ends = (max(0.0, least), 1.0)
    plot = Plot(ends, ends, xlabel="confidence", ylabel="share that is right")
    plot.line(ends, ends, "grey", style="dashed", label="perfect")
    plot.rods(confidence, np.clip(share - error, *ends), np.clip(share + error, *ends), "a")
    plot.line(confidence, share, "a", label="found, ± 2 standard errors")
    plot.dots(confidence, share, "a", radius=3.4)
    return Figure(
        "Reliability",
        plot.svg("Share of right predictions against confidence."),
        "On the dashed line: of predictions made with 80% confidence, 80% are right. Below it the model is too sure.",
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
    less = "" if size == count else f" The {size} commonest of {count} classes are shown."
    return Figure(
        "Which classes are confused",
        plot.svg("Table of true and predicted classes."),
        f"Rows of the true class, spread over the predicted ones; the diagonal is right.{less}",
    )


def _histograms(title: str, groups: dict[str, Any], most: float, caption: str) -> Figure:
    edges = np.linspace(0.0, most, BINS + 1)
    shares = {name: np.histogram(v, edges)[0] / max(len(v), 1) for name, v in groups.items()}
    top = max(float(share.max()) for share in shares.values()) * 1.06
    plot = Plot((0, most), (0, top), xlabel="entropy of the prediction (nats)", ylabel="share of each group")
    for (name, share), colour in zip(shares.items(), "ab", strict=False):
        plot.bars(edges, share, colour, label=name, style="overlaid")
    return Figure(title, plot.svg(f"{title}: histograms of entropy for {' and '.join(groups)}."), caption)
