"""Lambda as a diagonal and a few directions: the maps are exact, the directions are found, and C is never negative."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd.samplers import rows
from isosgd.samplers.lowrank import LowRank
from isosgd.samplers.shaped import EXCESS, Rule

F64 = torch.float64
RULE = Rule(num_data=1000, batch_size=10, temperature=1.0, bias=0.02, averaged=True)
PRIOR = 1e-3


def bound(structure: LowRank, size: int, dtype: torch.dtype = F64, chains: int | None = None) -> LowRank:
    """A structure for two groups of parameters."""
    lead = () if chains is None else (chains,)
    parts = [torch.zeros(*lead, n, dtype=dtype) for n in (size // 3, size - size // 3)]
    structure.bind([{"params": [p]} for p in parts], batched=chains is not None)
    return structure


def feed(structure: LowRank, noise: Tensor) -> None:
    for vector in noise:
        structure.observe([vector[structure.slots[0]], vector[structure.slots[1]]])


def settle(structure: LowRank, rule: Rule = RULE, rise: float = 2.0) -> None:
    structure.settle(rule, torch.full((structure.total,), PRIOR), rise)


def spiked(count: int, size: int, strong: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise of unequal scales with a few strong directions, always the same, and its covariance."""
    scale = torch.logspace(-1, 1, size, dtype=F64)
    fixed = torch.randn(size, strong, generator=torch.Generator().manual_seed(7), dtype=F64)
    axes = torch.linalg.qr(fixed)[0] * math.sqrt(50.0)
    shared = torch.randn(count, strong, generator=generator, dtype=F64) @ axes.T
    noise = scale * (torch.randn(count, size, generator=generator, dtype=F64) + shared)
    return noise, scale[:, None] * (torch.eye(size, dtype=F64) + axes @ axes.T) * scale


def settled(generator: torch.Generator, size: int = 12, rank: int = 4, **options: Any) -> LowRank:
    dtype = options.pop("params", F64)
    structure = bound(LowRank(rank, **options), size, dtype)
    feed(structure, spiked(200, size, 3, generator)[0].to(dtype))
    settle(structure)
    return structure


def dense(structure: LowRank, core: Tensor, diagonal: Tensor | float = 1.0) -> Tensor:
    """``D^1/2 (diag + U^T core U) D^1/2``."""
    u, root = structure.basis.double(), structure.lam.double().sqrt()
    inner = torch.eye(structure.total, dtype=F64) * diagonal + u.mT @ core.double() @ u
    return root[:, None] * inner * root


def lam_of(structure: LowRank) -> Tensor:
    return dense(structure, torch.diag(structure.strength))


def noise_of(structure: LowRank) -> Tensor:
    """The gradient noise that the structure knows of."""
    return dense(structure, structure.shared, structure.residual.double())


def injected(structure: LowRank) -> Tensor:
    """The map from innovations to noise on the gradient, column by column."""
    zero = torch.zeros(structure.total, dtype=structure.dtype)
    columns = [structure.displacement(zero, xi) for xi in torch.eye(structure.total, dtype=structure.dtype)]
    return lam_of(structure) @ torch.stack(columns, dim=1).double() / structure.scale


# ------------------------------------------------------------------------------------------------ the maps are exact


# Whatever U is rounded to, the maps are those of the rounded U.
EXACT = pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 1e-9), ({"params": torch.float32}, 1e-4), ({"params": torch.float32, "dtype": torch.bfloat16}, 1e-4)],
    ids=["float64", "float32", "bfloat16"],
)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert float((a - b).abs().max()) < tolerance * float(b.abs().max())


@EXACT
def test_the_direction_is_the_inverse_of_lambda(
    options: dict[str, Any], tolerance: float, generator: torch.Generator
) -> None:
    structure = settled(generator, **options)
    unit = structure.lam.sqrt()  # compare in scaled coordinates, where all entries are alike
    found = torch.stack([structure.direction(e) for e in torch.eye(structure.total, dtype=structure.dtype)], dim=1)
    expected = structure.scale * torch.linalg.inv(lam_of(structure))
    close(unit[:, None] * found * unit, unit[:, None] * expected * unit, tolerance)
    torch.testing.assert_close(structure.rates(), expected.diagonal().to(structure.dtype), rtol=tolerance, atol=0.0)


@EXACT
def test_injected_and_gradient_noise_add_up_to_lambda(
    options: dict[str, Any], tolerance: float, generator: torch.Generator
) -> None:
    structure = settled(generator, **options)
    assert structure.clipped() == 0.0
    root, unit = injected(structure), structure.lam.double().rsqrt()
    missing = 2 * lam_of(structure) - noise_of(structure)
    close(unit[:, None] * (root @ root.T) * unit, unit[:, None] * missing * unit, 2 * tolerance)


