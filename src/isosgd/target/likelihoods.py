"""Likelihoods: from a model's output to the log probability of each example.

The output has one row for each example. Targets ``y`` of shape ``[n]`` go with outputs ``[n]`` or ``[n, 1]``; targets
``[n, k]`` go with outputs ``[n, k]``, and their log probabilities are summed over ``k``. Shapes that would broadcast
some other way are refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isosgd.target.elementwise import LOG_2PI, Extra, HalfCauchy, PositivePrior, check_positive, student_t_log_prob
from isosgd.target.params import Params

SCALE = "likelihood.scale"
NO_LABEL = torch.iinfo(torch.int64).min


class Likelihood(ABC):
    """Distribution of ``y`` given a model's output."""

    def extra(self) -> dict[str, Extra]:
        """Sampled parameters of the likelihood itself, such as a noise scale: start values and their priors."""
        return {}

    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log probability of each example: shape ``[n]``."""

    @abstractmethod
    def mean(self, output: Tensor, params: Params) -> Tensor:
        """Mean of ``y`` given the output (class probabilities for classes)."""

    @abstractmethod
    def variance(self, output: Tensor, params: Params) -> Tensor:
        """Variance of ``y`` given the output: the noise, without the uncertainty about parameters."""

    def check(self, output: Tensor, y: Tensor) -> None:
        """Raise a ``ValueError`` when these targets cannot come from this likelihood.

        The output may be that of the first examples only.
        """
        _align(output[:1], y[:1])

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        """Mean and noise variance of ``y``, to be averaged over draws."""
        return {"mean": self.mean(output, params), "variance": self.variance(output, params)}

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain values."""
        return {"name": type(self).__name__, **(asdict(self) if is_dataclass(self) else {})}


