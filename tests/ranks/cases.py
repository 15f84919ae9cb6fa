"""What each rank does in tests/ranks, with the environment that torchrun sets: ``python cases.py OUT CASE...``.

Every case returns plain values; rank r writes them to OUT/r.json. What a case raises is written as its text. Without
RANK in the environment it forks WORLD_SIZE ranks: torch is then loaded once, and not by each of them.
"""

import errno
import faulthandler
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from isosgd import (
    ISGD,
    SGHMC,
    SGLD,
    SGNHT,
    Collector,
    Posterior,
    RankError,
    Target,
    likelihoods,
    load,
    merge,
    priors,
    sample,
)
from isosgd.engine.chains import Chains
from isosgd.engine.gradients import Parted
from isosgd.engine.ranks import Ranks
from isosgd.engine.schedule import Schedule
from isosgd.sampling import recorders
from isosgd.sampling.settings import sampler_factory
from isosgd.sampling.trained import TrainedRun
from isosgd.store import writer

ROWS, WIDTH = 240, 400
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.3 * torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
MEANS = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
TABLE = torch.randn(ROWS, 30, generator=torch.Generator().manual_seed(6))
RESPONSES = TABLE.mean(1) + 0.3 * torch.randn(ROWS, generator=torch.Generator().manual_seed(7))
QUICK: dict[str, Any] = {"draws": 4, "keep_every": 3, "warmup": 100, "progress": False, "batch_size": 24}
STEPS: dict[str, Any] = {"keep_every": 20, "warmup": 0, "progress": False, "batch_size": 24}
STATIONARY: dict[str, Any] = {"draws": 25, "keep_every": 16, "warmup": 200, "progress": False, "batch_size": 48}


def network() -> Target:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return Target.from_module(model, "gaussian")


def conjugate() -> Target:
    """The mean of normal data: posterior variance T / (N + 1 / 100) in each of its many dimensions."""
    return Target(
        lambda p, b: -0.5 * (b[0] - p["mu"]).square().sum(-1), priors.Normal(10.0), init={"mu": torch.zeros(WIDTH)}
    )


def regression() -> Target:
    """A conjugate regression, of known noise; where it begins the gradient is far from zero."""
    return Target(
        lambda p, b: -0.5 * ((b[1] - b[0] @ p["w"]) / 0.3).square(), priors.Normal(10.0),
        init={"w": torch.full((30,), 0.1)},
    )  # fmt: skip


def cliff() -> Target:
    """A density that grows without bound above 3: a chain from there is at infinity after some steps."""
    return Target(
        lambda p, b: -0.5 * (b[0][:, 0] - p["mu"]) ** 2 + torch.relu(p["mu"] - 3.0) ** 4, priors.Normal(10.0),
        init={"mu": torch.tensor(0.0)},
    )  # fmt: skip


def hashes(posterior: Posterior) -> list[str]:
    """Of the draws of each chain."""
    every = [torch.cat([x[k].reshape(-1) for x in posterior.draws.values()]) for k in range(posterior.num_chains)]
    return [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in every]


