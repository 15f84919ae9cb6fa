"""The space in which samplers move: parameters, which of them are positive, and their prior."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from isosgd.target.params import HALF, Params, match
from isosgd.target.priors import LOG_2PI, Extra, Flat, Joint, Normal, PositivePrior, Prior


class Space:
    """The parameters once their names and shapes are known.

    Args:
        values: natural values of the parameters, possibly with those that the prior samples.
        prior: prior of the user's parameters.
        own: sampled parameters of the likelihood.
        positive: names or patterns of the user's positive parameters.
    """

    def __init__(self, values: Params, prior: Prior, own: Mapping[str, Extra], positive: Collection[str]) -> None:
        if not values:
            raise ValueError("there are no parameters to sample; give at least one in init")
        hyper = prior.extra(values)
        if set(own) & set(hyper):
            raise ValueError(
                f"likelihood and prior both sample {next(iter(set(own) & set(hyper)))!r}; rename the prior's"
            )
        users = {name: x for name, x in values.items() if name not in hyper}
        for pattern in positive:
            if not any(match(name, [pattern]) for name in users):
                raise ValueError(f"positive has {pattern!r}, which fits no parameter; they are {list(users)}")
        self.extras: dict[str, Extra] = {**own, **hyper}
        self.positive = tuple(name for name in users if match(name, positive)) + tuple(self.extras)
        self.values: Params = users | {name: values.get(name, extra.value) for name, extra in self.extras.items()}
        self.prior = self._join(users, prior, own, hyper)

    def _join(self, users: Params, prior: Prior, own: Mapping[str, Extra], hyper: Mapping[str, Extra]) -> Prior:
        """The prior of all parameters. The user's prior never applies to parameters of the likelihood."""
        ruled = users | {name: self.values[name] for name in hyper}
        resolved = prior.resolve(ruled)
        parts = list(resolved.parts) if isinstance(resolved, Joint) else [(resolved, tuple(ruled))]
        for part, names in parts:
            wrong = [name for name in names if name not in self.positive]
            if isinstance(part, PositivePrior) and wrong:
                raise ValueError(
                    f"parameter {wrong[0]!r} has the prior {type(part).__name__} of positive numbers but is not "
                    f"declared positive; pass positive=[{wrong[0]!r}], or choose a prior of real numbers"
                )
        parts += [(extra.prior, (name,)) for name, extra in own.items()]
        return Joint(tuple(parts))

    def constrain(self, free: Params) -> Params:
        """Natural parameters from free ones."""
        if not self.positive:
            return dict(free)
        return {name: x.exp() if name in self.positive else x for name, x in free.items()}

    def unconstrain(self, natural: Params) -> Params:
        """Free parameters from natural ones."""
        return {name: x.log() if name in self.positive else x for name, x in natural.items()}

    def log_prior(self, free: Params, natural: Params) -> Tensor:
        """Log density of the free parameters, including the Jacobian of the exponential."""
        value = self.prior.log_prob(natural)
        for name in self.positive:
            value = value + free[name].sum()
        return value

    def score(self, natural: Params) -> Params:
        """Gradient of `log_prior` in the free parameters, in closed form if the prior has one."""
        scores = self.prior.grad(natural)
        for name in self.positive:  # chain rule, and the gradient of the Jacobian
            scores[name] = scores[name] * natural[name] + 1
        return scores

    @property
    def entries(self) -> bool:
        """Whether entries are independent with normal or flat priors, or positive with priors of positive numbers."""
        if not isinstance(self.prior, Joint):
            return False
        return all(
            isinstance(prior, PositivePrior if name in self.positive else Normal | Flat)
            for prior, names in self.prior.parts
            for name in names
        )

    def start(self, given: Params, device: torch.device | str | None, dtype: torch.dtype | None) -> Params:
        """Free leaf tensors from natural values, which are checked; the space's own values if none are given."""
        unknown = [name for name in given if name not in self.values]
        if unknown:
            raise ValueError(
                f"init has {unknown[0]!r}, which is no parameter of the target; they are {list(self.values)}"
            )
        first = next(iter(self.values.values()))
        natural = {}
        for name, default in self.values.items():
            value = given.get(name, default)
            # Parameters of likelihood and prior go to the device of the others.
            shape, home = (self.extras[name].value.shape, first) if name in self.extras else (default.shape, value)
            if value.shape != shape:
                raise ValueError(f"init[{name!r}] has shape {list(value.shape)}, expected {list(shape)}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"init[{name!r}] has values that are NaN or infinite; mend them")
            if name in self.positive and not bool((value > 0).all()):
                raise ValueError(f"init[{name!r}] must be positive, its least value is {value.min().item():g}")
            natural[name] = value.to(device or home.device, dtype or home.dtype)
        return {name: x.detach().clone().requires_grad_() for name, x in self.unconstrain(natural).items()}


class FlatPrior:
    """The log prior at flat parameters ``[chains, d]`` with independent entries (`Space.entries`).

    Args:
        space: of the parameters.
        shapes: of the parameters of a chain, in the order of the vector.
        like: a tensor with their dtype and device.
    """

    def __init__(self, space: Space, shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> None:
        priors = {name: prior for prior, names in cast(Joint, space.prior).parts for name in names}
        self.others, self.constant, end = list[tuple[slice, Prior, float]](), 0.0, 0
        precisions = []
        for name, shape in shapes.items():
            begin, end = end, end + torch.Size(shape).numel()
            prior, precision = priors[name], 0.0
            if isinstance(prior, Normal):
                scale = prior.scale_of(name)
                precision = scale**-2
                self.constant -= (end - begin) * (math.log(scale) + 0.5 * LOG_2PI)
            elif isinstance(prior, PositivePrior):
                self.others.append((slice(begin, end), prior, prior.scale_of(name)))
            precisions += [precision] * (end - begin)
        self.precisions = torch.tensor(precisions, dtype=like.dtype, device=like.device)

    def log_prob(self, theta: Tensor) -> Tensor:
        """As `Space.log_prior`, of each chain."""
        found = self.constant - 0.5 * theta.square() @ self.precisions
        for slot, prior, scale in self.others:
            found = found + (prior.density(theta[:, slot].exp(), scale) + theta[:, slot]).sum(-1)
        return found

    def score(self, theta: Tensor) -> Tensor:
        """As `Space.score`."""
        found = theta * -self.precisions
        for slot, prior, scale in self.others:
            natural = theta[:, slot].exp()
            found[:, slot] = prior.score(natural, scale) * natural + 1
        return found


def refuse_sharded(name: str, value: Any) -> None:
    """Raise an error for a DTensor, since targets need whole parameters."""
    if hasattr(value, "device_mesh"):
        raise ValueError(
            f"{name!r} is sharded over ranks (a DTensor, as fully_shard makes them), which sample does not take. "
            "Sample the sharded model in a loop, with ISGD and Collector(store=...); make its target before it is "
            "sharded. Or, where it fits one device, put it together on every rank (full_tensor()), and sample with "
            "parallel='data'"
        )


def as_parameter(name: str, value: Any) -> Tensor:
    """A start value as a tensor that can be sampled."""
    if not isinstance(name, str):
        raise TypeError(f"init must map names to tensors, got the key {name!r}")
    refuse_sharded(name, value)
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"init[{name!r}] must be a tensor, got {type(value).__name__}") from error
    if not tensor.is_floating_point():
        raise TypeError(
            f"init[{name!r}] is {tensor.dtype}; only real floating-point parameters can be sampled: use floats"
        )
    if not tensor.numel():
        raise ValueError(f"init[{name!r}] has shape {list(tensor.shape)}, so there is nothing to sample in it")
    # Most steps are smaller than the spacing of half-precision numbers.
    return tensor.detach().clone() if tensor.dtype not in HALF else tensor.detach().float()
