"""Injected noise: from the moves of a sampler to its kicks.

A sampler provides the `Move` of each group. An `Injector` turns all moves into a plan: one rate for each tensor (or
group), and one flat tensor of *kicks*, ``rate * w``, drawn, scaled and corrected in one go for all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor

from isosgd.geometry.layer import Number, outer_factor, over_chains, subtract_outer_
from isosgd.noise.model import NoiseModel, split_like
from isosgd.samplers.groups import Group
from isosgd.samplers.innovations import Innovations, Source

NO_GRADIENT = "no parameter has a gradient: call backward() before step()"


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Move(NamedTuple):
    """The step of a group, in terms of Theorems 1 and 2 (see `isosgd.samplers.steppers`).

    The injected noise is ``w = amplitude * scale * xi``; an amplitude of 0 injects none. ``outer`` is the lambda of a
    correction for recent noise vectors (see `isosgd.geometry.layer.subtract_outer_`).
    """

    rate: Number
    amplitude: Number
    scale: Tensor | None = None  # flat, like the group's innovations
    outer: Number | None = None


class GroupKicks(NamedTuple):
    """The parameters of a group that have gradients, and views of their kicks: flat, and one for each parameter."""

    group: Group
    params: list[Tensor]
    flat: Tensor
    kicks: list[Tensor]


class Planned(NamedTuple):
    """Parameters that are updated in one call."""

    params: list[Tensor]
    rate: Number | list[float]
    kicks: list[Tensor]


class Injector:
    """Draws the kicks of a sampler's steps, from ``move``, which gives the `Move` of a group.

    The layout depends on which parameters have gradients; the plan is updated when something has changed.

    Attributes:
        extra: innovations that a step takes beyond one for each element.
        averaged: whether innovations are means over this step and the last one.
        moves: of the groups in the layout; empty if they have to be recomputed.
        plan: what a step executes.
        scale: of the kicks, flat.
        noiseless: whether nothing is injected.
        source: of innovations.
    """

    def __init__(
        self,
        noise: NoiseModel,
        generator: torch.Generator,
        innovations: Innovations,
        chains: int | None,
        capturable: bool,
        move: Callable[[Group, list[Tensor]], Move],
    ) -> None:
        self.noise, self.generator, self.innovations = noise, generator, innovations
        self.chains, self.capturable, self.move = chains, capturable, move
        self.extra, self.averaged = 0, False
        self.source: Source
        self.reset()

    def reset(self, extra: int | None = None) -> None:
        """Drop the layout and the last innovations; ``extra`` sets the number of extra ones."""
        self.extra = self.extra if extra is None else extra
        self._key: tuple[bool, ...] | None = None
        self._last: Tensor | None = None  # innovations of the last step, for the next source
        self.layout: list[GroupKicks] = []
        self.moves: list[tuple[GroupKicks, Move]] = []
        self.plan: list[Planned] = []
        self.scale = torch.empty(0)
        self.noiseless = self._corrected = False
        self._fixed: list[Tensor] = []

    def fixed(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors that change with the noise estimate, copied to where a captured step reads them."""
        if not self.capturable:
            return found
        if not capturing():
            if [t.shape for t in self._fixed] == [t.shape for t in found]:
                torch._foreach_copy_(self._fixed, list(found))
            else:
                self._fixed = [t.clone() for t in found]
        return self._fixed

    @property
    def params(self) -> list[Tensor]:
        return [p for part in self.layout for p in part.params]

    def generator_state(self) -> Tensor:
        """The generator's state before the next step, to be saved."""
        return self.generator.get_state() if self._key is None else self.source.state()

    def drop_prefetched(self) -> None:
        """Return prefetched innovations to the generator."""
        if self._key is not None:
            self.source.drop_prefetched()

    def lay_out(self) -> None:
        """Assign the parameters that have gradients their places in the flat tensor of kicks."""
        groups = self.noise.groups
        key = tuple([p.grad is not None for group in groups for p in group["params"]])
        if key == self._key:
            return
        last = self.last
        active = [[p for p in group["params"] if p.grad is not None] for group in groups]
        every = [p for params in active for p in params]
        if not every:
            raise RuntimeError(NO_GRADIENT)
        for group, params in zip(groups, active, strict=True):
            if self.noise.uses.vectors and 0 < len(params) < len(group["params"]):
                missing = next(p for p in group["params"] if p.grad is None)
                raise RuntimeError(
                    f"a parameter of shape {tuple(missing.shape)} in group {group['name']!r} has no gradient, while "
                    "others of the group have: the noise of a group is taken out as a whole. Freeze it before the "
                    "sampler is made, or give it a group of its own"
                )
        dtype = reduce(torch.promote_types, (p.dtype for p in every), torch.float32)
        lead = () if self.chains is None else (self.chains,)
        size = sum(p.numel() for p in every) // (self.chains or 1)
        drawn = torch.zeros((*lead, size + self.extra), dtype=dtype, device=every[0].device)
        whole = self.noise.whole
        draw = partial(whole.normal_, params=every, generator=self.generator) if whole.sharded else None
        self.source = Source(drawn, self.generator, self.innovations, self.averaged, draw)
        self.layout, end = [], 0
        for group, params in zip(groups, active, strict=True):
            if params:
                start, end = end, end + sum(p.numel() for p in params) // (self.chains or 1)
                flat = drawn[..., start:end]
                self.layout.append(GroupKicks(group, params, flat, split_like(flat, params, self.chains)))
        self._key = key
        self.moves, self.scale = [], torch.empty(0)
        if self.averaged:
            self.last = last

    def refresh(self) -> None:
        """Recompute the moves; with ``capturable``, overwrite the tensors that captured steps read."""
        again = self.capturable and bool(self.moves)
        self.moves = []
        if again:
            self.make_plan()

    def noise_changed(self) -> None:
        """Adopt a new noise estimate: variances may change the moves, vectors the correction of the kicks."""
        if self.noise.uses.variances or not self.noise.groups[0]["frozen"]:
            self.refresh()
        self._corrected = False

    def make_plan(self) -> None:
        """Update the plan if the moves have changed, and the correction if the noise vectors have.

        If every rate is a float, all groups become one, so that a step is a few calls for any number of layers.
        """
        if not self.moves:
            self.moves = [(part, self.move(part.group, part.params)) for part in self.layout]
            self.noiseless = all(isinstance(m.amplitude, float) and m.amplitude == 0 for _, m in self.moves)
            if any(isinstance(move.rate, Tensor) for _, move in self.moves):
                self.plan = [Planned(part.params, move.rate, part.kicks) for part, move in self.moves]
            else:
                rates = [cast(float, move.rate) for part, move in self.moves for _ in part.params]
                self.plan = [Planned(self.params, rates, [kick for part in self.layout for kick in part.kicks])]
            scales = []
            for part, move in self.moves:
                scale = over_chains(move.rate * move.amplitude) * (1.0 if move.scale is None else move.scale)
                scales.append(torch.as_tensor(scale).to(part.flat).expand_as(part.flat))
            if self.capturable and self.scale.numel():
                torch.cat(scales, dim=-1, out=self.scale)
            else:
                self.scale = torch.cat(scales, dim=-1)
            self._corrected = False
        if not self._corrected and not self.noiseless:
            self.source.prepare(self.scale, self._correction())
            self._corrected = True

    def outer_corrections(self) -> list[tuple[GroupKicks, Tensor, Tensor | float]]:
        """Groups whose kicks are corrected for noise vectors, with the vectors and the factor for `subtract_outer_`."""
        found = []
        for part, move in self.moves:
            if move.outer is not None:
                ring, *spectrum, count = self.noise.spectrum(part.group)
                factor = outer_factor(ring, (spectrum[0], spectrum[1]), move.outer, count)
                found.append((part, ring, factor))
        return found

    def _correction(self) -> Callable[[], None] | None:
        """A function that corrects the scaled kicks: a group has one scale, so correcting after scaling is exact."""
        outers, whole = self.outer_corrections(), self.noise.whole
        factors = [factor for *_, factor in outers if isinstance(factor, Tensor)]
        if factors and len(factors) == len(outers):
            fixed = self.fixed(factors)
            outers = [(part, ring, factor) for (part, ring, _), factor in zip(outers, fixed, strict=True)]

        def finish() -> None:
            for part, ring, factor in outers:
                subtract_outer_(part.flat, ring, factor, whole.total if whole.sharded else None)

        return finish if outers else None

    @property
    def last(self) -> Tensor | None:
        """Innovations of the last step, if averaged; None before the first."""
        return self._last if self._key is None else self.source.last

    @last.setter
    def last(self, value: Tensor | None) -> None:
        if self._key is None:
            self._last = value
        else:
            self.source.last = value
