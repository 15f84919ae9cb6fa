"""``python -m experiments.uci``: what it prints and writes, and how it ends when something is wrong."""

import json
import math
import shlex
from dataclasses import replace

import numpy as np
import pytest

import isosgd
from experiments.uci import runs as uci
from experiments.uci import tables as uci_tables
from experiments.uci.__main__ import main

# so few steps cannot settle
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")]

FEW = ["--hidden", "3", "--chains", "2", "--draws", "4", "--warmup", "150", "--keep-every", "3"]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """To compile takes longer than all of these steps."""
    for name, setting in uci.SETTINGS.items():
        monkeypatch.setitem(uci.SETTINGS, name, replace(setting, options=setting.options | {"compile": False}))


@pytest.fixture
def root(tmp_path):
    """A data root with two sets of two splits."""
    for name in ("one", "two"):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(40, 2))
        folder = tmp_path / "data" / "uci" / name
        folder.mkdir(parents=True)
        np.savetxt(folder / "data.txt", np.column_stack([x, x.sum(1) + 0.1 * rng.normal(size=40)]))
        (folder / "index_features.txt").write_text("0\n1\n")
        (folder / "index_target.txt").write_text("2\n")
        for k in range(2):
            order = rng.permutation(40)
            np.savetxt(folder / f"index_train_{k}.txt", order[:32], fmt="%d")
            np.savetxt(folder / f"index_test_{k}.txt", order[32:], fmt="%d")
    return tmp_path / "data"


def strict(text):
    """JSON as the standard has it, without NaN and infinities."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_it_writes_a_result_with_its_command(root, tmp_path, capsys):
    argv = ["--sets", "one", "--data-root", str(root), "--out", str(tmp_path / "my results"), *FEW]
    assert main(argv) == 0
    assert [path.name for path in (tmp_path / "my results").iterdir()] == ["one-isgd.json"]
    result = uci_tables.read(tmp_path / "my results" / "one-isgd.json")
    assert shlex.split(result.command) == ["python", "-m", "experiments.uci", *argv]
    assert (result.set, result.method, len(result.splits)) == ("one", "isgd", 2)
    assert {"hidden": 3, "chains": 2, "draws": 4, "warmup": 150, "keep_every": 3}.items() <= result.settings.items()
    assert f"one: rmse {result.mean_and_error('rmse')[0]:.3f} ±" in capsys.readouterr().out


def test_it_runs_all_sets_and_another_method(root, tmp_path, capsys):
    argv = ["--method", "sgld", "--data-root", str(root), "--out", str(tmp_path / "out"), "--json"]
    assert main([*argv, "--splits", "1", *FEW]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"one-sgld.json", "two-sgld.json"}
    for name, line in zip(["one", "two"], capsys.readouterr().out.splitlines(), strict=True):
        found, result = strict(line), uci_tables.read(tmp_path / "out" / f"{name}-sgld.json")
        assert (result.method, result.label, len(result.splits)) == ("sgld", "sgld", 1)
        assert found["set"] == name
        assert found["rmse"] == [result.splits[0].rmse, None]  # a single split has no standard error


def test_other_noise_has_a_row_and_a_file_of_its_own(root, tmp_path):
    argv = ["--sets", "one", "--splits", "1", "--data-root", str(root), "--out", str(tmp_path), *FEW]
    for noise, file, own in (
        ("student", "one-isgd", ""),
        ("gaussian", "one-isgd-gaussian", ", Gaussian noise"),
        ("varying", "one-isgd-varying", ", noise by input"),
    ):
        assert main([*argv, "--noise", noise]) == 0
        result = uci_tables.read(tmp_path / f"{file}.json")
        assert result.label == uci.SETTINGS["isgd"].label + own
        assert result.settings["noise"] == noise and math.isfinite(result.splits[0].mnll)


def test_the_papers_setting_takes_a_structure(root, tmp_path):
    argv = ["--sets", "one", "--splits", "1", "--data-root", str(root), "--out", str(tmp_path), *FEW]
    assert main([*argv, "--method", "isgd-paper", "--structure", "layer"]) == 0
    result = uci_tables.read(tmp_path / "one-isgd-paper-layer.json")
    assert result.label == uci.SETTINGS["isgd-paper"].label + ", layer"
    assert (result.settings["preset"], result.settings["structure"]) == ("alpha-a", "layer")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--method", "nonesuch"], "nonesuch"),
        (["--sets", "three"], "'three'"),
        (["--data-root", "no/such/folder"], "no/such/folder"),
        (["--splits", "3"], "split 2 is not there"),
        (["--splits", "0"], "--splits 0"),
        (["--threads", "0"], "--threads 0"),
        (["--device", "abacus"], "--device abacus"),
        (["--draws", "0"], "draws = 0"),
        (["--hidden", "0"], "hidden = 0"),
        (["--structure", "heap"], "heap"),
        (["--method", "sghmc", "--structure", "layer"], "structure"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_end_with_1_and_are_named(root, tmp_path, capsys, more, named):
    out = tmp_path / "out"
    assert main(["--data-root", str(root), "--out", str(out), *FEW, *more]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("experiments.uci: ") and named in printed.err
    assert printed.out == ""
    assert not out.exists()


def test_an_unknown_method_is_told_the_known_ones(root, capsys):
    assert main(["--method", "nonesuch", "--data-root", str(root)]) == 1
    printed = capsys.readouterr().err
    assert all(name in printed for name in {*uci.SETTINGS, *isosgd.METHODS})


def test_a_root_without_sets_is_an_error(tmp_path, capsys):
    assert main(["--data-root", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert f"no set in {tmp_path}" in capsys.readouterr().err


def test_the_root_in_the_environment_is_used(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ISOSGD_DATA", str(tmp_path / "gone"))
    assert main(["--sets", "one"]) == 1
    assert str(tmp_path / "gone") in capsys.readouterr().err
    monkeypatch.setenv("ISOSGD_DATA", str(root))
    assert main(["--sets", "none"]) == 1
    assert "['one', 'two']" in capsys.readouterr().err


def test_what_is_finished_is_kept_when_stopped(root, tmp_path, capsys, monkeypatch):
    whole = uci.run

    def stopped(name, *args, **kwargs):
        if name == "two":
            raise KeyboardInterrupt
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(uci, "run", stopped)
    assert main(["--splits", "1", "--data-root", str(root), "--out", str(tmp_path / "out"), *FEW]) == 130
    assert "stopped" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one-isgd.json"]


@pytest.mark.parametrize("argv", [["--draws", "many"], ["mnist"]], ids=" ".join)
def test_wrong_usage_ends_with_2(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert capsys.readouterr().err.startswith("usage: python -m experiments.uci")
