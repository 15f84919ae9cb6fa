"""Parameter groups, one for each layer, each with its N and temperature; checks of settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from isosgd.errors import nearest
from isosgd.names import layer_of

ParamsLike = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Group = dict[str, Any]


class OwnRateGroup(dict[str, Any]):
    """A group whose rate the sampler sets: reading or setting ``lr``, as a scheduler does, raises with the reason."""

    reason = ""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"there is no lr to read or schedule: {self.reason}") if key == "lr" else KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" and self.reason:
            raise ValueError(f"lr = {value!r} cannot be set: {self.reason}")
        super().__setitem__(key, value)


def layer_groups(params: ParamsLike) -> list[Group]:
    """One group for each layer, or the groups that are given as dicts.

    Without names, a tensor of two or more dimensions begins a layer, and a vector of the same length that follows it
    is its bias.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> [(g["name"], len(g["params"])) for g in layer_groups(net.named_parameters())]
        [('0', 2), ('1', 2)]
    """
    items = list(params)
    if not items:
        raise ValueError("params is empty: pass model.parameters() or a list of groups with tensors in them")
    if all(isinstance(item, dict) for item in items):
        groups = [{"name": str(i), **cast(Group, item)} for i, item in enumerate(items)]
        for group in groups:
            if "params" not in group:
                raise ValueError(f"group {group['name']!r} has no 'params': give {{'params': layer.parameters()}}")
            given = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            group["params"] = [item[1] if isinstance(item, tuple) else item for item in given]
        check_names([group["name"] for group in groups])
        return groups
    if all(isinstance(item, tuple) for item in items):
        layers: dict[str, Group] = {}
        for name, tensor in cast(list[tuple[str, Tensor]], items):
            group = layers.setdefault(layer_of(name), {"name": layer_of(name), "params": []})
            group["params"].append(tensor)
        return list(layers.values())
    if not all(isinstance(item, Tensor) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        raise TypeError(f"params holds {', '.join(kinds)}: pass model.parameters(), named parameters, or groups")
    found: list[Group] = []
    for tensor in cast(list[Tensor], items):
        before = found[-1]["params"] if found else []
        if tensor.dim() == 1 and len(before) == 1 and before[0].dim() > 1 and len(before[0]) == len(tensor):
            before.append(tensor)
        else:
            found.append({"name": str(len(found)), "params": [tensor]})
    return found


def check_names(names: Sequence[str]) -> None:
    """Raise if names are not unique."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two groups have the name {twice[0]!r}: give each group a name of its own")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise if a setting is not one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(
            f"{name} = {value!r} is unknown; choose {', '.join(others)} or {last}{nearest(value, choices)}"
        )


def check_if_given(name: str, value: float | None, default: str) -> None:
    """Raise if a value is given and not positive; ``default`` says what is done without it."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} = {value} must be positive; leave it out {default}")


def is_whole(number: object) -> bool:
    """Whether this is an integer, also numpy's, but not a bool or tensor."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def check_units(num_data: int, temperature: float) -> None:
    """Raise if N or T is invalid."""
    if not is_whole(num_data) or num_data < 1:
        raise ValueError(f"num_data = {num_data!r} must be the number of examples, an integer of at least 1")
    if not _finite_and_not_negative(temperature):
        raise ValueError(f"temperature = {temperature!r} must be finite and not negative; 1 is the Bayesian posterior")


def _finite_and_not_negative(number: Any) -> bool:
    try:
        return bool(math.isfinite(number) and number >= 0)
    except TypeError:  # no number at all
        return False


def check_same_units(groups: Sequence[Group], user: str) -> None:
    """Raise if groups differ in N or T."""
    for name in ("temperature", "num_data"):
        if len(found := sorted({group[name] for group in groups})) > 1:
            raise ValueError(f"groups with {name} = {found}: {user} needs one for all")


def check_batch_size(batch_size: int | None, num_data: int | None) -> None:
    """Raise if n is invalid."""
    if batch_size is None:
        return
    if not is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"batch_size = {batch_size!r} must be the examples behind a step, an integer of at least 1")
    if num_data is not None and batch_size > num_data:
        raise ValueError(
            f"batch_size = {batch_size} exceeds num_data = {num_data}: a step has at most all examples behind it"
        )


def check_groups(groups: list[Group], chains: int | None) -> None:
    """Raise if a group has invalid units, integer tensors, or tensors without the chain dimension."""
    for group in groups:
        check_units(group["num_data"], group["temperature"])
        group["num_data"] = int(group["num_data"])
        if not _finite_and_not_negative(group["weight_decay"]):
            raise ValueError(f"weight_decay = {group['weight_decay']!r} must be finite and not negative")
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
    """The groups without frozen parameters, unless all are frozen."""
    trained = [[p for p in group["params"] if p.requires_grad] for group in groups]
    if not any(trained):
        return groups
    for group, params in zip(groups, trained, strict=True):
        group["params"] = params
    return [group for group in groups if group["params"]]
