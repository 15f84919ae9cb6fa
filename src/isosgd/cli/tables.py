"""Tables: fit a network on a CSV or Parquet file, and predict new rows."""

from __future__ import annotations

import argparse
import csv
import math
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import isosgd
from isosgd.cli.common import (
    add_damaged,
    add_json,
    add_machine,
    check_file,
    check_folder,
    check_method,
    echo,
    print_json,
    use_machine,
)
from isosgd.cli.folders import TABLE, open_run, save_tabular
from isosgd.cli.network import Network, steps_for
from isosgd.cli.runs import draw_and_judge
from isosgd.posterior import central
from isosgd.tables.columns import read_columns
from isosgd.tables.tables import learn_table

LEAST_ROWS = 20
USUAL = {"task": None, "holdout": 0.1, "chains": 4, "draws": 100, "hidden": 50, "method": "isgd", "seed": 0}
BATCH = 2_000  # rows predicted at once
ROW, FLAGS = "row", ("unlike", "why")  # columns beside those of what is predicted


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Sample the posterior of a network with one hidden layer on a table. Numbers are standardised, categories "
        "become indicators, missing values are filled and marked, dates become days; nothing needs to be tuned. A "
        "tenth of the rows is held out, so that the report can say how good the predictions are. RUN then holds "
        "the draws, the rules by which columns were read, the rows in standard units, and report.html."
    )
    parser.epilog = "example: isosgd fit houses.csv --target price --out runs/houses"
    parser.add_argument("table", metavar="TABLE", type=Path, help="CSV or Parquet file")
    parser.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    parser.add_argument("--out", metavar="RUN", type=Path, help="folder of the run (default: runs/TABLE-COLUMN)")
    parser.add_argument(
        "--task", choices=("regression", "classification"),
        help="what COLUMN is (default: numbers are regressed on; text, and at most 10 whole numbers, are classes)",
    )  # fmt: skip
    parser.add_argument(
        "--holdout", type=float, default=USUAL["holdout"], metavar="SHARE",
        help="share of the rows that is held out for the report; 0 for none (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--effort", type=float, default=1.0, help="times the usual number of steps (%(default)g)")
    parser.add_argument("--chains", type=int, default=USUAL["chains"], help="(%(default)s)")
    parser.add_argument("--draws", type=int, default=USUAL["draws"], help="of each chain (%(default)s)")
    parser.add_argument("--hidden", type=int, default=USUAL["hidden"], help="units of the hidden layer (%(default)s)")
    parser.add_argument("--method", default=USUAL["method"], help="one of `isosgd methods` (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=USUAL["seed"], help="of the held-out rows and of the chains (%(default)s)"
    )
    parser.add_argument("--no-report", dest="report", action="store_false", help="do not write report.html")
    add_machine(parser, threads=1)  # so small a network gains nothing from more
    add_json(parser, "scores and verdict")


def run_fit(args: argparse.Namespace) -> int:
    """Read the table, sample, judge, report."""
    _check(args)
    use_machine(args.threads, args.device)
    folder = args.out or Path("runs") / f"{args.table.stem}-{args.target}".replace("/", "-").replace(" ", "-")
    check_folder(folder)
    table, train, heldout, counts = _read(args)
    network = Network(len(table.inputs), len(table.classes) or 1, args.hidden, args.seed)
    found = save_tabular(
        folder, table, network, train, heldout, source=args.table.name, command=args.line, longer=_longer(args, folder)
    )
    echo(args, f"{counts['rows']:,} rows: {counts['train']:,} to train on, {counts['heldout']:,} held out" + (
        f", {counts['dropped']:,} without a target left aside" if counts["dropped"] else ""
    ))  # fmt: skip
    echo(args, *(f"  {line}" for line in table.describe()))
    steps = steps_for(args.method, counts["train"], network.weights, args.effort)
    how = "HMC on all rows" if steps["batch_size"] == "all" else "minibatches of rows"
    echo(args, f"sampling {args.chains} chains, {how}, into {folder} (Ctrl-C keeps what has been drawn)")

    def draw() -> None:
        isosgd.sample(
            found.target,
            found.data,
            init=found.init,
            method=args.method,
            draws=args.draws,
            chains=args.chains,
            seed=args.seed,
            device=args.device,
            store=folder,
            **steps,
        )

    return draw_and_judge(args, found, draw, counts)


