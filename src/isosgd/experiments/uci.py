"""The UCI regressions: one network, the published splits, all splits and chains of a set in one run.

The model is the paper's, a hidden layer of 50 ReLU units. The standard deviation of the observations is sampled, and so
are the prior's scales, one for each input and one for each layer, under half-Cauchy hyperpriors: nothing is tuned, and
all sets have the same settings. Features and targets are scaled by each split's training part. Every chain starts at
weights of its own.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isosgd import DataSets, Posterior, Target, priors, sample
from isosgd.data.uci import UCISet
from isosgd.data.uci import uci as read
from isosgd.diagnostics import traces
from isosgd.experiments.uci_tables import Result, Split, joined
from isosgd.metrics import mixture_coverage, mixture_crps, mixture_mnll, rmse
from isosgd.models import mlp

HIDDEN = 50
SEED_APART = 1_000_003  # seeds of processes that share the splits
TRACED = 64  # held-out predictions whose R-hat is taken


@dataclass(frozen=True)
class Setting:
    """How a row of the table is made, the same for all sets.

    Attributes:
        label: what tables call the row.
        method: a name of `isosgd.methods`.
        chains: of each split.
        draws: of each chain.
        warmup: gradients of each chain before its first draw.
        keep_every: steps between draws.
        batch_size: n, less where a set has fewer rows; or ``all``.
        options: of the method.
        hierarchical: whether the prior's scales are sampled; else they are those of `isosgd.priors.FanInNormal`.
    """

    label: str
    method: str = "isgd"
    chains: int = 5
    draws: int = 100
    warmup: int = 10_000
    keep_every: int = 100
    batch_size: int | Literal["all"] = 128
    options: dict[str, Any] = field(default_factory=dict)
    hierarchical: bool = True


SETTINGS = {
    "isgd": Setting("I-SGD, ours, minibatches", options={"compile": True}),
    "isgd-all": Setting(
        "I-SGD, ours, all data", chains=4, warmup=6_000, keep_every=50, batch_size="all", options={"compile": True}
    ),
    "isgd-paper": Setting(
        "I-SGD, the paper's setting",
        chains=1,
        warmup=2_000,
        keep_every=2_000,
        options={"preset": "alpha-a", "compile": True},
        hierarchical=False,
    ),
}


def run(
    name: str,
    setting: Setting,
    *,
    splits: Iterable[int] | None = None,
    hidden: int = HIDDEN,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
    device: str | None = None,
    progress: bool = True,
    command: str = "",
) -> Result:
    """One method on the splits of one set.

    Args:
        name: of the set, as `isosgd.data.uci` knows it.
        setting: how to sample.
        splits: their numbers; all by default.
        hidden: units of the hidden layer.
        seed: of everything.
        root: data root.
        device: where to sample.
        progress: show a progress line on a terminal.
        command: that made the result, to be kept with it.
    """
    table = read(name, root)
    chosen = _chosen(table, splits)
    scaled = [Scaled(table, k) for k in chosen]
    sizes = {len(one.train[0]) for one in scaled}
    if len(sizes) > 1:
        raise ValueError(f"the training parts of {table.name!r} have {sorted(sizes)} rows; they must be equally large")
    start = time.monotonic()
    target = make_target(table.x.shape[1], hidden, setting)
    sets = DataSets([torch.stack([one.train[i] for one in scaled]) for i in range(2)])
    posterior = sample(
        target,
        sets,
        init=lambda chain: fresh_start(target, table.x.shape[1], hidden, seed, chain),
        method=setting.method,
        draws=setting.draws,
        chains=setting.chains,
        batch_size="all" if setting.batch_size == "all" else min(setting.batch_size, sets.num_data // 2 * 2),
        warmup=setting.warmup,
        keep_every=setting.keep_every,
        seed=seed,
        device=device,
        progress=progress,
        **setting.options,
    )
    seconds = time.monotonic() - start
    found = [
        measure(posterior, one, range(i * setting.chains, (i + 1) * setting.chains), seconds / len(scaled))
        for i, one in enumerate(scaled)
    ]
    settings = {
        "chains": setting.chains,
        "draws": setting.draws,
        "warmup": setting.warmup,
        "keep_every": setting.keep_every,
        "batch_size": posterior.info["batch_size"],
        "hidden": hidden,
        "seed": seed,
        "engine": posterior.info["engine"],
        **posterior.info["options"],
    }
    return Result(
        table.name,
        setting.method,
        setting.label,
        found,
        settings,
        command,
        posterior.info["versions"],
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        + (f", {torch.cuda.get_device_name()}" if device and device.startswith("cuda") else ""),
    )


def _chosen(table: UCISet, splits: Iterable[int] | None) -> list[int]:
    """The splits that are named, all by default."""
    chosen = list(range(len(table.splits)) if splits is None else splits)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"splits = {chosen} of {table.name!r}: name at least one, and each once")
    for k in chosen:
        if not 0 <= k < len(table.splits):
            raise ValueError(f"split {k} is not there: {table.name!r} has {len(table.splits)}, counted from 0")
    return chosen


def side_by_side(name: str, setting: Setting, jobs: int, threads: int, **settings: Any) -> Result:
    """`run`, with the splits shared out to processes.

    Args:
        name: of the set.
        setting: how to sample.
        jobs: how many processes.
        threads: of each.
        settings: as for `run`.
    """
    splits = settings.pop("splits", None)
    chosen = _chosen(read(name, settings.get("root")), splits)
    parts = [chosen[k::jobs] for k in range(min(jobs, len(chosen)))]
    start = time.monotonic()
    # Processes that are begun anew: what torch has started in this one does not live on in a copy of it.
    with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
        # One line of progress tells enough: all parts have about the same to do.
        # Every process has a seed of its own, so that splits do not share their random numbers.
        seeds = [settings.get("seed", 0) + SEED_APART * i for i in range(len(parts))]
        shown = [i == 0 and settings.get("progress", True) for i in range(len(parts))]
        each = [
            {**settings, "splits": part, "seed": seed, "progress": show}
            for part, seed, show in zip(parts, seeds, shown, strict=True)
        ]
        results = list(pool.map(_run_part, repeat(name), repeat(setting), repeat(threads), each))
    seconds = (time.monotonic() - start) / len(chosen)
    whole = joined(results)
    return replace(
        whole,
        splits=[replace(split, seconds=seconds) for split in whole.splits],
        hardware=f"{whole.hardware}, {len(parts)} processes",
    )


def _run_part(name: str, setting: Setting, threads: int, settings: dict[str, Any]) -> Result:
    torch.set_num_threads(threads)
    return run(name, setting, **settings)


class Scaled:
    """One split, scaled to mean 0 and standard deviation 1 by its training part.

    Attributes:
        split: its number.
        train: features and targets ``[N, 1]``, scaled.
        x: held-out features, scaled.
        y: held-out targets, as they are.
        mean: of the training targets.
        scale: their standard deviation.
    """

    def __init__(self, table: UCISet, split: int) -> None:
        rows, held_out = table.splits[split]
        x, y = table.x[rows], table.y[rows]
        # A column that never changes says nothing; it must not become NaN.
        spread = x.std(0, correction=0)
        spread = torch.where(spread > 0, spread, 1.0)
        self.split, self.mean, self.scale = split, y.mean(), y.std(correction=0)
        self.train = ((x - x.mean(0)) / spread).float(), ((y - self.mean) / self.scale).float().unsqueeze(-1)
        self.x, self.y = ((table.x[held_out] - x.mean(0)) / spread).float(), table.y[held_out]


def make_target(features: int, hidden: int, setting: Setting) -> Target:
    """The posterior of the network."""
    sampled = {"0.weight": priors.Relevance(), "*": priors.HierarchicalNormal()}
    return Target.from_module(
        mlp(features, hidden, 1), "gaussian", sampled if setting.hierarchical else priors.FanInNormal()
    )


def fresh_start(target: Target, features: int, hidden: int, seed: int, chain: int) -> dict[str, Tensor]:
    """Weights of a new network; everything else starts where the target says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence((seed, chain, 1)).generate_state(1)[0]))
        return {name: p.detach() for name, p in mlp(features, hidden, 1).named_parameters()}


