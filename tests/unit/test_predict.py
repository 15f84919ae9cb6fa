"""Predictions: any batch size and device, mixtures, a user's function, BatchNorm, draws that are not in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from isosgd import Posterior, Target, likelihoods, metrics, priors
from isosgd.posterior import central
from isosgd.posterior.draws import MOST_AT_ONCE

F64 = torch.float64
CHAINS, DRAWS = 2, 5


def draws_of(
    model: nn.Module, generator: torch.Generator, chains: int = CHAINS, draws: int = DRAWS
) -> dict[str, Tensor]:
    return {
        name: p.detach() + 0.3 * torch.randn(chains, draws, *p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


@pytest.fixture
def regression(generator: torch.Generator) -> Posterior:
    """A small network with a sampled noise scale."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    scales = {"likelihood.scale": 0.2 + torch.rand(CHAINS, DRAWS, generator=generator, dtype=F64)}
    return Posterior(Target.from_module(net, "gaussian"), draws_of(net, generator) | scales, {})


@pytest.fixture
def classifier(generator: torch.Generator) -> Posterior:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return Posterior(Target.from_module(net, "categorical"), draws_of(net, generator), {})


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    return torch.randn(11, 3, generator=generator, dtype=F64)


def by_hand(posterior: Posterior, x: Tensor) -> Tensor:
    """Outputs of a network of two linear layers at each draw, [chains * draws, n, k]."""
    act = torch.tanh if "likelihood.scale" in posterior.draws else torch.relu
    found = []
    for p in posterior:
        hidden = act(x @ p["0.weight"].T + p["0.bias"])
        found.append(hidden @ p["2.weight"].T + p["2.bias"])
    return torch.stack(found)


# ---------------------------------------------------------------- batches of inputs and of draws


@pytest.mark.parametrize("batch_size", [1, 4, 11, 100])
@pytest.mark.parametrize("kind", ["regression", "classifier"])
def test_any_batch_size_gives_the_same(kind: str, batch_size: int, x: Tensor, request: pytest.FixtureRequest) -> None:
    posterior: Posterior = request.getfixturevalue(kind)
    levels = (0.1, 0.5) if kind == "regression" else ()
    whole = posterior.predict(x, levels=levels, return_draws=True)
    parts = posterior.predict(x, levels=levels, return_draws=True, batch_size=batch_size)
    for name in ("mean", "model_variance", "noise_variance", "expected_entropy", "quantiles", "draws"):
        if getattr(whole, name) is None:
            assert getattr(parts, name) is None
        else:
            torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    y = torch.zeros(11, 1, dtype=F64) if kind == "regression" else torch.zeros(11, dtype=torch.int64)
    torch.testing.assert_close(
        posterior.log_predictive((x, y), batch_size=batch_size), posterior.log_predictive((x, y))
    )
    assert posterior.log_likelihood((x, y), batch_size=batch_size).shape == (CHAINS, DRAWS, 11)


def test_draws_come_by_chain(regression: Posterior, x: Tensor) -> None:
    found = regression.predict(x, return_draws=True)
    assert found.draws is not None and found.draw_variances is not None
    torch.testing.assert_close(found.draws, by_hand(regression, x).unflatten(0, (CHAINS, DRAWS)))
    scale = regression.draws["likelihood.scale"][..., None, None].expand(-1, -1, 11, 1)
    torch.testing.assert_close(found.draw_variances, scale**2)
    assert regression.predict(x).draws is None


def test_inputs_of_several_tensors(generator: torch.Generator) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) + self.b(y)

    net = Two()
    posterior = Posterior(Target.from_module(net, likelihoods.Gaussian(1.0)), draws_of(net, generator), {})
    inputs = torch.randn(7, 2, generator=generator), torch.randn(7, 3, generator=generator)
    torch.testing.assert_close(posterior.predict(inputs, batch_size=3).mean, posterior.predict(inputs).mean)


def test_more_draws_than_are_worked_on_at_once(generator: torch.Generator, x: Tensor) -> None:
    net = nn.Linear(3, 1).double()
    posterior = Posterior(
        Target.from_module(net, likelihoods.Gaussian(1.0)), draws_of(net, generator, 3, MOST_AT_ONCE), {}
    )
    outs = torch.stack([x @ p["weight"].T + p["bias"] for p in posterior])
    found = posterior.predict(x)
    torch.testing.assert_close(found.mean, outs.mean(0))
    torch.testing.assert_close(found.model_variance, outs.var(0, correction=0))


