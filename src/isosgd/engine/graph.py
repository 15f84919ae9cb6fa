"""One chain on a GPU as CUDA graphs: minibatch, transform, network and update without work of the host in between.

Three things are captured once and replayed: the next minibatch (drawn, gathered and transformed on the device), the
gradient on the minibatch at hand, and a whole step. What they read and write stays in its place. Batches of a loader
are copied into fixed buffers; one of another size is taken without a graph.

Noise vectors are differences of successive gradients, over sqrt(2), so that there is one shape of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isosgd.chain.batches import IterableBatches, TensorBatches, tensors_of, tree_map
from isosgd.engine.fused import FlatParameters, FusedStep

if TYPE_CHECKING:
    from isosgd.chain.chain import Chains

WARM_UPS = 3  # runs before a capture, in which libraries choose and load what they use


class Captured:
    """A function without arguments as a CUDA graph.

    Args:
        body: it may not wait for the device; what it reads and writes must stay in its place.
        generators: that it draws from.
        keep: tensors that the runs before the capture must leave as they are.
    """

    def __init__(self, body: Callable[[], None], generators: Sequence[torch.Generator], keep: Sequence[Tensor]) -> None:
        before = [generator.get_state() for generator in generators]
        values = [x.detach().clone() for x in keep]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        with torch.cuda.graph(self.graph):
            body()
        with torch.no_grad():
            for x, value in zip(keep, values, strict=True):
                x.copy_(value)
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)

    def __call__(self) -> None:
        """Run it once."""
        self.graph.replay()


def unsupported_reason(run: Chains) -> str:
    """Why chains cannot run as CUDA graphs; empty when they can."""
    if not run.leaves[0].is_cuda:
        return "not on a GPU"
    if run.many is not None:
        return "several chains in one computation"
    if len({x.dtype for x in run.leaves}) > 1:
        return "parameters have several dtypes"
    if run.batches.whole:
        return "all data at once"
    return ""


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
        self.precisions = run.target.prior_precisions(run.params)
        self.batch: Any = None  # in its fixed place
        self.irregular = 0  # batches of another size than the first
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
        """The next minibatch, in its fixed place; a batch of another size than the first is itself."""
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
        self.likelihood(self.batch)
        if self.precisions is not None:
            decays = [tau / self.run.num_data for tau in self.precisions]
            pulls = torch._foreach_mul([p.detach() for p in self.run.leaves], decays)
            torch._foreach_add_(self.flat.views(self.gradient), pulls)

    def likelihood(self, batch: Any) -> None:
        """Loss and gradient at a minibatch; without the prior's part where that is Gaussian."""
        loss, gradients = self.run.target.gradient(
            self.run.params, batch, self.run.num_data, prior=self.precisions is None
        )
        self.flat.join(gradients, self.gradient)
        self.loss.copy_(loss.reshape(1))
        self.finite.copy_(torch.isfinite(self.loss + self.gradient.sum()))

    def __call__(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """Loss, gradients and whether they are finite, at the minibatch at hand: copies."""
        self._gradients()
        finite = self.finite.clone()
        gradient = torch.where(finite, self.gradient, 0.0)
        return torch.where(finite, self.loss, torch.inf), self.flat.views(gradient), finite


class GraphSteps:
    """Whole steps of one chain as a CUDA graph: minibatch, gradient and a fused update.

    Args:
        run: the chain, with `GraphGradients`.
        noise_every: every so many steps a noise vector is taken in, where the sampler follows the noise.
    """

    def __init__(self, run: Chains, noise_every: int) -> None:
        assert run.graph is not None
        self.run, self.graph, self.noise_every = run, run.graph, noise_every
        found = run.sampler.elementwise()
        if isinstance(found, str):
            raise RuntimeError(found)
        if self.graph.precisions is None:
            raise RuntimeError("the prior is not a Gaussian of fixed scales")
        decays = [tau / run.num_data for tau in self.graph.precisions]
        self.update = FusedStep(self.graph.flat, found, decays, run.sampler.generator)
        if run.keys is not None:
            self.update.keys.copy_(run.keys)
        run.keys = self.update.keys
        self.good = torch.ones(1, dtype=torch.bool, device=run.alive.device)
        self._before = torch.zeros_like(self.graph.gradient)
        self._loader = isinstance(run.batches, IterableBatches)
        generators = [run.sampler.generator, *([] if self._loader else self.graph.generators)]
        kept = [self.graph.flat.values, self.update.keys, self.good, *run.buffers.values()]
        self._step = Captured(self._body, generators, kept)

    def _body(self) -> None:
        self._step_at(self.graph.batch if self._loader else self.run.batches.next())

    def _step_at(self, batch: Any) -> None:
        self.graph.likelihood(batch)
        self.good.logical_and_(self.graph.finite)
        self.update.step(self.graph.gradient)

    @torch.no_grad()
    def go(self, done: int, steps: int, tick: Callable[[int], None]) -> None:
        """Take so many steps. Whether they were good is asked once, at the end.

        Args:
            done: steps that were taken before, since the warm-up.
            steps: to take.
            tick: told how many were taken.
        """
        run = self.run
        start = self.graph.flat.values.clone()
        for i in range(done, done + steps):
            observed = run.follows and (i + 1) % self.noise_every == 0
            if observed:
                self._before.copy_(self.graph.gradient)
            if self._loader:
                self._from_loader()
            else:
                self._step()
            if observed and i > done:
                noise = (self.graph.gradient - self._before).mul_(math.sqrt(0.5))
                run.sampler.observe(self.graph.flat.views(noise))
                found = run.sampler.elementwise()
                assert not isinstance(found, str)
                self.update.set(found)
        run.gradients += steps
        for group in run.sampler.param_groups:
            group["step"] += steps
        tick(steps)
        run.loss = self.graph.loss.clone()
        if not bool(self.good & torch.isfinite(self.graph.flat.values.sum())):
            self.graph.flat.values.copy_(start)
            run.diverged()

    def _from_loader(self) -> None:
        batch = self.graph.next()
        if batch is self.graph.batch:
            self._step()
        else:
            self._step_at(batch)
