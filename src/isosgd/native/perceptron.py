"""Networks of one hidden layer of ReLU units as one operation (``perceptron.h``).

Chains of small networks take many small matrix products, which are mostly overhead in a library. The operation
evaluates all networks of a batch in one call, and their gradients in another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isosgd.native import build

LEAST = 200_000  # products below which calling the operations costs more than it saves


class Names(NamedTuple):
    """Names of the parameters, in the order of the operation's arguments."""

    first_weight: str
    first_bias: str
    second_weight: str
    second_bias: str


def names_in(module: nn.Module) -> Names | None:
    """The names of a module's parameters if it is such a network and nothing else."""
    children = list(module._modules.items())  # `named_children` would leave out a layer's second place
    if type(module) is not nn.Sequential or not all(_plain(layer) for layer in (module, *module._modules.values())):
        return None
    layers = [
        (name, layer)
        for name, layer in children
        if not (type(layer) is nn.Identity or (type(layer) is nn.Dropout and not layer.training))
    ]
    if [type(layer) for _, layer in layers] != [nn.Linear, nn.ReLU, nn.Linear]:
        return None
    (first, a), _, (second, b) = layers
    assert isinstance(a, nn.Linear) and isinstance(b, nn.Linear)
    if a.bias is None or b.bias is None or a.out_features < build.FEWEST:
        return None
    return Names(f"{first}.weight", f"{first}.bias", f"{second}.weight", f"{second}.bias")


def _plain(layer: nn.Module | None) -> bool:
    """Whether a layer has no hooks and no forward of its own."""
    if layer is None or "forward" in vars(layer):
        return False
    return not any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def fits(theta: Tensor, batch: Any, units: int) -> bool:
    """Whether to use the operation for flat parameters and a batch; only in compiled code.

    The parameters are ``[*networks, d]``, the batch inputs ``[*networks, rows, in]`` and targets.
    """
    if not isinstance(batch, tuple) or len(batch) != 2 or batch[0].dim() != theta.dim() + 1:
        return False
    enough = batch[0].numel() * units >= LEAST
    return torch.compiler.is_compiling() and enough and build.ready(theta, batch[0])


def forward(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """``hidden = relu(x @ first.T + bias)`` and ``hidden @ second.T + offset``, where it `fits`.

    All tensors have the same leading dimensions, those of the networks. The outputs come first.
    """
    found: tuple[Tensor, Tensor] = torch.ops.isosgd.perceptron(x, first, bias, second, offset)
    return found


def backward(x: Tensor, second: Tensor, hidden: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the four parameters, from that of the outputs."""
    found: tuple[Tensor, ...] = torch.ops.isosgd.perceptron_backward(x, second, hidden, slope)
    return found


@build.shapes("perceptron")
def _outputs(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], w2.shape[-2])), x.new_empty((*x.shape[:-1], w1.shape[-2]))


@build.shapes("perceptron_backward")
def _gradients(x: Tensor, w2: Tensor, hidden: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    units, outs = w2.shape[-1], w2.shape[-2]
    sizes = (units, x.shape[-1]), (units,), (outs, units), (outs,)
    return tuple(x.new_empty((*x.shape[:-2], *size)) for size in sizes)
