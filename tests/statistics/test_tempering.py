"""What is sampled at a temperature where scales of the prior are sampled too: the likelihood alone is tempered."""

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid

from isosgd import Posterior, Target, priors, sample

# Of many chains one may look unsettled by chance.
pytestmark = pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")
DIM, NUM_DATA, CHAINS, DRAWS = 8, 200, 128, 15
SPREAD = 1.0  # of the logarithm of the scale, before any data
BIAS = 0.02  # of a variance, that the steps of a minibatch sampler may leave


def problem() -> tuple[Target, torch.Tensor]:
    """``y ~ N(w, I)``, ``w ~ N(0, s^2)``, ``log s ~ N(log .3, 1)``; the data tell s from zero."""
    g = torch.Generator().manual_seed(0)
    y = torch.randn(NUM_DATA, DIM, generator=g)
    y = y - y.mean(0) + 0.3 * torch.linspace(-1.5, 1.5, DIM)

    def log_likelihood(params, batch):
        return -0.5 * (batch[0] - params["w"]).square().sum(-1)

    prior = priors.HierarchicalNormal(hyper=priors.LogNormal(0.3, SPREAD), per="all")
    return Target(log_likelihood, prior, init={"w": torch.zeros(DIM)}), y


def known(y: torch.Tensor, temperature: float) -> tuple[dict[str, float], torch.Tensor]:
    """Moments under ``likelihood^(1/T) * prior``, and the mean of w; w is integrated out by hand, log s on a grid."""
    noise, mean = temperature / NUM_DATA, y.mean(0).double().numpy()
    log_s = np.linspace(np.log(0.3) - 8, np.log(0.3) + 8, 20_001)
    total = np.exp(2 * log_s)[:, None] + noise
    log_p = (-0.5 * mean**2 / total - 0.5 * np.log(total)).sum(1) - 0.5 * ((log_s - np.log(0.3)) / SPREAD) ** 2
    p = np.exp(log_p - log_p.max())
    p /= trapezoid(p, log_s)
    centre = mean * (1 - noise / total)
    square = centre**2 + noise * (1 - noise / total)
    first = float(trapezoid(p * log_s, log_s))
    means = trapezoid(p[:, None] * centre, log_s, axis=0)
    expected = {
        "log s": first,
        "log s, variance": float(trapezoid(p * (log_s - first) ** 2, log_s)),
        "w, last": float(trapezoid(p * centre[:, -1], log_s)),
        "w, variance": float(trapezoid(p * square.sum(1), log_s) - (means**2).sum()),
    }
    return expected, torch.as_tensor(means)


def compare(posterior: Posterior, expected: dict[str, float], means: torch.Tensor, most: float = 4.0) -> None:
    """Means over draws of each chain, against what is known: chains are independent, so they tell the error."""
    log_s, w = posterior.draws["prior.scale"].double().log(), posterior.draws["w"].double()
    found = {
        "log s": log_s,
        "log s, variance": (log_s - expected["log s"]).square(),
        "w, last": w[..., -1],
        "w, variance": (w - means).square().sum(-1),
    }
    for name, x in found.items():
        each = x.mean(1)
        error = float(each.std()) / len(each) ** 0.5
        slack = BIAS * abs(expected[name]) if name != "log s" else BIAS
        assert abs(float(each.mean()) - expected[name]) < most * error + slack, (name, each.mean(), error, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_the_likelihood_alone_is_tempered(temperature):
    target, y = problem()
    posterior = sample(
        target,
        (y,),
        chains=CHAINS,
        batch_size=50,
        draws=DRAWS,
        warmup=1500,
        temperature=temperature,
        progress=False,
        compile=False,
    )
    compare(posterior, *known(y, temperature))
    assert "likelihood" in posterior.info["density"]


def test_the_likelihood_alone_is_tempered_on_all_data():
    target, y = problem()
    posterior = sample(
        target,
        (y,),
        chains=CHAINS,
        batch_size="all",
        draws=DRAWS,
        warmup=1000,
        temperature=0.1,
        progress=False,
        compile=False,
    )
    compare(posterior, *known(y, 0.1))


@pytest.mark.long
@pytest.mark.parametrize(("tempered", "weight"), [("both", 1.0), ("likelihood", 0.1)])
def test_what_is_tempered_can_be_said(tempered, weight):
    """``y ~ N(w, I)``, ``w ~ N(0, .1^2)``: variances under ``(likelihood * prior^weight)^(1/T)``."""
    _, y = problem()
    temperature, precision = 0.1, 100.0
    target = Target(
        lambda params, batch: -0.5 * (batch[0] - params["w"]).square().sum(-1),
        priors.Normal(precision**-0.5),
        init={"w": torch.zeros(DIM)},
    )
    posterior = sample(
        target, (y,), chains=CHAINS, batch_size=50, draws=DRAWS, warmup=1500, temperature=temperature,
        tempered=tempered, progress=False, compile=False,
    )  # fmt: skip
    total = NUM_DATA + weight * precision
    mean, variance = y.mean(0).double() * NUM_DATA / total, temperature / total
    w = posterior.draws["w"].double()
    for found, expected, slack in (
        (w[..., -1].mean(1), mean[-1], 0.0),
        ((w - mean).square().mean((1, 2)), torch.tensor(variance), BIAS * variance),
    ):
        error = float(found.std()) / len(found) ** 0.5
        assert abs(float(found.mean() - expected)) < 4 * error + slack, (found.mean(), expected, error)
