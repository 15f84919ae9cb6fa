"""A stored run around trained networks predicts as held-out examples say, in every session."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from isosgd import Posterior, SamplingWarning, Target, load, merge, priors, resume, sample
from isosgd.sampling.weights import Weights
from isosgd.store import Manifest, StoreError
from tests.unit.test_trained import HELD, SHORT, TRAIN, examples, target_of, trained

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
NEW = examples(2_000, 2)
GOOD: dict[str, Any] = {"held_out": HELD, "batch_size": 16, "compile": False, "progress": False, "temperature": "auto"}


def run(folder: Path, **settings: Any) -> tuple[Target, Posterior]:
    """A stored run that helps: an overfitted network is sampled at a temperature of .3, 600 steps."""
    model = trained()
    target = target_of(model)
    lengths = {"draws": 12, "warmup": 300, "keep_every": 25}
    return target, sample(target, TRAIN, starts=[model], store=folder, **{**GOOD, **lengths, **settings})


def nll(posterior: Posterior) -> float:
    found = posterior.against_start(*NEW)
    assert found.average.nll == pytest.approx(-float(posterior.log_predictive(NEW).mean()), rel=1e-4)
    return found.average.nll


def alike(one: Posterior, other: Posterior) -> bool:
    return torch.allclose(one.predict(NEW[0]).mean, other.predict(NEW[0]).mean, atol=1e-6)


def test_what_sample_returns_is_what_load_returns(tmp_path: Path) -> None:
    target, found = run(tmp_path / "run")
    again = load(tmp_path / "run", target)
    assert again.info["from_start"] == found.info["from_start"] > 0
    assert again.softmax_temperature == found.softmax_temperature
    assert again.info["temperature_choice"] == found.info["temperature_choice"]
    assert "the starts have a weight of" in again.info["temperature_choice"]["reason"]
    assert alike(found, again)
    drawn = load(tmp_path / "run", target, as_drawn=True)
    assert drawn.num_draws == 12 and "from_start" not in drawn.info and drawn.softmax_temperature == 1
    start = found.against_start(*NEW).start.nll
    assert nll(found) < 0.9 * start
    # Without a target draws cannot predict, and are as drawn.
    assert load(tmp_path / "run").num_draws == 12
    assert alike(resume(tmp_path / "run", target, TRAIN, starts=[trained()], progress=False), found)


def test_draws_that_do_not_help_leave_the_network_and_stay_in_the_store(tmp_path: Path) -> None:
    """Far from convergence draws predict worse than the network: no session may predict by them unasked."""
    model = trained()
    target = target_of(model)
    with pytest.warns(SamplingWarning, match=r"as_drawn=True\) has the draws of the chains"):
        found = sample(target, TRAIN, starts=[model], held_out=HELD, store=tmp_path / "run", **SHORT)
    again = load(tmp_path / "run", target)
    assert alike(found, again) and again.num_draws == 1 and again.softmax_temperature > 1
    against = again.against_start(*NEW)
    assert against.average.nll < against.start.nll  # it is calibrated
    assert again.info["complete"] and again.info["store"] == str(tmp_path / "run")
    drawn = load(tmp_path / "run", target, as_drawn=True)
    assert drawn.num_draws == 4 and drawn.info["method"] == "isgd"


@pytest.mark.long
def test_more_draws_are_weighted_anew_where_examples_are_given(tmp_path: Path) -> None:
    model = trained()
    target, found = run(tmp_path / "run")
    with pytest.warns(SamplingWarning, match="weighted 12 draws of each chain, and there are 16 now"):
        more = resume(tmp_path / "run", target, TRAIN, starts=[model], draws=16, progress=False)
    assert more.softmax_temperature == found.softmax_temperature and more.info["from_start"] > 0
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _, anew = run(tmp_path / "run", resume=True, draws=16)
        again = load(tmp_path / "run", target)
    assert not [w for w in heard if "weighted 12 draws" in str(w.message)]
    kept = Weights.read(Manifest.read(tmp_path / "run"))
    assert kept is not None and kept.of == 16
    assert alike(anew, again)
    assert nll(anew) < 0.9 * anew.against_start(*NEW).start.nll


@pytest.mark.long
def test_other_examples_judge_anew(tmp_path: Path) -> None:
    _, found = run(tmp_path / "run")
    _, same = run(tmp_path / "run", resume=True)
    assert alike(same, found)
    _, wrong = run(tmp_path / "run", resume=True, held_out=(HELD[0], 1 - HELD[1]))  # by these nothing is good
    assert wrong.softmax_temperature > 2 * found.softmax_temperature


def test_a_folder_that_holds_a_run_is_refused_before_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "run")
    monkeypatch.setattr("isosgd.sampling.trained.TrainedRun._trial", lambda *given: pytest.fail("a trial began"))
    with pytest.raises(FileExistsError, match="already holds a run: pass resume=True"):
        run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        run(tmp_path / "file")


def test_a_regression_keeps_its_weights_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 3, generator=generator)
    y = (x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(160, generator=generator)).unsqueeze(-1)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    target = Target.from_module(model, "gaussian", priors.Normal(1.0))
    settings: dict[str, Any] = {"warmup": 200, "draws": 8, "keep_every": 20, "progress": False}
    found = sample(
        target, (x[:100], y[:100]), starts=[model], held_out=(x[100:], y[100:]), store=tmp_path / "run", **settings
    )
    again = load(tmp_path / "run", target)
    assert torch.allclose(found.log_predictive((x, y)), again.log_predictive((x, y)), atol=1e-5)
    assert again.info.get("from_start", 0) == found.info.get("from_start", 0)
    before = {name: t.clone() for name, t in load(tmp_path / "run").draws.items()}
    # Chains of a run that goes on began at the noise scale that suited the held-out examples.
    resume(tmp_path / "run", target, (x[:100], y[:100]), draws=10, progress=False)
    more = {"held_out": (x[100:], y[100:]), "store": tmp_path / "run", "resume": True, **settings, "draws": 12}
    longer = sample(target, (x[:100], y[:100]), starts=[model], **more)
    assert longer.num_draws - longer.info.get("from_start", 0) in (1, 12)
    for name, t in load(tmp_path / "run").draws.items():
        assert t.shape[1] == 12 and torch.equal(t[:, :8], before[name])


@pytest.mark.long
def test_a_regression_whose_draws_do_not_help_is_its_network(tmp_path: Path) -> None:
    """With the noise scale that suits the network, not that of draws far from it, and as without a store."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = (x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(400, generator=generator)).unsqueeze(-1)
    model = torch.nn.Linear(3, 1)
    model.load_state_dict({"weight": torch.tensor([[1.0, -2.0, 0.5]]), "bias": torch.zeros(1)})
    data, held_out, new = (x[:20], 30 * y[:20]), (x[20:200], y[20:200]), (x[200:], y[200:])  # draws fit other targets
    settings: dict[str, Any] = {"starts": [model], "held_out": held_out, "progress": False}
    alone = sample(Target.from_module(model, "gaussian", priors.Normal(100.0)), data, **settings)
    assert alone.info["method"] == "the starts"
    target = Target.from_module(model, "gaussian", priors.Normal(100.0))
    stored = sample(target, data, store=tmp_path / "run", **settings)
    for found in (stored, load(tmp_path / "run", target)):
        assert found.info["method"] == "the starts"
        difference = found.log_predictive(new).mean() - alone.log_predictive(new).mean()
        assert abs(float(difference)) < 0.01
    residual = new[1] - model(new[0]).detach()
    best = float(0.5 * (2 * torch.pi * torch.e * residual.square().mean()).log())
    for found in (alone, stored):  # the network that is compared with has the scale that suits the new rows
        assert found.against_start(*new).start.nll == pytest.approx(best, abs=1e-3)


