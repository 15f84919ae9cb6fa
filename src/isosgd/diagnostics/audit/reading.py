"""What an optimizer says of itself: the fields of a `Loop` that can be read from its parameter groups and its state."""

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
    if isinstance(optimizer, Sampler):
        return [_sampler(optimizer, group) for group in optimizer.param_groups], _of_sampler(optimizer)
    if isinstance(optimizer, SGD):
        return [_sgd(group) for group in optimizer.param_groups], []
    fields = [_others(group) for group in optimizer.param_groups]
    return fields, _of_others(optimizer)


def _sgd(group: Group) -> dict[str, Any]:
    """Torch's SGD: ``buf = m buf + (1 - dampening) g``, ``theta -= lr buf``, so that v = -lr buf."""
    # Nesterov looks one kick ahead, which moves no farther in all: it is the same to leading order in the rate.
    undamped = 1.0 - (float(group["dampening"]) if group["momentum"] else 0.0)
    common = {"momentum": float(group["momentum"]), "weight_decay": float(group["weight_decay"])}
    return {"lr": float(group["lr"]) * undamped, "noise": 0.0, **common}


def _others(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {"noise": None}
    for name in ("lr", "momentum", "weight_decay"):
        value = group.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def _of_others(optimizer: Optimizer) -> list[Finding]:
    if not type(optimizer).__module__.startswith("torch.optim"):
        return []
    return [
        Finding(
            "preconditioner from gradients",
            f"{type(optimizer).__name__} scales each step by past gradients: Theorem 1 then requires noise scaled "
            "alike and the divergence of that scale, and both are missing; no tempered posterior is known",
            "plain SGD with noise, or a sampler with a metric: isosgd.methods()",
        )
    ]


def _sampler(sampler: Sampler, group: Group) -> dict[str, Any]:
    """A sampler of ours: the noise is that of its next step, so that a setting changed by hand shows."""
    assumed, temperature, friction = int(group["num_data"]), float(group["temperature"]), sampler.friction
    known = group.get("rate") is not None
    rate = _number(sampler.rate(group)) if known else UNSET
    if known and isinstance(sampler.schedule, Cycles):  # the rate of the sampling stage
        rate = _number(group["rate"])
    # What Theorems 1 and 2 require, gradient noise included.
    composite = rate * (2.0 * friction * temperature / (assumed * rate)) ** 0.5
    corrected = bool(getattr(sampler, "corrected", False)) or isinstance(sampler, ISGD)
    if isinstance(sampler, VSGD):
        composite = 0.0
    elif isinstance(sampler, ISGD):
        composite = rate * (2.0 * _number(group["lam"])) ** 0.5 if known else composite
    elif known and not isinstance(sampler.schedule, Cycles):
        params = [p for p in group["params"] if p.requires_grad]
        move = sampler._move(group, params)
        scoring = isinstance(sampler, SGFS | FullSGFS)
        corrected = corrected or scoring or move.scale is not None or move.outer is not None
        if not corrected and _number(move.amplitude):
            composite = _number(move.rate) * _number(move.amplitude)
    metric = _mean_metric(sampler, group) if known else 1.0
    return {
        "lr": rate * metric,
        "noise": composite * metric**0.5,
        "temperature": temperature,
        "momentum": 1.0 - friction,
        "assumed_num_data": assumed,
        "corrected": corrected,
        "averaged": bool(getattr(sampler, "averaged", False)),
        "gradient_noise": _gradient_noise(sampler, group),
    }


def _mean_metric(sampler: Sampler, group: Group) -> float:
    """How much larger than its rate a sampler's steps are: by P, its noise by the root of P."""
    if sampler.metric is not None:
        metrics = [sampler.metric.value(p).double().flatten() for p in group["params"]]
        return float(torch.cat(metrics).mean())
    if isinstance(sampler, FullSGFS):
        return 0.5 / _number(sampler.noise_summary(group, "mean"))  # P is the inverse of Var(g)
    return 1.0


def _gradient_noise(sampler: Sampler, group: Group) -> float | None:
    """Mean Var(g) over a group's parameters, if it was observed; a metric has units of its own."""
    if sampler.metric is not None or isinstance(sampler, FullSGFS) or sampler.noise.of_group(group) is None:
        return None
    return 2.0 * _number(sampler.noise_summary(group, "mean"))


def _of_sampler(sampler: Sampler) -> list[Finding]:
    if not isinstance(sampler, ISGD):
        return []
    clipped = max(_number(sampler.clipped_share(group)) for group in sampler.param_groups)
    if clipped <= CLIPPED:
        return []
    return [
        Finding(
            "gradient noise above lambda",
            f"{clipped:.0%} of the gradient noise exceeds lambda and is not corrected: too hot along it",
            "warm up again where the chain now is (scheme='windowed'), or a larger lambda",
        )
    ]


def _number(value: float | Tensor) -> float:
    """A number; for chains, that of the first."""
    return float(torch.as_tensor(value).flatten()[0])
