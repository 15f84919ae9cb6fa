"""The interface of a prior, and the priors of independent entries, with closed-form gradients.

Every prior gives ``log_prob(params)`` (a scalar, constants included) and ``grad(params)`` (a gradient for each
parameter, written out, no autograd), both in natural parameters. All of them act element by element, so that a leading
chain dimension can be mapped over them.

A prior whose scale depends on shapes or patterns can work it out once: ``prior.resolve(params)`` is the same prior
with one number for each name, which is what runs at every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from isosgd.target.params import Params, lookup

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Extra:
    """A positive parameter that a likelihood or a prior brings along and that is sampled, by its logarithm.

    Attributes:
        value: its start value.
        prior: its own prior.
        noise_scale: whether it is what the noise of ``y`` is multiplied by. Of the logarithm of such a scale every
            example is known to tell something; of other parameters, such as degrees of freedom, nothing is known.
    """

    value: Tensor
    prior: PositivePrior
    noise_scale: bool = False


def check_positive(what: str, value: object) -> float:
    """The value as a float, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be positive and finite, got {value!r}")
    return float(value)


def total(terms: Sequence[Tensor]) -> Tensor:
    """Sum of scalars (one kernel for all of them)."""
    return terms[0] if len(terms) == 1 else torch.stack(list(terms)).sum()


def multiply(tensors: list[Tensor], factors: list[float]) -> Sequence[Tensor]:
    """Each tensor times its factor, in few launches."""
    # List kernels cannot be mapped over chains, and the compiler fuses single ones by itself.
    if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(tensors[0]):
        return [x * factor for x, factor in zip(tensors, factors, strict=True)]
    return torch._foreach_mul(tensors, factors)


def student_t_log_prob(z: Tensor, df: float) -> Tensor:
    """Log density of the standard Student-t, entry by entry; that of the normal where ``df`` is infinite."""
    if df == math.inf:
        return -0.5 * (z.square() + LOG_2PI)
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return constant - (df + 1) / 2 * (z.square() / df).log1p()