@torch.no_grad()
def predictions(posterior: Posterior, chains: Sequence[int], one: Scaled) -> tuple[Tensor, Tensor]:
    """Mean and variance of the held-out targets, in their units, for each draw: ``[chains, draws, n]``."""
    found = posterior.select(chains=chains).predict(one.x, return_draws=True)
    assert found.draws is not None and found.draw_variances is not None  # asked for, and the likelihood is Gaussian
    mean = found.draws.squeeze(-1).double() * one.scale + one.mean
    return mean, found.draw_variances.squeeze(-1).double().expand_as(mean) * one.scale**2


def measure(posterior: Posterior, one: Scaled, chains: Sequence[int], seconds: float) -> Split:
    """What the chains of one split reached."""
    kept = posterior.info["chain_indices"]
    alive = [kept.index(k) for k in chains if k in kept]
    dropped = tuple(f"chain {k}: {posterior.info['dropped'][k]}" for k in chains if k not in kept)
    gradients = posterior.info["gradients"] / (len(kept) + len(posterior.info["dropped"])) * len(list(chains))
    if not alive:
        return Split(one.split, gradients=gradients, seconds=seconds, dropped=dropped)
    mean, variance = predictions(posterior, alive, one)
    traced = mean[..., :TRACED].numpy()
    rhat = float(np.max(traces.rhat(traced))) if len(alive) > 1 else math.nan
    ess = float(np.min(traces.ess(traced)))
    mean, variance = mean.flatten(0, 1), variance.flatten(0, 1)
    return Split(
        one.split,
        rmse=float(rmse(mean.mean(0), one.y)),
        mnll=float(mixture_mnll(mean, variance, one.y)),
        coverage=float(mixture_coverage(mean, variance, one.y)),
        crps=float(mixture_crps(mean, variance, one.y)),
        rhat=rhat if math.isfinite(rhat) else None,
        ess=ess if math.isfinite(ess) else None,
        gradients=gradients,
        seconds=seconds,
        dropped=dropped,
    )
