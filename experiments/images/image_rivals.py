"""What I-SGD is compared with in the classification tables, from the same trained models."""

from __future__ import annotations

import math

import torch

from experiments.images.image_jobs import Job, Method, Outcome, Steps, keep_draws, start_chain, take, walk
from experiments.images.image_methods import Watch
from isosgd.baselines.swag import Moments
from isosgd.noise import MovingAverage
from isosgd.noise.summaries import summarise

CYCLES = 3
SNAPSHOTS = 20
FRICTION = 0.1


@Method
def vsgd(job: Job, outcome: Outcome) -> Steps:
    """SGD at the rate of Mandt et al., T / (N mean b), without injected noise."""
    chain = start_chain(job, noise=False)
    watch = Watch(chain, MovingAverage(0.99, centred=True))
    chain.update.pace.zero_()
    for _ in range(job.warmup):
        chain.step()
        watch.look()
        yield
    everything = range(len(chain.flat.params))
    mean = summarise(chain.flat.parts(watch.variance, everything), "mean")
    chain.update.set([job.temperature / (chain.num_data * mean)] * len(chain.groups))
    chain.update.pace.fill_(1.0)
    yield from keep_draws(job, chain, outcome)
    return chain


@Method
def sghmc(job: Job, outcome: Outcome) -> Steps:
    """SGHMC without a correction, at a hundredth of the training's highest rate."""
    chain = start_chain(job, friction=FRICTION)
    rate = torch.tensor(0.01 * job.task.recipe.peak, device=job.task.train.device)
    lam = FRICTION * job.temperature / (chain.num_data * rate)  # composite noise of Theorem 2
    chain.update.set([rate] * len(chain.groups), [lam] * len(chain.groups))
    yield from walk(chain, job.warmup)
    yield from keep_draws(job, chain, outcome)
    return chain


@Method
def csghmc(job: Job, outcome: Outcome) -> Steps:
    """Cyclical SGHMC: the rate falls from half the training's highest; draws come from the last fifth of a cycle."""
    chain = start_chain(job, friction=FRICTION)
    one = torch.ones((), device=job.task.train.device)
    lam = FRICTION * job.temperature / chain.num_data * one
    chain.update.set([one] * len(chain.groups), [lam] * len(chain.groups))
    each = math.ceil(job.draws / CYCLES)
    cycle = max(job.keep_every * each, 5 * each)
    marks = {round(cycle * (0.8 + 0.2 * (k + 1) / each)) for k in range(each)}
    for step in range(CYCLES * cycle):
        position = step % cycle / cycle
        rate = 0.5 * job.task.recipe.peak * 0.5 * (1 + math.cos(math.pi * position))
        chain.update.pace[0] = rate
        chain.update.pace[1] = math.sqrt(rate) if position >= 0.8 else 0.0
        chain.step()
        yield
        if step % cycle + 1 in marks and outcome.draws < job.draws:
            take(job, chain, outcome)
    return chain


@Method
def swag(job: Job, outcome: Outcome) -> Steps:
    """SWAG: SGD with momentum goes on at a constant rate, and a Gaussian is fitted to snapshots of it."""
    chain = start_chain(job, friction=FRICTION, noise=False)
    epochs, rate = job.task.recipe.swag
    steps = job.task.steps(epochs, job.task.recipe.batch_size)
    chain.update.set([torch.tensor(rate, device=job.task.train.device)] * len(chain.groups))
    moments = Moments(SNAPSHOTS)
    for _ in range(SNAPSHOTS):
        yield from walk(chain, max(1, steps // SNAPSHOTS))
        moments.add(chain.flat.values[None].clone())
    for _ in range(job.draws):
        chain.flat.values.copy_(moments.draw(1.0, chain.generator)[0])
        take(job, chain, outcome)
        yield
    return chain


@Method
def dropout(job: Job, outcome: Outcome) -> Steps:
    """MC-dropout: of a network trained with dropout, which stays on. ``job.state`` is that network's."""
    model = job.task.restored(job.state, job.task.recipe.dropout)
    for _ in range(job.draws):
        outcome.add(job.task, model, dropout=True)
        yield
    return None


@Method
def single(job: Job, outcome: Outcome) -> Steps:
    """The trained model itself."""
    outcome.add(job.task, job.task.restored(job.state))
    yield
    return None
