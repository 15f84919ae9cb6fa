"""Lambdas that know directions: how large they are, and that a step is exactly what Theorem 1 asks for."""

import math
from typing import Any

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

from isosgd.samplers.full import Full
from isosgd.samplers.kronecker import Kronecker
from isosgd.samplers.shaped import EXCESS, HIGHEST, Diagonal, Rotated, Rule, Shaped
from isosgd.samplers.steppers import variance_inflation

F64 = torch.float64
N, BATCH, T = 500, 10, 0.7
SHAPES = {"a.weight": (4, 2), "a.bias": (3,), "b.weight": (5,)}  # 16 entries, so that 64 vectors are four of each
SIZE = 16
KINDS: dict[str, type[Shaped]] = {"diagonal": Diagonal, "kronecker": Kronecker, "full": Full}
every_kind = pytest.mark.parametrize("kind", KINDS)


def rule(**changes: Any) -> Rule:
    return Rule(**{"num_data": N, "batch_size": BATCH, "temperature": T, "bias": 0.02, "averaged": True, **changes})


def bound(kind: str, batched: bool = False, dtype: torch.dtype = F64) -> Shaped:
    """A structure that knows its parameters, in two layers, and has seen nothing."""
    shaped, lead = KINDS[kind](), (3,) if batched else ()
    params = {name: torch.zeros(*lead, *shape, dtype=dtype) for name, shape in SHAPES.items()}
    groups = [{"params": [params["a.weight"], params["a.bias"]]}, {"params": [params["b.weight"]]}]
    shaped.bind(groups, batched)
    return shaped


def parts(vector: Tensor) -> list[Tensor]:
    """A flat vector by parameter."""
    split = torch.split(vector, [math.prod(s) for s in SHAPES.values()], dim=-1)
    return [p.view(*p.shape[:-1], *s) for p, s in zip(split, SHAPES.values(), strict=True)]


def feed(shaped: Shaped, covariance: Tensor) -> None:
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


def expected_lambda(shaped: Shaped, covariance: Tensor, prior: Tensor, q: float) -> Tensor:
    """``q (n Var(g) + prior)``, and the floor that shapes other than the full one have, layer by layer."""
    h = BATCH * covariance + torch.diag(prior)
    if isinstance(shaped, Rotated):
        for slot in shaped.slots:
            h.diagonal()[slot] += shaped.damping * h.diagonal()[slot].mean()
    return q * h


PRIOR = torch.cat([torch.full((8,), 0.3), torch.full((3,), 0.1), torch.linspace(0.01, 2.0, 5)]).to(F64) / N


def settled(kind: str, stretch: float = 1.0, scale: float = 1.0, **changes: Any) -> tuple[Shaped, Tensor, Tensor]:
    """A structure with its Lambda, the noise covariance, and what Lambda should be."""
    shaped, covariance = bound(kind), scale * noise_of(kind)
    feed(shaped, covariance)
    shaped.stretch = stretch
    shaped.settle(rule(**changes), scale * PRIOR, rise=10.0)
    return shaped, covariance, expected_lambda(shaped, covariance, scale * PRIOR, rule(**changes).factor(stretch))


def step_maps(shaped: Shaped) -> tuple[Tensor, Tensor]:
    """The linear maps from gradient and from innovations to a displacement, column by column."""
    unit, zero = torch.eye(SIZE, dtype=F64), torch.zeros(SIZE, dtype=F64)
    pull = torch.stack([shaped.displacement(e, zero) for e in unit], 1)
    push = torch.stack([shaped.displacement(zero, e) for e in unit], 1)
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
    curvature = lam / shaped.factor
    a, injected = torch.eye(SIZE, dtype=F64) - pull @ curvature, push @ push.T
    noise = pull @ covariance @ pull.T + injected
    if averaged:  # half of the injected noise, and its correlation with what the last step injected
        noise = noise - injected / 2 + (a @ injected + injected @ a.T) / 4
    found = torch.as_tensor(solve_discrete_lyapunov(a.numpy(), noise.numpy()))
    # In coordinates where Lambda is one: the shares of gradient noise are the eigenvalues of Lambda^-1 B.
    inverse = torch.linalg.inv(torch.linalg.cholesky(lam))
    shares, vectors = torch.linalg.eigh(inverse @ covariance @ inverse.T / 2)
    kept = shares if averaged else torch.ones_like(shares)
    inflation = torch.tensor([variance_inflation(shaped.unit_rate, share=float(s)) for s in kept], dtype=F64)
    assert inflation.min() > 1.0 and (not averaged or inflation.max() < 1.02 / (1 - HIGHEST / 2))
    axes = vectors.T @ inverse
    close(found / (T / N), shaped.factor * axes.T @ torch.diag(inflation) @ axes, curvature, 1e-6)


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
    torch.testing.assert_close(shaped.direction(g), pull @ g)
    torch.testing.assert_close(shaped.rates().double(), pull.diagonal())
    for slot, rate in zip((slice(0, 11), slice(11, 16)), shaped.group_rates(), strict=True):
        assert rate == pytest.approx(float(pull.diagonal()[slot].log().mean().exp()))
    assert shaped.clipped() == 0.0
    assert shaped.unit_rate == pytest.approx(rule().rate_curvature(stretch) / stretch)


