"""Say whether to believe a run, and why."""

from __future__ import annotations

import argparse

from isosgd.commands.common import add_json, print_json, say
from isosgd.commands.runs import add_damaged, add_run


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = (
        "Say whether to trust the draws of a run, to run longer, or that it samples something else: R-hat and "
        "effective draws of predictions, and the temperature of the draws by layer. Unfinished runs are judged by "
        "what is there."
    )
    parser.epilog = "example: isosgd diagnose runs/houses --json"
    add_run(parser)
    add_damaged(parser)
    parser.add_argument(
        "--check", action="store_true", help="end with 1 unless the verdict is to trust it, for use in scripts"
    )
    add_json(parser, "summary and verdict")


def run(args: argparse.Namespace) -> int:
    """Judge."""
    from isosgd.commands.runs import open_run

    found = open_run(args.run, args.script, args.drop_damaged)
    posterior = found.posterior()
    summary = posterior.summary(found.heldout if found.heldout is not None else found.data)
    verdict = posterior.trust(found.data, held_out=found.heldout)
    if args.json:
        print_json({
            "run": args.run,
            "complete": posterior.info.get("complete"),
            "verdict": verdict.as_dict(),
            "summary": summary.as_dict(),
        })  # fmt: skip
    else:
        say(args, found.subject.named(str(verdict)), "", str(summary))
    return 0 if verdict.trusted or not args.check else 1
