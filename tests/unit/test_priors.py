"""Densities against scipy, closed-form gradients and curvatures against autograd, and every refusal."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from isosgd import Target, priors
from isosgd.target import Prior

POSITIVE = [
    priors.HalfNormal(0.7),
    priors.HalfCauchy(1.3),
    priors.LogNormal(0.5, sigma=0.8),
    priors.Exponential(2.5),
]
REAL = [
    priors.Normal(0.6),
    priors.Normal({"*.weight": 0.3, "*": 2.0}),
    priors.FanInNormal(1.5),
    priors.Laplace(0.4),
    priors.StudentT(3.0, scale=0.5),
    priors.StudentT(scale={"a.*": 0.5, "b.bias": 1.0, "b.*": 3.0}),
    priors.Flat(),
    priors.PerParameter({"a.*": priors.Laplace(2.0), "*.bias": priors.Flat(), "*": priors.StudentT(5.0)}),
    priors.PerParameter({"a.*": priors.HierarchicalNormal(), "b.*": priors.HierarchicalNormal(name="b.scale")}),
    priors.PerParameter({"a.weight": priors.Relevance(priors.HalfNormal(2.0)), "*": priors.HierarchicalNormal()}),
    *(
        priors.HierarchicalNormal(hyper, per=per, fan_in=fan_in)  # type: ignore[arg-type]
        for hyper, per, fan_in in zip(
            POSITIVE, ["all", "layer", "tensor", "layer"], [True, False, True, True], strict=True
        )
    ),
]


def network() -> dict[str, Tensor]:
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4, 3, 3), "b.bias": (2,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def with_extras(prior: Prior, params: dict[str, Tensor]) -> dict[str, Tensor]:
    extras = {name: torch.rand_like(extra.value) + 0.3 for name, extra in prior.extra(params).items()}
    return params | extras


def assert_grad_is_autograd(prior: Prior, params: dict[str, Tensor]) -> None:
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    value = prior.log_prob(leaves)
    assert value.shape == ()
    if value.requires_grad:
        expected = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    else:
        expected = tuple(torch.zeros_like(x) for x in leaves.values())
    found = prior.grad(params)
    assert list(found) == list(params) or set(found) == set(params)
    for name, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prior", REAL, ids=repr)
def test_gradient_of_a_prior_is_that_of_autograd(prior: Prior) -> None:
    params = with_extras(prior, network())
    assert_grad_is_autograd(prior, params)
    assert_grad_is_autograd(prior.resolve(params), params)
    torch.testing.assert_close(prior.resolve(params).log_prob(params), prior.log_prob(params))


@pytest.mark.parametrize("prior", POSITIVE, ids=repr)
def test_gradient_of_a_positive_prior_is_that_of_autograd(prior: Prior) -> None:
    assert_grad_is_autograd(prior, {"s": torch.rand(5, dtype=torch.float64) * 3 + 0.05})


@pytest.mark.parametrize(
    ("prior", "reference"),
    [
        (priors.Normal(0.6), stats.norm(scale=0.6)),
        (priors.Laplace(0.4), stats.laplace(scale=0.4)),
        (priors.StudentT(3.0, scale=0.5), stats.t(3.0, scale=0.5)),
        (priors.HalfNormal(0.7), stats.halfnorm(scale=0.7)),
        (priors.HalfCauchy(1.3), stats.halfcauchy(scale=1.3)),
        (priors.LogNormal(0.5, sigma=0.8), stats.lognorm(0.8, scale=0.5)),
        (priors.Exponential(2.5), stats.expon(scale=2.5)),
    ],
    ids=lambda value: repr(value) if isinstance(value, Prior) else "",  # the same in every process
)
def test_log_density_is_scipys(prior: Prior, reference: stats.rv_continuous) -> None:
    x = torch.rand(20, dtype=torch.float64) * 4 + 0.01
    assert prior.log_prob({"x": x}).item() == pytest.approx(reference.logpdf(x.numpy()).sum(), rel=1e-10)
    if isinstance(prior, priors.PositivePrior):
        assert prior.median == pytest.approx(reference.median(), rel=1e-10)


def test_fan_in_scales_weights_and_leaves_vectors() -> None:
    params = network()
    scales = {"a.weight": 2 / math.sqrt(3), "a.bias": 2.0, "b.weight": 2 / 6, "b.bias": 2.0}
    expected = sum(stats.norm(scale=s).logpdf(params[name].numpy()).sum() for name, s in scales.items())
    assert priors.FanInNormal(2.0).log_prob(params).item() == pytest.approx(expected)


@pytest.mark.parametrize(("per", "groups"), [("all", [0, 0, 0, 0]), ("layer", [0, 0, 1, 1]), ("tensor", [0, 1, 2, 3])])
def test_hierarchical_normal_is_a_normal_given_its_scales(per: str, groups: list[int]) -> None:
    prior = priors.HierarchicalNormal(priors.HalfNormal(2.0), per=per, fan_in=False)  # type: ignore[arg-type]
    params = network()
    assert prior.extra(params)["prior.scale"].value.shape == (() if per == "all" else (max(groups) + 1,))
    full = with_extras(prior, params)
    scales = full["prior.scale"].reshape(-1)
    expected = stats.halfnorm(scale=2.0).logpdf(scales.numpy()).sum()
    for x, group in zip(params.values(), groups, strict=True):
        expected += stats.norm(scale=scales[group].item()).logpdf(x.numpy()).sum()
    assert prior.log_prob(full).item() == pytest.approx(expected)


def test_an_exact_name_goes_before_a_pattern_and_patterns_in_order() -> None:
    prior = priors.Normal({"*": 1.0, "a.*": 9.0, "a.bias": 3.0})
    assert [prior.scale_of(name) for name in ("a.bias", "a.weight")] == [3.0, 1.0]


def test_a_callable_prior_goes_through_autograd() -> None:
    def log_prob(params: dict[str, Tensor]) -> Tensor:
        return -0.5 * params["a.bias"].square().sum()

    params = network()
    prior = priors.as_prior(log_prob)
    assert_grad_is_autograd(prior, params)
    assert not prior.grad(params)["b.bias"].any()
    constant = priors.as_prior(lambda params: torch.zeros(()))
    assert not any(x.any() for x in constant.grad(params).values())


def test_what_a_callable_prior_closes_over_may_require_gradients() -> None:
    around = dict(torch.nn.Linear(2, 1).named_parameters())
    prior = priors.as_prior(lambda params: -0.5 * sum((params[k] - x).square().sum() for k, x in around.items()))  # type: ignore[arg-type, return-value]
    params = {name: torch.zeros_like(x) for name, x in around.items()}
    found = prior.grad(params)
    assert not any(x.requires_grad for x in found.values())
    torch.testing.assert_close(found["weight"], around["weight"].detach())


def test_priors_map_over_a_leading_chain_dimension() -> None:
    own = priors.as_prior(lambda params: -sum((x**4).sum() for x in params.values()))  # type: ignore[arg-type, return-value]
    for prior in (priors.FanInNormal(), priors.HierarchicalNormal(), priors.StudentT(), own):
        chains = [with_extras(prior, network()) for _ in range(3)]
        stacked = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
        resolved = prior.resolve(chains[0])
        batched = torch.vmap(resolved.grad)(stacked)
        torch.testing.assert_close(torch.vmap(resolved.log_prob)(stacked)[1], prior.log_prob(chains[1]))
        for name, x in prior.grad(chains[2]).items():
            torch.testing.assert_close(batched[name][2], x)


# ------------------------------------------------------------------------------------------------ curvature


def prior_of(prior: Prior, start: dict[str, Tensor], **options: object) -> tuple[Target, dict[str, Tensor]]:
    """The prior as a target's, and where a chain starts."""
    target = Target(lambda params, batch: batch[0], prior, init=start, **options)  # type: ignore[arg-type]
    return target, {name: x.detach() for name, x in target.initial().items()}


