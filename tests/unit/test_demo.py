"""The demo runs, writes what it says, and says what is missing."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from isosgd.demo import run as demo
from isosgd.demo.jobs import ISGD, QUICK, Found

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
def test_quick_demo_writes_what_it_says(tmp_path: Path) -> None:
    """As `make demo` calls it: what is sent to processes of its own must be found there."""
    out = tmp_path / "new" / "folder"
    options = ["--out", str(out), "--quick", "--jobs", "2", "--seed", "1", "--json"]
    done = subprocess.run([sys.executable, "-m", "isosgd.demo", *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())
    assert json.loads(done.stdout) == results
    assert sorted(out.iterdir()) == sorted(demo.written(out))
    for path in demo.written(out):
        assert str(path) in done.stderr
        assert path.suffix != ".png" or path.read_bytes().startswith(PNG)

    assert results["seed"] == 1 and results["quick"] and results["seconds"] > 0
    assert {"isosgd", "torch", "python"} <= set(results["versions"])
    assert set(results["toy"]) == {"exact", *demo.METHODS}
    assert len({results["toy"][method]["gradients"] for method in demo.METHODS}) == 1, "equal number of gradients"
    for name, keys in (("diabetes", ("rmse", "coverage95", "mnll")), ("digits", ("accuracy", "confidence", "mnll"))):
        for label, row in results[name]["rows"].items():
            assert label in done.stderr
            assert all(math.isfinite(row[key]) for key in keys)
            if label != ISGD:
                word = "better than" if row["excess"] > 0 else "worse than"
                assert (
                    f"{word if abs(row['excess']) > 2 * row['excess_error'] else 'level with'} {label!r}" in done.stderr
                )
    for found in (*results["toy"].values(), results["diabetes"], results["digits"]):
        assert all(message in done.stderr for message in found.get("warnings", []))


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # here they are installed
    assert demo.main(["--quick"]) == 2
    message = capsys.readouterr().err
    assert "scikit-learn and matplotlib" in message and 'pip install "isosgd[demo]"' in message


@pytest.mark.parametrize("wrong", [["--jobs", "0"], ["--seed", "-1"], ["--seed", "x"]])
def test_bad_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        demo.main(["--help"])
    assert "example: python -m isosgd.demo --out" in capsys.readouterr().out


def test_warnings_of_a_job_are_kept() -> None:
    import warnings

    def job(seed: int, sizes: object) -> Found:
        warnings.warn("the draws may be off", UserWarning, stacklevel=2)
        return Found({}, {})

    assert demo.run_job(job, 0, QUICK).numbers["warnings"] == ["the draws may be off"]
