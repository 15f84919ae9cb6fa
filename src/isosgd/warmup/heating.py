"""The peak rate of cycles that start at trained networks (``lr="heated"``).

A cycle should leave the mode at which training ended and come back to another one that is as good. Curvature and noise
at the mode do not tell which rate that takes, since both are small there. So momentum descent starts at a rate that
changes nothing, and the rate grows until the loss has risen a part of the way to that of predictions that ignore the
input. Cycles peak at a share of that rate, since a rate that is held for many steps does more than one that is reached
for one step. They begin at the trained network again.
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

PROBES, BATCHES = 20, 20  # power iterations for the curvature, and minibatches for the loss, of the start
FIRST = 0.05  # of 1 / curvature: the first rate
SOON, LOWER, MOST_STARTS = 60, 1000.0, 3  # where the loss rises in fewer steps, begin again at so much lower a rate
GROWTH, MOST = 1.02, 800  # of rates from step to step, and steps
MEMORY = 0.9  # of the mean loss
PART, LEAST_PART = 0.1, 0.02  # of the way to chance, and of the loss at chance at least
SURE = 3.0  # standard errors of the loss at the start, by which it must rise at least
UP = 0.5, 0.1  # rise in nats, or as a share of the loss, if the loss at chance is not known
LEAST_CYCLE = 50  # steps, however little time there is
SHARE = 20.0  # times T, at most 1, of the rate that was reached: the highest of a cycle


class Heating(Warmup):
    """The warm-up of samplers in cycles, of chains that start at trained networks; one rate serves all groups."""

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        """A report for each chain; with ``measure_spacing`` a stage has `STAGE_DRAWS` draws."""
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
        """Heat chains, and set the rates of their cycles; these are shorter where there is little time."""
        chains, sampler, began = self.chains, self.chains.sampler, time.monotonic()
        assert chains.heating is not None
        chains.evaluate()
        self.count("starting")
        for _ in range(PROBES):
            chains.probe_curvature()
            self.count("starting")
        start, limit = self._level()
        first = FIRST / chains.curvature.values().amax(-1).double()
        for _ in range(MOST_STARTS):
            reached, steps, reason = self._heat(first, start, limit)
            if steps >= SOON or reason:
                break
            first = first / LOWER
        if chains.many is None:
            reached = reached[0]
        share = min(1.0, SHARE * sampler.param_groups[0]["temperature"])
        now, cycles = time.monotonic(), -(-chains.heating.draws // STAGE_DRAWS)
        fits = (chains.heating.end - now) * self.spent / (now - began) / cycles  # steps, by the speed so far
        least = max(LEAST_CYCLE, math.ceil(1 / (1 - schedule.exploration)))  # so that some of its steps sample
        for group in sampler.param_groups:
            group["rate"] = sampler.number(schedule.set_highest(group, share * reached))
            if fits < group["cycle"]:
                group["cycle"] = min(group["cycle"], max(int(fits), least))
        sampler.refresh()
        return reason

    def _level(self) -> tuple[Tensor, Tensor]:
        """The loss of each chain at its start, and that up to which it is heated."""
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
            chance = -(shares * shares.log()).sum() * len(labels) / examples  # of all labels of an example
            rise = torch.maximum(PART * (chance - start), LEAST_PART * chance)
        limit = start + torch.maximum(rise, noise)
        return start, limit if chains.ranks is None else chains.ranks.of_lead(limit)

    @torch.no_grad()
    def _heat(self, rate: Tensor, loss: Tensor, limit: Tensor) -> tuple[Tensor, int, str]:
        """The rate of each chain at which its mean loss exceeds the limit; chains are back at their starts then.

        Returns:
            Rates, steps until the first chain came to its limit, and what went wrong; empty when nothing did.
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
