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
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
Ladder = dict[str, dict[str, float | None]]  # by method and temperature
NONE = "–"
MIRRORED = "mirrored "  # before the name of a measure
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
        had = _plain(earlier.settings)
        others = {k: (had[k], v) for k, v in _plain(self.settings).items() if k in had and had[k] != v}
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
    text = json.dumps(_plain({"format": FORMAT, **asdict(result)}), indent=1, allow_nan=False)
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_suffix(".part")
    half.write_text(text + "\n")
    os.replace(half, place)


def read(path: str | os.PathLike[str]) -> Result:
    """Read what `write` wrote."""
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away, or make it again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no result of this format ({FORMAT}); make it again with this version")
    known = {f.name for f in fields(Result)}
    rows = [Row(row["row"], row["temperature"], [Score(**s) for s in row["scores"]]) for row in found["rows"]]
    return Result(**{k: v for k, v in found.items() if k in known and k != "rows"}, rows=rows)


def _both(old: str, new: str) -> str:
    return ", ".join(dict.fromkeys(filter(None, [*old.split(", "), new])))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    more = ["AUROC"] if outside else []
    more += ["accuracy, mirrored too", "MNLL, mirrored too"] if mirrored else []
    head = ["method", "T", "accuracy", "MNLL", "ECE", "Brier", *more, "seconds", "paper"]
    lines = []
    for row in result.rows:
        name = row.row.removesuffix(" paper")
        label = LABELS.get(name, name) + (", paper's setting" if name != row.row else "")
        diverged = sum(s.diverged for s in row.scores)
        cells = [label, NONE if row.temperature is None else f"{row.temperature:g}"]
        cells += [_cell(row, "accuracy", 2), *(_cell(row, m, 4) for m in ("mnll", "ece", "brier"))]
        cells += [_cell(row, "auroc", 4)] if outside else []
        if mirrored:
            cells += [_cell(row, MIRRORED + "accuracy", 2), _cell(row, MIRRORED + "mnll", 4)]
        cells.append(_cell(row, "seconds", 1))
        printed = PAPER.get(result.model, {}).get(name) if name != row.row or name in RIVALS else None
        cells.append(NONE if printed is None else _printed(printed))
        if diverged:
            cells[0] += f" ({diverged} diverged)"
        lines.append(cells)
    return _table(head, lines)


RIVALS = ("csghmc", "swag", "mcdropout")


def _printed(row: tuple[float, float, float | None, float | None]) -> str:
    accuracy, error, mnll, spread = row
    return f"{accuracy:.2f} ± {error:.2f}, " + (NONE if mnll is None else f"{mnll:.4f} ± {spread:.4f}")


def _cell(row: Row, measure: str, digits: int) -> str:
    mean, deviation = row.mean_and_deviation(measure)
    if math.isnan(mean):
        return NONE
    return f"{mean:.{digits}f}" + ("" if math.isnan(deviation) else f" ± {deviation:.{digits}f}")


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
    return title + _table(["", *(f"{t:g}" for t in steps)], lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
