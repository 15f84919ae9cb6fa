"""I-SGD in the classification tables: from a trained model to averaged predictions.

Samplers work on one captured step (`experiments.images.captured`). Rates, lambda and the injected noise come from the
library's estimators and structures; the paper's variants are those of `isosgd.samplers.isgd`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.images.captured import Chain
from experiments.images.image_jobs import Job, Method, Outcome, Steps, keep_draws, start_chain
from isosgd.geometry.layer import Layer, Single
from isosgd.noise import MovingAverage, NoiseEstimator
from isosgd.noise.summaries import summarise
from isosgd.samplers.base import slow_rise
from isosgd.samplers.isgd import PRESETS

SAFETY = 4.0  # times the largest noise in a layer: what held at T = 1 on convolutional networks
FIRST_WINDOW = 100


class Watch:
    """The noise of a chain's gradients, in the flat layout.

    Args:
        chain: whose.
        estimator: of the variance. A centred one is fed differences of successive gradients over sqrt(2), which between
            two steps of a slow chain differ by noise alone.
    """

    def __init__(self, chain: Chain, estimator: NoiseEstimator) -> None:
        self.chain, self.estimator = chain, estimator
        self._now, self._last = torch.zeros_like(chain.flat.values), torch.zeros_like(chain.flat.values)
        self.restart()

    def restart(self) -> None:
        """Begin a new estimate."""
        self._state, self.seen, self._gradients = self.estimator.init(self._now), 0, 0

    def look(self) -> None:
        """Take in the gradient of the last step."""
        self.chain.flat_gradient(self._now)
        self._gradients += 1
        if not self.estimator.centred:
            self.estimator.update([self._state], [self._now], self.seen)
            self.seen += 1
            return
        if self._gradients > 1:
            self.estimator.update([self._state], [(self._now - self._last).mul_(math.sqrt(0.5))], self.seen)
            self.seen += 1
        self._now, self._last = self._last, self._now

    @property
    def variance(self) -> Tensor:
        """Of each gradient, flat."""
        return self.estimator.variance([self._state])[0]

    def bounds(self, how: Any) -> list[Tensor]:
        """What lambda must be at least, for each group."""
        flat, variance = self.chain.flat, self.variance
        return [summarise(flat.parts(variance, members), how) for members in self.chain.groups]


def isgd(preset: str) -> Method:
    """One of the paper's variants: lambda is estimated at the start (c) or while training goes on (b)."""
    about = PRESETS[preset]

    def steps(job: Job, outcome: Outcome) -> Steps:
        chain, structure = start_chain(job), (Single if about["structure"] == "single" else Layer)()
        watch = Watch(chain, about["noise"])
        if not watch.estimator.ready(job.warmup):
            raise ValueError(f"warmup = {job.warmup} is too short for {preset}: its estimate needs more gradients")
        chain.update.pace.zero_()
        lams: list[Tensor] = []
        for _ in range(job.warmup):
            chain.step()
            watch.look()
            yield
            if about["scheme"] == "b":  # training goes on at the Bayesian rate, as in `ISGD`
                lams = _positive(structure.solve(*_unguarded(watch.bounds(about["summary"]))))
                chain.update.set([torch.as_tensor(structure.rate(lam, 1.0, chain.num_data)) for lam in lams])
                chain.update.pace[0] = 1.0
        lams = lams or _positive(structure.solve(*_unguarded(watch.bounds(about["summary"]))))
        rates = [torch.as_tensor(structure.rate(lam, job.temperature, chain.num_data)) for lam in lams]
        chain.update.set(rates, lams, watch.variance)
        chain.update.pace.fill_(1.0)
        yield from keep_draws(job, chain, outcome)
        return chain

    return Method(steps)


def _unguarded(bounds: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return bounds, [torch.zeros_like(b) for b in bounds]


def _positive(lams: Sequence[Tensor]) -> list[Tensor]:
    return [lam.clamp_min(torch.finfo(torch.float32).tiny) for lam in lams]


@Method
def windowed(job: Job, outcome: Outcome) -> Steps:
    """Lambda of the places where the chain is: estimated while sampling, in growing windows, then fixed."""
    chain = start_chain(job)
    watch = Watch(chain, MovingAverage(0.99, centred=True))
    chain.update.pace.zero_()
    lams: list[Tensor] | None = None
    done, window = 0, FIRST_WINDOW
    while done < job.warmup:
        left = job.warmup - done
        size = left if left < 2 * window else window
        watch.restart()
        for _ in range(size):
            chain.step()
            watch.look()
            yield
        found = [SAFETY * b for b in watch.bounds("max")]
        old: Sequence[Tensor | None] = lams or [None] * len(found)
        lams = _positive([slow_rise(before, now, 2.0) for before, now in zip(old, found, strict=True)])
        chain.update.set([job.temperature / (chain.num_data * lam) for lam in lams], lams, watch.variance)
        chain.update.pace.fill_(1.0)
        done, window = done + size, 2 * window
    yield from keep_draws(job, chain, outcome)
    return chain
