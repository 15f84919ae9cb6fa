"""Tables of what `experiments.family` found: on a terminal, and in the documentation.

python -m experiments.family.tables results/family                        # print
python -m experiments.family.tables results/family --docs docs/methods.md  # write them into that page
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pages import NONE, put, table

Row = dict[str, Any]
COLUMNS = {  # what is shown, its head, and its form
    "mean_error": ("mean/sd", "8.3f"), "covariance_error": ("cov", "8.3f"), "w2": ("W2", "8.4f"),
    "min_ess": ("min ESS", "9.1f"), "ess_per_1000": ("ESS/1k", "9.2f"), "gradients": ("gradients", "9.0f"),
}  # fmt: skip
TITLES = {
    "toy-well-200": "The exact toy (200 examples, features over a whole period)",
    "logistic-cancer": "Logistic regression (breast cancer data, 569 examples, 30 features), against Hamiltonian Monte "
    "Carlo",
    "gauss-anisotropic": "Two dimensions of correlation .99, gradient noise with a shape of its own",
}


def read(folder: Path) -> list[Row]:
    """What was written by `experiments.family`, one problem a file."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    found = [part for part in found if "problem" in part]
    if not found:
        raise ValueError(f"{folder} holds no results: give the folder that experiments.family wrote with --out")
    return sorted(found, key=lambda part: ([*TITLES, part["problem"]].index(part["problem"]), part["problem"]))


def best(rows: list[Row], method: str) -> tuple[list[Row], list[Row]]:
    """Rows of a method at its defaults, and at the setting with the least mean W2 over repeats that all went well."""
    mine = [row for row in rows if row["method"] == method]
    tried: dict[str, list[Row]] = {}
    for row in mine:
        if row["options"]:
            tried.setdefault(json.dumps(row["options"]), []).append(row)
    good = [group for group in tried.values() if all("w2" in row for row in group)]
    tuned = min(good, key=lambda group: mean(group, "w2"), default=[])
    return [row for row in mine if not row["options"]], tuned


def at_edge(rows: list[Row], tuned: list[Row]) -> bool:
    """Whether the best setting is the smallest or the largest that was tried: a wider grid might hold a better one."""
    values = sorted({v for row in rows if row["method"] == tuned[0]["method"] for v in row["options"].values()})
    return next(iter(tuned[0]["options"].values())) in (values[0], values[-1])


def mean(group: Sequence[Row], key: str) -> float:
    """Over the repeats that went well."""
    found = [row[key] for row in group if "w2" in row]
    return float(np.mean(found)) if found else math.nan


def setting(group: list[Row]) -> str:
    """What an oracle chose, in words."""
    return ", ".join(f"{name} {value:.2g}" for name, value in group[0]["options"].items())


def methods(rows: list[Row]) -> list[str]:
    """Those that were run, the nearest to the posterior first: at its defaults or at an oracle's setting."""

    def nearest(method: str) -> float:
        found = [mean(group, "w2") for group in best(rows, method) if group]
        return min((w2 for w2 in found if math.isfinite(w2)), default=math.inf)

    return sorted(dict.fromkeys(row["method"] for row in rows), key=nearest)


def show(part: Row) -> None:
    """One problem on a terminal."""
    heads = " ".join(f"{head:>{form.split('.')[0]}}" for head, form in COLUMNS.values())
    print(f"\n{part['problem']}\n{'method':<15} {'':<16} {heads} {'seconds':>8}")
    for method in methods(part["results"]):
        own, tuned = best(part["results"], method)
        line(method, "defaults", own)
        if tuned:
            line(method, setting(tuned) + (" (edge)" if at_edge(part["results"], tuned) else ""), tuned)
    print(verdict(part["results"]))


def line(method: str, label: str, group: list[Row]) -> None:
    """One line: the mean over repeats that went well."""
    cells = [f"{mean(group, key):{form}}" for key, (_, form) in COLUMNS.items()]
    failed = sum("failed" in row for row in group)
    note = f"  {failed} of {len(group)} failed" if failed else ""
    seconds = np.mean([row["seconds"] for row in group]) if group else math.nan
    print(f"{method:<15} {label:<16} {' '.join(cells)} {seconds:8.1f}{note}")


def verdict(rows: list[Row]) -> str:
    """I-SGD at its defaults against the best that a rival reaches at an oracle's setting."""
    own = mean(best(rows, "isgd")[0], "w2")
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if not name.startswith("isgd")]
    tuned = {name: best(rows, name)[1] for name in names}
    w2 = {name: mean(group, "w2") for name, group in tuned.items() if group}
    if not w2 or not math.isfinite(own):
        return "Not all of it was run: there is nothing to compare yet."
    rival = min(w2, key=lambda name: w2[name])
    sign = "no farther than" if own <= w2[rival] else "farther than"
    return (
        f"I-SGD at its defaults is {own:.4f} away, {sign} the best rival with an oracle: "
        f"`{rival}` at {setting(tuned[rival])}, {w2[rival]:.4f}."
    )


def markdown(part: Row) -> str:
    """One problem as a table: a line for each method, at its defaults and at the oracle's setting."""
    heads = ["means", "covariance", "W2", "ESS / 1,000", "gradients"]
    keys = {"mean_error": ".3f", "covariance_error": ".3f", "w2": ".3f", "ess_per_1000": ".2f", "gradients": ",.0f"}
    lines = []
    for method in methods(part["results"]):
        own, tuned = best(part["results"], method)
        chosen = setting(tuned) + (" †" if at_edge(part["results"], tuned) else "") if tuned else NONE
        failed = sum("failed" in row for row in own)
        label = f"`{method}`" + (f" ({failed} of {len(own)} failed)" if failed else "")
        both = [cell(mean(group, key), form) for group in (own, tuned) for key, form in keys.items()]
        lines.append([label, *both[: len(keys)], chosen, *both[len(keys) :]])
    found = table(["Method", *heads, "oracle's choice", *heads], lines)
    return f"### {TITLES.get(part['problem'], part['problem'])}\n\n{found}\n\n{verdict(part['results'])}\n"


def cell(value: float, form: str) -> str:
    """A number, or a dash where there is none."""
    return f"{value:{form}}" if math.isfinite(value) else NONE


def page(parts: list[Row]) -> str:
    """All problems, and how they were run."""
    first = parts[0]
    machine, versions = first["machine"], first["versions"]
    about = (
        f"{first['gradients']:,} gradients in {first['chains']} chains, warm-up included, mean of "
        f"{first['repeats']} repeats; one core of a {machine['cores']}-core {machine['kind']} machine for each run, "
        f"torch {versions['torch'].split('+')[0]} (`{first['command']}`). † the best setting is the first or the last "
        "of the grid."
    )
    return "\n".join([about, "", *(markdown(part) for part in parts)])


def renewed(text: str, parts: list[Row]) -> str:
    """A page with its tables as they are now."""
    return put(text, "family", page(parts))


def main(arguments: list[str] | None = None) -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.family.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="that experiments.family wrote with --out")
    parser.add_argument("--docs", type=Path, help="a page to write the tables into, between its marks")
    args = parser.parse_args(arguments)
    parts = read(args.folder)
    if args.docs:
        args.docs.write_text(renewed(args.docs.read_text(), parts))
        return
    for part in parts:
        show(part)


if __name__ == "__main__":
    main()
