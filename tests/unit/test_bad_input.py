"""Bad input is refused at once, by an error that names the value and the mend."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from isosgd import ISGD, PRESETS, SGHMC, SGLD, VSGD, DivergedError, Target, priors, sample
from isosgd.noise import AlphaStable, MovingAverage, join_halves, make_estimator
from isosgd.noise.model import summarise

X = torch.linspace(-1, 1, 40)[:, None]
Y = 2 * X


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    return -0.5 * (y - x * params["slope"]).square().sum(-1)


def target(**options: Any) -> Target:
    return Target(log_likelihood, priors.Normal(1.0), **{"init": {"slope": torch.zeros(1)}, **options})


def with_row(tensor: Tensor, row: int, value: float) -> Tensor:
    changed = tensor.clone()
    changed[row] = value
    return changed


def generated() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that can be gone through only once."""
    yield from zip(X.split(10), Y.split(10), strict=True)


def try_sample(**changes: Any) -> None:
    settings = {"target": target(), "data": (X, Y), "draws": 2, "keep_every": 2, "warmup": 200, "progress": False}
    sample(**(settings | changes))


# ------------------------------------------------------------------------------------------------ sample

BAD_DATA: dict[str, tuple[Callable[[], dict[str, Any]], Any, str]] = {
    "no N": (
        lambda: {"data": [(X, Y)]},
        ValueError,
        "number of examples is not known from data of type list; pass num_data=",
    ),
    "N below a batch": (
        lambda: {"target": target(num_data=5), "batch_size": 10},
        ValueError,
        "num_data = 5 is smaller than a batch of 10 examples: it is the number of examples in the whole data set",
    ),
    "N below a loader's batch": (
        lambda: {"target": target(num_data=5), "data": [(X, Y)]},
        ValueError,
        "num_data = 5 is smaller than a batch of 40 examples",
    ),
    "empty loader": (lambda: {"data": DataLoader(TensorDataset(X[:0]))}, ValueError, "data has no examples"),
    "empty list": (
        lambda: {"target": target(num_data=40), "data": []},
        ValueError,
        "data yields no batches.*pass tensors",
    ),
    "empty tuple": (lambda: {"data": ()}, ValueError, r"data is an empty tuple; pass the tensors"),
    "no rows": (lambda: {"data": (X[:0], Y[:0])}, ValueError, "data holds no examples"),
    "exhausted": (
        lambda: {"target": target(num_data=40), "data": generated()},
        ValueError,
        "data yields no batches: .*iterator that can be gone through only once; pass tensors",
    ),
    "NaN": (
        lambda: {"data": (X, with_row(Y, 7, math.nan))},
        ValueError,
        "tensor 1 of data is not finite in row 7: drop or impute",
    ),
    "inf": (
        lambda: {"data": (with_row(X, 3, math.inf), Y)},
        ValueError,
        "tensor 0 of data is not finite in row 3: drop or impute",
    ),
    "NaN in a loader": (
        lambda: {"data": DataLoader(TensorDataset(X, with_row(Y, 7, math.nan)), batch_size=10)},
        (ValueError, DivergedError),
        "check init and data|look at the data",
    ),
    "NaN in a later batch": (
        lambda: {"data": DataLoader(TensorDataset(X, with_row(Y, 27, math.nan)), batch_size=10)},
        DivergedError,
        "The minibatch has values that are NaN or infinite: mend or drop those",
    ),
    "a label in a later batch": (
        lambda: {
            "target": Target.from_module(torch.nn.Linear(1, 2), "categorical", num_data=40),
            "data": [(X[:20], torch.zeros(20).long()), (X[20:], torch.full((20,), 7))],
        },
        ValueError,
        "y has the label 7, but the output has 2 classes",
    ),
    "narrow inputs in a later batch": (
        lambda: {
            "target": Target.from_module(torch.nn.Linear(2, 1), "gaussian", num_data=40),
            "data": [(X.expand(-1, 2), Y), (X, Y)],
        },
        ValueError,
        r"Linear cannot take inputs of shape \[40, 1\]",
    ),
    "a data set": (lambda: {"data": TensorDataset(X, Y)}, TypeError, r"pass DataLoader\(data, batch_size=64, shuffle"),
    "a file": (lambda: {"data": "data.csv"}, TypeError, "data of type str is neither a tuple or dict of tensors nor"),
    "lists": (
        lambda: {"data": (X.tolist(), Y.tolist())},
        TypeError,
        r"whose first part, a list, holds no tensor: pass tensors or arrays, such as \(np.asarray",
    ),
    "lengths": (
        lambda: {"data": (X, Y[:39])},
        ValueError,
        r"shapes \[\(40, 1\), \(39, 1\)\]: their first dimensions, the examples, must be the same",
    ),
    "shapes": (
        lambda: {"target": Target.from_module(torch.nn.Linear(1, 1), "gaussian"), "data": (X, torch.zeros(40, 3))},
        ValueError,
        r"shape \(1, 1\) and y has shape \(1, 3\); they must agree.*reshape y",
    ),
    "a number": (
        lambda: {"target": target(num_data=40), "data": 3.0},
        TypeError,
        "data of type float is neither a tuple or dict of tensors nor",
    ),
    "batch_size 1": (lambda: {"batch_size": 1}, ValueError, "batch_size = 1 must be an integer of at least 2"),
    "batch_size 2.0": (lambda: {"batch_size": 2.0}, ValueError, "batch_size = 2.0 must be an integer of at least 2"),
    "batch_size above N": (
        lambda: {"batch_size": 41},
        ValueError,
        "batch_size = 41 is larger than the 40 examples; choose at most 40",
    ),
    "batch_size of a loader": (
        lambda: {"data": DataLoader(TensorDataset(X, Y), batch_size=10), "batch_size": 8},
        ValueError,
        "batch_size = 8 has no effect on an iterable of batches: set it in the DataLoader",
    ),
    "batches of one": (
        lambda: {"data": DataLoader(TensorDataset(X, Y), batch_size=1)},
        ValueError,
        "batch.*1 example.*at least 2|batch_size.*2",
    ),
}


