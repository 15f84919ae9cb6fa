"""Chains that run together: several data sets at once, the same draws from the same seed, failures one by one."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from isosgd import METHODS, DataSets, DivergedError, Posterior, SamplingWarning, Target, priors, sample
from isosgd.diagnostics import integrated_time

pytestmark = pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")

N = 80
QUICK = {"draws": 6, "keep_every": 3, "warmup": 120, "batch_size": 16, "compile": False, "progress": False}


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    return -0.5 * (batch[0] - params["mu"]).square().sum(-1)


def unmapped(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Looks at a number, which cannot be mapped over chains: they run in turn."""
    return log_likelihood(params, batch) + (0.0 if float(params["mu"].detach()[0]) < 1e6 else 1.0)


IN_TURN = pytest.mark.filterwarnings("ignore:chains run in turn")


def make_target(function: Any = log_likelihood, **options: Any) -> Target:
    return Target(function, priors.Normal(10.0), **{"init": {"mu": torch.zeros(2)}, **options})


def centres(sets: int) -> Tensor:
    return 3.0 * torch.arange(sets).float()[:, None] - torch.tensor([0.0, 1.0])


def clusters(sets: int) -> Tensor:
    """``[sets, N, 2]``, around a centre of its own each."""
    g = torch.Generator().manual_seed(0)
    return centres(sets)[:, None] + torch.randn(sets, N, 2, generator=g)


class Mined:
    """A log likelihood that is not a number for marked examples, after so many calls for each mark."""

    def __init__(self, after: dict[int, float]) -> None:
        self.calls, self.after = 0, after

    def __call__(self, params: dict[str, Tensor], batch: Any) -> Tensor:
        self.calls += 1
        y, mark = batch
        value = log_likelihood(params, (y,))
        for k, after in self.after.items():
            if self.calls > after:
                value = value * torch.where(mark == k, math.nan, 1.0)
        return value


def marked(sets: int) -> DataSets:
    return DataSets((clusters(sets), torch.arange(sets)[:, None].expand(sets, N).clone()))


# ------------------------------------------------------------------------------------------------ data sets


def test_a_batch_larger_than_a_set_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size = 81 is larger than the 80 examples"):
        sample(make_target(), DataSets((clusters(2),)), **{**QUICK, "batch_size": 81})


@pytest.mark.long
def test_means_of_several_data_sets_are_recovered() -> None:
    """Conjugate normals, three sets, two chains each, against the exact posterior of each set."""
    check_means(sample(make_target(), DataSets((clusters(3),)), chains=2, **{**QUICK, "draws": 100}))


@IN_TURN
@pytest.mark.long
def test_means_of_several_data_sets_are_recovered_in_turn() -> None:
    posterior = sample(make_target(unmapped), DataSets((clusters(3),)), **{**QUICK, "draws": 100})
    assert posterior.info["engine"].startswith("in turn")
    check_means(posterior)


