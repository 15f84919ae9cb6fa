"""Do the chains agree, do they have the target temperature, and what did the warm-up find?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isosgd.diagnostics import ess, rhat
from isosgd.diagnostics.verdict import RHAT, Verdict
from isosgd.report.plot import SERIES, Array, Plot, decades, evenly, limits, number
from isosgd.report.subject import Figure, Subject

TRACED = 64  # predictions whose R-hat is shown
POINTS = 200  # of a trace that are drawn
MOST_LAYERS = 18
MOST_DRAWN = len(SERIES)  # chains of a plot


def agreement(traces: Array, log_likelihood: Array | None) -> tuple[Figure | None, list[Figure]]:
    """R-hat of all predictions; traces and rank plots of the worst and a typical one, and of the log likelihood.

    Args:
        traces: of predictions, ``[chains, draws, n]``.
        log_likelihood: mean over rows, ``[chains, draws]``.
    """
    some = traces[..., evenly(traces.shape[-1], TRACED)]
    found, draws = rhat(some), ess(some)
    if not np.isfinite(found).any():
        return None, []
    order = np.argsort(np.where(np.isfinite(found), found, -np.inf))
    chosen = {
        "Prediction with the largest R-hat": some[..., order[-1]],
        "A typical prediction": some[..., order[len(order) // 2]],
    }
    if log_likelihood is not None:
        chosen["Mean log likelihood of the rows"] = log_likelihood
    figures = []
    for name, values in chosen.items():
        figures.append(_trace(name, values))
        if len(values) > 1:
            figures.append(_ranks(name, values))
    return _overview(found, draws, traces.shape) if len(found) > 1 else None, figures


def _trace(name: str, values: Array) -> Figure:
    chains, draws = values.shape
    at = evenly(draws, POINTS)
    plot = Plot((1, max(draws, 2)), limits(values), xlabel="draw", ylabel="value", height=220)
    for k in range(min(chains, MOST_DRAWN)):
        plot.line(at + 1, values[k, at], SERIES[k], style="thin", label=f"chain {k + 1}")
    r, e = float(rhat(values)), float(ess(values))
    return Figure(
        name,
        plot.svg(f"{name}, the trace of each chain; R-hat {number(r)}."),
        f"R-hat {_rhat_text(r)}; {number(e, 2)} effective of {chains * draws:,} draws. Good traces overlap.",
    )


def _ranks(name: str, values: Array) -> Figure:
    """Ranks among the draws of all chains: even for each chain when they sample the same."""
    chains, draws = values.shape
    ranks = values.ravel().argsort(kind="stable").argsort(kind="stable").reshape(chains, draws)
    bins = int(np.clip(draws // 8, 4, 20))
    edges = np.linspace(0, chains * draws, bins + 1)
    counts = np.stack([np.histogram(row, edges)[0] for row in ranks]).astype(np.float64)
    mean = draws / bins
    error = 2 * math.sqrt(mean * (1 - 1 / bins))
    plot = Plot(
        (0, chains * draws), (0, max(float(counts[:MOST_DRAWN].max()), mean + error) * 1.06),
        xlabel="rank among all draws", ylabel="draws", height=220,
    )  # fmt: skip
    plot.band(edges[[0, -1]], (max(mean - error, 0),) * 2, (mean + error,) * 2, "grey", label="even, ± 2 se")
    for k in range(min(chains, MOST_DRAWN)):
        plot.line(np.repeat(edges, 2)[1:-1], np.repeat(counts[k], 2), SERIES[k], style="thin")
    return Figure(
        f"{name}: ranks",
        plot.svg(f"Histogram of the ranks of each chain's draws, for {name}."),
        "Within the grey band the chains sample the same distribution. Autocorrelated draws stray further.",
    )


def _overview(found: Array, draws: Array, shape: Sequence[int]) -> Figure:
    top = max(float(np.nanmax(found)), RHAT) + 0.02
    plot = Plot(
        (0, max(float(np.nanmax(draws)) * 1.05, 1)), (min(0.99, float(np.nanmin(found))), top + 0.05 * (top - 1)),
        xlabel="effective draws", ylabel="R-hat",
    )  # fmt: skip
    plot.line(plot.x, (RHAT, RHAT), "grey", style="dashed", label=f"R-hat {RHAT:g}: chains agree below")
    plot.dots(draws, found, "a", label="a prediction", radius=3)
    share = float(np.mean(found <= RHAT))
    return Figure(
        "R-hat and effective draws of predictions",
        plot.svg(f"R-hat against effective draws; the largest R-hat is {number(float(np.nanmax(found)))}."),
        f"{100 * share:.0f}% of {len(found)} predictions are below the line; there are {shape[0] * shape[1]:,} draws.",
    )


def temperatures(verdict: Verdict, subject: Subject) -> Figure | None:
    """The temperature meter's reading of each layer."""
    shown = [r for r in verdict.readings if math.isfinite(r.temperature) and math.isfinite(r.error)][:MOST_LAYERS]
    if not shown:
        return None
    value = np.array([r.temperature for r in shown])
    error = np.array([min(2 * r.error, 3 * verdict.temperature) for r in shown])
    low, high = limits(np.clip(value - error, 0, None), value + error, [0.0, 2 * verdict.temperature])
    plot = _rows(
        [_layer("all parameters" if r.name == "all" else subject.layer(r.name)) for r in shown],
        (low, high),
        "temperature",
    )
    plot.line((verdict.temperature,) * 2, plot.y, "grey", style="dashed", label=f"target: {verdict.temperature:g}")
    for k, (v, e) in enumerate(zip(value, error, strict=True)):
        plot.line((v - e, v + e), (-k, -k), "a")
    plot.dots(value, -np.arange(len(shown)), "a", radius=3.4, label="read, ± 2 standard errors")
    return Figure(
        "Temperature by layer",
        plot.svg("Temperature read from draws and gradients for each layer."),
        "Read from the draws and the gradients at them. Too high: the draws are too spread out; too low: not enough. "
        "Readings of layers with few effective draws are uncertain.",
    )


