"""The command line: ``isosgd COMMAND``; the commands are the modules of `isosgd.commands`.

Exit codes: 0 when it went well, 1 when it did not, 2 when it was asked wrongly, 130 when Ctrl-C ended it.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence

import isosgd
from isosgd.commands import audit, diagnose, fit, methods, predict, report, resume, sample
from isosgd.commands.common import STOPPED, said
from isosgd.store import DamagedError

TRACEBACK = "ISOSGD_TRACEBACK"
BENCH_MOVED = (
    "bench has left the package; from a clone of the repository run python -m experiments.uci, "
    "python -m experiments.images mnist, or python -m experiments.images cifar10, with the same options"
)
COMMANDS = {
    "fit": fit,
    "predict": predict,
    "sample": sample,
    "resume": resume,
    "diagnose": diagnose,
    "report": report,
    "methods": methods,
    "audit": audit,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    try:
        if given[:1] == ["demo"]:  # it has a parser of its own
            from isosgd.demo.__main__ import main as demo

            return demo(given[1:])
        if given[:1] == ["bench"]:
            print(f"isosgd: {BENCH_MOVED}", file=sys.stderr)
            return 2
        args = parser().parse_args(given)
        args.line = shlex.join(["isosgd", *given])
        return int(COMMANDS[args.command].run(args))
    except KeyboardInterrupt as stopped:
        print(f"\nisosgd: {str(stopped) or 'stopped; results that were finished are kept'}", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `isosgd predict ... | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError) as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"isosgd: {_words(error, args)}", file=sys.stderr)
        return 1


def _words(error: Exception, args: argparse.Namespace) -> str:
    """What went wrong, in a line or two, and what would mend it where that is known."""
    if isinstance(error, DamagedError) and hasattr(args, "run"):
        mend = "--drop-damaged does without its draws" if hasattr(args, "drop_damaged") else "put back a copy of it"
        return f"{args.run}: {error}; {mend}"
    if isinstance(error, OSError) and error.strerror:
        kinds = {
            errno.ENOENT: "there is no such file or folder",
            errno.EISDIR: "that is a folder; name a file",
            errno.EEXIST: "that is a file; name a folder",
            errno.ENOTDIR: "a part of that is a file, not a folder",
        }
        words = kinds.get(error.errno or 0, error.strerror) if error.filename else error.strerror
        return f"{error.filename}: {words}" if error.filename else words
    if isinstance(error, RuntimeError) and not isinstance(error, isosgd.DivergedError):  # of torch, mostly
        return f"{said(error)} ({TRACEBACK}=1 in the environment shows where)"
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
    for name, module in COMMANDS.items():
        line = (module.__doc__ or "").splitlines()[0].rstrip(".")
        module.add(commands.add_parser(name, help=line[:1].lower() + line[1:]))
    return top
