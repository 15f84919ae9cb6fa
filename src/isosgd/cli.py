"""The command line: ``isosgd demo``, ``isosgd methods``, ``isosgd bench uci``."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import isosgd


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it went well, 1 when it did not, 2 when it was asked wrongly."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="isosgd", description="Bayesian PyTorch models by stochastic gradients.")
    parser.add_argument("--version", action="version", version=isosgd.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="sample posteriors that are known, and two real data sets", add_help=False)
    listing = commands.add_parser("methods", help="list every method", epilog="example: isosgd methods --json")
    listing.add_argument("--json", action="store_true", help="as JSON")
    bench = commands.add_parser("bench", help="run an experiment")
    experiments = bench.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    _add_uci(experiments)
    if given[:1] == ["demo"]:
        from isosgd.demo import main as demo

        return demo(given[1:])
    args = parser.parse_args(given)
    try:
        return _methods(args) if args.command == "methods" else _uci(args, shlex.join(["isosgd", *given]))
    except (ValueError, TypeError, OSError, isosgd.DivergedError) as error:
        print(f"isosgd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; results that were finished are kept", file=sys.stderr)
        return 130


def _methods(args: argparse.Namespace) -> int:
    rows = isosgd.methods()
    if args.json:
        print(json.dumps(rows, indent=1, default=str))
    else:
        for row in rows:
            print(f"{row['name']:<16} {row['family']:<12} {row['targets']}")
    return 0


def _add_uci(experiments: Any) -> None:
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
    uci.add_argument("--device", help="where to sample (default: the CPU)")
    uci.add_argument("--threads", type=int, help="threads of torch")
    uci.add_argument("--out", type=Path, default=Path("results/uci"), help="folder for results (%(default)s)")
    uci.add_argument("--json", action="store_true", help="print the results as JSON")


def _uci(args: argparse.Namespace, command: str) -> int:
    from isosgd.data.root import data_root
    from isosgd.data.uci import names
    from isosgd.experiments import uci, uci_tables

    _use_machine(args.threads, args.device)
    setting = uci.SETTINGS.get(args.method)
    if setting is None:
        if args.method not in isosgd.METHODS:
            known = sorted({*uci.SETTINGS, *isosgd.METHODS})
            raise ValueError(f"--method {args.method} is not known; choose one of {', '.join(known)}")
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
            command=command,
        )
        uci_tables.write(result, args.out / f"{result.set}-{args.method}.json")
        if args.json:
            # JSON has no NaN: what does not exist, such as the standard error of a single split, is null.
            found = {
                m: [x if math.isfinite(x) else None for x in result.mean_and_error(m)] for m in uci_tables.MEASURES
            }
            print(json.dumps(found | {"set": result.set}), flush=True)
        else:
            means = (f"{m} {result.mean_and_error(m)[0]:.3f} ± {result.mean_and_error(m)[1]:.3f}" for m in SHOWN)
            print(f"{result.set}: {', '.join(means)}", flush=True)
    return 0


def _use_machine(threads: int | None, device: str | None) -> None:
    """Set the number of threads and see that the device is there, before anything is read."""
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises each of them
            raise ValueError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error


SHOWN = ("rmse", "mnll", "coverage", "crps", "rhat", "seconds")
