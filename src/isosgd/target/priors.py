"""Priors, with closed-form gradients.

Every prior gives ``log_prob(params)`` (a scalar, constants included) and ``grad(params)`` (a gradient for each
parameter, without autograd), both in natural parameters. Priors of independent entries act element by element, so that
they can be mapped over a leading dimension of chains.

Where a scale depends on shapes or patterns, ``prior.resolve(params)`` is the same prior with one number for each name;
that one runs at every step.

Example:
    >>> import torch
    >>> params = {"fc.weight": torch.ones(2, 4), "fc.bias": torch.ones(2)}
    >>> FanInNormal().grad(params)["fc.weight"][0]
    tensor([-4., -4., -4., -4.])
    >>> PerParameter({"*.bias": Flat(), "*": Laplace(0.5)}).grad(params)["fc.bias"]
    tensor([0., 0.])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn, optim
from torch._C._functorch import is_functorch_wrapped_tensor

from isosgd.errors import check_positive, nearest
from isosgd.names import layer_of
from isosgd.target.params import Params, lookup, match

LOG_2PI = math.log(2 * math.pi)
# Optimizers whose weight decay is the gradient of a penalty, unless a group says that it is decoupled.
PENALISED = (
    optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    optim.ASGD,
)  # fmt: skip


@dataclass(frozen=True)
class Extra:
    """A positive parameter that a likelihood or a prior brings along and that is sampled, by its logarithm.

    Attributes:
        value: its start value.
        prior: its own prior.
        noise_scale: whether the noise of ``y`` is multiplied by it. Every example is known to carry information about
            the logarithm of such a scale; nothing is known of other parameters, such as degrees of freedom.
    """

    value: Tensor
    prior: PositivePrior
    noise_scale: bool = False


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


class Prior:
    """A density over named parameters.

    A prior of independent entries implements ``density`` and ``score``, of an entry at a ``scale``: one number, or a
    mapping from names or shell patterns (``"fc1.*"``) to numbers. A prior that stands for another one implements
    ``resolve``; any other ``log_prob`` and ``grad``.
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
        if isinstance(scale, Mapping):
            return lookup(name, scale, f"{type(self).__name__}: the mapping of scales")
        return scale

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


def fan_in_factor(x: Tensor) -> float:
    """``1 / sqrt(fan_in)`` of a weight, 1 for a bias or another vector."""
    return math.sqrt(x.shape[0] / x.numel()) if x.ndim >= 2 and x.numel() else 1.0


@dataclass(frozen=True)
class FanInNormal(Prior):
    """Normal entries whose scale keeps activations of order one: the usual prior of a network.

    A tensor of two or more dimensions gets standard deviation ``scale / sqrt(fan_in)``, with
    ``fan_in = numel / shape[0]`` as in ``nn.Linear`` and ``nn.Conv2d``; biases and other vectors get ``scale``.
    """

    scale: float = 1.0

    def resolve(self, params: Params) -> Prior:
        return Normal({name: self.scale * fan_in_factor(x) for name, x in params.items()})


