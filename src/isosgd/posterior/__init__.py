"""Draws, what they predict, and whether to believe them."""

from isosgd.posterior.posterior import Posterior
from isosgd.posterior.prediction import Prediction, central

__all__ = ["Posterior", "Prediction", "central"]
