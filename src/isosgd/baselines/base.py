"""The base class of baselines, and their training.

Training is Adam with a cosine schedule on the samplers' mean loss, prior included, so that it ends near a mode of the
posterior. Chains (and the members of an ensemble) train in one batched computation if the model allows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.errors import check_positive
from isosgd.progress import Progress
from isosgd.samplers.schedules import cosine
from isosgd.target import Params, Target

LOOKS, PROBES = 50, 20  # gradients for the noise and for the curvature when a rate is chosen
STABLE = 0.5  # largest chosen rate times h; twice that for the peak of cycles in `snapshots`
LOSSES = 100  # minibatches averaged for the reported loss
Start = Callable[[int], Params]


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a run."""

    draws: int  # of each chain
    training: int  # steps
    keep_every: int | None  # steps between snapshots; None lets the baseline choose
    temperature: float
    epoch: int  # steps
    example: Any  # a few examples, to trace the model


class Baseline(ABC):
    """A method with draws like those of a sampler, but not of the posterior."""

    family: ClassVar[str] = "baseline"
    targets: ClassVar[str] = "not the posterior"
    paper: ClassVar[str]
    departures: ClassVar[str]
    tempered: ClassVar[bool] = False  # whether it has a temperature

    def __init__(self, *, train_lr: float = 0.01) -> None:
        self.train_lr = check_positive("train_lr", train_lr)

    def members(self, draws: int) -> int:
        """Trainings per chain."""
        return 1

    def starts(self, target: Target, seed: int) -> Start | None:
        """The start of each training, in natural parameters; None for the initial values of the target."""
        return None

    def spacing(self, plan: TrainingPlan) -> int:
        """Steps between snapshots; 0 if there are none."""
        return 0

    def expected(self, plan: TrainingPlan) -> int:
        """Gradients of one training, snapshots included, for the progress line."""
        return plan.training

    @abstractmethod
    def run(self, training: Training, plan: TrainingPlan) -> list[Params]:
        """Train; returns natural parameters ``[chains, *shape]`` for each draw."""


class Training:
    """Optimisation of chains to a mode, and plain SGD around it.

    Scales of a hierarchical prior are fixed at their initial values: such a density has its mode at scale zero, far
    from its mass. The sampler of the chains is V-SGD, which is plain SGD with known noise and rate.
    """

    def __init__(self, chains: Chains, bar: Progress, label: str = "") -> None:
        self.chains, self.bar, self.label = chains, bar, label
        scales = chains.target.prior_scales(chains.params)
        self._fixed = [leaf for name, leaf in chains.params.items() if name in scales]
        self.losses: list[Tensor] = []  # of the last steps of the training
        self.rates: Tensor | None = None  # of plain SGD

    @property
    def generator(self) -> torch.Generator:
        """For all randomness except the minibatches."""
        return self.chains.sampler.generator

    def gradient(self, stage: str = "training") -> None:
        """Compute the gradients of the next minibatch."""
        self.chains.evaluate()
        self.count(stage)
        self.fix_scales()

    def fix_scales(self) -> None:
        """Set the gradients of fixed scales to zero."""
        for leaf in self._fixed:
            leaf.grad = torch.zeros_like(leaf)

    def count(self, stage: str) -> None:
        """Count one gradient."""
        self.bar.advance(self.label + stage, self.chains.count)

    def train(self, steps: int, lr: float, gradient: Callable[[], None] | None = None) -> None:
        """Optimise with Adam and a cosine schedule; ``gradient`` replaces the minibatch gradient."""
        adam = torch.optim.Adam(self.chains.leaves, lr=lr, foreach=True)
        for step in range(steps):
            (gradient or self.gradient)()
            if step >= steps - LOSSES:
                self.losses.append(self.chains.loss)
            adam.param_groups[0]["lr"] = lr * cosine(step / steps)
            adam.step()
        for leaf in self.chains.leaves:
            leaf.grad = None

    def choose_rate(self, lr: float | None, most: float, mandt: bool) -> Tensor:
        """The rate of plain SGD for each chain, ``[chains]``: ``lr``, or ``most / h`` with h the largest curvature.

        With ``mandt`` it is the rate at which SGD's stationary Gaussian is closest to the posterior (Mandt, Hoffman,
        Blei 2017), if that is lower.
        """
        chains = self.chains
        if lr is not None:
            return torch.full((chains.count,), lr, device=chains.alive.device)
        seen = 0
        while seen < (LOOKS if mandt else 1):
            seen += chains.observe_noise()
            self.count("measuring noise")
        for _ in range(PROBES):
            chains.probe_curvature()
            self.count("measuring curvature")
        rates = most / chains.curvatures().amax(-1)
        if mandt:
            chains.adapt(chains.curvatures())
            rates = torch.minimum(rates, chains.rates()[:, 0])
        return rates

    def run_sgd(self, steps: int, rates: Tensor, schedule: Callable[[int], float] | None = None) -> None:
        """Steps of plain SGD at ``rates [chains]``, times the schedule's factor of each step."""
        sampler, self.rates = self.chains.sampler, rates
        for step in range(steps):
            if step == 0 or schedule is not None:
                now = rates * (1.0 if schedule is None else schedule(step))
                for group in sampler.param_groups:
                    group["rate"] = sampler.number(now if self.chains.many is not None else now[0])
                sampler.refresh()
            self.gradient("SGD")
            self.chains.advance(None)

    def natural(self, flat: Tensor) -> Params:
        """Natural parameters ``[chains, *shape]`` from flat free ones ``[chains, d]``."""
        free = self.chains.layout.views(flat)
        leaves = self.chains.params
        return self.chains.target.constrain({name: x.to(leaves[name].dtype) for name, x in free.items()})
