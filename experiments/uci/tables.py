"""The UCI tables: results on the published splits, ours beside published ones, and paired differences.

A result is one method on one set, kept as a JSON file:

- ``format``: 1, the version of this layout.
- ``set``: folder of the set, as `experiments.data.uci` names it.
- ``method``: name of the method, such as ``isgd``; ``label``: what tables call the row, such as ``I-SGD, ours``.
- ``settings``: whatever the method was given, by name.
- ``splits``: an object for each split: ``split`` (its number), ``rmse``, ``mnll``, ``coverage`` (share of targets in
  their 95% intervals), ``crps``, ``rhat`` (largest over held-out predictions), ``ess`` (least), ``gradients`` (of all
  chains, warm-up included), ``seconds`` (of splits that ran together, an equal share each), and ``dropped``, a list of
  sentences, one for each chain that was left out, with its number and the cause. Errors are in the units of the
  target. A number that does not exist, for instance the R-hat of a method without chains, is null.
- ``command`` that made it, ``versions`` of what it ran on by name, ``hardware`` in words.

`Result` is that file in Python, `read` and `write` convert, `markdown` makes tables. This puts them into the page:

    python -m experiments.uci.tables --data-root DIR [--results results/uci] [--docs docs/uci.md]
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.data import uci
from experiments.pages import NONE, plus_minus, put, read_json, table, write_json

FORMAT = 1
SETS = {
    "bostonHousing": "Boston",
    "concrete": "Concrete",
    "protein-tertiary-structure": "Protein",
    "wine-quality-red": "Wine",
    "yacht": "Yacht",
}
MEASURES = ("rmse", "mnll", "coverage", "crps", "rhat", "ess", "gradients", "seconds")

MC_DROPOUT = "MC-dropout, tuned (Gal)"

PAPER_SOURCE = (
    "Franzese, Candela, Milios, Filippone and Michiardi (2020), Isotropic SGD, first table; 10 splits of their own"
)
_PAPER_METHODS = ("I-SGD (paper)", "SGHMC (paper)", "MC-dropout (paper)")
_PAPER_ROWS = {  # for each method RMSE, its ±, MNLL, its ±
    "bostonHousing": [(3.26, 1.14, 3.46, 1.83), (3.41, 1.13, 3.56, 1.80), (3.32, 1.01, 5.26, 2.38)],
    "concrete": [(5.47, 0.38, 12.33, 4.38), (5.27, 0.46, 11.77, 2.81), (5.01, 0.43, 6.77, 1.80)],
    "protein-tertiary-structure": [(4.77, 0.05, 4.20, 0.05), (4.55, 0.04, 3.90, 0.02), (4.49, 0.02, 3.69, 0.01)],
    "wine-quality-red": [(0.63, 0.04, 1.03, 0.11), (0.64, 0.05, 0.98, 0.11), (0.64, 0.05, 1.04, 0.13)],
    "yacht": [(0.69, 0.33, 4.19, 7.24), (0.49, 0.17, 3.53, 8.22), (0.57, 0.16, 4.15, 4.98)],
}
PAPER = {label: {name: row[i] for name, row in _PAPER_ROWS.items()} for i, label in enumerate(_PAPER_METHODS)}
"""By method and set: RMSE, its ±, MNLL, its ±, as printed in `PAPER_SOURCE`, which does not say what its ± is."""


@dataclass(frozen=True)
class Split:
    """What a method reached on one split; see the module's page for the units."""

    split: int
    rmse: float | None = None
    mnll: float | None = None
    coverage: float | None = None
    crps: float | None = None
    rhat: float | None = None
    ess: float | None = None
    gradients: float | None = None
    seconds: float | None = None
    dropped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.split, bool) or not isinstance(self.split, int) or self.split < 0:
            raise ValueError(f"split = {self.split!r} must be its number, an integer from 0")
        for name in MEASURES:
            x = getattr(self, name)
            if x is not None and (isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x)):
                raise ValueError(
                    f"{name} = {x!r} of split {self.split} must be a finite number, or None if there is none"
                )


@dataclass(frozen=True)
class Result:
    """What a method reached on the splits of one set.

    Example:
        >>> ours = Result("yacht", "isgd", "I-SGD", [Split(k, rmse=0.5 + 0.01 * k) for k in range(3)])
        >>> [round(x, 3) for x in ours.mean_and_error("rmse")]
        [0.51, 0.006]
    """

    set: str
    method: str
    label: str
    splits: Sequence[Split]
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""

    def __post_init__(self) -> None:
        numbers = [split.split for split in self.splits]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"{self.label!r} on {self.set!r} has a split twice: {sorted(numbers)}")

    def values(self, measure: str) -> dict[int, float]:
        """A measure for each split that has it."""
        if measure not in MEASURES:
            raise ValueError(f"measure = {measure!r} is not known; choose one of {', '.join(MEASURES)}")
        found = {split.split: getattr(split, measure) for split in self.splits}
        return {k: float(value) for k, value in found.items() if value is not None}

    def mean_and_error(self, measure: str) -> tuple[float, float]:
        """Mean over splits and its standard error, as if splits were independent (their training rows overlap)."""
        return _mean_and_error(list(self.values(measure).values()))


