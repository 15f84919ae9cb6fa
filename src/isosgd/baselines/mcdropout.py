"""MC-dropout (Gal and Ghahramani 2016): a network with units dropped at random.

Each input of a layer with weights W is dropped with probability p and the others are scaled by 1 / (1 - p). With m the
mask divided by 1 - p, ``W (m * x) = (W diag(m)) x``: a mask scales the columns of the weight, so that a draw is a set
of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from isosgd.baselines.base import Baseline, Training, TrainingPlan
from isosgd.engine.chains import Chains
from isosgd.target import Params, Target
from isosgd.target.params import match

DEFAULT = 0.1
Rates = float | Mapping[str, float] | None


class MCDropout(Baseline):
    """Draws are the trained weights under random dropout masks.

    Targets no posterior: the draws scatter around weights that minimise the mean loss under dropout, with a covariance
    that depends on p, not on the number of examples: for a linear model with weights w, ``diag(p / (1 - p) w^2)``.

    Departures from the paper, all because draws are weights: a draw has one mask for all examples, and in training one
    for each minibatch (the expected loss is the same); convolutions drop whole channels; and dropout layers of the
    model act on the next linear or convolutional layer that the model calls. A model without any, or a target that is
    not a module, gets masks.

    Args:
        p: dropout probability: one for all linear and convolutional layers but the first (or for the only one); or by
            names or patterns of layers. None: those of the model's own dropout layers, else 0.1.
        units: for a target that is not a module: names of its weights, with the axis of their inputs.
        train_lr: the initial rate of Adam.

    Example:
        >>> from isosgd import Target, sample
        >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> target = Target.from_module(torch.nn.Linear(3, 1), "gaussian")
        >>> posterior = sample(target, (x, x[:, :1]), method="mcdropout", p=0.5, draws=4, warmup=100, progress=False)
        >>> posterior.draws["weight"].shape, bool((posterior.draws["weight"] == 0).any())
        (torch.Size([1, 4, 1, 3]), True)
    """

    targets = "dropout masks on the weights of least mean loss under dropout"
    paper = "Gal, Ghahramani 2016"
    departures = "one mask for all examples of a draw, folded into its weights; of convolutions, whole channels"

    def __init__(self, *, p: Rates = None, units: Mapping[str, int] | None = None, train_lr: float = 0.01) -> None:
        super().__init__(train_lr=train_lr)
        for value in p.values() if isinstance(p, Mapping) else [] if p is None else [p]:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"p = {value!r} must be a probability of at least 0 and below 1")
        self.p, self.units = p, units

    def run(self, training: Training, plan: TrainingPlan) -> list[Params]:
        chains = training.chains
        weights = masked_weights(chains.target, self.p, self.units, plan.example)
        if plan.training:
            training.train(plan.training, self.train_lr, lambda: self._gradient(training, weights))
        here, found = chains.snapshot(), []
        for _ in range(plan.draws):
            self._apply_masks(chains, weights, training.generator)
            found.append(chains.natural())
            chains.restore(here)
        return found

    @torch.no_grad()
    def _apply_masks(self, chains: Chains, weights: list[MaskedWeight], generator: torch.Generator) -> Params:
        """Multiply the weights by new masks; returns the masks."""
        masks = {weight.name: weight.mask(chains, generator) for weight in weights}
        for name, mask in masks.items():
            chains.params[name].mul_(mask)
        return masks

    def _gradient(self, training: Training, weights: list[MaskedWeight]) -> None:
        """Gradient of the loss under new masks, which apply to the likelihood but not to the prior."""
        chains = training.chains
        here, prior = chains.snapshot(), _prior_score(chains)
        masks = self._apply_masks(chains, weights, training.generator)
        masked = _prior_score(chains)
        chains.evaluate()
        chains.restore(here)
        with torch.no_grad():
            for name, leaf in chains.params.items():
                assert leaf.grad is not None
                likelihood = (leaf.grad + masked[name] / chains.num_data) * masks.get(name, 1.0)
                leaf.grad = likelihood - prior[name] / chains.num_data
        training.count("training")
        training.fix_scales()


@torch.no_grad()
def _prior_score(chains: Chains) -> Params:
    score = chains.target.prior_score
    found: Params = score(chains.params) if chains.many is None else vmap(score)(chains.params)
    return found


# -- masks ------------------------------------------------------------------------------------------------------------


class MaskedWeight(NamedTuple):
    """A weight whose inputs are dropped: number of inputs, groups of a convolution, shape of its mask, and p."""

    name: str
    inputs: int
    groups: int
    shape: tuple[int, ...]
    p: float

    def mask(self, chains: Chains, generator: torch.Generator) -> Tensor:
        """A random factor of the weight for each chain."""
        like = chains.params[self.name]
        drawn = torch.rand(chains.count, self.inputs, generator=generator, device=like.device)
        mask = (drawn >= self.p).to(like.dtype) / (1.0 - self.p)
        if self.groups > 1:  # rows of a group see the inputs of their group only
            mask = mask.view(chains.count, self.groups, 1, -1).expand(-1, -1, self.shape[0] // self.groups, -1)
        mask = mask.reshape(chains.count, *self.shape)
        return mask if chains.many is not None else mask[0]


def masked_weights(target: Target, p: Rates, units: Mapping[str, int] | None, example: Any) -> list[MaskedWeight]:
    """The weights whose inputs are dropped; ``example`` is used to find the order in which the model calls layers."""
    free = target.initial()
    if target.module is None:
        found = _by_axis(target, free, p, units)
    elif units is not None:
        raise ValueError("units is for targets that are not modules: this one has layers, name them in p")
    else:
        found = _by_layer(target, target.module._module, free, p, example)
    weights = [weight for weight in found if weight.p > 0]
    if not weights:
        raise ValueError(
            f"nothing is ever dropped (p = {p!r}): give p above 0 for a linear or convolutional layer that is sampled"
        )
    return weights


def _by_axis(target: Target, free: Params, p: Rates, units: Mapping[str, int] | None) -> Iterator[MaskedWeight]:
    positive = target.describe()["positive"]
    weights = [name for name in free if name not in positive and free[name].ndim]
    if not units:
        raise ValueError(
            "this target is not a module, so it has no layers whose inputs could be dropped: pass units=, a dict from "
            f"names of weights to the axis of their inputs; its parameters are {list(free)}"
        )
    for name, axis in units.items():
        if name not in weights:
            raise ValueError(f"units has {name!r}, which is not a weight of the target; choose from {weights}")
        shape = free[name].shape
        if isinstance(axis, bool) or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            raise ValueError(f"units[{name!r}] = {axis!r} is not an axis of a weight of shape {list(shape)}")
        mask = [1] * len(shape)
        mask[axis] = shape[axis]
        yield MaskedWeight(name, shape[axis], 1, tuple(mask), _rate(name, p))


def _by_layer(target: Target, module: nn.Module, free: Params, p: Rates, example: Any) -> Iterator[MaskedWeight]:
    layers: dict[str, nn.Linear | _ConvNd] = {
        prefix: layer
        for prefix, layer in module.named_modules()
        if isinstance(layer, nn.Linear | _ConvNd) and _weight(prefix) in free
    }
    if isinstance(p, Mapping):
        for pattern in p:
            if not any(match(prefix, [pattern]) is not None for prefix in layers):
                raise ValueError(f"p has {pattern!r}, which fits no layer with sampled weights: {list(layers)}")
    own = _own_rates(target, module, free, layers, example) if p is None else {}
    for number, (prefix, layer) in enumerate(layers.items()):
        first = number == 0 and len(layers) > 1 and not isinstance(p, Mapping)
        rate = own.get(prefix, 0.0) if own else 0.0 if first else _rate(prefix, p)
        uses = sum(x is layer.weight for other in module.modules() for x in other._parameters.values())
        if rate > 0 and uses > 1:
            raise ValueError(
                f"the weight of layer {prefix!r} is shared with another layer, which its mask would affect as well: "
                "name other layers in p"
            )
        yield _masked(_weight(prefix), layer, rate)


def _masked(name: str, layer: nn.Linear | _ConvNd, p: float) -> MaskedWeight:
    if isinstance(layer, nn.Linear):
        return MaskedWeight(name, layer.in_features, 1, (1, layer.in_features), p)
    window = [1] * (layer.weight.ndim - 2)
    if isinstance(layer, _ConvTransposeNd):  # inputs come first
        return MaskedWeight(name, layer.in_channels, 1, (layer.in_channels, 1, *window), p)
    rows = layer.out_channels if layer.groups > 1 else 1
    return MaskedWeight(name, layer.in_channels, layer.groups, (rows, layer.in_channels // layer.groups, *window), p)


def _own_rates(
    target: Target, module: nn.Module, free: Params, layers: Mapping[str, nn.Module], example: Any
) -> dict[str, float]:
    """Rates of the model's own dropout layers, by the layer that is called next."""
    dropouts = [m for m in module.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    prefixes = {id(layer): prefix for prefix, layer in layers.items()}
    found: dict[str, float] = {}
    kept = 1.0  # probability that the dropout layers called since the last layer with weights keep a unit

    def before(module: nn.Module, _: Any) -> None:
        nonlocal kept
        if isinstance(module, _DropoutNd):
            kept *= 1.0 - module.p
        elif kept < 1.0:
            found[prefixes[id(module)]] = 1.0 - kept
            kept = 1.0

    if dropouts:
        hooks = [m.register_forward_pre_hook(before) for m in {*dropouts, *layers.values()}]
        try:
            target.log_likelihood(free, example)
        finally:
            for hook in hooks:
                hook.remove()
    return found


def _weight(prefix: str) -> str:
    return f"{prefix}.weight" if prefix else "weight"


def _rate(name: str, p: Rates) -> float:
    if isinstance(p, Mapping):
        pattern = match(name, p)
        return 0.0 if pattern is None else p[pattern]
    return DEFAULT if p is None else p
