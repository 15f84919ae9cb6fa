"""Alpha-stable noise: tail index and scale come back from synthetic noise, and the nearest Gaussian is the nearest."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize
from torch import Tensor

from isosgd.noise import AlphaStable, join_halves
from isosgd.noise.stable import TailMeter, fit_from_logs, log_abs, match_gaussian, matched_variance

ALPHAS = [2.0, 1.8, 1.5, 1.2, 1.0]
SIGMAS = 4.5


def fit(samples: Tensor, block: int = 10) -> tuple[Tensor, Tensor]:
    """Tail index and scale of stable samples along dimension 0, of which whole blocks are used."""
    usable = samples[: samples.shape[0] // block * block]
    sums = usable.reshape(-1, block, *usable.shape[1:]).sum(1)
    return fit_from_logs(log_abs(usable).mean(0), log_abs(sums).mean(0), block)


def stable_noise(alpha: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Chambers, Mallows and Stuck (1976): symmetric stable numbers of scale 1."""
    u = math.pi * (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5)
    w = -torch.log1p(-torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.sin(alpha * u) / u.cos() ** (1 / alpha) * (torch.cos((1 - alpha) * u) / w) ** ((1 - alpha) / alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_synthetic_noise_has_its_characteristic_function(alpha: float, generator: torch.Generator) -> None:
    x = stable_noise(alpha, (50_000,), generator)
    for t in (0.3, 1.0, 2.0):
        waves = torch.cos(t * x)
        z = (waves.mean() - math.exp(-(t**alpha))) / (waves.std() / math.sqrt(len(x)))
        assert abs(float(z)) < SIGMAS


@pytest.mark.parametrize("alpha", ALPHAS)
def test_tail_index_and_scale_are_recovered_within_five_percent(alpha: float, generator: torch.Generator) -> None:
    found, scale = fit(0.3 * stable_noise(alpha, (400_000,), generator), block=100)
    assert abs(float(found) / alpha - 1) < 0.05
    assert abs(float(scale) / 0.3 - 1) < 0.05


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_online_estimate_recovers_them_for_each_parameter(alpha: float, generator: torch.Generator) -> None:
    """The median over 200 parameters, of which each has a standard error of about 4%."""
    estimator, c = AlphaStable(block=10, blocks=200), 2.0
    state = estimator.init(torch.zeros(200))
    for seen, d in enumerate(c * stable_noise(alpha, (2000, 200), generator)):
        estimator.update([state], [d.float()], seen)
    assert abs(float(state["alpha"].median()) / alpha - 1) < 0.05
    expected = (c / match_gaussian(alpha)) ** 2
    assert abs(float(state["variance"].median()) / expected - 1) < 0.1  # 5% of c


def test_the_online_estimate_is_the_fit_of_its_blocks(generator: torch.Generator) -> None:
    noise = torch.randn(40, 3, generator=generator)
    estimator = AlphaStable(block=4, blocks=5, momentum=0.25)
    state = estimator.init(noise[0])
    for seen, d in enumerate(noise):
        assert estimator.ready(seen) == (seen >= 20)
        estimator.update([state], [d], seen)
    alphas, scales = zip(*(fit(part, block=4) for part in (noise[:20], noise[20:])), strict=True)
    torch.testing.assert_close(state["alpha"], 0.25 * alphas[0] + 0.75 * alphas[1])
    first, second = (matched_variance(a, c) for a, c in zip(alphas, scales, strict=True))
    torch.testing.assert_close(state["variance"], 0.25 * first + 0.75 * second)


def test_an_estimate_started_anew_forgets_unfinished_blocks(generator: torch.Generator) -> None:
    """A sampler starts its count again in each window; half a block from before must not leak into the next."""
    noise = torch.randn(27, 3, generator=generator)
    estimator = AlphaStable(block=4, blocks=5)
    state = estimator.init(noise[0])
    for seen, d in enumerate(noise[:7]):
        estimator.update([state], [100.0 * d], seen)
    for seen, d in enumerate(noise[7:]):  # seen = 0 again
        estimator.update([state], [d], seen)
    alpha, scale = fit(noise[7:], block=4)
    torch.testing.assert_close(state["alpha"], alpha)
    torch.testing.assert_close(state["variance"], matched_variance(alpha, scale))


def test_a_drifting_gradient_fakes_heavy_tails_and_centring_mends_it(generator: torch.Generator) -> None:
    examples = 2.0 + torch.randn(4000, 100, 8, generator=generator)  # mean 2, Gaussian noise of scale 0.35
    (g,), (d,) = join_halves([examples[..., :4].mean(2)], [examples[..., 4:].mean(2)])
    assert float(fit(g)[0].median()) < 1.05
    assert float(fit(d)[0].median()) > 1.95


# ------------------------------------------------------------------------------------------------ the nearest Gaussian


def nearest_gaussian(alpha: float) -> float:
    """1 / sigma of the Gaussian whose density is nearest in l2 to a stable one of scale 1, by Parseval."""

    def distance(sigma: float) -> float:
        def gap(t: float) -> float:
            return (math.exp(-0.5 * (sigma * t) ** 2) - math.exp(-(t**alpha))) ** 2

        return sum(integrate.quad(gap, a, b, limit=200)[0] for a, b in [(0, 1), (1, 10), (10, np.inf)])

    return 1.0 / optimize.minimize_scalar(distance, bounds=(0.5, 3.0), method="bounded", options={"xatol": 1e-7}).x


@pytest.mark.parametrize("alpha", [2.0, 1.9, 1.7, 1.5, 1.3, 1.1, 1.0, 0.8, 0.6, 0.5])
def test_the_matched_gaussian_is_the_nearest_in_l2(alpha: float) -> None:
    assert abs(match_gaussian(alpha) - nearest_gaussian(alpha)) < 1e-3


def test_matched_variance_interpolates_and_scales() -> None:
    alpha = torch.tensor([2.0, 1.2345, 1.0, 0.3])
    expected = torch.tensor([(3.0 / match_gaussian(float(a))) ** 2 for a in alpha])
    torch.testing.assert_close(matched_variance(alpha, torch.full((4,), 3.0)), expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(matched_variance(torch.tensor(2.0), torch.tensor(3.0)), torch.tensor(18.0))


# ------------------------------------------------------------------------------------------------ one index for a group


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.0])
def test_the_tail_meter_pools_a_group(alpha: float, generator: torch.Generator) -> None:
    """Parameters of different scale have one tail index; those without noise are left out."""
    meter, scales = TailMeter(block=10), torch.logspace(-3, 3, 400)
    for d in stable_noise(alpha, (200, 400), generator).float():
        meter.update([d * scales, torch.zeros(5)])
    assert abs(meter.tail_index() / alpha - 1) < 0.05


def test_the_tail_meter_knows_nothing_before_a_whole_block() -> None:
    meter = TailMeter(block=3)
    meter.update([torch.ones(2)])
    assert math.isnan(meter.tail_index())
    silent = TailMeter(block=1)
    silent.update([torch.zeros(2)])
    assert math.isnan(silent.tail_index())


@pytest.mark.parametrize("alpha", [0.2, 2.1, math.nan])
def test_an_impossible_tail_index_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha = .* is outside \[0.3, 2.0\]"):
        match_gaussian(alpha)
