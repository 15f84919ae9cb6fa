"""A run that was stopped, at whatever moment, goes on to the draws it would have had."""

import builtins
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isosgd import METHODS, DataSets, Interrupted, Posterior, SamplingWarning, Target, load, priors, resume, sample
from isosgd.engine import compiled
from isosgd.noise import MovingAverage
from tests.crashes import MACHINE, Crash, Tanh, crash_after, stored_draws

pytestmark = [
    pytest.mark.usefixtures("eager_store"),
    # Short warm-ups are the rule here and beside the point. That a draw comes again as it was is the point.
    pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning"),
    pytest.mark.filterwarnings("error:draw .* did not come out:isosgd.errors.SamplingWarning"),
]

ROWS = 80
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
FOLDS = torch.stack([torch.randperm(ROWS, generator=torch.Generator().manual_seed(i))[:60] for i in range(2)])
QUICK: dict[str, Any] = {"draws": 4, "keep_every": 3, "warmup": 300, "progress": False, "compile": False}
BARE: dict[str, Any] = {**QUICK, "method": "sgld", "lr": 1e-3, "warmup": 0}


def network(width: int = 4) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, width), Tanh(), nn.Linear(width, 1))
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return model


def make_target(model: nn.Module | None = None, num_data: int | None = None) -> Target:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Target.from_module(network() if model is None else model, "gaussian", num_data=num_data)


def equal(a: Posterior, b: Posterior) -> bool:
    parts = ((a.draws, b.draws), (a.buffers, b.buffers))
    return all(list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x) for x, y in parts)


def crash_and_resume(folder: Path, run: Callable[..., Posterior], *crashes: float) -> None:
    """Crash again and again, resume after each crash, and compare with a run that never did.

    Args:
        folder: of the run.
        run: a run; takes where to store it.
        crashes: each after a share of all calls of the model, if below 1, else after so many draws, of one session.
    """
    with crash_after() as machine:
        wanted = run()
    total = machine.calls
    for after in crashes:
        before = load(folder).info["lengths"] if (folder / "manifest.json").exists() else {}
        crash = crash_after(after * total) if after < 1 else crash_after(after, folder)
        with crash, pytest.raises(Crash):
            run(store=folder, resume=True)
        after_it = load(folder, verify=True)
        assert all(after_it.info["lengths"].get(chain, 0) >= length for chain, length in before.items())
    found = run(store=folder, resume=True)
    assert equal(found, wanted)
    assert equal(load(folder), wanted)
    skipped = {"seconds", "store", "lengths"}
    infos = [{k: v for k, v in posterior.info.items() if k not in skipped} for posterior in (found, wanted)]
    assert repr(infos[0]) == repr(infos[1])  # NaN is not itself


IN_WARMUP_AND_DRAWS = (0.6, 2)


# ------------------------------------------------------------------------------------------------ every sampler

STRUCTURES = {
    "layer": 300, "single": 300, "diagonal": 400, "kronecker": 400, "lowrank": 900, "full": 900,
}  # fmt: skip
FAST = {"kronecker", "lowrank"}


@pytest.mark.long
@pytest.mark.parametrize(
    "structure", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STRUCTURES]
)
def test_every_structure(tmp_path: Path, structure: str) -> None:
    settings = {**QUICK, "structure": structure, "warmup": STRUCTURES[structure]}
    crashes = IN_WARMUP_AND_DRAWS
    if structure == "lowrank":  # long enough for two windows; the crash is in the second
        settings, crashes = {**settings, "keep_every": "auto", "draws": 4}, (0.7, 2)
    crash_and_resume(tmp_path, lambda **store: sample(make_target(), (X, Y), **settings, **store), *crashes)


EASY = {"vsgd": {"temperature": 1e-2}, "csgld": {"cycle": 10}, "csghmc": {"cycle": 10}, "hmc": {"warmup": 600}}


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [name if name in ("adaptive-sghmc", "csgld") else pytest.param(name, marks=pytest.mark.slow)
     for name in METHODS],
)  # fmt: skip
def test_every_method(tmp_path: Path, method: str) -> None:
    settings = {**QUICK, "method": method, **EASY.get(method, {})}
    crash_and_resume(tmp_path, lambda **store: sample(make_target(), (X, Y), **settings, **store), *IN_WARMUP_AND_DRAWS)


