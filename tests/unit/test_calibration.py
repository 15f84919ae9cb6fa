"""Softmax temperatures and noise factors: predictions that are as sure as held-out examples say they should be."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import Posterior, SamplingWarning, Target, likelihoods, load, priors, sample
from isosgd.posterior.calibration import AVERAGES, leave_one_out, sharpest
from isosgd.target import Params
from isosgd.target.priors import Extra

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")

SURENESS = 3.0  # logits are so many times too large


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels drawn by the probabilities of a linear model whose logits are ``x``."""
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(count, 3, generator=generator)
    return x, x.softmax(1).multinomial(1, generator=generator)[:, 0]


def too_sure(draws: int = 5, spread: float = 0.0, sureness: float = SURENESS) -> Posterior:
    """Draws around the true model with logits that are too large."""
    model = nn.Linear(3, 3, bias=False)
    noise = spread * torch.randn(1, draws, 3, 3, generator=torch.Generator().manual_seed(3))
    return Posterior(
        Target.from_module(model, "categorical", priors.Normal(1.0)),
        {"weight": sureness * (torch.eye(3).expand(1, draws, 3, 3) + noise)},
        {"method": "isgd", "temperature": 1.0},
        starts=[{"weight": sureness * torch.eye(3)}],
    )


def test_the_temperature_that_is_known_is_found() -> None:
    found = too_sure().calibrated(*examples(20_000, 0))
    assert found.softmax_temperature == pytest.approx(SURENESS, rel=0.06)  # temperatures are a tenth apart
    new = examples(20_000, 1)
    assert found.predict(new[0]).mean == pytest.approx(new[0].softmax(1), abs=0.02)
    gain = found.log_predictive(new) - too_sure().log_predictive(new)
    assert float(gain.mean()) > 5 * float(gain.std()) / math.sqrt(len(gain))


@pytest.mark.parametrize("sureness", [0.2, 40.0])
def test_far_from_1_the_temperature_is_found_roughly(sureness: float) -> None:
    found = too_sure(sureness=sureness).calibrated(*examples(20_000, 0))
    assert abs(math.log(found.softmax_temperature / sureness)) < 0.3  # temperatures are half apart there


@pytest.mark.parametrize("sureness", [1e-3, 1e3])
def test_the_last_temperature_that_is_tried_is_warned_of(sureness: float) -> None:
    """By `calibrated` and by the call itself, where the start comes back."""
    posterior, held_out = too_sure(sureness=sureness), examples(2_000, 0)
    size = "unsure" if sureness < 1 else "sure"
    message = (
        f"softmax temperature .* is the last of those that are tried, 0.082 to 148: predictions are far too {size} "
    )
    with pytest.warns(SamplingWarning, match=message) as said:
        posterior.calibrated(*held_out)
    assert said[0].filename == __file__
    run: dict[str, Any] = {"draws": 4, "warmup": 200, "keep_every": 1, "batch_size": 50, "compile": False}
    with pytest.warns(SamplingWarning, match=message):
        sample(
            posterior.view.target, examples(300, 1), starts=posterior.starts, held_out=held_out, ladder=[1e-12],
            progress=False, **run,
        )  # fmt: skip


def test_all_predictions_are_of_the_same_logits() -> None:
    """Averages, densities, outcomes and entropies, and those of parts of the draws."""
    posterior = too_sure(draws=6, spread=0.3).at_softmax_temperature(2.0)
    x, y = examples(50, 2)
    each = torch.stack([(x @ w.T / 2).softmax(1) for w in posterior.draws["weight"][0]])
    found = posterior.predict(x, return_draws=True)
    torch.testing.assert_close(found.mean, each.mean(0))
    assert found.draws is not None
    torch.testing.assert_close(found.draws[0], each)
    torch.testing.assert_close(found.expected_entropy, torch.special.entr(each).sum(2).mean(0))
    of_label = each[:, torch.arange(50), y]
    torch.testing.assert_close(posterior.log_likelihood((x, y))[0], of_label.log())
    torch.testing.assert_close(posterior.log_predictive((x, y)), of_label.mean(0).log())
    one = posterior.select(draws=slice(0, 1)).predict(x).mean
    torch.testing.assert_close(one, each[0])
    drawn = posterior.simulate(x[:1].expand(4_000, 3))[0]
    share = torch.stack([(drawn == k).double().mean(1) for k in range(3)], 1)
    assert float((share - each[:, 0]).abs().max()) < 5 * 0.5 / math.sqrt(4_000)
    beside = posterior.with_starts(0.5)
    assert beside.softmax_temperature == 2.0
    torch.testing.assert_close(beside.predict(x).mean, 0.5 * each.mean(0) + 0.5 * (SURENESS * x / 2).softmax(1))


