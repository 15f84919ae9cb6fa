"""Models on a GPU and data on the CPU, and the other way round.

Where there is no GPU, `Moves` stands in: what is sent to ``cuda:0`` is written down and stays where it is. The tests
marked so run on a real one.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isosgd import Posterior, Target, sample
from isosgd.data.sources import IterableBatches, as_data
from isosgd.posterior.draws import place_of

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Moves(TorchFunctionMode):
    """Shapes of the tensors that were sent to ``cuda:0``, and of those sent back to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.there: list[tuple[int, ...]] = []
        self.back: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1:2] == (CUDA,):
            self.there.append(tuple(args[0].shape))
            return args[0].clone()
        if (func is Tensor.to and args[1:2] == (CPU,)) or func is Tensor.cpu:
            self.back.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def regression(device: torch.device = CPU, norm: bool = False) -> Posterior:
    """Draws as `sample` keeps them: on the CPU, wherever the network is."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 1)]
    net = nn.Sequential(*layers).eval().to(device)
    draws: dict[str, Tensor] = {name: torch.randn(2, 5, *p.shape) for name, p in net.named_parameters()}
    draws["likelihood.scale"] = torch.ones(2, 5)
    return Posterior(Target.from_module(net, "gaussian"), draws, {})


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(20, 3), torch.randn(20, 1)


def test_which_device_is_chosen() -> None:
    there, here = torch.empty(1, device="meta"), torch.zeros(1)
    assert place_of("cpu", CUDA, there) == CPU  # as asked for
    assert place_of(None, CUDA, here) == CUDA  # the model's, where that is an accelerator
    assert place_of(None, CPU, (here, there)) == CPU  # else that of the inputs
    assert place_of(None, CPU, [{"x": there}, here]) == torch.device("meta")
    assert place_of(None, None, "text") == CPU
    with pytest.raises(RuntimeError, match="nowhere"):
        place_of("nowhere", None, here)


@pytest.mark.parametrize("asked", [False, True])
def test_draws_and_inputs_go_to_the_device_and_predictions_come_back(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    posterior = regression()
    expected = posterior.predict(data[0], levels=(0.5,))
    likely = posterior.log_predictive(data)
    device: dict[str, Any] = {"device": "cuda:0"} if asked else {}
    if not asked:
        monkeypatch.setattr(Target, "device", CUDA)
    with Moves() as moves:
        found = posterior.predict(data[0], levels=(0.5,), **device)
    assert (20, 3) in moves.there and (10, 4, 3) in moves.there  # inputs, and a block of all draws
    assert (20, 1) in moves.back and (1, 20, 1) in moves.back
    torch.testing.assert_close(found.mean, expected.mean)
    for call, shape in ((posterior.log_likelihood, (10, 20)), (posterior.log_predictive, (20,))):
        with Moves() as moves:
            values = call(data, **device)
        assert {(20, 3), (20, 1), (10, 4, 3)} <= set(moves.there) and shape in moves.back
    torch.testing.assert_close(values, likely)


def test_statistics_are_refreshed_where_the_model_is(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior = regression(norm=True)
    expected = posterior.predict(data[0], refresh=[(data[0],)])
    with Moves() as moves:
        posterior.refreshed([(data[0],)], device="cuda:0")
    assert (1, 4, 3) in moves.there  # a draw
    monkeypatch.setattr(Target, "device", CUDA)
    with Moves() as moves:
        found = posterior.predict(data[0], refresh=[(data[0],)])
    assert moves.there.count((1, 4, 3)) == 11  # the first to check inputs, each draw for its statistics,
    assert (10, 4, 3) in moves.there and (10, 4) in moves.there  # then all with them to predict
    torch.testing.assert_close(found.mean, expected.mean)


def test_the_temperature_is_read_on_the_device(data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    draws = {"w": torch.randn(2, 40)}
    target = Target(lambda p, b: -0.5 * (b[1][:, 0] - p["w"] * b[0][:, 0]) ** 2, lambda p: p["w"] * 0, init={"w": 0.0})
    with Moves() as moves:
        Posterior(target, draws, {}, data).trust(device="cuda:0")
    assert {(40,), (64,), (80,)} & set(moves.there) and (20, 3) in moves.there


@needs_gpu
@pytest.mark.parametrize(("model", "inputs"), [(CUDA, CPU), (CPU, CUDA), (CUDA, CUDA)])
def test_predictions_of_a_gpu_are_those_of_the_cpu(
    data: tuple[Tensor, Tensor], model: torch.device, inputs: torch.device
) -> None:
    posterior, here = regression(model), regression()
    x, y = (t.to(inputs) for t in data)
    found, expected = posterior.predict(x, levels=(0.1, 0.9)), here.predict(data[0], levels=(0.1, 0.9))
    assert found.mean.device.type == inputs.type and found.quantiles is not None
    torch.testing.assert_close(found.mean.cpu(), expected.mean)
    torch.testing.assert_close(found.quantiles.cpu(), expected.quantiles)
    likely = posterior.log_predictive((x, y))
    assert likely.device.type == inputs.type
    torch.testing.assert_close(likely.cpu(), here.log_predictive(data))
    normed = regression(model, norm=True).predict(x, refresh=[(x[:10],), (x[10:],)])
    expected = regression(norm=True).predict(data[0], refresh=[(data[0][:10],), (data[0][10:],)])
    torch.testing.assert_close(normed.mean.cpu(), expected.mean)


def test_data_go_where_the_parameters_are(data: tuple[Tensor, Tensor]) -> None:
    moved = as_data(data, None, torch.device("meta"))
    assert isinstance(moved, tuple) and {t.device.type for t in moved} == {"meta"}
    batches = IterableBatches([{"x": data[0]}], CPU)
    batches.device = torch.device("meta")  # no generator lives there
    assert batches.next()["x"].device.type == "meta"
    assert IterableBatches([data], CPU).next() is data  # nothing to do


def test_a_run_sends_its_data_to_the_parameters(data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def stop(data: Any, batch_size: Any, device: Any, *more: Any) -> None:
        seen.append(device)
        raise InterruptedError

    # Nothing can be sampled on the only other device that every machine has: what is asked of the data is watched.
    monkeypatch.setattr(sys.modules["isosgd.sampling.run"], "as_data", stop)
    there = {"w": torch.zeros(3, device="meta")}
    monkeypatch.setattr(Target, "initial", lambda self, init=None, device=None: there)
    target = Target(lambda p, b: b[0] @ p["w"], lambda p: p["w"].sum())
    with pytest.raises(InterruptedError):
        sample(target, data, progress=False)
    assert seen == [torch.device("meta")]


@needs_gpu
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # batches in order, few draws
def test_a_model_on_the_gpu_takes_data_of_the_cpu(data: tuple[Tensor, Tensor]) -> None:
    target = regression(CUDA).target
    assert target is not None
    batches = [(data[0][:10], data[1][:10]), (data[0][10:], data[1][10:])]
    quick: dict[str, Any] = {"draws": 3, "warmup": 500, "keep_every": 2, "progress": False, "structure": "layer"}
    assert len(sample(target, data, **quick)) == 3
    target.num_data = 20
    assert len(sample(target, batches, **quick)) == 3
