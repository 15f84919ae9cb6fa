"""The largest curvature of ``f / N`` in each group, measured as the chains run.

A step of size ``rate`` inflates the variance along a direction of curvature h by ``rate h / 2`` (see
`isosgd.geometry.rule.variance_inflation`), so the largest h bounds the rate. It is found by power iteration. A product
with the Hessian is the difference of two gradients *on the same minibatch*, one posterior standard deviation apart:
minibatch noise cancels, any model with a gradient will do, and kinks (ReLU) count as much as they do for the chain.

One gradient probes all groups, each along its own vector with a random sign, so that terms between groups average out.
A second vector over all groups then measures how much they add up.

All vectors are flat, ``[chains, d]``, and all numbers are one for each chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry
from isosgd.noise.model import dot

MEMORY = 0.1  # weight of a new probe, once ten have been taken
LONG_MEMORY = 0.03  # for `Stiffness`: minibatches differ in their stiffest direction, which looks like stiffness
KEPT = 4  # probes that an old estimate counts for in a new window
SMALLEST_MOVE = 1e-3  # relative to a group's own length: keeps differences of float32 gradients meaningful

Change = Callable[[Tensor], Tensor]  # from a move of flat parameters to the change of gradients on the last minibatch


class Stiffness:
    """Running estimate of the largest curvature relative to the H of a Lambda that knows directions.

    Power iteration in the metric of H: a gradient change w belongs to the displacement ``H^-1 w``, and its length
    ``sqrt(w . H^-1 w)`` tends to the top eigenvalue of H^-1 times the Hessian.
    """

    def __init__(self, like: Tensor, seed: int) -> None:
        generator = torch.Generator(device=like.device).manual_seed(seed)
        self.image = _random(like, generator)
        self.length: Tensor | None = None  # of the image at the last probe
        self.probes = 0
        self.turn = -1

    @torch.no_grad()
    def probe(self, geometry: Geometry, change: Change) -> None:
        """One power iteration."""
        along, length = self._along(geometry)
        image = self._image(geometry, along / length.unsqueeze(-1), change)
        if self.length is not None:  # H, and so the metric, may have changed
            self.image.mul_((length / self.length).unsqueeze(-1))
        self.image.lerp_(image, max(LONG_MEMORY, 1.0 / (self.probes + 1)))
        self.length = self._along(geometry)[1]
        self.probes += 1

    @torch.no_grad()
    def probe_axis(self, geometry: Geometry, change: Change) -> None:
        """Probe along the next axis of Lambda."""
        self.turn = (self.turn + 1) % geometry.axes
        geometry.observe_hessian(self.turn, self._image(geometry, geometry.axis(self.turn), change))

    def _image(self, geometry: Geometry, axis: Tensor, change: Change) -> Tensor:
        """The Hessian times a vector along which H has curvature 1."""
        far = geometry.scale**0.5  # a posterior standard deviation along such a vector
        return change((far * axis).to(self.image.dtype)).div(far)

    def forget(self) -> None:
        """Give new probes more weight, since Lambda or the position has changed."""
        self.probes = min(self.probes, KEPT)

    def value(self, geometry: Geometry) -> Tensor:
        """The largest ``rate * curvature``."""
        length = self._along(geometry)[1]
        return length * (length / (length if self.length is None else self.length)) * geometry.unit_rate

    def _along(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """``H^-1 w``, and the length of w in the metric."""
        along = geometry.direction(self.image).to(self.image.dtype) / geometry.unit_rate.unsqueeze(-1)
        return along, dot(self.image, along).clamp_min(1e-36).sqrt()


class Curvature:
    """Running estimate of the top curvature of each group.

    Args:
        slots: position of each group in the flat vectors.
    """

    def __init__(self, like: Tensor, slots: Sequence[slice], temperature: float, num_data: int, seed: int) -> None:
        self.slots, self.variance = list(slots), temperature / num_data
        self.generator = torch.Generator(device=like.device).manual_seed(seed)
        self.own, self.joint = _random(like, self.generator), _random(like, self.generator)
        self.probes = 0

    @torch.no_grad()
    def probe(self, theta: Tensor, change: Change) -> None:
        """One power iteration."""
        weight = max(MEMORY, 1.0 / (self.probes // 2 + 1))
        if self.probes % 2 == 0:
            signs = 2 * torch.randint(2, (len(self.slots),), generator=self.generator, device=theta.device) - 1
            move = signs * self._steps(theta)
            image = change(self.own * self._spread(move / self.own_values()))
            self.own.lerp_((image / self._spread(move)).to(self.own.dtype), weight)
        else:
            # The same over all groups at once, in coordinates in which each group's own top curvature is 1.
            roots = self.own_values().sqrt()
            move = (self._steps(theta) * roots).amin(-1, keepdim=True)
            image = change(self.joint * self._spread(move / (self._together().unsqueeze(-1) * roots)))
            self.joint.lerp_((image / self._spread(move * roots)).to(self.joint.dtype), weight)
        self.probes += 1

    def forget(self) -> None:
        """Give new probes more weight, since the position has changed."""
        self.probes = min(self.probes, KEPT)

    def _steps(self, theta: Tensor) -> Tensor:
        """Distance to move each group: a posterior standard deviation along its stiffest direction, within bounds."""
        size = self._lengths(theta).clamp_min(1.0)
        if self.probes == 0:
            return SMALLEST_MOVE * size
        spread = (self.variance / self.own_values()).sqrt()
        return torch.maximum(torch.minimum(spread, size), SMALLEST_MOVE * size)

    def _lengths(self, x: Tensor) -> Tensor:
        """Length of each group's part, ``[chains, groups]``."""
        return torch.stack([dot(x[:, slot], x[:, slot]) for slot in self.slots], dim=-1).sqrt().clamp_min(1e-30)

    def _spread(self, numbers: Tensor) -> Tensor:
        """``[chains, groups]`` as ``[chains, d]``."""
        sizes = [slot.stop - slot.start for slot in self.slots]
        parts = [n.unsqueeze(-1).expand(-1, size) for n, size in zip(numbers.unbind(-1), sizes, strict=True)]
        return torch.cat(parts, dim=-1)

    def _together(self) -> Tensor:
        return dot(self.joint, self.joint).sqrt().clamp_min(1e-30)

    def own_values(self) -> Tensor:
        """Top curvature of each group on its own, ``[chains, groups]``."""
        return self._lengths(self.own)

    def values(self) -> Tensor:
        """Top curvature of each group, raised so that the bound also holds for all groups together."""
        values = self.own_values()
        return values * self._together().clamp_min(1.0).unsqueeze(-1) if self.probes > 1 else values


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(like.shape, dtype=dtype, device=like.device).normal_(generator=generator)
