"""What the baselines draw from, on models where theory says so: the documented bias is the one that is measured.

The model of `GaussianPosterior` has the Hessian ``h I`` and gradient noise of one known covariance everywhere, so that
plain SGD is a linear recursion: every moment of its iterates is a number times that covariance, known exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import isosgd
from isosgd import Target, priors
from isosgd.samplers.schedules import cosine

CHAINS = 256
DIM = 6
LR = 0.2


def target_of(known: Any) -> Target:
    """The model behind a `GaussianPosterior`, at its mean."""
    return Target(
        lambda p, b: -0.5 * (b[0] - p["theta"]).square().sum(-1), priors.Normal(1.0), init={"theta": known.mean}
    )


def run(known: Any, method: str, draws: int, **settings: Any) -> isosgd.Posterior:
    """Chains that start at the mode: plain SGD from the first step."""
    options = {"warmup": 0, "chains": CHAINS, "batch_size": known.batch, "progress": False, "compile": False}
    return isosgd.sample(target_of(known), (known.data,), method=method, draws=draws, **{**options, **settings})


def covariances(rates: Sequence[float], h: float, kept: Sequence[int]) -> Tensor:
    """Covariance of iterates after so many steps, in units of Var(g): ``[kept, kept]``.

    An iterate is the sum of the noise of all steps before, each multiplied by all later ``1 - rate h``.
    """
    weights = torch.zeros(len(kept), len(rates), dtype=torch.float64)
    for row, end in enumerate(kept):
        factor = 1.0
        for step in reversed(range(end)):
            weights[row, step] = rates[step] * factor
            factor *= 1.0 - rates[step] * h
    return weights @ weights.T


def z_scores(off: Tensor, predicted: Tensor) -> Tensor:
    """Standard errors between second moments and theory, ``[dim, dim]``; ``off`` is ``[chains, draws, dim]``."""
    squares = torch.einsum("cki,ckj->cij", off, off).double() / off.shape[1]
    return (squares.mean(0) - predicted) / (squares.std(0) / math.sqrt(len(off)))


def agrees(z: Tensor) -> bool:
    """Whether no entry is off by more than chance allows."""
    return bool(z.abs().max() < 4.5)


# ------------------------------------------------------------------------------------------------ snapshots


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["independent", "correlated", "half"])
def test_snapshots_at_a_constant_rate_have_the_covariance_of_sgd(gaussian_posterior: type, kind: str) -> None:
    known, gap, draws = gaussian_posterior(kind), 5, 12
    posterior = run(known, "snapshots", draws, schedule="constant", lr=LR, keep_every=gap)
    kept = [gap * (i + 1) for i in range(draws)]
    scale = covariances([LR] * kept[-1], known.curvature, kept).diagonal().mean()
    z = z_scores(posterior.draws["theta"] - known.mean, scale * known.noise.double())
    z = z[known.noise > 0] if kind == "half" else z  # without noise nothing moves
    assert agrees(z), z


def test_a_constant_rate_has_no_noise_where_gradients_have_none(gaussian_posterior: type) -> None:
    """The posterior is as wide in all directions; SGD does not leave the mode in half of them."""
    known = gaussian_posterior("half")
    draws = run(known, "snapshots", 4, schedule="constant", lr=LR).draws["theta"]
    silent = torch.diagonal(known.noise) == 0
    spread = (draws - known.mean).square().mean((0, 1)) * (known.num_data + 1)
    assert (
        int(silent.sum()) == DIM // 2 and bool((spread[silent] < 1e-6).all()) and bool((spread[~silent] > 0.01).all())
    )


def test_snapshots_of_cycles_have_the_covariance_of_their_schedule(gaussian_posterior: type) -> None:
    known, cycle, draws = gaussian_posterior("correlated"), 12, 5
    posterior = run(known, "snapshots", draws, lr=0.8, keep_every=cycle)
    rates = [0.8 * cosine(t % cycle / cycle) for t in range(cycle * draws)]
    kept = [cycle * (i + 1) for i in range(draws)]
    scale = covariances(rates, known.curvature, kept).diagonal()
    z = z_scores(posterior.draws["theta"] - known.mean, scale.mean() * known.noise.double())
    assert agrees(z), z
    constant = covariances([0.8] * kept[-1], known.curvature, kept).diagonal()
    assert float(scale[-1] / constant[-1]) < 0.3  # far less than what a constant rate of that size would leave


# ------------------------------------------------------------------------------------------------ SWAG


def swag_covariance(known: Any, gap: int, snapshots: int, rank: int, temperature: float) -> Tensor:
    """Second moments about the mode that SWAG's draws have: of its mean, and of its Gaussian."""
    kept = [gap * (i + 1) for i in range(snapshots)]
    joint = covariances([LR] * kept[-1], known.curvature, kept)
    ones = torch.full((snapshots,), 1.0 / snapshots, dtype=torch.float64)
    mean = ones @ joint @ ones
    centred = torch.eye(snapshots, dtype=torch.float64) - ones
    diagonal = torch.einsum("ij,jk,ik->i", centred, joint, centred).mean()
    noise = known.noise.double()
    wide = diagonal * torch.diag(torch.diagonal(noise))
    if rank:
        running = torch.tril(torch.ones(snapshots, snapshots, dtype=torch.float64))
        running = torch.eye(snapshots, dtype=torch.float64) - running / running.sum(1, keepdim=True)
        deviations = torch.einsum("ij,jk,ik->i", running, joint, running)[-rank:].sum() / (rank - 1)
        wide = (wide + deviations * noise) / 2
    return mean * noise + temperature * wide


