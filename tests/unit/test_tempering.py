"""A temperature under a prior whose scales are sampled: a small network on digits must not end at zero weights."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from isosgd import Posterior, Target, priors, sample

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # of short warm-ups


@pytest.fixture(scope="module")
def digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Half of scikit-learn's digits to train on, the other half to test."""
    load = pytest.importorskip("sklearn.datasets").load_digits
    x, y = (torch.as_tensor(part) for part in load(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).chunk(2)
    return [((x[rows] / 16).float(), y[rows]) for rows in order]


def drawn(digits: Any, **settings: Any) -> tuple[Posterior, float]:
    """Draws, and the mean negative log likelihood of their mean prediction on the other half."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    target = Target.from_module(network, "categorical", priors.HierarchicalNormal())
    posterior = sample(target, digits[0], draws=10, progress=False, compile=False, **settings)
    x, y = digits[1]
    chosen = posterior.predict(x).mean[torch.arange(len(y)), y]
    return posterior, float(-chosen.log().mean())


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.1, 0.03])
def test_tempered_digits_with_sampled_scales(digits, temperature):
    posterior, score = drawn(digits, temperature=temperature, warmup=800, keep_every=10)
    assert score < 0.2 * math.log(10)  # that of the same probability for every digit
    assert "likelihood^(1/T) * prior" in posterior.info["density"]


@pytest.mark.long
def test_tempered_digits_on_all_data(digits):
    x, y = digits[0]
    part = [(x[:400], y[:400]), digits[1]]
    _, score = drawn(part, temperature=0.1, batch_size="all", warmup=800, keep_every=10)
    assert score < 0.2 * math.log(10)


def test_fixed_scales_are_tempered_as_before():
    target = Target(lambda p, b: -0.5 * (b[0] - p["w"]) ** 2, priors.Normal(1.0), init={"w": torch.zeros(())})
    run = {"draws": 4, "keep_every": 2, "warmup": 300, "progress": False, "compile": False}
    posterior = sample(target, (torch.randn(100),), temperature=0.5, **run)
    assert posterior.info["density"].startswith("(likelihood * prior)^(1/T), T = 0.5")
    assert sample(target, (torch.randn(100),), **run).info["density"] == "likelihood * prior: the posterior"


@pytest.mark.long
def test_the_meter_reads_the_density_that_was_sampled():
    """Of the scale itself, too, though its prior is not tempered."""
    y = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(-1, 1, 8)
    prior = priors.HierarchicalNormal(hyper=priors.LogNormal(1.0, 0.5), per="all")
    target = Target(lambda p, b: -0.5 * (b[0] - p["w"]).square().sum(-1), prior, init={"w": torch.zeros(8)})
    posterior = sample(
        target, (y,), temperature=0.1, chains=64, draws=20, batch_size=50, warmup=500, keep_every=5,
        progress=False, compile=False,
    )  # fmt: skip
    found = {reading.name: reading for reading in posterior.trust((y,)).readings}
    for reading in found.values():
        assert abs(reading.temperature - 0.1) < 4 * reading.error + 0.01, reading
