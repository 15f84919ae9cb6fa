"""Diagonal preconditioning, put over a sampler: the same step in other coordinates.

    theta -= rate P g + P^1/2 kick        instead of        theta -= rate g + kick

In the coordinates ``P^-1/2 theta`` that is the step without P. So what bounds the rate are the gradient noise and the
curvature in those coordinates, ``P^1/2 V P^1/2`` and ``P^1/2 H P^1/2``. The first is measured here, the second by a
loop that probes along `whiten`; where only the top eigenvalue of H is known, noise stands in for it (see `stretch`).

A P that changes with theta adds a drift that a sampler must make up for, ``(T / N) div P`` (Theorem 1), or may drop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.noise import Summary, dot, join, power_step, top_eigenvalue
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group
from isosgd.samplers.steppers import Number


def rms_metric(square: Tensor, eps: float) -> Tensor:
    """The diagonal of P that RMSprop has, ``1 / (eps + sqrt(V))``, from a running mean V of squared gradients."""
    return 1.0 / (eps + square.sqrt())


class Preconditioned(Sampler):
    """A layer over `SGLD` or `SGHMC` (which stands behind it in the list of bases) that gives their steps a metric."""

    given: bool  # whether the rate is the user's
    in_metric: bool = False  # whether curvatures are told in the metric, by a loop that probes along `whiten`

    @abstractmethod
    def _metric(self, p: Tensor) -> Tensor:
        """The diagonal of P for one parameter, in its shape, in float32 at least."""

    def _learn(self, group: Group, params: list[Tensor]) -> None:
        """Take in the gradients of a group, each once, where P is made of them."""

    def whiten(self, vectors: Sequence[Tensor], power: float = 0.5) -> list[Tensor]:
        """``P^power`` times vectors, one for each parameter in their order."""
        every = [p for group in self.param_groups for p in group["params"]]
        return [self._metric(p) ** power * d for p, d in zip(every, vectors, strict=True)]

    # -- noise --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        self._learn_all()
        self.param_groups[0]["learnt"] = True
        super().observe(noise)
        given = iter(noise if noise is not None else [p.grad for group in self.param_groups for p in group["params"]])
        for group in self.param_groups:
            seen = [(p, d) for p, d in zip(group["params"], given, strict=False) if d is not None]
            if not seen or group["frozen"]:
                continue
            vector = join([d * self._metric(p).sqrt() for p, d in seen], self.batched)
            state = self._seen_noise(group)
            image: Tensor = state.setdefault("scaled", torch.zeros_like(vector))
            image.copy_(torch.where((image == 0).all(-1, keepdim=True), vector, image))
            power_step(image, vector, max(1.0 - self.estimator.momentum, 1.0 / group["seen"], 0.01))

    def _variances(self, group: Group) -> list[Tensor]:
        """Var(g) in the metric, so that every summary of the noise is."""
        params = [p for p in group["params"] if "variance" in self.state.get(p, {})]
        return [v * self._metric(p) for v, p in zip(super()._variances(group), params, strict=True)]

    def noise_summary(self, group: Group, how: Summary) -> Tensor:
        return self._top_in_metric(group) if how == "top" else super().noise_summary(group, how)

    def _top_in_metric(self, group: Group) -> Tensor:
        return top_eigenvalue(self._seen_noise(group)["scaled"])

    def excess_noise(self, group: Group, corrected: list[Tensor]) -> Tensor:
        """How much noise is left along its top direction when a diagonal of it, in the metric, is made up for."""
        image = self._seen_noise(group)["scaled"]
        along = dot(0.5 * join(corrected, self.batched), image.square()) / dot(image, image).clamp_min(1e-30)
        return (top_eigenvalue(image) - along).clamp_min(0.0)

    # -- rates --------------------------------------------------------------------------------------------------------

    def stretch(self, group: Group) -> Tensor:
        """Curvature in the metric over plain curvature: the ratio of the noise's top eigenvalues.

        It is exact when noise and curvature are proportional, as for a model that fits its data.
        """
        plain, scaled = super().noise_summary(group, "top"), self._top_in_metric(group)
        largest = join([self._metric(p) for p in group["params"]], self.batched).amax(-1)
        ratio = torch.where(plain > 0, scaled / plain, largest.to(plain))
        return torch.ones_like(ratio) if self.in_metric else ratio

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        """Set every group's rate; ``curvature`` is the plain one unless `in_metric`."""
        if curvature is not None and not self.given:
            curvature = [h * self.stretch(group) for h, group in zip(curvature, self.param_groups, strict=True)]
        super().adapt(curvature, rise)  # type: ignore[safe-super]

    # -- the step -----------------------------------------------------------------------------------------------------

    def _learn_all(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._learn(group, params)

    def _update(self) -> None:
        first = self.param_groups[0]
        if not first.get("learnt"):  # `observe` has not seen this gradient
            self._learn_all()
        first["learnt"] = False
        super()._update()

    def _drift(self, params: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The diagonal of P, and what takes the place of the gradient."""
        metric = [self._metric(p) for p in params]
        return metric, list(torch._foreach_mul(metric, grads))

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        metric, drift = self._drift(params, grads)
        if kick is not None:
            kick = list(torch._foreach_mul(kick, torch._foreach_sqrt(metric)))
        super()._advance(params, drift, rate, kick)
