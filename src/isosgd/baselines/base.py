"""What the baselines share: how they are asked for, and how they train.

Training is Adam with a rate that falls along a cosine, on the same mean loss that samplers see, prior included, so
that it ends near a mode of the posterior. Chains (and the members of an ensemble) train in one batched computation
where the model allows it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from isosgd.chain.chain import Chains
from isosgd.chain.progress import Progress
from isosgd.potential import Params, Target
from isosgd.potential.modules import ModuleLikelihood
from isosgd.samplers.cyclical import cosine

LOOKS, PROBES = 50, 20  # gradients spent on the noise and on the curvature where a rate is chosen
STABLE = 0.5  # of 1 / h: the most that a chosen rate may be; twice that in `snapshots`, where it falls again
LOSSES = 100  # minibatches behind the loss that is reported
Start = Callable[[int], Params]


@dataclass(frozen=True)
class TrainingPlan:
    """What is asked of a baseline, with nothing left open.

    Attributes:
        draws: of each chain.
        training: steps of training.
        keep_every: steps between snapshots, None where the baseline shall choose.
        temperature: T.
        epoch: steps in which as many examples are seen as there are.
        example: a few examples, for a look at how the model runs.
    """

    draws: int
    training: int
    keep_every: int | None
    temperature: float
    epoch: int
    example: Any


class Baseline(ABC):
    """A method that yields draws as samplers do, but not of the posterior.

    Args:
        train_lr: the highest rate of Adam in the training.
    """

    targets: ClassVar[str] = "not the posterior"
    tempered: ClassVar[bool] = False
    """Whether a temperature has a meaning."""

    def __init__(self, *, train_lr: float = 0.01) -> None:
        self.train_lr = check_positive("train_lr", train_lr)

    def members(self, draws: int) -> int:
        """Trainings behind one chain."""
        return 1

    def starts(self, target: Target, seed: int) -> Start | None:
        """Where each training starts, in natural parameters; None for where the target says."""
        return None

    def spacing(self, plan: TrainingPlan) -> int:
        """Steps between snapshots, 0 where there are none."""
        return 0

    def expected(self, plan: TrainingPlan) -> int:
        """Gradients of one training and what follows it, for the progress line."""
        return plan.training

    @abstractmethod
    def run(self, training: Training, plan: TrainingPlan) -> list[Params]:
        """Train, and make the draws.

        Returns:
            Natural parameters ``[chains, *shape]`` for each draw.
        """


class Training:
    """Chains on their way to a mode and around it.

    Scales that a prior brings along are held where they start: a hierarchical density has its mode where a scale is
    zero, far from all its mass.

    Args:
        chains: with V-SGD as their sampler: plain SGD, whose noise and rate it knows.
        bar: told of every gradient.
        label: of these chains, for the progress line.
    """

    def __init__(self, chains: Chains, bar: Progress, label: str = "") -> None:
        self.chains, self.bar, self.label = chains, bar, label
        target = chains.target
        held = target.prior_scales(chains.params)
        self._held = [leaf for name, leaf in chains.params.items() if name in held]
        self.losses: list[Tensor] = []  # of the last steps of the training
        self.rates: Tensor | None = None  # of plain SGD, where there is any

    @property
    def generator(self) -> torch.Generator:
        """Where all randomness beyond the minibatches comes from."""
        return self.chains.sampler.generator

    def gradient(self, stage: str = "training") -> None:
        """Gradients of the next minibatch, left in ``.grad``."""
        self.chains.evaluate()
        self.count(stage)
        self.hold()

    def hold(self) -> None:
        """Let what is held have no gradient."""
        for leaf in self._held:
            leaf.grad = torch.zeros_like(leaf)

    def count(self, stage: str) -> None:
        """One gradient more."""
        self.bar.advance(self.label + stage, self.chains.count)

    def train(self, steps: int, lr: float, gradient: Callable[[], None] | None = None) -> None:
        """Go down with Adam, at a rate that falls to zero along a cosine.

        Args:
            steps: how many.
            lr: the first and highest rate.
            gradient: puts gradients in place, in another way than `gradient`.
        """
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
        """The rate of plain SGD for each chain.

        Args:
            lr: the one to take, if given.
            most: of 1 / h, h the largest curvature.
            mandt: whether to take the rate at which a Gaussian of SGD's is nearest to the posterior, if that is less.

        Returns:
            Rates, ``[chains]``.
        """
        chains = self.chains
        if lr is not None:
            return torch.full((chains.count,), lr, device=chains.alive.device)
        for _ in range(LOOKS if mandt else 1):
            chains.sampler.observe(chains.evaluate(split=True))
            self.count("measuring noise")
        for _ in range(PROBES):
            chains.probe_curvature()
            self.count("measuring curvature")
        rates = most / chains.curvatures().amax(-1)
        if mandt:
            chains.adapt(chains.curvatures())
            rates = torch.minimum(rates, chains.rates()[:, 0])
        return rates

    def descend(self, steps: int, rates: Tensor, shape: Callable[[int], float] | None = None) -> None:
        """Steps of plain SGD.

        Args:
            steps: how many.
            rates: ``[chains]``.
            shape: what a step's rate is multiplied by; 1 when not given.
        """
        sampler, self.rates = self.chains.sampler, rates
        for step in range(steps):
            if step == 0 or shape is not None:
                now = rates * (1.0 if shape is None else shape(step))
                for group in sampler.param_groups:
                    group["rate"] = sampler.number(now if self.chains.many is not None else now[0])
                sampler.refresh()
            self.gradient("stepping")
            self.chains.advance(None)

    def natural(self, flat: Tensor) -> Params:
        """Natural parameters ``[chains, *shape]`` from flat free ones ``[chains, d]``."""
        free = self.chains.layout.views(flat)
        leaves = self.chains.params
        return self.chains.target.constrain({name: x.to(leaves[name].dtype) for name, x in free.items()})


def module_of(target: Target) -> nn.Module | None:
    """The network that a target runs, its own copy of the user's; None for a target of functions."""
    likelihood = target._log_likelihood
    return likelihood._module if isinstance(likelihood, ModuleLikelihood) else None


def check_positive(name: str, value: float) -> float:
    """A setting that must be a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} = {value!r} must be a positive number")
    return float(value)


def check_count(name: str, value: int, least: int) -> int:
    """A setting that must be an integer of a least size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {value!r} must be an integer of at least {least}")
    return value


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """A setting that must be one of a few words."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r} is unknown; choose one of {list(choices)}")
    return value