def test_a_displacement_is_the_direction_and_the_kick(generator: torch.Generator) -> None:
    structure = settled(generator)
    g, xi = torch.randn(2, structure.total, generator=generator, dtype=F64)
    kick = structure.displacement(torch.zeros_like(g), xi)
    torch.testing.assert_close(structure.displacement(g, xi), structure.direction(g) + kick)


def test_lambda_is_the_rule_along_what_it_knows(generator: torch.Generator) -> None:
    """Lambda = q (n Var + prior) with the noise as the structure splits it, but for the damping."""
    structure = settled(generator, damping=0.0)
    expected = structure.factor * (RULE.batch_size * noise_of(structure) + PRIOR * torch.eye(12, dtype=F64))
    torch.testing.assert_close(lam_of(structure), expected)
    assert structure.factor == RULE.factor(structure.stretch)


def test_slowing_down_keeps_noise_and_multiplies_lambda(generator: torch.Generator) -> None:
    structure = settled(generator)
    lam, noise, rates = lam_of(structure), noise_of(structure), structure.rates().clone()
    structure.slow(3.0)
    torch.testing.assert_close(lam_of(structure), 3 * lam)
    torch.testing.assert_close(noise_of(structure), noise)
    torch.testing.assert_close(structure.rates(), rates / 3)
    root = injected(structure)
    torch.testing.assert_close(root @ root.T, 6 * lam - noise)


# ------------------------------------------------------------------------------------------------ what is found


def test_strong_directions_are_found(generator: torch.Generator) -> None:
    count, size = 2000, 60
    noise, covariance = spiked(count, size, 3, generator)
    structure = bound(LowRank(5), size)
    feed(structure, noise[:100])
    settle(structure)
    structure.forget()
    feed(structure, noise[100:])
    settle(structure, rise=100.0)
    # Noise over what the rule says that Lambda covers: q n Var / Lambda is 1 where Lambda is right.
    root = torch.linalg.cholesky(torch.linalg.inv(lam_of(structure)))
    covered = torch.linalg.eigvalsh(structure.factor * RULE.batch_size * root.T @ covariance @ root)
    # The smallest eigenvalue of a white sample covariance; half of the vectors count, as the later ones weigh more.
    most = (1 - math.sqrt(size / (count / 2))) ** -2
    assert float(covered.max()) < most
    # The diagonal alone leaves 51 times as much noise as it covers, on average over a direction's parameters.
    diagonal = structure.factor * RULE.batch_size * covariance.diagonal()
    alone = torch.linalg.eigvalsh(
        structure.factor * RULE.batch_size * covariance * diagonal.rsqrt() * diagonal.rsqrt()[:, None]
    )
    assert float(alone.max()) > 4 * most
    # The damping is a tenth of a layer's mean, and scales differ by ten: small parameters may be damped, no others.
    assert structure.strength[:3].min() > 10 * structure.strength[3:].max()


def test_few_vectors_of_many_parameters_fake_no_direction(generator: torch.Generator) -> None:
    """Along a noise vector itself the noise looks d / count times too large: here 80 times."""
    structure = bound(LowRank(5), 4000)
    feed(structure, torch.randn(50, 4000, generator=generator, dtype=F64))
    settle(structure)
    # The mean of 8 vectors' squares, of which the largest of five counts: chi-square, six standard errors.
    assert float(structure.strength.max()) < structure.factor * RULE.batch_size * 6 * math.sqrt(2 / 8) / (1 - 0.5)
    for vector in torch.randn(200, 4000, generator=generator, dtype=F64):
        structure.observe([vector[s] for s in structure.slots])
    assert structure.excess() < EXCESS


def test_noise_outside_of_the_shape_slows_lambda_down(generator: torch.Generator) -> None:
    structure = bound(LowRank(1, damping=0.0), 60)
    for _ in range(2):  # directions change from window to window, what is outside is measured under the first
        structure.forget()
        feed(structure, spiked(400, 60, 6, generator)[0])
        settle(structure)
    assert structure.factor > 2 * RULE.factor(structure.stretch)
    assert structure.excess() == pytest.approx(EXCESS)


