"""A run on a GPU, stopped and resumed, and read where there is none. Skipped without a GPU.

Also runs without pytest: ``python tests/unit/test_cuda_resume.py``.

On a GPU a run need not come out the same twice: sums may be taken in another order. Where it does, which each test
finds out first by running twice, a run that was stopped must come out the same too, bit for bit. Where it does not,
what is stored must be kept, and the rest be as many draws.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import isosgd
from isosgd.engine.chains import Chains
from isosgd.store import writer

DEVICE = "cuda"
ROWS = 80
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
QUICK: dict[str, Any] = {"draws": 10, "keep_every": 3, "warmup": 300, "progress": False, "compile": False}


class Stopped(BaseException):
    """Stands for the end of the process: nothing catches it."""


def make_target(norm: bool = False) -> isosgd.Target:
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Tanh(), nn.Linear(4, 1)]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return isosgd.Target.from_module(model.to(DEVICE), "gaussian")


@contextlib.contextmanager
def counted(limit: float = float("inf"), what: str = "evaluate") -> Iterator[list[int]]:
    """Counts minibatches, or with ``natural`` draws, and ends the process, so to say, after so many."""
    count, method = [0], getattr(Chains, what)

    def call(self: Chains, *args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > limit:
            raise Stopped
        return method(self, *args, **options)

    setattr(Chains, what, call)
    try:
        yield count
    finally:
        setattr(Chains, what, method)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Every draw is written when it comes, with a checkpoint; warnings of short warm-ups are beside the point."""
    before, writer.LEAST_WAIT = writer.LEAST_WAIT, 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        writer.LEAST_WAIT = before


def equal(a: isosgd.Posterior, b: isosgd.Posterior) -> bool:
    parts = ((a.draws, b.draws), (a.buffers, b.buffers))
    return all(list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x) for x, y in parts)


def stop_and_resume(folder: Path, run: Callable[..., isosgd.Posterior]) -> tuple[isosgd.Posterior, bool]:
    """The run after it was stopped in the warm-up and twice while drawing; and whether such runs come out the same."""
    with at_once():
        with counted() as count:
            whole = run(store=folder / "whole")
        same = equal(whole, run(store=folder / "again"))
        for after in ((count[0] // 3, "evaluate"), (4, "natural"), (3, "natural")):
            had = isosgd.load(folder / "run").num_draws if (folder / "run" / "manifest.json").exists() else 0
            with contextlib.suppress(Stopped), counted(*after):
                run(store=folder / "run", resume=True)
                raise AssertionError("it was not stopped")
            kept = isosgd.load(folder / "run", verify=True)
            assert kept.num_draws >= had
            for name in kept.draws if same else ():
                assert torch.equal(kept.draws[name], whole.draws[name][: kept.num_chains, : kept.num_draws])
        found = run(store=folder / "run", resume=True)
    assert found.info["complete"] and found.num_draws == QUICK["draws"]
    assert all(bool(x.isfinite().all()) for x in found.draws.values())
    if same:
        assert equal(found, whole), "a run that was stopped came out otherwise than one that was not"
    return found, same


def check(run: Callable[..., isosgd.Posterior]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found, same = stop_and_resume(folder, run)
        print("bit for bit the same from run to run" if same else "not the same from run to run on this GPU")
        device = next(iter(found.draws.values())).device
        assert device.type == "cpu", f"draws of a store are on {device}"


def test_one_chain_is_resumed() -> None:
    check(lambda **store: isosgd.sample(make_target(), (X, Y), device=DEVICE, **QUICK, **store))


def test_chains_side_by_side_are_resumed() -> None:
    check(lambda **store: isosgd.sample(make_target(), (X, Y), device=DEVICE, chains=3, **QUICK, **store))


def test_data_that_live_on_the_gpu_and_another_method() -> None:
    data = (X.to(DEVICE), Y.to(DEVICE))
    check(lambda **store: isosgd.sample(make_target(), data, method="sghmc", chains=2, **QUICK, **store))


def test_buffers_go_with_the_draws() -> None:
    check(lambda **store: isosgd.sample(make_target(norm=True), (X, Y), device=DEVICE, **QUICK, **store))


def test_a_run_of_a_gpu_is_read_on_a_cpu() -> None:
    """By a target that was never on a GPU; what is predicted there is what is predicted on the GPU."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with tempfile.TemporaryDirectory() as name, at_once():
        drawn = isosgd.sample(
            isosgd.Target.from_module(model, "gaussian"), (X, Y), device=DEVICE, store=name, chains=2, **QUICK
        )
        there = isosgd.load(name, isosgd.Target.from_module(model, "gaussian"))
        here = there.predict(X).mean
        assert here.device.type == "cpu"
        torch.testing.assert_close(drawn.predict(X.to(DEVICE)).mean.cpu(), here, rtol=1e-3, atol=1e-4)


def test_another_kind_of_device_is_refused() -> None:
    """A run goes on on the kind of device that it was begun on."""
    with tempfile.TemporaryDirectory() as name, at_once():
        with contextlib.suppress(Stopped), counted(4, "natural"):
            isosgd.sample(make_target(), (X, Y), device=DEVICE, store=name, **QUICK)
            raise AssertionError("it was not stopped")
        try:
            isosgd.sample(make_target(), (X, Y), device="cpu", store=name, resume=True, **QUICK)
        except ValueError as error:
            assert f"device was '{DEVICE}' and is 'cpu'" in str(error)
        else:
            raise AssertionError("it was not refused")


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed")
else:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
