"""Trajectories on all data: posteriors that are known exactly come out without a bias, at every pace."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isosgd import METHODS, Posterior, Target, priors, sample
from isosgd.diagnostics import traces
from isosgd.samplers.innovations import Source

HMC: Any = METHODS["hmc"]
N, SIGMA, PRIOR = 60, 0.5, 2.0
pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # warm-ups are short


def regression(columns: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, columns, generator=g)
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]  # nearly the same: a badly conditioned posterior
    return x, x @ torch.linspace(-1, 1, columns) + SIGMA * torch.randn(N, generator=g)


def linear(columns: int = 4) -> Target:
    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = batch
        return -0.5 * ((y - x @ params["w"].reshape(-1)) / SIGMA) ** 2

    return Target(log_likelihood, priors.Normal(PRIOR), init={"w": torch.zeros(2, columns // 2)})


def exact(temperature: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance."""
    x, y = (t.double() for t in regression())
    precision = x.T @ x / SIGMA**2 + torch.eye(4).double() / PRIOR**2
    covariance = torch.linalg.inv(precision)
    return covariance @ x.T @ y / SIGMA**2, temperature * covariance


def z_scores(draws: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Standard errors of means and of variances along the principal axes, from the chains' own autocorrelation."""
    values, vectors = torch.linalg.eigh(covariance)
    u = ((draws.double() - mean) @ vectors / values.sqrt()).numpy()  # [chains, draws, d], N(0, I) if all is well
    squares = u**2
    means = u.mean((0, 1)) * np.sqrt(traces.ess(u))
    spread = (squares.mean((0, 1)) - 1.0) / (math.sqrt(2.0) / np.sqrt(traces.ess(squares)))
    return torch.as_tensor(means), torch.as_tensor(spread)


def run(structure: str, temperature: float = 1.0, **settings: Any) -> Posterior:
    settings = {"draws": 75, "chains": 32, "warmup": 800, "keep_every": 6, "compile": False, **settings}
    return sample(
        linear(), regression(), batch_size="all", structure=structure, temperature=temperature, progress=False,
        **settings,
    )  # fmt: skip


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("diagonal", "kronecker")]


@pytest.mark.parametrize("structure", ["full", "lowrank", *SLOW])
def test_a_badly_conditioned_regression_is_exact(structure: str) -> None:
    mean, covariance = exact(1.0)
    means, spread = z_scores(run(structure).draws["w"].flatten(2), mean, covariance)
    assert means.abs().max() < 4.5
    assert spread.abs().max() < 4.5


def test_temperature_is_kept() -> None:
    mean, covariance = exact(0.1)
    means, spread = z_scores(run("full", 0.1).draws["w"].flatten(2), mean, covariance)
    assert means.abs().max() < 4.5
    assert spread.abs().max() < 4.5


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.1, marks=pytest.mark.long)])
def test_draws_on_the_way_are_exact(temperature: float) -> None:
    """Trajectories are longer than draws are apart."""
    mean, covariance = exact(temperature)
    found = run("lowrank", temperature, keep_every=5, draws=150)
    assert found.info["warmup"][0]["trajectory"] > 5
    means, spread = z_scores(found.draws["w"].flatten(2), mean, covariance)
    assert means.abs().max() < 4.5
    assert spread.abs().max() < 4.5


# No input makes the sampler reckon its energy wrongly, or take draws that it should not: what follows changes its code.


def test_draws_on_the_way_that_are_all_taken_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    acceptance = HMC._acceptance

    def lenient(self: Any) -> Tensor:
        return acceptance(self) if self.place == self.length else torch.ones_like(self.error)

    monkeypatch.setattr(HMC, "_acceptance", lenient)
    mean, covariance = exact(1.0)
    _, spread = z_scores(run("lowrank", keep_every=5, draws=150).draws["w"].flatten(2), mean, covariance)
    assert spread.square().sum() > 60


def without_kinetic_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    kick = HMC._half_kick

    def forgetful(self: Any, *args: Any) -> None:
        kick(self, *args)
        self.gained = torch.zeros_like(self.gained)

    monkeypatch.setattr(HMC, "_half_kick", forgetful)


def too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Source.fill
    monkeypatch.setattr(Source, "fill", lambda self: fill(self).mul_(1.3))


@pytest.mark.parametrize("fault", [without_kinetic_energy, pytest.param(too_fast, marks=pytest.mark.slow)])
def test_faults_show(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would see a sampler that reckons its energy wrongly, or is stirred too much."""
    fault(monkeypatch)
    mean, covariance = exact(1.0)
    _, spread = z_scores(run("full").draws["w"].flatten(2), mean, covariance)
    assert spread.square().sum() > 60  # of 4, where all is well


def test_a_sampled_noise_scale_is_exact() -> None:
    """The posterior of a scale is skewed: the chain must be right where curvature changes from place to place."""
    y = torch.randn(12, generator=torch.Generator().manual_seed(5))
    y = (y - y.mean()) / y.std() + 0.0

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0] / params["s"]) ** 2 - params["s"].log()

    target = Target(log_likelihood, {"s": priors.LogNormal(1.0, 2.0)}, positive=["s"], init={"s": torch.tensor(1.0)})
    found = sample(
        target, (y,), batch_size="all", draws=100, chains=32, warmup=800, keep_every=6, compile=False, progress=False
    )
    u = found.draws["s"].log().double().numpy()
    grid = torch.linspace(-3, 3, 20001).double()
    log_density = -0.5 * y.double().square().sum() * (-2 * grid).exp() - len(y) * grid - 0.5 * (grid / 2.0) ** 2
    weights = (log_density - log_density.max()).exp()
    mean = float((weights * grid).sum() / weights.sum())
    variance = float((weights * (grid - mean) ** 2).sum() / weights.sum())
    assert abs(u.mean() - mean) < 4.5 * math.sqrt(variance / float(traces.ess(u)))
    off = (u - mean) ** 2
    assert abs(off.mean() - variance) < 4.5 * off.std() / math.sqrt(float(traces.ess(off)))
