"""Predictions from draws."""

from isosgd.predictive.posterior import Posterior, Prediction

__all__ = ["Posterior", "Prediction"]
