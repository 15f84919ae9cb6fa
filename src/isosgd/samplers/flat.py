"""Parameters as views of one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGN = 16  # tensors begin at multiples of it, so that their values are read sixteen bytes at a time


class Flat:
    """Parameters as views of one flat tensor, each in its own order of memory (channels-last stays as it is).

    Args:
        params: the parameters; from now on their values live in ``values``.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> flat = Flat(list(net.parameters()))
        >>> flat.values.zero_()[:6].shape, float(net.weight.detach().abs().max())
        (torch.Size([6]), 0.0)
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        if not params:
            raise ValueError("params is empty: there is nothing to lay out")
        for p in params:
            if p.dtype != torch.float32 or p.device != params[0].device:
                raise ValueError(f"a parameter is {p.dtype} on {p.device}; all must be float32 on {params[0].device}")
        self.params = list(params)
        self.offsets, end = [], 0
        for p in params:
            self.offsets.append(end)
            end += -(-p.numel() // ALIGN) * ALIGN
        self.values = torch.zeros(end, device=params[0].device)
        with torch.no_grad():
            for p, view in zip(self.params, self.views(self.values), strict=True):
                view.copy_(p)
                p.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor of this layout, as tensors in the shapes of the parameters."""
        return [
            flat.as_strided(p.shape, p.stride(), flat.storage_offset() + offset)
            for p, offset in zip(self.params, self.offsets, strict=True)
        ]

    def join(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Copy tensors in the shapes of the parameters into a flat one."""
        torch._foreach_copy_(self.views(out), list(tensors))
        return out

    def parts(self, flat: Tensor, members: Sequence[int]) -> list[Tensor]:
        """The values of some parameters, each one dimension."""
        return [flat[self.offsets[i] : self.offsets[i] + self.params[i].numel()] for i in members]
