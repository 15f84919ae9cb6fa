"""The rate of each group: what bounds it, and the composite noise that goes with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.samplers.groups import Group
from isosgd.samplers.planning import Planner
from isosgd.samplers.steppers import Number, allowed_rate_curvature


class Rated(Planner):
    """The part of a sampler that has rates.

    Attributes:
        friction: a of Theorem 2; 1 is Theorem 1.
        bias: the relative error of the posterior variance that the step size may cause.
    """

    friction: float = 1.0
    bias: float

    @abstractmethod
    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        """Set every group's rate from the noise seen and, where known, the curvature of ``f / N`` in that group.

        Rates fall at once and rise by at most a factor of ``rise``.
        """

    def _fit_rate(self, group: Group, curvature: Number, noise: Tensor, rise: float) -> None:
        """The largest rate whose composite noise ``a T / (N rate)`` covers ``noise`` and whose bias is as allowed.

        It falls at once and rises by at most a factor of ``rise``.
        """
        # Without a temperature there is no variance that noise could spoil: the curvature alone bounds the rate.
        heat = self.friction * group["temperature"]
        cover = group["num_data"] * noise / heat if heat else torch.zeros_like(noise)
        guard = torch.as_tensor(curvature, dtype=noise.dtype, device=noise.device)
        inverse = torch.maximum(cover, guard / allowed_rate_curvature(self.bias, self.friction))
        old = None if group["rate"] is None else 1.0 / group["rate"]
        group["rate"] = self.number(1.0 / slow_rise(old, inverse, rise))
        self.refresh()

    def number(self, value: Number) -> Number:
        """A group's number in the form this sampler keeps: a float, or a tensor when chains or a capture need one."""
        if self.chains is None and not self.capturable:
            return float(value)
        device = self.param_groups[0]["params"][0].device
        return torch.as_tensor(value, dtype=torch.float32, device=device).clone()

    def rate(self, group: Group) -> Number:
        """The step of a group: ``theta -= rate * (...)``."""
        rate: Number | None = group["rate"]
        if rate is None:
            raise RuntimeError(
                f"group {group['name']!r} has no rate yet: give one, or call adapt() after noise was observed"
            )
        return rate

    def composite(self, group: Group) -> Number:
        """The noise, gradient's and injected together, that goes with the rate: ``Sigma = a T / (N rate)``."""
        sigma: Number = self.friction * group["temperature"] / (group["num_data"] * self.rate(group))
        return sigma


def slow_rise(old: Number | None, new: Tensor, rise: float) -> Tensor:
    """An inverse rate (a lambda) that grows at once and shrinks by at most a factor of ``rise``."""
    return new if old is None else torch.maximum(new, torch.as_tensor(old, dtype=new.dtype, device=new.device) / rise)