@dataclass(frozen=True)
class Empirical(Prior):
    """Normal entries whose scale is that of the trained network: empirical Bayes, a scale for each tensor.

    The scale of a tensor is the root mean square of its values when the target is made, and at least ``least``. Meant
    for trained networks, image classifiers above all; on tables of some hundred rows the training's `WeightDecay` was
    better. For an untrained network it describes the initialisation.

    Args:
        scale: scales by name; None to take them from the start values of the target, rounded to four digits.
        least: lower bound of a scale, for tensors that are all but zero.

    Example:
        >>> import torch
        >>> from isosgd import Target
        >>> target = Target.from_module(torch.nn.Linear(2, 1, bias=False), "bernoulli", "empirical")
        >>> list(target.describe()["prior"]["scale"])
        ['weight']
    """

    scale: Mapping[str, float] | None = None
    least: float = 1e-2

    def __post_init__(self) -> None:
        object.__setattr__(self, "least", check_positive("Empirical: least", self.least))
        if self.scale is not None:
            object.__setattr__(self, "scale", Normal(self.scale).scale)

    def at(self, values: Params) -> Prior:
        if self.scale is not None:
            return self
        # In double precision on the CPU and rounded, so that a run that is loaded elsewhere has the same prior.
        sizes = {name: float(x.detach().double().cpu().square().mean().sqrt()) for name, x in values.items()}
        for name, size in sizes.items():
            if not math.isfinite(size):
                raise ValueError(f"Empirical: {name!r} has values that are NaN or infinite, so that it has no scale")
        return replace(self, scale={name: max(float(f"{size:.4g}"), self.least) for name, size in sizes.items()})

    def resolve(self, params: Params) -> Prior:
        if self.scale is None:
            raise ValueError(
                "the scales of an Empirical prior are those of start values, which are not known: pass init= to Target"
            )
        return Normal(self.scale).resolve(params)


@dataclass(frozen=True)
class WeightDecay(Prior):
    """The Gaussian prior that an optimizer's weight decay stands for: of precision ``decay * N``; flat where it is 0.

    With decay d, SGD and Adam minimise ``mean loss + d/2 |w|^2``; over N data this is the potential
    ``sum of losses + d N/2 |w|^2``. The loss must be the mean negative log likelihood. A mean squared error is
    ``2 sigma^2`` times that: divide its decay by ``2 sigma^2``. The decay of AdamW corresponds to no density.

    Args:
        decay: one, or a mapping from names or shell patterns to decays.
        num_data: N; that of the data which are sampled by default.

    Example:
        >>> import torch
        >>> WeightDecay({"bias": 0.0, "*": 1e-3}, 2000).grad({"weight": torch.ones(1), "bias": torch.ones(1)})
        {'weight': tensor([-2.]), 'bias': tensor([0.])}
    """

    decay: float | Mapping[str, float]
    num_data: int | None = None

    def __post_init__(self) -> None:
        for value in self.decay.values() if isinstance(self.decay, Mapping) else [self.decay]:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"weight decay must be a number, got {value!r}")
            if not (math.isfinite(value) and float(value) >= 0):
                raise ValueError(f"weight decay must be finite and at least 0, got {value!r}")
        decay = self.decay
        plain = {name: float(x) for name, x in decay.items()} if isinstance(decay, Mapping) else float(decay)
        object.__setattr__(self, "decay", plain)
        if isinstance(self.decay, Mapping) and not self.decay:
            raise ValueError("WeightDecay: the mapping of decays is empty; give at least {'*': 1e-4}")

    @classmethod
    def of(cls, optimizer: optim.Optimizer, model: nn.Module, names: list[str]) -> WeightDecay:
        """The prior that an optimizer's weight decay stands for.

        Args:
            optimizer: the one that trained the module; it holds the module's own parameters.
            model: the module.
            names: parameters that are sampled.
        """
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        penalty = isinstance(optimizer, PENALISED) and not isinstance(optimizer, optim.AdamW)
        found: dict[int, float] = {}
        for group in optimizer.param_groups:
            decay = float(group.get("weight_decay", 0.0))
            if decay and (not penalty or group.get("decoupled_weight_decay", False)):
                raise ValueError(
                    f"the weight decay of {type(optimizer).__name__} is not the gradient of a penalty, so there is no "
                    "prior that it stands for: it shrinks weights beside steps that are divided by the size of "
                    "gradients. Pass prior='empirical', whose scales are those of the trained layers, or a prior of "
                    "your own"
                )
            found |= {id(p): decay for p in group["params"]}
        parameters = dict(model.named_parameters())
        missing = [name for name in names if id(parameters[name]) not in found]
        if missing:
            what = "none of the parameters" if len(missing) == len(names) else f"the parameter {missing[0]!r} not"
            raise ValueError(
                f"the optimizer holds {what} of this model: pass the optimizer that it was trained with and the model "
                "itself, not a copy of it, or weight_decay="
            )
        return cls({name: found[id(parameters[name])] for name in names})

    def with_num_data(self, num_data: int) -> Prior:
        return replace(self, num_data=num_data) if self.num_data is None else self

    def resolve(self, params: Params) -> Prior:
        table = self.decay if isinstance(self.decay, Mapping) else {"*": self.decay}
        decays = {name: lookup(name, table, "WeightDecay: the mapping of decays") for name in params}
        if not any(decays.values()):
            return Flat()
        if self.num_data is None:
            return self
        scales = {name: (decay * self.num_data) ** -0.5 for name, decay in decays.items() if decay}
        flat = tuple(name for name in decays if name not in scales)
        return Joint(((Normal(scales), tuple(scales)), (Flat(), flat))) if flat else Normal(scales)

    def scale_of(self, name: str) -> float:
        raise ValueError(
            "the precision that a weight decay stands for is decay * N, and N is not known yet: pass num_data="
        )


