"""Sampling around trained networks: the start is kept, and the temperature is found on held-out examples."""

from __future__ import annotations

import copy
import functools
import math
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isosgd import DivergedError, OutOfTimeError, Posterior, SamplingWarning, Target, load, priors, sample
from isosgd.sampling.ladder import SCORED_ON_CPU, Rung
from isosgd.sampling.trained import TrainedRun

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")

SHORT: dict[str, Any] = {
    "warmup": 200,
    "draws": 4,
    "keep_every": 5,
    "batch_size": 16,
    "compile": False,
    "progress": False,
}


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    noisy = x @ torch.tensor([2.0, -1.0, 0.5, 0.0]) + torch.randn(count, generator=generator)
    return x, (noisy > 0).long()


def trained(seed: int = 0, steps: int = 300, norm: bool = False) -> nn.Module:
    """A network that has fitted the noise of few examples; a copy for each test."""
    return copy.deepcopy(_trained(seed, steps, norm))


@functools.cache
def _trained(seed: int, steps: int, norm: bool) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Linear(16, 2)]
    model, (x, y) = nn.Sequential(*layers), examples(100, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def bent() -> nn.Module:
    """A network of the same shapes, with another activation."""
    model = trained(steps=1)
    return nn.Sequential(model[0], nn.Tanh(), model[2])  # type: ignore[index]


TRAIN, HELD = examples(100, 0), examples(400, 1)


def target_of(model: nn.Module) -> Target:
    return Target.from_module(model, "categorical", priors.Normal(1.0))


@pytest.mark.long
def test_an_overfitted_network_is_better_by_held_out_examples_and_says_how() -> None:
    model = trained()
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    posterior = sample(target_of(model), TRAIN, starts=model, held_out=HELD, **run)
    choice = posterior.info["temperature_choice"]
    assert posterior.info["temperature"] == choice["temperature"] > 0
    assert choice["held_out"] == 400 and "held-out" in choice["reason"]
    assert [rung["temperature"] for rung in choice["rungs"]] == [0.3] and choice["rungs"][0]["nll"] > 0
    new = examples(2_000, 2)
    words = str(posterior.trust(held_out=new)).splitlines()
    assert words[0].startswith("Against the start: NLL -") and words[1].startswith("Temperature: T = ")
    found = posterior.against_start(*new)
    assert found.ratio < 0.6  # it was .23 to .35 with five seeds of network and sampler


@pytest.mark.long
@pytest.mark.parametrize(("steps", "said"), [(3, True), (60, False)])
def test_a_network_that_was_not_trained_to_the_end_is_optimised_first(steps: int, said: bool) -> None:
    """Then draws are far better than those that go on from it; what is compared with is the network as it was given."""
    model, new = trained(steps=steps), examples(2_000, 2)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False, "ladder": [0.01, 0.1]}
    found = sample(target_of(model), TRAIN, starts=model, held_out=HELD, **run)
    choice = found.info["temperature_choice"]
    assert ("not trained to the end" in choice["reason"]) is said
    against = found.against_start(*new)
    with torch.no_grad():
        assert against.start.nll == pytest.approx(float(nn.functional.cross_entropy(model(new[0]), new[1])), rel=1e-4)
    assert against.ratio < (0.75 if said else 1.01)


