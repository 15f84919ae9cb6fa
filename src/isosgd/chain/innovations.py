"""Innovations of several steps at once; see `isosgd.samplers.innovations` for the two kinds there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isosgd.samplers.innovations import UNIT, count_bits, stream


def innovations(out: Tensor, generator: torch.Generator, bits: bool, scale: Tensor | None = None) -> Tensor:
    """Fill ``[steps, chains, width]``, a function of the generator alone.

    Args:
        out: contiguous.
        generator: where all randomness comes from.
        bits: count bits; normal numbers otherwise.
        scale: of each, ``[chains, width]``; 1 when not given.

    Example:
        >>> out = innovations(torch.empty(50, 10, 20), torch.Generator().manual_seed(0), bits=False)
        >>> round(float(out.var()), 1)
        1.0
    """
    if out.device.type != "cpu":
        out.normal_(generator=generator)
        return out if scale is None else out.mul_(scale)
    words = torch.empty(3, dtype=torch.int64).random_(generator=generator).numpy().view(np.uint64)
    flat = out.view(len(out), -1).numpy()
    if bits:
        factor: Any = flat.dtype.type(UNIT) if scale is None else (scale * UNIT).reshape(-1).to(out.dtype).numpy()
        np.multiply(count_bits(words, flat.size).reshape(flat.shape), factor, out=flat, casting="unsafe")
        return out
    # numpy draws normal numbers in half the time that torch takes on one core.
    stream(words).standard_normal(flat.shape, flat.dtype.type, flat)
    return out if scale is None else out.mul_(scale)