@pytest.mark.long
@pytest.mark.parametrize("chains", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trajectories_on_all_data(tmp_path: Path, chains: int) -> None:
    settings = {**QUICK, "batch_size": "all", "structure": "diagonal", "warmup": 600, "chains": chains}
    crash_and_resume(tmp_path, lambda **store: sample(make_target(), (X, Y), **settings, **store), *IN_WARMUP_AND_DRAWS)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["G-b", pytest.param("alpha-a", marks=pytest.mark.slow)])
def test_the_papers_schemes(tmp_path: Path, preset: str) -> None:
    settings = {**QUICK, "preset": preset, "temperature": 1e-3, "warmup": 150}
    crash_and_resume(tmp_path, lambda **store: sample(make_target(), (X, Y), **settings, **store), *IN_WARMUP_AND_DRAWS)


# ------------------------------------------------------------------------------------------------ every way to run


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    ["together", "turn", pytest.param("sets", marks=pytest.mark.slow), pytest.param("auto", marks=pytest.mark.slow),
     pytest.param("wide", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.timeout(1800)
def test_every_way_to_run(tmp_path: Path, way: str) -> None:
    settings, data, model, crashes = {**QUICK, "chains": 2}, (X, Y), network(), IN_WARMUP_AND_DRAWS
    if way == "sets":
        data = DataSets((X, Y), FOLDS)
    elif way == "turn":
        model = turned()
        settings["warmup"] = 150
        crashes = (0.3, 2, 0.3, 2)  # of each chain
    elif way == "auto":
        settings |= {"warmup": "auto", "keep_every": "auto", "method": "sghmc"}
    elif way == "wide":  # groups that keep a single noise vector, and innovations made of bits, ahead
        model, settings = network(9000), {**settings, "chains": 1, "structure": "layer"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        crash_and_resume(tmp_path, lambda **store: sample(make_target(model), data, **settings, **store), *crashes)
    assert way != "turn" or load(tmp_path).info["engine"].startswith("in turn")


@pytest.mark.long
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_a_time_limit_leaves_a_resumed_warm_up_its_steps(share: float, tmp_path: Path) -> None:
    def run(**more: Any) -> Posterior:
        return sample(make_target(), (X, Y), max_seconds=1e5, **{**QUICK, "warmup": 1000}, **more)

    crash_and_resume(tmp_path / "run", run, share)


@pytest.mark.parametrize("warmup", [0, 150])
def test_buffers_of_a_single_chain(tmp_path: Path, warmup: int) -> None:
    """The first look at a batch, which a target takes once, passes through the network and changes its buffers."""
    settings = {**(QUICK if warmup else BARE), "warmup": warmup}

    def run(**store: Any) -> Posterior:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Tanh(), nn.Linear(4, 1))
        model.load_state_dict(normed)
        return sample(make_target(model), (X, Y), **settings, **store)

    normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Tanh(), nn.Linear(4, 1)).state_dict()
    crash_and_resume(tmp_path, run, (0.6 if warmup else 0.3), 2)
    assert "1.running_mean" in load(tmp_path).buffers


@pytest.mark.long
def test_compiled_gradients_begin_when_they_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that rounds otherwise, so that it matters."""

    def compile_(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        def fast(*args: Any) -> Any:
            loss, gradient, noise = function(*args)
            return loss, gradient * (1 + 1e-6), noise

        return fast

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compiled, "FEW_PRODUCTS", 0)  # as if the model were large, so that it begins at 500
    settings = {**QUICK, "chains": 2, "structure": "layer", "compile": "auto", "warmup": 700}
    crash_and_resume(tmp_path, lambda **store: sample(make_target(), (X, Y), **settings, **store), *IN_WARMUP_AND_DRAWS)
    assert load(tmp_path).info["engine"] == "together, compiled"


@pytest.mark.slow
def test_really_compiled_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FEW_PRODUCTS", 0)  # as above
    settings = {**QUICK, "chains": 2, "compile": "auto", "warmup": 700}

    def run(**store: Any) -> Posterior:
        return sample(make_target(), (X, Y), **{**settings, **store})

    crash_and_resume(tmp_path / "crashed", run, 0.6)  # before it compiles: compiled models cannot crash
    run(store=tmp_path / "extended", draws=2)
    assert equal(resume(tmp_path / "extended", make_target(), (X, Y), draws=settings["draws"]), run())


@pytest.mark.parametrize("kind", ["list", "shuffled", "own"])
def test_loaders_whose_order_is_torchs(tmp_path: Path, kind: str) -> None:
    def run(**store: Any) -> Posterior:
        torch.manual_seed(5)
        data: Any = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, ROWS, 16)]
        if kind != "list":
            own = torch.Generator().manual_seed(3) if kind == "own" else None
            data = DataLoader(TensorDataset(X, Y), 16, shuffle=kind != "order", generator=own)
        return sample(make_target(num_data=ROWS), data, chains=2, **{**BARE, "draws": 8}, **store)

    crash_and_resume(tmp_path, run, 5, 5, 2)  # in the first chain, and twice in the second


@pytest.mark.long
def test_a_loader_between_two_chains(tmp_path: Path) -> None:
    """The second chain has no checkpoint of its own yet, and its data begin where those of the first ended."""

    def run(**store: Any) -> Posterior:
        torch.manual_seed(5)
        data = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
        return sample(make_target(), data, chains=2, method="sgld", **{**QUICK, "warmup": 120, "draws": 2}, **store)

    crash_and_resume(tmp_path, run, 2)  # once all draws of the first are stored


@pytest.mark.long
def test_chains_that_diverge_stay_given_up(tmp_path: Path) -> None:
    """One chain of two comes down from afar into a hole, and is dropped; the other goes on."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        MACHINE.call()
        hole = (params["mu"] > 50) & (params["mu"] < 85)
        return -0.5 * torch.where(hole, torch.nan, (batch[1][:, 0] - params["mu"]) ** 2)

    def run(**store: Any) -> Posterior:
        target = Target(log_likelihood, priors.Normal(10.0), init={"mu": 0.0})
        start = lambda chain: {"mu": 100.0 if chain else 0.0}  # noqa: E731
        return sample(target, (X, Y), init=start, chains=2, **{**BARE, "draws": 8, "lr": 0.01}, **store)

    wanted = run()
    assert wanted.info["chain_indices"] == [0]
    with crash_after(6, tmp_path / "x"), pytest.raises(Crash):
        run(store=tmp_path / "x")
    assert load(tmp_path / "x").info["chain_indices"] == [0]  # it is known at once
    crash_and_resume(tmp_path, run, 2, 3)
    assert load(tmp_path).info["chain_indices"] == [0]
    assert 0 < load(tmp_path, chains=[1]).num_draws == load(tmp_path).info["lengths"][1] < 8


# ------------------------------------------------------------------------------------------------ every moment


class InHalves:
    """A file that is written in halves, with something that may happen in between."""

    def __init__(self, file: Any, happens: Callable[[], Any]) -> None:
        self._file, self._happens = file, happens

    def write(self, part: Any) -> None:
        content = bytes(part)
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        self._happens()
        self._file.write(content[len(content) // 2 :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def in_halves(happens: Callable[[], Any]) -> Callable[..., Any]:
    """`open`, whose new binary files are written in halves."""
    plain = open

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        found = plain(file, mode, *args, **options)
        return InHalves(found, happens) if mode == "wb" else found

    return opened


@pytest.mark.long
def test_a_crash_at_any_instant_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after every call that changes the disk; nothing else stops a process just there."""
    wanted = sample(make_target(), (X, Y), **BARE)
    calls, limit, after = [0], [10**9], [False]

    def breakable(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == limit[0] and not after[0]:
                raise Crash
            value = function(*args, **options)
            if calls[0] == limit[0]:
                raise Crash
            return value

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, breakable(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", breakable(Path.unlink))
    monkeypatch.setattr(builtins, "open", in_halves(breakable(lambda: None)))
    sample(make_target(), (X, Y), store=tmp_path / "whole", **BARE)
    total = calls[0]
    assert total > 30
    drawn = []
    for place in range(1, total + 1, 11):
        folder, calls[0], limit[0], after[0] = tmp_path / str(place), 0, place, place % 2 == 0
        with pytest.raises(Crash):
            sample(make_target(), (X, Y), store=folder, **BARE)
        limit[0] = 10**9
        if (folder / "manifest.json").exists():
            found = load(folder, verify=True)
            drawn.append(found.num_draws)
            assert found.num_draws == 0 or torch.equal(
                found.draws["0.weight"], wanted.draws["0.weight"][:, : found.num_draws]
            )
        assert equal(sample(make_target(), (X, Y), store=folder, resume=True, **BARE), wanted)
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", *[".safetensors"] * 5]  # nothing is left
    assert drawn == sorted(drawn) and set(drawn) == {0, 1, 2, 3, 4}


def kill_and_resume(tmp_path: Path, kills: int, rng: random.Random, settings: dict[str, Any]) -> list[int]:
    """Kill processes at random moments, many of them in the middle of a write; resume; compare.

    Returns:
        Draws that were on the disk after each kill.
    """
    wanted = sample(make_target(), (X, Y), **settings)

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(0.002)
            return function(*args)

        return call

    def child(folder: Path) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.fsync, os.replace = slow(os.fsync), slow(os.replace)
                builtins.open = in_halves(slow(lambda: None))  # type: ignore[assignment]
                sample(make_target(), (X, Y), store=folder, resume=True, **settings)
            finally:
                os._exit(0)
        return pid

    started = time.monotonic()
    os.waitpid(child(tmp_path / "whole"), 0)
    length = time.monotonic() - started
    assert equal(load(tmp_path / "whole", verify=True), wanted)
    drawn = []
    for number in range(kills):
        folder = tmp_path / str(number % max(kills // 4, 1))  # most are killed several times
        had = load(folder).num_draws if (folder / "manifest.json").exists() else 0
        pid = child(folder)
        time.sleep(rng.uniform(0.0, length))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not (folder / "manifest.json").exists():
            continue  # it had not come to write anything
        found = load(folder, verify=True)
        drawn.append(found.num_draws)
        assert found.num_draws >= had
        for name in found.draws:
            assert torch.equal(found.draws[name], wanted.draws[name][: found.num_chains, : found.num_draws])
        if number >= kills - max(kills // 4, 1):
            assert equal(sample(make_target(), (X, Y), store=folder, resume=True, **settings), wanted)
    return drawn


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_killed_processes(tmp_path: Path) -> None:
    drawn = kill_and_resume(tmp_path, 5, random.Random(0), {**BARE, "draws": 12, "chains": 2})
    assert drawn


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.timeout(1200)
def test_a_hundred_killed_processes(tmp_path: Path) -> None:
    rng = random.Random(1)
    quick = kill_and_resume(tmp_path / "bare", 60, rng, {**BARE, "draws": 40, "chains": 2})
    warm = kill_and_resume(tmp_path / "warm", 40, rng, {**QUICK, "structure": "kronecker", "draws": 20, "warmup": 600})
    assert len(set(quick)) > 10 and len(set(warm)) > 2  # most of the time is the warm-up's


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.5}, r"settings.temperature was 1.0 and is 0.5"),
        ({"seed": 3}, r"settings.seed was 0 and is 3"),
        ({"draws": 3}, r"settings.draws was 4 and is 3: a run can be extended, not cut short"),
        ({"draws": "auto"}, r"settings.draws was 4 and is 'auto', which watches predictions from the first draw on"),
        ({"method": "sghmc"}, r"settings.method was 'sgld' and is 'sghmc'"),
        ({"lr": 2e-3}, r"settings.options.lr was 0.001 and is 0.002"),
        ({"noise": "alpha"}, r"settings.options.noise was not there and is now"),
        ({"store_dtype": "bfloat16"}, r"settings.store_dtype was None and is 'bfloat16'"),
        ({"data": (X, Y + 1)}, r"the values of data.tensors\[1\] have changed"),
        ({"data": (X[:70], Y[:70])}, r"data.tensors\[0\].shape\[0\] was 80 and is 70"),
        ({"data": (X.double(), Y.double())}, r"data.tensors\[0\].dtype was 'float32' and is 'float64'"),
        ({"data": [(X, Y)]}, r"data.tensors was there and is not"),
        ({"width": 5}, r"target.describes.parameters.0.weight\[0\] was 4 and is 5"),
        ({"init": {"likelihood.scale": 2.0}}, r"the values of target.start\[0\].likelihood.scale have changed"),
        ({"activation": nn.ReLU()}, r"target.loss at the start was .*: the model or its likelihood has changed"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_changed_run_is_refused_with_the_difference(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with crash_after(1, tmp_path), pytest.raises(Crash):
        sample(make_target(num_data=ROWS), (X, Y), store=tmp_path, **BARE)
    model = network(change.pop("width", 4))
    model[1] = change.pop("activation", model[1])  # type: ignore[index]
    data = change.pop("data", (X, Y))
    target = make_target(model.double() if data[0][0].dtype == torch.float64 else model, ROWS)
    with pytest.raises(ValueError, match=f"(?s)cannot be resumed:.*{message}"):
        sample(target, data, store=tmp_path, resume=True, **{**BARE, **change})


# ------------------------------------------------------------------------------------------------ more draws


class Unmapped(nn.Linear):
    """Looks at a number, which cannot be mapped over chains: they run in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(self.bias.detach()[0]) < 1e6 else 0.0)


def turned() -> nn.Module:
    model = network()
    model[0] = Unmapped(3, 4)  # type: ignore[index]
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(4))
    return model


@pytest.mark.parametrize(
    "way", ["one", "together", "turn", pytest.param("all data", marks=pytest.mark.long), "warm-up"]
)
def test_an_extended_run_is_the_one_that_was_asked_for_at_once(tmp_path: Path, way: str) -> None:
    settings = {**BARE, "chains": 1 if way == "one" else 2}
    model = turned if way == "turn" else network
    if way == "all data":
        settings = {**QUICK, "batch_size": "all", "structure": "diagonal", "warmup": 600, "chains": 2}
    elif way == "warm-up":
        settings = {**QUICK, "chains": 2, "structure": "layer", "warmup": 120}
    wanted = sample(make_target(model()), (X, Y), **{**settings, "draws": 9})
    sample(make_target(model()), (X, Y), store=tmp_path, **settings)
    assert load(tmp_path).info["complete"] and load(tmp_path).num_draws == 4
    found = sample(make_target(model()), (X, Y), store=tmp_path, resume=True, **{**settings, "draws": 7})
    assert found.num_draws == 7 and found.info["draws"] == 7 and found.info["complete"]
    found = resume(tmp_path, make_target(model()), (X, Y), draws=9, progress=False)
    assert way != "turn" or found.info["engine"].startswith("in turn")
    assert equal(found, wanted) and equal(load(tmp_path, verify=True), wanted)
    assert found.info["gradients"] == wanted.info["gradients"]
    assert equal(resume(tmp_path, make_target(model()), (X, Y), progress=False), wanted)  # settings are the new ones


def test_a_run_that_was_stopped_goes_on_to_more_draws(tmp_path: Path) -> None:
    wanted = sample(make_target(), (X, Y), **{**BARE, "draws": 9})
    with crash_after(2, tmp_path), pytest.raises(Crash):
        sample(make_target(), (X, Y), store=tmp_path, **BARE)
    with crash_after(3, tmp_path), pytest.raises(Crash):
        resume(tmp_path, make_target(), (X, Y), draws=9, progress=False)
    assert not load(tmp_path).info["complete"]
    assert equal(resume(tmp_path, make_target(), (X, Y), progress=False), wanted)


def test_draws_that_end_by_themselves_are_extended_by_a_budget_or_by_a_number(tmp_path: Path) -> None:
    settings = {**BARE, "draws": "auto", "chains": 2}
    wanted = sample(make_target(), (X, Y), budget=25, **settings)
    sample(make_target(), (X, Y), store=tmp_path, budget=20, **settings)
    found = resume(tmp_path, make_target(), (X, Y), budget=25, progress=False)
    assert equal(found, wanted) and found.info["stopped"] == wanted.info["stopped"]
    found = resume(tmp_path, make_target(), (X, Y), draws=27, progress=False)
    assert found.num_draws == 27 and torch.equal(found.draws["0.weight"][:, :25], wanted.draws["0.weight"])
    with pytest.raises(ValueError, match=r"settings.draws was 27 and is 26: a run can be extended"):
        resume(tmp_path, make_target(), (X, Y), draws=26)


def test_chains_that_failed_are_not_extended(tmp_path: Path) -> None:
    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        hole = (params["mu"] > 50) & (params["mu"] < 85)
        return -0.5 * torch.where(hole, torch.nan, (batch[1][:, 0] - params["mu"]) ** 2)

    def run(draws: int, **store: Any) -> Posterior:
        target = Target(log_likelihood, priors.Normal(10.0), init={"mu": 0.0})
        start = lambda chain: {"mu": 100.0 if chain else 0.0}  # noqa: E731
        return sample(target, (X, Y), init=start, chains=2, **{**BARE, "draws": draws, "lr": 0.01}, **store)

    run(8, store=tmp_path)
    found = run(12, store=tmp_path, resume=True)
    assert found.info["chain_indices"] == [0] and equal(found, run(12))


def test_a_baseline_is_not_extended(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "swag", "warmup": 60, "progress": False}
    sample(make_target(), (X, Y), store=tmp_path, draws=3, **settings)
    with pytest.raises(ValueError, match="was 3 and is 5, but swag makes its draws all at once: begin another run"):
        sample(make_target(), (X, Y), store=tmp_path, resume=True, draws=5, **settings)


def test_other_versions_are_said_and_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with crash_after(1, tmp_path), pytest.raises(Crash):
        sample(make_target(), (X, Y), store=tmp_path, **BARE)
    monkeypatch.setattr(np, "__version__", "9.9")  # there is but one numpy here
    with pytest.warns(SamplingWarning, match=r"goes on where it was, but .* numpy was '.*' and is '9.9'"):
        sample(make_target(), (X, Y), store=tmp_path, resume=True, **BARE)


def test_resume_takes_the_settings_from_the_manifest(tmp_path: Path) -> None:
    settings = {**BARE, "temperature": 0.5, "chains": 2}
    wanted = sample(make_target(), (X, Y), **settings)
    with crash_after(2, tmp_path), pytest.raises(Crash):
        sample(make_target(), (X, Y), store=tmp_path, **settings)
    assert 2 <= load(tmp_path).num_draws < 4 and not load(tmp_path).info["complete"]
    assert equal(resume(tmp_path, make_target(), (X, Y), progress=False), wanted)
    assert equal(resume(tmp_path, make_target(), (X, Y), progress=False), wanted)  # once more: it is complete


def test_options_that_a_manifest_cannot_hold_are_asked_for(tmp_path: Path) -> None:
    settings = {**BARE, "noise": MovingAverage(0.5)}
    with crash_after(2, tmp_path), pytest.raises(Crash):
        sample(make_target(), (X, Y), store=tmp_path, **settings)
    with pytest.raises(ValueError, match=r"begun with noise=MovingAverage.*: pass noise= as it was"):
        resume(tmp_path, make_target(), (X, Y))
    wanted = sample(make_target(), (X, Y), **settings)
    assert equal(resume(tmp_path, make_target(), (X, Y), progress=False, noise=MovingAverage(0.5)), wanted)


def test_where_there_is_no_run_one_is_begun(tmp_path: Path) -> None:
    assert equal(
        sample(make_target(), (X, Y), store=tmp_path / "x", resume=True, **BARE), sample(make_target(), (X, Y), **BARE)
    )


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with crash_after(2, tmp_path), pytest.raises(Crash):
        sample(make_target(), (X, Y), store=tmp_path, **BARE)
    (path,) = tmp_path.glob("checkpoint-*")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match=r"checkpoint-\d+.safetensors is damaged"):
        sample(make_target(), (X, Y), store=tmp_path, resume=True, **BARE)


