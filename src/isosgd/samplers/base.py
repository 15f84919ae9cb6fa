"""What every sampler shares: groups by layer, the generator, the noise estimate, the state that is saved."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.noise import (
    NoiseEstimator,
    NoiseName,
    Summary,
    flat,
    join,
    make_estimator,
    power_step,
    summarise,
    top_eigenvalue,
)
from isosgd.samplers.innovations import Innovations, Source
from isosgd.samplers.steppers import Number, allowed_rate_curvature, langevin_
from isosgd.samplers.structure import diagonal_scale, outer_factor, ring_spectrum, root, take_out_

ParamsLike = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Group = dict[str, Any]
CLIPPED = 0.01  # share of noise vectors that may be longer than lambda covers
LENGTHS_KEPT = 256  # recent lengths of each group's noise, of which the noise bound takes a quantile
MOST_VECTORS = 16  # noise vectors kept for a group ...
VECTOR_MEMORY = 1 << 15  # ... as long as a chain's hold at most so many numbers, so that large groups keep one


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: the module that owns it. A name without a dot is a layer of its own."""
    return name.rpartition(".")[0] or name


def layer_groups(params: ParamsLike) -> list[Group]:
    """One group a layer from named parameters; groups that were given as dicts stay as they are.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> [(g["name"], len(g["params"])) for g in layer_groups(net.named_parameters())]
        [('0', 2), ('1', 2)]
    """
    items = list(params)
    if not items:
        raise ValueError("params is empty: pass model.named_parameters() or a list of groups with tensors in them")
    if all(isinstance(item, dict) for item in items):
        return [{"name": str(i), **cast(Group, item)} for i, item in enumerate(items)]
    if all(isinstance(item, tuple) for item in items):
        groups: dict[str, Group] = {}
        for name, tensor in cast(list[tuple[str, Tensor]], items):
            group = groups.setdefault(layer_of(name), {"name": layer_of(name), "params": []})
            group["params"].append(tensor)
        return list(groups.values())
    if len(items) > 1:
        raise ValueError(
            f"{len(items)} tensors without names: samplers set one rate a layer and cannot tell which "
            "tensors form one. "
            "Pass model.named_parameters(), or one group a layer: [{'params': [...]}, ...]"
        )
    return [{"name": "0", "params": items}]


def check_units(num_data: int, temperature: float) -> None:
    """Refuse an N or a T that makes no sense."""
    if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
        raise ValueError(f"num_data = {num_data!r} must be the number of examples, an integer of at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature = {temperature} must be finite and not negative; 1 is the Bayesian posterior")


class Move(NamedTuple):
    """What a step of a group is made of, in the terms of Theorems 1 and 2 (see `isosgd.samplers.steppers`).

    The injected noise is ``w = amplitude * scale * (xi - Q^T M^T xi)``; an amplitude of 0 injects none.
    """

    rate: Number | list[float]
    amplitude: Number | list[float]
    scale: list[Tensor] | None = None
    ring: Tensor | None = None  # M^T
    factor: Tensor | None = None  # Q

    def only(self, i: int) -> Move:
        """The same for the i-th tensor alone."""
        rate = self.rate[i] if isinstance(self.rate, list) else self.rate
        amplitude = self.amplitude[i] if isinstance(self.amplitude, list) else self.amplitude
        return Move(rate, amplitude, None if self.scale is None else [self.scale[i]])


Planned = tuple[list[Tensor], list[Tensor], Move]  # parameters, their innovations, and what to do with them


