"""Sample a target that a Python script makes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from isosgd.commands.common import add_json, add_machine, check_folder, check_method, check_seed, use_machine
from isosgd.commands.scripts import USUAL


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
    parser.add_argument("--method", help="one of `isosgd methods` (%(default)s)")
    parser.add_argument("--chains", type=int, help="(%(default)s)")
    parser.add_argument("--draws", type=_steps, help="of each chain; `auto` until predictions converge (%(default)s)")
    parser.add_argument("--budget", type=int, help="draws of each chain, at most, with --draws auto (default: 2000)")
    parser.add_argument(
        "--batch-size", type=_rows, help="examples of a minibatch, or `all` of them (default: by the number of data)"
    )
    parser.add_argument("--warmup", type=_steps, help="gradients before the first draw (%(default)s)")
    parser.add_argument("--keep-every", type=_steps, help="steps between draws (%(default)s)")
    parser.add_argument("--temperature", type=float, help="(%(default)g)")
    parser.add_argument("--seed", type=int, help="(%(default)s)")
    parser.add_argument(
        "--store-dtype", choices=("float32", "bfloat16"), help="dtype in which draws are written (default: their own)"
    )
    parser.set_defaults(**USUAL)
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
    from isosgd.commands.drawing import draw_and_judge
    from isosgd.commands.runs import of_script
    from isosgd.commands.scripts import load_script
    from isosgd.store.manifest import Manifest

    check_method(args.method)
    check_seed(args.seed)
    use_machine(args.threads, args.device)
    script = load_script(args.script)
    folder = args.out or Path("runs") / script.path.stem
    check_folder(folder)
    if Manifest.begun(folder):
        raise ValueError(
            f"{folder} holds a run already: `isosgd resume {folder}` goes on with it; or choose another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    script.save(folder)

    def draw() -> None:
        settings = {name: getattr(args, name) for name in USUAL}
        isosgd.sample(
            script.target, script.data, init=script.init, device=args.device, store=folder,
            **settings, **dict(args.option),
        )  # fmt: skip

    return draw_and_judge(args, of_script(folder, script), draw)


def _rows(text: str) -> int | str:
    return text if text == "all" else int(text)


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
