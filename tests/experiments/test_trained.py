"""Trained networks before and after sampling: the lists, training, scores and the command, on tiny data."""

import importlib.util
import json
import math
from functools import partial

import pytest
import torch
from torch import nn

from experiments.trained import __main__ as command
from experiments.trained import curves, runs, tune
from experiments.trained.networks import Transformer, cnn, small_vgg
from experiments.trained.pairs import LISTS, Pair, Sets, adam, adamw, dense, robot_arm, rows, scikit, sgd, table
from experiments.trained.training import SCALE, start, train

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # warm-ups are short


def blobs(root, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (200,), generator=generator)
    x = torch.randn(200, 1, 4, 4, generator=generator) + y.view(-1, 1, 1, 1)
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 120), (120, 140), (140, 200))]
    return Sets(*parts, outside=10 * torch.randn(30, 1, 4, 4, generator=generator))


def normed(dropout):
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))


TINY = Pair("tiny", blobs, normed, adamw(lr=1e-2), 3, 32)
LINE = Pair("line", robot_arm, dense(8, (5,), 1), adam(lr=1e-2, weight_decay=1e-3), 1, 256, "gaussian")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(runs, "LEAST", 400)
    monkeypatch.setattr(runs, "EPOCHS", 1)
    monkeypatch.setattr(runs, "DRAWS", 4)
    monkeypatch.setattr(runs, "lengths", lambda *_: {"warmup": 200, "draws": 4, "keep_every": 5})


def test_no_pair_is_in_both_lists_and_there_are_enough():
    names = {which: [pair.name for pair in pairs] for which, pairs in LISTS.items()}
    assert len(names["test"]) >= 12
    assert len({*names["test"], *names["tune"]}) == len(names["test"]) + len(names["tune"])
    text = __import__("experiments.trained").trained.__doc__
    assert all(name in text for some in names.values() for name in some)


def test_parts_of_a_table_are_disjoint_and_standardised_by_the_training_part():
    assert sorted(torch.cat(rows(10, 0, 5, 2, 3)).tolist()) == list(range(10))
    with pytest.raises(ValueError, match="more than the 10"):
        rows(10, 0, 9, 2)
    y = torch.arange(100.0)
    sets = table(torch.stack([y, torch.ones(100)], 1), 3 * y, 0, classes=False)
    assert [len(part[0]) for part in (sets.train, sets.held_out, sets.test)] == [70, 10, 20]
    torch.testing.assert_close(sets.train[0][:, 0].std(), torch.tensor(1.0))
    assert sets.train[1].std() == pytest.approx(1.0) and sets.unit > 50
    assert scikit("wine", None, 0).train[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (partial(cnn, norm="batch"), (2, 1, 28, 28)),
        (partial(cnn, norm="group"), (2, 1, 28, 28)),
        (small_vgg, (2, 3, 32, 32)),
        (lambda p: Transformer(8, 8, dropout=p), (2, 8, 8)),
    ],
)
def test_networks_give_ten_logits(model, shape):
    assert model(0.1)(torch.randn(shape)).shape == (2, 10)


def test_a_regression_trains_its_noise_and_scores_in_the_old_unit(tmp_path):
    sets = LINE.read(None, 0)
    (begun,) = train(LINE, sets, [0])
    assert 0 < float(begun.state[SCALE]) < 2
    found = runs.scores(LINE, sets, runs.together(LINE, sets, [begun]))
    model = LINE.model(0.0)
    model.load_state_dict({name: x for name, x in begun.state.items() if name != SCALE})
    normal = torch.distributions.Normal(model(sets.test[0]).squeeze(-1) * sets.unit, begun.state[SCALE] * sets.unit)
    assert found["nll"] == pytest.approx(float(-normal.log_prob(sets.test[1] * sets.unit).mean().detach()), abs=1e-4)


def test_the_start_is_scored_as_its_network_predicts_and_comes_from_its_file(tmp_path):
    sets = blobs(None, 0)
    begun = start(TINY, sets, 0, tmp_path)
    model = TINY.model(0.0)
    model.load_state_dict(begun.state)
    expected = nn.functional.cross_entropy(model.eval()(sets.test[0]), sets.test[1])
    found = runs.scores(TINY, sets, runs.together(TINY, sets, [begun]))
    assert found["nll"] == pytest.approx(float(expected.detach()), abs=1e-5)
    again = start(TINY, sets, 0, tmp_path)
    assert again.seconds == begun.seconds
    assert all(torch.equal(again.state[name], x) for name, x in begun.state.items())
    other = start(Pair("tiny", blobs, normed, adamw(lr=1e-2), 4, 32), sets, 0, tmp_path)
    assert not torch.equal(other.state["0.weight"], begun.state["0.weight"])