def write(result: Result, path: str | os.PathLike[str]) -> None:
    """Write a result as JSON."""
    write_json(asdict(result), path, FORMAT)


def joined(parts: Sequence[Result]) -> Result:
    """One result from runs of one method on different splits of one set."""
    if len({(part.set, part.method) for part in parts}) != 1:
        raise ValueError(f"parts of {sorted({(p.set, p.method) for p in parts})}: give those of one set and one method")
    splits = sorted((split for part in parts for split in part.splits), key=lambda split: split.split)
    return replace(parts[0], splits=splits, command=" && ".join(dict.fromkeys(part.command for part in parts)))


def read(path: str | os.PathLike[str]) -> Result:
    """Read what `write` wrote."""
    content = read_json(path, FORMAT)
    try:
        rows = content.pop("splits")
        return Result(**content, splits=[Split(**row | {"dropped": tuple(row.get("dropped", ()))}) for row in rows])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        known = [entry.name for entry in fields(Result)], [entry.name for entry in fields(Split)]
        raise ValueError(f"{path}: {error}; a result has {known[0]}, and a split {known[1]}") from error


def mc_dropout(name: str, root: str | os.PathLike[str] | None = None) -> Result:
    """Tuned MC-dropout of one hidden layer on the same splits, as Gal and Ghahramani (2016) published it.

    Args:
        name: a set, as for `experiments.data.uci`.
        root: data root.
    """
    found = uci(name, root)
    if not {"MC_rmse", "ll"} <= found.gal.keys():
        raise ValueError(
            f"the set {found.name!r} has no gal_results with MC_rmse and ll; only the usual sets have them"
        )
    pairs = zip(found.gal["MC_rmse"].tolist(), found.gal["ll"].tolist(), strict=True)
    splits = [Split(k, rmse=rmse, mnll=-ll) for k, (rmse, ll) in enumerate(pairs)]
    return Result(found.name, "mc_dropout", MC_DROPOUT, splits, {"hidden_layers": 1, "epochs_multiplier": 100})


@dataclass(frozen=True)
class Paired:
    """Difference of two methods on the splits that both have: below zero, the first is better.

    Attributes:
        mean: of the differences.
        error: its standard error, as if splits were independent; not a number for a single split.
        differences: by split.
    """

    mean: float
    error: float
    differences: Mapping[int, float]


def paired(ours: Result, theirs: Result, measure: str = "mnll") -> Paired:
    """What we have less than they, split by split.

    Example:
        >>> ours = Result("yacht", "a", "A", [Split(0, mnll=1.0), Split(1, mnll=3.0)])
        >>> theirs = Result("yacht", "b", "B", [Split(0, mnll=1.5), Split(1, mnll=3.25), Split(2, mnll=9.0)])
        >>> paired(ours, theirs).mean, paired(ours, theirs).error
        (-0.375, 0.125)
    """
    if ours.set != theirs.set:
        raise ValueError(f"{ours.label!r} is on {ours.set!r} and {theirs.label!r} on {theirs.set!r}; pair one set")
    left, right = ours.values(measure), theirs.values(measure)
    differences = {k: left[k] - right[k] for k in sorted(left.keys() & right.keys())}
    if not differences:
        raise ValueError(f"{ours.label!r} and {theirs.label!r} have no split of {ours.set!r} with {measure} in common")
    return Paired(*_mean_and_error(list(differences.values())), differences)


# ---------------------------------------------------------------- tables

Cell = Callable[[Sequence[float]], str]

TABLES: dict[str, tuple[str, Cell]] = {
    "rmse": ("RMSE: mean over splits ± standard error", lambda x: plus_minus(*_mean_and_error(x))),
    "mnll": ("MNLL: mean over splits ± standard error", lambda x: plus_minus(*_mean_and_error(x))),
    "crps": ("CRPS: mean over splits ± standard error", lambda x: plus_minus(*_mean_and_error(x))),
    "coverage": ("Targets within their 95% interval, in %", lambda x: plus_minus(*_mean_and_error(x, 100), digits=1)),
    "rhat": (
        "R-hat of held-out predictions: the median over splits, the largest",
        lambda x: _median_and_worst(x, max, 3),
    ),
    "ess": ("Effective draws: the median over splits, the least", lambda x: _median_and_worst(x, min, 0)),
    "gradients": ("Gradients spent on a split", lambda x: f"{np.mean(x):,.0f}"),
    "seconds": ("Seconds for all splits", lambda x: f"{sum(x):,.0f}"),
}
"""Title of the table of each measure, and how the numbers of the splits become a cell."""