def test_a_stored_run_pays_for_no_optimisation_that_it_cannot_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins at the network as it was given, so that it can be resumed; of one that is undertrained this is said."""
    model = trained(steps=3)
    with caplog.at_level("INFO", logger="isosgd"):
        found = sample(
            target_of(model), TRAIN, starts=[model], held_out=examples(2_000, 1), store=tmp_path / "run", **SHORT
        )
    said = "the network was not trained to the end, and such a run does not begin with an optimisation"
    assert said in found.info["temperature_choice"]["reason"]
    assert said in load(tmp_path / "run").info["temperature_choice"]["reason"]
    assert len([line for line in caplog.messages if line.startswith("temperature 0.3: held-out NLL")]) == 1
    assert not any("initial optimisation" in line for line in caplog.messages)


def fitted(apart: float) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A network of two classes that lie so far apart, its data, and examples that it was not trained on."""

    def made(count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = examples(count, seed)[0], (examples(count, seed)[0][:, 0] > 0).long()
        x[:, 0] += apart * (y - 0.5)
        return x, y

    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), made(100, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, (x, y), made(400, 1)


def test_where_every_trial_does_harm_the_starts_come_back_without_a_run() -> None:
    model, data, held_out = fitted(apart=8.0)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    with pytest.warns(SamplingWarning, match="at no temperature do draws help"):
        found = sample(target_of(model), data, starts=[model], held_out=held_out, **run)
    tried = [rung["temperature"] for rung in found.info["temperature_choice"]["rungs"]]
    assert tried == pytest.approx([0.03, 0.0949, 0.3], rel=1e-3)
    assert len(found) == 1 and found.info["gradients"] == 3 * 400 and found.info["engine"]
    assert found.info["density"].startswith("none: no run was better")


@pytest.mark.long
def test_a_run_that_is_not_surely_better_is_followed_by_a_colder_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by no third one: the second decides. Runs that come out so close to the bounds cannot be had by any data."""
    said, of = iter([(-1e-4, 2e-4), (-0.05, 0.01)]), Rung.of

    def judged(*args: Any, apart: bool = False) -> Rung:
        found = of(*args, apart=apart)
        if not apart:
            return found
        difference, error = next(said)
        return replace(found, difference=difference, error=error, rest=difference + error)

    monkeypatch.setattr(Rung, "of", judged)
    model, data, held_out = fitted(apart=0.0)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    found = sample(target_of(model), data, starts=[model], held_out=held_out, **run)
    reason = found.info["temperature_choice"]["reason"]
    assert reason.startswith("the run at T = 0.3 did not help to predict held-out examples surely (")
    assert "T = 0.0949 was taken" in reason and found.info["temperature"] == pytest.approx(0.3 / 10**0.5)
    assert 2 * 1_300 < found.info["gradients"] - 400 < 2 * 1_400


def judged_as(
    monkeypatch: pytest.MonkeyPatch, fates: list[str], error: float = 2e-4, seconds: float = 0.0, **settings: Any
) -> tuple[list[float], Any]:
    """Temperatures of the runs after the trials, where each ends as said: "diverged", or better by .0001 +- error.

    By the clock each takes so many seconds more than it does. Draws so close to a bound, and runs that diverge at
    a temperature at which the trial before them did not, cannot be had by any data.
    """
    module, ran = sys.modules["isosgd.sampling.trained"], list[float]()
    draw, clock = module.draw_at, time.monotonic  # type: ignore[attr-defined]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds * len(ran))

    def fated(*args: Any, **given: Any) -> Any:
        if "about_choice" in given:
            ran.append(given["temperature"])
            if fates[len(ran) - 1] == "diverged":
                raise DivergedError("as said", step=0, group=None, state={})
        return draw(*args, **given)

    of = Rung.of

    def unsure(*args: Any, apart: bool = False) -> Rung:
        found = of(*args, apart=apart)
        rest = error if math.isfinite(found.rest) else found.rest
        return replace(found, difference=-1e-4, error=error, rest=rest) if apart else found

    monkeypatch.setattr(module, "draw_at", fated)
    monkeypatch.setattr(Rung, "of", unsure)
    model, data, held_out = fitted(apart=0.0)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False, "draws": 8, "keep_every": 5}
    run["warmup"] = 200
    with pytest.warns(SamplingWarning, match="the draws are the starts"):
        found = sample(target_of(model), data, starts=[model], **{"held_out": held_out, **run, **settings})
    return ran, found


def test_at_most_two_runs_are_judged_however_many_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, found = judged_as(monkeypatch, ["diverged", "unsure", "unsure", "never"])
    assert ran == pytest.approx([0.3, 0.03, 0.03 / 10**0.5])
    assert [run["temperature"] for run in found.info["temperature_choice"]["runs"]] == ran[1:]
    monkeypatch.undo()
    ran, _ = judged_as(monkeypatch, ["unsure", "diverged", "unsure", "never"])
    assert ran == pytest.approx([0.3, 0.3 / 10**0.5, 0.03 / 10**0.5])


def test_there_is_no_second_run_where_it_could_not_be_surely_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """A colder run gains some hundredths of the NLL, and held-out examples leave an error that is far larger."""
    ran, found = judged_as(monkeypatch, ["unsure", "never"], error=0.02)
    assert found.info["temperature_choice"]["calibrated_nll"] < 0.2
    assert ran == [0.3] and "surely (0.0001 ± 0.02 better)" in found.info["temperature_choice"]["reason"]


@pytest.mark.parametrize(("seconds", "runs"), [(600.0, 2), (700.0, 1)])
def test_a_second_run_has_half_the_time_of_the_first_at_least(
    monkeypatch: pytest.MonkeyPatch, seconds: float, runs: int
) -> None:
    ran, found = judged_as(monkeypatch, ["unsure", "unsure", "never"], seconds=seconds, max_seconds=1_000.0)
    assert len(ran) == runs
    said = "max_seconds ended before a colder one" in found.info["temperature_choice"]["reason"]
    assert said == (runs == 1)


def test_without_a_warm_up_there_is_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not go on from the trial, and would have no rates."""
    assert judged_as(monkeypatch, ["unsure", "never"], warmup=0)[0] == [0.3]


@pytest.mark.long
def test_two_held_out_examples_are_too_few_for_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, (x, y) = fitted(apart=0.0)
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    worst = losses.argsort(descending=True)[:2]  # so that trials do not all do harm
    assert len(judged_as(monkeypatch, ["unsure", "never"], held_out=(x[worst], y[worst]))[0]) == 1


@pytest.mark.long
def test_held_out_examples_are_predicted_once_by_each_trial() -> None:
    """Also where the network is not too sure, so that a trial tells whether it was trained to the end."""
    calls = list[int]()

    class Watched(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    model, data, held_out = fitted(apart=8.0)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    model = Watched(*model)
    found = sample(target_of(model), data, starts=[model], held_out=held_out, **run)
    choice = found.info["temperature_choice"]
    assert choice["start_width"] <= 1
    tried = [calls.count(SCORED_ON_CPU), calls.count(400 - SCORED_ON_CPU)]
    calls.clear()
    found.log_predictive(held_out, batch_size=SCORED_ON_CPU)
    each = [calls.count(SCORED_ON_CPU), calls.count(400 - SCORED_ON_CPU)]
    assert tried == [(1 + len(choice["rungs"])) * count for count in each] != [0, 0]  # the start, and each trial


def test_where_time_ends_the_trials_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole trial at T = 0.3 does harm there."""
    model, data, held_out = fitted(apart=8.0)
    monkeypatch.setattr("isosgd.sampling.ladder.Ladder._late", lambda ladder: True)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    with pytest.warns(SamplingWarning, match="max_seconds ended before a colder one"):
        found = sample(target_of(model), data, starts=[model], held_out=held_out, **run)
    assert len(found.info["temperature_choice"]["rungs"]) == 1


@pytest.mark.long
@pytest.mark.parametrize(("steps", "more"), [(3, True), (60, False)])
def test_networks_that_are_too_sure_are_not_optimised_first(steps: int, more: bool) -> None:
    """Its draws may be better by any number of standard errors; it is too sure, as one that is undertrained is not."""
    model, held_out = trained(steps=steps), examples(20_000, 1)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    found = sample(target_of(model), TRAIN, starts=[model], held_out=held_out, **run)
    assert "not trained to the end" not in found.info["temperature_choice"]["reason"] or more
    assert (found.info["gradients"] > 2_500) is more  # with the optimisation, whether that was kept or not


@pytest.mark.long
def test_draws_of_the_temperature_that_won_are_the_first_of_the_run() -> None:
    """The trial's eight come before those that go on from it; where lengths are given, all draws are as asked for."""
    model, run = trained(), {"batch_size": 16, "compile": False, "progress": False, "draws": 16}
    found = sample(target_of(model), TRAIN, starts=[model], held_out=HELD, **run)
    given = sample(target_of(model), TRAIN, starts=[model], held_out=HELD, keep_every=60, **run)
    assert "from_rung" not in given.info
    apart = []
    for posterior in (found, given):
        first = posterior.info["from_start"]
        assert posterior.num_draws == posterior.info["draws"] == first + 16
        assert all(torch.equal(posterior.draws["0.weight"][0, k], model[0].weight) for k in range(first))
        apart.append(posterior.draws["0.weight"][:, first:].diff(dim=1)[0].square().mean((1, 2)).sqrt())
    assert found.info["from_rung"] == 8
    assert float(apart[0][:7].mean()) < float(apart[0][8:].mean())  # the trial's are closer together than the others
    assert float(apart[1].min()) > 0


@pytest.mark.long
def test_gradients_of_trials_are_counted_once() -> None:
    """Each trial goes on from the last one, and the run from one of them."""
    settings = {**SHORT, "ladder": [1e-4, 1e-3, 1e-2, 1e-1]}
    found = sample(target_of(trained()), TRAIN, starts=[trained()], held_out=HELD, **settings)
    tried = len(found.info["temperature_choice"]["rungs"])
    assert tried >= 4
    assert 220 + 132 * tried < found.info["gradients"] < 220 + 132 * tried + 2 * 272  # one or two trials from the start


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*the statistics of the minibatch:UserWarning")
def test_the_run_of_a_network_with_batchnorm_keeps_the_rates_of_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    name, trials, runs = "draw_at", dict[float, Any](), dict[float, Any]()

    def followed(*args: Any, **settings: Any) -> Any:
        found = draw(*args, **settings)
        (runs if "about_choice" in settings else trials)[settings["temperature"]] = found.info["rates"]
        return found

    module = sys.modules["isosgd.sampling.trained"]
    draw = getattr(module, name)
    monkeypatch.setattr(module, name, followed)
    model = trained(norm=True)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False}
    sample(target_of(model), TRAIN, starts=[model], held_out=HELD, **run)
    first = next(iter(runs))  # a colder one begins anew
    assert runs[first] == trials[first]


@pytest.mark.long
def test_draws_where_predictions_get_worse_are_left_out() -> None:
    """From a network that was stopped early a chain goes on to those that fit the noise of few examples."""
    model = trained(steps=10)
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False, "draws": 32}
    found = sample(target_of(model), TRAIN, starts=[model], held_out=HELD, **run)
    choice, own = found.info["temperature_choice"], found.num_draws - found.info["from_start"]
    assert choice["judged"]["part"] and own == [32, 16, 8][choice["judged"]["part"]]
    assert f"by the first {own} of 32 draws" in choice["reason"]
    assert found.against_start(*examples(2_000, 2)).ratio < 1


