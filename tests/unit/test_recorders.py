"""Where draws go: what is written in the background, what comes again, and what is said of some of the chains."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Posterior, SamplingWarning, Target, load, priors, sample
from isosgd.sampling.stored import info_of
from isosgd.store import writer
from isosgd.store.files import write_tensors
from isosgd.store.manifest import Manifest
from isosgd.target import Params

DATA = (3.0 + torch.randn(60, generator=torch.Generator().manual_seed(0)),)
QUICK: dict[str, Any] = {
    "method": "sgld", "lr": 1e-3, "warmup": 0, "keep_every": 2, "draws": 6, "progress": False, "compile": False,
}  # fmt: skip
SWAG: dict[str, Any] = {"method": "swag", "draws": 6, "warmup": 200, "progress": False}


def make_target(log_likelihood: Callable[[Params, Any], Tensor] | None = None) -> Target:
    def normal(params: Params, batch: Any) -> Tensor:
        return -0.5 * (batch[0] - params["mu"]).square()

    return Target(log_likelihood or normal, priors.Normal(10.0), init={"mu": 0.0})


def hole(params: Params, batch: Any) -> Tensor:
    """Chains that come down from afar are lost in a hole."""
    lost = (params["mu"] > 50) & (params["mu"] < 85)
    return -0.5 * torch.where(lost, torch.nan, (batch[0] - params["mu"]) ** 2)


def middle_from_afar(chain: int) -> dict[str, float]:
    return {"mu": 86.0 if chain == 1 else 0.0}


def same(a: Posterior, b: Posterior) -> bool:
    return all(torch.equal(a.draws[name], b.draws[name]) for name in a.draws)


# ------------------------------------------------------------------------------------------------ draws that come again


def stop_before_the_end(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> None:
    with monkeypatch.context() as patch:

        def stopped(self: writer.Writer, info: Any) -> None:
            self.flush()
            raise InterruptedError

        patch.setattr(writer.Writer, "finish", stopped)
        with pytest.raises(InterruptedError):
            sample(make_target(), DATA, store=folder, **settings)


def test_a_baseline_that_comes_out_otherwise_says_so_and_keeps_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(make_target(), DATA, **SWAG)
    stop_before_the_end(monkeypatch, tmp_path, **SWAG)
    with monkeypatch.context() as patch:
        differs = writer.Writer.differs
        seen = []

        def other(self: writer.Writer, first: int, index: int, draw: Params, buffers: Params) -> str:
            seen.append(index)
            moved = {name: x + 1 for name, x in draw.items()} if index == 2 else draw
            return differs(self, first, index, moved, buffers)

        patch.setattr(writer.Writer, "differs", other)
        with pytest.warns(SamplingWarning, match=r"draw 2 did not come out as it is stored \('mu' differs\)"):
            again = sample(make_target(), DATA, store=tmp_path, resume=True, **SWAG)
    assert seen == [0, 1, 2], "it is said once"
    assert same(again, whole)


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


@pytest.mark.parametrize("known", [[[]], [0, 0], [True], "01", None, 3])
def test_info_of_anyone_is_no_error(known: Any) -> None:
    info = {"chain_indices": known, "rates": [1.0], "warmup": {}}
    assert info_of(info, [0])["chain_indices"] == [0]


def test_of_a_chain_that_was_given_up_nothing_is_said(tmp_path: Path) -> None:
    settings = {**QUICK, "lr": 0.01, "chains": 3, "init": middle_from_afar, "draws": 8}
    with pytest.warns(SamplingWarning, match="chain 1 was dropped"):
        sample(make_target(hole), DATA, store=tmp_path, **settings)
    assert load(tmp_path).info["keep_every"] == [2, 2]
    assert load(tmp_path, chains=[0, 1]).info["keep_every"] == [2]


# ------------------------------------------------------------------------------------------------ in the background


@pytest.mark.parametrize("place", range(3, 9))
def test_a_disk_that_fails_while_more_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Shards and checkpoints wait behind the one that fails; none of them may be there without it."""
    wanted = sample(make_target(), DATA, **QUICK)
    calls: list[Path] = []

    def failing(path: Path, *args: Any) -> tuple[str, int]:
        calls.append(path)
        time.sleep(0.02)  # so that more is waiting
        if len(calls) == place:
            raise OSError(errno.EIO, "Input/output error")
        return write_tensors(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "LEAST_WAIT", 0.0)
        patch.setattr(writer, "write_tensors", failing)
        with pytest.raises(OSError, match="Input/output error"):
            sample(make_target(), DATA, store=tmp_path, **QUICK)
    assert len(calls) == place
    manifest = Manifest.read(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} >= {shard.file for shard in manifest.shards}
    assert (tmp_path / manifest.checkpoints[0].file).exists()
    found = load(tmp_path, verify=True)
    assert not found.num_draws or torch.equal(found.draws["mu"], wanted.draws["mu"][:, : found.num_draws])
    assert same(sample(make_target(), DATA, store=tmp_path, resume=True, **QUICK), wanted)
