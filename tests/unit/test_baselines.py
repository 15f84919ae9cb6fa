"""The parts of the baselines: masks, fresh starts, moments, BatchNorm statistics, and how trainings are shared out."""

import copy
import io
import itertools
import re
import sys
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout1d

import isosgd
from experiments.models import lenet5, resnet56
from isosgd import DataSets, Target, priors
from isosgd.baselines.base import LOOKS, PROBES
from isosgd.baselines.mcdropout import masked_weights
from isosgd.baselines.swag import Moments

GAUSSIAN = isosgd.likelihoods.Gaussian(scale=0.5)
QUICK: dict[str, Any] = {"draws": 3, "warmup": 10, "keep_every": 3, "progress": False}


def sampled(model: nn.Module, x: Tensor, y: Tensor, method: str, **settings: Any) -> isosgd.Posterior:
    return isosgd.sample(Target.from_module(model, GAUSSIAN), (x, y), method=method, **{**QUICK, **settings})


# ------------------------------------------------------------------------------------------------ masks

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {  # a layer, the shape of its inputs, and their units
    "linear": (nn.Linear(6, 3), (6,), 6),
    "linear over rows": (nn.Linear(6, 3), (2, 6), 6),
    "conv1d": (nn.Conv1d(6, 3, 2), (6, 5), 6),
    "conv2d": (nn.Conv2d(6, 3, 2), (6, 5, 5), 6),
    "grouped": (nn.Conv2d(6, 4, 2, groups=2), (6, 5, 5), 6),
    "depthwise": (nn.Conv2d(6, 6, 2, groups=6), (6, 5, 5), 6),
    "transposed": (nn.ConvTranspose2d(6, 3, 2), (6, 5, 5), 6),
    "transposed, grouped": (nn.ConvTranspose2d(6, 4, 2, groups=2), (6, 5, 5), 6),
}


