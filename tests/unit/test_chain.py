"""The parts of the loop: batches, curvature, autocorrelation, progress."""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from isosgd.chain.autocorrelation import integrated_time
from isosgd.chain.batches import (
    IterableBatches,
    TensorBatches,
    batch_length,
    default_batch_size,
    halves,
    make_batches,
    tree_map,
)
from isosgd.chain.curvature import Curvature
from isosgd.chain.progress import Progress, clock

SIGMAS = 4.5

# ------------------------------------------------------------------------------------------------ batches


def test_tensors_are_drawn_uniformly_with_replacement() -> None:
    rows, size, steps = 10, 8, 2000
    batches = TensorBatches((torch.arange(rows), torch.arange(rows) * 2), size, seed=0)
    drawn = []
    for _ in range(steps):
        x, y = batches.next()
        assert torch.equal(y, 2 * x)
        drawn.append(x)
    counts = torch.bincount(torch.cat(drawn), minlength=rows).double()
    expected = size * steps / rows
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - (rows - 1)) < SIGMAS * math.sqrt(2 * (rows - 1))
    # With replacement the number of different rows in a batch is rows (1 - (1 - 1/rows)^size) on average.
    different = torch.tensor([float(len(x.unique())) for x in drawn])
    error = float(different.std()) / math.sqrt(steps)
    assert abs(float(different.mean()) - rows * (1 - (1 - 1 / rows) ** size)) < SIGMAS * error


def test_tensor_batches_follow_their_seed() -> None:
    x = torch.arange(100)
    a, b, c = (TensorBatches((x,), 8, seed=seed) for seed in (1, 1, 2))
    first, second, third = ([batches.next()[0] for _ in range(3)] for batches in (a, b, c))
    assert all(map(torch.equal, first, second)) and not any(map(torch.equal, first, third))


@pytest.mark.parametrize(("rows", "size"), [(5, 5), (8, 8), (50, 24), (155, 76), (1000, 128), (10**6, 128)])
def test_the_default_batch_is_half_of_the_data_within_bounds(rows: int, size: int) -> None:
    assert default_batch_size(rows) == size


def test_an_iterable_starts_again() -> None:
    batches = IterableBatches([(torch.tensor([k]),) for k in range(3)], None)
    assert [int(batches.next()[0]) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("replacement", "independent"), [(True, True), (False, False)])
def test_a_loader_says_whether_it_draws_independently(replacement: bool, independent: bool) -> None:
    data = TensorDataset(torch.arange(6.0))
    loader = DataLoader(data, batch_size=2, sampler=RandomSampler(data, replacement=replacement))
    assert IterableBatches(loader, None).independent == independent
    assert TensorBatches((torch.arange(6.0),), 2, 0).independent


def test_arrays_are_data_too() -> None:
    batches = make_batches((np.arange(12.0), np.arange(12)), 4, 0, None)
    x, y = batches.next()
    assert torch.equal(x.long(), y) and len(x) == 4