def test_a_head_whose_features_are_shared_is_scaled_too() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    target = Target.from_module(model, "categorical", priors.Normal(1.0), sampled="last_layer")
    run: dict[str, Any] = {"draws": 3, "warmup": 100, "batch_size": 20, "progress": False, "compile": False}
    posterior = sample(target, examples(100, 0), **run, keep_every=20)
    x, _ = examples(20, 1)
    plain = posterior.predict(x, return_draws=True).draws
    scaled = posterior.at_softmax_temperature(2.0).predict(x, return_draws=True).draws
    assert plain is not None and scaled is not None
    torch.testing.assert_close(scaled, (plain.log() / 2).softmax(-1))


def test_what_is_sampled_is_judged_as_it_was_sampled() -> None:
    target = Target.from_module(nn.Linear(3, 3), "categorical", priors.Normal(1.0))
    data = examples(200, 0)
    posterior = sample(target, data, draws=60, warmup=300, keep_every=5, batch_size=50, compile=False, progress=False)
    scaled = posterior.at_softmax_temperature(3.0)
    assert scaled.trust().as_dict() == posterior.trust().as_dict()
    assert scaled.summary().as_dict() == posterior.summary().as_dict()
    assert scaled.trust(held_out=data).temperature == posterior.trust(held_out=data).temperature


@pytest.mark.parametrize("seed", range(5))
def test_few_examples_that_are_all_right_do_not_make_a_network_surer(seed: int) -> None:
    """Nor does one that is wrong make it much less sure."""
    x, _ = examples(40, seed)
    model, right = too_sure(), x.argmax(1)
    assert 0.9 < model.calibrated(x, right).softmax_temperature < 1.1
    wrong = torch.where(torch.arange(40) == 0, x.argmin(1), right)
    assert 0.9 < model.calibrated(x, wrong).softmax_temperature < 1.5
    many = x.repeat(100, 1)
    assert model.calibrated(many, many.argmax(1)).softmax_temperature < 0.7


