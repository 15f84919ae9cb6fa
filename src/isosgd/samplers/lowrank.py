"""Lambda as a diagonal and a few directions more: the strongest that the noise of different parameters shares.

With a diagonal matrix D and k directions, the rows of S,

    Lambda = D + D S^T diag(strength) S D,    U = S D^1/2 with orthonormal rows,

so that a step takes two products with S, O(d k): Lambda^-1 is diagonal plus ``S^T (k x k) S``.

*The noise* is split in the same form: the diagonal is only what the directions leave (`isosgd.samplers.rows.split`), so
that the rule ``Lambda = q H`` holds along U and beside it, each by its own noise. What ``C = Lambda - Var(g) / 2`` has
along the directions is injected by k innovations of their own (`LowRank.extra`).

*The directions* are found in the warm-up, see `isosgd.samplers.directions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.noise import dot
from isosgd.samplers.directions import Directions
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
    times,
)
from isosgd.samplers.shaped import EXCESS, Rule, Shaped

LARGE = 1_000_000  # parameters from which S is kept in bfloat16 on an accelerator
SMALLEST = 0.01  # injected variance over that of Lambda, in the diagonal part
ROOM = 0.25  # strength that a direction has at the least, since its noise may be found larger later on
NEGLIGIBLE = 0.01  # variance over that of the diagonal part that may be injected in excess
SPILL = 0.1  # share of the noise along the directions that is reckoned with beside them: they turn as a chain moves


class LowRank(Shaped):
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
    kept = (
        *Shaped.kept,
        *("lam", "pace", "ratio", "basis", "strength", "inner", "back", "add", "undo", "reach"),
        *("left", "spread", "residual", "shared", "top", "most", "looks"),
    )

    def __init__(self, rank: int = 20, damping: float = 0.1, dtype: torch.dtype | None = None) -> None:
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
        none = self.full(0.0, 0)
        # Set by `settle`: vectors, S and the small matrices, and what is known of the noise.
        self.lam = self.pace = self.ratio = self.basis = self.strength = self.inner = self.back = self.add = none
        self.undo = self.reach = none  # empty unless more noise has to be taken out than Lambda has along a direction
        self.left = self.spread = self.residual = self.shared = none
        self.top = none  # an image of the direction with most noise for its Lambda, and how much that is
        self.most, self.looks = self.full(0.0), 0
        generator = torch.Generator(self.device).manual_seed(0)  # of the start only its span matters
        start = torch.empty(self.k, self.total, dtype=self.dtype, device=self.device).normal_(generator=generator)
        orthonormal_(start.unsqueeze(0))
        # Until Lambda is settled, and again from `forget` on.
        self.search: Directions | None = Directions(start.repeat(self.chains, 1, 1), damped=self._damped)

    @property
    def extra(self) -> int:
        """Innovations that a step takes besides one for each parameter."""
        return self.k

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
        self._look_outside(noise)
        count = self.seen + 1
        if count >= self.least and count & (count - 1) == 0:
            self.residual, self.shared = split(self.basis, self.lam.sqrt(), self.left, self.spread)
            self._inject()

    def _damped(self, h: Tensor) -> Tensor:
        out = h.clone()
        for slot in self.slots:
            out[:, slot] += self.damping * h[:, slot].mean(-1, keepdim=True)
        return out

    def forget(self) -> None:
        """At the start of a window look for directions anew, from those that Lambda has on."""
        if self.known and self.search is None:
            rows = self.basis.to(self.dtype, copy=True).mul_(self.lam.sqrt().unsqueeze(1))
            known = self.lam.rsqrt(), self.left.clone(), self.spread.clone()
            self.search = Directions(rows, *known, damped=self._damped)
        self.looks = min(self.looks, 1)
        super().forget()

    def _look_outside(self, noise: Tensor) -> None:
        """Power iteration on ``Lambda^-1 B``, measured along a direction before the vector is taken into it."""
        if not self.looks:
            self.top = noise.clone()
        else:
            along = dot(noise, self._worst())
            self.most = torch.lerp(self.most, 0.5 * along.square(), max(1.0 / self.looks, 0.01))
            self.top.lerp_(noise * along.unsqueeze(-1), max(1.0 / (self.looks + 1), 0.01))
        self.looks += 1

    def _worst(self) -> Tensor:
        """The direction t of most noise known, ``t . Lambda t = 1``."""
        t = self._solve(self.top)
        return t / dot(self.top, t).clamp_min(torch.finfo(self.dtype).tiny).sqrt().unsqueeze(-1)

    def excess(self) -> Tensor:
        if self.looks < 2:
            return torch.zeros_like(self.most)
        return self.most - 0.5 * self._along(self._worst(), self.residual, self.shared)

    def _along(self, t: Tensor, beside: Tensor | float, core: Tensor) -> Tensor:
        """``t . (D^1/2 (diag(beside) + U^T core U) D^1/2) t``."""
        image = self.lam * t
        along = project(self.basis, image)
        return dot(image * beside, t) + dot(along, times(core, along))

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if self.search is not None:
            self._renew(self.search, rule, prior, rise)
            self.search = None
        else:  # the noise is that of the last time; only the factor may have changed
            self.slow((rule.factor(self.stretch) / self.factor).clamp_min(1.0 / rise))
        beyond = self.excess() / EXCESS
        if bool((beyond > 1.0).any()):
            self.slow(beyond.clamp_min(1.0))

    def _renew(self, search: Directions, rule: Rule, prior: Tensor, rise: float) -> None:
        """Lambda from the noise along the directions found and beside them."""
        outside = self._worst() if self.looks else None
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
        if outside is not None:  # it was measured over t . Lambda t, and that has changed
            self.most = self.most / self._along(outside, 1.0, torch.diag_embed(self.strength))

    def slow(self, factor: Tensor) -> None:
        self.factor = self.factor * factor
        self.most = self.most / factor
        vector, matrix = factor.view(-1, 1), factor.view(-1, 1, 1)
        self.lam = self.lam * vector
        self.left, self.residual = self.left / vector, self.residual / vector
        self.shared, self.spread = self.shared / matrix, self.spread / matrix
        self.basis = self.basis.mul_(matrix.rsqrt())
        self._inject()

    def _inject(self) -> None:
        """What a step takes; exact for any S, so that rounding it to bfloat16 does no harm."""
        one = torch.eye(self.k, dtype=torch.float64, device=self.device)
        products, strength = gram(self.basis, self.lam).double(), torch.diag_embed(self.strength.double())
        # Woodbury: Lambda^-1 = D^-1 + S^T inner S
        half = strength.sqrt()
        inner = -half @ torch.linalg.solve(one + half @ products @ half, half)
        # 2 C = D^1/2 (A^2 + U^T missing U) D^1/2: what is positive of `missing` is injected along the directions ...
        square = (2.0 - self.residual).clamp_min(2.0 * SMALLEST)
        missing, axes = symmetric_eigen(2.0 * strength - self.shared.double())
        along = self.scale * (one + inner @ products)
        self.add = (along @ (axes * missing.clamp_min(0.0).sqrt().unsqueeze(-2))).to(self.dtype)
        self.inner, self.back = inner.to(self.dtype), (self.scale * inner).to(self.dtype)
        self.pace, self.ratio = self.scale / self.lam, (square * self.lam).sqrt_()
        # ... and what is negative is taken out of the innovations of the parameters.
        self.undo = self.reach = self.full(0.0, 0)
        if bool((missing < -NEGLIGIBLE).any()):
            core = _root(gram(self.basis, self.lam / square), (axes * missing.clamp_max(0.0).unsqueeze(-2)) @ axes.mT)
            self.undo, self.reach = (along @ core).to(self.dtype), self.lam / self.ratio

    # -- the step -----------------------------------------------------------------------------------------------------

    def _solve(self, x: Tensor) -> Tensor:
        """``Lambda^-1 x``."""
        return spread_out_(self.basis, times(self.inner, project(self.basis, x)), x / self.lam)

    def direction(self, gradient: Tensor) -> Tensor:
        return self._solve(gradient.to(self.dtype)).mul_(self.scale)

    def tensors(self) -> tuple[Tensor, ...]:
        exact = (self.undo, self.reach) if self.undo.numel() else ()
        return self.basis, self.back, self.add, self.pace, self.ratio, *exact

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        basis, back, add, pace, ratio, *exact = tensors
        own, shared = xi[:, : self.total], xi[:, self.total :]
        force = torch.addcmul(gradient, ratio, own)
        along = times(back, project(basis, force)) + times(add, shared)
        if exact:
            undo, reach = exact
            along = along + times(undo, project(basis, reach * own))
        return spread_out_(basis, along, force.mul_(pace))

    def rates(self) -> Tensor:
        return self.pace + explained(self.basis, self.back)

    def clipped(self) -> Tensor:
        if not self.known:
            return torch.zeros_like(self.most)
        left = 2.0 * (gram(self.basis, self.lam) + torch.diag_embed(self.strength)) - self.spread
        over = (self.residual > 2.0).sum(-1) + (symmetric_eigen(left)[0] < 0).sum(-1)
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


def _root(inverse: Tensor, missing: Tensor) -> Tensor:
    """The core of a root ``A + U^T core U A^-1`` of ``A^2 + U^T missing U``, from ``U A^-2 U^T``."""
    values, vectors = symmetric_eigen(inverse)
    values = values.clamp_min(torch.finfo(torch.float32).tiny).sqrt().unsqueeze(-2)
    up, down = (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
    sizes, axes = symmetric_eigen(up @ missing @ up)
    return down @ (axes * ((1.0 + sizes).clamp_min(0.0).sqrt() - 1.0).unsqueeze(-2)) @ axes.mT @ down
