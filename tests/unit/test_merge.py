"""Runs with other seeds become one: looked at together, merged, extended."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isosgd
from isosgd import Target, load, merge, priors, resume, sample
from isosgd.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")

Y = torch.randn(80, generator=torch.Generator().manual_seed(0)) + 1.0
QUICK: dict[str, Any] = {"draws": 6, "keep_every": 3, "warmup": 0, "method": "sgld", "lr": 1e-2, "progress": False}


def make_target(scale: float = 10.0) -> Target:
    return Target(
        lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2,
        priors.Normal(scale),
        init={"mu": 0.0},
        predict=lambda p, x: p["mu"] + x,
    )


def run(folder: Path, seed: int, data: Any = Y, target: Target | None = None, **more: Any) -> isosgd.Posterior:
    data = data if isinstance(data, tuple) else (data,)
    return sample(target or make_target(), data, store=folder / str(seed), seed=seed, **{**QUICK, **more})


def test_runs_are_one_without_a_copy(tmp_path: Path) -> None:
    alone = [run(tmp_path, seed, chains=chains) for seed, chains in ((0, 2), (1, 1))]
    together = load([tmp_path / "0", tmp_path / "1"], make_target(), data=(Y,))
    assert torch.equal(together.draws["mu"], torch.cat([one.draws["mu"] for one in alone]))
    assert together.info["chain_indices"] == [0, 1, 2] and together.info["seed"] == [0, 1]
    assert len(together.info["keep_every"]) == 3 and together.info["complete"]
    assert torch.equal(together.draw(2, 5)["mu"], alone[1].draw(0, 5)["mu"])
    assert together.predict(torch.zeros(2)).mean.shape == (2,)
    # R-hat is that of all chains: three here, whatever each run had.
    assert together.summary((Y,)).as_dict()["chains"] == 3


def test_chains_of_merged_runs_have_the_networks_that_they_began_with(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    target, data = Target.from_module(first, "categorical"), (torch.randn(80, 4), torch.randint(3, (80,)))
    for seed, network, chains in ((0, first, 3), (1, second, 1)):
        run(tmp_path, seed, data, target, starts=[network], chains=chains, temperature=1e-3)
    folders = [tmp_path / "0", tmp_path / "1"]
    for found in (load(folders, target), merge(folders, tmp_path / "both", target)):
        heads = found.with_starts(0.5)
        began = [torch.equal(heads.draw(k, 0)["weight"], first.weight) for k in range(4)]
        assert began == [True, True, True, False]


def test_a_merged_run_is_extended_as_its_parts_would_be(tmp_path: Path) -> None:
    for seed in (3, 4):
        run(tmp_path, seed)
    merged = merge([tmp_path / "3", tmp_path / "4"], tmp_path / "all", make_target())
    assert (merged.num_chains, merged.num_draws) == (2, 6)
    longer = resume(tmp_path / "all", make_target(), (Y,), draws=9, progress=False)
    assert longer.num_draws == 9 and load(tmp_path / "3").num_draws == 6
    for chain, seed in enumerate((3, 4)):
        again = run(tmp_path / "again", seed, draws=9)
        assert torch.equal(longer.draws["mu"][chain], again.draws["mu"][0])
    more = run(tmp_path, 5, draws=9)
    every = merge([tmp_path / "all", tmp_path / "5"], tmp_path / "every")
    assert every.num_chains == 3 and torch.equal(every.draws["mu"][2], more.draws["mu"][0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": Y + 1}, "data.tensors"),
        ({"target": make_target(2.0)}, "target.describes.prior"),
        ({"temperature": 0.5}, "settings.temperature was 1.0 and is 0.5"),
        ({"method": "sghmc"}, "settings.method"),
    ],
)
def test_runs_of_something_else_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    run(tmp_path, 0)
    run(tmp_path, 1, **change)
    for take in (load, lambda runs: merge(runs, tmp_path / "all")):
        with pytest.raises(ValueError, match=said):
            take([tmp_path / "0", tmp_path / "1"])
    assert not (tmp_path / "all").exists()


def test_runs_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / str(seed) for seed in range(2)]
    run(tmp_path, 0, draws=2, chains=2)
    run(tmp_path, 1, draws=5, chains=2)
    left = rf"5 draws of each of 2 chains are shown; left out: {runs[0]} \(2 draws\)"
    with pytest.warns(isosgd.SamplingWarning, match=f"{left}. To level them: isosgd resume {runs[0]} --draws 5"):
        load(runs)
    with pytest.warns(isosgd.SamplingWarning, match=left) as warned:
        merge(runs, tmp_path / "all")
    assert len(warned) == 1
    with pytest.warns(isosgd.SamplingWarning, match=f"isosgd resume {tmp_path / 'all'} --draws 5"):
        load(tmp_path / "all")
    assert main(["merge", *map(str, runs), "--out", str(tmp_path / "command")]) == 0
    assert f"left out: {runs[0]} (2 draws)" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        levelled = resume(tmp_path / "all", make_target(), (Y,), draws=5, progress=False)
    assert (levelled.num_chains, levelled.num_draws) == (4, 5)


def test_draws_are_not_counted_twice(tmp_path: Path) -> None:
    run(tmp_path, 0)
    run(tmp_path / "other", 0, draws=7)
    with pytest.raises(ValueError, match="same seed = 0"):
        load([tmp_path / "0", tmp_path / "other" / "0"])
    with pytest.raises(ValueError, match="no runs were given"):
        load([])


def test_a_merged_run_is_not_written_over(tmp_path: Path) -> None:
    run(tmp_path, 0)
    run(tmp_path, 1)
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all")
    with pytest.raises(FileExistsError, match="already holds a run"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all")
    with pytest.raises(FileExistsError, match="already holds a run"):
        sample(make_target(), (Y,), store=tmp_path / "all", **QUICK)


def test_a_run_of_parts_goes_on_by_resume_alone(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path, seed)
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all")
    for chains in (1, 2):
        with pytest.raises(ValueError, match=r"holds a run of 2 parts.*isosgd\.resume"):
            sample(make_target(), (Y,), store=tmp_path / "all", resume=True, chains=chains, **{**QUICK, "draws": 9})
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"manifest.json", "part-0000", "part-0001"}
    with pytest.raises(ValueError, match=r"parallel = 'chains': isosgd\.resume goes on with them in one process"):
        resume(tmp_path / "all", make_target(), (Y,), parallel="chains")
    assert resume(tmp_path / "all", make_target(), (Y,), draws=9, progress=False).num_draws == 9


def test_parts_of_a_strange_manifest_do_not_lead_out(tmp_path: Path) -> None:
    run(tmp_path, 0)
    from isosgd.store import Manifest

    found = Manifest.read(tmp_path / "0")
    found.parts = ["../0"]
    (tmp_path / "strange").mkdir()
    found.write(tmp_path / "strange")
    with pytest.raises(isosgd.store.StoreError, match="not the name of a file of ours"):
        load(tmp_path / "strange")


def test_frozen_layers_are_those_of_all(tmp_path: Path) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    target = Target.from_module(model, "gaussian", sampled="last_layer")
    for seed in range(2):
        sample(target, (x, x[:, :1]), store=tmp_path / str(seed), seed=seed, **QUICK)
    found = load([tmp_path / "0", tmp_path / "1"], target)
    assert found.predict(x).mean.shape == (40, 1)


def test_the_command_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\nfrom isosgd import Target, priors\n"
        "data = (torch.linspace(-1, 1, 60),)\n"
        "target = Target(lambda p, b: -0.5 * (b[0] - p['mu']) ** 2, priors.Normal(10.0), init={'mu': 0.0})\n"
    )
    runs = [tmp_path / f"run{seed}" for seed in range(2)]
    for seed, folder in enumerate(runs):
        settings = ["--warmup", "0", "--keep-every", "5", "--method", "sgld", "--option", "lr=0.01", "--draws", "8"]
        assert (
            main(["sample", f"{script}:target", "--out", str(folder), "--seed", str(seed), "--no-report", *settings])
            == 0
        )
    assert main(["merge", *map(str, runs), "--out", str(tmp_path / "all")]) == 0
    assert "8 chains of 2 runs, 8 draws of each" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "all"), "--json"]) == 0
    assert '"chains": 8' in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "all"), "--draws", "10", "--no-report"]) == 0
    assert load(tmp_path / "all").num_draws == 10
    assert main(["merge", *map(str, runs), "--out", str(tmp_path / "all")]) == 1
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.long
def test_fits_of_one_table_with_other_seeds_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: it reads tables")
    from isosgd import sklearn

    table, runs = tmp_path / "t.csv", [tmp_path / f"run{seed}" for seed in range(2)]
    table.write_text("t,x,y\n" + "".join(f"{k},{k * 7 % 11},{k * 7 % 11 + k / 30:.2f}\n" for k in range(30)))
    short = ["--effort", "0.002", "--chains", "2", "--hidden", "2", "--no-report", "--use", "t"]
    for seed, folder in enumerate(runs):
        assert main(["fit", str(table), "--target", "y", "--out", str(folder), "--seed", str(seed), *short]) == 0
    assert torch.equal(*(sklearn.load(folder).held_out_[0] for folder in runs))
    assert merge(runs, tmp_path / "all").num_chains == 4
    model = sklearn.load(tmp_path / "all")
    assert model.posterior_.num_chains == 4 and list(model.feature_names_in_) == ["t", "x"]
    assert all((tmp_path / "all" / f"part-000{k}" / "start-000001.safetensors").exists() for k in range(2)), "to resume"
    capsys.readouterr()
    assert main(["merge", *map(str, runs), "--out", str(tmp_path / "merged")]) == 0
    assert main(["predict", str(tmp_path / "merged"), str(table), "--out", str(tmp_path / "p.csv")]) == 0
    assert "30 predictions in" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "merged")]) == 0 and (tmp_path / "merged" / "report.html").exists()
