"""Where minibatches come from: tensors drawn independently where they live, or any iterable of batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from isosgd.target import Target, batches
from isosgd.target.batches import tensors_of, tree_map
from isosgd.target.likelihoods import Tokens
from isosgd.target.modules import MASK

Batch = Any
Transform = Callable[[Batch, torch.Generator], Batch]
"""A user's function of a batch and a generator on its device: augmentation, normalisation, a change of dtype."""
ALL = "all"
Size = int | Literal["all"] | None
Tensors = tuple[Tensor, ...] | dict[str, Tensor]
"""Data as tensors that share their first dimension."""


def batch_length(batch: Batch) -> int:
    """Number of examples: the first dimension of the batch's tensors."""
    n = batches.batch_length(batch)
    if n is None:
        raise ValueError(
            f"a batch of type {type(batch).__name__} holds no tensor with a first dimension to count examples by"
        )
    return n


def halves(batch: Batch) -> tuple[Batch, Batch, tuple[int, int]]:
    """A batch split in two along its first dimension, with the sizes of the parts."""
    n = batch_length(batch)
    cut = n // 2
    return rows_of(batch, slice(cut)), rows_of(batch, slice(cut, n)), (cut, n - cut)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some examples of a batch; tensors of another length than the batch are not cut."""
    n = batch_length(batch)
    return tree_map(lambda t: t[rows] if t.dim() and t.shape[0] == n else t, batch)


class Transformed:
    """A user's transform of batches with its own generator; checks what it returns.

    Args:
        function: of a batch and a generator; None for none.
    """

    def __init__(self, function: Transform | None, seed: int, device: torch.device) -> None:
        if function is not None:
            _check_function(function)
        self.function = function
        self.generator = torch.Generator(device=device).manual_seed(seed ^ 0x7AF5)

    def __call__(self, batch: Batch, lead: int = 0, generator: torch.Generator | None = None) -> Batch:
        """The transformed batch.

        Args:
            lead: dimensions before that of the examples (steps, chains): the user's function gets one long batch.
            generator: to use in place of its own.
        """
        if self.function is None:
            return batch
        shape = tensors_of(batch)[0].shape[: lead + 1]
        flat = tree_map(lambda t: t.flatten(0, lead), batch) if lead else batch
        found = self.function(flat, generator or self.generator)
        if found is None:
            raise ValueError("transform returned None: it must return the batch, (inputs, targets)")
        if isinstance(flat, tuple | list) and isinstance(found, Tensor):
            raise ValueError(
                f"transform turned a batch of {len(flat)} tensors into one: it must return (inputs, targets)"
            )
        expected, tensors = math.prod(shape), tensors_of(found)
        lengths = [int(t.shape[0]) if t.dim() else 0 for t in tensors]
        if not tensors or any(length != expected for length in lengths):
            raise ValueError(
                f"transform turned a batch of {expected} examples into tensors of lengths {lengths}: it must return a "
                "batch like the one it is given, (inputs, targets), with the same number of examples in each tensor"
            )
        return tree_map(lambda t: t.unflatten(0, shape), found) if lead else found


def _check_function(function: Any) -> None:
    """Refuse a transform that cannot be called with a batch and a generator."""
    what = f"transform = {getattr(function, '__name__', function)!r}"
    if not callable(function):
        raise TypeError(f"{what} must be a function (batch, generator) -> batch")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TypeError(f"{what} is called as transform(batch, generator), which it does not take: {error}") from error
    except ValueError:  # it has no signature
        pass


class TensorBatches:
    """Minibatches drawn independently, with replacement, from tensors that share their first dimension.

    The theory needs independent batches: without replacement the noise cancels over an epoch.

    Args:
        tensors: the data, a tuple or a dict; batches have the same form.
        batch_size: n; None for a default that depends on N; ``"all"`` for all examples, a gradient without noise.
        seed: of the indices.
        chains: number of chains, each with its own batch ``[chains, n, ...]``; None for one chain without this
            dimension.
        rows: the rows that each chain draws from, ``[chains, N]``; all rows by default.
        transform: applied to every batch, on the device; see `Transform`.
    """

    independent = True

    def __init__(
        self,
        tensors: Tensors,
        batch_size: Size,
        seed: int,
        chains: int | None = None,
        rows: Tensor | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.tensors, self.chains, self.rows = tensors, chains, rows
        first = tensors_of(tensors)[0]
        self.num_data = int(first.shape[0] if rows is None else rows.shape[1])
        self.whole = batch_size == ALL
        self.batch_size = size_of(batch_size, self.num_data)
        if self.batch_size > self.num_data:
            raise ValueError(
                f"batch_size = {self.batch_size} is larger than the {self.num_data} examples; choose at "
                f"most {self.num_data}"
            )
        self.device = first.device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.transform, self.seed = Transformed(transform, seed, self.device), seed
        self._all: Batch = None
        if self.whole and transform is not None:
            self._check_not_random()

    def indices(self, steps: int = 1) -> Tensor:
        """Rows of the next minibatches, ``[steps, chains, n]``."""
        shape = (steps, self.chains or 1, self.batch_size)
        index = torch.randint(self.num_data, shape, generator=self.generator, device=self.device)
        return index if self.rows is None else self.rows.expand(steps, -1, -1).gather(-1, index)

    def at(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The examples in these rows, transformed."""
        flat = index.reshape(-1)
        found = tree_map(lambda t: t.index_select(0, flat).view(*index.shape, *t.shape[1:]), self.tensors)
        return self.transform(found, index.dim() - 1, generator)

    def fresh(self, number: int, count: int, size: int, chain: int = 0) -> Iterator[Batch]:
        """Batches that no step uses, other ones for each number: for the BatchNorm statistics of a draw."""
        size = min(size, self.num_data)
        generator = torch.Generator(device=self.device).manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
        for _ in range(max(1, min(count, self.num_data // size))):
            index = torch.randint(self.num_data, (size,), generator=generator, device=self.device)
            yield self.at(index if self.rows is None else self.rows[chain][index], generator)

    def _check_not_random(self) -> None:
        """Refuse a random transform where the gradient must be that of all data."""
        index = torch.arange(min(8, self.num_data), device=self.device)
        one, two = (self.at(index, torch.Generator(device=self.device).manual_seed(s)) for s in (1, 2))
        if any(not torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(two), strict=True)):
            raise ValueError(
                "transform is random, but batch_size='all' (HMC) needs the same potential at every step: give a "
                "number as batch_size, or a transform without random numbers"
            )

    def next(self, mixed: bool = False) -> Batch:
        """The next minibatch of each chain.

        Args:
            mixed: shuffle a batch that is all of the data, so that its halves are random.
        """
        if not self.whole:
            index = self.indices()[0]
            return self.at(index[0] if self.chains is None else index)
        if self._all is None:
            every = torch.arange(self.num_data, device=self.device) if self.rows is None else self.rows
            every = every.expand(self.chains, -1) if self.chains is not None and self.rows is None else every
            self._all = self.at(every)
        if not mixed:
            return self._all
        order = torch.randperm(self.num_data, generator=self.generator, device=self.device)
        return tree_map(lambda t: t.index_select(0 if self.chains is None else 1, order), self._all)

    def state(self) -> dict[str, Any]:
        """Generator states, from which `load_state` continues with the same batches."""
        return {"generator": self.generator.get_state(), "transform": self.transform.generator.get_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.generator.set_state(state["generator"].cpu())
        self.transform.generator.set_state(state["transform"].cpu())


class IterableBatches:
    """Batches from a DataLoader or any other iterable that can be iterated repeatedly.

    A smaller batch, such as the last one of an epoch, takes a step like any other, with the mean over its own examples.
    With a shuffled loader this is unbiased and adds noise to that step; in a fixed order the examples of a small batch
    count for more. A batch of one example takes a step, but gives no noise vector.

    A resumed run starts the interrupted pass again with the states that torch's generators had, and skips the batches
    already taken. This is exact if order and contents depend on nothing but torch's generators; those of numpy and
    Python are not restored.
    """

    whole = False  # not known of an iterable

    def __init__(
        self,
        source: Iterable[Batch],
        device: torch.device | None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        self.source, self.device, self.dtype = source, device, dtype
        self.transform = Transformed(transform, seed, device or torch.device("cpu"))
        self._peeked: Batch = None
        self._passes = 0
        self._begin()
        sampler = getattr(source, "sampler", None)
        if hasattr(sampler, "weights"):
            raise ValueError(
                f"data is drawn by {type(sampler).__name__}, some examples more often than others: the draws would be "
                "of another posterior. Use RandomSampler(replacement=True), or put weights into the log likelihood"
            )
        self.independent = bool(getattr(sampler, "replacement", False))

    def reseed(self, seed: int) -> None:
        """Start again with torch's generators, which determine the order, at a seed."""
        for generator in self._generators():
            generator.manual_seed(seed)
        self._peeked, self._passes = None, 0
        self._begin()

    def _begin(self) -> None:
        """Start a pass through the data."""
        set_epoch = getattr(getattr(self.source, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._passes)  # else a DistributedSampler has the same order in every pass
        self._passes += 1
        self._before, self._taken = [generator.get_state() for generator in self._generators()], 0
        self._iterator: Iterator[Batch] = iter(self.source)

    def _generators(self) -> list[torch.Generator]:
        """Torch's default generator, and those given to a DataLoader and its samplers."""
        places = [self.source, getattr(self.source, "sampler", None), getattr(self.source, "batch_sampler", None)]
        places.append(getattr(places[-1], "sampler", None))
        found = [generator for place in places if (generator := getattr(place, "generator", None)) is not None]
        return [torch.default_generator, *{id(g): g for g in found if isinstance(g, torch.Generator)}.values()]

    def state(self) -> dict[str, Any]:
        """From which `load_state` continues with the same batches, as far as that is possible."""
        taken, transform = self._taken - (self._peeked is not None), self.transform.generator.get_state()
        return {"before": self._before, "passes": self._passes - 1, "taken": taken, "transform": transform}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a `state`: start that pass again and skip the batches taken from it."""
        for generator, before in zip(self._generators(), state["before"], strict=True):
            generator.set_state(before.cpu())
        self._peeked, self._passes = None, state["passes"]
        self._begin()
        for _ in range(state["taken"]):
            self._take()
        self.transform.generator.set_state(state["transform"].cpu())

    def _take(self) -> Batch | None:
        batch = next(self._iterator, None)
        self._taken += 1
        return batch

    def next(self, mixed: bool = False) -> Batch:
        """The next batch, transformed; after the last one a new pass starts."""
        return self.transform(self.raw())

    def peek(self) -> Batch:
        """The next batch, not transformed and not consumed."""
        if self._peeked is None:
            self._peeked = self.raw()
        return self._peeked

    def raw(self) -> Batch:
        """The next batch on the device, not transformed."""
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        batch = self._take()
        if batch is None:
            self._begin()
            batch = self._take()
        if batch is None:
            raise ValueError(
                "data yields no batches: it is empty, or an iterator that can be gone through only once; "
                "pass tensors, a DataLoader or a list of batches"
            )
        return self._moved(batch)

    def _moved(self, batch: Batch) -> Batch:
        batch = batches.with_tensors(batch, self.dtype)
        if self.device is None or all(t.device == self.device for t in batches.tensors_of(batch)):
            return batch
        return tree_map(lambda t: t.to(self.device, non_blocking=True), batch)

    def fresh(self, number: int, count: int, size: int, chain: int = 0) -> Iterator[Batch]:
        """As `TensorBatches.fresh`: the first batches of a separate pass, of the loader's own size."""
        states = [generator.get_state() for generator in self._generators()]
        for _, batch in zip(range(count), self.source, strict=False):
            yield self.transform(self._moved(batch))
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)


Batches = TensorBatches | IterableBatches


def size_of(batch_size: Size, num_data: int) -> int:
    """The batch size n for N examples.

    By default half of the data, at least 8 and at most 128 examples, and even so that it splits in two. Up to there
    small batches cost nearly as much as large ones, and their noise slows the chain down.
    """
    if batch_size is None:
        return min(max(8, min(num_data // 2, 128)) // 2 * 2, num_data)
    return num_data if isinstance(batch_size, str) else batch_size


def as_tensors(data: Any, dtype: torch.dtype | None = None) -> Any:
    """Data as a tuple or dict of tensors; None when it is an iterable of batches.

    A list or a dict of tensors or arrays is data; a list of tuples or dicts is batches.
    """
    if isinstance(data, Mapping):
        other = next((name for name, x in data.items() if not batches.is_array(x)), None)
        if other is not None or not data:
            what = "is empty" if other is None else f"has {other!r} of type {type(data[other]).__name__}"
            raise TypeError(f"data is a dict that {what}: pass tensors or arrays by name, one row an example")
        return {name: batches.as_tensor(x, dtype) for name, x in data.items()}
    items = (data,) if batches.is_array(data) else data
    if not isinstance(items, tuple | list) or not all(map(batches.is_array, items)) or items == []:
        return None
    if not items:
        raise ValueError("data is an empty tuple; pass the tensors, for instance (inputs, targets)")
    return tuple(batches.as_tensor(item, dtype) for item in items)


def joined(parts: Iterable[Batch], target: Target, what: str) -> Tensors:
    """Batches as one, refused unless all are of one form; texts with masks are padded to one length.

    Args:
        parts: a loader, or a list of batches.
        target: says which entry of a dict holds the labels.
        what: the user's name for them.
    """
    every = [batches.with_tensors(part, target.dtype) for part in parts]
    if not every:
        raise ValueError(f"{what} has no examples: it is empty, or an iterator that was gone through already")
    if all(isinstance(b, Mapping) and b.keys() == every[0].keys() for b in every):
        labels, likelihood = (
            target.labels_of({name: name for name in every[0]}), target.module and target.module.likelihood,
        )  # fmt: skip
        ignore = likelihood.ignore if isinstance(likelihood, Tokens) else 0
        found: dict[str, Tensor] = {}
        for name in every[0]:
            tensors = [b[name] for b in every]
            if MASK in every[0] and all(t.ndim == 2 for t in tensors):
                longest, value = max(t.shape[1] for t in tensors), ignore if name == labels else 0
                tensors = [F.pad(t, (0, longest - t.shape[1]), value=value) for t in tensors]
            if len({t.shape[1:] for t in tensors}) > 1:
                raise ValueError(f"{what} has batches whose {name!r} are of different shapes: give them one")
            found[name] = torch.cat(tensors)
        return found
    if not all(isinstance(b, tuple | list) and len(b) == len(every[0]) and all(map(torch.is_tensor, b)) for b in every):
        raise TypeError(
            f"{what} must be (x, y) or a dict of tensors, or a loader of such batches, not of batches of "
            f"{type(every[0]).__name__}"
        )
    return tuple(torch.cat(column) for column in zip(*every, strict=True))


class DataSets:
    """Several data sets at once, each sampled by chains of its own: the splits of a benchmark, folds, bootstraps.

    Args:
        tensors: ``[sets, N, ...]``; or, with ``rows``, one data set ``[M, ...]`` for all.
        rows: the rows of each set, ``[sets, N]``.

    Example:
        >>> x, y = torch.randn(100, 3), torch.randn(100)
        >>> folds = torch.stack([torch.randperm(100)[:90] for _ in range(5)])
        >>> data = DataSets((x, y), rows=folds)
        >>> data.sets, data.num_data
        (5, 90)
    """

    def __init__(self, tensors: Sequence[Tensor | np.ndarray], rows: Tensor | np.ndarray | None = None) -> None:
        found = as_tensors(tensors if isinstance(tensors, Tensor | np.ndarray) else tuple(tensors))
        if found is None or isinstance(tensors, Mapping):
            raise TypeError("DataSets takes a sequence of tensors or arrays, for instance (x, y)")
        if any(t.dim() == 0 for t in found):
            raise ValueError("DataSets has a tensor without dimensions: the first ones are [sets, N], or the rows")
        if rows is None:
            shapes = [tuple(t.shape) for t in found]
            if any(t.dim() < 2 for t in found) or len({shape[:2] for shape in shapes}) > 1:
                raise ValueError(f"tensors of shapes {shapes}: all must begin with [sets, N]; or pass rows=[sets, N]")
            self.sets, self.num_data = shapes[0][:2]
            found = tuple(t.flatten(0, 1) for t in found)
            self.rows = torch.arange(self.sets * self.num_data, device=found[0].device).view(self.sets, self.num_data)
        else:
            self.rows = torch.as_tensor(rows, device=found[0].device)
            if self.rows.dim() != 2 or self.rows.is_floating_point() or self.rows.dtype == torch.bool:
                raise ValueError(f"rows must be integers [sets, N], got {self.rows.dtype} {list(self.rows.shape)}")
            self.rows = self.rows.long()
            if not self.rows.numel() or int(self.rows.min()) < 0 or int(self.rows.max()) >= found[0].shape[0]:
                raise ValueError(f"rows must name some of the {found[0].shape[0]} rows of the data, counted from 0")
            self.sets, self.num_data = self.rows.shape
        check_tensors(found)
        self.tensors = found

    def to(self, device: torch.device) -> DataSets:
        """The same on a device."""
        return DataSets([t.to(device) for t in self.tensors], self.rows)

    def set(self, i: int) -> tuple[Tensor, ...]:
        """The tensors of one set."""
        return tuple(t.index_select(0, self.rows[i]) for t in self.tensors)


Data = Tensors | DataSets | Iterable[Batch]


def as_data(data: Any, batch_size: Size, device: torch.device | None, dtype: torch.dtype | None = None) -> Data:
    """A user's data, checked and moved to the device."""
    wrong = isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 2
    if batch_size is not None and batch_size != ALL and wrong:
        raise ValueError(f"batch_size = {batch_size!r} must be an integer of at least 2, or 'all'")
    if isinstance(data, DataSets):
        return data if device is None else data.to(device)
    tensors = as_tensors(data, dtype)
    if tensors is not None:
        check_tensors(tensors)
        found: Data = tree_map(lambda t: t.to(device), tensors) if device is not None else tensors
        return found
    known = f"data of type {type(data).__name__} is neither a tuple or dict of tensors nor an iterable of batches"
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(f"{known}: pass DataLoader(data, batch_size=64, shuffle=True), or its tensors")
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        raise TypeError(f"{known} such as a DataLoader")
    if isinstance(data, tuple | list) and data and not tensors_of(batches.with_tensors(data[0])):
        raise TypeError(
            f"data is a {type(data).__name__} whose first part, a {type(data[0]).__name__}, holds no tensor: pass "
            "tensors or arrays, such as (np.asarray(x), np.asarray(y))"
        )
    if batch_size == ALL:
        raise ValueError(
            "HMC takes all data for every gradient, and the data come as an iterable of batches: pass tensors, or "
            "another method without batch_size='all'"
        )
    if batch_size is not None:
        raise ValueError(
            f"batch_size = {batch_size!r} has no effect on an iterable of batches: "
            "set it in the DataLoader, or pass tensors"
        )
    return data


def make_batches(
    data: Data,
    batch_size: Size,
    seed: int,
    device: torch.device | None,
    dtype: torch.dtype | None = None,
    transform: Transform | None = None,
) -> Batches:
    """Batches of one chain, from checked tensors or from an iterable."""
    assert not isinstance(data, DataSets)
    tensors = as_tensors(data)
    if tensors is None:
        return IterableBatches(data, device, dtype, seed, transform)
    return TensorBatches(tensors, batch_size, seed, transform=transform)


def check_tensors(given: Tensors) -> None:
    """Refuse data that cannot be sampled from: no rows, rows that do not match, values that are not finite."""
    names = list(given) if isinstance(given, Mapping) else range(len(given))
    tensors = tensors_of(given)
    lengths = [int(t.shape[0]) if t.dim() else None for t in tensors]
    if None in lengths or len(set(lengths)) != 1:
        shapes = [tuple(t.shape) for t in tensors]
        raise ValueError(
            f"the tensors of data have shapes {shapes}: their first dimensions, the examples, must be the same. "
            "Batches are given as a list of tuples, [(x1, y1), (x2, y2)]"
        )
    if lengths[0] == 0:
        raise ValueError("data holds no examples")
    for name, t in zip(names, tensors, strict=True):
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            row = int((~torch.isfinite(t)).reshape(t.shape[0], -1).any(1).nonzero()[0])
            raise ValueError(f"tensor {name!r} of data is not finite in row {row}: drop or impute such rows first")
