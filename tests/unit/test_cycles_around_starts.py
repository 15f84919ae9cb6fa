"""Trained classifiers of some size are sampled in cycles: what is called, found and said."""

import logging
import math
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import isosgd
from isosgd import Posterior, Target, sample
from isosgd.metrics import accuracy
from isosgd.store import Manifest

Data = tuple[Tensor, Tensor]
SHORT: dict[str, Any] = {"progress": False, "compile": False}
pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")


def problem() -> tuple[Data, Data, Data]:
    """Three classes in twenty dimensions, labels of one example in ten at random."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 20, generator=made)
    y = (x @ torch.randn(20, 3, generator=made)).argmax(1)
    wrong = torch.rand(2000, generator=made) < 0.1
    y = torch.where(wrong, torch.randint(3, (2000,), generator=made), y)
    return (x[:600], y[:600]), (x[600:1000], y[600:1000]), (x[1000:], y[1000:])


def trained(data: Data, steps: int = 300, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(100)] if norm else []
    model = nn.Sequential(nn.Linear(20, 100), *middle, nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def network() -> tuple[nn.Sequential, Data, Data, Data]:
    data, held_out, test = problem()
    return trained(data), data, held_out, test


@pytest.fixture(scope="module")
def drawn(network: tuple[nn.Sequential, Data, Data, Data]) -> Posterior:
    model, data, held_out, _ = network
    return sample(
        Target.from_module(model, "categorical", "empirical"), data, starts=[model], held_out=held_out, **SHORT
    )


def test_the_verdict_on_cycles_proposes_what_they_take(network: Any, drawn: Posterior) -> None:
    verdict = drawn.trust(network[1])
    assert verdict.summary == "run longer" and verdict.fixes == ("more draws (draws=) or more chains (chains=)",)
    reason = drawn.info["temperature_choice"]["reason"]
    found = re.search(r"after the run NLL ([\d.]+).* \(the start ([\d.]+); each half is scored by the choices", reason)
    assert found is not None and float(found[1]) < float(found[2])


def test_a_trained_classifier_is_better_after_cycles(network: Any, drawn: Posterior) -> None:
    model, _, held_out, test = network
    assert drawn.info["method"] == "csghmc"
    assert drawn.info["options"]["tempered"] == "likelihood"
    assert "likelihood^(1/T) * prior" in drawn.info["density"]
    found = drawn.against_start(*test)
    calibrated = drawn.start_draws().calibrated(*held_out)
    alone = -float(calibrated.log_predictive(test).mean())
    assert found.average.nll < 0.98 * alone < found.start.nll  # .94, with a deviation of .02 over seeds
    with torch.no_grad():
        before = accuracy(model(test[0]).softmax(-1), test[1])
    assert accuracy(drawn.predict(test[0]).mean, test[1]) > before - 0.01


def test_draws_are_those_of_several_cycles(drawn: Posterior) -> None:
    own = drawn.select(draws=slice(drawn.info["from_start"], None))
    assert own.num_draws == 30
    w = own.draws["2.weight"][0].flatten(1)
    steps = (w[1:] - w[:-1]).norm(dim=1)
    assert steps.sort(descending=True).indices[:2].sort().values.tolist() == [
        9,
        19,
    ]  # from one cycle to the next it is far
    assert steps[[9, 19]].min() > 3 * steps.median()


@pytest.mark.long
def test_a_colder_trial_takes_over_what_heating_reached(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate at which the loss rises does not depend on the temperature, so it is found once."""
    model, data, held_out, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    call: dict[str, Any] = {"starts": [model], "held_out": held_out, "chains": 2, "draws": 11, **SHORT}
    one = sample(target, data, **call)
    monkeypatch.setattr("isosgd.sampling.ladder.HARM", -math.inf)  # every trial does harm
    several = sample(target, data, **call)
    tried = [rung["temperature"] for rung in several.info["temperature_choice"]["rungs"]]
    assert len(tried) > 1
    spent = [posterior.info["gradients"] for posterior in (one, several)]
    assert spent[1] - spent[0] < 2 * (len(tried) - 1) * (400 + 30)  # a cycle each, and hardly more
    share = several.info["temperature"] / one.info["temperature"]
    rates = [[next(iter(rates.values())) for rates in p.info["rates"]] for p in (one, several)]
    assert rates[1] == pytest.approx([rate * share for rate in rates[0]], rel=1e-6)