@pytest.mark.parametrize(("changes", "error", "words"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_data(changes: Callable[[], dict[str, Any]], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        try_sample(**changes())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"target": torch.nn.Linear(1, 1)},
            TypeError,
            "target of type Linear: pass an isosgd.Target; Target.from_module",
        ),
        (
            {"method": "adam"},
            ValueError,
            r"method = 'adam' is unknown; choose one of \[.*'isgd', .*'sghmc', 'sgld', .*'vsgd'\]",
        ),
        ({"draws": 0}, ValueError, "draws = 0 must be an integer of at least 1"),
        ({"draws": 2.5}, ValueError, "draws = 2.5 must be an integer of at least 1"),
        ({"draws": "many"}, ValueError, "draws = 'many' must be an integer of at least 1 or 'auto'"),
        ({"chains": 0}, ValueError, "chains = 0 must be an integer of at least 1"),
        ({"keep_every": 0}, ValueError, "keep_every = 0 must be an integer of at least 1 or 'auto'"),
        ({"warmup": -1}, ValueError, "warmup = -1 must be an integer of at least 0 or 'auto'"),
        ({"warmup": "long"}, ValueError, "warmup = 'long' must be an integer of at least 0 or 'auto'"),
        ({"warmup": 0}, ValueError, r"warmup = 0 leaves no rate: give lr \(or lam\).*or let warmup be 'auto'"),
        (
            {"warmup": 0, "method": "sgld", "lr": 0.1, "keep_every": "auto"},
            ValueError,
            "keep_every='auto' is measured in the warm-up: give a number",
        ),
        (
            {"temperature": -1.0},
            ValueError,
            "temperature = -1.0 must be positive and finite, or 'auto'; 1 is the Bayesian posterior",
        ),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0 must be positive and finite"),
        ({"temperature": math.nan}, ValueError, "temperature = nan must be positive and finite"),
        ({"temperature": math.inf}, ValueError, "temperature = inf must be positive and finite"),
        (
            {"init": {"slop": torch.zeros(1)}},
            ValueError,
            r"init has 'slop', which is no parameter.*they are \['slope'\]",
        ),
        ({"init": {"slope": torch.zeros(2)}}, ValueError, r"init\['slope'\] has shape \[2\], expected \[1\]"),
        (
            {"init": {"slope": torch.zeros(1, dtype=torch.int64)}},
            TypeError,
            "slope.* is torch.int64; only real floating-point",
        ),
        ({"init": {"slope": torch.tensor([math.nan])}}, ValueError, "slope.* NaN or infinite; mend"),
        ({"preset": "alpha-b"}, ValueError, r"preset = 'alpha-b' is not one of the I-SGD rows \['G-b'"),
        ({"preset": "G-b", "method": "sgld"}, ValueError, "preset = 'G-b' is not one of the I-SGD rows"),
        ({"learning_rate": 0.1}, TypeError, "method 'isgd' has no option 'learning_rate'; it takes scheme, .*bias, "),
        ({"method": "vsgd", "lr": 0.1}, TypeError, "method 'vsgd' has no option 'lr'; it takes per_layer, bias, "),
        ({"method": "sgld", "lam": 0.1}, TypeError, "method 'sgld' has no option 'lam'; it takes lr, "),
        ({"compile": "yes"}, ValueError, "compile = 'yes' is unknown; choose 'auto', True or False"),
        ({"method": "igsd"}, ValueError, r"'vsgd'\]; did you mean 'isgd'\\?"),
        ({"structure": "low_rank"}, ValueError, "did you mean 'lowrank'\\?"),
        ({"preset": "window"}, ValueError, "did you mean 'windowed'\\?"),
        ({"noise": "Paired"}, ValueError, "did you mean 'paired'\\?"),
        ({"scheme": "B"}, ValueError, "did you mean 'b'\\?"),
        ({"temprature": 0.5}, TypeError, "method 'isgd' has no option 'temprature'.*did you mean 'temperature'\\?"),
        ({"n_draws": 5}, TypeError, "did you mean 'draws'\\?"),
        ({"bias": "small"}, TypeError, "bias = 'small' must be a number"),
        ({"temperature": "1"}, ValueError, "temperature = '1' must be positive"),
        ({"device": "gpu"}, ValueError, "device = 'gpu' cannot be used .*leave it out, or choose one that torch has"),
        ({"device": "meta"}, ValueError, "device = 'meta' holds no numbers"),
        (
            {"init": torch.nn.Linear(1, 1)},
            TypeError,
            r"init is a Linear: pass its state_dict\(\), or .*starts=\[model\]",
        ),
        ({"init": "model.pt"}, TypeError, "init gives a str: pass start values by name"),
        (
            {
                "target": Target.from_module(torch.nn.Linear(1, 1), "gaussian"),
                "draws": "auto",
                "held_out": torch.zeros(9, 2),
            },
            ValueError,
            r"Linear cannot take inputs of shape \[9, 2\]",
        ),
        ({"held_out": 0.1}, ValueError, "held_out= goes with draws='auto'.*, or with starts="),
        ({"ladder": [0.1]}, ValueError, r"ladder = \[0.1\]: temperatures are tried where there is starts="),
        ({"transform": "flip"}, TypeError, r"transform = 'flip' must be a function \(batch, generator\) -> batch"),
        (
            {"transform": lambda batch: batch},
            TypeError,
            r"is called as transform\(batch, generator\), which it does not",
        ),
        ({"transform": lambda batch, _: batch[0]}, ValueError, "batch of 2 tensors into one: it must return"),
        (
            {"transform": lambda batch, _: (batch[0][1:], batch[1][1:])},
            ValueError,
            r"of 20 examples .* lengths \[19, 19\]",
        ),
        ({"noise": "student"}, ValueError, "noise = 'student' is unknown; choose 'gaussian', 'paired', 'alpha'"),
        ({"scheme": "d"}, ValueError, "scheme = 'd' is unknown; choose 'a', 'b', 'c', 'windowed' or 'online'"),
        (
            {"structure": "round"},
            ValueError,
            r"structure = 'round' is unknown; choose 'auto', one of \['diagonal', 'full',",
        ),
        ({"noise_every": 0}, ValueError, "noise_every = 0 must be an integer of at least 1"),
        (
            {"preset": "alpha-a", "warmup": 50},
            ValueError,
            "50 steps are too few for a first noise estimate: give a longer warmup=",
        ),
    ],
    ids=lambda item: ", ".join(item) if isinstance(item, dict) else "",
)
def test_bad_settings_of_sample(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        try_sample(**changes)


def test_a_bad_init_is_found_when_the_target_knows_no_parameters() -> None:
    with pytest.raises(ValueError, match="parameters are not known; pass init="):
        try_sample(target=Target(log_likelihood, priors.Normal(1.0)))


# ------------------------------------------------------------------------------------------------ samplers

EVERY = [ISGD, SGLD, SGHMC, VSGD]


def params(dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    return [("a.weight", torch.zeros(3, 2, dtype=dtype)), ("a.bias", torch.zeros(3, dtype=dtype))]


COMMON = [
    ({"num_data": 0}, "num_data = 0 must be the number of examples, an integer of at least 1"),
    ({"num_data": 10.0}, "num_data = 10.0 must be the number of examples"),
    ({"batch_size": 200}, "batch_size = 200 exceeds num_data = 100"),
    ({"temperature": -0.5}, "temperature = -0.5 must be finite and not negative"),
    ({"temperature": math.nan}, "temperature = nan must be finite and not negative"),
    ({"temperature": "cold"}, "temperature = 'cold' must be finite and not negative"),
    ({"weight_decay": [1e-4]}, r"weight_decay = \[0.0001\] must be finite and not negative"),
    ({"bias": 0.0}, r"bias = 0.0 must lie in \(0, 1\)"),
    ({"bias": 1.0}, r"bias = 1.0 must lie in \(0, 1\)"),
    ({"bias": math.nan}, r"bias = nan must lie in \(0, 1\)"),
    ({"track_every": 0}, "track_every = 0 must be at least 1"),
    ({"noise": "cauchy"}, "noise = 'cauchy' is unknown; choose 'gaussian', 'paired', 'alpha'"),
    ({"momentum": 1.0}, r"momentum = 1.0 of the noise estimate must lie in \[0, 1\)"),
    ({"momentum": -0.1}, r"momentum = -0.1 of the noise estimate must lie in \[0, 1\)"),
    ({"chains": 2}, r"chains = 2, but a parameter of group 'a' has shape \(3, 2\)"),
    ({"innovations": "uniform"}, "innovations = 'uniform' is unknown; choose"),
]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("settings", "words"), COMMON, ids=lambda item: repr(item) if isinstance(item, dict) else "")
def test_bad_settings_of_every_sampler(kind: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(params(), **{"num_data": 100, **settings})


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], r"params is empty: pass model.parameters\(\)"),
        (
            [{"name": "a", "params": [torch.zeros(2)]}, {"name": "a", "params": [torch.zeros(2)]}],
            "two groups have the name 'a': give each group a name of its own",
        ),
        ([{"temperature": 0.5}], "group '0' has no 'params': give"),
        ([torch.zeros(2, dtype=torch.int64)], "group '0' holds a tensor of dtype torch.int64: only real floating"),
        (
            params(torch.int64),
            "group 'a' holds a tensor of dtype torch.int64: only real floating-point.*leave the others out",
        ),
        (params(torch.complex64), "group 'a' holds a tensor of dtype torch.complex64: only real floating-point"),
        ([{"params": [torch.zeros(2)], "temperature": -1.0}], "temperature = -1.0 must be"),
        ([{"params": [torch.zeros(2)], "num_data": 0}], "num_data = 0 must be"),
    ],
    ids=[
        "none",
        "one name",
        "no params",
        "unnamed integers",
        "integers",
        "complex",
        "group temperature",
        "group num_data",
    ],
)
def test_bad_parameters(kind: Any, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(given, num_data=100)


@pytest.mark.parametrize("kind", EVERY)
def test_a_generator_must_live_where_the_parameters_do(kind: Any) -> None:
    elsewhere = [("w", torch.zeros(2, device="meta"))]
    with pytest.raises(ValueError, match="the generator lives on cpu, the parameters on meta; make it there"):
        kind(elsewhere, num_data=100, generator=torch.Generator())


@pytest.mark.parametrize("kind", EVERY)
def test_num_data_is_never_guessed(kind: Any) -> None:
    with pytest.raises(TypeError, match="num_data"):
        kind(params())


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (ISGD, {"scheme": "e"}, "scheme = 'e' is unknown; choose 'a', 'b', 'c', 'windowed' or 'online'"),
        (ISGD, {"structure": "diag"}, "structure = 'diag' is unknown; choose 'auto', one of"),
        (ISGD, {"correction": "full"}, "correction = 'full' is unknown; choose 'diagonal' or 'outer'"),
        (ISGD, {"summary": "median"}, "summary = 'median' is unknown; choose 'max', 'sum', 'mean' or 'top'"),
        (ISGD, {"correction": "outer", "noise": "gaussian"}, "use it with noise='paired', or choose 'diagonal'"),
        (ISGD, {"correction": "outer", "noise": "alpha"}, "use it with noise='paired', or choose 'diagonal'"),
        (ISGD, {"lam": 0.0}, "lam = 0.0 must be positive; leave it out"),
        (ISGD, {"lam": math.nan}, "lam = nan must be positive; leave it out"),
        (ISGD, {"warmup": -1}, "warmup = -1 must not be negative"),
        (SGLD, {"lr": -0.1}, "lr = -0.1 must be positive; leave it out"),
        (SGLD, {"lr": 0.1, "decay": 1.5}, r"decay = 1.5 must lie in \[0, 1\]; 0 keeps the rate fixed"),
        (SGLD, {"lr": 0.1, "offset": 0.0}, "offset = 0.0 must be positive"),
        (SGHMC, {"lr": 0.0}, "lr = 0.0 must be positive; leave it out"),
        (SGHMC, {"friction": 0.0}, r"friction = 0.0 must lie in \(0, 1\]"),
        (SGHMC, {"friction": 1.5}, r"friction = 1.5 must lie in \(0, 1\]"),
    ],
)
def test_bad_settings_of_one_sampler(kind: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(params(), num_data=100, **settings)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"preset = 'G-a' is unknown; choose one of .*{sorted(PRESETS)[0]}"):
        ISGD.preset("G-a", params(), num_data=100)