class Flat(nn.Module):
    """A layer whose output is summed to one number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).flatten(1)
        return (out * torch.linspace(1, 2, out.shape[1])).sum(1, keepdim=True)


@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_on_weights_is_a_mask_on_units(name: str) -> None:
    """Exactly: the output of a draw is that of the trained layer with these units missing."""
    layer, shape, units = LAYERS[name]
    model = Flat(copy.deepcopy(layer))
    x = torch.randn(5, *shape)
    posterior = sampled(model, x, torch.zeros(5, 1), "mcdropout", p=0.4, draws=20, warmup=0)
    axis = x.ndim - 1 if isinstance(layer, nn.Linear) else 1
    view = [-1 if i == axis else 1 for i in range(x.ndim)]
    candidates = torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)))
    outputs = torch.stack([model(x * bits.view(view) / 0.6).detach() for bits in candidates])
    seen = set()
    for natural in posterior:
        # The mask that the draw was made with, read off its weights.
        weight, whole = natural["layer.weight"], model.layer.weight.detach()
        ratio = weight / whole * 0.6
        output = posterior.target.predictive(posterior.target.unconstrain(natural), x)["mean"]
        fits = candidates[torch.isclose(outputs, output, rtol=1e-4, atol=1e-5).flatten(1).all(1)]
        assert len(fits) == 1 and torch.allclose(ratio, (ratio > 0.5).float())
        assert torch.equal(natural["layer.bias"], model.layer.bias.detach())
        seen.add(tuple(fits[0].tolist()))
    assert len(seen) > 5


def test_masks_of_chains_together_and_alone_have_the_same_form() -> None:
    x = torch.randn(20, 6)
    for chains in (1, 3):
        posterior = sampled(nn.Linear(6, 2), x, torch.zeros(20, 2), "mcdropout", chains=chains, p=0.5)
        missing = posterior.draws["weight"] == 0
        assert torch.equal(missing[..., 0, :], missing[..., 1, :])  # a unit is missing for all rows
        assert len({tuple(row) for row in missing[..., 0, :].flatten(0, 1).tolist()}) > 1


def places(
    model: nn.Module, example: tuple[Tensor, Tensor], p: Any = None, likelihood: Any = GAUSSIAN
) -> dict[str, float]:
    found = masked_weights(Target.from_module(model.eval(), likelihood), p, None, example)
    return {place.name: round(place.p, 6) for place in found}


def test_dropout_is_put_before_all_layers_but_the_first() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    example = (torch.randn(3, 2), torch.randn(3, 1))
    assert places(model, example) == {"2.weight": 0.1, "4.weight": 0.1}
    assert places(model, example, 0.3) == {"2.weight": 0.3, "4.weight": 0.3}
    assert places(model, example, {"*": 0.2}) == {"0.weight": 0.2, "2.weight": 0.2, "4.weight": 0.2}
    assert places(model, example, {"4": 0.5, "0": 0.2}) == {"0.weight": 0.2, "4.weight": 0.5}
    assert places(nn.Linear(2, 1), example) == {"weight": 0.1}
    model[2].requires_grad_(False)
    assert places(model, example) == {"4.weight": 0.1}


def test_dropout_layers_of_the_model_are_found_where_they_act() -> None:
    images = (torch.randn(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))
    assert places(lenet5(dropout=0.25), images, likelihood="categorical") == {
        "conv2.weight": 0.25, "fc1.weight": 0.25, "fc2.weight": 0.25,
    }  # fmt: skip
    small = (torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))
    found = places(resnet56(dropout=0.2).eval(), small, likelihood="categorical")
    assert set(found.values()) == {0.2} and len(found) == 27 and all(name.endswith("conv2.weight") for name in found)
    example = (torch.randn(3, 2), torch.randn(3, 1))
    twice = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 4), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(4, 1))
    assert places(twice, example) == {"1.weight": 0.5, "4.weight": 0.6}
    assert places(twice, example, 0.1) == {"4.weight": 0.1}  # what is asked for goes before


def test_a_shared_weight_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match="the weight of layer '0' is shared with another layer"):
        places(model, (torch.randn(3, 2), torch.randn(3, 1)), {"0": 0.1})


def test_dropout_needs_a_layer() -> None:
    model = nn.Embedding(3, 1)
    example = (torch.zeros(4, dtype=torch.long), torch.randn(4, 1))
    with pytest.raises(ValueError, match="nothing is ever dropped"):
        places(model, example)


def test_training_sees_other_masks_than_torch_but_the_same_loss() -> None:
    """Over many masks: channel dropout of torch's own, on the inputs of a convolution."""
    torch.manual_seed(0)
    layer, x = nn.Conv1d(4, 1, 2, bias=False), torch.randn(50, 4, 3)
    y = layer(x).detach().mean(-1) + 0.3
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(2, 1, bias=False))
    nn.init.constant_(model[2].weight, 0.5)
    posterior = sampled(model, x, y, "mcdropout", p={"0": 0.3}, draws=2000, warmup=0)
    ours = torch.stack([-posterior.target.log_likelihood(natural, (x, y)).mean() for natural in posterior])
    theirs = []
    for _ in range(500):
        off = (model(dropout1d(x, 0.3, training=True)).detach() - y).square() / (2 * 0.25)
        theirs.append(off.mean() + 0.5 * torch.tensor(2 * torch.pi * 0.25).log())
    theirs = torch.stack(theirs)
    error = (ours.var() / len(ours) + theirs.var() / len(theirs)).sqrt()
    assert float((ours.mean() - theirs.mean()).abs() / error) < 4.5


# ------------------------------------------------------------------------------------------------ ensembles


