"""The temperature meter and the verdict: gradients at draws, the identity, thresholds, words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isosgd import Posterior, Target, likelihoods, priors
from isosgd.diagnostics import Reading
from isosgd.diagnostics.meter import anisotropy, directions, readings
from isosgd.diagnostics.summary import summary_of
from isosgd.diagnostics.verdict import judge, off
from isosgd.posterior.temperature import DrawGradients

F64 = torch.float64


# ---------------------------------------------------------------- gradients at draws


@pytest.fixture
def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(40, 3, generator=generator, dtype=F64), torch.randn(40, 1, generator=generator, dtype=F64)


@pytest.fixture
def network(data: tuple[Tensor, Tensor], generator: torch.Generator) -> Posterior:
    return network_of(nn.Sequential, data, generator)


def network_of(kind: type[nn.Sequential], data: tuple[Tensor, Tensor], generator: torch.Generator) -> Posterior:
    net = kind(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    draws: dict[str, Tensor] = {
        name: torch.randn(2, 9, *p.shape, generator=generator, dtype=F64) for name, p in net.named_parameters()
    }
    draws["likelihood.scale"] = 0.5 + torch.rand(2, 9, generator=generator, dtype=F64)
    return Posterior(Target.from_module(net, "gaussian"), draws, {}, data)


def full_gradient(posterior: Posterior, data: Any) -> Tensor:
    """Of f in free parameters, by differentiating the log joint density itself."""
    target = posterior.target
    assert target is not None
    found = []
    for natural in posterior:
        free = {name: x.detach().requires_grad_() for name, x in target.unconstrain(natural).items()}
        f = -target.log_likelihood(free, data).sum() - target.log_prior(free)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(f, list(free.values()))]))
    return torch.stack(found)


def gradients_at(posterior: Posterior, data: Any, rows: int | None, seed: int) -> DrawGradients:
    return DrawGradients(posterior._stack, posterior.view, data, posterior.info.get("num_data"), rows, seed)


def all_of(gradients: DrawGradients) -> Tensor:
    return torch.cat([slope for _, _, slope in gradients.blocks()])


class Looking(nn.Sequential):
    """Looks at a number, so that it takes draws one at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(self[0].bias.detach()[0]) < 1e6 else 0.0)


@pytest.mark.parametrize("rows", [40, 5_000])
@pytest.mark.parametrize("kind", [nn.Sequential, Looking])
def test_gradients_are_of_the_potential_in_free_parameters(
    kind: type[nn.Sequential], rows: int, generator: torch.Generator
) -> None:
    """Of data in one part, or more than are worked on at once; and of draws at once, or one by one."""
    data = torch.randn(rows, 3, generator=generator, dtype=F64), torch.randn(rows, 1, generator=generator, dtype=F64)
    posterior = network_of(kind, data, generator)
    torch.testing.assert_close(all_of(gradients_at(posterior, data, None, 0)), full_gradient(posterior, data))


def test_gradients_of_a_loader(network: Posterior, data: tuple[Tensor, Tensor]) -> None:
    loader = DataLoader(TensorDataset(*data), batch_size=16, shuffle=True)
    torch.testing.assert_close(all_of(gradients_at(network, loader, None, 0)), full_gradient(network, data))
    some = all_of(gradients_at(network, loader, 16, 0))
    assert some.shape == (18, 22) and bool(some.isfinite().all())
    with pytest.raises(ValueError, match="yields no batches"):
        all_of(gradients_at(Posterior(network.target, network.draws, {"num_data": 40}), [], 8, 0))


def test_gradients_of_fresh_examples_are_unbiased(network: Posterior, data: tuple[Tensor, Tensor]) -> None:
    one = network.select(chains=[0], draws=slice(0, 1))
    expected = full_gradient(one, data)[0]
    found = torch.stack([all_of(gradients_at(one, data, 10, seed))[0] for seed in range(80)])
    z = (found.mean(0) - expected) / (found.std(0) / math.sqrt(len(found)))
    assert float(z.abs().max()) < 4.5  # the largest of 22
    assert not torch.equal(found[0], found[1])


# ---------------------------------------------------------------- a posterior whose draws are exact


