"""How NLL depends on temperature, prior and structure, on the pairs that defaults may be chosen with.

    python -m experiments.trained.tune --data-root DIR --out results/trained/tune [--pairs NAMES] [--seeds 2]

Every setting samples from the same trained start for about ten epochs of gradients. One JSON a pair: a row for each
setting with the NLL over that of the start on held-out data, on test data, and on both together (``ratio``), a mean
over seeds; null where a run diverged. Rows that the file has already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import command
from experiments.pages import read_json, table, write_json
from experiments.trained import runs
from experiments.trained.__main__ import chosen
from experiments.trained.pairs import LISTS, Pair
from experiments.trained.training import start
from isosgd.warmup import windows

TEMPERATURES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
STRUCTURES = ("layer", "auto")
PRIORS = tuple(name for name in runs.PRIORS if name != "default")
KEYS = ("structure", "prior", "temperature", "optimised", "seed")


def parser() -> argparse.ArgumentParser:
    """Its options."""
    top = argparse.ArgumentParser(prog="python -m experiments.trained.tune", description=__doc__.splitlines()[0])
    top.add_argument("--pairs", nargs="+", help="names out of the list (default: all)")
    top.add_argument("--seeds", type=int, default=2, help="how many (%(default)s)")
    top.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    top.add_argument("--structures", nargs="+", default=STRUCTURES, help="or preset:NAME (%(default)s)")
    top.add_argument("--priors", nargs="+", default=PRIORS)
    top.add_argument("--optimise", action="store_true", help="let the warm-up begin with its initial optimisation")
    top.add_argument("--epochs", type=float, default=runs.EPOCHS, help="of gradients (%(default)s)")
    top.add_argument("--data-root", type=Path)
    top.add_argument("--starts", type=Path, default=Path("runs/trained/starts"), help="trained networks (%(default)s)")
    top.add_argument("--out", type=Path, default=Path("results/trained/tune"))
    command.add_machine(top, threads=1)
    return top


def overall(found: dict[str, Any], sets: Any) -> float:
    """NLL of held-out and test data together."""
    m, n = len(sets.held_out[0]), len(sets.test[0])
    return float((m * found["held_out_nll"] + n * found["nll"]) / (m + n))


def one(pair: Pair, sets: Any, begun: Any, before: dict[str, float], row: dict[str, Any], epochs: float) -> None:
    """Run a setting, and put what it scores into its row."""
    kind, _, preset = row["structure"].partition(":")
    settings = {"preset": preset} if kind == "preset" else {"structure": kind}
    settings |= {"temperature": row["temperature"], "prior": row["prior"], "epochs": epochs}
    found = runs.measured(pair, sets, before, lambda: runs.sampled(pair, sets, [begun], settings, row["seed"]))
    row |= {"seconds": round(found["seconds"], 1), "gradients": found.get("info", {}).get("gradients")}
    if "nll" not in found:
        row |= {"ratio": None, "held_out": None, "test": None}
        return
    both = {"nll": overall(found, sets)}, {"nll": overall(before, sets)}
    row["ratio"] = runs.ratio(pair, *both)
    row["held_out"], row["test"] = (runs.ratio(pair, found, before, name) for name in ("held_out_nll", "nll"))
    row |= {name: found[name] - before[name] for name in ("accuracy", "auroc") if name in found}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios by structure and prior, a column for each temperature, means over seeds; ``inf`` for diverged."""
    cells: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        name = row["prior"] + (", optimised" if row["optimised"] else "")
        cells.setdefault((row["structure"], name, row["temperature"]), []).append(row["ratio"] or math.inf)
    steps = sorted({t for _, _, t in cells})
    lines = []
    for structure, prior in dict.fromkeys((s, p) for s, p, _ in cells):
        found = [cells.get((structure, prior, t)) for t in steps]
        lines.append([structure, prior, *("" if x is None else f"{sum(x) / len(x):.3f}" for x in found)])
    return table(["structure", "prior", *(f"{t:g}" for t in steps)], lines)


def body(args: argparse.Namespace) -> None:
    """All settings of all pairs."""
    command.use_machine(args.threads, args.device)
    device = args.device or "cpu"
    if not args.optimise:  # a trained start is to be kept
        windows.MOST_OPTIMISATION_SHARE = 0.0
    for pair in chosen("tune", args.pairs or [p.name for p in LISTS["tune"] if not p.gpu or device != "cpu"]):
        path = args.out / f"{pair.name}.json"
        rows: list[dict[str, Any]] = read_json(path)["rows"] if path.exists() else []
        known = {tuple(row[key] for key in KEYS) for row in rows}
        for seed in range(args.seeds):
            sets = pair.read(args.data_root, seed).to(device)
            begun = start(pair, sets, seed, args.starts)
            before = runs.scores(pair, sets, runs.together(pair, sets, [begun]))
            print(pair.name, seed, {name: round(value, 4) for name, value in before.items()}, flush=True)
            for values in itertools.product(args.structures, args.priors, args.temperatures):
                row: dict[str, Any] = dict(zip(KEYS, (*values, args.optimise, seed), strict=True))
                if tuple(row.values()) in known:
                    continue
                one(pair, sets, begun, before, row, args.epochs)
                rows.append(row)
                about = {"pair": pair.name, "epochs": args.epochs, "command": args.line, **runs.about(device)}
                write_json({**about, "rows": rows}, path)
        print(f"\n{pair.name}\n{summary(rows)}\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return command.run("experiments.trained.tune", parser(), body, argv)


if __name__ == "__main__":
    sys.exit(main())
