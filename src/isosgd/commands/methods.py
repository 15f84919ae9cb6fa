"""List every method."""

from __future__ import annotations

import argparse

from isosgd.commands.common import add_json, print_json


def add(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description = "List every method that `isosgd sample --method` takes, with what it targets."
    parser.epilog = "example: isosgd methods --json"
    add_json(parser, "methods, with settings and defaults,")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    from isosgd import methods

    rows = methods()
    if args.json:
        print_json(rows)
        return 0
    wide = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{wide}}  {row['family']:<12} {row['targets']}")
    return 0
