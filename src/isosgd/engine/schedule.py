"""Which chains run together: all in one batched computation if that is possible, otherwise one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from isosgd.data.sources import (
    Batches,
    Data,
    DataSets,
    IterableBatches,
    Size,
    TensorBatches,
    Transform,
    as_tensors,
    batch_length,
    make_batches,
)
from isosgd.engine.chains import Chains, MakeSampler
from isosgd.engine.gradients import batchable
from isosgd.engine.ranks import Ranks
from isosgd.errors import warn_caller
from isosgd.target import Target
from isosgd.target.batches import tensors_of

LARGE = 1 << 20  # parameters from which a single chain fills a CPU, so that batching gains nothing
IMAGES = 1 << 14  # input values in a minibatch from which the same holds of convolutions
TOGETHER = "together"
MOST_SIDE_BY_SIDE = 16
GRAPH_EACH = 1 << 14  # parameters from which few chains on a GPU are faster each as a CUDA graph than batched

Start = Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None


def start_of(init: Start, chain: int) -> Mapping[str, Any] | None:
    """Where a chain starts, in natural parameters."""
    if isinstance(init, torch.nn.Module):
        raise TypeError(
            f"init is a {type(init).__name__}: pass its state_dict(), or sample around it as a trained network, "
            "starts=[model]"
        )
    found = init(chain) if callable(init) else init
    if found is not None and not isinstance(found, Mapping):
        raise TypeError(f"init gives a {type(found).__name__}: pass start values by name, such as a state_dict")
    return found


class Schedule:
    """Everything about a run that is known before the first step.

    Args:
        data: checked data on the device.
        init: start values in natural parameters, or a function from the number of a chain to them.
        chains: chains of each data set.
        batch_size: n; None for a default that depends on N; or ``"all"``.
        compile_after: number of gradients after which those of chains together are compiled; None for never.
        numbers: chains to run in this process, each on its own; None for all, together if possible.
        ranks: processes that share the run; None for this one alone.

    Attributes:
        engine: ``together``, or why chains run in turn.
        engine_note: further remarks on the engine for the user.
    """

    def __init__(
        self,
        target: Target,
        data: Data,
        init: Start,
        chains: int,
        batch_size: Size,
        seed: int,
        device: torch.device | None,
        compile_after: int | None,
        transform: Transform | None = None,
        numbers: Sequence[int] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.compile_after, self.transform, self.ranks = compile_after, transform, ranks
        self.target, self.data, self.init, self.chains, self.seed, self.device = (
            target, data, init, chains, seed, device
        )  # fmt: skip
        self.sets = data.sets if isinstance(data, DataSets) else 1
        self.count = self.sets * chains
        self.numbers = numbers
        self.tensors = data.tensors if isinstance(data, DataSets) else as_tensors(data)
        if isinstance(data, DataSets):
            self.num_data = target.num_data or data.num_data
            target.bind_num_data(self.num_data)
        else:
            self.num_data = target.resolve_num_data(data)
        start = target.initial(start_of(init, 0), device=device)
        target.check_device(next(iter(start.values())).device)
        self.given_buffers = {n for k in range(self.count) for n in target.split_init(start_of(init, k))[1]}
        probe = self._batches(0, 0, batch_size)
        self.given_size = batch_size
        batch = probe.next()
        # Each rank's loader yields its part of a minibatch, whereas tensors give all of it.
        parts = ranks.shares if ranks is not None and self.tensors is None else 1
        self.batch_size = _check_size(probe, batch, self.num_data, parts)
        self.engine = self._why_in_turn(batch) or TOGETHER
        self.engine_note = ""

    @property
    def together_sets(self) -> int:
        """Number of data sets whose chains run together."""
        return self.sets if self.engine == TOGETHER else 1

    @property
    def most_side_by_side(self) -> int:
        """Chains that may run at the same time, each on a CUDA stream of its own; 1 if they run in turn or together."""
        alone = self.engine == TOGETHER or self.tensors is None or self.numbers is not None or self.ranks is not None
        return 1 if alone or not self._on_gpu else min(self.count, MOST_SIDE_BY_SIDE)

    @property
    def _on_gpu(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    def _why_in_turn(self, batch: Any) -> str:
        """Why chains cannot run together; empty when they can."""
        if self.numbers is not None and self.ranks is not None and self.ranks.shares > 1:
            return f"each chain by {self.ranks.shares} ranks, {self.ranks.teams} at a time"
        if self.numbers is not None:
            return "in turn: each chain has random numbers of its own" + (
                "" if self.ranks is None else f", {self.ranks.size} ranks"
            )
        if self.count == 1:
            return "there is one chain"
        if self.tensors is None:
            return "in turn: the data come from a loader, not as tensors"
        start = self.target.initial(start_of(self.init, 0), device=self.device)
        size = sum(x.numel() for x in start.values())
        captured = self.compile_after is not None and self.given_size != "all" and not isinstance(self.data, DataSets)
        if captured and self._on_gpu and size >= GRAPH_EACH and self.count <= MOST_SIDE_BY_SIDE:
            return "in turn: each is a CUDA graph of its own"
        if self.given_buffers:
            first, *others = (self.target.split_init(start_of(self.init, k))[1] for k in range(self.count))
            if any(one.keys() != first.keys() or any(not torch.equal(one[n], first[n]) for n in one) for one in others):
                return "in turn: chains start with buffers of their own"
        if next(iter(start.values())).device.type == "cpu":
            if size > LARGE:
                return f"in turn: one chain of {size:,} parameters fills the CPU"
            convolves = self.target.module is not None and self.target.module.convolves
            if convolves and sum(t.numel() for t in tensors_of(self.target.inputs_of(batch))) >= IMAGES:
                return "in turn: one chain of a network with convolutions fills the CPU"
        why = batchable(self.target, start, batch, self.num_data)
        if why:
            warn_caller(f"chains run in turn, not together: {why}")
            return f"in turn: {why}"
        return ""

    def _batches(self, index: int, seed: int, batch_size: Size) -> Batches:
        """Minibatches of one chain."""
        data = self.data.set(index // self.chains) if isinstance(self.data, DataSets) else self.data
        return make_batches(data, batch_size, seed, self.device, self.target.dtype, self.transform)

    def runs(self, make_sampler: MakeSampler) -> Iterator[tuple[int, Chains]]:
        """Chains to run one after the other, each with the index of the first."""
        together = self.engine == TOGETHER
        for index in range(1 if together else self.count) if self.numbers is None else self.numbers:
            words = np.random.SeedSequence((self.seed, index)).generate_state(2, np.uint32)
            chain_seed, batch_seed = (int(word) for word in words)
            batches: Batches
            if together:
                assert self.tensors is not None
                rows = self.data.rows.repeat_interleave(self.chains, 0) if isinstance(self.data, DataSets) else None
                batches = TensorBatches(self.tensors, self.given_size, batch_seed, self.count, rows, self.transform)
            else:
                batches = self._batches(index, batch_seed, self.given_size)
                if self.numbers is not None and isinstance(batches, IterableBatches):
                    batches.reseed(batch_seed)  # the order does not depend on chains that ran here before
            numbers = range(self.count) if together else [index]
            starts = [self.target.initial(start_of(self.init, k), device=self.device) for k in numbers]
            yield (
                index,
                Chains(
                    self.target,
                    starts,
                    batches,
                    self.num_data,
                    make_sampler,
                    chain_seed,
                    together,
                    compile_after=self.compile_after,
                    buffers=self.target.initial_buffers(start_of(self.init, index), starts[0]),
                    given_buffers=self.given_buffers,
                    ranks=self.ranks if self.ranks is not None and self.ranks.shares > 1 else None,
                ),
            )


def _check_size(batches: Batches, batch: Any, num_data: int, parts: int = 1) -> int:
    """The batch size n, checked; ``batches`` yield one of so many parts of a minibatch."""
    n = parts * (getattr(batches, "batch_size", None) or batch_length(batch))
    if n < 2:
        raise ValueError(
            f"batches of {n} example: noise is measured between the halves of a batch, give it at least 2 (batch_size=)"
        )
    if n > num_data:
        raise ValueError(
            f"num_data = {num_data} is smaller than a batch of {n} examples: it is the number of examples "
            "in the whole data set"
        )
    return int(n)
