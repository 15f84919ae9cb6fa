"""One chain on a GPU as CUDA graphs: minibatch, transform, network and update without the host in between.

Three things are captured once and replayed: the next minibatch (drawn, gathered and transformed on the device), the
gradient on the current minibatch, and a whole step. Their inputs and outputs have fixed addresses. Batches of a loader
are copied into fixed buffers; a batch of another size is processed without a graph.

Noise vectors are differences of successive gradients over sqrt(2), so that all steps have one shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import IterableBatches, TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.compiled import Captured
from isosgd.engine.fused import FlatParameters, FusedStep
from isosgd.engine.fused import unsupported_reason as why_not_fused
from isosgd.errors import first_line
from isosgd.samplers.program import Elementwise, ScheduledProgram, StepProgram
from isosgd.target.batches import tensors_of, tree_map

TURN = 64  # steps of a chain before another one continues


def unsupported_reason(run: Chains) -> str:
    """Why chains cannot run as CUDA graphs; empty if they can."""
    if not run.leaves[0].is_cuda:
        return "not on a GPU"
    if run.ranks is not None:
        return "ranks share every minibatch"
    if run.many is not None:
        return "several chains in one computation"
    if len({x.dtype for x in run.leaves}) > 1:
        return "parameters have several dtypes"
    if run.batches.whole:
        return "all data at once"
    return ""


def accelerate(run: Chains) -> None:
    """Capture minibatches and gradients of a chain as CUDA graphs, if that is possible."""
    run.graph_unsupported = unsupported_reason(run)
    if not run.graph_unsupported:
        try:
            run.graph = GraphGradients(run)
        except Exception as error:  # a user's model may raise anything during capture
            run.graph_unsupported = first_line(error)


class GraphGradients:
    """Minibatches and gradients of one chain as CUDA graphs.

    Args:
        run: the chain; its parameters become views of one flat tensor.
    """

    def __init__(self, run: Chains) -> None:
        self.run, self.batches = run, run.batches
        self.flat = FlatParameters(run.leaves)
        self.gradient = torch.zeros_like(self.flat.values)
        self.loss = torch.zeros(1, device=self.flat.values.device)
        self.finite = torch.ones(1, dtype=torch.bool, device=self.flat.values.device)
        precisions = run.target.prior_precisions(run.params)
        # Precisions of a Gaussian prior, for each parameter and for each value.
        self.decays = None if precisions is None else [run.prior_weight * tau / run.num_data for tau in precisions]
        self.decay: Tensor | None = None
        if self.decays is not None:
            self.decay = torch.zeros_like(self.gradient)
            for view, rate in zip(self.flat.views(self.decay), self.decays, strict=True):
                view.fill_(rate)
        self.batch: Any = None  # at its fixed address
        self.irregular = 0  # number of batches of another size than the first
        self._fixed: list[Tensor] = []
        self._raw: Any = None
        if isinstance(self.batches, TensorBatches):
            self.generators = [self.batches.generator, self.batches.transform.generator]
            self._next = Captured(self._draw, self.generators, [])
        else:
            self.generators = [self.batches.transform.generator]
            first = self.batches.peek()
            self._raw = tree_map(torch.clone, first)
            self._fixed = tensors_of(self._raw)
            self._next = Captured(self._transform, self.generators, [])
        if not run.target._checked:
            run.target.check(run.params, self.batch)
        self._gradients = Captured(self._differentiate, [], [*run.leaves, *run.buffers.values()])

    def _draw(self) -> None:
        self.batch = self.batches.next()

    def _transform(self) -> None:
        self.batch = self.batches.transform(self._raw)

    def next(self) -> Any:
        """The next minibatch, at its fixed address; a batch of another size than the first is returned as it is."""
        if isinstance(self.batches, IterableBatches):
            raw = self.batches.raw()
            found = tensors_of(raw)
            if [t.shape for t in found] != [t.shape for t in self._fixed]:
                self.irregular += 1
                return self.batches.transform(raw)
            torch._foreach_copy_(self._fixed, found, non_blocking=True)
        self._next()
        return self.batch

    def _differentiate(self) -> None:
        self.differentiate(self.batch)
        self.finite.copy_(torch.isfinite(self.loss + self.gradient.sum()))

    def differentiate(self, batch: Any, prior: bool = True) -> None:
        """Loss and gradient at a minibatch, with or without the part of a Gaussian prior."""
        run = self.run
        # of the prior that is added to autograd's gradient here
        weight = run.prior_weight if self.decays is None else 0.0
        loss, gradients = run.target.gradient(run.params, batch, run.num_data, weight)
        self.flat.join(gradients, self.gradient)
        if prior and self.decay is not None:
            self.gradient.addcmul_(self.decay, self.flat.values)
        self.loss.copy_(loss.reshape(1))

    def __call__(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """Copies of loss, gradients, and whether they are finite, at the current minibatch."""
        self._gradients()
        finite = self.finite.clone()
        gradient = torch.where(finite, self.gradient, 0.0)
        return torch.where(finite, self.loss, torch.inf), self.flat.views(gradient), finite


class FusedUpdate:
    """The update of a step entry by entry, in one pass over memory."""

    def __init__(self, run: Chains, program: StepProgram, like: Elementwise) -> None:
        assert run.graph is not None and run.graph.decays is not None
        self.run, self.program = run, program
        self.fused = FusedStep(run.graph.flat, like, run.graph.decays, run.sampler.generator)
        if run.keys is not None:
            self.fused.keys.copy_(run.keys[:1])
        run.keys = self.fused.keys
        self.kept = [run.graph.flat.values, self.fused.keys, self.fused.velocity]
        self.prior = False  # the kernel adds the prior
        self.table: list[tuple[Tensor, Tensor]] = []  # rates and kicks of the next steps, if they change

    def begin(self, steps: int) -> None:
        """Take over the sampler's velocity and the rates of the next steps."""
        if isinstance(self.program, ScheduledProgram):
            found = (x[:, 0, self.program.groups].to(self.fused.rates) for x in self.program.table(steps))
            self.table = list(zip(*found, strict=True))
        if self.fused.friction is not None:
            self.fused.flat.join([self.run.sampler.velocity(p) for p in self.run.leaves], self.fused.velocity)

    def at(self, step: int) -> None:
        """Rates of a step, counted from `begin`."""
        if self.table:
            for now, next_one in zip((self.fused.rates, self.fused.kicks), self.table[step], strict=True):
                now.copy_(next_one)

    def step(self, gradient: Tensor) -> None:
        self.fused.step(gradient)

    def renew(self) -> bool:
        """Set the current rates and kicks; returns whether a captured step uses them."""
        found = self.program.elementwise()
        assert found is not None
        return self.fused.set(found)

    @torch.no_grad()
    def finish(self) -> None:
        """Write the state after the steps back to the sampler."""
        if self.fused.friction is not None:
            views = self.fused.flat.views(self.fused.velocity)
            torch._foreach_copy_([self.run.sampler.velocity(p) for p in self.run.leaves], views)


