"""How good predictions are: scores of regressions and classifications, calibration, data unlike the training data.

Functions of tensors, computed in float64 on the tensors' device, without gradients. Each returns a tensor.
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
