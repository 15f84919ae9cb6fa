"""The parts of the loop: batches, data sets, autocorrelation."""

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from isosgd import DataSets, Posterior, Target, priors, sample
from isosgd.data.sources import batch_length, halves
from isosgd.diagnostics import integrated_time

SIGMAS = 4.5

# ------------------------------------------------------------------------------------------------ batches


def run(data: Any, transform: Any = None, num_data: int | None = None, **settings: Any) -> Posterior:
    """A run that hardly moves, for its data."""
    target = Target(
        lambda params, batch: -0.5 * (batch[0].float() - params["mu"]).square(), priors.Normal(1.0),
        init={"mu": 0.0}, num_data=num_data,
    )  # fmt: skip
    quick: dict[str, Any] = {"keep_every": 1, "compile": False, "progress": False}
    quick |= {} if "warmup" in settings else {"method": "sgld", "lr": 1e-9, "warmup": 0}
    return sample(target, data, transform=transform, **quick, **settings)


def minibatches(data: Any, steps: int, **settings: Any) -> list[Any]:
    """Those that the steps of a run take."""
    seen = []

    def transform(batch: Any, generator: torch.Generator) -> Any:
        seen.append(batch)
        return batch

    run(data, transform, draws=steps, **settings)
    return seen[-steps:]  # before them the settings are checked


def test_tensors_are_drawn_uniformly_with_replacement() -> None:
    rows, size, steps = 10, 8, 1000
    drawn = []
    for x, y in minibatches((torch.arange(rows), torch.arange(rows) * 2), steps, batch_size=size):
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
    first, second, third = ([b[0] for b in minibatches((x,), 3, batch_size=8, seed=seed)] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, second)) and not any(map(torch.equal, first, third))


@pytest.mark.parametrize(("rows", "size"), [(5, 5), (8, 8), (50, 24), (155, 76), (1000, 128), (10**6, 128)])
def test_the_default_batch_is_half_of_the_data_within_bounds(rows: int, size: int) -> None:
    assert run((torch.arange(rows),), draws=1).info["batch_size"] == size


@pytest.mark.filterwarnings("ignore:.*not drawn independently:isosgd.SamplingWarning")
def test_an_iterable_starts_again() -> None:
    seen = minibatches([(torch.tensor([k, k]),) for k in range(3)], 7, num_data=6)
    numbers = [int(batch[0][0]) for batch in seen]
    assert all(after == (before + 1) % 3 for before, after in itertools.pairwise(numbers))


@pytest.mark.parametrize(("replacement", "independent"), [(True, True), (False, False)])
def test_a_loader_says_whether_it_draws_independently(replacement: bool, independent: bool) -> None:
    data = TensorDataset(torch.arange(60.0))
    loader = DataLoader(data, batch_size=6, sampler=RandomSampler(data, replacement=replacement))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(loader, draws=2, warmup=150, structure="layer")
    assert any("not drawn independently" in str(warning.message) for warning in caught) is not independent


def test_arrays_are_data_too() -> None:
    for x, y in minibatches((np.arange(12.0), np.arange(12)), 3, batch_size=4):
        assert isinstance(x, Tensor) and x.dtype == torch.float32
        assert torch.equal(x.long(), y) and len(x) == 4


