"""Baselines: they return draws as samplers do, but not from the posterior; each documents what it targets."""

from isosgd.baselines.base import Baseline
from isosgd.baselines.ensemble import Ensemble
from isosgd.baselines.mcdropout import MCDropout
from isosgd.baselines.runner import BASELINES, BaselineRun
from isosgd.baselines.snapshots import Snapshots
from isosgd.baselines.swag import SWAG

__all__ = ["BASELINES", "SWAG", "Baseline", "BaselineRun", "Ensemble", "MCDropout", "Snapshots"]
