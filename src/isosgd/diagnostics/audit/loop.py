"""The description of a sampling loop, and the tempered posterior that the loop samples.

With ``m`` the momentum, ``a = 1 - m`` the friction and ``s`` the factor of the loss's reduction on the mean gradient (1
for a mean, n for a sum, N for a full-data estimate), one step is

    v <- m v - lr (s g + prior' + wd theta) + sigma xi,    theta <- theta + v        (noise on the velocity)

or has ``sigma xi`` added to theta. On a quadratic potential that is a linear recursion, whose stationary variance is
known exactly. In the limit of small steps it gives ``T = N sigma^2 / (2 a lr s)`` for noise on the velocity,
``a N sigma^2 / (2 lr s)`` for noise on the parameters, and ``N lr s Var(g) / (2 a)`` from gradient noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np

from isosgd.geometry.rule import variance_inflation
from isosgd.samplers.groups import check_choice

MANY = 1000  # examples; from here on a temperature of 1/N is not a coincidence
SMALL = 1e-8  # what theta forgets in a period, in the limit of small steps
SCALES = {"mean": "", "sum": "*n", "full": "*N"}  # of the gradient, relative to the mean gradient


@dataclass(frozen=True)
class Loop:
    """What is known about a sampling loop.

    Attributes:
        num_data: N, the number of examples in the data set.
        lr: the learning rate.
        noise: standard deviation of the noise added to each parameter (velocity) in a step, such as
            ``math.sqrt(2 * lr * T / N)``; 0 for none, None if unknown.
        batch_size: n.
        loss_reduction: ``mean`` over the minibatch, ``sum`` over it, or ``full``: the sum times N / n.
        temperature: T, the target temperature. 1 / N is taken for 1, said of a mean loss.
        weight_decay: wd; adds ``wd theta`` to the gradient.
        decoupled: weight decay acts directly on the parameters (as in AdamW), not through the velocity.
        prior: factor of the negative log prior in the loss; 1 / N is right for a mean loss.
        prior_precision: precision of the intended normal prior.
        momentum: m; the friction is ``a = 1 - m``.
        noise_on: ``velocity``, or ``parameters`` if noise is added after the step. The same without momentum.
        averaged: each step injects the mean of its own and the last step's random numbers (Leimkuhler and Matthews
            2013), with ``noise`` stated as if it did not; without momentum only.
        momentum_noise: standard deviation of the velocity when it is redrawn.
        refresh_every: steps between two such refreshes.
        order: whether a step kicks the velocity and then moves, or moves first.
        minibatches: ``independent``, or ``epoch``: without replacement, as from a shuffled loader.
        reused: consecutive steps with the same noise, as when a random key is used twice.
        replicas: replicas of a data-parallel run, each with its own noise.
        corrected: ``noise`` is the total of injected and gradient noise, which the loop holds constant.
        assumed_num_data: the N that the loop assumes, if it differs from ``num_data``.
        gradient_noise: Var(g) of one parameter, for the gradient of the **mean** loss over independent minibatches.
        curvature: h of f / N; includes the discretisation error.
    """

    num_data: int
    lr: float
    noise: float | None = 0.0
    batch_size: int | None = None
    loss_reduction: Literal["mean", "sum", "full"] = "mean"
    temperature: float = 1.0
    weight_decay: float = 0.0
    decoupled: bool = False
    prior: float = 0.0
    prior_precision: float | None = None
    momentum: float = 0.0
    noise_on: Literal["velocity", "parameters"] = "velocity"
    averaged: bool = False
    momentum_noise: float | None = None
    refresh_every: int | None = None
    order: Literal["kick", "move"] = "kick"
    minibatches: Literal["independent", "epoch"] = "independent"
    reused: int = 1
    replicas: int = 1
    corrected: bool = False
    assumed_num_data: int | None = None
    gradient_noise: float | None = None
    curvature: float | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Loop).items():
            if get_origin(kind) is Literal:
                check_choice(name, getattr(self, name), get_args(kind))
        for name in ("num_data", "batch_size", "refresh_every", "reused", "replicas", "assumed_num_data"):
            _check_number(name, getattr(self, name), 1, "an integer of at least 1", int)
        for name in ("lr", "curvature", "prior_precision"):
            _check_number(name, getattr(self, name), 5e-324, "a positive number", int | float)
        for name in ("noise", "momentum_noise", "prior", "temperature", "weight_decay", "gradient_noise", "momentum"):
            _check_number(name, getattr(self, name), 0, "a number of at least 0", int | float)
        if not self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum} must lie in [0, 1); the friction is 1 - momentum")
        if self.loss_reduction == "sum" and self.batch_size is None:
            raise ValueError("loss_reduction = 'sum' multiplies gradients by n: give batch_size")
        if self.batch_size is not None and self.batch_size > self.num_data:
            raise ValueError(f"batch_size = {self.batch_size} is larger than num_data = {self.num_data}")
        if (self.refresh_every is None) != (self.momentum_noise is None):
            raise ValueError("momentum_noise and refresh_every describe one refresh: give both or neither")
        if self.averaged and (self.momentum or self.reused > 1):
            raise ValueError("averaged = True works without momentum only, and with fresh random numbers in every step")
        if self.refresh_every == 1 and self.order == "move":
            raise ValueError("refresh_every = 1 with order = 'move' discards every gradient before anything moves")

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def friction(self) -> float:
        """The friction a = 1 - m."""
        return 1.0 - self.momentum

    @property
    def scale(self) -> float:
        """The factor s of the gradient relative to that of the mean loss."""
        factors = {"mean": 1, "sum": self.batch_size or 1, "full": self.assumed_num_data or self.num_data}
        return float(factors[self.loss_reduction])

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of a step; 0 if it is unknown."""
        return self.noise or 0.0

    @property
    def target_temperature(self) -> float:
        """The intended temperature. 1/N is a way to say that the loss is a mean: T = 1."""
        is_share = self.num_data >= MANY and math.isclose(self.temperature * self.num_data, 1.0, rel_tol=0.01)
        return 1.0 if is_share else self.temperature

    @property
    def right_noise(self) -> str:
        """The noise that samples at T, as a rule."""
        friction = "" if not self.momentum else ("*a" if self.noise_on == "velocity" else "/a")
        return f"sqrt(2*lr*T{friction}{SCALES[self.loss_reduction]}/N)".replace("*N/N", "")

    @cached_property
    def response(self) -> float:
        """How far a kick of size 1 moves theta until the velocity is redrawn, as a mean over the steps it may come at.

        Without refresh that is ``1 + m + m^2 + ... = 1 / a``.
        """
        if self.refresh_every is None:
            return 1.0 / self.friction
        moves = np.cumsum(self.momentum ** np.arange(self.refresh_every, dtype=np.float64))
        return float(moves.sum() if self.order == "kick" else moves[:-1].sum()) / self.refresh_every

    @property
    def period(self) -> int:
        """Steps after which the loop repeats: the velocity is refreshed and the noise is fresh."""
        return math.lcm(self.refresh_every or 1, self.reused)

    def relaxation(self, curvature: float) -> float:
        """Steps in which theta forgets its past."""
        return 1.0 / (self.lr * self.scale * curvature * self.response)

    # -- temperatures -------------------------------------------------------------------------------------------------

    def temperature_of(
        self, injected: float = 0.0, gradients: float = 0.0, refreshed: float = 0.0, curvature: float | None = None
    ) -> float:
        """T on a quadratic potential: the variance of theta at the ends of periods, times N h.

        The state (theta, v, xi) follows a linear recursion: over a period it is mapped by F and gains the covariance Q,
        so its stationary covariance solves ``S = F S F' + Q``. T is linear in the three variances, and exact at any
        rate.

        Args:
            injected: variance of the noise of a step.
            gradients: Var(g) of the mean gradient, independent from step to step.
            refreshed: variance of a redrawn velocity.
            curvature: h of f / N; None for the limit of small h, without discretisation error.

        Returns:
            The temperature; infinite if the steps are unstable.

        Example:
            >>> loop = Loop(num_data=100, lr=0.04)
            >>> round(loop.temperature_of(injected=2 * 0.04 / 100, curvature=1.0), 4)  # 1/(1 - lr h / 2)
            1.0204
        """
        scale = self.lr * self.scale
        if curvature is None:
            curvature = SMALL / (scale * self.response * self.period)
        heat = scale**2 * gradients
        if self.averaged:  # averaged noise has no discretisation error (Leimkuhler and Matthews 2013)
            return self.num_data * (injected + heat * variance_inflation(scale * curvature)) / (2.0 * scale)
        on_velocity, on_theta = (injected**0.5, 0.0) if self.noise_on == "velocity" else (0.0, injected**0.5)
        kick = np.array([[1, 0, 0], [-scale * curvature, self.momentum, on_velocity], [0, 0, 1]], dtype=np.float64)
        move = np.array([[1, 1, on_theta], [0, 1, 0], [0, 0, 1]], dtype=np.float64)
        step = [(kick, np.diag([0.0, heat, 0.0])), (move, np.zeros((3, 3)))]
        if self.order == "move":
            step.reverse()
        whole, gained = np.eye(3), np.zeros((3, 3))
        for t in range(self.period):
            parts = list(step)
            if self.refresh_every is not None and t % self.refresh_every == 0:
                parts.insert(0, (np.diag([1.0, 0.0, 1.0]), np.diag([0.0, refreshed, 0.0])))
            if t % self.reused == 0:
                parts.insert(0, (np.diag([1.0, 1.0, 0.0]), np.diag([0.0, 0.0, 1.0])))
            for matrix, covariance in parts:
                whole, gained = matrix @ whole, matrix @ gained @ matrix.T + covariance
        if np.abs(np.linalg.eigvals(whole)).max() >= 1.0:
            return math.inf
        stationary = np.linalg.solve(np.eye(9) - np.kron(whole, whole), gained.ravel())
        return float(stationary[0]) * self.num_data * curvature

    def noise_temperature(self, curvature: float | None = None) -> float | None:
        """T of the injected noise alone (of the total noise if `corrected`); None if it is unknown."""
        if self.noise is None:
            return None
        return self.temperature_of(self.sigma**2 / self.replicas, 0.0, (self.momentum_noise or 0.0) ** 2, curvature)

    def gradient_temperature(self, curvature: float | None = None) -> float | None:
        """T added by gradient noise; if `corrected`, what minibatches without replacement take away. None if unknown.

        Noise without replacement cancels over an epoch, entirely so for a slow chain: it adds nothing.
        """
        if self.gradient_noise is None:
            return 0.0 if self.corrected and self.minibatches == "independent" else None
        share = (self.minibatches == "independent") - self.corrected
        return share * self.temperature_of(gradients=self.gradient_noise, curvature=curvature) if share else 0.0

    def temperatures(self) -> tuple[float | None, float | None, float | None]:
        """The temperature, its injected part, and its part from gradient noise; None where unknown."""
        injected, added = self.noise_temperature(self.curvature), self.gradient_temperature(self.curvature)
        if injected is None or (not injected and added is None):
            return None, injected, added
        return injected + (added or 0.0), injected, added

    # -- the prior -----------------------------------------------------------------------------------------------------

    @property
    def decay_precision(self) -> float:
        """The precision p of the normal prior in ``exp(-(L + p |theta|^2 / 2) / T)`` that weight decay stands for."""
        coupled = self.num_data * self.weight_decay / self.scale
        # Decoupled decay acts once a step; through the velocity it would act c times.
        return coupled / self.response if self.decoupled else coupled

    def prior_strength(self) -> float | None:
        """How many times the intended prior is counted (1 is right); None if the intended prior is unknown."""
        if self.weight_decay and self.prior_precision is None:
            return None
        decay = self.decay_precision / self.prior_precision if self.weight_decay and self.prior_precision else 0.0
        return decay + self.prior * self.num_data / self.scale

    @property
    def precision(self) -> float | None:
        """The precision of the normal prior of f, from weight decay and from the loss; None if unknown."""
        in_loss = self.prior * self.num_data / self.scale
        if in_loss and self.prior_precision is None:
            return None
        return self.decay_precision + in_loss * (self.prior_precision or 0.0)


NAMES = tuple(field.name for field in fields(Loop))


def _check_number(name: str, value: float | None, least: float, expected: str, kind: type | object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not (math.isfinite(value) and value >= least):  # type: ignore[arg-type]
        raise ValueError(f"{name} = {value!r} must be {expected}")