def markdown(results: Iterable[Result], paper: bool = True) -> str:
    """Tables of results for a page: a table for each measure, a row for each method, a column for each set.

    Args:
        results: ours and, with `mc_dropout`, the published ones that ours are paired with.
        paper: add the paper's own figures to the tables of RMSE and MNLL.
    """
    cells = by_label(results)
    sets = in_order({name for row in cells.values() for name in row})
    parts = []
    for measure, (title, show) in TABLES.items():
        rows = {label: {name: _cell(row[name], measure, show) for name in row} for label, row in cells.items()}
        if paper and measure in ("rmse", "mnll"):
            rows |= {label: {name: _paper_cell(x, measure) for name, x in PAPER[label].items()} for label in PAPER}
        parts.append(_table(title, sets, rows))
        if measure in ("rmse", "mnll") and MC_DROPOUT in cells:
            title = f"{measure.upper()} less that of {MC_DROPOUT}, on the same splits ± standard error"
            found = {label: pairs(cells, label, measure) for label in cells}
            parts.append(
                _table(title, sets, {row: {k: _difference(x) for k, x in found[row].items()} for row in found})
            )
    parts += [f"The paper's figures: {PAPER_SOURCE}."] if paper else []
    commands = dict.fromkeys(result.command for row in cells.values() for result in row.values() if result.command)
    parts += ["Made by:\n\n" + "\n".join(f"- `{command}`" for command in commands)] if commands else []
    return "\n\n".join(part for part in parts if part) + "\n"


def by_label(results: Iterable[Result]) -> dict[str, dict[str, Result]]:
    """Results by label and set; two of the same are refused."""
    cells: dict[str, dict[str, Result]] = {}
    for result in results:
        if result.set in cells.setdefault(result.label, {}):
            raise ValueError(f"there are two results of {result.label!r} on {result.set!r}; give them different labels")
        cells[result.label][result.set] = result
    if not cells:
        raise ValueError("there are no results to show; pass at least one")
    return cells


def in_order(sets: Iterable[str]) -> list[str]:
    """The usual sets as the paper has them, then others by name."""
    return sorted(sets, key=lambda name: (list(SETS).index(name) if name in SETS else len(SETS), name))


def pairs(cells: Mapping[str, Mapping[str, Result]], label: str, measure: str) -> dict[str, Paired]:
    """Differences of a method from tuned MC-dropout, for the sets on which both have a split."""
    theirs = cells.get(MC_DROPOUT, {})
    both = {name: ours for name, ours in cells[label].items() if name in theirs and label != MC_DROPOUT}
    return {
        name: paired(ours, theirs[name], measure)
        for name, ours in both.items()
        if ours.values(measure).keys() & theirs[name].values(measure).keys()
    }


def _difference(pair: Paired) -> str:
    return f"{pair.mean:+.3f}" + (f" ± {pair.error:.3f}" if math.isfinite(pair.error) else "")


def _cell(result: Result, measure: str, show: Cell) -> str:
    values = list(result.values(measure).values())
    missing = f" ({len(values)} of {len(result.splits)} splits)" if 0 < len(values) < len(result.splits) else ""
    return show(values) + missing if values else NONE


def _paper_cell(figures: tuple[float, float, float, float], measure: str) -> str:
    rmse, rmse_spread, mnll, mnll_spread = figures
    return plus_minus(*((rmse, rmse_spread) if measure == "rmse" else (mnll, mnll_spread)), digits=2)


def _table(title: str, sets: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> str:
    """A table without its empty rows; nothing when all are."""
    full = {label: row for label, row in rows.items() if any(row.get(name, NONE) != NONE for name in sets)}
    if not full:
        return ""
    lines = ([label, *(row.get(name, NONE) for name in sets)] for label, row in full.items())
    return f"**{title}**\n\n" + table(["", *(SETS.get(name, name) for name in sets)], lines)


def _mean_and_error(values: Sequence[float], scale: float = 1.0) -> tuple[float, float]:
    x: NDArray[np.float64] = scale * np.asarray(values, dtype=np.float64)
    error = float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.nan
    return (float(x.mean()) if len(x) else math.nan), error


def _median_and_worst(values: Sequence[float], worst: Callable[..., float], digits: int) -> str:
    return f"{np.median(values):,.{digits}f}, {worst(values):,.{digits}f}"


WHOLE = "I-SGD, ours, all data"
ORDER = (
    *(WHOLE, f"{WHOLE}, Gaussian noise", f"{WHOLE}, noise by input"),
    *("I-SGD, ours, minibatches", "I-SGD, the paper's setting"),
)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.uci.tables", description="Tables of docs/uci.md from the results."
    )
    parser.add_argument("--data-root", type=Path, help="folder with uci/, for the published results of MC-dropout")
    parser.add_argument("--results", type=Path, default=Path("results/uci"), help="(%(default)s)")
    parser.add_argument("--docs", type=Path, default=Path("docs/uci.md"), help="page to write (%(default)s)")
    args = parser.parse_args()
    ours = [read(path) for path in sorted(args.results.glob("*.json"))]
    if not ours:
        raise SystemExit(f"{args.results} holds no results: run `python -m experiments.uci` first")
    ours.sort(key=lambda result: ORDER.index(result.label) if result.label in ORDER else len(ORDER))
    published = [mc_dropout(name, args.data_root) for name in sorted({result.set for result in ours})]
    args.docs.write_text(put(args.docs.read_text(), "tables", markdown([*ours, *published])))


if __name__ == "__main__":
    main()
