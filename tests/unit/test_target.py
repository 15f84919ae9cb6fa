"""The contract: mean units, N, positive parameters and their Jacobian, and modules that stay as they are."""

import copy
import json
import math
import warnings
from typing import Any

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from isosgd.potential import Params, Target, likelihoods, priors

F64 = torch.float64


def mlp(inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def regression(n: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=F64), torch.randn(n, dtype=F64)


def line(params: Params, batch: Any) -> Tensor:
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

    def loss(free: Params) -> Tensor:
        return -target.log_likelihood(free, batch).mean() - target.log_prior(free) / 50

    target.check(starts[0], batch)
    stacked = {name: torch.stack([start[name].detach() for start in starts]) for name in starts[0]}
    grads = torch.vmap(torch.func.grad(loss))(stacked)
    for i, start in enumerate(starts):
        for name, wanted in zip(start, target.gradient(start, batch, 50)[1], strict=True):
            torch.testing.assert_close(grads[name][i], wanted)


def test_log_joint_compiles_without_a_break() -> None:
    target = Target.from_module(mlp().double(), "gaussian")
    free, batch = target.initial(), regression()
    expected = target.log_likelihood(free, batch).sum() + target.log_prior(free)

    @torch.compile(backend="eager", fullgraph=True)
    def joint(free: Params) -> Tensor:
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


# ------------------------------------------------------------------------------------------------ N


def test_num_data_comes_from_the_user_then_from_the_data() -> None:
    data = regression(12)
    loader = DataLoader(TensorDataset(*data), batch_size=5, drop_last=True)
    assert line_target().resolve_num_data(data) == 12
    assert line_target().resolve_num_data(loader) == 12
    assert line_target(num_data=100).resolve_num_data(data) == 100
    assert line_target(num_data=100).resolve_num_data(iter([data])) == 100


def test_num_data_is_never_guessed() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter([torch.zeros(3)])

    part = DataLoader(TensorDataset(*regression(12)), sampler=SubsetRandomSampler(range(4)))
    for data in (iter([regression()]), [regression()], DataLoader(Stream()), part, ()):
        with pytest.raises(ValueError, match="pass num_data="):
            line_target().resolve_num_data(data)
    with pytest.raises(ValueError, match=r"different lengths: \[3, 4\]"):
        line_target(num_data=3).resolve_num_data((torch.zeros(3), torch.zeros(4)))
    with pytest.raises(ValueError, match="no examples"):
        line_target().resolve_num_data((torch.zeros(0, 2),))


# ------------------------------------------------------------------------------------------------ starts


def test_a_start_is_new_leaf_tensors() -> None:
    target = line_target()
    first, second = target.initial(), target.initial()
    assert all(x.is_leaf and x.requires_grad for x in first.values())
    first["slope"].data += 1
    assert not second["slope"].any()
    assert not LINE_START["slope"].any()
    assert first["sigma"].item() == pytest.approx(math.log(1.5))
    assert all(x.dtype == torch.float32 for x in target.initial(dtype=torch.float32).values())


def test_a_start_may_be_given_in_part_and_as_numbers() -> None:
    free = line_target().initial({"sigma": 3.0})
    assert free["sigma"].item() == pytest.approx(math.log(3))
    assert not free["slope"].any()
    target = Target.from_module(mlp(), "gaussian", priors.HierarchicalNormal())
    free = target.initial({"likelihood.scale": 0.5, "prior.scale": torch.tensor([2.0, 3.0])}, dtype=F64)
    assert free["likelihood.scale"].item() == pytest.approx(math.log(0.5))
    assert free["prior.scale"][1].item() == pytest.approx(math.log(3))
    assert all(x.dtype == F64 for x in free.values())


def test_a_target_without_start_takes_that_of_the_chain() -> None:
    target = line_target(init=None)
    with pytest.raises(ValueError, match="pass init="):
        target.initial()
    free = target.initial(LINE_START)
    assert free["sigma"].item() == pytest.approx(math.log(1.5))
    other = line_target(init=None)  # one that has seen nothing, as after a reload
    assert other.gradient(free, regression(), 9)[0].shape == ()
    assert other.constrain(free)["sigma"].item() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("init", "error", "words"),
    [
        ({"slop": torch.zeros(3)}, ValueError, "'slop'.*slope"),
        ({"slope": torch.zeros(4)}, ValueError, r"\[4\], expected \[3\]"),
        ({"slope": torch.zeros(3, dtype=torch.int64)}, TypeError, "int64"),
        ({"slope": torch.zeros(3, dtype=torch.complex64)}, TypeError, "complex64"),
        ({"slope": torch.tensor([0.0, math.nan, 0.0])}, ValueError, "NaN"),
        ({"sigma": 0.0}, ValueError, "must be positive, its least value is 0"),
        ({"sigma": "one"}, TypeError, "got str"),
        ({"slope": torch.zeros(0)}, ValueError, "nothing to sample"),
    ],
)
def test_a_bad_start_is_refused(init: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        line_target().initial(init)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"log_likelihood": 3}, TypeError, "got 3"),
        ({"prior": None}, TypeError, "got None"),
        ({"prior": {"slope": priors.Normal()}}, ValueError, "no prior for parameter 'sigma'"),
        ({"prior": LINE_PRIOR | {"tau": priors.Flat()}}, ValueError, "'tau' fits no parameter"),
        ({"num_data": 0}, ValueError, "num_data = 0"),
        ({"num_data": -5}, ValueError, "num_data = -5"),
        ({"num_data": 10.0}, TypeError, r"10\.0"),
        ({"num_data": True}, TypeError, "True"),
        ({"positive": ["tau"]}, ValueError, "'tau', which fits no parameter"),
        ({"positive": []}, ValueError, r"positive=\['sigma'\]"),
        ({"predict": 1}, TypeError, "predict"),
        ({"init": {}}, ValueError, "no parameters"),
        ({"init": LINE_START | {"sigma": -1.0}}, ValueError, "must be positive"),
        ({"init": {"slope": torch.zeros(3).int(), "sigma": 1.0}}, TypeError, "int32"),
    ],
)
def test_a_bad_target_is_refused_when_it_is_made(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        line_target(**options)


def test_dtype_of_a_start_must_be_floating() -> None:
    with pytest.raises(TypeError, match="int64"):
        line_target().initial(dtype=torch.int64)


@pytest.mark.parametrize(
    ("returns", "error", "words"),
    [
        (lambda p, b: b[0].sum(), ValueError, r"shape \[12\], got \[\]"),
        (lambda p, b: b[1][:, None], ValueError, r"got \[12, 1\]"),
        (lambda p, b: b[1][:-1], ValueError, r"shape \[12\], got \[11\]"),
        (lambda p, b: b[1].long(), TypeError, "int64"),
        (lambda p, b: 0.0, TypeError, "float"),
        (lambda p, b: b[1] * math.nan, ValueError, "NaN for 12 of 12"),
    ],
)
def test_what_a_log_likelihood_returns_is_looked_at_once(returns: Any, error: type[Exception], words: str) -> None:
    target = line_target(log_likelihood=returns)
    with pytest.raises(error, match=words):
        target.gradient(target.initial(), regression(12), 12)


# ------------------------------------------------------------------------------------------------ modules


def test_the_users_module_stays_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before, mode = copy.deepcopy(model.state_dict()), model.training
    with pytest.warns(UserWarning, match=r"1 \(BatchNorm1d\)"):
        target = Target.from_module(model, "gaussian")
    free = target.initial()
    batch = (torch.randn(8, 3), torch.randn(8))
    for _ in range(3):
        for x, g in zip(free.values(), target.gradient(free, batch, 8)[1], strict=True):
            x.data -= 0.1 * g
    target.predictive(free, batch[0])
    assert model.training == mode
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in model.parameters())
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_a_target_does_not_follow_what_happens_to_the_module_later() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    target = Target.from_module(model, "gaussian")
    free, batch = target.initial(), (torch.randn(8, 3), torch.randn(8))
    loss = target.gradient(free, batch, 8)[0]
    model.train()
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(target.gradient(target.initial(), batch, 8)[0], loss)


