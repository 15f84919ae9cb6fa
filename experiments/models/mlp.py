"""Fully connected networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from torch import nn

from experiments.models.layers import check_size, dropout_layer, initialise

Activation = Literal["relu", "tanh", "silu", "gelu"]

# With the gain that keeps variances about the same from layer to layer.
_ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "relu": (nn.ReLU, math.sqrt(2)),
    "tanh": (nn.Tanh, 1.0),
    "silu": (nn.SiLU, math.sqrt(2)),
    "gelu": (nn.GELU, math.sqrt(2)),
}


def mlp(
    in_features: int,
    hidden: int | Sequence[int],
    out_features: int,
    activation: Activation = "relu",
    *,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Linear layers with a nonlinearity between them.

    Args:
        in_features: features of an example.
        hidden: units of the hidden layer, or of each of several; an empty sequence makes a linear model.
        out_features: outputs.
        activation: the nonlinearity.
        dropout: probability to drop a hidden unit.

    Example:
        >>> net = mlp(13, 50, 1)
        >>> sum(p.numel() for p in net.parameters())
        751
    """
    if activation not in get_args(Activation):
        raise ValueError(f"activation = {activation!r} is not known; choose one of {sorted(_ACTIVATIONS)}")
    widths = list(hidden) if isinstance(hidden, Sequence) else [hidden]
    check_size("in_features", in_features)
    check_size("out_features", out_features)
    make, gain = _ACTIVATIONS[activation]
    layers: list[nn.Module] = []
    for width in widths:
        check_size("hidden", width)
        layers += [nn.Linear(in_features, width), make(), dropout_layer(dropout)]
        in_features = width
    net = nn.Sequential(*layers, nn.Linear(in_features, out_features))
    initialise(net, gain)
    return net