def check_means(posterior: Posterior) -> None:
    info, y = posterior.info, clusters(3)
    assert info["sets"] == 3 and info["num_data"] == N and info["chain_indices"] == list(range(info["chains"]))
    exact = (y.mean(1) / (1 + 0.01 / N)).repeat_interleave(info["chains"] // 3, 0).double()
    sd = 1 / math.sqrt(N + 0.01)
    for chain, mean in zip(posterior.draws["mu"].double(), exact, strict=True):
        independent = torch.tensor([len(chain) / integrated_time(trace) for trace in chain.T.numpy()])
        assert bool(((chain.mean(0) - mean).abs() < 4 * sd / independent.sqrt()).all())


@pytest.mark.filterwarnings("ignore:.*come out too large:isosgd.errors.SamplingWarning")  # on some machines
def test_rows_of_a_bootstrap_are_data_sets_too() -> None:
    y = clusters(1)[0]
    rows = torch.stack([torch.arange(N // 2), torch.arange(N // 2, N)])
    split = sample(make_target(), DataSets((y,), rows=rows), **QUICK)
    whole = sample(make_target(), DataSets((y.view(2, N // 2, 2),)), **QUICK)
    assert torch.equal(split.draws["mu"], whole.draws["mu"]) and split.info["num_data"] == N // 2


# ------------------------------------------------------------------------------------------------ together


@pytest.mark.parametrize(
    "method",
    [m if m in ("isgd", "sgld", "sghmc", "hmc") else pytest.param(m, marks=pytest.mark.long) for m in METHODS],
)
def test_every_method_runs_chains_together(method: str) -> None:
    y = clusters(1)[0]
    settings = {**QUICK, "draws": 1, "warmup": 300, **({"batch_size": None} if method == "hmc" else {})}
    posterior = sample(make_target(), (y,), chains=3, method=method, **settings)
    assert posterior.info["engine"] == "together" and posterior.draws["mu"].shape == (3, 1, 2)
    assert float((posterior.draws["mu"] - y.mean(0)).abs().max()) < 8 / math.sqrt(N)
    assert len({float(x) for x in posterior.draws["mu"][:, 0, 0]}) == 3


def test_draws_follow_the_seed_and_global_random_numbers_are_left_alone() -> None:
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    data = (clusters(1)[0],)
    first, second, other = (sample(make_target(), data, chains=3, seed=k, **QUICK).draws["mu"] for k in (1, 1, 2))
    assert torch.equal(first, second) and not torch.isclose(first, other).any()
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numbers, np.random.get_state()[1])


@IN_TURN
@pytest.mark.parametrize("engine", ["together", "in turn"])
def test_each_chain_may_have_a_start_of_its_own(engine: str) -> None:
    target = make_target(unmapped if engine == "in turn" else log_likelihood)
    settings = {**QUICK, "method": "sgld", "lr": 1e-9, "warmup": 0, "draws": 2}
    starts = torch.tensor([[7.0, -7.0], [0.0, 1.0], [100.0, 5.0], [-3.0, 2.0]])
    data = DataSets((clusters(2),))
    posterior = sample(target, data, chains=2, init=lambda k: {"mu": starts[k]}, **settings)
    assert posterior.info["engine"].startswith(engine)
    torch.testing.assert_close(posterior.draws["mu"], starts[:, None].expand(4, 2, 2), atol=0.01, rtol=0.0)


def test_chains_on_a_loader_run_in_turn_without_ado() -> None:
    loader = DataLoader(TensorDataset(clusters(1)[0]), batch_size=16, sampler=torch.arange(N).repeat(2).tolist())
    with pytest.warns(SamplingWarning, match="not drawn independently"):
        posterior = sample(make_target(num_data=N), loader, chains=2, **{**QUICK, "batch_size": None})
    assert posterior.info["engine"] == "in turn: the data come from a loader, not as tensors"


def test_a_large_model_on_a_cpu_runs_in_turn() -> None:
    target = make_target(
        lambda params, batch: -0.5 * (batch[0][:, 0] - params["mu"].mean()).square(),
        init={"mu": torch.zeros(2**20 + 1)},
    )
    settings = {**QUICK, "method": "sgld", "lr": 1e-9, "warmup": 0, "draws": 1}
    posterior = sample(target, (clusters(1)[0],), chains=2, **settings)
    assert posterior.info["engine"] == "in turn: one chain of 1,048,577 parameters fills the CPU"


@pytest.mark.parametrize(
    ("side", "engine"), [(8, "together"), (24, "in turn: one chain of a network with convolutions")]
)
def test_convolutions_of_larger_images_run_in_turn(side: int, engine: str) -> None:
    """Mapped over chains they take longer on a CPU: 1.3 to 1.7 times for 28 by 28 values."""
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    x = torch.randn(64, 1, side, side)
    net(x)
    found = sample(
        Target.from_module(net, "categorical"), (x, torch.arange(64) % 2), method="sgld", lr=1e-4, chains=2, draws=2,
        keep_every=1, warmup=0, batch_size=32, progress=False,
    )  # fmt: skip
    assert found.info["engine"].startswith(engine)


# ------------------------------------------------------------------------------------------------ failures


@pytest.fixture(scope="module")
def whole() -> tuple[Posterior, int]:
    """A run of three data sets in which nothing happens, and how often it called the log likelihood."""
    counter = Mined({})
    return sample(make_target(counter), marked(3), **QUICK), counter.calls


@pytest.mark.parametrize("before_the_end", [5, 60])
def test_a_chain_that_diverges_leaves_the_others_as_they_are(before_the_end: int, whole: tuple[Posterior, int]) -> None:
    """In the second half of the draws, or in a window of the warm-up."""
    posterior, calls = whole
    with pytest.warns(SamplingWarning, match=r"chain 1 was dropped: after \d+ gradients the gradient of group 'mu'"):
        found = sample(make_target(Mined({1: calls - before_the_end})), marked(3), **QUICK)
    assert found.num_chains == 2
    assert found.info["chains"] == 2 and found.info["chain_indices"] == [0, 2] and list(found.info["dropped"]) == [1]
    assert len(found.info["warmup"]) == len(found.info["rates"]) == len(found.info["keep_every"]) == 2
    assert torch.equal(found.draws["mu"], posterior.draws["mu"][[0, 2]])


def test_a_chain_that_runs_away_by_itself_is_dropped() -> None:
    """A potential of fourth order under a rate for one of second order, where the data say so."""

    def steep(params: dict[str, Tensor], batch: Any) -> Tensor:
        y, mark = batch
        off = (y - params["mu"]).square().sum(-1)
        return -0.5 * off - 1e3 * mark * off.square()

    def run(mark: float) -> Posterior:
        marks = torch.tensor([0.0, mark])[:, None].expand(2, N).clone()
        settings = {**QUICK, "method": "sgld", "lr": 0.01, "warmup": 0, "draws": 8, "keep_every": 5}
        return sample(make_target(steep), DataSets((clusters(2), marks)), **settings)

    calm = run(0.0)
    with pytest.warns(SamplingWarning, match="chain 1 was dropped: .*(not finite|overflows|loss is)"):
        found = run(1.0)
    assert calm.num_chains == 2 and found.num_chains == 1
    assert torch.equal(found.draws["mu"][0], calm.draws["mu"][0])


def test_when_all_chains_diverge_the_first_tells_what_it_had(whole: tuple[Posterior, int]) -> None:
    """It goes in the third draw, the others in the last; what it has are the two before."""
    posterior, calls = whole
    with pytest.raises(DivergedError, match="gradients") as caught:
        sample(make_target(Mined({0: calls - 11, 1: calls - 2, 2: calls - 2})), marked(3), **QUICK)
    error = caught.value
    assert error.group == "mu" and bool(error.state["mu"].isfinite().all())
    assert torch.equal(error.draws["mu"], posterior.draws["mu"][0, :2])