def raised(call: Callable[[], Any]) -> str:
    """What it raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def raise_(error: Exception, *_: Any) -> Any:
    raise error


# -- cases ------------------------------------------------------------------------------------------------------------


def draw_chains(**more: Any) -> Posterior:
    return sample(network(), (X, Y), chains=5, **QUICK, **more)


def chains() -> Any:
    found = draw_chains(parallel="chains")
    return {"hashes": hashes(found), "engine": found.info["engine"], "indices": found.info["chain_indices"]}


def loader(**more: Any) -> Posterior:
    source = DataLoader(TensorDataset(X, Y), batch_size=24, shuffle=True)
    settings = {**QUICK, "batch_size": None}
    return sample(network(), source, chains=4, **settings, **more)


def chains_loader() -> Any:
    return hashes(loader(parallel="chains"))


def trajectory(draws: int = 5, **more: Any) -> Posterior:
    """A draw every 20 steps, from the first step on."""
    settings: dict[str, Any] = {**STEPS, "method": "isgd", "lam": 2.0, "structure": "layer", "noise_every": 4}
    return sample(network(), (X, Y), chains=1, draws=draws, **settings, **more)


def flat(posterior: Posterior) -> Tensor:
    return torch.cat([x[0].reshape(posterior.num_draws, -1) for x in posterior.draws.values()], -1)


def data() -> Any:
    """The first 100 steps, and a hash of the draws of 1,000 as each rank has them in its own memory."""
    kept: list[Tensor] = []

    def keep(self: Any, run: Chains, first: int, number: int) -> None:
        kept.append(torch.cat([x.reshape(-1) for x in run.natural().values()]))
        take(self, run, first, number)

    kind: Any = recorders.Recorder if dist.get_rank() else recorders.InMemory
    take, kind.keep = kind.keep, keep
    try:
        found = trajectory(50, parallel="data")
    finally:
        kind.keep = take
    bits = hashlib.sha256(torch.stack(kept).numpy().tobytes()).hexdigest()
    return {"draws": flat(found)[:5].tolist(), "gradients": found.info["gradients"], "bits": bits, "kept": len(kept)}


def stationary(temperature: float, **more: Any) -> Any:
    """Mean square of the distance from the posterior mean in each dimension, over the posterior variance.

    The chain begins with a draw from the posterior, so that a short one is stationary from its start.
    """
    exact = temperature / (ROWS + 0.01)
    mean = MEANS.sum(0) / (ROWS + 0.01)
    start = mean + exact**0.5 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    found = sample(
        conjugate(), (MEANS,), chains=1, parallel="data", temperature=temperature, init={"mu": start},
        structure="diagonal", **{**STATIONARY, **more},
    )  # fmt: skip
    return {"ratios": ((found.draws["mu"][0] - mean).square().mean(0) / exact).tolist(), "hash": hashes(found)}


def warm() -> Any:
    return stationary(1.0)


def cold() -> Any:
    return stationary(0.1)


def noise() -> Any:
    """Mean square of noise vectors between ranks, over the variance of a minibatch's gradient; and gradients taken."""
    with Ranks("data", 60.0) as ranks:
        ranks.arrange(1)
        ranks.connect(torch.device("cpu"))
        schedule = Schedule(conjugate(), (MEANS,), None, 1, 24, 0, None, None, None, [0], ranks)
        _, run = next(iter(schedule.runs(sampler_factory("isgd", ROWS, 1.0, 24, 1, {"structure": "layer"}))))
        squares, calls = torch.zeros(WIDTH), 40
        for _ in range(calls):
            found = run.evaluate(split=True)
            assert found is not None
            squares += found[0].square() / calls
        exact = MEANS.var(0, correction=0) / 24
        return {"ratio": float((squares / exact).mean()), "gradients": run.gradients, "calls": calls}


def noise_estimates(seed: int, ranks: Ranks | None = None, data: Any = (TABLE, RESPONSES), times: int = 20) -> Any:
    """Variances, their trace and lambda where the chain begins, each from 30 minibatches, and this so many times."""
    size = 24 if isinstance(data, tuple) else None
    schedule = Schedule(regression(), data, None, 1, size, seed, None, None, None, [0], ranks)
    options = {"structure": "layer", "correction": "diagonal", "summary": "max"}
    make = sampler_factory("isgd", ROWS, 1.0, 24, 1, options)
    _, run = next(iter(schedule.runs(make)))
    (group,) = run.sampler.param_groups
    found: dict[str, list[Any]] = {"variances": [], "trace": [], "lam": []}
    for _ in range(times):
        run.sampler.forget_noise()
        for _ in range(30):
            assert run.observe_noise()
        (variances,) = run.sampler.noise.variances(group)
        run.sampler.adapt([0.0], rise=torch.inf)  # by the noise alone
        found["variances"].append(variances.tolist())
        found["trace"].append(float(variances.sum()))
        found["lam"].append(float(group["lam"]))
    assert torch.equal(run.params["w"], regression().initial()["w"])
    return found | {"gradients": run.gradients}


def noise_of_ranks() -> Any:
    """Noise estimates from the differences between ranks, of tensors and of loaders; and what they cost."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with Ranks("data", 60.0) as ranks:
        ranks.arrange(1)
        ranks.connect(torch.device("cpu"))
        source = TensorDataset(TABLE, RESPONSES)
        sampler: Any = DistributedSampler(source, num_replicas=size, rank=rank, seed=5)
        batches = DataLoader(source, batch_size=24 // size, sampler=sampler)
        found = {"tensors": noise_estimates(0, ranks), "loader": noise_estimates(0, ranks, batches)}
    return found | {"measured": gradients_taken(1), "not measured": gradients_taken(100_000)}


def gradients_taken(noise_every: int) -> Any:
    """How often this rank differentiates in a run of 100 steps, and examples of each time."""
    gradient, rows = Target.gradient, []

    def counted(self: Target, params: Any, batch: Any, *args: Any) -> Any:
        rows.append(len(batch[0]))
        return gradient(self, params, batch, *args)

    Target.gradient = counted  # type: ignore[method-assign]
    try:
        settings: dict[str, Any] = {**STEPS, "lam": 20.0, "structure": "layer", "noise_every": noise_every}
        data = TABLE, RESPONSES
        found = sample(regression(), data, chains=1, draws=5, method="isgd", parallel="data", **settings)
    finally:
        Target.gradient = gradient  # type: ignore[method-assign]
    counts = {str(n): rows.count(n) for n in sorted(set(rows))}
    return {"calls": counts, "gradients": found.info["gradients"], "hash": hashes(found)}


def distributed_loader() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    source = TensorDataset(MEANS)
    sampler: Any = DistributedSampler(source, num_replicas=size, rank=rank, seed=5)
    batches = DataLoader(source, batch_size=24 // size, sampler=sampler)
    settings = {**QUICK, "batch_size": None, "warmup": 200}
    found = sample(conjugate(), batches, chains=1, parallel="data", **settings)
    plain = DataLoader(source, batch_size=24 // size, shuffle=True)
    return {
        "hash": hashes(found),
        "num_data": found.info["num_data"],
        "plain": raised(lambda: sample(conjugate(), plain, parallel="data", **settings)),
    }


def wrapped() -> Any:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    target = Target.from_module(model, "gaussian")
    found = sample(target, (X, Y), parallel="data", starts=[model], temperature=0.01, **QUICK)
    # A loop of one's own: the same generator on every rank, and other examples.
    isgd = ISGD(model.parameters(), num_data=ROWS, lam=2.0, generator=torch.Generator().manual_seed(1))
    for rows in torch.arange(ROWS).chunk(20):
        own = rows.chunk(dist.get_world_size())[dist.get_rank()]
        isgd.zero_grad()
        (model(X[own]) - Y[own]).square().mean().backward()
        isgd.step()
    end = [x.detach().tolist() for x in model.parameters()]
    return {"names": sorted(found.draws), "end": end, "steps": isgd.param_groups[0]["step"]}


class SlowToCheck:
    """A store whose answer to whether there is a key comes late."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        there = self.store.check(keys)
        time.sleep(0.005)
        return there


