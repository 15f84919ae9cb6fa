"""Lambda in bases of weight matrices: which sides get one, that they are the right ones, and that a step is exact."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd.geometry.kronecker import (
    Kronecker,
    LeadingAxes,
    weight_matrices,
)
from isosgd.geometry.linalg import diagonal
from isosgd.geometry.rule import Rule

F64 = torch.float64
RULE = Rule(num_data=500, batch_size=10, temperature=0.7, bias=0.02, averaged=True)
PRIOR = 1e-3
SHAPES = [(4, 3), (3,), (2, 3, 2), (5,)]  # two layers; with a longest side of 4 the second matrix gets leading axes
SIZE = sum(math.prod(shape) for shape in SHAPES)
KINDS = {"all axes": {}, "leading": {"longest": 4, "leading": 2}}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def bound(chains: int | None = None, dtype: torch.dtype = F64, **options: Any) -> Kronecker:
    structure, lead = Kronecker(**options), () if chains is None else (chains,)
    params = [torch.zeros(*lead, *shape, dtype=dtype) for shape in SHAPES]
    structure.bind([{"params": params[:2]}, {"params": params[2:]}], chains)
    return structure


def feed(structure: Kronecker, noise: Tensor) -> None:
    """Flat noise vectors ``[count, d]``, or ``[count, chains, d]``."""
    for vector in noise:
        parts = torch.split(vector, structure.sizes, -1)
        structure.observe([p.reshape(*p.shape[:-1], *s) for p, s in zip(parts, structure.shapes, strict=True)])


def correlated(count: int, generator: torch.Generator, chains: int = 1) -> Tensor:
    """Noise ``[count, chains, d]`` that no shape can express, different for each chain."""
    mix = torch.randn(chains, SIZE, SIZE, generator=torch.Generator().manual_seed(5), dtype=F64)
    white = torch.randn(count, chains, SIZE, generator=generator, dtype=F64)
    return torch.einsum("cij,ncj->nci", mix * torch.arange(1, chains + 1).view(-1, 1, 1), white)


def settle(structure: Kronecker, rise: float = 2.0) -> None:
    structure.set_lambda(RULE, structure.full(PRIOR, structure.total), rise)


def settled(generator: torch.Generator, chains: int | None = None, windows: int = 2, **options: Any) -> Kronecker:
    """A structure in the middle of a window."""
    structure = bound(chains, **options)
    for window in range(windows):
        noise = correlated(60, generator, chains or 1)
        feed(structure, noise if chains else noise[:, 0])
        settle(structure)
        if window < windows - 1:
            structure.forget()
    return structure


def axes_of(structure: Kronecker) -> Tensor:
    """The basis as a matrix of columns for each chain."""
    units = [structure.back(e.expand(structure.chains, -1)) for e in torch.eye(structure.total, dtype=F64)]
    return torch.stack(units, -1)


def step_maps(structure: Kronecker) -> tuple[Tensor, Tensor]:
    """The linear maps from gradient and from innovations to a displacement, column by column."""
    zero, tensors = structure.full(0.0, structure.total), structure.tensors()
    units = [e.expand(structure.chains, -1) for e in torch.eye(structure.total, dtype=F64)]
    pull = torch.stack([structure.displace(tensors, e, zero) for e in units], -1)
    return pull, torch.stack([structure.displace(tensors, zero, e) for e in units], -1)


# ------------------------------------------------------------------------------------------------ a step


@every_kind
@pytest.mark.parametrize("chains", [None, 3])
def test_a_step_is_that_of_theorem_1(options: dict[str, Any], chains: int | None, generator: torch.Generator) -> None:
    """``(T / N) Lambda^-1 (g + w)``, gradient and injected noise adding up to ``2 Lambda`` exactly."""
    structure = settled(generator, chains, **options)
    axes, scale = axes_of(structure), RULE.scale
    torch.testing.assert_close(axes.mT @ axes, torch.eye(SIZE, dtype=F64).expand_as(axes))
    lam, noise = (axes @ torch.diag_embed(x) @ axes.mT for x in (structure.on_axes.lam, structure.on_axes.v))
    assert structure.clipped().tolist() == [0.0] * structure.chains
    pull, push = step_maps(structure)
    inverse = torch.linalg.inv(lam)
    torch.testing.assert_close(pull, scale * inverse)
    torch.testing.assert_close(push @ push.mT, scale**2 * inverse @ (2 * lam - noise) @ inverse)
    torch.testing.assert_close(structure.rates(), diagonal(pull))
    g = torch.randn(structure.chains, SIZE, generator=generator, dtype=F64)
    torch.testing.assert_close(structure.direction(g), (pull @ g.unsqueeze(-1)).squeeze(-1))


@every_kind
def test_lambda_is_the_rule_in_the_basis(options: dict[str, Any], generator: torch.Generator) -> None:
    """What the variances of the window are in a basis, worked out from the noise vectors themselves."""
    structure = bound(3, **options)
    feed(structure, correlated(60, generator, 3))
    settle(structure)
    structure.forget()
    noise = correlated(60, generator, 3)
    feed(structure, noise)
    basis = axes_of(structure)
    settle(structure, rise=1e12)
    h = RULE.batch_size * torch.einsum("ncd,cde->nce", noise, basis).square().mean(0) + PRIOR
    for slot in structure.slots:
        h[:, slot] += structure.damping * h[:, slot].mean(-1, keepdim=True)
    torch.testing.assert_close(structure.on_axes.lam, structure.factor[:, None] * h)
    assert bool(
        (structure.factor >= RULE.factor(structure.curvature_ratio)).all()
    )  # noise that is not expressed slows it


@every_kind
def test_chains_together_are_chains_alone(options: dict[str, Any], generator: torch.Generator) -> None:
    together, alone = bound(3, **options), [bound(**options) for _ in range(3)]
    g, xi = torch.randn(2, 3, SIZE, generator=generator, dtype=F64)
    for _ in range(3):
        noise = correlated(60, generator, 3)
        for structure, own in [(together, noise), *((one, noise[:, k]) for k, one in enumerate(alone))]:
            feed(structure, own)
            settle(structure)
        step = together.displace(together.tensors(), g, xi)
        for k, one in enumerate(alone):
            own = slice(k, k + 1)
            torch.testing.assert_close(step[own], one.displace(one.tensors(), g[own], xi[own]))
            for number in ("rates", "clipped", "excess_temperature"):
                torch.testing.assert_close(getattr(together, number)()[own], getattr(one, number)())
        for structure in (together, *alone):
            structure.forget()


@pytest.mark.long
@every_kind
def test_a_step_compiles_without_a_break(options: dict[str, Any], generator: torch.Generator) -> None:
    structure = settled(generator, 2, **options)
    g, xi = torch.randn(2, 2, SIZE, generator=generator, dtype=F64)
    compiled = torch.compile(structure.displace, backend="aot_eager", fullgraph=True, dynamic=False)
    tensors = structure.tensors()
    torch.testing.assert_close(compiled(tensors, g, xi), structure.displace(tensors, g, xi))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_kind
def test_an_accelerator_makes_the_same_steps(options: dict[str, Any], generator: torch.Generator) -> None:
    structure, other = settled(generator, 2, **options), Kronecker(**options)
    params = [torch.zeros(2, *shape, dtype=F64, device="cuda") for shape in SHAPES]
    other.bind([{"params": params[:2]}, {"params": params[2:]}], 2)
    other.load(structure.state())
    noise = correlated(60, generator, 2)
    for one in (structure, other):
        feed(one, noise.to(one.device))
        settle(one)
    g, xi = torch.randn(2, 2, SIZE, generator=generator, dtype=F64)
    step = other.displace(other.tensors(), g.cuda(), xi.cuda()).cpu()
    torch.testing.assert_close(step, structure.displace(structure.tensors(), g, xi))


# ------------------------------------------------------------------------------------------------ bases


def spiked(count: int, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise matrices of two chains, most of it along three axes of the columns, and those axes, the strongest first."""
    axes = torch.linalg.qr(torch.randn(2, columns, 3, generator=generator, dtype=F64))[0].mT
    strength = torch.tensor([30.0, 15.0, 7.0], dtype=F64)
    along = torch.randn(count, 2, rows, 3, generator=generator, dtype=F64) * strength
    return along @ axes + torch.randn(count, 2, rows, columns, generator=generator, dtype=F64), axes


