"""Two and four processes: the draws of one process, clear errors on every rank, and mistakes that are found."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from isosgd import load, resume, sample
from tests.ranks import cases
from tests.ranks.launch import launch

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,  # five minutes; in the long tier once there is room for them
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning"),
]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    out = tmp_path_factory.mktemp("two")
    every = ("chains", "chains_loader", "store", "data", "data_equal", "noise", "warm", "cold", "distributed_loader")
    return launch(2, out, *every, "wrapped", "auto", "diverges", "bad_input", "faults"), out


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(4, tmp_path_factory.mktemp("four"), "chains", "data", "data_equal", "noise", "grid", "bad_input")


def same(found: Found, case: str) -> Any:
    """What all ranks found, which must be the same."""
    assert all(rank[case] == found[0][case] for rank in found), [rank[case] for rank in found]
    return found[0][case]


def test_draws_do_not_depend_on_the_number_of_ranks(two: tuple[Found, Path], four: Found) -> None:
    alone = cases.draw_chains(first_chain=0)
    for found in (two[0], four):
        assert same(found, "chains")["hashes"] == cases.hashes(alone)
        assert found[0]["chains"]["indices"] == [0, 1, 2, 3, 4]
    assert same(two[0], "chains_loader") == cases.hashes(cases.loader(first_chain=0))


def test_a_store_of_two_ranks_is_read_and_extended_by_one(two: tuple[Found, Path]) -> None:
    found, out = two
    assert found[0]["store"]["hashes"] == found[1]["store"]["hashes"] == found[0]["chains"]["hashes"]
    for rank in found:
        assert "already holds a run" in rank["store"]["again"] and "a run of 5 chains" in rank["store"]["other"]
    posterior = load(out / "store", cases.network(), data=(cases.X, cases.Y))
    assert posterior.info["complete"] and posterior.info["chain_indices"] == [0, 1, 2, 3, 4]
    longer = resume(out / "store", cases.network(), (cases.X, cases.Y), draws=6, progress=False)
    asked = {**cases.QUICK, "draws": 6}
    whole = sample(cases.network(), (cases.X, cases.Y), chains=5, first_chain=0, **asked)
    assert cases.hashes(longer) == cases.hashes(whole)


def test_minibatches_that_ranks_share_give_the_trajectory_of_one_process(two: tuple[Found, Path], four: Found) -> None:
    alone = cases.trajectory(first_chain=0)
    for found in (two[0], four):
        draws = torch.tensor(same(found, "data")["draws"])
        assert (draws - cases.flat(alone)).abs().max() < 1e-5
        assert found[0]["data"]["gradients"] == alone.info["gradients"]


def test_parameters_have_the_same_bits_on_all_ranks(two: tuple[Found, Path], four: Found) -> None:
    for found in (two[0], four):
        assert isinstance(same(found, "data_equal"), str) and len(found[0]["data_equal"]) == 64


@pytest.mark.parametrize("case", ["warm", "cold"])
def test_the_stationary_variance_is_that_of_the_posterior(two: tuple[Found, Path], case: str) -> None:
    ratios = same(two[0], case)["ratios"]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    assert abs(statistics.mean(ratios) - 1.0) < 0.02 + 4.0 * error  # the bias that the step size may have


def test_noise_between_ranks_is_that_of_minibatches(two: tuple[Found, Path], four: Found) -> None:
    for found in (two[0], four):
        noise = same(found, "noise")
        # Squares of normal numbers, so many in each of the dimensions; no gradient more than steps.
        assert abs(noise["ratio"] - 1.0) < 4.0 * (2.0 / (noise["calls"] * cases.WIDTH)) ** 0.5
        assert noise["gradients"] == noise["calls"]


def test_mistakes_are_found(two: tuple[Found, Path]) -> None:
    found = [rank["faults"] for rank in two[0]]
    for rank in found:
        assert "are no longer those of the others" in rank["own noise"]
        ratios = rank["divided"]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        assert statistics.mean(ratios) - 1.0 > 0.02 + 4.0 * error
    alone = cases.flat(cases.trajectory(first_chain=0))
    assert (torch.tensor(found[0]["summed"]) - alone).abs().max() > 1e-3


def test_a_distributed_loader_is_gone_through_together(two: tuple[Found, Path]) -> None:
    loader = same(two[0], "distributed_loader")
    assert loader["num_data"] == cases.ROWS and "must have a DistributedSampler" in loader["plain"]


def test_modules_in_ddp_are_taken_as_they_are(two: tuple[Found, Path]) -> None:
    assert same(two[0], "wrapped") == ["bias", "likelihood.scale", "weight"]


def test_chains_in_a_grid_of_ranks(four: Found) -> None:
    grid = same(four, "grid")
    assert grid["engine"].startswith("each chain by 2 ranks, 2 at a time") and len(set(grid["hashes"])) == 2


def test_convergence_is_judged_over_all_ranks(two: tuple[Found, Path]) -> None:
    auto = same(two[0], "auto")
    assert "draws of 4 chains" in auto["stopped"] and auto["stopped"].startswith("converged")


def test_a_chain_that_diverges_is_dropped_and_no_rank_waits(two: tuple[Found, Path]) -> None:
    found = same(two[0], "diverges")
    assert found["indices"] == [0, 2, 3] and found["dropped"] in ([1], ["1"])
    assert found["every"].startswith("DivergedError")


def test_bad_input_is_refused_on_every_rank(two: tuple[Found, Path], four: Found) -> None:
    said = {
        "few chains": "are fewer than the",
        "seeds": "settings.seed was 0 and is 1",
        "data": "data.tensors",
        "chains": "settings.chains",
        "one bad": "is not finite in row 3",
        "no division": "do not divide",
        "baseline": "shares out chains",
        "unknown": "is unknown",
        "hidden store": "does not see",
        "max_seconds": "does not go with parallel",
    }
    for found in (two[0], four):
        for rank, every in enumerate(found):
            for name, words in said.items():
                assert words in every["bad_input"][name], (rank, name, every["bad_input"][name])
    assert all("give a batch_size of 4 or more" in every["bad_input"]["small batch"] for every in four)
