"""Diagonal preconditioning of a sampler: the same step in other coordinates.

    theta -= rate P g + P^1/2 kick        instead of        theta -= rate g + kick

In the coordinates ``P^-1/2 theta`` this is the step without P. So the gradient noise and the curvature in those
coordinates, ``P^1/2 V P^1/2`` and ``P^1/2 H P^1/2``, bound the rate. The former is measured here, the latter by the
warm-up, which probes along `whiten`. If only the top eigenvalue of H is known, H is assumed to be proportional to V
(see `DiagonalMetric.curvature_ratio`).

A P that depends on theta adds a drift, ``(T / N) div P`` (Theorem 1), which a sampler corrects for or drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from isosgd.noise.model import NoiseModel, dot, join, power_step, top_eigenvalue
from isosgd.samplers.groups import Group

Learn = Callable[[Group, list[Tensor]], None]


def rms_metric(square: Tensor, eps: float) -> Tensor:
    """RMSprop's P, ``1 / (eps + sqrt(V))``, from a running mean V of squared gradients."""
    return 1.0 / (eps + square.sqrt())


def check_eps(eps: float) -> float:
    """The eps of `rms_metric`; raises if it is not positive."""
    if not eps > 0:
        raise ValueError(f"eps = {eps} must be positive: it bounds the preconditioner")
    return eps


class Metric(Protocol):
    """A preconditioner in whose coordinates curvature is measured."""

    entered: bool  # whether the curvature that is passed to `adapt` is that in the metric

    def whiten(self, vectors: Sequence[Tensor], power: float = 0.5) -> list[Tensor]:
        """``P^power`` times vectors, one for each parameter in their order."""

    def curvature_ratio(self, group: Group) -> Tensor:
        """Curvature in the metric over the curvature that is passed to `adapt`."""


class DiagonalMetric:
    """The preconditioner of a sampler, and its gradient noise in that metric.

    Args:
        noise: the sampler's gradient noise.
        value: the diagonal of P for one parameter, in its shape, in float32 at least.
        learn: updates P from the gradients of a group; called once for each gradient.
    """

    def __init__(self, noise: NoiseModel, value: Callable[[Tensor], Tensor], learn: Learn | None = None) -> None:
        self.noise, self.value, self.learn = noise, value, learn
        self.entered = False

    def whiten(self, vectors: Sequence[Tensor], power: float = 0.5) -> list[Tensor]:
        every = [p for group in self.noise.groups for p in group["params"]]
        return [self.value(p) ** power * d for p, d in zip(every, vectors, strict=True)]

    def curvature_ratio(self, group: Group) -> Tensor:
        """The ratio of the noise's top eigenvalues: exact if noise and curvature are proportional."""
        plain, scaled = self.noise.summary(group, "top"), self.top(group)
        largest = join([self.value(p) for p in group["params"]], self.noise.batched).amax(-1)
        ratio = torch.where(plain > 0, scaled / plain, largest.to(plain))
        return torch.ones_like(ratio) if self.entered else ratio

    def update(self, observed: bool) -> None:
        """Update P from the present gradients, once: when they are observed, otherwise before the step."""
        first = self.noise.groups[0]
        if observed or not first.get("learnt"):
            for group in self.noise.groups:
                params = [p for p in group["params"] if p.grad is not None]
                if params and self.learn is not None:
                    self.learn(group, params)
        first["learnt"] = observed

    def update_noise(self, noise: Sequence[Tensor] | None) -> None:
        """Update the top direction of the noise in the metric; called after `NoiseModel.update`."""
        for group, seen in self.noise.by_group(noise):
            if not seen or group["frozen"]:
                continue
            vector = join([d * self.value(p).sqrt() for p, d in seen], self.noise.batched)
            state = self.noise.seen_of_group(group)
            image: Tensor = state.setdefault("scaled", torch.zeros_like(vector))
            image.copy_(torch.where((image == 0).all(-1, keepdim=True), vector, image))
            power_step(image, vector, max(1.0 - self.noise.estimator.momentum, 1.0 / group["seen"], 0.01))

    def variances(self, group: Group) -> list[Tensor]:
        """Var(g) in the metric."""
        params = self.noise.seen_params(group)
        return [v * self.value(p) for v, p in zip(self.noise.variances(group), params, strict=True)]

    def top(self, group: Group) -> Tensor:
        """The largest eigenvalue of B in the metric."""
        return top_eigenvalue(self.noise.seen_of_group(group)["scaled"])

    def excess_noise(self, group: Group, corrected: list[Tensor]) -> Tensor:
        """Noise along its top direction in the metric that is left after the diagonal is corrected for."""
        image = self.noise.seen_of_group(group)["scaled"]
        along = dot(0.5 * join(corrected, self.noise.batched), image.square()) / dot(image, image).clamp_min(1e-30)
        return (top_eigenvalue(image) - along).clamp_min(0.0)
