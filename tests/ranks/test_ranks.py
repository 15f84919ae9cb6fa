"""Two and four processes: the draws of one process, clear errors on every rank, and mistakes that are found."""

import statistics
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import isosgd.engine.ranks
from isosgd import Posterior, RankError, load, resume, sample
from isosgd.engine.gradients import Parted, Single
from isosgd.engine.ranks import Ranks, checksum
from isosgd.native.layers import Layers
from tests.ranks import cases
from tests.ranks.launch import launch_once

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning"),
]
Found = list[dict[str, Any]]


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    every = ("chains", "chains_loader", "store", "data", "noise", "noise_of_ranks", "warm", "cold", "wrapped")
    more = ("distributed_loader", "drift", "ladder", "sharded", "sharded_bad_input", "auto", "diverges", "bad_input")
    last = ("faults", "hang_chains", "hang_data")  # which ends the group's use
    return launch_once(tmp_path_factory, 2, *every, *more, *last)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    every = ("chains", "data", "noise", "noise_of_ranks", "warm", "cold", "sharded", "grid", "bad_input")
    return launch_once(tmp_path_factory, 4, *every)


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """One rank against two: the parts that noise vectors are differences of have not the same size."""
    return launch_once(tmp_path_factory, 3, "noise", "noise_of_ranks")


@cache
def alone() -> Posterior:
    """The trajectory of one process, by single steps: ranks that share every minibatch take no others."""
    with patch.object(Layers, "fits", return_value=False):
        return cases.trajectory(first_chain=0)


def within_error(ratios: list[float]) -> bool:
    """Whether the mean over dimensions is 1, up to four standard errors and the bias that the step size may have."""
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    return abs(statistics.mean(ratios) - 1.0) < 0.02 + 4.0 * error


def same(found: Found, case: str) -> Any:
    """What all ranks found, which must be the same; what each says of bad input apart."""
    every = [rank[case] for rank in found]
    if isinstance(every[0], dict):
        every = [{name: value for name, value in one.items() if name != "refused"} for one in every]
    assert all(one == every[0] for one in every), every
    return every[0]


def test_draws_do_not_depend_on_the_number_of_ranks(two: tuple[Found, Path], four: tuple[Found, Path]) -> None:
    expected = cases.hashes(cases.draw_chains(first_chain=0))
    for found in (two[0], four[0]):
        assert same(found, "chains")["hashes"] == expected
        assert found[0]["chains"]["indices"] == [0, 1, 2, 3, 4]
    assert same(two[0], "chains_loader") == cases.hashes(cases.loader(first_chain=0))


def test_a_store_of_two_ranks_is_read_and_extended_by_one(two: tuple[Found, Path]) -> None:
    found, out = two
    assert found[0]["store"]["hashes"] == found[1]["store"]["hashes"] == found[0]["chains"]["hashes"]
    for rank in found:
        assert "already holds a run" in rank["store"]["again"] and "a run of 5 chains" in rank["store"]["other"]
        assert "merged runs, which are extended in one process" in rank["store"]["longer"]
    posterior = load(out / "store", cases.network(), data=(cases.X, cases.Y))
    assert posterior.info["complete"] and posterior.info["chain_indices"] == [0, 1, 2, 3, 4]
    longer = resume(out / "store", cases.network(), (cases.X, cases.Y), draws=6, progress=False)
    asked = {**cases.QUICK, "draws": 6}
    whole = sample(cases.network(), (cases.X, cases.Y), chains=5, first_chain=0, **asked)
    assert cases.hashes(longer) == cases.hashes(whole)


def test_minibatches_that_ranks_share_give_the_trajectory_of_one_process(
    two: tuple[Found, Path], four: tuple[Found, Path]
) -> None:
    for found in (two[0], four[0]):
        draws = torch.tensor(same(found, "data")["draws"])
        assert draws.shape == cases.flat(alone()).shape and (draws - cases.flat(alone())).abs().max() < 1e-5
        assert found[0]["data"]["gradients"] == 10 * alone().info["gradients"]


def test_parameters_have_the_same_bits_on_all_ranks_for_1000_steps(
    two: tuple[Found, Path], four: tuple[Found, Path]
) -> None:
    for found in (two[0], four[0]):
        assert len(same(found, "data")["bits"]) == 64 and found[0]["data"]["kept"] == 50


