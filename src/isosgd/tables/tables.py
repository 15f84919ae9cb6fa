"""From the columns of a table to the inputs and the target of a network, by rules that are learnt once and kept.

- A **number** is standardised. Where it is missing it takes the median, and an input of its own says that it was.
- A **category** becomes one input for each level; levels that are rare (below 1% of the rows, or 5 rows) share one. A
  missing value is a level of its own. A level never seen in training has none of these inputs on.
- A **date** (ISO 8601) becomes its day, and sine and cosine of its place in the year.
- **Dropped**: columns that never change, that are empty, that number the rows, and text that hardly repeats (names,
  identifiers). Each is named, with the reason, in `Table.dropped`.
- A column is one of numbers (or dates) when at least 95% of its values are; the others then count as missing.

Everything is learnt from training rows alone and saved as strict JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isosgd.tables.columns import Columns, days, near, numbers
from isosgd.tables.encoding import MOSTLY, Column, Kind, Values, learn_column
from isosgd.tables.scaling import standardise

Task = Literal["regression", "classification"]
VERSION = 1
FEW = 10  # different whole numbers that are read as classes
MOST_CLASSES = 100
LARGEST_FILE = 64 << 20  # bytes of a table.json that are read


@dataclass(frozen=True)
class Table:
    """How rows of a table become inputs and targets of a network; made by `learn_table`.

    Attributes:
        columns: that are used, in order.
        dropped: columns that are not, with the reason.
        target: name of the column to predict.
        task: ``regression`` or ``classification``.
        classes: names of the classes, in the order of their numbers; empty for a regression.
        x_mean: of each input.
        x_scale: of each input.
        y_mean: of the target; 0 for a classification.
        y_scale: of the target; 1 for a classification.
        remarks: what was noticed that a user should know.
    """

    columns: tuple[Column, ...]
    dropped: dict[str, str]
    target: str
    task: Task
    classes: tuple[str, ...] = ()
    x_mean: tuple[float, ...] = ()
    x_scale: tuple[float, ...] = ()
    y_mean: float = 0.0
    y_scale: float = 1.0
    remarks: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[str]:
        """Names of the network's inputs."""
        return [name for column in self.columns for name in column.inputs]

    def encode(self, columns: Columns) -> tuple[Tensor, list[list[str]]]:
        """Inputs in standard units ``[n, inputs]``, and for each row what is unusual about its values.

        Columns that are not used may be absent; one that is used may not.
        """
        if absent := [c.name for c in self.columns if c.name not in columns]:
            which = f"the columns {_listed(absent)}" if len(absent) > 1 else f"the column {absent[0]!r}"
            hint = near(absent[0], set(columns) - {c.name for c in self.columns})
            raise ValueError(f"the table lacks {which}, with which the model was fitted{hint}")
        found, words = zip(*(c.encode(columns[c.name]) for c in self.columns), strict=True)
        x = (np.concatenate(found, 1) - np.array(self.x_mean)) / np.array(self.x_scale)
        return torch.as_tensor(x, dtype=torch.float32), [[w for w in row if w] for row in zip(*words, strict=True)]

    def encode_target(self, columns: Columns) -> tuple[Tensor, NDArray[np.bool_]]:
        """Targets of the rows that have a usable one, and which rows these are.

        A regression's are standardised, of shape ``[n, 1]``; classes are numbered from 0.
        """
        if self.target not in columns:
            raise ValueError(f"the table lacks the target {self.target!r}")
        values = columns[self.target]
        if self.task == "classification":
            place = {name: k for k, name in enumerate(self.classes)}
            labels = np.array([-1 if v is None else place.get(_label(v), -1) for v in values])
            return torch.as_tensor(labels[labels >= 0]), labels >= 0
        number, _ = numbers(values)
        there = np.isfinite(number)
        y = (number[there] - self.y_mean) / self.y_scale
        return torch.as_tensor(y, dtype=torch.float32).unsqueeze(-1), there

    def describe(self) -> list[str]:
        """What was done, in a few lines."""
        kinds = Counter(c.kind for c in self.columns)
        many = {"number": "numbers", "date": "dates", "category": "categories"}
        used = ", ".join(f"{kinds[k]} {many[k] if kinds[k] > 1 else k}" for k in get_args(Kind) if kinds[k])
        what = f"{len(self.classes)} classes of" if self.classes else "the number"
        lines = [f"{self.task} of {what} {self.target!r} on {used}, which become {len(self.inputs)} inputs"]
        if lacking := [c.name for c in self.columns if c.missing]:
            lines.append(f"missing values in {_listed(lacking)}: an input says so, and a number takes its median")
        if lumped := [c.name for c in self.columns if c.rare]:
            lines.append(f"rare levels of {_listed(lumped)} are taken as one")
        lines += [f"dropped {name!r}: {why}" for name, why in self.dropped.items()]
        return lines + list(self.remarks)

    def save(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Write strict JSON; ``more`` is kept beside the table, under its own names."""
        text = json.dumps({"version": VERSION, "table": asdict(self), **more}, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def load_table(path: str | os.PathLike[str]) -> tuple[Table, dict[str, Any]]:
    """Read what `Table.save` wrote: the table, and what was kept beside it. Anything else is refused."""
    path = Path(path)
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a table takes at most {LARGEST_FILE:,}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        table = _from_dict(found["table"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = f"{error or type(error).__name__}; fit the table again"
        raise ValueError(f"{path} is not a table that isosgd wrote: {why}") from error
    return table, {k: v for k, v in found.items() if k not in ("version", "table")}


def learn_table(columns: Columns, target: str, task: Task | None = None) -> Table:
    """Learn from training rows how a table becomes inputs and targets.

    Args:
        columns: training rows, as `isosgd.tables.columns.read_columns` gives them.
        target: the column to predict. Rows that lack it are left aside.
        task: ``regression`` or ``classification``; by default text is classified, and so are at most 10 different
            whole numbers; other numbers are regressed on.

    Example:
        >>> rows = {"age": ["31", None, "52", "40"] * 5, "town": ["Rome", "Oslo"] * 10, "pay": [*map(str, range(20))]}
        >>> table = learn_table(rows, "pay")
        >>> table.task, table.inputs
        ('regression', ['age', 'age is missing', 'town = Oslo', 'town = Rome'])
        >>> x, unusual = table.encode({"age": ["45", "99"], "town": ["Rome", "Paris"]})
        >>> unusual
        [[], ['age 99 is outside 31 to 52', "town 'Paris' is new"]]
    """
    if target not in columns:
        hint = near(target, columns) or f"; the table has {_listed(columns)}"
        raise ValueError(f"there is no column {target!r} to predict{hint}")
    if task is not None and task not in get_args(Task):
        raise ValueError(f"task = {task!r} is not known; choose one of {', '.join(get_args(Task))}")
    chosen, classes, remarks = _learn_target(columns[target], target, task)
    plain = Table((), {}, target, chosen, classes)
    rows = np.flatnonzero(plain.encode_target(columns)[1])
    used, dropped = [], {}
    for name, values in columns.items():
        if name != target:
            column, remark = learn_column(name, [values[k] for k in rows])
            if column is None:
                dropped[name] = remark
            else:
                used.append(column)
                remarks += [remark] * bool(remark)
    if not used:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in dropped.items())
        raise ValueError(f"no column is left to predict {target!r} from ({why}); add others")
    x = np.concatenate([c.encode([columns[c.name][k] for k in rows])[0] for c in used], 1)
    number, _ = numbers([columns[target][k] for k in rows]) if chosen == "regression" else (np.zeros(len(rows)), 0)
    if chosen == "regression" and number.min() == number.max():
        raise ValueError(f"the target {target!r} is always {number[0]:g}; choose another column to predict")
    scaler = standardise(torch.as_tensor(x), torch.as_tensor(number))
    # A 0-1 input gets the scale of a balanced one, whatever its share: else a rare level would lie far from all others.
    indicator = torch.tensor([flag for c in used for flag in c.indicators])
    scale = torch.where(indicator, 0.5, scaler.x_scale)
    return replace(
        plain,
        columns=tuple(used),
        dropped=dropped,
        x_mean=tuple(scaler.x_mean.tolist()),
        x_scale=tuple(scale.tolist()),
        y_mean=float(scaler.y_mean),
        y_scale=float(scaler.y_scale),
        remarks=tuple(remarks),
    )


def _learn_target(values: Values, name: str, task: Task | None) -> tuple[Task, tuple[str, ...], list[str]]:
    there = [v for v in values if v is not None]
    if not there:
        raise ValueError(f"the target {name!r} has no value in any row; choose another column to predict")
    number, bad = numbers(there)
    numeric = bad <= (1 - MOSTLY) * len(there)
    remarks = [f"{bad} values of {name!r} are no numbers; these rows are left aside"] if numeric and bad else []
    if not numeric and days(there)[1] <= (1 - MOSTLY) * len(there):
        raise ValueError(f"the target {name!r} is a date; make a number of it, such as days from a fixed one")
    if task == "regression" and not numeric:
        first = next(v for v, x in zip(there, number, strict=True) if np.isnan(x))
        raise ValueError(f"{bad} of {len(there)} values of {name!r} are no numbers ({first!r}); classify instead")
    different = {_label(v) for v in there}
    if task is None:
        few = len(different) <= FEW and bool((number == np.round(number)).all())
        task = "regression" if numeric and not few else "classification"
        if numeric and few:
            words = f"{name!r} has {len(different)} different whole numbers, taken as classes"
            remarks.append(f"{words}; --task regression takes it as a number")
    if task == "regression":
        return task, (), remarks
    if len(different) < 2:
        raise ValueError(f"the target {name!r} is always {there[0]!r}; choose another column to predict")
    if len(different) > MOST_CLASSES:
        raise ValueError(
            f"the target {name!r} has {len(different)} different values, too many for classes ({MOST_CLASSES} at most)"
            "; take rare ones together, or choose another column"
        )
    by_number = not numbers(list(different))[1]
    return task, tuple(sorted(different, key=(lambda v: (float(v), v)) if by_number else None)), remarks


def _label(value: str) -> str:
    """The name of a class; 1, 1.0 and 01 are the same."""
    found, bad = numbers([value])
    if bad or not np.isfinite(found[0]):
        return value
    number = float(found[0])
    return str(int(number)) if number.is_integer() else repr(number)


def _from_dict(given: Mapping[str, Any]) -> Table:
    columns = tuple(_made(Column, one) for one in given["columns"])
    made: Table = _made(Table, {**given, "columns": columns})
    sizes = {len(made.x_mean), len(made.x_scale), len(made.inputs)}
    if not columns or len(sizes) > 1 or (made.task == "classification") != (len(made.classes) > 1):
        raise ValueError("inputs, means, scales or classes are lacking")
    if not all(scale > 0 for scale in (*made.x_scale, made.y_scale)):
        raise ValueError("a scale is not positive")
    return made


_TEXTS, _NUMBERS = (tuple, str), (tuple, float)
_SHAPES: dict[str, tuple[type, type | None]] = {
    "columns": (tuple, Column), "dropped": (dict, str), "target": (str, None), "task": (str, None),
    "classes": _TEXTS, "x_mean": _NUMBERS, "x_scale": _NUMBERS, "y_mean": (float, None), "y_scale": (float, None),
    "remarks": _TEXTS, "name": (str, None), "kind": (str, None), "missing": (bool, None), "middle": (float, None),
    "low": (float, None), "high": (float, None), "levels": _TEXTS, "rare": _TEXTS,
}  # fmt: skip
_CHOICES = {"task": get_args(Task), "kind": get_args(Kind)}


def _made(kind: Any, given: Any) -> Any:
    """A dataclass from JSON, every field checked."""
    if not isinstance(given, dict):
        raise TypeError(f"{given!r:.40} is no {kind.__name__.lower()}")
    fields = {}
    for name, value in given.items():
        outer, inner = _SHAPES[name]
        value = tuple(value) if outer is tuple and isinstance(value, list) else value
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        if not isinstance(value, outer) or not all(isinstance(part, inner or object) for part in parts):
            raise TypeError(f"{name} is {value!r:.40}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"{name} is {value!r:.40}")
        fields[name] = value
    return kind(**fields)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}, which is no JSON")


def _listed(names: Iterable[str], most: int = 6) -> str:
    found = [repr(name) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
