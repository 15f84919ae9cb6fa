"""The way down: a fit to the data first, and what it is for."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd import Target
from isosgd.chain import descent


def wave(rows: int = 100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(rows, 1, generator=generator) - 1
    return x, torch.sin(4 * x) + 0.1 * torch.randn(rows, 1, generator=generator)


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


def loss_after(warmup: int, net: nn.Module, **settings: object) -> tuple[float, int]:
    """Mean loss of the last window of a warm-up of two chains, and the gradients of the way down."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", isosgd.SamplingWarning)  # so short a warm-up hardly settles
        found = isosgd.sample(
            Target.from_module(net, "gaussian"), wave(), draws=2, chains=2, batch_size=20, warmup=warmup, keep_every=1,
            structure="layer", compile=False, progress=False, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
    reports = found.info["warmup"]
    return max(report["loss"][0] for report in reports), reports[0]["descent"]


def test_a_network_fits_the_data_before_it_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few data the posterior density has a mode where weights are small and all is noise, far from its mass."""
    fitted, spent = loss_after(2400, network())
    monkeypatch.setattr(descent, "FIT_STEPS", 0)
    dull, less = loss_after(2400, network())
    assert dull > 0.7  # a straight line, and noise of about .6
    assert fitted < 0.0
    assert spent - less <= 700


def test_what_fits_already_is_left_where_it_is() -> None:
    """A trained network: the fit may go on, but must not end at a lower density."""
    net, (x, y) = network(), wave()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(2000):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    assert loss_after(2400, net)[0] < 0.0


def test_a_fit_that_leads_away_is_undone() -> None:
    """Rows that are said ten thousand times over by the prior: the likelihood alone would go far off."""

    def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return -0.5 * (batch[0] - params["w"]).square().sum(-1)

    data = (torch.full((64, 3), 5.0) + torch.randn(64, 3, generator=torch.Generator().manual_seed(0)),)
    target = Target(log_likelihood, isosgd.priors.Normal(1e-3), init={"w": torch.zeros(3)})
    found = isosgd.sample(target, data, draws=400, chains=4, batch_size=8, seed=0, progress=False)
    mean, precision = float(found.draws["w"].mean()), 64 + 1e6
    assert abs(mean - 64 * 5 / precision) < 5e-4 and math.isfinite(mean)
    assert abs(float(found.draws["w"].std()) * math.sqrt(precision) - 1) < 0.1
