"""The random numbers of a step: independent, mean zero, one variance.

On an accelerator, and for small tensors, they are normal. On the CPU drawing a million normals takes fifteen times as
long as the update they belong to, so large CPU tensors get *moment-matched* variables instead: four random bits give
one of 16 equidistant levels k = -15, -13, ..., 15, and the cubic ``k (k^2 + c)`` of it, with c such that the first
five moments are proportional to those of N(0, 1) exactly. A scheme of weak order one or two does not see the
difference (Kloeden and Platen 1992, section 14.1-14.2): means, covariances and the order of the discretisation bias
are unchanged, and sums over steps are normal.

Both kinds are a function of the `torch.Generator` alone, so that saving the generator saves the stream.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Innovations = Literal["auto", "normal", "bits"]
BITS_FROM = 1 << 14  # elements; below it normals cost less than the rest of the step

LEVELS = np.arange(-15, 16, 2) * 8.0  # as they stand in the upper half of a byte
# x = k (k^2 + c) has E[x^4] = 3 E[x^2]^2; odd moments vanish. UNIT makes its variance one.
CUBIC = 4549.272179713177
UNIT = 9.106026763583008e-07


def innovations_(out: Tensor, generator: torch.Generator, kind: Innovations = "auto") -> float:
    """Fill the flat float tensor ``out`` with innovations, in place.

    Returns:
        The number by which they must still be multiplied to have variance one.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.empty(1 << 16)
        >>> x *= innovations_(x, g)
        >>> round(float(x.var()), 1), round(float(x.pow(4).mean()), 1)
        (1.0, 3.0)
    """
    if kind == "normal" or out.device.type != "cpu" or (kind == "auto" and out.numel() < BITS_FROM):
        out.normal_(generator=generator)
        return 1.0
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    words = np.random.SFC64(seed).random_raw((out.numel() + 15) // 16).view(np.uint8)
    levels = np.empty((2, words.size), dtype=np.uint8)
    # Each half byte goes to the upper half; 8 in the lower half centres the level.
    np.bitwise_and(words, 0xF0, out=levels[0])
    np.left_shift(words, 4, out=levels[1])
    levels |= 8
    out.copy_(torch.from_numpy(levels.view(np.int8).reshape(-1)[: out.numel()]))
    square = out * out
    out.mul_(square.add_(CUBIC))
    return UNIT