def exact(
    count: tuple[int, int], seed: int, temperature: float = 1.0, heat: Tensor | float = 1.0, rho: float = 0.0
) -> Posterior:
    """Draws of a linear regression's posterior with ``rho`` between successive ones, heated by a factor."""
    g = torch.Generator().manual_seed(99)
    x = torch.randn(60, 6, generator=g, dtype=F64) * torch.linspace(0.5, 1.5, 6, dtype=F64)
    y = x @ torch.ones(6, dtype=F64) + torch.randn(60, generator=g, dtype=F64)
    precision = x.T @ x + torch.eye(6, dtype=F64)
    mean = torch.linalg.solve(precision, x.T @ y)
    values, vectors = torch.linalg.eigh(precision)
    z = torch.randn(*count, 6, generator=torch.Generator().manual_seed(seed), dtype=F64)
    for t in range(1, count[1]):
        z[:, t] = rho * z[:, t - 1] + math.sqrt(1 - rho**2) * z[:, t]
    draws = mean + (z * (temperature * torch.as_tensor(heat) / values).sqrt()) @ vectors.T
    target = Target(
        lambda p, b: -0.5 * (b[1] - b[0] @ p["w"]) ** 2, priors.Normal(1.0), init={"w": torch.zeros(6, dtype=F64)}
    )
    return Posterior(target, {"w": draws}, {"temperature": temperature, "num_data": 60}, data=(x, y))


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_exact_draws_are_trusted(temperature: float) -> None:
    found = exact((4, 200), 0, temperature).trust()
    assert found.trusted and found.summary == "trust it", str(found)
    whole = found.readings[0]
    assert abs(whole.temperature / temperature - 1) < 0.05 + 3 * whole.error / temperature
    assert whole.error / temperature < 0.03


@pytest.mark.long
def test_few_draws_bring_no_bias() -> None:
    """Each half takes its centre from the other; a mean of the same draws would read 1 - 1/8 here."""
    found = np.array([exact((1, 8), seed).trust(rows=60).readings[0].temperature for seed in range(100)])
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - 1.0) < 4 * error
    assert 4 * error < 1 / 8  # so that the bias would show


def test_standard_errors_are_right() -> None:
    """Readings of correlated draws are off by their standard errors: their ratio is a standard normal."""
    found = [exact((4, 100), seed, rho=0.5).trust().readings[0] for seed in range(25)]
    z = np.array([(r.temperature - 1.0) / r.error for r in found])
    assert 0.6 < z.std() < 1.4 and abs(z.mean()) < 0.6


def test_fresh_examples_will_do() -> None:
    found = exact((4, 400), 0).trust(rows=20)
    assert found.readings[0].error < 0.06
    assert abs(found.readings[0].temperature - 1.0) < 4 * found.readings[0].error


@pytest.mark.parametrize("heat", [0.5, 1.6])
def test_a_wrong_temperature_is_found(heat: float) -> None:
    found = exact((4, 200), 1, 0.1, heat).trust()
    assert found.summary == "it samples something else"
    assert f"times its target {0.1:g}" in found.reasons[0] and found.fixes
    assert found.readings[0].temperature == pytest.approx(0.1 * heat, rel=0.1)


def test_heat_that_the_mean_hides_is_found() -> None:
    """Half of the directions twice as hot, half without: the temperature over all is right."""
    heat = torch.tensor([1.9, 0.1, 1.9, 0.1, 1.9, 0.1], dtype=F64)
    found = exact((4, 250), 0, heat=heat).trust()
    assert found.readings[0].temperature == pytest.approx(1.0, abs=0.1)
    assert found.summary == "it samples something else" and "not the same in all directions" in found.reasons[0]
    assert found.anisotropy > 0.5
    assert exact((4, 250), 0).trust().anisotropy < 0.15


def test_draws_that_are_off_centre_are_found() -> None:
    """At the right temperature around the wrong place, as under another prior."""
    posterior = exact((4, 250), 0)
    sd = posterior.draws["w"].std((0, 1))
    moved = Posterior(posterior.target, {"w": posterior.draws["w"] + sd}, posterior.info, posterior.data)
    found = moved.trust()
    assert found.readings[0].temperature == pytest.approx(1.0, abs=0.1)
    assert found.summary == "it samples something else" and "off centre" in found.reasons[0]


