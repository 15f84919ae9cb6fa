"""What the commands of the experiments share: options of the machine, errors as lines, words and JSON apart."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isosgd.cli.common import STOPPED, add_json, add_machine, echo, print_json, use_machine

__all__ = ["add_json", "add_machine", "echo", "plain", "print_json", "run", "use_machine"]


def plain(value: Any) -> Any:
    """Values that strict JSON holds; of others their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def run(
    module: str,
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """Parse, run, and return an exit code: 0, 1 with a line that says what is wrong, 130 after Ctrl-C.

    Args:
        module: that ``python -m`` runs; the command line is kept with results as ``args.line``.
        parser: of its options.
        body: what to do with them.
        argv: what was given; ``sys.argv`` by default.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    args.line = shlex.join(["python", "-m", module, *given])
    try:
        body(args)
    except KeyboardInterrupt:
        print("\nstopped; results that were finished are kept", file=sys.stderr)
        return STOPPED
    except (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError) as error:
        if os.environ.get("ISOSGD_TRACEBACK"):
            raise
        print(f"{module}: {error}", file=sys.stderr)
        return 1
    return 0
