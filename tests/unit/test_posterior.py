"""Predictions: moments over draws as one would compute them by hand, in natural parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, likelihoods, priors

F64 = torch.float64
CHAINS, DRAWS = 2, 3


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    return torch.distributions.Normal(params["slope"] * x, params["sigma"]).log_prob(y)


@pytest.fixture
def posterior(generator: torch.Generator) -> Posterior:
    """A line with a positive noise scale, at made-up draws."""
    target = Target(
        log_likelihood,
        {"slope": priors.Normal(1.0), "sigma": priors.HalfNormal(1.0)},
        positive=["sigma"],
        init={"slope": torch.tensor(0.0, dtype=F64), "sigma": torch.tensor(1.0, dtype=F64)},
        predict=lambda params, x: {"mean": params["slope"] * x, "variance": params["sigma"].square().expand_as(x)},
    )
    draws = {
        "slope": torch.randn(CHAINS, DRAWS, generator=generator, dtype=F64),
        "sigma": 0.5 + torch.rand(CHAINS, DRAWS, generator=generator, dtype=F64),
    }
    return Posterior(target, draws, {"method": "isgd"})


def test_size_and_order(posterior: Posterior) -> None:
    assert (posterior.num_chains, posterior.num_draws, len(posterior)) == (CHAINS, DRAWS, CHAINS * DRAWS)
    every = list(posterior)
    assert len(every) == CHAINS * DRAWS
    assert every[4]["slope"] == posterior.draws["slope"][1, 1] and every[4]["sigma"] == posterior.draws["sigma"][1, 1]
    assert repr(posterior) == "Posterior(2 chains x 3 draws of slope [], sigma []; method='isgd')"


def test_prediction_is_the_moments_over_draws(posterior: Posterior) -> None:
    x = torch.tensor([-1.0, 0.5, 2.0], dtype=F64)
    slopes, sigmas = (posterior.draws[name].flatten() for name in ("slope", "sigma"))
    means = slopes[:, None] * x
    found = posterior.predict(x)
    torch.testing.assert_close(found.mean, means.mean(0))
    torch.testing.assert_close(found.model_variance, means.var(0, correction=0))
    torch.testing.assert_close(found.noise_variance, sigmas.square().mean().expand(3))
    torch.testing.assert_close(found.variance, found.model_variance + found.noise_variance)
    torch.testing.assert_close(found.std, found.variance.sqrt())


def test_log_predictive_is_the_log_of_the_mean_density(posterior: Posterior) -> None:
    x, y = torch.tensor([-1.0, 0.5, 2.0], dtype=F64), torch.tensor([0.0, 1.0, -300.0], dtype=F64)
    each = torch.stack([log_likelihood(draw, (x, y)) for draw in posterior])
    expected = torch.logsumexp(each, 0) - torch.tensor(float(len(posterior)), dtype=F64).log()
    found = posterior.log_predictive((x, y))
    torch.testing.assert_close(found, expected)
    assert bool(found.isfinite().all())  # though the density itself underflows


def test_a_prediction_without_a_variance_says_so(posterior: Posterior) -> None:
    plain = Target(
        log_likelihood, priors.Normal(1.0), init={"slope": 0.0, "sigma": 1.0}, predict=lambda p, x: p["slope"] * x
    )
    found = Posterior(plain, posterior.draws, {}).predict(torch.ones(2, dtype=F64))
    assert found.noise_variance is None
    torch.testing.assert_close(found.variance, found.model_variance)


def test_a_target_without_predict_is_refused(posterior: Posterior) -> None:
    silent = Target(log_likelihood, priors.Normal(1.0), init={"slope": 0.0, "sigma": 1.0})
    with pytest.raises(ValueError, match="cannot predict: pass predict="):
        Posterior(silent, posterior.draws, {}).predict(torch.ones(2))


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_module_predicts_the_average_over_draws(outputs: int, generator: torch.Generator) -> None:
    """Outputs of a regression, and class probabilities rather than logits of a classification."""
    net = nn.Linear(2, outputs).double()
    likelihood = likelihoods.Gaussian(0.5) if outputs == 1 else "categorical"
    draws = {
        "weight": torch.randn(CHAINS, DRAWS, outputs, 2, generator=generator, dtype=F64),
        "bias": torch.randn(CHAINS, DRAWS, outputs, generator=generator, dtype=F64),
    }
    posterior = Posterior(Target.from_module(net, likelihood), draws, {})
    x = torch.randn(5, 2, generator=generator, dtype=F64)
    outs = torch.stack([x @ draw["weight"].T + draw["bias"] for draw in posterior])
    means = outs if outputs == 1 else outs.softmax(-1)
    found = posterior.predict(x)
    torch.testing.assert_close(found.mean, means.mean(0))
    torch.testing.assert_close(found.model_variance, means.var(0, correction=0))
    if outputs == 1:
        torch.testing.assert_close(found.noise_variance, torch.full((5, 1), 0.25, dtype=F64))
    y = torch.randn(5, 1, generator=generator, dtype=F64) if outputs == 1 else torch.tensor([0, 1, 2, 0, 1])
    if outputs == 1:
        each = torch.distributions.Normal(outs, 0.5).log_prob(y).squeeze(-1)
    else:
        each = outs.log_softmax(-1)[:, torch.arange(5), y]
    torch.testing.assert_close(posterior.log_predictive((x, y)), each.exp().mean(0).log())


def test_chains_of_a_data_set_are_known_after_a_selection() -> None:
    """Two data sets of four chains: of the first four none belongs to the second."""
    info = {"sets": 2, "chains_per_set": 4, "chain_indices": list(range(8)), "chains": 8}
    first = Posterior(None, {"w": torch.arange(8.0).view(8, 1)}, info).select(chains=[0, 1, 2, 3])
    assert first.info["chains"] == 4
    with pytest.raises(ValueError, match="data set 1"):
        first.of_set(1)
    assert first.of_set(0).draws["w"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
