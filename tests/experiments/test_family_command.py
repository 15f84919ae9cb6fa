"""The benchmark of all methods, and the logistic regressions that it runs on."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isosgd
from experiments.family import __main__ as family
from experiments.family import runs, tables
from experiments.posteriors import logistic, suite

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------ logistic regressions


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with a small set in the form of the breast cancer data, and a short reference."""
    monkeypatch.setattr(logistic, "REFERENCE", {"chains": 8, "draws": 200, "warmup": 100, "steps": (2, 6)})
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 2)) * [1.0, 50.0] + [3.0, -100.0]
    y = (generator.uniform(size=200) < 1 / (1 + np.exp(-(x[:, 0] - 3.0)))).astype(float)
    np.savez(tmp_path / logistic.FILE, x=x, y=y)
    return tmp_path


@pytest.mark.slow
def test_the_reference_is_the_posterior_and_is_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a grid: the posterior of an intercept and two weights, integrated."""
    problem = logistic.make("logistic-cancer", small, small / "kept")
    x, y = (t.double() for t in problem.data)
    assert torch.allclose(x.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-6) and x.dtype == torch.float64
    axis = torch.linspace(-2.5, 2.5, 61, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis, axis)
    logits = points[:, :2] @ x.T + points[:, 2:]
    log_density = torch.nn.functional.logsigmoid((2 * y - 1) * logits).sum(1) - 0.5 * points.square().sum(1)
    weight = log_density.softmax(0)
    mean = weight @ points
    covariance = (points - mean).T @ ((points - mean) * weight[:, None])
    sd = covariance.diagonal().sqrt()
    known = problem.reference
    assert bool(((known.mean - mean).abs() < 4.5 * sd / known.ess**0.5).all())
    assert bool((known.covariance - covariance).abs().max() < 6 * float(sd.square().max()) / known.ess**0.5)
    monkeypatch.setattr(logistic, "hmc", lambda *_, **__: pytest.fail("made anew"))
    again = logistic.make("logistic-cancer", small, small / "kept").reference
    assert torch.equal(again.mean, known.mean) and again.ess == known.ess


def test_data_that_are_not_there_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert logistic.names(tmp_path) == []
    with pytest.raises(ValueError, match="data of 'logistic-wine' are not under"):
        logistic.make("logistic-wine", tmp_path)
    with pytest.raises(ValueError, match="problem 'nonesuch' is unknown"):
        logistic.make("nonesuch", tmp_path)
    with pytest.raises(ValueError, match="scikit-learn is not installed"):
        logistic.export(tmp_path)


def test_what_is_exported_is_what_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    file = logistic.export(tmp_path)
    found = logistic.read_cancer(tmp_path)
    assert file.is_file() and found is not None
    assert np.array_equal(found[0], datasets.load_breast_cancer().data) and set(found[1]) == {0.0, 1.0}


def test_the_wine_data_are_read(data_root: Path) -> None:
    found = logistic.read_wine(data_root)
    if found is None:
        pytest.skip("no uci/wine-quality-red under the data root")
    assert found[0].shape == (1599, 11) and 0.5 < found[1].mean() < 0.6


# ------------------------------------------------------------------------------------------------ one run


def job(method: str, gradients: int, name: str | None = None, *values: float, repeats: int = 1) -> Any:
    return runs.Job("toy-well-200", method, name, values, repeats, gradients, (".", None))


@pytest.mark.parametrize(
    ("method", "budget"), [("mcdropout", 1600), ("swag", 3200), ("ensemble", 1600), ("snapshots", 8000)]
)
def test_a_baseline_keeps_to_the_budget(method: str, budget: int) -> None:
    posterior = runs.draw(suite.make("toy-well-200"), job(method, budget))
    assert 0.8 * budget < posterior.info["gradients"] <= budget
    assert posterior.num_chains == runs.CHAINS


@pytest.mark.parametrize(("steps", "sampling"), [(0, 0), (4999, 0), (5000, 1229), (9999, 1229), (10_000, 2459)])
def test_exploration_counts_against_the_budget(steps: int, sampling: int) -> None:
    """Of a cycle of 5000 steps 1250 explore; the others count as 1537 at the full rate, and .8 of these give draws."""
    assert runs.sampling_steps(5000, steps) == sampling
    assert runs.sampling_steps(0, steps) == steps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # the warm-up is short
@pytest.mark.parametrize("method", ["csgld", "csghmc"])
def test_cyclical_methods_keep_to_the_budget(method: str) -> None:
    """One cycle of 500 steps, of which draws come from as many as count as 122, after a warm-up of as many."""
    for own in ((), ("lr", 1e-4)):
        row = runs.run(job(method, 8000, *own))[0]
        assert 7000 <= row["gradients"] <= 8000, row
        assert row["draws"] == 8 * (122 - runs.MARGIN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_a_warm_up_is_counted_and_cut() -> None:
    problem = suite.make("toy-well-200")
    given = {"chains": 1, "batch_size": 32, "progress": False, "compile": False, "method": "vsgd", "keep_every": 5}
    cost = runs.warmup_cost(problem, given, 20_000)
    assert cost == isosgd.sample(problem.target, problem.data, draws=1, **given).info["warmup"][0]["steps"]
    assert runs.warmup_cost(problem, given, 300) is None


@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_every_block_has_its_own_rate_and_one_that_diverges_stops_no_other() -> None:
    rows = runs.run(job("sgld", 4000, "lr", 1e-3, 1e-2, 1e3, repeats=2))
    assert [(row["options"]["lr"], row["repeat"]) for row in rows] == [
        (lr, repeat) for lr in (1e-3, 1e-2, 1e3) for repeat in (0, 1)
    ]
    assert [row.get("rate") for row in rows[:4]] == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2], rel=1e-4)
    assert all("diverged" in row["failed"] for row in rows[4:])
    assert all(3900 < row["gradients"] <= 4000 and math.isfinite(row["w2"]) for row in rows[:4])
    alone = runs.run(job("isgd-momentum", 4000, "lam", 0.2, 0.1))
    assert [row["rate"] for row in alone] == pytest.approx([0.1 / (200 * 0.2), 0.1 / (200 * 0.1)], rel=1e-4)


def test_whatever_goes_wrong_is_a_row() -> None:
    row = runs.run(job("sgld", 8000, "nonesuch", 1.0))[0]
    assert row["failed"].startswith("TypeError: method 'sgld' has no option 'nonesuch'")


# ------------------------------------------------------------------------------------------------ the script


def test_what_the_oracle_tries() -> None:
    rows = [{"rate": 0.1}, {"rate": 0.4}, {"failed": "diverged"}]
    values = family.grid("sgld", rows, 5)
    assert values == pytest.approx([0.2 * 10.0**k for k in (-2, -1, 0, 1, 2)])
    assert family.grid("isgd", rows, 5) == [] and len(family.grid("sgld", [], 5)) == 5
    assert family.grid("mcdropout", [], 2) == pytest.approx([0.5e-4, 0.5])
    assert family.grid("ensemble", [{}], 3)[1] == pytest.approx(0.01) and len(family.grid("swag", rows, 9)) == 5


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Any]:
    """Results and what was printed. Runs are made up, so that the oracle's best is known, and some fail."""

    def run(job: Any) -> list[dict[str, Any]]:
        scores = {key: 1.0 for key in ("mean_error", "covariance_error", "min_ess", "ess_per_1000", "gradients")}
        rows = []
        for block in job.blocks:
            value = next(iter(block["options"].values()), 0.25)
            good = {"w2": abs(math.log(value)), "rate": 0.1, "num_data": 200, **scores}
            bad = job.method == "snapshots" and block["repeat"] == 1
            rows.append(block | {"seconds": 1.0} | ({"failed": "diverged"} if bad else good))
        return rows

    monkeypatch.setattr(family, "run", run)
    arguments = ["--problems", "toy*", "--methods", "isgd", "sgld", "snapshots", "--rates", "5"]
    family.main([*arguments, "--out", str(tmp_path / "found"), "--data-root", str(tmp_path)])
    return tmp_path / "found", capsys.readouterr()


