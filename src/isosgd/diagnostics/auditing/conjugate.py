"""Measure what a loop samples: run it on a posterior that is known, under the noise of real minibatches.

The data are rows ``y_i`` in R^d, the model says ``y_i ~ N(theta, I / h)``: the gradient of a minibatch's mean loss is
``h (theta - mean y)``, whose variance is ``h^2 Var(y) / n``. With a normal prior of precision p the tempered posterior
is ``N(N h mean(y) / (N h + p), T / (N h + p))`` in every coordinate. So the mean of the draws tells the prior that a
loop has, and their variance its temperature. Each coordinate is a chain of its own, as far as a rule works coordinate
by coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.diagnostics.auditing.described import Described
from isosgd.diagnostics.auditing.loop import Loop
from isosgd.diagnostics.auditing.reading import read
from isosgd.diagnostics.auditing.recursion import temperature_at
from isosgd.samplers import ISGD, VSGD, Sampler

Factory = Callable[[list[Tensor]], Optimizer]
DIMENSION = 512  # coordinates, so many chains side by side
BURN_IN, KEPT = 8.0, 40.0  # in times that a chain takes to forget
BLOCKS = 20
DRAWS = 8  # in the time that a chain takes to forget
LARGEST_STEP = 0.02  # lr s h: discretisation stays below 1%
PAST = 10.0  # a chain forgets no faster than in so many of the loop's own times (1 / friction, a period)
ADDED = 0.01  # heat of gradient noise over that of the injected noise, where it was not given
SHIFT = 30.0  # how far the prior moves the mean, in standard deviations of the draws
MOST_ROWS, MOST_NUMBERS = 1024, 1 << 22  # of the data
MOST_BATCH = 8
AHEAD = 32  # minibatches that are made at once
FOLLOWED = 8  # steps from one noise vector that a sampler of ours is shown to the next
MOST_STEPS = 200_000
QUIET = 0.2  # Var(g) over h / N, at which curvature rather than noise bounds a rate
WARMED = 100  # noise vectors that a sampler of ours sees before its rate is set


@dataclass(frozen=True)
class Measured:
    """What a run on the conjugate target showed.

    Attributes:
        temperature: variance of the draws times N h + p.
        error: its Monte-Carlo standard error.
        expected: the temperature that the description says for this target, with the gradient noise and the error of
            discrete steps reckoned in; None when there is none.
        prior_precision: p, from the mean of the draws; None when the loop is not said to have a prior.
        prior_error: its standard error.
        curvature: h of the target.
        gradient_noise: Var(g) of the target's minibatches.
        steps: of the run, the burn-in included.
    """

    temperature: float
    error: float
    expected: float | None
    prior_precision: float | None
    prior_error: float | None
    curvature: float
    gradient_noise: float
    steps: int

    def agrees(self, errors: float = 4.0, within: float = 0.05) -> bool:
        """Whether measured and expected are one, by ``errors`` standard errors and by a relative error."""
        if self.expected is None or not math.isfinite(self.temperature):
            return False
        off = abs(self.temperature - self.expected)
        return off <= max(errors * self.error, 1e-3 * self.expected) and off <= within * self.expected

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


class Conjugate:
    """The target, made to fit a loop: a curvature that its rate suits, gradient noise of the size that was told.

    Args:
        loop: the rule; of its noise only the size is used, to choose that of the gradients.
        generator: of the data and the minibatches.
        dimension: d; less where the data would not fit.
    """

    def __init__(self, loop: Loop, generator: torch.Generator, dimension: int = DIMENSION) -> None:
        own = loop.relaxation(1.0) * loop.lr * loop.scale  # 1 / mean response
        slow = PAST * max(1.0 / loop.friction, loop.period)
        step = min(LARGEST_STEP, own / slow)
        self.loop, self.generator = loop, generator
        self.precision = loop.precision or 0.0
        self.in_loss = loop.value("prior") * (loop.prior_precision or 0.0)
        self.likelihood = loop.curvature or step / (loop.lr * loop.scale)
        self.curvature = self.likelihood + self.precision / loop.num_data
        heat = loop.noise_temperature()
        self.heat = loop.meant if heat is None else heat
        self.noise = self._noise()
        self.epoch = loop.minibatches == "epoch"
        count = loop.num_data if self.epoch else min(loop.num_data, MOST_ROWS)
        self.dimension = max(32, min(dimension, MOST_NUMBERS // count))
        self.batch = min(loop.batch_size or MOST_BATCH, loop.num_data)
        if not self.epoch:  # as much noise from fewer rows, since their spread is free
            self.batch = min(self.batch, MOST_BATCH)
        self.batch = max(2, self.batch // 2 * 2)
        self.mean = self._far()
        y = torch.randn(count, self.dimension, generator=generator, dtype=torch.float64)
        y = (y - y.mean(0)) / y.std(0, correction=0).clamp_min(1e-12)
        self.data = self.mean + y * math.sqrt(self.noise * self.batch) / self.likelihood
        self._ready: list[Tensor] = []

    def _noise(self) -> float:
        """Var(g): as told; or so that it adds little to the temperature; or, without noise, of a model that fits."""
        loop = self.loop
        if loop.gradient_noise is not None:
            return loop.gradient_noise
        if not self.heat:
            return self.likelihood / (loop.batch_size or MOST_BATCH)
        return ADDED * self.heat / loop.temperature_of(velocity=(loop.lr * loop.scale) ** 2)

    def _far(self) -> float:
        """Mean of the data, so far from the prior's that the shift it causes can be measured."""
        if not self.precision:
            return 0.0
        total = self.loop.num_data * self.curvature
        return SHIFT * math.sqrt((self.heat or 1.0) / total) * total / self.precision

    def gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the loop's loss for a minibatch, and half the difference of those of its halves."""
        if not self._ready:
            self._ready = list(self._minibatches())
        mean, noise = self._ready.pop()
        g = (theta - mean).mul_(self.loop.scale * self.likelihood)
        return g.add_(theta, alpha=self.in_loss) if self.in_loss else g, noise

    def _minibatches(self) -> Tensor:
        """Means and noise vectors ``[steps, 2, d]`` of the next minibatches: of an epoch, or of some steps."""
        if self.epoch:
            steps = len(self.data) // self.batch
            rows = torch.randperm(len(self.data), generator=self.generator)[: steps * self.batch]
        else:
            steps = AHEAD
            rows = torch.randint(len(self.data), (steps * self.batch,), generator=self.generator)
        first, second = self.data[rows].view(steps, 2, self.batch // 2, -1).mean(2).unbind(1)
        noise = 0.5 * self.loop.scale * self.likelihood * (second - first)
        return torch.stack([0.5 * (first + second), noise], 1)

    def expected(self) -> float | None:
        """The temperature that the description says for this target."""
        loop = self.loop
        if loop.noise is None:
            return None
        whole = temperature_at(loop, self.curvature, self.noise)
        if not self.epoch:
            return whole
        told = replace(loop, gradient_noise=self.noise, curvature=self.curvature)
        if loop.corrected:
            return whole + (told.gradient_temperature() or 0.0)
        cold = temperature_at(loop, self.curvature)
        return cold + (whole - cold) * told.epoch_share()


def vectors_needed(sampler: Sampler) -> int:
    """Noise vectors to show a sampler before its rate is set."""
    geometry = sampler.geometry if isinstance(sampler, ISGD) else None
    return WARMED if geometry is None else max(WARMED, geometry.min_vectors)


def needs_rate(optimizer: Optimizer) -> bool:
    """Whether it is a sampler of ours that has yet to find its rate."""
    return isinstance(optimizer, Sampler) and optimizer.param_groups[0].get("rate") is None


def _fitting(loop: Loop, make: Factory) -> Loop:
    """The loop on a target from which a sampler that finds its own rate finds one that forgets soon.

    Shapes take their curvature from the noise, which must be that of a model that fits, and V-SGD lives on it; for
    others it is quiet.
    """
    optimizer = make([torch.zeros(8, dtype=torch.float64).requires_grad_()])
    if not needs_rate(optimizer):
        return loop
    curvature = loop.curvature or 1.0
    share = QUIET / loop.num_data
    if isinstance(optimizer, ISGD) and optimizer.geometry is not None:
        share = 1.0 / (optimizer.batch_size or MOST_BATCH)
    elif isinstance(optimizer, VSGD):
        share = max(1.0 / MOST_BATCH, 2.0 / (LARGEST_STEP * loop.num_data))
    return replace(loop, curvature=curvature, gradient_noise=curvature * share)


def warm(optimizer: Optimizer, theta: Tensor, target: Conjugate) -> bool:
    """Let a sampler of ours that has no rate yet see the noise, and set it; whether it did."""
    if not (needs_rate(optimizer) and isinstance(optimizer, Sampler)):
        return False
    for _ in range(vectors_needed(optimizer)):
        theta.grad, noise = target.gradient(theta.detach())
        optimizer.observe([noise])
    optimizer.adapt([target.curvature] * len(optimizer.param_groups))
    optimizer.freeze()
    return True


def measure(loop: Loop, make: Factory | None = None, *, seed: int = 0, relaxations: float = KEPT) -> Measured:
    """Run a loop on the conjugate target and measure its temperature and its prior.

    Args:
        loop: the description.
        make: makes the optimizer to run from a list of tensors; the description itself is run when None.
        seed: of data, minibatches and, for a description, of its noise.
        relaxations: how long draws are taken, in times that a chain takes to forget.

    Example:
        >>> found = measure(Loop(num_data=1000, lr=1e-3, noise="sqrt(2*lr)"))
        >>> found.agrees() and 950 < found.temperature < 1080  # N times too hot
        True
    """
    generator = torch.Generator().manual_seed(seed)
    target = Conjugate(loop if make is None else _fitting(loop, make), generator)
    theta = torch.full((target.dimension,), target.mean, dtype=torch.float64).requires_grad_()
    if make is None:
        told = replace(loop, gradient_noise=target.noise)
        optimizer: Optimizer = Described([theta], told, torch.Generator().manual_seed(seed + 1))
    else:
        optimizer = make([theta])
    if warm(optimizer, theta, target):  # it has found a rate for this target
        found = read(optimizer)[0][0]
        loop = target.loop = replace(target.loop, **{name: found[name] for name in ("lr", "noise")})
    time = max(loop.relaxation(target.curvature), 1.0 / loop.friction)
    first = math.ceil(BURN_IN * time) + loop.burn_in
    steps = first + math.ceil(relaxations * time)
    if steps > MOST_STEPS:
        raise ValueError(
            f"the loop forgets in {time:,.0f} steps where the curvature is {target.curvature:.3g}, which would take "
            f"{steps:,} steps to measure: leave curvature out, and one that suits the rate is taken"
        )
    every = max(1, int(time / DRAWS / loop.period))
    # From the data's mean: what is summed is small, and the prior's shift is what is looked for.
    blocks = torch.zeros(BLOCKS, 3, dtype=theta.dtype)  # number of draws, their mean and their mean square
    centre = torch.zeros((), dtype=theta.dtype)
    for step in range(steps):
        theta.grad, noise = target.gradient(theta.detach())
        if isinstance(optimizer, Sampler):
            optimizer.step(noise=[noise] if step % FOLLOWED == 0 else None)
        else:
            optimizer.step()
        counts = optimizer.at_end() if isinstance(optimizer, Described) else (step + 1) % loop.period == 0
        if isinstance(optimizer, Sampler):
            counts = counts and optimizer.sampling
        if step < first or not counts or step // loop.period % every:
            continue
        with torch.no_grad():
            off = theta - target.mean
            centre = centre if blocks[:, 0].any() else off.mean()
            off -= centre
            block = blocks[(step - first) * BLOCKS // (steps - first)]
            block += torch.stack([torch.ones_like(centre), off.mean(), off.square().mean()])
    return _found(target, blocks, float(centre), steps)


def _found(target: Conjugate, blocks: Tensor, centre: float, steps: int) -> Measured:
    """Blocks of time are independent, coordinates are not quite (they share minibatches): blocks tell the errors."""
    blocks = blocks[blocks[:, 0] > 0]
    means, squares = (blocks[:, 1:] / blocks[:, :1]).unbind(1)
    root = math.sqrt(len(blocks))
    middle = means.mean()
    each = squares - 2 * middle * means + middle**2  # mean squares around the mean of all draws
    total = target.loop.num_data * target.curvature
    shift, shift_error = centre + float(middle), float(means.std()) / root
    precision = error = None
    if target.precision:
        # mean = N h y / (N h + p), so that p = -N h shift / (y + shift)
        whole = target.loop.num_data * target.likelihood
        precision = -whole * shift / (target.mean + shift)
        error = whole * shift_error * target.mean / (target.mean + shift) ** 2
    return Measured(
        temperature=float(each.mean()) * total,
        error=float(each.std()) / root * total,
        expected=target.expected(),
        prior_precision=precision,
        prior_error=error,
        curvature=target.curvature,
        gradient_noise=target.noise,
        steps=steps,
    )
