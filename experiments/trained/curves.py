"""How the NLL falls with the length of a run, by temperature and prior, on the pairs that defaults may be chosen with.

    python -m experiments.trained.curves --pairs cifar10k-vgg --device cuda --data-root DIR --out results/trained/tune

One run of each setting from the same trained start. ``curves.json`` gets a row for each: NLL of the average over the
first 1, 2, 4, 8, ... draws over that of the start, on held-out and on test examples, and the same with the start among
the draws, with the weight that suits the held-out examples best. A row of the same setting is replaced.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import command
from experiments.pages import read_json, write_json
from experiments.trained import runs
from experiments.trained.__main__ import chosen
from experiments.trained.training import start
from isosgd import DivergedError
from isosgd.sampling.ladder import best_share, pooled

COUNTS = (1, 2, 4, 8, 12, 20, 30, 45, 60)
PARTS = ("held_out", "test")
KEYS = ("pair", "prior", "temperature", "warmup", "keep_every")


def parser() -> argparse.ArgumentParser:
    """Its options."""
    top = argparse.ArgumentParser(prog="python -m experiments.trained.curves", description=__doc__.splitlines()[0])
    top.add_argument("--pairs", nargs="+", required=True, help="names out of the list to tune on")
    top.add_argument("--temperatures", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3])
    top.add_argument("--priors", nargs="+", default=["empirical", "weight-decay"])
    top.add_argument("--warmup", type=int, default=400)
    top.add_argument("--keep-every", type=int, default=60)
    top.add_argument("--data-root", type=Path)
    top.add_argument("--starts", type=Path, default=Path("runs/trained/starts"), help="trained networks (%(default)s)")
    top.add_argument("--out", type=Path, default=Path("results/trained/tune"))
    command.add_machine(top, threads=1)
    return top


def curves(each: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """NLL of the average over the first draws over the start's, from that of each draw and example, by part."""
    found: dict[str, list[float]] = {}
    for count in (count for count in COUNTS if count <= len(each["test"])):
        after = {part: (-each[part][:count]).logsumexp(0) - math.log(count) for part in PARTS}
        share = best_share(-before["held_out"], after["held_out"])
        for part in PARTS:
            both = pooled(-before[part], after[part], share)
            for name, likely in ((part, after[part]), (f"{part}_with_start", both)):
                found.setdefault(name, []).append(round(float(-likely.mean() / before[part].mean()), 4))
        found.setdefault("share", []).append(share)
    return found


def body(args: argparse.Namespace) -> None:
    """All settings of all pairs; of classifiers."""
    command.use_machine(args.threads, args.device)
    torch.backends.cudnn.benchmark = True  # shapes do not change
    device, path = args.device or "cpu", args.out / "curves.json"
    rows: list[dict[str, Any]] = read_json(path)["rows"] if path.exists() else []
    for pair in chosen("tune", args.pairs):
        sets = pair.read(args.data_root, 0).to(device)
        begun = start(pair, sets, 0, args.starts)
        alone = runs.together(pair, sets, [begun])
        before = {part: runs.negative_log_likelihoods(alone, sets, part)[0] for part in PARTS}
        for prior, temperature in itertools.product(args.priors, args.temperatures):
            settings = {
                "prior": prior, "temperature": temperature, "warmup": args.warmup, "draws": COUNTS[-1],
                "keep_every": args.keep_every,
            }  # fmt: skip
            row, began = {"pair": pair.name, **settings}, time.monotonic()
            try:
                found = runs.sampled(pair, sets, [begun], settings, 0)
            except DivergedError as error:
                row["diverged"] = str(error)
            else:
                row["seconds"] = round(time.monotonic() - began, 1)
                row |= curves({part: runs.negative_log_likelihoods(found, sets, part) for part in PARTS}, before)
            rows = [other for other in rows if any(other[key] != row[key] for key in KEYS)] + [row]
            print(rows[-1], flush=True)
            write_json({"draws": COUNTS, "command": args.line, **runs.about(device), "rows": rows}, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return command.run("experiments.trained.curves", parser(), body, argv)


if __name__ == "__main__":
    sys.exit(main())
