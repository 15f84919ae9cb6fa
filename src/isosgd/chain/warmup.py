"""The automatic warm-up: find the typical set, find the rates, say whether it worked.

1. *Descend* at temperature 0 with momentum, at half the largest stable rate, until the loss no longer falls.
2. *Sample* in windows that double. In each, gradient noise and curvature are measured where the chain now is; rates
   fall at once when they must and rise by at most 2 from window to window.
3. *Settle* when in two successive windows no rate changed by more than a half and the loss did not drift. Rates
   are frozen then, which is what Theorem 1 asks for.

The paper's schemes a, b and c are driven by the sampler itself for a fixed number of steps (see
`isosgd.samplers.isgd`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from isosgd.chain.autocorrelation import integrated_time
from isosgd.chain.batches import tree_map
from isosgd.chain.chain import Chain
from isosgd.chain.progress import Progress
from isosgd.errors import DivergedError
from isosgd.noise import dot, join
from isosgd.noise.stable import TailMeter
from isosgd.samplers import ISGD
from isosgd.samplers.steppers import allowed_rate_curvature, hamiltonian_, variance_inflation

FIRST_WINDOW = 50
LEAST_LAST_WINDOW = 400
DESCENT_WINDOW = 100
DESCENT_RATE = 0.5  # of 1 / h; with friction 0.1 the limit is 3.8
DESCENT_FRICTION = 0.1
PROBE_EVERY = 10
SPLIT_EVERY = 2
ADAPT_EVERY = 20
CAUTION = 4.0
VECTORS = 8  # noise vectors in the last window, over the least that tell a Lambda's shape
EARLY_RISE = 10.0
SETTLED_RATIO = 1.5
SIGNAL_RATIO = 2.0
RELAXATIONS = 5.0
MOST_STEPS = 20_000
PAPER_STEPS = 2_000  # the paper's warm-up on its regressions
MOST_DESCENT_SHARE = 0.5
TRACES, TRACE_LENGTH = 16, 400


@dataclass
class GroupReport:
    """What the warm-up found for one group (layer)."""

    name: str
    rate: float
    lam: float
    curvature: float
    rate_curvature: float
    predicted_bias: float
    tail_index: float
    noise_share: float
    clipped_share: float


@dataclass
class WarmupReport:
    """Outcome of a warm-up.

    Attributes:
        settled: whether rates and loss stopped changing.
        reason: why not, and what would help; empty when settled.
        steps: gradients spent.
        descent: of them in the descent.
        keep_every: spacing of draws measured from the autocorrelation of predictions (None when not measured).
        loss: mean and standard deviation of the minibatches' loss in the last window (None when not measured).
        groups: one report for each layer.
    """

    settled: bool
    reason: str
    steps: int
    descent: int
    keep_every: int | None
    groups: list[GroupReport] = field(default_factory=list)
    loss: tuple[float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def warm_up(chain: Chain, steps: int | None, progress: Progress, measure_spacing: bool) -> WarmupReport:
    """Run the warm-up of a chain and freeze its rates.

    Args:
        chain: the chain; it is left where sampling starts.
        steps: gradients to spend; None for as many as it takes, up to a limit.
        progress: told of every step.
        measure_spacing: whether to measure how far apart draws should be.
    """
    return _Warmup(chain, steps, progress).run(measure_spacing)


class _Warmup:
    def __init__(self, chain: Chain, steps: int | None, progress: Progress) -> None:
        self.chain, self.progress = chain, progress
        self.budget = MOST_STEPS if steps is None else steps
        self.exact = steps is not None
        self.spent = 0
        self.tails: list[TailMeter] = []
        self.traces: list[np.ndarray[Any, np.dtype[np.float64]]] = []
        self.trace_stride = 1
        self.examples: Any = None
        self.signal: list[list[float]] = []
        self.seen_curvatures: list[list[float]] = []
        self.curvatures: list[float] = []
        self.loss: tuple[float, float] | None = None

    def run(self, measure_spacing: bool) -> WarmupReport:
        sampler = self.chain.sampler
        if isinstance(sampler, ISGD) and sampler.scheme != "windowed":
            return self._paper_scheme(sampler, measure_spacing)
        if self.budget < 2 * FIRST_WINDOW:
            raise ValueError(
                f"warmup = {self.budget} is too short to measure anything: give at least {2 * FIRST_WINDOW} "
                f"({8 * FIRST_WINDOW} or more to settle), 'auto', or 0 with a rate of your own"
            )
        self.chain.evaluate()
        self._count("starting")
        for _ in range(2 * PROBE_EVERY):
            self._probe("starting")
        descent = self._descend()
        settled, reason = self._windows()
        keep = self._spacing() if measure_spacing else None
        report = WarmupReport(settled, reason, self.spent, descent, keep, self._groups(), self.loss)
        sampler.freeze()
        return report

    # -- 1. descend ---------------------------------------------------------------------------------------------------

    def _descend(self) -> int:
        """Momentum descent, never upwards: a window that ends higher than the best so far is undone.

        The rate is cut when the loss stops falling, down to the rate of sampling. Scales of priors and noise are
        held: a hierarchical density has its mode where a scale is zero, far from all its mass.
        """
        chain, limit = self.chain, int(MOST_DESCENT_SHARE * self.budget)
        window = max(min(DESCENT_WINDOW, limit // 8), 5)
        held = set(chain.target.extras(chain.params))
        moving = [
            (group, h_index)
            for h_index, group in enumerate(chain.sampler.param_groups)
            if not held & {name for name, leaf in chain.params.items() if any(leaf is p for p in group["params"])}
        ]
        factor, start = DESCENT_RATE, self.spent
        smallest = DESCENT_FRICTION * allowed_rate_curvature(chain.sampler.bias)
        best, error = self._mean_loss(window // 5)
        while factor > smallest and self.spent - start + window <= limit:
            saved = chain.snapshot()
            try:
                losses = self._descent_window(factor, window, moving)
                later = losses[len(losses) // 2 :]
                now, error = float(later.mean()), 2.0 * float(later.std()) / math.sqrt(len(later))
                now += self._prior_part()
            except DivergedError:
                now = math.inf
            if not now < best + error:
                chain.restore(saved)
            if not now < best - max(error, 1e-3 * abs(best)):
                factor /= 4.0
            best = min(best, now)
        return self.spent - start

    def _mean_loss(self, batches: int) -> tuple[float, float]:
        """Mean loss where the chain is, and twice its standard error."""
        losses = []
        for _ in range(max(batches, 2)):
            self.chain.evaluate()
            losses.append(self.chain.loss)
            self._count("descending")
        return float(np.mean(losses)) + self._prior_part(), 2.0 * float(np.std(losses)) / math.sqrt(len(losses))

    def _prior_part(self) -> float:
        """The prior's part of the loss, which the loss of a minibatch leaves out."""
        with torch.no_grad():
            return -float(self.chain.target.log_prior(self.chain.params)) / self.chain.num_data

    def _descent_window(
        self, factor: float, length: int, moving: list[tuple[dict[str, Any], int]]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        chain = self.chain
        velocity = {id(p): torch.zeros_like(p) for p in chain.leaves}
        losses = []
        for i in range(length):
            chain.evaluate()
            losses.append(chain.loss)
            if i % 5 == 0:
                self._probe("descending")
            curvatures = chain.curvature.values()
            with torch.no_grad():
                for group, index in moving:
                    params = group["params"]
                    speeds, grads = [velocity[id(p)] for p in params], [p.grad for p in params]
                    rate = factor / curvatures[index]
                    hamiltonian_(params, speeds, grads, rate, DESCENT_FRICTION)
            self._count("descending")
        return np.array(losses)

    # -- 2. and 3. sample in windows until settled --------------------------------------------------------------------

    def _windows(self) -> tuple[bool, str]:
        chain, length = self.chain, FIRST_WINDOW
        if chain.shaped is not None:
            length, axes = chain.shaped.least, 4 * chain.shaped.axes
            if self.spent + length + axes > self.budget:
                raise ValueError(
                    f"warmup = {self.budget} is too short for structure {chain.shaped.name!r}, which needs "
                    f"{length + axes} gradients after the descent for a first look at {len(chain.stiffness.image)} "
                    f"parameters: give at least {4 * (length + axes)}, or structure='layer'"
                )
        for _ in range(length):  # a first noise estimate before the first move
            noise = chain.evaluate(split=True)
            chain.sampler.observe(noise if chain.sampler.estimator.centred else None)
            self._count("measuring noise")
        # A mode has far less noise than its surroundings: start well below the rate it suggests, and let it rise.
        chain.adapt([CAUTION * h for h in chain.curvature.values()])
        if chain.shaped is not None:  # and a look at the curvature along its axes, twice
            for _ in range(4 * chain.shaped.axes):
                self._probe("measuring curvature")
            chain.adapt(chain.curvatures())
        settled_before, reason = False, ""
        while True:
            left = self.budget - self.spent
            # A remainder too short for another doubled window is spent in this one.
            length = left if self.exact and left < 3 * length else min(length, left)
            if length < 2:
                return False, reason or f"{self.budget} steps are too few: give warmup at least {8 * FIRST_WINDOW}"
            old = self._rates()
            losses = self._window(length)
            # One probe is noisy: the upper quartile over the window's second half bounds the curvature of most places.
            self.curvatures = np.quantile(self.seen_curvatures[len(self.seen_curvatures) // 2 :], 0.75, axis=0).tolist()
            # A shape is measured in every direction, so it may be left quickly while the chain is still on its way.
            early = chain.shaped is not None and length < LEAST_LAST_WINDOW
            chain.adapt(self.curvatures, rise=EARLY_RISE if early else 2.0)
            self.loss = float(losses.mean()), float(losses.std())
            reason = self._unsettled(old, losses)
            settled = not reason
            if self.exact and self.spent >= self.budget:
                return settled, reason
            if not self.exact and settled and settled_before and length >= self._least_last_window():
                return True, ""
            if self.budget - self.spent < length:
                return settled, reason
            settled_before = settled
            length *= 2

    def _least_last_window(self) -> int:
        shaped = self.chain.shaped
        return LEAST_LAST_WINDOW if shaped is None else max(LEAST_LAST_WINDOW, VECTORS * shaped.least)

    def _window(self, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        chain = self.chain
        chain.sampler.forget_noise()
        chain.stiffness.forget()
        self.tails = [TailMeter() for _ in chain.sampler.param_groups]
        self.signal = [[] for _ in chain.sampler.param_groups]
        self.seen_curvatures = []
        self.traces, self.trace_stride = [], max(1, length // TRACE_LENGTH)
        losses: list[float] = []
        end = self.spent + length
        while self.spent < end:
            i = len(losses)
            noise = chain.evaluate(split=chain.shaped is not None or i % SPLIT_EVERY == 0)
            self._count("warming up")
            losses.append(chain.loss)
            if i % PROBE_EVERY == 0 and self.spent < end:
                self._probe("warming up")
                self.seen_curvatures.append(chain.curvatures())
            if noise is not None:
                self._feed_tails(noise)
                self._feed_signal(noise)
            if i % self.trace_stride == 0:
                self._trace()
            chain.sampler.step(noise=noise if chain.sampler.estimator.centred else None)
            if i % ADAPT_EVERY == ADAPT_EVERY - 1:  # within a window rates may only fall
                chain.adapt(chain.curvatures(), rise=1.0)
        return np.array(losses)

    def _unsettled(self, old: list[float], losses: np.ndarray[Any, np.dtype[np.float64]]) -> str:
        """Why the chain has not settled; empty when it has."""
        groups = self.chain.sampler.param_groups
        ratios = [new / o for new, o in zip(self._rates(), old, strict=True)]
        if self.exact and self.spent >= self.budget:
            # No window is left to use a higher rate; that the old one was low did no harm, only cost time.
            ratios = [min(ratio, 1.0) for ratio in ratios]
        worst = max(range(len(ratios)), key=lambda i: abs(math.log(ratios[i])))
        if max(ratios[worst], 1.0 / ratios[worst]) > SETTLED_RATIO:
            return (
                f"the rate of group {groups[worst]['name']!r} still changes (by {ratios[worst]:.2f} in the "
                "last window of "
                f"{len(losses)} steps): a longer warmup= or a start closer to a mode (init=) would help"
            )
        for group, rate, h, signal in zip(groups, self._rates(), self.curvatures, self.signal, strict=True):
            # At stationarity E|grad f / N|^2 = T tr(H) / N: with top curvature h it cannot exceed T d h / N.
            size = sum(p.numel() for p in group["params"])
            most = group["temperature"] * h * size / group["num_data"]
            if self.chain.shaped is not None:  # the same in the metric of P, over all groups
                size = sum(leaf.numel() for leaf in self.chain.leaves)
                most = group["temperature"] * rate * h * size / group["num_data"]
            later = np.array(signal[len(signal) // 2 :])
            found, error = float(later.mean()), 3.0 * float(later.std()) / math.sqrt(max(len(later), 1))
            if found - error > SIGNAL_RATIO * most:
                return (
                    f"the gradient of group {group['name']!r} is still {math.sqrt(found / most):.1f} times "
                    "what it can be at "
                    "stationarity: the chain is still on its way; a longer warmup= or a start closer to a "
                    "mode (init=) would help"
                )
        slowest = min(range(len(groups)), key=lambda i: self._rates()[i] * self.curvatures[i])
        relaxation = 1.0 / max(self._rates()[slowest] * self.curvatures[slowest], 1e-12)
        if len(losses) < RELAXATIONS * relaxation:
            return (
                f"the last window of {len(losses)} steps is short beside the {relaxation:.0f} steps that group "
                f"{groups[slowest]['name']!r} takes to forget where it was, even along its stiffest "
                "direction: a longer "
                "warmup=, a larger batch_size= or a higher temperature would help"
            )
        parts = np.array([part.mean() for part in np.array_split(losses, 10)])
        first, second = parts[:5], parts[5:]
        drift = float(second.mean() - first.mean())
        error = math.sqrt(float(first.var(ddof=1) + second.var(ddof=1)) / 5.0)
        if abs(drift) > 4.0 * error:
            return (
                f"the mean loss still drifts (by {drift:+.3g}, {abs(drift) / error:.0f} standard errors, "
                "in the last window "
                f"of {len(losses)} steps): a longer warmup= or a start closer to a mode (init=) would help"
            )
        return ""

    # -- the paper's schemes ------------------------------------------------------------------------------------------

    def _paper_scheme(self, sampler: ISGD, measure_spacing: bool) -> WarmupReport:
        steps = self.budget if self.exact else PAPER_STEPS
        sampler.warmup = steps
        self.tails = [TailMeter() for _ in sampler.param_groups]
        self.trace_stride = max(1, steps // TRACE_LENGTH)
        for i in range(steps):
            noise = self.chain.evaluate(split=sampler.estimator.centred)
            self._feed_tails(noise if noise is not None else [leaf.grad for leaf in self.chain.leaves])
            if i % self.trace_stride == 0:
                self._trace()
            sampler.step(noise=noise)
            self._count(f"scheme {sampler.scheme}")
        ready = sampler.param_groups[0]["lam"] is not None
        reason = "" if ready else f"{steps} steps are too few for a first noise estimate: give a longer warmup="
        if not ready:
            raise ValueError(reason)
        self.chain.evaluate()
        for _ in range(2 * PROBE_EVERY):  # for the report alone: these schemes have no guard
            self.chain.probe_curvature()
        sampler.freeze()
        keep = None
        if measure_spacing:  # the traces so far are of training, or of a frozen model
            self.traces, self.trace_stride = [], 1
            for _ in range(TRACE_LENGTH):
                self.chain.step(split=sampler.estimator.centred)
                self._trace()
                self._count("measuring")
            keep = self._spacing()
        report = WarmupReport(True, "", self.spent, 0, keep, self._groups())
        return report

    # -- measurements -------------------------------------------------------------------------------------------------

    def _probe(self, stage: str) -> None:
        self.chain.probe_curvature()
        self._count(stage)

    def _count(self, stage: str) -> None:
        self.spent += 1
        self.progress.advance(stage)

    def _rates(self) -> list[float]:
        return [float(g["rate"]) for g in self.chain.sampler.param_groups]

    def _feed_tails(self, noise: list[Any]) -> None:
        vectors = iter(noise)
        for meter, group in zip(self.tails, self.chain.sampler.param_groups, strict=True):
            meter.update([next(vectors) for _ in group["params"]])

    def _feed_signal(self, noise: list[Any]) -> None:
        """``|g|^2 - |D|^2``: squared length of the gradient without its noise, unbiased, for each group."""
        vectors = iter(noise)
        shaped = self.chain.shaped
        if shaped is not None:
            both = [join(noise), join([leaf.grad for leaf in self.chain.leaves])]  # type: ignore[misc]
            lengths = [float(dot(x, shaped.direction(x).to(x.dtype))) for x in both]
            for signal in self.signal:
                signal.append(lengths[1] - lengths[0])
            return
        for signal, group in zip(self.signal, self.chain.sampler.param_groups, strict=True):
            mine = join([next(vectors) for _ in group["params"]])
            grads = join([p.grad for p in group["params"]])
            signal.append(float(dot(grads, grads) - dot(mine, mine)))

    def _trace(self) -> None:
        """Log likelihoods of a few fixed examples: functions mix even where weights do not."""
        if self.examples is None:
            self.examples = tree_map(lambda t: t[:TRACES] if t.dim() else t, self.chain.batch)
        with torch.no_grad():
            values = self.chain.target.log_likelihood(self.chain.params, self.examples)
        self.traces.append(values.double().cpu().numpy())

    def _spacing(self) -> int:
        """Steps between draws: the integrated autocorrelation time of the slowest traced example."""
        traces = np.stack(self.traces, axis=1)
        slowest = max(integrated_time(trace) for trace in traces)
        return max(1, math.ceil(slowest * self.trace_stride))

    def _groups(self) -> list[GroupReport]:
        sampler = self.chain.sampler
        reports = []
        curvatures = self.curvatures or self.chain.curvatures()
        for group, h, meter in zip(sampler.param_groups, curvatures, self.tails, strict=True):
            rate = float(group["rate"])
            sigma = sampler.friction * group["temperature"] / (group["num_data"] * rate) if rate > 0 else math.inf
            counted = 1.0  # share of the composite noise that makes for a bias
            if self.chain.shaped is not None and isinstance(sampler, ISGD):
                share = min(1.0, 0.5 / (sampler.rule().batch_size * self.chain.shaped.factor))
                counted = share if sampler.averaged else 1.0
            else:
                share = float(sampler.noise_summary(group, "top")) / sigma if sampler.group_noise(group) else math.nan
            reports.append(
                GroupReport(
                    name=group["name"],
                    rate=rate,
                    lam=sigma,
                    curvature=h,
                    rate_curvature=rate * h,
                    predicted_bias=variance_inflation(rate * h, sampler.friction, counted) - 1.0,
                    tail_index=meter.tail_index(),
                    noise_share=share,
                    clipped_share=sampler.clipped_share(group) if isinstance(sampler, ISGD) else 0.0,
                )
            )
        return reports
