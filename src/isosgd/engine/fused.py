"""A step of Theorem 1 or 2 in one pass over memory, for rates and kicks per entry.

    theta <- theta - rate (g + decay theta) - kick xi                                  (Theorem 1)
    v <- (1 - a) v - rate (g + decay theta) - kick xi,  theta <- theta + v             (Theorem 2)

``decay`` is the precision of a Gaussian prior over N. The kernel makes the innovations xi (by Philox, with a new key
at each step). If they are averaged over two steps, those of the previous step are made again from its key.

If the step also moves along a few directions that all parameters share (`isosgd.samplers.program.Directions`), there
are two passes: the first also projects the force onto the directions, the second adds what they contribute.

The kernels use Triton, which comes with torch for GPUs, and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.innovations import CHUNK, make_normals
from isosgd.samplers.program import Directions, Elementwise

ALIGN = 16  # tensors start at multiples of it, so that sixteen bytes are read at a time
WARPS = 4  # of one program
MOST_DIRECTIONS = 64
MOST_PROJECTED = 1 << 21  # for more parameters, the matrix products of a library are as fast
ROWS = 64  # chunks whose projections are added at once


class FlatParameters:
    """Parameters as views of one flat tensor, each in its own memory order (channels-last is kept).

    Args:
        params: the parameters; their values move to ``values``.

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
        """A flat tensor of this layout as tensors in the shapes and strides of the parameters."""
        return [
            flat.as_strided(p.shape, p.stride(), flat.storage_offset() + offset)
            for p, offset in zip(self.params, self.offsets, strict=True)
        ]

    def join(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Copy tensors in the shapes of the parameters into a flat one."""
        torch._foreach_copy_(self.views(out), list(tensors))
        return out


def unsupported_reason(flat: FlatParameters, like: Elementwise) -> str:
    """Why the kernels cannot take a step; empty if they can."""
    if make_kernels() is None:
        return "there is no Triton, which the fused step needs"
    if flat.values.dtype != torch.float32:
        return f"the fused step is for parameters in float32, not {flat.values.dtype}"
    if like.directions is not None and (
        len(like.directions.basis) > MOST_DIRECTIONS or like.directions.basis.shape[1] > MOST_PROJECTED
    ):
        return "its directions are many or long, which matrix products are made for"
    return ""


class FusedStep:
    """Takes steps of flat parameters by the kernels.

    Args:
        like: a first step, which shows which of its numbers are tensors.
        decays: precision of each tensor's Gaussian prior, over N.
    """

    def __init__(
        self, flat: FlatParameters, like: Elementwise, decays: Sequence[float], generator: torch.Generator
    ) -> None:
        if reason := unsupported_reason(flat, like):
            raise RuntimeError(reason)
        self.kernels, device = make_kernels(), flat.values.device
        self.flat, self.averaged = flat, like.averaged
        self.none = torch.empty(0, device=device)
        self.wide = any(x.dim() for x in like.rates), any(x.dim() for x in like.kicks)
        self.rates, self.kicks = (
            torch.zeros_like(flat.values) if wide else torch.zeros(len(flat.params), device=device)
            for wide in self.wide
        )
        self.friction = like.friction
        self.velocity = self.none if like.friction is None else torch.zeros_like(flat.values)
        self.decays = torch.tensor(list(decays), device=device, dtype=torch.float32)
        self.keys = torch.empty(1, dtype=torch.int64, device=device)  # of the last step; the next key is larger by 1
        self.keys.random_(generator=generator)
        self._lay_out(device)
        self.shared: _Shared | None = None
        self.set(like)

    @torch.no_grad()
    def set(self, step: Elementwise) -> bool:
        """Set rates and kicks; returns whether a captured step uses them, or must be captured again."""
        for out, wide, found in zip((self.rates, self.kicks), self.wide, (step.rates, step.kicks), strict=True):
            if wide:
                self.flat.join([x.expand(p.shape) for x, p in zip(found, self.flat.params, strict=True)], out)
            else:
                out.copy_(torch.stack([x.to(out) for x in found]))
        if step.directions is None:
            return True
        if self.shared is not None and self.shared.exact == (step.directions.undo is not None):
            self.shared.set(step.directions)
            return True
        self.shared = _Shared(self.flat, step.directions, self.chunks)
        return False

    def step(self, gradient: Tensor) -> None:
        """One step from a flat gradient of the likelihood."""
        self.keys.add_(1)
        kernel, combine, spread = self.kernels
        shared, none = self.shared, self.none
        exact = shared is not None and shared.exact
        with torch.cuda.device(gradient.device):  # Triton launches on torch's current device
            kernel[(self.chunks,)](
                self.flat.values, gradient, self.rates, self.kicks, self.decays, self.starts, self.counts, self.owners,
                self.keys, self.velocity, 1.0 - (self.friction or 0.0),
                *((none,) * 4 if shared is None else (shared.moves, shared.basis, shared.reach, shared.along)),
                len(self.flat.values), MOMENTUM=self.friction is not None, WIDE_RATES=self.wide[0],
                WIDE_KICKS=self.wide[1], AVERAGED=self.averaged, QUARTER=CHUNK // 4,
                DIRECTIONS=0 if shared is None else shared.count, EXACT=exact, num_warps=WARPS,
            )  # fmt: skip
            if shared is None:
                return
            combine[(1,)](
                shared.along, shared.back, shared.add, shared.undo, self.keys, shared.move, shared.count,
                AVERAGED=self.averaged, EXACT=exact, CHUNKS=self.chunks, QUARTER=CHUNK // 4, WIDTH=shared.width,
                ROWS=ROWS, num_warps=8,
            )  # fmt: skip
            spread[(self.chunks,)](
                self.flat.values, shared.moves, shared.basis, shared.move, self.starts, self.counts,
                len(self.flat.values), SIZE=CHUNK, DIRECTIONS=shared.count, num_warps=WARPS,
            )  # fmt: skip

    def _lay_out(self, device: torch.device) -> None:
        """Cut the tensors into chunks: position, length, and number of the tensor of each."""
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


class _Shared:
    """The directions of a step in the layout of flat parameters, and memory shared by its passes."""

    def __init__(self, flat: FlatParameters, found: Directions, chunks: int) -> None:
        self.flat, self.count, self.exact = flat, len(found.basis), found.undo is not None
        self.width = max(16, 1 << (self.count - 1).bit_length())
        device, size = flat.values.device, len(flat.values)
        self.basis = torch.zeros(self.count, size, device=device, dtype=found.basis.dtype)
        self.back, self.add, self.undo = (torch.zeros(self.width, self.width, device=device) for _ in range(3))
        self.reach = torch.zeros(size if self.exact else 0, device=device)
        self.moves = torch.zeros(size, device=device)
        self.along = torch.zeros(1 + self.exact, self.count, chunks, device=device)  # projections of each chunk
        self.move = torch.zeros(self.width, device=device)
        self.of: Tensor | None = None  # the basis that `basis` is a copy of, and its version
        self.version = 0
        self.set(found)

    def set(self, found: Directions) -> None:
        """Set new values."""
        if self.of is not found.basis or self.version != found.basis._version:
            for row, values in zip(self.basis, found.basis, strict=True):
                self._place(values, row)
            self.of, self.version = found.basis, found.basis._version
        k = self.count
        self.back[:k, :k] = found.back
        self.add[:k, :k] = found.add
        if found.undo is not None and found.reach is not None:
            self.undo[:k, :k] = found.undo
            self._place(found.reach, self.reach)

    def _place(self, values: Tensor, out: Tensor) -> None:
        """Values of all parameters in the layout of the flat ones."""
        params = self.flat.params
        parts = torch.split(values, [p.numel() for p in params])
        self.flat.join([part.view(p.shape) for part, p in zip(parts, params, strict=True)], out)


@lru_cache(maxsize=1)
def make_kernels() -> Any:
    """The step, and the two passes that follow it if there are directions; None without Triton."""
    normals = make_normals()
    if normals is None:
        return None
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def step(  # type: ignore[no-untyped-def]
        theta, gradient, rates, kicks, decays, starts, counts, owners, keys, velocity, keep, moves, basis, reach, along,
        size, MOMENTUM: tl.constexpr, WIDE_RATES: tl.constexpr, WIDE_KICKS: tl.constexpr, AVERAGED: tl.constexpr,
        QUARTER: tl.constexpr, DIRECTIONS: tl.constexpr, EXACT: tl.constexpr,
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
        key = tl.load(keys)
        xi = normals(key, counter, QUARTER)
        if AVERAGED:
            xi = 0.5 * (xi + normals(key - 1, counter, QUARTER))
        move = rate * g + kick * xi
        if DIRECTIONS:  # `spread` moves the parameters
            tl.store(moves + place, move, mask=inside)
            force = tl.where(rate > 0.0, move / rate, 0.0)
            chunks = tl.num_programs(0)
            reached = tl.load(reach + place, mask=inside, other=0.0) * xi if EXACT else xi
            for j in tl.static_range(DIRECTIONS):
                row = tl.load(basis + j * size + place, mask=inside, other=0.0).to(tl.float32)
                tl.store(along + j * chunks + chunk, tl.sum(row * force, 0))
                if EXACT:
                    tl.store(along + (DIRECTIONS + j) * chunks + chunk, tl.sum(row * reached, 0))
        else:
            if MOMENTUM:
                v = keep * tl.load(velocity + place, mask=inside, other=0.0) - move
                tl.store(velocity + place, v, mask=inside)
                move = -v
            tl.store(theta + place, x - move, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def combine(  # type: ignore[no-untyped-def]
        along, back, add, undo, keys, move, directions, AVERAGED: tl.constexpr, EXACT: tl.constexpr,
        CHUNKS: tl.constexpr, QUARTER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        j = tl.arange(0, WIDTH)
        force = tl.zeros([WIDTH], tl.float32)
        reached = tl.zeros([WIDTH], tl.float32)
        for first in range(0, CHUNKS, ROWS):
            c = first + tl.arange(0, ROWS)
            inside = (j < directions)[:, None] & (c < CHUNKS)[None, :]
            place = j[:, None] * CHUNKS + c[None, :]
            force += tl.sum(tl.load(along + place, mask=inside, other=0.0), 1)
            if EXACT:
                reached += tl.sum(tl.load(along + directions * CHUNKS + place, mask=inside, other=0.0), 1)
        key, counter = tl.load(keys), CHUNKS * QUARTER + j  # counters that no parameter uses
        xi = tl.randn(key, counter)
        if AVERAGED:
            xi = 0.5 * (xi + tl.randn(key - 1, counter))
        square = j[:, None] * WIDTH + j[None, :]
        found = tl.load(back + square) * force[None, :] + tl.load(add + square) * xi[None, :]
        if EXACT:
            found += tl.load(undo + square) * reached[None, :]
        tl.store(move + j, tl.sum(found, 1))

    @triton.jit  # type: ignore[untyped-decorator]
    def spread(  # type: ignore[no-untyped-def]
        theta, moves, basis, along, starts, counts, size, SIZE: tl.constexpr, DIRECTIONS: tl.constexpr,
    ):  # fmt: skip
        chunk = tl.program_id(0)
        lane = tl.arange(0, SIZE)
        inside = lane < tl.load(counts + chunk)
        place = tl.multiple_of(tl.load(starts + chunk), 16) + lane
        x = tl.load(theta + place, mask=inside, other=0.0) - tl.load(moves + place, mask=inside, other=0.0)
        for j in tl.static_range(DIRECTIONS):
            x -= tl.load(basis + j * size + place, mask=inside, other=0.0).to(tl.float32) * tl.load(along + j)
        tl.store(theta + place, x, mask=inside)

    return step, combine, spread
