"""The warm-up of HMC: optimise, then find the mass and the step sizes.

1. *Initial optimisation* by Adam on all data, or in turn on parts of a large data set; the best parameters are kept.
2. *Windows* of doubling length. In each, Lambda is estimated from differences of gradients between random halves of the
   data, and each chain's step size is set so that a chosen share of its trajectories is accepted.
3. In the *last* window Lambda is fixed and only step sizes are set, which are then frozen, too.

All trajectories are accepted or rejected, so that no chain can diverge.

References:
    Hoffman, Gelman (2014), The No-U-Turn sampler (dual averaging).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from isosgd.data.sources import TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.leapfrog import LeapfrogMultiStep
from isosgd.progress import Progress
from isosgd.samplers.hmc import HMC
from isosgd.samplers.isgd import report_rates
from isosgd.warmup.base import Array, Mark, Warmup
from isosgd.warmup.optimise import Adam, decay, end_of
from isosgd.warmup.reports import GroupReport, WarmupReport, drifting

FIRST_WINDOW, LEAST_WINDOW = 100, 20  # the latter if the whole warm-up is short
LAST_SHARE = 0.4  # of the gradients after the initial optimisation, for the last window
OPTIMISATION_SHARE, MOST_OPTIMISATION = 0.15, 1_500
RATE = 0.1  # step length of the optimisation, over the size of a group's parameters
PART = 1_000  # least number of rows in a part of the data
MANY = 10  # least number of parts: with fewer, steps on all rows descend faster
PART_RATE = 0.03  # step length on a part, whose gradient is noisy
PASSES = 150  # through all parts, at most: then HMC descends faster
LOOK = 10  # passes between evaluations on all data
ACCEPTED = 0.75  # share of accepted trajectories at which step sizes aim
LEAST_ACCEPTED = 0.3  # share below which a chain has not found its step size
REACH = 2.0  # length of a trajectory, in standard deviations of a direction in which the curvature is H
MOST_LENGTH = 64  # steps of a trajectory
# Longer trajectories, up to LONGEST steps, are used if the squared distance that they cover grows faster than their
# length to the power GROWTH_POWER (2 is a straight line). It is averaged over ENOUGH_DIRECTIONS directions of
# trajectories, of which MOST_OF_ONE at most are counted for each.
GROWTH_POWER, ENOUGH_DIRECTIONS, MOST_OF_ONE, LONGEST = 1.5, 320, 40, 256
LENGTHENED, LONG_TRAJECTORIES = 0.6, 8  # share of the last window in which lengths may grow; least trajectories in it
GAIN = 0.2  # of dual averaging; with the usual .05, step sizes swing and are too small after short windows
TRAJECTORIES = 20  # in a window, at least: step sizes are found from them
FEW_TRAJECTORIES = 4  # the same if the time of the run is over
DIVERGED = 10.0  # gain of energy over T above which the noise of a trajectory is not used
VECTORS = 4  # noise vectors in a window, over the least number for a geometry
ENOUGH = 1_600  # steps of the last window, unless a number was given


class DualAveraging:
    """Dual averaging of step sizes, one for each chain, to reach a share of accepted trajectories.

    If all trajectories are accepted at first, steps ``bold`` times as long as those at the start are tried. A larger
    ``gain`` makes step sizes vary less.
    """

    def __init__(self, start: Tensor, share: float = ACCEPTED, bold: float = 2.0, gain: float = GAIN) -> None:
        self.share, self.gain, self.count = share, gain, 0
        self.centre = (bold * start).log()
        self.error, self.log_mean = torch.zeros_like(start), start.log()
        self.value = start

    def update(self, acceptance: Tensor) -> None:
        """Update with the acceptance probabilities of the last trajectories."""
        self.count += 1
        self.error = torch.lerp(self.error, self.share - acceptance, 1.0 / (self.count + 10.0))
        log = self.centre - math.sqrt(self.count) / self.gain * self.error
        self.log_mean = torch.lerp(self.log_mean, log, self.count**-0.75)
        self.value = log.exp()

    @property
    def mean(self) -> Tensor:
        """The averaged step sizes, for use after the adaptation."""
        return self.log_mean.exp()


class HMCWarmup(Warmup):
    """The warm-up of chains whose sampler is `HMC`; ``multi_step`` takes several leapfrog steps in a call."""

    gives_up = False  # its first measurement is some hundred gradients

    kept = (*Warmup.kept, "optimised", "last")

    def __init__(
        self,
        chains: Chains,
        budget: int,
        exact: bool,
        progress: Progress,
        mark: Mark,
        multi_step: LeapfrogMultiStep | None = None,
    ) -> None:
        super().__init__(chains, budget, exact, progress, mark)
        self.sampler, self.multi_step = cast(HMC, chains.sampler), multi_step
        self.length, self.optimised, self.traced = FIRST_WINDOW, 0, True
        self.last: list[Tensor] | None = None  # noise
        self.grown, self.directions = torch.zeros(2), 0  # sums over the last trajectories, see `_lengthen`

    def check(self) -> None:
        needed = self.sampler.geometry.min_vectors + 5 * LEAST_WINDOW
        if self.budget < needed:
            raise ValueError(f"warmup = {self.budget} is too short for HMC: give at least {needed}")

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        self.traced = measure_spacing
        geometry = self.sampler.geometry
        self.check()
        if self.budget < geometry.min_vectors + 5 * FIRST_WINDOW:
            self.length = LEAST_WINDOW
        if self.stage == "start":
            self.chains.evaluate(forgiving=False)
            if not self.chains.trained:
                self._optimise(min(int(OPTIMISATION_SHARE * self.budget), MOST_OPTIMISATION))
            self._measure(geometry.min_vectors)
            self.chains.shape()
            self.stage = "windows"
        while self.stage == "windows":
            self.mark()
            self._window(self.length, fixed=False)
            self.sampler.restart()  # first: the prior's part of Lambda depends on the position
            self.chains.shape()
            left = self.budget - self.spent
            done = 2 * self.length > (1.0 - LAST_SHARE) * left or not (self.exact or any(self.reasons)) or self._late()
            self.stage, self.length = ("last", self.length) if done else ("windows", 2 * self.length)
        self.mark()
        left = self.budget - self.spent
        self._window(left if self.exact else min(left, max(2 * self.length, ENOUGH)), fixed=True)
        self.sampler.freeze()
        return self._reports(self.traces.spacing() if measure_spacing else None)

    # -- initial optimisation -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _optimise(self, gradients: int) -> None:
        """Adam with steps that shrink in the second half; a step on a large data set is on a part of it.

        Scales of the prior are fixed: a hierarchical density has its mode at scale zero, far from its mass.
        """
        chains = self.chains
        rows = cast(TensorBatches, chains.batches).num_data  # N may be larger
        parts = rows // PART if rows >= MANY * PART else 1
        passes = gradients if parts == 1 else min(gradients, PASSES)
        steps, rate = passes * parts, RATE if parts == 1 else PART_RATE
        adam = Adam(chains, rate, chains.target.prior_scales(chains.params))
        late = end_of(chains)
        best, saved, turns = chains.energy(), chains.snapshot(), self._turns(parts, rows // parts)
        for i in range(1, steps + 1):
            if parts > 1:
                chains.evaluate(batch=next(turns))
            adam.step([cast(Tensor, leaf.grad) for leaf in chains.leaves], decay(i, steps))
            if parts > 1 and i % parts == 0:  # a pass through all parts counts as one gradient
                chains.gradients -= parts - 1
                self.count("initial optimisation")
            if parts == 1 or i % (LOOK * parts) == 0 or i == steps:
                chains.evaluate()
                self.count("initial optimisation")
                energy = chains.energy()
                lower = energy < best
                best = torch.where(lower, energy, best)
                saved = chains.merged(saved, chains.snapshot(), lower)
            if time.monotonic() > late:
                break
        chains.restore(saved)
        self.optimised = self.spent

    def _turns(self, parts: int, size: int) -> Iterator[Any]:
        """Equal parts of the data, without end, shuffled in every pass; a few rows may be left out of a pass."""
        dim = 0 if self.chains.many is None else 1
        while True:
            mixed = self.chains.batches.next(mixed=True)
            for k in range(parts):
                yield tuple(t.narrow(dim, k * size, size) for t in mixed)

    # -- windows ------------------------------------------------------------------------------------------------------

    def _window(self, steps: int, fixed: bool) -> None:
        """Run trajectories to set the step sizes and, unless Lambda is ``fixed``, observe noise."""
        chains, sampler = self.chains, self.sampler
        sampler.forget_noise()
        self.traces.begin(steps)
        step_sizes = DualAveraging(sampler.step_size.sqrt())
        self._choose_length(steps)
        self.grown, self.directions = torch.zeros(2), 0
        levels: list[Tensor] = []
        accepted: list[Tensor] = []
        # Noise vectors at one place would take less time, but tell less of the posterior.
        every = steps + 1 if fixed else max(1, steps // (VECTORS * sampler.geometry.min_vectors))
        i = 0
        while i < steps and not (len(accepted) >= FEW_TRAJECTORIES and self._late()):
            looks, count = not fixed and i % every == 0, 0
            if self.multi_step is not None and not looks:
                count = min(self.multi_step.remaining, steps - i, every - i % every)
            if self.multi_step is not None and count:
                self.multi_step.leapfrog(count)
            else:
                count, noise = 1, chains.evaluate(split=looks)
                chains.advance(None)
                if noise is not None:
                    sampler.observe(self._seen(noise))
            self.count("testing the step size" if fixed else f"warm-up window of {steps:,}", count)
            if self.traced:
                self.traces.add(i, count)
            levels += [chains.level] * count
            i += count
            if count == 1 and sampler.ended:
                accepted.append(sampler.acceptance)
                step_sizes.update(sampler.acceptance)
                sampler.step_size = step_sizes.value.square()
                if fixed and i <= steps // 4:
                    self._choose_length(steps)
                elif fixed and i <= LENGTHENED * steps and self._lengthen(steps):  # then steps must be shorter
                    step_sizes = DualAveraging(step_sizes.mean, bold=1.0)
        sampler.step_size = step_sizes.mean.square()
        losses, shares = _array(levels), _array(accepted[len(accepted) // 2 :]).mean(0)
        self.loss = losses.mean(0), losses.std(0)
        self.reasons = [self._unsettled(k, shares[k], losses[:, k]) for k in range(chains.count)]

    def _measure(self, vectors: int) -> None:
        """Measure the noise of so many minibatches at the chains' positions."""
        for _, noise in self.chains.noise_vectors(vectors):
            self.sampler.observe(self._seen(noise))
            self.count("measuring noise")

    def _late(self) -> bool:
        """Whether the time of the run (``max_seconds``) is over."""
        return time.monotonic() > self.chains.deadline

    def _seen(self, noise: list[Tensor]) -> list[Tensor]:
        """The noise vectors, with the last good one of chains whose trajectory has gained too much energy."""
        good = self.sampler.error.abs() < DIVERGED
        if self.last is not None:
            noise = self.chains.merged(self.last, noise, good)
        self.last = noise
        return noise

    def _choose_length(self, steps: int) -> None:
        """Set the length of trajectories, one for all chains, from the median step size."""
        # The step size may fall to zero if every trajectory is rejected.
        reach = REACH / max(float(self.sampler.step_size.sqrt().median()), REACH / MOST_LENGTH)
        self.sampler.length = max(1, min(math.ceil(reach), MOST_LENGTH, steps // TRAJECTORIES))

    def _lengthen(self, steps: int) -> bool:
        """Double the length of trajectories if chains then move so much farther that it pays; returns whether it does.

        It does if the posterior is far wider in some directions than the mass says, as those of networks are.
        """
        sampler = self.sampler
        self.grown = self.grown + torch.stack([(sampler.acceptance * x).nansum() for x in sampler.growth]).cpu()
        self.directions += len(sampler.acceptance) * min(sampler.geometry.total, MOST_OF_ONE)
        if self.directions < ENOUGH_DIRECTIONS:
            return False
        distance, growth = self.grown.tolist()
        self.grown, self.directions = torch.zeros(2), 0
        longer = 2 * sampler.length
        if growth <= GROWTH_POWER * distance or longer > min(LONGEST, steps // LONG_TRAJECTORIES):
            return False
        sampler.length = longer
        return True

    def _unsettled(self, k: int, accepted: float, losses: Array) -> str:
        if not bool(self.chains.alive[k]):
            return "the chain has diverged"
        if accepted < LEAST_ACCEPTED:
            return (
                f"{100 * accepted:.0f}% of the trajectories were accepted in the last window of {len(losses)} steps: "
                "a longer warmup= would help"
            )
        return drifting(losses)

    def _reports(self, keep: int | None) -> list[WarmupReport]:
        sampler, geometry, groups = self.sampler, self.sampler.geometry, self.sampler.param_groups
        assert self.loss is not None
        report_rates(sampler, sampler.step_size)
        rates, squares = self.chains.rates().cpu().numpy(), sampler.step_size.double().cpu().numpy()
        structure, conditioning = self.chains.structure, self.chains.conditioning()
        reports = []
        for k, reason in enumerate(self.reasons):
            a = 0.5 * float(squares[k])  # rate * curvature, where that is H
            found = [
                GroupReport(group["name"], float(rate), geometry.scale / float(rate), a / float(rate), a)
                for group, rate in zip(groups, rates[k], strict=True)
            ]
            loss = float(self.loss[0][k]), float(self.loss[1][k])
            given = not reason, reason, self.spent, self.optimised, keep, found, loss
            reports.append(
                WarmupReport(*given, structure=structure, conditioning=conditioning, trajectory=sampler.length)
            )
        return reports


def _array(numbers: list[Tensor]) -> Array:
    return torch.stack(numbers).double().cpu().numpy()
