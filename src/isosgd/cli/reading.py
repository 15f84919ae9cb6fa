"""Reads tables by pandas and finds the type of each column: numbers, dates or text."""

from __future__ import annotations

import csv
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from isosgd.sampling.settings import memory

SEPARATORS = ",;\t|"
MISSING = ["?", "na", "Na", "none", "nat", "NaT", "NAN", "N/a"]  # in addition to those of pandas
MOSTLY = 0.95  # share of numbers or dates that makes a text column numbers or dates
LARGER = 3  # least size of a frame, relative to its file
SWAPPED = str.maketrans(",.", ".,")
_NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")
_ID = re.compile(r"(.*[_ .-])?(id|index|key|uuid|rows?([_ .-]?(names?|num(ber)?|no|id))?)|unnamed.*", re.IGNORECASE)


def read_table(path: Path, columns: Any = None, target: str | None = None) -> tuple[Any, list[str]]:
    """A CSV or Parquet file as a frame with typed columns, and remarks about values that do not fit.

    The first line of a CSV file names its columns. The separator is the most frequent of comma, semicolon, tab and bar
    in this line; with semicolons, a comma inside a number is its decimal point. Text of which at least 95% are numbers
    or ISO dates is converted, and the rest is missing.

    Args:
        path: ``.parquet`` or ``.pq`` for Parquet; anything else is CSV in UTF-8.
        columns: the `isosgd.tables.columns.Columns` of a model, which give the type of each column.
        target: the column to predict. If it is text, only empty cells are missing, since "None" may be a class.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('tables need pandas and scikit-learn: pip install "isosgd[tables]"') from error
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a CSV or Parquet file")
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; name a CSV or Parquet file")
    room = memory()
    if room is not None and LARGER * path.stat().st_size > room:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than memory holds: fit fewer rows of it")
    known = {} if columns is None else {n: k for k in ("numbers", "dates", "categories") for n in getattr(columns, k)}
    text = [name for name, kind in known.items() if kind != "numbers"]
    frame, decimal = _parquet(path) if _is_parquet(path) else _csv(path, text)
    if columns is None and frame.shape[1] < 2:
        raise ValueError(
            f"{path} has the single column {frame.columns[0]!r}; a target and at least one input are needed"
        )
    if not len(frame):
        raise ValueError(f"{path} has names of columns in its first line, but no rows below it")
    remarks: list[str] = []
    if target in frame.columns and not _is_parquet(path):
        frame[target], remarks = _with_words(path, frame[target], decimal)
    for name in frame.columns:
        column = frame[name]
        if pd.api.types.is_object_dtype(column) or pd.api.types.is_string_dtype(column):
            frame[name], bad, kind = _typed(column, known.get(name), decimal)
            remarks += [f"{bad} values of {name!r} are no {kind} and count as missing"] if bad else []
    return frame, remarks


def as_they_stand(path: Path, names: list[str]) -> Any:
    """Columns as in the file: the text of CSV, with only empty cells missing, or the values of Parquet."""
    return (_parquet(path) if _is_parquet(path) else _csv(path, names, only=True))[0][names]


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


def _with_words(path: Path, column: Any, decimal: str) -> tuple[Any, list[str]]:
    """A text column in which words such as "None" are values, and remarks about them."""
    from pandas.api import types

    text = types.is_object_dtype(column) or types.is_string_dtype(column)
    if not text or not column.isna().any():
        return column, []
    as_text = as_they_stand(path, [column.name])[column.name].str.strip()
    known = as_text.where(column.notna())
    if not known.notna().any() or _typed(known, None, decimal)[2] != "text":
        return column, []
    words = as_text[column.isna()].value_counts().sort_index()
    return as_text, [
        f"of the target {column.name!r}, {word!r} ({rows} rows) is taken as a class; only empty cells are missing there"
        for word, rows in words.items()
    ]


def _csv(path: Path, text: list[str], only: bool = False) -> tuple[Any, str]:
    """The frame, with some columns as text, and its decimal mark; or ``only`` these columns, with only empty cells
    missing.
    """
    import pandas as pd

    separator = ","
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
        if not first.strip():
            empty = "it" if not path.stat().st_size else "the first line"
            raise ValueError(f"{path}: {empty} is empty; the first line must name the columns")
        separator = max(SEPARATORS, key=first.count)
        decimal = "," if separator == ";" else "."
        names = [name.strip() for name in next(csv.reader([first], delimiter=separator, skipinitialspace=True))]
        _check_names(path, names)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more values than names
            frame = pd.read_csv(
                path, sep=separator, decimal=decimal, encoding="utf-8-sig", index_col=False,
                skipinitialspace=True, na_values=[""] if only else MISSING, keep_default_na=not only, low_memory=False,
                usecols=(lambda name: name.strip() in text) if only else None,
                dtype=str if only else {name: str for name in text if name in names},
            )  # fmt: skip
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); save it as CSV in UTF-8") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        why = str(error).replace("Error tokenizing data. C error: ", "").strip()
        if "EOF inside string" in why:
            raise ValueError(f"{path}: a double quote is opened and not closed ({why})") from error
        raise ValueError(f"{path}: {why}; put values that hold {separator!r} in double quotes") from error
    return frame.rename(columns=lambda name: str(name).strip()), decimal


def _parquet(path: Path) -> tuple[Any, str]:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError as error:
        raise ModuleNotFoundError('to read Parquet, install pyarrow: pip install "isosgd[tables]"') from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from error
    frame = frame.rename(columns=str)
    _check_names(path, list(frame.columns))
    for name in frame.columns:
        if found := {type(value).__name__ for value in frame[name]} & {"list", "dict", "bytes", "ndarray"}:
            raise ValueError(f"{path}: column {name!r} has values of type {found.pop()}; drop it, or make text of it")
    return frame, "."


def _check_names(path: Path, names: list[str]) -> None:
    if all(_NUMBER.fullmatch(name) for name in names):
        raise ValueError(f"{path}: the first line holds numbers ({', '.join(names[:3])}); it must name the columns")
    for k, name in enumerate(names):
        if not name and k:  # R writes row numbers under an empty name
            raise ValueError(f"{path}: column {k + 1} has no name; give it one in the first line")
        if names.index(name) < k:
            raise ValueError(f"{path}: columns {names.index(name) + 1} and {k + 1} are both named {name!r}; rename one")


def _typed(column: Any, kind: str | None, decimal: str) -> tuple[Any, int, str]:
    """A text column as numbers or dates, if most values or the ``kind`` say so; and the number of values that are
    not.
    """
    import pandas as pd

    column = column.map(lambda value: value.strip() if isinstance(value, str) else value)
    there = int(column.notna().sum())

    def numbers() -> Any:
        values = column
        if kind == "numbers":  # pandas reads only True and False, and other words make it text
            truth = {"true": 1.0, "false": 0.0}
            values = column.map(lambda value: truth.get(value.lower(), value) if isinstance(value, str) else value)
        found = pd.to_numeric(values, errors="coerce")
        if decimal == ".":
            return found
        # One decimal mark for the whole column, the more frequent one: beside 1.5, 1,234 is not 1.234.
        swapped = values.map(lambda v: v.translate(SWAPPED) if isinstance(v, str) else v)
        other = pd.to_numeric(swapped, errors="coerce")
        return other if other.notna().sum() >= found.notna().sum() else found

    readers: dict[str, Any] = {
        "numbers": numbers,
        "dates": lambda: pd.to_datetime(column, format="ISO8601", errors="coerce", utc=True),
    }
    for name, read in readers.items():
        if kind in (None, name) and there:
            found = read()
            bad = there - int(found.notna().sum())
            if kind == name or bad <= (1 - MOSTLY) * there:
                return found, bad, name
    if kind in readers:  # all missing
        return readers[kind](), 0, kind
    return column, 0, "text"


def why_useless(column: Any) -> str:
    """Why a column has no information; empty if it may have."""
    import pandas as pd

    counts = column.value_counts()
    if not len(counts):
        return "it is empty"
    if len(counts) == 1 and column.notna().all():
        return f"it is always {_shown(counts.index[0])}"
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
        return ""
    single = int((counts == 1).sum())
    if single > counts.sum() / 2:
        return f"most of its values stand in one row alone ({single} of {int(counts.sum())})"
    return ""


def look_separated(column: Any) -> bool:
    """Whether text is mostly numbers with thousands separators, a currency or a percent sign."""
    import pandas as pd

    bare = column.dropna().astype(str).str.replace(r"[,$€£%\s]", "", regex=True)
    return bool(pd.to_numeric(bare, errors="coerce").notna().mean() >= MOSTLY)


def numbers_rows(name: str, column: Any) -> bool:
    """Whether a column numbers the rows: from 0 or 1 in order; or has a name of a row number, and no repeats."""
    import pandas as pd

    if not pd.api.types.is_integer_dtype(column) or not column.is_unique:
        return False
    return bool(_ID.fullmatch(name)) or any((column == np.arange(k, k + len(column))).all() for k in (0, 1))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) and math.isfinite(value) else repr(value)