def test_output_is_that_of_the_module() -> None:
    model = mlp()
    x = torch.randn(7, 3)
    target = Target.from_module(model, likelihoods.Gaussian(0.5))
    pieces = target.predictive(target.initial(), x)
    torch.testing.assert_close(pieces["mean"], model(x).detach())
    torch.testing.assert_close(pieces["variance"], torch.full((7, 1), 0.25))


def test_which_parameters_are_sampled() -> None:
    model = mlp()
    everything = ["0.weight", "0.bias", "2.weight", "2.bias"]

    def names(model: nn.Module, sampled: Any) -> list[str]:
        return list(Target.from_module(model, "categorical", sampled=sampled).initial())

    assert names(model, "all") == everything
    assert names(model, "last_layer") == ["2.weight", "2.bias"]
    assert names(nn.Linear(2, 2), "last_layer") == ["weight", "bias"]
    assert names(model, lambda name, p: p.ndim == 1) == ["0.bias", "2.bias"]
    model[0].requires_grad_(False)
    assert names(model, "all") == ["2.weight", "2.bias"]
    assert names(model, lambda name, p: True) == everything


def test_frozen_parameters_are_shared_and_move_to_the_type_of_the_sampled() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    target = Target.from_module(model, "gaussian", sampled="last_layer")
    copied = target._log_likelihood._module[0]  # type: ignore[attr-defined]
    assert copied.weight.data_ptr() == model[0].weight.data_ptr()
    x = torch.randn(6, 3)
    for dtype in (torch.float32, F64, torch.float32):
        mean = target.predictive(target.initial(dtype=dtype), x.to(dtype))["mean"]
        assert mean.dtype == dtype
        torch.testing.assert_close(mean.float(), model(x).detach())


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    model = Tied().double()
    target = Target.from_module(model, likelihoods.Gaussian(1.0), priors.Flat())
    free = target.initial()
    assert list(free) == ["first.weight", "first.bias", "second.bias"]
    x, y = torch.randn(5, 3, dtype=F64), torch.randn(5, 3, dtype=F64)
    _, grads = target.gradient(free, (x, y), 5)
    loss = 0.5 * (model(x) - y).square().sum(1).mean()
    torch.testing.assert_close(grads, list(torch.autograd.grad(loss, list(model.parameters()))))


