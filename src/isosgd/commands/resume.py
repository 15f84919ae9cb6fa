"""Go on with a run that was stopped."""

from __future__ import annotations

import argparse

from isosgd.commands.common import add_json, add_machine, say, use_machine
from isosgd.commands.runs import add_run


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Go on with a run where it was stopped, with the settings it was begun with. On a CPU its draws are those of a "
        "run that was never stopped, bit for bit. A run that is complete is left as it is."
    )
    parser.epilog = "example: isosgd resume runs/houses"
    add_run(parser)
    parser.add_argument("--no-report", dest="report", action="store_false", help="do not write report.html")
    add_machine(parser)
    add_json(parser, "scores and verdict")


def run(args: argparse.Namespace) -> int:
    """Go on."""
    import isosgd
    from isosgd.commands.drawing import draw_and_judge
    from isosgd.commands.runs import MANIFEST, open_run

    found = open_run(args.run, args.script)
    if not (args.run / MANIFEST).exists():
        raise ValueError(f"{args.run} has no {MANIFEST}: the run was stopped before it began; start it again")
    info = isosgd.load(args.run).info
    use_machine(args.threads or info.get("threads"), args.device)  # other threads may round otherwise
    if info["complete"]:
        say(args, f"{args.run} is complete")

    def draw() -> None:
        isosgd.resume(args.run, found.target, found.data, init=found.init, device=args.device)

    return draw_and_judge(args, found, draw)
