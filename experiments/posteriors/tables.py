"""Tables and plots of what `python -m experiments.posteriors` found: on a terminal, and in the documentation.

    python -m experiments.posteriors.tables results/posteriors                          # print the tables
    python -m experiments.posteriors.tables results/posteriors --docs docs/posteriors.md  # write them into that page
    python -m experiments.posteriors.tables results/posteriors --plot docs/img/suite.png [--problems 'toy-*,gauss-*']

The argument is a folder with JSON files of ``python -m experiments.posteriors --json FILE``, or one of them. There are
three tables: how near the default comes to every posterior, run by run; the error of every method and structure; and
whether ``auto`` is ever worse than the best structure.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pages import put, table

Row = dict[str, Any]
DEFAULT, ORACLE = "isgd:auto", "@oracle"
ALLOWED = 1.1  # error of `auto` over that of the best structure
SIGMAS = 2.0
ORDER = (
    *("isgd:auto", "isgd:full", "isgd:lowrank", "isgd:kronecker", "isgd:diagonal", "isgd:layer", "isgd:single"),
    *("isgd-all:auto", "sgld", "sghmc", "adaptive-sghmc", "psgld"),
)


def read(place: Path) -> list[Row]:
    """All runs in a file or a folder; of one that is there twice, the later."""
    files = [place] if place.is_file() else sorted(place.glob("*.json"))
    kept = [json.loads(file.read_text()) for file in files]
    runs = [run for found in kept for run in (found if isinstance(found, list) else [found])]
    rows = {(row["problem"], row["method"], row["seed"]): row for run in runs for row in run["results"]}
    if not rows:
        raise ValueError(
            f"{place} holds no results: give a file or a folder that experiments.posteriors wrote with --json"
        )
    return list(rows.values())


def _place(method: str) -> tuple[int, str]:
    plain = method.removesuffix(ORACLE)
    return ORDER.index(plain) if plain in ORDER else len(ORDER), method


def by(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    """Rows with the same value of a column together, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def done(rows: list[Row]) -> list[Row]:
    """Runs that came to an end."""
    return [row for row in rows if "w2" in row]


def mean(rows: list[Row], key: str = "w2") -> float:
    """Over the runs that came to an end; infinite if one did not."""
    return float(np.mean([row[key] for row in rows])) if len(done(rows)) == len(rows) else math.inf


def spread(rows: list[Row], key: str = "w2") -> float:
    """Standard error of that mean, relative to it; a third, which is what single runs show, of one run alone."""
    values = [row[key] for row in done(rows)]
    return float(np.std(values, ddof=1) / math.sqrt(len(values)) / np.mean(values)) if len(values) > 1 else 0.33


def runs_table(rows: list[Row]) -> str:
    """Every run of the default, posterior by posterior."""

    def cells(own: list[Row], key: str, form: str) -> str:
        return ", ".join(format(row[key], form) if "w2" in row else "failed" for row in own)

    columns = (("mean_error", ".3f"), ("sd_error", ".3f"), ("w2", ".3f"), ("ess_per_1000", ".1f"))
    heads = ["posterior", "mean, in standard deviations", "standard deviation, log ratio", "2-Wasserstein over scale"]
    found = by([row for row in rows if row["method"] == DEFAULT], "problem")
    lines = ([name, *(cells(own, *column) for column in columns)] for name, own in sorted(found.items()))
    return table([*heads, "effective draws per 1,000 gradients"], lines)


def methods_table(rows: list[Row]) -> str:
    """2-Wasserstein distance over scale of every method and structure, the mean over runs; the best in bold."""
    compared = {name: own for name, own in by(rows, "problem").items() if len(by(own, "method")) >= 3}
    methods = sorted({row["method"] for own in compared.values() for row in own}, key=_place)
    lines = []
    for name, own in sorted(compared.items()):
        means = {method: mean(group) for method, group in by(own, "method").items()}
        shown = {method: "failed" if math.isinf(value) else f"{value:.3f}" for method, value in means.items()}
        best = min(means, key=lambda method: means[method])
        shown[best] = f"**{shown[best]}**"
        lines.append([name, *(shown.get(method, "") for method in methods)])
    return table(["posterior", *(f"`{method}`" for method in methods)], lines)


