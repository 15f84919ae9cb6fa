"""The loop: minibatches, warm-up, draws."""

from isosgd.chain.batches import DataSets
from isosgd.chain.reports import GroupReport, WarmupReport

__all__ = ["DataSets", "GroupReport", "WarmupReport"]
