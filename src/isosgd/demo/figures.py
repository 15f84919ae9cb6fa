"""Figures of the demo. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

F = TypeVar("F", bound=Callable[..., None])

# Okabe and Ito's colours: told apart with any colour vision.
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
    """Draw in our style and leave the user's settings alone."""

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
    figure, rows = _subplots(2, len(methods), (3.1 * len(methods), 5.6), share="row", height_ratios=[1, 1.15])
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
    rows[1][0].set_ylim(1.25 * low, 1.45 * high)  # room for the words
    figure.suptitle("Posterior predictive of the toy regression: exact (grey) and sampled (blue)", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _band(axes: Axes, x: Array, middle: Array, half: Array, colour: str, alpha: float, label: str) -> None:
    axes.fill_between(x, middle - half, middle + half, color=colour, alpha=alpha, lw=0, label=label)
    axes.plot(x, middle, color=colour, lw=1.2)
    for edge in (middle - half, middle + half):
        axes.plot(x, edge, color=colour, lw=0.8)


@styled
def draw_digits(arrays: dict[str, Any], path: Path, hide: str = "") -> None:
    """Is it sure where it is right? Entropy of right and wrong predictions, and reliability.

    Args:
        arrays: labels ``y`` and ``probabilities``, for each method ``[n, classes]``.
        path: PNG to write.
        hide: a method to leave out.
    """
    y = np.asarray(arrays["y"])
    methods = {name: np.asarray(p) for name, p in arrays["probabilities"].items() if name != hide}
    figure, rows = _subplots(1, len(methods) + 1, (3.6 * (len(methods) + 1), 3.4))
    colours = dict(zip(methods, (EXACT, SAMPLED), strict=False))
    bins = np.linspace(0.0, np.log(next(iter(methods.values())).shape[1]), 24)
    for axes, (name, p) in zip(rows[0], methods.items(), strict=False):
        entropy = -(p * np.log(np.clip(p, 1e-12, 1.0))).sum(1)
        right = p.argmax(1) == y
        axes.hist(entropy[right], bins, color=SAMPLED, alpha=0.75, label=f"right ({right.sum()})")
        axes.hist(entropy[~right], bins, color=WRONG, alpha=0.85, label=f"wrong ({(~right).sum()})")
        axes.set(yscale="symlog", xlabel="entropy of the prediction (nats)", title=name)
        axes.legend(loc="upper right")
    tallest = max(axes.get_ylim()[1] for axes in rows[0][:-1])
    for axes in rows[0][:-1]:
        axes.set_ylim(0, tallest)
        axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    rows[0][0].set_ylabel("test images")
    last = rows[0][-1]
    last.plot([0, 1], [0, 1], color=POINTS, lw=1, ls="--", label="perfect")
    for name, p in methods.items():
        confidence, accuracy, error = reliability(p, y)
        last.errorbar(confidence, accuracy, 2 * error, color=colours[name], marker="o", ms=4, lw=1.2, label=name)
    last.set(xlabel="confidence", ylabel="share that is right", title="Reliability (± 2 standard errors)")
    low = min(float(reliability(p, y)[0].min()) for p in methods.values())
    last.set(xlim=(low - 0.08, 1.02), ylim=(max(0.0, low - 0.25), 1.04))
    last.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)


def reliability(probabilities: Array, y: NDArray[Any], bins: int = 8) -> tuple[Array, Array, Array]:
    """Mean confidence, accuracy and its standard error in bins of equally many examples."""
    confidence = probabilities.max(1)
    right = (probabilities.argmax(1) == y).astype(float)
    parts = np.array_split(np.argsort(confidence), bins)
    accuracy = np.array([right[part].mean() for part in parts])
    # One example more of each kind keeps the error of an all-right bin from being zero.
    error = np.array(
        [np.sqrt((k := right[part].sum() + 1) * (len(part) + 2 - k)) / (len(part) + 2) ** 1.5 for part in parts]
    )
    return np.array([confidence[part].mean() for part in parts]), accuracy, error


def _subplots(
    rows: int,
    columns: int,
    size: tuple[float, float],
    *,
    share: Literal["row"] | bool = False,
    height_ratios: list[float] | None = None,
) -> tuple[Figure, Any]:
    """A figure of its own, without pyplot: no display is needed, and no global state is left behind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(
        rows, columns, sharex=bool(share), sharey=share, squeeze=False, gridspec_kw={"height_ratios": height_ratios}
    )
    return figure, axes
