"""What fit, sample and resume have in common: to draw, then to judge and report; and what Ctrl-C leaves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isosgd.commands.common import STOPPED, gathered_warnings, print_json, say
from isosgd.commands.runs import Run

UNSETTLED = "the warm-up did not settle"  # the verdict says so, too


def draw_and_judge(
    args: argparse.Namespace, found: Run, draw: Callable[[], Any], counts: dict[str, int] | None = None
) -> int:
    """Draw into the folder of a run, say how good the draws are, and write the report.

    Args:
        args: of the command.
        found: the run, whose draws are yet to come.
        draw: draws.
        counts: of rows, for a table.

    Returns:
        The exit code.
    """
    try:
        with gathered_warnings() as warned:
            draw()
    except KeyboardInterrupt:
        print(f"\nstopped; {_kept(found.folder)}. Go on with: isosgd resume {found.folder}", file=sys.stderr)
        return STOPPED
    finish(args, found, warned, counts)
    return 0


def finish(args: argparse.Namespace, found: Run, warned: list[str], counts: dict[str, int] | None = None) -> None:
    """Say how good the draws are, and write the report."""
    from isosgd.commands.judgement import scores_of, verdict_of

    posterior = found.posterior()
    scores = scores_of(found, posterior)
    verdict = verdict_of(found, posterior)
    page = found.report() if args.report else None
    if args.json:
        print_json({
            "run": found.folder,
            "report": page,
            "counts": counts,
            "what_was_done": found.table.describe() if found.table is not None else [],
            "draws": posterior.num_draws,
            "chains": posterior.num_chains,
            "seconds": posterior.info.get("seconds"),
            "scores": scores,
            "verdict": verdict.as_dict() if verdict is not None else None,
            "warnings": warned,
        })  # fmt: skip
        return
    seconds = posterior.info.get("seconds")
    say(args, f"{len(posterior):,} draws" + (f" in {seconds:.0f} s" if seconds else ""))
    if scores:
        words = "held-out rows" if found.heldout is not None else "training rows (no rows were held out)"
        shown = ", ".join(f"{name} {value:.4g}" for name, value in scores.items() if isinstance(value, float))
        say(args, f"{words}: {shown}")
    for warning in warned:
        if verdict is None or UNSETTLED not in warning:
            say(args, f"note: {found.subject.named(warning)}")
    if verdict is not None:
        say(args, found.subject.named(str(verdict)))
        if verdict.words == "run longer" and (longer := found.longer(posterior)):
            say(args, f"to run longer: {longer}")
    if page is not None:
        say(args, f"report: {page}")
    if found.table is not None:
        say(args, f"next: isosgd predict {found.folder} NEW.csv")


def _kept(folder: Path) -> str:
    """What a run that was stopped has, in words."""
    import isosgd
    from isosgd.store.manifest import Manifest

    if not Manifest.begun(folder):
        return "nothing had been drawn yet"
    kept = isosgd.load(folder)
    return f"{kept.num_draws} draws of {kept.num_chains} chains are kept" if len(kept) else "nothing had been drawn yet"
