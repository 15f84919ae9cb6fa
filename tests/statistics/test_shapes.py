"""Lambdas that know directions: exact where theory is exact, and good where nobody else mixes.

`Shaped` runs chains on the posterior of `GaussianPosterior` under real minibatch noise. Everything is linear there, so
that the stationary covariance of the chain follows from a Lyapunov equation, bias and all, and chains are held to it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

import isosgd
from isosgd import ISGD, Target, priors
from isosgd.chain.autocorrelation import integrated_time
from isosgd.experiments import posteriordb
from isosgd.experiments.toy import Toy, compare, gaussian_w2
from isosgd.samplers.innovations import Source
from isosgd.samplers.steppers import variance_inflation

CHAINS = 256


class Run:
    """Many chains with one Lambda, and what theory says of them.

    Args:
        posterior: the conjugate model of conftest, curvature ``h`` in every direction.
        relaxations: how long, in times that the slowest direction takes to forget.
        estimated: whether the noise is estimated from noise vectors, or known exactly (to a full Lambda).
        settings: of the sampler.

    Attributes:
        ratio: ``[chains, d]``, variance found over variance predicted along the principal axes of the noise.
        inflation: variance predicted over that of the target, ``[d]``.
        shares: of gradient noise in Lambda, ``[d]``.
        rate_curvature: ``[d]``.
    """

    def __init__(
        self,
        posterior: Any,
        *,
        temperature: float = 1.0,
        relaxations: float = 12.0,
        estimated: bool = True,
        **settings: Any,
    ) -> None:
        h, size = posterior.curvature, len(posterior.mean)
        g = torch.Generator().manual_seed(posterior.seed + 1)
        exact = temperature / (posterior.num_data * h)
        theta = (posterior.mean + math.sqrt(exact) * torch.randn(CHAINS, size, generator=g)).requires_grad_()
        sampler = ISGD(
            [("theta", theta)],
            num_data=posterior.num_data,
            temperature=temperature,
            batch_size=posterior.batch,
            chains=CHAINS,
            generator=torch.Generator().manual_seed(posterior.seed + 2),
            **settings,
        )
        shaped, group = sampler.shaped, sampler.param_groups[0]
        prior = [torch.ones(CHAINS, size)]
        for _ in range(40):
            sampler.observe([posterior.gradients(theta.detach(), g)[1]])
        if not estimated:
            shaped.cov.copy_(posterior.noise)
        sampler.adapt([h], prior=prior)
        for _ in range(2):  # H is not the curvature here: the stretch is what a chain measures by power iteration
            top = h * float(torch.linalg.eigvalsh(shaped.direction(torch.eye(size)).double()).max())
            sampler.adapt([top / group["rate"]], prior=prior)
        sampler.freeze()
        pull = shaped.direction(torch.eye(size)).double()
        push = torch.stack([shaped.displacement(torch.zeros(size), e).double() for e in torch.eye(size)], 1)
        noise = posterior.noise.double()
        predicted = self._stationary(torch.eye(size).double() - h * pull, pull @ noise @ pull.T, push @ push.T, sampler)
        axes = torch.linalg.eigh(noise)[1].T
        along = torch.einsum("ij,jk,ik->i", axes, predicted, axes)
        rates = torch.einsum("ij,jk,ik->i", axes, pull, axes)
        self.rate_curvature = h * rates
        self.inflation = along / exact
        self.shares = torch.einsum("ij,jk,ik->i", axes, noise, axes) * rates * posterior.num_data / (2 * temperature)
        steps = int(relaxations / float(self.rate_curvature.min()))
        total = torch.zeros(CHAINS, size)
        for _ in range(steps):
            theta.grad = posterior.gradients(theta.detach(), g)[0]
            sampler.step()
            total += ((theta.detach() - posterior.mean) @ axes.T.float()).square()
        self.ratio = total / steps / along

    @staticmethod
    def _stationary(a: Tensor, gradient: Tensor, injected: Tensor, sampler: ISGD) -> Tensor:
        noise = gradient + injected
        if sampler.averaged:  # half of what is injected, and its correlation with the last step
            noise = noise - injected / 2 + (a @ injected + injected @ a.T) / 4
        return torch.as_tensor(solve_discrete_lyapunov(a.numpy(), noise.numpy()))

    def z(self) -> float:
        """Standard errors between all directions together and theory; chains are independent."""
        off = self.ratio.mean(1) - 1.0
        return float(off.mean() / (off.std() / math.sqrt(CHAINS)))

    def z_each(self) -> float:
        """The same for the direction that is furthest off."""
        off = self.ratio - 1.0
        return float((off.mean(0) / (off.std(0) / math.sqrt(CHAINS))).abs().max())


# ------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize(
    ("structure", "noise"),
    [("full", "independent"), ("full", "correlated"), ("full", "half"), ("diagonal", "independent")],
)
def test_variance_is_that_of_the_temperature(gaussian_posterior, structure, noise, temperature):
    run = Run(gaussian_posterior(noise, 0.5, seed=1), temperature=temperature, structure=structure)
    assert abs(run.z()) < 3 and run.z_each() < 3.5  # the largest of six
    assert float(run.inflation.sub(1).abs().max()) < 0.025  # theory itself is near the target, as bias=0.02 says


def test_ten_times_the_data(gaussian_posterior):
    run = Run(gaussian_posterior("correlated", 0.5, num_data=2000, seed=2), structure="full")
    assert abs(run.z()) < 3 and run.z_each() < 3.5


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_these_tests_fail_when_noise_is_doubled(gaussian_posterior, monkeypatch, structure):
    original = Source._draw
    monkeypatch.setattr(Source, "_draw", lambda self, out: (original(self, out), out.mul_(2.0)))
    run = Run(gaussian_posterior("independent", 0.5), temperature=0.1, relaxations=10, structure=structure)
    assert run.z() > 10


def test_these_tests_fail_when_gradient_noise_is_left_in(gaussian_posterior, monkeypatch):
    """The covariance of the noise is forgotten once predictions are made: ``2 Lambda`` is injected in full."""
    run = ISGD.step

    def forgetful(self, *args, **kwargs):
        if bool(self.shaped.cov.any()):
            self.shaped.cov.zero_()
            self.shaped._inject()
        return run(self, *args, **kwargs)

    monkeypatch.setattr(ISGD, "step", forgetful)
    assert Run(gaussian_posterior("correlated", 0.5, seed=1), temperature=0.1, structure="full").z() > 5


# ------------------------------------------------------------------------------------------------ the bias


@pytest.mark.parametrize("averaged", [False, True])
def test_bias_at_a_large_rate_is_as_predicted(gaussian_posterior, averaged):
    """Much bias allowed, gradient noise most of Lambda: each kind of innovations has the bias of its own formula.

    The other formula, and no bias at all, are many standard errors away.
    """
    posterior = gaussian_posterior("independent", 1.0, num_data=80)
    run = Run(posterior, structure="full", averaged=averaged, bias=0.3, relaxations=300, estimated=False)

    def formula(averaged: bool) -> Tensor:
        shares = run.shares if averaged else torch.ones_like(run.shares)
        pairs = zip(run.rate_curvature.tolist(), shares.tolist(), strict=True)
        return torch.tensor([variance_inflation(a, share=s) for a, s in pairs], dtype=torch.float64)

    torch.testing.assert_close(run.inflation, formula(averaged), rtol=1e-5, atol=0.0)  # exact up to float32
    assert abs(run.z()) < 3 and run.z_each() < 3.5
    assert float(run.rate_curvature.max()) > 0.15 and float(run.inflation.max()) > 1.04
    found = run.ratio * run.inflation
    for wrong in (formula(not averaged), torch.ones_like(run.inflation)):
        run.ratio = found / wrong
        assert abs(run.z()) > 5


# ------------------------------------------------------------------------------------------------ nothing tuned


def errors(draws: Tensor, mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of means in standard deviations, ratios of standard deviations, and independent draws, by entry.

    Args:
        draws: ``[chains, draws, entries]``.
        mean: what their mean should be.
        sd: and their standard deviation.
    """
    draws = draws.double()
    independent = torch.tensor(
        [sum(len(c) / integrated_time(c.numpy()) for c in draws[..., i]) for i in range(draws.shape[-1])]
    )
    flat = draws.flatten(0, 1)
    return (flat.mean(0) - mean).abs() / sd, flat.std(0) / sd, independent


