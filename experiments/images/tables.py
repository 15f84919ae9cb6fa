"""The classification tables: results as JSON, ours beside the paper's.

A result is one network on one data set, all methods and seeds, kept as a JSON file:

- ``format``: 1, the version of this layout.
- ``data``, ``model``: what it is.
- ``settings``: the recipe of the network, by name.
- ``ladder``: for each method the mean negative log likelihood on the held-out tenth by temperature, a mean over the
  pilots, null where a chain diverged; ``single`` are the pilots' models without sampling.
- ``together``: the same of predictions averaged over all pilots, which is an ensemble for ``single``; absent in files
  that were made with one pilot by older versions.
- ``rows``: an object for each method: ``row`` (its name), ``temperature``, and ``scores``, one for each seed:
  ``accuracy`` in percent, ``mnll``, ``ece``, ``brier``, for MNIST ``auroc`` and ``fpr95`` of the entropy against
  notMNIST and ``entropies``, histograms of equal bins from 0 to log 10 of both; for CIFAR-10 ``mirrored``, accuracy and
  MNLL when predictions are also averaged over an image and its mirror image; ``gradients``, ``seconds`` (predictions
  included, training of the start not), ``notes`` and whether it ``diverged``.
- ``command`` that made it, ``versions`` of what it ran on by name, ``hardware`` in words.

This puts the tables and figures into the page, between the marks that have the names of the files:

    python -m experiments.images.tables [--results results/classification]
        [--docs docs/classification.md]
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command import plain
from experiments.pages import NONE, plus_minus, put, read_json, table, write_json
from isosgd.demo.figures import SAMPLED, WRONG, styled

FORMAT = 1
Ladder = dict[str, dict[str, float | None]]  # by method and temperature
MIRRORED = "mirrored "  # before the name of a measure
MIRRORED_HEADS = ("accuracy", "MNLL")
TITLES = {
    "lenet5": "LeNet-5 on MNIST",
    "resnet18": "ResNet-18 on CIFAR-10",
    "resnet56": "ResNet-56 on CIFAR-10",
    "vgg16": "VGG-16 on CIFAR-10",
}
LABELS = {
    "single": "one trained model",
    "alpha-c": "I-SGD α-c",
    "alpha-c-slr": "I-SGD α-c, SLR",
    "G-b": "I-SGD G-b",
    "G-b-slr": "I-SGD G-b, SLR",
    "G-c": "I-SGD G-c",
    "G-c-slr": "I-SGD G-c, SLR",
    "windowed": "I-SGD windowed",
    "vsgd": "V-SGD",
    "sghmc": "SGHMC",
    "csghmc": "cSGHMC",
    "swag": "SWAG",
    "mcdropout": "MC-dropout",
    "ensemble": "deep ensemble",
    "ours": "I-SGD, ours",
}
PAPER: dict[str, dict[str, tuple[float, float, float | None, float | None]]] = {
    "lenet5": {
        "alpha-c": (99.42, 0.03, 0.0222, 0.0010),
        "G-b": (99.35, 0.05, 0.0226, 0.0010),
        "G-b-slr": (99.42, 0.03, 0.0222, 0.0014),
        "mcdropout": (99.38, 0.02, 0.0242, 0.0017),
        "swag": (99.14, 0.07, 0.0291, 0.0012),
        "vsgd": (99.41, 0.03, 0.0224, 0.0012),
    },
    "resnet18": {"alpha-c": (95.38, 0.12, 0.1794, 0.0044), "csghmc": (95.73, 0.03, None, None)},
    "resnet56": {
        "alpha-c": (94.37, 0.15, 0.2011, 0.0035),
        "G-b": (94.07, 0.02, 0.1949, 0.0046),
        "G-b-slr": (93.80, 0.21, 0.2627, 0.0099),
        "G-c": (94.06, 0.08, 0.1897, 0.0022),
        "G-c-slr": (94.39, 0.19, 0.2027, 0.0037),
        "mcdropout": (95.15, 0.10, 0.1734, 0.0033),
        "swag": (94.90, 0.08, 0.1551, 0.0016),
        "vsgd": (93.82, 0.19, 0.2664, 0.0100),
    },
    "vgg16": {
        "alpha-c": (92.73, 0.07, 0.3577, 0.0046),
        "G-b-slr": (92.93, 0.10, 0.3136, 0.0085),
        "G-c": (92.94, 0.11, 0.2644, 0.0068),
        "G-c-slr": (92.91, 0.08, 0.3389, 0.0063),
        "mcdropout": (92.71, 0.12, 0.2470, 0.0067),
        "swag": (93.66, 0.13, 0.1946, 0.0036),
        "vsgd": (93.02, 0.06, 0.3313, 0.0062),
    },
}
"""By network and method: accuracy, its ±, MNLL, its ±, of Franzese et al. (2020), over five seeds."""


@dataclass
class Score:
    """What a method reached with one seed; see the module's page."""

    seed: int
    accuracy: float | None = None
    mnll: float | None = None
    ece: float | None = None
    brier: float | None = None
    auroc: float | None = None
    fpr95: float | None = None
    entropies: dict[str, list[int]] = field(default_factory=dict)
    mirrored: dict[str, float | None] = field(default_factory=dict)
    gradients: int = 0
    seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)
    diverged: bool = False

    def value(self, measure: str) -> float | None:
        """A measure by its name, ``accuracy``, or that of predictions for both mirror images, ``mirrored accuracy``."""
        if measure.startswith(MIRRORED):
            return self.mirrored.get(measure.removeprefix(MIRRORED))
        found: float | None = getattr(self, measure)
        return found

    def words(self) -> str:
        """For a line on a terminal."""
        if self.diverged or self.accuracy is None:
            return "diverged"
        outside = "" if self.auroc is None else f", AUROC {self.auroc:.4f}"
        return (
            f"{self.accuracy:.2f}%, MNLL {self.mnll:.4f}, ECE {self.ece:.4f}, Brier {self.brier:.4f}{outside} "
            f"({self.seconds:.1f} s)"
        )


