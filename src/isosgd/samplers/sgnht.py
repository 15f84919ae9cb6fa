"""Stochastic gradient Nosé-Hoover thermostats (Ding, Fang, Babbush, Chen, Skeel, Neven 2014), in velocity form.

    v <- (1 - xi) v - lr (g + w),    theta <- theta + v,    w ~ N(0, 2 a T / (N lr))
    xi <- xi + gain (N |v|^2 / (lr T d) - 2 / (2 - xi))

In the notation of Theorem 2: P = I, C = a T / (N lr), and the friction A = xi is learned: it settles where gradient
noise and injected noise together keep the velocity at temperature T. With step epsilon of the underlying dynamics
``lr = N epsilon^2``, ``xi`` and ``a`` are epsilon times their xi and A, and their own gain is ``lr T / N``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.noise.model import dot, join
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike, check_if_given
from isosgd.samplers.program import StepProgram, Tensors
from isosgd.samplers.steppers import hamiltonian_, spread


class SGNHT(Sampler):
    """SGHMC with a friction that adapts to gradient noise of unknown size.

    Targets ``exp(-f / T)`` if gradient noise of any size is isotropic within each group. Otherwise only the mean
    temperature is right: the variance in a direction is too large by the factor ``(s + b) / (s + mean b)``, with
    ``s = a T / (N rate)`` and b the noise in that direction; `adapt` keeps the error below ``bias``.

    Departures from the paper: one thermostat for each group; the set point of the velocity is ``2 / (2 - xi)``, not 1,
    which makes the discrete recursion exact for Gaussians at any rate, on average over directions; ``gain``, an inverse
    thermal mass, does not vanish with the rate; friction is at most 1.

    Args:
        friction: a in (0, 1], the friction that matches the injected noise; xi starts there.
        gain: how fast xi adapts; ``0.1 friction^2`` by default. Its standard deviation is then ``0.3 a / sqrt(d)``.
        corrected: subtract the measured gradient noise from the injected noise, as in `SGHMC`; the total is isotropic.
        settings: those of every `Sampler`.
    """

    family = "hamiltonian"
    targets = "exp(-f / T) for isotropic gradient noise"
    paper = "Ding et al. 2014"
    departures = "a thermostat for each group; the set point of the discrete recursion; a free thermal mass"

    def __init__(
        self,
        params: ParamsLike,
        *,
        friction: float = 0.1,
        gain: float | None = None,
        corrected: bool | None = None,
        **settings: Any,
    ) -> None:
        check_if_given("gain", gain, "for 0.1 friction^2")
        super().__init__(params, friction=friction, corrected=corrected, **settings)
        self.gain = 0.1 * friction**2 if gain is None else gain

    def thermostat(self, group: Group) -> Tensor:
        """The friction xi of a group, one for each chain."""
        state = self.state[group["params"][0]]
        if "thermostat" not in state:
            lead = () if self.chains is None else (self.chains,)
            state["thermostat"] = torch.full(lead, self.friction, device=group["params"][0].device)
        xi: Tensor = state["thermostat"]
        return xi

    def velocity_variance(self, group: Group) -> Number:
        """Variance of the velocity at temperature T in continuous time."""
        variance: Number = group["temperature"] * self.rate(group) / group["num_data"]
        return variance

    def noise_bound(self, group: Group) -> Tensor:
        """Anisotropic noise is at most a small share of it; isotropic noise may double the friction."""
        if self.corrected:
            return super().noise_bound(group)
        top, mean = self.noise_summary(group, "top"), self.noise_summary(group, "mean")
        return torch.maximum((top - mean) / self.bias - mean, mean)

    def _program(self) -> StepProgram | str:
        if any(p.dtype.itemsize < 4 for group in self.param_groups for p in group["params"]):
            return "thermostats need float32"
        if self.corrected:
            return "thermostats with a correction for noise run step by step"
        if not all(group["temperature"] for group in self.param_groups):
            return "there is no temperature to regulate"
        return ThermostatProgram(self)

    def _update(self) -> None:
        for part in self.injector.layout:
            velocity = [self.velocity(p) for p in part.params]
            torch._foreach_mul_(velocity, spread(1.0 - self.thermostat(part.group), velocity))
        super()._update()
        for part in self.injector.layout:
            if part.group["temperature"]:
                xi, v = self.thermostat(part.group), join([self.velocity(p) for p in part.params], self.batched).float()
                found = dot(v, v) / (v.shape[-1] * self.velocity_variance(part.group))
                xi.add_(self.gain * (found - 2.0 / (2.0 - xi))).clamp_(max=1.0)

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        hamiltonian_(params, [self.velocity(p) for p in params], grads, rate, 0.0, kick)  # friction was applied


class ThermostatProgram(StepProgram):
    """Steps of `SGNHT`. The state also has the velocity and the friction of each group."""

    def __init__(self, sampler: SGNHT) -> None:
        super().__init__(sampler)
        self.thermostats = [sampler.thermostat(group) for group in sampler.param_groups]
        self.variance, self.gain = sampler.velocity_variance, sampler.gain

    def memory(self) -> list[list[Tensor]]:
        return [self.velocities()]

    def numbers(self) -> list[Tensor]:
        return self.thermostats

    def take_numbers(self, numbers: Tensor) -> None:
        for xi, found in zip(self.thermostats, numbers.unbind(-1), strict=True):
            xi.copy_(found.view_as(xi))

    def tensors(self) -> Tensors:
        rates, variances = self.rates(), [self.variance(group) for group in self.sampler.param_groups]
        return rates, torch.stack([torch.as_tensor(v).to(rates).expand(self.chains) for v in variances], -1)

    def move(self, state: Tensor, gradient: Tensor, noise: Tensor | None, xi: Tensor, tensors: Tensors) -> Tensor:
        rate, variance = tensors
        theta, velocity, friction = torch.split(state, [self.dim, self.dim, len(self.counts)], -1)
        wide = torch.cat([f.expand(-1, n) for f, n in zip(torch.split(friction, 1, -1), self.counts, strict=True)], -1)
        velocity = (1.0 - wide) * velocity - rate * gradient - xi
        squares = torch.stack([v.square().sum(-1) / v.shape[-1] for v in torch.split(velocity, self.counts, -1)], -1)
        friction = friction + self.gain * (squares / variance - 2.0 / (2.0 - friction))
        return torch.cat([theta + velocity, velocity, friction.clamp(max=1.0)], -1).to(state.dtype)
