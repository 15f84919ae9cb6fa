"""Commands for runs: sample a script's target, resume, merge, diagnose, report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import isosgd
from isosgd import Posterior
from isosgd.cli.common import (
    STOPPED,
    add_damaged,
    add_json,
    add_machine,
    add_run,
    check_file,
    check_folder,
    check_seed,
    echo,
    gathered_warnings,
    max_seconds,
    print_json,
    use_machine,
)
from isosgd.cli.folders import (
    MANIFEST,
    USUAL,
    Run,
    open_run,
    refuse_begun,
    run_of_script,
    split_place,
    write_note,
)
from isosgd.diagnostics.verdict import Verdict
from isosgd.report.predictions import evaluate, some
from isosgd.store.manifest import Manifest

UNSETTLED = "the warm-up did not settle"  # also part of the verdict


def add_sample(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("script", metavar="SCRIPT.py:target", help="a script, and the name of the target in it")
    parser.add_argument("--out", metavar="RUN", type=Path, help="folder of the run (default: runs/SCRIPT)")
    parser.add_argument("--method", help="one of `isosgd methods` (%(default)s)")
    parser.add_argument("--chains", type=int, help="(%(default)s)")
    parser.add_argument("--draws", type=_steps, help="of each chain; `auto` until predictions converge (%(default)s)")
    parser.add_argument("--budget", type=int, help="draws of each chain, at most, with --draws auto (default: 2000)")
    parser.add_argument(
        "--batch-size",
        type=_rows,
        help="examples of a minibatch; `all` is --method hmc (default: by the number of data)",
    )
    parser.add_argument("--warmup", type=_steps, help="gradients before the first draw (%(default)s)")
    parser.add_argument("--keep-every", type=_steps, help="steps between draws (%(default)s)")
    parser.add_argument("--temperature", type=float, help="(%(default)g)")
    parser.add_argument("--seed", type=int, help="(%(default)s)")
    parser.add_argument(
        "--store-dtype", choices=("float32", "bfloat16"), help="dtype in which draws are written (default: their own)"
    )
    parser.add_argument("--minutes", type=float, help="end in about so many, with fewer draws (default: no limit)")
    parser.set_defaults(**USUAL)
    parser.add_argument(
        "--option", action="append", default=[], type=_option, metavar="NAME=VALUE",
        help="a setting of the method, such as structure=layer; may be given again",
    )  # fmt: skip
    parser.add_argument("--no-report", dest="report", action="store_false", help="do not write report.html")
    add_machine(parser)
    add_json(parser, "the verdict")


def run_sample(args: argparse.Namespace) -> int:
    """Run a Python script and sample the isosgd.Target of that name in it, or that a function of that name
    returns. The script's `data` (a tuple of tensors, a DataLoader, or a function that makes one) is sampled
    with; `heldout`, in the same form, is for the report, and `init` is where chains start. torch is seeded
    before the script runs, so that a network it makes is the same when the run is resumed.

    example: isosgd sample model.py:target --out runs/model --chains 4
    """
    check_seed(args.seed)
    use_machine(args.threads, args.device)
    folder = args.out or Path("runs") / split_place(args.script)[0].stem
    check_folder(folder)
    refuse_begun(folder)
    found = run_of_script(folder, args.script)
    folder.mkdir(parents=True, exist_ok=True)
    write_note(found)

    seconds = max_seconds(args)

    def draw() -> Run:
        settings = {name: getattr(args, name) for name in USUAL} | dict(args.option)
        isosgd.sample(
            found.target, found.data, init=found.init, device=args.device, store=folder, max_seconds=seconds, **settings
        )
        return found

    return draw_and_judge(args, folder, draw)


def _rows(text: str) -> int | str:
    return text if text == "all" else int(text)


def _steps(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _option(text: str) -> tuple[str, Any]:
    """``NAME=VALUE``, with the value as JSON if it is valid, else as text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run(parser)
    parser.add_argument("--draws", type=int, help="of each chain, more than before (default: as many as before)")
    parser.add_argument("--budget", type=int, help="of a run with draws 'auto': draws of each chain, at most")
    parser.add_argument("--no-report", dest="report", action="store_false", help="do not write report.html")
    add_machine(parser)
    add_json(parser, "scores and verdict")


def run_resume(args: argparse.Namespace) -> int:
    """Continue a run where it was stopped, with the same settings. On a CPU its draws are bit for bit those of a
    run that was never stopped. A complete run is extended if --draws or --budget ask for more than it has, and
    is left as it is otherwise.

    examples: isosgd resume runs/houses; isosgd resume runs/houses --draws 400
    """
    found = open_run(args.run, args.script)
    if not (args.run / MANIFEST).exists():
        raise ValueError(f"{args.run} has no {MANIFEST}: the run was stopped before it began; start it again")
    info = isosgd.load(args.run).info
    use_machine(args.threads or info.get("threads"), args.device)  # another number of threads may round differently
    if info["complete"] and args.draws is None and args.budget is None:
        echo(args, f"{args.run} is complete")

    def draw() -> Run:
        if found.model is not None:
            from isosgd import sklearn

            sklearn.resume(args.run, draws=args.draws, device=args.device, verbose=True)
            return open_run(args.run)  # with the draws so far
        isosgd.resume(
            args.run, found.target, found.data, init=found.init, device=args.device, draws=args.draws,
            budget=args.budget,
        )  # fmt: skip
        return found

    return draw_and_judge(args, args.run, draw)


def add_merge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folders of the runs")
    parser.add_argument("--out", metavar="OUT", type=Path, required=True, help="folder of the merged run")
    add_json(parser, "chains and draws")