def test_leading_axes_are_found(generator: torch.Generator) -> None:
    count, rows, columns = 60, 8, 50
    noise, axes = spiked(count, rows, columns, generator)
    side = LeadingAxes(columns, 3)
    kept = side.start(noise[0])
    for i, matrix in enumerate(noise):
        side.update(kept, matrix, 1.0 / (i + 1))
    basis = side.basis(kept)
    turned = side.rotate(torch.eye(columns, dtype=F64).repeat(2, 1, 1), basis)
    torch.testing.assert_close(turned.mT @ turned, torch.eye(columns, dtype=F64).expand_as(turned))
    # Of an axis of strength s^2 the sample has an error of about sqrt(columns / (s^2 vectors)); those of the last
    # 1 / FORGET matrices count most. Squared overlaps, the weakest axis having the largest error.
    overlap = diagonal(axes @ turned[..., :3]).square()
    error = columns / (torch.tensor([30.0, 15.0, 7.0], dtype=F64).square() * rows * 20)
    assert bool((1.0 - overlap < 10 * error + 0.02).all())


@pytest.mark.parametrize("rows", [1, 3], ids=["a single row", "fewer rows than axes"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-20], ids=["no noise", "noise", "hardly any"])
def test_few_rows_or_no_noise_do_no_harm(rows: int, scale: float, generator: torch.Generator) -> None:
    structure = Kronecker(longest=2, leading=5)
    structure.bind([{"params": [torch.zeros(rows, 30), torch.zeros(4)]}])
    for _ in range(2):
        feed_one = scale * torch.randn(60, rows * 30 + 4, generator=generator)
        for vector in feed_one:
            structure.observe([vector[:-4].view(rows, 30), vector[-4:]])
        structure.set_lambda(RULE, structure.full(PRIOR, structure.total), 2.0)
        structure.forget()
    x = torch.randn(1, structure.total, generator=generator)
    torch.testing.assert_close(structure.back(structure.rotate(x)), x, rtol=1e-4, atol=1e-5)
    assert bool(torch.isfinite(structure.displace(structure.tensors(), x, x)).all())


def test_a_chain_that_diverged_does_not_stop_the_others(generator: torch.Generator) -> None:
    structure = settled(generator, 2, longest=4, leading=2)
    noise = correlated(60, generator, 2)
    noise[10:, 1] = torch.nan
    structure.forget()
    feed(structure, noise)
    settle(structure)
    structure.forget()
    g = torch.ones(2, SIZE, dtype=F64)
    moved = structure.displace(structure.tensors(), g, g)
    assert torch.isfinite(moved).all(-1).tolist() == [True, False]


# ------------------------------------------------------------------------------------------------ who gets one


def sides(*shapes: tuple[int, ...], **options: Any) -> list[tuple[str, str]]:
    return [(type(m.left).__name__, type(m.right).__name__) for m in weight_matrices(shapes, **options)]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"damping": -1.0}, "damping = -1.0"), ({"damping": math.nan}, "damping = nan"),
     ({"longest": 0}, "longest = 0"), ({"leading": -1}, "leading = -1")],
)  # fmt: skip
def test_bad_settings_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Kronecker(**options)
