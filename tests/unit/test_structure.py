"""Lambda: how large it is, and that injected noise is exactly what gradient noise leaves to be filled."""

import math

import pytest
import torch
from torch import Tensor

from isosgd.geometry.choice import make_structure
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.layer import (
    PerGroup,
    diagonal_scale,
    outer_factor,
    root,
    take_out_,
)
from isosgd.noise.model import ring_spectrum

F64 = torch.float64


def injected(lam: float, ring: Tensor, count: int | None = None) -> Tensor:
    """The linear map from innovations to injected noise, column by column."""
    factor = outer_factor(ring, ring_spectrum(ring), lam, ring.shape[0] if count is None else count)
    columns = torch.eye(ring.shape[1], dtype=ring.dtype)
    for xi in columns:
        take_out_(xi, ring, factor)
    return root(2.0 * lam) * columns.T


def outer_mean(ring: Tensor) -> Tensor:
    return ring.T @ ring / ring.shape[0]


@pytest.mark.parametrize(("vectors", "size"), [(1, 5), (2, 5), (5, 5), (8, 3), (3, 1)])
def test_injected_and_gradient_noise_add_up_to_lambda(vectors: int, size: int, generator: torch.Generator) -> None:
    ring = torch.randn(vectors, size, generator=generator, dtype=F64)
    lam = 0.51 * float(torch.linalg.eigvalsh(outer_mean(ring)).max())
    a = injected(lam, ring)
    torch.testing.assert_close(a @ a.T, 2 * lam * torch.eye(size, dtype=F64) - outer_mean(ring))
    torch.testing.assert_close(a, a.T)


def test_slots_not_yet_filled_do_not_count(generator: torch.Generator) -> None:
    ring = torch.zeros(4, 3, dtype=F64)
    ring[:2] = torch.randn(2, 3, generator=generator, dtype=F64)
    torch.testing.assert_close(injected(4.0, ring, count=2), injected(4.0, ring[:2]))


def test_one_vector_in_closed_form(generator: torch.Generator) -> None:
    d, lam = torch.randn(4, generator=generator, dtype=F64), 5.0
    unit = d / d.norm()
    shrink = 1 - math.sqrt(1 - float(d @ d) / (2 * lam))
    expected = math.sqrt(2 * lam) * (torch.eye(4, dtype=F64) - shrink * torch.outer(unit, unit))
    torch.testing.assert_close(injected(lam, d[None]), expected)


def test_noise_beyond_lambda_gets_nothing_and_the_rest_all_it_needs() -> None:
    """Two orthogonal noise vectors, one longer than lambda covers."""
    ring = torch.tensor([[4.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=F64)
    a = injected(1.0, ring)
    torch.testing.assert_close(a @ a.T, torch.diag(torch.tensor([0.0, 1.5, 2.0], dtype=F64)))


def test_without_noise_all_is_injected() -> None:
    torch.testing.assert_close(injected(0.5, torch.zeros(3, 2, dtype=F64)), torch.eye(2, dtype=F64))


@pytest.mark.parametrize("vectors", [1, 3])
def test_chains_together_are_chains_alone(vectors: int, generator: torch.Generator) -> None:
    ring = torch.randn(4, vectors, 5, generator=generator, dtype=F64)
    xi, lam = torch.randn(4, 5, generator=generator, dtype=F64), torch.tensor([0.2, 2.0, 4.0, 9.0], dtype=F64)
    together = xi.clone()
    take_out_(together, ring, outer_factor(ring, ring_spectrum(ring), lam, vectors))
    for k in range(4):
        alone = xi[k].clone()
        take_out_(alone, ring[k], outer_factor(ring[k], ring_spectrum(ring[k]), float(lam[k]), vectors))
        torch.testing.assert_close(together[k], alone)


def test_diagonal_scale_fills_up_each_parameter() -> None:
    scale = diagonal_scale(2.0, torch.tensor([0.0, 3.0, 4.0, 9.0]))
    torch.testing.assert_close(scale, torch.tensor([2.0, 1.0, 0.0, 0.0]))
    by_chain = diagonal_scale(torch.tensor([2.0, 5.0]), torch.tensor([[0.0, 3.0], [1.0, 6.0]]))
    torch.testing.assert_close(by_chain, torch.tensor([[2.0, 1.0], [3.0, 2.0]]))


# ------------------------------------------------------------------------------------------------ lambda


def numbers(*values: float) -> list[Tensor]:
    return [torch.tensor(v) for v in values]


def test_a_layer_takes_the_larger_bound() -> None:
    assert [float(x) for x in PerGroup("layer").solve(numbers(1.0, 5.0), numbers(3.0, 2.0))] == [3.0, 5.0]


@pytest.mark.parametrize(("guard", "expected"), [((3.0, 2.0), 6.0), ((9.0, 2.0), 9.0)])
def test_a_single_lambda_covers_the_sum_of_noise_and_the_largest_curvature(
    guard: tuple[float, ...], expected: float
) -> None:
    assert [float(x) for x in PerGroup("single").solve(numbers(1.0, 5.0), numbers(*guard))] == [expected] * 2


@pytest.mark.parametrize("structure", [PerGroup("layer"), PerGroup("single")], ids=["layer", "single"])
def test_lambdas_of_many_chains_are_those_of_each(structure: PerGroup) -> None:
    noise, guard = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.5])], [torch.tensor([0.1, 7.0])] * 2
    together = structure.solve(noise, guard)
    for k in range(2):
        alone = structure.solve([b[k] for b in noise], [h[k] for h in guard])
        assert [float(x[k]) for x in together] == [float(x) for x in alone]


def test_names_stand_for_structures() -> None:
    assert make_structure("layer") == PerGroup("layer")
    assert make_structure("single") == PerGroup("single")
    own = Diagonal()
    assert make_structure(own) is own
