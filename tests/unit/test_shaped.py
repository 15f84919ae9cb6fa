"""Lambdas that know directions: how large they are, and that a step is exactly what Theorem 1 asks for."""

import math
from typing import Any

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

from isosgd.geometry.base import MOST_EXCESS, Geometry
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.kronecker import Kronecker
from isosgd.geometry.rule import HIGHEST, Rule, variance_inflation

F64 = torch.float64
N, BATCH, T = 500, 10, 0.7
SHAPES = {"a.weight": (4, 2), "a.bias": (3,), "b.weight": (5,)}  # 16 entries, so that 64 vectors are four of each
SIZE = 16
KINDS: dict[str, type[Geometry]] = {"diagonal": Diagonal, "kronecker": Kronecker, "full": Full}
every_kind = pytest.mark.parametrize("kind", KINDS)


def rule(**changes: Any) -> Rule:
    return Rule(**{"num_data": N, "batch_size": BATCH, "temperature": T, "bias": 0.02, "averaged": True, **changes})


def bound(kind: str, chains: int | None = None, dtype: torch.dtype = F64) -> Geometry:
    """A structure that knows its parameters, in two layers, and has seen nothing."""
    shaped, lead = KINDS[kind](), () if chains is None else (chains,)
    params = {name: torch.zeros(*lead, *shape, dtype=dtype) for name, shape in SHAPES.items()}
    groups = [{"params": [params["a.weight"], params["a.bias"]]}, {"params": [params["b.weight"]]}]
    shaped.bind(groups, chains, sets=chains or 1)  # a data set for each chain: nothing is shared
    return shaped


def parts(vector: Tensor) -> list[Tensor]:
    """A flat vector by parameter."""
    split = torch.split(vector, [math.prod(s) for s in SHAPES.values()], dim=-1)
    return [p.view(*p.shape[:-1], *s) for p, s in zip(split, SHAPES.values(), strict=True)]


def feed(shaped: Geometry, covariance: Tensor) -> None:
    """64 noise vectors whose mean outer product is exactly this."""
    unit = covariance.diagonal().sqrt().clamp_min(1e-30)  # parameters may have very different units
    values, vectors = torch.linalg.eigh(covariance / unit / unit[:, None])
    columns = math.sqrt(SIZE) * unit[:, None] * vectors * values.clamp_min(0.0).sqrt()
    for i in range(64):
        shaped.observe(parts(columns[:, i % SIZE].contiguous()))


def random_covariance(size: int, condition: float, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=F64))
    return q @ torch.diag(torch.logspace(0, -math.log10(condition), size, dtype=F64)) @ q.T


def noise_of(kind: str) -> Tensor:
    """A covariance that the shape can express, correlated as far as it can."""
    if kind == "full":
        return random_covariance(SIZE, 1e8)
    rest = torch.diag(torch.logspace(0, -3, 8, dtype=F64))
    if kind == "diagonal":
        return torch.block_diag(torch.diag(torch.logspace(-2, 1, 8, dtype=F64)), rest)
    return torch.block_diag(torch.kron(random_covariance(4, 50.0, 1), random_covariance(2, 9.0, 2)), rest)


def expected_lambda(shaped: Geometry, covariance: Tensor, prior: Tensor, q: float) -> Tensor:
    """``q (n Var(g) + prior)``, and the floor that shapes other than the full one have, layer by layer."""
    h = BATCH * covariance + torch.diag(prior)
    if isinstance(shaped, Diagonal | Kronecker):
        for slot in shaped.slots:
            h.diagonal()[slot] += shaped.damping * h.diagonal()[slot].mean()
    return q * h


PRIOR = torch.cat([torch.full((8,), 0.3), torch.full((3,), 0.1), torch.linspace(0.01, 2.0, 5)]).to(F64) / N


def settled(kind: str, stretch: float = 1.0, scale: float = 1.0, **changes: Any) -> tuple[Geometry, Tensor, Tensor]:
    """A structure with its Lambda, the noise covariance, and what Lambda should be."""
    shaped, covariance = bound(kind), scale * noise_of(kind)
    feed(shaped, covariance)
    settle(shaped, rule(**changes), scale * PRIOR, stretch)
    q = float(rule(**changes).factor(shaped.curvature_ratio))
    return shaped, covariance, expected_lambda(shaped, covariance, scale * PRIOR, q)


