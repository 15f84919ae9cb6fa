"""Run an experiment."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from isosgd.commands.common import add_json, add_machine, plain, use_machine

SHOWN = ("rmse", "mnll", "coverage", "crps", "rhat", "seconds")


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the experiments."""
    parser.description, parser.epilog = "Run an experiment on public data.", "example: isosgd bench uci --sets yacht"
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    uci = experiments.add_parser(
        "uci",
        help="regressions on the published UCI splits",
        description="All splits and chains of a set run together. Results go to OUT/SET-METHOD.json, one file a set.",
        epilog="example: isosgd bench uci --sets yacht boston --data-root data",
    )
    uci.add_argument("--method", default="isgd", help="isgd, isgd-paper (the paper's setting), or one of `methods`")
    uci.add_argument("--sets", nargs="+", help="names of sets (default: all under the data root)")
    uci.add_argument("--splits", type=int, help="only so many of the first splits")
    uci.add_argument("--data-root", type=Path, help="folder with uci/ (default: ISOSGD_DATA)")
    uci.add_argument("--hidden", type=int, default=50, help="units of the hidden layer (%(default)s)")
    uci.add_argument("--chains", type=int, help="of each split")
    uci.add_argument("--draws", type=int, help="of each chain")
    uci.add_argument("--warmup", type=int, help="gradients of each chain before its first draw")
    uci.add_argument("--keep-every", type=int, help="steps between draws")
    uci.add_argument("--structure", help="of I-SGD's Lambda (default: auto)")
    uci.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    uci.add_argument("--out", type=Path, default=Path("results/uci"), help="folder for results (%(default)s)")
    add_machine(uci)
    add_json(uci, "scores")


def run(args: argparse.Namespace) -> int:
    """Run the experiment."""
    import json

    import isosgd
    from isosgd.data.root import data_root
    from isosgd.data.uci import names
    from isosgd.experiments import uci, uci_tables

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
    if args.structure:
        setting = replace(setting, options=setting.options | {"structure": args.structure})
    if args.splits is not None and args.splits < 1:
        raise ValueError(f"--splits {args.splits} must be at least 1")
    splits = None if args.splits is None else range(args.splits)
    chosen = args.sets or names(args.data_root)
    if not chosen:
        raise ValueError(f"there is no set in {data_root(args.data_root)}; name the folder with uci/ by --data-root")
    for name in chosen:
        result = uci.run(
            name,
            setting,
            splits=splits,
            hidden=args.hidden,
            seed=args.seed,
            root=args.data_root,
            device=args.device,
            command=args.line,
        )
        uci_tables.write(result, args.out / f"{result.set}-{args.method}.json")
        if args.json:
            found = {measure: list(result.mean_and_error(measure)) for measure in uci_tables.MEASURES}
            print(json.dumps(plain(found | {"set": result.set})), flush=True)
        else:
            means = (f"{m} {result.mean_and_error(m)[0]:.3f} ± {result.mean_and_error(m)[1]:.3f}" for m in SHOWN)
            print(f"{result.set}: {', '.join(means)}", flush=True)
    return 0
