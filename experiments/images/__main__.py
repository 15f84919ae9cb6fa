"""The classification tables: ``python -m experiments.images mnist --data-root DIR --device cuda``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from experiments import command
from experiments.images import classifiers, tables
from experiments.images.classification import Bench

MODELS = {"mnist": ("lenet5",), "cifar10": ("resnet18", "resnet56", "vgg16")}
OWN = ("epochs", "warmup", "keep_every")  # options that change the recipe of a network


def parser() -> argparse.ArgumentParser:
    """Its options."""
    top = argparse.ArgumentParser(
        prog="python -m experiments.images",
        description="Classification of images by every method of the paper's tables.",
        epilog="example: python -m experiments.images cifar10 --model resnet18 --data-root data --device cuda",
    )
    sets = top.add_subparsers(dest="set", required=True, metavar="SET")
    for name, models in MODELS.items():
        one = sets.add_parser(
            name,
            help=f"classification of {name}",
            description="Starting models are trained, or read from CACHE; results go to OUT/SET-MODEL.json.",
            epilog=f"example: python -m experiments.images {name} --data-root data --device cuda",
        )
        one.add_argument("--model", choices=models, default=models[0], help="(%(default)s)")
        one.add_argument("--rows", nargs="+", help="names of rows (default: all; a wrong name lists them)")
        one.add_argument("--once", nargs="+", default=[], help="names of rows that are run for one seed only")
        one.add_argument("--seeds", type=int, default=5, help="how many (%(default)s)")
        one.add_argument("--chains", type=int, default=5, help="of our setting, members of the ensemble (%(default)s)")
        one.add_argument("--pilots", type=int, default=2, help="models that temperatures are chosen with (%(default)s)")
        one.add_argument("--epochs", type=int, help="of the training of a starting model")
        one.add_argument("--warmup", type=int, help="steps before the first draw in our settings")
        one.add_argument("--keep-every", type=int, help="steps between draws in our settings")
        one.add_argument("--ladder", type=float, nargs="+", help="temperatures to choose from, for all methods")
        one.add_argument("--paper-keep", type=int, help="at most so many steps between draws in the paper's settings")
        one.add_argument("--limit", type=int, help="take only so many images of each set, for a quick look")
        one.add_argument("--data-root", type=Path, help="folder with the data (default: ISOSGD_DATA)")
        one.add_argument("--cache", type=Path, help="folder to keep trained models in (default: none is kept)")
        one.add_argument("--out", type=Path, default=Path("results/classification"), help="for results (%(default)s)")
        one.add_argument(
            "--resume",
            action="store_true",
            help="keep the ladders, rows and seeds that OUT has of the same settings, and make those that it lacks",
        )
        command.add_machine(one)
        command.add_json(one, "scores")
    return top


def run(args: argparse.Namespace) -> None:
    """One network on one set."""
    command.use_machine(args.threads, args.device)
    for name in ("seeds", "chains", "pilots", "limit", *OWN):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    torch.backends.cudnn.benchmark = True  # shapes never change: let it try which algorithm is the fastest
    changes = {name: getattr(args, name) for name in OWN if getattr(args, name) is not None}
    path = args.out / f"{args.set}-{args.model}.json"
    earlier = tables.read(path) if args.resume and path.exists() else None
    task, pilot = classifiers.read(
        args.model,
        args.data_root,
        args.device or "cpu",
        recipe=replace(classifiers.RECIPES[args.model], **changes),
        limit=args.limit,
        cache=args.cache,
    )
    bench = Bench(
        task,
        pilot,
        chains=args.chains,
        pilots=args.pilots,
        paper_keep=args.paper_keep,
        ladder=args.ladder,
        command=args.line,
        earlier=earlier,
        say=lambda words: command.echo(args, words),
        save=lambda result: tables.write(result, path),
    )
    result = bench.run(args.seeds, args.rows, args.once)
    if args.json:
        measures = ("accuracy", "mnll", "ece", "brier", "auroc")
        command.print_json({row.row: {m: list(row.mean_and_deviation(m)) for m in measures} for row in result.rows})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return command.run("experiments.images", parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
