"""What does not fit into memory, and inputs that a run watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd import Target, sample
from isosgd.cli import main

PENGUINS = Path(__file__).parents[1] / "data" / "penguins.csv"
X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
QUICK: dict[str, Any] = {"draws": 3, "keep_every": 5, "warmup": 600, "progress": False, "compile": False}


def line() -> Target:
    torch.manual_seed(0)
    return Target.from_module(nn.Linear(2, 1), "gaussian")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["isgd", "swag"])
@pytest.mark.parametrize("stored", [True, False])
def test_more_chains_than_fit_are_refused_at_once(method: str, stored: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": tmp_path / "run"} if stored else {}
    with pytest.raises(ValueError, match=r"chains = 1,000,000,000 need .* GiB of memory at least, and this machine"):
        sample(line(), (X, Y), method=method, chains=10**9, **settings)
    assert not (tmp_path / "run").exists()


def test_more_draws_than_fit_go_to_the_disk(tmp_path: Path) -> None:
    settings = {**QUICK, "draws": 10**13}
    with pytest.raises(ValueError, match=r"draws = 10,000,000,000,000 of 1 chains .* \(store=\)"):
        sample(line(), (X, Y), **settings)
    with pytest.raises(ValueError, match="draws = 10,000,000,000,000"):  # baselines draw all at the end
        sample(line(), (X, Y), method="swag", store=tmp_path / "swag", **settings)
    settings |= {"keep_every": 1, "method": "sgld", "lr": 1e-4, "warmup": 0, "max_seconds": 0.5}
    found = sample(line(), (X, Y), store=tmp_path / "run", **settings)
    assert len(found) >= 1 and found.info["stopped"].startswith("max_seconds")


def test_fit_says_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fit", str(PENGUINS), "--target", "body_mass_g", "--out", str(tmp_path / "run"), "--chains", "100000000"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("isosgd: chains = 100,000,000 need") and error.count("\n") == 1


# -- what is held out --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
@pytest.mark.parametrize("changed", [X[:3] + 1.0, X[:4], None], ids=["values", "number", "none"])
def test_other_held_out_inputs_are_refused(changed: Tensor | None, tmp_path: Path) -> None:
    """They decide when draws="auto" ends."""
    settings = {**QUICK, "draws": "auto", "budget": 2}
    sample(line(), (X, Y), store=tmp_path, held_out=X[:3], **settings)
    with pytest.raises(ValueError, match=r"(?s)cannot be resumed:.*held_out"):
        sample(line(), (X, Y), store=tmp_path, resume=True, held_out=changed, **settings)
    assert isosgd.resume(tmp_path, line(), (X, Y), held_out=X[:3]).num_draws == 2