def settle(shaped: Geometry, own: Rule, prior: Tensor, stretch: float | None = 1.0, rise: float = 10.0) -> None:
    """Lambda of every chain, with one stretch and one prior for all; a stretch of None stays as it is."""
    if stretch is not None:
        shaped.curvature_ratio = shaped.full(stretch)
    shaped.set_lambda(own, prior.to(shaped.dtype).expand(shaped.chains, -1), rise)


def step_maps(shaped: Geometry, chain: int = 0) -> tuple[Tensor, Tensor]:
    """The linear maps from gradient and from innovations to a displacement of a chain, column by column."""
    zero, tensors = shaped.full(0.0, shaped.total), shaped.tensors()
    units = [e.to(shaped.dtype).expand(shaped.chains, -1) for e in torch.eye(shaped.total)]
    pull = torch.stack([shaped.displace(tensors, e, zero)[chain] for e in units], 1)
    push = torch.stack([shaped.displace(tensors, zero, e)[chain] for e in units], 1)
    return pull, push


def close(found: Tensor, expected: Tensor, metric: Tensor, tolerance: float) -> None:
    """Compare maps between covectors and displacements in coordinates where both are of order one."""
    root = torch.linalg.cholesky(metric)
    torch.testing.assert_close(root.T @ found @ root, root.T @ expected @ root, rtol=0.0, atol=tolerance)


# ------------------------------------------------------------------------------------------------ the bias


@every_kind
@pytest.mark.parametrize("averaged", [False, True])
def test_stationary_covariance_of_a_whole_step(kind: str, averaged: bool) -> None:
    """Where H is the curvature the covariance is ``(T / N) H^-1``, up to the bias of each direction."""
    shaped, covariance, lam = settled(kind)
    pull, push = step_maps(shaped)
    curvature = lam / float(shaped.factor)
    a, injected = torch.eye(SIZE, dtype=F64) - pull @ curvature, push @ push.T
    noise = pull @ covariance @ pull.T + injected
    if averaged:  # half of the injected noise, and its correlation with what the last step injected
        noise = noise - injected / 2 + (a @ injected + injected @ a.T) / 4
    found = torch.as_tensor(solve_discrete_lyapunov(a.numpy(), noise.numpy()))
    # In coordinates where Lambda is one: the shares of gradient noise are the eigenvalues of Lambda^-1 B.
    inverse = torch.linalg.inv(torch.linalg.cholesky(lam))
    shares, vectors = torch.linalg.eigh(inverse @ covariance @ inverse.T / 2)
    kept = shares if averaged else torch.ones_like(shares)
    inflation = variance_inflation(shaped.unit_rate.double(), share=kept)
    assert inflation.min() > 1.0 and (not averaged or inflation.max() < 1.02 / (1 - HIGHEST / 2))
    axes = vectors.T @ inverse
    close(found / (T / N), float(shaped.factor) * axes.T @ torch.diag(inflation) @ axes, curvature, 1e-6)


# ------------------------------------------------------------------------------------------------ a step


@every_kind
@pytest.mark.parametrize("stretch", [1.0, 7.0])
def test_a_step_is_that_of_theorem_1(kind: str, stretch: float) -> None:
    """``(T / N) Lambda^-1 (g + w)``, gradient and injected noise adding up to ``2 Lambda`` exactly."""
    shaped, covariance, lam = settled(kind, stretch)
    pull, push = step_maps(shaped)
    inverse = torch.linalg.inv(lam)
    close(pull, (T / N) * inverse, lam, 1e-7)
    close(push @ push.T, (T / N) ** 2 * inverse @ (2 * lam - covariance) @ inverse, lam, 1e-7)
    assert float(torch.linalg.eigvalsh(2 * lam - covariance).min()) > 0
    g = torch.linspace(-1, 1, SIZE, dtype=F64)
    torch.testing.assert_close(shaped.direction(g[None]), (pull @ g)[None])
    torch.testing.assert_close(shaped.rates(), pull.diagonal()[None])
    for slot, rate in zip((slice(0, 11), slice(11, 16)), shaped.group_rates().unbind(-1), strict=True):
        assert rate.tolist() == pytest.approx([float(pull.diagonal()[slot].log().mean().exp())])
    assert shaped.clipped().tolist() == [0.0]
    ratio = shaped.curvature_ratio
    torch.testing.assert_close(shaped.unit_rate, rule().scale * ratio / rule().factor(ratio) / stretch)