@dataclass
class Row:
    """A method, with its scores for each seed."""

    row: str
    temperature: float | None
    scores: list[Score] = field(default_factory=list)

    def mean_and_deviation(self, measure: str) -> tuple[float, float]:
        """Over seeds; NaN where there is none, and for the deviation of one."""
        values = [v for s in self.scores if (v := s.value(measure)) is not None]
        if not values:
            return math.nan, math.nan
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


@dataclass
class Result:
    """One network; see the module's page."""

    data: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    ladder: Ladder = field(default_factory=dict)
    together: Ladder = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str = ""

    def add(self, row: str, temperature: float | None, score: Score) -> None:
        """Take in a score."""
        for known in self.rows:
            if known.row == row:
                known.scores = sorted([*known.scores, score], key=lambda s: s.seed)
                return
        self.rows.append(Row(row, temperature, [score]))

    def go_on(self, earlier: Result) -> None:
        """Take over what an earlier result of the same settings has."""
        if (self.data, self.model) != (earlier.data, earlier.model):
            raise ValueError(f"the earlier result is of {earlier.data}, {earlier.model}: give one of the same network")
        had = plain(earlier.settings)
        others = {k: (had[k], v) for k, v in plain(self.settings).items() if k in had and had[k] != v}
        if others:
            said = ", ".join(f"{name} = {old} (now {new})" for name, (old, new) in others.items())
            raise ValueError(f"the earlier result has {said}: go on with the same settings, or write to another folder")
        self.settings, self.rows = self.settings | earlier.settings, earlier.rows
        self.ladder, self.together = earlier.ladder, earlier.together
        self.command = " && ".join(filter(None, (earlier.command, self.command)))
        self.hardware = _both(earlier.hardware, self.hardware)
        self.versions = {name: _both(earlier.versions.get(name, ""), v) for name, v in self.versions.items()}


def write(result: Result, path: str | os.PathLike[str]) -> None:
    """Write a result as strict JSON; what is not finite is null."""
    write_json(asdict(result), path, FORMAT)


def read(path: str | os.PathLike[str]) -> Result:
    """Read what `write` wrote."""
    found = read_json(path, FORMAT)
    known = {f.name for f in fields(Result)}
    rows = [Row(row["row"], row["temperature"], [Score(**s) for s in row["scores"]]) for row in found["rows"]]
    return Result(**{k: v for k, v in found.items() if k in known and k != "rows"}, rows=rows)


def _both(old: str, new: str) -> str:
    return ", ".join(dict.fromkeys(filter(None, [*old.split(", "), new])))


def markdown(results: Iterable[Result]) -> str:
    """Tables of all results, ours and the paper's side by side."""
    parts = []
    for result in results:
        seeds = max((len(row.scores) for row in result.rows), default=0)
        trained = f", starts of {result.settings['epochs']} epochs" if "epochs" in result.settings else ""
        title = f"## {TITLES.get(result.model, result.model)}{trained}{_spacing(result)}"
        parts.append(f"{title}\n\n{result.hardware}, {seeds} seed(s).\n")
        parts.append(_scores(result))
        pilots = result.settings.get("pilots", 1)
        if result.ladder:
            each = f", mean of {pilots} models" if pilots > 1 else ""
            parts.append(_ladder(result.ladder, each, "the trained model alone"))
        if result.together and pilots > 1:
            parts.append(_ladder(result.together, f" when {pilots} models predict together", "without sampling"))
        parts.append(f"Made by `{result.command}`.\n" if result.command else "")
    return "\n".join(part for part in parts if part)


def _spacing(result: Result) -> str:
    """Where draws of the paper's settings are as far apart as it has them, though others of that network are not."""
    spacing = result.settings.get("alpha", (0, 0))[1]
    whole = "paper_keep" in result.settings and result.settings["paper_keep"] is None
    return f", the paper's spacing of {spacing:,} steps" if whole and result.data == "cifar10" else ""


