"""Normal random numbers inside a kernel of Triton's, from a counter and a key (Philox).

They never pass through memory, and are a function of the key alone.

References:
    Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

CHUNK = 1024  # values of one program of a kernel: four for each count


@lru_cache(maxsize=1)
def make_normals() -> Any:
    """A function for kernels, of key, counters and their number, a quarter of the values; None without Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit  # type: ignore[untyped-decorator]
    def normals(key, counter, QUARTER: tl.constexpr):  # type: ignore[no-untyped-def]
        a, b, c, d = tl.randn4x(key, counter)
        return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [4 * QUARTER])

    return normals
