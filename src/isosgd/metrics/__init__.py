"""Scores of predictions: regression, classification, calibration, and detection of out-of-distribution data.

Functions of tensors that return tensors, computed in float64 on the tensors' device, without gradients.
"""

from isosgd.metrics.classification import (
    Reliability,
    accuracy,
    auroc,
    brier,
    categorical_mnll,
    ece,
    fpr95,
    mutual_information,
    predictive_entropy,
    reliability,
)
from isosgd.metrics.regression import (
    mixture_cdf,
    mixture_coverage,
    mixture_crps,
    mixture_interval,
    mixture_mnll,
    mixture_quantiles,
    rmse,
)

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "brier",
    "categorical_mnll",
    "ece",
    "fpr95",
    "mixture_cdf",
    "mixture_coverage",
    "mixture_crps",
    "mixture_interval",
    "mixture_mnll",
    "mixture_quantiles",
    "mutual_information",
    "predictive_entropy",
    "reliability",
    "rmse",
]
