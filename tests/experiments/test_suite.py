"""The suite of posteriors: its problems are what they say, and its scores are right where the answer is known."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isosgd
from experiments.posteriors import __main__ as command
from experiments.posteriors import posteriordb, runs, suite, tables
from experiments.posteriors.suite import Moments, Problem, Run, make, moments, names, score

ROOT = Path(__file__).resolve().parents[2]
SIGMAS = 5.0


def exact_draws(problem: Problem, chains: int = 4, draws: int = 2000) -> Tensor:
    """Independent draws ``[chains, draws, k]`` of the Gaussian that a problem's moments describe."""
    root = torch.linalg.cholesky(problem.reference.covariance)
    xi = torch.randn(chains, draws, len(root), dtype=torch.float64)
    return problem.reference.mean + xi @ root.T


@pytest.mark.parametrize("name", ["toy-well-200", "toy-bad-200", "toy-bad-2000", "gauss-anisotropic", "gauss-half"])
def test_exact_draws_score_as_well_as_their_number_allows(name: str) -> None:
    problem = make(name)
    key = next(iter(problem.target.initial()))
    found = score(problem, {key: exact_draws(problem)}, gradients=80_000)
    assert found["mean_error"] < SIGMAS / math.sqrt(8000)
    assert found["sd_error"] < SIGMAS / math.sqrt(2 * 8000)
    # With n draws in k dimensions its square is about 1/n, of the means, and at most (k + 1) / (4 n), of covariances.
    assert found["w2"] < SIGMAS * math.sqrt((1 + (len(problem.unit) + 1) / 4) / 8000)
    assert 70 < found["ess_per_1000"] <= 100
    assert found["rhat"] < 1.01


def test_errors_are_measured_in_posterior_units() -> None:
    problem = make("gauss-half")
    x = exact_draws(problem)
    # Made to have the exact moments, then off by known amounts.
    flat = x.reshape(-1, 2)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(flat.T.cov()), (flat - flat.mean(0)).T, upper=False)
    exact = (torch.linalg.cholesky(problem.reference.covariance) @ white).T.reshape(x.shape)
    shifted = exact.clone()
    shifted[..., 1] += 0.3
    found = score(problem, {"theta": shifted}, gradients=1)
    assert found["mean_error"] == pytest.approx(0.3)
    assert found["sd_error"] == pytest.approx(0.0, abs=1e-9)
    assert found["w2"] == pytest.approx(0.3 / math.sqrt(2), rel=1e-6)
    found = score(problem, {"theta": 2 * exact}, gradients=1)
    assert found["sd_error"] == pytest.approx(math.log(2))
    assert found["w2"] == pytest.approx(1.0)
    found = score(problem, {"theta": exact / 2}, gradients=1)
    assert found["sd_error"] == pytest.approx(math.log(2))


def test_chains_that_disagree_have_few_effective_draws() -> None:
    x = torch.randn(4, 500, 1)
    assert moments(x).ess > 1500
    assert moments(x + 20 * torch.arange(4.0)[:, None, None]).ess < 8


def test_bad_scores_are_refused() -> None:
    problem = make("gauss-half")
    with pytest.raises(ValueError, match="gradients = 0"):
        score(problem, {"theta": torch.zeros(1, 5, 2)}, gradients=0)
    with pytest.raises(ValueError, match="too few"):
        score(problem, {"theta": torch.zeros(1, 1, 2)}, gradients=1)


@pytest.mark.parametrize(("name", "noise"), [("gauss-anisotropic", (100.0, 1.0)), ("gauss-half", (100.0, 0.0))])
def test_gaussians_have_the_noise_they_name_and_the_posterior(name: str, noise: tuple[float, float]) -> None:
    problem = make(name)
    theta = {"theta": torch.tensor([0.4, -0.2], dtype=torch.float64)}
    precision = torch.linalg.inv(problem.reference.covariance)
    whole = problem.target.log_likelihood(theta, problem.data).sum()
    torch.testing.assert_close(whole, -0.5 * theta["theta"] @ precision @ theta["theta"])
    count = len(problem.data[0])
    rows = [problem.target.gradient({"theta": theta["theta"].clone().requires_grad_()}, (e[None],), count)[1][0]
            for e in problem.data[0]]  # fmt: skip
    covariance = torch.stack(rows).T.cov(correction=0) * count
    torch.testing.assert_close(covariance, torch.diag(torch.tensor(noise, dtype=torch.float64)), rtol=1e-9, atol=1e-9)


def test_names_go_with_the_data(tmp_path: Path) -> None:
    assert "toy-bad-200" in names() and "net-boston" not in names()
    assert names(tmp_path) == names()
    with pytest.raises(ValueError, match="'arK-arK' is unknown or has no data"):
        make("arK-arK", tmp_path)


