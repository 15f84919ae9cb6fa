"""What a user sees of a run from a trained network: where warnings point, what is said of the draws that are kept."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import SamplingWarning, Target, sample

Data = tuple[Tensor, Tensor]


def trained(steps: int = 100) -> tuple[nn.Sequential, Data, Data]:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=made)
    y = (x.sum(1) + 0.5 * torch.randn(200, generator=made) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, (x[:100], y[:100]), (x[100:], y[100:])


def test_a_warning_names_the_line_that_called() -> None:
    model, data, _ = trained()
    target = Target.from_module(model, "categorical", prior="empirical")
    with pytest.warns(SamplingWarning) as said:
        short: dict[str, Any] = {"warmup": 100, "draws": 2, "keep_every": 1, "structure": "layer", "compile": False}
        sample(target, data, starts=[model], temperature=0.01, progress=False, **short)
    assert {warning.filename for warning in said} == {__file__}


@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_a_short_time_still_gives_draws_or_the_starts() -> None:
    model, data, held_out = trained()
    target = Target.from_module(model, "categorical", prior="empirical")
    posterior = sample(target, data, starts=[model], held_out=held_out, max_seconds=0.01, progress=False, compile=False)
    assert posterior.num_draws >= 1
    assert posterior.info["temperature_choice"]["reason"]
    assert posterior.against_start(*held_out).starts == 1


@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_the_reason_says_what_weight_the_start_has() -> None:
    model, data, held_out = trained(steps=3)
    target = Target.from_module(model, "categorical", prior="empirical")
    short: dict[str, Any] = {"warmup": 200, "draws": 8, "keep_every": 5, "ladder": [1e-2], "compile": False}
    posterior = sample(target, data, starts=[model], held_out=held_out, progress=False, **short)
    reason = posterior.info["temperature_choice"]["reason"]
    assert posterior.info["temperature"] > 0, reason
    assert posterior.info["draws"] == posterior.num_draws
    share = float(reason.partition("the starts have a weight of ")[2].partition(" ")[0])
    assert posterior.info["from_start"] / posterior.num_draws == pytest.approx(share, abs=0.02)


def test_predictions_of_a_transformer_do_not_warn_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(24, 2)).eval()
    x, y = torch.randn(20, 3, 8), torch.arange(20) % 2
    target = Target.from_module(model, "categorical")
    posterior = sample(target, (x, y), method="sgld", lr=1e-4, draws=3, keep_every=1, warmup=0, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert posterior.predict(x).mean.shape == (20, 2)


def test_held_out_inputs_of_another_shape_are_refused() -> None:
    model, data, (x, y) = trained(steps=1)
    target = Target.from_module(model, "categorical", prior="empirical")
    with pytest.raises(
        ValueError, match=r"held_out of shapes \[\[100, 1\], \[100\]\] cannot be predicted by the start"
    ):
        sample(target, data, starts=[model], held_out=(x[:, :1], y), progress=False)
