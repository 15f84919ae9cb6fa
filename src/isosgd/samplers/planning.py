"""From the moves of a sampler to its kicks.

A sampler says what the `Move` of each group is. Here all moves become a plan: one rate for each tensor (or group), and
one flat tensor of *kicks*, ``rate * w``, drawn, scaled and corrected at once for all groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from isosgd.noise import join
from isosgd.samplers.following import NoiseFollower
from isosgd.samplers.groups import Group
from isosgd.samplers.innovations import Innovations, Source
from isosgd.samplers.steppers import Number, over_chains
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


class Planner(NoiseFollower):
    """The part of a sampler that plans its steps.

    A plan is laid out once, for the parameters that have gradients, and made anew as far as something has changed.
    """

    chains: int | None
    capturable: bool
    innovations: Innovations

    def _start_plan(self) -> None:
        """No plan yet."""
        self._laid_key: tuple[bool, ...] | None = None
        self._spectra: dict[int, tuple[Tensor, Tensor]] = {}
        self._moves: list[tuple[Laid, Move]] = []
        self._plan: list[Planned] = []
        self._scale = torch.empty(0)
        self._outers_known = self._silent = False

    @abstractmethod
    def _move(self, group: Group, params: list[Tensor]) -> Move:
        """The rate and the injected noise of a group's next steps: all that tells samplers apart.

        It is asked again when the noise estimate or the rates change, and after `refresh`.
        """

    def _outer(self, lam: Number, rate: Number) -> Move:
        """A move whose injected noise makes gradient noise isotropic, correlations included (see `take_out_`)."""
        return Move(rate, root(2.0 * lam), outer=lam)

    def _diagonal(self, params: list[Tensor], lam: Number, rate: Number) -> Move:
        """A move whose injected noise makes up for the variance of each parameter's gradient noise on its own."""
        variances = self.estimator.variance([self._noise_state(p) for p in params])
        return Move(rate, 1.0, scale=diagonal_scale(lam, join(variances, self.batched)))

    @property
    def _extra(self) -> int:
        """Innovations that a step takes beyond one for each parameter."""
        return 0

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
