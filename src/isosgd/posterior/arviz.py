"""Export of draws to ArviZ."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isosgd.target import Likelihood
from isosgd.target.batches import with_tensors

if TYPE_CHECKING:
    from isosgd.posterior.posterior import Posterior


def to_datatree(posterior: Posterior, data: Any, names: Sequence[str], seed: int) -> Any:
    """The groups that `Posterior.to_arviz` describes."""
    try:
        arviz = importlib.import_module("arviz_base")
    except ImportError as error:
        raise ImportError('to_arviz needs arviz-base: pip install "isosgd[arviz]"') from error
    size, info = (posterior.num_chains, posterior.num_draws), posterior.info
    stats: dict[str, Any] = {"temperature": np.full(size, float(info.get("temperature", 1.0)))}
    groups = {"posterior": {name: _array(posterior.draws[name]) for name in names}}
    rates = info.get("rates") or [{}]
    layers = list(rates[0])
    if layers and len(rates) == size[0] and all(list(each) == layers for each in rates):
        table = np.array([[each[layer] for layer in layers] for each in rates], float)
        stats["rate"] = np.broadcast_to(table[:, None], (*size, len(layers)))
    if data is not None:
        view = posterior.view
        batch = with_tensors(data, view.target.dtype)
        each = posterior.log_likelihood(batch)
        groups["log_likelihood"] = {"y": _array(each)}
        stats["loss"] = _array(-each.double().mean(-1))
        if isinstance(batch, tuple | list | Mapping) and len(batch) > 1:
            y = view.target.labels_of(batch)
            groups["observed_data"] = {"y": _array(y)}
            if view.network is not None and isinstance(view.network.likelihood, Likelihood):
                simulated = posterior.simulate(view.target.inputs_of(batch), seed=seed)
                groups["posterior_predictive"] = {"y": _array(simulated.reshape(*size, *y.shape))}
    attrs = {key: _attribute(value) for key, value in info.items()} | {"inference_library": "isosgd"}
    found = arviz.from_dict(groups, attrs={"posterior": attrs})
    # A separate call, since `dims` apply to all groups, and a parameter may have the name of a statistic.
    named = {"dims": {"rate": ["layer"]}, "coords": {"layer": layers}}
    found["sample_stats"] = arviz.from_dict({"sample_stats": stats}, **named)["sample_stats"]
    return found


def _attribute(value: Any) -> str | int | float:
    """A plain value, as ArviZ needs to write a file: nested values as JSON, booleans as 0 or 1."""
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, str | int | float) else json.dumps(value, default=str)


def _array(values: Tensor) -> Any:
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
