"""How a baseline is run: its settings, trainings side by side, draws, and what became of each chain."""

from __future__ import annotations

import math
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from isosgd.baselines.base import Baseline, Plan, Training, module_of
from isosgd.baselines.registry import BASELINES
from isosgd.chain.backend import fastest_products
from isosgd.chain.batches import Data, DataSets, as_tensors, make_batches
from isosgd.chain.progress import Progress
from isosgd.chain.reports import WarmupReport
from isosgd.chain.team import Start, Team, start_of
from isosgd.errors import DivergedError, SamplingWarning
from isosgd.potential import Params, Target
from isosgd.predictive import Posterior
from isosgd.samplers import VSGD, Sampler

LEAST_TRAINING, EPOCHS = 3000, 40  # steps of training when nothing is said: so many epochs, but at least so many
PAYS = 10_000  # gradients from which compiling them is worth its time
HELD = 1 << 22  # parameters in trainings that run together; further members of an ensemble are trained after them
EXAMPLES = 8
REFRESHED_BY = 500  # examples in a batch of those that BatchNorm statistics are taken from


@dataclass
class Outcome:
    """What became of the chains.

    Attributes:
        num_data: N.
        batch_size: n; None when the data come in batches.
        sets: data sets.
        engine: whether trainings ran together, or why not.
        keep_every: steps between snapshots; 0 where a baseline takes none.
        draws: of each chain that did not diverge, by its index: natural parameters ``[draws, *shape]``.
        failures: of the others.
        reports: of the training of each chain with draws.
        rates: of its plain SGD, by group; empty where there is none.
        gradients: spent in all.
    """

    num_data: int = 0
    batch_size: int | None = None
    sets: int = 1
    engine: str = ""
    keep_every: int = 0
    draws: dict[int, Params] = field(default_factory=dict)
    failures: dict[int, DivergedError] = field(default_factory=dict)
    reports: list[WarmupReport] = field(default_factory=list)
    rates: list[dict[str, float]] = field(default_factory=list)
    gradients: int = 0


def make(method: str, options: dict[str, Any]) -> Baseline:
    """A baseline with its settings, which are checked."""
    known = BASELINES[method].settings
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"method {method!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    found: Baseline = BASELINES[method].kind(**options)
    return found