def test_the_full_matrix_is_exact_for_parameters_in_very_different_units() -> None:
    """Regressions on raw columns: each parameter in units of its own, up to 1e8 apart."""
    shaped, units = bound("full"), torch.logspace(-4, 4, SIZE, dtype=F64)
    covariance = units[:, None] * random_covariance(SIZE, 1e3) * units
    feed(shaped, covariance)
    settle(shaped, rule(), torch.zeros(SIZE, dtype=F64))
    pull, push = step_maps(shaped)
    lam = float(shaped.factor) * BATCH * covariance
    torch.testing.assert_close(shaped.factor, rule().factor(torch.ones(1, dtype=F64)))
    close(pull, (T / N) * torch.linalg.inv(lam), lam, 1e-7)
    inverse = torch.linalg.inv(lam)
    close(push @ push.T, (T / N) ** 2 * inverse @ (2 * lam - covariance) @ inverse, lam, 1e-7)


@every_kind
def test_noise_beyond_lambda_is_clipped_and_counted(kind: str) -> None:
    """Five times Lambda along one axis: nothing is injected there, all else is as before."""
    shaped, covariance, lam = settled(kind)
    _, before = step_maps(shaped)
    root = torch.linalg.cholesky(lam)
    axis = torch.zeros(SIZE, dtype=F64)
    axis[-1] = 1.0  # the last column of a Cholesky root is along the last parameter, an axis of every shape here
    extra = 10.0 * torch.outer(root @ axis, root @ axis)
    if kind == "full":
        covariance = covariance - covariance[:, -1:] @ covariance[-1:] / covariance[-1, -1]  # none along the axis
    shaped.forget()
    feed(shaped, covariance + extra)
    assert shaped.clipped().tolist() == pytest.approx([1 / SIZE])
    pull, push = step_maps(shaped)
    close(pull, (T / N) * torch.linalg.inv(lam), lam, 1e-7)  # Lambda itself stays
    left = torch.linalg.eigvalsh(root.T @ push @ push.T @ root) / (T / N) ** 2
    assert abs(float(left[0])) < 1e-9 and float(left[1]) > 0.1
    if kind != "full":
        torch.testing.assert_close(push[:-1, :-1], before[:-1, :-1])


@every_kind
def test_chains_side_by_side_are_chains_alone(kind: str, generator: torch.Generator) -> None:
    """Noise, prior, stretch and slowing of its own for each chain, over two windows; Lambda is each chain's own too."""
    together, alone = bound(kind, chains=3), [bound(kind) for _ in range(3)]
    scales = torch.tensor([1.0, 30.0, 0.2], dtype=F64)
    for window in range(2):
        stretch = torch.tensor([1.0, 0.5, 9.0], dtype=F64) * (1 + window)
        for row in scales[:, None] * torch.randn(80, 3, SIZE, generator=generator, dtype=F64):
            together.observe(parts(row))
            for one, own in zip(alone, row, strict=True):
                one.observe(parts(own))
        together.curvature_ratio = stretch.clone()
        together.set_lambda(rule(), scales[:, None] * PRIOR, rise=2.0)
        together.slow(scales.clamp_min(1.0))
        for k, one in enumerate(alone):
            one.curvature_ratio = stretch[k : k + 1].clone()
            one.set_lambda(rule(), scales[k] * PRIOR[None], rise=2.0)
            one.slow(scales[k : k + 1].clamp_min(1.0))
            torch.testing.assert_close(step_maps(together, k), step_maps(one))
            for number in ("rates", "group_rates", "clipped", "excess_temperature"):
                torch.testing.assert_close(getattr(together, number)()[k], getattr(one, number)()[0])
        together.forget()
        for one in alone:
            one.forget()
    g = torch.randn(3, SIZE, generator=generator, dtype=F64)
    directions = [one.direction(own[None])[0] for one, own in zip(alone, g, strict=True)]
    torch.testing.assert_close(together.direction(g), torch.stack(directions))


