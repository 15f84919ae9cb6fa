"""Groups of parameters: one a layer, each with its N and its temperature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a setting that is none of several choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} = {value!r} is unknown; choose {', '.join(others)} or {last}")


def check_units(num_data: int, temperature: float) -> None:
    """Refuse an N or a T that makes no sense."""
    if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
        raise ValueError(f"num_data = {num_data!r} must be the number of examples, an integer of at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature = {temperature} must be finite and not negative; 1 is the Bayesian posterior")


def check_groups(groups: list[Group], chains: int | None) -> None:
    """Refuse groups that cannot be sampled: bad units, integers, or tensors without the dimension of their chains."""
    for group in groups:
        check_units(group["num_data"], group["temperature"])
        for p in group["params"]:
            if not p.is_floating_point():
                raise ValueError(
                    f"group {group['name']!r} holds a tensor of dtype {p.dtype}: only real floating-point parameters "
                    "can be sampled; leave the others out of params"
                )
            if chains is not None and (p.dim() == 0 or p.shape[0] != chains):
                raise ValueError(
                    f"chains = {chains}, but a parameter of group {group['name']!r} has shape {tuple(p.shape)}"
                )


def trained_groups(groups: list[Group]) -> list[Group]:
    """Leave out parameters without gradients, so that a frozen layer needs no noise, no rate and no step.

    A model that is frozen altogether stays as it is.
    """
    trained = [[p for p in group["params"] if p.requires_grad] for group in groups]
    if not any(trained):
        return groups
    for group, params in zip(groups, trained, strict=True):
        group["params"] = params
    return [group for group in groups if group["params"]]
