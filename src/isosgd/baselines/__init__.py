"""Methods that yield the same draws as samplers, but not of the posterior: each says of what."""

from isosgd.baselines.base import Baseline
from isosgd.baselines.ensemble import Ensemble
from isosgd.baselines.mcdropout import MCDropout
from isosgd.baselines.runner import BASELINES, BaselineRun
from isosgd.baselines.snapshots import Snapshots
from isosgd.baselines.swag import SWAG

__all__ = ["BASELINES", "SWAG", "Baseline", "BaselineRun", "Ensemble", "MCDropout", "Snapshots"]