def drift() -> Any:
    """Loops with DDP whose ranks draw the same noise, noise of their own, and one with a collector on rank 0 alone.

    A trainer holds the DDP around a model: the collector is then given the model within. And chains of each rank alone.
    """
    rank = dist.get_rank()

    def loop(
        generator: torch.Generator | None,
        collects: bool = True,
        within: bool = False,
        alone: bool = False,
        batches: int = 20,
    ) -> int:
        torch.manual_seed(0 if alone else rank)
        model: nn.Module = nn.Linear(3, 1)
        torch.manual_seed(rank)
        ddp = model if alone else nn.parallel.DistributedDataParallel(model)
        sgld = SGLD(ddp.parameters(), num_data=ROWS, lr=1e-3, weight_decay=0.1, generator=generator)
        collector = Collector(sgld, model if within else ddp, keep_every=2) if collects else None
        for rows in torch.arange(ROWS).repeat(batches // 20).chunk(batches):
            sgld.zero_grad()
            (ddp(X[rows]) - Y[rows]).square().mean().backward()
            sgld.step()
        return 0 if collector is None else collector.posterior().num_draws

    def chains() -> int:
        """Ranks do not wait for each other, and one answer takes rank 1 so long that rank 0 is draws ahead by then."""
        store = dist.distributed_c10d._get_default_store()
        with mock.patch.object(
            dist.distributed_c10d, "_get_default_store", lambda: SlowToCheck(store) if rank else store
        ):
            return loop(None, alone=True, batches=200)

    return {
        "alone": loop(torch.Generator().manual_seed(1), rank == 0),
        "same": loop(torch.Generator().manual_seed(1)),
        "other": raised(lambda: loop(None)),
        "same within": loop(torch.Generator().manual_seed(1), within=True),
        "other within": raised(lambda: loop(None, within=True)),
        "chains": chains(),  # of one start, and with the same examples at every step
    }


def ladder() -> Any:
    """Temperatures that every rank tries; rank 1 finds another one best, as if its machine rounded otherwise."""
    model = nn.Linear(3, 2)
    for p in model.parameters():
        p.data.fill_(0.1)
    held_out = X[:60], (Y[:60, 0] > 0).long()
    given: dict[str, Any] = {"starts": [model], "chains": 2, "parallel": "chains", "held_out": held_out, **QUICK}
    choose = TrainedRun.choose

    def other(self: Any, *args: Any) -> Any:
        found = choose(self, *args)
        return replace(found, temperature=found.temperature * (1 + dist.get_rank()))

    TrainedRun.choose = other  # type: ignore[method-assign]
    target, labels = Target.from_module(model, "categorical"), (Y[:, 0] > 0).long()
    found = sample(target, (X, labels), ladder=[0.1, 1.0], **given)
    TrainedRun.choose = choose  # type: ignore[method-assign]
    batches = DataLoader(TensorDataset(X, labels), batch_size=24)
    return {
        "hashes": hashes(found),
        "temperature": found.info["temperature"],
        "rungs": len(found.info["temperature_choice"]["rungs"]),
        "loader": raised(lambda: sample(target, batches, **{**given, "batch_size": None})),
    }


class Mean(nn.Module):
    """A parameter and no more: the loss of the conjugate target in a loop."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.mu = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self.mu).square().sum(-1).mean()


def sharded_steps(mesh: Any, model: nn.Module, optimizer: Any, loss: Any, steps: int, size: int, seed: int = 5) -> None:
    """Steps on minibatches of which each rank takes its part."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(ROWS, (size,), generator=source).chunk(mesh.size())[mesh.get_local_rank()]
        optimizer.zero_grad()
        loss(model, rows).backward()
        optimizer.step()


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])  # type: ignore[operator]


