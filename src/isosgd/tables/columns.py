"""Tables from files: named columns of text, in which a missing value is None.

CSV is read with the standard library; Parquet needs pyarrow. What a column means is for `isosgd.tables.tables` to say.
"""

from __future__ import annotations

import csv
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, list[str | None]]
MISSING = {"", "?", "na", "n/a", "nan", "nat", "null", "none", "#n/a"}
"""What stands for a missing value, in any case."""
SEPARATORS = ",;\t|"
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_COMMA_NUMBER = re.compile(r"([+-]?\d*),(\d+)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)?(?:Z|[+-]\d\d(?::?\d\d)?)?")
_DAY = 86_400.0


def read_columns(path: str | os.PathLike[str]) -> Columns:
    r"""Read a CSV or Parquet file; the ending tells which.

    The first line of a CSV file names its columns. Its separator is the comma, semicolon, tab or bar that this line has
    most of; where it is the semicolon, a comma inside a number is its decimal point. Spaces around values are dropped.

    Args:
        path: ``.parquet`` or ``.pq`` for Parquet, anything else is read as CSV in UTF-8.

    Raises:
        ValueError: the file is no such table; the message names the line.
        OSError: it cannot be read.
        ModuleNotFoundError: Parquet without pyarrow.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "t.csv").write_text("age, town\n31, Rome\nNA, Oslo\n")
        ...     read_columns(Path(folder) / "t.csv")
        {'age': ['31', None], 'town': ['Rome', 'Oslo']}
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a CSV or Parquet file")
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; name a CSV or Parquet file")
    columns = _read_parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _read_csv(path)
    if not next(iter(columns.values())):
        raise ValueError(f"{path} has names of columns in its first line, but no rows below it")
    return columns


def _read_csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            if not first.strip():
                empty = "it" if not path.stat().st_size else "the first line"
                raise ValueError(f"{path}: {empty} is empty; the first line must name the columns")
            separator = max(SEPARATORS, key=first.count)
            file.seek(0)
            reader = csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)
            names = _check_names(path, [name.strip() for name in next(reader)])
            rows: list[list[str]] = []
            for row in reader:
                if not row:
                    continue  # an empty line, often the last
                if len(row) != len(names):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(row)} values for {len(names)} columns; put values that "
                        f"hold {separator!r} in double quotes"
                    )
                rows.append(row)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); save it as CSV in UTF-8") from error
    except csv.Error as error:
        why = "a double quote is opened and not closed" if "end of data" in str(error) else error
        raise ValueError(f"{path}, line {reader.line_num}: {why}") from error
    comma = separator == ";"
    return {name: [_clean(row[k], comma) for row in rows] for k, name in enumerate(names)}


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('to read Parquet, install pyarrow: pip install "isosgd[tables]"') from error
    try:
        table = parquet.ParquetFile(path).read()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from error
    names = _check_names(path, table.column_names)
    return {name: [_as_text(value) for value in table.column(k).to_pylist()] for k, name in enumerate(names)}


def _check_names(path: Path, names: list[str]) -> list[str]:
    if len(names) < 2:
        raise ValueError(f"{path} has the single column {names[0]!r}; a target and at least one input are needed")
    if all(_NUMBER.fullmatch(name) for name in names):
        raise ValueError(f"{path}: the first line holds numbers ({', '.join(names[:3])}); it must name the columns")
    # R writes row numbers under an empty name: the first column may go without one.
    names = [names[0] or "(first column)", *names[1:]]
    for k, name in enumerate(names):
        if not name:
            raise ValueError(f"{path}: column {k + 1} has no name; give it one in the first line")
        if names.index(name) < k:
            raise ValueError(f"{path}: columns {names.index(name) + 1} and {k + 1} are both named {name!r}; rename one")
    return names


def _clean(text: str, comma: bool) -> str | None:
    text = text.strip()
    if text.lower() in MISSING:
        return None
    return _COMMA_NUMBER.sub(r"\1.\2", text) if comma and _COMMA_NUMBER.fullmatch(text) else text


def _as_text(value: Any) -> str | None:
    if isinstance(value, datetime | date):
        return value.isoformat(" ") if isinstance(value, datetime) else value.isoformat()
    if isinstance(value, list | dict | bytes | time):
        raise ValueError(f"a value of type {type(value).__name__} is no number, text or date; drop its column")
    return None if value is None else _clean(str(value), comma=False)


def near(name: str, names: Iterable[str]) -> str:
    """Words that ask whether a name that is not there was meant to be one that is; empty where none is like it.

    Example:
        >>> near("Prise", ["price", "town"])
        "; did you mean 'price'?"
    """
    lower = {other.lower(): other for other in names}
    found = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""


def numbers(values: Sequence[str | None]) -> tuple[NDArray[np.float64], int]:
    """Values as numbers, NaN where there is none, and how many of these are text that is no number.

    Example:
        >>> numbers(["1", "2.5e3", None, "many"])
        (array([1.0e+00, 2.5e+03,     nan,     nan]), 1)
    """
    found = np.array([float(v) if v is not None and _NUMBER.fullmatch(v) else np.nan for v in values])
    found[np.isinf(found)] = np.nan  # 1e999: written as a number, but none
    return found, sum(v is not None for v in values) - int(np.isfinite(found).sum())


def days(values: Sequence[str | None]) -> tuple[NDArray[np.float64], int]:
    """ISO dates, with or without a time, as days since the start of 1970; and how many are none.

    A time with an offset is brought to UTC; one without is taken as it stands.

    Example:
        >>> days(["1970-01-02", "1970-01-01 12:00", "1970-01-01T12:00+06:00", None, "soon"])
        (array([1.  , 0.5 , 0.25,  nan,  nan]), 1)
    """
    found = np.array([_days(v) for v in values])
    return found, sum(v is not None for v in values) - int(np.isfinite(found).sum())


def _days(text: str | None) -> float:
    if text is None or not _DATE.fullmatch(text):
        return np.nan
    try:
        when = datetime.fromisoformat(text)
    except ValueError:  # 2024-02-31
        return np.nan
    offset = when.utcoffset() or timedelta()
    return (when.replace(tzinfo=None) - datetime(1970, 1, 1) - offset).total_seconds() / _DAY