class ProgramUpdate:
    """The update of any sampler that exports its steps as a function of tensors."""

    def __init__(self, run: Chains, program: StepProgram) -> None:
        assert run.graph is not None
        self.run, self.program, self.graph = run, program, run.graph
        self.state = program.begin()
        self.now = torch.zeros(1, program.width, dtype=program.dtype, device=self.state.device)
        self.last = self.now.clone()
        self.tensors, self.injection = self._exported()
        self.kept = [self.state, self.graph.flat.values, self.last]
        self.prior = True

    def _exported(self) -> tuple[list[Tensor], list[Tensor]]:
        return [t.clone() for t in self.program.tensors()], [t.clone() for t in self.program.injection()]

    def at(self, step: int) -> None:
        """All steps have the same rates."""

    def begin(self, steps: int) -> None:
        """Take over the sampler's state."""
        self.state.copy_(self.program.begin())
        if self.program.lead:
            before = self.program.sampler.injector.last
            if before is None:
                self.last.normal_(generator=self.run.sampler.generator)
            else:
                self.last.copy_(before.view_as(self.last))

    def step(self, gradient: Tensor) -> None:
        program = self.program
        flat = program.flat(self.graph.flat.views(gradient))
        self.now.normal_(generator=self.run.sampler.generator)
        xi = 0.5 * (self.now + self.last) if program.lead else self.now
        if program.lead:
            self.last.copy_(self.now)
        xi = program.inject(xi, tuple(self.injection))
        self.state.copy_(program.move(self.state, flat, None, xi, tuple(self.tensors)))
        program.write([p.detach() for p in self.run.leaves], program.parameters(self.state))

    def renew(self) -> bool:
        """Take over the exported tensors; False if shapes have changed, so that a new capture is needed."""
        tensors, injection = self._exported()
        old, new = [*self.tensors, *self.injection], [*tensors, *injection]
        if [t.shape for t in old] != [t.shape for t in new]:
            self.tensors, self.injection = tensors, injection
            return False
        torch._foreach_copy_(old, new)
        return True

    def finish(self) -> None:
        """Write the state after the steps back to the sampler."""
        self.program.finish(self.state)
        if self.program.lead:
            injector = self.program.sampler.injector
            injector.last = self.last.clone().view(injector.source.out.shape)


