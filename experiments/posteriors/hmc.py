"""Hamiltonian Monte Carlo on all data: a reference for posteriors that have no exact answer.

Chains run side by side. They share a step size, set in the warm-up by dual averaging so that a chosen share of
proposals is accepted, and a diagonal mass, the variances of all chains in windows that double. Each trajectory takes
a random number of leapfrog steps, so that none returns to its start for every direction at once.

References:
    Neal (2011), MCMC using Hamiltonian dynamics. Hoffman and Gelman (2014), The No-U-Turn sampler (dual averaging).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from isosgd import Target
from isosgd.diagnostics import rhat
from isosgd.target import Params
from isosgd.warmup.hmc import DualAveraging

ACCEPTANCE = 0.8  # share of proposals that the step size aims at
GAIN = 0.05  # of dual averaging
FIRST_WINDOW = 25
LAST_SHARE = 0.1  # of the warm-up, in which the mass is fixed and only the step size is set
DIVERGED = 1000.0  # an energy error beyond which a trajectory is no longer one

LogDensity = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [chains, d] -> gradients and values


@dataclass(frozen=True)
class Info:
    """How a run went.

    Attributes:
        acceptance: mean probability of acceptance after the warm-up.
        step_size: of the leapfrog steps, in units of the mass.
        rhat: split R-hat of the log density over chains; near 1 when they agree.
        log_density: trace ``[chains, draws]``.
        diverged: trajectories after the warm-up that lost their energy.
        gradients: of all data, for each chain.
        seconds: wall time.
    """

    acceptance: float
    step_size: float
    rhat: float
    log_density: Tensor
    diverged: int
    gradients: int
    seconds: float


def hmc(
    target: Target,
    data: Any,
    *,
    init: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    chains: int = 8,
    draws: int = 1000,
    warmup: int = 1000,
    steps: tuple[int, int] = (10, 30),
    seed: int = 0,
    keep_every: int = 1,
) -> tuple[Params, Info]:
    """Draw from a posterior with gradients of all data.

    Args:
        target: what to sample; its log likelihood is mapped over chains. A badly conditioned one needs float64.
        data: all of it, as the log likelihood takes a batch.
        init: start values in natural parameters, for all chains or a sequence with one for each.
        chains: chains, run side by side.
        draws: draws to keep from each.
        warmup: trajectories before the first draw.
        steps: least and most leapfrog steps of a trajectory.
        seed: same seed, same draws.
        keep_every: trajectories between draws.

    Returns:
        Natural parameters ``[chains, draws, *shape]`` by name, and how the run went.

    Example:
        >>> from isosgd import Target, priors
        >>> y = torch.randn(50, dtype=torch.float64) + 3
        >>> start = {"mu": torch.zeros((), dtype=torch.float64)}
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init=start)
        >>> found, info = hmc(target, (y,), draws=200, warmup=200, steps=(2, 6))
        >>> found["mu"].shape, bool(abs(found["mu"].mean() - y.mean()) < 0.05), info.rhat < 1.05
        (torch.Size([8, 200]), True, True)
    """
    _check(target, chains, draws, warmup, steps, keep_every)
    started = time.monotonic()
    flat = Flat(target, data, init, chains)
    run = _Run(flat.log_density, flat.start, steps, torch.Generator().manual_seed(seed))
    run.warm_up(warmup)
    kept, densities, acceptance = [], [], 0.0
    run.diverged = 0
    for _ in range(draws):
        for _ in range(keep_every):
            acceptance += float(run.move().mean())
        kept.append(run.position)
        densities.append(run.value)
    trace = torch.stack(densities, 1)
    info = Info(
        acceptance=acceptance / (draws * keep_every),
        step_size=run.step_size,
        rhat=float(rhat(trace)),
        log_density=trace,
        diverged=run.diverged,
        gradients=run.gradients,
        seconds=time.monotonic() - started,
    )
    return flat.natural(torch.stack(kept, 1)), info


class Flat:
    """A target's log density as a function of one vector, mapped over chains.

    Args:
        target: what to sample.
        data: all of it.
        init: start values, as for `hmc`.
        chains: number of chains.
    """

    def __init__(
        self, target: Target, data: Any, init: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, chains: int
    ) -> None:
        starts = [init] * chains if init is None or isinstance(init, Mapping) else list(init)
        if len(starts) != chains:
            raise ValueError(f"init has {len(starts)} starts for {chains} chains; give one for each, or one for all")
        frees = [{name: x.detach() for name, x in target.initial(start).items()} for start in starts]
        target.check(frees[0], data)  # what follows is mapped, and mapped code cannot look at values
        self.target, self.data = target, data
        self.shapes = {name: x.shape for name, x in frees[0].items()}
        self.start = torch.stack([torch.cat([x.reshape(-1) for x in free.values()]) for free in frees])
        self._values = vmap(self._one)

    def log_density(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients ``[chains, d]`` and values ``[chains]`` of the log density at ``[chains, d]``."""
        position = position.detach().requires_grad_()
        values: Tensor = self._values(position)
        # Chains do not see each other, so one backward pass through the sum has the gradients of all.
        (gradients,) = torch.autograd.grad(values.sum(), position)
        return gradients, values.detach()

    def free(self, position: Tensor) -> Params:
        """Free parameters by name from vectors ``[..., d]``."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = torch.split(position, sizes, dim=-1)
        lead = position.shape[:-1]
        return {name: x.reshape(lead + shape) for (name, shape), x in zip(self.shapes.items(), parts, strict=True)}

    def natural(self, position: Tensor) -> Params:
        """Natural parameters by name from vectors ``[..., d]``."""
        return self.target.constrain(self.free(position))

    def _one(self, position: Tensor) -> Tensor:
        free = self.free(position)
        return self.target.log_likelihood(free, self.data).sum() + self.target.log_prior(free)


class _Run:
    """All chains: where they are, and the step size and mass they share."""

    def __init__(self, log_density: LogDensity, start: Tensor, steps: tuple[int, int], generator: torch.Generator):
        self.log_density, self.steps, self.generator = log_density, steps, generator
        self.position = start
        self.gradients, self.diverged = 0, 0
        self.gradient, self.value = self._evaluate(start)
        bad = ~(self.value.isfinite() & self.gradient.isfinite().all(1))
        if bool(bad.any()):
            chain = int(bad.nonzero()[0])
            raise ValueError(
                f"the log density or its gradient is not finite at the start of chain {chain}; change init"
            )
        self.variance = torch.ones_like(start[0])
        self.step_size = 1.0

    def _evaluate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        self.gradients += 1
        return self.log_density(position)

    def move(self) -> Tensor:
        """One trajectory of every chain; returns the probabilities ``[chains]`` with which they were accepted."""
        least, most = self.steps
        return self._trajectory(int(torch.randint(least, most + 1, (), generator=self.generator)))

    def _trajectory(self, length: int) -> Tensor:
        like, step = self.position, self.step_size
        momentum = torch.randn(like.shape, generator=self.generator, dtype=like.dtype) / self.variance.sqrt()
        before = self.value - 0.5 * (momentum.square() * self.variance).sum(1)
        position, gradient, value = self.position, self.gradient, self.value
        momentum = momentum + 0.5 * step * gradient
        for i in range(length):
            position = position + step * self.variance * momentum
            gradient, value = self._evaluate(position)
            momentum = momentum + (0.5 if i == length - 1 else 1.0) * step * gradient
        change = value - 0.5 * (momentum.square() * self.variance).sum(1) - before
        change = torch.nan_to_num(change, nan=-math.inf)
        self.diverged += int((change < -DIVERGED).sum())
        accepted = torch.rand(len(like), generator=self.generator, dtype=like.dtype).log() < change
        self.position = torch.where(accepted[:, None], position, self.position)
        self.gradient = torch.where(accepted[:, None], gradient, self.gradient)
        self.value = torch.where(accepted, value, self.value)
        return change.clamp_max(0.0).exp()

    def warm_up(self, length: int) -> None:
        """Set step size and mass in windows that double; the last one sets the step size alone."""
        last = max(int(LAST_SHARE * length), 1)
        size, left = FIRST_WINDOW, length - last
        while left > 0:
            size = left if left < 3 * size else size  # a rest too short for a doubled window is spent in this one
            self._window(size, mass=True)
            left, size = left - size, 2 * size
        self._window(last, mass=False)

    def _window(self, length: int, mass: bool) -> None:
        self._first_step_size()
        averaging = DualAveraging(torch.tensor(self.step_size, dtype=torch.float64), ACCEPTANCE, 10.0, GAIN)
        seen = []
        for _ in range(length):
            averaging.update(self.move().mean().double())
            self.step_size = float(averaging.value)
            seen.append(self.position)
        self.step_size = float(averaging.mean)
        if mass:
            variance = torch.cat(seen[length // 3 :]).var(0)
            self.variance = torch.where(variance > 0, variance, self.variance)  # none when nothing was accepted

    def _first_step_size(self) -> None:
        """Double or halve the step until one step of it is accepted about half of the time."""
        saved = self.position, self.gradient, self.value
        up: bool | None = None
        for _ in range(200):
            accepted = float(self._trajectory(1).mean()) > 0.5
            self.position, self.gradient, self.value = saved
            if up is not None and accepted != up:
                return
            up = accepted
            self.step_size *= 2.0 if up else 0.5


def _check(target: Target, chains: int, draws: int, warmup: int, steps: tuple[int, int], keep_every: int) -> None:
    if not isinstance(target, Target):
        raise TypeError(f"target of type {type(target).__name__}: pass an isosgd.Target")
    for name, value in (("chains", chains), ("draws", draws), ("warmup", warmup), ("keep_every", keep_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r} must be an integer of at least 1")
    if not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise ValueError(f"steps = {steps!r} must be (least, most) leapfrog steps, with 1 <= least <= most")
