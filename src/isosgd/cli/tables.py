"""Commands for tables: fit `isosgd.sklearn`'s estimators to a CSV or Parquet file, and predict new rows."""

from __future__ import annotations

import argparse
import csv
import json
import math
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from isosgd.cli.common import (
    add_damaged,
    add_json,
    add_machine,
    check_file,
    check_folder,
    check_seed,
    echo,
    max_seconds,
    print_json,
    use_machine,
)
from isosgd.cli.folders import MODEL, TABLE, Run, open_run, refuse_begun
from isosgd.cli.reading import as_they_stand, look_separated, numbers_rows, read_table, why_useless
from isosgd.cli.runs import draw_and_judge
from isosgd.errors import nearest

LEAST_ROWS, FEW, MOST_CLASSES = 20, 10, 100  # least rows; up to so many different integers are classes; most classes
USUAL: dict[str, Any] = {
    "task": None, "likelihood": None, "use": [], "holdout": 0.1, "chains": 8, "hidden": "auto", "minutes": None,
    "seed": 0, "holdout_seed": 0,
}  # fmt: skip
BATCH = 10_000  # rows per batch
ROW, FLAGS = "row", ("unlike", "why")  # columns besides the predictions


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("table", metavar="TABLE", type=Path, help="CSV or Parquet file")
    parser.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    parser.add_argument("--out", metavar="RUN", type=Path, help="folder of the run (default: runs/TABLE-COLUMN)")
    parser.add_argument(
        "--task", choices=("regression", "classification"),
        help="what COLUMN is (default: numbers are regressed on; text, and at most 10 whole numbers, are classes)",
    )  # fmt: skip
    parser.add_argument(
        "--likelihood",
        choices=("auto", "student_t", "gaussian", "loglinear_t", "loglinear", "heteroscedastic_t", "heteroscedastic"),
        help="noise of a regression (default: auto, by residuals of held-out rows)",
    )  # fmt: skip
    parser.add_argument(
        "--use", nargs="+", default=USUAL["use"], metavar="COLUMN",
        help="columns to predict from that would be dropped, such as one that looks like row numbers",
    )  # fmt: skip
    parser.add_argument(
        "--holdout", type=float, default=USUAL["holdout"], metavar="SHARE",
        help="share of the rows that is held out for the report; 0 for none (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--holdout-seed", type=int, default=USUAL["holdout_seed"],
        help="of which rows are held out; runs with one of these and another --seed can be merged (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--effort", type=float, default=1.0, help="times the usual number of steps (%(default)g)")
    parser.add_argument("--minutes", type=float, help="end in about so many, with fewer steps (default: no limit)")
    parser.add_argument("--chains", type=int, default=USUAL["chains"], help="(%(default)s)")
    parser.add_argument(
        "--hidden", default=USUAL["hidden"], metavar="UNITS",
        help="units of the hidden layers, such as 64,64,64; 0 for a linear model (default: by the number of rows)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=USUAL["seed"], help="of the chains (%(default)s)")
    parser.add_argument("--no-report", dest="report", action="store_false", help="do not write report.html")
    add_machine(parser, threads=1)  # more threads do not help so small a network
    add_json(parser, "scores and verdict")


def run_fit(args: argparse.Namespace) -> int:
    """Fit a Bayesian network to a table: isosgd.sklearn.BayesianMLPRegressor or BayesianMLPClassifier. Numbers
    are standardised, categories become indicators, missing values are filled and marked, dates become days;
    nothing needs to be tuned. A tenth of the rows is held out to score predictions in the report. RUN then holds
    the draws, the estimator (isosgd.sklearn.load reads it), the rows in standard units, and report.html. Needs
    pip install "isosgd[tables]".

    example: isosgd fit houses.csv --target price --out runs/houses
    """
    hidden = _check(args)
    use_machine(args.threads, args.device)
    folder = args.out or Path("runs") / f"{args.table.stem}-{args.target}".replace("/", "-").replace(" ", "-")
    check_folder(folder)
    frame, remarks = read_table(args.table, target=args.target)  # first, since it names missing packages
    from isosgd import sklearn
    from isosgd.tables.columns import Columns
    from isosgd.tables.network import Network

    refuse_begun(folder)
    y, classes, told = _target(frame, args)
    X, y, dropped, out = _rows(frame, y, classes, args)
    columns, x = Columns.learn(X[~out])
    if hidden != "auto":
        Network(x.shape[1], len(classes) or 1, hidden=hidden)  # raises an error if it is too large
    settings: dict[str, Any] = {
        "hidden_layers": hidden, "chains": args.chains, "effort": args.effort, "max_seconds": max_seconds(args),
        "random_state": args.seed, "device": args.device, "verbose": True,
    }  # fmt: skip
    if classes:
        model = sklearn.BayesianMLPClassifier(**settings)
    else:
        model = sklearn.BayesianMLPRegressor(likelihood=args.likelihood or "auto", **settings)
    what = f"{len(classes)} classes of" if classes else "the number"
    notes = [f"{'classification' if classes else 'regression'} of {what} {args.target!r}", *told]
    notes += [f"dropped {name!r}: {why}" for name, why in dropped.items()]
    notes += [remark for remark in remarks if not any(repr(name) in remark for name in dropped)]
    counts = {"rows": len(frame), "train": int((~out).sum()), "heldout": int(out.sum()), "dropped": len(frame) - len(y)}
    echo(args, f"{counts['rows']:,} rows: {counts['train']:,} to train on, {counts['heldout']:,} held out" + (
        f", {counts['dropped']:,} without a target left aside" if counts["dropped"] else ""
    ))  # fmt: skip
    echo(args, *(f"  {line}" for line in (*notes, *columns.describe())))
    folder.mkdir(parents=True, exist_ok=True)
    note = {
        "target": args.target, "source": args.table.name, "notes": notes, "command": args.line,
        "longer": _longer(args, folder),
    }  # fmt: skip
    (folder / TABLE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    echo(args, f"sampling {args.chains} chains into {folder} (Ctrl-C keeps what has been drawn)")

    def draw() -> Run:
        held_out = (X[out], y[out]) if out.any() else None
        model.fit(X[~out], y[~out], store=folder, held_out=held_out)
        return open_run(folder)

    return draw_and_judge(args, folder, draw, counts)


def _longer(args: argparse.Namespace, folder: Path) -> str:
    """The same command with four times the effort, into another folder."""
    words = ["isosgd", "fit", str(args.table), "--target", args.target]
    for name, usual in USUAL.items():
        if (value := getattr(args, name)) != usual:
            values = value if isinstance(value, list) else [4 * value if name == "minutes" else value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join([*words, "--effort", f"{4 * args.effort:g}", "--out", f"{folder}-longer"])


def _check(args: argparse.Namespace) -> Any:
    """Check the arguments; returns the hidden layers."""
    if not 0 <= args.holdout < 1:
        raise ValueError(f"--holdout {args.holdout:g} must be at least 0 and below 1")
    if not (math.isfinite(args.effort) and args.effort > 0):
        raise ValueError(f"--effort {args.effort:g} must be positive")
    if args.chains < 1:
        raise ValueError(f"--chains {args.chains} must be at least 1")
    check_seed(args.seed)
    check_seed(args.holdout_seed, "--holdout-seed")
    if args.hidden == "auto":
        return "auto"
    try:
        units = [int(part) for part in str(args.hidden).split(",")]
        if units != [0] and min(units) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"--hidden {args.hidden}: give the units of each layer, such as 64,64,64") from None
    return () if units == [0] else tuple(units)


def _target(frame: Any, args: argparse.Namespace) -> tuple[Any, list[Any], list[str]]:
    """The target column, its classes (none for a regression), and remarks."""
    from pandas.api import types

    name, task = args.target, args.task
    if name not in frame.columns:
        hint = nearest(name, frame.columns) or f"; the table has {', '.join(map(repr, list(frame.columns)[:6]))}"
        raise ValueError(f"there is no column {name!r} to predict{hint}")
    y = frame[name]
    there = y.dropna()
    if len(frame) < LEAST_ROWS:
        raise ValueError(f"{args.table} has too few rows, {len(frame)}: {LEAST_ROWS} at least are needed")
    if not len(there):
        raise ValueError(f"the target {name!r} has no value in any row; choose another column to predict")
    if there.nunique() == 1:
        value = there.iloc[0]
        shown = f"{value:g}" if types.is_numeric_dtype(y) else repr(value)
        raise ValueError(f"the target {name!r} is always {shown}; choose another column to predict")
    if len(there) < LEAST_ROWS:
        raise ValueError(f"{len(there)} rows of {args.table} have a target; {LEAST_ROWS} at least are needed")
    if types.is_datetime64_any_dtype(y):
        raise ValueError(f"the target {name!r} is a date; make a number of it, such as days from a fixed one")
    numeric = types.is_numeric_dtype(y) and not types.is_bool_dtype(y)
    if numeric and np.isinf(there.to_numpy(dtype=np.float64)).any():
        raise ValueError(f"the target {name!r} has infinite values; make them missing, or drop these rows")
    text, different = not types.is_numeric_dtype(y), there.nunique()
    if text and (task == "regression" or (task is None and different > FEW)) and look_separated(there):
        raise ValueError(
            f"the target {name!r} has {different} different values that look like numbers with separators "
            f"({there.iloc[0]!r}): leave out separators of thousands, currencies and % (or --task classification)"
        )
    if task == "regression" and not numeric:
        raise ValueError(f"values of the target {name!r} are no numbers ({there.iloc[0]!r}); classify instead")
    whole = numeric and bool((there == there.round()).all())
    remarks = []
    if task is None:
        few = whole and different <= FEW
        task = "regression" if numeric and not few else "classification"
        if few:
            remarks.append(
                f"{name!r} has {different} different whole numbers, taken as classes; --task regression takes it "
                "as a number"
            )
    if task == "regression":
        return y, [], remarks
    if args.likelihood is not None:
        raise ValueError(f"--likelihood {args.likelihood} is for regressions, and {name!r} is classified; leave it out")
    y = y.map(lambda value: int(value) if whole else str(value), na_action="ignore").astype(object)
    counts = y.value_counts()
    if len(counts) > MOST_CLASSES:
        raise ValueError(
            f"the target {name!r} has {len(counts)} different values, too many for classes ({MOST_CLASSES} at most)"
            "; take rare ones together, or choose another column"
        )
    if len(counts) > FEW and (counts == 1).sum() > len(counts) / 2:
        raise ValueError(
            f"the target {name!r} has {len(counts)} classes, most with one row; take rare ones together, or choose "
            "another column"
        )
    remarks += [f"the class {value!r} of {name!r} has one row" for value, rows in counts.items() if rows == 1]
    return y, sorted(counts.index), remarks


def _rows(frame: Any, y: Any, classes: list[Any], args: argparse.Namespace) -> Any:
    """Inputs and targets of labelled rows, dropped columns with reasons, and which rows are held out."""
    X, there = frame.drop(columns=args.target), y.notna()
    for name in args.use:
        if name not in X.columns:
            why = "it is the target" if name == args.target else f"there is no such column{nearest(name, X.columns)}"
            raise ValueError(f"--use {name}: {why}")
    # Row numbers are found from all rows of the file, everything else from training rows.
    dropped = {
        name: f"it numbers the rows (--use {shlex.quote(name)} keeps it)"
        for name in X.columns
        if name not in args.use and numbers_rows(name, X[name])
    }
    X, y = X[there].reset_index(drop=True), y[there].reset_index(drop=True)
    y = np.array(y, dtype=(np.int64 if isinstance(classes[0], int) else object) if classes else np.float64)
    out = _heldout(y, args.holdout, bool(classes), np.random.default_rng(args.holdout_seed))
    for name in X.columns:
        if name not in dropped and (why := why_useless(X[name][~out])):
            if name not in args.use:
                dropped[name] = why
            elif X[name][~out].nunique() < 2:
                raise ValueError(f"--use {name}: {why} in the training rows; leave it out")
    if len(dropped) == X.shape[1]:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in dropped.items())
        raise ValueError(f"no column is left to predict {args.target!r} from ({why}); add others")
    return X.drop(columns=list(dropped)), y, dropped, out


def _heldout(y: Any, share: float, classes: bool, rng: Any) -> Any:
    """Which rows to hold out: a share of each class, but never all of its rows."""
    out = np.zeros(len(y), bool)
    groups = [np.flatnonzero(y == k) for k in np.unique(y)] if classes else [np.arange(len(y))]
    for group in groups:
        count = min(round(share * len(group)), len(group) - 1)
        out[rng.permutation(group)[:count]] = True
    return out


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run that `isosgd fit` made")
    parser.add_argument(
        "table", metavar="NEW", type=Path, help="CSV or Parquet file with the columns of the fitted one"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write (default: standard output)")
    parser.add_argument("--level", type=float, default=0.95, help="probability of the intervals (%(default)s)")
    parser.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help="columns of NEW to copy as they are")
    add_damaged(parser)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON, not CSV")


def run_predict(args: argparse.Namespace) -> int:
    """Predict the rows of a table with the draws of a run of `isosgd fit`. A regression gives mean, standard
    deviation and the ends of an interval; a classification gives the most probable class, the probability of
    each, and the entropy. Rows unlike the training data are flagged, with the reason.

    example: isosgd predict runs/houses new.csv --out predictions.csv
    """
    args.to_stdout = args.out is None
    check_file(args.out)
    if not 0 < args.level < 1:
        raise ValueError(f"--level {args.level:g} must be between 0 and 1")
    if args.run.is_dir() and not (args.run / MODEL).exists():
        raise ValueError(
            f"{args.run} was not made by `isosgd fit`; predict from Python, isosgd.load({str(args.run)!r}, target)"
        )
    found = open_run(args.run, drop_damaged=args.drop_damaged)
    model, posterior = found.model, found.posterior()
    frame, remarks = read_table(args.table, model.columns_)
    if absent := [name for name in args.keep if name not in frame.columns]:
        raise ValueError(f"--keep {absent[0]}: {args.table} has no such column")
    names = _names(found)
    if taken := [name for name in args.keep if name in (ROW, *names, *FLAGS)]:
        raise ValueError(f"--keep {taken[0]}: a column of the predictions has that name; rename it in {args.table}")
    used = model.columns_.names
    if used is None:
        raise ValueError(f"{args.run} was fitted to an array without names of columns; predict from Python")
    if absent := [name for name in used if name not in frame.columns]:
        which = f"columns {', '.join(map(repr, absent))}" if len(absent) > 1 else f"column {absent[0]!r}"
        hint = nearest(absent[0], set(frame.columns) - set(used))
        raise ValueError(f"{args.table} lacks the {which}, with which the model was fitted{hint}")
    echo(args, *(f"note: {remark}" for remark in remarks if any(repr(name) in remark for name in used)))
    if not posterior.info.get("complete", True):
        echo(args, f"note: the run is not complete; {len(posterior):,} draws are used")
    table: list[dict[str, Any]] = []
    copies = as_they_stand(args.table, args.keep) if args.keep else frame[[]]
    copies = copies.astype(object).where(copies.notna(), None)
    for at in range(0, len(frame), BATCH):
        part = frame.iloc[at : at + BATCH]
        rows = zip(_predicted(model, part[used], args.level), model.unlike(part[used]), strict=True)
        for copied, (values, why) in zip(copies.iloc[at : at + BATCH].to_dict("records"), rows, strict=True):
            flags = zip(FLAGS, (bool(why), "; ".join(why)), strict=True)
            table.append({ROW: len(table) + 1, **copied, **dict(zip(names, values, strict=True)), **dict(flags)})
    flagged = sum(row[FLAGS[0]] for row in table)
    if args.json:
        print_json(table)
    if args.out is not None:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            _write(file, table)
        echo(args, f"{len(table):,} predictions in {args.out}")
    elif not args.json:
        _write(sys.stdout, table)
    echo(args, f"{flagged:,} of {len(table):,} rows are unlike the training data")
    return 0


def _names(found: Run) -> list[str]:
    """Names of the predicted columns."""
    if not found.subject.classes:
        if found.model.network_.outputs > 1:
            raise ValueError(f"{found.folder} predicts several numbers; predict from Python, isosgd.sklearn.load")
        return ["mean", "sd", "model_sd", "low", "high"]
    return ["predicted", *(f"p({name})" for name in found.subject.classes), "entropy"]


def _predicted(model: Any, X: Any, level: float) -> Iterable[list[Any]]:
    """The values of these columns for each row."""
    if hasattr(model, "classes_"):
        for found in model.predict_proba(X):
            entropy = -float(np.sum(found * np.log(np.maximum(found, np.finfo(float).tiny))))
            yield [str(model.classes_[found.argmax()]), *map(_short, found), _short(entropy)]
        return
    mean, sd = model.predict(X, return_std=True)
    ends = model.predict(X, quantiles=(0.5 - level / 2, 0.5 + level / 2))
    for values in zip(mean, sd, model.predict(X, return_draws=True).std(0), *ends, strict=True):
        yield [*map(_short, values)]


def _short(value: float) -> float:
    """Rounded to six digits."""
    return float(f"{value:.6g}")


def _write(file: Any, table: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, FLAGS[0]: "yes" if row[FLAGS[0]] else "no"} for row in table)