def never_worse(rows: list[Row]) -> str:
    """`auto` against the best structure, each by its mean over runs."""
    lines = []
    for name, own in sorted(by(rows, "problem").items()):
        groups = {m: group for m, group in by(own, "method").items() if m.startswith("isgd:")}
        auto, others = groups.pop(DEFAULT, []), {m: group for m, group in groups.items() if done(group)}
        if not done(auto) or not others:
            continue
        best = min(others, key=lambda method: mean(others[method]))
        ratio = mean(auto) / mean(others[best])
        error = ratio * math.hypot(spread(auto), spread(others[best]))
        verdict = "yes" if ratio <= ALLOWED else "within chance" if ratio - SIGMAS * error <= ALLOWED else "no"
        lines.append([name, f"`{best.removeprefix('isgd:')}`", f"{ratio:.2f} ± {error:.2f}", verdict])
    return table(["posterior", "best other structure", "error of `auto` over its error", f"at most {ALLOWED}"], lines)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "Every run of the default.": runs_table,
    "2-Wasserstein distance over scale, by structure and method, at equal gradients.": methods_table,
    "Is `auto` ever worse than the best structure?": never_worse,
}


def plot(rows: list[Row], file: Path) -> None:
    """Error against gradients: a panel for each problem, a colour for each method, the mean over runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    problems = sorted({row["problem"] for row in rows})
    methods = sorted({row["method"] for row in rows}, key=_place)
    bases = list(dict.fromkeys(method.removesuffix(ORACLE) for method in methods))
    colours = {base: plt.get_cmap("tab20")(i % 20) for i, base in enumerate(bases)}
    style = {
        m: (colours[m.removesuffix(ORACLE)], ":" if ORACLE in m else "-" if "isgd" in m else "--") for m in methods
    }
    across = min(4, len(problems))
    down = math.ceil(len(problems) / across)
    figure, axes = plt.subplots(down, across, figsize=(3.6 * across, 2.7 * down), squeeze=False, layout="constrained")
    for axis, problem in zip(axes.flat, problems, strict=False):
        for method, group in by([r for r in rows if r["problem"] == problem and "curve" in r], "method").items():
            curves = [np.array([(p["gradients"], p["w2"]) for p in row["curve"]]).T for row in group]
            grid = np.geomspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 30)
            logs = [np.interp(grid, x, np.log(y)) for x, y in curves]
            colour, line = style[method]
            axis.loglog(grid, np.exp(np.mean(logs, 0)), color=colour, linestyle=line, linewidth=1.4)
        axis.set_title(problem, fontsize=8)
        axis.tick_params(labelsize=7, which="both")
    for axis in axes.flat[len(problems) :]:
        axis.axis("off")
    lines = [Line2D([], [], color=style[m][0], linestyle=style[m][1], label=m) for m in methods]
    figure.legend(handles=lines, loc="outside upper center", ncols=min(6, len(methods)), fontsize=8)
    figure.supxlabel("gradients, warm-up included", fontsize=9)
    figure.supylabel("2-Wasserstein over scale", fontsize=9)
    figure.savefig(file, dpi=80)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Print, write, draw."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.posteriors.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="a file or a folder that experiments.posteriors wrote")
    parser.add_argument("--docs", type=Path, help="a page to write the tables into")
    parser.add_argument("--plot", type=Path, help="draw error against gradients into this file")
    parser.add_argument("--problems", default="*", help="patterns of problems, with commas between (default all)")
    args = parser.parse_args(arguments)
    patterns = args.problems.split(",")
    rows = [row for row in read(args.results) if any(fnmatch.fnmatchcase(row["problem"], p) for p in patterns)]
    if args.plot:
        plot(rows, args.plot)
        return
    text = "\n\n".join(f"**{title}**\n\n{made(rows)}" for title, made in TABLES.items())
    print(text)
    if args.docs:
        args.docs.write_text(put(args.docs.read_text(), "suite", text))


if __name__ == "__main__":
    main()