SWAG_CASES = [(0, 1.0, 5), (0, 0.25, 5), (10, 1.0, 5), (10, 0.25, 2), (4, 3.0, 20)]


def swag_draws(known: Any, rank: int, temperature: float, gap: int) -> Tensor:
    settings = {"lr": LR, "rank": rank, "snapshots": 20, "keep_every": gap, "temperature": temperature}
    return run(known, "swag", 40, **settings).draws["theta"]


def swag_z(known: Any, rank: int, temperature: float, gap: int) -> Tensor:
    predicted = swag_covariance(known, gap, 20, rank, temperature)
    return z_scores(swag_draws(known, rank, temperature, gap) - known.mean, predicted)


@pytest.mark.quick
@pytest.mark.parametrize(("rank", "temperature", "gap"), SWAG_CASES)
@pytest.mark.parametrize("kind", [pytest.param("independent", marks=pytest.mark.long), "correlated"])
def test_swag_has_the_covariance_of_sgd_and_of_its_fit(
    gaussian_posterior: type, kind: str, rank: int, temperature: float, gap: int
) -> None:
    z = swag_z(gaussian_posterior(kind), rank, temperature, gap)
    assert agrees(z), z


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"temperature": 2.0}, {"temperature": 1e-9}], ids=str)
def test_these_tests_fail_when_swag_is_wrong(gaussian_posterior: type, wrong: dict[str, Any]) -> None:
    """Without its low-rank part, twice as wide, or its mean alone."""
    known = gaussian_posterior("correlated")
    draws = swag_draws(known, **{"rank": 10, "temperature": 1.0, "gap": 5, **wrong})
    assert z_scores(draws - known.mean, swag_covariance(known, 5, 20, 10, 1.0)).abs().max() > 8


def test_swag_is_not_the_posterior(gaussian_posterior: type) -> None:
    """At the rate it chooses the mean variance is about right, and no single one is: the noise shapes it."""
    known = gaussian_posterior("independent", level=1.0)
    posterior = run(known, "swag", 40, keep_every=25)
    squares = (posterior.draws["theta"] - known.mean).square().mean((0, 1)) * (known.num_data + 1)
    assert 0.7 < float(squares.mean()) < 1.4
    assert float(squares.max() / squares.min()) == pytest.approx(4.0, rel=0.2)  # as the variances of the noise


# ------------------------------------------------------------------------------------------------ MC-dropout

WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])
P = 0.3


def regression() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(150, len(WEIGHTS), generator=g) + 0.7 * torch.randn(150, 1, generator=g)
    return x, x @ WEIGHTS + 0.5 * torch.randn(150, generator=g)


def least_loss(x: Tensor, y: Tensor, p: float) -> Tensor:
    """The weights of least mean loss under dropout: a ridge whose penalty is p / (1 - p) times the squares of inputs.

    ``E |y - x (m * w)|^2 = |y - x w|^2 + p / (1 - p) sum_j x_j^2 w_j^2``, and the prior adds ``s^2 |w|^2``, s = .5.
    """
    gram = (x.T @ x).double()
    gram = gram + p / (1 - p) * torch.diag(gram.diagonal()) + 0.25 * torch.eye(len(WEIGHTS), dtype=torch.float64)
    return torch.linalg.solve(gram, (x.T @ y).double())


