"""A sampling loop, described: its loss, its steps and its noise, and the tempered posterior that these amount to.

With ``m`` the momentum, ``a = 1 - m`` the friction and ``s`` what the loss's reduction multiplies the mean gradient by
(1 for a mean, n for a sum, N for a full-data estimate), a described step is

    v <- m v - lr (s g + prior' + wd theta) + sigma xi,    theta <- theta + v        (noise on the velocity)

or has ``sigma xi`` added to theta. Over ``l`` steps (from one refresh of the velocity to the next, or one step where
there is none) a kick of size 1 in step i moves theta by ``c_i = 1 + m + ... + m^(l-i)``. Where theta moves little in
that time, the steps add up to a drift ``-lr sum(c) s grad L / N`` and a variance

    D = A^2 r^2 + (sigma_v^2 + lr^2 s^2 Var(g)) sum(c^2) + l sigma_theta^2,    A = m + ... + m^l

(r the standard deviation of a fresh velocity). Drift and variance of ``exp(-L / T)`` stand in the ratio of Langevin
dynamics, ``D = 2 lr s sum(c) T / N``, so that

    T = N D / (2 lr s sum(c)).

Without refresh ``c_i = 1 / a``, ``A = 0``: ``T = N sigma^2 / (2 a lr s)`` for noise on the velocity, ``a N sigma^2 /
(2 lr s)`` for noise on the parameters, and ``N lr s Var(g) / (2 a)`` from gradient noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from isosgd.diagnostics.auditing.checks import real, whole
from isosgd.diagnostics.auditing.epochs import share_left
from isosgd.diagnostics.auditing.expressions import evaluate

Reduction = Literal["mean", "sum", "full"]
Shared = Literal["steps", "tensors", "chains"]
Rule = float | str
MANY = 1000  # data, from which on a temperature of 1/N is no coincidence
SCALES: dict[Reduction, str] = {"mean": "", "sum": "*n", "full": "*N"}  # of the gradient, over the mean gradient


@dataclass(frozen=True)
class Loop:
    """What is known of a loop that is meant to sample. Rules are numbers, or expressions of lr, N, n, T and a.

    Attributes:
        num_data: N, the number of examples in the data set.
        lr: the learning rate.
        noise: standard deviation of what is added to each parameter (velocity) in a step, e.g. ``"sqrt(2*lr*T/N)"``; 0
            for none, None when not known.
        batch_size: n.
        loss_reduction: ``mean`` over the minibatch, ``sum`` over it, or ``full``: the sum times N / n.
        temperature: T, the temperature that is meant; a rule such as ``"1/N"`` where a script sets it so.
        weight_decay: wd; the loss has a gradient ``wd theta`` from it.
        decoupled: weight decay acts on the parameters beside the gradient (as in AdamW), not through the velocity.
        prior: factor before the negative log prior in the loss, as a rule; ``"1/N"`` is right for a mean loss.
        prior_precision: precision of the normal prior that is meant.
        momentum: m; the friction ``a = 1 - m``.
        noise_on: ``velocity``, or ``parameters`` when noise is added after the step. Without momentum both are one.
        averaged: a step takes the mean of its own and the last step's random numbers (Leimkuhler and Matthews 2013),
            at a ``noise`` that counts as if it did not; without momentum.
        momentum_noise: standard deviation of the velocity when it is drawn anew, as a rule.
        refresh_every: steps from one such draw to the next.
        order: whether a step kicks the velocity and then moves, or moves first.
        clipping: largest norm that gradients are cut to.
        augmentation: inputs are augmented at random.
        batchnorm: BatchNorm in training mode.
        dropout: dropout, or another stochastic layer, in training mode.
        minibatches: ``independent``, or ``epoch``: without replacement, as a shuffled loader has them.
        shared_noise: where one random number is used more than once: in ``reused`` steps in a row, in all ``tensors``
            of the same shape, or in all ``chains``.
        reused: steps that share noise, with ``shared_noise="steps"``.
        replicas: replicas of a data-parallel run that draw noise of their own.
        burn_in: steps that the loop adapts, or trains, before it samples.
        counter: what advances the count of the burn-in: every ``step``, or every ``tensor`` of a step.
        num_tensors: how many tensors are updated.
        counter_saved: whether that count is part of what is saved.
        corrected: ``noise`` is that of injected and gradient noise together, which the loop keeps constant.
        told_num_data: the N that the loop itself was given, which its rules use, where it is another.
        gradient_noise: Var(g) of a parameter, of the gradient of the **mean** loss, over independent minibatches.
        curvature: h of f / N; discretisation is then reckoned with.
    """

    num_data: int
    lr: float
    noise: Rule | None = 0.0
    batch_size: int | None = None
    loss_reduction: Reduction = "mean"
    temperature: Rule = 1.0
    weight_decay: float = 0.0
    decoupled: bool = False
    prior: Rule | None = None
    prior_precision: float | None = None
    momentum: float = 0.0
    noise_on: Literal["velocity", "parameters"] = "velocity"
    averaged: bool = False
    momentum_noise: Rule | None = None
    refresh_every: int | None = None
    order: Literal["kick", "move"] = "kick"
    clipping: float | None = None
    augmentation: bool = False
    batchnorm: bool = False
    dropout: bool = False
    minibatches: Literal["independent", "epoch"] = "independent"
    shared_noise: Shared | None = None
    reused: int = 2
    replicas: int = 1
    burn_in: int = 0
    counter: Literal["step", "tensor"] = "step"
    num_tensors: int = 1
    counter_saved: bool = True
    corrected: bool = False
    told_num_data: int | None = None
    gradient_noise: float | None = None
    curvature: float | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {listed}")
        for name in ("num_data", "batch_size", "refresh_every", "reused", "replicas", "num_tensors", "told_num_data"):
            whole(name, getattr(self, name))
        if self.burn_in:
            whole("burn_in", self.burn_in)
        for name in ("lr", "clipping", "curvature", "prior_precision"):
            real(name, getattr(self, name), positive=True)
        for name in ("weight_decay", "gradient_noise"):
            real(name, getattr(self, name), positive=False)
        real("momentum", self.momentum, positive=False)
        if not self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum} must lie in [0, 1); the friction is 1 - momentum")
        if self.loss_reduction == "sum" and self.batch_size is None:
            raise ValueError("loss_reduction = 'sum' multiplies gradients by n: give batch_size")
        if self.batch_size is not None and self.batch_size > self.num_data:
            raise ValueError(f"batch_size = {self.batch_size} is larger than num_data = {self.num_data}")
        if (self.refresh_every is None) != (self.momentum_noise is None):
            raise ValueError(
                "momentum_noise says what a velocity is drawn from and refresh_every how often: give both or neither"
            )
        if self.averaged and (self.momentum or self.shared_noise == "steps"):
            raise ValueError("averaged noise goes without momentum, and with fresh random numbers in every step")
        if self.refresh_every == 1 and self.order == "move":
            raise ValueError("refresh_every = 1 with order = 'move' forgets every gradient before it moves anything")
        for name in ("noise", "momentum_noise", "prior", "temperature"):
            if self.value(name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} comes to a negative number")

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, name: str) -> float:
        """A rule's value; 0 for None."""
        rule: Rule | None = getattr(self, name)
        believed = float(self.told_num_data or self.num_data)
        known = {"lr": self.lr, "N": believed, "n": self.batch_size, "a": self.friction}
        if name != "temperature":
            known["T"] = self.value("temperature")
        return 0.0 if rule is None else evaluate(rule, known, name)

    @property
    def friction(self) -> float:
        """The friction a = 1 - m."""
        return 1.0 - self.momentum

    @property
    def scale(self) -> float:
        """How much larger the gradient is than that of the mean loss, s."""
        return {"mean": 1.0, "sum": float(self.batch_size or 1), "full": float(self.told_num_data or self.num_data)}[
            self.loss_reduction
        ]

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the noise of a step."""
        return self.value("noise")

    @cached_property
    def meant(self) -> float:
        """The temperature that is meant. One of 1/N is a way to say that the loss is a mean, and means 1."""
        told = self.value("temperature")
        a_rule = isinstance(self.temperature, str)
        is_share = math.isclose(told * self.num_data, 1.0, rel_tol=0.01)
        return 1.0 if is_share and (a_rule or self.num_data >= MANY) else told

    @property
    def fresh(self) -> float:
        """Standard deviation of a velocity that is drawn anew."""
        return self.value("momentum_noise")

    @property
    def right_noise(self) -> str:
        """The noise that samples at T, as a rule."""
        friction = "" if not self.momentum else ("*a" if self.noise_on == "velocity" else "/a")
        return f"sqrt(2*lr*T{friction}{SCALES[self.loss_reduction]}/N)".replace("*N/N", "")

    @property
    def right_fresh(self) -> float:
        """The standard deviation of a velocity at the temperature that is meant."""
        return math.sqrt(self.lr * self.scale * self.meant / self.num_data)

    # -- temperatures -------------------------------------------------------------------------------------------------

    @cached_property
    def response(self) -> NDArray[np.float64]:
        """How far a kick of size 1 in each step has moved theta by the end of the period, ``c``."""
        if self.refresh_every is None:
            return np.array([1.0 / self.friction])
        moves = np.cumsum(self.momentum ** np.arange(self.refresh_every, dtype=np.float64))[::-1]
        return moves if self.order == "kick" else np.append(moves[1:], 0.0)

    def temperature_of(self, velocity: float = 0.0, parameters: float = 0.0, fresh: float = 0.0, run: int = 1) -> float:
        """T of the likelihood that so much variance in a step amounts to, where theta moves little in a period.

        Args:
            velocity: variance added to the velocity in a step.
            parameters: variance added to the parameters in a step.
            fresh: variance of a velocity drawn anew.
            run: steps in a row that have the same noise.
        """
        c = self.response
        if self.refresh_every is None:
            squares, starts = run * float(c[0] ** 2), 0.0
            moved = float(run)
        else:
            blocks = np.arange(0, len(c), run)
            squares = float((np.add.reduceat(c, blocks) ** 2).sum())
            moved = float((np.diff(np.append(blocks, len(c))) ** 2).sum())
            starts = float(c[0] * self.momentum if self.order == "kick" else c[0] + self.momentum ** (len(c) - 1))
        variance = starts**2 * fresh + squares * velocity + moved * parameters
        return self.num_data * variance / (2.0 * self.lr * self.scale * float(c.sum()))

    def noise_temperature(self, with_refresh: bool = True) -> float | None:
        """T of the injected noise alone (of the composite noise when `corrected`)."""
        if self.noise is None:
            return None
        loop = self if with_refresh else replace(self, refresh_every=None, momentum_noise=None)
        run = self.reused if self.shared_noise == "steps" else 1
        place = {"velocity" if self.noise_on == "velocity" else "parameters": self.sigma**2 / self.replicas}
        fresh = loop.fresh**2 if loop.refresh_every else 0.0
        return loop.temperature_of(**place, fresh=fresh, run=run)

    def gradient_temperature(self) -> float | None:
        """T that gradient noise adds; with `corrected`, what minibatches that cancel take away."""
        if self.gradient_noise is None:
            return 0.0 if self.corrected and self.minibatches == "independent" else None
        added = self.temperature_of(velocity=(self.lr * self.scale) ** 2 * self.gradient_noise)
        share = self.epoch_share() if self.minibatches == "epoch" else 1.0
        return added * (share - 1.0 if self.corrected else share)

    def epoch_share(self) -> float:
        """Share of the heat of gradient noise that is left when an epoch's minibatches do not repeat.

        Nothing is left of it when the curvature is not known: that is the limit of a slow chain. Within a minibatch,
        too, no example repeats, which makes its noise smaller by ``(N - n) / (N - 1)``.
        """
        n = self.batch_size or 1
        if self.curvature is None or n == self.num_data:
            return 0.0
        left = share_left(1.0 / self.relaxation(self.curvature), self.num_data // n)
        return left * (self.num_data - n) / (self.num_data - 1)

    # -- the prior ----------------------------------------------------------------------------------------------------

    @property
    def decay_precision(self) -> float:
        """The precision p of the normal prior in ``exp(-(L + p |theta|^2 / 2) / T)`` that weight decay amounts to."""
        whole = self.num_data * self.weight_decay / self.scale
        # Decay beside the gradient acts once a step; through the velocity it would act c times.
        return whole / float(self.response.mean()) if self.decoupled else whole

    def prior_strength(self) -> float | None:
        """How many times the prior that is meant is counted, 1 being right; None when it is not known what is meant."""
        found = 0.0
        if self.prior is not None:
            found += self.value("prior") * self.num_data / self.scale
        if self.weight_decay:
            if self.prior_precision is None:
                return None
            found += self.decay_precision / self.prior_precision
        return found

    @property
    def precision(self) -> float | None:
        """The precision of the normal prior of f, from weight decay and from the loss; None when it is not known."""
        in_loss = self.value("prior") * self.num_data / self.scale
        if in_loss and self.prior_precision is None:
            return None
        return self.decay_precision + in_loss * (self.prior_precision or 0.0)

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        """Steps after which the loop is where it was: the velocity is drawn anew, the noise is fresh."""
        return math.lcm(self.refresh_every or 1, self.reused if self.shared_noise == "steps" else 1)

    def relaxation(self, curvature: float) -> float:
        """Steps in which theta forgets its past."""
        return 1.0 / (self.lr * self.scale * curvature * float(self.response.mean()))


_CHOICES: dict[str, Sequence[str | None]] = {
    "loss_reduction": get_args(Reduction),
    "noise_on": ("velocity", "parameters"),
    "order": ("kick", "move"),
    "minibatches": ("independent", "epoch"),
    "shared_noise": (None, *get_args(Shared)),
    "counter": ("step", "tensor"),
}
NAMES = tuple(field.name for field in fields(Loop))