class Stored(Mapping[str, Tensor]):
    """Draws that may only be read one at a time, as from a disk."""

    def __init__(self, of: dict[str, Tensor]) -> None:
        self._of, self.read = of, 0
        self.num_chains, self.num_draws = next(iter(of.values())).shape[:2]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of[name].shape

    def draw(self, chain: int, index: int, rows: None = None) -> dict[str, Tensor]:
        self.read += 1
        return {name: x[chain, index].clone() for name, x in self._of.items()}

    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError("all draws were read at once")

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def test_a_store_is_read_draw_by_draw(regression: Posterior, x: Tensor) -> None:
    stored = Stored(dict(regression.draws))
    lazy = Posterior(regression.target, stored, {})
    torch.testing.assert_close(lazy.predict(x).mean, regression.predict(x).mean)
    y = torch.zeros(11, 1, dtype=F64)
    torch.testing.assert_close(lazy.log_predictive((x, y)), regression.log_predictive((x, y)))
    assert len(list(lazy)) == len(lazy) == CHAINS * DRAWS
    some = lazy.select(chains=[1], draws=slice(2, None))
    assert (some.num_chains, some.num_draws) == (1, DRAWS - 2)
    torch.testing.assert_close(
        some.predict(x).mean, regression.select(chains=[1], draws=slice(2, None)).predict(x).mean
    )
    assert "2 chains x 5 draws" in repr(lazy)


# ---------------------------------------------------------------- several draws at once


class Unmapped(nn.Sequential):
    """May look at a number, so that it takes draws one at a time; and counts its calls."""

    looks, calls = True, 0

    def forward(self, x: Tensor) -> Tensor:
        Unmapped.calls += 1
        return super().forward(x) * (1.0 if not self.looks or float(self[0].bias.detach()[0]) < 1e6 else 0.0)