@pytest.mark.parametrize("case", ["warm", "cold"])
def test_the_stationary_variance_is_that_of_the_posterior(
    two: tuple[Found, Path], four: tuple[Found, Path], case: str
) -> None:
    for found, _ in (two, four):
        assert within_error(same(found, case)["ratios"])


def test_noise_between_ranks_is_that_of_minibatches(
    two: tuple[Found, Path], three: tuple[Found, Path], four: tuple[Found, Path]
) -> None:
    for found in (two[0], three[0], four[0]):
        noise = same(found, "noise")
        # Squares of normal numbers, so many in each of the dimensions; no gradient more than steps.
        assert abs(noise["ratio"] - 1.0) < 4.0 * (2.0 / (noise["calls"] * cases.WIDTH)) ** 0.5
        assert noise["gradients"] == noise["calls"]


@cache
def halves(seed: int, times: int) -> Any:
    """Noise estimates from paired halves in one process."""
    return cases.noise_estimates(seed, times=times)


def moments(estimates: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and its squared standard error, from estimates of minibatches that are independent."""
    every = torch.tensor(estimates, dtype=torch.float64)
    return every.mean(0), every.var(0) / len(every)


@pytest.mark.parametrize("name", ["variances", "trace", "lam"])
@pytest.mark.parametrize("source", ["tensors", "loader"])
def test_the_noise_estimate_of_ranks_is_that_of_paired_halves(
    two: tuple[Found, Path], three: tuple[Found, Path], four: tuple[Found, Path], source: str, name: str
) -> None:
    expected, error = moments(halves(1, 100)[name])  # of other minibatches than the ranks'
    for found in (two[0], three[0], four[0]):
        mean, own_error = moments(same(found, "noise_of_ranks")[source][name])
        tolerance = 5.0 * (error + own_error).sqrt()  # of 31 numbers, twice three times
        assert ((mean - expected).abs() < tolerance).all(), (len(found), (mean / expected).tolist())
        # One rank against two, taken for halves, would be 1 / 8 too much: the smallest mistake.
        assert name != "trace" or tolerance < expected / 8


def test_noise_vectors_between_ranks_are_those_of_paired_halves_of_the_same_minibatches(
    two: tuple[Found, Path], four: tuple[Found, Path]
) -> None:
    for found in (two[0], four[0]):
        variances = torch.tensor(same(found, "noise_of_ranks")["tensors"]["variances"])
        torch.testing.assert_close(variances, torch.tensor(halves(0, 20)["variances"]), rtol=1e-4, atol=0.0)


def test_measuring_the_noise_between_ranks_costs_no_gradient(
    two: tuple[Found, Path], three: tuple[Found, Path], four: tuple[Found, Path]
) -> None:
    for found in (two[0], three[0], four[0]):
        noise = same(found, "noise_of_ranks")
        assert noise["tensors"]["gradients"] == noise["loader"]["gradients"] == 20 * 30
        measured, plain = noise["measured"], noise["not measured"]
        assert measured["hash"] != plain["hash"]  # what was measured counts in the steps
        assert measured["calls"] == plain["calls"] and measured["gradients"] == plain["gradients"] == 100
        assert measured["calls"][str(24 // len(found))] == 100


def test_mistakes_are_found(two: tuple[Found, Path]) -> None:
    found = [rank["faults"] for rank in two[0]]
    for rank in found:
        assert "are no longer those of the others" in rank["own noise"]
        assert not within_error(rank["divided"])
    assert (torch.tensor(found[0]["summed"]) - cases.flat(alone())).abs().max() > 1e-3


def test_a_distributed_loader_is_gone_through_together(two: tuple[Found, Path]) -> None:
    loader = same(two[0], "distributed_loader")
    assert loader["num_data"] == cases.ROWS and "must have a DistributedSampler" in loader["plain"]


def test_modules_in_ddp_are_taken_as_they_are(two: tuple[Found, Path]) -> None:
    wrapped = same(two[0], "wrapped")  # where a loop ended, too, to the bit
    assert wrapped["names"] == ["bias", "likelihood.scale", "weight"] and wrapped["steps"] == 20


def test_replicas_of_ddp_that_drift_apart_are_found_in_a_loop(two: tuple[Found, Path]) -> None:
    for rank, every in enumerate(two[0]):
        assert every["drift"]["same"] == 10 and every["drift"]["alone"] == (0 if rank else 10)
        assert every["drift"]["same within"] == 10 and every["drift"]["chains"] == 100
        for name in ("other", "other within"):
            assert "give the optimizer of each rank a generator= of the same seed" in every["drift"][name]


def test_sharded_parameters_are_the_chain_of_one_rank(two: tuple[Found, Path], four: tuple[Found, Path]) -> None:
    for found, _ in (two, four):
        sharded = same(found, "sharded")
        assert sharded["differences"].keys() == {"ISGD", "SGLD", "SGHMC"}
        assert max(sharded["differences"].values()) < 1e-4, sharded["differences"]
        for several, one in sharded["rates"].values():
            assert several == pytest.approx(one, rel=1e-4)


def test_what_cannot_be_done_with_sharded_parameters_is_refused_on_every_rank(two: tuple[Found, Path]) -> None:
    for name, words in {
        "sampler": "only ISGD, SGLD and SGHMC",
        "structure": "choose 'layer' or 'single'",
        "some": "shard the whole model",
        "full": "the disk is full. What the manifest names is safe",
        "missing": "ends at step 241 and the optimizer goes on at step 251: the draws between are missing",
        "memory": "give store=",
        "twice": "already holds a run",
        "hidden": "does not see",
        "target": "in a loop, with ISGD and Collector(store=...)",
        "starts": "in a loop, with ISGD and Collector(store=...)",
        "init": "in a loop, with ISGD and Collector(store=...)",
    }.items():
        for rank in two[0]:
            assert words in rank["sharded"]["refused"][name], rank["sharded"]["refused"][name]


def test_ranks_that_share_a_model_must_be_given_the_same(two: tuple[Found, Path]) -> None:
    for rank, every in enumerate(two[0]):
        found = dict(every["sharded_bad_input"])
        assert found.pop("fine") == 2 * "nothing was raised"
        assert found.pop("another store").startswith("ValueError: rank 1 was not given what rank 0 was")
        for name in ("num_data", "lam", "keep_every"):
            words = found.pop(f"bad {name}")
            assert f"{name} = " in words and words.startswith("ValueError" if rank else "RankValueError: on rank 1: ")
        assert "lambada" in found.pop("unknown")
        assert "give store=" in found.pop("no store")
        for name, words in found.items():
            assert words.startswith("ValueError: rank 1 was not given what rank 0 was") and name in words, words


def test_sharded_parameters_have_the_stationary_variance_and_a_store_for_any_number_of_ranks(
    two: tuple[Found, Path], four: tuple[Found, Path]
) -> None:
    for found, out in (two, four):
        sharded = same(found, "sharded")
        assert within_error(sharded["ratios"]) and sharded["bits"] and sharded["damaged"]
        assert all(sharded["again"].values()), sharded["again"]
        assert cases.hashes(load(out / "sharded", verify=True)) == sharded["hash"]
        assert cases.hashes(load([out / "sharded"])) == sharded["hash"]
        # Each rank has written a file for each draw, of its rows and no more.
        sizes = [len(list((out / "sharded").glob(f"draws-*-{rank:04d}.safetensors"))) for rank in range(len(found))]
        assert sizes == [25] * len(found)


def test_chains_in_a_grid_of_ranks(four: tuple[Found, Path]) -> None:
    grid = same(four[0], "grid")
    assert grid["engine"].startswith("each chain by 2 ranks, 2 at a time") and len(set(grid["hashes"])) == 2


def test_ranks_that_try_temperatures_take_the_choice_of_rank_0(two: tuple[Found, Path]) -> None:
    ladder = same(two[0], "ladder")
    assert ladder["rungs"] >= 2 and 0.01 <= ladder["temperature"] <= 1.0
    assert "every rank tries the temperatures by itself" in ladder["loader"]


def test_convergence_is_judged_over_all_ranks(two: tuple[Found, Path]) -> None:
    auto = same(two[0], "auto")
    assert "draws of 4 chains" in auto["stopped"] and auto["stopped"].startswith("converged")


def test_a_chain_that_diverges_is_dropped_and_no_rank_waits(two: tuple[Found, Path]) -> None:
    found = same(two[0], "diverges")
    assert found["indices"] == [0, 2, 3] and found["dropped"] in ([1], ["1"])
    assert found["every"].startswith("DivergedError")


def test_bad_input_is_refused_on_every_rank(two: tuple[Found, Path], four: tuple[Found, Path]) -> None:
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
        "one unknown": "parallel = 'both' is unknown",
        "one timeout": "rank_timeout = -1.0",
        "one store": "store= was False and is True",
        "one resume": "resume= was False and is True",
    }
    for found in (two[0], four[0]):
        for rank, every in enumerate(found):
            for name, words in said.items():
                assert words in every["bad_input"][name], (rank, name, every["bad_input"][name])
    assert all("give a batch_size of 4 or more" in every["bad_input"]["small batch"] for every in four[0])


@pytest.mark.parametrize("case", ["hang_chains", "hang_data"])
def test_a_rank_that_hangs_is_named(two: tuple[Found, Path], case: str) -> None:
    assert two[0][0][case].startswith("RankError: rank 1 "), two[0][0][case]


class Meeting(dist.HashStore):
    """A store in which another rank puts its value, and then its error, between two looks of this one."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order, self.looks = order, 0

    def check(self, keys: list[str]) -> bool:
        found = bool(super().check(keys))
        self.looks += 1
        for name in self.order if self.looks == 1 else ():
            ranks_of(self, 1)._put(name, {"wrong": False, "text": "it broke"} if name == "error" else 7)
        return found


def ranks_of(store: dist.Store, rank: int) -> Ranks:
    """One of two ranks as it is within a call; two processes would not meet in one order only."""
    found = Ranks.__new__(Ranks)
    found.rank, found.size, found.timeout, found._told = rank, 2, 5.0, False
    found._store, found._call, found._round, found._beats, found._last = store, "call", 0, 0, 0.0
    return found


def test_what_a_rank_gave_before_it_failed_is_taken() -> None:
    """Ranks that have all met go on to the same error by themselves; one that failed before is named."""
    assert ranks_of(Meeting(["round1", "error"]), 0).gather(3) == [3, 7]
    with pytest.raises(RankError, match="on rank 1: it broke"):
        ranks_of(Meeting(["error"]), 0).gather(3)


def test_ranks_give_tensors_that_lie_in_the_same_memory() -> None:
    """As buffers of transformers do, which every draw has."""
    x, store = torch.arange(4.0), dist.HashStore()
    ranks_of(store, 1)._put("round1", [x, x, x[1:]])
    assert [one.tolist() for one in ranks_of(store, 0).gather(None)[1]] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]


