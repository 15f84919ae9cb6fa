"""Which library multiplies small matrices on this CPU.

torch hands matrix products to oneDNN where it was built with it. On ARM that is slow for small products: with torch
2.13 on a Neoverse N1 a linear layer of 128 x 13 by 50 x 13 took more than ten times as long with it as with the BLAS
that torch otherwise falls back on, and no layer was faster. What is known of the machine decides, not a trial: a choice
that hung on the clock would change the draws.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fastest_products(device: torch.device) -> Iterator[None]:
    """While open, products on the CPU go the faster way."""
    before = bool(torch.backends.mkldnn.enabled)
    if not (before and device.type == "cpu" and _onednn_is_slow()):
        yield
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


def _onednn_is_slow() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")
