"""What a target needs to know before a chain starts: N, start values, names; and that bad ones are refused."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

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


# ------------------------------------------------------------------------------------------------ N


def test_num_data_comes_from_the_user_then_from_the_data() -> None:
    data = regression(12)
    loader = DataLoader(TensorDataset(*data), batch_size=5, drop_last=True)
    assert line_target().resolve_num_data(data) == 12
    assert line_target().resolve_num_data(loader) == 10  # those that are ever visited: the order is fixed
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
