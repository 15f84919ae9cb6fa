"""Gradient noise, the error of a minibatch gradient, estimated online."""

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
