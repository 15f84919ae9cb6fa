"""The UCI regressions: one network, the published splits, all splits and chains of a set in one run.

The network has 50 hidden units, as in the paper; `uci_model` has its prior and the noise. All sets have the same
settings. Features and targets are scaled by each split's training part. Every chain starts at weights of its own.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from multiprocessing import get_context, parent_process
from typing import Any, Literal

import torch

from experiments.data.uci import UCISet
from experiments.data.uci import uci as read
from experiments.uci.model import Model
from experiments.uci.scores import Scaled, measure
from experiments.uci.tables import Result, joined
from isosgd import DataSets, sample

HIDDEN = 50
SEED_APART = 1_000_003  # seeds of processes that share the splits


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
        model: what is sampled.
    """

    label: str
    method: str = "isgd"
    chains: int = 5
    draws: int = 100
    warmup: int = 10_000
    keep_every: int = 100
    batch_size: int | Literal["all"] = 128
    options: dict[str, Any] = field(default_factory=dict)
    model: Model = field(default_factory=Model)


SETTINGS = {
    "isgd": Setting("I-SGD, ours, minibatches", options={"compile": True}),
    "isgd-all": Setting(
        "I-SGD, ours, all data", chains=8, warmup=4_000, keep_every=25, batch_size="all", options={"compile": True}
    ),  # chains of a network do not meet: many short ones say more than a few long ones
    "isgd-paper": Setting(
        "I-SGD, the paper's setting",
        chains=1,
        warmup=2_000,
        keep_every=2_000,
        options={"preset": "alpha-a", "compile": True},
        model=Model("gaussian", scales=None),
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
    validate: bool = False,
) -> Result:
    """One method on the splits of one set.

    Args:
        name: of the set, as `experiments.data.uci` knows it.
        setting: how to sample.
        splits: their numbers; all by default.
        hidden: units of the hidden layer.
        seed: of everything.
        root: data root.
        device: where to sample.
        progress: show a progress line on a terminal.
        command: that made the result, to be kept with it.
        validate: score on a tenth of the training rows, held out, and leave the test rows alone: to choose settings by.
    """
    table = read(name, root)
    chosen = _chosen(table, splits)
    scaled = [Scaled(table, k, validate) for k in chosen]
    sizes = {len(one.train[0]) for one in scaled}
    if len(sizes) > 1:
        raise ValueError(f"the training parts of {table.name!r} have {sorted(sizes)} rows; they must be equally large")
    start = time.monotonic()
    size = table.x.shape[1], hidden
    sets = DataSets([torch.stack([one.train[i] for one in scaled]) for i in range(2)])
    posterior = sample(
        setting.model.target(*size),
        sets,
        init=lambda chain: setting.model.start(*size, seed, chain),
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
        **setting.model.describe(),
        "validate": validate,
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
    with ProcessPoolExecutor(len(parts), get_context("spawn"), end_with_parent) as pool:
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


def end_with_parent() -> None:
    """Let this process end when the one that began it does, however that came: nobody would take its result."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_part(name: str, setting: Setting, threads: int, settings: dict[str, Any]) -> Result:
    torch.set_num_threads(threads)
    return run(name, setting, **settings)
