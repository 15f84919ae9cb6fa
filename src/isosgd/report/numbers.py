"""Numbers for people: few digits, round ticks, limits of an axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Limits = tuple[float, float]
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def limits(*values: Any, margin: float = 0.05) -> Limits:
    """Limits that hold all finite values, with a margin.

    Example:
        >>> limits([0.0, 10.0], [float("nan")], margin=0.1)
        (-1.0, 11.0)
    """
    every = np.concatenate([np.ravel(np.asarray(v, dtype=np.float64)) for v in values])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = float(every.min()), float(every.max())
    room = margin * (high - low)
    return low - room, high + room


def number(value: float, digits: int = 3) -> str:
    """A number for people to read: few digits, thousands apart.

    Example:
        >>> number(12345.6), number(0.01234), number(-0.0), number(3.0), number(2.5e-7)
        ('12,346', '0.0123', '0', '3', '2.5×10⁻⁷')
    """
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size > 8:
        mantissa = f"{value / 10.0**size:.{digits - 1}f}".rstrip("0").rstrip(".")
        return f"{mantissa}×10{str(size).translate(_SUPERSCRIPTS)}".replace("-", "−")
    text = f"{value:,.{max(digits - 1 - size, 0)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def widened(ends: Limits) -> Limits:
    """Ends that are apart, and finite."""
    low, high = (float(end) for end in ends)
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high - low > 1e-12 * max(abs(low), abs(high), 1e-30) else (low - 0.5, high + 0.5)


def ticks(low: float, high: float, count: float) -> list[tuple[float, str]]:
    """Round numbers between two ends, about so many."""
    rough = (high - low) / max(count, 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [k * step for k in range(first, last + 1)]
    largest = max((abs(v) for v in values), default=1.0)
    if largest >= 1e6 or largest < 1e-4:
        return [(v, number(v)) for v in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9) + (1 if abs(step / power - 2.5) < 1e-9 else 0))
    return [(v, f"{v:,.{decimals}f}".replace("-", "−") if abs(v) > 1e-12 * largest else "0") for v in values]


def decades(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten between two exponents."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    step = max(1, (last - first) // 5 + 1) if last - first > 5 else 1
    return [(k, f"10{str(k).translate(_SUPERSCRIPTS)}") for k in range(first, last + 1, step)]