@pytest.mark.long
def test_the_start_has_its_share_of_predictions_and_none_of_the_diagnostics() -> None:
    """Its weight is what was asked for, of any kind of prediction; chains are judged without it."""
    models, new = [trained(seed) for seed in (0, 1)], examples(50, 2)
    settings = {**SHORT, "draws": 12, "temperature": 1e-2}
    alone = sample(target_of(models[0]), TRAIN, starts=models, chains=2, **settings)
    began = torch.stack([model(new[0]).softmax(1) for model in models]).mean(0).detach()
    for share in (0.2, 0.5):
        both = alone.with_starts(share)
        assert both.num_draws == 12 + both.info["from_start"]
        expected = share * began + (1 - share) * alone.predict(new[0]).mean
        torch.testing.assert_close(both.predict(new[0]).mean, expected, rtol=1e-4, atol=1e-5)
        likely = share * began.gather(1, new[1][:, None])[:, 0] + (1 - share) * alone.log_predictive(new).exp()
        torch.testing.assert_close(both.log_predictive(new).exp(), likely, rtol=1e-4, atol=1e-5)
        assert both.summary(new).as_dict() == alone.summary(new).as_dict()
        assert both.trust(held_out=new).readings == alone.trust(held_out=new).readings
    most = alone.with_starts(0.8)
    assert most.info["from_start"] == 24 and most.num_draws == 30  # every second of twelve draws
    part = most.select(draws=slice(22, None))
    assert part.info["from_start"] == 2 and part.num_draws == part.info["draws"] == 8
    again = alone.with_starts(0.8).with_starts(0.5)
    assert again.info["from_start"] == 6 and again.num_draws == 12  # of the draws that were left
    with pytest.raises(ValueError, match="3 starts for 2 chains"):
        alone.with_starts(0.5, [*models, models[0]])
    for share in (0.0, 1.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            alone.with_starts(share)


@pytest.mark.long
@pytest.mark.parametrize(("bound", "value"), [("SURE_CHOSEN", 1e6), ("LEAST_GAIN", 10.0)])
def test_a_gain_that_may_be_chance_is_not_taken(bound: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better than the start, but not surely, or not by much: the start comes back; one temperature is one run.

    By how much a run is better is a matter of chance, so that the bounds are moved, not the data.
    """
    monkeypatch.setattr(f"isosgd.sampling.trained.{bound}", value)
    model, settings = trained(steps=10), {**SHORT, "ladder": [1.0], "keep_every": 50}
    with pytest.warns(SamplingWarning, match=r"surely \(0\.\d+ ± 0\.\d+ better\): the draws are the starts"):
        found = sample(target_of(model), TRAIN, starts=[model], held_out=HELD, **settings)
    assert found.info["method"] == "the starts" and found.info["temperature_choice"]["judged"]["difference"] < 0


def test_the_start_is_kept() -> None:
    """Without an initial optimisation, and cold, draws stay where the network was trained."""
    model = trained()
    posterior = sample(target_of(model), TRAIN, starts=[model], temperature=1e-6, **SHORT)
    assert [report["optimisation"] for report in posterior.info["warmup"]] == [0]
    for name, value in model.state_dict().items():
        assert float((posterior.draws[name] - value).abs().max()) < 0.1 * float(value.abs().max())
    assert posterior.info["temperature_choice"]["reason"] == "given"


def test_hmc_keeps_the_start_too() -> None:
    model = trained(steps=30)
    settings: dict[str, Any] = {"draws": 2, "keep_every": 2, "warmup": 560, "progress": False, "compile": False}
    posterior = sample(target_of(model), TRAIN, starts=[model], method="hmc", temperature=1e-6, **settings)
    assert [report["optimisation"] for report in posterior.info["warmup"]] == [0]


def test_chains_take_the_networks_in_turns_with_their_buffers() -> None:
    models = [trained(seed, norm=True).train() for seed in (0, 1)]
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        target = target_of(models[0])
    short = {**SHORT, "warmup": 100, "structure": "layer"}
    posterior = sample(target, TRAIN, starts=models, chains=4, temperature=1e-6, **short)
    assert posterior.num_chains == 4 and posterior.info["starts"] == 2
    weights = posterior.draws["0.weight"][:, -1]
    for chain in range(4):
        own, other = (float((weights[chain] - models[(chain + k) % 2][0].weight.detach()).abs().mean()) for k in (0, 1))
        assert own < 0.1 * other


def test_a_loader_and_a_share_of_the_data_can_be_held_out() -> None:
    model = trained()
    loader = DataLoader(TensorDataset(*HELD), batch_size=64)
    more: dict[str, Any] = {**SHORT, "ladder": [1e30], "preset": "windowed"}  # it diverges at once
    found = sample(target_of(model), TRAIN, starts=[model], held_out=loader, **more)
    assert found.info["temperature_choice"]["held_out"] == 400
    found = sample(target_of(model), TRAIN, starts=[model], held_out=0.2, **more)
    assert found.info["temperature_choice"]["held_out"] == 20
    assert found.info.get("num_data", 80) == 80


def test_without_held_out_examples_it_is_cold_and_says_so() -> None:
    model = trained()
    posterior = sample(target_of(model), TRAIN, temperature="auto", **SHORT)
    assert posterior.info["temperature"] == 1e-3
    assert "no examples were held out" in posterior.info["temperature_choice"]["reason"]


def test_where_nothing_helps_the_draws_are_the_starts() -> None:
    """Labels that the network knows exactly leave nothing to gain, but for being surer of them."""
    model = trained()
    x = HELD[0]
    y = model(x).argmax(1)
    with pytest.warns(SamplingWarning, match="the draws are the starts"):
        posterior = sample(target_of(model), TRAIN, starts=[model], held_out=(x, y), ladder=[1.0], **SHORT)
    assert posterior.info["temperature"] == 0 and len(posterior) == 1
    assert torch.equal(posterior.draws["0.weight"][0, 0], model[0].weight.detach())
    assert posterior.softmax_temperature < 1 and posterior.against_start(x, y).helps
    plain = posterior.at_softmax_temperature(1.0).against_start(x, y)
    assert plain.ratio == pytest.approx(1.0) and not plain.helps
    with pytest.raises(ValueError, match="there is nothing to judge"):
        posterior.trust()


@pytest.mark.long
def test_a_network_that_is_sure_and_right_comes_back() -> None:
    """Its NLL is exactly zero, so that nothing can be measured by it."""
    model, (x, _) = nn.Linear(4, 2), HELD
    with torch.no_grad():
        model.weight.copy_(1e4 * torch.tensor([[-1.0], [1.0]]).expand(2, 4))
        model.bias.zero_()
    y = (x.sum(1) > 0).long()
    held, settings = (x[100:], y[100:]), {**SHORT, "ladder": [1e-3, 1e-2]}
    with pytest.warns(SamplingWarning, match="the draws are the starts"):
        found = sample(target_of(model), (x[:100], y[:100]), starts=[model], held_out=held, **settings)
    assert found.info["gradients"] > 0 and found.info["temperature_choice"]["start_nll"] == 0


@pytest.mark.long
def test_a_regression_has_the_noise_of_its_draws_beside_them() -> None:
    """Four held-out rows know little of the noise: a network without a scale of its own takes that of the draws."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(304, 2, generator=generator)
    y = x @ torch.tensor([[1.0], [-1.0]]) + 0.3 * torch.randn(304, 1, generator=generator)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -1.5]]))  # far off, so that draws are better on any four rows
        model.bias.zero_()
    target = Target.from_module(model, "gaussian", priors.Normal(1.0))
    held = (x[300:], y[300:])
    found = sample(target, (x[:300], y[:300]), starts=[model], held_out=held, **{**SHORT, "draws": 20})
    first = found.info["from_start"]
    scales = found.draws["likelihood.scale"][0]
    assert first > 0 and float(scales[:first].std()) < 1e-6
    assert float(scales[0]) == pytest.approx(float(scales[first:].log().mean().exp()), rel=0.05)
    assert found.info["temperature_choice"]["judged"]["share"] == pytest.approx(first / found.num_draws, abs=0.05)
    with pytest.warns(SamplingWarning, match="the draws are the starts"):
        one = sample(target, (x[:300], y[:300]), starts=[model], held_out=(x[300:301], y[300:301]), **SHORT)
    assert one.info["temperature_choice"]["judged"]["error"] == float("inf")  # one row judges nothing


