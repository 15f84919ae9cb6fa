"""Results as JSON, and pages of the documentation whose tables are made from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.command import plain

BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->"
NONE = "–"


def put(text: str, name: str, new: str) -> str:
    """Replace what stands between the marks of this name."""
    begin, end = BEGIN.format(name), END.format(name)
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no marks {begin.strip()!r} and {end!r}: put them where the tables belong")
    return head + begin + new.rstrip() + "\n" + end + rest.partition(end)[2]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(table(["method", "W2"], [["I-SGD", "0.01"]]))
        | method | W2 |
        | --- | --- |
        | I-SGD | 0.01 |
    """
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def plus_minus(mean: float, error: float, digits: int = 3) -> str:
    """A figure with its spread where there is one, and a dash where there is no figure.

    Example:
        >>> plus_minus(0.5, 0.01), plus_minus(0.5, math.nan), plus_minus(math.nan, math.nan)
        ('0.500 ± 0.010', '0.500', '–')
    """
    if math.isnan(mean):
        return NONE
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if math.isfinite(error) else "")


def write_json(content: dict[str, Any], path: str | os.PathLike[str], layout: int = 1) -> None:
    """Strict JSON of this version of a layout; what is not finite is null, and a reader never sees half a file."""
    text = json.dumps(plain({"format": layout, **content}), indent=1, allow_nan=False)
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_name(place.name + ".part")
    half.write_text(text + "\n", encoding="utf-8")
    half.replace(place)


def read_json(path: str | os.PathLike[str], layout: int = 1) -> dict[str, Any]:
    """What `write_json` wrote, less the version of the layout."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}; move it away, or make it again") from error
    if not isinstance(content, dict) or content.pop("format", None) != layout:
        raise ValueError(f"{path} is not a result of format {layout}; make it again with this version")
    return content
