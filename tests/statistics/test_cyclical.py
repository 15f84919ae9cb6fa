"""Cyclical samplers at their defaults: stages long enough to spread in, and a warning where they are not."""

import pytest
import torch
from torch import Tensor

from isosgd import Posterior, SamplingWarning, Target, priors, sample


def regression(num_data: int) -> tuple[Target, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Target, data, and the posterior's mean and the Cholesky factor of its precision."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 4, generator=g)
    y = x @ torch.tensor([1.0, -0.5, 0.3, 2.0]) + torch.randn(num_data, generator=g)
    target = Target(
        lambda p, b: -0.5 * (b[1] - b[0] @ p["w"]).square(), priors.Normal(10.0), init={"w": torch.zeros(4)}
    )
    precision = x.T @ x + torch.eye(4) / 100
    return target, (x, y), torch.linalg.solve(precision, x.T @ y), torch.linalg.cholesky(precision)


def check_variance(posterior: Posterior, mean: Tensor, root: Tensor, bias: float = 0.06) -> None:
    """Squares of whitened draws have mean 1; chains are independent, so they tell the error."""
    each = ((posterior.draws["w"] - mean) @ root).square().mean((1, 2)).double()
    error = float(each.std()) / len(each) ** 0.5
    assert abs(float(each.mean()) - 1) < 4 * error + bias, (each, error)
    assert 4 * error + bias < 0.5  # so that 0.38, which it was, is far off


@pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")
@pytest.mark.parametrize("method", ["csgld", "csghmc"])
def test_variance_of_small_data_at_the_defaults(method):
    target, data, mean, root = regression(100)
    posterior = sample(
        target, data, method=method, batch_size=50, chains=32, draws=10, warmup=800, progress=False, compile=False
    )
    check_variance(posterior, mean, root)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["csgld", "csghmc"])
def test_variance_of_a_plain_regression_at_the_defaults(method):
    target, data, mean, root = regression(2000)
    check_variance(sample(target, data, method=method, batch_size=50, chains=4, draws=80, progress=False), mean, root)


@pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")
def test_cycles_that_are_too_short_are_named():
    target, data, *_ = regression(100)
    with pytest.warns(SamplingWarning, match="posterior variances come out too small. Leave cycle= out"):
        sample(target, data, method="csgld", batch_size=50, draws=4, warmup=800, cycle=20, progress=False)
