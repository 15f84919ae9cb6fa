"""Scores of class probabilities, and of the detection of out-of-distribution data.

``probabilities`` are ``[n, classes]``, those of the model average unless a function says otherwise; ``y`` are labels
``[n]``, from 0. Logarithms are natural.

References:
    Naeini, Cooper and Hauskrecht (2015), Obtaining well calibrated probabilities using Bayesian binning (ECE).
    Houlsby, Huszár, Ghahramani and Lengyel (2011), Bayesian active learning for classification and preference learning
    (mutual information).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isosgd.errors import check_integer
from isosgd.metrics import checks
from isosgd.metrics.checks import Reduction, reduce


@dataclass(frozen=True)
class Reliability:
    """Accuracy of predictions by their confidence, in bins with at least one prediction.

    Attributes:
        confidence: mean probability of the predicted class, ``[bins]``.
        accuracy: share of these predictions that are right, ``[bins]``.
        count: predictions in the bin, ``[bins]``.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def ece(self) -> Tensor:
        """Expected calibration error: mean distance of confidence and accuracy over predictions."""
        return (self.count * (self.confidence - self.accuracy).abs()).sum() / self.count.sum()


def accuracy(probabilities: Tensor, y: Tensor) -> Tensor:
    """Share of examples whose most probable class is right.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    probabilities, y = _checked(probabilities, y)
    return (probabilities.argmax(1) == y).double().mean()


def categorical_mnll(probabilities: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Mean negative log likelihood: minus the log probability of the right class; infinite where that is 0.

    Example:
        >>> categorical_mnll(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(0.6931, dtype=torch.float64)
    """
    probabilities, y = _checked(probabilities, y)
    return reduce(-probabilities.gather(1, y[:, None]).squeeze(1).log(), reduction)


def brier(probabilities: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Brier score: squared distance of the probabilities from the right class as a unit vector, from 0 to 2.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.2500, dtype=torch.float64)
    """
    probabilities, y = _checked(probabilities, y)
    right = torch.nn.functional.one_hot(y, probabilities.shape[1])
    return reduce((probabilities - right).square().sum(1), reduction)


def reliability(probabilities: Tensor, y: Tensor, bins: int = 15) -> Reliability:
    """The reliability curve, over bins of equal width in the probability of the predicted class.

    Example:
        >>> curve = reliability(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1, 1]), bins=2)
        >>> curve.confidence, curve.accuracy, curve.count
        (tensor([0.8000], dtype=torch.float64), tensor([0.6667], dtype=torch.float64), tensor([3]))
    """
    probabilities, y = _checked(probabilities, y)
    confidence, predicted = probabilities.max(1)
    right = (predicted == y).double()
    check_integer("bins", bins, 1)
    place = (confidence * bins).long().clamp(0, bins - 1)
    count = place.bincount(minlength=bins)
    mean_confidence = place.bincount(confidence, bins) / count
    share = place.bincount(right, bins) / count
    there = count > 0
    return Reliability(mean_confidence[there], share[there], count[there])


def ece(probabilities: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """Expected calibration error, by `reliability`.

    Example:
        >>> ece(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))  # sure to 75%, right in 75%
        tensor(0., dtype=torch.float64)
    """
    return reliability(probabilities, y, bins).ece


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Entropy of each prediction, ``[n]``: the total uncertainty.

    Example:
        >>> predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.0000, 0.6931], dtype=torch.float64)
    """
    return _entropy(checks.probabilities(probabilities, "n", "classes"))


def mutual_information(probabilities: Tensor) -> Tensor:
    """Mutual information of label and draw, ``[n]``: the part of the entropy that more data would remove.

    Args:
        probabilities: of each draw, ``[draws, n, classes]``.

    Example:
        >>> sure_but_at_odds = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> mutual_information(sure_but_at_odds), mutual_information(torch.full((2, 1, 2), 0.5))
        (tensor([0.6931], dtype=torch.float64), tensor([0.], dtype=torch.float64))
    """
    probabilities = checks.probabilities(probabilities, "draws", "n", "classes")
    return (_entropy(probabilities.mean(0)) - _entropy(probabilities).mean(0)).clamp_min(0)


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Area under the ROC curve: the probability that other data have the higher score; ties count half.

    Args:
        inside: scores of data like the training data, ``[n]``; higher means less alike.
        outside: scores of other data, ``[m]``.

    Example:
        >>> auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor(0.8750, dtype=torch.float64)
    """
    inside, outside = checks.numbers("inside", inside, "n").sort().values, checks.numbers("outside", outside, "m")
    below = torch.searchsorted(inside, outside) + torch.searchsorted(inside, outside, right=True)
    return below.double().mean() / (2 * len(inside))


def fpr95(inside: Tensor, outside: Tensor, pass_rate: float = 0.95) -> Tensor:
    """Share of other data that pass a threshold which 95% of data like the training data pass.

    Args:
        inside: scores of data like the training data, ``[n]``; higher means less alike.
        outside: scores of other data, ``[m]``.
        pass_rate: least share of ``inside`` that passes.

    Note:
        Data like the training data are the positives (Liang, Li and Srikant 2018). For the opposite convention, swap
        the two and change the sign of both.

    Example:
        >>> fpr95(torch.arange(100.0), torch.tensor([50.0, 94.0, 95.0, 200.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    checks.between_0_and_1("pass_rate", pass_rate)
    inside, outside = checks.numbers("inside", inside, "n").sort().values, checks.numbers("outside", outside, "m")
    # 0.95 * 20 is slightly above 19 in floating point, but the threshold must be the 19th.
    threshold = inside[math.ceil(pass_rate * len(inside) * (1 - 1e-12)) - 1]
    return (outside <= threshold).double().mean()


def _checked(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = checks.probabilities(probabilities, "n", "classes")
    return probabilities, checks.labels(y, probabilities)


def _entropy(probabilities: Tensor) -> Tensor:
    parts: Tensor = torch.special.entr(probabilities)
    return parts.sum(-1)
