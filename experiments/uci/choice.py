"""How the model of the UCI regressions was chosen: on a tenth of the training rows, held out.

    python -m experiments.uci.choice --data-root DIR [--device cuda] [--jobs 16] [--out FILE]
    python -m experiments.uci.choice --docs docs/uci.md

Each candidate is sampled on all data, on all splits of the sets (Protein: the first two). Beside that: how many test
rows are copies of training rows. The second form makes the table of the page from the file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from experiments import pages
from experiments.data.uci import uci as read
from experiments.uci import runs as uci
from experiments.uci.model import Model
from experiments.uci.tables import SETS, in_order
from isosgd import priors

FREE = priors.HalfCauchy()


def around(median: float, spread: float = 0.2) -> priors.LogNormal:
    """A log-normal prior of scales."""
    return priors.LogNormal(median, sigma=spread)


WIDE = around(math.sqrt(10))
CANDIDATES = {
    "Student-t, 6; median 3.2, spread .2": Model("student", 6.0, WIDE),
    "Student-t, 6; half-Cauchy": Model("student", 6.0, FREE),
    "Student-t, 6; median 2, spread .2": Model("student", 6.0, around(2.0)),
    "Student-t, 6; median 5, spread .2": Model("student", 6.0, around(5.0)),
    "Student-t, 6; median 3.2, spread .5": Model("student", 6.0, around(math.sqrt(10), 0.5)),
    "Student-t, 4; median 3.2, spread .2": Model("student", 4.0, WIDE),
    "Student-t, 8; median 3.2, spread .2": Model("student", 8.0, WIDE),
    "Gaussian; median 3.2, spread .2": Model("gaussian", scales=WIDE),
    "Gaussian; half-Cauchy": Model("gaussian", scales=FREE),
    "by input; median 3.2, spread .2": Model("varying", scales=WIDE),
}
LARGE = "protein-tertiary-structure"


def one(name: str, candidate: str, root: Path | None, device: str | None) -> tuple[dict[str, Any], str, Any]:
    """One candidate on one set: its scores, the machine, versions."""
    torch.set_num_threads(1)
    setting = replace(uci.SETTINGS["isgd-all"], label=candidate, model=CANDIDATES[candidate])
    splits = range(2) if name == LARGE else None
    found = uci.run(name, setting, splits=splits, root=root, device=device, progress=False, validate=True)
    measures = ("rmse", "mnll", "coverage", "crps", "rhat", "seconds")
    scores = {measure: [round(x, 5) for x in found.values(measure).values()] for measure in measures}
    settings = {key: value for key, value in found.settings.items() if key != "engine"}
    return {"set": name, "candidate": candidate, "settings": settings, **scores}, found.hardware, found.versions


def copies(name: str, root: Path | None) -> float:
    """Share of the test rows that stand in the training part, too, with the same target."""
    found = read(name, root)
    rows = [row.numpy().tobytes() for row in torch.column_stack([found.x, found.y])]
    seen = [{rows[i] for i in train.tolist()} for train, _ in found.splits]
    among = [rows[i] in known for known, (_, test) in zip(seen, found.splits, strict=True) for i in test.tolist()]
    return sum(among) / len(among)


def table(content: dict[str, Any]) -> str:
    """For the page."""
    rows = content["rows"]
    sets = in_order({row["set"] for row in rows})
    cells = {(row["candidate"], row["set"]): row for row in rows}

    def cell(candidate: str, name: str) -> str:
        row = cells.get((candidate, name))
        if row is None:
            return pages.NONE
        return ", ".join(f"{sum(row[m]) / len(row[m]):.3f}" for m in ("rmse", "mnll"))

    head = ["noise; scales of the prior", *(SETS.get(name, name) for name in sets)]
    lines = ([candidate, *(cell(candidate, name) for name in sets)] for candidate in CANDIDATES)
    twice = ", ".join(f"{SETS[name]} {content['copies'][name]:.1%}" for name in sets)
    made = f"{content['hardware']}; torch {content['versions']['torch']}. Made by `{content['command']}`."
    return f"{pages.table(head, lines)}\n\nTest rows that stand in the training part, too: {twice}.\n{made}\n"


def main() -> None:
    """Run the candidates, or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.uci.choice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-root", type=Path, help="folder with uci/ (default: ISOSGD_DATA)")
    parser.add_argument("--device")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/uci/choice/candidates.json"))
    parser.add_argument("--docs", type=Path, help="write the table of OUT into this page, and run nothing")
    args = parser.parse_args()
    if args.docs:
        content = json.loads(args.out.read_text())
        args.docs.write_text(pages.put(args.docs.read_text(), "choice", table(content)))
        return
    command = f"python -m experiments.uci.choice --data-root DIR --jobs {args.jobs}"
    command += f" --device {args.device}" if args.device else ""
    # The largest set first, so that it is not what all others are waited for with.
    work = [(name, candidate) for name in sorted(SETS, key=lambda name: name != LARGE) for candidate in CANDIDATES]
    rows: list[dict[str, Any]] = []
    also = {"copies": {name: copies(name, args.data_root) for name in SETS}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), uci.end_with_parent) as pool:
        for job in as_completed([pool.submit(one, *given, args.data_root, args.device) for given in work]):
            last, hardware, versions = job.result()
            rows.append(last)
            means = " ".join(f"{m} {sum(last[m]) / max(len(last[m]), 1) or math.nan:.4f}" for m in ("rmse", "mnll"))
            line = f"{len(rows)} of {len(work)}: {last['set']}, {last['candidate']}: {means}"
            print(line, file=sys.stderr, flush=True)
            machine = {"hardware": hardware, "versions": versions}
            args.out.write_text(json.dumps({"format": 1, "command": command, **machine, **also, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