def run_merge(args: argparse.Namespace) -> int:
    """Merge several runs of the same target and data with different seeds, such as those of an array job, into
    one. Draws are copied; diagnose, report, predict and resume then use all chains.

    example: isosgd merge runs/houses-* --out runs/houses
    """
    check_folder(args.out)
    with gathered_warnings() as warned:
        found = isosgd.merge(args.runs, args.out)
    if args.json:
        print_json({"run": args.out, "chains": found.num_chains, "draws": found.num_draws, "warnings": warned})
    else:
        echo(args, f"{args.out}: {found.num_chains} chains of {len(args.runs)} runs, {found.num_draws} draws of each")
        echo(args, *(f"note: {warning}" for warning in warned))
        echo(args, f"next: isosgd diagnose {args.out}")
    return 0


def add_diagnose(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run(parser)
    add_damaged(parser)
    parser.add_argument(
        "--check", action="store_true", help="end with 1 unless the verdict is to trust it, for use in scripts"
    )
    add_json(parser, "summary and verdict")


def run_diagnose(args: argparse.Namespace) -> int:
    """Say whether to trust the draws of a run, to run longer, or that it samples something else, from R-hat and
    effective draws of predictions and the temperature of the draws by layer. An unfinished run is judged by its
    draws so far.

    example: isosgd diagnose runs/houses --json
    """
    found = open_run(args.run, args.script, args.drop_damaged)
    posterior = found.judged()
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
        echo(args, found.subject.named(str(verdict)), "", str(summary))
    return 0 if verdict.trusted or not args.check else 1


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run(parser)
    add_damaged(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="HTML file to write (default: RUN/report.html)")
    add_json(parser, "where it is and the verdict")


def run_report(args: argparse.Namespace) -> int:
    """Write one self-contained HTML file: the verdict, predictions on held-out rows, traces and ranks of the
    chains, R-hat and effective draws, temperature and rates by layer, settings and versions.

    example: isosgd report runs/houses --out houses.html
    """
    check_file(args.out)
    found = open_run(args.run, args.script, args.drop_damaged)
    page = found.report(args.out)
    if args.json:
        verdict = verdict_of(found, found.judged())
        print_json({"report": page, "verdict": verdict.as_dict() if verdict is not None else None})
    else:
        echo(args, f"report: {page}")
    return 0


# ---------------------------------------------------------------- draw, judge, report


def draw_and_judge(
    args: argparse.Namespace, folder: Path, draw: Callable[[], Run], counts: dict[str, int] | None = None
) -> int:
    """Draw into the folder of a run, print the verdict, and write the report; returns the exit code.

    ``counts`` are numbers of rows of a table.
    """
    try:
        with gathered_warnings() as warned:
            found = draw()
    except KeyboardInterrupt:
        print(f"\nstopped; {_kept(folder)}", file=sys.stderr)
        return STOPPED
    scores = scores_of(found, found.posterior())
    posterior = found.judged()
    verdict = verdict_of(found, posterior)
    page = found.report() if args.report else None
    if args.json:
        print_json({
            "run": found.folder,
            "report": page,
            "counts": counts,
            "what_was_done": found.subject.notes,
            "draws": posterior.num_draws,
            "chains": posterior.num_chains,
            "seconds": posterior.info.get("seconds"),
            "scores": scores,
            "verdict": verdict.as_dict() if verdict is not None else None,
            "warnings": warned,
        })  # fmt: skip
        return 0
    seconds = posterior.info.get("seconds")
    echo(args, f"{len(posterior):,} draws" + (f" in {seconds:.0f} s" if seconds else ""))
    if scores:
        words = "held-out rows" if found.heldout is not None else "training rows (no rows were held out)"
        shown = ", ".join(f"{name} {value:.4g}" for name, value in scores.items() if isinstance(value, float))
        echo(args, f"{words}: {shown}")
    for warning in warned:
        if verdict is None or UNSETTLED not in warning:
            echo(args, f"note: {found.subject.named(warning)}")
    if verdict is not None:
        longer = found.longer(posterior) if verdict.summary == "run longer" else ""
        echo(args, found.subject.named(str(replace(verdict, fixes=()) if longer else verdict)))
        if longer:
            echo(args, f"to run longer: {longer}")
    if page is not None:
        echo(args, f"report: {page}")
    if found.model is not None:
        echo(args, f"next: isosgd predict {found.folder} NEW.csv")
    return 0


def _kept(folder: Path) -> str:
    """A sentence about the draws of a stopped run."""
    if not (folder / MANIFEST).exists():
        return "nothing had been drawn yet. Start it again"
    kept = isosgd.load(folder) if Manifest.begun(folder) else None
    found = f"{kept.num_draws} draws of {kept.num_chains} chains are kept" if kept else "nothing had been drawn yet"
    return f"{found}. Go on with: isosgd resume {folder}"


def verdict_of(run: Run, posterior: Posterior) -> Verdict | None:
    """The verdict; None if there are too few draws, or the data come from a loader."""
    try:
        return posterior.trust(held_out=run.heldout)
    except ValueError:
        return None


def scores_of(run: Run, posterior: Posterior) -> dict[str, Any]:
    """Scores on the held-out rows of a table, else on its training rows; none for scripts."""
    if run.model is None:
        return {}
    rows = some(run.heldout if run.heldout is not None else run.data)
    found = evaluate(posterior, rows, run.scored())
    if found is None:  # several targets
        return {}
    return {"rows": len(rows[0]), **found.scores()}
