"""Gradient noise: what a minibatch adds to the gradient, measured online."""

from isosgd.noise.estimators import (
    AlphaStable,
    MovingAverage,
    NoiseEstimator,
    NoiseName,
    join_halves,
    make_estimator,
    paired_backward,
)
from isosgd.noise.model import (
    NoiseModel,
    Summary,
    Uses,
    Whole,
    dot,
    flat,
    join,
    power_step,
    summarise,
    top_eigenvalue,
)

__all__ = [
    "AlphaStable",
    "MovingAverage",
    "NoiseEstimator",
    "NoiseModel",
    "NoiseName",
    "Summary",
    "Uses",
    "Whole",
    "dot",
    "flat",
    "join",
    "join_halves",
    "make_estimator",
    "paired_backward",
    "power_step",
    "summarise",
    "top_eigenvalue",
]