class Own(nn.Module):
    """A layer with a parameter of its own that no `reset_parameters` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(20.0))
        self.norm = nn.LayerNorm(20)
        self.out = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(x * self.scale))
        return found


def test_members_start_from_weights_of_their_own() -> None:
    x, y = torch.randn(30, 20), torch.randn(30, 1)
    model = Own()
    posterior = sampled(model, x, y, "ensemble", warmup=0, chains=2)
    weights = posterior.draws["out.weight"].flatten(0, 1)
    assert len({tuple(row) for row in weights[:, 0].tolist()}) == 6
    assert float(weights.abs().max()) <= 1 / 20**0.5  # as nn.Linear has it
    scales = posterior.draws["scale"].flatten(0, 1)
    assert torch.equal(scales.sort(-1).values, torch.arange(20.0).expand(6, 20))
    assert len({tuple(row) for row in scales.tolist()}) == 6
    assert bool((posterior.draws["norm.weight"] == 1).all())


def test_members_of_a_function_start_where_it_says_or_by_number() -> None:
    of = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Flat(), init={"mu": 4.0})
    settings: dict[str, Any] = {**QUICK, "method": "ensemble", "warmup": 0, "chains": 2}
    data = (torch.randn(30),)
    assert isosgd.sample(of, data, **settings).draws["mu"].tolist() == [[4.0] * 3] * 2
    numbered = isosgd.sample(of, data, init=lambda k: {"mu": float(k)}, **settings)
    assert numbered.draws["mu"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.long
@pytest.mark.parametrize("sets", [1, 2])
def test_large_ensembles_are_trained_in_parts(sets: int) -> None:
    """Two members of each chain at a time: those of more do not go together."""
    size = (1 << 20) // sets
    of = Target(lambda p, b: -0.5 * (b[0] - p["mu"].mean()) ** 2, priors.Flat(), init={"mu": torch.zeros(size)})
    data = DataSets((torch.randn(sets, 30),)) if sets > 1 else (torch.randn(30),)
    settings: dict[str, Any] = {
        **QUICK,
        "draws": 5,
        "chains": 2,
        "method": "ensemble",
        "init": lambda k: {"mu": torch.full((size,), float(k))},
    }
    posterior = isosgd.sample(of, data, **{**settings, "warmup": 0})
    expected = [[5.0 * chain + member for member in range(5)] for chain in range(2 * sets)]
    assert posterior.draws["mu"][..., 0].tolist() == expected
    trained = isosgd.sample(of, data, **settings)
    assert trained.info["gradients"] == 5 * 2 * sets * 10
    assert len(set(trained.draws["mu"][..., 0].flatten().tolist())) == 10 * sets


# ------------------------------------------------------------------------------------------------ moments


@pytest.mark.parametrize("rank", [0, 3, 50])
def test_moments_are_those_of_all_snapshots(rank: int) -> None:
    x = 1000.0 + torch.randn(12, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = Moments(rank)
    for row in x.float():
        moments.add(row)
    kept = x.float().double()
    torch.testing.assert_close(moments.mean.double(), kept.mean(0))
    torch.testing.assert_close(moments.variance.double(), kept.var(0, correction=0), rtol=1e-3, atol=0.0)
    assert len(moments.columns) == min(rank, 12)
    for i, column in enumerate(reversed(moments.columns)):
        torch.testing.assert_close(column.double(), kept[11 - i] - kept[: 12 - i].mean(0), rtol=0.0, atol=2e-3)


# ------------------------------------------------------------------------------------------------ BatchNorm


class Normed(nn.Module):
    """A small image network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.norm = nn.BatchNorm1d(4 * 36)
        self.head = nn.Linear(4 * 36, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.body(x)))
        return found


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(2, (90,), generator=g)
    return torch.randn(90, 1, 8, 8, generator=g) + y.view(-1, 1, 1, 1), y


METHODS = {"swag": {"snapshots": 3, "rank": 2}, "snapshots": {}, "mcdropout": {}, "ensemble": {}}