def test_recurrent_and_attention_models_work() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.rnn(x)[0]
            return self.head(self.attend(hidden, hidden, hidden)[0][:, -1])

    model = Last()
    target = Target.from_module(model, "categorical", priors.Flat())
    x, y = torch.randn(5, 6, 3), torch.randint(2, (5,))
    _, grads = target.gradient(target.initial(), (x, y), 5)
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    torch.testing.assert_close(grads, list(expected))


def test_several_inputs_and_a_callable_likelihood() -> None:
    model = nn.Bilinear(2, 3, 1)
    target = Target.from_module(model, lambda output, y: -(output[:, 0] - y).abs())
    a, b, y = torch.randn(5, 2), torch.randn(5, 3), torch.randn(5)
    free = target.initial()
    torch.testing.assert_close(target.log_likelihood(free, (a, b, y)), -(model(a, b)[:, 0] - y).abs())
    torch.testing.assert_close(target.predictive(free, (a, b)), model(a, b).detach())


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.1), nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.RReLU(), nn.MultiheadAttention(4, 2, dropout=0.1)],
)
def test_random_layers_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4), layer)
    with pytest.raises(ValueError, match=rf"1 \({type(layer).__name__}\).*model\.eval\(\)"):
        Target.from_module(model, "gaussian")
    Target.from_module(model.eval(), "gaussian")


def test_randomness_written_by_hand_is_found_too() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 1)

    target = Target.from_module(Noisy(3, 1), "gaussian")
    with pytest.raises(ValueError, match="different outputs for the same input"):
        target.gradient(target.initial(), (torch.zeros(4, 3), torch.zeros(4)), 4)


