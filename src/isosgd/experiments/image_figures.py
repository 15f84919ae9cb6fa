"""Figures of the classification tables. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import math
import os

import numpy as np

from isosgd.experiments.demo_figures import SAMPLED, WRONG, styled
from isosgd.experiments.image_tables import LABELS, Result

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
