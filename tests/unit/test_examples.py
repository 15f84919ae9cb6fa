"""The files under examples/ and the README's code run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
TRAINED = ("trained_tabular", "trained_cnn", "trained_transformer")


def blocks(page: str) -> list[str]:
    """Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_an_example_runs_and_compares_with_its_start(name: str) -> None:
    pytest.importorskip("sklearn")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    start, average = (
        float(re.search(rf"^{row} +([0-9.]+) ", found.stdout, re.MULTILINE)[1])  # type: ignore[index]
        for row in ("start", "average of draws")
    )
    assert 0 < average < 2 * start  # test data are few, and did not choose the temperature
    assert re.search(r"^NLL [+-].* examples, \d+ draws?$", found.stdout, re.MULTILINE)
    assert re.search(r"held-out examples", found.stdout)


def test_examples_are_short_and_all_of_them_are_run() -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    assert [file.stem for file in files] == sorted(TRAINED)
    for file in files:
        assert len(file.read_text().splitlines()) < 60, file.name


@pytest.mark.parametrize(
    "page",
    ["README.md", *(pytest.param(page, marks=pytest.mark.long) for page in ("docs/index.md", "docs/trained.md"))],
)
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_the_first_lines_of_a_page_take_a_trained_network_to_predictions(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(260, 2, generator=made)
    y = (x.sum(1) + 0.5 * torch.randn(260, generator=made) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    known: dict[str, Any] = {"model": model, "x_new": x[-3:]}
    for name, rows in {"train": slice(100), "val": slice(100, 180), "test": slice(180, 260)}.items():
        known |= {f"x_{name}": x[rows], f"y_{name}": y[rows]}
    exec(compile(blocks(page)[0], page, "exec"), known)
    assert "average of draws" in capsys.readouterr().out
    assert known["posterior"].info["temperature_choice"]["held_out"] == 80
    assert known["posterior"].predict(x[-3:]).mean.shape == (3, 2)
