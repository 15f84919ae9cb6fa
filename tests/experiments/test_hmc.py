"""Hamiltonian Monte Carlo on all data: right where the answer is known."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.posteriors import posteriordb
from experiments.posteriors.hmc import Flat, hmc
from isosgd import Target, priors
from isosgd.diagnostics import integrated_time

pytestmark = pytest.mark.long
SIGMAS = 5.0
NOISE = 0.5


def ess(x: Tensor) -> float:
    """Effective number of draws ``[chains, draws]``, with the chains one after the other."""
    return x.numel() / integrated_time(x.numpy().astype(np.float64).reshape(-1))


def regression(num_data: int = 40) -> tuple[Target, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A linear regression with known noise; its posterior is Gaussian. Columns differ a hundredfold in scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1])
    x[:, 1] += 5 * x[:, 0]
    y = x @ torch.tensor([1.0, -0.2, 2.0], dtype=torch.float64)
    y = y + NOISE * torch.randn(num_data, generator=generator, dtype=torch.float64)
    covariance = torch.linalg.inv(torch.eye(3, dtype=torch.float64) + x.T @ x / NOISE**2)

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        features, response = batch
        return -0.5 * ((response - features @ params["w"]) / NOISE).square()

    target = Target(log_likelihood, priors.Normal(1.0), init={"w": torch.zeros(3, dtype=torch.float64)})
    return target, (x, y), covariance @ x.T @ y / NOISE**2, covariance


@pytest.fixture(scope="module")
def conjugate_run() -> Any:
    target, data, mean, covariance = regression()
    return hmc(target, data, chains=32, draws=150, warmup=200, steps=(2, 8)), mean, covariance


def test_conjugate_regression_has_its_exact_moments(conjugate_run: Any) -> None:
    (draws, _), mean, covariance = conjugate_run
    w = draws["w"]
    root = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(root, (w - mean).reshape(-1, 3).T, upper=False).T.reshape(w.shape)
    for i in range(3):  # in these coordinates the posterior is standard normal
        for moment, exact, spread in ((z[..., i], 0.0, 1.0), (z[..., i].square(), 1.0, math.sqrt(2.0))):
            assert abs(float(moment.mean()) - exact) < SIGMAS * spread / math.sqrt(ess(moment)), i
        for j in range(i):
            product = z[..., i] * z[..., j]
            assert abs(float(product.mean())) < SIGMAS / math.sqrt(ess(product)), (i, j)


def test_a_run_says_how_it_went(conjugate_run: Any) -> None:
    (draws, info), _, _ = conjugate_run
    assert draws["w"].shape == (32, 150, 3)
    assert 0.6 < info.acceptance < 0.98  # the warm-up aims at 0.8
    assert info.rhat < 1.05
    assert info.log_density.shape == (32, 150)
    assert info.diverged == 0
    assert info.gradients > 350 * 2


def test_it_agrees_with_reference_draws() -> None:
    """Mean and variance of every parameter, within the standard errors of both runs."""
    root = posteriordb.default_root()
    name = "sblri-blr"
    if root is None or name not in posteriordb.names(root):
        pytest.skip("no data: set ISOSGD_DATA to a folder that holds posteriordb/sblri-blr")
    reference = posteriordb.load(name, root)
    found, info = hmc(reference.target, reference.data, chains=32, draws=100, warmup=200, steps=(2, 8))
    assert info.rhat < 1.05
    for key, theirs in reference.draws.items():
        ours = found[key].reshape(32, 100, -1)
        for i, (a, b) in enumerate(zip(ours.unbind(-1), theirs.reshape(*theirs.shape[:2], -1).unbind(-1), strict=True)):
            for x, y in ((a, b), ((a - b.mean()).square(), (b - b.mean()).square())):
                error = math.sqrt(float(x.var()) / ess(x) + float(y.var()) / ess(y))
                assert abs(float(x.mean() - y.mean())) < SIGMAS * error, (key, i)


def test_gradients_are_those_of_the_target() -> None:
    reference_target, data, _, _ = regression()
    flat = Flat(reference_target, data, None, chains=2)
    position = torch.randn(2, 3, dtype=torch.float64)
    gradients, values = flat.log_density(position)
    for k in range(2):
        free = {"w": position[k].clone().requires_grad_()}
        _, (mean_gradient,) = reference_target.gradient(free, data, num_data=40)
        torch.testing.assert_close(gradients[k], -40 * mean_gradient)
        expected = reference_target.log_likelihood(free, data).sum() + reference_target.log_prior(free)
        torch.testing.assert_close(values[k], expected.detach())


def test_positive_parameters_come_back_positive_and_shaped() -> None:
    y = torch.randn(30, dtype=torch.float64)

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0] / params["sigma"][0]).square() - params["sigma"].log().sum() / 2

    start = {"sigma": torch.ones(2, dtype=torch.float64)}
    target = Target(log_likelihood, priors.HalfNormal(1.0), positive=["sigma"], init=start)
    draws, _ = hmc(target, (y,), chains=3, draws=4, warmup=5, steps=(1, 2))
    assert draws["sigma"].shape == (3, 4, 2)
    assert bool((draws["sigma"] > 0).all())


def test_same_seed_same_draws_and_thinning() -> None:
    target, data, _, _ = regression()
    settings: dict[str, Any] = {"chains": 2, "warmup": 10, "steps": (1, 3)}
    first, _ = hmc(target, data, draws=6, **settings)
    again, _ = hmc(target, data, draws=6, **settings)
    thinned, _ = hmc(target, data, draws=3, keep_every=2, **settings)
    other, _ = hmc(target, data, draws=6, seed=1, **settings)
    assert torch.equal(first["w"], again["w"])
    assert torch.equal(first["w"][:, 1::2], thinned["w"])
    assert not torch.equal(first["w"], other["w"])


def test_chains_start_where_they_are_told() -> None:
    target, data, _, _ = regression()
    starts = [{"w": torch.full((3,), float(k), dtype=torch.float64)} for k in range(4)]
    assert torch.equal(Flat(target, data, starts, chains=4).start[:, 0], torch.arange(4.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="init has 4 starts for 5 chains"):
        hmc(target, data, init=starts, chains=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chains": 0}, "chains = 0"),
        ({"draws": 1.5}, "draws = 1.5"),
        ({"warmup": 0}, "warmup = 0"),
        ({"keep_every": True}, "keep_every = True"),
        ({"steps": (5, 2)}, r"steps = \(5, 2\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    target, data, _, _ = regression()
    with pytest.raises(ValueError, match=message):
        hmc(target, data, **settings)


def test_a_start_without_density_is_refused() -> None:
    target = Target(lambda p, b: p["x"].log() * b[0], priors.Flat(), init={"x": torch.zeros((), dtype=torch.float64)})
    with pytest.raises(ValueError, match="not finite at the start of chain 0"):
        hmc(target, (torch.ones(3, dtype=torch.float64),), chains=2)


def test_something_else_than_a_target_is_refused() -> None:
    with pytest.raises(TypeError, match=r"isosgd\.Target"):
        hmc("target", ())  # type: ignore[arg-type]
