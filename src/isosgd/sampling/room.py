"""Whether what is asked for fits into memory: said at once, not after an hour of filling it."""

from __future__ import annotations

import os

from isosgd.target import Params

OBJECT = 500  # bytes that a tensor takes up beside its numbers


def memory() -> int | None:
    """Bytes of memory that this machine has; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no such function
        return None


def check_room(start: Params, chains: int, draws: int) -> None:
    """Refuse more chains, or more draws of them, than this machine has memory for at the very least.

    Args:
        start: parameters of a chain.
        chains: how many there are.
        draws: of each, that are kept in memory.

    Example:
        >>> import torch
        >>> check_room({"w": torch.zeros(50, 13)}, chains=4, draws=100)
    """
    room = memory()
    if room is None:
        return
    numbers = sum(x.numel() * x.element_size() for x in start.values())
    on_cpu = all(x.device.type == "cpu" for x in start.values())
    needed = chains * (OBJECT * len(start) + numbers * on_cpu)
    if needed > room:
        raise ValueError(
            f"chains = {chains:,} need {_gib(needed)} of memory at least, and this machine has {_gib(room)}: take fewer"
        )
    if (needed := chains * draws * numbers) > room:
        raise ValueError(
            f"draws = {draws:,} of {chains:,} chains take up {_gib(needed)} of memory, and this machine has "
            f"{_gib(room)}: take fewer, or have them written to the disk as they come (store=)"
        )


def _gib(size: float) -> str:
    """A number of bytes in words.

    Example:
        >>> _gib(3.2e12)
        '2,980 GiB'
    """
    return f"{size / (1 << 30):,.0f} GiB"
