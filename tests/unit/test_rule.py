"""How large a Lambda that knows directions must be, and the discretisation bias that this leaves."""

import itertools
import math
from typing import Any

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov

from isosgd.geometry.rule import HIGHEST, TRACKED, Rule, allowed_rate_curvature, variance_inflation

BATCH = 10


def rule(**changes: Any) -> Rule:
    return Rule(**{"num_data": 500, "batch_size": BATCH, "temperature": 0.7, "bias": 0.02, "averaged": True, **changes})


def factor(rule: Rule, stretch: float = 1.0) -> float:
    """q of one chain."""
    return float(rule.factor(torch.tensor([stretch], dtype=torch.float64)))


def rate_curvature(rule: Rule, stretch: float = 1.0) -> float:
    ratio = torch.tensor([stretch], dtype=torch.float64)
    return float(rule.scale * ratio / rule.factor(ratio))


@pytest.mark.parametrize("averaged", [False, True])
def test_each_chain_has_a_factor_of_its_own(averaged: bool) -> None:
    own = rule(averaged=averaged)
    stretches = [0.3, 1.0, 40.0]
    together = own.factor(torch.tensor(stretches, dtype=torch.float64))
    assert together.tolist() == [factor(own, s) for s in stretches]


@pytest.mark.parametrize("averaged", [False, True])
def test_factor_grows_with_temperature_and_stretch(averaged: bool) -> None:
    temperatures = [0.0, 1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3]
    for values in (
        [factor(rule(averaged=averaged, temperature=t)) for t in temperatures],
        [factor(rule(averaged=averaged, bias=0.5), s) for s in (0.0, 0.1, 1.0, 10.0, 100.0, 1e4)],
    ):
        assert values == sorted(values) and values[-1] > 10 * values[0]


def test_noise_that_changes_may_have_a_larger_share_where_its_level_is_followed() -> None:
    few, many = {"num_data": 50, "temperature": 1.0}, {"num_data": 10_000, "temperature": 1.0}
    assert rule(**few, trackable=True).tracks_level and not rule(**few).tracks_level
    assert rule(**few, trackable=True).cover == pytest.approx(rule(**few).cover / TRACKED)
    colder = rule(num_data=25, temperature=0.5, trackable=True)  # it goes by T / N
    assert (
        colder.cover == rule(**few, trackable=True).cover
        and rule(num_data=25, temperature=1.0).cover > 3 * colder.cover
    )
    assert not rule(**few, trackable=True, full_batch=True).tracks_level  # there is none
    assert not rule(**many, trackable=True).tracks_level  # it hardly changes over so narrow a posterior
    medium = {"num_data": 400, "temperature": 1.0, "kappa": 1.25}
    assert rule(**medium).change > 1.25 and not rule(**medium, trackable=True).tracks_level  # nothing would be gained
    half = {"num_data": 150, "batch_size": 75, "temperature": 1.0, "kappa": 1.25}
    assert not rule(**half, trackable=True).tracks_level  # nor here, where heat is the bound
    for own in (medium, half):
        assert rule(**own, trackable=True).cover == rule(**own).cover
    for num_data in (20, 50, 100, 150, 200):
        own = rule(num_data=num_data, batch_size=4, temperature=1.0, kappa=1.25, trackable=True)
        assert own.tracks_level and own.cover >= 1.0  # levels scatter: noise is never more than half of Lambda
    assert rule(**many, trackable=True).cover == rule(**many).cover == 0.5 * rule().kappa


@pytest.mark.parametrize("averaged", [False, True])
def test_cold_chains_are_bound_by_the_noise_alone(averaged: bool) -> None:
    cold = rule(averaged=averaged, temperature=0.0)
    assert factor(cold) == factor(cold, 100.0) == pytest.approx(cold.kappa / (2 * BATCH))
    assert rate_curvature(cold) == 0.0


@pytest.mark.parametrize("kappa", [1.25, 2.0, 5.0])
def test_lambda_covers_the_noise_kappa_times(kappa: float) -> None:
    for t in (0.0, 1e-4, 1.0, 100.0):
        for averaged in (False, True):
            assert factor(rule(temperature=t, averaged=averaged, kappa=kappa)) >= kappa / (2 * BATCH)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("bias", [0.005, 0.02, 0.2])
def test_the_bias_is_at_most_what_is_allowed(averaged: bool, bias: float) -> None:
    for n, stretch in itertools.product((2, 10, 100, 400), (0.3, 1.0, 2.0, 8.0)):
        own = rule(averaged=averaged, bias=bias, batch_size=n)
        share = 1.0 / (2 * n * factor(own, stretch)) if averaged else 1.0
        found = variance_inflation(rate_curvature(own, stretch), share=share) - 1.0
        # With averaged innovations the rule is first order in rate * curvature, which is at most HIGHEST.
        assert 0 < found <= bias * (1 / (1 - HIGHEST / 2) if averaged else 1.0) * (1 + 1e-9), (n, stretch)
        assert rate_curvature(own, stretch) <= (HIGHEST if averaged else allowed_rate_curvature(bias)) * (1 + 1e-9)


def test_the_bounds_are_reached_where_curvature_rules() -> None:
    """Large batches of few data: noise is no bound then."""
    plain, averaged = (rule(averaged=a, batch_size=400, temperature=1.0, bias=0.3) for a in (False, True))
    assert rate_curvature(plain, 5.0) == pytest.approx(allowed_rate_curvature(0.3))
    assert rate_curvature(averaged, 5.0) == pytest.approx(HIGHEST)
    between = rule(batch_size=100)  # the bias of the gradient noise alone, in first order
    a, share = rate_curvature(between, 2.0), 1.0 / (200 * factor(between, 2.0))
    assert a < HIGHEST and share * a / 2 == pytest.approx(between.bias)


def test_averaged_innovations_allow_faster_steps() -> None:
    """With little gradient noise; and they never ask for a larger Lambda as long as HIGHEST is no bound."""
    plain, averaged = (rule(averaged=a, batch_size=200, temperature=1.0) for a in (False, True))
    assert rate_curvature(averaged, 4.0) > 2 * rate_curvature(plain, 4.0)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("a", [0.01, 0.2, 1.0, 1.9])
def test_variance_of_the_averaged_recursion_is_as_predicted(a: float, share: float) -> None:
    """``x' = (1 - a) x - rate g - (w + w_last) / 2`` as a linear system in ``(x, w_last)``, solved exactly."""
    step = [[1 - a, -0.5], [0.0, 0.0]]
    total = 2 * a  # per step, at which the variance would be 1 in continuous time
    injected, gradient = (1 - share) * total, share * total
    noise = [[gradient + injected / 4, -injected / 2], [-injected / 2, injected]]
    variance = solve_discrete_lyapunov(step, noise)[0, 0]
    assert variance == pytest.approx(variance_inflation(a, share=share), rel=1e-9)
    tensor = variance_inflation(torch.tensor(a, dtype=torch.float64), share=share)
    assert float(tensor) == pytest.approx(variance)


def test_share_of_the_bias() -> None:
    assert variance_inflation(0.4) == variance_inflation(0.4, share=1.0) == pytest.approx(1.25)
    assert variance_inflation(0.4, share=0.0) == 1.0
    assert variance_inflation(2.5, share=0.1) == math.inf
    assert torch.equal(variance_inflation(torch.tensor([0.4, 2.0]), share=0.5), torch.tensor([1.125, math.inf]))
