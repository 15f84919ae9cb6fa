"""Columns of a table as inputs of a network, by encoders of scikit-learn that are saved as plain numbers and text.

- A **number** is standardised. A missing one becomes the median, and another input says that it was missing.
- A **category** becomes an input for each level. Levels of a single row, and those beyond the 50 most frequent, share
  one. Missing is a level. For an unseen level, all inputs are off.
- A **date** becomes its day, and sine and cosine of the day of the year.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

from isosgd.errors import listed

Array = NDArray[Any]
MISSING = "(missing)"
RARE, MOST_LEVELS = 2, 50  # least rows and most number of levels with an input of their own
MARGIN = 0.1  # of the training range, that a number may lie beyond it without being called unusual
YEAR = 365.2425
NUMERIC = {"integer", "floating", "mixed-integer-float", "decimal", "boolean"}  # what pandas may find in objects


@dataclass
class Columns:
    """Turns rows of a pandas frame, or of an array of numbers, into inputs; made by `learn`.

    Attributes:
        names: of the columns; None for an array.
        numbers: names of those that are numbers; of an array their positions.
        dates: names of those that are dates.
        categories: names of the others.
        low: least value of each number and date (in days) in training; NaN where there was none.
        high: largest value of each.
        center: what is subtracted from each input.
        scale: by which it is divided then.
    """

    names: list[Any] | None
    numbers: list[Any]
    dates: list[Any]
    categories: list[Any]
    low: Array = field(default_factory=lambda: np.empty(0))
    high: Array = field(default_factory=lambda: np.empty(0))
    center: Array = field(default_factory=lambda: np.empty(0))
    scale: Array = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        self._fill = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        self._one_hot = OneHotEncoder(
            handle_unknown="ignore", min_frequency=RARE, max_categories=MOST_LEVELS, sparse_output=False,
            dtype=np.float64,
        )  # fmt: skip

    @classmethod
    def learn(cls, X: Any) -> tuple[Columns, torch.Tensor]:
        """Learn from training rows; also returns their inputs."""
        if not hasattr(X, "columns"):
            made = cls(None, list(range(X.shape[1])), [], [])
        else:
            kinds = {name: _kind(X[name]) for name in X.columns}
            numbers, dates, categories = ([name for name, k in kinds.items() if k == kind] for kind in KINDS)
            made = cls(list(X.columns), numbers, dates, categories)
        values, texts = made._parts(X)
        there = np.isfinite(values[:, : len(made.numbers) + len(made.dates)])
        made.low = np.where(there, values[:, : there.shape[1]], np.inf).min(0)
        made.high = np.where(there, values[:, : there.shape[1]], -np.inf).max(0)
        made.low[~there.any(0)] = made.high[~there.any(0)] = np.nan
        made._fit(values, texts)
        found = made._encoded(values, texts)
        # A 0-1 input is scaled like a balanced one; otherwise a rare level would be far from all others.
        flags = ((found == 0) | (found == 1)).all(0)
        with np.errstate(over="ignore"):
            made.center, spread = found.mean(0), found.std(0)
        if not np.isfinite(spread).all():
            raise ValueError("X has values so large that their squares overflow; divide its columns by their size")
        made.scale = np.where(flags, 0.5, np.where(spread > 1e-12 * np.abs(made.center), spread, 1.0))
        return made, made._standard(found)

    def inputs(self, X: Any) -> torch.Tensor:
        """Inputs in standard units, ``[n, inputs]``."""
        return self._standard(self._encoded(*self._parts(X)))

    def unusual(self, X: Any) -> list[list[str]]:
        """For each row, what its values have that training rows did not have."""
        values, texts = self._parts(X)
        found: list[list[str]] = [[] for _ in range(len(values))]
        gaps = set(self._gaps())
        for k, name in enumerate([*self.numbers, *self.dates]):
            show: Callable[[float], str] = _day if k >= len(self.numbers) else "{:g}".format
            room = MARGIN * (self.high[k] - self.low[k])
            words = f" is outside {show(self.low[k])} to {show(self.high[k])}" if np.isfinite(room) else " is new"
            inside = (values[:, k] >= self.low[k] - room) & (values[:, k] <= self.high[k] + room)
            for row in np.flatnonzero(~inside).tolist():
                if np.isfinite(values[row, k]):
                    found[row].append(f"{name} {show(values[row, k])}{words}")
                elif k not in gaps:
                    found[row].append(f"{name} is missing")
        for k, name in enumerate(self.categories):
            known = set(self._one_hot.categories_[k])
            for row, level in enumerate(texts[:, k]):
                if level not in known:
                    found[row].append(f"{name} is missing" if level == MISSING else f"{name} {level!r} is new")
        return found

    def describe(self) -> list[str]:
        """What was done to the columns, in a few lines."""
        kinds = {"number": self.numbers, "date": self.dates, "category": self.categories}
        many = {"number": "numbers", "date": "dates", "category": "categories"}
        used = ", ".join(f"{len(v)} {many[k] if len(v) > 1 else k}" for k, v in kinds.items() if v)
        lines = [f"{used} become {len(self.scale)} inputs"]
        found, values = self.as_dict(), [*self.numbers, *self.dates]
        lacking = [values[k] for k in found["gaps"]]
        lacking += [name for name, levels in zip(self.categories, found["levels"], strict=True) if MISSING in levels]
        if lacking:
            lines.append(
                f"missing values in {listed(map(repr, lacking))}: an input says so, and a number takes its median"
            )
        if lumped := [name for name, rare in zip(self.categories, found["rare"], strict=True) if rare]:
            lines.append(f"rare levels of {listed(map(repr, lumped))} are taken as one")
        return lines

    def named(self, X: Array) -> Any:
        """An array as a frame with the learnt names."""
        import pandas as pd

        return pd.DataFrame(X, columns=self.names)

    # -- encoders -----------------------------------------------------------------------------------------------------

    def _parts(self, X: Any) -> tuple[Array, Array]:
        """Numbers, days and seasons of dates, ``[n, ...]``; and categories as text."""
        if self.names is None:
            return np.asarray(X, dtype=np.float64), np.empty((len(X), 0), object)
        if absent := [name for name in self.names if name not in X.columns]:
            raise ValueError(f"X lacks the column {absent[0]!r}, with which the model was fitted: give it all columns")
        days = [_days(X[name]) for name in self.dates]
        waves = [np.nan_to_num(wave(2 * np.pi * part / YEAR)) for part in days for wave in (np.sin, np.cos)]
        numbers = [_numbers(X[name]) for name in self.numbers]
        values = np.stack([*numbers, *days, *waves], 1) if self.numbers or self.dates else np.empty((len(X), 0))
        texts = [_texts(X[name]) for name in self.categories]
        return values, np.stack(texts, 1) if texts else np.empty((len(X), 0), object)

    def _fit(self, values: Array, texts: Array) -> None:
        if values.shape[1]:
            self._fill.fit(values)
        if texts.shape[1]:
            self._one_hot.fit(texts)

    def _encoded(self, values: Array, texts: Array) -> Array:
        parts = [self._fill.transform(values)] if values.shape[1] else []
        parts += [self._one_hot.transform(texts)] if texts.shape[1] else []
        return np.concatenate(parts, 1)

    def _standard(self, found: Array) -> torch.Tensor:
        return torch.from_numpy((found - self.center) / self.scale)

    def _gaps(self) -> list[int]:
        """Which numbers and dates were missing in training rows."""
        return [int(k) for k in self._fill.indicator_.features_] if self.numbers or self.dates else []

    # -- as plain values ----------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """All that was learnt, as JSON values."""
        rare = getattr(self._one_hot, "infrequent_categories_", None) if self.categories else None
        levels = [list(part) for part in self._one_hot.categories_] if self.categories else []
        return {
            **{name: getattr(self, name) for name in ("names", "numbers", "dates", "categories")},
            **{name: _plain(getattr(self, name)) for name in ("low", "high", "center", "scale")},
            "medians": _plain(self._fill.statistics_) if self.numbers or self.dates else [],
            "gaps": self._gaps(),
            "levels": levels,
            "rare": [[] if part is None else list(part) for part in rare or [None] * len(levels)],
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Columns:
        """The inverse of `as_dict`: encoders are fitted to a few rows with the same medians, gaps and levels."""
        made = cls(*(given[name] for name in ("names", "numbers", "dates", "categories")))
        for name in ("low", "high", "center", "scale"):
            setattr(made, name, np.array([np.nan if v is None else v for v in given[name]], dtype=np.float64))
        columns = [
            [level for level in levels for _ in range(1 if level in rare else RARE)]
            for levels, rare in zip(given["levels"], map(set, given["rare"]), strict=True)
        ]
        count = max([2, *map(len, columns)])
        values = np.tile(np.array(given["medians"], dtype=np.float64), (count, 1))
        values[-1, given["gaps"]] = np.nan
        empty = np.isnan(made.low)
        values[:, : len(empty)][:, empty] = np.nan
        # A column of only rare levels has at most one for each training row.
        often = [next((v for v in part if part.count(v) > 1), None) if len(part) < count else None for part in columns]
        texts = [part + [filler] * (count - len(part)) for part, filler in zip(columns, often, strict=True)]
        made._fit(values, np.array(texts, dtype=object).T if texts else np.empty((count, 0), object))
        again = made.as_dict()
        if wrong := [name for name in given if given[name] != again[name]]:
            raise ValueError(f"its {wrong[0]} do not go with each other")
        if len(made.center) != len(made.scale) or made._width() != len(made.scale) or not (made.scale > 0).all():
            raise ValueError("its scales are not those of its inputs")
        return made

    def _width(self) -> int:
        """Number of inputs."""
        numbers = len(self.numbers) + 3 * len(self.dates) + len(self._gaps())
        return numbers + (len(self._one_hot.get_feature_names_out()) if self.categories else 0)


# -- columns of pandas ------------------------------------------------------------------------------------------------

KINDS = ("number", "date", "category")


def _kind(column: Any) -> str:
    import pandas as pd
    from pandas.api import types

    if types.is_numeric_dtype(column):
        return "number"
    if types.is_timedelta64_dtype(column):
        return "number"
    if types.is_datetime64_any_dtype(column) or isinstance(column.dtype, pd.PeriodDtype):
        return "date"
    found = types.infer_dtype(column, skipna=True) if types.is_object_dtype(column) else ""
    return "number" if found in NUMERIC else "date" if found in ("date", "datetime") else "category"


def _numbers(column: Any) -> Array:
    import pandas as pd
    from pandas.api import types

    try:
        if types.is_timedelta64_dtype(column):
            column = column / pd.Timedelta(days=1)
        if types.is_datetime64_any_dtype(column):
            raise TypeError
        found = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise ValueError(
            f"column {column.name!r} was one of numbers when the model was fitted; now it holds {_first(column)!r}"
        ) from None
    if np.isinf(found).any():
        raise ValueError(f"column {column.name!r} has infinite values; make them missing (NaN), or drop these rows")
    return np.asarray(found)


def _days(column: Any) -> Array:
    import pandas as pd

    if _kind(column) != "date" and column.notna().any():
        raise ValueError(
            f"column {column.name!r} was one of dates when the model was fitted; now it holds {_first(column)!r}: "
            "pandas.to_datetime makes dates of text"
        )
    if isinstance(column.dtype, pd.PeriodDtype):
        column = column.dt.to_timestamp()
    since = pd.to_datetime(column, utc=True) - pd.Timestamp(0, tz="UTC")
    return np.asarray(since / pd.Timedelta(days=1), dtype=np.float64)


def _texts(column: Any) -> Array:
    import pandas as pd
    from pandas.api import types

    if types.is_float_dtype(column) and column.notna().any():
        raise ValueError(
            f"column {column.name!r} was one of categories when the model was fitted; now it holds the number "
            f"{_first(column)!r}: give it as text"
        )
    for value in column:
        if isinstance(value, Mapping | Collection) and not isinstance(value, str | bytes):
            raise ValueError(
                f"column {column.name!r} holds a {type(value).__name__}: make columns of numbers, text or dates of it"
            )
    return np.array([MISSING if pd.isna(value) else str(value) for value in column], dtype=object)


def _first(column: Any) -> Any:
    """An example value of a column, for an error message."""
    there = column.dropna()
    value = next((value for value in there if isinstance(value, str)), there.iloc[0])
    return value.item() if isinstance(value, np.generic) else value


def _plain(values: Array) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values]


def _day(value: float) -> str:
    return str(np.datetime64(round(value), "D"))