def test_two_parameters_that_are_nearly_one():
    """y ~ N(theta, S), correlation .99: the posterior has it too, and so has the gradient noise."""
    covariance = torch.tensor([[1.0, 0.99], [0.99, 1.0]])
    y = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) @ torch.linalg.cholesky(covariance).T
    precision = torch.linalg.inv(covariance)
    white = torch.linalg.cholesky(precision)
    target = Target(
        lambda p, b: -0.5 * ((b[0] - p["theta"]) @ white).square().sum(1),
        priors.Normal(10.0),
        init={"theta": torch.zeros(2)},
    )
    exact = torch.linalg.inv(500 * precision.double() + torch.eye(2).double() / 100)
    mean = exact @ precision.double() @ y.double().sum(0)
    posterior = isosgd.sample(
        target, (y,), draws=2000, keep_every=5, warmup=2500, batch_size=200, structure="full", progress=False
    )
    draws = posterior.draws["theta"]
    axes = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    sd = torch.einsum("ij,jk,ik->i", axes, exact, axes).sqrt()
    assert sd[0] / sd[1] > 10
    off, ratio, independent = errors(draws.double() @ axes.T, axes @ mean, sd)
    assert bool((off < 3.5 / independent.sqrt()).all())
    # A standard deviation has relative error 1 / sqrt(2 n); 3% more for the bias that rate and noise may leave.
    assert bool(((ratio - 1).abs() < 3.5 / (2 * independent).sqrt() + 0.03).all())
    assert float(independent.min()) > 300  # both mix: the narrow direction and the one fourteen times as wide
    w2 = gaussian_w2(draws[0].mean(0), draws[0].T.cov(), mean, exact)
    assert w2 / math.sqrt(float(exact.trace())) < 0.10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_badly_conditioned_toy_is_found(seed):
    """Condition number in the thousands, N = 200, n = 32, 50,000 gradients; peers reach .45 to .66."""
    toy = Toy.make(seed, half_width=math.pi / 2)
    posterior = isosgd.sample(
        toy.target,
        toy.data,
        batch_size=32,
        draws=4_500,
        keep_every=10,
        warmup=4_000,
        seed=seed,
        structure="full",
        progress=False,
    )
    assert posterior.info["gradients"] <= 50_000
    assert compare(posterior.draws["w"], toy)["w2"] / math.sqrt(float(toy.covariance.trace())) <= 0.10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["kidiq-kidscore_momiq", "mesquite-logmesquite"])
def test_regressions_have_the_posterior_of_the_reference(name):
    """Real data as they are, against draws of a long Stan run: no option but draws, chains and batch size."""
    root = posteriordb.default_root()
    if root is None or name not in posteriordb.names(root):
        pytest.skip(f"no data: set ISOSGD_DATA to a folder that holds posteriordb/{name}")
    reference = posteriordb.load(name, root)
    posterior = isosgd.sample(
        reference.target, reference.data, draws=400, chains=4, batch_size=reference.batch_size, progress=False
    )
    for key, drawn in reference.natural(posterior.draws).items():
        truth = reference.draws[key].flatten(0, 1)
        off, ratio, independent = errors(
            drawn.reshape(*drawn.shape[:2], -1), truth.mean(0).reshape(-1), truth.std(0).reshape(-1)
        )
        assert bool((off < 0.1).all()), (key, off)
        # 10,000 reference draws have errors of their own: 0.7% of a standard deviation.
        assert bool(((ratio - 1).abs() < 0.05 + 3 / (2 * independent).sqrt()).all()), (key, ratio)