def test_rungs_that_diverge_are_left_out() -> None:
    model = trained()
    steep = copy.deepcopy(model)
    with pytest.warns(SamplingWarning, match="diverged"):
        posterior = sample(
            target_of(steep), TRAIN, starts=[steep], held_out=HELD, ladder=[1e30], preset="windowed", **SHORT
        )
    assert posterior.info["temperature_choice"]["diverged"] and len(posterior) == 1


def test_gradients_of_trials_that_diverge_are_counted() -> None:
    """A trial goes on until it meets what is not finite, and that costs as much as one that is kept."""
    model = trained()
    settings = {**SHORT, "preset": "windowed", "starts": [model], "held_out": HELD}
    one = sample(target_of(model), TRAIN, ladder=[1e30], **settings)
    chains = sample(target_of(model), TRAIN, ladder=[1e30], chains=2, **settings)
    trials = sample(target_of(model), TRAIN, ladder=[1e29, 1e30], **settings)
    assert len(trials.info["temperature_choice"]["diverged"]) > 1
    assert 0 < one.info["gradients"] < min(chains.info["gradients"], trials.info["gradients"])
    assert one.info["seconds"] > 0


def test_time_is_bounded_and_what_was_drawn_is_kept() -> None:
    model = trained()
    began = time.monotonic()
    posterior = sample(
        target_of(model), TRAIN, starts=[model], temperature=0.01, max_seconds=2.0, warmup=200, draws=100_000,
        keep_every=5, batch_size=16, progress=False,
    )  # fmt: skip
    assert time.monotonic() - began < 10
    assert 1 <= posterior.num_draws < 100_000 and posterior.info["draws"] == posterior.num_draws
    assert posterior.info["stopped"].startswith("max_seconds")


