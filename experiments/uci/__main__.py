"""Regressions on the published UCI splits: ``python -m experiments.uci --data-root DIR --method isgd-all``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import isosgd
from experiments import command
from experiments.data.root import data_root
from experiments.data.uci import names
from experiments.uci import runs, tables
from experiments.uci.model import NOISES

SHOWN = ("rmse", "mnll", "coverage", "crps", "rhat", "seconds")


def parser() -> argparse.ArgumentParser:
    """Its options."""
    uci = argparse.ArgumentParser(
        prog="python -m experiments.uci",
        description="Regressions on the published UCI splits. Splits and chains of a set run together. Results go to "
        "OUT/SET-METHOD[-STRUCTURE][-NOISE].json",
        epilog="example: python -m experiments.uci --sets yacht boston --data-root data",
    )
    uci.add_argument(
        "--method",
        default="isgd",
        help="isgd, isgd-all (all data in a batch), isgd-paper (the paper's setting), or one of `isosgd methods`",
    )
    uci.add_argument("--sets", nargs="+", help="names of sets (default: all under the data root)")
    uci.add_argument("--splits", help="only so many of the first splits, or a range of them such as 10:20")
    uci.add_argument("--data-root", type=Path, help="folder with uci/ (default: ISOSGD_DATA)")
    uci.add_argument("--hidden", type=int, default=50, help="units of the hidden layer (%(default)s)")
    uci.add_argument(
        "--noise",
        choices=("gaussian", "student", "varying"),
        help="of the targets: Gaussian, with Student-t tails, or of a size that depends on the input (default: "
        "student, and gaussian in the paper's setting)",
    )
    uci.add_argument("--chains", type=int, help="of each split")
    uci.add_argument("--draws", type=int, help="of each chain")
    uci.add_argument("--warmup", type=int, help="gradients of each chain before its first draw")
    uci.add_argument("--keep-every", type=int, help="steps between draws")
    uci.add_argument("--structure", help="of I-SGD's Lambda (default: auto)")
    uci.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    uci.add_argument("--jobs", type=int, default=1, help="processes that share the splits (%(default)s)")
    uci.add_argument("--out", type=Path, default=Path("results/uci"), help="folder for results (%(default)s)")
    command.add_machine(uci)
    command.add_json(uci, "scores")
    return uci


def chosen_splits(text: str) -> range:
    """``5`` as the first five, ``10:20`` as those from 10 up to 20.

    Example:
        >>> chosen_splits("5"), chosen_splits("10:20")
        (range(0, 5), range(10, 20))
    """
    begin, _, end = text.rpartition(":")
    if not (end.isdecimal() and (begin or "0").isdecimal() and int(begin or 0) < int(end)):
        raise ValueError(f"--splits {text} is neither a number of splits, at least 1, nor a range such as 10:20")
    return range(int(begin or 0), int(end))


def chosen_setting(args: argparse.Namespace) -> tuple[runs.Setting, str | None]:
    """How to sample, and the noise where it is another than that of the method's setting."""
    setting = runs.SETTINGS.get(args.method)
    if setting is None:
        known = {row["name"] for row in isosgd.methods()}
        if args.method not in known:
            every = ", ".join(sorted({*runs.SETTINGS, *known}))
            raise ValueError(f"--method {args.method} is not known; choose one of {every}")
        setting = replace(runs.SETTINGS["isgd"], label=args.method, method=args.method)
    changes = {name: getattr(args, name) for name in ("chains", "draws", "warmup", "keep_every")}
    setting = replace(setting, **{name: value for name, value in changes.items() if value is not None})
    noise = None if args.noise in (None, setting.model.noise) else args.noise
    if noise:
        model = replace(setting.model, noise=noise)
        setting = replace(setting, model=model, label=f"{setting.label}, {NOISES[noise]}")
    if args.structure:
        options = setting.options | {"structure": args.structure}
        setting = replace(setting, options=options, label=f"{setting.label}, {args.structure}")
    return setting, noise


def run(args: argparse.Namespace) -> None:
    """The regressions, set by set."""
    command.use_machine(args.threads, args.device)
    setting, noise = chosen_setting(args)
    splits = None if args.splits is None else chosen_splits(args.splits)
    chosen = args.sets or names(args.data_root)
    if not chosen:
        raise ValueError(f"there is no set in {data_root(args.data_root)}; name the folder with uci/ by --data-root")
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs} must be at least 1")
    settings: dict[str, Any] = {
        **{"splits": splits, "hidden": args.hidden, "seed": args.seed, "root": args.data_root},
        **{"device": args.device, "command": args.line},
    }
    for name in chosen:
        if args.jobs == 1:
            result = runs.run(name, setting, **settings)
        else:
            result = runs.side_by_side(name, setting, args.jobs, args.threads or 1, **settings)
        named = filter(None, (result.set, args.method, args.structure, noise))
        tables.write(result, args.out / f"{'-'.join(named)}.json")
        if args.json:
            found = {measure: list(result.mean_and_error(measure)) for measure in tables.MEASURES}
            print(json.dumps(command.plain(found | {"set": result.set})), flush=True)
        else:
            means = (f"{m} {result.mean_and_error(m)[0]:.3f} ± {result.mean_and_error(m)[1]:.3f}" for m in SHOWN)
            print(f"{result.set}: {', '.join(means)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return command.run("experiments.uci", parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
