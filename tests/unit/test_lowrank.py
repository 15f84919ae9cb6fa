"""Lambda as a diagonal and a few directions: the maps are exact, the directions are found, and C is never negative."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd.geometry.base import MOST_EXCESS
from isosgd.geometry.lowrank import ROOM, SPILL, LowRank
from isosgd.geometry.rule import Rule

F64 = torch.float64
RULE = Rule(num_data=1000, batch_size=10, temperature=1.0, bias=0.02, averaged=True)
PRIOR = 1e-3


def bound(structure: LowRank, size: int, dtype: torch.dtype = F64, chains: int | None = None) -> LowRank:
    """A structure for two groups of parameters."""
    lead = () if chains is None else (chains,)
    parts = [torch.zeros(*lead, n, dtype=dtype) for n in (size // 3, size - size // 3)]
    structure.bind([{"params": [p]} for p in parts], chains)
    return structure


def feed(structure: LowRank, noise: Tensor) -> None:
    """Noise vectors ``[count, d]``, or ``[count, chains, d]``."""
    for vector in noise:
        structure.observe([vector[..., slot] for slot in structure.slots])


def settle(structure: LowRank, rule: Rule = RULE, rise: float = 2.0) -> None:
    structure.set_lambda(rule, structure.full(PRIOR, structure.total), rise)


def spiked(count: int, size: int, strong: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise of unequal scales with a few strong directions, always the same, and its covariance."""
    scale = torch.logspace(-1, 1, size, dtype=F64)
    fixed = torch.randn(size, strong, generator=torch.Generator().manual_seed(7), dtype=F64)
    axes = torch.linalg.qr(fixed)[0] * math.sqrt(50.0)
    shared = torch.randn(count, strong, generator=generator, dtype=F64) @ axes.T
    noise = scale * (torch.randn(count, size, generator=generator, dtype=F64) + shared)
    return noise, scale[:, None] * (torch.eye(size, dtype=F64) + axes @ axes.T) * scale


def settled(generator: torch.Generator, size: int = 12, rank: int = 4, **options: Any) -> LowRank:
    """A structure with its Lambda; of many chains each has noise of its own."""
    dtype, chains = options.pop("params", F64), options.pop("chains", None)
    structure = bound(LowRank(rank, **options), size, dtype, chains)
    count = 200 * (chains or 1)
    noise = spiked(count, size, 3, generator)[0].to(dtype)
    feed(structure, noise if chains is None else noise.view(200, chains, size) * (1.0 + torch.arange(chains)[:, None]))
    settle(structure)
    return structure


def dense(structure: LowRank, core: Tensor, beside: Tensor, chain: int = 0) -> Tensor:
    """``D diag(beside) + D S^T core S D``."""
    image = structure.lam[chain].double() * structure.basis[chain].double()
    return torch.diag(structure.lam[chain] * beside).double() + image.mT @ core.double() @ image


def lam_of(structure: LowRank, chain: int = 0) -> Tensor:
    return dense(structure, torch.diag(structure.strength[chain]), torch.ones(structure.total), chain)


def noise_of(structure: LowRank, chain: int = 0) -> Tensor:
    """The gradient noise that the structure knows of."""
    return dense(structure, structure.shared[chain], structure.residual[chain], chain)


def step_maps(structure: LowRank, chain: int = 0) -> tuple[Tensor, Tensor]:
    """The linear maps from gradient and from innovations to a displacement of a chain, column by column."""
    sizes, tensors = (structure.total, structure.total + structure.extra_innovations), structure.tensors()
    zeros = [structure.full(0.0, size) for size in sizes]
    units = [torch.eye(size).to(zeros[0]) for size in sizes]
    pull = [structure.displace(tensors, e.expand(structure.chains, -1), zeros[1])[chain] for e in units[0]]
    push = [structure.displace(tensors, zeros[0], e.expand(structure.chains, -1))[chain] for e in units[1]]
    return torch.stack(pull, 1).double(), torch.stack(push, 1).double()


