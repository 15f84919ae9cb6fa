"""The warm-up of I-SGD with one of the schemes a, b, c and ``online``, which set lambda themselves.

They run for a fixed number of steps (see `isosgd.samplers.isgd`).
"""

from __future__ import annotations

import time
from typing import cast

from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.noise.stable import TailMeter
from isosgd.progress import Progress
from isosgd.samplers import ISGD
from isosgd.samplers.isgd import PAPER_STEPS
from isosgd.warmup.base import LENGTH, PROBES, TAILS_EVERY, Mark, Warmup, update_tails
from isosgd.warmup.reports import WarmupReport, group_reports

MARK_EVERY = 100  # steps
LEAST_LENGTH = 20  # steps of the trace that measures the spacing, where there is no time for more


class SchemeWarmup(Warmup):
    """The warm-up of chains whose sampler is `ISGD` with a scheme other than ``windowed``."""

    kept = (*Warmup.kept, "tails")

    def __init__(self, chains: Chains, budget: int, exact: bool, progress: Progress, mark: Mark) -> None:
        super().__init__(chains, budget, exact, progress, mark)
        self.tails = [TailMeter() for _ in chains.sampler.param_groups]

    def run(self, measure_spacing: bool) -> list[WarmupReport]:
        chains, sampler, reason = self.chains, cast(ISGD, self.chains.sampler), ""
        groups, steps = sampler.param_groups, self.budget if self.exact else PAPER_STEPS
        sampler.warmup = steps
        for i in range(self.spent, steps):
            if i % MARK_EVERY == 0:
                chains.check_finite()
                self.mark()
            noise = chains.evaluate(split=sampler.estimator.centred)
            if chains.graph is None or i % TAILS_EVERY == 0:
                update_tails(self.tails, groups, noise or [cast(Tensor, leaf.grad) for leaf in chains.leaves])
            chains.advance(noise)
            self.count(f"scheme {sampler.scheme}")
            if groups[0]["lam"] is not None and time.monotonic() > chains.deadline:
                sampler.cut_warmup()
                reason = "max_seconds ended the warm-up"
                break
        chains.check_finite()
        if groups[0]["lam"] is None:
            raise ValueError(f"{steps} steps are too few for a first noise estimate: give a longer warmup=")
        chains.evaluate()
        for _ in range(PROBES):  # for the report only: these schemes have no guard
            chains.probe_curvature()
        sampler.freeze()
        keep = None
        if measure_spacing:
            self.traces.begin(LENGTH)
            for i in range(LENGTH):
                if i >= LEAST_LENGTH and time.monotonic() > chains.deadline:
                    break
                chains.step(split=sampler.estimator.centred)
                self.traces.add(i)
                self.count("measuring")
            keep = self.traces.spacing()
        found = group_reports(chains, None, [meter.tail_index() for meter in self.tails])
        return [WarmupReport(not reason, reason, self.spent, 0, keep, own, structure=chains.structure) for own in found]
