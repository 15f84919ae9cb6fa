"""How good a run is: scores of its predictions, and the verdict on its draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isosgd import Posterior
from isosgd.commands.runs import Run
from isosgd.diagnostics.verdict import Verdict
from isosgd.predictive.draws import batches_of
from isosgd.report.predictions import evaluate_regression

LEVEL = 0.95
HELD = 1 << 20  # numbers, of which there is one for each row and draw, or class


def verdict_of(run: Run, posterior: Posterior) -> Verdict | None:
    """The verdict; None where there are too few draws for one, or the data come from a loader."""
    try:
        return posterior.trust(held_out=run.heldout)
    except ValueError:
        return None


def scores_of(run: Run, posterior: Posterior) -> dict[str, Any]:
    """Scores on the held-out rows of a table, on its training rows where none were held out; else nothing.

    Rows are predicted some at a time, so that memory does not grow with their number.
    """
    if run.table is None:
        return {}
    rows = run.heldout if run.heldout is not None else run.data
    width = max(len(posterior), len(run.table.classes))
    parts = batches_of(rows, max(1, HELD // width))
    scores = _of_classes(posterior, parts) if run.table.classes else _of_numbers(posterior, parts, run)
    return {"rows": len(rows[0]), **scores}


def _of_classes(posterior: Posterior, parts: Iterator[Any]) -> dict[str, float]:
    from isosgd import metrics

    every: list[tuple[Tensor, ...]] = []
    for x, y in parts:
        mean = posterior.predict(x).mean.double()
        confidence, predicted = mean.max(1)
        scored = (metrics.categorical_mnll(mean, y, "none"), metrics.brier(mean, y, "none"))
        every.append((confidence, predicted == y, *scored))
    confidence, right, mnll, brier = map(torch.cat, zip(*every, strict=True))
    return {
        "accuracy": float(right.double().mean()),
        "mnll": float(mnll.mean()),
        "ece": float(metrics.calibration(confidence, right).ece),
        "brier": float(brier.mean()),
    }


def _of_numbers(posterior: Posterior, parts: Iterator[Any], run: Run) -> dict[str, float]:
    from isosgd import metrics

    every: list[tuple[Tensor, ...]] = []
    for part in parts:
        found = evaluate_regression(posterior, part, run.subject)
        assert found is not None
        mean, variance, y = found.means.flatten(0, 1), found.variances.flatten(0, 1), found.y
        below, mnll = metrics.mixture_cdf(mean, variance, y), metrics.mixture_mnll(mean, variance, y, "none")
        every.append((mean.mean(0) - y, mnll, below))
    error, mnll, below = map(torch.cat, zip(*every, strict=True))
    tail = (1 - LEVEL) / 2
    return {
        "rmse": float(error.square().mean().sqrt()),
        "mnll": float(mnll.mean()),
        "coverage95": float(((below >= tail) & (below <= 1 - tail)).double().mean()),
    }
