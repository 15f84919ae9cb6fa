"""Where draws go: what is written in the background, what comes again, and what is said of some of the chains."""

import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Posterior, SamplingWarning, Target, load, priors, sample

DATA = (3.0 + torch.randn(60, generator=torch.Generator().manual_seed(0)),)
QUICK: dict[str, Any] = {
    "method": "sgld", "lr": 1e-3, "warmup": 0, "keep_every": 2, "draws": 6, "progress": False, "compile": False,
}  # fmt: skip
SWAG: dict[str, Any] = {"method": "swag", "draws": 6, "warmup": 200, "progress": False}


def make_target(log_likelihood: Callable[[dict[str, Tensor], Any], Tensor] | None = None) -> Target:
    def normal(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0] - params["mu"]).square()

    return Target(log_likelihood or normal, priors.Normal(10.0), init={"mu": 0.0})


def hole(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Chains that come down from afar are lost in a hole."""
    lost = (params["mu"] > 50) & (params["mu"] < 85)
    return -0.5 * torch.where(lost, torch.nan, (batch[0] - params["mu"]) ** 2)


def middle_from_afar(chain: int) -> dict[str, float]:
    return {"mu": 86.0 if chain == 1 else 0.0}


def same(a: Posterior, b: Posterior) -> bool:
    return all(torch.equal(a.draws[name], b.draws[name]) for name in a.draws)


# ------------------------------------------------------------------------------------------------ draws that come again


class Changing:
    """A likelihood that another machine, say, computes otherwise; not at the start, where a change would be noticed."""

    def __init__(self) -> None:
        self.off, self.left = 0.0, math.inf

    def __call__(self, params: dict[str, Tensor], batch: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return -0.5 * (batch[0] - params["mu"] * (1.0 + self.off * params["mu"])).square()


def test_a_draw_that_comes_out_otherwise_is_said_and_what_is_stored_is_kept(tmp_path: Path) -> None:
    """The run was stopped before a first checkpoint, so that all draws come again."""
    changing = Changing()
    whole = sample(make_target(changing), DATA, **QUICK)
    changing.left = 10
    with pytest.raises(KeyboardInterrupt):
        sample(make_target(changing), DATA, store=tmp_path, **QUICK)
    before = load(tmp_path).num_draws
    assert 1 < before < 6
    changing.off = 1e-3
    with pytest.warns(SamplingWarning, match=r"draw 0 did not come out as it is stored \('mu' differs\)") as caught:
        again = sample(make_target(changing), DATA, store=tmp_path, resume=True, **QUICK)
    assert len(caught) == 1, "it is said once"
    assert again.num_draws == 6 and torch.equal(again.draws["mu"][:, :before], whole.draws["mu"][:, :before])
    assert not torch.equal(again.draws["mu"][:, before:], whole.draws["mu"][:, before:])


def full_at_the_end(monkeypatch: pytest.MonkeyPatch, folder: Path, function: Callable[..., Tensor]) -> None:
    """A baseline whose draws are written, and whose manifest, that says that it is complete, is not."""
    sync, calls = os.fsync, list[int]()

    def counted(file: Any) -> None:
        calls.append(file)
        if len(calls) == last:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted)
        last = 0
        sample(make_target(function), DATA, store=folder / "whole", **SWAG)
        last, calls = len(calls) - 1, []
        with pytest.raises(OSError, match="the disk is full"):
            sample(make_target(function), DATA, store=folder / "run", **SWAG)
    assert load(folder / "run").num_draws == 6 and not load(folder / "run").info["complete"]


@pytest.mark.long
def test_a_baseline_that_was_stopped_has_every_draw_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Changing()
    full_at_the_end(monkeypatch, tmp_path, changing)
    again = sample(make_target(changing), DATA, store=tmp_path / "run", resume=True, **SWAG)
    assert same(again, load(tmp_path / "whole")) and again.info["complete"]


@pytest.mark.long
def test_a_baseline_that_comes_out_otherwise_says_so_and_keeps_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = Changing()
    full_at_the_end(monkeypatch, tmp_path, changing)
    changing.off = 1e-3
    with pytest.warns(SamplingWarning, match=r"draw 0 did not come out as it is stored \('mu' differs\)") as caught:
        again = sample(make_target(changing), DATA, store=tmp_path / "run", resume=True, **SWAG)
    assert len(caught) == 1, "it is said once"
    assert same(again, load(tmp_path / "whole"))


@pytest.mark.long
def test_a_baselines_chains_keep_their_numbers(tmp_path: Path) -> None:
    settings = {**SWAG, "chains": 3, "init": middle_from_afar, "train_lr": 0.1}
    with pytest.warns(SamplingWarning, match="chain 1 was dropped"):
        wanted = sample(make_target(hole), DATA, **settings)
    with pytest.warns(SamplingWarning, match="chain 1 was dropped"):
        found = sample(make_target(hole), DATA, store=tmp_path, **settings)
    assert found.info["chain_indices"] == wanted.info["chain_indices"] == [0, 2]
    assert same(found, wanted) and found.info["rates"] == wanted.info["rates"] and len(found.info["rates"]) == 2


# ------------------------------------------------------------------------------------------------ some of the chains


@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # so few steps need not settle
def test_info_is_that_of_the_chains_that_are_shown(tmp_path: Path) -> None:
    settings = {**QUICK, "chains": 3, "warmup": 300, "method": "isgd", "structure": "layer"}
    settings.pop("lr")
    whole = sample(make_target(), DATA, store=tmp_path, **settings)
    rates = whole.info["rates"]
    assert len({tuple(rate.values()) for rate in rates}) == 3
    some = load(tmp_path, chains=[2, 0])
    assert some.info["rates"] == [rates[2], rates[0]] and some.info["chains"] == 2
    assert some.info["warmup"] == [whole.info["warmup"][2], whole.info["warmup"][0]]
    assert some.info["keep_every"] == [2, 2] and some.info["chain_indices"] == [2, 0]


def test_of_a_chain_that_was_given_up_nothing_is_said(tmp_path: Path) -> None:
    settings = {**QUICK, "lr": 0.01, "chains": 3, "init": middle_from_afar, "draws": 8}
    with pytest.warns(SamplingWarning, match="chain 1 was dropped"):
        sample(make_target(hole), DATA, store=tmp_path, **settings)
    assert load(tmp_path).info["keep_every"] == [2, 2]
    assert load(tmp_path, chains=[0, 1]).info["keep_every"] == [2]


# ------------------------------------------------------------------------------------------------ in the background


@pytest.mark.parametrize("place", range(5, 30, 4))
@pytest.mark.usefixtures("eager_store")
def test_a_disk_that_fails_while_more_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Shards and checkpoints wait behind the one that fails; none of them may be there without it."""
    wanted = sample(make_target(), DATA, **QUICK)
    sync, calls = os.fsync, list[int]()

    def failing(file: Any) -> None:
        calls.append(file)
        time.sleep(0.01)  # so that more is waiting
        if len(calls) == place:
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match=r"(json|safetensors) cannot be written: Input/output error"):
            sample(make_target(), DATA, store=tmp_path, **QUICK)
    assert len(calls) == place
    found = load(tmp_path, verify=True)
    assert not found.num_draws or torch.equal(found.draws["mu"], wanted.draws["mu"][:, : found.num_draws])
    assert same(sample(make_target(), DATA, store=tmp_path, resume=True, **QUICK), wanted)
