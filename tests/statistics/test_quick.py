"""The main ways to a posterior that is known exactly, through `sample`, in seconds: many chains, few draws of each."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Target, priors, sample

ROWS, SIGMA = 400, 0.8
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"structure": name} for name in ("layer", "single", "diagonal", "lowrank", "kronecker", "full")},
    "sgld": {"method": "sgld"},
    "sghmc": {"method": "sghmc", "corrected": True},
    "hmc": {"method": "hmc", "batch_size": None, "warmup": 600},
    "tempered": {"temperature": 0.1},
}


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    return -0.5 * ((y - x @ params["w"].reshape(-1) - params["b"]) / SIGMA).square()


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # warm-ups are short
@pytest.mark.parametrize("way", WAYS)
def test_means_and_variances_of_a_regression(way: str) -> None:
    """Chains are independent: standard errors are those between them. The bias that rates may have is 0.02."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator)
    whole = torch.cat([x, torch.ones(ROWS, 1)], 1)
    y = whole @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + SIGMA * torch.randn(ROWS, generator=generator)
    precision = (whole.T @ whole / SIGMA**2 + torch.eye(5) / 4.0).double()
    mean = torch.linalg.solve(precision, (whole.T @ y / SIGMA**2).double())
    target = Target(log_likelihood, priors.Normal(2.0), init={"w": mean[:4].float().view(2, 2), "b": mean[4].float()})
    given: dict[str, Any] = {"batch_size": 40, "draws": 12, "keep_every": 25, "warmup": 480, **WAYS[way]}
    posterior = sample(target, (x, y), chains=64, compile=False, progress=False, **given)
    root = torch.linalg.cholesky(precision / given.get("temperature", 1.0))
    draws = torch.cat([posterior.draws["w"].flatten(2), posterior.draws["b"][..., None]], -1)
    z = (draws.double() - mean) @ root  # independent, of variance 1
    for found, wanted, bias in ((z.mean(1), 0.0, 0.0), (z.square().mean((1, 2)), 1.0, 0.03)):
        error = found.std(0) / math.sqrt(len(found))
        assert bool((error < 0.12).all())
        assert bool(((found.mean(0) - wanted).abs() < 4.5 * error + bias).all())
