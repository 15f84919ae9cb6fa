"""Figures of the UCI tables. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np

from isosgd.experiments.demo_figures import EXACT, POINTS, SAMPLED, WRONG, styled
from isosgd.experiments.uci_tables import MC_DROPOUT, SETS, Result, by_label, in_order, pairs

COLOURS = (SAMPLED, WRONG, EXACT, "#009e73", "#cc79a7", "#e69f00")
FAR = 10.0  # times the middle one; beyond, differences are drawn on a logarithmic scale


@styled
def draw_paired(results: Iterable[Result], path: str | os.PathLike[str]) -> None:
    """Paired differences from tuned MC-dropout: every split as a dot, means with two standard errors.

    Args:
        results: ours, and those of `mc_dropout` for the same sets.
        path: PNG or SVG to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    cells = by_label(results)
    labels = [label for label in cells if label != MC_DROPOUT]
    found = {measure: {label: pairs(cells, label, measure) for label in labels} for measure in ("rmse", "mnll")}
    sets = in_order({name for rows in found.values() for row in rows.values() for name in row})
    if not sets:
        raise ValueError("no set has both a result of ours and that of mc_dropout(set); there is nothing to pair")
    figure = Figure(figsize=(9.0, 1.6 + 0.22 * len(sets) * (1 + len(labels))), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (measure, rows) in zip(panels, found.items(), strict=True):
        panel.axvline(0, color=POINTS, lw=1)
        means = []
        for i, label in enumerate(labels):
            style = {"color": COLOURS[i % len(COLOURS)]}
            for name, pair in rows[label].items():
                scale = 100 / cells[MC_DROPOUT][name].mean_and_error("rmse")[0] if measure == "rmse" else 1.0
                height = sets.index(name) + 0.7 * ((i + 0.5) / len(labels) - 0.5)
                dots = [scale * x for x in pair.differences.values()]
                panel.plot(dots, [height] * len(dots), ".", alpha=0.3, ms=5, mew=0, **style)
                error = 2 * scale * pair.error if math.isfinite(pair.error) else 0.0
                panel.errorbar(scale * pair.mean, height, xerr=error, fmt="o", ms=5, **style)
                means.append(abs(scale * pair.mean))
        middle = float(np.median(means)) if means else 0.0
        if middle and max(means) > FAR * middle:
            panel.set_xscale("symlog", linthresh=middle)
    panels[0].set_yticks(range(len(sets)), [SETS.get(name, name) for name in sets])
    panels[0].invert_yaxis()
    panels[0].set(title="RMSE", xlabel="difference in % of MC-dropout's")
    panels[1].set(title="MNLL", xlabel="difference in nats")
    handles = [Line2D([], [], marker="o", ms=5, color=colour) for colour in COLOURS]
    handles = [handles[i % len(handles)] for i in range(len(labels))]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    figure.suptitle("Compared with tuned MC-dropout on the same splits: left of zero is better", x=0.01, ha="left")
    figure.savefig(path, dpi=150)