def test_yes_or_no() -> None:
    """Logits of one output, twice too large."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(10_000, 1, generator=generator)
    y = x.sigmoid().bernoulli(generator=generator)
    target = Target.from_module(nn.Linear(1, 1, bias=False), "bernoulli", priors.Normal(1.0))
    posterior = Posterior(target, {"weight": torch.full((1, 1, 1, 1), 2.0)}, {})
    found = posterior.calibrated(x, y)
    assert found.softmax_temperature == pytest.approx(2.0, rel=0.1)
    torch.testing.assert_close(found.predict(x).mean, (2 * x / found.softmax_temperature).sigmoid())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_other_temperatures_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"softmax temperature = {value!r} must be a positive number"):
        too_sure().at_softmax_temperature(value)


def test_numbers_have_no_softmax_temperature_and_classes_no_noise_factor() -> None:
    with pytest.raises(ValueError, match="a softmax temperature is for classes"):
        regression("gaussian").at_softmax_temperature(2.0)
    with pytest.raises(ValueError, match="a noise factor is for regressions"):
        too_sure().at_noise_factor(2.0)
    with pytest.raises(ValueError, match="noise factor = -1 must be a positive number"):
        regression("gaussian").at_noise_factor(-1)
    with pytest.raises(ValueError, match="predictions under Gaussian have no noise factor"):
        regression(likelihoods.Gaussian(0.1)).calibrated(torch.zeros(3, 2), torch.zeros(3, 2))


def test_a_trained_network_that_is_too_sure_comes_back_calibrated() -> None:
    """Its own draws are left: the chain cannot improve on the true model."""
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(SURENESS * torch.eye(3))
    target = Target.from_module(model, "categorical", priors.Normal(1.0))
    run: dict[str, Any] = {"draws": 4, "warmup": 200, "keep_every": 1, "batch_size": 50, "compile": False}
    posterior = sample(
        target, examples(300, 0), starts=[model], held_out=examples(2_000, 1), ladder=[1e-8], progress=False, **run
    )
    assert posterior.softmax_temperature == pytest.approx(SURENESS, rel=0.15)
    choice = posterior.info["temperature_choice"]
    assert choice["start_width"] == pytest.approx(SURENESS, rel=0.15)
    assert choice["calibrated_nll"] < choice["start_nll"] and "softmax temperature" in choice["reason"]
    new = examples(20_000, 2)
    found = posterior.against_start(*new)
    assert found.helps and found.average.ece < 0.5 * found.start.ece


def test_examples_that_cannot_be_scored_are_refused() -> None:
    """By the call itself, too: what is not a number would choose any temperature."""
    posterior, (x, y) = too_sure(), examples(40, 0)
    broken = torch.where(torch.arange(40)[:, None] == 7, math.nan, x)
    for inputs, labels, message in ((broken, y, "NaN"), (x, y.float(), "integers"), (x, y + 5, "label")):
        with pytest.raises(ValueError, match=message):
            posterior.calibrated(inputs, labels)
    model = nn.Linear(3, 3, bias=False)
    target = Target.from_module(model, "categorical", priors.Normal(1.0))
    with pytest.raises(ValueError, match="NaN"):
        sample(target, (x, y), starts=[model], held_out=(broken, y), batch_size=10, progress=False)


def test_classes_that_a_network_masks_out_do_not_make_it_surer() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.inner(x), torch.full((len(x), 2), -math.inf)], 1)

    x, _ = examples(40, 1)
    target = Target.from_module(Masked(), "categorical", priors.Normal(1.0))
    posterior = Posterior(target, {"inner.weight": SURENESS * torch.eye(3).expand(1, 2, 3, 3)}, {})
    assert 0.9 < posterior.calibrated(x, x.argmax(1)).softmax_temperature < 1.1


def test_another_weight_of_the_starts_keeps_the_temperature() -> None:
    both = too_sure(draws=6, spread=0.3).with_starts(0.5).at_softmax_temperature(2.0)
    again = both.with_starts(0.25)
    assert again.softmax_temperature == 2.0 and again.info["from_start"] == 2


def test_the_first_draws_of_each_chain_are_averaged() -> None:
    posterior = too_sure(draws=6, spread=0.3)
    three = Posterior(posterior.target, {"weight": posterior.draws["weight"].reshape(2, 3, 3, 3)}, {})
    batch = examples(30, 4)
    found = three.densities(batch, [3, 1], batch_size=7)
    for i, some in enumerate((three, three.select(draws=slice(0, 1)))):
        for index in (found.one, 3, 20):
            scaled = some.at_softmax_temperature(found.widths[index])
            wanted = scaled.log_predictive(batch).double()
            torch.testing.assert_close(found.values[index, i], wanted, rtol=1e-5, atol=1e-5)


def test_logits_that_say_nothing_are_left_as_they_are() -> None:
    model = nn.Linear(4, 2)
    flat = Posterior(
        Target.from_module(model, "categorical"), {"weight": torch.zeros(1, 2, 2, 4), "bias": torch.zeros(1, 2, 2)}, {}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flat.calibrated(torch.randn(50, 4), torch.arange(50) % 2).softmax_temperature == 1.0


# ------------------------------------------------------------------------------------------------- noise factors

NOISE, SAID = 0.6, 0.2  # standard deviation of the noise, and what the draws say it is


class Wide(nn.Module):
    """Two means, and logarithms of squared noise scales for each."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x)
        return torch.stack([mean, torch.full_like(mean, 2 * math.log(SAID))], -1)


def regression(likelihood: Any) -> Posterior:
    """Draws at the true model, with noise that is too small."""
    wide = likelihood == "heteroscedastic"
    target = Target.from_module(Wide() if wide else nn.Linear(2, 2, bias=False), likelihood, priors.Normal(1.0))
    draws = {"mean.weight" if wide else "weight": torch.eye(2).expand(1, 4, 2, 2)}
    if target.noise_scales():
        draws["likelihood.scale"] = torch.full((1, 4), SAID)
    return Posterior(target, draws, {"method": "hmc", "temperature": 1.0})


def responses(count: int, seed: int, df: float = math.inf) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(count, 2, generator=generator), torch.randn(count, 2, generator=generator)
    if df < math.inf:
        noise /= (torch._standard_gamma(torch.full((count, 2), df / 2), generator) * 2 / df).sqrt()
    return x, x + NOISE * noise