@dataclass(frozen=True)
class Around(Prior):
    """Normal entries around given values: a pull to a trained network, for sampling near it (see `isosgd.llc`).

    At temperature T of `isosgd.sample` it is tempered like the likelihood: for a pull of precision gamma give gamma T.

    Args:
        start: the values by name, such as a ``state_dict``; entries that are no parameters are left alone.
        precision: one number, or a mapping from names or shell patterns to numbers.

    Example:
        >>> import torch
        >>> prior = Around({"w": torch.tensor([1.0, 2.0])}, precision=4.0)
        >>> prior.grad({"w": torch.tensor([1.5, 2.0])})
        {'w': tensor([-2., -0.])}
    """

    start: Mapping[str, Tensor] = field(repr=False)
    precision: float | Mapping[str, float] = 1.0
    normal: Normal = field(init=False, repr=False)

    def __post_init__(self) -> None:
        start = {name: torch.as_tensor(x).detach().clone() for name, x in self.start.items()}
        bad = next((name for name, x in start.items() if not bool(x.isfinite().all())), None)
        if bad is not None:
            raise ValueError(f"Around: start[{bad!r}] has values that are NaN or infinite; mend them")
        several = isinstance(self.precision, Mapping)
        table = self.precision if isinstance(self.precision, Mapping) else {"*": self.precision}
        scales = {key: check_positive(f"Around: precision of {key!r}", x) ** -0.5 for key, x in table.items()}
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "normal", Normal(scales if several else scales["*"]))

    def _from_start(self, params: Params) -> Params:
        missing = next((name for name in params if name not in self.start), None)
        if missing is not None:
            raise ValueError(f"Around: start has no values of parameter {missing!r}; it has {list(self.start)}")
        return {name: x - self.start[name].to(device=x.device, dtype=x.dtype) for name, x in params.items()}

    def log_prob(self, params: Params) -> Tensor:
        return self.normal.log_prob(self._from_start(params))

    def grad(self, params: Params) -> Params:
        return self.normal.grad(self._from_start(params))

    def describe(self) -> dict[str, Any]:
        sizes = {name: float(f"{float(x.double().square().mean().sqrt()):.6g}") for name, x in self.start.items()}
        return {"name": "Around", "precision": self.precision, "root_mean_squares_of_start": sizes}


def _check_hyper(prior: HierarchicalNormal | Relevance) -> None:
    if not isinstance(prior.hyper, PositivePrior):
        kind = type(prior).__name__
        raise TypeError(f"{kind}: hyper = {prior.hyper!r}; give a prior of positive numbers: HalfCauchy()")


