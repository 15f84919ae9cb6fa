"""Examples that a posterior cannot score or predict are refused by an error that names them and the mend."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isosgd import Posterior, SamplingWarning, Target, sample

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


@pytest.fixture(scope="module")
def posterior() -> Posterior:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    draws = {name: x.detach().expand(2, 4, *x.shape).clone() for name, x in model.named_parameters()}
    return Posterior(Target.from_module(model, "categorical"), draws, {}, starts=[model])


def with_nan(row: int) -> Tensor:
    changed = X.clone()
    changed[row, 1] = math.nan
    return changed


SCORED: dict[str, tuple[Any, Any, str]] = {
    "label above": (X, Y + 3, "y has the label 3, but the output has 3 classes: labels go from 0 to 2"),
    "label below": (X, Y - 1, "y has the label -1"),
    "labels as floats": (X, Y.float(), r"needs labels as integers.*use y.long\(\)"),
    "one-hot": (X, nn.functional.one_hot(Y), r"one-hot rows into labels by y.argmax\(1\)"),
    "fewer labels": (X, Y[:-1], "the inputs have 12 examples and y has 11"),
    "a list of names": (X, ["a"] * 12, "y is of type list: pass a tensor or an array"),
    "too narrow": (X[:, :4], Y, r"Linear cannot take inputs of shape \[12, 4\]"),
    "double precision": (X.double(), Y, r"inputs are torch.float64, the parameters torch.float32: pass x.to\(torch"),
    "NaN": (with_nan(7), Y, "input 0 has 1 values that are NaN or infinite, in row 7 first"),
    "none at all": (X[:0], Y[:0], "no examples"),
    "no y": (X, None, "needs y, what is to be predicted"),
}


@pytest.mark.parametrize("caller", ["against_start", "calibrated", "log_predictive", "log_likelihood"])
@pytest.mark.parametrize(("x", "y", "words"), SCORED.values(), ids=SCORED)
def test_examples_that_cannot_be_scored(posterior: Posterior, caller: str, x: Any, y: Any, words: str) -> None:
    if caller.startswith("log"):
        if y is None or not len(x):
            return  # without examples there are no densities
        with pytest.raises((ValueError, TypeError), match=words):
            getattr(posterior, caller)((x, y))
        return
    with pytest.raises((ValueError, TypeError), match=words):
        getattr(posterior, caller)(x, y)


PREDICTED: dict[str, tuple[Any, str]] = {
    "NaN": (with_nan(3), "input 0 has 1 values that are NaN or infinite, in row 3 first"),
    "infinite": (X / 0, "NaN or infinite, in row 0 first"),
    "too narrow": (X[:, :4], r"Linear cannot take inputs of shape \[12, 4\]"),
    "double precision": (X.double(), r"pass x.to\(torch.float32\)"),
    "integers": (X.long(), r"pass x.to\(torch.float32\)"),
    "with y": ((X, Y), r"Linear cannot take inputs of shape \[12, 5\], \[12\]"),
    "a loader": (DataLoader(TensorDataset(X, Y)), "inputs of type DataLoader: pass tensors or arrays.*torch.cat"),
    "lists": (X.tolist(), "inputs of type list: pass tensors or arrays"),
    "a file": ("new.csv", "inputs of type str"),
    "none": (None, "inputs of type NoneType"),
    "one without a dimension of examples": (X[0], r"cannot take inputs of shape \[5\]|a single one is x\[None\]"),
}


@pytest.mark.parametrize("caller", ["predict", "simulate"])
@pytest.mark.parametrize(("x", "words"), PREDICTED.values(), ids=PREDICTED)
def test_inputs_that_cannot_be_predicted(posterior: Posterior, caller: str, x: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        getattr(posterior, caller)(x)


def test_no_inputs_are_no_predictions(posterior: Posterior) -> None:
    assert posterior.predict(X[:0]).mean.shape == (0, 3)
    assert posterior.simulate(X[:0]).shape == (2, 4, 0)
    assert posterior.log_likelihood((X[:0], Y[:0])).shape == (2, 4, 0)


def test_a_loader_is_scored_as_its_examples_are(posterior: Posterior) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    assert posterior.against_start(loader) == posterior.against_start(X, Y)
    wide = posterior.at_softmax_temperature(3.0)
    assert wide.calibrated(loader).softmax_temperature == wide.calibrated(X, Y).softmax_temperature
    with pytest.raises(ValueError, match="against_start has no examples"):
        posterior.against_start(DataLoader(TensorDataset(X[:0], Y[:0])))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.predict(X, levels=0.5), r"levels = 0.5 must be a tuple such as \(0.5,\)"),
        (lambda p: p.select(draws=3), r"draws = 3 a slice such as slice\(10\)"),
        (lambda p: p.select(chains=1), r"chains = 1 must be a list such as \[0, 1\]"),
    ],
)
def test_numbers_in_the_place_of_several(posterior: Posterior, call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(posterior)


# ---------------------------------------------------------------- models and likelihoods that cannot be what is meant

SHORT: dict[str, Any] = {"draws": 2, "keep_every": 2, "warmup": 200, "batch_size": 6, "progress": False}


class Outputs(nn.Module):
    """A layer whose output goes through a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(5, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda out: out.detach(), r"no gradient in the sampled parameters: look for detach\(\)"),
        (lambda out: out[:1], r"gives an output of shape \[1, 3\] for 12 examples"),
        (lambda out: out.sum(), r"gives an output of shape \[\] for 12 examples"),
    ],
)
def test_outputs_that_are_no_logits_of_examples(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample(Target.from_module(Outputs(function), "categorical"), (X, Y), **SHORT)


@pytest.mark.filterwarnings("ignore:chain 0:isosgd.errors.SamplingWarning")
def test_probabilities_in_the_place_of_logits_are_warned_of_once() -> None:
    target = Target.from_module(Outputs(lambda out: out.softmax(1)), "categorical")
    with pytest.warns(
        SamplingWarning, match="outputs of Outputs are probabilities, and 'categorical' takes logits"
    ) as w:
        sample(target, (X, Y), **SHORT).predict(X)
    assert sum("probabilities" in str(each.message) for each in w) == 1
    yes = Target.from_module(nn.Sequential(nn.Linear(5, 1), nn.Sigmoid()), "bernoulli")
    with pytest.warns(SamplingWarning, match="'bernoulli' takes logits"):
        sample(yes, (X, Y == 0), **SHORT)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="none"), nn.functional.cross_entropy, nn.MSELoss()])
def test_a_loss_is_no_log_likelihood(loss: Any) -> None:
    with pytest.raises(ValueError, match="is a loss, the negative of a log likelihood: pass a name, 'categorical'"):
        Target.from_module(nn.Linear(5, 3), loss)


def test_arrays_in_double_precision_are_converted() -> None:
    model = nn.Linear(5, 3)
    draws = {name: x.detach()[None, None] for name, x in model.named_parameters()}
    posterior = Posterior(Target.from_module(model, "categorical"), draws, {}, starts=[model])
    arrays = X.double().numpy(), np.asarray(Y)
    assert posterior.against_start(*arrays) == posterior.against_start(X, Y)
