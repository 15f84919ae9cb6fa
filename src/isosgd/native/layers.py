"""Hidden layers of SiLU units beside a linear path, of many chains in one call (``layers.cpp``), or by torch.

The network is `isosgd.tables.network.Perceptron`. Its products are so small that calling torch for each of them, and
autograd for their gradients, takes several times as long as the products. On a GPU, and without a compiler, torch makes
the products, without autograd.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isosgd.native import build

LEAST = 20_000  # products of rows and weights of all chains below which building the library does not pay
THREADED = 10_000_000  # such products below which more threads lose on a busy machine


class Layers:
    """Outputs and gradients of the networks of all chains, from flat parameters ``[chains, d]``.

    Args:
        shapes: of the parameters of a chain, in the order in which they are flat.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        begin, at = 0, dict[str, int]()
        for name, shape in shapes.items():
            at[name] = begin
            begin += int(torch.Size(shape).numel())
        self.total, self.kept = begin, torch.empty(0)
        count = sum(name.startswith("hidden.") and name.endswith(".weight") for name in shapes)
        hidden = [f"hidden.{i}.weight" for i in range(count)]
        self.units = sum(shapes[name][0] for name in hidden)
        self.wide = bool(hidden) and min(shapes[name][0] for name in hidden) >= build.FEWEST
        if not self.wide:
            return
        self.outs, self.inputs = shapes["skip.weight"]
        layers = [(*reversed(shapes[name]), at[name], at[name.replace("weight", "bias")]) for name in hidden]
        numbers = [
            *(self.total, 0, self.inputs, self.outs, shapes["out.weight"][0]),
            *(at[name] for name in ("skip.weight", "gate", "out.weight", "out.bias")),
            *(len(layers), *(number for layer in layers for number in layer)),
        ]
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)  # in the order of ``Net``; the second are the rows

    def fits(self, theta: Tensor, x: Tensor) -> bool:
        """Whether to use the library for such parameters and inputs ``[chains, n, inputs]``."""
        if not self.wide or torch.compiler.is_compiling() or x.shape[1] * theta.numel() < LEAST:
            return False
        return build.fits(theta, x) and build.layers() is not None

    def _given(self, theta: Tensor, x: Tensor) -> tuple[Any, ...]:
        """The first arguments of both calls."""
        assert theta.shape == (len(x), self.total) and x.shape[2] == self.inputs
        assert theta.is_contiguous() and x[0].is_contiguous()
        self.numbers[1] = x.shape[1]
        threads = min(torch.get_num_threads(), len(x)) if x.shape[1] * theta.numel() >= THREADED else 1
        return self.numbers, len(x), threads, theta.data_ptr(), x.data_ptr(), x.stride(0)

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
