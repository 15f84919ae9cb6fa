"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox, Guestrin 2014), in velocity form.

    v <- (1 - a) v - lr (g + w),    theta <- theta + v,    Cov(w) = 2 a T / (N lr) I - [Var(g)]

In the notation of Theorem 2: P = I, A = a, C = a T / (N lr) - B^, with B^ = 0 or estimated. With step epsilon of the
underlying dynamics, ``lr = N epsilon^2`` and ``a`` is epsilon times the friction. The velocity has variance ``lr T /
N``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.planning import Move
from isosgd.samplers.steppers import Number, hamiltonian_
from isosgd.samplers.structure import root


class SGHMC(Sampler):
    """SGHMC, with or without the correction for gradient noise.

    Targets ``exp(-f / T)`` up to the discretisation bias ``rate h / (2 (2 - a))``, and without the correction as the
    rate tends to zero only: gradient noise then heats it by ``rate N b / (a T)``.

    Departures from the paper: B^ is measured, correlations included, where theirs is the user's; the velocity is never
    drawn anew; `adapt` sets the rate where none is given; there is a temperature.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N.
        temperature: T.
        lr: the rate; left out, `adapt` sets it.
        friction: a in (0, 1]; at 1 it is SGLD.
        corrected: subtract the measured gradient noise from the injected noise, correlations included. It needs centred
            noise vectors. Chen et al. take a user's B^; theirs with B^ = 0 is the default here too.
        settings: the settings common to all samplers, see `Sampler`.
    """

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        lr: float | None = None,
        friction: float = 0.1,
        corrected: bool = False,
        **settings: Any,
    ) -> None:
        if lr is not None and not lr > 0:
            raise ValueError(f"lr = {lr} must be positive; leave it out to have it set by the warm-up")
        if not 0 < friction <= 1:
            raise ValueError(f"friction = {friction} must lie in (0, 1]")
        self.given, self.friction, self.corrected = lr is not None, friction, corrected
        super().__init__(params, num_data=num_data, temperature=temperature, extra={"rate": None}, **settings)
        if lr is not None:
            for group in self.param_groups:
                group["rate"] = self.number(lr)

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        if self.given:
            return
        if curvature is None:
            raise ValueError("SGHMC has no rate and no curvature to set it from: pass lr, or use isosgd.sample")
        for group, h in zip(self.param_groups, curvature, strict=True):
            # Corrected, the noise must fit under a T / (N lr); otherwise it must drown in it.
            if self.corrected:
                self._fit_rate(group, h, self.longest_noise(group), rise)
            else:
                self._fit_rate(group, h, self.noise_summary(group, "top") / self.bias, rise)

    @property
    def _follows(self) -> tuple[bool, bool]:
        return False, self.corrected

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        rate, sigma = self.rate(group), self.composite(group)
        return self._outer(sigma, rate) if self.corrected else Move(rate, root(2.0 * sigma))

    def _velocity(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(p)
        velocity: Tensor = state["velocity"]
        return velocity

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        hamiltonian_(params, [self._velocity(p) for p in params], grads, rate, self.friction, kick)
