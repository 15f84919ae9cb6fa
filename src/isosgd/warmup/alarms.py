"""Warnings at the end of a run: one per cause, for all chains that have it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.errors import warn_caller
from isosgd.geometry.base import MOST_EXCESS
from isosgd.samplers import ISGD, Sampler
from isosgd.samplers.schedules import SPREAD, Cycles
from isosgd.warmup.reports import WarmupReport

CLIPPED_ALARM = 0.05
LOADER_ALARM = 0.02
RISE_ALARM = 5.0  # standard deviations of a minibatch's loss
EXCESS_ALARM = 3.0 * MOST_EXCESS
Late = Tensor | None  # mean loss of each chain in the second half of the draws


def warn_of(run: Chains, reports: list[WarmupReport], late: list[Tensor], first: int) -> None:
    """Check chains after their last draw and warn about problems.

    Args:
        run: the chains.
        reports: of their warm-up.
        late: losses of minibatches in the second half of the draws.
        first: number of the first chain.
    """
    alive = [k for k in range(run.count) if k not in run.failures]
    losses = torch.stack(late).double().mean(0).cpu() if late else None
    for check in (_unsettled, _clipped, _hot, _biased, _in_order, _risen, _short_stages):
        cases = [(k, message) for k in alive if (message := check(run, reports[k], k, losses))]
        if cases:
            k, message = cases[0]
            others = f" (and {len(cases) - 1} other of {len(alive)} chains)" if len(cases) > 1 else ""
            warn_caller(f"chain {first + k}{others}: {message}")


def _unsettled(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    return "" if report.settled else f"the warm-up did not settle; {report.reason}."


def _clipped(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    for group in run.sampler.param_groups:
        clipped = float(run.each(run.sampler.clipped_share(group))[k])
        if clipped > CLIPPED_ALARM:
            return (
                f"{100 * clipped:.0f}% of the gradient noise of group {group['name']!r} exceeds lambda where the chain "
                "now is, so that the draws are too widely spread. Use scheme='windowed', a longer warmup= or a lower "
                "temperature."
            )
    return ""


def _hot(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    """Noise that a geometry does not express."""
    geometry = run.geometry
    if geometry is None or not geometry.known or (excess := float(geometry.excess_temperature()[k])) <= EXCESS_ALARM:
        return ""
    if geometry.name == "full":
        return (
            f"gradient noise is larger where the chain now is than it was on average, and raises the temperature by "
            f"{100 * excess:.0f}% in the worst direction. A larger batch_size= or a longer warmup= would help."
        )
    return (
        f"gradient noise that structure {geometry.name!r} does not express raises the temperature by "
        f"{100 * excess:.0f}% in the worst direction. A larger batch_size=, structure='full' or 'layer' would help."
    )


def _biased(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    sampler = run.sampler
    if sampler.targets != Sampler.targets:
        return ""
    limit = 2.0 * sampler.bias
    corrected = isinstance(sampler, ISGD) or sampler.corrected
    for found in report.groups:
        excess = found.predicted_bias + (0.0 if corrected else found.noise_share)
        if excess > 2.0 * limit or found.predicted_bias > limit:
            return (
                f"posterior variances of group {found.name!r} come out too large by about {100 * excess:.0f}%: its "
                f"rate of {found.rate:.3g} is too high for its curvature or its gradient noise. Lower it, or let the "
                "warm-up set it."
            )
    return ""


def _in_order(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    """Batches without replacement."""
    share = max((g.noise_share for g in report.groups if math.isfinite(g.noise_share)), default=0.0)
    if run.batches.independent or share <= LOADER_ALARM:
        return ""
    return (
        "the batches are not drawn independently (a shuffled loader goes through the data without replacement), so "
        f"their noise cancels over an epoch. It is {100 * share:.0f}% of the composite noise: posterior variances may "
        "come out too small by up to that. Pass the tensors themselves, or a DataLoader with "
        "RandomSampler(replacement=True)."
    )


def _risen(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    """A chain that has left the region in which its rates were found. HMC is exact at any step size."""
    if report.loss is None or late is None or run.hmc is not None:
        return ""
    before, spread = report.loss
    now = float(late[k])
    if now <= before + RISE_ALARM * max(spread, 1e-3 * abs(before)):
        return ""
    return (
        f"the mean loss rose from {before:.4g} in the warm-up to {now:.4g} in the second half of the draws: the rates "
        "were found elsewhere, and the draws are not to be trusted. A longer warmup= or a smaller bias= would help."
    )


def _short_stages(run: Chains, report: WarmupReport, k: int, late: Late) -> str:
    """Cycles whose sampling stage is too short for a chain to spread."""
    schedule, spacing = run.sampler.schedule, report.keep_every
    if not isinstance(schedule, Cycles) or spacing is None or run.heating is not None:
        return ""
    group = run.sampler.param_groups[0]
    cycle, stage = group["cycle"], schedule.stage(group)
    if SPREAD * stage >= spacing:
        return ""
    return (
        f"a sampling stage of cycle = {cycle} counts as {stage:.0f} steps at the full rate, but draws should be "
        f"{spacing} apart: each exploration leaves the chain at a mode, and posterior variances come out too small. "
        f"Leave cycle= out, or give at least {cycle * spacing / (SPREAD * stage):.0f}."
    )
