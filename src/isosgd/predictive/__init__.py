"""Draws, what they predict, and whether to believe them."""

from isosgd.predictive.posterior import Posterior
from isosgd.predictive.prediction import Prediction, central

__all__ = ["Posterior", "Prediction", "central"]
