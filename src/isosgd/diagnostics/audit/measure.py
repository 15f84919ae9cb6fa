"""Run a loop on a known posterior, and measure its temperature and its prior.

The data are rows ``y_i`` in R^d and the model is ``y_i ~ N(theta, I / h)``: the gradient of a minibatch's mean loss is
``h (theta - mean y)``, with variance ``h^2 Var(y) / n``. With a normal prior of precision p the tempered posterior is
``N(N h mean(y) / (N h + p), T / (N h + p))`` in every coordinate. The mean of the draws shows the prior of a loop,
their variance its temperature. Each coordinate is a chain of its own, as far as a rule works coordinate by coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.diagnostics.audit.loop import Loop
from isosgd.diagnostics.audit.reading import read
from isosgd.samplers import ISGD, VSGD, Sampler

Factory = Callable[[list[Tensor]], Optimizer]
DIMENSION = 512  # coordinates
BURN_IN, KEPT = 8.0, 40.0  # relaxation times
BLOCKS = 20  # of time, for standard errors
DRAWS = 8  # per relaxation time
LARGEST_STEP = 0.02  # lr s h: the discretisation error stays below 1%
SLOWER = 10.0  # least ratio of the relaxation time to the loop's own times (1 / friction, a period)
ADDED = 0.01  # gradient noise relative to injected noise, if it is not given
SHIFT = 30.0  # how far the prior moves the mean, in standard deviations of the draws
MOST_ROWS, MOST_NUMBERS = 1024, 1 << 22  # of the data
MOST_BATCH = 8
PREFETCH = 32  # minibatches prepared at once
NOISE_EVERY = 8  # steps between the noise vectors that a sampler of ours gets
MOST_STEPS = 200_000
QUIET = 0.2  # Var(g) over h / N, at which curvature rather than noise bounds a rate
WARMUP = 100  # noise vectors that a sampler of ours observes before its rate is set


@dataclass(frozen=True)
class Measured:
    """What a run on the conjugate target showed.

    Attributes:
        temperature: variance of the draws times N h + p.
        error: its Monte-Carlo standard error.
        expected: the temperature that the description predicts for this target, with its gradient noise and the
            discretisation error; None if the noise is unknown, or minibatches are without replacement.
        prior_precision: p, from the mean of the draws; None if no prior is described.
        prior_error: its standard error.
        curvature: h of the target.
        gradient_noise: Var(g) of the target's minibatches.
        steps: of the run, burn-in included.
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
        """Whether measured and expected agree, by ``errors`` standard errors and by a relative error."""
        if self.expected is None or not math.isfinite(self.temperature):
            return False
        off = abs(self.temperature - self.expected)
        return off <= max(errors * self.error, 1e-3 * self.expected) and off <= within * self.expected