def backward(kind: Any, **settings: Any) -> Any:
    weight = torch.zeros(2, requires_grad=True)
    sampler = kind([("w", weight)], num_data=100, **settings)
    weight.grad = torch.ones(2)
    return sampler


@pytest.mark.parametrize("kind", EVERY)
def test_a_step_without_a_rate_says_how_to_get_one(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"finds its own rate in a loop.*pass batch_size=n.*or a rate of your own"):
        backward(kind).step()


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_a_rate_cannot_come_from_nothing(kind: Any) -> None:
    with pytest.raises(ValueError, match="has no rate and no curvature to set it from: pass lr, or use"):
        backward(kind).adapt()


@pytest.mark.parametrize("kind", EVERY)
def test_adapting_before_any_noise_says_what_is_missing(kind: Any) -> None:
    with pytest.raises(RuntimeError, match=r"no gradient noise was seen for group 'w': pass step\(noise="):
        backward(kind).adapt([1.0])


def test_a_step_without_gradients_says_so() -> None:
    sampler = SGLD([("w", torch.zeros(2, requires_grad=True))], num_data=100, lr=0.1)
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient: call backward\(\) before step\(\)"):
        sampler.step()


@pytest.mark.parametrize(
    "noise", [[], [torch.ones(2)] * 2, [torch.ones(3)]], ids=["too few", "too many", "wrong shape"]
)
def test_noise_vectors_must_match_the_parameters(noise: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="noise"):
        backward(ISGD, lam=1.0).step(noise=noise)