def test_draws_that_were_not_judged_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a run that was stopped; the same call judges them, and keeps how the temperature was chosen."""
    monkeypatch.setattr(Weights, "write", lambda weights, folder: None)
    target, found = run(tmp_path / "run")
    monkeypatch.undo()
    with pytest.warns(SamplingWarning, match="have not judged these draws"):
        drawn = load(tmp_path / "run", target)
    assert drawn.num_draws == 12 and "from_start" not in drawn.info
    _, judged = run(tmp_path / "run", resume=True)
    assert judged.info["from_start"] > 0
    rungs = [one["temperature"] for one in found.info["temperature_choice"]["rungs"]]
    assert [one["temperature"] for one in judged.info["temperature_choice"]["rungs"]] == rungs
    assert alike(judged, load(tmp_path / "run", target))
    known = {"temperature": judged.info["temperature"], "draws": 12, "warmup": 300, "keep_every": 25, "resume": True}
    same = sample(target, TRAIN, starts=[trained()], store=tmp_path / "run", **{**GOOD, "held_out": None, **known})
    assert alike(judged, same)


@pytest.mark.long
def test_runs_that_are_shown_together_are_as_drawn(tmp_path: Path) -> None:
    for seed in (0, 1):
        target, _ = run(tmp_path / str(seed), seed=seed)
    for read in (lambda: load([tmp_path / "0", tmp_path / "1"], target),
                 lambda: merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all", target)):  # fmt: skip
        with pytest.warns(SamplingWarning, match="together they are shown as drawn"):
            both = read()
        assert both.num_chains == 2 and both.num_draws == 12 and "from_start" not in both.info
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplingWarning)
        load(tmp_path / "all", target, as_drawn=True)
        assert load([tmp_path / "0"], target).info["from_start"] > 0  # that run alone


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    target, _ = run(tmp_path / "run")
    manifest = Manifest.read(tmp_path / "run")
    good = manifest.weights
    for bad in ({"part": 0.5}, {**good, "share": "x"}, {**good, "draws": 0}, {**good, "width": -1.0}):
        manifest.weights = bad
        manifest.write(tmp_path / "run")
        with pytest.raises(StoreError, match="as_drawn=True"):
            load(tmp_path / "run", target)
    assert load(tmp_path / "run", target, as_drawn=True).num_draws == 12
