"""How well a score, such as the predictive entropy, tells data unlike the training data from data like it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isosgd.metrics.checks import between_0_and_1, numbers


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Area under the ROC curve: probability that data from outside have the higher score; ties count half.

    Args:
        inside: scores of data like the training data, ``[n]``; higher means less alike.
        outside: scores of other data, ``[m]``.

    Example:
        >>> auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor(0.8750, dtype=torch.float64)
    """
    inside, outside = numbers("inside", inside, "n").sort().values, numbers("outside", outside, "m")
    below = torch.searchsorted(inside, outside) + torch.searchsorted(inside, outside, right=True)
    return below.double().mean() / (2 * len(inside))


def fpr95(inside: Tensor, outside: Tensor, pass_rate: float = 0.95) -> Tensor:
    """Share of data from outside that pass when the threshold lets 95% of the data from inside pass.

    Args:
        inside: scores of data like the training data, ``[n]``; higher means less alike.
        outside: scores of other data, ``[m]``.
        pass_rate: least share of ``inside`` that passes.

    Note:
        Data from inside are the positives here (Liang, Li and Srikant 2018). With outside as the positives, as some
        write it, swap the two and change the sign of both.

    Example:
        >>> fpr95(torch.arange(100.0), torch.tensor([50.0, 94.0, 95.0, 200.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    between_0_and_1("pass_rate", pass_rate)
    inside, outside = numbers("inside", inside, "n").sort().values, numbers("outside", outside, "m")
    # 0.95 * 20 is a hair above 19 in floating point; that must not let one more pass.
    threshold = inside[math.ceil(pass_rate * len(inside) * (1 - 1e-12)) - 1]
    return (outside <= threshold).double().mean()