def test_all_groups_have_one_rate_and_colder_ones_a_lower(network: Any) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", weight_decay=1e-4, optimizer=None, num_data=600)
    short: dict[str, Any] = {"method": "csghmc", "lr": "heated", "cycle": 50, "draws": 2, "keep_every": 1}
    found = []
    for temperature in (0.03, 0.01):
        posterior = sample(target, data, starts=[model], temperature=temperature, **short, **SHORT)
        rates = set(posterior.info["rates"][0].values())
        assert len(rates) == 1
        found += rates
    assert found[0] > 2 * found[1]


def test_heating_ends_where_it_began(network: Any) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    short: dict[str, Any] = {"method": "csghmc", "lr": "heated", "cycle": 1000, "exploration": 0.0}
    short |= {"draws": 1, "keep_every": 1}
    posterior = sample(target, data, starts=[model], temperature=1e-8, **short, **SHORT)
    steps = posterior.info["gradients"]
    assert steps > 50  # most of them in heating, which moved the network until its loss rose
    for name, x in model.named_parameters():
        assert (posterior.draws[name][0, 0] - x).norm() < 1e-3 * x.norm() + 1e-4, name


@pytest.mark.long
def test_small_networks_and_temperatures_that_are_given_keep_i_sgd(network: Any) -> None:
    model, data, held_out, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    short: dict[str, Any] = {"warmup": 400, "draws": 2, "keep_every": 1, "structure": "layer"}
    assert sample(target, data, starts=[model], temperature=0.01, **short, **SHORT).info["method"] == "isgd"
    ladder = sample(target, data, starts=[model], held_out=held_out, ladder=[1e-3], **short, **SHORT)
    assert ladder.info["method"] in ("isgd", "the starts")


@pytest.mark.long
def test_batchnorm_keeps_fresh_statistics() -> None:
    data, held_out, test = problem()
    model = trained(data, norm=True)
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        target = Target.from_module(model, "categorical", "empirical")
    posterior = sample(target, data, starts=[model], held_out=held_out, **SHORT)
    found = posterior.against_start(*test)
    assert found.average.nll < found.start.nll


def test_a_short_time_makes_cycles_shorter(network: Any) -> None:
    model, data, held_out, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    began = time.monotonic()
    posterior = sample(target, data, starts=[model], held_out=held_out, max_seconds=1.5, **SHORT)
    assert time.monotonic() - began < 10
    assert posterior.num_draws >= 1


