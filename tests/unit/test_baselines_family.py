"""The benchmark of all methods, and the logistic regressions that it runs on."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from isosgd.experiments import logistic, suite

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def family() -> Any:
    """The script; it imports its neighbour, as it does when it is run."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("family_benchmark", ROOT / "benchmarks" / "family.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


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
    found = logistic._cancer(tmp_path)
    assert file.is_file() and found is not None
    assert np.array_equal(found[0], datasets.load_breast_cancer().data) and set(found[1]) == {0.0, 1.0}


def test_the_wine_data_are_read(data_root: Path) -> None:
    found = logistic._wine(data_root)
    if found is None:
        pytest.skip("no uci/wine-quality-red under the data root")
    assert found[0].shape == (1599, 11) and 0.5 < found[1].mean() < 0.6


# ------------------------------------------------------------------------------------------------ the script


@pytest.mark.parametrize(
    ("method", "budget"), [("mcdropout", 1600), ("swag", 3200), ("ensemble", 1600), ("snapshots", 8000)]
)
def test_a_baseline_keeps_to_the_budget(family: ModuleType, method: str, budget: int) -> None:
    problem = suite.make("toy-well-200")
    posterior = family.draw(problem, method, {}, budget, seed=0)
    assert 0.8 * budget < posterior.info["gradients"] <= budget
    assert posterior.num_chains == family.CHAINS


def test_what_the_oracle_tries(family: ModuleType) -> None:
    rows = [{"rates": [0.1, 0.4], "num_data": 50}, {"rates": [0.2], "num_data": 50}]
    values = [options["lr"] for options in family.grid("sgld", rows, 5)]
    assert values[0] == pytest.approx(0.1 / 8) and values[-1] == pytest.approx(0.4 * 8)
    lams = [options["lam"] for options in family.grid("isgd-momentum", rows, 3)]
    assert lams[0] == pytest.approx(1 / (50 * 0.1 / 8))
    assert (
        family.grid("isgd", rows, 5) == [] and family.grid("vsgd", rows, 5) == [] and family.grid("sgld", [], 5) == []
    )
    assert [list(o) for o in family.grid("mcdropout", [], 2)] == [["p"]] * 2
    assert [o["train_lr"] for o in family.grid("ensemble", [{}], 3)][1] == pytest.approx(0.01)


def test_it_runs_shows_and_writes(
    family: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole script; runs are made up, so that the oracle's best is known, and one fails."""

    def run(job: Any) -> dict[str, Any]:
        row = {"problem": job.problem, "method": job.method, "options": job.options, "seed": job.seed, "seconds": 1.0}
        if job.method == "snapshots" and job.seed == 1:
            return row | {"failed": "diverged"}
        rate = job.options.get("lr", 0.5)
        scores = {key: 1.0 for key in ("mean_error", "covariance_error", "min_ess", "ess_per_1000", "gradients")}
        return row | scores | {"w2": abs(np.log(rate)), "rates": [0.5], "num_data": 200}

    monkeypatch.setattr(family, "run", run)
    file = tmp_path / "found.json"
    arguments = ["--problems", "toy*", "--methods", "isgd", "sgld", "snapshots", "--rates", "4", "--out", str(file)]
    family.main([*arguments, "--data-root", str(tmp_path)])
    printed = capsys.readouterr()
    rows = json.loads(file.read_text())["results"]
    assert len(rows) == 2 * (3 + 2 * 4)
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines if line and line.split()[0] in ("isgd", "sgld", "snapshots")] == [
        "isgd", "sgld", "sgld", "snapshots",
    ]  # fmt: skip
    best = next(line for line in lines if line.startswith("sgld") and "lr" in line)
    assert "lr 1" in best  # of 1/16, 1/4, 1, 4
    assert "1 of 2 failed" in next(line for line in lines if line.startswith("snapshots"))
    assert "22/22" in printed.err and "0:00 left" in printed.err
    family.main(["--show", str(file)])
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nonesuch"], "method 'nonesuch' is unknown"),
        (["--problems", "nonesuch"], "no problem fits"),
        (["--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--gradients", "10"], "--gradients 10 must be at least 8000"),
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
    ],
)
def test_bad_arguments_are_named(
    family: ModuleType, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        family.main([*arguments, "--data-root", str(tmp_path)])
    assert message in capsys.readouterr().err
