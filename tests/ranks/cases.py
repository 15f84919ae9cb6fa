"""What each rank does in tests/ranks: run as ``python cases.py OUT CASE...``, with the environment that torchrun sets.

Every case returns plain values; rank r writes them to OUT/r.json. What a case raises is written as its text.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import isosgd
from isosgd import Posterior, RankError, Target, priors, sample
from isosgd.engine.chains import Chains
from isosgd.engine.gradients import Parted
from isosgd.engine.ranks import Ranks
from isosgd.engine.schedule import Schedule
from isosgd.sampling import recorders
from isosgd.sampling.settings import sampler_factory

ROWS, WIDTH = 240, 20
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.3 * torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
MEANS = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
QUICK: dict[str, Any] = {"draws": 4, "keep_every": 3, "warmup": 300, "progress": False, "batch_size": 24}
STEPS: dict[str, Any] = {"draws": 100, "keep_every": 1, "warmup": 0, "progress": False, "batch_size": 24}
STATIONARY: dict[str, Any] = {"draws": 150, "keep_every": 8, "warmup": 600, "progress": False, "batch_size": 48}


def network() -> Target:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return Target.from_module(model, "gaussian")


def conjugate() -> Target:
    """The mean of normal data: posterior variance T / (N + 1 / 100) in each of its dimensions."""
    return Target(
        lambda p, b: -0.5 * (b[0] - p["mu"]).square().sum(-1), priors.Normal(10.0), init={"mu": torch.zeros(WIDTH)}
    )


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


def trajectory(**more: Any) -> Posterior:
    return sample(
        network(), (X, Y), chains=1, method="isgd", lam=2.0, structure="layer", noise_every=2, **STEPS, **more
    )


def data() -> Any:
    found = trajectory(parallel="data")
    return {"draws": flat(found).tolist(), "gradients": found.info["gradients"]}


def flat(posterior: Posterior) -> Tensor:
    return torch.cat([x[0].reshape(posterior.num_draws, -1) for x in posterior.draws.values()], -1)


def data_equal() -> Any:
    """Draws as each rank has them in its own memory, a thousand steps after the start."""
    kept: list[Tensor] = []

    def keep(self: Any, run: Chains, first: int, number: int) -> None:
        kept.append(torch.cat([x.reshape(-1) for x in run.natural().values()]))
        take(self, run, first, number)

    kind: Any = recorders.Follower if dist.get_rank() else recorders.InMemory
    take, kind.keep = kind.keep, keep
    try:
        sample(network(), (X, Y), chains=1, parallel="data", **{**STEPS, "draws": 10, "keep_every": 100}, method="isgd",
               lam=2.0, structure="layer")  # fmt: skip
    finally:
        kind.keep = take
    return hashlib.sha256(torch.stack(kept).numpy().tobytes()).hexdigest()


def stationary(temperature: float, **more: Any) -> Any:
    """Variance in each dimension, over that of the posterior."""
    found = sample(conjugate(), (MEANS,), chains=1, parallel="data", temperature=temperature, **STATIONARY, **more)
    exact = temperature / (ROWS + 0.01)
    return {"ratios": (found.draws["mu"][0].var(0) / exact).tolist(), "hash": hashes(found)}


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
        squares, calls = torch.zeros(WIDTH), 300
        for _ in range(calls):
            found = run.evaluate(split=True)
            assert found is not None
            squares += found[0].square() / calls
        exact = MEANS.var(0, correction=0) / 24
        return {"ratio": float((squares / exact).mean()), "gradients": run.gradients, "calls": calls}


def distributed_loader() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    source = TensorDataset(MEANS)
    sampler: Any = DistributedSampler(source, num_replicas=size, rank=rank, seed=5)
    batches = DataLoader(source, batch_size=24 // size, sampler=sampler)
    settings = {**QUICK, "batch_size": None, "keep_every": "auto", "warmup": 500}
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
    return sorted(found.draws)


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
    return {"hashes": hashes(found), "again": again, "other": other, "size": size}


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
    }


def hang_chains() -> Any:
    """The last rank hangs before its chain ends."""
    late = dist.get_world_size() - 1

    def start(chain: int) -> Any:
        if dist.get_rank() == late:
            time.sleep(20.0)
        return {"mu": torch.zeros(WIDTH)}

    given: dict[str, Any] = {**QUICK, "chains": late + 1, "parallel": "chains", "rank_timeout": 2.0, "init": start}
    return raised(lambda: sample(conjugate(), (MEANS,), **given))


def hang_data() -> Any:
    """The last rank hangs in a step."""
    gradient = Parted.__call__

    def slow(*args: Any, **given: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(20.0)
        return gradient(*args, **given)

    Parted.__call__ = slow  # type: ignore[method-assign]
    return raised(lambda: sample(conjugate(), (MEANS,), parallel="data", rank_timeout=3.0, **QUICK))


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
    found["divided"] = stationary(1.0)["ratios"]
    Schedule.__init__ = number  # type: ignore[method-assign]
    mean = Parted._like

    def summed(gradients: Any, row: Tensor) -> Any:
        return mean(gradients, row * dist.get_world_size())

    Parted._like = staticmethod(summed)  # type: ignore[method-assign]
    found["summed"] = flat(trajectory(parallel="data")).tolist()
    Parted._like = staticmethod(mean)  # type: ignore[method-assign]
    return found


def killed() -> Any:
    """A run in which some rank is killed, again and again, at a random moment; see tests/ranks/test_faults.py."""
    attempt, kills = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["KILLS"])
    chosen = random.Random(attempt * 7919 + int(os.environ["KILL_SEED"]))
    done = list(Path(sys.argv[1]).glob("kill-*"))  # an attempt may also end because gloo finds no connection
    dist.barrier()

    def kill() -> None:
        (Path(sys.argv[1]) / f"kill-{attempt}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if len(done) < kills and chosen.randrange(dist.get_world_size()) == dist.get_rank():
        timer = threading.Timer(chosen.uniform(0.0, float(os.environ["KILL_WITHIN"])), kill)
        timer.daemon = True
        timer.start()
    parallel: Any = os.environ["PARALLEL"]
    count = 4 if parallel == "chains" else 1
    found = sample(
        network(), (X, Y), chains=count, parallel=parallel, store=Path(sys.argv[1]) / "store", resume=True, draws=30,
        keep_every=20, warmup=400, batch_size=24, progress=False,
    )  # fmt: skip
    return {"hashes": hashes(found), "kills": len(done), "complete": found.info["complete"]}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out, found = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        try:
            found[name] = globals()[name]()
        except (Exception, RankError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        # Written at once: what comes later may hang.
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    assert isosgd.__version__
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