def test_several_draws_at_once_and_one_at_a_time_agree(generator: torch.Generator, x: Tensor) -> None:
    found, calls = [], []
    net = Unmapped(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for net.looks in (False, True):
        draws = draws_of(net, torch.Generator().manual_seed(0), draws=20)
        posterior = Posterior(Target.from_module(net, likelihoods.Gaussian(1.0)), draws, {})
        Unmapped.calls = 0
        found.append(posterior.predict(x, levels=(0.3,), return_draws=True))
        calls.append(Unmapped.calls)
    assert calls[0] < 10 and calls[1] >= CHAINS * 20
    torch.testing.assert_close(found[0].draws, found[1].draws)
    torch.testing.assert_close(found[0].quantiles, found[1].quantiles)


@pytest.mark.parametrize("how", ["number", "wrong"])
def test_a_prediction_that_cannot_be_mapped_falls_back(posterior_of_line: Posterior, how: str) -> None:
    def number(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return x * params["slope"].item()  # not under vmap

    def wrong(params: dict[str, Tensor], x: Tensor) -> Tensor:
        mapped = torch._C._functorch.is_functorch_wrapped_tensor(params["slope"])
        return x * params["slope"] * (2.0 if mapped else 1.0)

    target = Target(
        lambda p, b: -0.5 * (b[1] - p["slope"] * b[0]) ** 2,
        priors.Normal(1.0),
        init={"slope": 0.0},
        predict={"number": number, "wrong": wrong}[how],
    )
    slopes = posterior_of_line.draws["slope"]
    found = Posterior(target, {"slope": slopes}, {}).predict(torch.ones(2))
    torch.testing.assert_close(found.mean, slopes.mean().expand(2))


@pytest.fixture
def posterior_of_line(generator: torch.Generator) -> Posterior:
    target = Target(
        lambda p, b: -0.5 * (b[1] - p["slope"] * b[0]) ** 2,
        priors.Normal(1.0),
        init={"slope": 0.0},
        predict=lambda p, x: {"mean": p["slope"] * x, "variance": torch.ones_like(x)},
    )
    return Posterior(target, {"slope": torch.randn(2, 4, generator=generator)}, {})


def test_filters_are_not_mapped_over(generator: torch.Generator) -> None:
    """To group filters of several draws in one convolution is slower than to take one draw after the other."""
    calls = 0

    class Watched(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    net = nn.Sequential(Watched(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    posterior = Posterior(Target.from_module(net, "categorical"), draws_of(net, generator, draws=20), {})
    images = torch.randn(5, 1, 4, 4, generator=generator)
    calls = 0
    assert posterior.predict(images).mean.shape == (5, 3) and calls >= CHAINS * 20
    assert posterior.predict(images, batch_size=2).mean.shape == (5, 3)


# ---------------------------------------------------------------- mixtures and classes


def test_quantiles_are_those_of_the_mixture(regression: Posterior, x: Tensor) -> None:
    """At its quantile the mean over draws of the normal distribution functions is the level."""
    stats = pytest.importorskip("scipy.stats")
    levels = (0.025, 0.3, 0.975)
    found = regression.predict(x, levels=levels)
    assert found.quantiles is not None and found.quantiles.shape == (3, 11, 1)
    means = by_hand(regression, x)
    sd = regression.draws["likelihood.scale"].flatten()[:, None, None]
    for level, value in zip(levels, found.quantiles, strict=True):
        below = stats.norm.cdf(value, means, sd).mean(0)
        assert below == pytest.approx(level, abs=1e-9)
    low, high = found.interval(0.95)
    torch.testing.assert_close(low, found.quantiles[0])
    torch.testing.assert_close(high, found.quantile(0.975))


def test_quantiles_from_returned_draws_are_the_same(regression: Posterior, x: Tensor) -> None:
    asked = regression.predict(x, levels=central(0.8))
    later = regression.predict(x, return_draws=True)
    for one, other in zip(asked.interval(0.8), later.interval(0.8), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match=r"not requested.*return_draws=True"):
        asked.interval(0.5)


@pytest.mark.parametrize(("likelihood", "df"), [("heteroscedastic", math.inf), ("heteroscedastic_t", 4.0)])
def test_heteroscedastic_noise(likelihood: str, df: float, generator: torch.Generator) -> None:
    net = nn.Linear(3, 2).double()
    posterior = Posterior(Target.from_module(net, likelihood), draws_of(net, generator), {})
    x = torch.randn(6, 3, generator=generator, dtype=F64)
    outs = torch.stack([x @ p["weight"].T + p["bias"] for p in posterior])
    found = posterior.predict(x, levels=(0.9,))
    variance = outs[..., 1].exp() * (1.0 if df == math.inf else df / (df - 2))
    torch.testing.assert_close(found.noise_variance, variance.mean(0))
    expected = metrics.mixture_quantiles(outs[..., 0], variance, 0.9, df=df)
    torch.testing.assert_close(found.quantile(0.9), expected)


def test_entropies_are_those_of_the_metrics(classifier: Posterior, x: Tensor) -> None:
    probabilities = by_hand(classifier, x).softmax(-1)
    found = classifier.predict(x)
    torch.testing.assert_close(found.mean, probabilities.mean(0))
    torch.testing.assert_close(found.entropy, metrics.predictive_entropy(probabilities.mean(0)))
    torch.testing.assert_close(found.mutual_information, metrics.mutual_information(probabilities))


def test_entropy_of_a_yes_or_no(generator: torch.Generator) -> None:
    net = nn.Linear(3, 1).double()
    posterior = Posterior(Target.from_module(net, "bernoulli"), draws_of(net, generator), {})
    x = torch.randn(6, 3, generator=generator, dtype=F64)
    found = posterior.predict(x)
    both = torch.cat([found.mean, 1 - found.mean], 1)
    torch.testing.assert_close(found.entropy, metrics.predictive_entropy(both))
    assert bool((found.mutual_information <= found.entropy).all())


def test_a_regression_has_no_entropy(regression: Posterior, x: Tensor) -> None:
    with pytest.raises(ValueError, match="not class probabilities"):
        _ = regression.predict(x).entropy


def test_quantiles_where_there_are_none(classifier: Posterior, generator: torch.Generator, x: Tensor) -> None:
    with pytest.raises(ValueError, match="class labels have no quantiles"):
        classifier.predict(x, levels=(0.5,))
    net = nn.Linear(3, 1).double()
    heavy = Posterior(Target.from_module(net, likelihoods.StudentT(2.0, scale=1.0)), draws_of(net, generator), {})
    assert heavy.predict(x).noise_variance is not None
    with pytest.raises(ValueError, match="not those of a normal mixture"):
        heavy.predict(x, levels=(0.5,))
    with pytest.raises(ValueError, match=r"levels = 1\.5 must lie between 0 and 1"):
        heavy.predict(x, levels=(1.5,))


def test_quantiles_of_student_t_noise(generator: torch.Generator, x: Tensor) -> None:
    net = nn.Linear(3, 1).double()
    heavy = Posterior(Target.from_module(net, likelihoods.StudentT(5.0, scale=0.5)), draws_of(net, generator), {})
    found = heavy.predict(x, levels=(0.1, 0.9), return_draws=True)
    each = stats.t(5.0, found.draws.flatten(0, 1).numpy(), 0.5)
    for level, at in zip((0.1, 0.9), found.quantile((0.1, 0.9)), strict=True):
        np.testing.assert_allclose(each.cdf(at.numpy()).mean(0), level, rtol=1e-9)


# ---------------------------------------------------------------- a user's function


def test_a_function_of_model_parameters_and_inputs(regression: Posterior, x: Tensor) -> None:
    def squared(model: Any, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return model(x).square() + params["likelihood.scale"]

    found = regression.predict(x, function=squared, levels=(0.5,), batch_size=4)
    each = by_hand(regression, x).square() + regression.draws["likelihood.scale"].flatten()[:, None, None]
    torch.testing.assert_close(found.mean, each.mean(0))
    torch.testing.assert_close(found.model_variance, each.var(0, correction=0))
    assert found.noise_variance is None
    torch.testing.assert_close(found.quantile(0.5), torch.quantile(each, 0.5, dim=0))  # over draws: there is no noise


def test_a_function_of_classes(classifier: Posterior, x: Tensor) -> None:
    found = classifier.predict(x, function=lambda model, params, x: model(x).softmax(1)[:, 0], levels=(0.05, 0.95))
    each = by_hand(classifier, x).softmax(-1)[..., 0]
    torch.testing.assert_close(found.interval(0.9)[1], torch.quantile(each, 0.95, dim=0))


def test_a_function_of_a_target_without_a_network(posterior_of_line: Posterior) -> None:
    x = torch.tensor([1.0, 2.0])
    found = posterior_of_line.predict(x, function=lambda model, params, x: model(x)["mean"] ** 2)
    slopes = posterior_of_line.draws["slope"].flatten()[:, None]
    torch.testing.assert_close(found.mean, (slopes * x).square().mean(0))


# ---------------------------------------------------------------- BatchNorm


@pytest.fixture
def normed(generator: torch.Generator) -> tuple[nn.Module, Posterior, list[tuple[Tensor, Tensor]]]:
    """A network with BatchNorm whose statistics are of other parameters, and training data in batches."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double().eval()
    posterior = Posterior(Target.from_module(net, "categorical"), draws_of(net, generator), {})
    data = torch.randn(30, 3, generator=generator, dtype=F64) * 2 + 1
    batches = [(part, torch.zeros(len(part), dtype=torch.int64)) for part in data.split(10)]
    return net, posterior, batches


def test_refreshed_statistics_are_those_of_torch(normed: Any, x: Tensor) -> None:
    net, posterior, batches = normed
    before = copy.deepcopy(net.state_dict())
    found = posterior.predict(x, refresh=batches, return_draws=True, batch_size=4)
    for k, draw in enumerate(posterior):
        model = copy.deepcopy(net)
        model.load_state_dict(model.state_dict() | draw)
        update_bn(batches, model)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(found.draws.flatten(0, 1)[k], model(x).softmax(1))
    stale = posterior.predict(x)
    assert not torch.allclose(found.mean, stale.mean, atol=0.01)
    for name, value in net.state_dict().items():  # the user's module is as it was
        assert torch.equal(value, before[name])
    torch.testing.assert_close(posterior.predict(x).mean, stale.mean)  # and so is the posterior


def test_statistics_travel_with_draws(normed: Any, x: Tensor) -> None:
    _, posterior, batches = normed
    fresh = posterior.refreshed(batches)
    assert set(fresh.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert fresh.buffers["1.running_mean"].shape == (CHAINS, DRAWS, 6)
    carried = Posterior(posterior.target, posterior.draws, {}, buffers=fresh.buffers)
    torch.testing.assert_close(carried.predict(x).mean, posterior.predict(x, refresh=batches).mean)
    y = torch.zeros(11, dtype=torch.int64)
    each = carried.predict(x, return_draws=True).draws
    torch.testing.assert_close(carried.log_likelihood((x, y)), each[..., 0].log())
    part = carried.select(chains=[1])
    torch.testing.assert_close(part.predict(x, return_draws=True).draws, each[1:])


def test_statistics_of_the_batch_are_warned_of(normed: Any, x: Tensor) -> None:
    net, posterior, batches = normed
    net.train()
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        target = Target.from_module(net, "categorical")
    training = Posterior(target, posterior.draws, {})
    with pytest.warns(UserWarning, match="layer '1'.*refresh="):
        training.predict(x)
    found = training.predict(x, refresh=batches)
    torch.testing.assert_close(found.mean, posterior.predict(x, refresh=batches).mean)


def test_what_cannot_be_refreshed(regression: Posterior, posterior_of_line: Posterior, normed: Any, x: Tensor) -> None:
    with pytest.raises(ValueError, match="no BatchNorm with running statistics"):
        regression.predict(x, refresh=[(x, x)])
    with pytest.raises(ValueError, match="has no network"):
        posterior_of_line.predict(torch.ones(2), refresh=[x])
    with pytest.raises(ValueError, match="yields no batches"):
        normed[1].predict(x, refresh=[])


# ---------------------------------------------------------------- refusals, devices, sets


def test_without_a_target(regression: Posterior, x: Tensor) -> None:
    alone = Posterior(None, regression.draws, {"method": "isgd"})
    assert "2 chains x 5 draws" in repr(alone)
    for act in (lambda: alone.predict(x), lambda: alone.log_predictive((x, x)), lambda: alone.trust((x, x))):
        with pytest.raises(ValueError, match=r"isosgd.load\(path, target="):
            act()


def test_bad_arguments(regression: Posterior, posterior_of_line: Posterior, x: Tensor) -> None:
    for size in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"batch_size = .* must be an integer of at least 1"):
            regression.predict(x, batch_size=size)
    with pytest.raises(TypeError, match="needs inputs with rows"):
        posterior_of_line.predict(3.0, batch_size=2)
    with pytest.raises(ValueError, match="a row for each input"):
        regression.predict(x, function=lambda model, params, x: model(x).mean(), batch_size=4)
    with pytest.raises(ValueError, match="have a 'mean'"):
        regression.predict(x, function=lambda model, params, x: {"middle": model(x)})
    with pytest.raises(TypeError, match="tensor or a dict of tensors, got float"):
        regression.predict(x, function=lambda model, params, x: 1.0)
    with pytest.raises(ValueError, match="must name some of 2 chains"):
        regression.select(chains=[2])
    with pytest.raises(ValueError, match="leaves none of 5 draws"):
        regression.select(draws=slice(5, None))


def test_chains_of_one_data_set(regression: Posterior) -> None:
    info = {"sets": 3, "chain_indices": [0, 1, 2, 5], "dropped": {3: "", 4: ""}, "rates": ["a", "b", "c", "d"]}
    draws = {name: x[:1].repeat(4, *(1,) * (x.ndim - 1)) for name, x in regression.draws.items()}
    several = Posterior(regression.target, draws, info)
    assert [several.of_set(i).num_chains for i in range(3)] == [2, 1, 1]
    assert several.of_set(0).info["rates"] == ["a", "b"] and several.of_set(2).info["chain_indices"] == [5]
    with pytest.raises(ValueError, match="no data set 3"):
        several.of_set(3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_draws_go_where_the_inputs_are(regression: Posterior, x: Tensor) -> None:
    there = regression.predict(x.cuda(), levels=(0.5,))
    here = regression.predict(x, levels=(0.5,))
    assert there.mean.is_cuda
    torch.testing.assert_close(there.mean.cpu(), here.mean)
    torch.testing.assert_close(there.quantile(0.5).cpu(), here.quantile(0.5))