def student_t_slopes(residual: Tensor, scale: Tensor | float, df: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log density of Student-t noise of a scale, and its derivatives in the location and in the logarithm of the scale.

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
    """Standard Student-t numbers of the shape of another tensor; normal ones where ``df`` is infinite."""
    normal = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    if df == math.inf:
        return normal
    half = torch._standard_gamma(torch.full_like(like, df / 2), generator)  # of a chi-squared
    return normal * (df / (2 * half)).sqrt()


def student_t_variance(df: float) -> float:
    """Variance of the standard Student-t."""
    return 1 + 2 / (df - 2) if df > 2 else math.inf


class Prior:
    """A density over named parameters.

    A prior says what is its own: one of independent entries the ``density`` and ``score`` of an entry at a ``scale``,
    which is one number or a mapping from names or shell patterns (``"fc1.*"``) to numbers; one that stands for another
    prior its ``resolve``; any other its ``log_prob`` and ``grad``.
    """

    scale: Any
    median_factor: ClassVar[float] = 1.0  # median over scale, of a prior of positive numbers

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for setting in ("scale", "df", "sigma"):
            value = vars(self).get(setting)
            if isinstance(value, Mapping):
                if not value:
                    raise ValueError(f"{kind}: the mapping of {setting}s is empty; give at least {{'*': 1.0}}")
                found: Any = {key: check_positive(f"{kind}: {setting} of {key!r}", x) for key, x in value.items()}
            elif setting in vars(self):
                found = check_positive(f"{kind}: {setting}", value)
            else:
                continue
            object.__setattr__(self, setting, found)

    def density(self, x: Tensor, scale: float) -> Tensor:
        """Log density of each entry."""
        raise NotImplementedError(f"{type(self).__name__} has neither density and score nor log_prob and grad")

    def score(self, x: Tensor, scale: float) -> Tensor:
        """Derivative of ``density`` in ``x``."""
        raise NotImplementedError(f"{type(self).__name__} has neither density and score nor log_prob and grad")

    def scale_of(self, name: str) -> float:
        """Scale of one parameter."""
        scale: float | Mapping[str, float] = self.scale
        return (
            lookup(name, scale, f"{type(self).__name__}: the mapping of scales")
            if isinstance(scale, Mapping)
            else scale
        )

    @property
    def median(self) -> float:
        """Of positive numbers: the median (of the first scale), where a likelihood's or prior's parameter starts."""
        scale = next(iter(self.scale.values())) if isinstance(self.scale, Mapping) else self.scale
        return self.median_factor * float(scale)

    def resolve(self, params: Params) -> Prior:
        """This prior with what depends on names and shapes worked out."""
        scale = getattr(self, "scale", None)
        if isinstance(scale, Mapping) and scale.keys() != params.keys():
            return cast(Prior, replace(cast(Any, self), scale={name: self.scale_of(name) for name in params}))
        return self

    def log_prob(self, params: Params) -> Tensor:
        """Log density summed over all entries: a scalar."""
        if (found := self.resolve(params)) is not self:
            return found.log_prob(params)
        return total([self.density(x, self.scale_of(name)).sum() for name, x in params.items()])

    def grad(self, params: Params) -> Params:
        """Gradient of ``log_prob`` for each parameter."""
        if (found := self.resolve(params)) is not self:
            return found.grad(params)
        return {name: self.score(x, self.scale_of(name)) for name, x in params.items()}

    def at(self, values: Params) -> Prior:
        """This prior with what depends on the start values worked out (most do not)."""
        return self

    def with_num_data(self, num_data: int) -> Prior:
        """This prior with what depends on the number of data worked out (most do not)."""
        return self

    def extra(self, params: Params) -> dict[str, Extra]:
        """Sampled parameters of the prior itself (none for most)."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Name and settings as plain values."""
        settings: dict[str, Any] = asdict(self) if is_dataclass(self) else {}
        return {"name": type(self).__name__, **settings}


@dataclass(frozen=True)
class Normal(Prior):
    """Independent normal entries, ``N(0, scale^2)``.

    Example:
        >>> prior = Normal({"*.weight": 0.5, "*": 2.0})
        >>> prior.grad({"fc.weight": torch.ones(1), "fc.bias": torch.ones(1)})
        {'fc.weight': tensor([-4.]), 'fc.bias': tensor([-0.2500])}
    """

    scale: float | Mapping[str, float] = 1.0

    def density(self, x: Tensor, scale: float) -> Tensor:
        return -0.5 * (x / scale).square() - (math.log(scale) + 0.5 * LOG_2PI)

    def score(self, x: Tensor, scale: float) -> Tensor:
        return x * (-(scale**-2))

    # The common prior runs at every step, so it has list kernels: few launches whatever the number of tensors.
    def log_prob(self, params: Params) -> Tensor:
        scales = [self.scale_of(name) for name in params]
        constant = sum(x.numel() * (math.log(s) + 0.5 * LOG_2PI) for x, s in zip(params.values(), scales, strict=True))
        scaled = multiply(list(params.values()), [1 / s for s in scales])
        flat = torch.cat([x.reshape(-1) for x in scaled])
        return -0.5 * torch.dot(flat, flat) - constant

    def grad(self, params: Params) -> Params:
        factors = [-(self.scale_of(name) ** -2) for name in params]
        return dict(zip(params, multiply(list(params.values()), factors), strict=True))


@dataclass(frozen=True)
class Laplace(Prior):
    """Independent Laplace entries, density ``exp(-|x|/scale) / (2 scale)``; the gradient at 0 is taken as 0."""

    scale: float | Mapping[str, float] = 1.0

    def density(self, x: Tensor, scale: float) -> Tensor:
        return -x.abs() / scale - math.log(2 * scale)

    def score(self, x: Tensor, scale: float) -> Tensor:
        return x.sign() / -scale


@dataclass(frozen=True)
class StudentT(Prior):
    """Independent Student-t entries with ``df`` degrees of freedom."""

    df: float = 4.0
    scale: float | Mapping[str, float] = field(default=1.0, kw_only=True)

    def density(self, x: Tensor, scale: float) -> Tensor:
        return student_t_log_prob(x / scale, self.df) - math.log(scale)

    def score(self, x: Tensor, scale: float) -> Tensor:
        return -(self.df + 1) * x / (self.df * scale**2 + x.square())


@dataclass(frozen=True)
class Flat(Prior):
    """The improper constant prior: log density 0 everywhere."""

    def log_prob(self, params: Params) -> Tensor:
        return next(iter(params.values())).new_zeros(())

    def grad(self, params: Params) -> Params:
        return {name: torch.zeros_like(x) for name, x in params.items()}


@dataclass(frozen=True)
class HalfNormal(Prior):
    """The absolute value of ``N(0, scale^2)``."""

    scale: float | Mapping[str, float] = 1.0
    median_factor: ClassVar[float] = 0.6744897501960817

    def density(self, x: Tensor, scale: float) -> Tensor:
        return -0.5 * (x / scale).square() + (0.5 * math.log(2 / math.pi) - math.log(scale))

    def score(self, x: Tensor, scale: float) -> Tensor:
        return x * (-(scale**-2))


@dataclass(frozen=True)
class HalfCauchy(Prior):
    """The absolute value of a Cauchy: half of its mass is below ``scale``, with a long tail above."""

    scale: float | Mapping[str, float] = 1.0

    def density(self, x: Tensor, scale: float) -> Tensor:
        return math.log(2 / (math.pi * scale)) - (x / scale).square().log1p()

    def score(self, x: Tensor, scale: float) -> Tensor:
        return -2 * x / (scale**2 + x.square())


@dataclass(frozen=True)
class LogNormal(Prior):
    """A positive number whose logarithm is ``N(log(scale), sigma^2)``: ``scale`` is its median."""

    scale: float | Mapping[str, float] = 1.0
    sigma: float = 1.0

    def density(self, x: Tensor, scale: float) -> Tensor:
        z = (x.log() - math.log(scale)) / self.sigma
        return -0.5 * z.square() - x.log() - (math.log(self.sigma) + 0.5 * LOG_2PI)

    def score(self, x: Tensor, scale: float) -> Tensor:
        return -(1 + (x.log() - math.log(scale)) / self.sigma**2) / x


@dataclass(frozen=True)
class Exponential(Prior):
    """Density ``exp(-x/scale) / scale``; ``scale`` is the mean."""

    scale: float | Mapping[str, float] = 1.0
    median_factor: ClassVar[float] = math.log(2)

    def density(self, x: Tensor, scale: float) -> Tensor:
        return -x / scale - math.log(scale)

    def score(self, x: Tensor, scale: float) -> Tensor:
        return torch.full_like(x, -1 / scale)


PositivePrior = HalfNormal | HalfCauchy | LogNormal | Exponential
"""Priors of positive numbers: for positive parameters, noise scales and hyperparameters."""