def test_chains_of_one_data_set_share_a_full_matrix(generator: torch.Generator) -> None:
    """So many numbers take many noise vectors: those of all chains of a set count, and none of another set."""
    shaped = Full()
    shaped.bind([{"params": [torch.zeros(6, 5, dtype=F64)]}], chains=6, sets=2)
    assert (shaped.min_vectors, bound("full").min_vectors) == (
        20,
        64,
    )  # four vectors for each parameter, at least twenty
    loudness = torch.tensor([1.0, 5.0]).repeat_interleave(3)[:, None]
    drawn = loudness * torch.randn(40, 6, 5, generator=generator, dtype=F64)
    for row in drawn:
        shaped.observe([row])
    for own, chains in ((drawn[:, :3], (0, 1, 2)), (drawn[:, 3:], (3, 4, 5))):
        vectors = own.reshape(-1, 5)
        for k in chains:
            torch.testing.assert_close(shaped.cov[k], vectors.T @ vectors / len(vectors))
    shaped.curvature_ratio = torch.logspace(2, 4, 6, dtype=F64)  # how far the curvature is above it is each chain's own
    shaped.set_lambda(rule(), torch.zeros(6, 5, dtype=F64), rise=10.0)
    torch.testing.assert_close(shaped.factor, rule().factor(shaped.curvature_ratio))
    assert len(shaped.factor.unique()) == 6


# ------------------------------------------------------------------------------------------------ noise outside


def heat(shaped: Geometry, covariance: Tensor, temperature: float) -> float:
    """Temperature of the hottest direction over what it should be: composite noise over ``2 (T / N) P``."""
    pull, push = step_maps(shaped)
    inverse = torch.linalg.inv(torch.linalg.cholesky(pull))
    composite = pull @ covariance @ pull.T + push @ push.T
    return float(torch.linalg.eigvalsh(inverse @ composite @ inverse.T).max()) * N / (2 * temperature)


@pytest.mark.parametrize("windows", [2, 3, 4])
def test_noise_that_a_shape_cannot_express_slows_it(windows: int, generator: torch.Generator) -> None:
    """Equal variances, nearly one direction: a diagonal Lambda would leave that direction far too hot."""
    shaped, cold = bound("diagonal"), rule(temperature=1e-3)
    covariance = 0.95 * torch.ones(SIZE, SIZE, dtype=F64) + 0.05 * torch.eye(SIZE, dtype=F64)
    root = torch.linalg.cholesky(covariance)
    heats = []
    for _ in range(windows):
        shaped.forget()
        for _ in range(1000):
            shaped.observe(parts(root @ torch.randn(SIZE, generator=generator, dtype=F64)))
        settle(shaped, cold, PRIOR, stretch=None)
        heats.append(heat(shaped, covariance, cold.temperature))
    assert heats[0] > 1 + 5 * MOST_EXCESS  # nothing is known of correlations before there is a Lambda
    assert heats[-1] < 1 + 2 * MOST_EXCESS  # the estimate of the top eigenvalue is itself noisy


@pytest.mark.parametrize("larger", [1.0, 30.0])
def test_noise_that_is_larger_here_than_on_average_slows_a_full_lambda(larger: float) -> None:
    """Chains of one data set share what they know of the noise on average; a chain in a noisier place slows down."""
    chains, cold = 8, rule(temperature=1e-3, kappa=Full.kappa)  # noise alone bounds Lambda, which is all but used up
    shaped = Full()
    shaped.bind([{"params": [torch.zeros(chains, SIZE, dtype=F64)]}], chains, sets=1)
    generator, here = torch.Generator().manual_seed(0), torch.ones(chains, SIZE, dtype=F64)
    for window in range(3):
        shaped.forget()
        if window:
            here[-1, 3] = math.sqrt(larger)  # one direction, in the place of one chain
        for _ in range(400):
            shaped.observe([here * torch.randn(chains, SIZE, generator=generator, dtype=F64)])
        shaped.set_lambda(cold, torch.zeros(chains, SIZE, dtype=F64), 2.0)
    pull, push = (x[-1] for x in (shaped.pull, shaped.push))
    composite = pull @ torch.diag(here[-1] ** 2) @ pull.T + push @ push.T
    heat = float((composite / (2 * cold.temperature / N * pull))[3, 3])
    if larger == 1.0:
        assert torch.allclose(shaped.factor, shaped.factor[0]) and abs(heat - 1.0) < 0.2
    else:  # without it the place would be hot by larger / kappa
        assert float(shaped.factor[-1]) > 5 * float(shaped.factor[:-1].max())
        assert heat < 1 + 3 * MOST_EXCESS


