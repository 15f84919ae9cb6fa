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

__all__ = [
    "AlphaStable",
    "MovingAverage",
    "NoiseEstimator",
    "NoiseName",
    "join_halves",
    "make_estimator",
    "paired_backward",
]
