"""What every sampler shares: the step, its randomness, and the state that is saved.

A sampler says what the `Move` of each group is. Here all moves become a plan: one rate for each tensor (or group), and
one flat tensor of *kicks*, ``rate * w``, drawn, scaled and corrected at once for all groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from isosgd.noise import NoiseEstimator, NoiseName, join, make_estimator
from isosgd.samplers.following import NoiseFollower
from isosgd.samplers.groups import Group, ParamsLike, check_units, layer_groups
from isosgd.samplers.innovations import Innovations, Source
from isosgd.samplers.steppers import Number, allowed_rate_curvature, langevin_, over_chains
from isosgd.samplers.structure import diagonal_scale, outer_factor, root, take_out_


class Move(NamedTuple):
    """What a step of a group is made of, in the terms of Theorems 1 and 2 (see `isosgd.samplers.steppers`).

    The injected noise is ``w = amplitude * scale * xi``. Where ``outer``, a lambda, is given, the noise vectors seen
    lately are first taken out of xi (see `isosgd.samplers.structure.take_out_`). An amplitude of 0 injects none.
    """

    rate: Number
    amplitude: Number
    scale: Tensor | None = None  # flat, like the group's innovations
    outer: Number | None = None


class Laid(NamedTuple):
    """A group's parameters that have gradients, and where their kicks lie, flat and by parameter."""

    group: Group
    params: list[Tensor]
    flat: Tensor
    kicks: list[Tensor]


class Planned(NamedTuple):
    """Parameters that move together."""

    params: list[Tensor]
    rate: Number | list[float]
    kicks: list[Tensor]


