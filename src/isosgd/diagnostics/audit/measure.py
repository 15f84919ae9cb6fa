"""Run an optimizer on a known posterior, and measure its temperature.

The data are rows ``y_i`` in R^d with mean 0 and the model is ``y_i ~ N(theta, I / h)``: the gradient of a minibatch's
mean loss is ``h (theta - mean y)``, with variance ``h^2 Var(y) / n``. With a normal prior of precision p the tempered
posterior is ``N(0, T / (N h + p))`` in every coordinate, and the variance of the draws shows T. Each coordinate is a
chain of its own, as far as a rule works coordinate by coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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
ROWS = 1024  # of the data, at most
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
            discretisation error; None if the noise is unknown.
        curvature: h of the target, prior included.
        gradient_noise: Var(g) of the target's minibatches.
        steps: of the run, burn-in included.
    """

    temperature: float
    error: float
    expected: float | None
    curvature: float
    gradient_noise: float
    steps: int


def measure(loop: Loop, make: Factory, seed: int = 0) -> Measured:
    """Run an optimizer on the conjugate target and measure its temperature.

    Args:
        loop: the description.
        make: makes the optimizer from a list of tensors.
        seed: for data and minibatches.
    """
    target = ConjugateTarget(_with_own_target(loop, make), torch.Generator().manual_seed(seed))
    theta = torch.zeros(DIMENSION, dtype=torch.float64).requires_grad_()
    optimizer = make([theta])
    if isinstance(optimizer, Sampler) and optimizer.param_groups[0].get("rate") is None:
        _set_rate(optimizer, theta, target)
        found = read(optimizer)[0][0]
        loop = target.loop = replace(target.loop, lr=found["lr"], noise=found["noise"])
    time = max(loop.relaxation(target.curvature), 1.0 / loop.friction)
    first, steps = math.ceil(BURN_IN * time), math.ceil((BURN_IN + KEPT) * time)
    if steps > MOST_STEPS:
        raise ValueError(
            f"at curvature {target.curvature:.3g} the loop relaxes in {time:,.0f} steps, so that a measurement would "
            f"take {steps:,} steps: leave out curvature to have one chosen that suits the rate"
        )
    every = max(1, int(time / DRAWS / loop.period))
    squares: list[Tensor] = []
    for step in range(steps):
        theta.grad, noise = target.gradient(theta.detach())
        if isinstance(optimizer, Sampler):
            optimizer.step(noise=[noise] if step % NOISE_EVERY == 0 else None)
        else:
            optimizer.step()
        ended = (step + 1) % loop.period == 0 and (not isinstance(optimizer, Sampler) or optimizer.sampling)
        if step >= first and ended and step // loop.period % every == 0:
            squares.append(theta.detach().square().mean())
    # Standard errors come from blocks of time: coordinates share minibatches, so they are not quite independent.
    blocks = torch.stack([block.mean() for block in torch.stack(squares).tensor_split(BLOCKS) if len(block)])
    total = loop.num_data * target.curvature
    here = replace(
        target.loop, gradient_noise=target.noise, curvature=target.curvature, minibatches="independent"
    )  # of the target
    return Measured(
        temperature=float(blocks.mean()) * total,
        error=float(blocks.std()) / math.sqrt(len(blocks)) * total,
        expected=here.temperatures()[0],
        curvature=target.curvature,
        gradient_noise=target.noise,
        steps=steps,
    )


class ConjugateTarget:
    """The known posterior, with a curvature that suits the rate of a loop and gradient noise of the described size."""

    def __init__(self, loop: Loop, generator: torch.Generator) -> None:
        self.loop, self.generator = loop, generator
        precision = loop.precision or 0.0
        self.in_loss = loop.prior * (loop.prior_precision or 0.0)
        step = min(LARGEST_STEP, 1.0 / (loop.response * SLOWER * max(1.0 / loop.friction, loop.period)))
        self.likelihood = loop.curvature or step / (loop.lr * loop.scale)
        self.curvature = self.likelihood + precision / loop.num_data
        injected = loop.noise_temperature()
        heat = loop.target_temperature if injected is None else injected
        if loop.gradient_noise is not None:
            self.noise = loop.gradient_noise
        elif heat:  # adds little to the temperature
            self.noise = ADDED * heat / loop.temperature_of(gradients=1.0)
        else:  # that of a well specified model
            self.noise = self.likelihood / (loop.batch_size or MOST_BATCH)
        # Fewer rows can have the same gradient noise, since the spread of the data is free.
        self.batch = max(2, min(loop.batch_size or MOST_BATCH, loop.num_data, MOST_BATCH) // 2 * 2)
        y = torch.randn(min(loop.num_data, ROWS), DIMENSION, generator=generator, dtype=torch.float64)
        y = (y - y.mean(0)) / y.std(0, correction=0).clamp_min(1e-12)
        self.data = y * math.sqrt(self.noise * self.batch) / self.likelihood
        self._ready: list[Tensor] = []

    def gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the loop's loss on a minibatch, and half the difference of those of its halves."""
        if not self._ready:
            self._ready = list(self._minibatches())
        mean, noise = self._ready.pop()
        g = (theta - mean).mul_(self.loop.scale * self.likelihood)
        return g.add_(theta, alpha=self.in_loss) if self.in_loss else g, noise

    def _minibatches(self) -> Tensor:
        """Means and noise vectors ``[steps, 2, d]`` of the next minibatches."""
        rows = torch.randint(len(self.data), (PREFETCH * self.batch,), generator=self.generator)
        first, second = self.data[rows].view(PREFETCH, 2, self.batch // 2, -1).mean(2).unbind(1)
        noise = 0.5 * self.loop.scale * self.likelihood * (second - first)
        return torch.stack([0.5 * (first + second), noise], 1)


# -- samplers of ours, which find their own rate ----------------------------------------------------------------------


def _set_rate(optimizer: Sampler, theta: Tensor, target: ConjugateTarget) -> None:
    """Let a sampler observe noise vectors and set its rate."""
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
    if not isinstance(optimizer, Sampler) or optimizer.param_groups[0].get("rate") is not None:
        return loop
    share = QUIET / loop.num_data
    if isinstance(optimizer, ISGD) and optimizer.geometry is not None:
        share = 1.0 / (optimizer.batch_size or MOST_BATCH)
    elif isinstance(optimizer, VSGD):
        share = max(1.0 / MOST_BATCH, 2.0 / (LARGEST_STEP * loop.num_data))
    curvature = loop.curvature or 1.0
    return replace(loop, curvature=curvature, gradient_noise=curvature * share)