@pytest.mark.parametrize("n", [2, 5, 8])
def test_halves_of_nested_batches(n: int) -> None:
    batch = {"x": torch.arange(n), "pair": [torch.arange(2.0 * n).view(n, 2), torch.tensor(7.0)], "name": "kept"}
    first, second, sizes = halves(batch)
    assert sizes == (n // 2, n - n // 2) == (batch_length(first), batch_length(second))
    assert torch.equal(torch.cat([first["x"], second["x"]]), batch["x"])
    assert torch.equal(torch.cat([first["pair"][0], second["pair"][0]]), batch["pair"][0])
    assert first["pair"][1] == second["pair"][1] == 7.0 and first["name"] == "kept"


# ------------------------------------------------------------------------------------------------ data sets


def test_data_sets_by_a_leading_dimension_or_by_rows(generator: torch.Generator) -> None:
    x, y = torch.randn(3, 5, 2, generator=generator), torch.randn(3, 5, generator=generator)
    leading = DataSets((x, y.numpy()))
    order = torch.randperm(15, generator=generator)
    where = torch.empty(15, dtype=torch.long)
    where[order] = torch.arange(15)
    by_rows = DataSets((x.reshape(15, 2)[order], y.reshape(15)[order]), rows=where.view(3, 5).numpy().astype(np.int32))
    for data in (leading, by_rows, by_rows.to(torch.device("cpu"))):
        assert (data.sets, data.num_data) == (3, 5)
        for i in range(3):
            assert torch.equal(data.set(i)[0], x[i]) and torch.equal(data.set(i)[1], y[i])


def test_rows_may_come_more_than_once_and_be_left_out() -> None:
    data = DataSets((torch.arange(10.0),), rows=torch.tensor([[0, 0, 3], [9, 3, 9]]))
    assert [data.set(i)[0].tolist() for i in range(2)] == [[0.0, 0.0, 3.0], [9.0, 3.0, 9.0]]


@pytest.mark.parametrize(
    ("tensors", "rows", "error", "words"),
    [
        (["a"], None, TypeError, r"takes a sequence of tensors or arrays, for instance \(x, y\)"),
        ([], None, ValueError, "empty"),
        ([torch.zeros(6)], None, ValueError, r"shapes \[\(6,\)\]: all must begin with \[sets, N\]; or pass rows="),
        ([torch.zeros(2, 6), torch.zeros(2, 5)], None, ValueError, r"shapes \[\(2, 6\), \(2, 5\)\]: all must begin"),
        ([torch.zeros(0, 6)], None, ValueError, "no examples"),
        ([torch.zeros(6)], torch.zeros(2, 3), ValueError, r"rows must be integers \[sets, N\], got torch.float32"),
        ([torch.zeros(6)], torch.ones(2, 6).bool(), ValueError, r"integers \[sets, N\], got torch.bool"),
        ([torch.zeros(6)], torch.arange(3), ValueError, r"integers \[sets, N\], got torch.int64 \[3\]"),
        ([torch.zeros(6)], torch.tensor([[0, 6]]), ValueError, "rows must name some of the 6 rows of the data"),
        ([torch.zeros(6)], torch.tensor([[0, -1]]), ValueError, "rows must name some of the 6 rows of the data"),
        ([torch.zeros(6)], torch.zeros(2, 0).long(), ValueError, "rows must name some of the 6 rows of the data"),
        ([torch.zeros(6), torch.zeros(5)], torch.tensor([[0, 1]]), ValueError, r"shapes \[\(6,\), \(5,\)\]"),
        ([torch.full((2, 6), math.nan)], None, ValueError, "not finite in row 0: drop or impute"),
        ([torch.tensor(1.0)], torch.tensor([[0, 0]]), ValueError, "a tensor without dimensions"),
    ],
)
def test_bad_data_sets_are_refused(tensors: Any, rows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DataSets(tensors, rows)


def test_one_tensor_alone_is_not_taken_for_a_tuple_of_its_rows() -> None:
    for tensor in (torch.zeros(2, 6, 3), np.zeros((2, 6, 3))):
        data = DataSets(tensor)
        assert (data.sets, data.num_data, len(data.tensors)) == (2, 6, 1)


def test_each_chain_draws_from_its_own_rows_and_all_of_them() -> None:
    rows = torch.tensor([[0, 1, 2, 3], [3, 7, 8, 9]])
    seen = minibatches(DataSets((torch.arange(10), torch.arange(20).view(10, 2)), rows), 100, batch_size=4, chains=2)
    values, pairs = (torch.stack(parts, 1).unflatten(0, (4, 4)).transpose(1, 2) for parts in zip(*seen, strict=True))
    assert values.shape == (4, 100, 4)  # examples of all chains go through a transform together
    expected = rows.repeat_interleave(2, 0).tolist()
    assert [sorted(set(chain.flatten().tolist())) for chain in values] == expected
    assert not torch.equal(values[0], values[1])  # chains of one set draw on their own
    assert torch.equal(pairs[..., 1], 2 * values + 1)


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
