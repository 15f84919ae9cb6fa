"""The automatic warm-up: find the typical set and the rates, and check that the chains have settled.

1. *Initial optimisation*: momentum descent at temperature 0, at half the largest stable rate, until the loss no
   longer falls.
2. *Windows* of doubling length, in which the chains sample. Gradient noise and curvature are measured at the chains'
   positions; rates fall at once if they must and rise by at most a factor of 2 from window to window.
3. The chains have *settled* if in two successive windows no rate changed by more than a half and the loss did not
   drift. Rates are then frozen, as Theorem 1 requires.

Chains that run side by side share windows and budget; each has rates, losses and a verdict of its own.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.engine.leapfrog import LeapfrogMultiStep
from isosgd.geometry.base import FIRST_RATIO
from isosgd.noise.model import dot
from isosgd.noise.stable import TailMeter
from isosgd.progress import Progress
from isosgd.samplers import ISGD
from isosgd.samplers.own_warmup import SETTLED_RATIO, SURE, unsettled
from isosgd.warmup.base import PROBES, TAILS_EVERY, Array, Mark, Warmup, update_tails
from isosgd.warmup.heating import Heating
from isosgd.warmup.hmc import HMCWarmup
from isosgd.warmup.optimise import InitialOptimisation
from isosgd.warmup.reports import WarmupReport, direction_reports, drifting, group_reports
from isosgd.warmup.runaway import LOSSES, Runaway
from isosgd.warmup.scheme import SchemeWarmup

FIRST_WINDOW = 50
LEAST_LAST_WINDOW = 400
PROBE_EVERY = 10
SPLIT_EVERY = 2
ADAPT_EVERY = 20
VECTORS = 8  # noise vectors in the last window, over the least number for a geometry
EARLY_RISE = 10.0
MOST_STEPS = 20_000
MOST_OPTIMISATION_SHARE = 0.5
CHECK_SHARE, MOST_CHECKED = 0.05, 400  # of the budget, and gradients at most, to test the last rates ...
FALLING_SHARE, MOST_FALLING = 0.2, 4_000  # ... if they fell in the last window
LATE = "the chain ran away while its last rates were tried, and was restarted: a longer warmup= would help"
ENOUGH = 0.75  # share of the chains that must have settled; of many, some are unsettled by chance
MOST_TRIES = 4  # minibatches for each noise vector of the first estimate


def warmup_of(
    chains: Chains,
    steps: int | None,
    progress: Progress,
    mark: Mark = lambda state: None,
    multi_step: LeapfrogMultiStep | None = None,
) -> Warmup:
    """The warm-up for chains; after its ``run`` they are ready to sample, at frozen rates.

    Args:
        steps: gradients to spend on each chain; None for as many as it takes, up to a limit.
        mark: called between windows with a function that returns the state of the warm-up.
        multi_step: takes several leapfrog steps in a call.
    """
    given = MOST_STEPS if steps is None else steps, steps is not None, progress, mark
    if chains.heating is not None:
        return Heating(chains, *given)
    if chains.hmc is not None:
        return HMCWarmup(chains, *given, multi_step)
    by_scheme = isinstance(chains.sampler, ISGD) and chains.sampler.scheme != "windowed"
    return SchemeWarmup(chains, *given) if by_scheme else WindowedWarmup(chains, *given)


class WindowedWarmup(Warmup):
    """The warm-up of every sampler but HMC and the schemes of I-SGD."""

    kept = (*Warmup.kept, "curvatures", "settled_before", "fell", "optimisation", "runaway", "tails")

    def __init__(self, chains: Chains, budget: int, exact: bool, progress: Progress, mark: Mark) -> None:
        super().__init__(chains, budget, exact, progress, mark)  # stages: "start", "optimisation", "windows"
        self.length, self.measure_spacing = FIRST_WINDOW, True
        self.tails = [TailMeter() for _ in chains.sampler.param_groups]
        self.runaway = Runaway(chains)
        self.signal: list[Tensor] = []  # [chains, groups], on the device
        self.seen_curvatures: list[Tensor] = []
        self.curvatures: Array | None = None
        limit = int(MOST_OPTIMISATION_SHARE * budget)
        self.optimisation = InitialOptimisation(chains, limit, lambda: self.count("initial optimisation"), self.mark)
        self.settled_before = False
        self.fell = False  # whether most rates fell within the last window
        self.last = False  # whether this is the last window

    def check(self) -> None:
        if self.chains.warmed:
            return
        if self.budget < 2 * FIRST_WINDOW:
            raise ValueError(
                f"warmup = {self.budget} is too short to measure anything: give at least {2 * FIRST_WINDOW} "
                f"({8 * FIRST_WINDOW} or more to settle), 'auto', or 0 with a rate of your own"
            )
        if self.stage == "start":
            self._check_structure(1 + PROBES, self.total - self._check_steps())

    def _check_structure(self, spent: int, budget: int) -> None:
        """Raise if the budget does not suffice for a first estimate of the geometry."""
        geometry = self.chains.geometry
        if geometry is None:
            return
        needed = geometry.min_vectors + 4 * geometry.axes
        if spent + needed > budget:
            raise ValueError(
                f"warmup = {self.total} is too short for structure {geometry.name!r}, which needs {needed} gradients "
                f"after the initial optimisation for a first look at {geometry.total} parameters: give at least "
                f"{4 * needed}, or structure='layer'"
            )

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        chains, sampler, self.measure_spacing = self.chains, self.chains.sampler, measure_spacing
        self.check()
        if self.stage == "start" and chains.warmed:
            self._take_over()
        if self.stage == "start":
            self.chains.evaluate()
            self.count("starting")
            for _ in range(PROBES):
                self._probe("starting")
            self.stage = "optimisation"
        if self.stage == "optimisation" and not chains.trained:
            self.optimisation.run()
        self.budget = self.total - self._check_steps()
        reasons = self._windows()
        restarts = self.runaway.restarts
        self._check(self.total if self.exact else min(self.total, self.spent + self._check_steps()))
        late = (self.runaway.restarts > restarts).tolist()
        reasons = [reason or (LATE if ran else "") for reason, ran in zip(reasons, late, strict=True)]
        keep = self._spacing() if measure_spacing else None
        groups = group_reports(chains, self.curvatures, [meter.tail_index() for meter in self.tails])
        more = direction_reports(chains)
        sampler.freeze()
        return [
            WarmupReport(
                not reason,
                reason,
                self.spent,
                self.optimisation.spent,
                keep,
                groups[k],
                None if self.loss is None else (float(self.loss[0][k]), float(self.loss[1][k])),
                structure=chains.structure,
                restarts=int(self.runaway.restarts[k]),
                **more[k],
            )
            for k, reason in enumerate(reasons)
        ]

    # -- sample in windows until settled ------------------------------------------------------------------------------

    def _first_estimates(self) -> None:
        """Measure noise and curvature after the initial optimisation, and set the first rates."""
        chains, length = self.chains, FIRST_WINDOW
        if chains.geometry is not None:
            self._check_structure(self.spent, self.budget)
            length = chains.geometry.min_vectors
        losses: list[Tensor] = []
        chains.forget_gradient()
        seen = 0
        if chains.trained and chains.sampler.estimator.centred and not chains.successive:
            for loss, noise in chains.noise_vectors(length - 1):
                chains.sampler.observe(noise)
                losses.append(loss)
                seen += 1
                self.count("measuring noise")
        while seen < length:  # a first noise estimate, before the chains move
            if len(losses) > MOST_TRIES * length:
                raise ValueError(
                    "minibatches that follow one another differ in size, so that their noise cannot be compared: let "
                    "the loader drop the last one (drop_last=True), or pass tensors"
                )
            seen += chains.observe_noise()
            losses.append(chains.loss)
            self.count("measuring noise")
        self.runaway.set_limit(losses)
        # There is far less noise at a mode than around it: start at a lower rate, which then rises.
        chains.adapt(FIRST_RATIO * chains.curvature.values())
        if chains.decide():
            self._first_estimates()
            return
        if chains.enter_metric():
            for _ in range(PROBES):
                self._probe("measuring curvature")
            chains.adapt(FIRST_RATIO * chains.curvatures())
        if chains.geometry is not None:  # measure the curvature along its axes, twice
            for _ in range(4 * chains.geometry.axes):
                self._probe("measuring curvature")
            chains.adapt(chains.curvatures())
        self.length = length

    def _take_over(self) -> None:
        """Continue with the estimates of colder chains; only the limit of the loss is new."""
        losses = list[Tensor]()
        for _ in range(LOSSES):
            self.chains.evaluate()
            losses.append(self.chains.loss)
            self.count("another temperature")
        self.runaway.set_limit(losses)
        self.stage = "windows"

    def _windows(self) -> list[str]:
        """Run windows until the chains have settled; returns why each has not, or an empty string."""
        chains = self.chains
        if self.stage == "optimisation":
            self._first_estimates()
            self.stage = "windows"
        while True:
            self.mark()
            self.budget = self.total - self._check_steps()
            left, in_time = self.budget - self.spent, self.gradients_in_time()
            # If the rest is too short for another window of twice the length, it is added to this one.
            length = left if self.exact and left < 3 * self.length else min(self.length, left)
            if in_time < min(length, self.length / 2):
                return [reason or "max_seconds ended the warm-up" for reason in self.reasons]
            length = int(min(length, in_time))
            if length < 2:
                short = f"{self.total} steps are too few: give warmup at least {8 * FIRST_WINDOW}"
                return [reason or short for reason in self.reasons]
            old, before = self._rates(), self._sizes()
            losses = self._window(length)
            if losses is None:  # a chain has diverged: the window is run again
                self.settled_before = False
                continue
            self.fell = bool((self._sizes() > SETTLED_RATIO * before)[chains.alive].double().mean() > 0.5)
            self.budget = self.total - self._check_steps()
            self.last = self.exact and self.budget - self.spent < length
            # A single probe is noisy: take the upper quartile over the second half of the window.
            later = torch.stack(self.seen_curvatures[len(self.seen_curvatures) // 2 :]).cpu().numpy()
            self.curvatures = np.quantile(later, 0.75, axis=0)
            # A geometry is measured in every direction, so that its rates may rise quickly in early windows.
            early = chains.geometry is not None and length < LEAST_LAST_WINDOW
            chains.adapt(torch.as_tensor(self.curvatures), rise=EARLY_RISE if early else 2.0)
            self.runaway.keep_slow()
            if chains.geometry is not None:  # relative to the new Lambda
                self.curvatures = chains.curvatures().cpu().numpy()
            with np.errstate(invalid="ignore"):  # the loss of a chain that was dropped is infinite
                self.loss = losses.mean(0), losses.std(0)
            self.reasons = reasons = self._unsettled(old, losses)
            if self.last:
                return reasons
            settled = self._settled(reasons)
            if not self.exact and settled and self.settled_before and length >= self._least_last_window():
                return reasons
            if self.budget - self.spent < length:
                return reasons
            self.settled_before = settled
            self.length = 2 * length

    def _sizes(self) -> Tensor:
        """The Lambda of each chain's geometry over its H."""
        geometry = self.chains.geometry
        return self.chains.each(1.0) if geometry is None else geometry.factor.clone()

    def _check_steps(self) -> int:
        """Gradients reserved for `_check`, with a geometry."""
        if self.chains.geometry is None:
            return 0
        share, most = (FALLING_SHARE, MOST_FALLING) if self.fell else (CHECK_SHARE, MOST_CHECKED)
        return min(int(share * self.total), most)

    def _check(self, end: int) -> None:
        """Test the last rates, which no window has used; until ``end`` they may only fall."""
        chains, losses = self.chains, list[Tensor]()
        if chains.geometry is None or self.spent >= end:
            return
        self.runaway.begin()
        while self.spent < end and time.monotonic() < chains.deadline:
            chains.step(split=True)
            losses.append(chains.loss)
            self.count("testing the rates")
            if len(losses) % 2 and self.spent < end:
                self._probe("testing the rates")
            if len(losses) % ADAPT_EVERY == 0:
                if self.runaway.restart_runaways(losses):
                    losses = losses[:0]
                else:
                    chains.adapt(chains.curvatures(), rise=1.0)
        if isinstance(chains.sampler, ISGD):
            chains.sampler.limit_excess()
        self.curvatures = chains.curvatures().cpu().numpy()

    def _settled(self, reasons: list[str]) -> bool:
        """Whether enough of the chains that were not dropped have settled."""
        good = [not reason for reason, alive in zip(reasons, self.chains.alive.tolist(), strict=True) if alive]
        return sum(good) >= ENOUGH * len(good)

    def _least_last_window(self) -> int:
        geometry = self.chains.geometry
        return LEAST_LAST_WINDOW if geometry is None else max(LEAST_LAST_WINDOW, VECTORS * geometry.min_vectors)

    def _window(self, length: int) -> Array | None:
        """Run a window; returns its losses ``[steps, chains]``, or None if a chain has diverged and was restarted."""
        chains = self.chains
        chains.sampler.forget_noise()
        chains.forget_gradient()
        chains.stiffness.forget()
        self.tails = [TailMeter() for _ in chains.sampler.param_groups]
        self.signal, self.seen_curvatures = [], []
        self.traces.begin(length)
        self.runaway.begin()
        losses: list[Tensor] = []
        end, stage = self.spent + length, f"warm-up window of {length:,}"
        while self.spent < end:
            i = len(losses)
            noise = chains.evaluate(split=chains.geometry is not None or i % SPLIT_EVERY == 0)
            self.count(stage)
            losses.append(chains.loss)
            if i % PROBE_EVERY == 0 and self.spent < end:
                self._probe(stage)
                self.seen_curvatures.append(chains.curvatures())
            if noise is not None:
                # Sums of successive differences would cancel in the tails. Both cost more than a captured gradient.
                if (not chains.successive or i % 4 == 0) and (chains.graph is None or i % TAILS_EVERY == 0):
                    update_tails(self.tails, chains.sampler.param_groups, noise)
                if chains.graph is None or i % 4 == 0:
                    self._feed_signal(noise)
            if self.measure_spacing:
                self.traces.add(i)
            chains.advance(noise if chains.sampler.estimator.centred else None)
            if i % ADAPT_EVERY == ADAPT_EVERY - 1:
                chains.check_finite()
                if self.runaway.restart_runaways(losses):
                    return None
                chains.adapt(chains.curvatures(), rise=1.0)  # within a window rates may only fall
        if self.runaway.restart_runaways(losses):
            return None
        return torch.stack(losses).double().cpu().numpy()

    def _unsettled(self, old: Array, losses: Array) -> list[str]:
        """Why each chain has not settled, or an empty string."""
        signal = torch.stack(self.signal[len(self.signal) // 2 :]).cpu().numpy()
        return [
            self._verdict(k, old[k], losses[:, k], signal[:, k]) if alive else "the chain has diverged"
            for k, alive in enumerate(self.chains.alive.tolist())
        ]

    def _verdict(self, k: int, old: Array, losses: Array, signal: Array) -> str:
        assert self.curvatures is not None
        sampler, rates, curvatures = self.chains.sampler, self._rates()[k], self.curvatures[k]
        ratios = rates / old
        if self.last:
            ratios = np.minimum(ratios, 1.0)  # a rate that was too low does no harm
        sizes = np.array([slot.stop - slot.start for slot in self.chains.slots])
        scale = sampler.param_groups[0]["temperature"] / sampler.param_groups[0]["num_data"]
        most = scale * curvatures * sizes
        if self.chains.geometry is not None:  # the same in the metric of P, over all groups
            most = scale * rates * curvatures * sizes.sum()
        found, error = signal.mean(0), SURE * signal.std(0) / math.sqrt(len(signal))
        signals = list(zip(found, error, most, strict=True))
        relaxation = sampler.friction / max(float((rates * curvatures).min()), 1e-12)
        reason = unsettled(sampler.param_groups, list(ratios), signals, len(losses), relaxation)
        mend = "a longer warmup=, a start closer to a mode (init=) or a larger batch_size= would help"
        return f"{reason}: {mend}" if reason else drifting(losses)

    # -- measurements -------------------------------------------------------------------------------------------------

    def _probe(self, stage: str) -> None:
        self.chains.probe_curvature()
        self.count(stage)

    def _rates(self) -> Array:
        return self.chains.rates().cpu().numpy()

    def _feed_signal(self, noise: list[Tensor]) -> None:
        """``|g|^2 - |D|^2``: squared length of the gradient without its noise, unbiased, for each group."""
        chains = self.chains
        d, g = chains.flat(noise), chains.flat([leaf.grad for leaf in chains.leaves])  # type: ignore[misc]
        if chains.in_metric:
            d, g = chains.whiten(d), chains.whiten(g)
        if chains.geometry is not None:
            whole = dot(g, chains.geometry.direction(g)) - dot(d, chains.geometry.direction(d))
            signal = whole.unsqueeze(-1).expand(-1, len(chains.slots))
        else:
            squares = g.square() - d.square()
            signal = torch.stack([squares[:, slot].sum(-1) for slot in chains.slots], dim=-1)
        self.signal.append(signal.double())

    def _spacing(self) -> int:
        found = self.traces.spacing()
        if found is None and math.isfinite(self.chains.deadline):  # there was no time for a window
            return FIRST_WINDOW
        if found is None:
            raise ValueError(
                f"warmup = {self.total} ends before anything was measured: give at least {8 * FIRST_WINDOW}"
            )
        return found
