"""The kernel of `isosgd.samplers.fused`, in Triton, which comes with torch where there is a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def make_kernel() -> Any:
    """The kernel, or None where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        theta, velocity, share, addresses, starts, counts, owners, rates, kicks, pace, key, decay, keep,
        NOISE: tl.constexpr, MOMENTUM: tl.constexpr, QUARTER: tl.constexpr,
    ):  # fmt: skip
        chunk = tl.program_id(0)
        lane = tl.arange(0, 4 * QUARTER)
        count = tl.load(counts + chunk)
        inside = lane < (count + 3) // 4 * 4  # whole sixteen bytes, which all belong to the tensor's allocation
        owner = tl.load(owners + chunk)
        start = tl.multiple_of(tl.load(starts + chunk), 16)
        grad = tl.load(addresses + chunk).to(tl.pointer_type(tl.float32))
        g = tl.load(tl.multiple_of(grad + lane, 16), mask=inside, other=0.0)
        place = start + lane
        x = tl.load(theta + place, mask=inside, other=0.0)
        move = tl.load(rates + owner) * tl.load(pace) * (g + decay * x)
        if NOISE:
            kick = tl.load(kicks + owner) * tl.load(pace + 1)
            counter = chunk * QUARTER + tl.arange(0, QUARTER)
            a, b, c, d = tl.randn4x(tl.load(key), counter)
            xi = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [4 * QUARTER])
            move += kick * tl.load(share + place, mask=inside, other=0.0).to(tl.float32) * xi
        move = tl.where(lane < count, move, 0.0)
        if MOMENTUM:
            v = keep * tl.load(velocity + place, mask=inside, other=0.0) - move
            tl.store(velocity + place, v, mask=inside)
            tl.store(theta + place, x + v, mask=inside)
        else:
            tl.store(theta + place, x - move, mask=inside)

    return kernel
