"""Several steps of chains in one call, used while draws are taken, when rates are fixed or known.

A step of a small network takes less time than the call of a function. So minibatches and innovations of up to `MOST`
steps are drawn at once, and the steps themselves (gradients and updates) are one call: of a compiled function of flat
tensors, which is a loop on a CPU and a CUDA graph on a GPU, or of the library of `isosgd.native.layers`.

The algorithm is that of `isosgd.engine.chains.Chains.step`; only the order of random numbers differs. If a sampler
follows the gradient noise, every k-th step takes two halves of its minibatch. If it follows the level of the noise,
every step does, and the level is an additional column after the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import Batch, TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.compiled import UNCHECKED, Compiled, Found, GraphLoop, Looped, Tensors, bytes_of
from isosgd.engine.gradients import Many, batchable
from isosgd.samplers.program import StepProgram
from isosgd.target.batches import tensors_of

MOST = 64  # steps in a call
BYTES = {"cpu": 1 << 27, "cuda": 1 << 29}  # bound of the minibatches and innovations that are drawn at once
WIDE = 100_000  # parameters of a chain up to which compiled steps were not faster than those of the library
LARGE = 1 << 20  # parameters of a chain from which a call costs little beside a step


def unsupported_reason(run: Chains) -> str:
    """Why chains cannot take several steps in a call; empty when they can."""
    sampler, batches = run.sampler, run.batches
    if run.ranks is not None:
        return "ranks share every minibatch"
    program = sampler.program()
    if isinstance(program, str):
        return program
    if not isinstance(batches, TensorBatches) or batches.whole:
        return "minibatches are not drawn from tensors"
    if isinstance(batches.tensors, dict):
        return "minibatches are dicts"
    if sum(run.layout.sizes) > LARGE or _steps(run) < 2:
        return "a single step is work enough"
    if len({x.dtype for x in run.leaves}) > 1:
        return "parameters have several dtypes"
    if run.many is None:
        return batchable(run.target, run.params, _some(batches), run.num_data)
    return ""


def _some(batches: TensorBatches, *lead: int) -> Batch:
    """A minibatch to try, or several; the generator of its transform is left as it is."""
    generator = torch.Generator(device=batches.device).manual_seed(0)
    return batches.at(torch.arange(batches.batch_size, device=batches.device).expand(*lead, -1), generator)


def without_compiler(run: Chains) -> bool:
    """Whether the library has the gradients, so that steps are fast without a compiler."""
    batches = run.batches
    if not isinstance(batches, TensorBatches) or not isinstance(batches.tensors, tuple) or batches.whole:
        return False
    if run.target.network() is None:
        return False
    gradient = Many(run.target, run.num_data, run.layout, prior_weight=run.prior_weight)
    return gradient.density(run.flat(run.leaves), _some(batches, run.count)) is not None


def is_fastest(run: Chains) -> bool:
    """Whether steps of the library are as fast as compiled ones: it must have the updates, too."""
    program = run.sampler.program()
    small = not isinstance(program, str) and program.in_library and sum(run.layout.sizes) <= WIDE
    return small and without_compiler(run)


class ByLibrary:
    """Several steps of chains by one call of the library, where it has their updates; else one by one.

    Args:
        gradient: of the chains.
        program: of the sampler.
        loop: takes the steps one by one.
    """

    unsupported_reason = ""  # it can be called in any case

    def __init__(self, gradient: Many, program: StepProgram, loop: Looped) -> None:
        self.gradient, self.program, self.loop = gradient, program, loop

    def __call__(self, count: int, state: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        """As `Looped`."""
        theta, dim = self.program.parameters(state), self.program.dim
        density = self.gradient.density(theta, tuple(t[0] for t in batch)) if count else None
        updates = None if density is None else self.program.updates(xi[: count + self.program.lead], tensors)
        if density is None or updates is None or theta.dtype != xi.dtype:
            return self.loop(count, state, batch, xi, tensors)
        assert self.gradient.layers is not None
        rows = self.gradient.rows(tuple(t[:count].flatten(0, 1) for t in batch))
        x, y = (t.view(count, len(theta), *t.shape[1:]) for t in rows)
        rest, theta = (t.clone(memory_format=torch.contiguous_format) for t in (state[:, dim:], theta))
        loss, total = self.gradient.layers.steps(density, theta, rest, (x, y), updates)
        return torch.cat([theta, rest], -1) if rest.numel() else theta, loss, total


def _steps(run: Chains) -> int:
    """Most steps in a call that memory allows."""
    batches = run.batches
    assert isinstance(batches, TensorBatches)
    row = bytes_of(t[0] for t in tensors_of(batches.tensors))
    each = run.count * (batches.batch_size * row + sum(run.layout.sizes) * run.leaves[0].element_size())
    return max(1, min(MOST, BYTES.get(run.leaves[0].device.type, BYTES["cpu"]) // each))


Loop = Looped | GraphLoop | ByLibrary


class MultiStep:
    """Takes steps of chains, several in a call.

    Args:
        run: the chains; `unsupported_reason` must be empty.
        noise_every: if the noise is followed, every k-th step is split in halves.

    Attributes:
        failed: why the steps could not be compiled; empty if they could.
    """

    def __init__(
        self, run: Chains, noise_every: int, compiled: bool = True, log: Callable[[str], None] | None = None
    ) -> None:
        self.run, self.compiled, self.log = run, compiled, log
        program = run.sampler.program()
        if isinstance(program, str):
            raise ValueError(f"{type(run.sampler).__name__} takes single steps: {program}")
        self.program, self.most, self.noise_every = program, _steps(run), noise_every
        self.gradient = Many(run.target, run.num_data, run.layout, prior_weight=run.prior_weight)
        # Compiled functions are for fixed shapes, and those of Lambda may change.
        self.known: dict[tuple[Any, ...], tuple[Loop, Compiled]] = {}
        self._turned: tuple[Tensor, int, Tensor] | None = None
        program.prepare(self.most)
        self.failed = self._try()

    def _try(self) -> str:
        """Compile without moving chains or drawing random numbers."""
        if not self.compiled:
            return ""
        theta, tensors = self.program.begin(), self._tensors()
        batches, program = self.run.batches, self.program
        assert isinstance(batches, TensorBatches)
        batch = _some(batches, self.most, self.run.count)
        xi = theta.new_zeros(self.most + program.lead, self.run.count, program.width, dtype=program.dtype)
        loop, split = self._functions(tensors)
        with torch.no_grad():
            loop(self.most, theta, batch, xi, tensors)
            if program.follows_noise:
                split(theta, self._at(batch, 0), program.innovation(xi, 0), tensors)
        return loop.unsupported_reason or split.unsupported_reason

    # -- the step, of tensors alone -----------------------------------------------------------------------------------

    def step(
        self, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors, split: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """New flat parameters ``[chains, d]`` after one step, the losses, and with ``split`` the noise."""
        loss, gradient, noise = self.gradient.flat(self.program.parameters(theta), batch, split)
        return self.program.move(theta, gradient, noise, xi, tensors), loss, noise

    @staticmethod
    def _at(batch: Tensors, k: int) -> Tensors:
        return tuple(t.select(0, k) for t in batch)

    def _kth(self, k: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Step k of a call."""
        xi = self.program.innovation(xi, k)
        theta, loss, _ = self.step(theta, self._at(batch, k), xi, tensors, self.program.needs_noise)
        return theta, loss

    def _functions(self, tensors: Tensors) -> tuple[Loop, Compiled]:
        """The loop over steps and the split step, for tensors of such shapes."""
        key = tuple((t.shape, t.dtype) for t in tensors)
        if key not in self.known:
            run, after = self.run, 0 if self.compiled else None
            given = self._kth, self.most, after, self.log
            assert isinstance(run.batches, TensorBatches)
            between = run.layout.between(run.batches.batch_size, run.leaves[0].dtype)
            loop: Loop = GraphLoop(*given) if run.leaves[0].is_cuda else Looped(*given, between)
            if isinstance(loop, Looped) and not self.compiled:
                loop = ByLibrary(self.gradient, self.program, loop)
            split = Compiled(self.step, after, self.log, "steps that follow the noise", UNCHECKED)
            self.known[key] = loop, split
        return self.known[key]

    # -- inputs of a call ---------------------------------------------------------------------------------------------

    def _tensors(self) -> Tensors:
        """The sampler's tensors that a step needs, such as Lambda."""
        tensors = self.program.tensors()
        return tuple(self._by_columns(t) for t in tensors) if self.compiled else tensors

    def _by_columns(self, t: Tensor) -> Tensor:
        """A wide matrix of each chain in column-major order: compiled code reads it contiguously in both products."""
        if t.dim() != 3 or t.is_cuda or t.shape[1] >= t.shape[2]:
            return t
        of, version, turned = self._turned or (None, 0, t)
        if of is not t or version != t._version:
            turned = t.mT.contiguous().mT
            self._turned = t, t._version, turned
        return turned

    # -- steps --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_steps(self, done: int, steps: int, tick: Callable[[int], None]) -> None:
        """Take so many steps.

        Args:
            done: steps taken before, since the warm-up.
            steps: number of steps to take.
            tick: called with the number of steps taken.
        """
        theta, end = self.program.begin(), done + steps
        while done < end:
            until = min(end, done + self.most)
            if self.program.follows_noise:  # a step that is split is the last of its call
                until = min(until, (done // self.noise_every + 1) * self.noise_every)
            theta = self._call(theta, until - done, self.program.follows_noise and until % self.noise_every == 0)
            tick(until - done)
            done = until
        self.program.finish(theta)

    def _call(self, theta: Tensor, steps: int, split: bool) -> Tensor:
        run, batches = self.run, self.run.batches
        assert isinstance(batches, TensorBatches)
        tensors = self._tensors()
        batch, xi = batches.at(batches.indices(steps)), self.program.draw(steps)
        loop, halves = self._functions(tensors)
        after, loss, total = loop(steps - split, theta, batch, xi, tensors)
        noise = None
        if split:
            last = steps - 1
            after, loss, noise = halves(after, self._at(batch, last), self.program.innovation(xi, last), tensors)
            total = total + loss
        finite = torch.isfinite(total + after.sum(-1))
        good = bool((finite | ~run.alive).all())
        if not good:
            self._drop(theta, steps, batch, xi, tensors, ~finite)
        if run.failures:  # chains that were dropped stay where they were
            finite = finite & run.alive
            after = torch.where(run.alive.unsqueeze(-1), after, theta)
            loss = torch.where(run.alive, loss, torch.inf)
        run.loss = loss
        run.gradients += steps
        self.program.count(steps)
        if noise is not None:
            noise = torch.where(finite.unsqueeze(-1), noise, 0.0) if run.failures else noise
            run.sampler.observe(run.parts(noise))
        return after

    def _drop(self, theta: Tensor, steps: int, batch: Tensors, xi: Tensor, tensors: Tensors, bad: Tensor) -> None:
        """Repeat the steps one by one, and drop chains at the step where they stop being finite."""
        run, before = self.run, self.run.gradients
        loss = gradient = theta
        for k in range(steps):
            loss, gradient, noise = self.gradient.flat(
                self.program.parameters(theta), self._at(batch, k), self.program.needs_noise
            )
            last = torch.full_like(bad, k == steps - 1)  # eager rounding may hide what happened in compiled code
            new = bad & run.alive & (last | ~torch.isfinite(loss + gradient.sum(-1)))
            if bool(new.any()):
                self.program.finish(theta)
                run.gradients = before + k
                try:
                    run.drop(new, loss, run.parts(gradient))
                finally:
                    run.gradients = before
            moved = self.program.move(theta, gradient, noise, self.program.innovation(xi, k), tensors)
            theta = torch.where(run.alive.unsqueeze(-1), moved, theta)
