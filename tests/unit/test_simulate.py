"""Outcomes simulated from the posterior predictive distribution, against the moments of each likelihood."""

import math

import pytest
import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, likelihoods, priors

DRAWS, INPUTS = 40, 100


def simulated(likelihood: likelihoods.Likelihood, output: Tensor, **more: Tensor) -> Tensor:
    """Outcomes of a model whose output at every input is this one, ``[outcomes, ...]``."""
    model = nn.Linear(1, output.numel(), bias=False)
    model.weight.data.copy_(output[:, None])
    target = Target.from_module(model, likelihood)
    draws = {"weight": model.weight.detach().expand(2, DRAWS, -1, -1), **more}
    return Posterior(target, draws, {}).simulate(torch.ones(INPUTS, 1)).reshape(2 * DRAWS * INPUTS, -1)


@pytest.mark.parametrize(
    ("likelihood", "output"),
    [
        (likelihoods.Gaussian(0.3), [1.0, -2.0]),
        (likelihoods.StudentT(6.0, scale=0.5), [1.0, -2.0]),
        (likelihoods.Heteroscedastic(), [0.7, -1.0]),
        (likelihoods.Heteroscedastic(6.0, scale=0.5), [0.7, -1.0]),
        (likelihoods.Bernoulli(), [0.8]),
        (likelihoods.Poisson(), [1.2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outcomes_have_the_moments_of_the_likelihood(likelihood: likelihoods.Likelihood, output: list[float]) -> None:
    values = torch.tensor(output)
    y = simulated(likelihood, values)
    mean, variance = (f(values[None], {}).flatten() for f in (likelihood.mean, likelihood.variance))
    assert float(((y.mean(0) - mean).abs() / (y.var(0) / len(y)).sqrt()).max()) < 4.5
    error = ((y - mean).square().var(0) / len(y)).sqrt()
    assert float(((y.var(0) - variance).abs() / error).max()) < 4.5


def test_classes_come_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0])
    y = simulated(likelihoods.Categorical(), logits)
    assert not y.is_floating_point()
    expected = logits.softmax(0)
    found = torch.bincount(y.flatten(), minlength=3) / y.numel()
    assert float(((found - expected).abs() / (expected * (1 - expected) / y.numel()).sqrt()).max()) < 4.5
    generator = torch.Generator().manual_seed(0)
    assert likelihoods.Categorical().simulate(torch.zeros(5, 3, 2, 2), {}, generator).shape == (5, 2, 2)


def test_a_sampled_scale_is_each_draws_own() -> None:
    scale = torch.cat([torch.full((1, DRAWS), 0.1), torch.full((1, DRAWS), 3.0)])
    y = simulated(likelihoods.Gaussian(), torch.zeros(1), **{"likelihood.scale": scale}).reshape(2, -1)
    assert float((y.std(1) / scale[:, 0] - 1).abs().max()) < 4.5 / math.sqrt(2 * DRAWS * INPUTS)


def test_seeds_batches_and_refusals() -> None:
    target = Target.from_module(nn.Linear(2, 1), likelihoods.Gaussian(1.0))
    draws = {"weight": torch.zeros(2, 3, 1, 2), "bias": torch.zeros(2, 3, 1)}
    posterior, x = Posterior(target, draws, {}), torch.randn(7, 2)
    once = posterior.simulate(x, seed=1)
    assert once.shape == (2, 3, 7, 1) and torch.equal(once, posterior.simulate(x, seed=1))
    assert not torch.equal(once, posterior.simulate(x, seed=2))
    assert posterior.simulate(x, batch_size=4).shape == once.shape
    own = Target(lambda p, b: -((b[0] - p["m"]) ** 2), priors.Flat(), init={"m": 0.0})
    with pytest.raises(ValueError, match=r"one of isosgd\.likelihoods"):
        Posterior(own, {"m": torch.zeros(1, 2)}, {}).simulate(x)
    callable_one = Target.from_module(nn.Linear(2, 1), lambda output, y: -(output - y).square().sum(1))
    with pytest.raises(ValueError, match=r"one of isosgd\.likelihoods"):
        Posterior(callable_one, draws, {}).simulate(x)
