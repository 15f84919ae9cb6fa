"""Checks of numbers that a description is made of."""

from __future__ import annotations

import math


def whole(name: str, value: int | None) -> None:
    """Refuse what is no count; None passes."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} = {value!r} must be an integer of at least 1")


def real(name: str, value: float | None, positive: bool) -> None:
    """Refuse what is no finite number of the right sign; None passes."""
    if value is None:
        return
    number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} = {value!r} must be a {'positive number' if positive else 'number of at least 0'}")