def _longer(args: argparse.Namespace, folder: Path) -> str:
    """The command of the same run with four times the effort, into another folder."""
    words = ["isosgd", "fit", str(args.table), "--target", args.target]
    for name, usual in USUAL.items():
        if (value := getattr(args, name)) != usual:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, "--effort", f"{4 * args.effort:g}", "--out", f"{folder}-longer"])


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.holdout < 1:
        raise ValueError(f"--holdout {args.holdout:g} must be at least 0 and below 1")
    if not (math.isfinite(args.effort) and args.effort > 0):
        raise ValueError(f"--effort {args.effort:g} must be positive")
    for name in ("chains", "draws", "hidden"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    check_method(args.method, args.seed)


def _read(args: argparse.Namespace) -> Any:
    """The table's rules, training and held-out tensors, and counts of rows."""
    columns = read_columns(args.table)
    if (count := len(next(iter(columns.values())))) < LEAST_ROWS:
        raise ValueError(f"{args.table} has too few rows, {count}: {LEAST_ROWS} at least are needed")
    whole = learn_table(columns, args.target, args.task)  # for the task, and which rows have a target
    y, there = whole.encode_target(columns)
    rows = np.flatnonzero(there)
    if len(rows) < LEAST_ROWS:
        raise ValueError(f"{len(rows)} rows of {args.table} have a target; {LEAST_ROWS} at least are needed")
    # Row numbers are known by having no gaps, which the training rows alone have.
    numbered = {name: why for name, why in whole.dropped.items() if why == "it numbers the rows"}
    columns = {name: values for name, values in columns.items() if name not in numbered}
    out = _heldout(y.numpy(), args.holdout, bool(whole.classes), np.random.default_rng(args.seed))
    parts = []
    table = None
    for chosen in (rows[~out], rows[out]):
        part = {name: [values[k] for k in chosen] for name, values in columns.items()}
        # Everything is learnt from the rows that are trained on; only what there is to predict is known before.
        if table is None:
            table = learn_table(part, args.target, whole.task)
            told = [remark for remark in whole.remarks if repr(args.target) in remark and remark not in table.remarks]
            table = replace(table, remarks=(*told, *table.remarks), dropped={**numbered, **table.dropped})
        x, _ = table.encode(part)
        parts.append((x, table.encode_target(part)[0]))
    counts = {
        "rows": len(there),
        "train": len(parts[0][0]),
        "heldout": len(parts[1][0]),
        "dropped": int((~there).sum()),
    }
    return table, parts[0], parts[1] if out.any() else None, counts


def _heldout(y: Any, share: float, classes: bool, rng: Any) -> Any:
    """Which rows to hold out: so many of each class, of every class at most all but one."""
    out = np.zeros(len(y), bool)
    groups = [np.flatnonzero(y == k) for k in np.unique(y)] if classes else [np.arange(len(y))]
    for group in groups:
        count = min(round(share * len(group)), len(group) - 1)
        out[rng.permutation(group)[:count]] = True
    return out


def add_predict(parser: argparse.ArgumentParser) -> None:
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


def run_predict(args: argparse.Namespace) -> int:
    """Predict."""
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
        echo(args, f"note: the run is not complete; {len(posterior):,} draws are used")
    predicted = (
        _classification(posterior, x, found.table)
        if found.table.classes
        else _regression(posterior, x, found.table, args.level)
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
        echo(args, f"{len(table):,} predictions in {args.out}")
    elif not args.json:
        _write(sys.stdout, table)
    echo(args, f"{flagged:,} of {len(table):,} rows are unlike the training data")
    return 0


def _names(table: Any) -> list[str]:
    """Columns of what is predicted."""
    if not table.classes:
        return ["mean", "sd", "model_sd", "low", "high"]
    return ["predicted", *(f"p({name})" for name in table.classes), "entropy"]


def _regression(posterior: Any, x: Any, table: Any, level: float) -> Iterable[list[Any]]:
    found = posterior.predict(x, levels=central(level), batch_size=BATCH)
    assert found.quantiles is not None
    middle, low, high = (v.double().flatten() * table.y_scale + table.y_mean for v in (found.mean, *found.quantiles))
    spread, model = (v.double().flatten() * table.y_scale for v in (found.std, found.model_variance.sqrt()))
    for values in zip(*(v.tolist() for v in (middle, spread, model, low, high)), strict=True):
        yield [*map(_short, values)]


def _classification(posterior: Any, x: Any, table: Any) -> Iterable[list[Any]]:
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
