"""Quantities whose convergence is judged: predictions and log likelihoods of some examples, and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isosgd.data.sources import as_tensors
from isosgd.posterior.draws import Device
from isosgd.target.batches import batch_length, tree_map, with_tensors
from isosgd.target.params import match

if TYPE_CHECKING:
    from isosgd.posterior.posterior import Posterior

FEW = 32  # up to so many parameters, all are judged


def followed(posterior: Posterior, data: Any, inputs: Any, examples: int, device: Device) -> dict[str, tuple[str, Any]]:
    """Kind and values ``[chains, draws, ...]`` by name: predictions and log likelihoods of some examples at each draw.

    The arguments are those of `Posterior.summary`.
    """
    dtype = None if posterior.target is None else posterior.target.dtype
    batch = _some_examples(posterior.data if data is None else data, examples, dtype)
    traces: dict[str, tuple[str, Any]] = {}
    if batch is None and inputs is None:
        return traces
    view = posterior.view
    if inputs is not None or view.network is not None:
        if inputs is None:
            x = view.target.inputs_of(batch)
        else:
            x = tree_map(lambda t: _spaced(t, examples), with_tensors(inputs, view.target.dtype))
        predicted = posterior.predict(x, return_draws=True, device=device).draws
        assert predicted is not None
        if view.classes and predicted.ndim > 3 and predicted.shape[3] > 1:
            predicted = predicted[:, :, :, :-1]  # probabilities sum to one
        traces["prediction"] = ("prediction", predicted)
    if batch is not None:
        each = posterior.log_likelihood(batch, device=device)
        traces["log likelihood"] = ("log likelihood", each.double().mean(-1))
        if "prediction" not in traces:  # in place of a prediction
            traces["log likelihood of example"] = ("log likelihood", each)
    return traces


def chosen_parameters(shapes: Mapping[str, tuple[int, ...]], patterns: Sequence[str] | None) -> list[str]:
    """Names of the parameters to judge; by default all if there are few, else the scalars."""
    if patterns is None:
        if sum(math.prod(shape) for shape in shapes.values()) <= FEW:
            return list(shapes)
        return [name for name, shape in shapes.items() if not shape][:FEW]
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in given:
        if not any(match(name, [pattern]) for name in shapes):
            raise ValueError(f"parameters has {pattern!r}, which fits none of {list(shapes)}")
    return [name for name in shapes if match(name, given)]


def _some_examples(data: Any, count: int, dtype: torch.dtype | None) -> Any:
    """Evenly spaced examples of the data; of a loader, the first of its first batch."""
    if data is None:
        return None
    if tensors := as_tensors(data, dtype):
        return tree_map(lambda t: _spaced(t, count), tensors)
    batch = with_tensors(next(iter(data), None), dtype)
    if batch is None:
        raise ValueError("data yields no batches: it is empty, or an iterator that was gone through already")
    size = batch_length(batch)
    return tree_map(lambda t: t[:count] if t.ndim and len(t) == size else t, batch)


def _spaced(x: Tensor, count: int) -> Tensor:
    """At most ``count`` evenly spaced rows."""
    if not x.ndim or len(x) <= count:
        return x
    return x[torch.linspace(0, len(x) - 1, count).round().long().to(x.device)]
