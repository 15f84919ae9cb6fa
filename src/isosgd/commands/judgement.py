"""How good a run is: scores of its predictions, and the verdict on its draws."""

from __future__ import annotations

from typing import Any

from isosgd import Posterior
from isosgd.commands.runs import Run
from isosgd.diagnostics.verdict import Verdict
from isosgd.report import classification, regression

LEVEL = 0.95


def verdict_of(run: Run, posterior: Posterior) -> Verdict | None:
    """The verdict; None where there are too few draws for one, or the data come from a loader."""
    try:
        return posterior.trust(held_out=run.heldout)
    except ValueError:
        return None


def scores_of(run: Run, posterior: Posterior) -> dict[str, Any]:
    """Scores on the held-out rows of a table, on its training rows where none were held out; else nothing."""
    from isosgd import metrics

    if run.table is None:
        return {}
    rows = run.heldout if run.heldout is not None else run.data
    if run.table.classes:
        found = classification.evaluate(posterior, rows, None, run.subject)
        assert found is not None
        return {
            "rows": len(rows[0]),
            "accuracy": float(metrics.accuracy(found.mean, found.y)),
            "mnll": float(metrics.categorical_mnll(found.mean, found.y)),
            "ece": float(metrics.ece(found.mean, found.y)),
            "brier": float(metrics.brier(found.mean, found.y)),
        }
    numbers = regression.evaluate(posterior, rows, run.subject)
    assert numbers is not None
    mean, variance = numbers.means.flatten(0, 1), numbers.variances.flatten(0, 1)
    return {
        "rows": len(rows[0]),
        "rmse": float(metrics.rmse(mean.mean(0), numbers.y)),
        "mnll": float(metrics.mixture_mnll(mean, variance, numbers.y)),
        "coverage95": float(metrics.mixture_coverage(mean, variance, numbers.y, LEVEL)),
    }