@pytest.mark.parametrize("name", runs.PRIORS)
def test_priors_by_name(name):
    sets, pair = blobs(None, 0), Pair("tiny", blobs, normed, sgd(lr=1e-2, weight_decay=1e-2), 1, 32)
    model = pair.model(0.0)
    prior = runs.prior_of(name, pair, sets, model)
    if name == "weight-decay":
        assert prior.scale_of("0.weight") == pytest.approx((1e-2 * 120) ** -0.5)
    if name == "empirical":
        size = float(model[5].weight.detach().square().mean().sqrt())
        assert prior.at(dict(model.named_parameters())).scale["5.weight"] == pytest.approx(size, rel=1e-3)
    with pytest.raises(ValueError, match="choose one of"):
        runs.prior_of("cauchy", pair, sets, model)


def test_ratio_of_a_density_does_not_depend_on_its_unit():
    assert runs.ratio(TINY, {"nll": 0.05}, {"nll": 0.1}) == pytest.approx(0.5)
    for shift in (0.0, 3.0):
        assert runs.ratio(LINE, {"nll": shift - 0.1}, {"nll": shift}) == pytest.approx(math.exp(-0.1))


@pytest.mark.long
def test_all_methods_of_a_pair_go_to_its_file(tmp_path, short, monkeypatch, capsys):
    monkeypatch.setitem(LISTS, "tune", (TINY,))
    every = [rival for rival in runs.RIVALS if rival != "ivon" or importlib.util.find_spec("ivon")]
    rivals = ["--rivals", *every, "--members", "2"]
    code = command.main(
        ["--list", "tune", "--out", str(tmp_path), *rivals, "--", "temperature=0.01", "structure=layer"]
    )
    assert code == 0, capsys.readouterr().err
    run = json.loads((tmp_path / "tiny.json").read_text())["runs"][0]
    assert set(run["rivals"]) == set(every) - {"ensemble"} and len(run["ensemble"]) == 2
    assert run["average"]["ratio"] == pytest.approx(run["average"]["nll"] / run["start"]["nll"])
    assert run["average"]["info"]["temperature"] == 0.01 and run["average"]["info"]["gradients"] > 200
    assert 0 <= run["start"]["auroc"] <= 1
    assert "median" in capsys.readouterr().out


@pytest.mark.long
def test_the_map_of_temperatures_goes_on_where_it_was(tmp_path, short, monkeypatch, capsys):
    monkeypatch.setitem(LISTS, "tune", (TINY,))
    monkeypatch.setattr(tune.windows, "MOST_OPTIMISATION_SHARE", 0.5)
    given = ["--seeds", "1", "--structures", "layer", "--priors", "normal", "--out", str(tmp_path)]
    given += ["--starts", str(tmp_path), "--temperatures"]
    assert tune.main([*given, "0.01"]) == 0
    assert tune.main([*given, "0.01", "0.001"]) == 0
    found = json.loads((tmp_path / "tiny.json").read_text())["rows"]
    assert [row["temperature"] for row in found] == [0.01, 0.001]
    assert "| layer | normal |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pairs", "nothing"], "choose from"),
        (["--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--", "temperature"], "write KEY=VALUE"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys, tmp_path):
    assert command.main(["--out", str(tmp_path), *argv]) == 1
    assert words in capsys.readouterr().err


def test_worth_in_networks():
    assert runs.worth(0.09, [0.1, 0.08]) == pytest.approx(4 / 3)
    assert runs.worth(0.11, [0.1, 0.08]) == 0.0


def test_curves_have_the_start_among_the_draws():
    """Draws that are right where the start is wrong, and the other way round, are best with it."""
    sure, wrong = -math.log(0.9), -math.log(0.1)
    before = {part: torch.tensor([sure, wrong] * 200, dtype=torch.float64) for part in curves.PARTS}
    each = {part: torch.tensor([wrong, sure] * 200, dtype=torch.float64).expand(4, -1) for part in curves.PARTS}
    found = curves.curves(each, before)
    assert found["test"] == [1.0] * 3 and len(found["share"]) == 3  # of 1, 2 and 4 draws
    assert found["test_with_start"][-1] == pytest.approx(math.log(2) / ((sure + wrong) / 2), abs=1e-3)


def test_ivon_is_a_rival_where_it_is_installed(monkeypatch):
    pytest.importorskip("ivon", reason="ivon-opt belongs to the peers' environment")
    monkeypatch.setattr(runs, "DRAWS", 3)
    posterior = runs.ivon(LINE, LINE.read(None, 0).limited(200), 0)
    assert posterior.num_chains == 3 and math.isfinite(
        runs.averaged(-posterior.log_likelihood(robot_arm(None, 0).test)[:, 0])
    )