class _Groups:
    """For each tensor the index of its scale, its number of entries, and the fixed factor of its scale."""

    def __init__(self, index: list[int], counts: list[int], factors: list[float]) -> None:
        self._lists = (index, counts, factors)
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def like(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three as tensors beside ``x``, made once for each device and type."""
        key = (x.device, x.dtype)
        if key not in self._tensors:
            index, counts, factors = self._lists
            self._tensors[key] = (
                torch.tensor(index, device=x.device),
                torch.tensor(counts, device=x.device, dtype=x.dtype),
                torch.tensor(factors, device=x.device, dtype=x.dtype),
            )
        return self._tensors[key]


@dataclass(frozen=True)
class HierarchicalNormal(Prior):
    """Normal entries whose scale is sampled too, under a hyperprior.

    The scale is the positive parameter ``"prior.scale"``, of shape ``[]`` for one scale, else ``[groups]`` with the
    groups in the order of the parameters. Entries of a tensor are ``N(0, (factor * scale)^2)``, the factor
    ``1/sqrt(fan_in)`` for weights as in `FanInNormal`, or 1 without ``fan_in``.

    Args:
        hyper: prior of each scale.
        per: one scale for ``"all"``, for each ``"layer"``, or for each ``"tensor"``.
        fan_in: whether scales are relative to ``1/sqrt(fan_in)``.
        name: name of the scale among the parameters; two such priors in one model need two names.
    """

    hyper: PositivePrior = field(default_factory=HalfCauchy)
    per: Literal["all", "layer", "tensor"] = "layer"
    fan_in: bool = True
    name: str = "prior.scale"
    groups: _Groups | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_hyper(self)
        if self.per not in ("all", "layer", "tensor"):
            raise ValueError(f"HierarchicalNormal: per = {self.per!r}; choose 'all', 'layer' or 'tensor'")

    def _labels(self, params: Params) -> list[str]:
        names = [name for name in params if name != self.name]
        return {"all": ["all"] * len(names), "layer": [layer_of(name) for name in names], "tensor": names}[self.per]

    def resolve(self, params: Params) -> HierarchicalNormal:
        labels = self._labels(params)
        order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        tensors = [x for name, x in params.items() if name != self.name]
        groups = _Groups(
            index=[order[label] for label in labels],
            counts=[x.numel() for x in tensors],
            factors=[fan_in_factor(x) if self.fan_in else 1.0 for x in tensors],
        )
        return replace(self, groups=groups)

    def extra(self, params: Params) -> dict[str, Extra]:
        shape = () if self.per == "all" else (len(set(self._labels(params))),)
        like = next(iter(params.values()))
        return {self.name: Extra(like.new_full(shape, self.hyper.median), self.hyper)}

    def log_prob(self, params: Params) -> Tensor:
        if self.groups is None:
            return self.resolve(params).log_prob(params)
        scale = params[self.name]
        index, counts, factors = self.groups.like(scale)
        stds = scale.reshape(-1)[index] * factors
        squares = torch.stack([x.square().sum() for name, x in params.items() if name != self.name])
        normal = -0.5 * squares / stds.square() - counts * (stds.log() + 0.5 * LOG_2PI)
        return normal.sum() + self.hyper.log_prob({self.name: scale})

    def grad(self, params: Params) -> Params:
        if self.groups is None:
            return self.resolve(params).grad(params)
        scale = params[self.name]
        index, counts, factors = self.groups.like(scale)
        scales = scale.reshape(-1)[index]
        precisions = (scales * factors) ** -2
        tensors = [x for name, x in params.items() if name != self.name]
        squares = torch.stack([x.square().sum() for x in tensors])
        by_tensor = (squares * precisions - counts) / scales
        by_group = torch.zeros_like(scale).reshape(-1).index_add(0, index, by_tensor).reshape(scale.shape)
        scores = iter([x * factor for x, factor in zip(tensors, (-precisions).unbind(), strict=True)])
        hyper = self.hyper.grad({self.name: scale})[self.name]
        return {name: by_group + hyper if name == self.name else next(scores) for name in params}

    def describe(self) -> dict[str, Any]:
        return {
            "name": "HierarchicalNormal",
            "hyper": self.hyper.describe(),
            "per": self.per,
            "fan_in": self.fan_in,
            "parameter": self.name,
        }


@dataclass(frozen=True)
class Relevance(Prior):
    """Normal weights of a first layer, with a scale for each input that is sampled too.

    Weights ``[outputs, inputs]`` are ``N(0, scale_j^2 / inputs)`` in column j. The scales are the positive parameter
    ``"prior.relevance"``, ``[inputs]``: an input that explains nothing gets a small one, and drops out.

    Args:
        hyper: prior of each scale.
        name: name of the scales among the parameters.

    Example:
        >>> import torch
        >>> from isosgd import Target, priors
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> prior = {"0.weight": priors.Relevance(), "*": priors.HierarchicalNormal()}
        >>> Target.from_module(model, "gaussian", prior).initial()["prior.relevance"].shape
        torch.Size([3])

    References:
        Neal (1996), Bayesian learning for neural networks. MacKay (1994), Bayesian methods for backpropagation
        networks.
    """

    hyper: PositivePrior = field(default_factory=HalfCauchy)
    name: str = "prior.relevance"

    def __post_init__(self) -> None:
        _check_hyper(self)

    def _weight(self, params: Params) -> tuple[str, Tensor]:
        found = {name: x for name, x in params.items() if name != self.name}
        weights = [(name, x) for name, x in found.items() if x.ndim == 2]
        if len(found) != 1 or len(weights) != 1:
            shapes = {name: tuple(x.shape) for name, x in found.items()}
            raise ValueError(
                f"Relevance is the prior of one matrix of weights [outputs, inputs], but it was given {shapes}: name "
                "the weight of the first layer, and another prior for the rest, as in {'0.weight': Relevance(), '*': "
                "Normal()}"
            )
        return weights[0]

    def extra(self, params: Params) -> dict[str, Extra]:
        x = next((x for name, x in params.items() if name != self.name and x.ndim == 2), None)
        inputs = 1 if x is None else x.shape[1]  # where it fits nothing, `_weight` says so
        like = next(iter(params.values()))
        return {self.name: Extra(like.new_full((inputs,), self.hyper.median), self.hyper)}

    def log_prob(self, params: Params) -> Tensor:
        _, x = self._weight(params)
        scale = params[self.name]
        stds = scale / math.sqrt(x.shape[1])
        normal = -0.5 * x.square().sum(0) / stds.square() - x.shape[0] * (stds.log() + 0.5 * LOG_2PI)
        return normal.sum() + self.hyper.log_prob({self.name: scale})

    def grad(self, params: Params) -> Params:
        name, x = self._weight(params)
        scale = params[self.name]
        precision = x.shape[1] * scale**-2
        by_scale = (x.square().sum(0) * precision - x.shape[0]) / scale
        return {name: -precision * x, self.name: by_scale + self.hyper.grad({self.name: scale})[self.name]}

    def describe(self) -> dict[str, Any]:
        return {"name": "Relevance", "hyper": self.hyper.describe(), "parameter": self.name}


@dataclass(frozen=True)
class Joint(Prior):
    """Independent priors, each over the parameters named with it."""

    parts: tuple[tuple[Prior, tuple[str, ...]], ...]

    def log_prob(self, params: Params) -> Tensor:
        return total([prior.log_prob({name: params[name] for name in names}) for prior, names in self.parts])

    def grad(self, params: Params) -> Params:
        grads: Params = {}
        for prior, names in self.parts:
            grads |= prior.grad({name: params[name] for name in names})
        return grads


@dataclass(frozen=True)
class PerParameter(Prior):
    """A prior for each parameter, found by name or shell pattern; every parameter must find one.

    A name of its own goes before patterns, and patterns go in the order given.
    """

    table: Mapping[str, Prior]

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("prior: the mapping is empty; give at least {'*': Normal()}")
        for key, prior in self.table.items():
            if not isinstance(prior, Prior):
                raise TypeError(f"prior of {key!r} must be one of isosgd.priors, got {prior!r}")

    def _members(self, params: Params) -> list[tuple[Prior, Params]]:
        owned = {name for prior in self.table.values() for name in prior.extra(params)}
        members: dict[str, Params] = {pattern: {} for pattern in self.table}
        for name, x in params.items():
            if name in owned:
                continue
            pattern = match(name, self.table)
            if pattern is None:
                raise ValueError(
                    f"no prior for parameter {name!r}: the mapping has {list(self.table)}; add it, or '*' for the rest"
                )
            members[pattern][name] = x
        unused = [pattern for pattern, found in members.items() if not found]
        if unused:
            raise ValueError(f"prior of {unused[0]!r} fits no parameter; the parameters are {list(params)}")
        return [(self.table[pattern], found) for pattern, found in members.items()]

    def at(self, values: Params) -> Prior:
        return self._with([prior.at(mine) for prior, mine in self._members(values)])

    def with_num_data(self, num_data: int) -> Prior:
        return self._with([prior.with_num_data(num_data) for prior in self.table.values()])

    def _with(self, found: list[Prior]) -> Prior:
        """The same patterns with these priors in their places."""
        same = all(one is other for one, other in zip(found, self.table.values(), strict=True))
        return self if same else PerParameter(dict(zip(self.table, found, strict=True)))

    def extra(self, params: Params) -> dict[str, Extra]:
        extras: dict[str, Extra] = {}
        for prior, found in self._members(params):
            for name, extra in prior.extra(found).items():
                if name in extras:
                    raise ValueError(f"two priors sample a parameter {name!r}; give one of them another name=")
                extras[name] = extra
        return extras

    def resolve(self, params: Params) -> Joint:
        parts = []
        for prior, found in self._members(params):
            own = tuple(name for name in prior.extra(found) if name in params)
            parts.append((prior.resolve(found), (*found, *own)))
        return Joint(tuple(parts))

    def describe(self) -> dict[str, Any]:
        return {"name": "PerParameter", "table": {key: prior.describe() for key, prior in self.table.items()}}


@dataclass(frozen=True)
class FromCallable(Prior):
    """A user's log density; its gradient comes from autograd."""

    function: Callable[[Params], Tensor]

    def log_prob(self, params: Params) -> Tensor:
        value = self.function(params)
        if not isinstance(value, Tensor) or value.ndim:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ValueError(f"the prior's log density must be a scalar tensor, got {found}; sum it over parameters")
        return value

    def grad(self, params: Params) -> Params:
        # By a function's own gradient, which can be mapped over chains; zero where it does not depend on a parameter.
        found: Params = torch.func.grad(self.log_prob)({name: x.detach() for name, x in params.items()})
        return {name: x.detach() for name, x in found.items()}  # what the function closes over may want a gradient

    def describe(self) -> dict[str, Any]:
        return {"name": getattr(self.function, "__qualname__", type(self.function).__name__), "callable": True}


PriorLike = Prior | Mapping[str, Prior] | Callable[[Params], Tensor] | Literal["empirical"]


def as_prior(prior: PriorLike) -> Prior:
    """Any of the forms a user may give, as a prior."""
    if isinstance(prior, str):
        if prior != "empirical":
            close = nearest(prior, ["empirical"])
            raise ValueError(f"prior = {prior!r} is unknown: choose 'empirical', or one of isosgd.priors{close}")
        return Empirical()
    if isinstance(prior, type) and issubclass(prior, Prior):
        return prior()
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Mapping):
        return PerParameter(dict(prior))
    if callable(prior) and not isinstance(prior, type):
        return FromCallable(prior)
    raise TypeError(f"prior must be one of isosgd.priors, a mapping of them or a callable, got {prior!r}")
