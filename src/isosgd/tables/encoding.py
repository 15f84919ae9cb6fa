"""How one column of a table becomes inputs of a network; the rules stand in `isosgd.tables.tables`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isosgd.tables.columns import days, numbers

Kind = Literal["number", "date", "category"]
MOSTLY = 0.95  # share of numbers that makes a column one of numbers
RARE_ROWS, RARE_SHARE = 5, 0.01  # a level with fewer is rare
MARGIN = 0.1  # of the training range, that a number may lie beyond it without being called unusual
YEAR = 365.2425
_ID = re.compile(r"(.*[_ .-])?(id|index|key|uuid|rownames?)|unnamed.*|\(first column\)", re.IGNORECASE)

Array = NDArray[np.float64]
Values = Sequence[str | None]


@dataclass(frozen=True)
class Column:
    """How one column becomes inputs.

    Attributes:
        name: in the file.
        kind: ``number``, ``date`` or ``category``.
        missing: whether training rows lacked it; there is an input for that.
        middle: median of a number or date (in days), which stands in for a missing value.
        low: least value in training.
        high: largest value in training.
        levels: of a category, the most frequent first, each with an input.
        rare: other levels, which share an input.
    """

    name: str
    kind: Kind
    missing: bool
    middle: float = 0.0
    low: float = 0.0
    high: float = 0.0
    levels: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs it becomes."""
        if self.kind == "category":
            named = [f"{self.name} = {level}" for level in self.levels] + [f"{self.name} = (other)"] * bool(self.rare)
        else:
            named = [self.name]
            if self.kind == "date":
                named += [f"{self.name} ({wave} of the year)" for wave in ("sine", "cosine")]
        return named + [f"{self.name} is missing"] * self.missing

    @property
    def indicators(self) -> list[bool]:
        """Which of the inputs are 0 or 1."""
        numeric = {"number": 1, "date": 3, "category": 0}[self.kind]
        return [k >= numeric for k in range(len(self.inputs))]

    def encode(self, values: Values) -> tuple[Array, list[str]]:
        """Inputs ``[n, inputs]``, and what is unusual about each value (empty: nothing)."""
        found, gone, words = self._levels(values) if self.kind == "category" else self._numbers(values)
        if self.missing:
            return np.column_stack([found, gone]).astype(np.float64), words
        return found, [f"{self.name} is missing" if g else w for g, w in zip(gone, words, strict=True)]

    def _levels(self, values: Values) -> tuple[Array, NDArray[np.bool_], list[str]]:
        place = {level: k for k, level in enumerate(self.levels)}
        found = np.zeros((len(values), len(self.levels) + bool(self.rare)))
        known = {*self.levels, *self.rare}
        for row, value in enumerate(values):
            at = place.get(value, len(place)) if value is not None else found.shape[1]
            if at < found.shape[1]:
                found[row, at] = 1
        words = [f"{self.name} {v!r} is new" if v is not None and v not in known else "" for v in values]
        return found, np.array([v is None for v in values], bool), words

    def _numbers(self, values: Values) -> tuple[Array, NDArray[np.bool_], list[str]]:
        number, _ = (days if self.kind == "date" else numbers)(values)
        gone, room = ~np.isfinite(number), MARGIN * (self.high - self.low)
        beyond = (number < self.low - room) | (number > self.high + room)
        show: Callable[[float], str] = _day if self.kind == "date" else "{:g}".format
        words = [
            f"{self.name} {show(v)} is outside {show(self.low)} to {show(self.high)}" if b else ""
            for v, b in zip(number, beyond, strict=True)
        ]
        number = np.where(gone, self.middle, number)
        angle = 2 * np.pi * number / YEAR
        parts = [number, np.sin(angle), np.cos(angle)] if self.kind == "date" else [number]
        return np.stack(parts, 1), gone, words


def learn_column(name: str, values: Values) -> tuple[Column | None, str]:
    """What a column is, and a remark about it; None for one that is dropped, the remark then says why.

    Example:
        >>> learn_column("size", ["3", "4", None, "8"])[0].inputs
        ['size', 'size is missing']
        >>> learn_column("who", ["Ann", "Bob", "Cid", "Dan"])
        (None, 'no level has 5 rows (4 different in 4 rows)')
    """
    there = [v for v in values if v is not None]
    if not there:
        return None, "it is empty"
    different = Counter(there)
    if len(different) == 1 and len(there) == len(values):
        return None, f"it is always {there[0]!r}"
    for kind, read in (("number", numbers), ("date", days)):
        found, bad = read(values)
        if bad <= (1 - MOSTLY) * len(there):
            return _learn_number(name, kind, found, bad, len(different))  # type: ignore[arg-type]
    least = max(RARE_ROWS, math.ceil(RARE_SHARE * len(values)))
    ordered = sorted(different, key=lambda level: (-different[level], level))
    levels = tuple(level for level in ordered if different[level] >= least)
    rare = tuple(level for level in ordered if different[level] < least)
    often = sum(different[level] for level in levels)
    if not levels:
        return None, f"no level has {least} rows ({len(different)} different in {len(there)} rows)"
    if often < len(there) / 2:
        return None, f"most of its {len(different)} levels are rare (below {least} rows)"
    return Column(name, "category", len(there) < len(values), levels=levels, rare=rare), ""


def _learn_number(name: str, kind: Kind, found: Array, bad: int, different: int) -> tuple[Column | None, str]:
    there = found[np.isfinite(found)]
    if there.min() == there.max() and not np.isnan(found).any():
        return None, f"it is always {there[0]:g}"
    whole = bool((there == np.round(there)).all()) and len(there) == len(found) == different
    if kind == "number" and whole and (_ID.fullmatch(name) or bool((np.diff(np.sort(there)) == 1).all())):
        return None, "it numbers the rows"
    remark = f"{bad} values of {name!r} are no {kind} and count as missing" if bad else ""
    middle, low, high = (float(f(there)) for f in (np.median, np.min, np.max))
    return Column(name, kind, bool(np.isnan(found).any()), middle, low, high), remark


def _day(value: float) -> str:
    try:
        return (datetime(1970, 1, 1) + timedelta(days=value)).date().isoformat()
    except OverflowError:
        return f"day {value:g}"