def rates(reports: Sequence[Mapping[str, Any]], subject: Subject) -> list[Figure]:
    """Rates of the layers, and how much of their noise comes from the gradients."""
    names = [str(group["name"]) for group in reports[0].get("groups", ())][:MOST_LAYERS] if reports else []
    if not names:
        return []

    def each(what: str) -> Array:
        tables = [{str(g["name"]): g.get(what) for g in report["groups"]} for report in reports]
        return np.array([[np.nan if t.get(n) is None else t[n] for n in names] for t in tables], dtype=np.float64)

    labels = [_layer(subject.layer(name)) for name in names]
    found = []
    rate = each("rate")
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log10(rate)
    if np.isfinite(power).any():
        low, high = limits(power[np.isfinite(power)], margin=0.08)
        low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
        plot = _rows(labels, (low, high), "rate", xticks=decades(low, high))
        _dots_by_chain(plot, power)
        found.append(
            Figure(
                "Rates by layer",
                plot.svg("Rate of each layer in each chain, on a logarithmic axis."),
                "A dot for each chain. The warm-up sets the rates from gradient noise and curvature.",
            )
        )
    share = each("noise_share")
    if np.isfinite(share).any() and np.nanmax(share) > 0:  # none with all data in a batch
        plot = _rows(labels, (0, max(100.0, float(np.nanmax(share)) * 105)), "% of the composite noise")
        _dots_by_chain(plot, 100 * share)
        found.append(
            Figure(
                "Noise by layer",
                plot.svg("Share of gradient noise in the composite noise of each layer."),
                "The share of the noise that minibatches bring; the sampler injects the rest.",
            )
        )
    return found


def _rows(labels: Sequence[str], x: tuple[float, float], xlabel: str, **more: Any) -> Plot:
    """Axes with one row for each label, from the top."""
    ticks = [(-float(k), label) for k, label in enumerate(labels)]
    return Plot(x, (-len(labels) + 0.4, 0.6), xlabel=xlabel, yticks=ticks, height=62 + 26 * len(labels), **more)


def _dots_by_chain(plot: Plot, values: Array) -> None:
    chains = min(len(values), MOST_DRAWN)
    for k in range(chains):
        at = -np.arange(values.shape[1]) + (0.0 if chains == 1 else 0.16 * (2 * k / (chains - 1) - 1))
        there = np.isfinite(values[k])
        plot.dots(values[k][there], at[there], SERIES[k], label=f"chain {k + 1}" if chains > 1 else "", radius=3.2)


def _layer(name: str) -> str:
    return name if len(name) <= 24 else "…" + name[-23:]


def _rhat_text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not known"