def test_directions_go_on_from_window_to_window(generator: torch.Generator) -> None:
    noise, covariance = spiked(800, 60, 3, generator)
    structure = bound(LowRank(3), 60)
    feed(structure, noise[:100])
    settle(structure)
    assert not structure.tracking
    structure.forget()
    assert structure.tracking
    feed(structure, noise[100:])
    settle(structure, rise=100.0)
    rows = structure.basis * structure.root
    # Noise along each direction as measured, and as it is: half of the 700 vectors or more count.
    error = math.sqrt(2 / 350)
    torch.testing.assert_close(
        structure.spread.diagonal(), (rows @ covariance @ rows.T).diagonal(), rtol=4 * error, atol=0.0
    )


# ------------------------------------------------------------------------------------------------ C >= 0


def test_noise_that_grows_beyond_lambda_is_clipped_and_counted(generator: torch.Generator) -> None:
    noise, _ = spiked(128, 12, 3, generator)
    structure = settled(generator)
    assert structure.clipped() == 0.0
    structure.seen = 0
    feed(structure, 30.0 * noise)
    assert structure.clipped() > 0.0
    root = injected(structure)
    assert bool(torch.isfinite(root).all())
    # Along the strongest direction nothing is left to inject.
    t = (structure.basis[0] * structure.root).double()
    assert float(t @ root @ root.T @ t) < 0.05 * float(t @ (2 * lam_of(structure)) @ t)


def test_noise_goes_on_being_averaged_and_lambda_does_not_move(generator: torch.Generator) -> None:
    structure = settled(generator)
    lam, before = lam_of(structure), noise_of(structure)
    feed(structure, 0.5 * spiked(400, 12, 3, generator)[0])
    torch.testing.assert_close(lam_of(structure), lam)
    assert float(noise_of(structure).trace()) < 0.8 * float(before.trace())
    root = injected(structure)
    torch.testing.assert_close(root @ root.T, 2 * lam - noise_of(structure))


def test_dead_parameters_get_the_damping(generator: torch.Generator) -> None:
    structure = bound(LowRank(3), 30)
    noise = torch.randn(100, 30, generator=generator, dtype=F64)
    noise[:, 20:25] = 0.0
    feed(structure, noise)
    settle(structure)
    alive = structure.lam[25:]
    assert bool((structure.lam[20:25] > 0.05 * alive.mean()).all())
    assert bool(torch.isfinite(injected(structure)).all())


def test_a_second_settling_follows_the_stretch(generator: torch.Generator) -> None:
    structure = settled(generator)
    lam = lam_of(structure)
    structure.stretch = 400.0
    settle(structure)
    torch.testing.assert_close(lam_of(structure), lam * structure.factor / RULE.factor(4.0))
    assert structure.factor == pytest.approx(RULE.factor(400.0))


def test_rates_rise_slowly(generator: torch.Generator) -> None:
    structure = settled(generator)
    before = structure.lam.clone()
    structure.forget()
    feed(structure, 0.01 * spiked(100, 12, 3, generator)[0])
    settle(structure, rise=2.0)
    torch.testing.assert_close(structure.lam, before / 2)


# ------------------------------------------------------------------------------------------------ chains, state, rows


def test_chains_together_are_chains_alone(generator: torch.Generator) -> None:
    noise, _ = spiked(120, 12, 3, generator)
    together, alone = bound(LowRank(4), 12, chains=3), bound(LowRank(4), 12)
    for three in noise.view(40, 3, 12):
        together.observe([three[:, s] for s in together.slots])
    feed(alone, noise)
    settle(together)
    settle(alone)
    g, xi = torch.randn(2, 3, 12, generator=generator, dtype=F64)
    for k in range(3):
        torch.testing.assert_close(together.displacement(g, xi)[k], alone.displacement(g[k], xi[k]))
        torch.testing.assert_close(together.direction(g)[k], alone.direction(g[k]))