@pytest.fixture(scope="module")
def dropped() -> tuple[Tensor, Tensor]:
    """Draws of MC-dropout on a regression, and the weights of least mean loss."""
    x, y = regression()
    likelihood = lambda p, b: -0.5 * (b[1] - b[0] @ p["w"]).square() / 0.25  # noqa: E731
    target = Target(likelihood, priors.Normal(1.0), init={"w": WEIGHTS})
    posterior = isosgd.sample(
        target, (x, y), method="mcdropout", p=P, units={"w": 0}, draws=400, chains=32, batch_size=50, warmup=1000,
        compile=False, progress=False,
    )  # fmt: skip
    return posterior.draws["w"].double(), least_loss(x, y, P)


def test_dropout_is_trained_to_the_least_mean_loss(dropped: tuple[Tensor, Tensor]) -> None:
    """A weight that is there is 1 / (1 - p) of the trained one."""
    draws, best = dropped
    trained = draws.amax(1).where(best > 0, draws.amin(1)) * (1 - P)
    error = trained.std(0) / math.sqrt(len(trained))
    assert bool(((trained.mean(0) - best).abs() < 4 * error + 5e-3 * best.abs()).all()), (trained.mean(0), best, error)


def test_dropout_has_the_covariance_of_its_rate(dropped: tuple[Tensor, Tensor]) -> None:
    """``diag(p / (1 - p) w^2)``: nothing of the data but through w."""
    draws, _ = dropped
    there = (draws != 0).double()
    count = draws.shape[0] * draws.shape[1]
    z = (there.mean((0, 1)) - (1 - P)) / math.sqrt(P * (1 - P) / count)
    assert bool((z.abs() < 4.5).all()), z
    relative = draws / draws.abs().amax(1, keepdim=True)  # each chain has weights of its own
    found = torch.cov(relative.flatten(0, 1).abs().T)
    assert bool(((found.diagonal() / (P * (1 - P)) - 1).abs() < 5 / math.sqrt(count)).all()), found
    assert bool((found - torch.diag(found.diagonal())).abs().max() < 4.5 * P * (1 - P) / math.sqrt(count))


def test_a_linear_layer_is_the_same_regression(dropped: tuple[Tensor, Tensor]) -> None:
    """Through `Target.from_module`, whose only layer has its inputs dropped."""
    (x, y), (_, best) = regression(), dropped
    layer = torch.nn.Linear(len(WEIGHTS), 1, bias=False)
    target = Target.from_module(layer, isosgd.likelihoods.Gaussian(scale=0.5), priors.Normal(1.0))
    posterior = isosgd.sample(
        target, (x, y[:, None]), init={"weight": WEIGHTS[None]}, method="mcdropout", p=P, draws=30, chains=12,
        batch_size=50, warmup=1000, compile=False, progress=False,
    )  # fmt: skip
    draws = posterior.draws["weight"][:, :, 0].double()
    trained = draws.amax(1).where(best > 0, draws.amin(1)) * (1 - P)
    error = trained.std(0) / math.sqrt(len(trained))
    assert bool(((trained.mean(0) - best).abs() < 4 * error + 5e-3 * best.abs()).all())


# ------------------------------------------------------------------------------------------------ ensembles


def test_members_of_an_ensemble_agree_where_there_is_one_mode(gaussian_posterior: type) -> None:
    """However wide the posterior is: what is left is the noise of the last steps, whose rate has fallen to zero."""
    known = gaussian_posterior("independent", level=1.0)
    posterior = isosgd.sample(
        target_of(known), (known.data,), method="ensemble", draws=64, chains=4, batch_size=known.batch, warmup=800,
        compile=False, progress=False,
    )  # fmt: skip
    off = posterior.draws["theta"] - known.mean
    assert float(off.square().mean() * (known.num_data + 1)) < 0.2
    error = off.flatten(0, 1).std(0) / math.sqrt(256)
    assert bool((off.mean((0, 1)).abs() < 4 * error + 1e-3).all())
