"""The temperature of draws, measured from gradients of the potential at each of them.

Gradients use all data if that is affordable, else new examples for each draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

from isosgd.data.sources import as_tensors
from isosgd.diagnostics.meter import LEAST, Reading, directions, readings
from isosgd.diagnostics.traces import as_array
from isosgd.posterior.draws import Mapped, Stack, at_once, batches_of, moved, place_of
from isosgd.posterior.view import View
from isosgd.target import Params
from isosgd.target.batches import batch_length, tree_map, with_tensors

CHUNK = 2048  # examples per batch
AFFORDABLE = 1e11  # parameters x examples x draws, about a minute on one core
LEAST_ROWS = 64
WORKED_ON = 1 << 21  # numbers of a block of gradients at most
HELD = 1 << 24  # numbers of draws and gradients that are kept for directions


class DrawGradients:
    """``grad f`` at each draw in free parameters, where ``exp(-f / T)`` is the sampled density.

    Args:
        stack: the draws.
        view: their target.
        data: all training data, tensors or batches.
        num_data: N in the run; taken from the data when None.
        rows: examples in each gradient; when None all, or as many as are affordable.
        seed: of the examples.
        device: where to compute, as for `Posterior.predict`.
        temperature: T; a prior with sampled scales counts T times, see `isosgd.Target.prior_weight`.

    Attributes:
        sizes: number of entries of each parameter.
        example: one draw, in free parameters.
        rows: examples in each gradient.
    """

    def __init__(
        self, stack: Stack, view: View, data: Any, num_data: int | None, rows: int | None, seed: int,
        device: torch.device | str | None = None, temperature: float = 1.0,
    ) -> None:  # fmt: skip
        self.stack, self.view, self.target = stack, view, view.target
        self.tensors = as_tensors(data, self.target.dtype)
        self.data = data if self.tensors is None else self.tensors
        self.num_data = num_data or self.target.resolve_num_data(self.data)
        self.target.bind_num_data(self.num_data)
        self.temperature = temperature
        self.example = self.target.unconstrain(stack.draw(0, 0))
        self.prior_weight = self.target.prior_weight(self.example, temperature)
        self.sizes = {name: x.numel() for name, x in self.example.items()}
        total = sum(self.sizes.values())
        most = int(AFFORDABLE / (total * len(stack)))
        self.rows = min(self.num_data, max(LEAST_ROWS, most)) if rows is None else rows
        if isinstance(self.rows, bool) or not 1 <= self.rows <= self.num_data:
            raise ValueError(f"rows = {rows!r} must lie between 1 and the {self.num_data} examples")
        self._generator = torch.Generator().manual_seed(seed)
        self._full = self.rows == self.num_data
        # Each draw has its own random examples; all data and batches of a loader are shared by the draws of a block.
        shared = self._full or self.tensors is None
        self._mapped = Mapped(self._one, (0, None if shared else 0))
        self._scores = Mapped(self.target.prior_score, ())
        self._batches: Iterator[Any] = iter(())
        self.place = place_of(device, self.target.device, self._few())

    def free_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Index of the first draw of a block, and free parameters ``[block, d]``."""
        first = 0
        for block, _ in self.stack.blocks(None):
            free = self.target.unconstrain({name: block[name] for name in self.sizes})
            yield first, self._flat(free)
            first += len(next(iter(block.values())))

    def blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The same with gradients ``[block, d]``, on the CPU."""
        size = at_once([tuple(x.shape) for x in self.example.values()], self._few())
        size = max(1, min(size, WORKED_ON // sum(self.sizes.values())))
        first = 0
        for block, _ in self.stack.blocks(self._few(), size, self.place):
            natural = {name: block[name] for name in self.sizes}
            buffers = {name: x for name, x in block.items() if name not in natural}
            free = self.target.unconstrain(natural)
            count = len(next(iter(free.values())))
            total: Params = {name: torch.zeros_like(x) for name, x in free.items()}
            examples = 0
            for batch, rows in self._parts(count):
                found = self._mapped(free, buffers, moved(batch, self.place))
                total = {name: total[name] + found[name] for name in total}
                examples += rows
            scores, scale = self._scores(free), self.num_data / examples
            slope = {name: total[name] * scale - self.prior_weight * scores[name] for name in total}
            yield first, self._flat(free), self._flat(slope)
            first += count

    def _one(self, free: Params, buffers: Params, batch: Any) -> Params:
        """Gradient of the summed negative log likelihood of a batch at one draw."""

        def loss(leaves: Params) -> Tensor:
            return -self.view.log_likelihood(self.target.constrain(leaves) | buffers, batch).sum()

        return value_and_slope(loss, free)[1]

    def _parts(self, draws: int) -> Iterator[tuple[Any, int]]:
        """Batches for some draws, and their numbers of examples."""
        if self.tensors is None:
            yield from self._loaded()
        elif self._full:
            for part in batches_of(self.tensors, CHUNK):
                yield part, batch_length(part) or 0
        else:
            for first in range(0, self.rows, CHUNK):
                rows = min(CHUNK, self.rows - first)
                index = torch.randint(batch_length(self.tensors) or 0, (draws, rows), generator=self._generator)
                yield tree_map(lambda t, index=index: t[index.to(t.device)], self.tensors), rows

    def _loaded(self) -> Iterator[tuple[Any, int]]:
        """Batches of a loader: all, or as many as are affordable, continuing after those of the last block."""
        if self._full:
            self._batches = iter(self.data)
        seen, started = 0, False
        while seen < self.rows:
            batch = with_tensors(next(self._batches, None), self.target.dtype)
            if batch is None:
                if seen and self._full:
                    return
                if started:
                    raise ValueError("data yields no batches: it is empty, or an iterator gone through already")
                self._batches, started = iter(self.data), True
                continue
            rows = batch_length(batch) or 1
            seen, started = seen + rows, False
            yield batch, rows

    def _few(self) -> Any:
        """The examples of one evaluation."""
        if self.tensors is not None:
            return tree_map(lambda t: t[: min(CHUNK, self.rows)], self.tensors)
        return with_tensors(next(iter(self.data), None))

    def _flat(self, params: Params) -> Tensor:
        return torch.cat([x.detach().reshape(len(x), -1).cpu() for x in (params[name] for name in self.sizes)], 1)


def measure(gradient: DrawGradients) -> tuple[tuple[Reading, ...], tuple[Reading, ...]]:
    """Temperatures over all parameters and each layer, and along single directions.

    Makes two passes over the draws, one for the centres and one for the gradients, and keeps as many draws and
    gradients as fit in memory.
    """
    chains, draws, temperature = gradient.stack.num_chains, gradient.stack.num_draws, gradient.temperature
    layers = gradient.target.layers(gradient.example)
    groups = list(dict.fromkeys(layers[name] for name in gradient.sizes))
    numbers = torch.tensor([groups.index(layers[name]) for name in gradient.sizes])
    place = numbers.repeat_interleave(torch.tensor(list(gradient.sizes.values())))  # group of each entry
    total = len(place)
    late = draws // 2  # first draw of the second half of a chain

    def where(first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Chain, index and half of some draws."""
        number = torch.arange(first, first + count)
        return number // draws, number % draws, (number % draws >= late).long()

    centres = torch.zeros(chains, 2, total, dtype=torch.float64)
    weights = torch.tensor([1.0 / late, 1.0 / (draws - late)], dtype=torch.float64)
    for first, theta in gradient.free_blocks():
        chain, _, half = where(first, len(theta))
        centres.index_put_((chain, half), theta.double() * weights[half, None], accumulate=True)

    held = min(draws, HELD // (total * chains))
    slot = torch.full((draws,), -1)  # position of a draw that is kept
    slot[torch.linspace(0, draws - 1, held).round().long()] = torch.arange(held)
    kept = [torch.zeros(chains, held, total, dtype=torch.float32) for _ in range(2)] if held >= LEAST else []
    series = torch.zeros(chains, draws, len(groups), dtype=torch.float64)
    for first, theta, slope in gradient.blocks():
        chain, index, half = where(first, len(theta))
        products = (theta.double() - centres[chain, 1 - half]) * slope.double()
        series[chain, index] = products.new_zeros(len(theta), len(groups)).index_add_(1, place, products)
        if kept:
            here = slot[index] >= 0
            spot = chain[here], slot[index][here]
            kept[0][spot] = (theta.double() - centres[chain].mean(1))[here].float()
            kept[1][spot] = slope[here].float()
    if not bool(series.isfinite().all()):
        chain, index, _ = (~series.isfinite()).nonzero()[0]
        raise ValueError(
            f"draw {int(index)} of chain {int(chain)}, or the gradient there, is not finite: leave that chain out with "
            "posterior.select(chains=...)"
        )
    every = as_array(series.sum(-1, keepdim=True))
    if len(groups) == 1:
        found = readings(["all"], [total], every, temperature)
    else:
        sizes = [total, *torch.bincount(place).tolist()]
        found = readings(["all", *groups], sizes, np.concatenate([every, as_array(series)], -1), temperature)
    return found, directions(kept[0], kept[1], temperature) if kept else ()


def value_and_slope(function: Callable[[Params], Tensor], params: Params) -> tuple[Tensor, Params]:
    """Value and gradient of a scalar function of parameters."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in params.values()):
        slope, value = grad_and_value(function)(params)
        return value, slope
    leaves = {name: x.detach().requires_grad_() for name, x in params.items()}
    with torch.enable_grad():
        value = function(leaves)
        if not value.requires_grad:
            return value, {name: torch.zeros_like(x) for name, x in params.items()}
        parts = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return value.detach(), dict(zip(params, parts, strict=True))