def test_reference_draws_of_posteriordb_score_zero() -> None:
    root = posteriordb.default_root()
    if root is None or not posteriordb.names(root):
        pytest.skip("no data: set ISOSGD_DATA to a folder that holds posteriordb/<name>/data.json and draws.npz")
    for name in posteriordb.names(root):
        reference, problem = posteriordb.load(name, root), make(name, root)
        found = score(problem, reference.sampled(reference.draws), gradients=10_000)
        assert max(found["mean_error"], found["sd_error"], found["w2"]) < 1e-4, name
        assert found["ess_per_1000"] > 500, name
        assert problem.reference.rhat < 1.01


@pytest.fixture
def quick_net(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reference runs of networks that take no time; the list counts them."""
    calls: list[int] = []
    real = suite.hmc

    def counted(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        return real(*args, **settings | {"draws": 5, "warmup": 1, "steps": (1, 1)})

    monkeypatch.setattr(suite, "hmc", counted)
    return calls


def test_networks_are_compared_in_function_space(quick_net: list[int]) -> None:
    problem = make("net-small")
    start = problem.target.constrain(problem.target.initial())
    draws = {name: torch.stack([x.detach(), 2 * x.detach()])[None] for name, x in start.items()}
    test = torch.linspace(-1, 1, 41)[:, None]
    expected = isosgd.Posterior(problem.target, draws, {}).predict(test).mean
    torch.testing.assert_close(problem.entries(draws).mean(1).reshape(-1, 1), expected)
    assert len(problem.reference.mean) == 41


def test_reference_moments_are_kept(quick_net: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make("net-small", cache=tmp_path / "kept")
    again = make("net-small", cache=tmp_path / "kept")
    assert len(quick_net) == 1
    assert torch.equal(first.reference.covariance, again.reference.covariance)
    assert first.reference.ess == again.reference.ess
    monkeypatch.setattr(suite, "Run", lambda: Run(seed=1))  # another run is another file
    make("net-small", cache=tmp_path / "kept")
    assert len(quick_net) == 2


def test_moments_of_one_entry() -> None:
    found = moments(torch.randn(2, 100, 1))
    assert isinstance(found, Moments)
    assert found.covariance.shape == (1, 1)


# ---------------------------------------------------------------- the benchmark


class Fake:
    """`isosgd.sample` without sampling: exact draws at a stated price."""

    def __init__(self, warmup: int, gap: int) -> None:
        self.warmup, self.gap = warmup, gap

    def __call__(self, target: Any, data: Any, *, draws: int, chains: int, warmup: Any, **_: Any) -> isosgd.Posterior:
        steps = self.warmup if warmup == "auto" else warmup
        info = {
            "gradients": chains * (steps + draws * self.gap),
            "keep_every": [self.gap] * chains,
            "warmup": [{"steps": steps}] * chains,
            "rates": [{"theta": 0.1}] * chains,
            "seconds": 0.0,
        }
        return isosgd.Posterior(target, {"theta": torch.randn(chains, draws, 2, dtype=torch.float64)}, info)


@pytest.mark.parametrize(
    ("warmup", "gap", "capped"), [(1000, 10, False), (1000, 33, False), (50_000, 10, True), (6_000, 900, False)]
)
def test_a_budget_is_kept(monkeypatch: pytest.MonkeyPatch, warmup: int, gap: int, capped: bool) -> None:
    monkeypatch.setattr(isosgd, "sample", Fake(warmup, gap))
    problem = make("gauss-half")
    posterior = runs.spend(problem, "isgd", {}, 100_000, seed=0)
    assert posterior.info["capped"] == capped
    spent = posterior.info["gradients"]
    assert spent <= 100_000
    assert spent == 8 * ((6250 if capped else warmup) + posterior.num_draws * gap)
    assert spent + 8 * gap > 100_000  # and used up
    points = runs.curve(problem, posterior)
    assert points[-1]["gradients"] == spent
    assert [point["gradients"] for point in points] == sorted(point["gradients"] for point in points)


@pytest.mark.parametrize(("best", "least"), [(3.0, 3.0), (6.0, 6.0), (-2.0, -2.0), (100.0, 12.0)])
def test_the_oracle_goes_on_where_the_best_rate_is_at_an_end(best: float, least: float) -> None:
    asked: list[float] = []

    def error(lr: float) -> float:
        asked.append(lr)
        return abs(math.log2(lr) - best)

    assert math.log2(runs.walk(error, [2.0, 4.0, 8.0, 16.0])) == pytest.approx(least)
    assert len(asked) == len(set(asked)) <= 4 + runs.MOST_BEYOND


def test_the_oracle_stops_where_runs_fail() -> None:
    def error(lr: float) -> float:
        return -lr if lr < 5 else math.inf

    assert runs.walk(error, [1.0, 2.0, 4.0]) == 4.0
    assert runs.walk(lambda lr: math.inf, [1.0, 2.0]) is None


@pytest.mark.long
def test_the_benchmark_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import json

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(isosgd, "sample", Fake(1000, 10))
    threads = torch.get_num_threads()
    files = ["--json", str(tmp_path / "found.json")]
    settings = ["--problems", "gauss-*", "--methods", "isgd:layer", "sgld", "--oracle", "--gradients", "20000"]
    command.main([*settings, *files, "--threads", str(threads)])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {(row["problem"], row["method"]) for row in found["results"]} == {
        (problem, method)
        for problem in ("gauss-anisotropic", "gauss-half")
        for method in ("isgd:layer", "sgld", "sgld@oracle")
    }
    assert len(found["results"]) == 2 * 3 * 2
    assert all(key in found for key in ("command", "versions", "machine", "seconds"))
    assert "sgld@oracle" in capsys.readouterr().out
    tables.main([str(tmp_path), "--plot", str(tmp_path / "found.png")])
    assert (tmp_path / "found.png").stat().st_size > 0
    page = tmp_path / "page.md"
    page.write_text("before <!-- suite: begin -->\nold<!-- suite: end --> after")
    tables.main([str(tmp_path), "--docs", str(page)])
    assert "| gauss-half |" in page.read_text() and "old" not in page.read_text()
    assert page.read_text().startswith("before ") and page.read_text().endswith(" after")


def test_a_batch_of_all_rows_means_all_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []
    fake = Fake(1000, 10)

    def sample(target: Any, data: Any, *, method: str, batch_size: Any, **settings: Any) -> isosgd.Posterior:
        asked.append((method, batch_size))
        return fake(target, data, **settings)

    monkeypatch.setattr(isosgd, "sample", sample)
    problem = make("gauss-half")
    whole = dataclasses.replace(problem, batch_size=len(problem.data[0]))
    for given, method in ((problem, "isgd"), (problem, "isgd-all"), (whole, "isgd"), (whole, "sgld")):
        runs.spend(given, method, {}, 20_000, seed=0)
    assert asked[::2] == [("isgd", 32), ("isgd", "all"), ("isgd", "all"), ("sgld", 1000)]


def made(method: str, *w2: float) -> list[dict[str, Any]]:
    """Runs of a method with these errors."""
    common = {"problem": "p", "mean_error": 0.1, "sd_error": 0.1, "ess_per_1000": 1.0}
    return [{**common, "method": method, "seed": k, "w2": value} for k, value in enumerate(w2)]


@pytest.mark.parametrize(
    ("auto", "verdict"),
    [((0.20, 0.21), "yes"), ((0.30, 0.31), "no"), ((0.20, 0.30), "within chance")],
)
def test_auto_against_the_best_structure(auto: tuple[float, ...], verdict: str) -> None:
    rows = [*made("isgd:auto", *auto), *made("isgd:layer", 0.20, 0.21), *made("isgd:diagonal", 0.5, 0.6)]
    rows += made("sgld", 0.1, 0.1)  # not a structure
    line = tables.never_worse(rows).splitlines()[-1]
    assert "`layer`" in line and line.endswith(f"| {verdict} |")
    failed = [row for row in made("isgd:full", 0.1, 0.1)]
    del failed[1]["w2"]
    assert tables.never_worse([*rows, *failed]).splitlines()[-1] == line  # a structure that fails is not the best


def test_the_later_of_two_runs_counts(tmp_path: Path) -> None:
    import json

    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": made("sgld", value)}))
    assert [row["w2"] for row in tables.read(tmp_path)] == [2.0]
    with pytest.raises(ValueError, match="holds no results"):
        tables.read(tmp_path / "nowhere")


def test_a_run_that_diverges_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any, **__: Any) -> isosgd.Posterior:
        raise isosgd.DivergedError("the loss is nan", step=3, group=None, state={})

    monkeypatch.setattr(isosgd, "sample", diverge)
    row = runs.measure(make("gauss-half"), "sgld", {}, 1000, seed=0)
    assert row["failed"] == "the loss is nan"
    command.show([row])


@pytest.mark.parametrize("bad", [["--methods", "nuts"], ["--problems", "nothing"], ["--gradients", "0"]])
def test_a_bad_command_line_is_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(bad)