def check_score_and_curvature(target: Target, free: dict[str, Tensor]) -> None:
    """Against gradient and diagonal of the Hessian of the log prior over all free parameters together."""
    sizes = [x.numel() for x in free.values()]

    def log_prior(flat: Tensor) -> Tensor:
        split = torch.split(flat, sizes)
        return target.log_prior({name: s.view(x.shape) for (name, x), s in zip(free.items(), split, strict=True)})

    flat = torch.cat([x.reshape(-1) for x in free.values()])
    hessian = slope = torch.zeros_like(flat)
    if log_prior(flat.clone().requires_grad_()).requires_grad:  # a flat prior is a constant
        hessian = -torch.autograd.functional.hessian(log_prior, flat).diagonal()
        slope = torch.autograd.functional.jacobian(log_prior, flat)
    scores = target.prior_score(free)
    torch.testing.assert_close(torch.cat([scores[name].reshape(-1) for name in free]), slope)
    found = target.prior_curvature(free)
    assert [x.shape for x in found] == [x.shape for x in free.values()]
    expected = torch.where(hessian > 1e-12, hessian, slope.square())
    torch.testing.assert_close(torch.cat([x.reshape(-1) for x in found]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prior", REAL, ids=repr)
def test_score_and_curvature_are_those_of_autograd(prior: Prior) -> None:
    check_score_and_curvature(*prior_of(prior, network()))


@pytest.mark.parametrize("prior", [*POSITIVE, priors.Flat()], ids=repr)
def test_score_and_curvature_of_positive_parameters_include_the_jacobian(prior: Prior) -> None:
    start = {"s": torch.linspace(0.05, 4.0, 7, dtype=torch.float64)}
    check_score_and_curvature(*prior_of(prior, start, positive=["s"]))


@pytest.mark.parametrize("prior", REAL, ids=repr)
def test_curvatures_of_many_chains_are_those_of_each(prior: Prior) -> None:
    target, free = prior_of(prior, network())
    chains = {name: torch.stack([x + 0.3 * torch.randn_like(x) for _ in range(3)]) for name, x in free.items()}
    together = target.prior_curvature(chains, batched=True)
    for k in range(3):
        alone = target.prior_curvature({name: x[k] for name, x in chains.items()})
        torch.testing.assert_close([x[k] for x in together], alone)


def test_curvature_where_it_is_known_by_heart() -> None:
    """1/scale^2 for a normal; the squared slope 1/scale^2 for a Laplace; 0 for none; of a Student-t both, by place."""
    w, v = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    both = priors.PerParameter({"w": priors.Normal(0.5), "v": priors.Laplace(0.2)})
    target, free = prior_of(both, {"w": w, "v": v})
    assert [x.tolist() for x in target.prior_curvature(free)] == [pytest.approx([4.0, 4.0]), pytest.approx([25.0])]
    target, free = prior_of(priors.Flat(), {"w": w})
    assert target.prior_curvature(free)[0].tolist() == [0.0, 0.0]
    target, free = prior_of(priors.StudentT(1.0), {"w": torch.tensor([0.0, 3.0], dtype=torch.float64)})
    # At 0 the curvature 2, at 3 the square of the slope 2 x / (1 + x^2).
    assert target.prior_curvature(free)[0].tolist() == pytest.approx([2.0, 0.36])


def test_curvature_leaves_no_graph_behind() -> None:
    start = {"w": torch.ones(3, dtype=torch.float64, requires_grad=True)}
    (found,) = prior_of(priors.StudentT(), start)[0].prior_curvature(start)
    assert not found.requires_grad and start["w"].grad is None


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, {"*": -2.0}, {}])
@pytest.mark.parametrize("kind", [priors.Normal, priors.Laplace, priors.HalfCauchy, priors.LogNormal])
def test_a_bad_scale_is_refused(kind: type, scale: object) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        kind(scale)


