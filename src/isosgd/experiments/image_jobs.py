"""What every method of the classification tables is asked, and what it gives back: averaged predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isosgd.experiments.captured import Chain, probabilities, refresh_statistics
from isosgd.experiments.classifiers import State, Task


@dataclass
class Job:
    """What is asked of a method.

    Attributes:
        task: the network and the data.
        state: the trained model to start from.
        seed: of everything.
        temperature: T.
        draws: how many.
        warmup: steps before the first draw.
        keep_every: steps between draws.
    """

    task: Task
    state: State
    seed: int
    temperature: float
    draws: int
    warmup: int
    keep_every: int


@dataclass
class Outcome:
    """Predictions averaged over draws, and what they took.

    Attributes:
        sums: class probabilities summed over draws, for each set of images.
        draws: how many.
        gradients: of a minibatch.
        seconds: in all.
        notes: numbers that say how it went.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    draws: int = 0
    gradients: int = 0
    seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)

    def add(self, task: Task, model: torch.nn.Module, dropout: bool = False) -> None:
        """Take in what one draw predicts."""
        for name, images in task.sets.items():
            found = probabilities(model, images.plain(), dropout).double()
            self.sums[name] = self.sums[name] + found if name in self.sums else found
        self.draws += 1

    def mean(self, name: str) -> Tensor:
        """Probabilities of the model average."""
        return self.sums[name] / self.draws

    @classmethod
    def join(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """The average over all draws of several chains."""
        names = outcomes[0].sums
        return cls(
            {name: torch.stack([o.sums[name] for o in outcomes]).sum(0) for name in names},
            sum(o.draws for o in outcomes),
            sum(o.gradients for o in outcomes),
            sum(o.seconds for o in outcomes),
            outcomes[0].notes,
        )


Method = Callable[[Job], Outcome]


def timed(method: Callable[[Job, Outcome], Chain | None]) -> Method:
    """Count seconds and gradients."""

    def run(job: Job) -> Outcome:
        began, outcome = time.monotonic(), Outcome()
        chain = method(job, outcome)
        if job.task.train.device.type == "cuda":
            torch.cuda.synchronize()
        outcome.seconds = time.monotonic() - began
        if chain is not None:
            outcome.gradients = chain.gradients
            rates = chain.update.rates
            outcome.notes |= {"least rate": float(rates.min()), "largest rate": float(rates.max())}
        return outcome

    return run


def start_chain(job: Job, friction: float = 1.0, noise: bool = True) -> Chain:
    """A chain at the start."""
    task, recipe = job.task, job.task.recipe
    model = task.restored(job.state)
    return Chain(
        model, task.train, recipe.batch_size, decay=recipe.decay, friction=friction, noise=noise, seed=job.seed
    )


def keep_draws(job: Job, chain: Chain, outcome: Outcome) -> None:
    """Go on, and take in every so manieth state."""
    for _ in range(job.draws):
        chain.step(job.keep_every)
        take(job, chain, outcome)


def take(job: Job, chain: Chain, outcome: Outcome) -> None:
    """Take in the state as a draw."""
    refresh_statistics(chain.model, job.task.train, chain.generator)
    outcome.add(job.task, chain.model)