def test_a_positive_parameter_is_read_in_the_free_one() -> None:
    """A rate with a conjugate prior: at temperature T its logarithm has density exp(-f/T), Jacobian included."""
    y = torch.tensor([0.3, 1.2, 0.7, 2.2, 0.4], dtype=F64)
    a, b = 2.0, 1.0
    target = Target(
        lambda p, batch: p["rate"].log() - p["rate"] * batch[0],
        lambda p: (a - 1) * p["rate"].log() - b * p["rate"],
        positive=["rate"],
        init={"rate": torch.tensor(1.0, dtype=F64)},
    )
    for temperature in (1.0, 0.3):
        torch.manual_seed(0)
        gamma = torch.distributions.Gamma(
            torch.tensor((a + 5) / temperature, dtype=F64), torch.tensor((b + float(y.sum())) / temperature, dtype=F64)
        )
        posterior = Posterior(target, {"rate": gamma.sample((4, 500))}, {"temperature": temperature}, data=(y,))
        whole = posterior.trust().readings[0]
        assert abs(whole.temperature - temperature) < 4 * whole.error < 0.3 * temperature


def test_layers_are_read_one_by_one(network: Posterior, data: tuple[Tensor, Tensor]) -> None:
    found = network.trust(data)
    assert [(r.name, r.size) for r in found.readings] == [("all", 22), ("0", 16), ("2", 5), ("likelihood.scale", 1)]
    total = sum(r.temperature * r.size for r in found.readings[1:]) / 22
    assert found.readings[0].temperature == pytest.approx(total)
    assert found.summary != "trust it"  # these draws are made up


# ---------------------------------------------------------------- run longer


def test_few_effective_draws() -> None:
    found = exact((4, 100), 0, rho=0.97).trust()
    assert found.summary == "run longer" and "effective draws" in " ".join(found.reasons)


def test_a_chain_on_its_way_is_asked_to_run_longer() -> None:
    """Draws that come down from a bad start look hot, but less and less."""
    posterior = exact((4, 200), 0)
    decay = 8.0 * torch.exp(-torch.arange(200, dtype=F64) / 30)[None, :, None]
    moving = Posterior(posterior.target, {"w": posterior.draws["w"] + decay}, posterior.info, posterior.data)
    found = moving.trust()
    assert found.summary == "run longer", str(found)


def test_chains_that_have_not_spread_are_asked_to_run_longer() -> None:
    """Too cold, but only in directions in which the chains have not come round."""
    g = torch.Generator().manual_seed(0)
    precision = torch.tensor([1e-4] * 6 + [1.0] * 2, dtype=F64)
    target = Target(
        lambda p, b: -0.5 * (precision * (p["w"] - b[0]) ** 2).sum(-1),
        lambda p: 0.0 * p["w"].sum(),
        init={"w": torch.zeros(8, dtype=F64)},
    )
    walk = 0.3 * torch.randn(4, 300, 8, generator=g, dtype=F64).cumsum(1)  # a random walk, far from the width of 100
    walk[..., 6:] = torch.randn(4, 300, 2, generator=g, dtype=F64)
    found = Posterior(target, {"w": walk}, {}, data=(torch.zeros(1, 8, dtype=F64),)).trust()
    assert found.readings[0].temperature < 0.5
    assert found.summary == "run longer" and "not mixed in" in " ".join(found.reasons)
    cold = walk.clone()
    cold[..., 6:] *= 0.3  # and where they have come round it is too cold indeed
    found = Posterior(target, {"w": cold}, {}, data=(torch.zeros(1, 8, dtype=F64),)).trust()
    assert found.summary == "it samples something else"


# ---------------------------------------------------------------- other faults, remarks, words


def test_chains_that_share_their_noise() -> None:
    posterior = exact((4, 200), 0)
    same = posterior.draws["w"][:1].repeat(4, 1, 1)
    found = Posterior(posterior.target, {"w": same}, posterior.info, posterior.data).trust()
    assert found.summary == "it samples something else" and "move together" in found.reasons[0]