def test_batch_norm_warns_only_where_it_looks_at_the_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Target.from_module(model, "categorical")
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        Target.from_module(nn.BatchNorm1d(4, track_running_stats=False).eval(), "categorical")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Target.from_module(lambda x: x, "gaussian"), TypeError, "function"),
        (lambda: Target.from_module(mlp(), "normal"), ValueError, "'normal'.*gaussian"),
        (lambda: Target.from_module(mlp(), 3), TypeError, "got 3"),
        (lambda: Target.from_module(mlp(), "gaussian", sampled="first"), ValueError, "'first'"),
        (lambda: Target.from_module(mlp(), "gaussian", sampled=lambda n, p: False), ValueError, "none of the 4"),
        (lambda: Target.from_module(mlp().requires_grad_(False), "gaussian"), ValueError, "requires_grad"),
        (lambda: Target.from_module(mlp().requires_grad_(False), "gaussian", sampled="last_layer"), ValueError, "none"),
        (lambda: Target.from_module(nn.ReLU(), "gaussian"), ValueError, "none of the 0"),
        (lambda: Target.from_module(nn.LazyLinear(2), "gaussian"), ValueError, "no shape yet"),
        (lambda: Target.from_module(nn.Linear(2, 1, dtype=torch.complex64), "gaussian"), TypeError, "complex64"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_bad_modules_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(4, 3), "got a Tensor"),
        ((torch.zeros(4, 3),), "got a tuple of 1"),
        ((torch.zeros(4, 3), torch.tensor([0, 1, 2, 5])), "label 5, but the output has 3 classes"),
        ((torch.full((4, 3), math.nan), torch.zeros(4).long()), "input 0 has 12 values that are NaN"),
        ((torch.zeros(4, 3), torch.zeros(4)), r"y\.long"),
    ],
)
def test_bad_batches_are_refused(batch: Any, words: str) -> None:
    target = Target.from_module(mlp(outputs=3), "categorical")
    with pytest.raises(ValueError, match=words):
        target.gradient(target.initial(), batch, 4)


def test_check_looks_at_every_target() -> None:
    y = torch.zeros(500)
    y[-1] = 2
    target = Target.from_module(mlp(), "bernoulli")
    with pytest.raises(ValueError, match="got 2"):
        target.check(target.initial(), (torch.zeros(500, 3), y))


# ------------------------------------------------------------------------------------------------ names


def test_layers_are_modules_and_scales_stand_alone() -> None:
    target = Target.from_module(mlp(), "gaussian", priors.HierarchicalNormal())
    assert target.layers(target.initial()) == {
        "0.weight": "0",
        "0.bias": "0",
        "2.weight": "2",
        "2.bias": "2",
        "likelihood.scale": "likelihood.scale",
        "prior.scale": "prior.scale",
    }
    line = line_target()
    assert line.layers(line.initial()) == {"slope": "slope", "sigma": "sigma"}


def test_own_parameters_keep_to_their_own_priors() -> None:
    """A wide prior on the weights must not touch the noise scale."""
    model = mlp().double()
    prior = priors.HalfNormal(0.2)
    target = Target.from_module(model, likelihoods.Gaussian(prior), priors.Flat())
    u = torch.tensor(-0.3, dtype=F64)
    free = target.initial() | {"likelihood.scale": u}
    torch.testing.assert_close(target.log_prior(free), prior.log_prob({"": u.exp()}) + u)


def test_names_that_clash_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both sample 'likelihood\.scale'"):
        Target.from_module(mlp(), "gaussian", priors.HierarchicalNormal(name="likelihood.scale"))


@pytest.mark.parametrize("name", ["likelihood", "prior"])
def test_a_module_may_not_take_the_name_of_a_sampled_scale(name: str) -> None:
    model = mlp()
    scale = nn.Module()
    scale.scale = nn.Parameter(torch.tensor(1.0))
    model.add_module(name, scale)
    with pytest.raises(ValueError, match=rf"'{name}\.scale'"):
        Target.from_module(model, "gaussian", priors.HierarchicalNormal())


def test_description_is_plain_json() -> None:
    for target in (
        line_target(num_data=7),
        line_target(init=None),
        Target.from_module(mlp(), "student_t", priors.HierarchicalNormal(), sampled="last_layer"),
        Target.from_module(mlp(), lambda output, y: output[:, 0] * y, lambda params: params["0.bias"].sum()),
    ):
        text = json.dumps(target.describe(), allow_nan=False)
        assert "prior" in text
    described = Target.from_module(mlp(), "gaussian", sampled="last_layer").describe()
    assert described["parameters"] == {"2.weight": [1, 5], "2.bias": [1], "likelihood.scale": []}
    assert described["frozen"] == ["0.weight", "0.bias"]


def test_predictions_of_a_users_density() -> None:
    with pytest.raises(ValueError, match="pass predict="):
        line_target().predictive(line_target().initial(), torch.zeros(2, 3))
    target = line_target(predict=lambda params, x: x @ params["slope"] + params["sigma"])
    torch.testing.assert_close(
        target.predictive(target.initial(), torch.zeros(2, 3).double()), torch.full((2,), 1.5, dtype=F64)
    )
