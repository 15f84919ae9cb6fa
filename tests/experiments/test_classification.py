"""The classification tables on a tiny network and made-up images: every row, the file, the page, the command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.images import classification, classifiers
from experiments.images.__main__ import main
from experiments.images.classification import ROWS, Bench, finite_mnll, run, settings
from experiments.images.classifiers import PILOT, Recipe, Task
from experiments.images.images import Images
from experiments.images.tables import Result, Row, Score, draw_entropies, markdown, read, write
from isosgd import DivergedError

RECIPE = Recipe("mnist", 3, 32, 0.02, 1e-3, 32, (100, 2), (10, 2), 100, 2, 1, 0.2, augment="none")
# warm-ups are short
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")]


def tiny(dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(256, 4),
    )


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    pixels = torch.randint(60, (count, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), :, labels] = 255
    wrong = torch.rand(count, generator=generator) < 0.15  # without them there would be no noise at a mode
    labels = torch.where(wrong, torch.randint(4, (count,), generator=generator), labels)
    return Images.make(pixels, labels, 0.2, 0.3)


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    monkeypatch.setitem(classifiers.MAKERS, "tiny", tiny)
    train, test = images(300, 0), images(100, 1)
    outside = Images.make(
        torch.randint(256, (50, 8, 8), dtype=torch.uint8), torch.zeros(50, dtype=torch.long), 0.2, 0.3
    )
    part, held_out = train.split(0.1, 0)
    task = Task("tiny", RECIPE, train, {"test": test, "outside": outside}, tmp_path)
    return task, Task("tiny", RECIPE, part, {"held-out": held_out}, tmp_path)


@pytest.mark.slow
def test_every_row_is_made_for_every_seed_and_read_back(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "DRAWS", 4)
    path, said = tmp_path / "results" / "tiny.json", []
    bench = Bench(*tasks, chains=2, ladder=[1e-3, 1e-2], say=said.append, save=lambda r: write(r, path))
    rows = ["single", "G-b-slr paper", "ours"]
    once = [row for row in ROWS if row not in rows]
    result = bench.run(2, [*rows, "single"], [*once, "ours"])  # named twice, made once
    assert [row.row for row in result.rows] == [*rows, *once]
    assert set(tasks[0].known) == {
        (0, 0.0),
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (0, 0.2),
    }  # MC-dropout: the first seed's only
    assert [len(row.scores) for row in result.rows] == [2] * len(rows) + [1] * len(once)
    for row in result.rows:
        for score in row.scores:
            # In scheme b training goes on at the rate 1 / (N lam), too much for so few images.
            assert row.row.startswith("G-b") or score.accuracy > 60, (row.row, score)
            assert score.diverged or sum(score.entropies["outside"]) == 50
    assert {row.row: row.temperature for row in result.rows}["G-c paper"] == 1e-5
    assert set(result.ladder) == {"single", "alpha-c", "windowed", "sghmc", "csghmc"}
    ours = next(row for row in result.rows if row.row == "ours")
    best = result.settings["ours"]
    held = {float(t): m for t, m in result.together[best].items()}
    assert held[ours.temperature] == min(held.values())
    assert set(tasks[1].known) == {(PILOT, 0.0), (PILOT + 1, 0.0)}
    again = read(path)
    for name in ("rows", "ladder", "together", "versions"):
        assert getattr(again, name) == getattr(result, name)
    text = markdown([again])
    assert "I-SGD, ours" in text and "mean of 2 models (" in text and "2 seed(s)" in text
    assert f"when 2 models predict together (without sampling: {result.together['single']['0']:.4f})" in text
    assert len([line for line in said if line.startswith("seed 0")]) == len(ROWS)


@pytest.mark.slow
def test_a_result_goes_on_with_the_seeds_and_rows_that_it_lacks(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "DRAWS", 4)
    path = tmp_path / "tiny.json"
    settings = {"chains": 2, "ladder": [1e-3, 1e-2], "say": lambda words: None, "save": lambda r: write(r, path)}
    whole = Bench(*tasks, **settings).run(2, ["single", "ours", "swag"])
    Bench(*tasks, **settings, command="first").run(1, ["single", "ours"])
    earlier = read(path)
    task, pilot = (replace(one, known={}, cache=None) for one in tasks)
    result = Bench(task, pilot, **settings, earlier=earlier, command="then").run(2, ["single", "ours"], ["swag"])
    assert not pilot.known and set(task.known) == {(2, 0.0), (3, 0.0)}  # neither the pilots nor seed 0 again
    assert result.command == "first && then" and result.ladder == earlier.ladder
    assert [[score.seed for score in row.scores] for row in result.rows] == [[0, 1], [0, 1], [1]]
    for row, same in zip(result.rows, whole.rows, strict=True):
        assert row.temperature == same.temperature
        assert [s.mnll for s in row.scores] == [s.mnll for s in same.scores if row.row != "swag" or s.seed == 1]
    assert read(path).rows == result.rows
    again = Bench(task, pilot, **settings, earlier=read(path)).run(2, ["single", "ours"], ["swag"])
    assert again.rows == result.rows and not pilot.known
    with pytest.raises(ValueError, match=r"chains = 2 \(now 3\)"):
        Bench(task, pilot, **(settings | {"chains": 3}), earlier=read(path))
    with pytest.raises(ValueError, match=r"at \[0.001, 0.01\], now \[0.01, 0.1\] are asked for"):
        Bench(task, pilot, **(settings | {"ladder": [1e-2, 0.1]}), earlier=read(path))


@pytest.mark.slow
def test_a_ladder_that_was_not_climbed_to_its_end_is_climbed_again(tasks, monkeypatch):
    monkeypatch.setattr(classification, "DRAWS", 4)
    settings = {"chains": 2, "ladder": [1e-3, 1e-2], "say": lambda words: None}
    whole = Bench(*tasks, **settings).run(1, ["ours"])
    stopped = replace(whole, rows=[], ladder={"single": {}, "alpha-c": {"0.001": 0.1}, "windowed": {}})
    stopped.together = {name: dict(rungs) for name, rungs in stopped.ladder.items()}
    again = Bench(*tasks, **settings, earlier=stopped).run(1, ["ours"])
    assert again.ladder == whole.ladder and again.together == whole.together
    assert [s.mnll for s in again.rows[0].scores] == [s.mnll for s in whole.rows[0].scores]


def test_a_ladder_that_is_not_climbed_again_stays_on_record(tasks, monkeypatch):
    monkeypatch.setattr(classification, "DRAWS", 4)
    settings = {"chains": 2, "ladder": [1e-3, 1e-2], "say": lambda words: None}
    whole = Bench(*tasks, **settings).run(1, ["single"])
    stopped = replace(whole, ladder={"alpha-c": {"0.001": 0.1}}, together={"alpha-c": {"0.001": 0.2}})
    again = Bench(*tasks, **settings, earlier=stopped).run(1, ["single", "sghmc"])
    assert again.ladder["alpha-c"] == {"0.001": 0.1} and again.together["alpha-c"] == {"0.001": 0.2}
    assert set(again.ladder["sghmc"]) == {"0.001", "0.01"}


@pytest.mark.parametrize("pilots", [1, 2])
def test_ladders_are_scored_alone_and_together(tasks, monkeypatch, pilots):
    monkeypatch.setattr(classification, "DRAWS", 8)
    task, pilot = tasks
    bench = Bench(task, pilot, pilots=pilots, ladder=[1e-2], say=lambda words: None)
    bench.climb(["windowed"])
    labels = pilot.sets["held-out"].labels
    starts = [pilot.start(PILOT + k) for k in range(pilots)]
    for name, t in (("single", 0.0), ("windowed", 1e-2)):
        posterior = run(pilot, name, starts, 1, t or None, 2, (100, 2))
        each = [pilot.predictions(posterior.select(chains=[k]))["held-out"] for k in range(pilots)]
        own = [-float(p[range(30), labels].log().mean()) for p in each]
        joined = -float((sum(each) / pilots)[range(30), labels].log().mean())
        assert bench.result.ladder[name][f"{t:g}"] == pytest.approx(sum(own) / pilots)
        assert bench.result.together[name][f"{t:g}"] == pytest.approx(joined)
        assert (joined < sum(own) / pilots - 1e-6) == (pilots > 1)  # Jensen


def test_a_rung_where_a_pilot_diverges_is_not_chosen(tasks, monkeypatch):
    task, pilot = tasks

    def some(task, name, starts, seed, temperature=None, draws=1, times=(0, 0)):
        if temperature is not None and temperature < 0.01:
            raise DivergedError("infinite", step=1, group=None, state={})
        return run(task, "single", starts, seed)

    monkeypatch.setattr(classification, "run", some)
    said = []
    bench = Bench(task, pilot, ladder=[1e-3, 0.1], say=said.append)
    bench.climb(["alpha-c"])
    assert said[-2].startswith("ladder, alpha-c, 1 chain: the highest temperature is the best")
    assert said[-1].startswith("ladder, alpha-c, 5 chains: the highest temperature is the best")
    assert bench.result.ladder["alpha-c"]["0.001"] is None is bench.result.together["alpha-c"]["0.001"]
    assert bench.chosen("alpha-c")[1] == bench.chosen("alpha-c", 4)[1] == 0.1


@pytest.mark.parametrize(("chains", "ours"), [(1, ("windowed", 0.1)), (3, ("alpha-c", 1e-3))])
def test_one_chain_goes_by_pilots_alone_and_several_by_pilots_together(tasks, chains, ours):
    bench = Bench(*tasks, chains=chains)
    bench.result.ladder = {"alpha-c": {"0.001": 0.3, "0.01": 0.2}, "windowed": {"0.01": 0.4, "0.1": 0.1}}
    bench.result.together = {"alpha-c": {"0.001": 0.05, "0.01": 0.07}, "windowed": {"0.01": 0.06, "0.1": 0.08}}
    name, temperature, draws, _ = bench.plan("ours")
    assert (name, temperature) == ours == (bench.result.settings["ours"], temperature)
    assert draws * chains == 30 and len(bench.starts("ours", 0)) == chains
    assert bench.plan("alpha-c")[1] == 0.01 and bench.plan("windowed")[1] == 0.1


def test_starts_come_from_the_cache_and_only_if_they_are_the_same(tasks, tmp_path):
    task, _ = tasks
    state = task.start(0)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    fresh = replace(task, known={})
    for name, value in fresh.start(0).items():
        assert torch.equal(value, state[name])
    other = replace(task, known={}, recipe=replace(RECIPE, epochs=1))
    assert any(not torch.equal(value, state[name]) for name, value in other.start(0).items())
    both = replace(task, known={}, cache=None)
    assert not torch.equal(both.start(0)["0.weight"], both.start(1)["0.weight"])
    assert torch.equal(both.start(0)["0.weight"], state["0.weight"])
    assert set(both.known) == {(0, 0.0), (1, 0.0)}


def test_a_start_predicts_what_its_network_does(tasks):
    task, _ = tasks
    state = task.start(0)
    model = task.fresh(3)
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        expected = model(task.sets["test"].plain).softmax(1)
    torch.testing.assert_close(task.predictions(run(task, "single", [state], 0))["test"], expected)
    both = run(task, "single", [state, task.start(1)], 0)
    assert both.num_chains == 2 and both.buffers["1.running_mean"].shape == (2, 1, 4)


@pytest.mark.parametrize("name", ["windowed", "G-c", "sghmc", "csghmc", "swag", "mcdropout"])
def test_a_method_starts_from_its_model_and_has_as_many_draws(tasks, name):
    """At a low temperature, or a small rate, draws stay near the start; dropout masks multiply its weights."""
    task, _ = tasks
    dropout = task.recipe.dropout if name == "mcdropout" else 0.0
    state = task.start(0, dropout)
    temperature = None if name in ("swag", "mcdropout") else 1e-5
    posterior = run(task, name, [state], 1, temperature, 3, (100, 2))
    assert posterior.num_draws == 3 and posterior.num_chains == 1
    assert posterior.buffers["1.running_mean"].shape == (1, 3, 4)
    weights, start = posterior.draws["5.weight"][0], state["5.weight"].cpu()
    if name == "mcdropout":
        kept = weights[0] != 0
        assert 0.6 < float(kept.float().mean()) < 0.95
        torch.testing.assert_close(weights[0][kept], start[kept] / 0.8)
        assert torch.equal(posterior.buffers["1.running_mean"][0, 0], state["1.running_mean"].cpu())
    else:
        assert not torch.equal(weights[0], start) and float((weights - start).norm(dim=(1, 2)).max()) < 0.5 * float(
            start.norm()
        )


@pytest.mark.parametrize("name", ["alpha-c", "G-c-slr", "windowed", "sghmc"])
def test_rate_and_lambda_make_up_the_temperature(tasks, name):
    task, _ = tasks
    posterior = run(task, name, [task.start(0)], 1, 1e-3, 1, (120, 2))
    for report in posterior.info["warmup"]:
        for group in report["groups"]:
            assert group["rate"] * len(task.train) * group["lam"] == pytest.approx(1e-3, rel=1e-4)
    given = settings(task, "csghmc", 30, 800, 400)
    assert given["cycle"] == 4000 and given["keep_every"] == 80
    assert given["lr"] == pytest.approx(0.5 * RECIPE.peak * 0.5 * (1 + math.cos(0.8 * math.pi)))


def test_training_learns_and_follows_the_recipe(tasks):
    task, _ = tasks
    predicted = task.predictions(run(task, "single", [task.start(0)], 0))["test"]
    assert float((predicted.argmax(1) == task.sets["test"].labels).float().mean()) > 0.7
    rates = classifiers.one_cycle(100, 0.1)
    assert int(rates.argmax()) in (19, 20) and float(rates[-1]) < 1e-3 * 0.1
    with pytest.raises(ValueError, match="both must be positive"):
        classifiers.one_cycle(0, 0.1)


def test_a_chain_that_diverges_is_said_to(tasks, monkeypatch):
    def never(*args):
        raise DivergedError("infinite", step=1, group=None, state={})

    monkeypatch.setattr(classification, "run", never)
    bench = Bench(*tasks, chains=1, say=lambda words: None)
    result = bench.run(1, ["single"])
    assert result.rows[0].scores[0].diverged and "diverged" in result.rows[0].scores[0].words()
    assert "(1 diverged)" in markdown([result])
    assert finite_mnll(torch.tensor([[math.nan, 1.0]]), torch.tensor([0])) is None


def test_bad_settings_are_refused(tasks, tmp_path):
    task, pilot = tasks
    with pytest.raises(ValueError, match="chains = 0"):
        Bench(task, pilot, chains=0)
    with pytest.raises(ValueError, match="pilots = 0"):
        Bench(task, pilot, pilots=0)
    with pytest.raises(ValueError, match="temperatures must be positive"):
        Bench(task, pilot, ladder=[0.0])
    with pytest.raises(ValueError, match="not known; choose from single"):
        Bench(task, pilot).run(1, ["nonsense"])
    with pytest.raises(ValueError, match="no method of these tables"):
        settings(task, "nonsense", 1, 1, 1)
    with pytest.raises(ValueError, match="unknown; choose one of"):
        classifiers.read("nonsense", tmp_path, "cpu")
    (tmp_path / "old.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="not a result of format 1"):
        read(tmp_path / "old.json")
    (tmp_path / "half.json").write_text('{"format": 1, "data')
    with pytest.raises(ValueError, match=r"half.json is not a JSON file: .*make it again"):
        read(tmp_path / "half.json")


def test_what_is_not_there_is_left_out_of_the_page():
    result = Result("cifar10", "resnet18", rows=[Row("ours", 0.01, [Score(0, 95.0, 0.15, 0.01, 0.08)])])
    text = markdown([result])
    assert "| I-SGD, ours | 0.01 | 95.00 | 0.1500 |" in text and "AUROC" not in text
    old = Result("cifar10", "resnet18", {"chains": 4}, {"single": {"0": 0.2}, "alpha-c": {"0.01": 0.1}})
    assert "by temperature (the trained model alone: 0.2000):" in markdown([old]) and "together" not in markdown([old])
    printed = Result("cifar10", "resnet18", rows=[Row("alpha-c paper", 1e-5, [Score(0, 95.0, 0.15, 0.01, 0.08)])])
    assert "95.38 ± 0.12, 0.1794 ± 0.0044" in markdown([printed])
    assert "spacing" not in markdown([printed])
    spaced = replace(printed, settings={"alpha": [800, 4000], "paper_keep": None})
    assert ", the paper's spacing of 4,000 steps\n" in markdown([spaced])
    shortened = replace(printed, settings={"alpha": [800, 4000], "paper_keep": 100})
    assert "spacing" not in markdown([shortened])


def test_scores_of_mirror_images_have_columns_of_their_own():
    scores = [Score(seed, 95.0, 0.15, 0.01, 0.08, mirrored={"accuracy": 96.0 + seed, "mnll": 0.14}) for seed in (1, 0)]
    result = Result("cifar10", "vgg16")
    for score in scores:
        result.add("single", None, score)
    text = markdown([result])
    assert "accuracy, mirrored too" in text and "| 96.50 ± 0.71 | 0.1400 ± 0.0000 |" in text
    assert [score.seed for score in result.rows[0].scores] == [0, 1]
    assert Score(0, accuracy=9.0).value("mirrored mnll") is None and Score(0, accuracy=9.0).value("accuracy") == 9.0


def test_the_page_is_made_from_the_results():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "classification.md").read_text()
    files = sorted((root / "results" / "classification").glob("*.json"))
    assert files
    for path in files:
        assert markdown([read(path)]).rstrip() in page, f"run python -m experiments.images.tables: {path.name} is newer"


def test_entropies_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    score = Score(0, 99.0, 0.03, auroc=0.9, entropies={"test": [9, 1, 0], "outside": [1, 4, 5]})
    rows = [Row("single", None, [score]), Row("ours", 0.01, [score, score])]
    draw_entropies(Result("mnist", "lenet5", rows=rows), tmp_path / "entropies.png")
    assert (tmp_path / "entropies.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no histograms"):
        draw_entropies(Result("mnist", "lenet5"), tmp_path / "nothing.png")


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main(["mnist", "--seeds", "0"]) != 0
    assert "--seeds 0" in capsys.readouterr().err
    assert main(["mnist", "--data-root", str(tmp_path)]) != 0
    assert "is not there" in capsys.readouterr().err
