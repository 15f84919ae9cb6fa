"""Isotropic SGD with momentum (the outlook of Franzese, Candela, Milios, Filippone, Michiardi 2020).

    v <- (1 - a) v - (a T / (N lam)) (g + w),    theta <- theta + v,    Cov(w) = 2 lam I - Var(g)

In the notation of Theorem 2: Sigma = lam I, A = a = eta lam. Gradient noise and injected noise add up to a constant
isotropic covariance, as in `isosgd.samplers.isgd`, which is the case a = 1. It is SGHMC with a measured B^ and a rate
that follows from lambda.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike, check_if_given
from isosgd.samplers.injection import Move


class MomentumISGD(Sampler):
    """I-SGD with momentum, one lambda for each group, at a rate it finds itself.

    Targets ``exp(-f / T)`` if lambda is constant and at least the top eigenvalue of B, up to the discretisation bias
    ``rate h / (2 (2 - a))``. The rate is ``a T / (N lam)``. Where the noise bounds it, chains mix as fast as without
    momentum; where the curvature does, a few times faster.

    Departures from the paper, which gives no algorithm: those of `isosgd.samplers.isgd`.

    Args:
        lam: fixed lambda for all groups; by default `adapt` sets it from the noise and the curvature.
        friction: a in (0, 1]; at 1 it is I-SGD.
        settings: those of every `Sampler`.
    """

    family = "hamiltonian"
    paper = "Franzese et al. 2020, outlook"
    departures = "those of isgd; one lambda a group only"
    has_lr = False

    def __init__(self, params: ParamsLike, *, lam: float | None = None, friction: float = 0.1, **settings: Any) -> None:
        check_if_given("lam", lam, "to have it estimated")
        super().__init__(params, friction=friction, corrected=True, **settings)
        if not self.paired:
            raise ValueError("momentum I-SGD subtracts centred noise vectors: use noise='paired'")
        self.given, self._lam = lam is not None, lam
        if lam is not None:
            for group in self.param_groups:
                group["rate"] = self.number(friction * group["temperature"] / (group["num_data"] * lam))

    def lam(self, group: Group) -> Number:
        """The composite noise of a group."""
        return self.composite(group) if self._lam is None else self._lam

    def clipped_share(self, group: Group) -> Tensor:
        if group["rate"] is None or self.noise.of_group(group) is None:
            return super().clipped_share(group)
        return (self.noise.recent_lengths(group) > 2.0 * self.lam(group)).float().mean(0)

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        return self._outer(self.lam(group), self.rate(group))