@dataclass
class Run:
    """A baseline on a target and data; the fields are the arguments of `isosgd.sample`, checked."""

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

    def outcome(self) -> Outcome:
        """Train and draw."""
        baseline = self.baseline = make(self.method, self.options)
        if self.temperature != 1 and not baseline.tempered:
            raise ValueError(
                f"temperature = {self.temperature} has no meaning for method {self.method!r}, which is of no density: "
                "leave it at 1"
            )
        self.members = baseline.members(self.draws)
        self.starts = self.init if self.init is not None else baseline.starts(self.target, self.seed)
        self.sets = self.data.sets if isinstance(self.data, DataSets) else 1
        size = sum(x.numel() for x in self.target.initial(start_of(self.starts, 0)).values())
        most = max(1, HELD // (size * self.sets * self.chains))
        outcome = Outcome(sets=self.sets)
        self.losses: dict[int, list[Tensor]] = {}
        with Progress(1, self.progress) as bar:
            for first in range(0, self.members, most):
                self._together(first, min(most, self.members - first), outcome, bar)
        for index in outcome.failures:
            outcome.draws.pop(index, None)
        outcome.draws = dict(sorted(outcome.draws.items()))
        outcome.reports = [self._report(index, outcome) for index in outcome.draws]
        outcome.rates = [outcome.rates[index] for index in outcome.draws]
        return outcome

    def posterior(self, about: dict[str, Any]) -> Posterior:
        """The draws.

        Args:
            about: what `isosgd.sample` says of every method alike; the rest of ``info`` is added.
        """
        started = time.monotonic()
        found = self.outcome()
        if not found.draws:
            raise next(iter(found.failures.values()))
        for index, failure in found.failures.items():
            warnings.warn(f"chain {index} was dropped: {failure}", SamplingWarning, stacklevel=3)
        info = about | {
            "num_data": found.num_data,
            "batch_size": found.batch_size,
            "draws": self.draws,
            "chains": len(found.draws),
            "chain_indices": list(found.draws),
            "sets": found.sets,
            "chains_per_set": self.chains,
            "engine": found.engine,
            "keep_every": [found.keep_every] * len(found.draws),
            "warmup": [report.as_dict() for report in found.reports],
            "rates": found.rates,
            "dropped": {index: str(failure) for index, failure in found.failures.items()},
            "gradients": found.gradients,
            "threads": torch.get_num_threads(),
        }
        names = list(self.target.initial(start_of(self.starts, 0)))
        draws = {name: torch.stack([chain[name] for chain in found.draws.values()]) for name in names}
        posterior = with_statistics(Posterior(self.target, draws, info), self.data, list(found.draws), self.chains)
        info["seconds"] = time.monotonic() - started
        return posterior

    def _together(self, first: int, count: int, outcome: Outcome, bar: Progress) -> None:
        """Members ``first`` and so on of every chain; those of a baseline without members are the chains."""
        seed = self.seed if first == 0 else int(np.random.SeedSequence((self.seed, first)).generate_state(1)[0])

        def start(k: int) -> Any:
            return start_of(self.starts, k // count * self.members + first + k % count)

        given = None if self.starts is None else start
        team = Team(
            self.target, self.data, given, self.chains * count, self.batch_size, seed, self.device, self.compile_after
        )
        if not outcome.engine:
            self.plan = self._plan(team)
            bar.total = self.sets * self.chains * self.members * self.baseline.expected(self.plan)
            outcome.num_data, outcome.keep_every = team.num_data, self.baseline.spacing(self.plan)
            outcome.batch_size = team.batch_size if team.tensors is not None else None
            outcome.engine = team.engine
            outcome.rates = [{} for _ in range(self.sets * self.chains)]
        if self.compile_after and self.baseline.expected(self.plan) < PAYS:
            team.compile_after = None

        def plain_sgd(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> Sampler:
            return VSGD(groups, num_data=team.num_data, generator=generator, chains=chains)

        for place, chains in team.runs(plain_sgd):
            label = f"{place + 1}/{team.count} " if chains.many is None and team.count > 1 else ""
            training, found = Training(chains, bar, label), list[Params]()
            with fastest_products(chains.alive.device), suppress(DivergedError):  # raised when every chain has
                found = self.baseline.run(training, self.plan)
            outcome.gradients += chains.gradients * chains.count
            if first + place == 0:
                outcome.engine += chains.compiled
            for k in range(chains.count):
                index = (place + k) // count
                if k in chains.failures:
                    outcome.failures.setdefault(index, self._failure(chains.failures[k]))
                    continue
                self.losses.setdefault(index, []).extend(loss[k] for loss in training.losses)
                mine = {name: torch.stack([draw[name][k].cpu() for draw in found]) for name in found[0]}
                before = outcome.draws.get(index)
                outcome.draws[index] = mine if before is None else {n: torch.cat([before[n], mine[n]]) for n in mine}
                if training.rates is not None:
                    rate = float(training.rates[k])
                    outcome.rates[index] = {group["name"]: rate for group in chains.sampler.param_groups}

    def _plan(self, team: Team) -> Plan:
        epoch = max(1, math.ceil(team.num_data / team.batch_size))
        training = max(LEAST_TRAINING, EPOCHS * epoch) if self.warmup == "auto" else self.warmup
        keep_every = None if self.keep_every == "auto" else self.keep_every
        return Plan(self.draws, training, keep_every, self.temperature, epoch, self._example())

    def _example(self) -> Any:
        data = self.data.set(0) if isinstance(self.data, DataSets) else self.data
        tensors = as_tensors(data)
        if tensors is None:
            return make_batches(data, None, 0, self.device).next()
        return tuple(t[:EXAMPLES] for t in tensors)

    def _report(self, index: int, outcome: Outcome) -> WarmupReport:
        losses = torch.stack(self.losses[index]).double().cpu() if self.losses.get(index) else None
        loss = None if losses is None else (float(losses.mean()), float(losses.std(correction=0)))
        return WarmupReport(True, "", self.plan.training, self.plan.training, outcome.keep_every or None, loss=loss)

    def _failure(self, error: DivergedError) -> DivergedError:
        what = "the loss" if error.group is None else f"the gradient of group {error.group!r}"
        return DivergedError(
            f"{self.method}: after {error.step} gradients {what} is not finite. The state before it is kept in .state. "
            "If it happens at the start, check init and data; later, a smaller train_lr= (or lr=) helps.",
            step=error.step,
            group=error.group,
            state=error.state,
        )


def with_statistics(posterior: Posterior, data: Data, chain_indices: list[int], chains: int) -> Posterior:
    """The same draws, each with BatchNorm statistics of all data, where the model takes them from minibatches.

    Args:
        posterior: draws of a baseline.
        data: what they were trained on.
        chain_indices: of its chains, in the order of data sets.
        chains: of each data set.
    """
    assert posterior.target is not None
    module = module_of(posterior.target)
    norms = [] if module is None else [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    if all(norm.running_mean is None for norm in norms):
        return posterior
    if not isinstance(data, DataSets):
        return posterior.refreshed(_in_batches(data))
    parts = [
        posterior.select(chains=[place]).refreshed(_in_batches(data.set(index // chains))).buffers
        for place, index in enumerate(chain_indices)
    ]
    buffers = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Posterior(posterior.target, posterior.draws, posterior.info, posterior.data, buffers)


def _in_batches(data: Any) -> Any:
    """Data in batches of about the same size."""
    tensors = as_tensors(data)
    if tensors is None:
        return data
    count = math.ceil(len(tensors[0]) / REFRESHED_BY)
    return list(zip(*(t.tensor_split(count) for t in tensors), strict=True))
