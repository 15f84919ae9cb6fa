"""The command: ``python -m experiments.trained --list test --data-root DIR --out FOLDER``."""

from __future__ import annotations

import argparse
import ast
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import command
from experiments.pages import NONE, table, write_json
from experiments.trained import runs
from experiments.trained.pairs import LISTS, Pair


def parser() -> argparse.ArgumentParser:
    """Its options."""
    top = argparse.ArgumentParser(
        prog="python -m experiments.trained",
        description="Trained networks before and after isosgd.sample. Writes OUT/PAIR.json; keeps what it trains.",
        epilog="example: python -m experiments.trained --pairs digits-mlp --out runs/trained -- temperature=0.001",
    )
    top.add_argument("--list", choices=sorted(LISTS), default="test", help="which pairs (%(default)s)")
    top.add_argument("--pairs", nargs="+", help="names out of the list (default: all; a wrong name lists them)")
    top.add_argument("--seeds", type=int, default=1, help="how many (%(default)s)")
    top.add_argument("--first-seed", type=int, default=0, help="the first of them (%(default)s)")
    top.add_argument("--starts", type=int, default=1, help="trained networks to sample around (%(default)s)")
    top.add_argument("--rivals", nargs="+", default=["none"], choices=(*runs.RIVALS, "none"), help="(%(default)s)")
    top.add_argument("--members", type=int, default=4, help="of the deep ensemble (%(default)s)")
    top.add_argument("--limit", type=int, help="take only so many examples of each part, for a quick look on a CPU")
    top.add_argument("--data-root", type=Path, help="folder with the data (default: ISOSGD_DATA)")
    top.add_argument("--out", type=Path, default=Path("results/trained"), help="for results (%(default)s)")
    top.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="after --: settings of isosgd.sample; also "
                     f"prior ({', '.join(runs.PRIORS)}) and epochs")  # fmt: skip
    command.add_machine(top)
    return top


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Settings as Python values.

    Example:
        >>> parsed(["temperature=0.001", "structure=layer"])
        {'temperature': 0.001, 'structure': 'layer'}
    """
    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r} is no setting: write KEY=VALUE, such as temperature=0.001")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def chosen(which: str, names: Sequence[str] | None) -> list[Pair]:
    """Pairs of a list by their names."""
    known = {pair.name: pair for pair in LISTS[which]}
    for name in names or ():
        if name not in known:
            raise ValueError(f"{name!r} is no pair of the list {which!r}; choose from {list(known)}")
    return [known[name] for name in names or known]


def line(name: str, run: dict[str, Any]) -> list[str]:
    """A row of the table."""

    def said(x: float | None, digits: int = 4) -> str:
        return NONE if x is None or not math.isfinite(x) else f"{x:.{digits}f}"

    before, after = run["start"], run["average"]
    measure = "rmse" if "rmse" in before else "accuracy"
    rivals = [f"{other} {said(found['ratio'], 3)}" for other, found in run["rivals"].items()]
    return [
        name, str(run["seed"]), f"{after.get('info', {}).get('temperature', NONE)}",
        said(before["nll"]), said(after.get("nll")), said(after["ratio"], 3),
        said(before[measure]), said(after.get(measure)), said(before.get("auroc")), said(after.get("auroc")),
        said(run["training_seconds"], 1), said(after["seconds"], 1), said(run.get("worth"), 1), ", ".join(rivals),
    ]  # fmt: skip


HEAD = (
    "pair", "seed", "T", "NLL start", "average", "ratio", "accuracy/RMSE start", "average", "AUROC start", "average",
    "s training", "s sampling", "worth", "rivals' ratios",
)  # fmt: skip


def body(args: argparse.Namespace) -> None:
    """All pairs that were asked for."""
    command.use_machine(args.threads, args.device)
    device = args.device or "cpu"
    for name in ("seeds", "starts", "members", "limit"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    torch.backends.cudnn.benchmark = True  # shapes do not change
    settings, lines, ratios = parsed(args.settings), [], []
    for pair in chosen(args.list, args.pairs):
        if pair.gpu and not device.startswith("cuda"):
            print(f"{pair.name} needs a GPU: left out", flush=True)
            continue
        found = []
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            sets = pair.read(args.data_root, seed).limited(args.limit).to(device)
            found.append(
                runs.run(pair, sets, seed, args.out / "starts", settings, args.rivals, args.members, args.starts)
            )
            lines.append(line(pair.name, found[-1]))
            print("  ".join(lines[-1]), flush=True)
            about = {"pair": pair.name, "list": args.list, "settings": settings, "command": args.line}
            write_json({**about, **runs.about(device), "runs": found}, args.out / f"{pair.name}.json")
        ratios.append(statistics.fmean(run["average"]["ratio"] for run in found))
    if ratios:
        print("\n" + table(HEAD, lines))
        print(f"\nratio of NLL: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return command.run("experiments.trained", parser(), body, argv)


if __name__ == "__main__":
    sys.exit(main())
