"""Trained networks as starts of chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isosgd.engine.schedule import Start
from isosgd.target import Target

Network = nn.Module | Mapping[str, Any]


def as_starts(starts: Any, target: Target, init: Start) -> list[Mapping[str, Any]] | None:
    """Parameters and buffers of trained networks, checked; None where no network was given."""
    if starts is None:
        return None
    if init is not None:
        raise ValueError("starts= and init= both say where chains begin: pass the trained networks as starts= alone")
    if isinstance(starts, nn.Module | Mapping):
        starts = [starts]
    if not isinstance(starts, Sequence) or not starts:
        raise TypeError(f"starts must be a list of trained networks or of their state_dicts, got {starts!r}")
    return [_state(network, i, target) for i, network in enumerate(starts)]


def _state(network: Network, number: int, target: Target) -> dict[str, Any]:
    if not isinstance(network, nn.Module | Mapping):
        raise TypeError(f"starts[{number}] is a {type(network).__name__}: pass a network, or its state_dict()")
    found = dict(network.state_dict() if isinstance(network, nn.Module) else network)
    free = target.initial()
    here = {name: tuple(x.shape) for name, x in target.constrain(free).items()}
    here |= {name: tuple(x.shape) for part in (target.buffers, target.frozen) for name, x in part.items()}
    extras = set(target.extras(free))
    missing = sorted(here.keys() - found.keys() - extras)
    unknown = sorted(found.keys() - here.keys())
    others = [name for name in here if name in found and tuple(torch.as_tensor(found[name]).shape) != here[name]]
    if missing or unknown or others:
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the target lacks" if unknown else (
            f"has {others[0]!r} of shape {list(torch.as_tensor(found[others[0]]).shape)} where the target has "
            f"{list(here[others[0]])}"
        )  # fmt: skip
        raise ValueError(f"starts[{number}] {what}: all starts must be of the architecture that the target was made of")
    # Frozen parameters that are equal say nothing; `Target.split_init` refuses others.
    return found
