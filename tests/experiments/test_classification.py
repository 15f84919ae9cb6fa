"""The classification tables on a tiny network and made-up images: every row, the file, the page, the command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.images import classification, classifiers, image_methods, image_rivals
from experiments.images.__main__ import main
from experiments.images.classification import ROWS, Bench, finite_mnll
from experiments.images.classifiers import PILOT, Recipe, Task, prepare
from experiments.images.image_jobs import Job, Method, Outcome, gather, start_chain, together
from experiments.images.image_methods import Watch, isgd
from experiments.images.image_rivals import single
from experiments.images.images import Images
from experiments.images.tables import Result, Row, Score, draw_entropies, markdown, read, write
from isosgd.noise import MovingAverage

RECIPE = Recipe("mnist", 3, 32, 0.02, 1e-3, 32, (100, 2), (10, 2), 100, 2, (1, 0.01), 0.2, augment="none")


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
    monkeypatch.setitem(classifiers._MAKERS, "tiny", tiny)
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


@pytest.mark.slow
@pytest.mark.parametrize("pilots", [1, 2])
def test_ladders_are_scored_alone_and_together(tasks, monkeypatch, pilots):
    monkeypatch.setattr(classification, "DRAWS", 8)
    task, pilot = tasks
    bench = Bench(task, pilot, pilots=pilots, ladder=[1e-3, 1e-2], say=lambda words: None)
    bench.climb(["alpha-c", "windowed"])
    labels = pilot.sets["held-out"].labels
    methods = {"single": single, "alpha-c": isgd("alpha-c"), "windowed": image_methods.windowed}
    assert {name: list(found) for name, found in bench.result.together.items()} == {
        "single": ["0"],
        "alpha-c": ["0.001", "0.01"],
        "windowed": ["0.001", "0.01"],
    }
    for name, found in bench.result.ladder.items():
        for temperature, alone in found.items():
            each = [
                methods[name](Job(pilot, pilot.start(PILOT + k), 1 + k, float(temperature), 2, 100, 2)).mean("held-out")
                for k in range(pilots)
            ]
            own = [-float(p[range(30), labels].log().mean()) for p in each]
            joined = -float((sum(each) / pilots)[range(30), labels].log().mean())
            assert alone == pytest.approx(sum(own) / pilots)
            assert bench.result.together[name][temperature] == pytest.approx(joined)
            assert (joined < alone - 1e-6) == (pilots > 1)  # Jensen


def test_a_rung_where_one_pilot_is_astray_is_not_chosen(tasks, monkeypatch):
    """At the lower temperature the second pilot's chain diverges, and what the first one says does not count."""
    task, pilot = tasks

    def steps(job, outcome):
        outcome.add(job.task, job.task.restored(job.state))
        if job.seed == 2 and job.temperature < 0.01:
            outcome.sums["held-out"][0] = math.nan
        yield

    monkeypatch.setitem(classification.RUNGS, "alpha-c", Method(steps))
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
    jobs, temperature = bench.plan("ours", 0)
    assert (bench.result.settings["ours"], temperature) == ours
    assert len(jobs) == chains and {job.temperature for _, job in jobs} == {temperature}
    assert bench.plan("alpha-c", 0)[1] == 0.01 and bench.plan("windowed", 0)[1] == 0.1


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
    both.prepare([0, 1])
    assert set(both.known) == {(0, 0.0), (1, 0.0)}
    assert not torch.equal(both.known[0, 0.0]["0.weight"], both.known[1, 0.0]["0.weight"])


def test_jobs_side_by_side_come_to_what_they_come_to_alone(tasks):
    task, _ = tasks
    jobs = [
        (isgd("alpha-c"), Job(task, task.start(0), 1, 1e-3, 2, 100, 3)),
        (single, Job(task, task.start(1), 1, 0.0, 1, 0, 0)),
        (image_rivals.swag, Job(task, task.start(1), 2, 0.0, 2, 0, 0)),
        (image_methods.windowed, Job(task, task.start(0), 3, 1e-2, 2, 100, 3)),
    ]
    under_way = dict(together(jobs, 3))
    assert list(under_way) != sorted(under_way)  # the short one is done first
    for number, (method, job) in enumerate(jobs):
        alone = method(job)
        assert torch.equal(alone.mean("test"), under_way[number].mean("test"))
        assert alone.gradients == under_way[number].gradients
    with pytest.raises(ValueError, match="width = 0"):
        next(together(jobs, 0))


def test_outcomes_of_a_group_come_together_and_in_their_order(tasks):
    task, _ = tasks
    slow = (isgd("alpha-c"), Job(task, task.start(0), 1, 1e-3, 1, 100, 2))
    quick = (single, Job(task, task.start(0), 1, 0.0, 1, 0, 0))
    found = list(gather([[slow, quick], [quick], [quick, quick]], 3))
    assert [i for i, _ in found] == [1, 2, 0]
    assert [[o.gradients for o in outcomes] for _, outcomes in found] == [[0], [0, 0], [102, 0]]


