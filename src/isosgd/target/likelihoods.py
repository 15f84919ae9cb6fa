"""Likelihoods: from a model's output to the log probability of each example.

The output has one row for each example. Targets ``y`` of shape ``[n]`` go with outputs ``[n]`` or ``[n, 1]``; targets
``[n, k]`` go with outputs ``[n, k]``, and their log probabilities are summed over ``k``. Shapes that would broadcast
otherwise are refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from isosgd.errors import check_positive
from isosgd.target.params import Params
from isosgd.target.priors import LOG_2PI, Extra, HalfCauchy, PositivePrior, student_t_log_prob

SCALE = "likelihood.scale"
NO_LABEL = torch.iinfo(torch.int64).min


class Likelihood(ABC):
    """Distribution of ``y`` given a model's output.

    A ``scale`` of the noise is a number, or a prior of positive numbers under which it is sampled.

    Predictions are calibrated by `wider`. A likelihood of your own that brings a parameter with ``noise_scale=True``
    can leave this out by a property ``has_width`` that is False.

    Attributes:
        of_classes: whether ``y`` are labels and the output their logits.
    """

    of_classes: ClassVar[bool] = False

    scale: float | PositivePrior | None

    def __post_init__(self) -> None:
        if "scale" not in vars(self):
            return
        if self.scale is None:
            object.__setattr__(self, "scale", HalfCauchy())
        elif not isinstance(self.scale, PositivePrior):
            object.__setattr__(self, "scale", check_positive(f"{type(self).__name__}: scale", self.scale))

    def extra(self) -> dict[str, Extra]:
        """Sampled parameters of the likelihood itself, such as a noise scale: start values and their priors."""
        if isinstance(prior := vars(self).get("scale"), PositivePrior):
            outputs = vars(self).get("outputs")
            shape = () if outputs is None else (outputs,)
            return {SCALE: Extra(torch.full(shape, prior.median), prior, noise_scale=True)}
        return {}

    def scale_at(self, params: Params) -> Tensor | float:
        """The noise scale, if there is one."""
        return self.scale if isinstance(self.scale, float) else params[SCALE]

    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log probability of each example: shape ``[n]``."""

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        """`log_prob`, and the derivatives of its sum in the output and in the parameters of each row."""
        raise NotImplementedError(f"{type(self).__name__} has no slopes in closed form")

    def _noise_slopes(
        self, location: Tensor, y: Tensor, scale: Tensor | float, df: float, params: Params
    ) -> tuple[Tensor, Tensor, Tensor, Params]:
        """`slopes` of Student-t noise: in the location, in the logarithm of the scale, and in parameters."""
        found, inner, by_log = student_t_slopes(y - location, scale, df)
        own = {} if isinstance(self.scale, float) else {SCALE: by_log / params[SCALE]}
        return _by_example(found), inner, by_log, own

    @property
    def has_width(self) -> bool:
        """Whether predictions can be made wider, see `wider`: by default of classes, or with a sampled noise scale."""
        return self.of_classes or any(extra.noise_scale for extra in self.extra().values())

    def wider(self, output: Tensor, params: Params, width: float) -> tuple[Tensor, Params]:
        """Output and parameters under which predictions are wider: so many times the noise, or flatter classes."""
        if self.of_classes:
            return output / width, params
        return output, {**params, **{n: params[n] * width for n, e in self.extra().items() if e.noise_scale}}

    @abstractmethod
    def mean(self, output: Tensor, params: Params) -> Tensor:
        """Mean of ``y`` given the output (class probabilities for classes)."""

    @abstractmethod
    def variance(self, output: Tensor, params: Params) -> Tensor:
        """Variance of ``y`` given the output."""

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        """Simulated ``y``, one for each example."""
        raise NotImplementedError(f"{type(self).__name__} has no simulate(output, params, generator): give it one")

    def check(self, output: Tensor, y: Tensor) -> None:
        """Raise a ``ValueError`` if these targets cannot come from this likelihood.

        The output may be that of the first examples.
        """
        y = _align(output[:1], y[:1])[1]
        outputs = vars(self).get("outputs")
        if outputs is not None and math.prod(y.shape[1:]) != outputs:
            raise ValueError(
                f"{type(self).__name__}: outputs = {outputs} noise scales, but a row of y has shape "
                f"{tuple(y.shape[1:])}: give as many as y has numbers, or leave outputs out for one scale"
            )

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        """Mean and noise variance of ``y``, to be averaged over draws."""
        return {"mean": self.mean(output, params), "variance": self.variance(output, params)}

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain values."""
        settings: dict[str, Any] = asdict(self) if is_dataclass(self) else {}
        if isinstance(prior := vars(self).get("scale"), PositivePrior):
            settings["scale"] = prior.describe()
        if settings.get("outputs", 0) is None:
            del settings["outputs"]
        return {"name": type(self).__name__, **settings}


def _align(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Output and targets with the same shape and type; a trailing dimension of 1 may be missing on one side."""
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


