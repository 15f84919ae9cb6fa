"""Sampling around a network that a trainer of another library has just trained: what Lightning and Trainer share."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from isosgd.errors import SamplingWarning
from isosgd.posterior import Posterior
from isosgd.sampling import sample
from isosgd.sampling.sample import check_sample
from isosgd.target import Likelihood, Target

What = str | Likelihood | Callable[[Any], Target]
"""A likelihood; or a function from the trained module to a `Target`."""

OURS = {"starts", "init", "data", "target"}  # arguments of `sample` that come from the trainer


class AfterFit:
    """Base of callbacks that sample once a network is trained.

    Args:
        what: the likelihood of the trained module, under the prior ``"empirical"``; or a function from the module to a
            `Target`.
        settings: of `isosgd.sample`. By default ``held_out`` is the trainer's validation data; None for no such data.

    Attributes:
        posterior: the draws; None before there are any.
    """

    def __init__(self, what: What, **settings: Any) -> None:
        if not (isinstance(what, str | Likelihood) or callable(what)):
            raise TypeError(f"pass a likelihood, or a function from the module to a Target, not {what!r}")
        if known := sorted(OURS & settings.keys()):
            raise TypeError(f"{known[0]}= is the trainer's: chains begin at the network it has trained, on its data")
        self.what, self.settings = what, settings
        self.posterior: Posterior | None = None

    def _target_of(self, module: nn.Module) -> Target:
        """The target of a trained module."""
        with warnings.catch_warnings():  # a module that was just trained is in training mode
            warnings.filterwarnings("ignore", message="dropout is off", category=UserWarning)
            if isinstance(self.what, str | Likelihood):
                return Target.from_module(module, self.what, "empirical")
            target = self.what(module)
        if not isinstance(target, Target) or target.module is None:
            raise TypeError(f"the function from a module gave {target!r}: return Target.from_module(...) of it")
        return target

    def _check_processes(self, count: int, replicated: bool, how: str) -> None:
        """Refuse training in several processes that sampling does not support.

        Args:
            count: number of processes.
            replicated: whether each holds the whole network.
            how: the trainer's name for this kind of training.
        """
        if count > 1 and not replicated:
            raise RuntimeError(
                f"sampling after a training in {count} processes by {how}: only replicas (DDP) can be sampled here. A "
                "model that is sharded is sampled in a loop, with ISGD and Collector"
            )
        if count > 1 and self.settings.get("parallel") is None:
            raise RuntimeError(
                f"sampling in {count} processes: say how they share it, by Sampling(..., temperature=..., "
                "parallel='data') for a chain whose minibatches they share, or by parallel='chains' with as many "
                "chains= or more; or train in one process"
            )

    def _check(self, module: nn.Module, data: Any, held_out: Any) -> None:
        """Refuse before training what `sample` would refuse after it, and forget draws of an earlier training.

        One batch of each loader is checked. The trainer's batches and random numbers stay as they were.
        """
        self.posterior = None
        with _unseen(data), _unseen(held_out), warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)  # they come when draws are taken
            check_sample(**self._call(module, data, held_out, only_check=True))

    def _sample(self, module: nn.Module, data: Any, held_out: Any) -> None:
        """Sample around the network as it is now."""
        if self._ranks() > 1:
            for buffer in module.buffers():  # as DDP does before every pass; until then each rank has its own
                dist.broadcast(buffer, 0)
        self.posterior = sample(**self._call(module, data, held_out))

    def _call(self, module: nn.Module, data: Any, held_out: Any, only_check: bool = False) -> dict[str, Any]:
        """The arguments of `isosgd.sample`; for a check, with loaders that do not affect the trainer's."""
        settings, data = dict(self.settings), _one_loader(data, "training", "sampling needs one")
        if settings.get("temperature") in (None, "auto") and "held_out" not in settings:
            held_out = _one_loader(held_out, "validation", "give held_out= one of them, or None, to the callback")
            if only_check and held_out is not None:
                held_out = list(islice(_in_this_process(held_out), 1))
            settings["held_out"] = held_out
        if (ranks := self._ranks()) > 1:
            chains = settings.get("chains", 1)  # which `sample` checks
            shares = ranks // chains if settings["parallel"] == "data" and chains in range(1, ranks + 1) else 1
            data = _of_rank(data, dist.get_rank() % shares, shares, settings.get("seed", 0))
        target = self._target_of(module)
        assert target.module is not None
        start = {**target.module.values, **target.frozen, **target.buffers}
        return {"target": target, "data": _in_this_process(data) if only_check else data, "starts": [start], **settings}

    def _ranks(self) -> int:
        """Processes that sample together."""
        together = self.settings.get("parallel") is not None and dist.is_available() and dist.is_initialized()
        return dist.get_world_size() if together else 1