# ------------------------------------------------------------------------------------------------ Ctrl-C


class Impatient:
    """A user who presses Ctrl-C at the nth gradient."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, params: dict[str, Tensor], batch: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return -0.5 * (batch[1][:, 0] - params["mu"]) ** 2


def impatient(after: int) -> Target:
    return Target(Impatient(after), priors.Normal(10.0), init={"mu": 0.0})


@pytest.mark.parametrize("stored", [False, True])
def test_ctrl_c_leaves_what_was_drawn(tmp_path: Path, stored: bool) -> None:
    where = {"store": tmp_path} if stored else {}
    wanted = sample(impatient(-1), (X, Y), **BARE)
    with pytest.raises(KeyboardInterrupt, match="sampling was stopped") as caught:
        sample(impatient(10), (X, Y), **BARE, **where)
    assert isinstance(caught.value, Interrupted)
    found = caught.value.posterior
    assert found is not None and 1 <= found.num_draws < 4 and not found.info["complete"]
    assert torch.equal(found.draws["mu"], wanted.draws["mu"][:, : found.num_draws])
    if stored:
        assert equal(resume(tmp_path, impatient(-1), (X, Y), progress=False), wanted)


def test_ctrl_c_before_the_first_draw(tmp_path: Path) -> None:
    for where in ({}, {"store": tmp_path}):
        with pytest.raises(Interrupted) as caught:
            sample(impatient(3), (X, Y), **BARE, **where)
        assert caught.value.posterior is None
    assert load(tmp_path).num_draws == 0


def test_chains_in_turn_are_stopped_at_different_lengths(tmp_path: Path) -> None:
    data = [(X, Y)]
    wanted = sample(make_target(num_data=ROWS), data, chains=3, **BARE)
    with crash_after(9, tmp_path), pytest.raises(Crash):  # of four draws of each
        sample(make_target(num_data=ROWS), data, chains=3, store=tmp_path, **BARE)
    found = load(tmp_path)
    lengths = found.info["lengths"]
    assert lengths[0] == lengths[1] == 4 > lengths[2] > 0 and not found.info["complete"]
    assert found.info["chain_indices"] == [0, 1] and found.num_draws == 4
    assert torch.equal(load(tmp_path, chains=[2]).draws["0.bias"], wanted.draws["0.bias"][2:, : lengths[2]])
    with pytest.raises(ValueError, match=r"chains = \[5\] must name some of those with draws: \[0, 1, 2\]"):
        load(tmp_path, chains=[5])
    again = sample(make_target(num_data=ROWS), data, chains=3, store=tmp_path, resume=True, **BARE)
    assert equal(again, wanted)


@pytest.mark.parametrize("resume", [False, True])
def test_a_setting_that_is_refused_does_not_block_the_folder(tmp_path: Path, resume: bool) -> None:
    with pytest.raises(ValueError, match="warmup = 0 leaves no rate"):
        sample(make_target(), (X, Y), store=tmp_path, draws=2, warmup=0, keep_every=5, progress=False)
    assert sample(make_target(), (X, Y), store=tmp_path, resume=resume, **BARE).info["complete"]
    with pytest.raises(FileExistsError, match="already holds a run"):
        sample(make_target(), (X, Y), store=tmp_path, **BARE)


@pytest.mark.long
def test_what_another_run_wrote_while_a_resume_waited_is_kept(tmp_path: Path) -> None:
    """It goes on for a while after the manifest has been read for the identity check."""
    whole = sample(make_target(), (X, Y), **BARE)
    half, looked = threading.Event(), threading.Event()

    def waiting() -> bool:
        if threading.current_thread() is not first:
            looked.set()
        elif stored_draws(tmp_path) >= 2:
            half.set()
            looked.wait(60)
            time.sleep(0.3)  # until the other one waits for the folder
        return False

    first = threading.Thread(target=lambda: sample(make_target(), (X, Y), store=tmp_path, **BARE))
    with crash_after() as machine:
        machine.ends = waiting
        first.start()
        assert half.wait(60)
        again = sample(make_target(), (X, Y), store=tmp_path, resume=True, **BARE)
    first.join(60)
    assert equal(again, whole) and equal(load(tmp_path, verify=True), whole)