def injected(structure: LowRank, chain: int = 0) -> Tensor:
    """Covariance of the noise that is put on the gradient."""
    root = lam_of(structure, chain) @ step_maps(structure, chain)[1] / structure.scale
    return root @ root.T


# ------------------------------------------------------------------------------------------------ the maps are exact


# Whatever S is rounded to, the maps are those of the rounded S.
EXACT = pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-9),
        ({"chains": 3}, 1e-9),
        ({"params": torch.float32}, 1e-4),
        ({"params": torch.float32, "dtype": torch.bfloat16, "chains": 2}, 1e-4),
    ],
    ids=["float64", "chains", "float32", "bfloat16"],
)


def close(a: Tensor, b: Tensor, unit: Tensor, tolerance: float) -> None:
    """Compare in scaled coordinates, where all entries are alike."""
    a, b = (unit[:, None] * m * unit for m in (a, b))
    assert float((a - b).abs().max()) < tolerance * float(b.abs().max())


@EXACT
def test_a_step_is_that_of_theorem_1(options: dict[str, Any], tolerance: float, generator: torch.Generator) -> None:
    """``(T / N) Lambda^-1 (g + w)``, gradient and injected noise adding up to ``2 Lambda`` exactly."""
    structure = settled(generator, **options)
    assert structure.clipped().tolist() == [0.0] * structure.chains
    for chain in range(structure.chains):
        lam, unit = lam_of(structure, chain), structure.lam[chain].double().sqrt()
        pull, push = step_maps(structure, chain)
        inverse = torch.linalg.inv(lam)
        close(pull, structure.scale * inverse, unit, tolerance)
        kick = structure.scale**2 * inverse @ (2 * lam - noise_of(structure, chain)) @ inverse
        close(push @ push.T, kick, unit, 2 * tolerance)
        torch.testing.assert_close(structure.rates()[chain].double(), pull.diagonal(), rtol=10 * tolerance, atol=0.0)


def test_noise_found_larger_than_the_directions_have_room_for_is_taken_out_exactly(generator: torch.Generator) -> None:
    """Along a direction the noise may exceed its strength and still be less than Lambda."""
    structure = settled(generator, chains=2)
    assert len(structure.tensors()) == 5
    strength = structure.strength
    structure.shared = torch.diag_embed(2.0 * strength + torch.linspace(-1.0, 1.0, 4, dtype=F64))
    structure.shared[1] = torch.diag(strength[1])  # the other chain has room
    structure.slow(torch.ones(2, dtype=F64))  # works out anew what is injected
    assert len(structure.tensors()) == 7
    for chain in range(2):
        missing = 2 * lam_of(structure, chain) - noise_of(structure, chain)
        assert float(torch.linalg.eigvalsh(missing).min()) > 0
        close(injected(structure, chain), missing, structure.lam[chain].rsqrt(), 1e-9)