def test_trials_say_what_they_do_and_a_loader_is_not_warned_of_in_vain(
    network: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial took a third of the time in silence; the share of noise, which cycles do not measure, was ``nan%``."""
    model, data, held_out, _ = network
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    monkeypatch.setattr("isosgd.progress.LEAST_STAGE", 0.0)
    target, loader = Target.from_module(model, "categorical", "empirical"), DataLoader(TensorDataset(*data), 64, True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sample(target, loader, starts=[model], held_out=held_out, compile=False, max_seconds=2.0)
    assert not any("nan" in str(warning.message) for warning in heard)
    lines = [line.split("isosgd: ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "trying T = 0.03 on 400 held-out examples"
    assert any(line.startswith("trial at T = 0.03: heating, ") for line in lines)
    assert any(line.startswith("temperature 0.03: held-out NLL ") for line in lines)
    assert any(line.startswith("sampling, ") for line in lines)


@pytest.mark.long
def test_several_networks_share_the_chains(network: Any) -> None:
    model, data, held_out, test = network
    other = trained(data, steps=250)
    target = Target.from_module(model, "categorical", "empirical")
    posterior = sample(target, data, starts=[model, other], held_out=held_out, **SHORT)
    assert posterior.num_chains == 2
    assert posterior.against_start(*test).starts == 2


def test_a_stored_run_of_cycles_is_extended(network: Any, tmp_path: Path) -> None:
    model, data, held_out, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    sample(target, data, starts=[model], held_out=held_out, draws=12, store=tmp_path / "run", **SHORT)
    short = isosgd.load(tmp_path / "run", target, as_drawn=True)
    assert short.info["method"] == "csghmc"
    before = {name: x.clone() for name, x in short.draws.items()}
    isosgd.resume(tmp_path / "run", target, data, starts=[model], draws=15, progress=False)
    longer = isosgd.load(tmp_path / "run", target, as_drawn=True)
    assert longer.num_draws == 15
    for name, x in before.items():
        torch.testing.assert_close(longer.draws[name][:, :12], x, rtol=0, atol=0)
    assert longer.info["density"] == short.info["density"]


def test_heating_is_for_cycles_and_takes_the_time_it_takes(network: Any) -> None:
    model, data, held_out, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    with pytest.raises(ValueError, match=r"lr = 'heated' is for methods in cycles, csgld and csghmc, not for 'sgld'"):
        sample(target, data, starts=[model], temperature=0.1, method="sgld", lr="heated", **SHORT)
    with pytest.raises(ValueError, match="warmup = 0: cycles find their rate by heating"):
        sample(target, data, starts=[model], held_out=held_out, warmup=0, **SHORT)
    with pytest.raises(ValueError, match=r"ladder = .* with lr = 'heated'"):
        sample(target, data, starts=[model], held_out=held_out, method="csghmc", lr="heated", ladder=[0.1], **SHORT)


def test_a_method_in_cycles_that_is_asked_for_samples_at_rates_by_theory(network: Any) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    settings: dict[str, Any] = {"starts": [model], "method": "csghmc", "cycle": 50, "draws": 2, "keep_every": 1}
    rates = [
        max(sample(target, data, temperature=0.01, **more, **settings, **SHORT).info["rates"][0].values())
        for more in ({"warmup": 400}, {"lr": "heated"})
    ]
    assert rates[0] < rates[1]


@pytest.mark.parametrize("labels", ["several of an example", "none that are known"])
def test_heating_knows_how_far_chance_is(labels: str) -> None:
    """The rate is found where the loss has come some way, not at the first minibatch that is worse than others."""
    data, _, _ = problem()
    torch.manual_seed(0)
    model = nn.Linear(20, 6 if labels.startswith("several") else 3)
    y = torch.randint(2, (600, 6)).float() if labels.startswith("several") else data[1]
    kind = "bernoulli" if labels.startswith("several") else "categorical"
    target = Target.from_module(model, kind, "empirical")
    settings: dict[str, Any] = {"method": "csghmc", "lr": "heated", "cycle": 50, "draws": 2, "keep_every": 1}
    posterior = sample(target, (data[0], y), starts=[model], temperature=0.03, **settings, **SHORT)
    assert posterior.info["warmup"][0]["steps"] > 100
    assert posterior.info["warmup"][0]["cycle"] == 50


def test_the_report_of_the_warm_up_is_that_of_the_heating(drawn: Posterior) -> None:
    """Also where the run goes on from a trial, whose heating it was."""
    (report,) = drawn.info["warmup"]
    assert report["steps"] > 100
    assert report["cycle"] == 400


def test_heating_is_the_whole_warm_up_without_starts_too(network: Any) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    for warmup in (0, 300):
        with pytest.raises(ValueError, match=f"warmup = {warmup}: cycles find their rate by heating"):
            sample(target, data, method="csghmc", lr="heated", warmup=warmup, **SHORT)


def test_the_length_of_heated_cycles_stays_as_reported(network: Any) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    settings: dict[str, Any] = {"method": "csghmc", "lr": "heated", "exploration": 0.8, "draws": 10}
    found = sample(target, data, temperature=0.03, max_seconds=1.0, **settings, **SHORT)
    heating, cycle = found.info["warmup"][0]["steps"], found.info["warmup"][0]["cycle"]
    assert cycle < 5000
    stage = min(10, int(0.05 * cycle))  # draws of one at least, where its steps are too few for ten
    assert found.info["gradients"] - heating <= cycle * math.ceil(10 / stage)


def test_heating_counts_the_examples_of_every_minibatch(network: Any) -> None:
    """Also where the last one that it looks at is a short one, as of a loader."""
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    settings: dict[str, Any] = {"method": "csghmc", "lr": "heated", "cycle": 50, "draws": 1, "keep_every": 1}
    rates = []
    for count in (420, 401):  # 21 batches, of which heating looks at the last 20 first
        loader = DataLoader(TensorDataset(data[0][:count], data[1][:count]), batch_size=20)
        posterior = sample(target, loader, starts=[model], temperature=0.03, **settings, **SHORT)
        rates += set(posterior.info["rates"][0].values())
    assert rates[1] < 1.5 * rates[0]


def test_what_is_tempered_does_not_choose_the_method() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    model = nn.Linear(3, 1)
    target = Target.from_module(model, "gaussian", "empirical")
    settings: dict[str, Any] = {"starts": [model], "draws": 2, "warmup": 200, "keep_every": 1}
    found = sample(target, (x, x[:, :1]), tempered="both", **settings, **SHORT)
    assert found.info["method"] == "hmc"


def test_a_stored_run_knows_what_its_temperature_acted_on(network: Any, tmp_path: Path) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    settings: dict[str, Any] = {"temperature": 0.01, "draws": 3, "keep_every": 2, "warmup": 200, "structure": "layer"}
    for seed, tempered in enumerate(("likelihood", "both")):
        sample(target, data, tempered=tempered, store=tmp_path / tempered, seed=seed, **settings, **SHORT)
    found = isosgd.load(tmp_path / "likelihood", target, data=data).target
    assert found is not None
    assert found.prior_weight(found.initial(), 0.01) == 0.01
    both = isosgd.load(tmp_path / "both", target, data=data).target
    assert both is not None
    assert both.prior_weight(both.initial(), 0.01) == 1.0
    with pytest.raises(ValueError, match="tempered"):
        isosgd.merge([tmp_path / "likelihood", tmp_path / "both"], tmp_path / "merged")
    with pytest.raises(ValueError, match="tempered"):
        asked = target.tempered("both")
        sample(asked, data, store=tmp_path / "likelihood", resume=True, seed=0, **settings, **SHORT)


def test_a_folder_whose_target_does_not_say_what_its_temperature_acts_on(network: Any, tmp_path: Path) -> None:
    """As in earlier folders: there only the options say so."""
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    settings: dict[str, Any] = {"temperature": 0.01, "draws": 3, "keep_every": 2, "warmup": 200, "structure": "layer"}
    for seed, name in enumerate(("old", "new")):
        sample(target, data, tempered="likelihood", store=tmp_path / name, seed=seed, **settings, **SHORT)
    manifest = Manifest.read(tmp_path / "old")
    del manifest.info["target"]["tempered"], manifest.identity["target"]["describes"]["tempered"]
    manifest.write(tmp_path / "old")
    found = isosgd.load(tmp_path / "old", target).target
    assert found is not None
    assert found.prior_weight(found.initial(), 0.01) == 0.01
    merged = isosgd.merge([tmp_path / "new", tmp_path / "old"], tmp_path / "merged", target)
    assert merged.num_chains == 2
    longer = isosgd.resume(tmp_path / "old", target, data, draws=5, progress=False)
    assert longer.num_draws == 5


def test_what_a_temperature_acts_on_must_be_known(network: Any) -> None:
    model, data, _, _ = network
    target = Target.from_module(model, "categorical", "empirical")
    with pytest.raises(ValueError, match=r"tempered = 'prior' is unknown; choose one of 'both', 'likelihood'"):
        sample(target, data, starts=[model], temperature=0.1, tempered="prior", **SHORT)
