"""What every method of the classification tables is asked, and what it gives back: averaged predictions.

A method is a generator that yields after every step, so that several chains go on side by side (`together`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.images.captured import Chain, own_stream, probabilities, refresh_statistics, synchronize
from experiments.images.classifiers import State, Task


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
        span: when it began and when it ended, by a clock in seconds.
        notes: numbers that say how it went.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    draws: int = 0
    gradients: int = 0
    span: tuple[float, float] = (0.0, 0.0)
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """It took, those of what was done at the same time included."""
        return self.span[1] - self.span[0]

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
            (min(o.span[0] for o in outcomes), max(o.span[1] for o in outcomes)),
            outcomes[0].notes,
        )


Steps = Generator[None, None, Chain | None]
"""A method at work: it stops after every step, and ends with its chain, if it has one."""


@dataclass(frozen=True)
class Method:
    """A way from a trained model to averaged predictions; it is called with a job."""

    steps: Callable[[Job, Outcome], Steps]

    def __call__(self, job: Job) -> Outcome:
        """Do it, and nothing else meanwhile."""
        return next(together([(self, job)], 1))[1]

    def run(self, job: Job, outcome: Outcome) -> Generator[None, None, None]:
        """Do it step by step, and count seconds and gradients."""
        began = time.monotonic()
        chain = yield from self.steps(job, outcome)
        synchronize(job.task.train.device)
        outcome.span = (began, time.monotonic())
        if chain is not None:
            outcome.gradients = chain.gradients
            rates = chain.update.rates
            outcome.notes |= {"least rate": float(rates.min()), "largest rate": float(rates.max())}


def together(jobs: Sequence[tuple[Method, Job]], width: int) -> Iterator[tuple[int, Outcome]]:
    """Do jobs side by side, a step of each in turn, at most ``width`` at a time, begun in their order.

    On a GPU each has a stream of its own: one chain of small minibatches leaves half of an H200 idle.

    Yields:
        The number of a job that is done, and its outcome, as they come.
    """
    if width < 1:
        raise ValueError(f"width = {width}: at least one job must be under way at a time")
    waiting = list(enumerate(jobs))[::-1]
    running: list[tuple[int, Outcome, Generator[None, None, None], Any]] = []
    while running or waiting:
        while waiting and len(running) < width:
            number, (method, job) = waiting.pop()
            synchronize(job.task.train.device)  # what it reads was made in other streams
            outcome = Outcome()
            running.append((number, outcome, method.run(job, outcome), own_stream(job.task.train.device)))
        for entry in list(running):
            number, outcome, steps, stream = entry
            with stream:
                done = next(steps, True)
            if done:
                running.remove(entry)
                yield number, outcome


def gather(groups: Sequence[Sequence[tuple[Method, Job]]], width: int) -> Iterator[tuple[int, list[Outcome]]]:
    """Do groups of jobs side by side, see `together`.

    Yields:
        The number of a group that is done, and the outcomes of its jobs, in their order.
    """
    places = [(i, k) for i, group in enumerate(groups) for k in range(len(group))]
    done: list[dict[int, Outcome]] = [{} for _ in groups]
    for number, outcome in together([job for group in groups for job in group], width):
        i, k = places[number]
        done[i][k] = outcome
        if len(done[i]) == len(groups[i]):
            yield i, [done[i].pop(k) for k in range(len(groups[i]))]


def walk(chain: Chain, count: int) -> Generator[None, None, None]:
    """So many steps."""
    for _ in range(count):
        chain.step()
        yield


def start_chain(job: Job, friction: float = 1.0, noise: bool = True) -> Chain:
    """A chain at the start."""
    task, recipe = job.task, job.task.recipe
    model = task.restored(job.state)
    return Chain(
        model, task.train, recipe.batch_size, decay=recipe.decay, friction=friction, noise=noise, seed=job.seed
    )


def keep_draws(job: Job, chain: Chain, outcome: Outcome) -> Generator[None, None, None]:
    """Go on, and take in every so manieth state."""
    for _ in range(job.draws):
        yield from walk(chain, job.keep_every)
        take(job, chain, outcome)


def take(job: Job, chain: Chain, outcome: Outcome) -> None:
    """Take in the state as a draw."""
    refresh_statistics(chain.model, job.task.train, chain.generator)
    outcome.add(job.task, chain.model)
