"""The base class of all samplers: parameter groups, units, step sizes, the step and its saving.

A sampler has a model of its gradient noise (`isosgd.noise.model.NoiseModel`), a step size schedule
(`isosgd.samplers.schedules`), an `Injector` that draws the injected noise, and perhaps a diagonal preconditioner
(`isosgd.samplers.metric`) or a geometry (`isosgd.geometry`). Samplers differ in the `Move` of a group. In a loop of the
user's own, an `isosgd.samplers.own_warmup.OwnWarmup` sets the rates; in `isosgd.sample`, the warm-up of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from numbers import Real
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.differences import check_ranks
from isosgd.geometry.base import Geometry, load_into, state_of
from isosgd.geometry.layer import Number, diagonal_scale, root
from isosgd.geometry.rule import allowed_rate_curvature
from isosgd.noise.estimators import AlphaStable, NoiseEstimator, NoiseName, make_estimator
from isosgd.noise.model import NoiseModel, Summary, Uses, join, summarise
from isosgd.samplers.groups import (
    Group,
    OwnRateGroup,
    ParamsLike,
    check_batch_size,
    check_choice,
    check_groups,
    check_if_given,
    check_names,
    check_units,
    layer_groups,
    trained_groups,
)
from isosgd.samplers.half import HalfParameters
from isosgd.samplers.injection import NO_GRADIENT, Injector, Move, capturing
from isosgd.samplers.innovations import Innovations, make_generator
from isosgd.samplers.metric import DiagonalMetric, Metric
from isosgd.samplers.own_warmup import OPTIMISING, SAMPLING, WARMING_UP, OwnWarmup
from isosgd.samplers.program import KickProgram, ScheduledProgram, StepProgram
from isosgd.samplers.schedules import Cycles, Schedule
from isosgd.samplers.shards import is_sharded, take_shards, together
from isosgd.samplers.steppers import hamiltonian_, langevin_

CHECK_EVERY = 64  # steps between checks of the parameters


class Sampler(Optimizer):
    """A `torch.optim.Optimizer` whose steps draw from a posterior.

    ``.grad`` must hold the gradient of ``mean negative log likelihood + (negative log prior) / N``; ``weight_decay``
    adds a Gaussian prior. In a training loop it optimises and warms up by itself; its steps are draws once
    ``draws_ready`` is True. Subclasses accept these arguments too, by keyword.

    Args:
        params: parameters, with or without names (one group for each layer), or parameter groups.
        num_data: N, the number of examples in the data set.
        batch_size: n, the examples in each step's gradient, accumulated ones included. Required if the sampler finds
            its own rate in a loop.
        weight_decay: adds a Gaussian prior of mean 0 and precision ``weight_decay * num_data``, as
            ``torch.optim.SGD(weight_decay=...)`` does for a mean loss. Can be set per group.
        warmup: steps of the sampler's own warm-up in a loop. By default as many as it needs; none if ``lr`` is given.
        trained: whether the parameters are those of a trained network, so that the warm-up skips the initial
            optimisation.
        temperature: T; the target is ``exp(-f / T)`` with f the negative log joint density.
        lr: step size for the mean gradient; may differ between groups and change between steps. By default the warm-up
            sets it. I-SGD and V-SGD take none.
        bias: relative error of the posterior variance that the step size may cause, when `adapt` sets the rates.
        noise: estimator of the gradient noise: ``gaussian``, ``paired``, ``alpha`` or a `NoiseEstimator`.
        momentum: momentum of that estimator.
        track_every: with an uncentred estimator, use the gradient of every k-th step; None stops after the warm-up, so
            that steps can be captured or compiled.
        generator: source of all randomness; saved with the state. By default seeded from torch's generator.
        chains: K if every parameter has a leading dimension of K independent chains; rates are then ``[K]``.
        foreach: update all tensors of a group in one call.
        capturable: keep rates in tensors on the device, so that a step can be captured in a CUDA graph once the phase
            is ``sampling``. A captured step ignores changes of ``lr``; call `replayed` after each replay to update the
            noise estimate.
        innovations: ``normal``, ``bits`` (moment-matched, see `isosgd.samplers.innovations`) or ``auto``.
        friction: a of Theorem 2, in (0, 1]; None for Theorem 1. Set by subclasses, as are the next three.
        corrected: whether to subtract the measured gradient noise, correlations included, from the injected noise.
            None: the sampler's own warm-up chooses what allows larger rates; in `isosgd.sample` False.
        schedule: step size schedule.
        extra: further entries of each group.

    Attributes:
        noise: the model of the gradient noise.
        given: whether the user gave the rate.
        left_out: parameters that were frozen when the sampler was made.
        own_warmup: the sampler's own warm-up, once it has begun.
        whole: computes sums over all elements of a group, which may be sharded over ranks.
        driven: whether a caller such as `isosgd.sample` sets the rates and decides which steps are draws.
        resumed: whether a state was loaded.
        metric: a diagonal preconditioner, or None.
        geometry: a Lambda with directions, or None.
    """

    family: ClassVar[str] = "langevin"  # Theorem 1; "hamiltonian" is Theorem 2
    targets: ClassVar[str] = "exp(-f / T)"
    paper: ClassVar[str]
    departures: ClassVar[str] = "none"  # from the paper, in a line
    has_lr: ClassVar[bool] = True
    can_add_groups: ClassVar[bool] = True  # whether groups can be added
    resumed = False
    shardable: ClassVar[bool] = False  # whether a shard of the parameters can be stepped on its own
    metric: DiagonalMetric | None = None
    geometry: Geometry | None = None

    def __init_subclass__(cls, **given: Any) -> None:
        """Wrap the constructor: for sharded parameters it checks that all ranks were given the same settings."""
        super().__init_subclass__(**given)
        make: Callable[..., None] = cls.__init__

        @wraps(make)
        def make_together(self: Sampler, params: ParamsLike, *args: Any, **settings: Any) -> None:
            if type(self) is not cls:  # called by the constructor of a subclass
                return make(self, params, *args, **settings)
            groups = layer_groups(params)
            every: list[Any] = [p for group in groups for p in group["params"] if is_sharded(p)]
            if not every or every[0].device_mesh.ndim > 1:  # `take_shards` refuses the latter
                return make(self, groups, *args, **settings)
            own_stream = settings.get("generator") is None

            def made() -> dict[str, Any]:
                make(self, groups, *args, **settings)
                return self._agreed(own_stream)

            check_ranks(together(every[0].device_mesh, made))
            if own_stream:
                self.whole.align(self.generator)
            return None

        cls.__init__ = make_together  # type: ignore[method-assign]

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        batch_size: int | None = None,
        weight_decay: float = 0.0,
        warmup: int | None = None,
        trained: bool = False,
        temperature: float = 1.0,
        lr: float | None = None,
        bias: float = 0.02,
        noise: NoiseName | NoiseEstimator = "paired",
        momentum: float | None = None,
        track_every: int | None = 50,
        generator: torch.Generator | None = None,
        chains: int | None = None,
        foreach: bool = True,
        capturable: bool = False,
        innovations: Innovations = "auto",
        friction: float | None = None,
        corrected: bool | None = False,
        schedule: Schedule | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        check_units(num_data, temperature)
        given: Any = bias  # mypy takes a float for no Real
        if not isinstance(given, Real):
            raise TypeError(f"bias = {bias!r} must be a number in (0, 1)")
        if not 0 < bias < 1:
            raise ValueError(f"bias = {bias} must lie in (0, 1): the relative error allowed in the posterior variance")
        check_choice("innovations", innovations, get_args(Innovations))
        if track_every is not None and track_every < 1:
            raise ValueError(f"track_every = {track_every} must be at least 1, or None")
        check_batch_size(batch_size, num_data)
        if warmup is not None and (isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0):
            raise ValueError(f"warmup = {warmup!r} must not be negative: a number of steps, or None")
        if friction is not None and not 0 < friction <= 1:
            raise ValueError(f"friction = {friction} must lie in (0, 1]")
        self.bias, self.track_every, self.chains = bias, track_every, chains
        self.foreach, self.capturable = foreach, capturable
        self.corrected, self.chooses_correction = bool(corrected), corrected is None
        self.has_velocity, self.friction = friction is not None, 1.0 if friction is None else friction
        self.batch_size, self.warmup, self.trained = batch_size, warmup, trained
        self.own_warmup: OwnWarmup | None = None
        self.driven = False
        self._captured: list[Any] = []  # references to what captured steps read
        groups = layer_groups(params)
        self.whole = take_shards(groups)
        if self.whole.sharded and (not self.shardable or chains is not None or capturable):
            raise ValueError(
                f"{type(self).__name__} of sharded parameters (DTensors): only ISGD, SGLD and SGHMC are supported, "
                "without chains= and capturable=True"
            )
        self.given = self._rate_given(groups, lr)
        self.schedule = schedule or Schedule()
        counters = {"step": 0, "seen": 0, "vectors": 0, "frozen": False, "rate": None}
        units = {"num_data": num_data, "temperature": temperature, "weight_decay": weight_decay}
        rate = {} if lr is None else {"lr": float(lr)}
        estimator = make_estimator(noise, momentum)
        defaults = {**units, **counters, **rate, **self.schedule.settings(begun=self.given), **(extra or {})}
        super().__init__(groups, defaults)
        every = [p for group in self.param_groups for p in group["params"]]
        self.param_groups = [self._wrapped(group) for group in trained_groups(self.param_groups)]
        taken = {p for group in self.param_groups for p in group["params"]}
        self.left_out = [p for p in every if p not in taken]
        self.generator = make_generator(generator, self.param_groups[0]["params"][0].device)
        if self.whole.sharded and isinstance(estimator, AlphaStable):
            raise ValueError("noise = 'alpha' of sharded parameters (DTensors) is not supported: choose 'paired'")
        self.noise = NoiseModel(self, estimator, self.generator, self.batched, self.whole)
        self.noise.uses = Uses(vectors=self.corrected)
        self.injector = Injector(self.noise, self.generator, innovations, chains, capturable, self._next_move)
        self.half = HalfParameters(self.state, [p for group in self.param_groups for p in group["params"]])
        self._follow_lr()

    def _agreed(self, own_stream: bool) -> dict[str, Any]:
        """The settings that must be the same on all ranks among which the parameters are sharded."""

        def plain(values: dict[str, Any]) -> dict[str, Any]:
            return {name: x for name, x in values.items() if x is None or isinstance(x, str | int | float)}

        wholes = getattr(self.whole, "part_of", {})
        return {
            "sampler": type(self).__name__,
            **plain(vars(self)),
            "noise": {"kind": type(self.estimator).__name__, **plain(vars(self.estimator))},
            "schedule": {"kind": type(self.schedule).__name__, **plain(vars(self.schedule))},
            "structure": getattr(getattr(self, "structure", None), "name", None),
            "innovations": self.injector.innovations,
            "groups": {group["name"]: plain(group) | {"params": len(group["params"])} for group in self.param_groups},
            "params": [f"{list(p.shape)} {p.dtype}" for p in wholes],
            "generator": {"sha256": own_stream or sha256(self.generator.get_state().numpy().tobytes()).hexdigest()},
        }

    # -- groups -------------------------------------------------------------------------------------------------------

    def _rate_given(self, groups: Sequence[Group], lr: float | None) -> bool:
        """Whether the user gave rates; raises if they are invalid or given for some groups only."""
        rates = [group.get("lr", lr) for group in groups]
        if not self.has_lr and any(rate is not None for rate in rates):
            raise ValueError(f"lr = {next(r for r in rates if r is not None)}: {self._no_lr()}")
        for group, rate in zip(groups, rates, strict=True):
            if rate is None and any(r is not None for r in rates):
                raise ValueError(f"group {group['name']!r} has no lr and others have one: give it to all, or to none")
            check_if_given("lr", rate, "to have it set by the warm-up")
        return rates[0] is not None

    def _no_lr(self) -> str:
        name = type(self).__name__
        if not self.has_lr:
            return f"{name} finds its rate itself, from the gradient noise; leave lr and schedulers out"
        return f"{name} finds its rate in its warm-up; give lr= to have a rate of your own, which can be scheduled"

    def _wrapped(self, group: Group) -> Group:
        """The group as one that refuses an ``lr``, unless the user gave it one."""
        group.pop("param_names", None)  # torch's, which may include parameters that were left out
        if "lr" in group:
            return dict(group)
        found = OwnRateGroup(group)
        found.reason = self._no_lr()
        return found

    def add_param_group(self, param_group: Group) -> None:
        """Add a group. A sampler that finds its own rates warms up again."""
        if not hasattr(self, "injector"):  # called by torch's constructor
            super().add_param_group(param_group)
            check_groups(self.param_groups[-1:], self.chains)
            return
        if self.geometry is not None or self.driven or not self.can_add_groups or self.whole.sharded:
            raise ValueError("a group cannot be added: make a new sampler with all of the parameters")
        new = {"name": str(len(self.param_groups)), **param_group}
        check_names([*(g["name"] for g in self.param_groups), new["name"]])
        rates = [*({"name": g["name"], **({"lr": g["lr"]} if self.given else {})} for g in self.param_groups), new]
        self._rate_given(rates, self.defaults.get("lr"))
        super().add_param_group(new)
        added = self.param_groups[-1]
        self.left_out = [p for p in self.left_out if all(p is not q for q in added["params"])]
        check_groups([added], self.chains)
        added["step"] = self.param_groups[0]["step"]
        self.trained = False  # the new parameters are not
        self.param_groups = [*self.param_groups[:-1], *(self._wrapped(g) for g in trained_groups([added]))]
        self.half = HalfParameters(self.state, [p for group in self.param_groups for p in group["params"]])
        self.noise.reset()
        self.injector.reset()
        self._follow_lr()
        if self.own_warmup is not None:
            for group in self.param_groups:
                group["frozen"] = False
            self.own_warmup = self._new_warmup()

    def hand_over_rates(self) -> None:
        """At the end of the warm-up: make each group's rate its ``lr``, which the user may change."""
        if self.has_lr:
            for i, group in enumerate(self.param_groups):
                lr = float(group["rate"])
                self.param_groups[i] = dict(group) | {"lr": lr, "followed": lr}
            self.noise.reset()
            self.injector.reset()

    def _follow_lr(self) -> None:
        """Adopt each group's ``lr`` where the user or a scheduler has changed it."""
        changed = False
        for group in self.param_groups:
            if (lr := group.get("lr")) is not None and lr != group.get("followed"):
                if not (math.isfinite(lr) and lr >= 0):
                    raise ValueError(f"group {group['name']!r} has lr = {lr}: it must be finite and not negative")
                group["followed"] = float(lr)
                # At a rate of zero the injected noise would be infinite.
                group["rate"] = self.number(max(float(lr), torch.finfo(torch.float32).tiny))
                changed = True
        if changed:
            self.refresh()

    @property
    def batched(self) -> bool:
        """Whether parameters have a leading chain dimension."""
        return self.chains is not None

    @property
    def estimator(self) -> NoiseEstimator:
        return self.noise.estimator

    @property
    def paired(self) -> bool:
        """Whether noise vectors are centred, and not modelled as alpha-stable."""
        return self.estimator.centred and not isinstance(self.estimator, AlphaStable)

    # -- gradient noise -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        """Update the noise estimate with one noise vector, in the order of the parameters, or with the gradients."""
        if self.geometry is not None:
            if noise is not None:  # the geometry has an estimate of its own
                self.noise.check(noise)
                self.geometry.observe(noise)
                for group in self.param_groups:
                    group["seen"] += 1
            return
        if self.metric is not None:
            self.metric.update(observed=True)
        self.noise.update(noise)
        self.injector.noise_changed()
        if self.metric is not None:
            self.metric.update_noise(noise)

    def forget_noise(self, void: bool = False) -> None:
        """Restart the noise estimate; the old one is used until the first new vector.

        ``void``: discard the old one, which was not measured on the posterior.
        """
        self.noise.forget()
        if self.geometry is not None:
            self.geometry.forget(void)

    def freeze(self) -> None:
        """Fix the rates, update only the noise estimates that a step depends on, and let cycles begin."""
        self.noise.freeze()
        self.schedule.begin(self.param_groups)

    def noise_summary(self, group: Group, how: Summary) -> Tensor:
        """One number for a group's noise, in units of ``b = v / 2``; in the metric if there is one."""
        if self.metric is None:
            return self.noise.summary(group, how)
        return self.metric.top(group) if how == "top" else summarise(self.metric.variances(group), how, self.batched)

    def clipped_share(self, group: Group) -> Tensor:
        """Share of a group's noise that exceeds lambda, so that it cannot be made isotropic."""
        return torch.zeros(self.chains or ())

    @property
    def whitening(self) -> Metric | None:
        """The metric in which the curvature is measured, or None."""
        return self.metric

    # -- rates --------------------------------------------------------------------------------------------------------

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        """Set every group's rate from the measured noise and the curvature of ``f / N`` in that group.

        Rates fall at once and rise by at most a factor of ``rise``.
        """
        if self.given:
            return
        if curvature is None:
            name = type(self).__name__
            raise ValueError(f"{name} has no rate and no curvature to set it from: pass lr, or use isosgd.sample")
        for group, h in zip(self.param_groups, curvature, strict=True):
            own = h if self.metric is None else h * self.metric.curvature_ratio(group)
            self._fit_rate(group, own, self.noise_bound(group), rise)
            peak = self.schedule.limit_peak(group, h)
            if peak is not None:
                group["peak"] = self.number(peak)

    def noise_bound(self, group: Group) -> Tensor:
        """The smallest composite noise allowed: the gradient noise if it is corrected for, else a multiple of it."""
        return self.noise.longest(group) if self.corrected else self.noise_summary(group, "top") / self.bias

    def _fit_rate(self, group: Group, curvature: Number, noise: Tensor, rise: float) -> None:
        """Set the largest rate of allowed bias whose composite noise ``a T / (N rate)`` is at least ``noise``."""
        # At temperature zero only the curvature bounds the rate.
        variance = self.friction * group["temperature"]
        cover = group["num_data"] * noise / variance if variance else torch.zeros_like(noise)
        guard = torch.as_tensor(curvature, dtype=noise.dtype, device=noise.device)
        inverse = torch.maximum(cover, guard / allowed_rate_curvature(self.bias, self.friction))
        old = None if group["rate"] is None else 1.0 / group["rate"]
        group["rate"] = self.number(1.0 / limit_rise(old, inverse, rise))
        self.refresh()

    def number(self, value: Number) -> Number:
        """A group's number as this sampler stores it: a float, or a tensor with ``chains`` or ``capturable``."""
        if self.chains is None and not self.capturable:
            return float(value)
        device = self.param_groups[0]["params"][0].device
        return torch.as_tensor(value, dtype=torch.float32, device=device).clone()

    def rate(self, group: Group) -> Number:
        """The step of a group: ``theta -= rate * (...)``."""
        if group["rate"] is None:
            raise RuntimeError(
                f"group {group['name']!r} has no rate yet: the first steps of a loop find it, or give one"
            )
        return self.schedule.rate(group, group["rate"])

    def composite(self, group: Group) -> Number:
        """Gradient noise plus injected noise, as the rate requires: ``Sigma = a T / (N rate)``."""
        sigma: Number = self.friction * group["temperature"] / (group["num_data"] * self.rate(group))
        return sigma

    # -- moves --------------------------------------------------------------------------------------------------------

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        """The rate and the injected noise of a group's next steps; subclasses override this.

        Called again when the noise estimate or the rates change, and after `refresh`. By default the injected noise is
        the composite noise, less the measured gradient noise if ``corrected``.
        """
        rate, lam = self.rate(group), self.composite(group)
        return self._outer(lam, rate) if self.corrected else Move(rate, root(2.0 * lam))

    def _next_move(self, group: Group, params: list[Tensor]) -> Move:
        return Move(self.rate(group), 0.0) if self.schedule.explores(group) else self._move(group, params)

    def _outer(self, lam: Number, rate: Number) -> Move:
        """A move that subtracts the gradient noise, correlations included (see `subtract_outer_`)."""
        return Move(rate, root(2.0 * lam), outer=lam)

    def _diagonal(self, lam: Number, rate: Number, variances: Sequence[Tensor]) -> Move:
        """A move that subtracts the variance of each parameter's gradient noise."""
        return Move(rate, 1.0, scale=diagonal_scale(lam, join(list(variances), self.batched)))

    def refresh(self) -> None:
        """Recompute the moves; call it after changing a group's settings by hand."""
        self.injector.refresh()

    # -- the step -----------------------------------------------------------------------------------------------------

    # Not compiled: a step is host work and random numbers.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Tensor] | None = None, *, noise: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        """One step of the chain.

        Args:
            closure: re-evaluates the loss and its gradients.
            noise: the noise vector of this step's minibatch (paired halves), if any.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.whole.take_gradients()
        if self.param_groups[0]["step"] % CHECK_EVERY == 0:
            self._check_parameters()
        self._follow_lr()
        if self.own_warmup is None and not self.driven:
            if self.given and self.needs_vectors and noise is None:
                self.own_warmup = OwnWarmup(self, None, by_scheme=True)  # only provides noise vectors
            elif not self.given and any(group["rate"] is None for group in self.param_groups):
                self.own_warmup = self._new_warmup()
        own, captured = self.own_warmup, capturing()
        if captured:
            self._check_capture()
        if own is not None:
            noise = own.noise(noise)  # before the gradient of the prior is added
        if own is None and noise is None and self._plain():
            self._plain_step()
            return loss
        with self.half.widened(), self._decayed():
            moves = True
            if own is not None and not own.by_scheme and own.phase != SAMPLING:
                moves = own.step(noise)
            elif noise is not None or self._takes_gradient():
                self.observe(noise)
            elif own is not None and own.by_scheme and not self.warming and not self.noise.ready():
                moves = False  # wait for the first noise vector
            if moves:
                self.injector.lay_out()
                self._update()
        if captured:  # recorded, not executed
            parts = (self.injector, self.injector.source, self.metric, self.geometry)
            self._captured += [dict(vars(part)) for part in parts if part is not None]
            self._captured += [dict(known) for known in (*self.param_groups, *self.state.values())]
            return loss
        for group in self.param_groups:
            group["step"] += 1
        if own is not None:
            own.stepped()
        if moves and not self.injector.noiseless:
            self.injector.source.prefetch()
        return loss

    @Optimizer.profile_hook_step  # run step hooks for these steps, too
    @torch.no_grad()
    def replayed(self) -> None:
        """Count a step that was replayed from a CUDA graph, and update the noise estimate from its gradients.

        Call it after each replay, on the same stream, before the gradients are cleared.
        """
        if any(p.grad is None for p in self.injector.params):
            raise RuntimeError("replayed() needs the gradients of the step: call it before zero_grad()")
        noise = None if self.own_warmup is None else self.own_warmup.noise(None)
        if noise is not None:
            with self.half.widened():
                self.observe(noise)
                if self.geometry is None:
                    self.injector.make_plan()
                else:
                    self.injector.fixed(self.geometry.tensors())
        for group in self.param_groups:
            group["step"] += 1

    def _check_capture(self) -> None:
        """Raise if replays of this step would not be valid steps."""
        if not self.capturable:
            why = "it was made without capturable=True"
        elif self.phase != SAMPLING or not self.injector.layout:
            why = f"its phase is {self.phase!r}: take steps until draws_ready, and three more"
        elif self.schedule.changes(self.param_groups):
            why = "its rate changes from step to step, and a captured one stays"
        elif self._takes_gradient():
            why = "this step takes in a noise vector: make it with track_every=None"
        else:
            return
        raise RuntimeError(f"a step of this {type(self).__name__} cannot be captured in a CUDA graph: {why}")

    def _check_parameters(self) -> None:
        """Raise if a frozen parameter was unfrozen since construction, or a gradient is sparse."""
        for p in self.left_out:
            if p.requires_grad:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} was frozen when this {type(self).__name__} was made, but "
                    "is not now: make a new sampler, or add_param_group"
                )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    raise ValueError(
                        f"a parameter of group {group['name']!r} has sparse gradients: make its layer with sparse=False"
                    )

    def __getstate__(self) -> dict[str, Any]:
        name = type(self).__name__
        raise TypeError(
            f"a {name} cannot be copied or pickled: make a {name} of the other parameters and give it this one's "
            "state_dict by load_state_dict"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.whole.zero_grad(set_to_none)

    def _plain(self) -> bool:
        """Whether bfloat16 parameters can be stepped one by one, without float32 copies of all."""
        if not self.half.every or self.batched or self.corrected or self.warming:
            return False
        if self.capturable or self.metric is not None or any(self.noise.uses) or self._takes_gradient():
            return False
        return all(getattr(type(self), name) is getattr(Sampler, name) for name in ("_move", "_update", "_advance"))

    def _plain_step(self) -> None:
        """A step of bfloat16 parameters, one by one."""
        if not any(p.grad is not None for p in self.half.params):
            raise RuntimeError(NO_GRADIENT)
        self.injector.drop_prefetched()
        self.half.begin_step(self.generator)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            move = self._next_move(group, params)
            numbers = float(move.rate), float(move.rate * move.amplitude), float(group["weight_decay"]), self.friction
            for p in params:
                velocity = self.kept_like(p, "velocity", torch.float32) if self.has_velocity else None
                self.half.step_(p, numbers, self.generator, velocity)
            group["step"] += 1

    @contextmanager
    def _decayed(self) -> Iterator[None]:
        """Context in which gradients include that of the Gaussian prior, ``weight_decay * theta``."""
        decays = [(p, g["weight_decay"]) for g in self.param_groups if g["weight_decay"] for p in g["params"]]
        found = [(p, p.grad, decay) for p, decay in decays if p.grad is not None]
        for p, grad, decay in found:
            p.grad = grad.add(p.detach(), alpha=decay)
        try:
            yield
        finally:
            for p, grad, _ in found:
                p.grad = grad

    # -- a warm-up of its own -----------------------------------------------------------------------------------------

    def _new_warmup(self) -> OwnWarmup:
        """A new warm-up of the sampler's own."""
        if self.batched:
            raise RuntimeError("chains side by side have no warm-up of their own: let isosgd.sample take them")
        return OwnWarmup(self, self.warmup)

    def _forget_warmup(self) -> None:
        """Return to the state before the first step."""
        self.own_warmup = None

    @property
    def needs_vectors(self) -> bool:
        """Whether steps at fixed rates depend on noise vectors."""
        return self.estimator.centred and any(self.noise.uses)

    @property
    def warming(self) -> bool:
        """Whether one of I-SGD's schemes is still estimating its rates."""
        return False

    @property
    def phase(self) -> str:
        """``optimising``, ``warming up`` or ``sampling``."""
        if self.own_warmup is not None and not (self.own_warmup.by_scheme and self.own_warmup.phase == SAMPLING):
            return self.own_warmup.phase
        if any(group["rate"] is None for group in self.param_groups):
            return WARMING_UP if self.trained else OPTIMISING
        return WARMING_UP if self.param_groups[0]["step"] < (self.warmup or 0) else SAMPLING

    @property
    def draws_ready(self) -> bool:
        """Whether the parameters are, after the last step, a draw."""
        return self.phase == SAMPLING and self.param_groups[0]["step"] > 0 and self.sampling

    def _takes_gradient(self) -> bool:
        """Whether this step's gradient is taken as an (uncentred) noise vector."""
        every = self.track_every
        if self.own_warmup is not None and not self.own_warmup.by_scheme:
            return False  # the warm-up uses centred ones
        return every is not None and not self.estimator.centred and self.param_groups[0]["step"] % every == 0

    def _update(self) -> None:
        """Draw the kicks and move the parameters."""
        if self.metric is not None:
            self.metric.update(observed=False)
        self._make_plan()
        noiseless = self.injector.noiseless
        if not noiseless:
            self.injector.source.fill()
        for params, rate, kicks in self.injector.plan:
            grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
            kick = None if noiseless else kicks
            if self.foreach:
                self._advance(params, grads, rate, kick)
                continue
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                own = rate[i] if isinstance(rate, list) else rate
                self._advance([p], [g], own, None if kick is None else [kick[i]])

    def all_params(self, user: str) -> list[Tensor]:
        """The parameters; raises if one has no gradient, since the ``user`` needs all of them."""
        params = [p for group in self.param_groups for p in group["params"]]
        missing = next((p for p in params if p.grad is None), None)
        if missing is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(missing.shape)} has no gradient: {user} needs those of all parameters; "
                "freeze it before the sampler is made"
            )
        return params

    def _make_plan(self) -> None:
        if self.schedule.changes(self.param_groups):
            self.refresh()
        self.injector.make_plan()

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        """Apply the stepper of Theorem 1 or 2, in the metric if there is one."""
        if self.metric is not None:
            metric, grads = self._drift(params, grads)
            if kick is not None:
                kick = list(torch._foreach_mul(kick, torch._foreach_sqrt(metric)))
        if self.has_velocity:
            hamiltonian_(params, [self.velocity(p) for p in params], grads, rate, self.friction, kick)
        else:
            langevin_(params, grads, rate, kick)

    def _drift(self, params: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The diagonal of P, and the drift that replaces the gradient."""
        assert self.metric is not None
        metric = [self.metric.value(p) for p in params]
        return metric, list(torch._foreach_mul(metric, grads))

    def velocity(self, p: Tensor) -> Tensor:
        return self.kept_like(p, "velocity", p.dtype)

    def kept_like(self, p: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of a parameter's shape in its state, zero at first."""
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p, dtype=dtype)
        found: Tensor = state[name]
        return found

    def program(self) -> StepProgram | str:
        """The next steps as a program for a backend, or the reason why there is none."""
        if any(self.noise.uses) and not self.estimator.centred and self.track_every is not None:
            return "the noise is followed by single gradients"
        if not self.schedule.changes(self.param_groups):
            return self._program()
        if isinstance(self.schedule, Cycles) and not self.corrected:
            return ScheduledProgram(self)
        return "rates change from step to step"

    def _program(self) -> StepProgram | str:
        return KickProgram(self)

    # -- draws --------------------------------------------------------------------------------------------------------

    @property
    def sampling(self) -> bool:
        """Whether the last step belongs to a sampling stage."""
        return self.schedule.sampled(self.param_groups[0])

    def steps_to(self, spacing: float, draws: int = 1) -> int:
        """Steps to the next draw, or to the last of several; ``spacing`` is in steps at the rate that was set."""
        return self.schedule.steps_to(self.param_groups[0], spacing, draws)

    def fit_schedule(self, spacing: float) -> None:
        """Fit the schedule to the measured spacing of draws, before the first draw."""
        self.schedule.fit(self.param_groups, spacing)

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state with those of the generator, the warm-up and the geometry."""
        state = {**super().state_dict(), "generator": self.injector.generator_state()}
        if self.own_warmup is not None:
            state["warmup"] = state_of(self.own_warmup)
        if self.geometry is not None:
            last = self.injector.last
            state["structure"] = {"name": self.geometry.name, "shape": self.geometry.state(), "last": last}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. Estimates keep their dtype, which torch would cast to the parameter's."""
        if "generator" not in state_dict:
            raise ValueError(
                "this state has no 'generator': it was not saved by an isosgd sampler and cannot resume a chain"
            )
        warmup, saved = state_dict.get("warmup"), state_dict.get("structure")
        if warmup is None and self.own_warmup is not None:
            self._forget_warmup()
        if warmup is not None:
            self.own_warmup = OwnWarmup(self, None, by_scheme=True) if self.given else self._new_warmup()
            load_into(self.own_warmup, warmup, self.own_warmup.device)
            self.corrected = self.own_warmup.corrected
            if self.chooses_correction:
                self.noise.uses = Uses(vectors=self.corrected)
        if (saved or {}).get("name") != (None if self.geometry is None else self.geometry.name):
            raise ValueError("the state was saved with another structure: make the sampler with the same one")
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in ("generator", "structure", "warmup")})
        self.param_groups = [self._wrapped(group) for group in self.param_groups]
        order = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, index in zip(order, indices, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
        self.generator.set_state(state_dict["generator"].cpu())
        self.resumed = True
        self.half.state = self.state  # torch has replaced it
        self.noise.reset()
        self.injector.reset()
        if self.geometry is not None and saved is not None:
            self.geometry.load(saved["shape"])
            self.injector.last = None if saved["last"] is None else saved["last"].clone()


def limit_rise(old: Number | None, new: Tensor, rise: float) -> Tensor:
    """A new inverse rate (or lambda), which may shrink by at most a factor of ``rise``."""
    return new if old is None else torch.maximum(new, torch.as_tensor(old, dtype=new.dtype, device=new.device) / rise)
