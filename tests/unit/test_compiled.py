"""Faster ways to the same numbers: functions compiled once it pays, and products by the faster library."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, priors, sample
from isosgd.engine import compiled
from isosgd.engine.compiled import Compiled, fastest_products

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
    monkeypatch.setattr(compiled.torch, "compile", found)
    return found


@pytest.mark.parametrize(("after", "runs"), [(0, 5), (3, 2), (5, 0), (None, 0)])
def test_a_function_is_compiled_once_after_so_many_calls(compiler: Compiler, after: int | None, runs: int) -> None:
    function = Compiled(lambda x: 2 * x, after)
    assert [function(x) for x in range(5)] == [0, 2, 4, 6, 8]
    assert compiler.runs == runs and len(compiler.asked) == (runs > 0)
    assert function.unsupported_reason == ""


def test_it_is_said_before_the_first_time(compiler: Compiler) -> None:
    said: list[str] = []
    function = Compiled(lambda x: 2 * x, 1, said.append)
    function(1)
    assert said == []
    function(2), function(3)
    assert len(said) == 1 and said[0].startswith("compiling")


def test_warnings_of_the_compiler_are_its_own_affair_and_those_of_the_function_not(compiler: Compiler) -> None:
    """The first time it warns of its innards; from then on warnings are the function's."""

    def warns(x: int) -> int:
        warnings.warn("look here", UserWarning, stacklevel=1)
        return x

    function = Compiled(warns, 0)
    assert function(1) == 1 and function.unsupported_reason == ""
    with pytest.warns(UserWarning, match="look here"):
        function(2)


def test_what_cannot_be_compiled_goes_on_and_says_why(compiler: Compiler) -> None:
    compiler.error = RuntimeError("no compiler found\nwith many more lines")
    function = Compiled(lambda x: 2 * x, 1)
    assert [function(x) for x in range(4)] == [0, 2, 4, 6]
    assert function.unsupported_reason == "RuntimeError: no compiler found"
    assert compiler.runs == 1  # it does not try again


def test_errors_of_the_function_itself_are_not_hidden(compiler: Compiler) -> None:
    def fails(x: int) -> int:
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        Compiled(fails, 0)(1)


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
@pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")
def test_compiled_chains_make_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = [], Compiled.__init__

    def spy(self: Compiled, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Compiled, "__init__", spy)
    monkeypatch.setattr("isosgd.sampling.loop._many_steps", lambda *args: None)  # those are tested elsewhere
    plain, fast = (run(structure="diagonal", warmup=300, compile=choice) for choice in (False, True))
    if any(function.unsupported_reason for function in made):
        pytest.skip(f"nothing can be compiled here: {made[-1].unsupported_reason}")
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


@pytest.mark.parametrize("slow", [True, False])
def test_the_faster_library_is_used_and_the_flag_put_back(
    slow: bool, flag: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_onednn_is_slow", lambda: slow)
    torch.backends.mkldnn.enabled = True
    with fastest_products(CPU):
        assert torch.backends.mkldnn.enabled != slow
    assert torch.backends.mkldnn.enabled
    with pytest.raises(KeyError), fastest_products(CPU):
        raise KeyError
    assert torch.backends.mkldnn.enabled


def test_a_users_own_choice_and_other_devices_are_left_alone(flag: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_onednn_is_slow", lambda: True)
    torch.backends.mkldnn.enabled = True
    with fastest_products(torch.device("cuda")):
        assert torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    with fastest_products(CPU):
        assert not torch.backends.mkldnn.enabled
    assert not torch.backends.mkldnn.enabled


@pytest.mark.parametrize(("machine", "slow"), [("x86_64", False), ("aarch64", True), ("ARM64", True), ("", False)])
def test_the_machine_decides_and_not_the_clock(machine: str, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that hung on the clock would change the draws."""
    monkeypatch.setattr(compiled.platform, "machine", lambda: machine)
    assert compiled._onednn_is_slow() == slow


def test_sampling_puts_the_flag_back_after_an_error(flag: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_onednn_is_slow", lambda: True)
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


class Doubler:
    def __init__(self) -> None:
        self.evaluate = Compiled(self.twice, 0)

    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


def test_methods_of_different_objects_are_different_code_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gives up on a piece of code after eight versions; every run has a version of its own."""
    seen: list[Any] = []
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: seen.append(function) or function)
    doublers = [Doubler(), Doubler()]
    assert [float(d.evaluate(torch.tensor(3.0))) for d in doublers] == [6.0, 6.0]
    first, second = (function.__func__.__code__ for function in seen)
    assert first is not second and all(f.__self__ is d for f, d in zip(seen, doublers, strict=True))
