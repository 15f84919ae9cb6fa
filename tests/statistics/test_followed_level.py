"""Few data: the noise of the gradients changes over the posterior, its level is followed, and the posterior is exact.

A normal regression with a sampled noise scale, by `isosgd.sample` alone. With f flat in coefficients and scale,
``exp(-f / T)`` is a normal distribution of the coefficients given the scale, whose square is a sum of squares over a
chi-square.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isosgd
from isosgd import Target, priors

N, BATCH, COEFFICIENTS, CHAINS, DRAWS = 46, 8, 3, 256, 15
pytestmark = pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.4])
def test_deviations_are_those_of_the_temperature(temperature: float) -> None:
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(N), rng.normal(size=(N, COEFFICIENTS - 1))]
    y = x.sum(1) + rng.normal(size=N)
    fit, squares = np.linalg.lstsq(x, y, rcond=None)[:2]
    freedom = (N - 1) / temperature - COEFFICIENTS
    variance = squares / temperature / rng.chisquare(freedom, size=400_000)  # of the noise
    inner = np.linalg.inv(x.T @ x).diagonal()
    known = np.append(np.sqrt(temperature * inner * variance.mean()), (0.5 * np.log(variance)).std())

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        rows, values = batch
        value: Tensor = -0.5 * ((values - rows @ params["beta"]) / params["scale"]).square() - params["scale"].log()
        return value

    start = {"beta": torch.from_numpy(fit), "scale": torch.tensor(1.0, dtype=torch.float64)}
    target = Target(log_likelihood, priors.Flat(), positive=["scale"], init=start)
    data = torch.from_numpy(x), torch.from_numpy(y)
    posterior = isosgd.sample(
        target, data, temperature=temperature, batch_size=BATCH, chains=CHAINS, draws=DRAWS,
        seed=0, progress=False, compile=False,
    )  # fmt: skip
    shares = [group["noise_share"] for report in posterior.info["warmup"] for group in report["groups"]]
    assert np.mean(shares) > 0.15  # by the average no more than 0.08 would be allowed, or 0.2 at the lower temperature
    draws = torch.cat([posterior.draws["beta"], posterior.draws["scale"].log().unsqueeze(-1)], -1).double()
    means = draws.mean((0, 1)).numpy()
    independent = min(float(isosgd.diagnostics.ess(draws[..., i].numpy()).min()) for i in range(COEFFICIENTS + 1))
    found = np.log(draws.flatten(0, 1).std(0).numpy() / known)
    error = 1 / np.sqrt(2 * independent)
    assert np.abs((means[:-1] - fit) / known[:-1]).max() < 4 / np.sqrt(independent)
    assert np.abs(found[:-1]).max() < 0.01 + 4 * error
    assert -0.025 - 4 * error < found[-1] < 0.01 + 4 * error
