"""Lambda as a diagonal and a few directions more: the strongest that the noise of different parameters shares.

*The directions* are found in the warm-up, see `isosgd.samplers.directions`.

*The noise* is split into a diagonal and what the directions share: the diagonal is only what they leave
(`isosgd.samplers.rows.split`), so that the rule ``Lambda = q H`` holds along the directions and beside them, each by
its own noise.

*The step*, and the form of Lambda, are in `isosgd.samplers.lowrank_step`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.directions import Directions
from isosgd.samplers.lowrank_step import LowRankStep
from isosgd.samplers.reshaping import RANK
from isosgd.samplers.rows import (
    explained,
    gram,
    leftover,
    mix_,
    orthonormal_,
    project,
    split,
    spread_out_,
    symmetric_eigen,
)
from isosgd.samplers.rule import Rule, damped

LARGE = 1_000_000  # parameters from which S is kept in bfloat16 on an accelerator
ROOM = 0.25  # strength that a direction has at the least, since its noise may be found larger later on
SPILL = 0.1  # share of the noise along the directions that is reckoned with beside them: they turn as a chain moves


class LowRank(LowRankStep):
    """A rate for each parameter, and one for each of a few directions that cross all of them.

    Args:
        rank: k, how many directions.
        damping: share of a layer's mean that is added to the diagonal part of the curvature everywhere.
        dtype: of S. By default that of the parameters (at least float32), and bfloat16 for a large model on an
            accelerator: there the reading of S is the cost. CPUs without bfloat16 arithmetic are slower with it.

    Example:
        >>> structure = LowRank(rank=2)
        >>> structure.bind([{"params": [torch.zeros(5)]}])
        >>> for _ in range(100):
        ...     structure.observe([torch.randn(()) * torch.ones(5) + 0.1 * torch.randn(5)])
        >>> structure.settle(Rule(num_data=1000, batch_size=10, temperature=1.0, bias=0.02, averaged=True),
        ...                  prior=torch.full((1, 5), 1e-3), rise=2.0)
        >>> bool(structure.strength[0, 0] > 20 * structure.strength[0, 1])  # the one that all parameters share
        True
    """

    name = "lowrank"
    kept = (*LowRankStep.kept, "left", "spread")

    def __init__(self, rank: int = RANK, damping: float = 0.1, dtype: torch.dtype | None = None) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank = {rank!r} must be an integer of at least 1; for none use structure='diagonal'")
        if not damping >= 0:
            raise ValueError(f"damping = {damping} must not be negative; 0.1 is the default")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype = {dtype} must be a floating-point type, such as torch.bfloat16")
        self.rank, self.damping, self.stored_as = rank, damping, dtype

    def prepare(self) -> None:
        small = self.device.type == "cpu" or self.total <= LARGE
        self.short = self.stored_as or (self.dtype if small else torch.bfloat16)
        self.k = min(self.rank, self.total)
        super().prepare()
        self.left = self.spread = self.full(0.0, 0)  # noise beside the directions and along them
        generator = torch.Generator(self.device).manual_seed(0)  # of the start only its span matters
        start = torch.empty(self.k, self.total, dtype=self.dtype, device=self.device).normal_(generator=generator)
        orthonormal_(start.unsqueeze(0))
        # Until Lambda is settled, and again from `forget` on.
        self.search: Directions | None = Directions(start.repeat(self.chains, 1, 1), damped=self._damped)

    @property
    def least(self) -> int:
        return max(super().least, 5 * max(self.k, 8))  # five rounds of the search

    # -- the noise ----------------------------------------------------------------------------------------------------

    def take(self, noise: Tensor) -> None:
        if self.search is not None:
            self.search.take(noise)
        if not self.known:
            return
        weight, along = 1.0 / (self.seen + 1), project(self.basis, noise)
        self.spread.lerp_(along.unsqueeze(-1) * along.unsqueeze(-2), weight)
        beside = spread_out_(self.basis, -along, noise / self.lam)
        self.left.lerp_(beside.square_().mul_(self.lam), weight)
        self.look(noise)
        count = self.seen + 1
        if count >= self.least and count & (count - 1) == 0:
            self.residual, self.shared = split(self.basis, self.lam.sqrt(), self.left, self.spread)
            self._inject()

    def _damped(self, h: Tensor) -> Tensor:
        return damped(h, self.damping, self.slots)

    def forget(self, void: bool = False) -> None:
        """At the start of a window look for directions anew, from those that Lambda has on."""
        if self.known and (void or self.search is None):
            rows = self.basis.to(self.dtype, copy=True).mul_(self.lam.sqrt().unsqueeze(1))
            known = self.lam.rsqrt(), self.left.clone(), self.spread.clone()
            self.search = Directions(rows, *known, damped=self._damped)
        super().forget(void)

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if self.search is not None:
            self._renew(self.search, rule, prior, rise)
            self.search = None
        else:  # the noise is that of the last time; only the factor may have changed
            self.slow((rule.factor(self.stretch) / self.factor).clamp_min(1.0 / rise))
        self.cool()

    def _renew(self, search: Directions, rule: Rule, prior: Tensor, rise: float) -> None:
        """Lambda from the noise along the directions found and beside them."""
        outside = self.worst() if self.looks else None
        psi, shared = split(search.rows, torch.ones_like(search.unit), search.left, search.spread)
        spilt = SPILL * explained(search.rows, shared.to(self.dtype)).clamp_min(0.0)
        curvature = self._damped(rule.batch_size * (psi + spilt) / search.unit.square() + prior.to(self.dtype))
        self.factor, self.scale = rule.factor(self.stretch), rule.scale
        lam = self.factor.unsqueeze(-1) * curvature.clamp_min(torch.finfo(self.dtype).tiny)
        self.lam = torch.maximum(lam, self.lam / rise) if self.known else lam
        # Both in the new coordinates, those of U.
        scale = (self.lam.sqrt() * search.unit).reciprocal()
        rows, self.residual = search.rows.mul_(scale.unsqueeze(1)), psi * scale.square()
        seen = gram(rows).double()
        seen = orthonormal_(rows) @ seen
        values, turn = symmetric_eigen(seen @ shared.double() @ seen.mT)
        mix_(turn.flip(-1).mT, rows)
        values = values.flip(-1).clamp_min(0.0).to(self.dtype)
        self.shared = torch.diag_embed(values)
        self.strength = (self.factor.unsqueeze(-1) * rule.batch_size * values).clamp_min(ROOM)
        self.left, self.spread = leftover(rows, self.residual), self.shared + gram(rows, self.residual)
        self.basis = rows.mul_(self.lam.rsqrt().unsqueeze(1)).to(self.short)
        self.known = True
        self._inject()
        if outside is not None:
            self.measured_anew(outside)

    def slow(self, factor: Tensor) -> None:
        self.factor = self.factor * factor
        self.most = self.most / factor
        vector, matrix = factor.view(-1, 1), factor.view(-1, 1, 1)
        self.lam = self.lam * vector
        self.left, self.residual = self.left / vector, self.residual / vector
        self.shared, self.spread = self.shared / matrix, self.spread / matrix
        self.basis = self.basis.mul_(matrix.rsqrt())
        self._inject()

    def clipped(self) -> Tensor:
        if not self.known:
            return torch.zeros_like(self.most)
        left = 2.0 * (gram(self.basis, self.lam) + torch.diag_embed(self.strength)) - self.weight * self.spread
        over = (self.weight * self.residual > 2.0).sum(-1) + (symmetric_eigen(left)[0] < 0).sum(-1)
        return over.to(self.dtype) / (self.total + self.k)

    def state(self) -> dict[str, Any]:
        search = {} if self.search is None else self.search.state()
        return {**super().state(), **{f"search_{name}": value for name, value in search.items()}}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        saved = {name.removeprefix("search_"): value for name, value in state.items() if name.startswith("search_")}
        self.search = Directions(self.full(0.0, self.k, self.total), damped=self._damped) if saved else None
        if self.search is not None:
            self.search.load(saved)
