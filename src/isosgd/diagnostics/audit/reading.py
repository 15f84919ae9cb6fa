"""The fields of a `Loop` that can be read from an optimizer's parameter groups and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from isosgd.diagnostics.audit.findings import Finding
from isosgd.samplers import ISGD, VSGD, Sampler
from isosgd.samplers.groups import Group
from isosgd.samplers.schedules import Cycles
from isosgd.samplers.sgfs import SGFS, FullSGFS

CLIPPED = 0.05  # accepted share of the noise above lambda
UNSET = 1e-6  # in place of a rate that the warm-up has yet to set; temperatures do not depend on it


def read(optimizer: Optimizer) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Fields of a `Loop` for each parameter group, and findings that only the optimizer itself shows."""
    kind, found = type(optimizer), list[Finding]()
    if isinstance(optimizer, Sampler):
        clipped = 0.0
        if isinstance(optimizer, ISGD):
            clipped = max(_number(optimizer.clipped_share(group)) for group in optimizer.param_groups)
        if clipped > CLIPPED:
            why = f"{clipped:.0%} of the gradient noise exceeds lambda and is not corrected: too hot along it"
            fix = "warm up again where the chain now is (scheme='windowed'), or a larger lambda"
            found.append(Finding("gradient noise above lambda", why, fix))
        return [_sampler(optimizer, group) for group in optimizer.param_groups], found
    if kind.__module__.startswith("torch.optim") and kind is not SGD:
        why = (
            f"{kind.__name__} scales each step by past gradients: Theorem 1 then requires noise scaled alike and the "
            "divergence of that scale, and both are missing; no tempered posterior is known"
        )
        fix = "plain SGD with noise, or a sampler with a metric: isosgd.methods()"
        found.append(Finding("preconditioner from gradients", why, fix))
    return [_other(optimizer, group) for group in optimizer.param_groups], found


def _other(optimizer: Optimizer, group: Group) -> dict[str, Any]:
    """An optimizer of torch or of someone else: its settings with the usual names."""
    found: dict[str, Any] = {"noise": None}
    for name in ("lr", "momentum", "weight_decay"):
        value = group.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    if isinstance(optimizer, SGD):
        # buf = m buf + (1 - dampening) g, theta -= lr buf. Nesterov looks one kick ahead, which moves no farther in
        # all: it is the same to leading order in the rate.
        found |= {"noise": 0.0, "lr": found["lr"] * (1.0 - (group["dampening"] if group["momentum"] else 0.0))}
    return found


def _sampler(sampler: Sampler, group: Group) -> dict[str, Any]:
    """A sampler of this library: the noise is that of its next step, so that a setting changed by hand shows."""
    assumed, temperature, friction = int(group["num_data"]), float(group["temperature"]), sampler.friction
    known, cyclical = group.get("rate") is not None, isinstance(sampler.schedule, Cycles)
    rate = UNSET
    if known:  # in cycles, the rate of the sampling stage
        rate = _number(group["rate"] if cyclical else sampler.rate(group))
    # What Theorems 1 and 2 require, gradient noise included.
    composite = rate * (2.0 * friction * temperature / (assumed * rate)) ** 0.5
    corrected = bool(getattr(sampler, "corrected", False)) or isinstance(sampler, ISGD)
    if isinstance(sampler, VSGD):
        composite = 0.0
    elif isinstance(sampler, ISGD):
        composite = rate * (2.0 * _number(group["lam"])) ** 0.5 if known else composite
    elif known and not cyclical:
        move = sampler._move(group, [p for p in group["params"] if p.requires_grad])
        scoring = isinstance(sampler, SGFS | FullSGFS)
        corrected = corrected or scoring or move.scale is not None or move.outer is not None
        if not corrected and _number(move.amplitude):
            composite = _number(move.rate) * _number(move.amplitude)
    metric = 1.0  # how much larger than its rate the steps are: by P, the noise by the root of P
    if known and sampler.metric is not None:
        metric = float(torch.cat([sampler.metric.value(p).double().flatten() for p in group["params"]]).mean())
    elif known and isinstance(sampler, FullSGFS):  # P is the inverse of Var(g)
        metric = 0.5 / _number(sampler.noise_summary(group, "mean"))
    gradient_noise = None  # a metric has units of its own
    if sampler.metric is None and not isinstance(sampler, FullSGFS) and sampler.noise.of_group(group) is not None:
        gradient_noise = 2.0 * _number(sampler.noise_summary(group, "mean"))
    return {
        "lr": rate * metric,
        "noise": composite * metric**0.5,
        "temperature": temperature,
        "momentum": 1.0 - friction,
        "assumed_num_data": assumed,
        "corrected": corrected,
        "averaged": bool(getattr(sampler, "averaged", False)),
        "gradient_noise": gradient_noise,
        "weight_decay": float(group["weight_decay"]),
    }


def _number(value: float | Tensor) -> float:
    """A number; for chains, that of the first."""
    return float(torch.as_tensor(value).flatten()[0])