def _align(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Output and targets of one shape and type; a trailing dimension of 1 may be missing on one side."""
    if output.shape != y.shape:
        if output.shape == (*y.shape, 1):
            output = output.squeeze(-1)
        elif y.shape == (*output.shape, 1):
            y = y.squeeze(-1)
        else:
            raise ValueError(
                f"the output has shape {tuple(output.shape)} and y has shape {tuple(y.shape)}; they must agree "
                "(a last dimension of 1 may be missing on one side): reshape y or change the model's last layer"
            )
    return output, y.to(output.dtype)


def _by_example(log_prob: Tensor) -> Tensor:
    return log_prob if log_prob.ndim <= 1 else log_prob.flatten(1).sum(1)


def _log(scale: Tensor | float) -> Tensor | float:
    return math.log(scale) if isinstance(scale, float) else scale.log()


def _first(y: Tensor, bad: Tensor) -> float | int:
    return y[bad].flatten()[0].item()


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classes from logits: output ``[n, K]`` (or ``[n, K, ...]``), ``y`` integers ``[n]`` (or ``[n, ...]``) below K.

    Example:
        >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2]), {})
        tensor([-1.3863])
    """

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        y = self._labels(output, y)
        # By default torch skips the label -100 silently; no label is to be skipped here.
        return _by_example(-F.cross_entropy(output, y.long(), reduction="none", ignore_index=NO_LABEL))

    @staticmethod
    def _labels(output: Tensor, y: Tensor) -> Tensor:
        """Labels without the dimension of classes, which may be there with length 1."""
        return y.squeeze(1) if y.ndim == output.ndim > 1 and y.shape[1] == 1 else y

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.softmax(1)

    def variance(self, output: Tensor, params: Params) -> Tensor:
        p = output.softmax(1)
        return p * (1 - p)

    def check(self, output: Tensor, y: Tensor) -> None:
        y = self._labels(output, y)
        if output.ndim < 2 or y.shape[1:] != output.shape[2:]:
            raise ValueError(
                f"Categorical needs output [n, classes] and y [n]; got output {tuple(output.shape)}, y {tuple(y.shape)}"
            )
        if y.is_floating_point() or y.is_complex():
            raise ValueError(f"Categorical needs class labels as integers, got y of {y.dtype}; use y.long()")
        bad = (y < 0) | (y >= output.shape[1])
        if bool(bad.any()):
            raise ValueError(
                f"y has the label {_first(y, bad)}, but the output has {output.shape[1]} classes: "
                f"labels go from 0 to {output.shape[1] - 1}"
            )


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no from a logit: ``y`` is 0 or 1, of any type."""

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        return _by_example(-F.binary_cross_entropy_with_logits(output, y, reduction="none"))

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.sigmoid()

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return output.sigmoid() * (-output).sigmoid()

    def check(self, output: Tensor, y: Tensor) -> None:
        _align(output[:1], y[:1])
        bad = (y != 0) & (y != 1)
        if bool(bad.any()):
            raise ValueError(f"Bernoulli needs y of 0 and 1, got {_first(y, bad)}")


@dataclass(frozen=True)
class _Located(Likelihood):
    """Noise of one scale around the output, the scale known or sampled.

    Args:
        scale: the known scale; or a prior of positive numbers under which it is sampled as ``"likelihood.scale"``;
            or None for ``HalfCauchy(1.0)``, weak when ``y`` is of order one: standardise ``y``, or give a prior in
            its units.
        outputs: numbers in a row of ``y``, each of which has a sampled scale of its own; None for one scale.
    """

    scale: float | PositivePrior | None = None
    outputs: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.scale is None:
            object.__setattr__(self, "scale", HalfCauchy())
        elif not isinstance(self.scale, PositivePrior):
            object.__setattr__(self, "scale", check_positive(f"{type(self).__name__}: scale", self.scale))

    def extra(self) -> dict[str, Extra]:
        if isinstance(self.scale, PositivePrior):
            shape = () if self.outputs is None else (self.outputs,)
            return {SCALE: Extra(torch.full(shape, self.scale.median), self.scale, noise_scale=True)}
        return {}

    def _scale(self, params: Params) -> Tensor | float:
        return self.scale if isinstance(self.scale, float) else params[SCALE]

    def _square_scale(self, output: Tensor, params: Params) -> Tensor:
        return torch.ones_like(output) * self._scale(params) ** 2

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output

    def describe(self) -> dict[str, Any]:
        scale = self.scale.describe() if isinstance(self.scale, PositivePrior) else self.scale
        found = {**super().describe(), "scale": scale}
        return {name: value for name, value in found.items() if (name, value) != ("outputs", None)}


@dataclass(frozen=True)
class Gaussian(_Located):
    """Normal noise around the output, of known or sampled standard deviation.

    Args:
        scale: the known standard deviation; or a prior of positive numbers under which it is sampled as
            ``"likelihood.scale"``; or None for ``HalfCauchy(1.0)``, weak when ``y`` is of order one: standardise
            ``y``, or give a prior in its units.

    Example:
        >>> Gaussian(0.5).log_prob(torch.zeros(1, 1), torch.tensor([0.5]), {})
        tensor([-0.7258])
    """

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        scale = self._scale(params)
        squares = F.mse_loss(output, y, reduction="none")
        return _by_example(squares * (-0.5 / scale**2) - (_log(scale) + 0.5 * LOG_2PI))

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return self._square_scale(output, params)


@dataclass(frozen=True)
class StudentT(_Located):
    """Student-t noise around the output: regression that shrugs off outliers.

    Args:
        df: degrees of freedom. The variance is infinite for ``df <= 2``.
        scale: known scale, a prior of it, or None, as for `Gaussian`.
    """

    df: float = 4.0
    scale: float | PositivePrior | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "df", check_positive("StudentT: df", self.df))

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        scale = self._scale(params)
        return _by_example(student_t_log_prob((y - output) / scale, self.df) - _log(scale))

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return self._square_scale(output, params) * (self.df / (self.df - 2) if self.df > 2 else math.inf)


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """Normal noise whose size the model predicts.

    The output is ``[n, 2]`` for ``y`` of ``[n]`` or ``[n, 1]``, and ``[n, k, 2]`` for ``y`` of ``[n, k]``: last comes
    the pair of mean and log variance.
    """

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        mean, log_variance = self._split(output)
        mean, y = _align(mean, y)
        log_variance = log_variance.reshape(mean.shape)
        square = (y - mean).square() * torch.exp(-log_variance)
        return _by_example(-0.5 * (square + log_variance + LOG_2PI))

    @staticmethod
    def _split(output: Tensor) -> tuple[Tensor, Tensor]:
        if output.shape[-1] != 2:
            raise ValueError(
                f"HeteroscedasticGaussian needs an output whose last dimension is 2 (mean, log variance), "
                f"got shape {tuple(output.shape)}"
            )
        return output[..., 0], output[..., 1]

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return self._split(output)[0]

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return self._split(output)[1].exp()

    def check(self, output: Tensor, y: Tensor) -> None:
        _align(self._split(output[:1])[0], y[:1])


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts from a log rate."""

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        return _by_example(y * output - output.exp() - torch.lgamma(y + 1))

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.exp()

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return output.exp()

    def check(self, output: Tensor, y: Tensor) -> None:
        _align(output[:1], y[:1])
        bad = (y < 0) | (y != y.round()) if y.is_floating_point() else y < 0
        if bool(bad.any()):
            raise ValueError(f"Poisson needs counts 0, 1, 2, ..., got {_first(y, bad)}")


NAMES: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic": HeteroscedasticGaussian,
    "student_t": StudentT,
    "poisson": Poisson,
}
"""Likelihoods by the name a user may give."""
