"""Write a report of a run as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from isosgd.commands.common import add_json, check_file, print_json, say
from isosgd.commands.runs import add_damaged, add_run


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Write one HTML file that needs nothing else: the verdict first, then predictions on held-out rows, traces and "
        "ranks of the chains, R-hat and effective draws, temperature, rates and noise by layer, settings and versions."
    )
    parser.epilog = "example: isosgd report runs/houses --out houses.html"
    add_run(parser)
    add_damaged(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="HTML file to write (default: RUN/report.html)")
    add_json(parser, "where it is and the verdict")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    from isosgd.commands.judgement import verdict_of
    from isosgd.commands.runs import open_run

    check_file(args.out)
    found = open_run(args.run, args.script, args.drop_damaged)
    page = found.report(args.out)
    if args.json:
        verdict = verdict_of(found, found.posterior())
        print_json({"report": page, "verdict": verdict.as_dict() if verdict is not None else None})
    else:
        say(args, f"report: {page}")
    return 0
