"""Networks of one hidden layer of ReLU units as one operation (``perceptron.h``).

Chains of small networks are many small matrix products, of which a library makes mostly overhead. The operation takes
all networks of a batch in one call, from the inputs to the outputs, and the gradient likewise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isosgd.native import build

LEAST = 200_000  # products: below, to call the operations takes longer than they save


class Names(NamedTuple):
    """Of the parameters, in the order in which the operation takes them."""

    first_weight: str
    first_bias: str
    second_weight: str
    second_bias: str


def names_in(module: nn.Module) -> Names | None:
    """Where a module is such a network and nothing else, the names of its parameters."""
    children = list(module._modules.items())  # all of them: `named_children` leaves out a layer's second place
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
    """Whether nobody has changed what a layer does."""
    if layer is None or "forward" in vars(layer):
        return False
    return not any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def fits(theta: Tensor, batch: Any, units: int) -> bool:
    """Whether the operation is there, and worth its call, for flat parameters and a batch: in compiled code alone.

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
