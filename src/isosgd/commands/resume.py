"""Go on with a run that was stopped, or extend one."""

from __future__ import annotations

import argparse

from isosgd.commands.common import add_json, add_machine, say, use_machine
from isosgd.commands.runs import add_run


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Go on with a run where it was stopped, with the settings it was begun with. On a CPU its draws are those of a "
        "run that was never stopped, bit for bit. A run that is complete is left as it is, unless --draws or --budget "
        "ask for more than it has: then it goes on from where it ended."
    )
    parser.epilog = "examples: isosgd resume runs/houses; isosgd resume runs/houses --draws 400"
    add_run(parser)
    parser.add_argument("--draws", type=int, help="of each chain, more than before (default: as many as before)")
    parser.add_argument("--budget", type=int, help="of a run with draws 'auto': draws of each chain, at most")
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
    if info["complete"] and args.draws is None and args.budget is None:
        say(args, f"{args.run} is complete")

    def draw() -> None:
        isosgd.resume(
            args.run, found.target, found.data, init=found.init, device=args.device, draws=args.draws,
            budget=args.budget,
        )  # fmt: skip

    return draw_and_judge(args, found, draw)
