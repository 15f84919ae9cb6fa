"""Automatic relevance determination: a network finds out which of its inputs matter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isosgd.target.elementwise import LOG_2PI, Extra, HalfCauchy, PositivePrior, Prior
from isosgd.target.params import Params


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
        if not isinstance(self.hyper, PositivePrior):
            raise TypeError(f"Relevance: hyper = {self.hyper!r}; give a prior of positive numbers: HalfCauchy()")

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
