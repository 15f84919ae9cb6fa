"""Gradient noise: paired halves are unbiased everywhere, averages are exact, summaries mean what they say."""

import math

import pytest
import torch
from torch import Tensor

from isosgd.noise import AlphaStable, MovingAverage, NoiseEstimator, join_halves, make_estimator, paired_backward
from isosgd.noise.model import power_step, summarise, top_eigenvalue

SIGMAS = 4.5  # z-scores beyond it come about by chance once in 150,000 tests


def assert_mean(samples: Tensor, expected: Tensor | float) -> None:
    """The mean over dimension 0 agrees with what is expected, within its own standard error."""
    error = samples.std(0) / math.sqrt(samples.shape[0])
    z = (samples.mean(0) - expected) / error
    assert float(z.abs().max()) < SIGMAS, f"z = {z}"


def fed(estimator: NoiseEstimator, vectors: Tensor) -> dict[str, Tensor]:
    """State of one parameter after the rows of ``vectors``."""
    state = estimator.init(vectors[0])
    for seen, d in enumerate(vectors):
        estimator.update([state], [d], seen)
    return state


# ------------------------------------------------------------------------------------------------ paired halves


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (1, 7)])
def test_the_difference_of_halves_has_mean_zero_and_the_covariance_of_the_gradient(
    sizes: tuple[int, int], generator: torch.Generator
) -> None:
    n, mix = sum(sizes), torch.tensor([[1.0, 0.0], [2.0, 0.5]], dtype=torch.float64)
    examples = 5.0 + torch.randn(20_000, n, 2, generator=generator, dtype=torch.float64) @ mix.T
    first, second = examples[:, : sizes[0]].mean(1), examples[:, sizes[0] :].mean(1)
    (g,), (d,) = join_halves([first], [second], sizes)
    torch.testing.assert_close(g, examples.mean(1))
    assert_mean(d, 0.0)
    assert_mean(d.unsqueeze(2) * d.unsqueeze(1), mix @ mix.T / n)


def test_paired_backward_leaves_the_mean_and_returns_the_difference(generator: torch.Generator) -> None:
    x, w = torch.randn(7, 3, generator=generator), torch.zeros(3, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        return (rows @ w - 1.0).square().mean() + w.sum()

    (noise,) = paired_backward([w], lambda: loss(x[:3]), lambda: loss(x[3:]), sizes=(3, 4))
    (whole,) = torch.autograd.grad(loss(x), [w])
    halves = [torch.autograd.grad(loss(part), [w])[0] for part in (x[:3], x[3:])]
    torch.testing.assert_close(w.grad, whole)
    torch.testing.assert_close(noise, math.sqrt(12) / 7 * (halves[0] - halves[1]))


# ------------------------------------------------------------------------------------------------ moving averages


def test_the_first_vectors_weigh_the_same_and_later_ones_follow_the_momentum(generator: torch.Generator) -> None:
    d = torch.randn(30, 4, generator=generator)
    torch.testing.assert_close(fed(MovingAverage(0.9), d[:10])["variance"], d[:10].square().mean(0))
    expected = d[:10].square().mean(0)
    for vector in d[10:]:
        expected = 0.9 * expected + 0.1 * vector.square()
    torch.testing.assert_close(fed(MovingAverage(0.9), d)["variance"], expected)


def test_only_centred_noise_measures_the_variance_away_from_a_mode(generator: torch.Generator) -> None:
    """A gradient of mean 3 and variance 1/8: uncentred, its square swamps the variance."""
    steps, mean, variance = 4000, 3.0, 1 / 8
    examples = mean + torch.randn(steps, 8, generator=generator)
    (g,), (d,) = join_halves([examples[:, :4].mean(1)], [examples[:, 4:].mean(1)])
    uncentred = fed(MovingAverage(1 - 1e-9, centred=False), g[:, None])["variance"]
    centred = fed(MovingAverage(1 - 1e-9, centred=True), d[:, None])["variance"]
    assert abs(centred - variance) < SIGMAS * variance * math.sqrt(2 / steps)
    error = math.sqrt((4 * mean**2 * variance + 2 * variance**2) / steps)
    assert abs(uncentred - (mean**2 + variance)) < SIGMAS * error


@pytest.mark.parametrize("estimator", [MovingAverage(), AlphaStable(block=2, blocks=2)], ids=repr)
def test_estimates_are_float32_for_small_types_and_float64_for_double(estimator: NoiseEstimator) -> None:
    for dtype, kept in [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2]:
        state = fed(estimator, torch.ones(4, 3, dtype=dtype))
        assert {value.dtype for value in state.values()} == {kept}


def test_names_stand_for_estimators() -> None:
    assert make_estimator("gaussian") == MovingAverage(0.9, centred=False)
    assert make_estimator("paired") == MovingAverage(0.99, centred=True)
    assert make_estimator("paired", 0.5) == MovingAverage(0.5, centred=True)
    assert make_estimator("alpha") == AlphaStable(momentum=0.5, centred=True)
    own = MovingAverage(0.3)
    assert make_estimator(own) is own


# ------------------------------------------------------------------------------------------------ summaries


def test_summaries_of_a_group() -> None:
    group = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0])]
    assert summarise(group, "max") == 5.0
    assert summarise(group, "sum") == 10.0
    assert summarise(group, "mean") == 2.0


# ------------------------------------------------------------------------------------------------ top eigenvalue


def correlated_noise(count: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Noise vectors with a random covariance, and half its largest eigenvalue."""
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    top = float(torch.linalg.eigvalsh(mix @ mix.T).max())
    return torch.randn(count, 6, generator=generator, dtype=torch.float64) @ mix.T, 0.5 * top


@pytest.mark.long
def test_power_iteration_finds_the_top_eigenvalue(generator: torch.Generator) -> None:
    steps, counted, weight = 12_000, 8000, 0.005
    noise, expected = correlated_noise(steps, generator)
    image, found = torch.randn(6, generator=generator, dtype=torch.float64), []
    for seen, d in enumerate(noise):
        power_step(image, d, max(weight, 1 / (seen + 1)))
        found.append(float(top_eigenvalue(image)))
    # The mean of (d.u)^2 over the counted steps; a running average of length 1/w adds a bias of order w.
    error = math.sqrt(2 / counted)
    assert abs(sum(found[-counted:]) / counted / expected - 1) < SIGMAS * error + 2 * weight