def test_the_full_matrix_is_exact_for_parameters_in_very_different_units() -> None:
    """Regressions on raw columns: each parameter in units of its own, up to 1e8 apart."""
    shaped, units = bound("full"), torch.logspace(-4, 4, SIZE, dtype=F64)
    covariance = units[:, None] * random_covariance(SIZE, 1e3) * units
    feed(shaped, covariance)
    shaped.stretch = 1.0
    shaped.settle(rule(), torch.zeros(SIZE, dtype=F64), rise=10.0)
    pull, push = step_maps(shaped)
    lam = rule().factor() * BATCH * covariance
    close(pull, (T / N) * torch.linalg.inv(lam), lam, 1e-7)
    inverse = torch.linalg.inv(lam)
    close(push @ push.T, (T / N) ** 2 * inverse @ (2 * lam - covariance) @ inverse, lam, 1e-7)


@every_kind
def test_units_of_the_gradient_do_not_matter(kind: str) -> None:
    """Noise and prior curvature 1e-6 times as large: displacements of the same gradient are 1e6 times as long."""
    (one, _, _), (small, _, _) = settled(kind), settled(kind, scale=1e-6)
    g = torch.linspace(-1, 1, SIZE, dtype=F64)
    torch.testing.assert_close(1e-6 * small.direction(g), one.direction(g))


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
    assert shaped.clipped() == pytest.approx(1 / SIZE)
    pull, push = step_maps(shaped)
    close(pull, (T / N) * torch.linalg.inv(lam), lam, 1e-7)  # Lambda itself stays
    left = torch.linalg.eigvalsh(root.T @ push @ push.T @ root) / (T / N) ** 2
    assert abs(float(left[0])) < 1e-9 and float(left[1]) > 0.1
    if kind != "full":
        torch.testing.assert_close(push[:-1, :-1], before[:-1, :-1])


@every_kind
def test_slower_is_the_same_lambda_multiplied(kind: str) -> None:
    shaped, covariance, lam = settled(kind)
    shaped.slow(3.0)
    pull, push = step_maps(shaped)
    inverse = torch.linalg.inv(3 * lam)
    close(pull, (T / N) * inverse, lam, 1e-7)
    close(push @ push.T, (T / N) ** 2 * inverse @ (6 * lam - covariance) @ inverse, lam, 1e-7)


@every_kind
def test_rates_rise_slowly_and_fall_at_once(kind: str) -> None:
    """With so little bias allowed gradient noise is a small share of Lambda, and its correlations do not count."""
    shaped, covariance, lam = settled(kind, bias=1e-3)
    for factor, expected in ((1e-2, 0.5), (1.0, 1.0), (4.0, 4.0)):
        shaped.forget()
        feed(shaped, factor * covariance)
        shaped.settle(rule(bias=1e-3), factor * PRIOR, rise=2.0)
        close(step_maps(shaped)[0], (T / N) * torch.linalg.inv(expected * lam), lam, 1e-6)


@every_kind
def test_many_chains_are_each_alone(kind: str, generator: torch.Generator) -> None:
    shaped, _, _ = settled(kind)
    g, xi = torch.randn(2, 3, SIZE, generator=generator, dtype=F64)
    torch.testing.assert_close(
        shaped.displacement(g, xi), torch.stack([shaped.displacement(g[k], xi[k]) for k in range(3)])
    )
    torch.testing.assert_close(shaped.direction(g), torch.stack([shaped.direction(g[k]) for k in range(3)]))


@every_kind
def test_noise_of_many_chains_counts_as_of_one(kind: str, generator: torch.Generator) -> None:
    together, alone = bound(kind, batched=True), bound(kind)
    drawn = torch.randn(40, 3, SIZE, generator=generator, dtype=F64)
    for row in drawn:
        together.observe(parts(row))
        for one in row:
            alone.observe(parts(one))
    assert together.seen == alone.seen == 120
    for shaped in (together, alone):
        shaped.settle(rule(), PRIOR, rise=10.0)
    torch.testing.assert_close(step_maps(together), step_maps(alone))