class GraphSteps:
    """Whole steps of one chain as a CUDA graph: minibatch, gradient and update.

    Args:
        run: the chain, with `GraphGradients`.
        noise_every: if the sampler follows the noise, every k-th step gives a noise vector.

    Raises:
        RuntimeError: if the sampler's steps cannot be captured; it says why.
    """

    def __init__(self, run: Chains, noise_every: int) -> None:
        assert run.graph is not None
        self.run, self.graph, self.noise_every = run, run.graph, noise_every
        program = run.sampler.program()
        if isinstance(program, str):
            raise RuntimeError(program)
        if program.needs_noise:
            raise RuntimeError("every step takes a noise vector")
        program.prepare(1)
        self.program = program
        single = program.elementwise() if self.graph.decays is not None else None
        if single is not None and why_not_fused(self.graph.flat, single):
            single = None
        if program.scheduled and single is None:
            raise RuntimeError("rates change from step to step")
        self.update = ProgramUpdate(run, program) if single is None else FusedUpdate(run, program, single)
        # Zero while all losses are finite, else NaN: one operation per step. The step after a non-finite gradient has
        # such a loss.
        self.faults, self._zero = (torch.zeros(1, device=run.alive.device) for _ in range(2))
        self._before = torch.zeros_like(self.graph.gradient)
        self._loader = isinstance(run.batches, IterableBatches)
        self._generators = [run.sampler.generator, *([] if self._loader else self.graph.generators)]
        self._step = self._capture()

    def _capture(self) -> Captured:
        return Captured(self._body, self._generators, [*self.update.kept, self.faults, *self.run.buffers.values()])

    def _body(self) -> None:
        self._step_at(self.graph.batch if self._loader else self.run.batches.next())

    def _step_at(self, batch: Any) -> None:
        self.graph.differentiate(batch, self.update.prior)
        self.faults.addcmul_(self.graph.loss, self._zero)
        self.update.step(self.graph.gradient)

    def take_steps(self, done: int, steps: int, tick: Callable[[int], None]) -> None:
        """Take a number of steps without turns of other chains."""
        for _ in self.turns(done, steps, tick):
            pass

    def turns(self, done: int, steps: int, tick: Callable[[int], None]) -> Iterator[None]:
        """Take a number of steps, pausing from time to time so that other chains may use the device.

        Waits for the device only at the end, to check that all losses were finite.
        """
        with torch.no_grad():
            start = self.graph.flat.values.clone()
            self.update.begin(steps)
        whole_before = False  # whether the current gradient is of a batch of the usual size, taken in this call
        for first in range(done, done + steps, TURN):
            end = min(first + TURN, done + steps)
            with torch.no_grad():
                for i in range(first, end):
                    whole_before = self._follow(i, i - done, whole_before)
            tick(end - first)
            yield
        with torch.no_grad():
            self._finish(start, steps)

    def _follow(self, number: int, place: int, whole_before: bool) -> bool:
        """A step, by its number in all and its place in this call; from time to time the sampler sees the noise."""
        due = self.program.follows_noise and (number + 1) % self.noise_every == 0 and whole_before
        if due:
            self._before.copy_(self.graph.gradient)
        self.update.at(place)
        whole = self._take_step()
        if due and whole:
            noise = (self.graph.gradient - self._before).mul_(math.sqrt(0.5))
            self.run.sampler.observe(self.graph.flat.views(noise))
            if not self.update.renew():
                self._step = self._capture()
        return whole

    def _finish(self, start: Tensor, steps: int) -> None:
        run = self.run
        self.update.finish()
        run.gradients += steps
        self.program.count(steps)
        run.loss = self.graph.loss.clone()
        if not bool(torch.isfinite(self.faults + self.graph.flat.values.sum())):
            self.graph.flat.values.copy_(start)
            run.diverged()

    def _take_step(self) -> bool:
        """Take a step on the next batch; returns whether it had the usual size."""
        if self._loader and (batch := self.graph.next()) is not self.graph.batch:
            self._step_at(batch)
            return False
        self._step()
        return True