def _one_loader(data: Any, what: str, advice: str) -> Any:
    """A loader, which may be in a list; None if there is none, or no batch in it."""
    if isinstance(data, list | tuple) and len(data) == 1:
        (data,) = data
    if isinstance(data, Mapping | list | tuple) and data:
        raise ValueError(f"there are {len(data)} loaders of {what} data, in a {type(data).__name__}: {advice}")
    try:
        return data if data is not None and len(data) else None
    except TypeError:  # of an `IterableDataset` the length is not known
        return data


def _of_rank(loader: Any, place: int, shares: int, seed: int) -> DataLoader[Any]:
    """A loader of this rank's examples, which no other rank of its chain has.

    Trainers divide data among processes in various ways; only with this one N and each rank's examples are known.
    """
    batches = getattr(loader, "batch_sampler", None)
    cut: Any = batches
    while hasattr(cut, "batch_sampler"):  # of accelerate, which deals batches out
        cut = cut.batch_sampler
    sampler, size = getattr(cut, "sampler", None), getattr(cut, "batch_size", None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or not _takes_all(sampler, loader) or size is None:
        raise ValueError(
            f"the training data are a {type(loader).__name__} with a {type(sampler).__name__}, which cannot be shared "
            "out among processes: a DataLoader is needed, over a data set of known length, in its order or shuffled. "
            "Or train in one process"
        )
    if getattr(batches, "split_batches", False):
        size //= dist.get_world_size()
    shuffle = getattr(sampler, "shuffle", not isinstance(sampler, SequentialSampler))
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=DistributedSampler(loader.dataset, shares, place, shuffle, seed),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        drop_last=bool(getattr(cut, "drop_last", False)),
    )


def _takes_all(sampler: Any, loader: Any) -> bool:
    """Whether a sampler goes through all of the data, in their order or shuffled; wrapped ones may leave some out."""
    if isinstance(sampler, DistributedSampler):
        return sampler.dataset is loader.dataset
    return isinstance(sampler, SequentialSampler | RandomSampler) and len(sampler) == len(loader.dataset)


def _in_this_process(loader: Any) -> Any:
    """A loader of the same batches without workers, since those of the trainer may be running already."""
    loader = getattr(loader, "base_dataloader", loader)  # of accelerate, which counts the loaders in use
    if not isinstance(loader, DataLoader):
        return loader
    found = copy.copy(loader)
    vars(found).update(num_workers=0, persistent_workers=False, prefetch_factor=None, timeout=0, _iterator=None)
    return found


@contextmanager
def _unseen(loader: Any) -> Iterator[None]:
    """Restore the states of random number generators after batches were taken from a loader."""
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts.append(getattr(parts[-1], "sampler", None))
    own = [g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)]
    before = [g.get_state() for g in own]
    others = random.getstate(), np.random.get_state()  # data sets may use them
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for generator, state in zip(own, before, strict=True):
            generator.set_state(state)
        random.setstate(others[0])
        np.random.set_state(others[1])
