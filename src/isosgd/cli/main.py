"""The command line, ``isosgd COMMAND``: `tables` has fit and predict, `runs` the commands for all runs.

A command consists of a function that adds its arguments to a parser, and one that runs it and returns the exit code.
The docstring of the second is its ``--help``, with an example as the last paragraph. Errors that a user can fix are
``ValueError``, ``TypeError`` or ``OSError``; they are printed and end with 1.

Exit codes: 0 for success, 1 for an error, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import isosgd
from isosgd.cli import audit, runs, tables
from isosgd.cli.common import STOPPED, add_json, print_json
from isosgd.errors import first_line
from isosgd.store import DamagedError

TRACEBACK = "ISOSGD_TRACEBACK"


class Command(NamedTuple):
    """A command: its help line, the function that adds its arguments, and the function that runs it."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    try:
        if given[:1] == ["demo"]:  # it has its own parser
            from isosgd.demo.run import main as demo

            return demo(given[1:])
        args = parser().parse_args(given)
        args.line = shlex.join(["isosgd", *given])
        return int(COMMANDS[args.command].run(args))
    except KeyboardInterrupt as stopped:
        print(f"\nisosgd: {str(stopped) or 'stopped; results that were finished are kept'}", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `isosgd predict ... | head` closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError) as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"isosgd: {_message(error, args)}", file=sys.stderr)
        return 1


def _message(error: Exception, args: argparse.Namespace) -> str:
    """The error in a line or two, with the fix if it is known."""
    if isinstance(error, DamagedError) and hasattr(args, "run"):
        fix = "--drop-damaged does without its draws" if hasattr(args, "drop_damaged") else "put back a copy of it"
        return f"{args.run}: {error}; {fix}"
    if isinstance(error, OSError) and error.strerror:
        kinds = {
            errno.ENOENT: "there is no such file or folder",
            errno.EISDIR: "that is a folder; name a file",
            errno.EEXIST: "that is a file; name a folder",
            errno.ENOTDIR: "a part of that is a file, not a folder",
        }
        words = kinds.get(error.errno or 0, error.strerror) if error.filename else error.strerror
        return f"{error.filename}: {words}" if error.filename else words
    if isinstance(error, RuntimeError) and not isinstance(error, isosgd.DivergedError):  # mostly of torch
        return f"{first_line(error)} ({TRACEBACK}=1 in the environment shows where)"
    return str(error)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="isosgd",
        description="Bayesian PyTorch models by stochastic gradients.",
        epilog="example: isosgd fit table.csv --target price --out runs/price",
    )
    top.add_argument("--version", action="version", version=isosgd.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="sample posteriors that are known, and two real data sets", add_help=False)
    for name, command in COMMANDS.items():
        description, _, example = (inspect.getdoc(command.run) or "").rpartition("\n\n")
        command.add(commands.add_parser(name, help=command.help, description=description, epilog=example))
    return top


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_json(parser, "methods, with settings and defaults,")


def run_methods(args: argparse.Namespace) -> int:
    """List every method that `isosgd sample --method` takes, with what it targets.

    example: isosgd methods --json
    """
    rows = isosgd.methods()
    if args.json:
        print_json(rows)
        return 0
    wide = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{wide}}  {row['family']:<12} {row['targets']}")
    return 0


COMMANDS = {
    "fit": Command("sample the posterior of a network on a CSV or Parquet table", tables.add_fit, tables.run_fit),
    "predict": Command(
        "predict new rows: means and intervals, or class probabilities", tables.add_predict, tables.run_predict
    ),
    "sample": Command("sample a target that a Python script makes", runs.add_sample, runs.run_sample),
    "resume": Command("continue a stopped run, or extend one", runs.add_resume, runs.run_resume),
    "merge": Command("merge runs with different seeds", runs.add_merge, runs.run_merge),
    "diagnose": Command("say whether to believe a run, and why", runs.add_diagnose, runs.run_diagnose),
    "report": Command("write a report of a run as one HTML file", runs.add_report, runs.run_report),
    "methods": Command("list every method", add_methods, run_methods),
    "audit": Command(
        "state what a sampling loop really samples, from a description of it", audit.add_audit, audit.run_audit
    ),
}
