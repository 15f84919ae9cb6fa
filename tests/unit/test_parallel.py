"""`parallel=` where there is no process group, or one of a single process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from isosgd import Target, load, priors, sample
from isosgd.store import StoreError

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")
Y = torch.randn(60, generator=torch.Generator().manual_seed(0))
QUICK: dict[str, Any] = {"draws": 3, "keep_every": 2, "warmup": 0, "method": "sgld", "lr": 1e-2, "progress": False}


def target() -> Target:
    return Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("parallel", ["chains", "data"])
def test_a_process_group_is_needed(parallel: Any) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        sample(target(), (Y,), parallel=parallel, **QUICK)


@pytest.mark.usefixtures("alone")
def test_one_process_is_a_group_too(tmp_path: Path) -> None:
    plain = sample(target(), (Y,), chains=2, first_chain=0, **QUICK)
    for parallel in ("chains", "data"):
        count = 2 if parallel == "chains" else 1
        store = tmp_path / parallel
        found = sample(target(), (Y,), chains=count, parallel=parallel, store=store, **QUICK)  # type: ignore[arg-type]
        assert torch.equal(found.draws["mu"], plain.draws["mu"][:count])
        assert load(store).info["complete"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel": "both"}, "is unknown"),
        ({"rank_timeout": 0}, "rank_timeout = 0"),
        ({"max_seconds": 1.0}, "max_seconds"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sample(target(), (Y,), **{"parallel": "chains", **QUICK, **change})


@pytest.mark.long  # it waits five seconds for the other run to end
@pytest.mark.usefixtures("alone")
def test_two_runs_into_one_store_are_refused(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="this system has no locks")
    (tmp_path / "run").mkdir()
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as another run of ranks holds it
    with pytest.raises(StoreError, match="being written by another process"):
        sample(target(), (Y,), parallel="chains", store=tmp_path / "run", resume=True, **QUICK)
    os.close(handle)
    assert len(sample(target(), (Y,), parallel="chains", store=tmp_path / "run", resume=True, **QUICK)) == 3


def test_a_part_of_the_data_is_not_taken_for_all(tmp_path: Path) -> None:
    """A DistributedSampler without parallel="data" would leave N and the examples of other ranks out."""
    source = TensorDataset(Y)
    sampler: Any = DistributedSampler(source, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="rank 0 of 2"):
        sample(target(), DataLoader(source, batch_size=10, sampler=sampler), **QUICK)


@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    model = distribute_module(torch.nn.Linear(2, 1), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="sharded over ranks"):
        Target.from_module(model, "gaussian")
