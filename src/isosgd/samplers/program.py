"""Step programs: the steps of a sampler as a pure function of tensors, for backends to execute.

A backend keeps a *state*: flat parameters ``[chains, d]``, followed by further columns for what else a step needs (a
velocity, a thermostat). It asks for the innovations of the next steps and for the tensors that a step reads, and
updates the state step by step, in compiled code or in a captured graph. No backend reads a sampler's attributes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import LEVEL_WEIGHT, Full
from isosgd.geometry.lowrank import LowRank
from isosgd.native.layers import Updates
from isosgd.noise.model import split_like
from isosgd.samplers.innovations import as_bits, fill_steps

if TYPE_CHECKING:
    from isosgd.samplers.base import Sampler

Tensors = tuple[Tensor, ...]


@dataclass
class Directions:
    """The part of a step along a few directions S that all parameters share.

    It is ``S^T (back S f + add s + undo S (reach xi))``, with the force ``f = g + (kick / rate) xi`` on each element
    and innovations s of the directions.

    Attributes:
        basis: S, ``[k, d]``.
        back: ``[k, k]``.
        add: ``[k, k]``.
        undo: ``[k, k]``, or None if nothing is subtracted from the elements' own innovations.
        reach: ``[d]``, likewise.
    """

    basis: Tensor
    back: Tensor
    add: Tensor
    undo: Tensor | None = None
    reach: Tensor | None = None


@dataclass
class Elementwise:
    """A step that acts on each element separately: ``theta -= rate g + kick xi``, or the same with a velocity.

    Attributes:
        rates: a number for each parameter tensor, or a tensor of its shape.
        kicks: the scale of injected noise, likewise.
        averaged: whether innovations are averaged over two steps.
        friction: of Theorem 2, if there is a velocity.
        directions: what is also subtracted from the parameters, if anything.
    """

    rates: list[Tensor]
    kicks: list[Tensor]
    averaged: bool = False
    friction: float | None = None
    directions: Directions | None = None


class StepProgram(ABC):
    """Steps of a sampler whose rates are fixed or scheduled. The sampler is unchanged before `prepare`.

    Attributes:
        dim: d, elements of all parameters of a chain.
        counts: the same for each group.
        width: innovations that a step takes.
        lead: innovations that precede those of the first step.
        follows_noise: whether the sampler needs a noise vector from time to time (`isosgd.samplers.Sampler.observe`).
        needs_noise: whether every step takes a noise vector.
        scheduled: whether rates change from step to step. They are then part of the innovations of `draw`, and there is
            no `injection`.
    """

    lead = 0
    needs_noise = False
    scheduled = False

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.chains = sampler, sampler.chains or 1
        self.params = [p for group in sampler.param_groups for p in group["params"]]
        self.counts = [sum(p.numel() for p in group["params"]) // self.chains for group in sampler.param_groups]
        self.dim = sum(self.counts)
        self.width = self.dim + sampler.injector.extra
        followed = any(sampler.noise.uses) and (sampler.estimator.centred or sampler.track_every is not None)
        self.follows_noise = followed or sampler.geometry is not None
        self.dtype = torch.promote_types(torch.float32, self.params[0].dtype)
        self.bits = False

    def prepare(self, most: int) -> None:
        """Prepare for calls of up to ``most`` steps; prefetched innovations are dropped."""
        injector = self.sampler.injector
        for p in self.params:  # only parameters with gradients are laid out
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        injector.lay_out()
        injector.source.prepare()
        self.sampler.refresh()
        self.bits = as_bits(injector.innovations, most * self.chains * self.width, self.params[0].device)

    # -- the state ------------------------------------------------------------------------------------------------

    def memory(self) -> list[list[Tensor]]:
        """The state of a step besides the parameters, in tensors of their shapes."""
        return []

    def numbers(self) -> list[Tensor]:
        """Further numbers in the state, each ``[chains]``."""
        return []

    def take_numbers(self, numbers: Tensor) -> None:  # noqa: B027 (most have none)
        """Store the new values of `numbers`, ``[chains, columns]``."""

    def begin(self) -> Tensor:
        """The present state."""
        theta = self.flat(self.params)
        columns = [self.flat(tensors).to(theta) for tensors in self.memory()]
        columns += [number.to(theta).expand(self.chains).unsqueeze(-1) for number in self.numbers()]
        return torch.cat([theta, *columns], dim=-1)

    def finish(self, state: Tensor) -> None:
        """Write a state to the sampler and its parameters."""
        end = 0
        for tensors in (self.params, *self.memory()):
            self.write(tensors, state[:, end : end + self.dim])
            end += self.dim
        self.take_numbers(state[:, end:])

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as one ``[chains, d]``."""
        return torch.cat([t.detach().reshape(self.chains, -1) for t in tensors], dim=-1)

    @torch.no_grad()
    def write(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """The inverse of `flat`."""
        torch._foreach_copy_(list(tensors), split_like(flat, tensors, self.chains))

    def parameters(self, state: Tensor) -> Tensor:
        """The parameters in a state."""
        return state if state.shape[-1] == self.dim else state[:, : self.dim]

    def velocities(self) -> list[Tensor]:
        return [self.sampler.velocity(p) for p in self.params]

    def count(self, steps: int) -> None:
        """Count steps that were taken."""
        for group in self.sampler.param_groups:
            group["step"] += steps

    # -- innovations ----------------------------------------------------------------------------------------------

    def draw(self, steps: int) -> Tensor:
        """Innovations of the next steps, ``[lead + steps, chains, width]``, from the sampler's generator.

        By default they are kicks, scaled and corrected like the sampler's own.
        """
        scale, *outer = self.injection()
        return self._take_out(fill_steps(self._empty(steps), self.sampler.generator, self.bits, scale), outer)

    def _empty(self, steps: int) -> Tensor:
        shape = self.lead + steps, self.chains, self.width
        return torch.empty(shape, dtype=self.dtype, device=self.params[0].device)

    def innovation(self, drawn: Tensor, k: int) -> Tensor:
        """The innovations of step k."""
        return drawn.select(0, k)

    def injection(self) -> Tensors:
        """The tensors with which `inject` turns normal numbers into innovations; they may change between calls."""
        injector = self.sampler.injector
        injector.make_plan()
        found = [injector.scale.view(self.chains, -1)]
        for _, ring, factor in injector.outer_corrections():
            factor = factor if isinstance(factor, Tensor) else factor * ring
            found += [t.view(self.chains, *t.shape[-2:]).to(self.dtype) for t in (ring, factor)]
        return tuple(found)

    def inject(self, normals: Tensor, tensors: Tensors) -> Tensor:
        """Innovations ``[chains, width]`` from standard normal numbers: a pure function of tensors."""
        scale, *outer = tensors
        return self._take_out((normals * scale).unsqueeze(0), outer).squeeze(0)

    def _take_out(self, kicks: Tensor, outer: Sequence[Tensor]) -> Tensor:
        """Correct kicks ``[steps, chains, d]`` for correlated noise, in place, where a group's move says so."""
        moves = self.sampler.injector.moves
        corrections = zip(outer[::2], outer[1::2], strict=True)
        for kick, (_, move) in zip(torch.split(kicks, self.counts, -1), moves, strict=True):
            if move.outer is not None:
                ring, factor = next(corrections)
                part = kick.transpose(0, 1)
                part.sub_((part @ ring.mT) @ factor)
        return kicks

    # -- the steps ------------------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> Tensors:
        """The tensors that a step reads besides its state; they may change between calls, not within one."""

    @abstractmethod
    def move(self, state: Tensor, gradient: Tensor, noise: Tensor | None, xi: Tensor, tensors: Tensors) -> Tensor:
        """The state after one step: a pure function of tensors.

        Args:
            state: the state before it.
            gradient: flat, of the mean loss.
            noise: the noise vector of the minibatch, if the program needs it.
            xi: the innovations of the step.
            tensors: those of `tensors`.
        """

    def elementwise(self) -> Elementwise | None:
        """The step in elementwise form, for one pass over memory; None if it has none."""
        return None

    @property
    def in_library(self) -> bool:
        """Whether the library takes such steps, given by `updates`."""
        return False

    def updates(self, drawn: Tensor, tensors: Tensors) -> Updates | None:
        """The steps of a call as the library takes them; None if at present it does not.

        Args:
            drawn: the innovations of `draw`.
            tensors: those of `tensors`.
        """
        return None

    def rates(self) -> Tensor:
        """The rate of each element, ``[chains, d]``."""
        self.sampler.injector.make_plan()
        parts = []
        for (_, move), count in zip(self.sampler.injector.moves, self.counts, strict=True):
            value = torch.as_tensor(move.rate, device=self.params[0].device).to(self.dtype)
            parts.append((value.unsqueeze(-1) if value.dim() else value).expand(self.chains, count))
        return torch.cat(parts, dim=-1)


class KickProgram(StepProgram):
    """Steps of Theorem 1, or of Theorem 2 with the velocity in the state; a metric must be constant."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.friction = sampler.friction if sampler.has_velocity else None

    def memory(self) -> list[list[Tensor]]:
        return [] if self.friction is None else [self.velocities()]

    def tensors(self) -> Tensors:
        metric = self.sampler.metric
        if metric is None:
            return (self.rates(),)
        values = self.flat([metric.value(p) for p in self.params]).to(self.dtype)
        return self.rates(), values, values.sqrt()

    def elementwise(self) -> Elementwise | None:
        injector = self.sampler.injector
        injector.make_plan()
        if self.chains > 1 or self.sampler.metric is not None or any(m.outer is not None for _, m in injector.moves):
            return None
        found = Elementwise([], [], friction=self.friction)
        for part, move in injector.moves:
            rate = torch.as_tensor(move.rate, dtype=self.dtype, device=part.flat.device).reshape(())
            kick = (rate * move.amplitude).reshape(())
            found.rates += [rate] * len(part.params)
            if move.scale is None:
                found.kicks += [kick] * len(part.params)
            else:
                found.kicks += [kick * share for share in split_like(move.scale.flatten(), part.params)]
        return found

    @property
    def in_library(self) -> bool:
        return True

    def updates(self, drawn: Tensor, tensors: Tensors) -> Updates | None:
        rate, *metric = tensors
        if metric:
            rate, drawn = rate * metric[0], metric[1] * drawn
        return Updates(drawn, rate.unsqueeze(0), self.friction)

    def move(self, state: Tensor, gradient: Tensor, noise: Tensor | None, xi: Tensor, tensors: Tensors) -> Tensor:
        rate, *metric = tensors
        if metric:
            gradient, xi = metric[0] * gradient, metric[1] * xi
        if self.friction is None:
            return (state - rate * gradient - xi).to(state.dtype)
        theta, velocity = state[:, : self.dim], state[:, self.dim :]
        velocity = (1.0 - self.friction) * velocity - rate * gradient - xi
        return torch.cat([theta + velocity, velocity], -1).to(state.dtype)


class ScheduledProgram(StepProgram):
    """Steps at rates that change from step to step, without a metric; the injected noise is the composite noise.

    A backend changes only the innovations between steps, so the rates of the groups are further columns of them.
    """

    scheduled = True

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.kicks = KickProgram(sampler)
        self.width = self.dim + len(self.counts)

    def memory(self) -> list[list[Tensor]]:
        return self.kicks.memory()

    def tensors(self) -> Tensors:
        return ()

    def table(self, steps: int) -> tuple[Tensor, Tensor]:
        """Rates and scales of the kicks of the next steps, each ``[steps, chains or 1, groups]``."""
        sampler, rates, kicks = self.sampler, [], []
        for group in sampler.param_groups:
            rate = torch.as_tensor(group["rate"], dtype=torch.float64, device="cpu")
            rate = rate * sampler.schedule.factors(group, steps)
            kick = (2.0 * sampler.friction * group["temperature"] / group["num_data"] * rate).sqrt()
            rates.append(rate)
            kicks.append(kick.masked_fill(sampler.schedule.exploring(group, steps), 0.0))
        return torch.stack(rates, -1), torch.stack(kicks, -1)

    def draw(self, steps: int) -> Tensor:
        out, normals = self._empty(steps), self._empty(steps)[..., : self.dim].contiguous()
        fill_steps(normals, self.sampler.generator, self.bits)
        rates, kicks = (x.to(out) for x in self.table(steps))
        parts = torch.split(normals, self.counts, -1), torch.split(out[..., : self.dim], self.counts, -1)
        for i, (normal, kicked) in enumerate(zip(*parts, strict=True)):
            torch.mul(normal, kicks[..., i, None], out=kicked)
        out[..., self.dim :] = rates
        return out

    def elementwise(self) -> Elementwise | None:
        """That of the first step; `table` has those of all."""
        if self.chains > 1:
            return None
        rates, kicks = ([x[0, 0, i] for i in self.groups] for x in self.table(1))
        return Elementwise(rates, kicks, friction=self.kicks.friction)

    @property
    def groups(self) -> list[int]:
        """The index of each parameter's group."""
        return [i for i, group in enumerate(self.sampler.param_groups) for _ in group["params"]]

    @property
    def in_library(self) -> bool:
        return True

    def updates(self, drawn: Tensor, tensors: Tensors) -> Updates | None:
        rates = torch.split(drawn[..., self.dim :], 1, -1)
        rate = torch.cat([x.expand(-1, -1, count) for x, count in zip(rates, self.counts, strict=True)], -1)
        return Updates(drawn[..., : self.dim], rate, self.kicks.friction)

    def injection(self) -> Tensors:
        raise RuntimeError("rates change from step to step: there is no injection for several steps")

    def move(self, state: Tensor, gradient: Tensor, noise: Tensor | None, xi: Tensor, tensors: Tensors) -> Tensor:
        columns = torch.split(xi[:, self.dim :], 1, -1)
        rates = [column.expand(-1, count) for column, count in zip(columns, self.counts, strict=True)]
        rate = columns[0] if len(rates) == 1 else torch.cat(rates, -1)
        return self.kicks.move(state, gradient, noise, xi[:, : self.dim], (rate,))


class GeometryProgram(StepProgram):
    """Steps of I-SGD with a geometry; if it tracks the level of the noise, the level is part of the state.

    ``averaged``: whether innovations are averaged over two steps.
    """

    def __init__(self, sampler: Sampler, geometry: Geometry, averaged: bool) -> None:
        super().__init__(sampler)
        self.geometry, self.lead = geometry, int(averaged)
        self.level = geometry if isinstance(geometry, Full) and geometry.tracks_level else None
        self.needs_noise = self.level is not None

    def numbers(self) -> list[Tensor]:
        return [] if self.level is None else [self.level.level]

    def take_numbers(self, numbers: Tensor) -> None:
        if self.level is not None:
            self.level.set_level(numbers[:, 0])

    def tensors(self) -> Tensors:
        tensors = self.geometry.tensors()
        return tensors if self.level is None else tensors[:-1]  # the level is part of the state

    def elementwise(self) -> Elementwise | None:
        if self.chains > 1:
            return None
        if isinstance(self.geometry, Diagonal):
            rate, kick = self.geometry.tensors()
            directions = None
        elif isinstance(self.geometry, LowRank):
            basis, back, add, rate, amplitude, *exact = self.geometry.tensors()
            kick = rate * amplitude
            directions = Directions(basis[0], back[0], add[0], *(t[0] for t in exact))
        else:
            return None
        rates, kicks = (split_like(t[0], self.params) for t in (rate, kick))
        return Elementwise(rates, kicks, bool(self.lead), directions=directions)

    def draw(self, steps: int) -> Tensor:
        xi, injector = self._empty(steps), self.sampler.injector
        fill_steps(xi[self.lead :], self.sampler.generator, self.bits)
        if self.lead:
            xi[0] = xi[1] if injector.last is None else injector.last.view(self.chains, -1)
            injector.last = xi[-1].clone().view(injector.source.out.shape)
        return xi

    def injection(self) -> Tensors:
        return ()

    def inject(self, normals: Tensor, tensors: Tensors) -> Tensor:
        return normals

    def innovation(self, drawn: Tensor, k: int) -> Tensor:
        return 0.5 * (drawn.select(0, k) + drawn.select(0, k + 1)) if self.lead else drawn.select(0, k)

    @property
    def in_library(self) -> bool:
        if isinstance(self.geometry, LowRank):
            basis, *others = self.geometry.tensors()
            return len(others) == 4 and basis.dtype == self.dtype  # without `undo` and `reach`
        return isinstance(self.geometry, Diagonal | Full)

    def updates(self, drawn: Tensor, tensors: Tensors) -> Updates | None:
        if not self.in_library:
            return None
        xi = 0.5 * (drawn[:-1] + drawn[1:]) if self.lead else drawn
        if isinstance(self.geometry, Diagonal):
            rate, kick = tensors
            return Updates(xi * kick, rate.unsqueeze(0))
        if isinstance(self.geometry, LowRank):
            basis, back, add, rate, amplitude = tensors
            return Updates(xi, rate.unsqueeze(0), along=(basis, back, add, amplitude))
        return Updates(xi, matrices=tensors, memory=LEVEL_WEIGHT)

    def move(self, state: Tensor, gradient: Tensor, noise: Tensor | None, xi: Tensor, tensors: Tensors) -> Tensor:
        geometry, level = self.geometry, self.level
        if level is None:
            return state - geometry.displace(tensors, gradient.to(geometry.dtype), xi).to(state.dtype)
        assert noise is not None
        now = level.levels(tensors, state[:, -1].to(geometry.dtype), noise)
        moved = geometry.displace((*tensors, now), gradient.to(geometry.dtype), xi)
        return torch.cat([state[:, :-1] - moved.to(state.dtype), now.unsqueeze(-1).to(state.dtype)], -1)
