"""How good predictions are: scores of regressions and classifications, calibration, data unlike the training data.

Functions of tensors, computed in float64 on the tensors' device, without gradients. Each returns a tensor.
"""

from isosgd.metrics.classification import (
    Reliability,
    accuracy,
    brier,
    calibration,
    categorical_mnll,
    ece,
    mutual_information,
    predictive_entropy,
    reliability,
)
from isosgd.metrics.ood import auroc, fpr95
from isosgd.metrics.regression import (
    interval_coverage,
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
    "calibration",
    "categorical_mnll",
    "ece",
    "fpr95",
    "interval_coverage",
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
