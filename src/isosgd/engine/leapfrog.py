"""Several leapfrog steps of HMC in one call: inside a trajectory there are only gradients and kicks.

The step that ends a trajectory and starts the next one is that of `isosgd.samplers.hmc.HMC`. All others are a loop in
compiled code, a few chains at a time and, if there are many rows, one part of the rows after the other, so that memory
stays in the cache. On a GPU they are a CUDA graph. The loop draws no random numbers: trajectories are the same up to
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.compiled import CACHE, LOOP, Captured, Compiled, Tensors, block, bytes_of, repeat
from isosgd.engine.gradients import Many, batchable
from isosgd.engine.multistep import LARGE
from isosgd.errors import first_line
from isosgd.noise.model import dot
from isosgd.samplers.hmc import HMC

MOST = 1 << 16  # steps of a trajectory


def unsupported_reason(run: Chains) -> str:
    """Why HMC cannot take several steps in a call; empty when they can."""
    if run.ranks is not None:
        return "ranks share every minibatch"
    if without_compiler(run):
        return ""
    if run.leaves[0].device.type != "cpu":
        return "the loop is one of a CPU"
    if sum(run.layout.sizes) > LARGE:
        return "a single step is work enough"
    if len({x.dtype for x in run.leaves}) > 1:
        return "parameters have several dtypes"
    if isinstance(run.batches, TensorBatches) and isinstance(run.batches.tensors, dict):
        return "the data are a dict"
    return "" if run.many is not None else batchable(run.target, run.params, run.batches.next(), run.num_data)


def without_compiler(run: Chains) -> bool:
    """Whether gradients are as fast without the compiler."""
    if run.target.batched and run.many is not None:
        return True
    if run.target.network() is None or not isinstance(batch := run.batches.next(), tuple):
        return False
    return Many(run.target, run.num_data, run.layout).fits(run.flat(run.leaves), _by_chain(run, batch))


def _by_chain(run: Chains, batch: Tensors) -> Tensors:
    """A batch with a leading dimension of chains."""
    return batch if run.many is not None else tuple(t.unsqueeze(0) for t in batch)


class GraphLoop:
    """The loop on a GPU: a step is captured as a CUDA graph and replayed. Without a capture it runs eagerly.

    Args:
        loop: `LeapfrogMultiStep._loop`.
    """

    unsupported_reason = ""  # it can be called in any case

    def __init__(self, loop: Callable[..., Tensors]) -> None:
        self.loop, self.failure = loop, ""
        self.graph: Captured | None = None
        self.state: list[Tensor] = []  # in fixed places: parameters, velocities, gains in energy, losses
        self.given: list[Tensor] = []  # likewise, step sizes and tensors of Lambda

    def __call__(self, count: Tensor, *args: Any) -> Tensors:
        """The state after ``count`` steps."""
        theta, velocity, gained, own, batch, shape = args
        if self.graph is None and not self.failure:
            self.state = [t.clone() for t in (theta, velocity, gained, theta[:, 0])]
            self.given = [t.clone() for t in (own, *shape)]
            try:
                self.graph = Captured(lambda: self._step(batch), [], self.state)
            except Exception as error:  # whatever a capture may raise
                self.failure = first_line(error)
        if self.graph is None:
            return self.loop(count, *args)
        torch._foreach_copy_([*self.state[:3], *self.given], [theta, velocity, gained, own, *shape])
        for _ in range(int(count)):
            self.graph()
        return tuple(t.clone() for t in self.state)

    def _step(self, batch: Tensors) -> None:
        own, *shape = self.given
        found = self.loop(torch.ones((), dtype=torch.int64), *self.state[:3], own, batch, tuple(shape))
        torch._foreach_copy_(self.state, list(found))


class LeapfrogMultiStep:
    """Takes leapfrog steps, several in a call.

    Args:
        run: the chains, of HMC; `unsupported_reason` must be empty.
    """

    def __init__(self, run: Chains, compiled: bool = True, log: Callable[[str], None] | None = None) -> None:
        assert isinstance(run.sampler, HMC) and run.geometry is not None
        self.run, self.sampler, self.geometry, self.compiled, self.log = run, run.sampler, run.geometry, compiled, log
        self.gradient = Many(run.target, run.num_data, run.layout, prior_weight=run.prior_weight)
        self.batch = _by_chain(run, run.batches.next())
        # Equal parts of the rows: those of a chain fit into the cache together with its activations.
        self.whole = self.batch[0].shape[1]
        self.each = bytes_of(self.batch) / run.count + run.layout.between(self.whole, run.leaves[0].dtype)
        # In eager mode more calls would cost more than the cache saves.
        self.whole_chains = not compiled and without_compiler(run)
        parts = 1 if self.whole_chains else min(math.ceil(self.each / CACHE), self.whole)
        self.rows = self.whole // parts
        # A compiled loop is for fixed shapes, and those of Lambda may change.
        self.loops: dict[tuple[torch.Size, ...], Compiled | GraphLoop] = {}

    @property
    def unsupported_reason(self) -> str:
        """Why nothing could be compiled, so that steps are taken one by one; empty if it could."""
        return next((loop.unsupported_reason for loop in self.loops.values() if loop.unsupported_reason), "")

    @property
    def engine(self) -> str:
        """How steps are executed, as a suffix of the engine's name."""
        graphs = [loop for loop in self.loops.values() if isinstance(loop, GraphLoop)]
        if not graphs:
            return ", several steps a call"
        failure = next((loop.failure for loop in graphs if loop.failure), "")
        return f", eager ({failure})" if failure else ", CUDA graph of leapfrog steps"

    @property
    def remaining(self) -> int:
        """Steps before the next one that ends or starts a trajectory; zero if nothing can be compiled."""
        if not self.sampler.place or self.unsupported_reason:
            return 0
        return max(0, self.sampler.length - self.sampler.place)

    def take_steps(self, done: int, steps: int, tick: Callable[[int], None]) -> None:
        """Take so many steps; as `isosgd.engine.multistep.MultiStep.take_steps`."""
        while steps:
            # A draw inside a trajectory needs its energy, so that the last step is one of the sampler.
            count = min(steps - self.sampler.recycles, self.remaining)
            if count > 0:
                self.leapfrog(count)
            else:
                count = 1
                self.run.step()
            tick(count)
            steps -= count

    @torch.no_grad()
    def leapfrog(self, count: int) -> None:
        """Take ``count`` steps inside a trajectory, at most as many as are `remaining`."""
        run, sampler = self.run, self.sampler
        theta, sampler.velocities, sampler.gained, run.loss = self._moved(
            count, run.flat(run.leaves), sampler.velocities, sampler.gained
        )
        sampler.put(theta)
        sampler.place += count
        sampler.ended = False
        run.gradients += count
        for group in sampler.param_groups:
            group["step"] += count

    @torch.no_grad()
    def _moved(self, count: int, theta: Tensor, velocity: Tensor, gained: Tensor) -> Tensors:
        """Parameters, velocities, gains in kinetic energy, and the last losses after ``count`` steps."""
        if (moved := self._by_library(count, theta, velocity, gained)) is not None:
            return moved
        number, tensors = torch.tensor(count), self.geometry.tensors()
        own, loop = self.sampler.jittered.unsqueeze(-1), self._compiled(tensors)
        size = self.run.count
        if not self.whole_chains:
            size = block(size, self.each + bytes_of(tensors) / size, CACHE)
        found: list[Tensors] = []
        for a in range(0, self.run.count, size):
            part = slice(a, a + size)
            given = (t[part] for t in (theta, velocity, gained, own))
            found.append(loop(number, *given, tuple(t[part] for t in self.batch), tuple(t[part] for t in tensors)))
        return tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))

    def _by_library(self, count: int, theta: Tensor, velocity: Tensor, gained: Tensor) -> Tensors | None:
        """The same by one call of the library, where it has all of the step; else None."""
        density, lam = self.gradient.density(theta, self.batch), self.geometry.along_directions()
        if density is None or lam is None or any(t.dtype != theta.dtype for t in (velocity, *lam)):
            return None
        assert self.gradient.layers is not None
        basis, back, rate = (t.contiguous() for t in lam)
        own, velocity, gained = self.sampler.jittered.contiguous(), velocity.clone(), gained.clone()
        rows, scale = self.gradient.rows(self.batch), self.geometry.scale
        loss = self.gradient.layers.leapfrog(
            count, density, theta, rows, (basis, back, rate), scale, own, velocity, gained
        )
        return theta, velocity, gained, loss

    def _compiled(self, tensors: Tensors) -> Compiled | GraphLoop:
        key = tuple(t.shape for t in tensors)
        if key not in self.loops:
            after = 0 if self.compiled else None
            compiled = Compiled(self._loop, after, self.log, "trajectories of all chains", LOOP)
            self.loops[key] = GraphLoop(self._loop) if self.batch[0].is_cuda else compiled
        return self.loops[key]

    def _loop(
        self,
        count: Tensor,
        theta: Tensor,
        velocity: Tensor,
        gained: Tensor,
        own: Tensor,
        batch: Tensors,
        shape: Tensors,
    ) -> Tensors:
        geometry, scale = self.geometry, self.geometry.scale
        still = velocity.new_zeros(len(velocity), geometry.total + geometry.extra_innovations)

        def body(k: int, state: Tensors) -> Tensors:
            theta, velocity, gained, _ = state
            loss, gradient = self._gradient(theta, batch)
            finite = torch.isfinite(loss + gradient.sum(-1)).unsqueeze(-1)
            gradient = torch.where(finite, gradient, 0.0).to(velocity.dtype)
            tensors = tuple(t.view(t.shape) for t in shape)  # as in `isosgd.engine.compiled.Looped`
            pull = own * geometry.displace(tensors, gradient, still).to(velocity.dtype)
            # Two half kicks, one that ends a step and one that begins the next (`HMC._half_kick`).
            gained = gained + (dot(gradient, pull) - dot(gradient, velocity)) / scale
            velocity = velocity - 2.0 * pull
            return (theta + velocity).to(theta.dtype), velocity, gained, loss

        return repeat(body, count, MOST, (theta, velocity, gained, torch.zeros_like(theta[:, 0])))

    def _gradient(self, theta: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        number, rows = self.whole // self.rows, self.rows
        if number == 1:
            return self.gradient.flat(theta, batch, False)[:2]
        end = number * rows
        parts = tuple(t[:, :end].reshape(len(t), number, rows, *t.shape[2:]).transpose(0, 1) for t in batch)
        rest = tuple(t[:, end:] for t in batch) if end < self.whole else ()
        return self.gradient.in_parts(theta, parts, rest)