def test_relevance_is_a_normal_prior_with_a_scale_for_each_column() -> None:
    weight, scale = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    found = priors.Relevance(priors.Exponential(1.0)).log_prob({"w": weight, "prior.relevance": scale})
    wanted = torch.distributions.Normal(0.0, scale / 3**0.5).log_prob(weight).sum()
    wanted += torch.distributions.Exponential(1.0).log_prob(scale).sum()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: priors.Normal("1"), TypeError, "'1'"),
        (lambda: priors.FanInNormal(-1.0), ValueError, "-1.0"),
        (lambda: priors.StudentT(0.0), ValueError, "df must be positive"),
        (lambda: priors.LogNormal(1.0, sigma=0.0), ValueError, "sigma"),
        (lambda: priors.HierarchicalNormal(priors.Normal()), TypeError, "HalfCauchy"),
        (lambda: priors.HierarchicalNormal(per="module"), ValueError, "'module'"),
        (lambda: priors.Relevance(priors.Normal()), TypeError, "HalfCauchy"),
        (lambda: priors.Relevance().log_prob(network()), ValueError, "weight of the first layer"),
        (lambda: priors.PerParameter({}), ValueError, "empty"),
        (lambda: priors.PerParameter({"w": 1.0}), TypeError, "'w'"),
        (lambda: priors.as_prior(3.0), TypeError, r"3\.0"),
        (lambda: priors.Normal({"a.*": 1.0}).log_prob(network()), ValueError, r"b\.weight"),
        (lambda: priors.PerParameter({"a.*": priors.Flat()}).resolve(network()), ValueError, r"b\.weight"),
        (lambda: priors.PerParameter({"*": priors.Flat(), "c": priors.Flat()}).resolve(network()), ValueError, "'c'"),
        (
            lambda: priors.PerParameter({"a.*": priors.HierarchicalNormal(), "b.*": priors.HierarchicalNormal()}).extra(
                network()
            ),
            ValueError,
            "name=",
        ),
        (lambda: priors.as_prior(lambda p: p["a.bias"]).log_prob(network()), ValueError, r"shape \(4,\)"),
        (lambda: priors.as_prior(lambda p: 0.0).log_prob(network()), ValueError, "scalar tensor"),
    ],
)
def test_bad_priors_are_refused(make, error, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=words):
        make()