@pytest.mark.filterwarnings("ignore:.*statistics of the minibatch", "ignore:chains run in turn")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sets", [1, 2])
def test_batchnorm_gets_statistics_of_all_data_for_each_draw(
    method: str, sets: int, digits: tuple[Tensor, Tensor]
) -> None:
    torch.manual_seed(0)
    model = Normed().train()
    of = Target.from_module(model, "categorical")
    x, y = digits
    parts = [digits, (3 * x, 1 - y)][:sets]
    data = digits if sets == 1 else DataSets((torch.stack([x, 3 * x]), torch.stack([y, 1 - y])))
    settings: dict[str, Any] = {**QUICK, **METHODS[method], "draws": 2, "chains": 2, "batch_size": 30}
    posterior = isosgd.sample(of, data, method=method, **settings)
    names = {f"{layer}.{kind}" for layer in ("body.1", "norm") for kind in ("running_mean", "running_var")}
    assert set(posterior.buffers) >= names
    assert all(tuple(v.shape[:2]) == (2 * sets, 2) for v in posterior.buffers.values())
    for chain, draw in ((0, 0), (2 * sets - 1, 1)):
        other = copy.deepcopy(model).train()  # torch's own way, over one batch of everything
        other.load_state_dict(posterior.draw(chain, draw), strict=False)
        for layer in (other.body[1], other.norm):
            layer.reset_running_stats()
            layer.momentum = None
        with torch.no_grad():
            other(parts[chain // 2][0])
        for name in names:
            wanted = other.state_dict()[name]
            torch.testing.assert_close(posterior.buffers[name][chain, draw], wanted, rtol=1e-3, atol=1e-4)
    # And predictions use them: those of an input do not depend on its batch.
    together = posterior.predict(x[:8]).mean
    torch.testing.assert_close(together[:1], posterior.predict(x[:1]).mean, rtol=1e-3, atol=1e-4)
    assert not torch.equal(model.norm.running_mean, posterior.buffers["norm.running_mean"][0, 0])
    assert bool((model.norm.running_mean == 0).all())  # the user's own is never written to


def test_fixed_statistics_stay_fixed(digits: tuple[Tensor, Tensor]) -> None:
    """In evaluation mode BatchNorm is a part of the model like any other."""
    posterior = isosgd.sample(
        Target.from_module(Normed().eval(), "categorical"), digits, method="swag", snapshots=2, rank=2, **QUICK
    )
    assert not posterior.buffers


# ------------------------------------------------------------------------------------------------ rates and costs


def test_a_rate_that_is_chosen_is_mandts_or_half_of_what_is_stable() -> None:
    """Of ``y ~ N(mu, 1)`` the curvature is 1; Mandt's rate is 2 n / (N Var(y))."""
    g = torch.Generator().manual_seed(0)
    y = torch.randn(400, 3, generator=g)
    y = (y - y.mean(0)) / y.std(0, correction=0)
    settings: dict[str, Any] = {**QUICK, "method": "snapshots", "schedule": "constant", "batch_size": 20, "chains": 4}
    for spread, expected in ((1.0, 2 * 20 / 400), (0.1, 0.5)):
        of = Target(lambda p, b: -0.5 * (b[0] - p["mu"]).square().sum(-1), priors.Flat(), init={"mu": torch.zeros(3)})
        rates = torch.tensor([rate["mu"] for rate in isosgd.sample(of, (spread * y,), **settings).info["rates"]])
        assert float(rates.mean()) == pytest.approx(expected, rel=0.15)
        cyclical = isosgd.sample(of, (spread * y,), **{**settings, "schedule": "cyclical"}).info["rates"]
        assert cyclical[0]["mu"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.long
def test_training_has_a_length_by_default() -> None:
    """3,000 steps, or forty epochs of more than 75 batches."""
    of = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Flat(), init={"mu": 0.0})

    def spent(n: int, method: str, **own: Any) -> int:
        settings = {"draws": 2, "batch_size": 8, "progress": False, "compile": False, **own}
        return int(isosgd.sample(of, (torch.randn(n),), method=method, **settings).info["gradients"])

    assert spent(16, "ensemble") == 2 * 3_000
    assert spent(16, "snapshots") == 3_000 + 1 + PROBES + 2 * 100
    for n, steps in ((16, 3_000), (608, 40 * 76)):
        assert spent(n, "swag", snapshots=5, rank=0) == steps + LOOKS + PROBES + 5 * n // 8


@pytest.mark.parametrize("method", METHODS)
def test_the_progress_line_ends_where_it_should(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, seconds = Terminal(), itertools.count()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))  # so slow that every step is shown
    x = torch.randn(40, 2)
    found = sampled(nn.Linear(2, 1), x, x[:, :1], method, chains=2, progress=True, **METHODS[method])
    share, done = re.findall(r"(\d+)%  ([\d,]+) steps", terminal.getvalue())[-1]
    steps = int(done.replace(",", ""))
    assert steps == pytest.approx(found.info["gradients"], abs=2 * LOOKS) and steps > 0
    assert int(share) >= 99 * (1 - 2 * LOOKS / steps)


@pytest.mark.parametrize("method", ["swag", "mcdropout"])
def test_minibatches_go_through_a_transform_and_buffers_of_the_start_stay(method):
    """Bytes become floats by the transform alone; a trained network's running statistics come with its weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (60, 4), generator=generator, dtype=torch.uint8)
    y = (x[:, 0] > 127).long()
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    net.train(method == "swag")
    start = {name: v.clone() for name, v in net.state_dict().items()}
    start["1.running_mean"] += 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        target = Target.from_module(net, "categorical")
    sizes = []

    def transform(batch, generator):
        sizes.append(len(batch[0]))
        return batch[0].float() / 255, batch[1]

    more = {"snapshots": 3, "keep_every": 2} if method == "swag" else {"p": 0.5}
    posterior = isosgd.sample(
        target, (x, y), method=method, init=start, transform=transform, warmup=0, draws=2, batch_size=20,
        progress=False, **more,
    )  # fmt: skip
    means = posterior.buffers["1.running_mean"]
    assert means.shape == (1, 2, 8) and sizes
    if method == "mcdropout":
        assert torch.equal(means[0, 0], start["1.running_mean"])
    else:
        hidden = (x.float() / 255) @ posterior.draws["0.weight"][0, 0].T + posterior.draws["0.bias"][0, 0]
        torch.testing.assert_close(means[0, 0], hidden.mean(0))