class SlowToTrain(nn.Module):
    """Takes 50 ms for a minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != len(HELD[0]):
            time.sleep(0.05)
        found: Tensor = self.last(self.first(x).relu())
        return found


@pytest.mark.parametrize("ladder", [None, [0.1]])
def test_where_no_trial_can_draw_in_time_the_network_comes_back(
    ladder: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isosgd.sampling.loop.GRACE", 0.2)
    torch.manual_seed(0)
    model, began = SlowToTrain(), time.monotonic()
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False, "max_seconds": 0.5, "chains": 3}
    found = sample(target_of(model), TRAIN, starts=[model], held_out=HELD, ladder=ladder, **run)
    assert time.monotonic() - began < 4.0  # 200 gradients of each chain would take 30 seconds
    assert "max_seconds was over before" in found.info["temperature_choice"]["reason"]
    assert found.against_start(*HELD).ratio <= 1.001
    with pytest.raises(OutOfTimeError, match="give more time or fewer chains"):  # nothing says what to fall back on
        sample(target_of(model), TRAIN, starts=[model], temperature=0.1, **run)


class SlowToScore(nn.Module):
    """Takes 20 ms for all held-out examples, each draw on its own, and no time for a minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 2), nn.Linear(8, 2)  # filters are not mapped over draws

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == len(HELD[0]):
            time.sleep(0.02)
        found: Tensor = self.last(self.first(x.reshape(-1, 1, 2, 2)).flatten(1).relu())
        return found


