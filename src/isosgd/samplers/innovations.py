"""The random numbers of a step: independent, mean zero, variance one.

On an accelerator, and for small tensors, they are normal. On the CPU drawing a million normals takes fifteen times as
long as the update they belong to, so large CPU tensors get *moment-matched* variables instead: a random byte ``u`` in
(-1, 1) through the cubic ``a u + b u^3``, with ``a`` and ``b`` such that the first five moments are those of N(0, 1)
exactly. A scheme of weak order one or two does not see the difference (Kloeden and Platen 1992, section 14.1-14.2):
means, covariances and the order of the discretisation bias are unchanged, and sums over steps are normal.

Both kinds are a function of the `torch.Generator` alone, so that saving the generator saves the stream.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Innovations = Literal["auto", "normal", "bytes"]
BYTES_FROM = 1 << 14  # elements; below it normals cost less than the rest of the step

# Solves E[x^2] = 1, E[x^4] = 3 for x = a u + b u^3 over the 256 values u = (k + 1/2) / 128; odd moments vanish.
CUBIC_A = 0.6075658039822274
CUBIC_B = 1.7690814484055293


def innovations_(out: Tensor, generator: torch.Generator, kind: Innovations = "auto") -> Tensor:
    """Fill the flat float tensor ``out`` with innovations, in place.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = innovations_(torch.empty(1 << 16), g)
        >>> round(float(x.var()), 1), round(float(x.pow(4).mean()), 1)
        (1.0, 3.0)
    """
    if kind == "normal" or out.device.type != "cpu" or (kind == "auto" and out.numel() < BYTES_FROM):
        return out.normal_(generator=generator)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    words = np.random.SFC64(seed).random_raw((out.numel() + 7) // 8)
    out.copy_(torch.from_numpy(words.view(np.int8)[: out.numel()])).add_(0.5)
    # x = b u (u^2 + a/b) with u = out / 128, written so that the cubic costs three passes.
    cube = out * out
    cube.mul_(CUBIC_B / 128**3).add_(CUBIC_A / 128)
    return out.mul_(cube)
