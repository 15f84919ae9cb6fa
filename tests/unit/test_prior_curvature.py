"""The curvature of priors, which Lambda needs where data say little, against autograd."""

import math

import pytest
import torch
from torch import Tensor

from isosgd import Target
from isosgd.potential import priors

F64 = torch.float64
SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2, 2)}
POSITIVE = [priors.HalfNormal(0.7), priors.HalfCauchy(1.3), priors.LogNormal(0.5, sigma=0.8), priors.Exponential(2.5)]
REAL = [
    priors.Normal(0.6),
    priors.Normal({"*.weight": 0.3, "*": 2.0}),
    priors.FanInNormal(1.5),
    priors.Laplace(0.4),
    priors.StudentT(3.0, scale=0.5),
    priors.Flat(),
    priors.PerParameter({"a.*": priors.Laplace(2.0), "*": priors.StudentT(5.0)}),
    priors.HierarchicalNormal(priors.HalfCauchy(2.0)),
    priors.HierarchicalNormal(priors.LogNormal(0.5), per="tensor", fan_in=False),
    priors.HierarchicalNormal(priors.Exponential(0.5), per="all"),
]


def check_curvature(target: Target) -> None:
    """Against the diagonal of the Hessian of the log prior over all free parameters together."""
    free = {name: x.detach() for name, x in target.initial().items()}
    sizes = [x.numel() for x in free.values()]

    def log_prior(flat: Tensor) -> Tensor:
        split = torch.split(flat, sizes)
        return target.log_prior({name: s.view(x.shape) for (name, x), s in zip(free.items(), split, strict=True)})

    flat = torch.cat([x.reshape(-1) for x in free.values()])
    value = log_prior(flat.clone().requires_grad_())
    constant = not value.requires_grad  # a flat prior
    zero = torch.zeros_like(flat)
    hessian = zero if constant else -torch.autograd.functional.hessian(log_prior, flat).diagonal()
    slope = zero if constant else torch.autograd.functional.jacobian(log_prior, flat)
    expected = torch.where(hessian > 1e-12, hessian, slope.square())
    found = target.prior_curvature(free)
    assert [x.shape for x in found] == [x.shape for x in free.values()]
    torch.testing.assert_close(torch.cat([x.reshape(-1) for x in found]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prior", REAL, ids=repr)
def test_prior_curvature_is_that_of_autograd(prior: priors.Prior) -> None:
    g = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=g, dtype=F64) for name, shape in SHAPES.items()}
    check_curvature(Target(lambda params, batch: batch[0], prior, init=start))


@pytest.mark.parametrize("prior", [*POSITIVE, priors.Flat()], ids=repr)
def test_prior_curvature_of_positive_parameters_includes_the_jacobian(prior: priors.Prior) -> None:
    start = {"s": torch.linspace(0.05, 4.0, 7, dtype=F64)}
    check_curvature(Target(lambda params, batch: batch[0], prior, positive=["s"], init=start))


def test_prior_curvature_where_it_is_known_by_heart() -> None:
    """1/scale^2 for a normal; the squared slope 1/scale^2 for a Laplace; 0 for none; one scale for each layer."""
    start = {"w": torch.tensor([3.0, -1.0], dtype=F64), "v": torch.tensor([2.0], dtype=F64)}
    prior = {"w": priors.Normal(0.5), "v": priors.Laplace(0.2)}
    w, v = Target(lambda p, b: b[0], prior, init=start).prior_curvature(start)
    assert w.tolist() == pytest.approx([4.0, 4.0]) and v.tolist() == pytest.approx([25.0])
    (flat,) = Target(lambda p, b: b[0], priors.Flat(), init={"w": start["w"]}).prior_curvature({"w": start["w"]})
    assert flat.tolist() == [0.0, 0.0]
    heavy = Target(lambda p, b: b[0], priors.StudentT(1.0), init={"w": start["w"]})
    (tails,) = heavy.prior_curvature({"w": torch.tensor([0.0, 3.0], dtype=F64)})
    assert tails.tolist() == pytest.approx(
        [2.0, 0.36]
    )  # at 0 the curvature 2, at 3 the square of the slope 2 x/(1+x^2)


def test_prior_curvature_leaves_no_graph_behind() -> None:
    start = {"w": torch.ones(3, dtype=F64, requires_grad=True)}
    (found,) = Target(lambda p, b: b[0], priors.StudentT(), init=start).prior_curvature(start)
    assert not found.requires_grad and start["w"].grad is None and math.isfinite(float(found.sum()))