def measure(loop: Loop, make: Factory | None = None, *, seed: int = 0, relaxations: float = KEPT) -> Measured:
    """Run a loop on the conjugate target and measure its temperature and its prior.

    Args:
        loop: the description.
        make: makes the optimizer to run from a list of tensors; the description itself is run if None.
        seed: for data, minibatches and, when a description is run, its noise.
        relaxations: length of the run after the burn-in, in relaxation times.

    Example:
        >>> found = measure(Loop(num_data=1000, lr=1e-3, noise="sqrt(2*lr)"))
        >>> found.agrees() and 950 < found.temperature < 1080  # N times too hot
        True
    """
    generator = torch.Generator().manual_seed(seed)
    target = ConjugateTarget(loop if make is None else _with_own_target(loop, make), generator)
    theta = torch.full((target.dimension,), target.mean, dtype=torch.float64).requires_grad_()
    if make is None:
        described = replace(loop, gradient_noise=target.noise)
        optimizer: Optimizer = DescribedLoop([theta], described, torch.Generator().manual_seed(seed + 1))
    else:
        optimizer = make([theta])
    if _needs_rate(optimizer):
        _set_rate(optimizer, theta, target)
        found = read(optimizer)[0][0]
        loop = target.loop = replace(target.loop, lr=found["lr"], noise=found["noise"])
    time = max(loop.relaxation(target.curvature), 1.0 / loop.friction)
    first = math.ceil(BURN_IN * time)
    steps = first + math.ceil(relaxations * time)
    if steps > MOST_STEPS:
        raise ValueError(
            f"at curvature {target.curvature:.3g} the loop relaxes in {time:,.0f} steps, so that a measurement would "
            f"take {steps:,} steps: leave out curvature to have one chosen that suits the rate"
        )
    every = max(1, int(time / DRAWS / loop.period))
    # Sums are of deviations from the mean of the first draw, to keep their digits.
    blocks = torch.zeros(BLOCKS, 3, dtype=theta.dtype)  # number of draws, their mean and their mean square
    centre = torch.zeros((), dtype=theta.dtype)
    for step in range(steps):
        theta.grad, noise = target.gradient(theta.detach())
        if isinstance(optimizer, Sampler):
            optimizer.step(noise=[noise] if step % NOISE_EVERY == 0 else None)
        else:
            optimizer.step()
        # A described loop that moves first has its gradient where the last step's move ended.
        moves_first = make is None and loop.order == "move"
        ended = (step + 1 + moves_first) % loop.period == 0
        if isinstance(optimizer, Sampler):
            ended = ended and optimizer.sampling
        if step < first or not ended or step // loop.period % every:
            continue
        with torch.no_grad():
            off = theta - target.mean
            centre = centre if blocks[:, 0].any() else off.mean()
            off -= centre
            block = blocks[(step - first) * BLOCKS // (steps - first)]
            block += torch.stack([torch.ones_like(centre), off.mean(), off.square().mean()])
    return _result(target, blocks, float(centre), steps)


def _result(target: ConjugateTarget, blocks: Tensor, centre: float, steps: int) -> Measured:
    """Standard errors come from blocks of time: coordinates share minibatches, so they are not quite independent."""
    blocks = blocks[blocks[:, 0] > 0]
    means, squares = (blocks[:, 1:] / blocks[:, :1]).unbind(1)
    root = math.sqrt(len(blocks))
    middle = means.mean()
    each = squares - 2 * middle * means + middle**2  # mean squares around the mean of all draws
    total = target.loop.num_data * target.curvature
    precision = error = None
    if target.precision:
        # mean = N h y / (N h + p), so that p = -N h shift / (y + shift)
        shift, shift_error = centre + float(middle), float(means.std()) / root
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


class DescribedLoop(Optimizer):
    """A description as an optimizer; gradients in ``.grad`` are those of its loss. For replicas it is their mean."""

    def __init__(self, params: Sequence[Tensor], loop: Loop, generator: torch.Generator | None = None) -> None:
        super().__init__(params, {"lr": loop.lr, "step": 0})
        self.loop = loop
        known = (loop.lr * loop.scale) ** 2 * (loop.gradient_noise or 0.0) if loop.corrected else 0.0
        self.sigma = math.sqrt(max(loop.sigma**2 - known, 0.0))  # the gradients contribute the rest
        self.generator = generator or torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, with clipping and weight decay."""
        loop, group = self.loop, self.param_groups[0]
        grads = [p.grad for p in group["params"]]
        if loop.clipping is not None:
            norm = torch.sqrt(sum((g.square().sum() for g in grads), start=torch.zeros(())))
            grads = [g * (loop.clipping / norm).clamp(max=1.0) for g in grads]
        step, by_shape = group["step"], dict[Any, Tensor]()
        for p, g in zip(group["params"], grads, strict=True):
            state = self.state[p]
            if not state:
                state.update(velocity=torch.zeros_like(p), noise=torch.zeros_like(p))
            if loop.shared_noise != "steps" or step % loop.reused == 0:
                fresh = p.new_empty((loop.replicas, *p.shape)).normal_(generator=self.generator).mean(0)
                shared = loop.shared_noise == "tensors"
                last, state["noise"] = state["noise"], by_shape.setdefault(p.shape, fresh) if shared else fresh
            noise = 0.5 * (last + state["noise"]) if loop.averaged else state["noise"]
            self._move(p, g, state["velocity"], self.sigma * noise, step)
        group["step"] += 1

    def _move(self, p: Tensor, g: Tensor, v: Tensor, noise: Tensor, step: int) -> None:
        loop = self.loop
        # A loop that moves first has its gradient where the last step's move ended: it is refreshed after the kick.
        refreshed = loop.refresh_every is not None and (step + (loop.order == "move")) % loop.refresh_every == 0
        if refreshed and loop.order == "kick":
            v.normal_(0.0, loop.refreshed_sd, generator=self.generator)
        v.mul_(loop.momentum).sub_(g if loop.decoupled else g + loop.weight_decay * p, alpha=loop.lr)
        if loop.noise_on == "velocity":
            v.add_(noise)
        if refreshed and loop.order == "move":
            v.normal_(0.0, loop.refreshed_sd, generator=self.generator)
        if loop.decoupled:
            p.mul_(1.0 - loop.lr * loop.weight_decay)
        p.add_(v)
        if loop.noise_on == "parameters":
            p.add_(noise)


class ConjugateTarget:
    """The known posterior, with a curvature that suits the rate of a loop and gradient noise of the described size."""

    def __init__(self, loop: Loop, generator: torch.Generator) -> None:
        self.loop, self.generator = loop, generator
        self.precision = loop.precision or 0.0
        self.in_loss = loop.value("prior") * (loop.prior_precision or 0.0)
        step = min(LARGEST_STEP, 1.0 / (loop.response * SLOWER * max(1.0 / loop.friction, loop.period)))
        self.likelihood = loop.curvature or step / (loop.lr * loop.scale)
        self.curvature = self.likelihood + self.precision / loop.num_data
        injected = loop.noise_temperature()
        heat = loop.target_temperature if injected is None else injected
        if loop.gradient_noise is not None:
            self.noise = loop.gradient_noise
        elif heat:  # adds little to the temperature
            self.noise = ADDED * heat / loop.temperature_of(gradients=1.0)
        else:  # that of a well specified model
            self.noise = self.likelihood / (loop.batch_size or MOST_BATCH)
        self.mean = 0.0  # of the data: so far from the prior's that its shift can be measured
        if self.precision:
            total = loop.num_data * self.curvature
            self.mean = SHIFT * math.sqrt((heat or 1.0) / total) * total / self.precision
        self.epoch = loop.minibatches == "epoch"
        rows = loop.num_data if self.epoch else min(loop.num_data, MOST_ROWS)
        self.dimension = max(32, min(DIMENSION, MOST_NUMBERS // rows))
        batch = min(loop.batch_size or MOST_BATCH, loop.num_data)
        # Fewer rows can have the same gradient noise, since the spread of the data is free.
        self.batch = max(2, (batch if self.epoch else min(batch, MOST_BATCH)) // 2 * 2)
        y = torch.randn(rows, self.dimension, generator=generator, dtype=torch.float64)
        y = (y - y.mean(0)) / y.std(0, correction=0).clamp_min(1e-12)
        self.data = self.mean + y * math.sqrt(self.noise * self.batch) / self.likelihood
        self._ready: list[Tensor] = []

    def gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the loop's loss on a minibatch, and half the difference of those of its halves."""
        if not self._ready:
            self._ready = list(self._minibatches())
        mean, noise = self._ready.pop()
        g = (theta - mean).mul_(self.loop.scale * self.likelihood)
        return g.add_(theta, alpha=self.in_loss) if self.in_loss else g, noise

    def _minibatches(self) -> Tensor:
        """Means and noise vectors ``[steps, 2, d]`` of the next minibatches: an epoch, or some steps."""
        if self.epoch:
            steps = len(self.data) // self.batch
            rows = torch.randperm(len(self.data), generator=self.generator)[: steps * self.batch]
        else:
            steps = PREFETCH
            rows = torch.randint(len(self.data), (steps * self.batch,), generator=self.generator)
        first, second = self.data[rows].view(steps, 2, self.batch // 2, -1).mean(2).unbind(1)
        noise = 0.5 * self.loop.scale * self.likelihood * (second - first)
        return torch.stack([0.5 * (first + second), noise], 1)

    def expected(self) -> float | None:
        """The temperature that the description predicts for this target."""
        if self.epoch:
            return None
        return replace(self.loop, gradient_noise=self.noise, curvature=self.curvature).temperatures()[0]


# -- samplers of ours, which find their own rate ----------------------------------------------------------------------


def _needs_rate(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, Sampler) and optimizer.param_groups[0].get("rate") is None


def _set_rate(optimizer: Optimizer, theta: Tensor, target: ConjugateTarget) -> None:
    """Let a sampler observe noise vectors and set its rate."""
    assert isinstance(optimizer, Sampler)
    geometry = optimizer.geometry if isinstance(optimizer, ISGD) else None
    for _ in range(WARMUP if geometry is None else max(WARMUP, geometry.min_vectors)):
        theta.grad, noise = target.gradient(theta.detach())
        optimizer.observe([noise])
    optimizer.adapt([target.curvature] * len(optimizer.param_groups))
    optimizer.freeze()


def _with_own_target(loop: Loop, make: Factory) -> Loop:
    """The loop with a target on which a sampler that finds its own rate relaxes quickly.

    A structured Lambda takes its curvature from the noise, which must be that of a well specified model, and V-SGD
    needs noise; for the others it is small.
    """
    optimizer = make([torch.zeros(8, dtype=torch.float64).requires_grad_()])
    if not _needs_rate(optimizer):
        return loop
    share = QUIET / loop.num_data
    if isinstance(optimizer, ISGD) and optimizer.geometry is not None:
        share = 1.0 / (optimizer.batch_size or MOST_BATCH)
    elif isinstance(optimizer, VSGD):
        share = max(1.0 / MOST_BATCH, 2.0 / (LARGEST_STEP * loop.num_data))
    curvature = loop.curvature or 1.0
    return replace(loop, curvature=curvature, gradient_noise=curvature * share)
