"""Faults that users met, each at the public API."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, load, sample

QUICK: dict[str, Any] = {"draws": 20, "warmup": 400, "keep_every": 2, "progress": False}


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def network(dtype: torch.dtype = torch.float32, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)


def regression_data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(120, 3, generator=generator, dtype=dtype)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(120, 1, generator=generator, dtype=dtype)


@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")
@pytest.mark.parametrize(
    ("dtype", "structure"), [(torch.float32, "auto"), (torch.float32, "kronecker"), (torch.float64, "auto")]
)
def test_everything_works_under_a_float64_default(
    float64_by_default: None, dtype: torch.dtype, structure: str, tmp_path: Path
) -> None:
    data = regression_data(dtype)
    target = Target.from_module(network(dtype), "gaussian")
    posterior = sample(target, data, chains=2, structure=structure, store=tmp_path / "run", **QUICK)
    assert {x.dtype for x in posterior.draws.values()} == {dtype}
    for one in (posterior, load(tmp_path / "run", target, data=data)):
        found = one.predict(data[0], levels=(0.1, 0.9))
        assert found.mean.dtype == dtype
        assert one.log_predictive(data).dtype == dtype
        assert one.summary(data, parameters=["*"]).rhat > 0
        assert one.trust(data).temperature is not None


def test_one_warning_for_all_layers_of_batch_norm() -> None:
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        target = Target.from_module(model, "gaussian")
    assert len(found) == 1
    assert "1 (BatchNorm1d) and 4 other layers use the statistics of the minibatch" in str(found[0].message)
    assert "model.eval()" in str(found[0].message)
    x = torch.randn(10, 3)
    draws: dict[str, Tensor] = {name: torch.randn(1, 3, *p.shape) for name, p in model.named_parameters()}
    draws["likelihood.scale"] = torch.ones(1, 3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Posterior(target, draws, {}).predict(x)
    assert len(found) == 1 and "refresh=" in str(found[0].message)
    with pytest.warns(UserWarning, match=r"^1 \(BatchNorm1d\) uses the statistics"):
        Target.from_module(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "gaussian")