@pytest.mark.parametrize("ladder", [None, [0.1]])
def test_time_is_left_to_judge_the_draws_by_held_out_examples(ladder: list[float] | None) -> None:
    """They are as many as fit: 200 of them would take four seconds to score."""
    torch.manual_seed(0)
    model, began = SlowToScore(), time.monotonic()
    run: dict[str, Any] = {"batch_size": 16, "compile": False, "progress": False, "draws": 200, "max_seconds": 1.5}
    found = sample(target_of(model), TRAIN, starts=[model], held_out=HELD, ladder=ladder, **run)
    assert time.monotonic() - began < 3.2
    assert found.info["temperature_choice"]["judged"] is not None


def test_a_regression_that_is_right_is_not_beaten_by_its_noise_scale() -> None:
    """A network has no scale of the noise: it is scored under its best one, so that learning that is no gain."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator)
    y = x @ torch.tensor([[1.0], [-1.0]]) + 0.05 * torch.randn(300, 1, generator=generator)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
        model.bias.zero_()
    target = Target.from_module(model, "gaussian", priors.Normal(1.0))
    posterior = sample(target, (x[:200], y[:200]), starts=[model], held_out=(x[200:], y[200:]), ladder=[0.1], **SHORT)
    assert posterior.info["temperature_choice"]["start_nll"] == pytest.approx(-1.58, abs=0.2)  # log(.05) + 1.42
    assert posterior.against_start(x[200:], y[200:]).difference < 0.05


@pytest.mark.long
def test_a_regression_of_few_rows_is_sampled_by_hmc_at_its_own_temperature() -> None:
    """A network that fits the noise of 60 rows is far better on average over its posterior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(660, 5, generator=generator)
    y = x @ torch.randn(5, 1, generator=generator) + 0.5 * torch.randn(660, 1, generator=generator)
    model = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(500):
        optimizer.zero_grad()
        (model(x[:60]) - y[:60]).square().mean().backward()
        optimizer.step()
    posterior = sample(
        Target.from_module(model, "gaussian"), (x[:60], y[:60]), starts=[model], held_out=(x[60:260], y[60:260]),
        draws=10, compile=False, progress=False,
    )  # fmt: skip
    choice = posterior.info["temperature_choice"]
    assert posterior.info["method"] == "hmc" and posterior.info["temperature"] == 1
    assert choice["held_out"] == 200 and choice["judged"]["difference"] < 0
    found = posterior.against_start(x[260:], y[260:])
    assert found.difference + 2 * found.standard_error < 0