def sharded() -> Any:
    """FSDP2: the chain of all ranks and that of one; stationary variance; draws written, and loaded onto ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    both = init_device_mesh("cpu", (size,))
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "ranks"))["ranks"]
    ends: dict[str, list[Tensor]] = {}
    rates: dict[str, list[list[float]]] = {}
    warm, fixed = {"batch_size": 24, "warmup": 100}, {"lr": 1e-3}  # the latter samples from the first step on
    ways = ((ISGD, warm, 120), (SGLD, fixed, 30), (SGHMC, fixed, 30))
    for (kind, own, steps), mesh in itertools.product(ways, (both, alone)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # rows that ranks cannot share evenly
        fully_shard(network, mesh=mesh)
        given: dict[str, Any] = {"num_data": ROWS, "generator": torch.Generator().manual_seed(1)}
        optimizer: Any = kind(network.named_parameters(), **own, **given)
        sharded_steps(mesh, network, optimizer, lambda m, r: (m(X[r]) - Y[r]).square().mean() / 2, steps, 24)
        ends.setdefault(kind.__name__, []).append(whole(network))
        rates.setdefault(kind.__name__, []).append([float(group["rate"]) for group in optimizer.param_groups])
        assert optimizer.phase == "sampling"
    exact, mean, lam = 1.0 / ROWS, MEANS.mean(0), 0.1
    start = mean + exact**0.5 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    model, folder = Mean(start), Path(sys.argv[1]) / "sharded"
    fully_shard(model, mesh=both)
    given.pop("generator")
    torch.manual_seed(dist.get_rank())  # ranks agree on random numbers by themselves
    isgd = ISGD(model.parameters(), lam=lam, structure="layer", correction="diagonal", **given)
    collector, gathered = Collector(isgd, model, keep_every=10, store=folder), []
    for seed in range(25):  # the first step of each is a draw
        sharded_steps(both, model, isgd, lambda m, r: m(MEANS[r]), 1, 48, seed)
        gathered.append(whole(model))
        sharded_steps(both, model, isgd, lambda m, r: m(MEANS[r]), 9, 48, 100 + seed)
    found = collector.posterior()
    draws, rate = found.draws["mu"][0], 1.0 / (ROWS * lam)
    # Loaded onto all ranks, onto half of them and onto one, from a copy of the folder in which this rank reads zeros
    # where the rows of others are.
    again = {}
    halves = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "ranks"))["ranks"]
    for mesh in (both, halves, alone):
        other = Mean(torch.zeros(WIDTH))
        fully_shard(other, mesh=mesh)
        found.load_into(other, index=3)
        with torch.no_grad():
            other(MEANS)  # whose parameters are whole then
        found.load_into(other, index=4)
        again[mesh.size()] = bool(torch.equal(whole(other), draws[4]))
    spoiled = folder.with_name(f"spoiled-{dist.get_rank()}")
    shutil.copytree(folder, spoiled)
    for path in spoiled.glob("draws-*.safetensors"):
        if not path.stem.endswith(f"-{dist.get_rank():04d}"):
            path.write_bytes(bytes(path.stat().st_size))
    fully_shard(other := Mean(torch.zeros(WIDTH)), mesh=both)
    load(spoiled).load_into(other, index=4)
    again["own rows"] = bool(torch.equal(whole(other), draws[4]))
    damaged = raised(lambda: load(spoiled).draw(0, 4))
    # A rank whose disk is full: the draw is not there, all that came before it is.
    sync = os.fsync
    if rank == 1:
        os.fsync = partial(raise_, OSError(errno.ENOSPC, ""))
    full = raised(lambda: sharded_steps(both, model, isgd, lambda m, r: m(MEANS[r]), 1, 48))
    if rank == 1:
        os.fsync = sync
    collector.close()
    later = Collector(isgd, model, keep_every=10, store=folder, resume=True)
    missing = raised(lambda: sharded_steps(both, model, isgd, lambda m, r: m(MEANS[r]), 1, 48))
    later.close()
    return {
        "bits": bool(torch.equal(torch.stack(gathered), draws)),
        "damaged": damaged.startswith("DamagedError"),
        "differences": {name: float((two - one).abs().max()) for name, (two, one) in ends.items()},
        "rates": rates,
        # What the step size adds is known here: the chain is an autoregression.
        "ratios": ((draws[5:] - mean).square().mean(0) / (exact / (1 - rate / 2))).tolist(),
        "hash": hashes(found),
        "seed": isgd.generator.initial_seed(),
        "again": again,
        "refused": {
            "sampler": raised(lambda: SGNHT(model.parameters(), **given)),
            "structure": raised(lambda: ISGD(model.parameters(), structure="diagonal", batch_size=4, **given)),
            "some": raised(lambda: SGLD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=1e-3, **given)),
            "full": full,
            "missing": missing,
            "memory": raised(lambda: Collector(isgd, model, keep_every=10)),
            "twice": raised(lambda: Collector(isgd, model, keep_every=10, store=folder)),
            "hidden": raised(lambda: Collector(isgd, model, keep_every=10, store=folder.with_name(f"of-{rank}"))),
            "target": raised(lambda: Target.from_module(model, "gaussian")),
            "starts": raised(lambda: sample(Target.from_module(Mean(start), "gaussian"), (X, Y), starts=[model])),
            "init": raised(lambda: sample(conjugate(), (MEANS,), init=dict(model.named_parameters()), **QUICK)),
        },
    }


def sharded_bad_input() -> Any:
    """FSDP2: what one rank alone is given, of an optimizer and of a collector."""
    from torch.distributed.fsdp import fully_shard

    rank, folder = dist.get_rank(), Path(sys.argv[1]) / "differ"
    fully_shard(model := nn.Linear(3, 4))
    one: dict[str, Any] = {"num_data": ROWS, "batch_size": 24, "warmup": 100}
    two: dict[str, Any] = {"keep_every": 5, "store": folder}

    def isgd(**other: Any) -> ISGD:
        return ISGD(model.named_parameters(), **(one | other if rank else one))

    def collector(leave: str = "", **other: Any) -> Collector:
        given = {name: value for name, value in (two | other).items() if name != leave}
        return Collector(isgd(), model, **(given if rank else two))

    changes = {
        "num_data": 100, "batch_size": 12, "temperature": 0.5, "weight_decay": 0.1, "warmup": 150, "bias": 0.1,
        "generator": torch.Generator().manual_seed(1), "noise": "gaussian",
    }  # fmt: skip
    found = {name: raised(partial(isgd, **{name: value})) for name, value in changes.items()}
    found["bad num_data"] = raised(lambda: isgd(num_data=-3))
    found["bad lam"] = raised(lambda: isgd(lam=-1.0))
    found["unknown"] = raised(lambda: isgd(lambada=2))
    found["keep_every"] = raised(lambda: collector(keep_every=7))
    found["bad keep_every"] = raised(lambda: collector(keep_every=0))
    found["no store"] = raised(lambda: collector("store"))

    def of_own_model(seed: int, buffer_seed: int) -> None:
        torch.manual_seed(seed)
        own = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        own[1].running_mean.fill_(float(rank))  # type: ignore[union-attr, operator]  # as each rank's examples have it
        own.register_buffer("directions", torch.randn(3, generator=torch.Generator().manual_seed(buffer_seed)))
        target = Target.from_module(own, likelihoods.Gaussian(1.0), priors.Flat())
        fully_shard(own)
        optimizer = ISGD(own.named_parameters(), **one)
        Collector(optimizer, own, target, keep_every=5, store=folder.with_name("own")).close()

    found["values of target.0.weight"] = raised(lambda: of_own_model(rank, 0))
    found["values of buffers of the model.directions"] = raised(lambda: of_own_model(0, rank))
    found["fine"] = raised(lambda: collector().close()) + raised(lambda: of_own_model(0, 0))
    if rank:
        shutil.copytree(folder, folder.with_name("copy"))
        (folder.with_name("copy") / "manifest.json").write_text("{}")
    dist.barrier()
    store = folder.with_name("copy") if rank else folder
    found["another store"] = raised(lambda: Collector(isgd(), model, keep_every=5, store=store, resume=True))
    return found


def grid() -> Any:
    found = sample(conjugate(), (MEANS,), chains=2, parallel="data", **QUICK)
    return {"hashes": hashes(found), "engine": found.info["engine"]}


def auto() -> Any:
    found = sample(
        conjugate(), (MEANS,), chains=4, parallel="chains", **{**QUICK, "draws": "auto", "keep_every": 2, "warmup": 0},
        budget=1000, method="sgld", lr=0.5,
    )  # fmt: skip
    return {"stopped": found.info["stopped"], "draws": found.num_draws, "hashes": hashes(found)}


def diverges() -> Any:
    found = sample(
        cliff(), (X,), chains=4, parallel="chains", init=lambda k: {"mu": 9.0 if k == 1 else 0.0}, method="sgld",
        lr=0.01, **{**QUICK, "warmup": 0},
    )  # fmt: skip
    every = raised(lambda: sample(cliff(), (X,), chains=4, parallel="chains", init={"mu": 9.0}, method="sgld", lr=0.01,
                                  **{**QUICK, "warmup": 0}))  # fmt: skip
    return {"indices": found.info["chain_indices"], "dropped": list(found.info["dropped"]), "every": every}


def store() -> Any:
    folder, size = Path(sys.argv[1]) / "store", dist.get_world_size()
    draw_chains(parallel="chains", store=folder)
    found = draw_chains(parallel="chains", store=folder, resume=True)  # nothing is left to do
    again = raised(lambda: draw_chains(parallel="chains", store=folder))
    other = raised(lambda: sample(network(), (X, Y), chains=6, parallel="chains", store=folder, resume=True, **QUICK))
    merged = folder.with_name("merged")
    for seed in (1, 2):
        sample(
            network(), (X, Y), chains=2, parallel="chains", store=folder.with_name(f"seed-{seed}"), seed=seed, **QUICK
        )
    if dist.get_rank() == 0:
        merge([folder.with_name(f"seed-{seed}") for seed in (1, 2)], merged)
    dist.barrier()
    longer = raised(lambda: sample(network(), (X, Y), chains=4, parallel="chains", store=merged, resume=True, **QUICK))
    return {"hashes": hashes(found), "again": again, "other": other, "size": size, "longer": longer}


def bad_input() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    target, folder = conjugate(), Path(sys.argv[1])
    bad = MEANS.clone()
    bad[3, 3] = torch.nan if rank == 1 else 0.0

    def said(parallel: str = "chains", data: Any = (MEANS,), **more: Any) -> str:
        return raised(lambda: sample(target, data, **{"chains": size, "parallel": parallel, **QUICK, **more}))

    return {
        "few chains": said(chains=size - 1),
        "seeds": said(seed=rank),
        "data": said(data=(MEANS + rank,)),
        "chains": said(chains=size + rank),
        "one bad": said(data=(bad,)),
        "no division": said("data", chains=size - 1 if size > 2 else 3),
        "small batch": said("data", chains=1, batch_size=2) if size > 2 else "",
        "baseline": said(method="ensemble"),
        "unknown": said("both"),
        "hidden store": said(store=folder / f"of-{rank}"),
        "max_seconds": said(max_seconds=5.0),
        "one unknown": said("both" if rank else "chains"),
        "one timeout": said(rank_timeout=-1.0 if rank else 60.0),
        "one store": said(**({"store": folder / "one"} if rank else {})),
        "one resume": said(store=folder / "some", resume=bool(rank)),
    }


def hang_chains() -> Any:
    """The last rank hangs before its chain ends."""
    late = dist.get_world_size() - 1
    naps = [6.0] if dist.get_rank() == late else []

    def start(chain: int) -> Any:
        if naps:
            time.sleep(naps.pop())
        return {"mu": torch.zeros(WIDTH)}

    given: dict[str, Any] = {**QUICK, "chains": late + 1, "parallel": "chains", "rank_timeout": 2.0, "init": start}
    found = raised(lambda: sample(conjugate(), (MEANS,), **given))
    dist.barrier()  # else the next case finds it still hanging
    return found


def hang_data() -> Any:
    """The last rank hangs in a step."""
    gradient = Parted.__call__
    naps = [6.0] if dist.get_rank() == dist.get_world_size() - 1 else []

    def slow(*args: Any, **given: Any) -> Any:
        if naps:
            time.sleep(naps.pop())
        return gradient(*args, **given)

    Parted.__call__ = slow  # type: ignore[method-assign]
    return raised(lambda: sample(conjugate(), (MEANS,), parallel="data", rank_timeout=2.0, **QUICK))


def faults() -> Any:
    """Mistakes that are often made, each put in on purpose."""
    found = {}
    make, number = Schedule.runs, Schedule.__init__

    def own_noise(self: Schedule, make_sampler: Any) -> Any:
        for first, run in make(self, make_sampler):
            run.sampler.generator.manual_seed(dist.get_rank())
            yield first, run

    Schedule.runs = own_noise  # type: ignore[method-assign]
    found["own noise"] = raised(lambda: trajectory(parallel="data"))
    Schedule.runs = make  # type: ignore[method-assign]

    def divided(self: Schedule, *args: Any, **given: Any) -> None:
        number(self, *args, **given)
        self.num_data //= dist.get_world_size()

    Schedule.__init__ = divided  # type: ignore[method-assign]
    found["divided"] = stationary(1.0, draws=15)["ratios"]
    Schedule.__init__ = number  # type: ignore[method-assign]
    mean = Parted._like

    def summed(gradients: Any, row: Tensor) -> Any:
        return mean(gradients, row * dist.get_world_size())

    Parted._like = staticmethod(summed)  # type: ignore[method-assign]
    found["summed"] = flat(trajectory(parallel="data")).tolist()
    Parted._like = staticmethod(mean)  # type: ignore[method-assign]
    return found


LABELS = (Y[:, 0] > 0).long()
AFTER: dict[str, Any] = {
    "draws": 4, "keep_every": 5, "warmup": 100, "structure": "layer", "temperature": 0.1, "progress": False, "seed": 3
}  # fmt: skip


def bits(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in module.state_dict().values())).hexdigest()


def trained_by(fit: Callable[..., tuple[Any, nn.Module]], likelihood: str, data: Any, held_out: Any) -> Any:
    """What callbacks of trainers sample in this process group, against calls of `sample` after the training."""
    found: dict[str, Any] = {}
    for parallel, chains in (("data", 1), ("chains", 3)):
        asked = {**AFTER, "parallel": parallel, "chains": chains}
        posterior, module = fit(**asked)
        shares, before = dist.get_world_size() if parallel == "data" else 1, bits(module)
        sampler: Any = DistributedSampler(data, shares, dist.get_rank() % shares, seed=3)
        batches: Any = DataLoader(data, batch_size=12, sampler=sampler)
        target = Target.from_module(module, likelihood, "empirical")
        again = sample(target, batches, starts=[module], **asked)
        found[parallel] = {
            "trained": before,
            "draws": hashes(posterior),
            "again": hashes(again),
            "num_data": posterior.info["num_data"],
            "engine": posterior.info["engine"],
            "left": bits(module) == before,
        }
    found["not said"] = raised(lambda: fit(**AFTER))
    found["sampler"] = raised(lambda: fit(**AFTER, parallel="data", sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)))
    found["few chains"] = raised(lambda: fit(**AFTER, parallel="chains"))
    found["auto"] = raised(lambda: fit(**AFTER | {"parallel": "data", "temperature": "auto", "held_out": held_out}))
    return found


def by_seed(module: nn.Module, seed: int) -> SGLD:
    generator = torch.Generator().manual_seed(seed)
    return SGLD(module.parameters(), num_data=ROWS, lr=1e-4, generator=generator)


def in_loop(by_sgld: Callable[[int], Posterior]) -> Any:
    """Draws of the optimizer of a trainer, of which each rank has those of its own steps."""
    return {"same noise": hashes(by_sgld(1)), "own noise": raised(lambda: by_sgld(dist.get_rank()))}


def lightning() -> Any:
    """A network with BatchNorm, whose statistics are those of each rank's examples, in Lightning's DDP."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from isosgd.lightning import Sampling

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    data = TensorDataset(X, LABELS)

    def train(module: Any, callbacks: list[Any], sampler: Any) -> None:
        loader = DataLoader(data, batch_size=12, shuffle=sampler is None, sampler=sampler)
        pl.Trainer(
            max_epochs=2, callbacks=callbacks, accelerator="cpu", devices=dist.get_world_size(), strategy="ddp",
            plugins=[TorchElasticEnvironment()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=sys.argv[1],
        ).fit(module, loader)  # fmt: skip

    def fit(sampler: Any = None, **settings: Any) -> Any:
        torch.manual_seed(0)
        module, callback = Classifier(), Sampling("categorical", **settings)
        train(module, [callback], sampler)
        return callback.posterior, module

    def by_sgld(seed: int) -> Posterior:
        """SGLD as the optimizer of the fit itself."""
        module = Classifier()
        sgld = by_seed(module, seed)
        module.configure_optimizers = lambda: sgld  # type: ignore[method-assign]
        collector = Collector(sgld, module, keep_every=2)
        train(module, [], None)
        return collector.posterior()

    return trained_by(fit, "categorical", data, (X, LABELS)) | in_loop(by_sgld)


def transformers() -> Any:
    """A language model in the DDP of Hugging Face's Trainer."""
    import transformers as hf

    from isosgd.transformers import Sampling

    config = hf.LlamaConfig(
        vocab_size=23, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ids = torch.randint(3, 23, (ROWS, 6), generator=torch.Generator().manual_seed(8))
    data: Any = [{"input_ids": one, "labels": one} for one in ids]

    def trainer_of(model: nn.Module, **more: Any) -> Any:
        args = hf.TrainingArguments(
            output_dir=sys.argv[1], use_cpu=True, report_to=[], per_device_train_batch_size=12, num_train_epochs=1,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0, ddp_backend="gloo",
        )  # fmt: skip
        return hf.Trainer(model, args=args, train_dataset=data, **more)

    def fit(sampler: Any = None, **settings: Any) -> Any:
        torch.manual_seed(0)
        model, callback = hf.LlamaForCausalLM(config), Sampling("tokens", **settings)
        trainer = trainer_of(model, callbacks=[callback])
        if sampler is not None:
            trainer._get_train_sampler = lambda *_: sampler
        trainer.train()
        return callback.posterior, model

    def by_sgld(seed: int) -> Posterior:
        model = hf.LlamaForCausalLM(config)
        sgld = by_seed(model, seed)
        collector = Collector(sgld, model, keep_every=2)
        trainer_of(model, optimizers=(sgld, torch.optim.lr_scheduler.ConstantLR(sgld, 1.0))).train()
        return collector.posterior()

    held_out = {"input_ids": ids, "labels": ids}
    return trained_by(fit, "tokens", data, held_out) | in_loop(by_sgld)


def killed() -> Any:
    """Runs of `sample` in which ranks are killed."""

    def run(parallel: Any, folder: Path) -> Posterior:
        return sample(
            network(), (X, Y), chains=4 if parallel == "chains" else 1, parallel=parallel, store=folder, resume=True,
            draws=30, keep_every=10, warmup=200, batch_size=24, progress=False,
        )  # fmt: skip

    return kill([partial(run, "chains"), partial(run, "data")])


def killed_loops() -> Any:
    """Loops over a sharded model in which ranks are killed."""
    return kill([sharded_loop])


def sharded_loop(folder: Path) -> Posterior:
    """A loop as users write it, with a checkpoint every 20 steps."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    fully_shard(model)
    optimizer = ISGD(model.named_parameters(), num_data=ROWS, batch_size=24, warmup=100)
    collector = Collector(optimizer, model, keep_every=7, store=folder, resume=True)
    batches = torch.Generator().manual_seed(5)
    if (state := collector.restore()) is not None:
        batches.set_state(state["batches"])
    while len(collector) < 40:
        rows = torch.randint(ROWS, (24,), generator=batches).chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        ((model(X[rows]) - Y[rows]).square().mean() / 2).backward()
        optimizer.step()
        if optimizer.param_groups[0]["step"] % 20 == 0:
            collector.checkpoint({"batches": batches.get_state()})
    found = collector.posterior()
    collector.close()
    return found


def kill(kinds: list[Callable[[Path], Posterior]]) -> Any:
    """Runs one after the other, in each of which some rank is killed at a random moment; see test_faults.py.

    The first of each kind is left alone: they say which draws are right, and how long a run takes. torchrun starts all
    ranks again after a kill, and they go on with the run that is not finished.
    """
    out, size = Path(sys.argv[1]), dist.get_world_size()
    attempt, kills = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["KILLS"])
    chosen = random.Random(1_000_003 * attempt + int(os.environ["KILL_SEED"]))  # all ranks choose alike
    writer.LEAST_WAIT = 0.02  # seconds: a short run has many shards and checkpoints, too
    calm: dict[int, float] = {}
    number, notes = 0, []
    while number < len(kinds) or len(notes) < kills or number <= max(notes, default=0):
        kind = number % len(kinds)
        done, note = out / f"done-{number}", out / f"kill-{number}"
        moment, victim = chosen.random(), chosen.randrange(size)
        dist.barrier()  # all have looked at what is there
        if not done.exists():
            timer = threading.Timer(moment * calm.get(kind, 0.0), _die, (note, attempt))
            if number >= len(kinds) and not note.exists() and victim == dist.get_rank():
                timer.start()
            begun = time.monotonic()
            found = kinds[kind](out / f"{number}")
            timer.cancel()
            dist.barrier()
            came = {"hashes": hashes(found), "seconds": time.monotonic() - begun, "complete": found.info["complete"]}
            if dist.get_rank() == 0:
                done.write_text(json.dumps(came))
            dist.barrier()
        if number < len(kinds):
            calm[kind] = json.loads(done.read_text())["seconds"]
        number, notes = number + 1, [int(path.name.removeprefix("kill-")) for path in out.glob("kill-*")]
    runs = [json.loads((out / f"done-{i}").read_text()) for i in range(number)]
    return {"runs": runs, "kills": [path.read_text() for path in sorted(out.glob("kill-*"))], "attempts": attempt + 1}


def _die(note: Path, attempt: int) -> None:
    """Leave a note of it, and kill this process."""
    number = note.name.removeprefix("kill-")
    drawn = sum("checkpoint" not in path.name for path in note.with_name(number).rglob("*.safetensors"))
    note.write_text(f"run {number}, attempt {attempt}: rank {dist.get_rank()} is killed, {drawn} shards are written")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)  # a launcher that waits too long asks where all threads are
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out, found = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        begun = time.monotonic()
        try:
            found[name] = globals()[name]()
        except (Exception, RankError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        found.setdefault("seconds", {})[name] = round(time.monotonic() - begun, 1)
        # Written at once: what comes later may hang.
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def fork(size: int) -> None:
    """Run `main` in so many processes, and exit as the worst of them did."""
    jobs = []
    for rank in range(size):
        jobs.append(os.fork())
        if not jobs[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                main()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) != 0 for job in jobs))


if __name__ == "__main__":
    main() if "RANK" in os.environ else fork(int(os.environ["WORLD_SIZE"]))
