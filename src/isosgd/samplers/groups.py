"""Groups of parameters: one a layer, each with its N and its temperature."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from isosgd.names import layer_of

ParamsLike = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Group = dict[str, Any]


def layer_groups(params: ParamsLike) -> list[Group]:
    """One group a layer from named parameters; groups that were given as dicts stay as they are.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> [(g["name"], len(g["params"])) for g in layer_groups(net.named_parameters())]
        [('0', 2), ('1', 2)]
    """
    items = list(params)
    if not items:
        raise ValueError("params is empty: pass model.named_parameters() or a list of groups with tensors in them")
    if all(isinstance(item, dict) for item in items):
        return [{"name": str(i), **cast(Group, item)} for i, item in enumerate(items)]
    if all(isinstance(item, tuple) for item in items):
        groups: dict[str, Group] = {}
        for name, tensor in cast(list[tuple[str, Tensor]], items):
            group = groups.setdefault(layer_of(name), {"name": layer_of(name), "params": []})
            group["params"].append(tensor)
        return list(groups.values())
    if len(items) > 1:
        raise ValueError(
            f"{len(items)} tensors without names: samplers set one rate a layer and cannot tell which "
            "tensors form one. "
            "Pass model.named_parameters(), or one group a layer: [{'params': [...]}, ...]"
        )
    return [{"name": "0", "params": items}]


def check_units(num_data: int, temperature: float) -> None:
    """Refuse an N or a T that makes no sense."""
    if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
        raise ValueError(f"num_data = {num_data!r} must be the number of examples, an integer of at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature = {temperature} must be finite and not negative; 1 is the Bayesian posterior")
