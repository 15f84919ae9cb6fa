"""draws="auto": until predictions have converged or the budget ends, and it is said which."""

import math
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import isosgd.sampling.loop
from isosgd import DataSets, Interrupted, OutOfTimeError, Posterior, Target, likelihoods, load, priors, resume, sample
from isosgd.sampling.stopping import looks

Y = torch.randn(80, generator=torch.Generator().manual_seed(0))
SETTINGS: dict[str, Any] = {"method": "sgld", "lr": 0.3, "warmup": 0, "batch_size": 40, "compile": False}
NOT_CONVERGED = "ignore:draws = 'auto'. not converged:isosgd.errors.SamplingWarning"


def target(predict: bool = False, patience: float = math.inf) -> Target:
    """The mean of a normal; the user stops it after so many gradients."""
    calls = count()

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        if next(calls) >= patience:
            raise KeyboardInterrupt
        return -0.5 * (batch[0] - params["mu"]) ** 2

    own = (lambda params, x: params["mu"] + 0.0 * x) if predict else None
    return Target(log_likelihood, priors.Normal(10.0), init={"mu": 0.0}, predict=own)


def auto(data: Any = (Y,), **options: Any) -> Posterior:
    settings = {"draws": "auto", "chains": 4, "keep_every": 4, "progress": False, **SETTINGS}
    return sample(options.pop("target", target()), data, **{**settings, **options})


@pytest.mark.long
def test_it_ends_when_predictions_have_converged() -> None:
    found = auto()
    assert found.info["stopped"].startswith("converged: ") and "R-hat" in found.info["stopped"]
    assert found.info["draws"] == found.num_draws < 2000 and found.num_draws in looks(2000)
    assert found.num_draws * 4 >= 300  # draws that alternate may count for more than they are


def test_it_ends_when_the_budget_does_and_warns() -> None:
    with pytest.warns(UserWarning, match="not converged when the budget of 30 draws ended.*R-hat"):
        found = auto(lr=0.001, keep_every=1, budget=30)
    assert found.num_draws == found.info["draws"] == 30 and "budget of 30 draws" in found.info["stopped"]


@pytest.mark.filterwarnings("ignore:chain 0:isosgd.errors.SamplingWarning")
@pytest.mark.parametrize("options", [{}, {"method": "sgld"}, {"method": "hmc"}, {"preset": "alpha-a"}], ids=str)
@pytest.mark.parametrize("chains", [1, 2])
def test_a_time_too_short_for_the_warm_up_gives_a_draw(options: dict[str, Any], chains: int, tmp_path: Path) -> None:
    run: dict[str, Any] = {"draws": 500, "max_seconds": 0.001, "chains": chains, "compile": False, "progress": False}
    found = sample(target(), (Y,), store=tmp_path / "run", **run, **options)
    assert found.info["stopped"] == "max_seconds: 1 of 500 draws were taken"
    assert found.num_draws == 1 and len(load(tmp_path / "run", target())) == chains
    if not options:  # a whole initial optimisation takes some hundred
        assert found.info["warmup"][0]["optimisation"] < 100
        assert "max_seconds ended the warm-up" in found.info["warmup"][0]["reason"]


