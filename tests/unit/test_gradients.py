"""Gradients of many chains in one computation: those of each chain alone, or a reason why not."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import SamplingWarning, Target, likelihoods, priors, sample
from isosgd.engine.gradients import Layout, Many, Single

F64 = torch.float64
N, CHAINS = 70, 3
QUICK = {"draws": 4, "keep_every": 2, "warmup": 500, "batch_size": 8, "progress": False}
in_turn = pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")


def mlp() -> Target:
    """A network with a sampled noise scale and sampled prior scales."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return Target.from_module(model, "gaussian", priors.HierarchicalNormal())


def conv() -> Target:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)).double()
    return Target.from_module(model, "categorical", priors.FanInNormal())


def frozen() -> Target:
    """BatchNorm that only looks at what it has learnt, and a last layer on top."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    return Target.from_module(model, likelihoods.Gaussian(0.3), sampled="last_layer")


def scalars() -> Target:
    """Parameters without dimensions, one of them positive, and one that the likelihood does not use."""
    return Target(
        lambda p, b: -0.5 * ((b[1] - p["slope"] * b[0][:, 0]) / p["sigma"]).square() - p["sigma"].log(),
        {"slope": priors.Normal(10.0), "sigma": priors.HalfNormal(1.0), "unused": priors.StudentT()},
        positive=["sigma"],
        init={
            name: torch.tensor(value, dtype=F64) for name, value in (("slope", 0.5), ("sigma", 1.5), ("unused", 2.0))
        },
    )


def rows(generator: torch.Generator, *lead: int) -> tuple[Tensor, ...]:
    return torch.randn(*lead, 3, generator=generator, dtype=F64), torch.randn(*lead, generator=generator, dtype=F64)


def images(generator: torch.Generator, *lead: int) -> tuple[Tensor, ...]:
    pixels = torch.randn(*lead, 1, 6, 6, generator=generator, dtype=F64)
    return pixels, torch.randint(4, lead, generator=generator)


CASES: dict[str, tuple[Callable[[], Target], Callable[..., tuple[Tensor, ...]]]] = {
    "mlp": (mlp, rows),
    "conv": (conv, images),
    "frozen": (frozen, rows),
    "scalars": (scalars, rows),
}
every_case = pytest.mark.parametrize(("make", "draw"), CASES.values(), ids=CASES)


def perturbed(target: Target, generator: torch.Generator) -> dict[str, Tensor]:
    start = target.initial()
    for x in start.values():
        x.data += 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return start


@every_case
@pytest.mark.parametrize(("n", "split"), [(1, True), (7, False), (8, False), (2, True), (3, True), (8, True)])
def test_many_chains_have_the_gradients_of_each(
    make: Any, draw: Any, n: int, split: bool, generator: torch.Generator
) -> None:
    """Losses, gradients and noise vectors, each chain at parameters and on a minibatch of its own."""
    target = make()
    starts = [perturbed(target, generator) for _ in range(CHAINS)]
    together = {name: torch.stack([start[name].detach() for start in starts]) for name in starts[0]}
    batch = draw(generator, CHAINS, n)
    alone = [Single(target, N)(starts[k], tuple(t[k] for t in batch), split) for k in range(CHAINS)]
    found = Many(target, N, Layout(starts[0]))(together, batch, split)
    assert found.loss.shape == (CHAINS,)
    torch.testing.assert_close(found.loss, torch.cat([one.loss for one in alone]))
    for i, g in enumerate(found.gradients):
        torch.testing.assert_close(g, torch.stack([one.gradients[i] for one in alone]), rtol=1e-9, atol=1e-12)
    if not split or n < 2:
        assert found.noise is None and alone[0].noise is None
        return
    for i, d in enumerate(found.noise):
        torch.testing.assert_close(d, torch.stack([one.noise[i] for one in alone]), rtol=1e-9, atol=1e-12)
    assert max(float(d.abs().max()) for d in found.noise) > 1e-3


def engine(target: Target, data: tuple[Tensor, ...]) -> str:
    """How two chains run on all rows at a time."""
    settings: dict[str, Any] = {"method": "sgld", "lr": 1e-12, "warmup": 0, "draws": 1, "keep_every": 1}
    settings |= {"batch_size": len(data[0]), "compile": False, "progress": False}
    return str(sample(target, data, chains=2, **settings).info["engine"])


@every_case
def test_what_can_be_batched_is(make: Any, draw: Any, generator: torch.Generator) -> None:
    assert engine(make(), draw(generator, 8)).startswith("together")


# ------------------------------------------------------------------------------------------------ why not


class Counting(nn.Module):
    """Keeps a running mean of its inputs, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.mean(0), 0.1)
        return self.linear(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rnn(x.unsqueeze(-1))[0][:, -1])
        return out.squeeze(-1)


def gated() -> Target:
    """Can be mapped over chains, but not over halves of their batches too, which noise vectors need."""
    rnn = nn.GRU(1, 4, batch_first=True)

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = batch
        return -0.5 * (y - torch.func.functional_call(rnn, params, (x.unsqueeze(-1),))[0][:, -1, 0]).square()

    return Target(log_likelihood, priors.Normal(1.0), init={n: x.detach().clone() for n, x in rnn.named_parameters()})


def control_flow() -> Target:
    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = batch
        off = y - x @ params["w"]
        return -0.5 * off.square() if params["w"].sum() < 100 else -off.abs()

    return Target(log_likelihood, priors.Normal(1.0), init={"w": torch.zeros(3)})


