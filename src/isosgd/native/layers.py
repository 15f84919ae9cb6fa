"""Networks of dense layers, of many chains in one call (``layers.cpp``), or by torch.

The networks are `isosgd.tables.network.Perceptron`, and plain modules of linear layers and activations in turns
(`network_of`). Products of small networks are so small that calling torch for each of them, and autograd for their
gradients, takes several times as long as the products. On a GPU, and without a compiler, torch makes those of
`Perceptron`, without autograd.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isosgd.native import build

LEAST = 500  # products of rows and weights of all chains below which building the library does not pay
THREADED = 10_000_000  # such products below which more threads lose on a busy machine
# Parameters of a chain from which torch is faster, where a hidden layer has fewer units than NARROW, or there is none.
NARROW, LARGE = 16, 30_000
ACTIVATIONS = ("relu", "silu", "tanh", "sigmoid", "gelu", "tanh gelu")  # in the order of ``with_activation``
KINDS: dict[type[nn.Module], Callable[[Any], str]] = {
    nn.ReLU: lambda _: "relu",
    nn.SiLU: lambda _: "silu",
    nn.Tanh: lambda _: "tanh",
    nn.Sigmoid: lambda _: "sigmoid",
    nn.GELU: lambda layer: "gelu" if layer.approximate == "none" else "tanh gelu",
}


class Hidden(NamedTuple):
    """A hidden layer: names of its parameters, and one of `ACTIVATIONS`."""

    weight: str
    bias: str | None
    activation: str


class Network(NamedTuple):
    """What is known of a network: hidden layers, and names of the output layer's parameters.

    To outputs times ``gate``, where there is one, come those of a linear path, the weights ``skip``. Inputs of several
    dimensions are flattened where the network ``flattens``; else there are none.
    """

    hidden: tuple[Hidden, ...]
    weight: str
    bias: str | None
    gate: str | None = None
    skip: str | None = None
    flattens: bool = False

    @property
    def names(self) -> list[str]:
        """Of all parameters."""
        layers = [(layer.weight, layer.bias) for layer in self.hidden]
        every = [*(name for layer in layers for name in layer), self.weight, self.bias, self.gate, self.skip]
        return [name for name in every if name is not None]


def network_of(module: nn.Module) -> Network | None:
    """The network that a module is, if it is linear layers with an activation between any two, and nothing else.

    Inputs may be flattened first, and layers may stand in several `nn.Sequential`.
    """
    try:
        layers = list(_layers(module, ""))
    except _Other:
        return None
    flattens = bool(layers) and type(layers[0][1]) is nn.Flatten
    if flattens:
        flat = layers.pop(0)[1]
        if (flat.start_dim, flat.end_dim) != (1, -1):
            return None
    linear, between = layers[::2], layers[1::2]
    if not linear or len(linear) != len(between) + 1 or len({id(layer) for _, layer in linear}) < len(linear):
        return None
    if any(type(layer) is not nn.Linear for _, layer in linear) or any(
        type(layer) not in KINDS for _, layer in between
    ):
        return None
    hidden = tuple(
        Hidden(_named(name, "weight"), _bias(name, layer), KINDS[type(kind)](kind))
        for (name, layer), (_, kind) in zip(linear, between, strict=False)
    )
    name, last = linear[-1]
    return Network(hidden, _named(name, "weight"), _bias(name, last), flattens=flattens)


def _named(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter


def _bias(name: str, layer: nn.Linear) -> str | None:
    return None if layer.bias is None else _named(name, "bias")


class _Other(Exception):
    """A layer is something else."""


def _layers(module: nn.Module | None, path: str) -> Iterator[tuple[str, Any]]:
    """All layers with their names, without those that do nothing."""
    if (
        module is None
        or "forward" in vars(module)
        or any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
    ):
        raise _Other
    if type(module) is nn.Sequential:
        for name, layer in module._modules.items():  # `named_children` would leave out a layer's second place
            yield from _layers(layer, f"{path}.{name}" if path else name)
    elif not (type(module) is nn.Identity or (type(module) is nn.Dropout and not module.training)):
        yield path, module


def network_of_tables(shapes: Mapping[str, tuple[int, ...]]) -> Network:
    """The network of `isosgd.tables.network.Perceptron`, from the shapes of its parameters."""
    count = sum(name.startswith("hidden.") and name.endswith(".weight") for name in shapes)
    hidden = tuple(Hidden(f"hidden.{i}.weight", f"hidden.{i}.bias", "silu") for i in range(count))
    return Network(hidden, "out.weight", "out.bias", "gate", "skip.weight")


class Density(NamedTuple):
    """Classes, or normal noise of one scale; and a prior of normal entries, half-Cauchy for the scale of the noise.

    Attributes:
        scale: place of the logarithm of the noise scale in flat parameters; negative if it is ``known``.
        known: the scale, if it is not sampled.
        prior: weight of the prior over N.
        cauchy: scale of the half-Cauchy.
        classes: whether outputs are logits, and targets labels.
        precisions: of the normal priors, ``[d]``; zero where there is none.
    """

    scale: int
    known: float
    prior: float
    cauchy: float
    classes: bool
    precisions: Tensor


@dataclass
class Updates:
    """Steps ``theta -= p``, or ``v = (1 - friction) v - p`` and ``theta += v``, with ``p = rate g + kick``.

    Along directions S it is ``p = rate f + S^T (back S f + add shared)`` with ``f = g + amplitude own``. With matrices
    it is ``p = pull g + push xi``; if these track the level of the noise, ``xi`` is as in
    `isosgd.geometry.full.Full.displace`.

    Attributes:
        drawn: kicks or innovations ``[steps, chains, d]``, or own and shared innovations ``[steps, chains, d + k]``.
        rate: ``[steps or 1, chains, d]``; None with matrices.
        friction: None without velocities.
        along: S ``[chains, k, d]``, ``back``, ``add`` and ``amplitude``; empty without directions.
        matrices: ``pull`` and ``push``, ``[chains, d, d]`` in float64; with a level ``shares`` and ``sight``, too.
        memory: weight of a step in the level.
    """

    drawn: Tensor
    rate: Tensor | None = None
    friction: float | None = None
    along: tuple[Tensor, ...] = ()
    matrices: tuple[Tensor, ...] = ()
    memory: float = 0.0


class Layers:
    """Outputs and gradients of the networks of all chains, from flat parameters ``[chains, d]``.

    Args:
        network: the network.
        shapes: of the parameters of a chain, in the order in which they are flat.
    """

    def __init__(self, network: Network, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.network, begin, at = network, 0, dict[str | None, int]({None: -1})
        for name, shape in shapes.items():
            at[name] = begin
            begin += int(torch.Size(shape).numel())
        self.total, self.kept = begin, torch.empty(0)
        hidden = network.hidden
        self.units = sum(shapes[layer.weight][0] for layer in hidden)
        narrow = min((shapes[layer.weight][0] for layer in hidden), default=0) < NARROW
        # A network of tables without hidden layers has another form.
        self.known = network.weight in shapes and not (narrow and self.total > LARGE)
        if not self.known:
            return
        curved, self.inputs = shapes[network.weight][0], shapes[(hidden[0] if hidden else network).weight][1]
        self.outs = curved if network.skip is None else shapes[network.skip][0]
        layers = [
            (*reversed(shapes[layer.weight]), at[layer.weight], at[layer.bias], ACTIVATIONS.index(layer.activation))
            for layer in hidden
        ]
        numbers = [
            *(self.total, 0, self.inputs, self.outs, curved),
            *(at[name] for name in (network.skip, network.gate, network.weight, network.bias)),
            *(len(layers), *(number for layer in layers for number in layer)),
        ]
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)  # in the order of ``Net``; the second are the rows

    def fits(self, theta: Tensor, x: Tensor) -> bool:
        """Whether to use the library for such parameters and inputs ``[chains, n, inputs]``."""
        if not self.known or torch.compiler.is_compiling() or x.dim() < 3 or x.shape[1] * theta.numel() < LEAST:
            return False
        if (x.dim() > 3 and not self.network.flattens) or x.shape[2:].numel() != self.inputs:
            return False
        return build.fits(theta, x) and build.layers() is not None

    def _given(self, theta: Tensor, x: Tensor) -> tuple[Any, ...]:
        """The first arguments of all calls."""
        assert theta.shape == (len(x), self.total) and x.shape[2] == self.inputs
        assert theta.is_contiguous() and x[0].is_contiguous()
        return self.numbers, len(x), self._threads(theta, x), theta.data_ptr(), x.data_ptr(), x.stride(0)

    def _threads(self, theta: Tensor, x: Tensor) -> int:
        """How many to use; tells the library how many rows there are."""
        self.numbers[1] = x.shape[1]
        return min(torch.get_num_threads(), len(x)) if x.shape[1] * theta.numel() >= THREADED else 1

    def forward(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs ``[chains, n, outputs]``, from contiguous tensors; activations are kept for `backward`."""
        size = len(x), 2 * x.shape[1] * self.units
        if self.kept.shape != size:
            self.kept = theta.new_empty(size)
        output = theta.new_empty(*x.shape[:2], self.outs)
        build.layers().isosgd_forward(*self._given(theta, x), output.data_ptr(), self.kept.data_ptr())
        return output

    def backward(self, theta: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        """Gradients ``[chains, d]`` from those of the outputs, after `forward` at the same place."""
        assert slope.shape == (*x.shape[:2], self.outs) and slope.is_contiguous()
        found = torch.empty_like(theta)
        build.layers().isosgd_backward(*self._given(theta, x), self.kept.data_ptr(), slope.data_ptr(), found.data_ptr())
        return found

    def gradient(self, density: Density, theta: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses and gradients with the prior's part; the batch is as in `leapfrog`."""
        found, loss = torch.empty_like(theta), theta.new_empty(len(theta))
        given = self._density(density, theta, batch)
        build.layers().isosgd_gradient(*given, found.data_ptr(), loss.data_ptr())
        self._check_labels(density, loss, batch[1])
        return loss, found

    def _check_labels(self, density: Density, loss: Tensor, y: Tensor) -> None:
        if density.classes and bool(loss.isnan().any()) and bool(((y < 0) | (y >= self.outs)).any()):
            raise IndexError(f"labels are not from 0 to {self.outs - 1}")

    def steps(
        self, density: Density, theta: Tensor, rest: Tensor, batch: tuple[Tensor, Tensor], updates: Updates
    ) -> tuple[Tensor, Tensor]:
        """Take a step for each minibatch, and return the last losses and the sums over all steps.

        Args:
            density: what is sampled.
            theta: parameters, which are moved.
            rest: velocities ``[chains, d]``, levels of the noise ``[chains, 1]``, or empty; it is changed.
            batch: ``[steps, chains, n, inputs]`` and ``[steps, chains, n, outputs]``, or labels ``[steps, chains, n]``.
            updates: of the steps.
        """
        (x, y), (steps, chains), d, drawn = batch, batch[0].shape[:2], self.total, updates.drawn.contiguous()
        rate = drawn[:0] if updates.rate is None else updates.rate.contiguous()
        along, matrices = ([t.contiguous() for t in given] for given in (updates.along, updates.matrices))
        k = along[0].shape[1] if along else 0
        assert all(t.is_contiguous() for t in (theta, rest, x, y))
        assert all(t.dtype == torch.float32 for t in (theta, rest, rate, drawn, *along))
        assert all(t.dtype == torch.float64 for t in matrices)
        assert theta.shape == (chains, d) and drawn.shape == (steps, chains, d + k)
        assert matrices or (rate.shape[1:] == theta.shape and len(rate) in (1, steps))
        assert rest.shape == (chains, 0 if updates.friction is None else d) or len(matrices) == 4
        loss, total = theta.new_empty(2, chains).unbind()
        velocity, level = (None, rest) if len(matrices) == 4 else (rest, None)
        given = [rate, drawn, velocity, *along, *[None] * (4 - len(along)), *matrices, *[None] * (4 - len(matrices))]
        places = [None if t is None else t.data_ptr() for t in (*given, level, loss, total)]
        friction = -1.0 if updates.friction is None else updates.friction
        build.layers().isosgd_steps(
            *self._given(theta, x[0])[:-1], x[0, 0].numel(), y.data_ptr(), y[0, 0].numel(),
            (ctypes.c_double * 5)(*density[:5]), density.precisions.data_ptr(),
            (ctypes.c_int64 * 4)(steps, len(rate) > 1, drawn.shape[2], k),
            (ctypes.c_double * 2)(friction, updates.memory), (ctypes.c_void_p * len(places))(*places),
        )  # fmt: skip
        self._check_labels(density, total, y)
        return loss, total

    def leapfrog(
        self, count: int, density: Density, theta: Tensor, batch: tuple[Tensor, Tensor],
        lam: tuple[Tensor, Tensor, Tensor], unit: float, own: Tensor, velocity: Tensor, gained: Tensor,
    ) -> Tensor:  # fmt: skip
        """Take steps inside trajectories (`isosgd.engine.leapfrog`), and return the last losses.

        Args:
            count: how many.
            density: what is sampled.
            theta: parameters, which are moved.
            batch: all data, ``[chains, n, inputs]`` and ``[chains, n, outputs]``, or labels ``[chains, n]``.
            lam: S, ``back`` and ``rate`` of ``rate g + S^T back S g``, which is ``(T / N) Lambda^-1 g``.
            unit: T / N.
            own: squared step size of each chain.
            velocity: of the parameters; it is changed.
            gained: change of the kinetic energy over T since the trajectories began; it is changed.
        """
        basis, every, loss = lam[0], [*lam, own, velocity, gained], torch.empty_like(gained)
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in every)
        assert basis.shape == (len(theta), basis.shape[1], self.total) and theta.shape == velocity.shape == lam[2].shape
        build.layers().isosgd_leapfrog(
            *self._density(density, theta, batch), count, own.data_ptr(), unit, basis.shape[1],
            *(t.data_ptr() for t in (*lam, velocity, gained, loss)),
        )  # fmt: skip
        return loss

    def _density(self, density: Density, theta: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
        """The first arguments of the last two calls."""
        x, y = batch
        shape, dtype = (x.shape[:2], torch.int64) if density.classes else ((*x.shape[:2], self.outs), torch.float32)
        assert y.shape == shape and y.dtype == dtype and y[0].is_contiguous()
        about = (ctypes.c_double * 5)(*density[:5])
        return *self._given(theta, x), y.data_ptr(), y.stride(0), about, density.precisions.data_ptr()


class TorchLayers:
    """The same by torch operations, on any device.

    There are as few of them as possible, since on a GPU their number takes the time. The inputs of a layer have a
    column of ones, so that a bias is one more weight.

    Args:
        shapes: as in `Layers`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [int(torch.Size(shape).numel()) for shape in shapes.values()]
        self.depth = sum(name.startswith("hidden.") and name.endswith(".weight") for name in shapes)
        # Inputs of the hidden layers and of the output layer, with a column of ones. CUDA graphs may go on to read
        # them, so that they stay in place.
        self.rooms: dict[tuple[Any, ...], list[Tensor]] = {}
        self.taken: list[Tensor] = []
        self.sums: list[Tensor] = []  # of hidden layers, before the activation
        self.curved = torch.empty(0)  # outputs of the output layer

    def _views(self, theta: Tensor) -> dict[str, Tensor]:
        parts = zip(self.shapes.items(), torch.split(theta, self.sizes, -1), strict=True)
        return {name: part.view(len(theta), *shape) for (name, shape), part in parts}

    def forward(self, theta: Tensor, x: Tensor) -> Tensor:
        p = self._views(theta)
        if not self.depth:
            return torch.baddbmm(p["skip.bias"].unsqueeze(1), x, p["skip.weight"].mT)
        self.taken = self._room(x)
        self.taken[0][..., :-1] = x
        self.sums = []
        for i in range(self.depth):
            self.sums.append(self._affine(p, f"hidden.{i}", self.taken[i]))
            torch.ops.aten.silu.out(self.sums[i], out=self.taken[i + 1][..., :-1])
        self.curved = self._affine(p, "out", self.taken[-1])
        found = torch.bmm(x, p["skip.weight"].mT)
        found[..., : self.curved.shape[-1]].addcmul_(self.curved, p["gate"].unsqueeze(-1))
        return found

    def _room(self, x: Tensor) -> list[Tensor]:
        key = x.shape, x.dtype, x.device
        if key in self.rooms:
            return self.rooms[key]
        widths = [x.shape[-1], *(self.shapes[f"hidden.{i}.weight"][0] for i in range(self.depth))]
        made = [torch.ones(*x.shape[:2], width + 1, dtype=x.dtype, device=x.device) for width in widths]
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # then the ones are only written at replay
            self.rooms[key] = made
        return made

    @staticmethod
    def _affine(p: Mapping[str, Tensor], name: str, taken: Tensor) -> Tensor:
        return torch.bmm(taken, torch.cat([p[f"{name}.weight"], p[f"{name}.bias"].unsqueeze(-1)], -1).mT)

    def backward(self, theta: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        """As in `Layers`; gradients of other parameters than the network's are zero."""
        p, found = self._views(theta), {"skip.weight": torch.bmm(slope.mT, x)}
        if not self.depth:
            return self._flat(theta, found | {"skip.bias": slope.sum(1)})
        curved = slope[..., : self.curved.shape[-1]]
        found["gate"] = (curved * self.curved).sum((1, 2))
        along = curved * p["gate"].unsqueeze(-1)
        for i in range(self.depth, -1, -1):  # the output layer, and hidden ones from the last to the first
            name = f"hidden.{i}" if i < self.depth else "out"
            if i < self.depth:
                along = torch.ops.aten.silu_backward(along, self.sums[i])
            both = torch.bmm(along.mT, self.taken[i])
            found[f"{name}.weight"], found[f"{name}.bias"] = both[..., :-1], both[..., -1]
            if i:
                along = torch.bmm(along, p[f"{name}.weight"])
        self.taken, self.sums, self.curved = [], [], torch.empty(0)  # they are large
        return self._flat(theta, found)

    def _flat(self, theta: Tensor, found: Mapping[str, Tensor]) -> Tensor:
        """Gradients of all parameters ``[chains, d]``; zero where none was found."""
        parts = (
            found[name].reshape(len(theta), -1) if name in found else theta.new_zeros(len(theta), size)
            for name, size in zip(self.shapes, self.sizes, strict=True)
        )
        return torch.cat(list(parts), -1)
