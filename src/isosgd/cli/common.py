"""Shared by the commands: output, strict JSON, warnings, threads and device."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from isosgd.diagnostics.summary import json_values
from isosgd.errors import SamplingWarning

STOPPED = 130  # the exit status of a shell after Ctrl-C


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """``--json``: results as JSON on standard output, text on standard error."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON; all other words go to stderr")


def add_machine(parser: argparse.ArgumentParser, threads: int | None = None) -> None:
    """``--device`` and ``--threads`` with a default number of threads."""
    parser.add_argument("--device", help="where to sample (default: the CPU)")
    usual = "as torch chooses" if threads is None else threads
    parser.add_argument("--threads", type=int, default=threads, help=f"threads of torch (default: {usual})")


def echo(args: argparse.Namespace, *lines: str) -> None:
    """Print text; to standard error if JSON or CSV goes to standard output."""
    quiet = getattr(args, "json", False) or getattr(args, "to_stdout", False)
    for line in lines:
        print(line, file=sys.stderr if quiet else sys.stdout, flush=True)


def print_json(value: Any) -> None:
    """Print strict JSON: non-finite numbers become null, and other types their text."""
    print(json.dumps(json_values(value), indent=1, allow_nan=False, default=str), flush=True)


def add_run(parser: argparse.ArgumentParser) -> None:
    """The argument RUN, and the option that says where its target comes from."""
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument(
        "--script", metavar="SCRIPT.py:target",
        help="what makes target and data, for a run that was begun from Python or whose script has moved",
    )  # fmt: skip


def add_damaged(parser: argparse.ArgumentParser) -> None:
    """The option to ignore damaged files."""
    parser.add_argument("--drop-damaged", action="store_true", help="do without draws in damaged files, and say so")


def use_machine(threads: int | None, device: str | None) -> None:
    """Set the number of threads and check the device, before anything is read."""
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises all of them
            raise ValueError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error


def max_seconds(args: argparse.Namespace) -> float | None:
    """``--minutes`` in seconds."""
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ValueError(f"--minutes {args.minutes:g} must be positive")
    return None if args.minutes is None else 60.0 * float(args.minutes)


def check_seed(seed: int, option: str = "--seed") -> None:
    """Check the range of a seed."""
    if seed < 0:
        raise ValueError(f"{option} {seed} must not be negative")


def check_folder(path: Path) -> None:
    """Check that ``--out`` can be the folder of a run, before anything is read."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out {path} is a file; name a folder for the run")


def check_file(path: Path | None) -> None:
    """Check that ``--out`` can be written, before anything is computed."""
    if path is not None and path.is_dir():
        raise ValueError(f"--out {path} is a folder; name a file")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")


@contextmanager
def gathered_warnings() -> Iterator[list[str]]:
    """Gather sampling warnings as sentences; others pass."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SamplingWarning)
        try:
            yield found
        finally:
            ours = [w for w in caught if issubclass(w.category, SamplingWarning)]
            found += dict.fromkeys(str(w.message) for w in ours)
    for other in caught:
        if other not in ours:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