class Sampler(NoiseFollower):
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
        self._laid_key: tuple[bool, ...] | None = None
        self._spectra: dict[int, tuple[Tensor, Tensor]] = {}
        self._moves: list[tuple[Laid, Move]] = []
        self._plan: list[Planned] = []
        self._scale = torch.empty(0)
        self._outers_known = self._silent = False

    @property
    def _extra(self) -> int:
        """Innovations that a step takes beyond one for each parameter."""
        return 0

    def _drop_frozen(self) -> None:
        """Leave out parameters without gradients, so that a frozen layer needs no noise, no rate and no step."""
        trained = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
        if any(trained):
            for group, params in zip(self.param_groups, trained, strict=True):
                group["params"] = params
            self.param_groups = [group for group in self.param_groups if group["params"]]

    @property
    def batched(self) -> bool:  # type: ignore[override]
        """Whether parameters carry a leading chain dimension."""
        return self.chains is not None

    def _outer(self, lam: Number, rate: Number) -> Move:
        """A move whose injected noise makes gradient noise isotropic, correlations included (see `take_out_`)."""
        return Move(rate, root(2.0 * lam), outer=lam)

    def _diagonal(self, params: list[Tensor], lam: Number, rate: Number) -> Move:
        """A move whose injected noise makes up for the variance of each parameter's gradient noise on its own."""
        variances = self.estimator.variance([self._noise_state(p) for p in params])
        return Move(rate, 1.0, scale=diagonal_scale(lam, join(variances, self.batched)))

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

    # Not compiled: a step is host work and random numbers, with buffers that change places.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(
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
        self._lay_out()
        self._update()
        for group in self.param_groups:
            group["step"] += 1
        if not self._silent:
            self._source.go_ahead()
        return loss

    def _update(self) -> None:
        """Draw the kicks and move the parameters."""
        self._make_plan()
        if not self._silent:
            self._source.fill()
        for params, rate, kicks in self._plan:
            grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
            kick = None if self._silent else kicks
            if self.foreach:
                self._advance(params, grads, rate, kick)
                continue
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                own = rate[i] if isinstance(rate, list) else rate
                self._advance([p], [g], own, None if kick is None else [kick[i]])

    def _takes_gradient(self) -> bool:
        """Whether this step's gradient serves as an (uncentred) noise vector."""
        return not self.estimator.centred and self.param_groups[0]["step"] % self.track_every == 0

    @abstractmethod
    def _move(self, group: Group, params: list[Tensor]) -> Move:
        """The rate and the injected noise of a group's next steps: all that tells samplers apart.

        It is asked again when the noise estimate or the rates change, and after `refresh`.
        """

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        """Move the parameters, by Theorem 1 unless a sampler says otherwise."""
        langevin_(params, grads, rate, kick)

    @property
    def sampling(self) -> bool:
        """Whether the last step makes a draw that counts."""
        return True

    def refresh(self) -> None:
        """Ask for the moves anew; call it after changing a group's settings by hand.

        A captured step meets the change at once: the tensors that it reads are written over.
        """
        again = self.capturable and bool(self._moves)
        self._moves = []
        if again:
            self._make_plan()

    def _noise_changed(self) -> None:
        variances, _ = self._follows
        if variances or not self.param_groups[0]["frozen"]:
            self.refresh()
        self._outers_known = False

    def _lay_out(self) -> None:
        """Lay out the parameters that have gradients in a flat tensor of kicks."""
        key = tuple([p.grad is not None for group in self.param_groups for p in group["params"]])
        if key == self._laid_key:
            return
        active = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        every = [p for params in active for p in params]
        if not every:
            raise RuntimeError("no parameter has a gradient: call backward() before step()")
        dtype = torch.float32
        for p in every:
            dtype = torch.promote_types(dtype, p.dtype)
        lead = () if self.chains is None else (self.chains,)
        sizes = [p.numel() // (self.chains or 1) for p in every]
        drawn = torch.zeros((*lead, sum(sizes) + self._extra), dtype=dtype, device=every[0].device)
        self._source = Source(drawn, self.generator, self.innovations)
        out = drawn[..., : sum(sizes)]
        self._laid = []
        parts = iter(torch.split(out, sizes, dim=-1))
        counts = [sum(p.numel() // (self.chains or 1) for p in params) for params in active]
        for group, params, whole in zip(self.param_groups, active, torch.split(out, counts, dim=-1), strict=True):
            if params:
                self._laid.append(Laid(group, params, whole, [next(parts).view(p.shape) for p in params]))
        self._laid_key = key
        self._moves, self._scale = [], torch.empty(0)

    def _make_plan(self) -> None:
        """Turn the samplers' moves into a plan, as far as something has changed.

        Where every rate is a float all groups become one, so that a step is a few calls however many layers there are.
        """
        if not self._moves:
            self._moves = [(laid, self._move(laid.group, laid.params)) for laid in self._laid]
            self._silent = all(isinstance(m.amplitude, float) and m.amplitude == 0 for _, m in self._moves)
            if any(isinstance(move.rate, Tensor) for _, move in self._moves):
                self._plan = [Planned(laid.params, move.rate, laid.kicks) for laid, move in self._moves]
            else:
                rates = [cast(float, move.rate) for laid, move in self._moves for _ in laid.params]
                params = [p for laid in self._laid for p in laid.params]
                self._plan = [Planned(params, rates, [kick for laid in self._laid for kick in laid.kicks])]
            scales = []
            for laid, move in self._moves:
                scale = over_chains(move.rate * move.amplitude) * (1.0 if move.scale is None else move.scale)
                scales.append(torch.as_tensor(scale).to(laid.flat).expand_as(laid.flat))
            if self.capturable and self._scale.numel():
                torch.cat(scales, dim=-1, out=self._scale)
            else:
                self._scale = torch.cat(scales, dim=-1)
            self._outers_known = False
        if not self._outers_known and not self._silent:
            self._source.prepare(self._scale, self._taking_out())
            self._outers_known = True

    def _taking_out(self) -> Callable[[], None] | None:
        """What takes noise vectors out of the kicks: one number scales a group, so that the order is free."""
        outers = []
        for laid, move in self._moves:
            if move.outer is not None:
                ring, *spectrum, count = self.spectrum(laid.group)
                outers.append((laid.flat, ring, outer_factor(ring, (spectrum[0], spectrum[1]), move.outer, count)))

        def finish() -> None:
            for kicks, ring, factor in outers:
                take_out_(kicks, ring, factor)

        return finish if outers else None

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the generator."""
        state = self.generator.get_state() if self._laid_key is None else self._source.state()
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
        self._laid_key = self._rows = None
        self._spectra.clear()
        self._moves = []


def slow_rise(old: Number | None, new: Tensor, rise: float) -> Tensor:
    """An inverse rate (a lambda) that grows at once and shrinks by at most a factor of ``rise``."""
    return new if old is None else torch.maximum(new, torch.as_tensor(old, dtype=new.dtype, device=new.device) / rise)
