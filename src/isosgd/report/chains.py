"""Figures of the report about chains: agreement, temperature, and rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isosgd.diagnostics import ess, rhat
from isosgd.diagnostics.verdict import Verdict
from isosgd.posterior.draws import evenly
from isosgd.report.page import Figure, Subject
from isosgd.report.plot import SERIES, Array, Plot, decades, limits, number

TRACED = 64  # predictions whose R-hat is shown
POINTS = 200  # of a trace in a plot
MOST_LAYERS = 18
MOST_DRAWN = len(SERIES)  # chains in a plot


def agreement(traces: Array, log_likelihood: Array) -> list[Figure]:
    """Traces and rank plots of the worst and a typical prediction, and of the log likelihood.

    Args:
        traces: of predictions, ``[chains, draws, n]``.
        log_likelihood: mean over rows, ``[chains, draws]``.
    """
    some = traces[..., evenly(traces.shape[-1], TRACED)]
    found = rhat(some)
    if not np.isfinite(found).any():
        return []
    order = np.argsort(np.where(np.isfinite(found), found, -np.inf))
    chosen = {
        "Prediction with the largest R-hat": some[..., order[-1]],
        "A typical prediction": some[..., order[len(order) // 2]],
        "Mean log likelihood of the rows": log_likelihood,
    }
    figures = []
    for name, values in chosen.items():
        figures.append(_trace(name, values))
        if len(values) > 1:
            figures.append(_ranks(name, values))
    return figures


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
        f"R-hat {number(r, 4)}; {number(e, 2)} effective of {chains * draws:,} draws. Good traces overlap."
        + _drawn(chains),
    )


def _drawn(chains: int) -> str:
    """A sentence on chains that figures leave out."""
    return f" The first {MOST_DRAWN} of {chains} chains are drawn." if chains > MOST_DRAWN else ""


def _ranks(name: str, values: Array) -> Figure:
    """Ranks among the draws of all chains, which are uniform for each chain if they sample the same density."""
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
        "Within the grey band the chains sample the same distribution. Autocorrelated draws stray further."
        + _drawn(chains),
    )


def temperatures(verdict: Verdict, subject: Subject) -> Figure | None:
    """The measured temperature of each layer."""
    shown = [r for r in verdict.readings if math.isfinite(r.temperature) and math.isfinite(r.error)][:MOST_LAYERS]
    if not shown:
        return None
    value = np.array([r.temperature for r in shown])
    error = np.array([min(2 * r.error, 3 * verdict.temperature) for r in shown])
    low, high = limits(np.clip(value - error, 0, None), value + error, [0.0, 2 * verdict.temperature])
    labels = [_layer("all parameters" if r.name == "all" else subject.layer(r.name)) for r in shown]
    plot = _rows(labels, (low, high), "temperature")
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


def rates(reports: Sequence[Mapping[str, Any]], subject: Subject) -> Figure | None:
    """Rates of the layers in each chain."""
    names = [str(group["name"]) for group in reports[0].get("groups", ())][:MOST_LAYERS] if reports else []
    tables = [{str(g["name"]): g.get("rate") for g in report["groups"]} for report in reports]
    rate = np.array([[np.nan if t.get(n) is None else t[n] for n in names] for t in tables], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log10(rate)
    if not np.isfinite(power).any():
        return None
    low, high = limits(power, margin=0.08)
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    plot = _rows([_layer(subject.layer(name)) for name in names], (low, high), "rate", xticks=decades(low, high))
    chains = min(len(power), MOST_DRAWN)
    for k in range(chains):
        at = -np.arange(len(names)) + (0.0 if chains == 1 else 0.16 * (2 * k / (chains - 1) - 1))
        there = np.isfinite(power[k])
        plot.dots(power[k][there], at[there], SERIES[k], label=f"chain {k + 1}" if chains > 1 else "", radius=3.2)
    return Figure(
        "Rates by layer",
        plot.svg("Rate of each layer in each chain, on a logarithmic axis."),
        "A dot for each chain. The warm-up sets the rates from gradient noise and curvature." + _drawn(len(power)),
    )


def _rows(labels: Sequence[str], x: tuple[float, float], xlabel: str, **more: Any) -> Plot:
    """Axes with one row per label, from the top."""
    ticks = [(-float(k), label) for k, label in enumerate(labels)]
    return Plot(x, (-len(labels) + 0.4, 0.6), xlabel=xlabel, yticks=ticks, height=62 + 26 * len(labels), **more)


def _layer(name: str) -> str:
    return name if len(name) <= 24 else "…" + name[-23:]