@pytest.mark.parametrize("keep_every", [1000, 200])
def test_a_gap_between_draws_ends_with_the_time(keep_every: int) -> None:
    delay, seconds = 0.005, 2.0

    def slow(params: dict[str, Tensor], batch: Any) -> Tensor:
        time.sleep(delay)
        return -0.5 * (batch[0] - params["mu"]) ** 2

    slow_target = Target(slow, priors.Normal(10.0), init={"mu": 0.0})
    found = sample(slow_target, (Y,), draws=50, max_seconds=seconds, keep_every=keep_every, **SETTINGS)
    assert found.info["gradients"] <= seconds / delay  # since each of them takes that long at least
    assert found.num_draws == max(1, found.info["gradients"] // keep_every)
    assert found.info["stopped"] == f"max_seconds: {found.num_draws} of 50 draws were taken"


@pytest.mark.long
def test_a_time_that_ends_before_noise_is_measured_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole call is bounded, not only what comes after the first measurement; a stored run goes on."""
    monkeypatch.setattr("isosgd.sampling.loop.GRACE", 0.2)
    delay = 0.02

    def slow(params: dict[str, Tensor], batch: Any) -> Tensor:
        time.sleep(delay)
        return -0.5 * (batch[0] - params["mu"]) ** 2

    slow_target, began = Target(slow, priors.Normal(10.0), init={"mu": 0.0}), time.monotonic()
    run: dict[str, Any] = {"draws": 5, "keep_every": 1, "warmup": 400, "compile": False, "progress": False}
    with pytest.raises(OutOfTimeError, match=r"over after \d+ gradients of the warm-up \(.*\), .* give more time"):
        sample(slow_target, (Y,), max_seconds=0.3, store=tmp_path / "run", **run)
    assert time.monotonic() - began < 0.3 + 0.2 + 20 * delay + 2.0
    delay = 0.0
    assert resume(tmp_path / "run", slow_target, (Y,), progress=False).num_draws == 5


@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.long
def test_chains_for_which_no_time_is_left_are_left_out(
    stored: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A chain that has draws keeps them; in a store the others can go on."""
    monkeypatch.setattr("isosgd.sampling.loop.GRACE", 0.0)
    starts = []

    def slow(params: dict[str, Tensor], batch: Any) -> Tensor:
        if float(params["mu"].detach()) and len(starts) > 1:  # a number, so that chains run in turn
            time.sleep(0.1)
        return -0.5 * (batch[0] - params["mu"]) ** 2

    def init(chain: int) -> dict[str, Any]:
        return {"mu": 0.1}

    noted = isosgd.sampling.loop._Drawing._warm_up

    def counted(drawing: Any, saved: Any) -> float:
        starts.append(drawing.first)
        return noted(drawing, saved)

    monkeypatch.setattr("isosgd.sampling.loop._Drawing._warm_up", counted)
    store = tmp_path / "run" if stored else None
    run: dict[str, Any] = {"draws": 5, "keep_every": 1, "warmup": 200, "compile": False, "progress": False}
    slow_target = Target(slow, priors.Normal(10.0), init={"mu": 0.1})
    found = sample(slow_target, (Y,), chains=3, init=init, max_seconds=2.5, store=store, **run)
    assert found.num_chains == 1 and found.num_draws == 5
    if store is None:
        assert "max_seconds was over" in found.info["dropped"][1]
        return
    assert not found.info["complete"]
    starts = []
    monkeypatch.setattr("isosgd.sampling.loop._Drawing._warm_up", noted)
    whole = resume(store, slow_target, (Y,), init=init, progress=False)
    assert whole.num_chains == 3 and whole.num_draws == 5 and whole.info["complete"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*did not settle; max_seconds:isosgd.SamplingWarning")  # on a busy machine
def test_nothing_is_compiled_in_a_short_time() -> None:
    found = sample(target(), (Y,), draws=20, chains=200, batch_size=80, max_seconds=50.0, progress=False, seed=1)
    assert found.info["gradients"] > 2 * 500 and "compiled" not in found.info["engine"]


@pytest.mark.filterwarnings(NOT_CONVERGED)
@pytest.mark.parametrize(("chains", "budget"), [(1, 70), (4, 70)])
def test_a_run_that_was_stopped_ends_where_it_would_have(chains: int, budget: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"chains": chains, "budget": budget, "keep_every": 1}
    whole = auto(**options)
    with pytest.raises(Interrupted) as stopped:
        auto(target=target(patience=60), store=tmp_path / "run", **options)
    assert stopped.value.posterior is not None and 0 < stopped.value.posterior.num_draws < whole.num_draws
    again = resume(tmp_path / "run", target(), (Y,), progress=False)
    assert again.num_draws == whole.num_draws and again.info["stopped"] == whole.info["stopped"]
    assert torch.equal(whole.draws["mu"], again.draws["mu"])
    assert resume(tmp_path / "run", target(), (Y,)).info["stopped"] == whole.info["stopped"]


@pytest.mark.long
@pytest.mark.filterwarnings(NOT_CONVERGED)
def test_held_out_predictions_are_what_counts() -> None:
    """The data say nothing of the slope, which therefore mixes slowly: predictions have converged at 0 alone."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[1] - params["mu"]) ** 2 + 0.0 * params["slope"]

    line = Target(
        log_likelihood, priors.Normal(1.0), init={"mu": 0.0, "slope": 0.0},
        predict=lambda params, x: params["mu"] + params["slope"] * x,
    )  # fmt: skip
    at = {"target": line, "data": (torch.ones(80), Y), "budget": 200}
    stopped = [auto(**at, held_out=x).info["stopped"] for x in (torch.zeros(3), torch.ones(3))]
    assert stopped[0].startswith("converged") and stopped[1].startswith("not converged")


def test_held_out_inputs_need_a_target_that_predicts() -> None:
    with pytest.raises(ValueError, match="the target cannot predict"):
        auto(held_out=torch.zeros(3))


@pytest.mark.filterwarnings(NOT_CONVERGED)
@pytest.mark.long
def test_chains_of_other_data_sets_are_not_compared() -> None:
    """The two posteriors lie far apart: together they could never converge."""
    data = DataSets((torch.stack([Y, Y + 50.0]),))
    found = auto(data, chains=4, init=lambda k: {"mu": 0.0 if k < 4 else 50.0})
    assert found.info["stopped"].startswith("converged") and found.info["chains"] == 8


# ------------------------------------------------------------------------------------------------ chains in turn


def in_turn(fails: int | None = None, patience: float = math.inf) -> Target:
    """A likelihood that cannot be mapped over chains, so that they run in turn; two of its modes are far apart.

    Args:
        fails: a chain that starts above 1000 diverges after so many gradients.
        patience: the user stops it after so many.
    """
    left, calls = [fails], count()

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        if next(calls) >= patience:
            raise KeyboardInterrupt
        where = float(params["mu"].detach())  # this is what cannot be mapped
        if where > 1000 and left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                return batch[0] * float("nan") * params["mu"]
        centre = 100.0 * round(where / 100.0)
        return -0.5 * (batch[0] + centre - params["mu"]) ** 2

    return Target(log_likelihood, lambda params: 0.0 * params["mu"].sum(), init={"mu": 0.0})


def starts(*places: float) -> Any:
    return lambda chain: {"mu": places[chain]}


TURNS = pytest.mark.filterwarnings("ignore:chains run in turn")


@TURNS
def test_chains_in_turn_that_disagree_have_not_converged() -> None:
    """Each alone looks as good as it gets; they are in two places."""
    with pytest.warns(UserWarning, match="not converged when the budget of 100 draws ended.*2 chains: R-hat"):
        found = auto(target=in_turn(), chains=2, budget=100, init=starts(0.0, 500.0))
    assert found.info["engine"].startswith("in turn") and found.num_draws == 100


@TURNS
@pytest.mark.long
def test_chains_in_turn_are_judged_together() -> None:
    """Effective draws are those of all chains: one alone would have needed four times as many."""
    found = auto(target=in_turn(), keep_every=2, init=starts(0.0, 0.1, -0.1, 0.2))
    assert found.info["stopped"].startswith("converged: ") and "of 4 chains: R-hat" in found.info["stopped"]
    assert found.info["chains"] == 4 and found.num_draws in looks(2000) and found.num_draws < 400


@TURNS
@pytest.mark.filterwarnings(NOT_CONVERGED)
@pytest.mark.filterwarnings("ignore:.*(did not settle|come out too large):isosgd.errors.SamplingWarning")
@pytest.mark.parametrize(("bad", "warmup"), [(0, 120), (1, 0)])
def test_a_chain_in_turn_that_fails_does_not_count(bad: int, warmup: int) -> None:
    """In its warm-up, or among its draws; the first one or another."""
    places = [0.0, 0.1, 0.2]
    places[bad] = 2000.0
    with pytest.warns(UserWarning, match=f"chain {bad} was dropped"):
        found = auto(target=in_turn(30), chains=3, budget=22, warmup=warmup, init=starts(*places))
    assert found.num_draws == 22 and "22 draws of 2 chains (1 dropped): R-hat" in found.info["stopped"]
    assert found.info["chain_indices"] == [k for k in range(3) if k != bad]


@TURNS
@pytest.mark.usefixtures("eager_store")
@pytest.mark.filterwarnings(NOT_CONVERGED)
@pytest.mark.parametrize("patience", [pytest.param(40, marks=pytest.mark.long), 170])
def test_chains_in_turn_that_were_stopped_end_where_they_would_have(patience: int, tmp_path: Path) -> None:
    options = {"chains": 2, "budget": 28, "init": starts(0.0, 0.1)}
    whole = auto(target=in_turn(), **options)
    with pytest.raises(Interrupted):
        auto(target=in_turn(patience=patience), store=tmp_path / "run", **options)
    again = resume(tmp_path / "run", in_turn(), (Y,), init=options["init"], progress=False)
    assert torch.equal(whole.draws["mu"], again.draws["mu"]) and again.info["stopped"] == whole.info["stopped"]


@TURNS
def test_ctrl_c_between_rounds_leaves_the_draws_of_all_chains() -> None:
    with pytest.raises(Interrupted) as caught:
        auto(target=in_turn(patience=200), chains=2, init=starts(0.0, 0.1))
    assert caught.value.posterior is not None and caught.value.posterior.num_chains == 2


@pytest.mark.filterwarnings(NOT_CONVERGED)
@pytest.mark.filterwarnings("ignore:.*not drawn independently")
def test_chains_on_a_loader_are_judged_at_held_out_inputs() -> None:
    loader = DataLoader(TensorDataset(Y), batch_size=40, shuffle=True)
    options = {"batch_size": None, "chains": 2, "keep_every": 2, "budget": 25}
    with pytest.raises(ValueError, match="held_out="):
        auto(loader, target=target(predict=True), **options)
    found = auto(loader, target=target(predict=True), held_out=torch.zeros(2), **options)
    assert found.num_draws == 25 and found.info["chains"] == 2 and "of 2 chains" in found.info["stopped"]


@pytest.mark.long
def test_networks_are_judged_by_what_they_predict() -> None:
    """Two weights of which only the product shows: chains of either sign never agree on them, yet predict alike."""
    x = torch.randn(80, 1, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    found = auto(
        (x, x + 0.5 * Y[:, None]),
        target=Target.from_module(net, likelihoods.Gaussian(scale=0.5)),
        init=lambda k: {name: torch.full((1, 1), 1.0 if k < 2 else -1.0) for name in ("0.weight", "1.weight")},
        lr=0.05,
        held_out=torch.linspace(-1, 1, 5)[:, None],
    )
    assert found.info["stopped"].startswith("converged")
    signs = found.draws["0.weight"].sign().flatten(1)
    assert signs.unique(dim=1).flatten().tolist() == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": "many"}, "draws = 'many' must be an integer of at least 1 or 'auto'"),
        ({"draws": 10, "budget": 20}, "budget= goes with draws='auto'"),
        ({"draws": 10, "held_out": Y}, "held_out= goes with draws='auto'"),
        ({"budget": 0}, "budget = 0 must be an integer of at least 1"),
        ({"method": "swag", "lr": 0.1}, "swag has none: give it a number"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auto(**options)