@pytest.mark.parametrize(
    ("likelihood", "df"), [("gaussian", math.inf), (likelihoods.StudentT(5.0), 5.0), ("heteroscedastic", math.inf)]
)
def test_the_noise_factor_that_is_known_is_found(likelihood: Any, df: float) -> None:
    plain = regression(likelihood)
    found = plain.calibrated(*responses(5_000, 0, df))
    assert found.noise_factor == pytest.approx(NOISE / SAID, rel=0.06)  # factors are a tenth apart
    assert found.softmax_temperature == 1
    x, y = responses(5_000, 1, df)
    gain = found.log_predictive((x, y)) - plain.log_predictive((x, y))
    assert float(gain.mean()) > 5 * float(gain.std()) / math.sqrt(len(gain))
    usual = found.noise_factor**2 * plain.predict(x).variance  # type: ignore[operator]
    torch.testing.assert_close(found.predict(x).variance, usual)
    torch.testing.assert_close(found.predict(x).mean, plain.predict(x).mean)
    apart = found.simulate(x)[0, 0] - x
    assert float(apart.square().mean()) == pytest.approx(float(usual.mean()), rel=0.1)
    torch.testing.assert_close(found.at_noise_factor(1.0).log_predictive((x, y)), plain.log_predictive((x, y)))


def test_intervals_hold_what_they_should_hold_with_a_noise_factor() -> None:
    found = regression("gaussian").calibrated(*responses(5_000, 0))
    x, y = responses(5_000, 1)
    low, high = found.predict(x, levels=(0.05, 0.95)).interval(0.9)
    inside = ((y > low) & (y < high)).float().mean()
    assert float(inside) == pytest.approx(0.9, abs=0.02)  # by the distance of a tenth between factors; error 0.004


def test_noise_is_never_made_smaller_and_not_larger_by_two_outliers() -> None:
    found, x = regression("gaussian"), torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    assert found.calibrated(x, x).noise_factor == 1.0
    y = x + SAID * torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    y[3:5] += 5.0
    assert found.calibrated(x, y).noise_factor < 1.3


@dataclass(frozen=True)
class Named(likelihoods.Gaussian):
    """Noise of two sampled scales with names of their own."""

    def extra(self) -> dict[str, Extra]:
        both = ("likelihood.one", "likelihood.two")
        return {name: Extra(torch.tensor(SAID), priors.HalfNormal(1.0), noise_scale=True) for name in both}

    def scale_at(self, params: Params) -> Tensor:
        return torch.stack([params["likelihood.one"], params["likelihood.two"]])


@dataclass(frozen=True)
class Kept(Named):
    """The same, not to be calibrated."""

    @property
    def has_width(self) -> bool:
        return False


def test_noise_scales_of_other_names_are_multiplied_too() -> None:
    for likelihood in (Named(), Kept()):
        target = Target.from_module(nn.Linear(2, 2, bias=False), likelihood, priors.Normal(1.0))
        draws = {"weight": torch.eye(2).expand(1, 4, 2, 2)}
        scales = {name: torch.full((1, 4), SAID) for name in ("likelihood.one", "likelihood.two")}
        plain = Posterior(target, {**draws, **scales}, {})
        if isinstance(likelihood, Kept):
            with pytest.raises(ValueError, match="predictions under Kept have no noise factor"):
                plain.calibrated(*responses(500, 0))
            continue
        found = plain.calibrated(*responses(5_000, 0))
        assert found.noise_factor == pytest.approx(NOISE / SAID, rel=0.06)
        usual = torch.full((3, 2), (SAID * found.noise_factor) ** 2)
        torch.testing.assert_close(found.predict(torch.zeros(3, 2)).variance, usual)


def test_likelihoods_derived_from_ours_are_calibrated_like_them() -> None:
    class Own(likelihoods.Categorical):
        pass

    found = Posterior(
        Target.from_module(nn.Linear(3, 3, bias=False), Own(), priors.Normal(1.0)), too_sure().draws, {}
    ).calibrated(*examples(20_000, 0))
    assert found.softmax_temperature == pytest.approx(SURENESS, rel=0.06) and found.noise_factor == 1


@pytest.mark.parametrize("likelihood", ["poisson", "tokens", lambda output, y: -(output - y).square().sum(1)])
def test_other_predictions_have_neither(likelihood: Any) -> None:
    draws = {"weight": torch.zeros(1, 2, 2, 2)}
    found = Posterior(Target.from_module(nn.Linear(2, 2, bias=False), likelihood), draws, {})
    for change in (found.at_softmax_temperature, found.at_noise_factor, found.at_width):
        with pytest.raises(ValueError, match=r"predictions under .* have no (softmax temperature|noise factor): make"):
            change(2.0)