@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["directions", "none"])
def test_lambda_is_the_rule_along_what_it_knows(scale: float, generator: torch.Generator) -> None:
    """Lambda = q (n Var + prior) with the noise as the structure splits it.

    A weak direction has room for more, and a share of what the directions have is reckoned with beside them.
    """
    structure = bound(LowRank(4, damping=0.0), 12)
    feed(structure, scale * spiked(200, 12, 3, generator)[0] + torch.randn(200, 12, generator=generator, dtype=F64))
    settle(structure)
    q = float(structure.factor)
    expected = q * (RULE.batch_size * noise_of(structure) + PRIOR * torch.eye(12, dtype=F64))
    along = q * RULE.batch_size * structure.shared[0].diagonal()
    assert bool((along < ROOM).any()) == (scale == 0.0)
    expected += dense(structure, torch.diag((ROOM - along).clamp_min(0.0)), torch.zeros(12))
    shared = dense(structure, structure.shared[0], torch.zeros(12))
    expected += q * RULE.batch_size * SPILL * torch.diag(shared.diagonal())
    torch.testing.assert_close(lam_of(structure), expected)
    torch.testing.assert_close(structure.factor, RULE.factor(structure.curvature_ratio))


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
    wanted = float(structure.factor) * RULE.batch_size * covariance
    covered = torch.linalg.eigvalsh(root.T @ wanted @ root)
    # The smallest eigenvalue of a white sample covariance; half of the vectors count, as the later ones weigh more.
    most = (1 - math.sqrt(size / (count / 2))) ** -2
    assert float(covered.max()) < most
    # The diagonal alone leaves 51 times as much noise as it covers, on average over a direction's parameters.
    scale = wanted.diagonal().rsqrt()
    alone = torch.linalg.eigvalsh(wanted * scale * scale[:, None])
    assert float(alone.max()) > 4 * most
    # The damping is a tenth of a layer's mean, and scales differ by ten: small parameters may be damped, no others.
    assert structure.strength[0, :3].min() > 10 * structure.strength[0, 3:].max()


def test_few_vectors_of_many_parameters_fake_no_direction(generator: torch.Generator) -> None:
    """Along a noise vector itself the noise looks d / count times too large: here 80 times."""
    structure = bound(LowRank(5), 4000)
    feed(structure, torch.randn(50, 4000, generator=generator, dtype=F64))
    settle(structure)
    # The mean of 8 vectors' squares, of which the largest of five counts: chi-square, six standard errors.
    most = float(structure.factor) * RULE.batch_size * 6 * math.sqrt(2 / 8) / (1 - 0.5)
    assert float(structure.strength.max()) < most
    feed(structure, torch.randn(200, 4000, generator=generator, dtype=F64))
    assert float(structure.excess_temperature()) < MOST_EXCESS


def test_noise_outside_of_the_shape_slows_lambda_down(generator: torch.Generator) -> None:
    structure = bound(LowRank(1, damping=0.0), 60)
    for _ in range(2):  # directions change from window to window, what is outside is measured under the first
        structure.forget()
        feed(structure, spiked(400, 60, 6, generator)[0])
        settle(structure)
    assert float(structure.factor) > 2 * float(RULE.factor(structure.curvature_ratio))
    assert float(structure.excess_temperature()) == pytest.approx(MOST_EXCESS)


# ------------------------------------------------------------------------------------------------ C >= 0


def test_noise_that_grows_beyond_lambda_is_clipped_and_counted(generator: torch.Generator) -> None:
    noise, _ = spiked(128, 12, 3, generator)
    structure = settled(generator)
    assert float(structure.clipped()) == 0.0
    structure.seen = 0
    feed(structure, 30.0 * noise)
    assert float(structure.clipped()) > 0.0
    covariance = injected(structure)
    assert bool(torch.isfinite(covariance).all())
    # Along the strongest direction nothing is left to inject.
    t = structure.basis[0, 0]
    assert float(t @ covariance @ t) < 0.05 * float(t @ (2 * lam_of(structure)) @ t)


# ------------------------------------------------------------------------------------------------ chains, state, rows


def test_chains_together_are_chains_alone(generator: torch.Generator) -> None:
    """Noise of its own for each chain, over two windows."""
    noise = spiked(600, 12, 3, generator)[0].view(200, 3, 12) * torch.tensor([[1.0], [5.0], [0.3]], dtype=F64)
    together, alone = bound(LowRank(4), 12, chains=3), [bound(LowRank(4), 12) for _ in range(3)]
    g, xi = torch.randn(3, 12, generator=generator, dtype=F64), torch.randn(3, 16, generator=generator, dtype=F64)
    for window in (noise[:80], noise[80:]):
        for structure, own in [(together, window), *((one, window[:, k]) for k, one in enumerate(alone))]:
            feed(structure, own)
            settle(structure)
        step, direction = together.displace(together.tensors(), g, xi), together.direction(g)
        for k, one in enumerate(alone):
            torch.testing.assert_close(step[k : k + 1], one.displace(one.tensors(), g[k : k + 1], xi[k : k + 1]))
            torch.testing.assert_close(direction[k : k + 1], one.direction(g[k : k + 1]))
            for number in ("rates", "clipped", "excess_temperature"):
                torch.testing.assert_close(getattr(together, number)()[k : k + 1], getattr(one, number)())
        for structure in (together, *alone):
            structure.forget()


