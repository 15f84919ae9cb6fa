"""From a start to settled rates: initial optimisation, windows, reports."""

from isosgd.warmup.reports import GroupReport, WarmupReport

__all__ = ["GroupReport", "WarmupReport"]