def test_it_runs_shows_and_writes(found: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, printed = found
    whole = json.loads((folder / "toy-well-200.json").read_text())
    assert len(whole["results"]) == 2 * (3 + 2 * 5)
    assert str(folder) not in whole["command"] and "--out DIR" in whole["command"]
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines if line and line.split()[0] in ("isgd", "sgld", "snapshots")] == [
        "sgld", "sgld", "isgd", "snapshots",
    ]  # fmt: skip
    assert "lr 1 " in next(line for line in lines if line.startswith("sgld") and "lr" in line)  # of .001 to 10
    assert "1 of 2 failed" in next(line for line in lines if line.startswith("snapshots"))
    assert "I-SGD at its defaults is 1.3863 away, farther than" in printed.out
    assert "9 runs in 0:00, 0 wait" in printed.err
    tables.main([str(folder)])
    assert capsys.readouterr().out == printed.out


def test_it_goes_on_where_it_was_stopped(
    found: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stopped is done again, and so is one that failed for no fault of its rates; the others are not."""
    file = found[0] / "toy-well-200.json"
    whole = json.loads(file.read_text())
    first, *rest = [row for row in whole["results"] if row["options"] == {} or row["method"] == "sgld"]
    whole["results"] = [first | {"failed": "TypeError: a bug"}, *rest]
    file.write_text(json.dumps(whole))
    asked: list[Any] = []
    run = family.run
    monkeypatch.setattr(family, "run", lambda job: asked.append(job) or run(job))
    arguments = ["--problems", "toy*", "--methods", "isgd", "sgld", "snapshots", "--rates", "5"]
    family.main([*arguments, "--out", str(found[0]), "--data-root", str(tmp_path)])
    assert [(job.method, len(job.values)) for job in asked] == [(first["method"], 0), *[("snapshots", 1)] * 5]
    with pytest.raises(ValueError, match="has repeats = 2, not 3: choose another --out"):
        family.main([*arguments, "--repeats", "3", "--out", str(found[0]), "--data-root", str(tmp_path)])


def test_the_page_gets_its_tables(found: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = found
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- family: begin -->\nold\n<!-- family: end -->\nafter\n")
    tables.main([str(folder), "--docs", str(page)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- family: end -->\nafter\n") and "old" not in text
    assert "| `sgld` | 1.000 |" in text and "| lr 1 |" in text and "`snapshots` (1 of 2 failed)" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no marks"):
        tables.main([str(folder), "--docs", str(page)])
    with pytest.raises(ValueError, match="holds no results"):
        tables.main([str(tmp_path / "nowhere")])


def test_the_documentation_shows_the_results_there_are() -> None:
    try:
        parts = tables.read(ROOT / "results" / "family")
    except ValueError as error:
        pytest.skip(str(error))
    page = (ROOT / "docs" / "methods.md").read_text()
    mend = "run python -m experiments.family.tables results/family --docs docs/methods.md"
    assert tables.renewed(page, parts) == page, mend


def test_no_run_is_started_when_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(family, "run", lambda job: pytest.fail("started"))
    family.main(["--problems", "toy*", "--methods", "sgld", "--limit", "-1", "--data-root", str(tmp_path)])
    assert "1 runs were not started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nonesuch"], "method 'nonesuch' is unknown"),
        (["--problems", "nonesuch"], "no problem fits"),
        (["--repeats", "0"], "--repeats 0 must be at least 1"),
        (["--gradients", "10"], "--gradients 10 must be at least 8000"),
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        family.main([*arguments, "--data-root", str(tmp_path)])
    assert message in capsys.readouterr().err