def test_remarks_of_the_warm_up() -> None:
    group = {"name": "w", "predicted_bias": 0.3, "clipped_share": 0.2, "tail_index": 1.2, "noise_share": 0.5}
    reports = [
        {"settled": False, "reason": "too short", "groups": [group]},
        {"settled": True, "reason": "", "groups": [group | {"predicted_bias": 0.0, "tail_index": math.nan}]},
    ]
    posterior = exact((2, 200), 0)
    posterior.info["warmup"] = reports
    found = posterior.trust()
    assert found.warmup["w"] == {
        "predicted_bias": 0.3, "clipped_share": 0.2, "noise_share": 0.5, "tail_index": 1.2,
    }  # fmt: skip
    said = " ".join(found.remarks)
    settled = "1 of 2 chains did not settle; the draws agree nevertheless"
    for words in (settled, "20% of the gradient noise", "30% too large", "1.20"):
        assert words in said
    doubted = posterior.trust(ess=1e6)
    assert doubted.summary == "run longer" and "1 of 2 chains did not settle: too short" in " ".join(doubted.remarks)


def test_a_verdict_is_strict_json_and_readable() -> None:
    found = exact((2, 100), 0).trust()
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["summary"] == found.summary and again["readings"][0]["name"] == "all"
    assert str(found).startswith(found.summary.capitalize())
    assert f"target {found.temperature:g}" in str(found)
    json.dumps(replace(found, anisotropy=math.nan, rhat=math.inf).as_dict(), allow_nan=False)


def test_errors_that_are_large_at_any_temperature_are_no_heat() -> None:
    """Along a direction of a network's posterior: readings of chains that are right were 4.2 ± 1 and 14 ± 6.5."""
    for temperature, error in ((4.16, 1.0), (13.9, 6.5)):
        reading = Reading("stiff 1, late", 1, temperature, error, 180.0, temperature, temperature)
        assert off(reading, 1.0, 70, 0.25) == 0
    hot = Reading("flat 1, late", 1, 4.16, 4.16 * math.sqrt(2 / 180), 180.0, 4.16, 4.16)  # a mean of squares
    assert off(hot, 1.0, 70, 0.25) == 1
    assert off(replace(hot, ess=30.0, error=4.16 * math.sqrt(2 / 30), temperature=40.0), 1.0, 70, 0.25) == 1


def test_few_draws_or_none_moving_do_not_break_it() -> None:
    quiet = summary_of({"x": ("prediction", np.ones((2, 10)))})
    readings_ = (Reading("all", 1, math.nan, math.nan, 1.0, math.nan, math.nan),)
    assert judge(1.0, readings_, (), quiet).summary == "run longer"
    assert math.isnan(anisotropy((), 1.0))


def test_noise_does_not_pass_for_heat_in_many_dimensions(generator: torch.Generator) -> None:
    """Directions fitted to the draws they are read on would read far above 1 in 200 dimensions from 100 draws."""
    theta = torch.randn(4, 50, 200, generator=generator)
    found = directions(theta, theta, 1.0)
    z = np.array([(r.temperature - 1.0) / r.error for r in found])
    assert len(z) == 34 and np.abs(z).max() < 4.5
    assert readings(["all"], [200], (theta**2).sum(-1, keepdim=True).double().numpy(), 1.0)[0].error < 0.02


def _with_nan(posterior: Posterior) -> Posterior:
    draws = posterior.draws["w"].clone()
    draws[1, 5, 0] = math.nan
    return Posterior(posterior.target, {"w": draws}, {}, posterior.data)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda p: Posterior(p.target, p.draws, {}).trust(), "pass them, posterior.trust"),
        (lambda p: p.select(draws=slice(0, 7)).trust(), "7 draws of a chain are too few"),
        (lambda p: p.trust(temperature=0.0), "temperature = 0.0 must be positive"),
        (lambda p: Posterior(p.target, p.draws, {"sets": 2}, p.data).trust(), "of_set"),
        (lambda p: _with_nan(p).trust(), "draw 5 of chain 1, or the gradient there, is not finite"),
    ],
)
def test_bad_input_is_refused(act: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        act(exact((2, 60), 0))


def test_known_scales_leave_one_layer() -> None:
    net = nn.Sequential(nn.Linear(2, 1)).double()
    g = torch.Generator().manual_seed(0)
    draws = {name: torch.randn(2, 10, *p.shape, generator=g, dtype=F64) for name, p in net.named_parameters()}
    batch = torch.randn(5, 2, generator=g, dtype=F64), torch.randn(5, 1, generator=g, dtype=F64)
    found = Posterior(Target.from_module(net, likelihoods.Gaussian(1.0)), draws, {}).trust(batch)
    assert [r.name for r in found.readings] == ["all"]
