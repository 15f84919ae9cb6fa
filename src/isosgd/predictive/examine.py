"""Looking at draws through their target: the traces for a summary, and gradients at the draws for the meter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isosgd.diagnostics.meter import LEAST, Reading, directions, readings
from isosgd.diagnostics.summary import PosteriorSummary, summary_of
from isosgd.diagnostics.traces import as_array
from isosgd.diagnostics.verdict import Verdict, judge
from isosgd.potential.params import match
from isosgd.predictive.gradients import DrawGradients
from isosgd.predictive.mapped import rows_of, tree_map
from isosgd.predictive.view import inputs_of

if TYPE_CHECKING:
    from isosgd.predictive.posterior import Posterior

FEW = 32  # parameters up to which all of them are followed
HELD = 1 << 24  # numbers of draws, and of gradients, that are held for directions


def summary(
    posterior: Posterior, data: Any, *, inputs: Any, parameters: Sequence[str] | None, examples: int
) -> PosteriorSummary:
    """See `Posterior.summary`."""
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise ValueError(f"examples = {examples!r} must be an integer of at least 1")
    _check_sets(posterior)
    traces = function_traces(posterior, data, inputs, examples)
    for name in chosen(posterior, parameters):
        traces[name] = ("parameter", posterior.draws[name])
    return summary_of(traces)


def function_traces(posterior: Posterior, data: Any, inputs: Any, examples: int) -> dict[str, tuple[str, Any]]:
    """Predictions and log likelihoods of some examples at each draw."""
    traces: dict[str, tuple[str, Any]] = {}
    batch = some_examples(posterior.data if data is None else data, examples)
    if batch is None and inputs is None:
        return traces
    network = posterior.view.network is not None
    if inputs is not None or network:
        x = tree_map(lambda t: spaced(t, examples), inputs) if inputs is not None else inputs_of(batch)
        predicted = posterior.predict(x, return_draws=True).draws
        assert predicted is not None
        traces["prediction"] = ("prediction", _without_last_class(predicted, posterior.view.classes))
    if batch is not None:
        each = posterior.log_likelihood(batch)
        traces["log likelihood"] = ("log likelihood", each.double().mean(-1))
        if "prediction" not in traces:  # the next best function of the parameters
            traces["log likelihood of example"] = ("log likelihood", each)
    return traces


def trust(
    posterior: Posterior,
    data: Any,
    temperature: float | None,
    inputs: Any,
    held_out: Any,
    rows: int | None,
    rhat: float,
    ess: float,
    examples: int,
    seed: int,
) -> Verdict:
    """See `Posterior.trust`."""
    _check_sets(posterior)
    _ = posterior.view  # says so where there is no target
    data = posterior.data if data is None else data
    if data is None:
        raise ValueError(
            "the temperature is read from gradients of the training data: pass them, posterior.trust(data); "
            "posterior.summary() does without"
        )
    wanted = float(posterior.info.get("temperature", 1.0) if temperature is None else temperature)
    if not wanted > 0:
        raise ValueError(f"temperature = {wanted} must be positive: the draws cannot be compared with a point")
    if posterior.num_draws < LEAST:
        raise ValueError(f"{posterior.num_draws} draws of a chain are too few for a verdict; {LEAST} at least")
    found, along = measure(posterior, data, wanted, rows, seed)
    traces = function_traces(posterior, held_out if held_out is not None else data, inputs, examples)
    every = np.concatenate(
        [as_array(x).reshape(posterior.num_chains, posterior.num_draws, -1) for _, x in traces.values()], -1
    )
    reports = posterior.info.get("warmup", [])
    return judge(wanted, found, along, summary_of(traces), every, reports, rhat, ess)


def measure(
    posterior: Posterior, data: Any, temperature: float, rows: int | None, seed: int
) -> tuple[tuple[Reading, ...], tuple[Reading, ...]]:
    """Temperatures over all parameters and each layer, and along single directions.

    Draws are gone through twice, for the centres and for the gradients; of the draws and gradients themselves only so
    many are held as fit.
    """
    chains, draws = posterior.num_chains, posterior.num_draws
    gradient = DrawGradients(posterior, data, rows, seed, temperature)
    layers = posterior.view.target.layers(gradient.example)
    groups = list(dict.fromkeys(layers[name] for name in gradient.sizes))
    numbers = torch.tensor([groups.index(layers[name]) for name in gradient.sizes])
    place = numbers.repeat_interleave(torch.tensor(list(gradient.sizes.values())))  # group of each entry
    total = len(place)
    late = draws // 2  # from here on it is the second half of a chain

    def where(first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Chain, number in it, and half of some draws."""
        number = torch.arange(first, first + count)
        return number // draws, number % draws, (number % draws >= late).long()

    centres = torch.zeros(chains, 2, total, dtype=torch.float64)
    weights = torch.tensor([1.0 / late, 1.0 / (draws - late)], dtype=torch.float64)
    for first, theta in gradient.free_blocks():
        chain, _, half = where(first, len(theta))
        centres.index_put_((chain, half), theta.double() * weights[half, None], accumulate=True)

    held = min(draws, HELD // (total * chains))
    slot = torch.full((draws,), -1)  # where a draw is held, if it is
    slot[torch.linspace(0, draws - 1, held).round().long()] = torch.arange(held)
    kept = [torch.zeros(chains, held, total) for _ in range(2)] if held >= LEAST else []
    series = torch.zeros(chains, draws, len(groups), dtype=torch.float64)
    for first, theta, slope in gradient.blocks():
        chain, index, half = where(first, len(theta))
        products = (theta.double() - centres[chain, 1 - half]) * slope.double()
        series[chain, index] = products.new_zeros(len(theta), len(groups)).index_add_(1, place, products)
        if kept:
            here = slot[index] >= 0
            spot = chain[here], slot[index][here]
            kept[0][spot] = (theta.double() - centres[chain].mean(1))[here].float()
            kept[1][spot] = slope[here].float()
    if not bool(series.isfinite().all()):
        chain, index, _ = (~series.isfinite()).nonzero()[0]
        raise ValueError(
            f"draw {int(index)} of chain {int(chain)}, or the gradient there, is not finite: leave that chain out with "
            "posterior.select(chains=...)"
        )
    every = as_array(series.sum(-1, keepdim=True))
    if len(groups) == 1:
        found = readings(["all"], [total], every, temperature)
    else:
        sizes = [total, *torch.bincount(place).tolist()]
        found = readings(["all", *groups], sizes, np.concatenate([every, as_array(series)], -1), temperature)
    return found, directions(kept[0], kept[1], temperature) if kept else ()


def chosen(posterior: Posterior, patterns: Sequence[str] | None) -> list[str]:
    """Names of the parameters to follow."""
    shapes = posterior.shapes
    if patterns is not None:
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in given:
            if not any(match(name, [pattern]) for name in shapes):
                raise ValueError(f"parameters has {pattern!r}, which fits none of {list(shapes)}")
        return [name for name in shapes if match(name, given)]
    if sum(int(np.prod(shape)) for shape in shapes.values()) <= FEW:
        return list(shapes)
    scales = [name for name, shape in shapes.items() if not shape]
    return scales[:FEW]


def some_examples(data: Any, count: int) -> Any:
    """Some examples of the data, evenly spaced; of a loader, the first of its first batch."""
    if data is None:
        return None
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    if isinstance(data, tuple) and all(isinstance(x, Tensor | np.ndarray) for x in data):
        return tuple(spaced(torch.as_tensor(x), count) for x in data)
    batch = next(iter(data), None)
    if batch is None:
        raise ValueError("data yields no batches: it is empty, or an iterator that was gone through already")
    size = rows_of(batch)
    return tree_map(lambda t: t[:count] if t.ndim and len(t) == size else t, batch)


def spaced(x: Tensor, count: int) -> Tensor:
    """So many rows, evenly spaced."""
    if not x.ndim or len(x) <= count:
        return x
    return x[torch.linspace(0, len(x) - 1, count).round().long().to(x.device)]


def _without_last_class(predicted: Tensor, classes: bool) -> Any:
    """Probabilities sum to one: the last says nothing that the others do not."""
    return predicted[:, :, :, :-1] if classes and predicted.ndim > 3 and predicted.shape[3] > 1 else predicted


def _check_sets(posterior: Posterior) -> None:
    if (sets := int(posterior.info.get("sets", 1))) > 1:
        raise ValueError(
            f"these draws are of {sets} data sets, which have different posteriors: choose the chains of one, "
            "posterior.of_set(i)"
        )
