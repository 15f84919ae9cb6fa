"""`Posterior`: draws, predictions from them, comparisons with trained networks, and diagnostics."""

from isosgd.posterior.comparison import Comparison, Scores
from isosgd.posterior.posterior import Posterior
from isosgd.posterior.prediction import Prediction, central

__all__ = ["Comparison", "Posterior", "Prediction", "Scores", "central"]