def test_examples_that_were_impossible_widen_the_noise() -> None:
    """Their log densities are minus infinity in float32."""
    model = Wide()
    target = Target.from_module(model, "heteroscedastic", priors.Normal(1.0))
    x, y = responses(500, 0)
    posterior = Posterior(target, {"mean.weight": torch.eye(2).expand(1, 2, 2, 2)}, {})
    far = y + 1e20
    assert posterior.log_predictive((x, far)).isneginf().all()
    with pytest.warns(SamplingWarning, match="noise factor 148 is the last"):
        assert posterior.calibrated(x, far).noise_factor > 100


def test_densities_of_numbers_are_those_at_each_noise_factor() -> None:
    found, batch = regression(likelihoods.Gaussian(outputs=2)), responses(30, 2)
    found.draws["likelihood.scale"] = torch.tensor([0.2, 0.4]).expand(1, 4, 2)
    at = found.densities(batch, batch_size=7)
    for index in (at.one, 3, 20):
        wanted = found.at_noise_factor(at.widths[index]).log_predictive(batch).double()
        torch.testing.assert_close(at.values[index, 0], wanted, rtol=1e-5, atol=1e-5)


def test_a_regression_that_is_too_sure_is_calibrated_by_the_call_itself(tmp_path: Path) -> None:
    """By a network with 60 units on 40 rows, trained until the noise is fitted. A stored run keeps the factor."""
    torch.manual_seed(0)
    x = torch.randn(2_140, 1)
    y = x.sin() + 0.3 * torch.randn(2_140, 1)
    train, held_out, new = ((x[part], y[part]) for part in (slice(40), slice(40, 140), slice(140, None)))
    model = nn.Sequential(nn.Linear(1, 60), nn.Tanh(), nn.Linear(60, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3_000):
        optimizer.zero_grad()
        (model(train[0]) - train[1]).square().mean().backward()
        optimizer.step()
    start = {**model.state_dict(), "likelihood.scale": (model(train[0]) - train[1]).std().detach()}
    target = Target.from_module(model, "gaussian", priors.Normal(10.0))
    found = sample(
        target, train, starts=[start], held_out=held_out, method="hmc", warmup=900, draws=8, keep_every=4,
        store=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert found.noise_factor > 1.2
    choice = found.info["temperature_choice"]
    assert choice["start_width"] > 1.2 and "noise factor" in choice["reason"]
    assert found.against_start(*new).helps
    again = load(tmp_path / "run", target)
    assert again.noise_factor == found.noise_factor
    torch.testing.assert_close(again.log_predictive(new), found.log_predictive(new))
    assert load(tmp_path / "run", target, as_drawn=True).noise_factor == 1


def test_an_example_that_is_left_out_is_predicted_by_the_posterior_of_the_others() -> None:
    """Of a coin with a flat prior that is known: the share of heads among the others, and two more throws."""
    heads, throws, draws = 3, 12, 200_000
    drawn = torch.distributions.Beta(1.0 + heads, 1.0 + throws - heads)
    torch.manual_seed(0)
    heads_by_draw = drawn.sample((draws,)).double()
    y = torch.tensor([1, 0])  # a throw with heads, and one without
    said = torch.stack([1 - heads_by_draw, heads_by_draw], -1).unsqueeze(1).expand(draws, 2, 2)
    found = leave_one_out(said, y).exp()[:, 1]
    wanted = torch.tensor([heads / (throws + 1), (heads + 1) / (throws + 1)], dtype=torch.float64)
    for k, p in enumerate((heads_by_draw, 1 - heads_by_draw)):
        weight = 1 / p
        error = (weight * (heads_by_draw - wanted[k])).std() / weight.mean() / math.sqrt(draws)
        assert abs(found[k] - wanted[k]) < 4 * error


def test_one_draw_that_is_sure_of_another_class_changes_little() -> None:
    said = torch.tensor([0.9, 0.1], dtype=torch.float64).repeat(400, 1, 1)
    said[0] = torch.tensor([1e-20, 1.0])
    assert leave_one_out(said, torch.tensor([0])).exp()[0, 0] > 0.8


def test_a_few_examples_that_are_right_make_nothing_as_sure_as_can_be() -> None:
    logs = torch.tensor([[0.8, 0.1, 0.1]]).log()
    few, many = (sharpest(logs.expand(n, 3), torch.zeros(n, dtype=torch.long)) for n in (10, 10_000))
    assert min(AVERAGES) < few < 1 and many < few


@pytest.mark.parametrize("scale", [0.45, 1.0, 2.0])
def test_the_temperature_of_averages_is_found(scale: float) -> None:
    x, y = examples(20_000, 1)
    assert sharpest((scale * x).log_softmax(1), y) == pytest.approx(scale, rel=0.06)
