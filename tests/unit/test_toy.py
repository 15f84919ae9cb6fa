"""The toy's posterior is the exact one, and distances from it are what theory says."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from isosgd.demo.toy import NOISE_VARIANCE, NUM_FEATURES, Toy, compare, features, gaussian_w2


def random_covariance(d: int, generator: torch.Generator) -> torch.Tensor:
    root = torch.randn(d, d + 2, generator=generator, dtype=torch.float64)
    return root @ root.T / d


def test_w2_of_equal_gaussians_is_zero(generator: torch.Generator) -> None:
    mean, covariance = torch.randn(6, generator=generator), random_covariance(6, generator)
    assert gaussian_w2(mean, covariance, mean, covariance) < 1e-6


@pytest.mark.parametrize(("s1", "s2"), [(1.0, 2.0), (0.5, 0.1), (3.0, 0.0)])
def test_w2_of_scaled_identities(s1: float, s2: float) -> None:
    """Same mean, covariances ``s^2 I``: ``sqrt(d) |s1 - s2|``."""
    zero, eye = torch.zeros(5), torch.eye(5)
    assert gaussian_w2(zero, s1**2 * eye, zero, s2**2 * eye) == pytest.approx(math.sqrt(5) * abs(s1 - s2))


def test_w2_of_means_alone(generator: torch.Generator) -> None:
    covariance = random_covariance(4, generator)
    assert gaussian_w2(torch.zeros(4), covariance, torch.tensor([3.0, 0.0, 4.0, 0.0]), covariance) == pytest.approx(5.0)


def test_w2_of_commuting_covariances(generator: torch.Generator) -> None:
    """One eigenbasis: ``|m1 - m2|^2 + sum_i (sqrt(a_i) - sqrt(b_i))^2``."""
    basis = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0]
    a, b = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    shift = torch.randn(5, generator=generator, dtype=torch.float64)
    expected = shift.square().sum() + (a.sqrt() - b.sqrt()).square().sum()
    found = gaussian_w2(shift, basis * a @ basis.T, torch.zeros(5), basis * b @ basis.T)
    assert found**2 == pytest.approx(float(expected))


@pytest.mark.parametrize("seed", range(5))
def test_w2_against_scipy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    c1, c2 = random_covariance(7, generator), random_covariance(7, generator)
    m1, m2 = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    root = scipy.linalg.sqrtm(c1.numpy())
    between = scipy.linalg.sqrtm(root @ c2.numpy() @ root).real
    square = np.sum((m1 - m2).numpy() ** 2) + np.trace(c1.numpy() + c2.numpy() - 2 * between)
    assert gaussian_w2(m1, c1, m2, c2) == pytest.approx(math.sqrt(square))
    assert gaussian_w2(m2, c2, m1, c1) == pytest.approx(math.sqrt(square))


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.make(seed=3)


def log_joint(toy: Toy, w: torch.Tensor) -> torch.Tensor:
    """Of the target itself, in float64."""
    data = tuple(part.double() for part in toy.data)
    return toy.target.log_likelihood({"w": w}, data).sum() + toy.target.log_prior({"w": w})


def test_gradient_is_zero_at_the_exact_mean(toy: Toy) -> None:
    w = toy.mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_joint(toy, w), w)
    typical = torch.linalg.inv(toy.covariance).diagonal().sqrt().min()  # length of the score in the typical set
    assert gradient.abs().max() < 1e-6 * typical


def test_hessian_is_the_exact_precision(toy: Toy) -> None:
    hessian = torch.autograd.functional.hessian(lambda w: log_joint(toy, w), toy.mean)
    precision = torch.linalg.inv(toy.covariance)
    assert torch.allclose(-hessian, precision, rtol=1e-6, atol=1e-6 * float(precision.max()))


def test_log_likelihood_is_normalised(toy: Toy) -> None:
    phi, y = toy.data
    w = toy.mean.float()
    expected = torch.distributions.Normal(phi @ w, math.sqrt(NOISE_VARIANCE)).log_prob(y)
    assert torch.allclose(toy.target.log_likelihood({"w": w}, toy.data), expected, atol=1e-4)


def test_exact_prediction_is_that_of_exact_draws(toy: Toy) -> None:
    x = torch.linspace(-3, 3, 9, dtype=torch.float64)
    exact, count = toy.predict(x), 20_000
    values = features(x) @ toy.draw(count, seed=1).T
    sd = exact.model_variance.sqrt()
    assert ((values.mean(1) - exact.mean).abs() < 4 * sd / math.sqrt(count)).all()
    assert ((values.var(1) / exact.model_variance - 1).abs() < 4 * math.sqrt(2 / count)).all()
    assert torch.allclose(exact.variance - exact.model_variance, torch.tensor(NOISE_VARIANCE, dtype=torch.float64))


def test_target_predicts_like_the_features(toy: Toy) -> None:
    found = toy.target.predictive({"w": toy.mean.float()}, toy.x)
    assert torch.allclose(found["mean"], toy.data[0] @ toy.mean.float(), atol=1e-4)


def test_seeds_and_shapes() -> None:
    one, same, other = Toy.make(1), Toy.make(1), Toy.make(2, num_data=50, half_width=1.0)
    assert torch.equal(one.data[0], same.data[0]) and torch.equal(one.mean, same.mean)
    assert other.data[0].shape == (50, NUM_FEATURES) and float(other.x.abs().max()) <= 1.0
    assert other.target.resolve_num_data(other.data) == 50


def test_half_a_period_is_badly_conditioned() -> None:
    assert torch.linalg.cond(Toy.make(0).covariance) < 10
    assert torch.linalg.cond(Toy.make(0, half_width=math.pi / 2).covariance) > 1_000


def test_exact_draws_lie_where_theory_says(toy: Toy) -> None:
    """Over 50 sets of independent draws, every error agrees with its expectation within 4 standard errors.

    To first order ``E W2^2 = (tr S + sum_ij s_i s_j (1 + [i = j]) / (2 (s_i + s_j))) / n`` with eigenvalues ``s`` of
    the covariance; the next order is about ``20 / n`` of it, here 0.5%.
    """
    count, seeds = 4_000, 50
    found = [compare(toy.draw(count, seed), toy) for seed in range(seeds)]
    s = torch.linalg.eigvalsh(toy.covariance)
    pairs = s[:, None] * s / (2 * (s[:, None] + s))
    expected = {
        "w2": float(s.sum() + pairs.sum() + pairs.trace()) / count,
        "mean_error": float(s.sum()) / count,
        "mean_error_sd": 1.0 / count,
        "covariance_error": float(s.sum() ** 2 + s.square().sum()) / float(s.square().sum()) / count,
    }
    for name, square in expected.items():
        squares = np.array([f[name] for f in found]) ** 2
        error = squares.std(ddof=1) / math.sqrt(seeds)
        assert abs(squares.mean() - square) < 4 * error + 0.01 * square, name
    ratios = np.array([f["trace_ratio"] for f in found])
    assert abs(ratios.mean() - 1) < 4 * ratios.std(ddof=1) / math.sqrt(seeds)


def test_a_thousand_exact_draws_set_the_scale_of_w2() -> None:
    """What our accuracy is held against: a thousand independent draws are about 0.0115 away."""
    found = np.array([compare(Toy.make(seed).draw(1_000, seed), Toy.make(seed))["w2"] for seed in range(50)])
    assert 0.0105 < found.mean() < 0.0125


def test_compare_sees_each_fault(toy: Toy) -> None:
    draws = toy.draw(5_000)
    shifted = compare(draws + 3 * toy.covariance.diagonal().sqrt(), toy)
    assert shifted["mean_error_sd"] == pytest.approx(3, abs=0.1)
    wide = compare(toy.mean + 2 * (draws - toy.mean), toy)
    assert wide["trace_ratio"] == pytest.approx(4, rel=0.05)
    assert wide["covariance_error"] == pytest.approx(3, rel=0.1)
    assert wide["w2"] == pytest.approx(float(toy.covariance.trace().sqrt()), rel=0.05)


def test_compare_takes_chains(toy: Toy) -> None:
    draws = toy.draw(100)
    assert compare(draws.reshape(4, 25, NUM_FEATURES), toy) == compare(draws, toy)


@pytest.mark.parametrize("shape", [(NUM_FEATURES,), (10, 3), (1, NUM_FEATURES)])
def test_compare_refuses_other_shapes(toy: Toy, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"draws"):
        compare(torch.zeros(shape), toy)
