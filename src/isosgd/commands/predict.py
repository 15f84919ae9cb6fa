"""Predict new rows: means and intervals, or class probabilities."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isosgd.commands.common import check_file, print_json, say
from isosgd.commands.runs import add_damaged

BATCH = 2_000  # rows predicted at once
ROW, FLAGS = "row", ("unlike", "why")  # columns beside those of what is predicted


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Predict the rows of a table with the draws of a run that `isosgd fit` made. A regression gives mean, standard "
        "deviation and the ends of an interval; a classification gives the likeliest class, the probability of each, "
        "and the entropy. Rows unlike the training data are flagged, and why."
    )
    parser.epilog = "example: isosgd predict runs/houses new.csv --out predictions.csv"
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run that `isosgd fit` made")
    parser.add_argument(
        "table", metavar="NEW", type=Path, help="CSV or Parquet file with the columns of the fitted one"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write (default: standard output)")
    parser.add_argument("--level", type=float, default=0.95, help="probability of the intervals (%(default)s)")
    parser.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help="columns of NEW to copy along")
    add_damaged(parser)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON, not CSV")


def run(args: argparse.Namespace) -> int:
    """Predict."""
    from isosgd.commands.runs import TABLE, open_run
    from isosgd.data.columns import read_columns

    args.to_stdout = args.out is None
    check_file(args.out)
    if not 0 < args.level < 1:
        raise ValueError(f"--level {args.level:g} must be between 0 and 1")
    if args.run.is_dir() and not (args.run / TABLE).exists():
        raise ValueError(
            f"{args.run} was not made by `isosgd fit`; predict from Python, isosgd.load({str(args.run)!r}, target)"
        )
    found = open_run(args.run, drop_damaged=args.drop_damaged)
    assert found.table is not None and found.familiar is not None
    columns = read_columns(args.table)
    if absent := [name for name in args.keep if name not in columns]:
        raise ValueError(f"--keep {absent[0]}: {args.table} has no such column")
    names = _names(found.table)
    taken = [name for name in args.keep if name in (ROW, *names, *FLAGS)]
    if taken:
        raise ValueError(f"--keep {taken[0]}: a column of the predictions has that name; rename it in {args.table}")
    x, unusual = found.table.encode(columns)
    posterior = found.posterior()
    if not posterior.info.get("complete", True):
        say(args, f"note: the run is not complete; {len(posterior):,} draws are used")
    predicted = (
        _classes(posterior, x, found.table) if found.table.classes else _numbers(posterior, x, found.table, args.level)
    )
    far = (found.familiar.distance(x) > found.familiar.limit).tolist()
    table = []
    for k, values in enumerate(predicted):
        why = [*unusual[k], *(["far from all training rows"] if far[k] else [])]
        kept = {name: columns[name][k] for name in args.keep}
        flags = zip(FLAGS, (bool(why), "; ".join(why)), strict=True)
        table.append({ROW: k + 1, **kept, **dict(zip(names, values, strict=True)), **dict(flags)})
    flagged = sum(row[FLAGS[0]] for row in table)
    if args.json:
        print_json(table)
    if args.out is not None:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            _write(file, table)
        say(args, f"{len(table):,} predictions in {args.out}")
    elif not args.json:
        _write(sys.stdout, table)
    say(args, f"{flagged:,} of {len(table):,} rows are unlike the training data")
    return 0


def _names(table: Any) -> list[str]:
    """Columns of what is predicted."""
    if not table.classes:
        return ["mean", "sd", "model_sd", "low", "high"]
    return ["predicted", *(f"p({name})" for name in table.classes), "entropy"]


def _numbers(posterior: Any, x: Any, table: Any, level: float) -> Iterable[list[Any]]:
    from isosgd.predictive import central

    found = posterior.predict(x, levels=central(level), batch_size=BATCH)
    assert found.quantiles is not None
    middle, low, high = (v.double().flatten() * table.y_scale + table.y_mean for v in (found.mean, *found.quantiles))
    spread, model = (v.double().flatten() * table.y_scale for v in (found.std, found.model_variance.sqrt()))
    for values in zip(*(v.tolist() for v in (middle, spread, model, low, high)), strict=True):
        yield [*map(_short, values)]


def _classes(posterior: Any, x: Any, table: Any) -> Iterable[list[Any]]:
    found = posterior.predict(x, batch_size=BATCH)
    for probabilities, entropy in zip(found.mean.double().tolist(), found.entropy.double().tolist(), strict=True):
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        yield [table.classes[best], *map(_short, probabilities), _short(entropy)]


def _short(value: float) -> float:
    """Six digits: a prediction has no more."""
    return float(f"{value:.6g}")


def _write(file: Any, table: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, FLAGS[0]: "yes" if row[FLAGS[0]] else "no"} for row in table)
