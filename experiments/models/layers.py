"""What the networks share: first weights, dropout, and checks of sizes."""

from __future__ import annotations

import math

from torch import nn


def initialise(model: nn.Module, gain: float = math.sqrt(2)) -> None:
    """He's first weights: normal with standard deviation ``gain / sqrt(fan-in)``; no biases.

    The last layer, which no nonlinearity follows, gets a gain of 1. Normalisation layers keep their ones and zeros.

    References:
        He, Zhang, Ren and Sun, Delving deep into rectifiers, 2015.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for layer in layers:
        fan_in = layer.weight[0].numel()
        nn.init.normal_(layer.weight, std=(1.0 if layer is layers[-1] else gain) / math.sqrt(fan_in))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def dropout_layer(p: float) -> nn.Module:
    """Dropout with this probability; a layer that does nothing for 0, so that names of parameters do not change.

    Example:
        >>> dropout_layer(0.1), dropout_layer(0.0)
        (Dropout(p=0.1, inplace=False), Identity())
    """
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise ValueError(f"dropout = {p!r} must be a probability of at least 0 and below 1")
    return nn.Dropout(p) if p else nn.Identity()


def check_size(name: str, value: int) -> None:
    """Refuse a number of features or classes that is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} = {value!r} must be an integer of at least 1")