def test_a_warm_up_that_is_too_short_is_refused_before_the_trials(tmp_path: Path) -> None:
    """A stored run begins at the network again. Without a store it continues a trial, and needs less."""
    model = trained()
    given = {**SHORT, "starts": [model], "held_out": HELD, "method": "isgd"}
    with patch.object(TrainedRun, "_trial") as trial, pytest.raises(ValueError, match="warmup = 5"):
        sample(target_of(model), TRAIN, store=tmp_path / "run", **{**given, "warmup": 5})
    trial.assert_not_called()
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(sample(target_of(model), TRAIN, **{**given, "warmup": 60}))


def test_chains_that_are_fewer_than_the_starts_are_told_of() -> None:
    starts = [trained(0), trained(1), trained(2)]
    with pytest.warns(SamplingWarning, match="chains = 2 are fewer than the 3 starts: there are 3 chains"):
        found = sample(target_of(starts[0]), TRAIN, starts=starts, chains=2, temperature=0.1, **SHORT)
    assert found.num_chains == 3


def test_batches_that_always_differ_in_size_are_refused() -> None:
    model = trained(norm=True, steps=1).train()
    loader = DataLoader(TensorDataset(*TRAIN), batch_size=60)  # 60, 40, 60, 40, ...
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        target = target_of(model)
    with pytest.raises(ValueError, match="drop_last=True"):
        sample(target, loader, structure="layer", warmup=400, draws=2, keep_every=2, progress=False)


