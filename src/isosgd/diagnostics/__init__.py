"""Diagnostics of draws: convergence of predictions, the temperature meter, and the verdict."""

from isosgd.diagnostics.logging import Log
from isosgd.diagnostics.meter import Reading
from isosgd.diagnostics.summary import PosteriorSummary, SummaryRow
from isosgd.diagnostics.traces import Convergence, ess, integrated_time, rhat
from isosgd.diagnostics.verdict import Verdict

__all__ = [
    "Convergence",
    "Log",
    "PosteriorSummary",
    "Reading",
    "SummaryRow",
    "Verdict",
    "ess",
    "integrated_time",
    "rhat",
]