def merge(planned: Sequence[Planned]) -> tuple[Planned, Tensor | None]:
    """Several groups as one, with a rate and an amplitude for each tensor.

    Returns:
        The one group; and, where parameters have scales of their own, ``rate * amplitude * scale`` of all of them as
        one flat tensor, for which the innovations then take the place of amplitude and scale.
    """
    every = [
        (p, xi, move.only(i))
        for params, xis, move in planned
        for i, (p, xi) in enumerate(zip(params, xis, strict=True))
    ]
    rates = [cast(float, move.rate) for _, _, move in every]
    amplitudes = [cast(float, move.amplitude) for _, _, move in every]
    flat_scale = None
    if all(move.scale is not None for _, _, move in every):
        scales = [cast(list[Tensor], move.scale)[0] for _, _, move in every]
        flat_scale = torch.cat([(r * a * s).reshape(-1) for r, a, s in zip(rates, amplitudes, scales, strict=True)])
        amplitudes = [1.0 / r if r else 0.0 for r in rates]
    return ([p for p, _, _ in every], [xi for _, xi, _ in every], Move(rates, amplitudes)), flat_scale


class Sampler(Optimizer):
    """A `torch.optim.Optimizer` whose steps draw from a posterior.

    The gradients it finds in ``.grad`` must be those of ``mean negative log likelihood + (negative log prior) / N``.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N, the number of examples in the data set. Never guessed.
        temperature: T; the target is ``exp(-f / T)`` with f the negative log joint density.
        bias: the relative error of the posterior variance that the step size may cause, when rates are set by `adapt`.
        noise: how gradient noise is estimated: ``gaussian``, ``paired``, ``alpha`` or a `NoiseEstimator`.
        momentum: momentum of that estimate.
        track_every: with an uncentred estimate, take in the gradient of every so many steps.
        generator: where all randomness comes from; saved with the state. Made from torch's seed when not given.
        chains: K when every parameter carries a leading dimension of K independent chains; rates are then ``[K]``.
        foreach: update all tensors of a group in one call.
        capturable: keep rates in tensors on the device, so that a step can be captured in a CUDA graph.
        innovations: ``normal``, ``bits`` (moment-matched, see `isosgd.samplers.innovations`) or ``auto``.
        extra: further settings of a group, from the subclass.
    """

    targets: ClassVar[str] = "exp(-f / T)"
    friction: float = 1.0

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        bias: float = 0.02,
        noise: NoiseName | NoiseEstimator = "paired",
        momentum: float | None = None,
        track_every: int = 50,
        generator: torch.Generator | None = None,
        chains: int | None = None,
        foreach: bool = True,
        capturable: bool = False,
        innovations: Innovations = "auto",
        extra: dict[str, Any] | None = None,
    ) -> None:
        check_units(num_data, temperature)
        if not 0 < bias < 1:
            raise ValueError(f"bias = {bias} must lie in (0, 1): the relative error allowed in the posterior variance")
        if innovations not in ("auto", "normal", "bits"):
            raise ValueError(f"innovations = {innovations!r} is unknown; choose 'auto', 'normal' or 'bits'")
        if track_every < 1:
            raise ValueError(f"track_every = {track_every} must be at least 1")
        self.estimator = make_estimator(noise, momentum)
        self.bias, self.track_every, self.chains = bias, track_every, chains
        self.foreach, self.capturable, self.innovations = foreach, capturable, innovations
        defaults = {
            "num_data": num_data,
            "temperature": temperature,
            "step": 0,
            "seen": 0,
            "vectors": 0,
            "frozen": False,
            **(extra or {}),
        }
        super().__init__(layer_groups(params), defaults)
        for group in self.param_groups:
            check_units(group["num_data"], group["temperature"])
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ValueError(
                        f"group {group['name']!r} holds a tensor of dtype {p.dtype}: only real "
                        "floating-point parameters "
                        "can be sampled; leave the others out of params"
                    )
                if chains is not None and (p.dim() == 0 or p.shape[0] != chains):
                    raise ValueError(
                        f"chains = {chains}, but a parameter of group {group['name']!r} has shape {tuple(p.shape)}"
                    )
        self._drop_frozen()
        device = self.param_groups[0]["params"][0].device
        if generator is None:
            generator = torch.Generator(device=device).manual_seed(int(torch.randint(2**62, ())))
        if generator.device.type != device.type:
            raise ValueError(f"the generator lives on {generator.device}, the parameters on {device}; make it there")
        self.generator = generator
        self._plan_key: tuple[bool, ...] | None = None
        self._spectra: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: list[Planned] = []
        self._scale: Tensor | None = None

    def _drop_frozen(self) -> None:
        """Leave out parameters without gradients, so that a frozen layer needs no noise, no rate and no step."""
        trained = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
        if any(trained):
            for group, params in zip(self.param_groups, trained, strict=True):
                group["params"] = params
            self.param_groups = [group for group in self.param_groups if group["params"]]

    @property
    def batched(self) -> bool:
        """Whether parameters carry a leading chain dimension."""
        return self.chains is not None

    # -- gradient noise -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        """Take in one noise vector, in the order of the parameters; the gradients themselves when None."""
        if noise is not None:
            self._check_noise(noise)
        vectors = iter(noise) if noise is not None else None
        for group in self.param_groups:
            given = [p.grad if vectors is None else next(vectors) for p in group["params"]]
            pairs = [(p, d) for p, d in zip(group["params"], given, strict=True) if d is not None]
            if not pairs:
                continue
            states = [self._noise_state(p) for p, _ in pairs]
            group_noise = [d.to(s["variance"].dtype) for s, (_, d) in zip(states, pairs, strict=True)]
            variance, vectors_too = self._follows if group["frozen"] else (True, True)
            if variance:
                self.estimator.update(states, group_noise, group["seen"])
            if vectors_too:
                self._observe_group(group, states[0], join(group_noise, self.batched))
            group["seen"] += 1
        self.refresh()

    @property
    def _follows(self) -> tuple[bool, bool]:
        """Whether a step depends on the variance of each parameter's noise, and on the noise vectors."""
        return False, False

    def freeze(self) -> None:
        """Rates stay as they are from now on; only the noise that a step depends on is still followed."""
        for group in self.param_groups:
            group["frozen"] = True

    def _check_noise(self, noise: Sequence[Tensor | None]) -> None:
        wanted = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        found = [None if d is None else tuple(d.shape) for d in noise]
        if len(found) != len(wanted) or any(f is not None and f != w for f, w in zip(found, wanted, strict=True)):
            raise ValueError(
                f"noise has vectors of shapes {found}, the parameters have {wanted}: give one for each, in their order"
            )

    def _noise_state(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if "variance" not in state:
            state.update(self.estimator.init(p))
        return cast(dict[str, Any], state)

    def _observe_group(self, group: Group, state: dict[str, Any], vector: Tensor) -> None:
        """What is known of a group's noise as a whole, kept in the state of its first parameter.

        The top eigenvector; the last few noise vectors; and how long their outer products were.
        """
        slots = min(MOST_VECTORS, max(1, VECTOR_MEMORY // vector.shape[-1]))
        if "top" not in state:
            state["top"] = torch.empty_like(vector).normal_(generator=self.generator)
            state["ring"] = vector.new_zeros((*vector.shape[:-1], slots, vector.shape[-1]))
            state["longest"] = vector.new_zeros((LENGTHS_KEPT, *vector.shape[:-1]))
        if not group["frozen"]:
            power_step(state["top"], vector, max(1.0 - self.estimator.momentum, 1.0 / (group["seen"] + 1), 0.01))
        state["ring"][..., group["vectors"] % slots, :] = vector
        group["vectors"] += 1
        self._spectra[id(group)] = spectrum = ring_spectrum(state["ring"])
        # A ring that is not full, or holds vectors of an older window, says little: such lengths are soon written over.
        index = max(group["seen"] - slots, 0) % LENGTHS_KEPT
        state["longest"][index] = spectrum[0].amax(-1) / min(group["vectors"], slots)

    @staticmethod
    def _lengths(group: Group, slots: int) -> int:
        """How many lengths count: those of full rings since the noise was last forgotten, or the last one."""
        return min(max(int(group["seen"]) - slots, 1), LENGTHS_KEPT)

    def forget_noise(self) -> None:
        """Start the noise estimate anew where the chain now is; the old one serves until the first new vector."""
        for group in self.param_groups:
            group["seen"] = 0

    def noise_ready(self) -> bool:
        """Whether every group has a first noise estimate."""
        return all(self.estimator.ready(group["seen"]) for group in self.param_groups)

    def group_noise(self, group: Group) -> dict[str, Any] | None:
        """What is known of a group's noise as a whole (see `_observe_group`), or None before any was seen."""
        return next((self.state[p] for p in group["params"] if "top" in self.state.get(p, {})), None)

    def noise_summary(self, group: Group, how: Summary) -> Tensor:
        """One number for a group's noise, in units of ``b = v / 2``."""
        if how == "top":
            return top_eigenvalue(self._seen_noise(group)["top"])
        return summarise(self._variances(group), how, self.batched)

    def _seen_noise(self, group: Group) -> dict[str, Any]:
        state = self.group_noise(group)
        if state is None:
            raise RuntimeError(
                f"no gradient noise was seen for group {group['name']!r}: pass "
                "step(noise=isosgd.noise.paired_backward(...)), "
                "or choose noise='gaussian'"
            )
        return state

    def _variances(self, group: Group) -> list[Tensor]:
        self._seen_noise(group)
        return self.estimator.variance([self.state[p] for p in group["params"] if "variance" in self.state.get(p, {})])

    def recent_lengths(self, group: Group) -> Tensor:
        """Top eigenvalue of the outer products of the noise vectors kept, at recent steps: ``[seen]`` or ``[seen,
        chains]``.
        """
        state = self._seen_noise(group)
        longest: Tensor = state["longest"]
        return longest[: self._lengths(group, state["ring"].shape[-2])]

    def longest_noise(self, group: Group) -> Tensor:
        """What lambda must cover for `take_out_` to be exact.

        A quantile, not the maximum: one outlier must not slow the chain for ever. What it clips is measured.
        """
        return 0.5 * torch.quantile(self.recent_lengths(group), 1.0 - CLIPPED, dim=0)

    def _outer(self, group: Group, lam: Number, rate: Number) -> Move:
        """A move whose injected noise makes gradient noise isotropic, correlations included (see `take_out_`)."""
        ring = self._seen_noise(group)["ring"]
        if id(group) not in self._spectra:
            self._spectra[id(group)] = ring_spectrum(ring)
        filled = min(group["vectors"], ring.shape[-2])
        factor = outer_factor(ring, self._spectra[id(group)], lam, filled)
        return Move(rate, root(2.0 * lam), ring=ring, factor=factor)

    def _diagonal(self, group: Group, params: list[Tensor], lam: Number, rate: Number) -> Move:
        """A move whose injected noise makes up for the variance of each parameter's gradient noise on its own."""
        variances = self.estimator.variance([self._noise_state(p) for p in params])
        scale = diagonal_scale(lam, join(variances, self.batched))
        parts = torch.split(scale, [flat(v, self.batched).shape[-1] for v in variances], dim=-1)
        return Move(rate, 1.0, scale=[x.view(p.shape) for x, p in zip(parts, params, strict=True)])

    # -- rates --------------------------------------------------------------------------------------------------------

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

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, noise: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        """One step of the chain.

        Args:
            closure: re-evaluates the loss and its gradients.
            noise: the noise vector of this step's minibatch (paired halves), where there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if noise is not None or self._takes_gradient():
            self.observe(noise)
        for params, xi, move in self._moves():
            grads = [cast(Tensor, p.grad) for p in params]
            if self.foreach:
                self._advance(params, grads, xi, move)
            else:
                for i, (p, g, x) in enumerate(zip(params, grads, xi, strict=True)):
                    self._advance([p], [g], [x], move.only(i))
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def _takes_gradient(self) -> bool:
        """Whether this step's gradient serves as an (uncentred) noise vector."""
        return not self.estimator.centred and self.param_groups[0]["step"] % self.track_every == 0

    @abstractmethod
    def _move(self, group: Group, params: list[Tensor]) -> Move:
        """The rate and the injected noise of a group's next steps: all that tells samplers apart.

        It is asked again when the noise estimate or the rates change, and after `refresh`.
        """

    def _advance(self, params: list[Tensor], grads: list[Tensor], xi: list[Tensor], move: Move) -> None:
        """Move the parameters, by Theorem 1 unless a sampler says otherwise."""
        langevin_(params, grads, xi, move.rate, move.amplitude, move.scale)

    def refresh(self) -> None:
        """Ask for the moves anew; call it after changing a group's settings by hand."""
        self._kept.clear()

    def _moves(self) -> list[Planned]:
        """Parameters that have gradients, with innovations of this step and what to do with them.

        Where every number is a float all groups become one, so that a step is a few calls however many layers there
        are.
        """
        key = tuple(p.grad is not None for group in self.param_groups for p in group["params"])
        if key != self._plan_key:
            self._make_plan()
            self._plan_key = key
        if not self._kept:
            unit, self._scale = self._source.unit, None
            for group, params, _, xi in self._groups:
                move = self._move(group, params)
                self._kept.append((params, xi, move._replace(amplitude=unit * cast(Number, move.amplitude))))
            self._outers = [
                (flat_xi, move.ring, move.factor)
                for (_, _, flat_xi, _), (_, _, move) in zip(self._groups, self._kept, strict=True)
                if move.ring is not None and move.factor is not None
            ]
            self._silent = all(isinstance(move.amplitude, float) and move.amplitude == 0 for _, _, move in self._kept)
            if not any(isinstance(x, Tensor) for _, _, move in self._kept for x in (move.rate, move.amplitude)):
                merged, self._scale = merge(self._kept)
                self._kept = [merged]
        if not self._silent:
            self._source.fill(self._scale)
            for flat_xi, ring, factor in self._outers:
                take_out_(flat_xi, ring, factor)
        return self._kept

    def _make_plan(self) -> None:
        active = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        every = [p for params in active for p in params]
        if not every:
            raise RuntimeError("no parameter has a gradient: call backward() before step()")
        dtype = torch.float32
        for p in every:
            dtype = torch.promote_types(dtype, p.dtype)
        lead = () if self.chains is None else (self.chains,)
        sizes = [p.numel() // (self.chains or 1) for p in every]
        self._innovation = torch.zeros((*lead, sum(sizes)), dtype=dtype, device=every[0].device)
        self._source = Source(self._innovation.view(-1), self.generator, self.innovations)
        views = iter(v.view(p.shape) for v, p in zip(torch.split(self._innovation, sizes, dim=-1), every, strict=True))
        counts = [sum(p.numel() // (self.chains or 1) for p in params) for params in active]
        flats = torch.split(self._innovation, counts, dim=-1)
        self._groups = [
            (group, params, flat_xi, [next(views) for _ in params])
            for group, params, flat_xi in zip(self.param_groups, active, flats, strict=True)
            if params
        ]
        self.refresh()

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the generator."""
        state = self.generator.get_state() if self._plan_key is None else self._source.state()
        return {**super().state_dict(), "generator": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Estimates keep their own dtype (torch would cast them to the parameter's)."""
        if "generator" not in state_dict:
            raise ValueError(
                "this state has no 'generator': it was not saved by an isosgd sampler and cannot resume a chain"
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "generator"})
        order = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, index in zip(order, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
        self.generator.set_state(state_dict["generator"].cpu())
        self._plan_key = None
        self._spectra.clear()
        self.refresh()


def slow_rise(old: Number | None, new: Tensor, rise: float) -> Tensor:
    """An inverse rate (a lambda) that grows at once and shrinks by at most a factor of ``rise``."""
    return new if old is None else torch.maximum(new, torch.as_tensor(old, dtype=new.dtype, device=new.device) / rise)
