"""Reports of the warm-up: rates by layer and relaxation times.

Along a direction of curvature h, a step at the rate r removes the share ``a = r h`` of the distance to the mean: the
relaxation time is ``1 / a`` steps, ``n / (N a)`` epochs, and an effective draw costs ``2 / a`` gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.geometry.base import Geometry
from isosgd.geometry.rule import Rule, variance_inflation
from isosgd.samplers import ISGD

Array = NDArray[np.float64]
PARTS = 10  # of a window, whose means are compared
SURE = 4.0  # standard errors
SHOWN = 9  # rates, from the largest to the smallest
OCTAVES = 3  # how often a batch is halved and doubled


@dataclass
class GroupReport:
    """What the warm-up found for one group (layer)."""

    name: str
    rate: float
    lam: float
    curvature: float
    rate_curvature: float
    predicted_bias: float = 0.0
    tail_index: float = math.nan
    noise_share: float = 0.0
    clipped_share: float = 0.0


@dataclass
class WarmupReport:
    """What a warm-up found for one chain.

    Attributes:
        settled: whether rates and loss stopped changing.
        reason: why not, and what would help; empty if settled.
        steps: gradients spent.
        optimisation: those of the initial optimisation.
        keep_every: spacing of draws, measured from the autocorrelation of predictions; None if not measured.
        loss: mean and standard deviation of the minibatches' loss in the last window; None if not measured.
        groups: one report for each layer.
        directions: rates and relaxation times along the directions of a geometry (see `directions`), or None.
        batch_sizes: cost and gain of other minibatch sizes, with a geometry (see `batch_sizes`).
        structure: the form of Lambda.
        restarts: how often the chain diverged and was restarted (see `isosgd.warmup.runaway`).
        conditioning: of a full matrix, the condition numbers that simpler forms would leave (see `Full.conditioning`).
        trajectory: of HMC, leapfrog steps of a trajectory.
        cycle: steps of a cycle, if heating has set its rate.
    """

    settled: bool
    reason: str
    steps: int
    optimisation: int
    keep_every: float | None
    groups: list[GroupReport] = field(default_factory=list)
    loss: tuple[float, float] | None = None
    directions: dict[str, Any] | None = None
    batch_sizes: list[dict[str, float]] = field(default_factory=list)
    structure: str | None = None
    restarts: int = 0
    conditioning: dict[str, float] | None = None
    trajectory: int | None = None
    cycle: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def drifting(losses: Array) -> str:
    """A message if the mean loss differs between the halves of a window, or an empty string."""
    if len(losses) < 2 * PARTS:
        return f"the last window of the warm-up had {len(losses)} steps only: give it more time, or a longer warmup="
    parts = np.array([part.mean() for part in np.array_split(losses, PARTS)])
    first, second = parts[: PARTS // 2], parts[PARTS // 2 :]
    drift = float(second.mean() - first.mean())
    deviation = math.sqrt(float(first.var(ddof=1) + second.var(ddof=1)) / len(first))
    if abs(drift) <= SURE * deviation or not deviation:
        return ""
    return (
        f"the mean loss still drifts (by {drift:+.3g}, {abs(drift) / deviation:.0f} standard errors, in the last "
        f"window of {len(losses)} steps): a longer warmup= or a start closer to a mode (init=) would help"
    )


def direction_reports(chains: Chains) -> list[dict[str, Any]]:
    """For each chain with a geometry: `directions`, `batch_sizes` and conditioning."""
    sampler, geometry = chains.sampler, chains.geometry
    if geometry is None or not isinstance(sampler, ISGD) or not bool((geometry.unit_rate > 0).all()):
        return [{} for _ in range(chains.count)]
    rule, conditioning = sampler.rule(), chains.conditioning()
    return [
        {"directions": own, "batch_sizes": batch_sizes(rule, curvature_ratio), "conditioning": conditioning}
        for own, curvature_ratio in zip(directions(geometry, rule), geometry.curvature_ratio, strict=True)
    ]


def group_reports(chains: Chains, curvatures: Array | None, tails: Sequence[float]) -> list[list[GroupReport]]:
    """A report for each chain and group, from curvatures ``[chains, groups]`` and the tail indices of groups."""
    sampler, rates = chains.sampler, chains.rates().cpu().numpy()
    curvatures = chains.curvatures().cpu().numpy() if curvatures is None else curvatures
    found: list[list[GroupReport]] = [[] for _ in range(chains.count)]
    for i, group in enumerate(sampler.param_groups):
        composite = sampler.friction * group["temperature"] / group["num_data"]  # times the rate
        counted, share = chains.each(1.0), chains.each(math.nan)  # shares of the composite noise: biasing; gradient's
        if chains.geometry is not None and isinstance(sampler, ISGD):
            share = (0.5 / (sampler.rule().batch_size * chains.geometry.factor)).clamp_max(1.0).double()
            counted = share if sampler.averaged else counted
        elif sampler.noise.of_group(group):
            lam = sampler.friction * group["temperature"] / (group["num_data"] * chains.each(group["rate"]))
            share = chains.each(sampler.noise_summary(group, "top")) / lam
        columns = torch.stack([counted, share, chains.each(sampler.clipped_share(group))]).cpu()
        for k, (counts, of_noise, clipped) in enumerate(columns.T.tolist()):
            rate, h = float(rates[k, i]), float(curvatures[k, i])
            found[k].append(
                GroupReport(
                    name=group["name"],
                    rate=rate,
                    lam=composite / rate if rate > 0 else math.inf,
                    curvature=h,
                    rate_curvature=rate * h,
                    predicted_bias=variance_inflation(rate * h, sampler.friction, counts) - 1.0,
                    tail_index=tails[i],
                    noise_share=of_noise,
                    clipped_share=clipped,
                )
            )
    return found


def directions(geometry: Geometry, rule: Rule) -> list[dict[str, Any]]:
    """For each chain, what is known of the directions of its geometry.

    ``count``: number of directions. ``rates``: a few, from the largest to the smallest. ``epochs_to_forget``:
    relaxation times along the fastest and the slowest direction, by the measured curvature (``full``) or by H.
    """
    rates, shares = geometry.principal_rates(), geometry.rate_curvatures()
    found = []
    for own, pulls in zip(rates.double().cpu(), shares.double().cpu(), strict=True):
        ordered = own.sort(descending=True).values
        shown = torch.linspace(0, len(own) - 1, min(SHOWN, len(own)), dtype=torch.float64).round().long()
        ends = (rule.batch_size / (rule.num_data * a) for a in (float(pulls.max()), float(pulls.min())))
        found.append({"count": len(own), "rates": ordered[shown].tolist(), "epochs_to_forget": list(ends)})
    return found


def batch_sizes(rule: Rule, curvature_ratio: Tensor) -> list[dict[str, float]]:
    """Cost and gain of other minibatch sizes, by the rule, for directions whose curvature is H.

    ``curvature_ratio`` is that of one chain. For each ``batch_size``: ``rate_curvature``, a; ``noise_share``, that of
    gradient noise in Lambda; ``epochs_to_forget``; and, for an effective draw, ``gradients_per_draw`` and
    ``examples_per_draw``.

    Example:
        >>> rule = Rule(num_data=1000, batch_size=32, temperature=1.0, bias=0.02, averaged=True)
        >>> for row in batch_sizes(rule, torch.ones(()))[::2]:
        ...     print(row["batch_size"], round(row["gradients_per_draw"]), round(row["examples_per_draw"]))
        4 500 2000
        16 125 2000
        64 31 2000
        256 14 3578
    """
    least, most = max(2, rule.batch_size >> OCTAVES), min(rule.num_data, rule.batch_size << OCTAVES)
    sizes = {rule.batch_size << k for k in range(OCTAVES + 1)} | {rule.batch_size >> k for k in range(OCTAVES + 1)}
    rows = []
    for n in sorted({rule.batch_size} | {min(max(n, least), most) for n in sizes}):
        factor = float(replace(rule, batch_size=n).factor(curvature_ratio))
        a = rule.scale / factor
        rows.append(
            {
                "batch_size": n,
                "rate_curvature": a,
                "noise_share": 0.5 / (n * factor),
                "epochs_to_forget": n / (rule.num_data * a),
                "gradients_per_draw": 2.0 / a,
                "examples_per_draw": 2.0 * n / a,
            }
        )
    return rows