class Alone:
    """What `Parted` asks of ranks, of one alone."""

    place, shares = 0, 1

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_loss_that_is_kept_does_not_keep_the_gradient() -> None:
    """Warm-ups keep losses: in the memory of gradients, 50 of them took that of 50 models."""
    single = Single(cases.conjugate(), cases.ROWS)
    params = cases.conjugate().initial()
    found = Parted(single, Alone(), cut=True)(params, (cases.MEANS[:8],))  # type: ignore[arg-type]
    wanted = single(params, (cases.MEANS[:8],))
    assert found.loss.untyped_storage().nbytes() == 4
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.gradients, wanted.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_another_one_where_any_bit_or_place_is(dtype: torch.dtype) -> None:
    """Of more numbers than are copied at once."""
    size = isosgd.engine.ranks.PART + 2
    one, two = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(3.0).to(dtype)
    every = {int(checksum([one, two])), int(checksum([one.flip(0), two])), int(checksum([one, two.flip(0)]))}
    places = (0, 1, size // 2, size - 3, size - 2, size - 1)
    for place in places:
        other = one.clone()
        other.view(torch.uint8)[place * one.element_size()] ^= 1
        every.add(int(checksum([other, two])))
    assert len(every) == 3 + len(places) and checksum([one.clone(), two.clone()]) == checksum([one, two])
