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

QUICK: dict[str, Any] = {"draws": 8, "warmup": 200, "keep_every": 2, "progress": False, "compile": False}


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
@pytest.mark.parametrize(("dtype", "structure"), [(torch.float32, "kronecker"), (torch.float64, "auto")])
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
    assert "layer '1' (BatchNorm1d) and 4 other layers use the statistics of the minibatch" in str(found[0].message)
    assert "model.eval()" in str(found[0].message)
    x = torch.randn(10, 3)
    draws: dict[str, Tensor] = {name: torch.randn(1, 3, *p.shape) for name, p in model.named_parameters()}
    draws["likelihood.scale"] = torch.ones(1, 3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Posterior(target, draws, {}).predict(x)
    assert len(found) == 1 and "refresh=" in str(found[0].message)
    with pytest.warns(UserWarning, match=r"^layer '1' \(BatchNorm1d\) uses the statistics"):
        Target.from_module(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "gaussian")


def _forms(kind: str, x: Tensor, y: Tensor) -> Any:
    pandas = pytest.importorskip("pandas")
    a, b = x.double().numpy(), (y.double() if y.is_floating_point() else y).numpy()
    if kind == "arrays":
        return a, b
    if kind == "list":
        return [a, b]
    if kind == "batches":
        return [(a[:60], b[:60]), (a[60:], b[60:])]
    return pandas.DataFrame(a, columns=list("abc")), pandas.Series(b.ravel())


@pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")
@pytest.mark.parametrize(
    ("kind", "likelihood"),
    [*((kind, "gaussian") for kind in ("arrays", "list", "frames", "batches")), ("frames", "categorical")],
)
def test_arrays_and_frames_are_data(kind: str, likelihood: str) -> None:
    x, y = regression_data()
    if likelihood == "categorical":
        y = (y[:, 0] > 0).long()
    target = Target.from_module(network(outputs=1 if likelihood == "gaussian" else 2), likelihood, num_data=120)
    data = _forms(kind, x, y)
    posterior = sample(target, data, structure="layer", **{**QUICK, "warmup": 100})
    assert {v.dtype for v in posterior.draws.values()} == {torch.float32}
    inputs = x.double().numpy() if kind == "batches" else data[0]
    torch.testing.assert_close(posterior.predict(inputs).mean, posterior.predict(x).mean)
    assert posterior.summary(data).rhat > 0 and posterior.trust(data).temperature == 1
    if kind != "batches":
        assert torch.equal(posterior.log_predictive(data), posterior.log_predictive((x, y)))


def test_a_column_that_is_not_of_numbers_is_named() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1.0, 2.0], "town": ["a", "b"]})
    with pytest.raises(TypeError, match=r"column 'town' of the data is of type .*encode it as numbers"):
        sample(Target.from_module(network(), "gaussian"), (frame, frame["age"]), progress=False)
    with pytest.raises(ValueError, match=r"must be the same.*list of tuples"):
        sample(Target.from_module(network(), "gaussian"), list(map(torch.zeros, (3, 4))), progress=False)