@pytest.mark.parametrize("n", [2, 5, 8])
def test_halves_of_nested_batches(n: int) -> None:
    batch = {"x": torch.arange(n), "pair": [torch.arange(2.0 * n).view(n, 2), torch.tensor(7.0)], "name": "kept"}
    first, second, sizes = halves(batch)
    assert sizes == (n // 2, n - n // 2) == (batch_length(first), batch_length(second))
    assert torch.equal(torch.cat([first["x"], second["x"]]), batch["x"])
    assert torch.equal(torch.cat([first["pair"][0], second["pair"][0]]), batch["pair"][0])
    assert first["pair"][1] == second["pair"][1] == 7.0 and first["name"] == "kept"


def test_tree_map_reaches_every_tensor() -> None:
    found = tree_map(lambda t: t + 1, (torch.tensor(1), [torch.tensor(2), {"a": torch.tensor(3)}], "text"))
    assert found[0] == 2 and found[1][0] == 3 and found[1][1]["a"] == 4 and found[2] == "text"


# ------------------------------------------------------------------------------------------------ curvature


def probe(matrix: Tensor, sizes: list[int], steps: int, **settings: Any) -> tuple[Curvature, list[Tensor]]:
    """Curvature of the quadratic ``theta^T matrix theta / 2`` with the parameters cut into groups."""
    params = [torch.zeros(size, dtype=matrix.dtype) for size in sizes]

    def gradient() -> list[Tensor]:
        return list(torch.split(matrix @ torch.cat(params), sizes))

    curvature = Curvature([[p] for p in params], **{"temperature": 1.0, "num_data": 100, "seed": 0, **settings})
    for _ in range(steps):
        curvature.probe(gradient(), gradient)
    return curvature, params


def random_hessian(generator: torch.Generator, size: int) -> Tensor:
    """Positive definite, with correlations between all parameters and a gap below its top eigenvalue."""
    mix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(mix)
    return q @ torch.diag(torch.logspace(1, -2, size, dtype=torch.float64)) @ q.T


def test_the_top_curvature_of_one_group_is_found(generator: torch.Generator) -> None:
    hessian = random_hessian(generator, 6)
    curvature, params = probe(hessian, [6], 200)
    assert curvature.own_values() == pytest.approx([10.0], rel=0.02)
    assert curvature.values() == pytest.approx([10.0], rel=0.02)
    assert not params[0].any()  # the parameters are put back


def test_each_group_finds_its_own_top_curvature() -> None:
    hessian = torch.block_diag(torch.diag(torch.tensor([3.0, 0.1])), torch.diag(torch.tensor([50.0, 1.0, 2.0])))
    curvature, _ = probe(hessian, [2, 3], 200)
    assert curvature.own_values() == pytest.approx([3.0, 50.0], rel=0.02)
    assert curvature.values() == pytest.approx([3.0, 50.0], rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_values_bound_the_groups_together(seed: int) -> None:
    """With rates delta / h_p in each group, no direction across groups may see more than delta."""
    hessian = random_hessian(torch.Generator().manual_seed(seed), 9)
    sizes = [2, 3, 4]
    curvature, _ = probe(hessian, sizes, 400)
    scale = torch.cat(
        [torch.full((n,), h, dtype=torch.float64) for n, h in zip(sizes, curvature.values(), strict=True)]
    ).rsqrt()
    top = float(torch.linalg.eigvalsh(scale[:, None] * hessian * scale).max())
    assert top <= 1.05
    assert top > 0.5  # and not by far too much


def test_minibatch_noise_cancels(generator: torch.Generator) -> None:
    """Each probe compares two gradients on one minibatch, so that their common noise drops out."""
    assert noisy_curvature(torch.zeros(3, dtype=torch.float64), generator) == pytest.approx([4.0], rel=0.05)


def test_parameters_that_start_at_zero_are_moved_far_enough(generator: torch.Generator) -> None:
    """A move must change a float32 gradient by more than its last digit."""
    assert noisy_curvature(torch.zeros(3), generator) == pytest.approx([4.0], rel=0.05)


def noisy_curvature(theta: Tensor, generator: torch.Generator) -> list[float]:
    curvature = Curvature([[theta]], 1.0, 100, seed=0)
    for _ in range(100):
        noise = 100.0 * torch.randn(3, generator=generator, dtype=theta.dtype)
        curvature.probe([4.0 * theta + noise], lambda noise=noise: [4.0 * theta + noise])
    return curvature.values()


# ------------------------------------------------------------------------------------------------ autocorrelation


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_integrated_time_of_an_autoregression(rho: float) -> None:
    """It is (1 + rho) / (1 - rho), floored at 1; its relative standard error is sqrt(2 (2 M + 1) / n), M the window."""
    rng, n = np.random.default_rng(0), 40_000
    x, shocks = np.zeros(n), rng.standard_normal(n)
    for t in range(1, n):
        x[t] = rho * x[t - 1] + shocks[t]
    expected = max(1.0, (1 + rho) / (1 - rho))
    window = 10 * expected
    assert abs(integrated_time(x) / expected - 1) < SIGMAS * math.sqrt(2 * (2 * window + 1) / n)


@pytest.mark.parametrize("trace", [np.ones(100), np.zeros(2), np.array([1.0])], ids=len)
def test_a_trace_that_says_nothing_counts_as_uncorrelated(trace: np.ndarray) -> None:
    assert integrated_time(trace) == 1.0


# ------------------------------------------------------------------------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (75, "1:15"), (3700, "1:01:40")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_line_shows_stage_share_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("isosgd.chain.progress.time.monotonic", lambda: now[0])
    stream = Terminal()
    progress = Progress(1000, stream=stream)
    now[0] = 10.0
    progress.advance("sampling", 250)
    line = stream.getvalue()
    for part in ("sampling", "25%", "250 steps", "25/s", "0:30 left", "█" * 5 + "░" * 15):
        assert part in line
    progress.advance("sampling")  # too soon to draw again
    assert stream.getvalue() == line
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("show", "stream"), [(True, io.StringIO()), (False, Terminal())], ids=["no terminal", "told so"]
)
def test_progress_is_silent(show: bool, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("isosgd.chain.progress.time.monotonic", lambda: now[0])
    progress = Progress(10, show, stream)
    now[0] = 10.0
    progress.advance("sampling", 5)
    progress.close()
    assert stream.getvalue() == ""


def test_a_line_beyond_the_total_stays_at_the_end() -> None:
    progress = Progress(0, stream=Terminal())
    progress.advance("warming up", 7)
    assert "100%" in progress.line("warming up")
