"""Figures of the demo. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

F = TypeVar("F", bound=Callable[..., None])

# Okabe and Ito's colours, which are distinct with any colour vision.
EXACT, SAMPLED, WRONG, POINTS = "#4d4d4d", "#0072b2", "#d55e00", "#9a9a9a"
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}

Array = NDArray[np.float64]


def styled(draw: F) -> F:
    """Decorator: draw in our style without changing the user's settings."""

    @wraps(draw)
    def inner(*args: Any, **kwargs: Any) -> None:
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            draw(*args, **kwargs)

    return cast("F", inner)


@styled
def draw_toy(methods: dict[str, tuple[dict[str, Any], dict[str, Any]]], path: Path) -> None:
    """Exact and sampled predictions, a column for each method.

    Args:
        methods: for each label its numbers (of `isosgd.demo.toy.compare`) and its arrays (``grid``, ``x``, ``y``,
            ``noise_sd``, and mean and standard deviation of the function, exact and sampled).
        path: PNG to write.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(3.1 * len(methods), 5.6), layout="constrained")
    ratios = {"height_ratios": [1, 1.15]}
    rows = figure.subplots(2, len(methods), sharex=True, sharey="row", squeeze=False, gridspec_kw=ratios)
    for column, (label, (numbers, a)) in enumerate(methods.items()):
        above, below = rows[0][column], rows[1][column]
        spread = 2 * np.sqrt(a["exact_sd"] ** 2 + a["noise_sd"] ** 2)
        above.fill_between(a["grid"], a["exact_mean"] - spread, a["exact_mean"] + spread, color=EXACT, alpha=0.25, lw=0)
        above.plot(a["x"], a["y"], ".", color=POINTS, ms=3)
        above.plot(a["grid"], a["exact_mean"], color=EXACT, lw=2.2)
        above.plot(a["grid"], a["mean"], color=SAMPLED, lw=1.0)
        above.set_title(label, fontweight="bold")
        found = f"$W_2$ = {numbers['w2']:.3f}\nvariance {numbers['trace_ratio']:.2f} × exact"
        below.text(0.04, 0.97, found, transform=below.transAxes, va="top")
        _band(below, a["grid"], 0 * a["grid"], 2 * a["exact_sd"], EXACT, 0.25, "exact")
        _band(below, a["grid"], a["mean"] - a["exact_mean"], 2 * a["sd"], SAMPLED, 0.22, "sampled")
        below.set(xlabel="x", xlim=(-np.pi, np.pi), xticks=[-np.pi, 0, np.pi], xticklabels=["−π", "0", "π"])
    rows[0][0].set_ylabel("y: data and predictions")
    rows[1][0].set_ylabel("f(x) − exact mean, ± 2 sd")
    rows[1][0].legend(loc="lower left", ncols=2)
    low, high = rows[1][0].get_ylim()
    rows[1][0].set_ylim(1.25 * low, 1.45 * high)  # room for text
    figure.suptitle("Posterior predictive of the toy regression: exact (grey) and sampled (blue)", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _band(axes: Axes, x: Array, middle: Array, half: Array, colour: str, alpha: float, label: str) -> None:
    axes.fill_between(x, middle - half, middle + half, color=colour, alpha=alpha, lw=0, label=label)
    axes.plot(x, middle, color=colour, lw=1.2)
    for edge in (middle - half, middle + half):
        axes.plot(x, edge, color=colour, lw=0.8)
