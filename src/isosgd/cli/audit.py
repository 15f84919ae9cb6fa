"""``isosgd audit``: what a sampling loop really samples, from its settings.

Exit status: 0 if nothing is wrong, 3 if there are findings, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from isosgd.diagnostics.audit import Loop, audit

HAS_FINDINGS = 3


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command: the fields of `Loop`, with their docstrings as help."""
    said = dict(re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", Loop.__doc__ or "", re.MULTILINE))
    for field in fields(Loop):
        kind = get_type_hints(Loop)[field.name]
        given: dict[str, Any] = {"required": field.default is MISSING, "help": " ".join(said[field.name].split())}
        if kind is bool:
            given |= {"action": "store_const", "const": True}
        elif get_origin(kind) is Literal:
            given["choices"] = get_args(kind)
        else:
            whole = int in (kind, *get_args(kind))
            given |= {"type": int if whole else float, "metavar": "COUNT" if whole else "NUMBER"}
        parser.add_argument(f"--{field.name.replace('_', '-')}", **given)
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run_audit(args: argparse.Namespace) -> int:
    """State the tempered posterior that a sampling loop targets, and what is wrong with it. Exit status: 0 if
    nothing is wrong, 3 if there are findings, 2 for wrong usage.

    example: isosgd audit --noise 0.0447 --lr 1e-3 --loss-reduction mean --num-data 60000 --weight-decay 5e-4
    """
    given = {name: value for name, value in vars(args).items() if name in Loop.__dataclass_fields__}
    try:
        found = audit(**{name: value for name, value in given.items() if value is not None})
    except (ValueError, TypeError) as error:
        print(f"isosgd audit: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    return 0 if found.clean else HAS_FINDINGS
