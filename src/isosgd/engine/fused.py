"""A step of Theorem 1 or 2 in one pass over memory, for rates and kicks that act entry by entry.

    theta <- theta - rate (g + decay theta) - kick xi                                  (Theorem 1)
    v <- (1 - a) v - rate (g + decay theta) - kick xi,  theta <- theta + v             (Theorem 2)

``decay`` is the precision of a Gaussian prior over N. The innovations xi are made inside the kernel
(by Philox, keyed anew each step); where they are averaged over two steps, those of the step before are
made once more from its key. The kernel is Triton's, which comes with torch where there is a GPU, and may be captured in
a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.innovations import CHUNK, make_normals
from isosgd.samplers.program import Elementwise

ALIGN = 16  # tensors begin at multiples of it, so that their values are read sixteen bytes at a time
WARPS = 4  # of one program


class FlatParameters:
    """Parameters as views of one flat tensor, each in its own order of memory (channels-last stays as it is).

    Args:
        params: the parameters; from now on their values live in ``values``.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> flat = FlatParameters(list(net.parameters()))
        >>> flat.values.zero_()[:6].shape, float(net.weight.detach().abs().max())
        (torch.Size([6]), 0.0)
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        first = params[0]
        for p in params:
            if p.dtype != first.dtype or p.device != first.device:
                raise ValueError(f"parameters are {p.dtype} on {p.device} and {first.dtype} on {first.device}")
        self.params = list(params)
        self.offsets, end = list[int](), 0
        for p in params:
            self.offsets.append(end)
            end += -(-p.numel() // ALIGN) * ALIGN
        self.values = torch.zeros(end, device=first.device, dtype=first.dtype)
        with torch.no_grad():
            for p, view in zip(self.params, self.views(self.values), strict=True):
                view.copy_(p)
                p.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor of this layout, as tensors in the shapes and strides of the parameters."""
        return [
            flat.as_strided(p.shape, p.stride(), flat.storage_offset() + offset)
            for p, offset in zip(self.params, self.offsets, strict=True)
        ]

    def join(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Copy tensors in the shapes of the parameters into a flat one."""
        torch._foreach_copy_(self.views(out), list(tensors))
        return out


class FusedStep:
    """Steps of flat parameters by the kernel.

    Args:
        like: a first step, which says which of its numbers are tensors.
        decays: precision of each tensor's Gaussian prior, over N.
    """

    def __init__(
        self, flat: FlatParameters, like: Elementwise, decays: Sequence[float], generator: torch.Generator
    ) -> None:
        self.kernel = make_kernel()
        if self.kernel is None:
            raise RuntimeError("there is no Triton, which the fused step needs")
        if flat.values.dtype != torch.float32:
            raise RuntimeError(f"the fused step is for parameters in float32, not {flat.values.dtype}")
        device = flat.values.device
        self.flat, self.averaged, self.generator = flat, like.averaged, generator
        self.wide = any(x.dim() for x in like.rates), any(x.dim() for x in like.kicks)
        none = torch.empty(0, device=device)
        self.rates, self.kicks = (
            torch.zeros_like(flat.values) if wide else torch.zeros(len(flat.params), device=device)
            for wide in self.wide
        )
        self.friction = like.friction
        self.velocity = none if like.friction is None else torch.zeros_like(flat.values)
        self.decays = torch.tensor(list(decays), device=device, dtype=torch.float32)
        self.keys = torch.zeros(2, dtype=torch.int64, device=device)  # of this step, and of the one before
        self.keys[:1].random_(generator=generator)
        self._lay_out(device)
        self.set(like)

    @torch.no_grad()
    def set(self, step: Elementwise) -> None:
        """Take rates and kicks; a captured step meets them at once."""
        for out, wide, found in zip((self.rates, self.kicks), self.wide, (step.rates, step.kicks), strict=True):
            if wide:
                self.flat.join([x.expand(p.shape) for x, p in zip(found, self.flat.params, strict=True)], out)
            else:
                out.copy_(torch.stack([x.to(out) for x in found]))

    def step(self, gradient: Tensor) -> None:
        """One step from a flat gradient of the likelihood."""
        self.keys[1:].copy_(self.keys[:1])
        self.keys[:1].random_(generator=self.generator)
        with torch.cuda.device(gradient.device):  # Triton launches where torch is, not where its arguments are
            self.kernel[(self.chunks,)](
                self.flat.values, gradient, self.rates, self.kicks, self.decays, self.starts, self.counts, self.owners,
                self.keys, self.velocity, 1.0 - (self.friction or 0.0),
                MOMENTUM=self.friction is not None, WIDE_RATES=self.wide[0], WIDE_KICKS=self.wide[1],
                AVERAGED=self.averaged, QUARTER=CHUNK // 4, num_warps=WARPS,
            )  # fmt: skip

    def _lay_out(self, device: torch.device) -> None:
        """Cut the tensors into chunks: of each, its place, its length, and the number of its tensor."""
        starts, counts, owners = list[int](), list[int](), list[int]()
        for i, p in enumerate(self.flat.params):
            for start in range(0, p.numel(), CHUNK):
                starts.append(self.flat.offsets[i] + start)
                counts.append(min(CHUNK, p.numel() - start))
                owners.append(i)
        self.chunks = len(starts)
        self.starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self.counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)


@lru_cache(maxsize=1)
def make_kernel() -> Any:
    """The kernel, or None where there is no Triton."""
    normals = make_normals()
    if normals is None:
        return None
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        theta, gradient, rates, kicks, decays, starts, counts, owners, keys, velocity, keep, MOMENTUM: tl.constexpr,
        WIDE_RATES: tl.constexpr, WIDE_KICKS: tl.constexpr, AVERAGED: tl.constexpr, QUARTER: tl.constexpr,
    ):  # fmt: skip
        chunk = tl.program_id(0)
        lane = tl.arange(0, 4 * QUARTER)
        inside = lane < tl.load(counts + chunk)
        owner = tl.load(owners + chunk)
        place = tl.multiple_of(tl.load(starts + chunk), 16) + lane
        x = tl.load(theta + place, mask=inside, other=0.0)
        g = tl.load(gradient + place, mask=inside, other=0.0) + tl.load(decays + owner) * x
        rate = tl.load(rates + place, mask=inside, other=0.0) if WIDE_RATES else tl.load(rates + owner)
        kick = tl.load(kicks + place, mask=inside, other=0.0) if WIDE_KICKS else tl.load(kicks + owner)
        counter = chunk * QUARTER + tl.arange(0, QUARTER)
        xi = normals(tl.load(keys), counter, QUARTER)
        if AVERAGED:
            xi = 0.5 * (xi + normals(tl.load(keys + 1), counter, QUARTER))
        move = rate * g + kick * xi
        if MOMENTUM:
            v = keep * tl.load(velocity + place, mask=inside, other=0.0) - move
            tl.store(velocity + place, v, mask=inside)
            move = -v
        tl.store(theta + place, x - move, mask=inside)

    return kernel
