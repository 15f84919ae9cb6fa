"""Every method that `isosgd.sample` knows by name: samplers of the posterior, and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from isosgd.baselines import BASELINES
from isosgd.samplers import REGISTRY, Method

EVERY: Mapping[str, Method] = MappingProxyType({**REGISTRY, **BASELINES})
GIVEN = {"batch_size", "budget", "sets"}  # settings that `sample` gives by itself
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->"


def methods() -> list[dict[str, Any]]:
    """Every method with its family, what it targets, where it departs from its paper, and its settings and defaults.

    Those of the families ``langevin`` and ``hamiltonian`` are also optimizers, the classes in `isosgd.METHODS`. That of
    the family ``metropolis``, HMC, takes all data for every gradient, and runs through `isosgd.sample`. Those of the
    family ``baseline`` are not samplers of the posterior: they yield draws of something else, for comparison.

    Example:
        >>> {row["family"] for row in methods()} == {"langevin", "hamiltonian", "metropolis", "baseline"}
        True
        >>> swag = next(row for row in methods() if row["name"] == "swag")
        >>> swag["settings"]["rank"]
        20
    """
    return [method.row(name) for name, method in EVERY.items()]


def tables() -> str:
    """The registry in Markdown: what each method draws from, then its settings."""
    rows = methods()
    lines = ["| Method | Family | Draws from | Paper | Where we depart from it |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row['name']}`", row["family"], row["targets"], row["paper"], row["departures"])
        lines.append("| " + " | ".join(cells) + " |")
    shared = set.intersection(*({*row["settings"].items()} for row in rows if row["family"] != "baseline"))
    common = [f"`{name}={value!r}`" for name, value in rows[0]["settings"].items() if (name, value) in shared]
    lines += [
        "",
        f"Settings of all samplers: {', '.join(common)}.",
        "",
        "| Method | Settings of its own |",
        "|---|---|",
    ]
    for row in rows:
        mine = {
            name: value for name, value in row["settings"].items() if name not in GIVEN and (name, value) not in shared
        }
        own = [f"`{name}={value!r}`" for name, value in mine.items()]
        lines.append(f"| `{row['name']}` | {', '.join(own) or 'none'} |")
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """A page with its tables as they are now.

    ``python -c "from isosgd.sampling.methods import renewed; print(renewed(open('docs/methods.md').read()), end='')"``
    prints that page.
    """
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no place for tables: put {BEGIN.strip()!r} and {END!r} into it")
    return before + BEGIN + tables() + END + after
