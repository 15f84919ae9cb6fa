"""Sample a target that a Python script makes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from isosgd.commands.common import STOPPED, add_json, add_machine, check_method, gathered_warnings, use_machine
from isosgd.commands.fit import finish, stopped


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Run a Python script and sample the isosgd.Target of that name in it, or that a function of that name "
        "returns. The script's `data` (a tuple of tensors, a DataLoader, or a function that makes one) is sampled "
        "with; `heldout`, in the same form, is for the report, and `init` is where chains start. torch is seeded "
        "before the script runs, so that a network it makes is the same when the run is resumed."
    )
    parser.epilog = "example: isosgd sample model.py:target --out runs/model --chains 4"
    parser.add_argument("script", metavar="SCRIPT.py:target", help="a script, and the name of the target in it")
    parser.add_argument("--out", metavar="RUN", type=Path, help="folder of the run (default: runs/SCRIPT)")
    parser.add_argument("--method", default="isgd", help="one of `isosgd methods` (%(default)s)")
    parser.add_argument("--chains", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--draws", type=int, default=100, help="of each chain (%(default)s)")
    parser.add_argument("--batch-size", type=int, help="examples of a minibatch (default: by the number of data)")
    parser.add_argument("--warmup", type=_steps, default="auto", help="gradients before the first draw (%(default)s)")
    parser.add_argument("--keep-every", type=_steps, default="auto", help="steps between draws (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(%(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--option", action="append", default=[], type=_option, metavar="NAME=VALUE",
        help="a setting of the method, such as structure=layer; may be given again",
    )  # fmt: skip
    parser.add_argument("--no-report", dest="report", action="store_false", help="do not write report.html")
    add_machine(parser)
    add_json(parser, "the verdict")


def run(args: argparse.Namespace) -> int:
    """Sample."""
    import isosgd
    from isosgd.commands.runs import open_run
    from isosgd.commands.scripts import load_script
    from isosgd.store.manifest import Manifest

    check_method(args.method)
    use_machine(args.threads, args.device)
    script = load_script(args.script)
    folder = args.out or Path("runs") / script.path.stem
    if Manifest.begun(folder):
        raise ValueError(
            f"{folder} holds a run already: `isosgd resume {folder}` goes on with it; or choose another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    script.save(folder)
    try:
        with gathered_warnings() as warned:
            isosgd.sample(
                script.target,
                script.data,
                init=script.init,
                method=args.method,
                draws=args.draws,
                chains=args.chains,
                batch_size=args.batch_size,
                keep_every=args.keep_every,
                warmup=args.warmup,
                temperature=args.temperature,
                seed=args.seed,
                device=args.device,
                store=folder,
                **dict(args.option),
            )
    except KeyboardInterrupt:
        stopped(args, folder)
        return STOPPED
    finish(args, open_run(folder), warned)
    return 0


def _steps(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _option(text: str) -> tuple[str, Any]:
    """``NAME=VALUE``: the value as JSON where it is some, else as text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
