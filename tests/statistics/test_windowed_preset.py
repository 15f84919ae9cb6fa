"""``preset="windowed"``: four times the noise as lambda, estimated while sampling, against a known posterior."""

import pytest
import torch

from isosgd import Target, priors, sample


@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # of the bias of a rate without a guard
@pytest.mark.parametrize(("temperature", "keep_every"), [(1.0, 20), (0.1, 200)])
def test_variances_of_a_regression_are_those_of_the_temperature(temperature, keep_every):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + torch.randn(300, generator=generator)
    precision = x.T @ x + torch.eye(3) / 4.0
    mean, covariance = torch.linalg.solve(precision, x.T @ y), torch.linalg.inv(precision)
    target = Target(lambda p, b: -0.5 * (b[1] - b[0] @ p["w"]) ** 2, priors.Normal(2.0), init={"w": mean})
    posterior = sample(
        target, (x, y), preset="windowed", warmup=700, temperature=temperature, draws=60, keep_every=keep_every,
        chains=32, batch_size=16, progress=False, compile=temperature < 1,
    )  # fmt: skip
    root = torch.linalg.cholesky(torch.linalg.inv(temperature * covariance).double())
    z = (posterior.draws["w"].double() - mean) @ root  # independent, of variance 1
    each = z.square().mean((1, 2))  # of a chain
    error = float(each.std()) / len(each) ** 0.5
    assert error < 0.06
    assert abs(float(each.mean()) - 1.0) < 3 * error + 0.03  # the bias rate h / 2, which no guard bounds
    lams = torch.tensor([report["groups"][0]["lam"] for report in posterior.info["warmup"]])
    shares = torch.tensor([report["groups"][0]["noise_share"] for report in posterior.info["warmup"]])
    assert bool((shares < 0.6).all()) and float(lams.max() / lams.min()) < 3.0
