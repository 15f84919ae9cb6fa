"""The description of a sampling loop, and the tempered posterior that the loop samples.

With ``m`` the momentum, ``a = 1 - m`` the friction and ``s`` the factor of the loss's reduction on the mean gradient (1
for a mean, n for a sum, N for a full-data estimate), one step is

    v <- m v - lr (s g + prior' + wd theta) + sigma xi,    theta <- theta + v        (noise on the velocity)

or has ``sigma xi`` added to theta. Over ``l`` steps (from one refresh of the velocity to the next, or one step without
refresh) a kick of size 1 in step i moves theta by ``c_i = 1 + m + ... + m^(l-i)``. Where theta moves little in that
time, the steps add up to a drift ``-lr sum(c) s grad L / N`` and a variance

    D = A^2 r^2 + (sigma_v^2 + lr^2 s^2 Var(g)) sum(c^2) + l sigma_theta^2,    A = m + ... + m^l

(r the standard deviation of a refreshed velocity). Langevin dynamics of ``exp(-L / T)`` has
``D = 2 lr s sum(c) T / N``, so that

    T = N D / (2 lr s sum(c)).

Without refresh ``c_i = 1 / a``, ``A = 0``: ``T = N sigma^2 / (2 a lr s)`` for noise on the velocity, ``a N sigma^2 /
(2 lr s)`` for noise on the parameters, and ``N lr s Var(g) / (2 a)`` from gradient noise.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from isosgd.geometry.rule import variance_inflation

Reduction = Literal["mean", "sum", "full"]
Shared = Literal["steps", "tensors", "chains"]
Rule = float | str
MANY = 1000  # examples; from here on a temperature of 1/N is not a coincidence
LONGEST_RULE = 200  # characters
SCALES: dict[Reduction, str] = {"mean": "", "sum": "*n", "full": "*N"}  # of the gradient, relative to the mean gradient


@dataclass(frozen=True)
class Loop:
    """What is known about a sampling loop. Rules are numbers, or expressions of lr, N, n, T and a.

    Attributes:
        num_data: N, the number of examples in the data set.
        lr: the learning rate.
        noise: standard deviation of the noise added to each parameter (velocity) in a step, e.g. ``"sqrt(2*lr*T/N)"``;
            0 for none, None if unknown.
        batch_size: n.
        loss_reduction: ``mean`` over the minibatch, ``sum`` over it, or ``full``: the sum times N / n.
        temperature: T, the target temperature; a rule such as ``"1/N"`` if the script computes it.
        weight_decay: wd; adds ``wd theta`` to the gradient.
        decoupled: weight decay acts directly on the parameters (as in AdamW), not through the velocity.
        prior: factor of the negative log prior in the loss, as a rule; ``"1/N"`` is right for a mean loss.
        prior_precision: precision of the intended normal prior.
        momentum: m; the friction is ``a = 1 - m``.
        noise_on: ``velocity``, or ``parameters`` if noise is added after the step. The same without momentum.
        averaged: each step injects the mean of its own and the last step's random numbers (Leimkuhler and Matthews
            2013), with ``noise`` stated as if it did not; without momentum only.
        momentum_noise: standard deviation of the velocity when it is redrawn, as a rule.
        refresh_every: steps between two such refreshes.
        order: whether a step kicks the velocity and then moves, or moves first.
        clipping: largest gradient norm.
        augmentation: inputs are augmented at random.
        batchnorm: BatchNorm in training mode.
        dropout: dropout, or another stochastic layer, in training mode.
        minibatches: ``independent``, or ``epoch``: without replacement, as from a shuffled loader.
        shared_noise: where the same random numbers are used more than once: in ``reused`` consecutive steps, in all
            ``tensors`` of the same shape, or in all ``chains``.
        reused: consecutive steps with the same noise, for ``shared_noise="steps"``.
        replicas: replicas of a data-parallel run, each with its own noise.
        burn_in: steps of adaptation or training before sampling.
        counter: what advances the burn-in counter: every ``step``, or every ``tensor`` of a step.
        num_tensors: number of updated tensors.
        counter_saved: whether that counter is part of the saved state.
        corrected: ``noise`` is the total of injected and gradient noise, which the loop holds constant.
        assumed_num_data: the N that the loop's rules use, if it differs from ``num_data``.
        gradient_noise: Var(g) of one parameter, for the gradient of the **mean** loss over independent minibatches.
        curvature: h of f / N; includes the discretisation error.
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
    assumed_num_data: int | None = None
    gradient_noise: float | None = None
    curvature: float | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {listed}")
        for name in (
            "num_data",
            "batch_size",
            "refresh_every",
            "reused",
            "replicas",
            "num_tensors",
            "assumed_num_data",
        ):
            _check_number(name, getattr(self, name), 1, "an integer of at least 1", int)
        for name in ("lr", "clipping", "curvature", "prior_precision"):
            _check_number(name, getattr(self, name), 5e-324, "a positive number", int | float)
        for name in ("weight_decay", "gradient_noise", "momentum"):
            _check_number(name, getattr(self, name), 0, "a number of at least 0", int | float)
        _check_number("burn_in", self.burn_in, 0, "an integer of at least 0", int)
        if not self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum} must lie in [0, 1); the friction is 1 - momentum")
        if self.loss_reduction == "sum" and self.batch_size is None:
            raise ValueError("loss_reduction = 'sum' multiplies gradients by n: give batch_size")
        if self.batch_size is not None and self.batch_size > self.num_data:
            raise ValueError(f"batch_size = {self.batch_size} is larger than num_data = {self.num_data}")
        if (self.refresh_every is None) != (self.momentum_noise is None):
            raise ValueError("momentum_noise and refresh_every describe one refresh: give both or neither")
        if self.averaged and (self.momentum or self.shared_noise == "steps"):
            raise ValueError("averaged = True works without momentum only, and with fresh random numbers in every step")
        if self.refresh_every == 1 and self.order == "move":
            raise ValueError("refresh_every = 1 with order = 'move' discards every gradient before anything moves")
        for name in ("noise", "momentum_noise", "prior", "temperature"):
            if self.value(name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} evaluates to a negative number")

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, name: str) -> float:
        """The value of the rule in a field; 0 for None."""
        rule: Rule | None = getattr(self, name)
        num_data = float(self.assumed_num_data or self.num_data)
        known = {"lr": self.lr, "N": num_data, "n": self.batch_size, "a": self.friction}
        if name != "temperature":
            known["T"] = self.value("temperature")
        return 0.0 if rule is None else evaluate(rule, known, name)

    @property
    def friction(self) -> float:
        """The friction a = 1 - m."""
        return 1.0 - self.momentum

    @property
    def scale(self) -> float:
        """The factor s of the gradient relative to that of the mean loss."""
        factors = {"mean": 1, "sum": self.batch_size or 1, "full": self.assumed_num_data or self.num_data}
        return float(factors[self.loss_reduction])

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the noise of a step."""
        return self.value("noise")

    @cached_property
    def target_temperature(self) -> float:
        """The intended temperature. A rule that gives 1/N is a way to say that the loss is a mean: T = 1."""
        given = self.value("temperature")
        is_share = math.isclose(given * self.num_data, 1.0, rel_tol=0.01)
        return 1.0 if is_share and (isinstance(self.temperature, str) or self.num_data >= MANY) else given

    @property
    def refreshed_sd(self) -> float:
        """Standard deviation of a refreshed velocity."""
        return self.value("momentum_noise")

    @property
    def right_noise(self) -> str:
        """The noise that samples at T, as a rule."""
        friction = "" if not self.momentum else ("*a" if self.noise_on == "velocity" else "/a")
        return f"sqrt(2*lr*T{friction}{SCALES[self.loss_reduction]}/N)".replace("*N/N", "")

    @property
    def right_refreshed_sd(self) -> float:
        """Standard deviation of a velocity at the target temperature."""
        return math.sqrt(self.lr * self.scale * self.target_temperature / self.num_data)

    # -- temperatures -------------------------------------------------------------------------------------------------

    @cached_property
    def response(self) -> NDArray[np.float64]:
        """How far a kick of size 1 in each step has moved theta by the end of the period, ``c``."""
        if self.refresh_every is None:
            return np.array([1.0 / self.friction])
        moves = np.cumsum(self.momentum ** np.arange(self.refresh_every, dtype=np.float64))[::-1]
        return moves if self.order == "kick" else np.append(moves[1:], 0.0)

    def temperature_of(self, velocity: float = 0.0, parameters: float = 0.0, fresh: float = 0.0, run: int = 1) -> float:
        """T of the likelihood for given variances per step, in the limit of small curvature.

        Args:
            velocity: variance added to the velocity in a step.
            parameters: variance added to the parameters in a step.
            fresh: variance of a refreshed velocity.
            run: consecutive steps with the same noise.
        """
        c = self.response
        if self.refresh_every is None:
            squares, moved, start = run * float(c[0] ** 2), float(run), 0.0
        else:
            blocks = np.arange(0, len(c), run)
            squares = float((np.add.reduceat(c, blocks) ** 2).sum())
            moved = float((np.diff(np.append(blocks, len(c))) ** 2).sum())
            start = float(c[0] * self.momentum if self.order == "kick" else c[0] + self.momentum ** (len(c) - 1))
        variance = start**2 * fresh + squares * velocity + moved * parameters
        return self.num_data * variance / (2.0 * self.lr * self.scale * float(c.sum()))

    def noise_temperature(self, with_refresh: bool = True) -> float | None:
        """T of the injected noise alone (of the total noise if `corrected`)."""
        if self.noise is None:
            return None
        loop = self if with_refresh else replace(self, refresh_every=None, momentum_noise=None)
        run = self.reused if self.shared_noise == "steps" else 1
        place = {self.noise_on: self.sigma**2 / self.replicas}
        return loop.temperature_of(**place, fresh=loop.refreshed_sd**2, run=run)

    def gradient_heat(self, variance: float = 1.0) -> float:
        """T that gradient noise of some variance adds if minibatches are independent and nothing corrects for it."""
        return self.temperature_of(velocity=(self.lr * self.scale) ** 2 * variance)

    def gradient_temperature(self) -> float | None:
        """T added by gradient noise; if `corrected`, what minibatches without replacement take away."""
        if self.gradient_noise is None:
            return 0.0 if self.corrected and self.minibatches == "independent" else None
        return self.gradient_heat(self.gradient_noise) * (self.epoch_share() - self.corrected)

    def temperatures(self) -> tuple[float | None, float | None, float | None]:
        """The temperature, its injected part, and its part from gradient noise; None where unknown."""
        injected, added = self.noise_temperature(), self.gradient_temperature()
        if injected is None:
            return None, None, added
        if self.curvature is not None:  # with the error of discrete steps
            injected = self.exact_temperature(self.curvature)
            if self.gradient_noise and not self.corrected:
                total = self.exact_temperature(self.curvature, self.gradient_noise)
                added = (total - injected) * self.epoch_share() if math.isfinite(injected) else 0.0
        if not injected and added is None:
            return None, injected, None
        return injected + (added or 0.0), injected, added

    def exact_temperature(self, curvature: float, gradient_noise: float = 0.0) -> float:
        """Variance of theta at the ends of periods on a quadratic potential, times N h.

        The state (theta, v, xi) then follows a linear recursion: over a period it is mapped by F and gains the
        covariance Q, so its stationary covariance solves ``S = F S F' + Q``. Holds at any rate, discretisation error
        included.

        Args:
            curvature: h of f / N.
            gradient_noise: Var(g) of the mean gradient, independent from step to step.

        Returns:
            The temperature; infinite if the steps are unstable.

        Example:
            >>> round(Loop(num_data=100, lr=0.04, noise="sqrt(2*lr/N)").exact_temperature(1.0), 4)  # 1/(1 - lr h / 2)
            1.0204
        """
        scale, injected = self.lr * self.scale, self.sigma**2 / self.replicas
        heat = scale**2 * gradient_noise
        if self.averaged:  # averaged noise has no discretisation error, gradient noise has that of its share
            total = max(injected, heat) if self.corrected else injected + heat
            variance = total * variance_inflation(scale * curvature, share=heat / total if heat else 0.0)
            return self.num_data * variance / (2.0 * scale)
        heat = 0.0 if self.corrected else heat
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
                parts.insert(0, (np.diag([1.0, 0.0, 1.0]), np.diag([0.0, self.refreshed_sd**2, 0.0])))
            if self.shared_noise != "steps" or t % self.reused == 0:
                parts.insert(0, (np.diag([1.0, 1.0, 0.0]), np.diag([0.0, 0.0, 1.0])))
            for matrix, covariance in parts:
                whole, gained = matrix @ whole, matrix @ gained @ matrix.T + covariance
        if np.abs(np.linalg.eigvals(whole)).max() >= 1.0:
            return math.inf
        stationary = np.linalg.solve(np.eye(9) - np.kron(whole, whole), gained.ravel())
        return float(stationary[0]) * self.num_data * curvature

    def epoch_share(self) -> float:
        """Share of the gradient noise's temperature that is left without replacement; 1 for independent minibatches.

        Without a known curvature it is 0, the limit of a slow chain. Within a minibatch no example repeats either,
        which makes its noise smaller by ``(N - n) / (N - 1)``.
        """
        n = self.batch_size or 1
        if self.minibatches == "independent":
            return 1.0
        if self.curvature is None or n == self.num_data:
            return 0.0
        left = epoch_noise_share(1.0 / self.relaxation(self.curvature), self.num_data // n)
        return left * (self.num_data - n) / (self.num_data - 1)

    # -- prior and time -----------------------------------------------------------------------------------------------

    @property
    def decay_precision(self) -> float:
        """The precision p of the normal prior in ``exp(-(L + p |theta|^2 / 2) / T)`` that weight decay stands for."""
        coupled = self.num_data * self.weight_decay / self.scale
        # Decoupled decay acts once a step; through the velocity it would act c times.
        return coupled / float(self.response.mean()) if self.decoupled else coupled

    def prior_strength(self) -> float | None:
        """How many times the intended prior is counted (1 is right); None if the intended prior is unknown."""
        if self.weight_decay and self.prior_precision is None:
            return None
        decay = self.decay_precision / self.prior_precision if self.weight_decay and self.prior_precision else 0.0
        return decay + self.value("prior") * self.num_data / self.scale

    @property
    def precision(self) -> float | None:
        """The precision of the normal prior of f, from weight decay and from the loss; None if unknown."""
        in_loss = self.value("prior") * self.num_data / self.scale
        if in_loss and self.prior_precision is None:
            return None
        return self.decay_precision + in_loss * (self.prior_precision or 0.0)

    @property
    def period(self) -> int:
        """Steps after which the loop repeats: the velocity is refreshed and the noise is fresh."""
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


def _check_number(name: str, value: float | None, least: float, expected: str, kind: type | object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not (math.isfinite(value) and value >= least):  # type: ignore[arg-type]
        raise ValueError(f"{name} = {value!r} must be {expected}")


def epoch_noise_share(forgets: float, steps: int) -> float:
    """Variance caused by the noise of minibatches without replacement, relative to that of independent minibatches.

    The noise sums to zero over an epoch of E steps, so two of its steps are correlated by ``-1 / (E - 1)``. A chain
    that forgets at the rate ``k`` per step weighs the noise of i steps ago by ``(1 - k)^i``: its variance is

        E / (E - 1) sum_i (1 - k)^2i - 1 / (E - 1) sum_epochs (sum of (1 - k)^i over the epoch)^2.

    Both sums are geometric. Averaged over the position in an epoch and divided by ``sum_i (1 - k)^2i``, that is
    ``(E - B (2 - k) / k) / (E - 1)`` with ``B = 1 - (1 - (1 - k)^E) 2 (1 - k) / ((2 - k) k E)``; ``k (E + 1) / 3`` for
    a slow chain.

    Args:
        forgets: k.
        steps: E.

    Example:
        >>> round(epoch_noise_share(1e-4, 20) / (1e-4 * 21 / 3), 3)
        1.0
    """
    if steps < 2:
        return 0.0
    k = min(forgets, 1.0)
    lost = -math.expm1(steps * math.log1p(-k)) if k < 1.0 else 1.0
    b = 1.0 - lost * 2.0 * (1.0 - k) / ((2.0 - k) * k * steps)
    return max((steps - b * (2.0 - k) / k) / (steps - 1), 0.0)


# -- rules ------------------------------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "exp": math.exp, "log": math.log}


def evaluate(rule: Rule, names: Mapping[str, float | None], what: str = "rule") -> float:
    """The value of a rule, computed without `eval`.

    Args:
        rule: a number, or arithmetic of numbers, ``names``, ``+ - * / **``, brackets, sqrt, exp and log.
        names: what names stand for; None for a known name without a value.
        what: what the value is, for messages.

    Raises:
        ValueError: not such an expression, or without a finite value.

    Example:
        >>> evaluate("sqrt(2*lr/N)", {"lr": 0.02, "N": 100})
        0.02
        >>> evaluate("open('x')", {})
        Traceback (most recent call last):
        ValueError: rule = "open('x')": open('x') is not allowed; use numbers, + - * / **, brackets, exp, log, sqrt
    """
    given = f"{what} = {rule!r}"
    if isinstance(rule, str) and len(rule) > LONGEST_RULE:
        raise ValueError(f"{what} has {len(rule)} characters; at most {LONGEST_RULE} are allowed")
    try:
        if isinstance(rule, bool):
            raise TypeError
        value = _evaluate(ast.parse(rule.strip(), mode="eval").body, names) if isinstance(rule, str) else float(rule)
        if not math.isfinite(value):
            raise ValueError(f"the value {value} is not finite")
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{given} must be a number, or an expression such as 'sqrt(2*lr*T/N)' with a value") from error
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{given}: {error}") from error
    return value


def _evaluate(node: ast.AST, names: Mapping[str, float | None]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name in names:
            if (value := names[name]) is None:
                raise ValueError(f"it uses {name}, which was not given")
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, names), _evaluate(right, names))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, names))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_evaluate(argument, names))
    known = ", ".join((*sorted(_FUNCTIONS), *sorted(names)))
    raise ValueError(f"{ast.unparse(node)} is not allowed; use numbers, + - * / **, brackets, {known}")
