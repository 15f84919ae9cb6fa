"""Lambdas that know directions: exact where theory is exact, and good where nobody else mixes.

`Run` has chains on the posterior of `GaussianPosterior` under real minibatch noise. Everything is linear there, so
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
from experiments.posteriors import posteriordb
from isosgd import ISGD, Target, priors
from isosgd.demo.toy import Toy, compare, gaussian_w2
from isosgd.diagnostics import integrated_time
from isosgd.geometry.base import Geometry
from isosgd.geometry.rule import variance_inflation

DIM, CHAINS = 6, 256
VECTORS = 1000  # of noise, for each chain


class Run:
    """Many chains, each with a Lambda of its own, and what theory says of them.

    Args:
        posterior: the conjugate model of conftest, curvature ``h`` in every direction.
        relaxations: how long, in times that the slowest direction takes to forget.
        estimated: whether the noise is estimated from noise vectors, or known exactly (to a full Lambda).
        shape: of the parameter.
        told: what the sampler is told instead of the truth.
        seen: scale of the noise vectors that it is told of.
        later: size of minibatches once theory has said what is to come of them; as before by default.
        settings: of the sampler.

    Attributes:
        found: ``[chains, d]``, variance along the principal axes of the noise over that of the target.
        inflation: the same as predicted.
        shares: of gradient noise in Lambda, ``[chains, d]``.
        rate_curvature: ``[chains, d]``.
    """

    def __init__(
        self,
        posterior: Any,
        *,
        temperature: float = 1.0,
        relaxations: float = 8.0,
        estimated: bool = True,
        shape: tuple[int, ...] = (DIM,),
        told: dict[str, Any] | None = None,
        seen: float = 1.0,
        later: int = 0,
        **settings: Any,
    ) -> None:
        h = posterior.curvature
        g = torch.Generator().manual_seed(posterior.seed + 1)
        exact = temperature / (posterior.num_data * h)
        start = posterior.mean + math.sqrt(exact) * torch.randn(CHAINS, DIM, generator=g)
        theta = start.view(CHAINS, *shape).clone().requires_grad_()
        place = theta.detach().view(CHAINS, DIM)
        sampler = ISGD(
            [("theta", theta)],
            chains=CHAINS,
            batch_size=posterior.batch,
            generator=torch.Generator().manual_seed(posterior.seed + 2),
            **{"num_data": posterior.num_data, "temperature": temperature, **(told or {}), **settings},
        )
        shaped, group = sampler.geometry, sampler.param_groups[0]
        prior = [torch.ones_like(theta)]
        for _ in range(VECTORS):
            sampler.observe([seen * posterior.gradients(place, g)[1].view_as(theta)])
        if not estimated:
            shaped.cov.copy_(posterior.noise)
        sampler.adapt([h], prior=prior)
        for _ in range(2):  # H is not the curvature here: the stretch is what a chain measures by power iteration
            pull, _ = maps(shaped)
            sampler.adapt([h * torch.linalg.eigvalsh(pull)[:, -1] / group["rate"]], prior=prior)
        sampler.freeze()
        pull, push = maps(shaped)
        noise = posterior.noise.double()
        eye = torch.eye(DIM).double()
        predicted = stationary(eye - h * pull, pull @ noise @ pull.mT, push @ push.mT, sampler.averaged)
        axes = torch.linalg.eigh(noise)[1].T
        rates = torch.einsum("ij,cjk,ik->ci", axes, pull, axes)
        self.rate_curvature = h * rates
        self.inflation = torch.einsum("ij,cjk,ik->ci", axes, predicted, axes) / exact
        self.shares = torch.einsum("ij,jk,ik->i", axes, noise, axes) * rates * posterior.num_data / (2 * temperature)
        steps = int(relaxations / float(self.rate_curvature.min()))
        total = torch.zeros(CHAINS, DIM)
        posterior.batch = later or posterior.batch
        for _ in range(steps):
            theta.grad = posterior.gradients(place, g)[0].view_as(theta)
            sampler.step()
            total += ((place - posterior.mean) @ axes.T.float()).square()
        self.found = total / steps / exact

    @property
    def ratio(self) -> Tensor:
        """Variance found over variance predicted."""
        return self.found / self.inflation

    def z(self) -> float:
        """Standard errors between all directions together and theory; chains are independent."""
        off = self.ratio.mean(1) - 1.0
        return float(off.mean() / (off.std() / math.sqrt(CHAINS)))

    def z_each(self) -> float:
        """The same for the direction that is furthest off."""
        off = self.ratio - 1.0
        return float((off.mean(0) / (off.std(0) / math.sqrt(CHAINS))).abs().max())

    def check(self) -> None:
        """Variances are as predicted, and near those of the target."""
        assert abs(self.z()) < 3 and self.z_each() < 3.5, "not as predicted"  # the largest of six
        assert float(self.inflation.mean(0).sub(1).abs().max()) < 0.025, "not the target"  # as bias=0.02 says
        error = self.found.mean(0).sub(1).abs() - 3.5 * self.found.std(0) / math.sqrt(CHAINS)
        assert float(error.max()) < 0.025, "not the target"


def maps(shaped: Geometry) -> tuple[Tensor, Tensor]:
    """The linear maps from gradients and from innovations to displacements, ``[chains, d, d]``."""
    tensors, drawn = shaped.tensors(), DIM + shaped.extra_innovations
    nothing, silence = torch.zeros(CHAINS, DIM), torch.zeros(CHAINS, drawn)
    pull = [shaped.displace(tensors, e.expand(CHAINS, -1), silence).double() for e in torch.eye(DIM)]
    push = [shaped.displace(tensors, nothing, e.expand(CHAINS, -1)).double() for e in torch.eye(drawn)]
    return torch.stack(pull, -1), torch.stack(push, -1)


def stationary(a: Tensor, gradient: Tensor, injected: Tensor, averaged: bool) -> Tensor:
    """Covariance S of each chain, ``S = A S A^T + noise``."""
    noise = gradient + injected
    if averaged:  # half of what is injected, and its correlation with the last step
        noise = noise - injected / 2 + (a @ injected + injected @ a.mT) / 4
    pairs = zip(a.numpy(), noise.numpy(), strict=True)
    return torch.stack([torch.as_tensor(solve_discrete_lyapunov(*pair)) for pair in pairs])


# ------------------------------------------------------------------------------------------------ exact

SHAPES = {"diagonal": (DIM,), "kronecker": (2, 3), "full": (DIM,), "lowrank": (DIM,)}


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize(
    ("structure", "noise"),
    [
        ("full", "independent"),
        ("full", "correlated"),
        ("full", "half"),
        ("diagonal", "independent"),
        ("kronecker", "independent"),
        ("lowrank", "independent"),
        ("lowrank", "correlated"),
    ],
)
def test_variance_is_that_of_the_temperature(gaussian_posterior, structure, noise, temperature):
    posterior = gaussian_posterior(noise, 0.5, seed=1)
    Run(posterior, temperature=temperature, structure=structure, shape=SHAPES[structure]).check()


@pytest.mark.slow
def test_ten_times_the_data(gaussian_posterior):
    Run(gaussian_posterior("correlated", 0.5, num_data=2000, seed=2), structure="full").check()


@pytest.mark.parametrize(
    ("structure", "wrong"),
    [
        ("diagonal", {"told": {"temperature": 0.4}}),  # noise scaled by 2
        ("full", {"seen": 0.1}),  # gradient noise left in
        ("full", {"later": 2}),
        ("kronecker", {"told": {"num_data": 8}}),
        ("lowrank", {"told": {"temperature": 1.0}}),
    ],
)
def test_these_tests_fail_for_a_wrong_sampler(gaussian_posterior, structure, wrong):
    posterior = gaussian_posterior("independent", 0.5, seed=1)
    run = Run(posterior, temperature=0.1, structure=structure, shape=SHAPES[structure], **wrong)
    with pytest.raises(AssertionError, match=r"not (as predicted|the target)"):
        run.check()


# ------------------------------------------------------------------------------------------------ the bias


@pytest.mark.parametrize("averaged", [False, True])
def test_bias_at_a_large_rate_is_as_predicted(gaussian_posterior, averaged):
    """Much bias allowed, gradient noise most of Lambda: each kind of innovations has the bias of its own formula.

    The other formula, and no bias at all, are many standard errors away.
    """
    posterior = gaussian_posterior("independent", 1.0, num_data=80)
    run = Run(posterior, structure="full", averaged=averaged, bias=0.3, relaxations=300, estimated=False)

    def formula(averaged: bool) -> Tensor:
        return variance_inflation(run.rate_curvature, share=run.shares if averaged else torch.ones_like(run.shares))

    torch.testing.assert_close(run.inflation, formula(averaged), rtol=1e-5, atol=0.0)  # exact up to float32
    assert abs(run.z()) < 3 and run.z_each() < 3.5
    assert float(run.rate_curvature.max()) > 0.15 and float(run.inflation.max()) > 1.04
    for wrong in (formula(not averaged), torch.ones_like(run.inflation)):
        run.inflation = wrong
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
    settings = {"draws": 300, "keep_every": 4, "warmup": 1500, "batch_size": 200, "structure": "full"}
    posterior = isosgd.sample(target, (y,), chains=4, compile=False, progress=False, **settings)
    draws = posterior.draws["theta"]
    axes = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    sd = torch.einsum("ij,jk,ik->i", axes, exact, axes).sqrt()
    assert sd[0] / sd[1] > 10
    off, ratio, independent = errors(draws.double() @ axes.T, axes @ mean, sd)
    assert bool((off < 3.5 / independent.sqrt()).all())
    # A standard deviation has relative error 1 / sqrt(2 n); 3% more for the bias that rate and noise may leave.
    assert bool(((ratio - 1).abs() < 3.5 / (2 * independent).sqrt() + 0.03).all())
    assert float(independent.min()) > 300  # both mix: the narrow direction and the one fourteen times as wide
    drawn = draws.flatten(0, 1)
    w2 = gaussian_w2(drawn.mean(0), drawn.T.cov(), mean, exact)
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
@pytest.mark.parametrize("half_width", [math.pi, math.pi / 2])
def test_every_direction_forgets_within_two_epochs(half_width):
    """The toy at N = 2000, n = 32, well and badly conditioned: the slowest direction decorrelates in 125 steps.

    Correlations fall like ``exp(-t / relaxation)``, so that the integrated time is twice the relaxation. Of twenty
    directions the largest estimate is chance: the mean over four chains has a relative error of about a tenth.
    """
    toy = Toy.make(0, num_data=2000, half_width=half_width)
    posterior = isosgd.sample(
        toy.target, toy.data, batch_size=32, chains=4, draws=3_000, keep_every=5, warmup=6_000, progress=False
    )
    _, axes = torch.linalg.eigh(toy.covariance)
    along = ((posterior.draws["w"].double() - toy.mean) @ axes).numpy()
    times = [sum(5 * integrated_time(chain[:, i]) for chain in along) / 4 for i in range(along.shape[-1])]
    epoch = 2000 / 32
    assert max(times) / 2.0 <= 2.0 * epoch * 1.1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["kidiq-kidscore_momiq", "low_dim_gauss_mix-low_dim_gauss_mix", "mesquite-logmesquite"]
)
def test_real_data_have_the_posterior_of_the_reference(name):
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
