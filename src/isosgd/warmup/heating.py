"""How high the rates of cycles rise, where chains start at trained networks.

A cycle is to leave the mode at which a network was trained, and to come back to one that is as good. What that takes is
not told by curvature and noise at the mode, where both are small. So the rate of momentum descent grows, from one at
which nothing happens, until the loss has come a part of the way to that of predictions which know nothing. Cycles begin
at a share of that rate, for a rate that is kept does more than one that is passed by; and at the trained network again.
"""

from __future__ import annotations

import math
import time
from typing import cast

import torch
from torch import Tensor

from isosgd.samplers.schedules import Cycles
from isosgd.samplers.steppers import hamiltonian_
from isosgd.target.likelihoods import Bernoulli, Categorical
from isosgd.warmup.base import Warmup
from isosgd.warmup.reports import GroupReport, WarmupReport

PROBES, BATCHES = 20, 20  # power iterations for the curvature, and minibatches for the loss, of the start
FIRST = 0.05  # of 1 / curvature: the first rate
GROWTH, MOST = 1.02, 800  # of rates from step to step, and steps
MEMORY = 0.9  # of the mean loss
FRICTION = 0.1
PART = 0.1  # of the way to what knows nothing
UP = 0.5  # nats, where it is not known how far that is
LEAST_CYCLE = 50  # steps, however little time there is
SHARE = 20.0  # times T, at most 1, of the rate that was reached: the highest of a cycle


class Heating(Warmup):
    """The warm-up of samplers in cycles, of chains that start at trained networks; one rate serves all groups."""

    def check(self) -> None:
        pass

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        """A report for each chain; with ``measure_spacing`` a stage has `STAGE_DRAWS` draws."""
        chains, sampler, schedule = self.chains, self.chains.sampler, self.chains.sampler.schedule
        assert isinstance(schedule, Cycles)
        if not chains.warmed:
            self._find_rates(schedule)
            sampler.freeze()
        keep = schedule.spacing(sampler.param_groups[0]) if measure_spacing else None
        rates, curvatures = (x.double().cpu().tolist() for x in (chains.rates(), chains.curvature.values()))
        names = [group["name"] for group in sampler.param_groups]
        found = [
            [GroupReport(name, r, math.nan, h, r * h) for name, r, h in zip(names, *numbers, strict=True)]
            for numbers in zip(rates, curvatures, strict=True)
        ]
        return [WarmupReport(True, "", self.spent, 0, keep, groups) for groups in found]

    def _find_rates(self, schedule: Cycles) -> None:
        """Heat chains, and set the rates of their cycles; these are shorter where there is little time."""
        chains, sampler, began = self.chains, self.chains.sampler, time.monotonic()
        chains.evaluate()
        self.count("starting")
        for _ in range(PROBES):
            chains.probe_curvature()
            self.count("starting")
        start, limit = self._level()
        rate = FIRST / chains.curvature.values().amax(-1).double()
        reached = self._heat(rate, start, limit)
        if chains.many is None:
            reached = reached[0]
        share = min(1.0, SHARE * sampler.param_groups[0]["temperature"])
        now = time.monotonic()
        fits = (chains.deadline - now) * self.spent / (now - began)  # steps, by the speed so far
        for group in sampler.param_groups:
            group["rate"] = sampler.number(schedule.set_highest(group, share * reached))
            if fits < group["cycle"]:
                group["cycle"] = max(int(fits), LEAST_CYCLE)
        sampler.refresh()

    def _level(self) -> tuple[Tensor, Tensor]:
        """The loss of each chain at its start, and that up to which it is heated."""
        chains, losses, seen = self.chains, list[Tensor](), list[Tensor]()
        for _ in range(BATCHES):
            chains.evaluate()
            self.count("starting")
            losses.append(chains.loss.double())
            seen.append(chains.target.labels_of(chains.batch).flatten().clone())
        start = torch.stack(losses).mean(0)
        module = chains.target.module
        if module is None or not isinstance(module.likelihood, Categorical | Bernoulli):
            return start, start + UP
        shares = torch.unique(torch.cat(seen), return_counts=True)[1].double()
        shares /= shares.sum()
        return start, start + PART * (-(shares * shares.log()).sum() - start).clamp_min(0.0)

    @torch.no_grad()
    def _heat(self, rate: Tensor, loss: Tensor, limit: Tensor) -> Tensor:
        """The rate of each chain at which its mean loss exceeds the limit; chains are back at their starts then."""
        chains = self.chains
        saved, velocity = chains.snapshot(), [torch.zeros_like(leaf) for leaf in chains.leaves]
        rising = chains.alive.clone()
        loss = loss.clone()
        for i in range(MOST):
            chains.evaluate(forgiving=True)
            self.count("heating")
            loss = torch.where(rising, MEMORY * loss + (1 - MEMORY) * chains.loss.double(), loss)
            rising = rising & (loss < limit)
            if i % 10 == 0 and not bool(rising.any()):
                break
            rate = torch.where(rising, GROWTH * rate, rate)
            now = torch.where(rising, rate, 0.0).to(chains.leaves[0].dtype)
            pulls = [chains.wide(now, leaf) * cast(Tensor, leaf.grad) for leaf in chains.leaves]
            hamiltonian_(chains.leaves, velocity, pulls, 1.0, FRICTION)
        chains.restore(saved)
        return rate
