"""Runs a baseline: settings, trainings side by side, draws and failures."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isosgd.baselines.base import Baseline, Training, TrainingPlan
from isosgd.baselines.ensemble import Ensemble
from isosgd.baselines.mcdropout import MCDropout
from isosgd.baselines.snapshots import Snapshots
from isosgd.baselines.swag import SWAG
from isosgd.data.sources import Data, DataSets, Transform, Transformed, as_tensors, make_batches
from isosgd.engine.compiled import fastest_products
from isosgd.engine.graph import accelerate
from isosgd.engine.schedule import Schedule, Start, start_of
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.posterior import Posterior
from isosgd.progress import Progress
from isosgd.samplers import VSGD, Method, Sampler
from isosgd.target import Params, Target
from isosgd.target.batches import tensors_of, tree_map
from isosgd.warmup.reports import WarmupReport

LEAST_TRAINING, EPOCHS = 3000, 40  # default steps of training: at least so many, and so many epochs
PAYS = 10_000  # gradients above which compiling pays
CAPTURED = 200  # gradients above which a CUDA graph pays
HELD = 1 << 22  # most parameters trained at once; other members of an ensemble follow
EXAMPLES = 8
REFRESH_BATCH = 500  # examples in a batch for BatchNorm statistics

BASELINES: Mapping[str, Method] = MappingProxyType(
    {"mcdropout": Method(MCDropout), "swag": Method(SWAG), "ensemble": Method(Ensemble), "snapshots": Method(Snapshots)}
)


@dataclass
class TrainedChain:
    """The result of the trainings of a chain."""

    draws: list[Params] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # of the last steps of its trainings
    rates: dict[str, float] = field(default_factory=dict)  # of its plain SGD, by group
    buffers: Params = field(default_factory=dict)  # those that differ from the target's
    failure: DivergedError | None = None  # why it was dropped

    def report(self, plan: TrainingPlan, spacing: int) -> WarmupReport:
        """The training, as the report of a warm-up."""
        losses = torch.stack(self.losses).double().cpu() if self.losses else None
        loss = None if losses is None else (float(losses.mean()), float(losses.std(correction=0)))
        return WarmupReport(True, "", plan.training, plan.training, spacing or None, loss=loss)


@dataclass
class BaselineRun:
    """A baseline on a target and data; the fields are the checked arguments of `isosgd.sample`."""

    method: str
    target: Target
    data: Data
    init: Start
    draws: int
    chains: int
    batch_size: int | None
    keep_every: int | Literal["auto"]
    warmup: int | Literal["auto"]
    temperature: float
    seed: int
    device: torch.device | None
    compile_after: int | None
    progress: bool
    options: dict[str, Any]
    transform: Transform | None = None

    def posterior(self, about: dict[str, Any]) -> Posterior:
        """Train and draw; ``about`` is the part of ``info`` that is the same for every method."""
        started = time.monotonic()
        baseline = self._baseline()
        starts = self.init if self.init is not None else baseline.starts(self.target, self.seed)
        initial = self.target.initial(start_of(starts, 0))
        sets = self.data.sets if isinstance(self.data, DataSets) else 1
        trained = [TrainedChain() for _ in range(sets * self.chains)]
        members = baseline.members(self.draws)
        together = max(1, HELD // (sum(x.numel() for x in initial.values()) * len(trained)))
        bar = Progress(1, self.progress)
        gradients, engine = 0, ""
        for first in range(0, members, together):
            schedule = self._schedule(starts, members, range(first, min(first + together, members)))
            if first == 0:
                plan = self._plan(schedule)
                bar.total = len(trained) * members * baseline.expected(plan)
            if self.compile_after and baseline.expected(plan) < PAYS:
                schedule.compile_after = None
            spent, compiled = self._train(baseline, plan, schedule, bar, trained)
            gradients, engine = gradients + spent, engine or schedule.engine + compiled
        bar.close()
        kept = {index: chain for index, chain in enumerate(trained) if chain.failure is None}
        failures = {index: chain.failure for index, chain in enumerate(trained) if chain.failure is not None}
        if not kept:
            raise failures[0]
        for index, failure in failures.items():
            warnings.warn(f"chain {index} was dropped: {failure}", SamplingWarning, stacklevel=4)
        spacing = baseline.spacing(plan)
        info = about | {
            "num_data": schedule.num_data,
            "batch_size": schedule.batch_size if schedule.tensors is not None else None,
            "draws": self.draws,
            "chains": len(kept),
            "chain_indices": list(kept),
            "sets": sets,
            "chains_per_set": self.chains,
            "engine": engine,
            "keep_every": [spacing] * len(kept),
            "warmup": [chain.report(plan, spacing).as_dict() for chain in kept.values()],
            "rates": [chain.rates for chain in kept.values()],
            "dropped": {index: str(failure) for index, failure in failures.items()},
            "gradients": gradients,
            "threads": torch.get_num_threads(),
        }
        draws = {
            name: torch.stack([torch.stack([draw[name] for draw in chain.draws]) for chain in kept.values()])
            for name in initial
        }
        own = next(iter(kept.values())).buffers
        buffers = {
            name: torch.stack([x.buffers[name].expand(self.draws, *own[name].shape) for x in kept.values()])
            for name in own
        }
        posterior = Posterior(self.target, draws, info, buffers=buffers)
        posterior = with_statistics(posterior, self.data, list(kept), self.chains, self.transform)
        info["seconds"] = time.monotonic() - started
        return posterior

    def _baseline(self) -> Baseline:
        known = BASELINES[self.method].settings
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise TypeError(f"method {self.method!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
        baseline: Baseline = BASELINES[self.method].kind(**self.options)
        if self.temperature != 1 and not baseline.tempered:
            raise ValueError(
                f"temperature = {self.temperature} has no meaning for method {self.method!r}, which is of no density: "
                "leave it at 1"
            )
        return baseline

    def _schedule(self, starts: Start, members: int, some: range) -> Schedule:
        """The trainings of some members of every chain; a baseline without members has one."""
        seed = (
            self.seed if not some.start else int(np.random.SeedSequence((self.seed, some.start)).generate_state(1)[0])
        )

        def start(k: int) -> Any:
            return start_of(starts, k // len(some) * members + some[k % len(some)])

        given, count = None if starts is None else start, self.chains * len(some)
        return Schedule(
            self.target, self.data, given, count, self.batch_size, seed, self.device, self.compile_after, self.transform
        )

    def _plan(self, schedule: Schedule) -> TrainingPlan:
        epoch = max(1, math.ceil(schedule.num_data / schedule.batch_size))
        training = max(LEAST_TRAINING, EPOCHS * epoch) if self.warmup == "auto" else self.warmup
        keep_every = None if self.keep_every == "auto" else self.keep_every
        data = self.data.set(0) if isinstance(self.data, DataSets) else self.data
        tensors = as_tensors(data)
        if tensors is None:
            example = make_batches(data, None, 0, self.device, transform=self.transform).next()
        else:
            few = tree_map(lambda t: t[:EXAMPLES], tensors)
            example = Transformed(self.transform, 0, tensors_of(few)[0].device)(few)
        return TrainingPlan(self.draws, training, keep_every, self.temperature, epoch, example)

    def _train(
        self, baseline: Baseline, plan: TrainingPlan, schedule: Schedule, bar: Progress, trained: list[TrainedChain]
    ) -> tuple[int, str]:
        """Train a schedule and add its draws to the chains; returns the gradients and what was compiled."""

        def plain_sgd(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> Sampler:
            return VSGD(groups, num_data=schedule.num_data, generator=generator, chains=chains)

        gradients, compiled, members = 0, "", schedule.count // len(trained)
        for place, chains in schedule.runs(plain_sgd):
            label = f"{place + 1}/{schedule.count} " if chains.many is None and schedule.count > 1 else ""
            training, draws = Training(chains, bar, label), list[Params]()
            with fastest_products(chains.alive.device), chains.target.using(chains.buffers):
                if self.compile_after is not None and baseline.expected(plan) >= CAPTURED:
                    accelerate(chains)
                with suppress(DivergedError):  # raised once every chain has diverged
                    draws = baseline.run(training, plan)
                    chains.check_finite()
                buffers = chains.fixed_buffers()
            gradients += chains.gradients * chains.count
            compiled = chains.compiled if place == 0 else compiled
            for k in range(chains.count):
                chain = trained[(place + k) // members]
                if k in chains.failures:
                    chain.failure = chain.failure or self._failure(chains.failures[k])
                    continue
                chain.buffers = {name: x[k].cpu() for name, x in buffers.items()}
                chain.losses += [loss[k] for loss in training.losses]
                chain.draws += [{name: x[k].cpu() for name, x in draw.items()} for draw in draws]
                if training.rates is not None:
                    rate = float(training.rates[k])
                    chain.rates = {group["name"]: rate for group in chains.sampler.param_groups}
        return gradients, compiled

    def _failure(self, error: DivergedError) -> DivergedError:
        what = "the loss" if error.group is None else f"the gradient of group {error.group!r}"
        return DivergedError(
            f"{self.method}: after {error.step} gradients {what} is not finite. The state before it is kept in .state. "
            "If it happens at the start, check init and data; later, a smaller train_lr= (or lr=) helps.",
            step=error.step,
            group=error.group,
            state=error.state,
        )


def with_statistics(
    posterior: Posterior, data: Data, chain_indices: list[int], chains: int, transform: Transform | None = None
) -> Posterior:
    """The same draws, with BatchNorm statistics of all data if the model has such layers.

    ``chain_indices`` are those of the posterior's chains; each data set has so many ``chains``.
    """
    assert posterior.target is not None
    module = posterior.target.module
    if module is None or not module.statistics:
        return posterior
    if not isinstance(data, DataSets):
        return posterior.refreshed(_in_batches(data, transform))
    parts = [
        posterior.select(chains=[place]).refreshed(_in_batches(data.set(index // chains), transform)).buffers
        for place, index in enumerate(chain_indices)
    ]
    buffers = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Posterior(posterior.target, posterior.draws, posterior.info, posterior.data, buffers)


def _in_batches(data: Any, transform: Transform | None) -> Any:
    """Data in batches of about the same size, transformed in every pass."""
    tensors = as_tensors(data)
    found = data
    if tensors is not None:
        count = math.ceil(len(tensors_of(tensors)[0]) / REFRESH_BATCH)
        parts = zip(*(t.tensor_split(count) for t in tensors_of(tensors)), strict=True)
        found = [dict(zip(tensors, part, strict=True)) if isinstance(tensors, dict) else part for part in parts]
    return found if transform is None else _Passes(found, transform)


class _Passes:
    """Batches that go through a transform."""

    def __init__(self, batches: Any, transform: Transform) -> None:
        self.batches, self.transform = batches, transform

    def __iter__(self) -> Iterator[Any]:
        change: Transformed | None = None
        for batch in self.batches:
            change = change or Transformed(self.transform, 0, tensors_of(batch)[0].device)
            yield change(batch)
