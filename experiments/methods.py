"""The tables of docs/methods.md, from the registry that `isosgd.methods` returns: ``python -m experiments.methods``."""

from __future__ import annotations

from pathlib import Path

from experiments.pages import put, table
from isosgd import methods

PAGE = Path(__file__).resolve().parents[1] / "docs" / "methods.md"
GIVEN = {"batch_size", "budget", "sets"}  # settings that `sample` gives by itself


def tables() -> str:
    """What each method draws from, then its settings."""
    rows = methods()
    known = [[f"`{row['name']}`", row["family"], row["targets"], row["paper"], row["departures"]] for row in rows]
    shared = set.intersection(*({*row["settings"].items()} for row in rows if row["family"] != "baseline"))
    common = [f"`{name}={value!r}`" for name, value in rows[0]["settings"].items() if (name, value) in shared]
    own = []
    for row in rows:
        mine = {name: x for name, x in row["settings"].items() if name not in GIVEN and (name, x) not in shared}
        own.append([f"`{row['name']}`", ", ".join(f"`{name}={value!r}`" for name, value in mine.items()) or "none"])
    head = ["Method", "Family", "Draws from", "Paper", "Where we depart from it"]
    parts = [table(head, known), f"Settings of all samplers: {', '.join(common)}."]
    return "\n\n".join([*parts, table(["Method", "Settings of its own"], own)])


def renewed(page: str) -> str:
    """A page with its tables as they are now."""
    return put(page, "tables", tables())


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