def others() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def broken() -> nn.Module:
    """Its training has diverged."""
    model = trained(steps=1)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name == "0.bias")[0] = math.nan
    return model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"starts": [others()]}, r"starts\[0\] has '0.weight' of shape \[8, 4\]"),
        ({"starts": [trained(steps=1), bent()]}, r"starts\[1\] has Tanh where the target has ReLU"),
        ({"starts": []}, "starts must be a list of trained networks"),
        ({"starts": [3]}, r"starts\[0\] is a int"),
        ({"starts": [trained(steps=1), broken()]}, r"starts\[1\] has '0.bias' with values that are NaN or infinite"),
        (
            {"starts": [{"model": others().state_dict()}]},
            r"starts\[0\] has 'model' of type OrderedDict.*checkpoint\['m",
        ),
        ({"held_out": (HELD[0], HELD[1] + 5)}, "label 5"),
        ({"held_out": (HELD[0],)}, "held_out is a tuple of 1 tensors, the data a tuple of 2 tensors"),
        ({"held_out": dict(zip("xy", HELD, strict=True))}, "held_out is a dict of 2 tensors, the data a tuple of 2"),
        ({"held_out": "0.1"}, "held_out of type str: pass"),
        ({"held_out": DataLoader(TensorDataset(HELD[0][:0], HELD[1][:0]))}, "held_out has no examples"),
        ({"held_out": (HELD[0], HELD[1].float()[:, None])}, "targets of an example have the shape"),
        ({"held_out": 1.5}, "held_out = 1.5 must lie between 0 and 1"),
        ({"held_out": 0.1, "transform": lambda b, g: b}, "with a transform"),
        ({"ladder": [], "held_out": HELD}, "must hold positive temperatures, one at least"),
        ({"ladder": [-1.0], "held_out": HELD}, "must hold positive temperatures"),
        ({"ladder": [0.1]}, "temperatures are tried where there is held_out="),
        ({"temperature": 1.0, "ladder": [0.1]}, "ladder= goes with temperature='auto'"),
        ({"max_seconds": 0}, "max_seconds = 0 must be a positive number"),
        ({"init": {}}, "starts= and init= both"),
        ({"temperature": -1.0}, "temperature = -1.0 must be positive"),
        ({"draws": 0}, "draws = 0 must be"),
        ({"method": "swag"}, "method = 'swag' trains networks of its own"),
        ({"temperature": 0.1, "held_out": 0.1}, "held_out= goes with temperature='auto'"),
        ({"transform": lambda b, g: None}, "transform returned None"),
    ],
)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    model = trained(steps=1)
    with pytest.raises((ValueError, TypeError), match=message):
        sample(target_of(model), TRAIN, **{"starts": [model], **SHORT, **settings})


def test_one_call_begins_and_resumes_a_stored_run(tmp_path: Path) -> None:
    """A script can always pass ``resume=True``: the temperature is chosen once."""
    model = trained()
    call: dict[str, Any] = {"starts": [model], "held_out": HELD, "store": tmp_path / "run", "resume": True, **SHORT}
    drawn = []
    for draws in (4, 4, 6):
        found = sample(target_of(model), TRAIN, **{**call, "draws": draws})
        assert found.info["method"] == "the starts"  # so short a run does not help
        drawn.append(dict(load(tmp_path / "run").draws))
    for name, x in drawn[0].items():
        assert torch.equal(drawn[1][name], x) and torch.equal(drawn[2][name][:, :4], x)
        assert drawn[2][name].shape[1] == 6
    with pytest.raises(ValueError, match=r"keep_every = 7, but the run in .* was begun with 5"):
        sample(target_of(model), TRAIN, **{**call, "keep_every": 7})
    with pytest.raises(ValueError, match="with draws='auto' go on with temperature="):
        sample(target_of(model), TRAIN, **{**call, "draws": "auto"})


def test_a_posterior_without_draws_cannot_be_compared() -> None:
    """Such as a stored run that was stopped before its first draw."""
    model = trained(steps=1)
    target = target_of(model)
    none = Posterior(target, {name: x.new_empty(1, 0, *x.shape) for name, x in target.initial().items()}, {})
    with pytest.raises(ValueError, match="has no draws yet"):
        none.against_start(*HELD, starts=[model])


def test_held_out_examples_that_are_the_training_data_are_warned_of() -> None:
    model = trained(steps=1)
    with pytest.warns(SamplingWarning, match="held_out are the training data"), suppress(ValueError):
        sample(target_of(model), TRAIN, starts=[model], held_out=TRAIN, **{**SHORT, "ladder": []})


def test_a_start_in_double_precision_is_one_of_the_target() -> None:
    model = trained(steps=1)
    found = sample(target_of(model), TRAIN, starts=[copy.deepcopy(model).double()], temperature=0.01, **SHORT)
    assert found.draws["0.weight"].dtype is torch.float32


def test_without_a_network_there_is_no_start() -> None:
    target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(1.0), init={"mu": 0.0})
    with pytest.raises(ValueError, match="is for trained networks"):
        sample(target, (torch.randn(50),), temperature="auto")
