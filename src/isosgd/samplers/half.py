"""Parameters in bfloat16 that are stepped in float32.

Most steps of a sampler are smaller than the spacing of bfloat16 numbers, about 1/128 of a value, and would be rounded
away. Stochastic rounding keeps them on average, but adds a variance at every step that can exceed that of the step
(`tests/unit/test_sampled_parts.py` measures both). So the parameter holds the rounded upper half of a float32, and the
sampler's state the rest as a 16-bit integer: six bytes for each parameter, gradient included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isosgd.errors import first_line
from isosgd.samplers.innovations import CHUNK, make_normals

LOW = "low"  # its name in the state
NAN = 0x7FC00000
HALF_STEP = 1 << 15  # of the upper half, in units of the lower


def wide(upper: Tensor, low: Tensor) -> Tensor:
    """A float32 from its halves, 16-bit integers.

    A zero upper half with a negative lower half is zero: someone else has set the parameter.

    Example:
        >>> x = torch.tensor([3.14159265, -1e-3])
        >>> torch.equal(wide(*halves(x)), x)
        True
    """
    rest = torch.where((upper & 0x7FFF) == 0, low.clamp_min(0), low)
    return ((upper.to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of the nearest bfloat16, and the difference to those of the float32."""
    bits = torch.where(x.isnan(), NAN, x.view(torch.int32))  # other NaNs could overflow
    upper = (bits + HALF_STEP) >> 16
    return upper.to(torch.int16), (bits - (upper << 16)).to(torch.int16)


def step_halves_(
    upper: Tensor, low: Tensor, grad: Tensor, xi: Tensor, numbers: Sequence[float], velocity: Tensor | None = None
) -> None:
    """``v <- (1 - friction) v - rate (grad + decay theta) - kick xi``, ``theta += v``, in place.

    ``numbers`` are the rate, the kick, the decay and the friction. Without a velocity, v is zero before the step.
    """
    rate, kick, decay, friction = numbers
    theta = wide(upper, low)
    move = -rate * (grad + decay * theta) - kick * xi
    if velocity is not None:
        move = (1.0 - friction) * velocity + move
        velocity.copy_(move)
    found = halves(theta + move)
    upper.copy_(found[0])
    low.copy_(found[1])


@lru_cache(maxsize=1)
def make_kernel() -> Any:
    """`step_halves_` as a Triton kernel that draws its own innovations; None without Triton."""
    normals = make_normals()
    if normals is None:
        return None
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["first", "count"])  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        upper, low, gradient, velocity, key, first, count, rate, kick, decay, keep, MOMENTUM: tl.constexpr,
        QUARTER: tl.constexpr,
    ):  # fmt: skip
        chunk = tl.program_id(0).to(tl.int64)
        place = chunk * (4 * QUARTER) + tl.arange(0, 4 * QUARTER)
        inside = place < count
        high = tl.load(upper + place, mask=inside, other=0).to(tl.int32)
        rest = tl.load(low + place, mask=inside, other=0).to(tl.int32)
        rest = tl.where((high & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
        theta = ((high << 16) + rest).to(tl.float32, bitcast=True)
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) + decay * theta
        counter = (first + chunk * QUARTER).to(tl.int32) + tl.arange(0, QUARTER)
        move = -rate * g - kick * normals(tl.load(key), counter, QUARTER)
        if MOMENTUM:
            move += keep * tl.load(velocity + place, mask=inside, other=0.0)
            tl.store(velocity + place, move, mask=inside)
        theta += move
        bits = tl.where(theta == theta, theta.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 32768) >> 16
        tl.store(upper + place, high.to(tl.int16), mask=inside)
        tl.store(low + place, (bits - (high << 16)).to(tl.int16), mask=inside)

    return kernel


class HalfParameters:
    """The parameters of a sampler that are in bfloat16."""

    def __init__(self, state: Any, params: list[Tensor]) -> None:
        wrong = next((p for p in params if p.dtype == torch.float16), None)
        if wrong is not None:
            raise ValueError(
                "parameters in float16 cannot be sampled in a loop: give them as bfloat16, or as float32 with "
                "torch.autocast"
            )
        self.state, self.params = state, [p for p in params if p.dtype == torch.bfloat16]
        self.every = bool(params) and len(self.params) == len(params)
        self._key: Tensor | None = None  # of the step's innovations on a GPU
        self._first = 0  # their next counter
        self.unsupported_reason = ""  # why the kernel is not used

    def low(self, p: Tensor) -> Tensor:
        if LOW not in self.state[p]:
            self.state[p][LOW] = torch.zeros_like(p, dtype=torch.int16)
        found: Tensor = self.state[p][LOW]
        return found

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Context in which parameters and gradients are in float32."""
        before = [(p, p.data, p.grad) for p in self.params]
        for p, data, grad in before:
            p.grad = None
            p.data = wide(data.view(torch.int16), self.low(p))
            p.grad = None if grad is None else grad.float()
        try:
            yield
        finally:
            for p, data, grad in before:
                upper, low = halves(p.data.contiguous())
                p.grad = None
                self.state[p][LOW].copy_(low)
                data.view(torch.int16).copy_(upper)
                p.data, p.grad = data, grad

    def begin_step(self, generator: torch.Generator) -> None:
        """On a GPU, draw the key of a step's innovations."""
        if generator.device.type == "cuda" and not self.unsupported_reason and make_kernel() is not None:
            if self._key is None:
                self._key = torch.empty(1, dtype=torch.int64, device=generator.device)
            self._key.random_(generator=generator)
            self._first = 0

    def step_(
        self, p: Tensor, numbers: Sequence[float], generator: torch.Generator, velocity: Tensor | None = None
    ) -> None:
        """A step of one parameter; on a GPU by the kernel."""
        assert p.grad is not None
        args = [p.detach().view(torch.int16), self.low(p), p.grad, *([] if velocity is None else [velocity])]
        dense = p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)
        same = all(x.stride() == p.stride() for x in args)
        if dense and same and self._key is not None and self._key.device == p.device:
            try:
                self._launch(p, args, numbers)
                return
            except Exception as error:  # any error of the compiler, before anything is written
                self._key, self.unsupported_reason = None, first_line(error)
        xi = torch.empty(p.shape, device=p.device).normal_(generator=generator)
        step_halves_(args[0], args[1], args[2], xi, numbers, velocity)

    def _launch(self, p: Tensor, args: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Launch the kernel; a fourth entry of ``args`` is the velocity."""
        rate, kick, decay, friction = numbers
        chunks = -(-p.numel() // CHUNK)
        with torch.cuda.device(p.device):  # Triton launches where torch is, not where its arguments are
            make_kernel()[(chunks,)](
                *args[:3], args[-1], self._key, self._first, p.numel(), rate, kick, decay, 1.0 - friction,
                MOMENTUM=len(args) > 3, QUARTER=CHUNK // 4,
            )  # fmt: skip
        self._first += chunks * (CHUNK // 4)
        torch.autograd.graph.increment_version(p)  # autograd must notice the change
