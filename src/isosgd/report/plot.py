"""Plots as SVG, coloured by the style sheet of the page, also in dark mode and print.

Colours are classes (``a`` to ``f`` for series, ``grey``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Limits = tuple[float, float]
SERIES = "abcdef"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
WIDTH = 440  # in units of the drawing, about pixels
CHARACTER = 6.1  # width of a digit of a tick label


class Plot:
    """A pair of axes from limits of x and y; ticks are positions with labels, if round numbers will not do.

    Example:
        >>> plot = Plot((0, 1), (0, 10), xlabel="time", ylabel="speed")
        >>> plot.line([0, 1], [0, 10], "a", label="run 1")
        >>> text = plot.svg("Speed rises with time.")
        >>> text.startswith("<svg"), "run 1" in text
        (True, True)
    """

    def __init__(
        self,
        x: Limits,
        y: Limits,
        *,
        xlabel: str = "",
        ylabel: str = "",
        xticks: Sequence[tuple[float, str]] | None = None,
        yticks: Sequence[tuple[float, str]] | None = None,
        height: int = 290,
        grid: bool = True,
    ) -> None:
        self.x, self.y, self.grid = widened(x), widened(y), grid
        self.xlabel, self.ylabel, self.height = xlabel, ylabel, height
        self.xticks = list(xticks) if xticks is not None else ticks(*self.x, count=WIDTH / 75)
        self.yticks = list(yticks) if yticks is not None else ticks(*self.y, count=height / 48)
        self.left = 14 + CHARACTER * max([len(label) for _, label in self.yticks] + [1]) + (16 if ylabel else 0)
        self.right, self.top, self.bottom = WIDTH - 14.0, 12.0, height - (42.0 if xlabel else 26.0)
        self._parts: list[str] = []
        self._legend: dict[str, tuple[str, str]] = {}

    def line(self, x: Any, y: Any, colour: str, *, label: str = "", style: str = "") -> None:
        """A line through points; ``style`` adds classes such as ``thin`` or ``dashed``."""
        xs, ys = self._places(x, y)
        if len(xs):
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))
            self._add(f'<polyline class="line {colour} {style}" points="{points}"/>', label, colour, f"line {style}")

    def band(self, x: Any, low: Any, high: Any, colour: str, *, label: str = "", style: str = "") -> None:
        """The area between two lines."""
        xs, lows = self._places(x, low)
        _, highs = self._places(x, high)
        if len(xs):
            path = [*zip(xs, lows, strict=True), *zip(xs[::-1], highs[::-1], strict=True)]
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in path)
            self._add(f'<polygon class="band {colour} {style}" points="{points}"/>', label, colour, f"band {style}")

    def dots(self, x: Any, y: Any, colour: str, *, label: str = "", radius: float = 2.6) -> None:
        """A dot at each point."""
        xs, ys = self._places(x, y)
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius:g}"/>' for a, b in zip(xs, ys, strict=True))
        self._add(f'<g class="dot {colour}">{dots}</g>', label, colour, "dot")

    def rods(self, x: Any, low: Any, high: Any, colour: str, *, label: str = "") -> None:
        """A vertical line from low to high at each x, such as an interval."""
        xs, lows = self._places(x, low)
        _, highs = self._places(x, high)
        path = " ".join(f"M{a:.1f} {b:.1f}V{c:.1f}" for a, b, c in zip(xs, lows, highs, strict=True))
        self._add(f'<path class="rod {colour}" d="{path}"/>', label, colour, "line")

    def bars(self, edges: Any, heights: Any, colour: str, *, label: str = "", style: str = "") -> None:
        """A histogram: bars from zero between edges."""
        lefts, tops = self._places(np.asarray(edges)[:-1], heights)
        rights, floor = self._places(np.asarray(edges)[1:], np.zeros(len(lefts)))
        parts = "".join(
            f'<rect x="{a:.1f}" y="{t:.1f}" width="{max(b - a - 1, 0.5):.1f}" height="{max(f - t, 0):.1f}"/>'
            for a, b, t, f in zip(lefts, rights, tops, floor, strict=True)
        )
        self._add(f'<g class="bar {colour} {style}">{parts}</g>', label, colour, f"bar {style}")

    def cell(self, x: float, y: float, strength: float, text: str) -> None:
        """A square of size 1 around a point, coloured by a strength in [0, 1]."""
        (left, right), (low, high) = self._places([x - 0.5, x + 0.5], [y - 0.5, y + 0.5])
        box = f'x="{left + 1:.1f}" y="{high + 1:.1f}" width="{right - left - 2:.1f}" height="{low - high - 2:.1f}"'
        self._parts.append(f'<rect class="cell" {box} rx="3" fill-opacity="{0.06 + 0.84 * strength:.3f}"/>')
        light = "light" if strength > 0.55 else ""
        self._parts.append(_text((left + right) / 2, (low + high) / 2 + 4, text, light))

    def svg(self, alt: str) -> str:
        """The drawing; ``alt`` is its text alternative."""
        legend, rows = self._legend_marks()
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height + 20 * rows}" role="img" aria-label="{escape(alt)}">{legend}'
            f'<g transform="translate(0 {20 * rows})">{self._axes()}{"".join(self._parts)}</g></svg>'
        )

    def _add(self, part: str, label: str, colour: str, kind: str) -> None:
        self._parts.append(part)
        if label:
            self._legend.setdefault(label, (colour, kind))

    def _places(self, x: Any, y: Any) -> tuple[Array, Array]:
        xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
        # Values far outside are moved to just beyond the frame, which clips them.
        across = np.clip((xs - self.x[0]) / (self.x[1] - self.x[0]), -0.01, 1.01)
        up = np.clip((ys - self.y[0]) / (self.y[1] - self.y[0]), -0.02, 1.02)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def _axes(self) -> str:
        parts = []
        for value, label in self.yticks:
            _, (at,) = self._places([self.x[0]], [value])
            if self.grid:
                parts.append(f'<path class="grid" d="M{self.left:.1f} {at:.1f}H{self.right:.1f}"/>')
            parts.append(_text(self.left - 7, at + 3.8, label, "tick", "end"))
        for value, label in self.xticks:
            (at,), _ = self._places([value], [1.0])
            parts.append(f'<path class="axis" d="M{at:.1f} {self.bottom:.1f}v4"/>')
            parts.append(_text(at, self.bottom + 17, label, "tick"))
        parts.append(f'<path class="axis" d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"/>')
        if self.xlabel:
            parts.append(_text((self.left + self.right) / 2, self.height - 6, self.xlabel, "label"))
        if self.ylabel:
            middle = (self.top + self.bottom) / 2
            parts.append(
                f'<text class="label" transform="translate(12 {middle:.1f}) rotate(-90)" text-anchor="middle">'
                f"{escape(self.ylabel)}</text>"
            )
        return "".join(parts)

    def _legend_marks(self) -> tuple[str, int]:
        """The legend, and its number of rows."""
        parts, row, x = [], 0, float(WIDTH)
        for label, (colour, kind) in self._legend.items():
            wide = 30 + 6.2 * len(label)
            if x + wide > WIDTH:
                row, x = row + 1, 6.0
            y = 20 * row - 10
            if kind.startswith("line"):
                mark = f'<path class="{kind} {colour}" d="M{x:.1f} {y}h18"/>'
            elif kind.startswith("dot"):
                mark = f'<g class="{kind} {colour}"><circle cx="{x + 9:.1f}" cy="{y}" r="3.4"/></g>'
            else:
                box = f'x="{x:.1f}" y="{y - 5}" width="18" height="10"'
                mark = f'<g class="{kind} {colour}"><rect class="{kind} {colour}" {box}/></g>'
            parts.append(mark + _text(x + 24, y + 4, label, "legend", "start"))
            x += wide + 8
        return "".join(parts), row


def _text(x: float, y: float, words: str, style: str, anchor: str = "middle") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


# -- numbers and axes --------------------------------------------------------------------------------------------------


def limits(*values: Any, margin: float = 0.05) -> Limits:
    """Limits that contain all finite values, with a margin.

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
    """A number for readers: few digits, and thousands separators.

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
    """Limits that are finite and differ."""
    low, high = (float(end) for end in ends)
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high - low > 1e-12 * max(abs(low), abs(high), 1e-30) else (low - 0.5, high + 0.5)


def ticks(low: float, high: float, count: float) -> list[tuple[float, str]]:
    """About ``count`` round numbers between two limits, with labels."""
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
    return [(k, f"10{str(k).translate(_SUPERSCRIPTS)}") for k in range(first, last + 1, (last - first) // 6 + 1)]