def _check_labels(kind: str, y: Tensor, count: int, what: str, ignore: int | None = None) -> None:
    """Labels must be integers from 0 to ``count - 1``."""
    if y.is_floating_point() or y.is_complex():
        raise ValueError(f"{kind} needs labels as integers, got y of {y.dtype}; use y.long()")
    bad = (y < 0) | (y >= count)
    if ignore is not None:
        bad &= y != ignore
    if bool(bad.any()):
        more = "" if ignore is None else f", and {ignore} is ignored"
        raise ValueError(
            f"y has the label {_first(y, bad)}, but the output has {count} {what}: "
            f"labels go from 0 to {count - 1}{more}"
        )


def student_t_slopes(residual: Tensor, scale: Tensor | float, df: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log density of Student-t noise, and its derivatives in the location and in the logarithm of the scale.

    Example:
        >>> scale = torch.tensor(2.0, requires_grad=True)
        >>> density, _, slope = student_t_slopes(torch.tensor(3.0), scale, 5.0)
        >>> bool(torch.isclose(scale * torch.autograd.grad(density, scale)[0], slope))
        True
    """
    z = residual / scale
    pull = z if df == math.inf else (df + 1) * z / (df + z.square())
    log_scale = math.log(scale) if isinstance(scale, float) else scale.log()
    return student_t_log_prob(z, df) - log_scale, pull / scale, pull * z - 1


def student_t_draw(like: Tensor, df: float, generator: torch.Generator) -> Tensor:
    """Standard Student-t random numbers with the shape of a tensor; normal ones if ``df`` is infinite."""
    normal = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    if df == math.inf:
        return normal
    half = torch._standard_gamma(torch.full_like(like, df / 2), generator)  # of a chi-squared
    return normal * (df / (2 * half)).sqrt()


def student_t_variance(df: float) -> float:
    """Variance of the standard Student-t."""
    return 1 + 2 / (df - 2) if df > 2 else math.inf


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classes from logits: output ``[n, K]`` (or ``[n, K, ...]``), ``y`` integers ``[n]`` (or ``[n, ...]``) below K.

    Example:
        >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2]), {})
        tensor([-1.3863])
    """

    of_classes = True

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        y = self._labels(output, y)
        # torch would skip the label -100 by default.
        return _by_example(-F.cross_entropy(output, y.long(), reduction="none", ignore_index=NO_LABEL))

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        found, y = output.log_softmax(1), self._labels(output, y).long().unsqueeze(1)
        slope = (-found.exp()).scatter_add_(1, y, torch.ones_like(found[:, :1]))
        return found.gather(1, y).squeeze(1), slope, {}

    @staticmethod
    def _labels(output: Tensor, y: Tensor) -> Tensor:
        """Labels without a class dimension of length 1."""
        return y.squeeze(1) if y.ndim == output.ndim > 1 and y.shape[1] == 1 else y

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.softmax(1)

    def variance(self, output: Tensor, params: Params) -> Tensor:
        p = output.softmax(1)
        return p * (1 - p)

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        p = output.softmax(1).movedim(1, -1)
        return p.flatten(0, -2).multinomial(1, generator=generator).reshape(p.shape[:-1])

    def check(self, output: Tensor, y: Tensor) -> None:
        y = self._labels(output, y)
        if output.ndim < 2 or y.shape[1:] != output.shape[2:]:
            raise ValueError(
                f"Categorical needs output [n, classes] and y [n]; got output {tuple(output.shape)}, y {tuple(y.shape)}"
                + (": turn one-hot rows into labels by y.argmax(1)" if y.ndim == 2 and output.ndim == 2 else "")
            )
        _check_labels("Categorical", y, output.shape[1], "classes")


@dataclass(frozen=True)
class Tokens(Likelihood):
    """Tokens of sequences from logits: output ``[n, T, V]``, ``y`` integers ``[n, T]`` below V, some of them ignored.

    With ``shift``, as for language models, the output at a position predicts the next token. If a dict batch has an
    ``attention_mask`` of the shape of ``y``, masked tokens are ignored too. Predictions are ``[n, V, T]``.

    Args:
        shift: whether the output at a position predicts the next token, rather than that token.
        per: what counts as one observation. ``"token"``: the log likelihood of a sequence is the sum over its tokens.
            ``"example"``: it is their mean, so that all sequences have the same weight.
        ignore: the label of ignored tokens.

    Example:
        >>> y = torch.tensor([[3, 1, 2, -100]])
        >>> Tokens().log_prob(torch.zeros(1, 4, 4), y, {}), Tokens(per="example").log_prob(torch.zeros(1, 4, 4), y, {})
        (tensor([-2.7726]), tensor([-1.3863]))
    """

    of_classes = True
    shift: bool = True
    per: Literal["token", "example"] = "token"
    ignore: int = -100

    def __post_init__(self) -> None:
        if self.per not in ("token", "example"):
            raise ValueError(f"Tokens: per = {self.per!r} is unknown; choose 'token' or 'example'")

    @property
    def has_width(self) -> bool:
        return False  # tokens of a text are not calibrated

    def _matched(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and their labels."""
        return (output[:, :-1], y[:, 1:]) if self.shift else (output, y)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = self._matched(output, y.long())
        each = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none", ignore_index=self.ignore)
        total = -each.view(y.shape).sum(1)
        return total if self.per == "token" else total / (y != self.ignore).sum(1).clamp_min(1)

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.softmax(-1).movedim(-1, 1)

    def variance(self, output: Tensor, params: Params) -> Tensor:
        p = self.mean(output, params)
        return p * (1 - p)

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        """The next token at each position, given the true ones before it; with ``shift`` the first is ignored."""
        found = output.softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(output.shape[:2])
        return torch.cat([torch.full_like(found[:, :1], self.ignore), found[:, :-1]], 1) if self.shift else found

    def scored(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities ``[m, V]`` of the tokens that are not ignored, and these tokens."""
        predicted, y = self._matched(predicted.movedim(1, -1), y)
        return predicted[y != self.ignore], y[y != self.ignore]

    def check(self, output: Tensor, y: Tensor) -> None:
        if output.ndim != 3 or y.ndim != 2 or y.shape[1] != output.shape[1]:
            raise ValueError(
                f"Tokens needs output [n, T, vocabulary] and y [n, T]; got output {tuple(output.shape)}, y "
                f"{tuple(y.shape)}"
            )
        _check_labels("Tokens", y, output.shape[2], "tokens", self.ignore)
        none = (self._matched(output, y)[1] == self.ignore).all(1)
        if bool(none.any()):
            after = " after the first" if self.shift else ""
            raise ValueError(
                f"{int(none.sum())} of {len(y)} examples have no token to predict{after}, example "
                f"{int(none.nonzero()[0])} first: all are masked or have the label {self.ignore}. Leave such out"
            )


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Binary ``y``, 0 or 1 of any type, from a logit."""

    of_classes = True

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        return _by_example(-F.binary_cross_entropy_with_logits(output, y, reduction="none"))

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        aligned, wanted = _align(output, y)
        return self.log_prob(output, y, params), (wanted - aligned.sigmoid()).view_as(output), {}

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.sigmoid()

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return output.sigmoid() * (-output).sigmoid()

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        return output.sigmoid().bernoulli(generator=generator)

    def check(self, output: Tensor, y: Tensor) -> None:
        _align(output[:1], y[:1])
        bad = (y != 0) & (y != 1)
        if bool(bad.any()):
            raise ValueError(f"Bernoulli needs y of 0 and 1, got {_first(y, bad)}")


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Normal noise around the output, with known or sampled standard deviation.

    Args:
        scale: the standard deviation; or a prior of positive numbers, under which it is sampled as
            ``"likelihood.scale"``; or None for ``HalfCauchy(1.0)``, which is weak if ``y`` is of order one: standardise
            ``y``, or give a prior in its units.
        outputs: number of columns of ``y``, each with its own sampled scale; None for one scale.

    Example:
        >>> Gaussian(0.5).log_prob(torch.zeros(1, 1), torch.tensor([0.5]), {})
        tensor([-0.7258])
    """

    scale: float | PositivePrior | None = None
    outputs: int | None = field(default=None, kw_only=True)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        scale = self.scale_at(params)
        squares = F.mse_loss(output, y, reduction="none")
        return _by_example(squares * (-0.5 / scale**2) - (_log(scale) + 0.5 * LOG_2PI))

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        location, y = _align(output, y)
        found, slope, _, own = self._noise_slopes(location, y, self.scale_at(params), math.inf, params)
        return found, slope.view_as(output), own

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return torch.ones_like(output) * self.scale_at(params) ** 2

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        return output + self.scale_at(params) * student_t_draw(output, math.inf, generator)


@dataclass(frozen=True)
class StudentT(Likelihood):
    """Student-t noise around the output: a regression robust to outliers.

    Args:
        df: degrees of freedom. The variance is infinite for ``df <= 2``.
        scale: as for `Gaussian`.
        outputs: as for `Gaussian`.
    """

    df: float = 4.0
    scale: float | PositivePrior | None = field(default=None, kw_only=True)
    outputs: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "df", check_positive("StudentT: df", self.df))

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        scale = self.scale_at(params)
        return _by_example(student_t_log_prob((y - output) / scale, self.df) - _log(scale))

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        location, y = _align(output, y)
        found, slope, _, own = self._noise_slopes(location, y, self.scale_at(params), self.df, params)
        return found, slope.view_as(output), own

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return torch.ones_like(output) * self.scale_at(params) ** 2 * student_t_variance(self.df)

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        return output + self.scale_at(params) * student_t_draw(output, self.df, generator)


@dataclass(frozen=True)
class Heteroscedastic(Likelihood):
    """Gaussian or Student-t noise with a scale that the model predicts.

    The output is ``[n, 2]`` for ``y`` of ``[n]`` or ``[n, 1]``, and ``[n, k, 2]`` for ``y`` of ``[n, k]``. The last
    dimension holds the location and the logarithm of the squared scale, for a Gaussian mean and log variance.

    Args:
        df: degrees of freedom of a Student-t; None for a Gaussian.
        scale: factor of the predicted scale: a number, or a prior under which it is sampled as ``"likelihood.scale"``.
            The model then only predicts how the noise differs between inputs.
        outputs: as for `Gaussian`.

    Example:
        >>> output = torch.tensor([[0.0, 0.0], [0.0, 2.0]])  # scales 1 and e
        >>> Heteroscedastic().log_prob(output, torch.zeros(2), {})
        tensor([-0.9189, -1.9189])
        >>> Heteroscedastic(6.0).variance(output, {})
        tensor([ 1.5000, 11.0836])
    """

    df: float | None = None
    scale: float | PositivePrior | None = field(default=1.0, kw_only=True)
    outputs: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        found = None if self.df in (None, math.inf) else check_positive("Heteroscedastic: df", self.df)
        object.__setattr__(self, "df", found)

    @property
    def _tails(self) -> float:
        return math.inf if self.df is None else self.df

    def _split(self, output: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Location and logarithm of the scale."""
        location, log_square = self._pair(output)
        return location, 0.5 * log_square + _log(self.scale_at(params))

    @staticmethod
    def _pair(output: Tensor) -> tuple[Tensor, Tensor]:
        if output.shape[-1] != 2:
            raise ValueError(
                f"Heteroscedastic needs an output whose last dimension is 2 (location, log of the squared scale), "
                f"got shape {tuple(output.shape)}"
            )
        return output[..., 0], output[..., 1]

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        location, log_scale = self._split(output, params)
        location, y = _align(location, y)
        log_scale = log_scale.reshape(location.shape)
        return _by_example(student_t_log_prob((y - location) * (-log_scale).exp(), self._tails) - log_scale)

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        location, log_scale = self._split(output, params)
        location, y = _align(location, y)
        scale = log_scale.reshape(location.shape).exp()
        found, inner, by_log, own = self._noise_slopes(location, y, scale, self._tails, params)
        return found, torch.stack([inner, 0.5 * by_log], -1).view_as(output), own

    @property
    def has_width(self) -> bool:
        return True

    def wider(self, output: Tensor, params: Params, width: float) -> tuple[Tensor, Params]:
        location, log_square = self._pair(output)
        return torch.stack([location, log_square + 2 * math.log(width)], -1), params

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return self._pair(output)[0]

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return (2 * self._split(output, params)[1]).exp() * student_t_variance(self._tails)

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        location, log_scale = self._split(output, params)
        return location + log_scale.exp() * student_t_draw(location, self._tails, generator)

    def check(self, output: Tensor, y: Tensor) -> None:
        super().check(self._pair(output[:1])[0], y)


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts from a log rate."""

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        output, y = _align(output, y)
        return _by_example(y * output - output.exp() - torch.lgamma(y + 1))

    def slopes(self, output: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor, Params]:
        aligned, counts = _align(output, y)
        return self.log_prob(output, y, params), (counts - aligned.exp()).view_as(output), {}

    def mean(self, output: Tensor, params: Params) -> Tensor:
        return output.exp()

    def variance(self, output: Tensor, params: Params) -> Tensor:
        return output.exp()

    def simulate(self, output: Tensor, params: Params, generator: torch.Generator) -> Tensor:
        return torch.poisson(output.exp(), generator=generator)

    def check(self, output: Tensor, y: Tensor) -> None:
        _align(output[:1], y[:1])
        bad = (y < 0) | (y != y.round()) if y.is_floating_point() else y < 0
        if bool(bad.any()):
            raise ValueError(f"Poisson needs counts 0, 1, 2, ..., got {_first(y, bad)}")


def has_classes(likelihood: object) -> bool:
    """Whether this is one of our likelihoods and of classes."""
    return isinstance(likelihood, Likelihood) and likelihood.of_classes


NAMES: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "tokens": Tokens,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic": Heteroscedastic,
    "heteroscedastic_t": lambda: Heteroscedastic(StudentT.df),
    "student_t": StudentT,
    "poisson": Poisson,
}
"""Likelihoods by name."""
