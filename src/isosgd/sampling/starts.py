"""Trained networks and held-out examples, as `sample` takes them: checked and brought into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from isosgd.data.sources import Tensors, as_tensors, joined
from isosgd.errors import warn_caller
from isosgd.posterior.starts import State, as_states
from isosgd.sampling.ladder import of_classes
from isosgd.target import Target
from isosgd.target.batches import tensors_of, tree_map
from isosgd.target.modules import unwrapped
from isosgd.target.space import refuse_sharded


def as_starts(starts: Any, target: Target, init: Any) -> list[State] | None:
    """Parameters and buffers of trained networks, checked; None if ``starts`` is None."""
    if starts is None:
        return None
    if init is not None:
        raise ValueError("starts= and init= both say where chains begin: pass the trained networks as starts= alone")
    found: list[State] = [_checked(state, i, target) for i, state in enumerate(as_states(starts))]
    for i, start in enumerate([starts] if isinstance(starts, nn.Module) else starts):
        if target.module is None or not isinstance(start, nn.Module):
            continue
        if (other := target.module.other_layer(unwrapped(start))) is not None:
            raise ValueError(
                f"starts[{i}] has {other[0]} where the target has {other[1]}: all starts must be of the architecture "
                "that the target was made of; of a network that computes the same, pass the state_dict"
            )
    return found


def _checked(state: State, number: int, target: Target) -> dict[str, Any]:
    """A network's state on the target's device; it must have the target's architecture."""
    for name, x in state.items():
        refuse_sharded(name, x)
        if isinstance(x, Mapping | str):
            raise ValueError(
                f"starts[{number}] has {name!r} of type {type(x).__name__}: pass the network or its state_dict itself, "
                f"such as checkpoint[{name!r}]"
            )
    found = {name: torch.as_tensor(x).detach().to(target.device) for name, x in target.without_aliases(state).items()}
    free = target.initial()
    own = {**target.constrain(free), **target.buffers, **target.frozen}
    here = {name: tuple(x.shape) for name, x in own.items()}
    transient = set() if target.module is None else target.module.transient
    missing = sorted(here.keys() - found.keys() - set(target.extras(free)) - transient)
    unknown = sorted(found.keys() - here.keys())
    other = next((name for name in here if name in found and tuple(found[name].shape) != here[name]), None)
    nan = next((name for name, x in found.items() if x.is_floating_point() and not bool(x.isfinite().all())), None)
    if nan is not None:
        raise ValueError(f"starts[{number}] has {nan!r} with values that are NaN or infinite: leave that network out")
    what = ""
    if missing:
        what = f"lacks {missing[0]!r}"
    elif unknown:
        what = f"has {unknown[0]!r}, which the target lacks"
    elif other is not None:
        what = f"has {other!r} of shape {list(found[other].shape)}, the target {list(here[other])}"
    if what:
        raise ValueError(f"starts[{number}] {what}: all starts must be of the architecture that the target was made of")
    return {name: x.to(own[name].dtype) if x.is_floating_point() and name in own else x for name, x in found.items()}


def own_network(target: Target, init: Any) -> State:
    """The module's own weights, or ``init``, as a trained network."""
    if callable(init):
        raise ValueError("temperature='auto' with init= a function: pass the trained networks as starts=")
    if target.module is None:
        raise ValueError(
            "temperature='auto' is for trained networks: make the target by Target.from_module, or give a number; 1 is "
            "the posterior"
        )
    values = {name: x.detach() for name, x in target.constrain(target.initial(init)).items()}
    buffers = target.initial_buffers(init, target.initial(init))
    return {**values, **buffers}


def set_aside(held_out: Any, data: Any, target: Target, seed: int) -> tuple[Any, Tensors | None]:
    """The data to sample with, and the held-out examples; a fraction is taken out of the data."""
    tensors = as_tensors(data, target.dtype)
    if held_out is None:
        return data, None
    if isinstance(held_out, int | float) and not isinstance(held_out, bool):
        if not 0 < held_out < 1:
            raise ValueError(f"held_out = {held_out} must lie between 0 and 1: the share of the data that is set aside")
        if tensors is None:
            raise ValueError(f"held_out = {held_out} takes a part of tensors, but the data are batches: pass (x, y)")
        if target.num_data is not None:
            raise ValueError(
                f"held_out = {held_out} leaves fewer examples than num_data = {target.num_data}: pass held_out=(x, y)"
            )
        count, place = len(tensors_of(tensors)[0]), tensors_of(tensors)[0].device
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(place)
        part = max(1, round(held_out * count))
        aside, rest = order[:part], order[part:]
        return tree_map(lambda t: t[rest], tensors), tree_map(lambda t: t[aside], tensors)
    found = as_tensors(held_out, target.dtype)
    if found is None and isinstance(held_out, Iterable) and not isinstance(held_out, str):
        found = joined(held_out, target, "held_out")
    if found is None:
        raise TypeError(f"held_out of type {type(held_out).__name__}: pass (x, y), a loader, or a share such as 0.1")
    _check_held_out(found, tensors, target)
    return data, found


def _equal(a: Tensors, b: Tensors) -> bool:
    """Whether both hold the same examples in the same order."""
    first, second = tensors_of(a), tensors_of(b)
    return len(first) == len(second) and all(
        x.shape == y.shape and torch.equal(x.cpu(), y.cpu()) for x, y in zip(first, second, strict=True)
    )


def _check_held_out(found: Tensors, tensors: Tensors | None, target: Target) -> None:
    lengths = [len(t) for t in tensors_of(found)]
    if tensors is not None and _equal(found, tensors):
        warn_caller(
            "held_out are the training data, which the networks have seen, so that they cannot tell which temperature "
            "helps: pass examples that were not trained on"
        )
    if not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(f"held_out has tensors of {lengths} examples: give as many of each, some at all")
    y = target.labels_of(found)
    if tensors is None:
        return
    if isinstance(found, dict) != isinstance(tensors, dict) or len(found) != len(tensors):
        kinds = [f"a {type(part).__name__} of {len(part)} tensors" for part in (found, tensors)]
        raise ValueError(f"held_out is {kinds[0]}, the data {kinds[1]}: pass them alike, such as (x, y)")
    known = target.labels_of(tensors)
    if y.shape[1:] != known.shape[1:]:
        raise ValueError(
            f"targets of an example have the shape {list(y.shape[1:])} in held_out and {list(known.shape[1:])} in the "
            "data: pass both alike, classes as one integer of each example"
        )
    if of_classes(target) and y.ndim < 2:  # a text may well have tokens that no other has
        new = sorted(set(y.flatten().tolist()) - set(known.flatten().tolist()))
        if new:
            raise ValueError(
                f"held_out has label {new[0]}, which the data never have: the networks cannot know it. Leave such "
                "examples out, or number the classes alike in both"
            )
