"""Lambda as a diagonal plus a low rank: the strongest directions of noise that is correlated between parameters.

With a diagonal matrix D and k directions, the rows of S,

    Lambda = D + D S^T diag(strength) S D,    U = S D^1/2 with orthonormal rows,

so that a step takes two products with S, O(d k): Lambda^-1 is diagonal plus ``S^T (k x k) S``. The noise has the same
form, ``Var(g) = D^1/2 (diag(residual) + U^T shared U) D^1/2``: its diagonal is what the directions leave
(`isosgd.geometry.linalg.split`), so that the rule ``Lambda = q H`` holds along the directions and orthogonal to them.
The part of ``C = Lambda - Var(g) / 2`` along the directions is injected by k further innovations.

The directions are found in the warm-up by block power iteration (`Directions`).

References:
    Yang, Hsieh, Wang (2018), History PCA: a new algorithm for streaming PCA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.errors import check_integer
from isosgd.geometry.base import Geometry, WorstDirection
from isosgd.geometry.linalg import (
    blocks,
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
from isosgd.geometry.rule import Rule, damped
from isosgd.noise.model import dot

RANK = 20  # directions, by default
LARGE = 1_000_000  # parameters from which S is kept in bfloat16 on an accelerator
ROOM = 0.25  # least strength of a direction, since its noise may be larger later
SPILL = 0.1  # share of the noise along the directions that is added to the diagonal: they rotate as a chain moves
SMALLEST = 0.01  # least injected variance over that of Lambda, in the diagonal part
NEGLIGIBLE = 0.01  # excess injected variance, over that of the diagonal part, that is not corrected
OLD_BLOCKS = 3  # weight of the directions of an earlier search, in blocks


class Directions:
    """The search for the strongest directions of the noise, for each chain.

    A round combines a block of noise vectors with the result of earlier blocks (history PCA). The noise along the
    directions is measured on vectors that were not used to find them: otherwise, with millions of parameters and a
    hundred vectors, it would be a thousand times too large.

    Directions are orthonormal in coordinates ``unit * parameters``. There the noise has the covariance ``spread``
    ``[chains, k, k]`` along them, and variances ``left`` ``[chains, d]`` orthogonal to them. The start ``rows``,
    ``[chains, k, d]``, is overwritten. Without a unit, it is set from the variances of the noise, made positive by
    ``damped``.
    """

    kept = ("rows", "image", "unit", "left", "spread", "block_spread", "in_block", "blocks")

    def __init__(
        self,
        rows: Tensor,
        unit: Tensor | None = None,
        left: Tensor | None = None,
        spread: Tensor | None = None,
        *,
        damped: Callable[[Tensor], Tensor],
    ) -> None:
        chains, k, d = rows.shape
        self.rows, self.image, self.damped = rows, torch.zeros_like(rows), damped
        self.unit = rows.new_ones(chains, d) if unit is None else unit
        self.left = rows.new_zeros(chains, d) if left is None else left
        self.spread = rows.new_zeros(chains, k, k) if spread is None else spread
        self.block_spread = torch.zeros_like(self.spread)
        self.in_block, self.blocks = 0, -1 if unit is None else OLD_BLOCKS  # a first block only sets the unit

    @property
    def block(self) -> int:
        return max(self.rows.shape[1], 8)

    def update(self, noise: Tensor) -> None:
        scaled = noise * self.unit
        along = project(self.rows, scaled)
        self.block_spread.add_(along.unsqueeze(-1) * along.unsqueeze(-2))
        self.image.addcmul_(along.unsqueeze(-1), scaled.unsqueeze(-2))
        if self.blocks < 0:
            self.left.lerp_(scaled.square_(), 1.0 / (self.in_block + 1))
        else:
            weight = OLD_BLOCKS / (self.blocks * self.block + self.in_block + OLD_BLOCKS)
            self.left.lerp_(spread_out_(self.rows, -along, scaled).square_(), weight)
        self.in_block += 1
        if self.in_block == self.block:
            self._end_block()

    def _end_block(self) -> None:
        """The next directions: ``(known + this block) rows^T``, made orthonormal."""
        weight = 1.0 if self.blocks <= 0 else OLD_BLOCKS / (self.blocks + OLD_BLOCKS)
        known = (1.0 - weight) * self.spread
        spread = known + weight / self.in_block * self.block_spread
        old, image = self.rows, self.image.mul_(weight / self.in_block)
        if weight < 1.0:
            for part, block in zip(blocks(image), blocks(old), strict=True):
                part.baddbmm_(known, block)
        if self.blocks < 0:
            self.unit = self.damped(self.left).clamp_min(torch.finfo(image.dtype).tiny).rsqrt()
            image.mul_(self.unit.unsqueeze(1))
        # Along the axes of `spread`: images of other vectors would all be close to the strongest direction.
        mix_(symmetric_eigen(spread)[1].mT, image)
        orthonormal_(image)
        if self.blocks >= 0:
            # Rotate the measured noise to the new directions, along which there is at least as much.
            both = torch.zeros_like(spread)
            for part, block in zip(blocks(image), blocks(old), strict=True):
                both.baddbmm_(part, block.mT)
            left, _, right = torch.linalg.svd(torch.nan_to_num(both.double()))
            turn = (left @ right).to(spread)
            spread = turn @ spread @ turn.mT
        self.rows, self.image, self.spread = image, old.zero_(), spread
        self.block_spread.zero_()
        self.in_block = 0
        self.blocks += 1


class LowRank(Geometry):
    """A rate for each element of the parameters, and for each of a few directions across all of them.

    Args:
        rank: k, the number of directions.
        damping: share of a layer's mean that is added to the diagonal part of the curvature everywhere.
        dtype: of S. By default that of the parameters (at least float32); bfloat16 for a large model on an
            accelerator, where reading S takes most of the time. CPUs without bfloat16 arithmetic are slower with it.

    Example:
        >>> structure = LowRank(rank=2)
        >>> structure.bind([{"params": [torch.zeros(5)]}])
        >>> for _ in range(100):
        ...     structure.observe([torch.randn(()) * torch.ones(5) + 0.1 * torch.randn(5)])
        >>> structure.set_lambda(Rule(num_data=1000, batch_size=10, temperature=1.0, bias=0.02, averaged=True),
        ...                  prior=torch.full((1, 5), 1e-3), rise=2.0)
        >>> bool(structure.strength[0, 0] > 20 * structure.strength[0, 1])  # the one that all parameters share
        True
    """

    name = "lowrank"
    kept = (
        *Geometry.kept,
        *("worst", "search", "lam", "basis", "strength", "residual", "shared", "left", "spread"),
        *("rate", "amplitude", "inner", "back", "add", "undo", "reach"),
    )

    def __init__(self, rank: int = RANK, damping: float = 0.1, dtype: torch.dtype | None = None) -> None:
        check_integer("rank", rank, 1, "; for none use structure='diagonal'")
        if not damping >= 0:
            raise ValueError(f"damping = {damping} must not be negative; 0.1 is the default")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype = {dtype} must be a floating-point type, such as torch.bfloat16")
        self.rank, self.damping, self.stored_as = rank, damping, dtype

    def prepare(self) -> None:
        small = self.device.type == "cpu" or self.total <= LARGE
        self.short = self.stored_as or (self.dtype if small else torch.bfloat16)
        self.k = min(self.rank, self.total)
        self.worst, none = WorstDirection(self), self.full(0.0, 0)
        self.lam = self.basis = self.strength = self.residual = self.shared = none
        self.left = self.spread = none  # noise orthogonal to the directions and along them
        self.rate = self.amplitude = self.inner = self.back = self.add = none  # vectors and small matrices of a step
        self.undo = self.reach = none  # empty unless the noise along a direction exceeds Lambda
        generator = torch.Generator(self.device).manual_seed(0)  # only the span of the start matters
        start = torch.empty(self.k, self.total, dtype=self.dtype, device=self.device).normal_(generator=generator)
        orthonormal_(start.unsqueeze(0))
        # None after Lambda has been set, until `forget`.
        self.search: Directions | None = Directions(start.repeat(self.chains, 1, 1), damped=self._damped)

    @property
    def min_vectors(self) -> int:
        return max(super().min_vectors, 5 * max(self.k, 8))  # five rounds of the search

    @property
    def extra_innovations(self) -> int:
        return self.k

    # -- the noise ----------------------------------------------------------------------------------------------------

    def update(self, noise: Tensor) -> None:
        if self.search is not None:
            self.search.update(noise)
        if not self.known:
            return
        weight, along = 1.0 / (self.seen + 1), project(self.basis, noise)
        self.spread.lerp_(along.unsqueeze(-1) * along.unsqueeze(-2), weight)
        beside = spread_out_(self.basis, -along, noise / self.lam)
        self.left.lerp_(beside.square_().mul_(self.lam), weight)
        self.worst.update(noise)
        count = self.seen + 1
        if count >= self.min_vectors and count & (count - 1) == 0:
            self.residual, self.shared = split(self.basis, self.lam.sqrt(), self.left, self.spread)
            self._inject()

    def _damped(self, h: Tensor) -> Tensor:
        return damped(h, self.damping, self.slots)

    def forget(self, void: bool = False) -> None:
        """At the start of a window, restart the search, from the directions of Lambda."""
        if self.known and (void or self.search is None):
            rows = self.basis.to(self.dtype, copy=True).mul_(self.lam.sqrt().unsqueeze(1))
            known = self.lam.rsqrt(), self.left.clone(), self.spread.clone()
            self.search = Directions(rows, *known, damped=self._damped)
        self.worst.forget(void)
        super().forget(void)

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def set_lambda(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if self.search is not None:
            self._renew(self.search, rule, prior, rise)
            self.search = None
        else:  # the noise has not changed; the factor may have
            self.slow((rule.factor(self.curvature_ratio) / self.factor).clamp_min(1.0 / rise))
        self.worst.limit_excess()

    def _renew(self, search: Directions, rule: Rule, prior: Tensor, rise: float) -> None:
        """Set Lambda from the noise along the new directions and orthogonal to them."""
        before = self.worst.direction() if self.worst.count else None
        psi, shared = split(search.rows, torch.ones_like(search.unit), search.left, search.spread)
        spilt = SPILL * explained(search.rows, shared.to(self.dtype)).clamp_min(0.0)
        curvature = self._damped(rule.batch_size * (psi + spilt) / search.unit.square() + prior.to(self.dtype))
        self.factor, self.scale = rule.factor(self.curvature_ratio), rule.scale
        lam = self.factor.unsqueeze(-1) * curvature.clamp_min(torch.finfo(self.dtype).tiny)
        self.lam = torch.maximum(lam, self.lam / rise) if self.known else lam
        # Rows and residual in the new coordinates, those of U.
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
        self.worst.rescale(before)

    def slow(self, factor: Tensor) -> None:
        self.factor = self.factor * factor
        self.worst.ratio = self.worst.ratio / factor
        vector, matrix = factor.view(-1, 1), factor.view(-1, 1, 1)
        self.lam = self.lam * vector
        self.left, self.residual = self.left / vector, self.residual / vector
        self.shared, self.spread = self.shared / matrix, self.spread / matrix
        self.basis = self.basis.mul_(matrix.rsqrt())
        self._inject()

    def clipped(self) -> Tensor:
        if not self.known:
            return torch.zeros_like(self.factor)
        left = 2.0 * (gram(self.basis, self.lam) + torch.diag_embed(self.strength)) - self.noise_weight * self.spread
        over = (self.noise_weight * self.residual > 2.0).sum(-1) + (symmetric_eigen(left)[0] < 0).sum(-1)
        return over.to(self.dtype) / (self.total + self.k)

    def excess_temperature(self) -> Tensor:
        return self.worst.excess_temperature()

    def _inject(self) -> None:
        """Compute the tensors of a step; exact for any S, also one that was rounded to bfloat16."""
        one = torch.eye(self.k, dtype=torch.float64, device=self.device)
        products, strength = gram(self.basis, self.lam).double(), torch.diag_embed(self.strength.double())
        # Woodbury: Lambda^-1 = D^-1 + S^T inner S
        half = strength.sqrt()
        inner = -half @ torch.linalg.solve(one + half @ products @ half, half)
        # 2 C = D^1/2 (A^2 + U^T missing U) D^1/2: the positive part of `missing` is injected along the directions ...
        square = (2.0 - self.noise_weight * self.residual).clamp_min(2.0 * SMALLEST)
        missing, axes = symmetric_eigen(2.0 * strength - self.noise_weight * self.shared.double())
        along = self.scale * (one + inner @ products)
        self.add = (along @ (axes * missing.clamp_min(0.0).sqrt().unsqueeze(-2))).to(self.dtype)
        self.inner, self.back = inner.to(self.dtype), (self.scale * inner).to(self.dtype)
        self.rate, self.amplitude = self.scale / self.lam, (square * self.lam).sqrt_()
        # ... and the negative part is subtracted from the elements' own innovations.
        self.undo = self.reach = self.full(0.0, 0)
        if bool((missing < -NEGLIGIBLE).any()):
            core = _root(gram(self.basis, self.lam / square), (axes * missing.clamp_max(0.0).unsqueeze(-2)) @ axes.mT)
            self.undo, self.reach = (along @ core).to(self.dtype), self.lam / self.amplitude

    # -- the step -----------------------------------------------------------------------------------------------------

    def inverse(self, x: Tensor) -> Tensor:
        return spread_out_(self.basis, times(self.inner, project(self.basis, x)), x / self.lam)

    def direction(self, gradient: Tensor) -> Tensor:
        return self.inverse(gradient.to(self.dtype)).mul_(self.scale)

    def tensors(self) -> tuple[Tensor, ...]:
        exact = (self.undo, self.reach) if self.undo.numel() else ()
        return self.basis, self.back, self.add, self.rate, self.amplitude, *exact

    def along_directions(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.basis, self.back, self.rate

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        basis, back, add, rate, amplitude, *exact = tensors
        own, shared = xi[:, : self.total], xi[:, self.total :]
        force = torch.addcmul(gradient, amplitude, own)
        along = times(back, project(basis, force)) + times(add, shared)
        if exact:
            undo, reach = exact
            along = along + times(undo, project(basis, reach * own))
        return spread_out_(basis, along, force.mul_(rate))

    def rates(self) -> Tensor:
        return self.rate + explained(self.basis, self.back)

    def principal_rates(self) -> Tensor:
        stiff = self.basis.to(self.dtype) * self.lam.unsqueeze(1)  # the strongest noise, as gradients
        rates = [dot(g, self.direction(g)) / dot(g, g) for g in stiff.unbind(1)]
        return torch.cat([self.rates(), torch.stack(rates, -1)], -1)

    # -- along a direction --------------------------------------------------------------------------------------------

    def lambda_along(self, t: Tensor) -> Tensor:
        return self._along(t, 1.0, torch.diag_embed(self.strength))

    def noise_along(self, t: Tensor) -> Tensor:
        return self._along(t, self.residual, self.shared)

    def _along(self, t: Tensor, beside: Tensor | float, core: Tensor) -> Tensor:
        """``t . (D^1/2 (diag(beside) + U^T core U) D^1/2) t``."""
        image = self.lam * t
        along = project(self.basis, image)
        return dot(image * beside, t) + dot(along, times(core, along))

    # -- saving -------------------------------------------------------------------------------------------------------

    def load(self, state: dict[str, Any]) -> None:
        searching = state.get("search") is not None
        self.search = Directions(self.full(0.0, self.k, self.total), damped=self._damped) if searching else None
        super().load(state)


def _root(inverse: Tensor, missing: Tensor) -> Tensor:
    """The core of a root ``A + U^T core U A^-1`` of ``A^2 + U^T missing U``, from ``U A^-2 U^T``."""
    values, vectors = symmetric_eigen(inverse)
    values = values.clamp_min(torch.finfo(torch.float32).tiny).sqrt().unsqueeze(-2)
    up, down = (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
    sizes, axes = symmetric_eigen(up @ missing @ up)
    return down @ (axes * ((1.0 + sizes).clamp_min(0.0).sqrt() - 1.0).unsqueeze(-2)) @ axes.mT @ down
