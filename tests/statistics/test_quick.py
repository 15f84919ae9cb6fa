"""The main ways to a posterior that is known exactly, through `sample`, in seconds: many chains, few draws of each."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Posterior, Target, priors, sample
from isosgd.sampling.run import draw_at

ROWS, SIGMA = 400, 0.8
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"structure": name} for name in ("layer", "single", "diagonal", "lowrank", "kronecker", "full")},
    "sgld": {"method": "sgld", "keep_every": 50},  # it is slower
    "sghmc": {"method": "sghmc", "corrected": True},
    "hmc": {"method": "hmc", "batch_size": None, "warmup": 450},
    "tempered": {"temperature": 0.1},
}
ALWAYS = {"layer", "diagonal", "lowrank", "sghmc", "hmc", "tempered"}  # the others take the same way in the long tier


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    return -0.5 * ((y - x @ params["w"].reshape(-1) - params["b"]) / SIGMA).square()


def regression() -> tuple[Target, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A target, its data, and the exact mean and precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator)
    whole = torch.cat([x, torch.ones(ROWS, 1)], 1)
    y = whole @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + SIGMA * torch.randn(ROWS, generator=generator)
    precision = (whole.T @ whole / SIGMA**2 + torch.eye(5) / 4.0).double()
    mean = torch.linalg.solve(precision, (whole.T @ y / SIGMA**2).double())
    target = Target(log_likelihood, priors.Normal(2.0), init={"w": mean[:4].float().view(2, 2), "b": mean[4].float()})
    return target, (x, y), mean, precision


def check(posterior: Posterior, mean: Tensor, precision: Tensor) -> None:
    """Chains are independent: standard errors are those between them. The bias that rates may have is 0.02."""
    draws = torch.cat([posterior.draws["w"].flatten(2), posterior.draws["b"][..., None]], -1)
    z = (draws.double() - mean) @ torch.linalg.cholesky(precision)  # independent, of variance 1
    for found, wanted, bias in ((z.mean(1), 0.0, 0.0), (z.square().mean((1, 2)), 1.0, 0.03)):
        error = found.std(0) / math.sqrt(len(found))
        assert bool((error < 0.12).all())
        assert bool(((found.mean(0) - wanted).abs() < 4.5 * error + bias).all())


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # warm-ups are short
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in ALWAYS else [pytest.mark.long]) for way in WAYS])
def test_means_and_variances_of_a_regression(way: str) -> None:
    target, data, mean, precision = regression()
    given: dict[str, Any] = {"batch_size": 40, "draws": 6, "keep_every": 25, "warmup": 360, **WAYS[way]}
    posterior = sample(target, data, chains=256, compile=False, progress=False, **given)
    check(posterior, mean, precision / given.get("temperature", 1.0))


@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")
@pytest.mark.parametrize(("structure", "before", "after"), [("layer", 0.1, 1.0), ("lowrank", 1.0, 0.3)])
def test_chains_that_go_on_at_another_temperature(structure: str, before: float, after: float) -> None:
    """As the rungs of a ladder do: with what was measured at one temperature, and a short warm-up at the next."""
    target, data, mean, precision = regression()
    given: dict[str, Any] = {
        "init": None,
        "method": "isgd",
        "batch_size": 40,
        "chains": 128,
        "keep_every": 25,
        "seed": 0,
    }
    given |= {"device": None, "compile": False, "progress": False, "structure": structure}
    ends: dict[int, Any] = {}
    draw_at(target, data, temperature=before, warmup=360, draws=1, ends=ends, **given)
    found = draw_at(target, data, temperature=after, warmup=60, draws=10, begin=ends, **given)
    assert found.info["gradients"] >= 128 * (360 + 25 + 60 + 10 * 25)
    check(found.select(draws=slice(4, None)), mean, precision / after)
