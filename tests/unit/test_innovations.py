"""Innovations: their moments, independence, and a stream that the generator alone decides."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from isosgd.samplers.innovations import UNIT, Source

NORMAL_MOMENTS = [0.0, 1.0, 0.0, 3.0, 0.0]
BITS_MOMENTS = [0.0, 1.0, 0.0, 2.75, 0.0]
LEVELS = UNIT * np.arange(-4, 5)
SIGMAS = 4.5
KINDS = ["normal", "bits"]


def drawn(size: int, generator: torch.Generator, kind: str = "bits", dtype: torch.dtype = torch.float64) -> Tensor:
    """One fill. What the thread draws ahead is given back, so that the generator stands where this fill left it."""
    source = Source(torch.empty(size, dtype=dtype), generator, kind)
    x = source.fill().clone()
    generator.set_state(source.state())
    return x


def test_moments_are_those_of_a_normal_but_the_fourth() -> None:
    weights = np.array([math.comb(8, k) for k in range(9)]) / 256
    found = [np.sum(weights * LEVELS**k) for k in range(1, 6)]
    np.testing.assert_allclose(found, BITS_MOMENTS, atol=1e-12)


def test_draws_are_binomial(generator: torch.Generator) -> None:
    values, counts = np.unique(drawn(1 << 18, generator).numpy(), return_counts=True)
    np.testing.assert_allclose(values, LEVELS, rtol=1e-12)
    expected = np.array([math.comb(8, k) for k in range(9)]) * 2.0**10
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 8) < SIGMAS * math.sqrt(16)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_draws(kind: str, generator: torch.Generator) -> None:
    x = drawn(1 << 18, generator, kind)
    for k, expected in enumerate(NORMAL_MOMENTS if kind == "normal" else BITS_MOMENTS, start=1):
        powers = x**k
        z = float((powers.mean() - expected) / (powers.std() / math.sqrt(len(x))))
        assert abs(z) < SIGMAS, f"moment {k}: z = {z}"


def z_of_correlation(a: Tensor, b: Tensor) -> float:
    product = (a - a.mean()) * (b - b.mean())
    return float(product.mean() / (product.std() / math.sqrt(len(product))))


@pytest.mark.parametrize("power", [1, 2])
def test_positions_are_independent(power: int, generator: torch.Generator) -> None:
    x = drawn(1 << 17, generator) ** power
    for lag in (1, 2, 3, 4, 8, 16, 64, 1 << 16):
        assert abs(z_of_correlation(x[:-lag], x[lag:])) < SIGMAS, f"lag {lag}"


@pytest.mark.parametrize("power", [1, 2])
def test_steps_are_independent(power: int, generator: torch.Generator) -> None:
    steps = [drawn(1 << 16, generator) ** power for _ in range(4)]
    for lag in (1, 2, 3):
        assert abs(z_of_correlation(steps[0], steps[lag])) < SIGMAS


def test_sums_over_steps_are_normal(generator: torch.Generator) -> None:
    """The fourth moment of a sum of m innovations tends to 3 like 1/m."""
    total = sum(drawn(1 << 16, generator) for _ in range(16)) / 4.0
    for k, expected in ((2, 1.0), (4, 3.0 - 0.25 / 16)):
        powers = total**k
        assert abs(float((powers.mean() - expected) / (powers.std() / 256))) < SIGMAS


def test_the_thread_ahead_changes_nothing() -> None:
    """One source filled three times gives what three sources give, each resumed from the saved state of the last."""
    source = Source(torch.empty(100), torch.Generator().manual_seed(1), "bits")
    once = [source.fill().clone() for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    again = []
    for _ in range(3):
        one = Source(torch.empty(100), generator, "bits")
        again.append(one.fill().clone())
        generator = torch.Generator()
        generator.set_state(one.state())
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1003])
def test_the_generator_alone_decides(kind: str, size: int) -> None:
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    runs = [[drawn(size, g, kind) for _ in range(2)] for g in (first, second)]
    assert all(map(torch.equal, *runs))
    assert not torch.equal(runs[0][0], runs[0][1])
    state = first.get_state()
    after = drawn(size, first, kind)
    first.set_state(state)
    assert torch.equal(after, drawn(size, first, kind))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numbers, np.random.get_state()[1])


def averaging(generator: torch.Generator, size: int = 1003) -> Source:
    source = Source(torch.empty(size, dtype=torch.float64), generator, "bits")
    source.averaged = True
    return source


def test_averaged_bits_are_means_of_two_steps() -> None:
    plain = Source(torch.empty(1003, dtype=torch.float64), torch.Generator().manual_seed(4), "bits")
    own = [plain.fill().clone() for _ in range(4)]
    source = averaging(torch.Generator().manual_seed(4))
    found = [source.fill().clone() for _ in range(4)]
    assert source.last is not None
    torch.testing.assert_close(source.last, own[-1])
    for k, mean in enumerate(found):
        torch.testing.assert_close(mean, 0.5 * (own[k] + own[max(k - 1, 0)]))


def test_averaged_bits_go_on_from_what_was_saved() -> None:
    """Also where the next ones were already made ahead, or were to be scaled anew."""
    source = averaging(torch.Generator().manual_seed(5))
    for _ in range(3):
        source.fill()
        source.prefetch()
    state, last = source.state(), source.last
    source.prepare(torch.full((1003,), 2.0, dtype=torch.float64))
    expected = source.fill().clone()
    generator = torch.Generator()
    generator.set_state(state)
    other = averaging(generator)
    other.last = last
    torch.testing.assert_close(2.0 * other.fill(), expected)
