"""Differences between the settings of a stored run and the present ones, or between those of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SAME_LOSS = 1e-4  # relative: another machine may round otherwise, another model gives another loss


def differences(then: Any, now: Any, where: str = "") -> Iterator[str]:
    """Differences between two identities, one line each."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            inner = f"{where}.{key}" if where else str(key)
            if key in then and key in now:
                yield from differences(then[key], now[key], inner)
            else:
                yield f"{inner} was {'there' if key in then else 'not there'} and is {'not' if key in then else 'now'}"
    elif isinstance(then, list | tuple) and isinstance(now, list | tuple) and len(then) == len(now):
        for i, (a, b) in enumerate(zip(then, now, strict=True)):
            yield from differences(a, b, f"{where}[{i}]")
    elif isinstance(then, list | tuple) and isinstance(now, list | tuple):
        yield f"{where} had {len(then)} items and has {len(now)}"
    elif isinstance(then, float) and isinstance(now, float) and where.endswith(("target.loss", "target.gradient")):
        if math.isfinite(then) and math.isfinite(now) and abs(then - now) > SAME_LOSS * max(abs(then), abs(now), 1e-2):
            yield f"{where} at the start was {then:.6g} and is {now:.6g}: the model or its likelihood has changed"
    elif where.endswith("sha256") or ".start[" in where:
        if then != now:
            yield f"the values of {where.removesuffix('.sha256')} have changed"
    elif then != now:
        yield f"{where} was {then!r} and is {now!r}"


def as_lines(found: list[str], most: int = 12) -> str:
    """Differences, each on a line of its own."""
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return "".join(f"\n  {line}" for line in [*found[:most], *more])


def check_ranks(given: Sequence[Any], what: str = "all ranks must make the same call") -> None:
    """Raise unless all ranks were given the same."""
    for rank, other in enumerate(given):
        if found := list(differences(given[0], other)):
            raise ValueError(
                f"rank {rank} was not given what rank 0 was (was: rank 0, is: rank {rank}):{as_lines(found)}\n{what}"
            )
