"""Chains that examples far out drive away are brought back in the warm-up, and stay slower."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isosgd
from experiments.posteriors import suite
from isosgd import Target, priors
from isosgd.engine.chains import Chains
from isosgd.store import writer
from isosgd.target import Params
from isosgd.warmup.runaway import LOSSES, MOST, SLOWER, Runaway

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # warm-ups are short here
QUICK: dict[str, Any] = {"draws": 10, "chains": 4, "batch_size": 20, "warmup": 1200, "keep_every": 10}
QUIET: dict[str, Any] = {"progress": False, "compile": False, "seed": 0}


@pytest.fixture(scope="module")
def cubic() -> tuple[Target, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Regression on monomials of heavy-tailed inputs, and the mean and deviations of its posterior."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(400, 6, generator=generator) / (torch.randn(400, 1, generator=generator).square() + 0.1).sqrt()
    powers = [p for k in (1, 2, 3) for p in itertools.combinations_with_replacement(range(6), k)]
    x = torch.stack([z[:, list(p)].prod(-1) for p in powers], -1)
    x = (x - x.mean(0)) / x.std(0)
    y = x[:, :6].sum(-1) + torch.randn(400, generator=generator)
    covariance = torch.linalg.inv((x.T @ x).double() + torch.eye(x.shape[1]).double())

    def log_likelihood(params: Params, batch: Any) -> Tensor:
        value: Tensor = -0.5 * (batch[1] - batch[0] @ params["w"]).square()
        return value

    target = Target(log_likelihood, priors.Normal(1.0), init={"w": torch.zeros(x.shape[1])})
    return target, (x, y), covariance @ (x.T @ y).double(), covariance.diagonal().sqrt()


@pytest.mark.parametrize("structure", ["lowrank", "diagonal"])
def test_chains_are_where_the_posterior_is(cubic: Any, structure: str) -> None:
    """Without this they end 246 and 15 standard deviations away; of 830 normal draws of each the worst is at 4."""
    target, data, mean, deviation = cubic
    posterior = isosgd.sample(target, data, **QUICK, **QUIET, structure=structure)
    assert sum(report["restarts"] for report in posterior.info["warmup"]) > 0
    worst = ((posterior.draws["w"].double() - mean) / deviation).abs().max()
    assert worst < 7
    rates = torch.tensor([chain["w"] for chain in posterior.info["rates"]])
    assert rates.min() > 1e-3 * rates.max()  # those that were brought back go on, if slowly


@pytest.mark.slow
def test_a_run_that_was_stopped_knows_who_ran_away(cubic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, data, _, _ = cubic
    monkeypatch.setattr(writer, "LEAST_WAIT", 0.0)  # a checkpoint wherever there may be one
    settings = {**QUICK, **QUIET, "structure": "diagonal"}
    whole = isosgd.sample(target, data, **settings)
    evaluate, count = Chains.evaluate, [0]

    def stop(self: Chains, *args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > 1000:
            raise KeyboardInterrupt
        return evaluate(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Chains, "evaluate", stop)
        with pytest.raises(KeyboardInterrupt):
            isosgd.sample(target, data, **settings, store=tmp_path)
    again = isosgd.sample(target, data, **settings, store=tmp_path, resume=True)
    assert torch.equal(again.draws["w"], whole.draws["w"])


class Shape:
    """A Lambda that is only a size."""

    def __init__(self) -> None:
        self.factor, self.curvature_ratio = torch.ones(3), torch.ones(3)
        self.scale, self.pulls = 0.01, torch.full((3, 40), 80.0)  # losses scatter by 0.01

    def rate_curvatures(self) -> Tensor:
        return self.pulls

    def slow(self, factor: Tensor) -> None:
        self.factor = self.factor * factor


class Still:
    """Three chains of 40 parameters and 100 examples that stay where they are: a mode is 0.2 below the posterior."""

    def __init__(self, temperature: float, num_data: int) -> None:
        self.count, self.num_data, self.geometry = 3, num_data, Shape()
        self.alive = torch.tensor([True, True, False])
        self.place = torch.zeros(3)
        weights = [torch.zeros(40, requires_grad=True)]
        self.sampler = isosgd.ISGD(weights, num_data=num_data, temperature=temperature, lam=1.0)
        self.sampler.limit_excess = lambda: None  # type: ignore[method-assign]

    class layout:
        sizes = (30, 10)

    class stiffness:
        image, length = torch.zeros(3, 40), None
        forget = staticmethod(lambda: None)

    def each(self, number: float) -> Tensor:
        return torch.full((3,), number, dtype=torch.float64)

    def snapshot(self) -> list[Tensor]:
        return [self.place.clone()]

    def restore(self, saved: list[Tensor], chains: Tensor) -> None:
        self.place = torch.where(chains, saved[0], self.place)


def watch(spread: float = 0.0, temperature: float = 1.0, num_data: int = 100) -> tuple[Still, Runaway]:
    chains = Still(temperature, num_data)
    runaway = Runaway(chains)  # type: ignore[arg-type]
    runaway.set_limit([torch.full((3,), 1.0 + spread * (-1) ** i) for i in range(50)])
    runaway.begin()
    chains.place = torch.ones(3)
    return chains, runaway


def losses(*last: float) -> list[Tensor]:
    return [torch.tensor(last)] * LOSSES


def test_who_is_brought_back() -> None:
    chains, runaway = watch()
    assert runaway.limit.tolist() == pytest.approx([1.0 + 20 * 0.2] * 3)
    assert not runaway.restart_runaways(losses(4.9, 4.9, 4.9))
    assert chains.place.tolist() == [1, 1, 1] and not runaway.restarts.any()
    assert runaway.restart_runaways(losses(4.9, 5.1, torch.inf))  # the third was dropped long ago
    assert chains.place.tolist() == [1, 0, 1] and runaway.restarts.tolist() == [0, 1, 0]
    assert chains.geometry.factor.tolist() == [1, SLOWER, 1]


def test_what_was_believed_on_the_way_is_not() -> None:
    chains, runaway = watch()
    chains.geometry.factor, chains.geometry.curvature_ratio = torch.full((3,), 1e9), torch.full((3,), 1e9)
    runaway.restart_runaways(losses(9.0, 1.0, 1.0))
    assert chains.geometry.factor.tolist() == pytest.approx([SLOWER, 1e9, 1e9])
    assert chains.geometry.curvature_ratio.tolist() == pytest.approx([1, 1e9, 1e9])


def test_each_time_slower_but_not_for_ever() -> None:
    chains, runaway = watch()
    for count in range(MOST + 3):
        assert runaway.restart_runaways(losses(9.0, 1.0, 1.0)) == (count < MOST)
    assert runaway.restarts.tolist() == [MOST, 0, 0]
    assert chains.geometry.factor.tolist() == [SLOWER**MOST, 1, 1]


def test_one_bad_minibatch_is_none() -> None:
    _, runaway = watch()
    rare = losses(1.0, 1.0, 1.0)[1:]
    runaway.restart_runaways([*rare[:9], torch.full((3,), 1e9), *rare[9:]])
    assert not runaway.restarts.any()
    runaway.restart_runaways(losses(9.0, 9.0, 9.0)[1:])  # too few to tell
    assert not runaway.restarts.any()


@pytest.mark.parametrize(("temperature", "num_data", "above"), [(1.0, 100, 4.0), (0.5, 100, 2.0), (1.0, 400, 1.0)])
def test_the_limit_goes_by_temperature_and_data(temperature: float, num_data: int, above: float) -> None:
    _, runaway = watch(temperature=temperature, num_data=num_data)
    assert runaway.limit.tolist() == pytest.approx([1.0 + above] * 3)


def test_noisy_losses_have_more_room() -> None:
    _, runaway = watch(spread=0.5)
    assert (runaway.limit > 1.0 + 20 * 0.2 + 3.0).all()


def test_losses_that_scatter_more_than_at_the_mode_are_none() -> None:
    """Noise without curvature: all along a soft direction losses of minibatches go up and down."""
    chains, runaway = watch()
    chains.geometry.pulls = torch.cat(
        [torch.full((3, 39), 80.0), torch.full((3, 1), 2e-4)], -1
    )  # 0.01 sqrt(2 / 2e-4) = 1
    assert not runaway.restart_runaways(losses(5.1, 6.6, 1.0))
    assert runaway.restart_runaways(losses(5.1, 6.8, 1.0)) and runaway.restarts.tolist() == [0, 1, 0]


def test_rates_that_rise_again_are_held() -> None:
    chains, runaway = watch()
    runaway.keep_slow()  # nobody ran away yet
    assert chains.geometry.factor.tolist() == [1, 1, 1]
    runaway.restart_runaways(losses(9.0, 1.0, 1.0))
    chains.geometry.factor = torch.tensor([0.5, 0.5, 0.5])
    runaway.keep_slow()
    assert chains.geometry.factor.tolist() == [SLOWER, 0.5, 0.5]
    chains.geometry.factor = torch.tensor([9.0, 9.0, 9.0])
    runaway.keep_slow()
    assert chains.geometry.factor.tolist() == [9, 9, 9]


def test_noise_without_curvature_drives_no_chain_away() -> None:
    """Losses are all alike at the mode of this Gaussian, and go up and down beside it."""
    problem = suite.make("gauss-half")
    settings = {**QUICK, **QUIET, "chains": 8, "batch_size": problem.batch_size}
    posterior = isosgd.sample(problem.target, problem.data, init=problem.init, **settings)
    assert sum(report["restarts"] for report in posterior.info["warmup"]) == 0
