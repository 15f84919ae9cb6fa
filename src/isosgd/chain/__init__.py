"""The loop: minibatches, warm-up, draws."""

from isosgd.chain.sample import sample
from isosgd.chain.warmup import GroupReport, WarmupReport

__all__ = ["GroupReport", "WarmupReport", "sample"]