def test_the_pilot_and_the_network_with_dropout_are_trained_beside_the_others(tasks):
    task, pilot = tasks
    prepare([(pilot, 7, 0.0), (task, 0, 0.0), (task, 0, 0.2)], side_by_side=3)
    beside = task.known[0, 0.0]
    assert set(pilot.known) == {(7, 0.0)} and set(task.known) == {(0, 0.0), (0, 0.2)}
    alone = replace(task, known={}, cache=None).start(0)
    assert all(torch.equal(value, beside[name]) for name, value in alone.items())


def test_draws_of_chains_are_averaged_over_all():
    a = Outcome({"test": torch.tensor([[2.0, 0.0]])}, 2, 10, (1.0, 2.0))
    b = Outcome({"test": torch.tensor([[0.0, 1.0]])}, 1, 5, (1.5, 4.0))
    joined = Outcome.join([a, b])
    torch.testing.assert_close(joined.mean("test"), torch.tensor([[2 / 3, 1 / 3]]))
    assert (joined.draws, joined.gradients, joined.seconds) == (3, 15, 3.0)


@pytest.mark.parametrize("temperature", [1e-3, 0.05])
@pytest.mark.parametrize("name", ["alpha-c", "G-c-slr", "windowed", "sghmc", "csghmc"])
def test_noise_and_rate_make_up_the_temperature(tasks, monkeypatch, name, temperature):
    """``(rate sqrt(2 lam))^2 = 2 a rate T / N`` in every group: noise too large, N or T left out would all show."""
    chains = []

    def spy(*args, **settings):
        chains.append(start_chain(*args, **settings))
        return chains[-1]

    monkeypatch.setattr(image_methods, "start_chain", spy)
    monkeypatch.setattr(image_rivals, "start_chain", spy)
    monkeypatch.setattr(image_methods, "keep_draws", lambda *args: iter(()))
    methods = {"windowed": image_methods.windowed, "sghmc": image_rivals.sghmc, "csghmc": image_rivals.csghmc}
    task, _ = tasks
    method = methods.get(name) or isgd(name)
    method(Job(task, task.start(0), 0, temperature, 2, 120, 5))
    update = chains[0].update
    rates, kicks = update.rates * update.pace[0], update.kicks * update.pace[1]
    found = chains[0].num_data * kicks.double().square() / (2.0 * update.friction * rates.double())
    assert bool((rates > 0).all())
    torch.testing.assert_close(found, torch.full_like(found, temperature), rtol=1e-4, atol=0.0)


def test_the_noise_watched_is_that_of_minibatches(tasks):
    """At a frozen network, differences of successive gradients have the variance of minibatch gradients."""
    task, _ = tasks
    chain = start_chain(Job(task, task.start(0), 3, 1.0, 1, 1, 1))
    chain.update.pace.zero_()
    watch = Watch(chain, MovingAverage(0.999, centred=True))
    every = []
    for _ in range(300):
        chain.step()
        watch.look()
        every.append(chain.flat_gradient(torch.zeros_like(chain.flat.values)))
    variance = torch.stack(every).var(0)
    ratio = float(torch.cat(chain.flat.parts(watch.variance, [0, 4])).sum()) / float(
        torch.cat(chain.flat.parts(variance, [0, 4])).sum()
    )
    # Of m values the mean square difference of neighbours over their variance has a standard error of 1 / sqrt(m), if
    # all gradients go together, less if they do not.
    assert abs(ratio - 1) < 4.5 / 300**0.5
    assert watch.seen == 299
    (first, *_), total = watch.bounds("max"), watch.bounds("sum")
    assert float(first) <= float(total[0])


def test_rates_are_those_of_the_rule(tasks):
    task, _ = tasks
    job = Job(task, task.start(0), 1, 1e-5, 1, 10, 1)
    found = {}
    for preset in ("G-c", "G-c-slr"):
        outcome = isgd(preset)(job)
        found[preset] = outcome.notes
        assert outcome.gradients == 11
    assert found["G-c-slr"]["least rate"] == pytest.approx(found["G-c-slr"]["largest rate"])
    # One lambda for all is the sum of the layers': its inverse rate is the sum of theirs, so that it is the least.
    assert found["G-c-slr"]["least rate"] < found["G-c"]["least rate"]


def test_a_chain_that_diverges_is_said_to(tasks):
    task, pilot = tasks
    bench = Bench(task, pilot, chains=1, say=lambda words: None)
    outcome = single(Job(task, task.start(0), 1, 0.0, 1, 0, 0))
    outcome.sums["test"][0, 0] = math.nan
    bench.make = lambda wanted: [(wanted[0], None, outcome)]
    result = bench.run(1, ["single"])
    assert result.rows[0].scores[0].diverged and "diverged" in result.rows[0].scores[0].words()
    assert "(1 diverged)" in markdown([result])
    assert finite_mnll(outcome.sums["test"], task.sets["test"].labels) is None


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
    with pytest.raises(ValueError, match="warmup = 99 is too short for alpha-c"):
        isgd("alpha-c")(Job(task, task.start(0), 1, 1e-5, 1, 99, 1))
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
