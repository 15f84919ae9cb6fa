"""Faster ways to the same numbers: functions compiled once it pays, and products by the faster library."""

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, priors, sample
from isosgd.engine.compiled import fastest_products

CPU = torch.device("cpu")


class Compiler:
    """Stands for `torch.compile`: says what it was asked for, and does as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.runs, self.error = 0, error

    def __call__(self, function: Any, **settings: Any) -> Any:
        self.asked.append(settings)

        def fast(*args: Any) -> Any:
            self.runs += 1
            if self.error is not None:
                raise self.error
            return function(*args)

        return fast


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(torch, "compile", found)
    return found


def run(**options: Any) -> Posterior:
    """In float64, so that rounding does not grow to what can be seen over a warm-up."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    target = Target.from_module(model, "gaussian", priors.HierarchicalNormal())
    settings = {"chains": 2, "draws": 4, "keep_every": 2, "batch_size": 10, "progress": False}
    return sample(target, (x, x.sin().sum(1)), **settings, **options)


@pytest.mark.slow
def test_compiled_chains_make_the_same_draws() -> None:
    """Of a sampler whose rate changes from step to step, so that gradients alone are compiled."""
    settings: dict[str, Any] = {"method": "sgld", "lr": 1e-3, "decay": 0.5, "warmup": 0}
    plain, fast = (run(compile=choice, **settings) for choice in (False, True))
    if "not compiled" in fast.info["engine"]:
        pytest.skip(f"nothing can be compiled here: {fast.info['engine']}")
    assert plain.info["engine"] == "together" and fast.info["engine"] == "together, compiled"
    for name, draws in plain.draws.items():
        torch.testing.assert_close(fast.draws[name], draws, rtol=1e-5, atol=1e-5)


def test_chains_go_on_where_the_compiler_fails(compiler: Compiler) -> None:
    compiler.error = RuntimeError("no compiler found")
    plain, fast = (run(method="sgld", lr=1e-3, warmup=0, compile=choice) for choice in (False, True))
    assert compiler.runs == 2  # it tries once with several steps, and once with the gradient
    assert fast.info["engine"] == "together, not compiled (RuntimeError: no compiler found)"
    for name, draws in plain.draws.items():
        assert torch.equal(fast.draws[name], draws)


# ------------------------------------------------------------------------------------------------ products


@pytest.fixture
def flag() -> Iterator[None]:
    """Whatever a test does to it, the flag is as it was."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of oneDNN is known on which machines it is slow; here there is one of them at most."""
    monkeypatch.setattr(platform, "machine", lambda: name)


@pytest.mark.parametrize(("name", "slow"), [("aarch64", True), ("x86_64", False)])
def test_the_faster_library_is_used_and_the_flag_put_back(
    name: str, slow: bool, flag: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, name)
    torch.backends.mkldnn.enabled = True
    with fastest_products(CPU):
        assert torch.backends.mkldnn.enabled != slow
    assert torch.backends.mkldnn.enabled
    with pytest.raises(KeyError), fastest_products(CPU):
        raise KeyError
    assert torch.backends.mkldnn.enabled


def test_sampling_puts_the_flag_back_after_an_error(flag: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "arm64")
    torch.backends.mkldnn.enabled = True
    seen = []

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        if len(seen) > 30:
            raise KeyError("of the user's own")
        return -0.5 * (batch[0] - params["mu"]).square()

    target = Target(log_likelihood, priors.Normal(1.0), init={"mu": 0.0})
    with pytest.raises(KeyError, match="of the user's own"):
        sample(target, (torch.randn(20),), warmup=200, progress=False)
    assert seen[-1] is False and torch.backends.mkldnn.enabled