# ------------------------------------------------------------------------------------------------ bases


def test_kronecker_bases_are_orthogonal_and_turning_back_undoes_turning() -> None:
    shaped, _, _ = settled("kronecker")
    assert isinstance(shaped, Kronecker)
    for basis, side in zip(shaped.bases[0], (4, 2), strict=True):
        torch.testing.assert_close(basis.T @ basis, torch.eye(side, dtype=F64))
    x = torch.randn(3, SIZE, dtype=F64)
    torch.testing.assert_close(shaped.back(shaped.turn(x)), x)
    torch.testing.assert_close(shaped.turn(shaped.back(x)), x)
    torch.testing.assert_close(shaped.turn(x)[:, 8:], x[:, 8:])  # vectors have no basis
    assert not torch.allclose(shaped.turn(x)[:, :8], x[:, :8])
    torch.testing.assert_close(shaped.turn(x).norm(dim=1), x.norm(dim=1))


def test_noise_is_uncorrelated_in_the_kronecker_basis() -> None:
    shaped, covariance, _ = settled("kronecker")
    turned = shaped.turn(shaped.turn(covariance).T)
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0.0, atol=1e-10)
    torch.testing.assert_close(shaped.v, turned.diagonal())


def test_long_sides_have_no_basis() -> None:
    shaped = Kronecker(longest=3)
    shaped.bind([{"params": [torch.zeros(4, 2), torch.zeros(1, 5), torch.zeros(6)]}], False)
    assert [(a is None, b is None) for a, b in zip(shaped.left, shaped.right, strict=True)] == [
        (True, False),  # 4 is too long
        (True, True),  # of a single row, and too long
    ]


def test_a_new_window_turns_lambda_into_the_new_basis(generator: torch.Generator) -> None:
    """Its diagonal there, so that traces stay; nothing is lost when the noise has not changed."""
    shaped, covariance, lam = settled("kronecker")
    shaped.forget()  # the same noise: the same basis, up to signs
    close(step_maps(shaped)[0], (T / N) * torch.linalg.inv(lam), lam, 1e-7)
    feed(shaped, torch.block_diag(random_covariance(8, 30.0, 5), covariance[8:, 8:]))
    before = shaped.lam.clone()
    shaped.forget()
    torch.testing.assert_close(shaped.lam[:8].sum(), before[:8].sum())
    assert not torch.allclose(shaped.lam[:8], before[:8])


def test_a_dead_parameter_has_a_floor_and_none_in_the_full_matrix() -> None:
    """Without noise and prior: the layer's mean bounds its rate; the full matrix takes the curvature it was told."""
    for kind in KINDS:
        shaped, covariance = bound(kind), noise_of("diagonal")
        covariance[12] = covariance[:, 12] = 0.0
        shaped.fallback.fill_(3.0)
        feed(shaped, covariance)
        shaped.stretch = 1.0
        shaped.settle(rule(), torch.zeros(SIZE, dtype=F64), rise=10.0)
        q = rule().factor()
        floor = getattr(shaped, "damping", 0.0) * BATCH * float(covariance.diagonal()[11:].mean())
        expected = q * (3.0 if kind == "full" else floor)
        assert float(shaped.rates()[12]) == pytest.approx(T / (N * expected))


# ------------------------------------------------------------------------------------------------ noise outside


def heat(shaped: Shaped, covariance: Tensor, temperature: float) -> float:
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
        shaped.settle(cold, PRIOR, rise=10.0)
        heats.append(heat(shaped, covariance, cold.temperature))
    assert heats[0] > 1 + 5 * EXCESS  # nothing is known of correlations before there is a Lambda
    assert heats[-1] < 1 + 2 * EXCESS  # the estimate of the top eigenvalue is itself noisy


@pytest.mark.parametrize("size", [16, 200, 20_000])
def test_independent_noise_does_not_slow_a_diagonal_lambda(size: int, generator: torch.Generator) -> None:
    """However many parameters there are: chance correlations among few noise vectors are no correlations."""
    shaped = Diagonal()
    shaped.bind([{"params": [torch.zeros(size)]}], False)
    own = rule(num_data=50_000, batch_size=128)
    rates = []
    for _ in range(2):
        shaped.forget()
        for _ in range(400):
            shaped.observe([torch.randn(size, generator=generator)])
        shaped.settle(own, torch.zeros(size), rise=10.0)
        rates.append(float(shaped.rates().mean()))
    # Heat is a mean over some fifty squares of normals, a fifth off at one standard error: at three, Lambda doubles.
    assert rates[1] > 0.4 * rates[0]