@pytest.mark.parametrize("size", [16, 200, 20_000])
def test_independent_noise_does_not_slow_a_diagonal_lambda(size: int, generator: torch.Generator) -> None:
    """However many parameters there are: chance correlations among few noise vectors are no correlations."""
    shaped = Diagonal()
    shaped.bind([{"params": [torch.zeros(size)]}])
    own = rule(num_data=50_000, batch_size=128)
    rates = []
    for _ in range(2):
        shaped.forget()
        for _ in range(400):
            shaped.observe([torch.randn(size, generator=generator)])
        settle(shaped, own, torch.zeros(size), stretch=None)
        rates.append(float(shaped.rates().mean()))
    # Heat is a mean over some fifty squares of normals, a fifth off at one standard error: at three, Lambda doubles.
    assert rates[1] > 0.4 * rates[0]


def test_a_full_lambda_is_small_where_only_noise_bounds_it() -> None:
    """Curvature far below the Fisher information in one direction: no bias is to be feared there, only noise."""
    full = Full()
    own = rule(num_data=1000, batch_size=100, temperature=1.0, kappa=full.kappa)
    full.bind([{"params": [torch.zeros(2)]}])
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        full.observe([0.1 * torch.randn(2, generator=generator)])  # n Var(g) is the identity
    full.curvature_ratio = full.full(1.0)
    full.set_lambda(own, torch.zeros(1, 2), 2.0)
    for i in range(full.axes):
        full.observe_hessian(i, full.axis(i) * torch.tensor([1.0, 0.01]))
    full.set_lambda(own, torch.zeros(1, 2), 100.0)
    found = own.scale * torch.linalg.inv(full.pull[0])
    covariance = full.cov[0]
    # The first direction is bound by the bias, the second by the noise alone, which Lambda still covers.
    q = float(own.factor(torch.ones(())))
    least = full.kappa / 2 * covariance[1, 1]
    assert q > 1.5 * full.kappa / 200
    assert float(found[0, 0]) == pytest.approx(q * 100 * float(covariance[0, 0]), rel=0.02)
    assert float(found[1, 1]) == pytest.approx(float(least), rel=0.02)
    assert float(torch.linalg.eigvalsh(found - 0.5 * covariance).min()) > 0
    assert float(full.clipped()) == 0.0
    # When Lambda is made smaller as a whole, it still covers the noise.
    full.slow(torch.tensor([0.2]))
    found = own.scale * torch.linalg.inv(full.pull[0])
    assert float(torch.linalg.eigvalsh(found - 0.999 * full.kappa / 2 * covariance).min()) > 0
    assert float(full.clipped()) == 0.0


# ------------------------------------------------------------------------------------------------ the noise's level


def levelled(chains: int | None = None, num_data: int = 40) -> Full:
    """A full Lambda of few data, whose noise was measured where its covariance is `noise_of`."""
    shaped = bound("full", chains)
    assert isinstance(shaped, Full)
    columns = math.sqrt(SIZE) * torch.linalg.cholesky(noise_of("full"))
    for i in range(64):
        one = columns[:, i % SIZE]
        shaped.observe(parts(one.contiguous() if chains is None else one.expand(chains, -1).contiguous()))
    settle(shaped, rule(num_data=num_data, kappa=Full.kappa, trackable=True), PRIOR)
    return shaped


@pytest.mark.parametrize("level", [0.3, 1.0, 2.5])
def test_gradient_noise_and_injected_noise_add_up_whatever_the_level(level: float) -> None:
    shaped = levelled()
    assert shaped.tracks_level
    shaped.set_level(torch.tensor([level], dtype=F64))
    pull, push = step_maps(shaped)
    composite = level * pull @ noise_of("full") @ pull.T + push @ push.T
    wanted = 2.0 * T / 40 * pull  # 2 (T / N) P: what Theorem 1 asks for
    root = torch.linalg.cholesky(torch.linalg.inv(wanted))
    torch.testing.assert_close(root.T @ composite @ root, torch.eye(SIZE, dtype=F64), rtol=0.0, atol=1e-8)


def test_a_state_of_another_version_is_refused_by_name() -> None:
    shaped = levelled(num_data=100_000)
    with pytest.raises(ValueError, match=r"lacks \['level'\]: it was saved by another version"):
        bound("full").load({k: v for k, v in shaped.state().items() if k != "level"})
