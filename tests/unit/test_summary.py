"""Summaries of a posterior: the numbers of arviz-stats, the quantities asked for, strict JSON, ArviZ's own form."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isosgd import Posterior, Target, diagnostics, likelihoods, priors
from isosgd.diagnostics.summary import summary_of

CHAINS, DRAWS = 4, 60


@pytest.fixture
def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(50, 3, generator=generator), torch.randn(50, 1, generator=generator)


@pytest.fixture
def posterior(data: tuple[Tensor, Tensor], generator: torch.Generator) -> Posterior:
    """A line with a sampled noise scale, at made-up draws that follow each other."""
    target = Target.from_module(nn.Linear(3, 1), "gaussian")

    def walk(*shape: int) -> Tensor:
        x = torch.randn(CHAINS, DRAWS, *shape, generator=generator)
        for t in range(1, DRAWS):
            x[:, t] = 0.6 * x[:, t - 1] + 0.8 * x[:, t]
        return x

    draws = {"weight": walk(1, 3), "bias": walk(1), "likelihood.scale": (0.1 * walk()).exp()}
    return Posterior(target, draws, {"method": "isgd", "temperature": 1.0, "warmup": [{"settled": True}]}, data=data)


def test_rows_are_what_arviz_says(posterior: Posterior, data: tuple[Tensor, Tensor]) -> None:
    arviz = pytest.importorskip("arviz_stats.base").array_stats
    found = posterior.summary(examples=5)
    x = data[0][torch.linspace(0, 49, 5).round().long()]
    traces = (torch.einsum("cdok,nk->cdn", posterior.draws["weight"], x) + posterior.draws["bias"]).numpy()
    rows = [row for row in found.rows if row.kind == "prediction"]
    assert [row.name for row in rows] == [f"prediction[{i}, 0]" for i in range(5)]
    expected = {
        "mean": traces.mean((0, 1)),
        "sd": traces.std((0, 1), ddof=1),
        "mcse": arviz.mcse(traces, 0, 1, method="mean"),
        "rhat": arviz.rhat(traces, 0, 1),
        "ess_bulk": arviz.ess(traces, 0, 1, method="bulk"),
        "ess_tail": arviz.ess(traces, 0, 1, method="tail", prob=0.05),
    }
    for what, values in expected.items():
        np.testing.assert_allclose([getattr(row, what) for row in rows], values, rtol=1e-4)


def test_what_is_looked_at(posterior: Posterior) -> None:
    found = posterior.summary()
    kinds = [row.kind for row in found.rows]
    assert kinds.count("prediction") == 16 and kinds.count("log likelihood") == 1
    assert [row.name for row in found.rows if row.kind == "parameter"] == [
        "weight[0, 0]", "weight[0, 1]", "weight[0, 2]", "bias[0]", "likelihood.scale",
    ]  # fmt: skip
    assert found.rhat == max(row.rhat for row in found.rows)
    assert found.ess_bulk == min(row.ess_bulk for row in found.rows)
    assert found.of("parameter").rows == tuple(row for row in found.rows if row.kind == "parameter")
    chosen = posterior.summary(parameters=["likelihood.*"], examples=2)
    assert [row.name for row in chosen.rows][-1] == "likelihood.scale"
    assert sum(row.kind == "parameter" for row in chosen.rows) == 1
    with pytest.raises(ValueError, match=r"'gain', which fits none of \['weight'"):
        posterior.summary(parameters=["gain"])


def test_many_parameters_are_not_all_followed(generator: torch.Generator) -> None:
    net = nn.Linear(40, 1)
    draws = {name: torch.randn(2, 10, *p.shape, generator=generator) for name, p in net.named_parameters()}
    draws["likelihood.scale"] = torch.rand(2, 10, generator=generator) + 1
    found = Posterior(Target.from_module(net, "gaussian"), draws, {}).summary()
    assert [row.name for row in found.rows] == ["likelihood.scale"]


def test_log_likelihood_is_the_mean_over_examples(posterior: Posterior, data: tuple[Tensor, Tensor]) -> None:
    found = posterior.summary(data, examples=50)
    (row,) = (row for row in found.rows if row.kind == "log likelihood")
    assert row.mean == pytest.approx(float(posterior.log_likelihood(data).mean()), rel=1e-5)


def test_data_in_batches_and_held_out(posterior: Posterior, data: tuple[Tensor, Tensor]) -> None:
    loader = DataLoader(TensorDataset(*data), batch_size=8)
    found = posterior.summary(loader, examples=5)
    first = posterior.summary((data[0][:5], data[1][:5]), examples=5)
    assert [row.mean for row in found.rows] == pytest.approx([row.mean for row in first.rows])
    with pytest.raises(ValueError, match="yields no batches"):
        posterior.summary([])


def test_classes_leave_the_last_out(generator: torch.Generator) -> None:
    net = nn.Linear(3, 3)
    draws = {name: torch.randn(2, 10, *p.shape, generator=generator) for name, p in net.named_parameters()}
    batch = torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 2, 0])
    found = Posterior(Target.from_module(net, "categorical"), draws, {}).summary(batch, parameters=[])
    assert sum(row.kind == "prediction" for row in found.rows) == 8


def test_a_target_without_a_network(generator: torch.Generator) -> None:
    """Predictions where the inputs are given; else the log likelihood of examples stands for them."""
    target = Target(
        lambda p, b: -0.5 * (b[1] - p["w"] * b[0].square()) ** 2,
        priors.Normal(1.0),
        init={"w": 0.0},
        predict=lambda p, x: p["w"] * x.square(),
    )
    posterior = Posterior(target, {"w": torch.randn(2, 10, generator=generator)}, {})
    batch = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    found = posterior.summary(batch)
    assert [row.kind for row in found.rows] == ["log likelihood"] * 7 + ["parameter"]
    found = posterior.summary(inputs=torch.ones(3))
    assert [row.name for row in found.rows] == ["prediction[0]", "prediction[1]", "prediction[2]", "w"]


def test_strict_json_and_words(posterior: Posterior) -> None:
    still = Posterior(posterior.target, dict(posterior.draws) | {"bias": torch.zeros(CHAINS, DRAWS, 1)}, {})
    found = still.summary(parameters=["bias", "likelihood.scale"])
    as_dict = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    by_name = {row["name"]: row for row in as_dict["rows"]}
    assert by_name["bias[0]"]["rhat"] is None and by_name["likelihood.scale"]["rhat"] > 0
    assert as_dict["worst"]["rhat"] == pytest.approx(by_name["likelihood.scale"]["rhat"])  # what is still says nothing
    assert "4 chains of 60 draws" in str(found) and "likelihood.scale" in str(found)
    assert "and 10 more" in str(posterior.summary())


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda p: p.summary(examples=0), "examples = 0 must be an integer"),
        (lambda p: Posterior(None, {"w": torch.zeros(2, 3)}, {}).summary(), "3 draws of each chain are too few"),
        (lambda p: Posterior(None, {"w": torch.zeros(2, 9, 64)}, {}).summary(), "nothing to summarise"),
        (lambda p: Posterior(p.target, p.draws, {"sets": 2}).summary(), r"2 data sets.*of_set"),
    ],
)
def test_bad_input_is_refused(posterior: Posterior, act: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        act(posterior)


def test_a_trace_that_never_moves() -> None:
    found = summary_of({"x": ("parameter", np.ones((2, 10)))})
    assert math.isnan(found.rhat) and found.rows[0].sd == 0


# ---------------------------------------------------------------- ArviZ


def test_arviz_takes_the_draws(posterior: Posterior, data: tuple[Tensor, Tensor]) -> None:
    pytest.importorskip("arviz_base")
    tree = posterior.to_arviz(data)
    weight = tree["posterior"]["weight"]
    assert weight.dims[:2] == ("chain", "draw") and weight.shape == (CHAINS, DRAWS, 1, 3)
    np.testing.assert_array_equal(weight.values, posterior.draws["weight"].numpy())
    np.testing.assert_allclose(tree["log_likelihood"]["y"].values, posterior.log_likelihood(data).numpy(), rtol=1e-6)
    attrs = tree["posterior"].attrs
    assert attrs["method"] == "isgd" and attrs["inference_library"] == "isosgd"
    assert json.loads(attrs["warmup"]) == [{"settled": True}]
    only = posterior.to_arviz(parameters=["likelihood.*"])
    assert list(only["posterior"].data_vars) == ["likelihood.scale"] and "log_likelihood" not in only.children


def test_arviz_has_every_group(posterior: Posterior, data: tuple[Tensor, Tensor]) -> None:
    pytest.importorskip("arviz_base")
    chains = [{"weight": 0.1, "likelihood.scale": 0.2}] * CHAINS
    tree = Posterior(posterior.target, posterior.draws, {"temperature": 0.5, "rates": chains}).to_arviz(data)
    stats, (_, y) = tree["sample_stats"], data
    assert stats["rate"].dims == ("chain", "draw", "layer") and float(stats["rate"].sel(layer="weight")[0, 0]) == 0.1
    assert float(stats["temperature"].min()) == 0.5
    likely = tree["log_likelihood"]["y"]
    np.testing.assert_allclose(stats["loss"], -likely.mean(likely.dims[2:]), rtol=1e-5)
    np.testing.assert_array_equal(tree["observed_data"]["y"].values, y.numpy())
    simulated = tree["posterior_predictive"]["y"]
    assert simulated.shape == (CHAINS, DRAWS, *y.shape)
    assert float(abs(simulated - simulated.mean()).max()) > 0
    assert "loss" not in posterior.to_arviz()["sample_stats"].data_vars


def test_arviz_judges_them_as_we_do(posterior: Posterior) -> None:
    pytest.importorskip("arviz_base")
    pytest.importorskip("xarray_einstats")
    stats = pytest.importorskip("arviz_stats")
    tree = posterior.to_arviz()
    ours = {row.name: row for row in posterior.summary().rows}
    table = stats.summary(tree, round_to="none")
    theirs = table.loc["likelihood.scale"]
    assert theirs["r_hat"] == pytest.approx(ours["likelihood.scale"].rhat, rel=1e-3)  # it keeps float32
    assert theirs["ess_bulk"] == pytest.approx(ours["likelihood.scale"].ess_bulk, rel=1e-2)


def test_half_precision_goes_to_arviz(generator: torch.Generator) -> None:
    pytest.importorskip("arviz_base")
    draws = {"w": torch.randn(2, 10, generator=generator).bfloat16()}
    assert Posterior(None, draws, {}).to_arviz()["posterior"]["w"].dtype == np.float32


def test_a_parameter_called_rate_and_attributes_of_netcdf(generator: torch.Generator) -> None:
    pytest.importorskip("arviz_base")
    draws = {"rate": torch.randn(1, 10, 3, generator=generator)}
    info = {"rates": [{"a": 0.1, "b": 0.2}], "complete": True}
    tree = Posterior(None, draws, info).to_arviz()
    assert tree["posterior"]["rate"].shape == (1, 10, 3) and "layer" not in tree["posterior"]["rate"].dims
    assert tree["sample_stats"]["rate"].dims == ("chain", "draw", "layer")
    # A file of netCDF has no type for truth values.
    assert not any(isinstance(value, bool) for value in tree["posterior"].attrs.values())
    assert tree["posterior"].attrs["complete"] == 1


def test_without_arviz_the_extra_is_named(posterior: Posterior, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"isosgd\[arviz\]"):
        posterior.to_arviz()


# ---------------------------------------------------------------- TensorBoard


def test_tensorboard_reads_the_log(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with diagnostics.Log(tmp_path / "tb") as log:
        assert not (tmp_path / "tb").exists()  # nothing before the first entry
        for step in range(3):
            log.step(step, torch.tensor([1.0 + step, math.inf]), {"fc": torch.tensor([0.1, 0.3])}, first_chain=4)
    events = reader.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss/chain 4", "rate/fc"}
    assert [(e.step, e.value) for e in events.Scalars("loss/chain 4")] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert events.Scalars("rate/fc")[0].value == pytest.approx(0.2)


def test_without_tensorboard_the_extra_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"isosgd\[tensorboard\]"):
        diagnostics.Log(tmp_path)


def test_a_known_scale_is_no_parameter(generator: torch.Generator) -> None:
    net = nn.Linear(2, 1)
    draws = {name: torch.randn(2, 10, *p.shape, generator=generator) for name, p in net.named_parameters()}
    found = Posterior(Target.from_module(net, likelihoods.Gaussian(1.0)), draws, {}).summary()
    assert all(row.kind == "parameter" and "scale" not in row.name for row in found.rows)
