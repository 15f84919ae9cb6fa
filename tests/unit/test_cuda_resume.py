"""A run on a GPU, stopped and resumed, and read where there is none. Skipped without a GPU.

On a GPU a run need not come out the same twice: sums may be taken in another order. Where it does, which each test
finds out first by running twice, a run that was stopped must come out the same too, bit for bit. Where it does not,
what is stored must be kept, and the rest be as many draws.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isosgd
from tests.crashes import Crash, Tanh, crash_after

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("eager_store"),
    pytest.mark.filterwarnings("ignore"),  # warm-ups are short here
]

DEVICE = "cuda"
ROWS = 80
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
QUICK: dict[str, Any] = {"draws": 10, "keep_every": 3, "warmup": 300, "progress": False, "compile": False}


def make_target(norm: bool = False) -> isosgd.Target:
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), Tanh(), nn.Linear(4, 1)]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return isosgd.Target.from_module(model.to(DEVICE), "gaussian")


def equal(a: isosgd.Posterior, b: isosgd.Posterior) -> bool:
    parts = ((a.draws, b.draws), (a.buffers, b.buffers))
    return all(list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x) for x, y in parts)


def check(folder: Path, run: Callable[..., isosgd.Posterior]) -> None:
    """Stop a run in the warm-up and twice while drawing; is it then the run that was not, where such runs are alike?"""
    with crash_after() as machine:
        whole = run(store=folder / "whole")
    same = equal(whole, run(store=folder / "again"))
    stops = (
        {"calls": machine.calls // 3},
        {"calls": 4, "store": folder / "run"},
        {"calls": 3, "store": folder / "run"},
    )
    for stop in stops:
        had = isosgd.load(folder / "run").num_draws if (folder / "run" / "manifest.json").exists() else 0
        with crash_after(**stop), pytest.raises(Crash):
            run(store=folder / "run", resume=True)
        kept = isosgd.load(folder / "run", verify=True)
        assert kept.num_draws >= had
        for name in kept.draws if same else ():
            assert torch.equal(kept.draws[name], whole.draws[name][: kept.num_chains, : kept.num_draws])
    found = run(store=folder / "run", resume=True)
    assert found.info["complete"] and found.num_draws == QUICK["draws"]
    assert all(bool(x.isfinite().all()) for x in found.draws.values())
    assert not same or equal(found, whole), "a run that was stopped came out otherwise than one that was not"
    assert all(x.device.type == "cpu" for x in found.draws.values())


def test_one_chain_is_resumed(tmp_path: Path) -> None:
    check(tmp_path, lambda **store: isosgd.sample(make_target(), (X, Y), device=DEVICE, **QUICK, **store))


def test_chains_side_by_side_are_resumed(tmp_path: Path) -> None:
    check(tmp_path, lambda **store: isosgd.sample(make_target(), (X, Y), device=DEVICE, chains=3, **QUICK, **store))


def test_data_that_live_on_the_gpu_and_another_method(tmp_path: Path) -> None:
    data = (X.to(DEVICE), Y.to(DEVICE))
    check(tmp_path, lambda **store: isosgd.sample(make_target(), data, method="sghmc", chains=2, **QUICK, **store))


def test_buffers_go_with_the_draws(tmp_path: Path) -> None:
    check(tmp_path, lambda **store: isosgd.sample(make_target(norm=True), (X, Y), device=DEVICE, **QUICK, **store))


def test_a_run_of_a_gpu_is_read_on_a_cpu(tmp_path: Path) -> None:
    """By a target that was never on a GPU; what is predicted there is what is predicted on the GPU."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    drawn = isosgd.sample(
        isosgd.Target.from_module(model, "gaussian"), (X, Y), device=DEVICE, store=tmp_path, chains=2, **QUICK
    )
    here = isosgd.load(tmp_path, isosgd.Target.from_module(model, "gaussian")).predict(X).mean
    assert here.device.type == "cpu"
    torch.testing.assert_close(drawn.predict(X.to(DEVICE)).mean.cpu(), here, rtol=1e-3, atol=1e-4)


def test_another_kind_of_device_is_refused(tmp_path: Path) -> None:
    """A run goes on on the kind of device that it was begun on."""
    with crash_after(4, tmp_path), pytest.raises(Crash):
        isosgd.sample(make_target(), (X, Y), device=DEVICE, store=tmp_path, **QUICK)
    with pytest.raises(ValueError, match=f"device was '{DEVICE}' and is 'cpu'"):
        isosgd.sample(make_target(), (X, Y), device="cpu", store=tmp_path, resume=True, **QUICK)
