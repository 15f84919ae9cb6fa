"""Lambda as a rate for each axis of a basis: the standard basis (`Diagonal`), or that of `Kronecker`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry
from isosgd.geometry.rule import Rule, damped
from isosgd.noise.model import dot, power_step


class AxisRates:
    """Noise, Lambda and rates along axes: ``H = diag(h)`` in their coordinates.

    Lambda is q h. A share of the layer's mean (``damping``) is added to h, so that a unit that was dead in the warm-up
    does not get a huge rate. ``v`` ``[chains, d]`` is the noise variance along each axis; ``top`` the image of the
    direction in which noise is largest relative to Lambda, and ``top_ratio`` their ratio there.
    """

    kept = ("v", "lam", "rate", "amplitude", "top", "top_ratio", "looks")

    def __init__(self, geometry: Geometry, damping: float) -> None:
        self.geometry, self.damping = geometry, damping
        self.v = geometry.full(0.0, geometry.total)
        self.lam, self.rate, self.amplitude = self.v.clone(), self.v.clone(), self.v.clone()
        self.top, self.top_ratio, self.looks = self.v.clone(), geometry.full(0.0), 0

    def update(self, z: Tensor) -> None:
        """Update with a noise vector, in coordinates along the axes."""
        self.v.lerp_(z.square(), 1.0 / (self.geometry.seen + 1))
        if self.geometry.known:
            self._update_top(z * (2.0 * self.lam).rsqrt())
        self.refresh()

    def _update_top(self, white: Tensor) -> None:
        """Update the direction in which noise is largest relative to Lambda, and their ratio there.

        The ratio is measured before the vector enters the direction, which would bias it.
        """
        if not self.looks:
            self.top = white.clone()
        else:
            along = dot(self.top, white).square() / self._length()
            self.top_ratio = torch.lerp(self.top_ratio, along, max(1.0 / self.looks, 0.02))
            power_step(self.top, white, max(1.0 / (self.looks + 1), 0.01))
        self.looks += 1

    def _length(self) -> Tensor:
        return dot(self.top, self.top).clamp_min(1e-30)

    def set_lambda(self, rule: Rule, prior: Tensor, rise: float) -> None:
        """As `Geometry.set_lambda`, with the prior's curvature along the axes."""
        geometry = self.geometry
        h = damped(rule.batch_size * self.v + prior, self.damping, geometry.slots)
        geometry.factor, geometry.scale = rule.factor(geometry.curvature_ratio), rule.scale
        lam = geometry.factor[:, None] * h.clamp_min(torch.finfo(geometry.dtype).tiny)
        lam = torch.maximum(lam, self.lam / rise) if geometry.known else lam
        if self.looks > 1:  # the ratio was measured against the old Lambda
            self.top_ratio = self.top_ratio * dot(self.top.square(), self.lam / lam) / self._length()
        self.lam, geometry.known = lam, True
        geometry.limit_excess()

    def slow(self, factor: Tensor) -> None:
        self.geometry.factor = self.geometry.factor * factor
        self.lam = self.lam * factor[:, None]
        self.top_ratio = self.top_ratio / factor
        self.refresh()

    def refresh(self) -> None:
        """Recompute the rates and the scale of injected noise."""
        if self.geometry.known:
            self.rate = self.geometry.scale / self.lam
            self.amplitude = self.rate * (2.0 * self.lam - self.geometry.noise_weight * self.v).clamp_min(0.0).sqrt()

    def excess_temperature(self) -> Tensor:
        """That of noise which is correlated between axes, which a diagonal cannot express."""
        if self.looks < 2:
            return torch.zeros_like(self.top_ratio)
        expressed = dot(self.top.square(), self.v / (2.0 * self.lam)) / self._length()
        return self.geometry.noise_weight * (self.top_ratio - expressed)

    def clipped(self) -> Tensor:
        over = self.geometry.noise_weight * self.v > 2.0 * self.lam
        return over.to(self.geometry.dtype).mean(-1) if self.geometry.known else torch.zeros_like(self.top_ratio)


class Diagonal(Geometry):
    """One rate for each element of the parameters.

    Args:
        damping: share of a layer's mean curvature that is added to that of every element.
    """

    name = "diagonal"
    kept = (*Geometry.kept, "on_axes")

    def __init__(self, damping: float = 0.1) -> None:
        self.damping = damping

    def prepare(self) -> None:
        self.on_axes = AxisRates(self, self.damping)

    def update(self, noise: Tensor) -> None:
        self.on_axes.update(noise)

    def forget(self, void: bool = False) -> None:
        super().forget(void)
        self.on_axes.looks = 0

    def set_lambda(self, rule: Rule, prior: Tensor, rise: float) -> None:
        self.on_axes.set_lambda(rule, prior, rise)

    def slow(self, factor: Tensor) -> None:
        self.on_axes.slow(factor)

    def excess_temperature(self) -> Tensor:
        return self.on_axes.excess_temperature()

    def clipped(self) -> Tensor:
        return self.on_axes.clipped()

    def direction(self, gradient: Tensor) -> Tensor:
        return self.on_axes.rate * gradient

    def tensors(self) -> tuple[Tensor, ...]:
        return self.on_axes.rate, self.on_axes.amplitude

    def along_directions(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.full(0.0, 0, self.total), self.full(0.0, 0, 0), self.on_axes.rate

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        rate, amplitude = tensors
        return rate * gradient + amplitude * xi

    def rates(self) -> Tensor:
        return self.on_axes.rate
