"""Trained networks at which chains start: as states, as draws, and with a noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isosgd.data.sources import Tensors
from isosgd.posterior.draws import Device, batches_of, moved, place_of
from isosgd.posterior.view import View
from isosgd.target import Likelihood, Params, Target
from isosgd.target.batches import batch_length, with_tensors
from isosgd.target.modules import unwrapped

State = Mapping[str, Any]
"""Parameters and buffers of a network by name, as in a ``state_dict``."""

STARTS = "the starts"  # ``info["method"]`` of draws that are the trained networks
SCALES, SCORED = 33, 1_000  # noise scales tried at once, and examples predicted at once


def as_states(starts: Any) -> list[State]:
    """One or several networks or state_dicts as state_dicts."""
    if isinstance(starts, nn.Module | Mapping):
        starts = [starts]
    if not isinstance(starts, Sequence) or isinstance(starts, str) or not starts:
        raise TypeError(f"starts must be a list of trained networks or of their state_dicts, got {starts!r}")
    for i, start in enumerate(starts):
        if not isinstance(start, nn.Module | Mapping):
            raise TypeError(f"starts[{i}] is a {type(start).__name__}: pass a network, or its state_dict()")
    return [unwrapped(start).state_dict() if isinstance(start, nn.Module) else start for start in starts]


def stacked(states: Sequence[State], target: Target, scales: Params) -> tuple[Params, Params]:
    """Natural parameters and buffers of networks as draws, ``[networks, 1, *shape]``.

    Args:
        states: of the networks.
        target: what was sampled.
        scales: values of what likelihood and prior sample beside the network, for states without them.
    """
    params, buffers = [], []
    for i, state in enumerate(states):
        if target.module is not None and (missing := [name for name in target.module.values if name not in state]):
            raise ValueError(f"starts[{i}] lacks {missing[0]!r}: pass a network of the architecture that was sampled")
        try:
            free = target.initial({**scales, **state}, device="cpu", dtype=target.dtype)
            buffers.append(target.initial_buffers(state, free))
        except ValueError as error:
            raise ValueError(f"starts[{i}] is not of the architecture that was sampled: {error}") from error
        params.append({name: x.detach() for name, x in target.constrain(free).items()})
    return (
        {name: torch.stack([one[name] for one in params])[:, None] for name in params[0]},
        {name: torch.stack([one[name] for one in buffers])[:, None] for name in buffers[0]},
    )


@torch.no_grad()
def with_noise_scale(target: Target, start: State, examples: Tensors, device: Device = None) -> State:
    """A start with the noise scale under which it predicts best; of several outputs, with one for each.

    A network has no noise scale. Under an arbitrary one its score would be poor, and any draws would look better.
    """
    names = [name for name in target.noise_scales() if name not in start]
    network = View(target).network
    if not names or network is None:
        return start
    examples = with_tensors(examples, target.dtype)
    place = place_of(device, target.device, examples)
    params, buffers = ({name: x[0, 0] for name, x in part.items()} for part in stacked([start], target, {}))
    natural = moved(params | buffers, place)
    if batch_length(examples) == 0:
        return start
    network.check(natural, examples)
    found = []  # outputs and what was to be predicted
    for part in batches_of(examples, SCORED):
        part = moved(part, place)
        output = network.output(natural, network.inputs_in(part))
        found.append((network.for_likelihood(output, natural)[0], network.labels_in(part)))
    output, y = (torch.cat(list(parts)) for parts in zip(*found, strict=True))
    likelihood = network.likelihood
    assert isinstance(likelihood, Likelihood)

    def fit(values: Tensor, scale: float) -> float:
        values.fill_(scale)
        return float(likelihood.log_prob(output, y, natural).double().sum().nan_to_num(-math.inf))

    for name in names:
        natural[name] = natural[name].clone()
        for values in natural[name].view(-1):  # the best of one output does not depend on those of the others
            spread, here = 1e4, 1.0  # a grid over eight decades, then finer ones around the best
            for _ in range(4):
                scales = here * torch.logspace(-math.log10(spread), math.log10(spread), SCALES, dtype=torch.float64)
                here, spread = max(scales.tolist(), key=partial(fit, values)), spread ** (4 / SCALES)
            values.fill_(here)
    return {**start, **{name: natural[name].to(target.device) for name in names}}
