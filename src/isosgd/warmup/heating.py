"""The peak rate of cycles that start at trained networks (``lr="heated"``).

A cycle should leave the mode at which training ended and reach another one of equal loss. Curvature and noise at the
mode are too small to tell which rate that takes. So momentum descent starts at a very low rate, which grows until the
loss has risen by a set part of its distance to the loss of predictions that ignore the input. The peak rate of the
cycles is a share of the rate reached, since it is held for many steps. Sampling starts again at the trained network.
"""

from __future__ import annotations

import math
import time
from typing import cast

import torch
from torch import Tensor

from isosgd.samplers.schedules import STAGE_DRAWS, Cycles
from isosgd.samplers.steppers import hamiltonian_
from isosgd.target.likelihoods import Bernoulli, Categorical
from isosgd.warmup.base import Warmup
from isosgd.warmup.reports import GroupReport, WarmupReport

PROBES, BATCHES = 20, 20  # power iterations for the curvature, and minibatches for the loss, at the start
FIRST = 0.05  # first rate, over 1 / curvature
SOON, LOWER, MOST_STARTS = 60, 1000.0, 3  # if the loss rises in fewer steps, retry at a rate lower by this factor
GROWTH, MOST = 1.02, 800  # growth of the rate per step, and most steps
MEMORY = 0.9  # of the mean loss
PART, LEAST_PART = 0.1, 0.02  # rise of the loss, over the distance to chance, and over the loss at chance at least
SURE = 3.0  # least rise, in standard errors of the loss at the start
UP = 0.5, 0.1  # rise in nats, or as a share of the loss, if the loss at chance is not known
LEAST_CYCLE = 50  # steps
SHARE = 20.0  # peak rate of a cycle, over T times the rate reached; at most that rate


class Heating(Warmup):
    """The warm-up of cyclical samplers whose chains start at trained networks; all groups have one rate."""

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        """As `Warmup.run`; with ``measure_spacing`` a stage has `STAGE_DRAWS` draws."""
        chains, sampler, schedule = self.chains, self.chains.sampler, self.chains.sampler.schedule
        assert isinstance(schedule, Cycles)
        reason = self._find_rates(schedule)
        sampler.freeze()
        group = sampler.param_groups[0]
        keep = schedule.spacing(group) if measure_spacing else None
        rates, curvatures = (x.double().cpu().tolist() for x in (chains.rates(), chains.curvature.values()))
        names, nan = [group["name"] for group in sampler.param_groups], math.nan
        found = [
            [GroupReport(name, r, nan, h, r * h, nan, nan, nan) for name, r, h in zip(names, *numbers, strict=True)]
            for numbers in zip(rates, curvatures, strict=True)
        ]
        return [WarmupReport(not reason, reason, self.spent, 0, keep, groups, cycle=group["cycle"]) for groups in found]

    def _find_rates(self, schedule: Cycles) -> str:
        """Set the rates of cycles, and shorten these if there is little time; returns what went wrong, if anything."""
        chains, sampler, began = self.chains, self.chains.sampler, time.monotonic()
        assert chains.heating is not None
        chains.evaluate()
        self.count("starting")
        for _ in range(PROBES):
            chains.probe_curvature()
            self.count("starting")
        if not (found := chains.heating.reached):
            rates, reason = self._heated()
            found = {"rates": rates, "reason": reason, "speed": self.spent / (time.monotonic() - began)}
            if not reason:
                chains.heating.reached.update(found)
        share = min(1.0, SHARE * sampler.param_groups[0]["temperature"])
        cycles = -(-chains.heating.draws // STAGE_DRAWS)
        fits = (chains.heating.end - time.monotonic()) * found["speed"] / cycles  # steps
        least = max(LEAST_CYCLE, math.ceil(1 / (1 - schedule.exploration)))  # with a sampling stage
        for group in sampler.param_groups:
            group["rate"] = sampler.number(schedule.set_highest(group, share * found["rates"]))
            if fits < group["cycle"]:
                group["cycle"] = min(group["cycle"], max(int(fits), least))
        sampler.refresh()
        return str(found["reason"])

    def _heated(self) -> tuple[Tensor, str]:
        """The rate of each chain at which its loss has risen, and what went wrong, if anything."""
        chains = self.chains
        start, limit = self._level()
        first = FIRST / chains.curvature.values().amax(-1).double()
        for _ in range(MOST_STARTS):
            reached, steps, reason = self._heat(first, start, limit)
            if steps >= SOON or reason:
                break
            first = first / LOWER
        return (reached[0] if chains.many is None else reached), reason

    def _level(self) -> tuple[Tensor, Tensor]:
        """The loss of each chain at its start, and the loss at which its heating ends."""
        chains, losses, seen, examples = self.chains, list[Tensor](), list[Tensor](), 0
        module = chains.target.module
        classes = module is not None and isinstance(module.likelihood, Categorical | Bernoulli)
        for _ in range(BATCHES):
            chains.evaluate()
            self.count("starting")
            losses.append(chains.loss.double())
            if classes:
                y = chains.target.labels_of(chains.batch).clone()
                seen.append(y.flatten())
                examples += len(y) if chains.many is None else y.shape[0] * y.shape[1]
        every = torch.stack(losses)
        start, noise = every.mean(0), SURE * every.std(0) / math.sqrt(BATCHES)
        rise = torch.maximum(torch.full_like(start, UP[0]), UP[1] * start.abs())
        if classes:
            labels = torch.cat(seen)
            shares = torch.unique(labels, return_counts=True)[1].double() / len(labels)
            chance = -(shares * shares.log()).sum() * len(labels) / examples  # summed over the labels of an example
            rise = torch.maximum(PART * (chance - start), LEAST_PART * chance)
        limit = start + torch.maximum(rise, noise)
        return start, limit if chains.ranks is None else chains.ranks.of_lead(limit)

    @torch.no_grad()
    def _heat(self, rate: Tensor, loss: Tensor, limit: Tensor) -> tuple[Tensor, int, str]:
        """Raise the rate of each chain until its mean loss exceeds the limit, then restore the chains.

        Returns:
            Rates, steps until the first chain exceeded its limit, and what went wrong, or an empty string.
        """
        chains, friction = self.chains, self.chains.sampler.friction
        saved, velocity = chains.snapshot(), [torch.zeros_like(leaf) for leaf in chains.leaves]
        rising, steps, reason = chains.alive.clone(), torch.zeros_like(rate), ""
        for i in range(MOST):
            chains.evaluate(forgiving=True)
            self.count("heating")
            loss = torch.where(rising, MEMORY * loss + (1 - MEMORY) * chains.loss.double(), loss)
            rising = rising & (loss < limit)
            steps = steps + rising
            if i % 10 == 0:
                if not bool(rising.any()):
                    break
                if time.monotonic() > chains.deadline:
                    reason = "max_seconds ended the heating"
                    break
            rate = torch.where(rising, GROWTH * rate, rate)
            now = torch.where(rising, rate, 0.0).to(chains.leaves[0].dtype)
            pulls = [chains.wide(now, leaf) * cast(Tensor, leaf.grad) for leaf in chains.leaves]
            hamiltonian_(chains.leaves, velocity, pulls, 1.0, friction)
        if not reason and bool(rising.any()):
            reason = f"the loss did not rise in {MOST} steps of heating"
        first = int(steps[chains.alive].min()) if bool(chains.alive.any()) else MOST
        chains.restore(saved)
        return rate, first, reason
