"""Gradients in mean units are those of the log joint density, the Jacobian of positive parameters included."""

import math
from typing import Any

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

from isosgd import Target, likelihoods, priors

F64 = torch.float64


def mlp(inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def regression(n: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=F64), torch.randn(n, dtype=F64)


def line(params: dict[str, Tensor], batch: Any) -> Tensor:
    """A straight line with unknown slope and noise, as a user would write it."""
    x, y = batch
    return -0.5 * ((y - x @ params["slope"]) / params["sigma"]).square() - params["sigma"].log()


LINE_PRIOR = {"slope": priors.Normal(10.0), "sigma": priors.HalfNormal(1.0)}
LINE_START = {"slope": torch.zeros(3, dtype=F64), "sigma": torch.tensor(1.5, dtype=F64)}


def line_target(**options: Any) -> Target:
    return Target(**{"log_likelihood": line, "prior": LINE_PRIOR, "positive": ["sigma"], "init": LINE_START} | options)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize(
    "prior",
    [
        None,
        priors.Normal(0.4),
        priors.Laplace(),
        priors.Flat(),
        priors.HierarchicalNormal(),
        priors.HierarchicalNormal(priors.LogNormal(), per="all"),
        {"*.weight": priors.HierarchicalNormal(priors.Exponential(), per="tensor"), "*": priors.StudentT()},
        lambda params: -params["0.weight"].square().sum().log(),
    ],
    ids=lambda value: "callable" if callable(value) and not hasattr(value, "describe") else repr(value),
)
@pytest.mark.parametrize(
    "likelihood",
    ["gaussian", "student_t", likelihoods.Gaussian(0.3)],
    ids=lambda value: "callable" if callable(value) and not hasattr(value, "describe") else repr(value),
)
def test_gradient_is_autograd_of_the_whole_loss(prior: Any, likelihood: Any) -> None:
    target = Target.from_module(mlp().double(), likelihood, prior)
    free = target.initial()
    for x in free.values():
        x.data += 0.1 * torch.randn_like(x)
    batch, n = regression(), 200
    loss, grads = target.gradient(free, batch, n)
    expected = -target.log_likelihood(free, batch).mean() - target.log_prior(free) / n
    assert not loss.requires_grad
    torch.testing.assert_close(loss, -target.log_likelihood(free, batch).mean().detach())
    for found, wanted in zip(grads, torch.autograd.grad(expected, list(free.values())), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_gradient_on_all_data_is_that_of_the_log_joint_over_minus_n() -> None:
    """The user's own formula in natural parameters, with the Jacobian written out."""
    target, (x, y) = line_target(), regression()
    free = target.initial()
    sigma = free["sigma"].exp()
    joint = line({"slope": free["slope"], "sigma": sigma}, (x, y)).sum() + free["sigma"]
    joint = joint - 0.5 * (free["slope"] / 10).square().sum() - 0.5 * sigma.square()
    expected = [-g / len(x) for g in torch.autograd.grad(joint, list(free.values()))]
    torch.testing.assert_close(target.gradient(free, (x, y), len(x))[1], expected)


def test_gradients_that_autograd_shares_are_not_spoilt() -> None:
    """The likelihood of a + b gives one tensor as gradient of both; a sum gives an expanded one."""
    target = Target(
        lambda p, batch: (p["a"] + p["b"]).sum() * batch,
        {"a": priors.Normal(1.0), "b": priors.Normal(2.0)},
        init={"a": torch.ones(3), "b": torch.ones(3)},
    )
    _, (a, b) = target.gradient(target.initial(), torch.ones(4), 2)
    torch.testing.assert_close(a, torch.full((3,), -1 + 1 / 2))
    torch.testing.assert_close(b, torch.full((3,), -1 + 1 / 8))


def test_parameters_the_likelihood_does_not_use_feel_the_prior_only() -> None:
    target = Target(lambda p, batch: p["a"] * batch, priors.Normal(), init={"a": 1.0, "unused": torch.ones(2)})
    _, (_, unused) = target.gradient(target.initial(), torch.ones(4), 10)
    torch.testing.assert_close(unused, torch.full((2,), 0.1))
    constant = Target(lambda p, batch: 0 * batch, priors.Normal(), init={"a": 1.0})
    _, (a,) = constant.gradient(constant.initial(), torch.ones(4), 10)
    torch.testing.assert_close(a, torch.tensor(0.1))


def test_gradient_works_where_gradients_are_off() -> None:
    target = line_target()
    free = target.initial()
    batch = regression()
    with torch.no_grad():
        found = target.gradient(free, batch, 5)[1]
    torch.testing.assert_close(found, target.gradient(free, batch, 5)[1])


def test_log_joint_maps_over_chains() -> None:
    target = Target.from_module(mlp().double(), "gaussian", priors.HierarchicalNormal())
    starts = [target.initial() for _ in range(3)]
    for start in starts:
        for x in start.values():
            x.data += 0.1 * torch.randn_like(x)
    batch = regression()

    def loss(free: dict[str, Tensor]) -> Tensor:
        return -target.log_likelihood(free, batch).mean() - target.log_prior(free) / 50

    target.check(starts[0], batch)
    stacked = {name: torch.stack([start[name].detach() for start in starts]) for name in starts[0]}
    grads = torch.vmap(torch.func.grad(loss))(stacked)
    for i, start in enumerate(starts):
        for name, wanted in zip(start, target.gradient(start, batch, 50)[1], strict=True):
            torch.testing.assert_close(grads[name][i], wanted)


@pytest.mark.long
def test_log_joint_compiles_without_a_break() -> None:
    target = Target.from_module(mlp().double(), "gaussian")
    free, batch = target.initial(), regression()
    expected = target.log_likelihood(free, batch).sum() + target.log_prior(free)

    @torch.compile(backend="eager", fullgraph=True)
    def joint(free: dict[str, Tensor]) -> Tensor:
        return target.log_likelihood(free, batch).sum() + target.log_prior(free)

    torch.testing.assert_close(joint(free), expected)


# ------------------------------------------------------------------------------------------------ positive parameters


def test_density_of_the_logarithm_integrates_to_one() -> None:
    for prior in (priors.HalfNormal(0.7), priors.HalfCauchy(2.0), priors.LogNormal(), priors.Exponential(0.3)):
        target = Target(lambda p, batch: batch, prior, positive="s", init={"s": torch.tensor(1.0, dtype=F64)})

        def density(u: float, target: Target = target) -> float:
            return target.log_prior({"s": torch.tensor(u, dtype=F64)}).exp().item()

        total, error = integrate.quad(density, -40, 40, points=[-2, 0, 2], limit=200)
        assert total == pytest.approx(1.0, abs=max(1e-6, 10 * error))


def test_constrain_and_unconstrain_are_inverse_and_take_leading_dimensions() -> None:
    target = line_target()
    free = {"slope": torch.randn(4, 2, 3), "sigma": torch.randn(4, 2)}
    natural = target.constrain(free)
    assert (natural["sigma"] > 0).all()
    assert natural["slope"] is free["slope"]
    torch.testing.assert_close(target.unconstrain(natural), free)


def test_positive_takes_patterns() -> None:
    start = {"sigma_a": 1.0, "sigma_b": 2.0, "w": -1.0}
    target = Target(lambda p, batch: batch, priors.Normal(), positive=["sigma_*"], init=start)
    free = target.initial()
    assert free["sigma_b"].item() == pytest.approx(math.log(2))
    assert free["w"].item() == -1.0