def two_dtypes() -> Target:
    return Target(
        lambda p, b: -0.5 * (b[1] - b[0] @ p["w"] - p["offset"].float()).square(),
        priors.Normal(1.0),
        init={"w": torch.zeros(3), "offset": torch.zeros((), dtype=F64)},
    )


def fickle() -> Target:
    """Not the same function under vmap."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        mapped = torch._C._functorch.maybe_current_level() is not None
        return -0.5 * (1.5 if mapped else 1.0) * (batch[1] - batch[0] @ params["w"]).square()

    return Target(log_likelihood, priors.Normal(1.0), init={"w": torch.zeros(3)})


REASONS: dict[str, tuple[Callable[[], Target], str]] = {
    "state": (
        lambda: Target.from_module(Counting(), "gaussian"),
        r"cannot be mapped over chains \(RuntimeError: .*in-?place",
    ),
    "halves": (gated, r"cannot be mapped over chains \(RuntimeError: output with shape"),
    "recurrent": (
        lambda: Target.from_module(Recurrent(), "gaussian"),
        r"maps the recurrent layer 'rnn' over chains by",
    ),
    "control flow": (control_flow, r"cannot be mapped over chains \(RuntimeError: .*data-dependent control flow"),
    "dtypes": (two_dtypes, r"parameters have several dtypes \(torch.float32, torch.float64\)"),
    "other": (fickle, r"gives other gradients \(off by 0.5 of their largest\)"),
}
every_reason = pytest.mark.parametrize(("make", "words"), REASONS.values(), ids=REASONS)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=g)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(N, generator=g)


def test_batchnorm_in_training_mode_can_be_mapped_over_chains(data: tuple[Tensor, Tensor]) -> None:
    """Its running statistics, which cannot, are found for each draw and not by passes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that examples of a batch hang together
        target = Target.from_module(model, "gaussian")
    x, y = data
    assert engine(target, (x[:8], y[:8, None])) == "together"


@every_reason
def test_what_cannot_be_batched_says_why_and_stays_as_it_was(make: Any, words: str, data: tuple[Tensor, ...]) -> None:
    target, batch = make(), tuple(t[:8] for t in data)
    start = target.initial()
    before = target.gradient(start, batch, N)[1]
    with pytest.warns(SamplingWarning, match=f"chains run in turn, not together: .*{words}"):
        assert re.search(words, engine(target, batch))
    torch.testing.assert_close(target.gradient(start, batch, N)[1], before)


@pytest.mark.long
@every_reason
@in_turn
def test_chains_then_run_in_turn_and_are_right(make: Any, words: str, data: tuple[Tensor, ...]) -> None:
    """With a warning that names the reason; the first chain is that of a run with one chain, which never batches."""
    with pytest.warns(SamplingWarning, match=f"chains run in turn, not together: .*{words}"):
        found = sample(make(), data, chains=2, **QUICK)
    assert found.info["engine"].startswith("in turn: ") and found.num_chains == 2
    torch.manual_seed(0)
    alone = sample(make(), data, chains=1, **QUICK)
    assert alone.info["engine"] == "there is one chain"
    for name, x in alone.draws.items():
        assert torch.equal(found.draws[name][0], x[0])
        assert not torch.equal(found.draws[name][1], x[0])


def wide() -> nn.Module:
    """Wide enough that its products are summed in another order when they are batched."""
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))


def test_large_losses_are_compared_by_their_size(generator: torch.Generator) -> None:
    """Raw columns: a loss of 1e7 is not the same in its last digits however it is summed."""
    x, y = 1e4 * torch.randn(33, 20, generator=generator), 1e4 * torch.randn(33, generator=generator)
    target = Target.from_module(wide(), "gaussian")
    assert float(target.gradient(target.initial(), (x, y), 33)[0]) > 1e6
    assert engine(target, (x, y)).startswith("together")


def test_gradients_that_vanish_are_not_compared_by_their_rounding(generator: torch.Generator) -> None:
    """A start at an exact fit: what is left of the gradient is chance."""
    model, x = wide(), torch.randn(33, 20, generator=generator)
    target = Target.from_module(model, lambda output, y: -(output - y).square()[:, 0], priors.Flat())
    assert engine(target, (x, model(x).detach())) == "together"


class Batched(nn.Module):
    """A module of a user's that takes parameters of all chains in one pass; its names are those of tables."""

    batched = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(3, 20)])
        self.last = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.hidden[0], self.last):
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(x) @ layer.weight.mT + layer.bias.unsqueeze(-2)
        return x


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_a_batched_module_of_a_user_keeps_its_own_gradients(likelihood: str) -> None:
    target = Target.from_module(Batched(), likelihood, {"*.weight": priors.Normal(0.5), "*.bias": priors.Flat()})
    layout = Layout(target.initial())
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(2, sum(layout.sizes), generator=draw)
    x = torch.randn(2, 400, 3, generator=draw)
    y = (x[..., :1] > 0).float()
    loss, gradient, _ = Many(target, 400, layout).flat(theta, (x, y), split=False)
    for k in range(2):
        free = {name: p.clone().requires_grad_() for name, p in layout.views(theta[k]).items()}
        one, wanted = target.gradient(free, (x[k], y[k]), 400)
        torch.testing.assert_close(loss[k], one)
        torch.testing.assert_close(gradient[k], torch.cat([g.flatten() for g in wanted]), rtol=1e-4, atol=1e-5)
