"""The weight decay that an optimizer trained a network with."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

PENALISED = (
    optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    optim.ASGD,
)  # fmt: skip
"""Optimizers whose decay is the gradient of a penalty, unless a group says that it is decoupled."""


def decays_of(optimizer: optim.Optimizer, model: nn.Module, names: list[str]) -> dict[str, float]:
    """Weight decay of each of these parameters of a module, by name.

    Args:
        optimizer: of the training; it holds the module's own parameters.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0.0))
        if decay and _decoupled(optimizer, group):
            raise ValueError(
                f"the weight decay of {type(optimizer).__name__} is not the gradient of a penalty, so there is no "
                "prior that it stands for: it shrinks weights beside steps that are divided by the size of gradients. "
                "Pass prior='empirical', whose scales are those of the trained layers, or a prior of your own"
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
    return {name: found[id(parameters[name])] for name in names}


def _decoupled(optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the decay of a group is that of no penalty, as far as is known."""
    if isinstance(optimizer, optim.AdamW) or not isinstance(optimizer, PENALISED):
        return True
    return bool(group.get("decoupled_weight_decay", False))
