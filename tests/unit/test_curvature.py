"""The largest curvature, found by power iteration on differences of gradients, for each chain and group."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd.data.sources import TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.curvature import Curvature, Stiffness
from isosgd.engine.schedule import Schedule
from isosgd.geometry.base import Geometry
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.rule import Rule
from isosgd.progress import Progress
from isosgd.samplers import SGLD
from isosgd.sampling.settings import sampler_factory
from isosgd.target import Params, Target, priors
from isosgd.warmup.windows import warm_up

F64 = torch.float64


def slots_of(sizes: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def probe(hessians: Tensor, sizes: list[int], steps: int) -> Curvature:
    """Curvature of the quadratics ``theta^T H theta / 2``, one a chain, with the parameters cut into groups."""
    theta = torch.zeros(hessians.shape[:2], dtype=hessians.dtype)
    curvature = Curvature(theta, slots_of(sizes), temperature=1.0, num_data=100, seed=0)
    for _ in range(steps):
        curvature.probe(theta, lambda move: (hessians @ move.unsqueeze(-1)).squeeze(-1))
    return curvature


def random_hessian(generator: torch.Generator, size: int) -> Tensor:
    """Positive definite, with correlations between all parameters and a gap below its top eigenvalue."""
    mix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(mix)
    return q @ torch.diag(torch.logspace(1, -2, size, dtype=torch.float64)) @ q.T


def test_the_top_curvature_of_one_group_is_found(generator: torch.Generator) -> None:
    curvature = probe(random_hessian(generator, 6)[None], [6], 200)
    assert curvature.own_values().tolist() == [pytest.approx([10.0], rel=0.02)]
    assert curvature.values().tolist() == [pytest.approx([10.0], rel=0.02)]


def test_each_group_finds_its_own_top_curvature() -> None:
    hessian = torch.block_diag(torch.diag(torch.tensor([3.0, 0.1])), torch.diag(torch.tensor([50.0, 1.0, 2.0])))
    curvature = probe(hessian[None], [2, 3], 200)
    assert curvature.own_values().tolist() == [pytest.approx([3.0, 50.0], rel=0.02)]
    assert curvature.values().tolist() == [pytest.approx([3.0, 50.0], rel=0.05)]


def test_each_chain_finds_its_own_curvatures() -> None:
    """Chains of very different stiffness side by side, one of them flat, whose numbers must stay finite."""
    hessian = torch.block_diag(torch.diag(torch.tensor([3.0, 0.1])), torch.diag(torch.tensor([50.0, 1.0, 2.0])))
    other = torch.block_diag(torch.diag(torch.tensor([1.0, 7.0])), torch.diag(torch.tensor([0.2, 0.1, 0.0])))
    values = probe(torch.stack([hessian, 1e4 * hessian, other, 0.0 * hessian]), [2, 3], 200).values()
    expected = torch.tensor([[3.0, 50.0], [3e4, 5e5], [7.0, 0.2]])
    torch.testing.assert_close(values[:3], expected, rtol=0.05, atol=0.0)
    assert bool(values[3].isfinite().all()) and float(values[3].max()) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_values_bound_the_groups_together(seed: int) -> None:
    """With rates delta / h_p in each group, no direction across groups may see more than delta."""
    hessian = random_hessian(torch.Generator().manual_seed(seed), 9)
    sizes = [2, 3, 4]
    (values,) = probe(hessian[None], sizes, 400).values().tolist()
    scale = torch.cat([torch.full((n,), h, dtype=torch.float64) for n, h in zip(sizes, values, strict=True)]).rsqrt()
    top = float(torch.linalg.eigvalsh(scale[:, None] * hessian * scale).max())
    assert top <= 1.05
    assert top > 0.5  # and not by far too much


@pytest.mark.parametrize("start", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_minibatch_noise_cancels(start: float, dtype: torch.dtype) -> None:
    """Each probe compares two gradients on one minibatch, so that their common noise drops out.

    A move must change a float32 gradient by more than its last digit, also of parameters that start at zero.
    """
    chain = one_chain(start, dtype)
    for _ in range(100):
        chain.evaluate()
        chain.probe_curvature()
    assert chain.curvatures().tolist() == [pytest.approx([4.0], rel=0.05)]
    assert torch.equal(chain.params["theta"], torch.full((3,), start, dtype=dtype))  # put back, to the last bit


def one_chain(start: float, dtype: torch.dtype) -> Chains:
    """Curvature 4 in three directions, under gradient noise a hundred times as large, of a chain that stands still."""
    data = 100.0 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def log_likelihood(params: Params, batch: Any) -> Tensor:
        return -2.0 * (params["theta"] - batch[0]).square().sum(-1)

    target = Target(log_likelihood, priors.Flat(), init={"theta": torch.full((3,), start, dtype=dtype)})

    def sgld(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> SGLD:
        return SGLD(groups, num_data=50, lr=1e-9, generator=generator, chains=chains)

    return Chains(target, [target.initial()], TensorBatches((data.to(dtype),), 4, 0), 50, sgld, seed=0)


# ------------------------------------------------------------------------------------------------ stiffness

RULE = Rule(num_data=500, batch_size=10, temperature=0.7, bias=0.02, averaged=True)


def settled(shaped: Geometry, size: int) -> Geometry:
    """A Lambda of two chains on data sets of their own, from noise of their own."""
    shaped.bind([{"params": [torch.zeros(2, size, dtype=F64)]}], 2, sets=2)
    settle(shaped)
    return shaped


def settle(shaped: Geometry, loudness: float = 1.0) -> None:
    g, size = torch.Generator().manual_seed(0), shaped.total
    spread = loudness * torch.logspace(-1, 1, size, dtype=F64) * torch.tensor([[1.0], [3.0]], dtype=F64)
    shaped.forget()
    for _ in range(200):
        shaped.observe([spread * torch.randn(2, size, generator=g, dtype=F64)])
    shaped.settle(RULE, torch.zeros(2, size, dtype=F64), rise=10.0)


def inverse_h(shaped: Geometry) -> Tensor:
    """``H^-1`` of each chain, column by column."""
    columns = [shaped.direction(e.expand(shaped.chains, -1)) for e in torch.eye(shaped.total, dtype=F64)]
    return torch.stack(columns, -1) / shaped.unit_rate.view(-1, 1, 1)


def hessians(size: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.stack([5.0 * random_hessian(g, size), 200.0 * random_hessian(g, size)])


@pytest.mark.parametrize("kind", [Diagonal, Full])
def test_stiffness_is_the_top_of_rate_times_curvature(kind: type[Geometry]) -> None:
    shaped, matrix = settled(kind(), 6), hessians(6)
    stiffness = Stiffness(torch.zeros(2, 6, dtype=F64), seed=0)

    def expected() -> list[float]:
        top = torch.linalg.eigvals(inverse_h(shaped) @ matrix).real.amax(-1)
        return (top * shaped.unit_rate).tolist()

    def probe(times: int) -> None:
        for _ in range(times):
            stiffness.probe(shaped, lambda move: (matrix @ move.unsqueeze(-1)).squeeze(-1))

    probe(300)
    first = expected()
    assert stiffness.value(shaped).tolist() == pytest.approx(first, rel=0.02)
    shaped.slow(torch.tensor([1.0, 4.0], dtype=F64))  # H is the same, the rate of one chain a quarter
    assert expected() == pytest.approx([first[0], first[1] / 4])
    assert stiffness.value(shaped).tolist() == pytest.approx(expected(), rel=0.02)
    settle(shaped, loudness=10.0)  # H is a hundred times what it was: known at once, and after a few probes
    assert stiffness.value(shaped).tolist() == pytest.approx(expected(), rel=0.05)
    probe(3)
    assert stiffness.value(shaped).tolist() == pytest.approx(expected(), rel=0.05)
    matrix *= torch.tensor([0.1, 3.0], dtype=F64).view(2, 1, 1)  # the place has changed
    stiffness.forget()
    probe(300)
    assert stiffness.value(shaped).tolist() == pytest.approx(expected(), rel=0.02)


def test_probes_along_the_axes_give_a_full_matrix_the_hessian() -> None:
    """Where the Hessian is far above what the noise says, it takes its place, for each chain."""
    shaped, matrix = settled(Full(), 4), 1e3 * hessians(4)
    stiffness = Stiffness(torch.zeros(2, 4, dtype=F64), seed=0)
    for _ in range(2 * shaped.axes):
        stiffness.probe_axis(shaped, lambda move: (matrix @ move.unsqueeze(-1)).squeeze(-1))
    assert shaped.probed == [2] * 4
    torch.testing.assert_close(shaped.hessian, shaped.root.mT @ matrix @ shaped.root)
    shaped.settle(RULE, torch.zeros(2, 4, dtype=F64), rise=10.0)
    values = torch.linalg.eigvals(inverse_h(shaped) @ matrix).real
    assert float(values.max()) < 1.0 + 1e-6  # nothing is stiffer than H says
    assert float(values.amax(-1).min()) > 1.0 - 1e-6


@pytest.mark.parametrize("method", ["psgld", "sgfs", "sgfs-full"])
def test_curvature_is_measured_in_the_metric_of_a_sampler_that_has_one(method: str, generator: torch.Generator) -> None:
    """Parameters whose curvatures are a thousand times apart: in the metric of the noise they are not."""
    x = torch.randn(200, 2, generator=generator) * torch.tensor([1.0, 30.0])
    y = x @ torch.tensor([1.0, 0.03]) + torch.randn(200, generator=generator)
    target = Target(
        lambda p, batch: -0.5 * (batch[1] - batch[0] @ p["w"]) ** 2, priors.Normal(10.0), init={"w": torch.zeros(2)}
    )
    schedule = Schedule(target, (x, y), None, 1, 20, 0, None, None)
    _, run = next(iter(schedule.runs(sampler_factory(method, 200, 1.0, 20, 1, {}))))
    report = warm_up(run, 600, Progress(1, show=False), measure_spacing=False)[0]
    assert run.in_metric
    plain, scaled = float(run.curvature.values()), float(run.scaled.values())
    assert abs(plain / 900.0 - 1.0) < 0.5 and scaled != pytest.approx(plain, rel=0.5)
    assert report.groups[0].predicted_bias < 0.05
