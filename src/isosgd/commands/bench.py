"""Run an experiment."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from isosgd.commands.common import add_json, add_machine, plain, print_json, say, use_machine

SHOWN = ("rmse", "mnll", "coverage", "crps", "rhat", "seconds")


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the experiments."""
    parser.description, parser.epilog = "Run an experiment on public data.", "example: isosgd bench uci --sets yacht"
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    uci = experiments.add_parser(
        "uci",
        help="regressions on the published UCI splits",
        description="Splits and chains of a set run together. Results go to OUT/SET-METHOD[-STRUCTURE][-NOISE].json",
        epilog="example: isosgd bench uci --sets yacht boston --data-root data",
    )
    uci.add_argument(
        "--method",
        default="isgd",
        help="isgd, isgd-all (all data in a batch), isgd-paper (the paper's setting), or one of `methods`",
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
    add_machine(uci)
    add_json(uci, "scores")
    for name, models, example in (
        ("mnist", ("lenet5",), "isosgd bench mnist --data-root data --device cuda"),
        ("cifar10", ("resnet18", "resnet56", "vgg16"), "isosgd bench cifar10 --model resnet18 --device cuda"),
    ):
        add_images(experiments, name, models, example)


def add_images(experiments: Any, name: str, models: tuple[str, ...], example: str) -> None:
    """Give a parser the classification of a set of images."""
    one = experiments.add_parser(
        name,
        help=f"classification of {name} by every method of the paper's tables",
        description="Starting models are trained, or read from CACHE; results go to OUT/SET-MODEL.json.",
        epilog=f"example: {example}",
    )
    one.add_argument("--model", choices=models, default=models[0], help="(%(default)s)")
    one.add_argument("--rows", nargs="+", help="names of rows (default: all; a wrong name lists them)")
    one.add_argument("--once", nargs="+", default=[], help="names of rows that are run for one seed only")
    one.add_argument("--seeds", type=int, default=5, help="how many (%(default)s)")
    one.add_argument("--chains", type=int, default=5, help="of our setting, members of the ensemble (%(default)s)")
    one.add_argument("--pilots", type=int, default=2, help="models that temperatures are chosen with (%(default)s)")
    one.add_argument("--side-by-side", type=int, default=5, help="models that are trained at a time (%(default)s)")
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
    add_machine(one)
    add_json(one, "scores")


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


def run(args: argparse.Namespace) -> int:
    """Run the experiment."""
    return run_uci(args) if args.experiment == "uci" else run_images(args)


def run_images(args: argparse.Namespace) -> int:
    """The classification tables."""
    import torch

    from isosgd.experiments import classifiers, image_tables
    from isosgd.experiments.classification import Bench

    use_machine(args.threads, args.device)
    own = ("epochs", "warmup", "keep_every")
    for name in ("seeds", "chains", "pilots", "side_by_side", "limit", *own):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    torch.backends.cudnn.benchmark = True  # shapes never change: let it try which algorithm is the fastest
    recipe = classifiers.RECIPES[args.model]
    changes = {name: getattr(args, name) for name in own if getattr(args, name) is not None}
    path = args.out / f"{args.experiment}-{args.model}.json"
    earlier = image_tables.read(path) if args.resume and path.exists() else None
    task, pilot = classifiers.read(
        args.model,
        args.data_root,
        args.device or "cpu",
        recipe=replace(recipe, **changes),
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
        side_by_side=args.side_by_side,
        command=args.line,
        earlier=earlier,
        say=lambda words: say(args, words),
        save=lambda result: image_tables.write(result, path),
    )
    result = bench.run(args.seeds, args.rows, args.once)
    if args.json:
        print_json(
            {
                row.row: {m: list(row.mean_and_deviation(m)) for m in ("accuracy", "mnll", "ece", "brier", "auroc")}
                for row in result.rows
            }
        )
    return 0


def run_uci(args: argparse.Namespace) -> int:
    """The regressions."""
    import json

    import isosgd
    from isosgd.data.root import data_root
    from isosgd.data.uci import names
    from isosgd.experiments import uci, uci_tables
    from isosgd.experiments.uci_model import NOISES

    use_machine(args.threads, args.device)
    setting = uci.SETTINGS.get(args.method)
    if setting is None:
        known = {row["name"] for row in isosgd.methods()}
        if args.method not in known:
            every = ", ".join(sorted({*uci.SETTINGS, *known}))
            raise ValueError(f"--method {args.method} is not known; choose one of {every}")
        setting = replace(uci.SETTINGS["isgd"], label=args.method, method=args.method)
    changes = {name: getattr(args, name) for name in ("chains", "draws", "warmup", "keep_every")}
    setting = replace(setting, **{name: value for name, value in changes.items() if value is not None})
    noise = None if args.noise in (None, setting.model.noise) else args.noise
    if noise:
        model = replace(setting.model, noise=noise)
        setting = replace(setting, model=model, label=f"{setting.label}, {NOISES[noise]}")
    if args.structure:
        options = setting.options | {"structure": args.structure}
        setting = replace(setting, options=options, label=f"{setting.label}, {args.structure}")
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
            result = uci.run(name, setting, **settings)
        else:
            result = uci.side_by_side(name, setting, args.jobs, args.threads or 1, **settings)
        named = filter(None, (result.set, args.method, args.structure, noise))
        uci_tables.write(result, args.out / f"{'-'.join(named)}.json")
        if args.json:
            found = {measure: list(result.mean_and_error(measure)) for measure in uci_tables.MEASURES}
            print(json.dumps(plain(found | {"set": result.set})), flush=True)
        else:
            means = (f"{m} {result.mean_and_error(m)[0]:.3f} ± {result.mean_and_error(m)[1]:.3f}" for m in SHOWN)
            print(f"{result.set}: {', '.join(means)}", flush=True)
    return 0
