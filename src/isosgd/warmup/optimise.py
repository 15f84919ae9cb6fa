"""Initial optimisation: from the start of the chains to the bulk of the posterior.

References:
    Kingma, Ba (2015), Adam.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.geometry.rule import allowed_rate_curvature
from isosgd.samplers.steppers import hamiltonian_
from isosgd.warmup.base import Array

WINDOW = 100
RATE = 0.5  # of 1 / h; with friction 0.1 the limit is 3.8
FRICTION = 0.1
PROBE_EVERY = 5
SCALE_STEPS, SCALE_STEP = 60, 0.1
FIT_STEPS, FIT_RATE, FIT_SHARE = 600, 0.03, 0.25  # of the fit of the likelihood; at most that share of the gradients
TIME = 0.5  # share of the time, if that is limited
ADAM_SIZE = 0.2  # assumed size of parameters that start at zero
ADAM_MEMORY = 0.9, 0.99  # of the gradient and its square


class Adam:
    """Adam for all chains; a step's length is a share of the size of its group's parameters.

    Parameters whose names are in ``held`` are fixed.
    """

    def __init__(self, chains: Chains, share: float, held: Collection[str]) -> None:
        self.leaves, self.count = chains.leaves, 0
        self.mean = [torch.zeros_like(leaf) for leaf in chains.leaves]
        self.square = [torch.zeros_like(leaf) for leaf in chains.leaves]
        self.lengths: list[Tensor] = []
        flat = chains.flat(chains.leaves)
        for group, slot in zip(chains.sampler.param_groups, chains.slots, strict=True):
            size = flat[:, slot].square().mean(-1).sqrt()
            length = share * torch.where(size > 0, size, ADAM_SIZE)
            self.lengths += [chains.wide(length, p) for p in group["params"]]
        for i, name in enumerate(chains.params):
            if name in held:
                self.lengths[i] = torch.zeros_like(self.lengths[i])

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], factor: float = 1.0) -> None:
        """One step, its length times ``factor``."""
        self.count += 1
        torch._foreach_lerp_(self.mean, list(gradients), 1.0 - ADAM_MEMORY[0])
        torch._foreach_lerp_(self.square, torch._foreach_mul(list(gradients), list(gradients)), 1.0 - ADAM_MEMORY[1])
        factor = factor / (1.0 - ADAM_MEMORY[0] ** self.count)
        for leaf, length, m, s in zip(self.leaves, self.lengths, self.mean, self.square, strict=True):
            leaf.sub_(factor * length * m / ((s / (1.0 - ADAM_MEMORY[1] ** self.count)).sqrt() + 1e-20))


def decay(step: int, steps: int) -> float:
    """Factor of the length of a step, numbered from 1: constant in the first half, then falling to 0.

    Example:
        >>> [round(decay(i, 9), 1) for i in (1, 5, 9)]
        [1.0, 1.0, 0.2]
    """
    return min(1.0, 2.0 * (1.0 - step / (steps + 1.0)))


def end_of(chains: Chains) -> float:
    """The time (`time.monotonic`) at which an initial optimisation that begins now must end."""
    now = time.monotonic()
    return now + TIME * (chains.deadline - now)


class InitialOptimisation:
    """Fit the likelihood, then find a mode of the posterior.

    *The fit* is by Adam on the likelihood, scales of the noise included. With few data, the prior can hold a chain that
    starts at small parameters at a mode that explains nothing, far from the mass of the posterior; the fit leaves it.
    Each chain then continues from the highest posterior density of the fit, or from its start.

    *The mode* is found by momentum descent at temperature 0, in windows; one that does not end clearly below the best
    so far is undone. A chain's rate is cut when its loss stops falling, down to the rate of sampling. Scales of priors
    and noise are fixed: a hierarchical density has its mode at scale zero, far from its mass. At the end the scales of
    the noise, but not those of the prior, are fitted to the residuals: if they are far too large, the curvature
    estimated from gradient noise is far too small.

    Args:
        chains: their parameters are changed.
        limit: gradients to spend at most.
        count: called for every gradient.
        mark: called between windows; the attributes in ``kept`` suffice to resume there.
    """

    kept = ("spent", "factor", "best", "doubt")

    def __init__(
        self, chains: Chains, limit: int, count: Callable[[], None], mark: Callable[[], None] = lambda: None
    ) -> None:
        self.chains, self.limit, self.count, self.mark = chains, limit, count, mark
        self.window = max(min(WINDOW, limit // 8), 5)
        held = set(chains.target.extras(chains.params))
        named = zip(chains.layout.shapes, chains.layout.sizes, strict=True)
        free = torch.cat([torch.full((size,), name not in held) for name, size in named])
        self.free = free.to(chains.alive.device)
        self.spent = 0
        self.factor = np.full(chains.count, RATE)
        self.best: Array | None = None
        self.doubt: Array | None = None
        self.deadline = math.inf

    def run(self) -> int:
        """Optimise; returns the gradients spent on each chain."""
        chains, factor = self.chains, self.factor
        self.deadline = end_of(chains)
        smallest = FRICTION * allowed_rate_curvature(chains.sampler.bias)
        if self.best is None or self.doubt is None:
            self.best, self.doubt = self._mean_loss(max(self.window // 5, 2))
            steps = min(FIT_STEPS, int(FIT_SHARE * self.limit))
            self._fit(steps - steps % WINDOW)
        while (factor > smallest).any() and self.spent + self.window <= self.limit and not self._late():
            self.mark()
            saved, best, doubt = chains.snapshot(), self.best, self.doubt
            losses = self._momentum_window(np.where(factor > smallest, factor, 0.0))
            now, error = self._summary(losses[len(losses) // 2 :])
            # At these rates gradient noise drives a chain far out along flat directions, which the loss hardly shows:
            # undo what does not clearly lower the loss.
            lower = now < best - np.maximum(np.hypot(error, doubt), 1e-3 * np.abs(best))
            chains.restore(saved, torch.as_tensor(~lower, device=chains.alive.device))
            factor[~lower] /= 4.0
            self.best, self.doubt = np.where(lower, now, best), np.where(lower, error, doubt)
        self._fit_scales()
        return self.spent

    def _fit(self, steps: int) -> None:
        """Fit the likelihood; each chain continues from the highest posterior density on the way."""
        chains, window = self.chains, WINDOW
        adam = Adam(chains, FIT_RATE, chains.target.prior_scales(chains.params))
        saved, losses, before = chains.snapshot(), list[Tensor](), math.inf
        assert self.best is not None and self.doubt is not None
        for i in range(1, steps + 1):
            chains.evaluate(forgiving=True)
            losses.append(chains.loss)
            self._count()
            adam.step(chains.likelihood_gradients(), decay(i, steps))
            if self._late():
                break
            if i % window:
                continue
            now, error = self._summary(losses[-window // 2 :])
            lower = now < self.best - np.hypot(error, self.doubt)
            saved = chains.merged(saved, chains.snapshot(), torch.as_tensor(lower, device=chains.alive.device))
            self.best, self.doubt = np.where(lower, now, self.best), np.where(lower, error, self.doubt)
            middle = float(torch.stack(losses[-window:]).median())
            if middle > before:  # most chains no longer improve
                break
            before = middle
        chains.restore(saved)
        if steps:  # the curvature may differ here
            chains.curvature.forget()
            chains.evaluate(forgiving=True)
            self._count()
            for _ in range(2 * PROBE_EVERY):
                chains.probe_curvature()
                self._count()

    def _fit_scales(self) -> None:
        """Descend in the logarithms of the noise scales only, by at most 0.1 per step."""
        names = self.chains.target.noise_scales()
        leaves = [self.chains.params[name] for name in names]
        for _ in range(SCALE_STEPS if names and self.spent + SCALE_STEPS <= self.limit and not self._late() else 0):
            self.chains.evaluate(forgiving=True)
            self._count()
            with torch.no_grad():
                for leaf in leaves:
                    leaf -= (0.5 * cast(Tensor, leaf.grad)).clamp_(-SCALE_STEP, SCALE_STEP)

    def _mean_loss(self, batches: int) -> tuple[Array, Array]:
        losses = []
        for _ in range(batches):
            self.chains.evaluate()
            losses.append(self.chains.loss)
            self._count()
        return self._summary(losses)

    def _summary(self, losses: list[Tensor]) -> tuple[Array, Array]:
        """Mean loss of each chain, including the prior's part, and twice its standard error."""
        found = torch.stack(losses).double().cpu().numpy()
        prior = -self.chains.log_prior().double().cpu().numpy() / self.chains.num_data
        with np.errstate(invalid="ignore"):  # a loss may be infinite
            mean, deviation = np.atleast_1d(found.mean(0)), np.atleast_1d(found.std(0))
        return np.nan_to_num(mean + prior, nan=math.inf), np.nan_to_num(2.0 * deviation / math.sqrt(len(losses)))

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _count(self) -> None:
        self.spent += 1
        self.count()

    def _momentum_window(self, factor: Array) -> list[Tensor]:
        chains, losses = self.chains, []
        velocity = [torch.zeros_like(leaf) for leaf in chains.leaves]
        shares = torch.as_tensor(factor, dtype=torch.float32, device=chains.alive.device)
        for i in range(self.window):
            chains.evaluate(forgiving=True)
            losses.append(chains.loss)
            if i % PROBE_EVERY == 0:
                chains.probe_curvature()
                self._count()
            rates = shares.unsqueeze(-1) / chains.curvature.values()
            rate = torch.zeros_like(chains.curvature.own)
            for slot, column in zip(chains.slots, rates.unbind(-1), strict=True):
                rate[:, slot] = column.unsqueeze(-1)
            speeds = chains.parts(rate * self.free)
            with torch.no_grad():
                grads = [cast(Tensor, leaf.grad) for leaf in chains.leaves]
                pulls = list(torch._foreach_mul(speeds, grads))
                hamiltonian_(chains.leaves, velocity, pulls, 1.0, FRICTION)
            self._count()
        return losses
