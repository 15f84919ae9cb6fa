"""Sample the posterior of a network on a CSV or Parquet table."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from isosgd.commands.common import (
    add_json,
    add_machine,
    check_folder,
    check_method,
    check_seed,
    say,
    use_machine,
)

LEAST_ROWS = 20
USUAL = {"task": None, "holdout": 0.1, "chains": 4, "draws": 100, "hidden": 50, "method": "isgd", "seed": 0}


def add(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Read the table, sample, judge, report."""
    import isosgd
    from isosgd.commands.drawing import draw_and_judge
    from isosgd.commands.effort import steps_for
    from isosgd.commands.network import Network
    from isosgd.commands.runs import save_tabular

    _check(args)
    use_machine(args.threads, args.device)
    folder = args.out or Path("runs") / f"{args.table.stem}-{args.target}".replace("/", "-").replace(" ", "-")
    check_folder(folder)
    table, train, heldout, counts = _read(args)
    network = Network(len(table.inputs), len(table.classes) or 1, args.hidden, args.seed)
    found = save_tabular(
        folder, table, network, train, heldout, source=args.table.name, command=args.line, longer=_longer(args, folder)
    )
    say(args, f"{counts['rows']:,} rows: {counts['train']:,} to train on, {counts['heldout']:,} held out" + (
        f", {counts['dropped']:,} without a target left aside" if counts["dropped"] else ""
    ))  # fmt: skip
    say(args, *(f"  {line}" for line in table.describe()))
    steps = steps_for(args.method, counts["train"], network.weights, args.effort)
    how = "all rows for every gradient" if steps["batch_size"] == "all" else "minibatches of rows"
    say(args, f"sampling {args.chains} chains, {how}, into {folder} (Ctrl-C keeps what has been drawn)")

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
    check_method(args.method)
    check_seed(args.seed)


def _read(args: argparse.Namespace) -> Any:
    """The table's rules, training and held-out tensors, and counts of rows."""
    import numpy as np

    from isosgd.data.columns import read_columns
    from isosgd.data.tables import learn_table

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
    import numpy as np

    out = np.zeros(len(y), bool)
    groups = [np.flatnonzero(y == k) for k in np.unique(y)] if classes else [np.arange(len(y))]
    for group in groups:
        count = min(round(share * len(group)), len(group) - 1)
        out[rng.permutation(group)[:count]] = True
    return out
