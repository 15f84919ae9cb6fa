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


def test_runs_that_are_shown_together_are_as_drawn(tmp_path: Path) -> None:
    for seed in (0, 1):
        target, _ = run(tmp_path / str(seed), seed=seed)
    for read in (lambda: load([tmp_path / "0", tmp_path / "1"], target),
                 lambda: merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all", target)):  # fmt: skip
        with pytest.warns(SamplingWarning, match="together they are shown as drawn"):
            both = read()
        assert both.num_chains == 2 and both.num_draws == 12 and "from_start" not in both.info


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    target, _ = run(tmp_path / "run")
    manifest = Manifest.read(tmp_path / "run")
    manifest.weights = {"part": 0.5}
    manifest.write(tmp_path / "run")
    with pytest.raises(StoreError, match="as_drawn=True"):
        load(tmp_path / "run", target)
    assert load(tmp_path / "run", target, as_drawn=True).num_draws == 12