@pytest.mark.long
def test_a_step_compiles_without_a_break(generator: torch.Generator) -> None:
    structure = settled(generator, chains=2)
    g, xi = torch.randn(2, 12, generator=generator, dtype=F64), torch.randn(2, 16, generator=generator, dtype=F64)
    compiled = torch.compile(structure.displace, backend="aot_eager", fullgraph=True, dynamic=False)
    tensors = structure.tensors()
    torch.testing.assert_close(compiled(tensors, g, xi), structure.displace(tensors, g, xi))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chains", [None, 3])
def test_an_accelerator_keeps_short_rows_and_makes_the_same_steps(
    chains: int | None, generator: torch.Generator
) -> None:
    structure = settled(generator, params=torch.float32, dtype=torch.bfloat16, chains=chains)
    other, lead = LowRank(4, dtype=torch.bfloat16), () if chains is None else (chains,)
    other.bind([{"params": [torch.zeros(*lead, 12, device="cuda")]}], chains)
    other.load(structure.state())
    g, xi = torch.randn(chains or 1, 12, generator=generator), torch.randn(chains or 1, 16, generator=generator)
    expected = structure.displace(structure.tensors(), g, xi)
    found = other.displace(other.tensors(), g.cuda(), xi.cuda()).cpu()
    # Vectors are rounded to bfloat16 before they meet S: an error of half a last digit, 2^-9, of each entry.
    force = (g + structure.amplitude * xi[:, :12]) * structure.rate.sqrt()
    error = (found - expected) / structure.rate.sqrt()
    assert float(error.abs().max()) < 4 * 2**-9 * float(torch.cat([force.abs(), xi.abs()], 1).max())


# ------------------------------------------------------------------------------------------------ in the sampler


@pytest.mark.parametrize(
    ("options", "named"),
    [({"rank": 0}, "rank = 0"), ({"rank": 2.5}, "rank = 2.5"), ({"damping": -1.0}, "damping = -1.0"),
     ({"damping": math.nan}, "damping = nan"), ({"dtype": torch.int8}, "int8")],
)  # fmt: skip
def test_bad_settings_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LowRank(**options)


@pytest.mark.parametrize("size", [1, 2, 14])
def test_as_many_directions_as_parameters_are_a_full_matrix(size: int, generator: torch.Generator) -> None:
    structure = bound(LowRank(20), size)
    feed(structure, torch.randn(200, size, generator=generator, dtype=F64))
    settle(structure)
    assert bool(torch.isfinite(lam_of(structure)).all()) and bool((structure.rates() > 0).all())
    assert float(torch.linalg.eigvalsh(2 * lam_of(structure) - noise_of(structure)).min()) > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")
def test_no_chain_is_lost_where_the_directions_leave_nothing_of_a_coordinate() -> None:
    """Small networks on few rows: what `split` divides by may be rounding alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator)
    y = torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(50, 1, generator=generator)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    target = isosgd.Target.from_module(network, "gaussian", isosgd.priors.FanInNormal())
    quick = {"draws": 4, "chains": 4, "batch_size": 10, "warmup": 1500, "keep_every": 2, "progress": False}
    posterior = isosgd.sample(target, (x, y), **quick, compile=False, structure="lowrank")
    assert not posterior.info["dropped"]