def _scores(result: Result) -> str:
    outside = any(s.auroc is not None for row in result.rows for s in row.scores)
    mirrored = any(s.mirrored for row in result.rows for s in row.scores)
    columns = {"accuracy": ("accuracy", 2), "MNLL": ("mnll", 4), "ECE": ("ece", 4), "Brier": ("brier", 4)}
    columns |= {"AUROC": ("auroc", 4)} if outside else {}
    if mirrored:
        columns |= {f"{head}, mirrored too": (MIRRORED + columns[head][0], columns[head][1]) for head in MIRRORED_HEADS}
    columns["seconds"] = ("seconds", 1)
    lines = []
    for row in result.rows:
        name = row.row.removesuffix(" paper")
        label = LABELS.get(name, name) + (", paper's setting" if name != row.row else "")
        diverged = sum(s.diverged for s in row.scores)
        cells = [label, NONE if row.temperature is None else f"{row.temperature:g}"]
        cells += [plus_minus(*row.mean_and_deviation(measure), digits) for measure, digits in columns.values()]
        printed = PAPER.get(result.model, {}).get(name) if name != row.row or name in RIVALS else None
        cells.append(NONE if printed is None else _printed(printed))
        if diverged:
            cells[0] += f" ({diverged} diverged)"
        lines.append(cells)
    return table(["method", "T", *columns, "paper"], lines) + "\n"


RIVALS = ("csghmc", "swag", "mcdropout")


def _printed(row: tuple[float, float, float | None, float | None]) -> str:
    accuracy, error, mnll, spread = row
    return f"{accuracy:.2f} ± {error:.2f}, " + (NONE if mnll is None else f"{mnll:.4f} ± {spread:.4f}")


def _ladder(ladder: Ladder, how: str, plain: str) -> str:
    steps = sorted({float(t) for name, found in ladder.items() for t in found if name != "single"})
    lines = []
    for name, found in ladder.items():
        if name == "single":
            continue
        at = {float(t): m for t, m in found.items()}
        said = [NONE if t not in at else "diverged" if at[t] is None else f"{at[t]:.4f}" for t in steps]
        lines.append([LABELS.get(name, name), *said])
    single = ladder.get("single", {}).get("0")
    alone = "" if single is None else f" ({plain}: {single:.4f})"
    title = f"MNLL on the held-out tenth of the training set by temperature{how}{alone}:\n\n"
    return title + table(["", *(f"{t:g}" for t in steps)], lines) + "\n"


SHOWN = ("single", "mcdropout", "swag", "csghmc", "ensemble", "ours")


@styled
def draw_entropies(result: Result, path: str | os.PathLike[str], classes: int = 10) -> None:
    """Entropies of predictions for the test set and for data from elsewhere, a panel for each method, all seeds.

    Args:
        result: with histograms of entropies.
        path: PNG or SVG to write.
        classes: of the predictions; their logarithm is the largest entropy.
    """
    from matplotlib.figure import Figure

    rows = [r for name in SHOWN for r in result.rows if r.row == name and any(s.entropies for s in r.scores)]
    if not rows:
        raise ValueError(f"the result of {result.model!r} has no histograms of entropies; there is nothing to draw")
    figure = Figure(figsize=(9.0, 2.0 * math.ceil(len(rows) / 3) + 0.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(math.ceil(len(rows) / 3), min(3, len(rows)), sharex=True, sharey=True))
    for panel in panels.flat[len(rows) :]:
        panel.set_visible(False)
    for panel, row in zip(panels.flat, rows, strict=False):
        for name, label, colour in (("test", "test set", SAMPLED), ("outside", "from elsewhere", WRONG)):
            counts = np.sum([s.entropies[name] for s in row.scores if s.entropies], axis=0)
            edges = np.linspace(0.0, math.log(classes), len(counts) + 1)
            panel.stairs(counts / counts.sum(), edges, fill=True, alpha=0.5, color=colour, label=label)
        mean, _ = row.mean_and_deviation("auroc")
        panel.set(title=f"{LABELS.get(row.row, row.row)}, AUROC {mean:.3f}", yscale="log", ylim=(1e-4, 1.0))
    for panel in panels.flat[max(0, len(rows) - 3) : len(rows)]:
        panel.set_xlabel("entropy of the prediction, nats")
    panels.flat[0].legend()
    figure.supylabel("share of images", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.images.tables", description="Tables of docs/classification.md from the results."
    )
    parser.add_argument("--results", type=Path, default=Path("results/classification"))
    parser.add_argument("--docs", type=Path, default=Path("docs/classification.md"))
    args = parser.parse_args()
    results = {path.stem: read(path) for path in sorted(args.results.glob("*.json"))}
    if not results:
        raise SystemExit(f"{args.results} holds no results: run `python -m experiments.images` first")
    text = args.docs.read_text()
    for name, result in results.items():
        text = put(text, name, markdown([result]))
        if any(score.entropies for row in result.rows for score in row.scores):
            draw_entropies(result, args.docs.parent / "img" / f"entropies-{result.model}.png")
    args.docs.write_text(text)


if __name__ == "__main__":
    main()