@pytest.mark.parametrize("window", [False, True], ids=["sampling", "inside a window"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_saved_state_goes_on_as_if_nothing_had_been(
    window: bool, dtype: torch.dtype | None, generator: torch.Generator
) -> None:
    structure = settled(generator, params=torch.float32, dtype=dtype)
    noise = spiked(100, 12, 3, generator)[0].float()
    if window:
        structure.forget()
    feed(structure, noise[:30])
    other = bound(LowRank(4, dtype=dtype), 12, torch.float32)
    other.load(structure.state())
    g, xi = torch.randn(2, 12, generator=generator)
    for one in (structure, other):
        feed(one, noise[30:])
        settle(one)
    assert torch.equal(structure.displacement(g, xi), other.displacement(g, xi))
    assert structure.basis.dtype == other.basis.dtype == (dtype or torch.float32)


def test_products_block_by_block_are_products(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    monkeypatch.setattr(rows, "BLOCK", 7)
    u = torch.randn(3, 30, generator=generator, dtype=F64)
    x, weight = torch.randn(2, 4, 30, generator=generator, dtype=F64), torch.rand(30, generator=generator, dtype=F64)
    core = torch.randn(3, 3, generator=generator, dtype=F64)
    torch.testing.assert_close(rows.project(u, x), x @ u.T)
    torch.testing.assert_close(rows.project(u, x[0, 0]), u @ x[0, 0])
    torch.testing.assert_close(rows.gram(u, weight), u * weight @ u.T)
    torch.testing.assert_close(rows.explained(u, core), (u.T @ core @ u).diagonal())
    along = torch.randn(2, 4, 3, generator=generator, dtype=F64)
    torch.testing.assert_close(rows.spread_out_(u, along, x.clone()), x + along @ u)
    unit = rows.orthonormal(u.clone())
    torch.testing.assert_close(unit @ unit.T, torch.eye(3, dtype=F64))
    torch.testing.assert_close(unit.T @ unit @ u.T, u.T)


def test_a_split_explains_the_noise(generator: torch.Generator) -> None:
    u = torch.linalg.qr(torch.randn(40, 3, generator=generator, dtype=F64))[0].T
    psi = torch.rand(40, generator=generator, dtype=F64) + 0.5
    shared = torch.diag(torch.tensor([9.0, 4.0, 2.0], dtype=F64))
    beside = torch.eye(40, dtype=F64) - u.T @ u
    left = (beside @ torch.diag(psi) @ beside).diagonal()
    torch.testing.assert_close(rows.leftover(u, psi), left)
    found_psi, found = rows.split(u, left, shared + u * psi @ u.T)
    error = 20 * rows.CONVERGED
    torch.testing.assert_close(found_psi, psi, rtol=error, atol=0.0)
    torch.testing.assert_close(found, shared, rtol=error, atol=error)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chains", [None, 3])
def test_an_accelerator_keeps_short_rows_and_makes_the_same_steps(
    chains: int | None, generator: torch.Generator
) -> None:
    structure = settled(generator, params=torch.float32, dtype=torch.bfloat16)
    other = LowRank(4, dtype=torch.bfloat16)
    other.bind([{"params": [torch.zeros(*([chains] * (chains is not None)), 12, device="cuda")]}], chains is not None)
    other.load(structure.state() | {"batched": chains is not None})
    shape = (2, 12) if chains is None else (2, chains, 12)
    g, xi = torch.randn(shape, generator=generator)
    # Vectors are rounded to bfloat16 before they meet U: an error of half a last digit, 2^-9, of each entry.
    expected, unit = structure.displacement(g, xi), structure.pace
    error = (other.displacement(g.cuda(), xi.cuda()).cpu() - expected) / unit
    assert float(error.abs().max()) < 4 * 2**-9 * float(torch.cat([(g * unit).abs(), xi.abs()]).max())


# ------------------------------------------------------------------------------------------------ in the sampler


def make_sampler(**settings: Any) -> tuple[nn.Linear, isosgd.ISGD]:
    torch.manual_seed(1)
    net = nn.Linear(6, 2)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    generator = torch.Generator().manual_seed(2)
    sampler = isosgd.ISGD(
        net.named_parameters(), num_data=100, batch_size=10, structure="lowrank", generator=generator, **settings
    )
    for _ in range(60):
        sampler.observe([torch.randn_like(p) for p in net.parameters()])
    sampler.adapt([1.0] * len(sampler.param_groups), prior=[torch.ones_like(p) for p in net.parameters()])
    return net, sampler


def test_a_sampler_takes_it_by_name_and_resumes() -> None:
    net, sampler = make_sampler()
    assert isinstance(sampler.shaped, LowRank)
    sampler.step()
    saved, where = copy.deepcopy(sampler.state_dict()), [p.detach().clone() for p in net.parameters()]
    sampler.step()
    after = [p.detach().clone() for p in net.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(where, after, strict=True))
    other, again = make_sampler()
    again.load_state_dict(saved)
    with torch.no_grad():
        for p, value in zip(other.parameters(), where, strict=True):
            p.copy_(value)
    again.step()
    assert all(torch.equal(a, b) for a, b in zip(after, other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"rank": 0}, "rank = 0"), ({"rank": 2.5}, "rank = 2.5"), ({"damping": -1.0}, "damping = -1.0"),
     ({"damping": math.nan}, "damping = nan"), ({"dtype": torch.int8}, "int8")],
)  # fmt: skip
def test_bad_settings_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LowRank(**options)