def test_a_foreign_state_is_refused() -> None:
    sampler = backward(SGLD, lr=0.1)
    with pytest.raises(ValueError, match="this state has no 'generator': it was not saved by an isosgd sampler"):
        sampler.load_state_dict(torch.optim.SGD([torch.zeros(2)], lr=0.1).state_dict())


# ------------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_estimator("normal"), "noise = 'normal' is unknown; choose 'gaussian', 'paired', 'alpha'"),
        (lambda: make_estimator("paired", 1.5), r"momentum = 1.5 of the noise estimate must lie in \[0, 1\)"),
        (lambda: MovingAverage(momentum=1.5), r"momentum = 1.5.* must lie in \[0, 1\)"),
        (lambda: AlphaStable(momentum=-1.0), r"momentum = -1.0.* must lie in \[0, 1\)"),
        (lambda: AlphaStable(block=1), "block = 1 must be at least 2"),
        (lambda: AlphaStable(blocks=0), "blocks = 0 must be at least 1"),
        (
            lambda: summarise([torch.ones(2)], "median"),
            "summary = 'median' is unknown; choose 'max', 'sum', 'mean' or 'top'",
        ),
        (lambda: join_halves([torch.ones(1)], [torch.ones(1)], (0, 3)), r"sizes = \(0, 3\).*use a batch of 2 or more"),
    ],
)
def test_bad_noise_settings(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_bias_from_numpy_is_a_number() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert ISGD([parameter], num_data=10, batch_size=5, bias=np.float32(0.25)).bias == 0.25
