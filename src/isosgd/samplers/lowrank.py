"""Lambda as a diagonal and a few directions more: the strongest that the noise of different parameters shares.

In coordinates scaled by the diagonal part D of Lambda,

    Lambda = D^1/2 (I + U^T diag(strength) U) D^1/2,    U [k, d] with orthonormal rows,

so that its inverse, and a root of ``C = Lambda - Var(g) / 2``, take two products with U: O(d k) for a step.

*The noise* is split in the same form, ``Var(g) = diag(psi) + (shared part along U)``: the diagonal is only what the
directions leave (`isosgd.samplers.rows.split`), so that the rule ``Lambda = q H`` holds along U and beside it, each by
its own noise. *The directions* are found in the warm-up by power iteration, `rank` of
them at once, on blocks of noise vectors and what is known from earlier ones (history PCA). The noise along them is
measured on vectors that had no part in finding them: with millions of parameters and a hundred vectors, the noise along
a direction made of those vectors would look a thousand times too large.

References:
    Yang, Hsieh, Wang (2018), History PCA: a new algorithm for streaming PCA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.noise import dot
from isosgd.samplers.rows import explained, gram, leftover, orthonormal, project, split, spread_out_
from isosgd.samplers.shaped import EXCESS, Rule, Shaped

LARGE = 1_000_000  # parameters from which U is kept in bfloat16 on an accelerator
OLD_BLOCKS = 3  # for how many blocks the directions of an earlier window count
SMALLEST = 0.01  # injected variance over that of Lambda, in the diagonal part


class LowRank(Shaped):
    """A rate for each parameter, and one for each of a few directions that cross all of them.

    Args:
        rank: k, how many directions.
        damping: share of a layer's mean that is added to the diagonal part of the curvature everywhere.
        dtype: of U. By default that of the parameters (at least float32), and bfloat16 for a large model on an
            accelerator: there the reading of U is the cost. CPUs without bfloat16 arithmetic are slower with it.

    Example:
        >>> structure = LowRank(rank=2)
        >>> structure.bind([{"params": [torch.zeros(5)]}], batched=False)
        >>> for _ in range(100):
        ...     structure.observe([torch.randn(()) * torch.ones(5) + 0.1 * torch.randn(5)])
        >>> structure.settle(Rule(num_data=1000, batch_size=10, temperature=1.0, bias=0.02, averaged=True),
        ...                  prior=torch.full((5,), 1e-3), rise=2.0)
        >>> bool(structure.strength[0] > 20 * structure.strength[1])  # the one direction that all parameters share
        True
    """

    name = "lowrank"

    def __init__(self, rank: int = 10, damping: float = 0.1, dtype: torch.dtype | None = None) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank = {rank!r} must be an integer of at least 1; for none use structure='diagonal'")
        if not damping >= 0:
            raise ValueError(f"damping = {damping} must not be negative; 0.1 is the default")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype = {dtype} must be a floating-point type, such as torch.bfloat16")
        self.rank, self.damping = rank, damping
        self.stored_as = None if dtype is None else str(dtype).removeprefix("torch.")  # a state holds plain values

    def prepare(self) -> None:
        if self.stored_as is None:
            small = self.device.type == "cpu" or self.total <= LARGE
            self.stored_as = str(self.dtype if small else torch.bfloat16).removeprefix("torch.")
        self.k = min(self.rank, self.total)
        none = torch.zeros(0, dtype=self.dtype, device=self.device)
        # Set by `settle`; vectors first, then U and the small matrices.
        self.lam = self.root = self.pace = self.amplitude = self.speed = self.left = self.residual = none
        self.basis = self.strength = self.spread = self.shared = self.back = self.add = none
        self.top = none  # an image of the direction with most noise for its Lambda, and how much that is
        self.most, self.looks = 0.0, 0
        generator = torch.Generator(device=self.device).manual_seed(0)  # a start that only its span matters of
        start = torch.empty(self.k, self.total, dtype=self.dtype, device=self.device).normal_(generator=generator)
        self.found, self.image = orthonormal(start), torch.zeros_like(start)
        self.unit = torch.ones(self.total, dtype=self.dtype, device=self.device)
        self.found_left = torch.zeros_like(self.unit)
        self.found_spread = torch.zeros(self.k, self.k, dtype=self.dtype, device=self.device)
        self.block_spread = torch.zeros_like(self.found_spread)
        self.in_block, self.blocks = 0, -1  # the first block only says what the scales are

    @property
    def least(self) -> int:
        return max(super().least, 5 * self.block)

    @property
    def block(self) -> int:
        """Noise vectors between two rounds of power iteration."""
        return max(self.k, 8)

    @property
    def tracking(self) -> bool:
        """Whether directions are being looked for: until Lambda is settled, and again from `forget` on."""
        return bool(self.found.numel())

    # -- the noise ----------------------------------------------------------------------------------------------------

    def take(self, noise: Tensor) -> None:
        if self.tracking:
            self._track(noise * self.unit)
        if not self.known:
            return
        weight, scaled = 1.0 / (self.seen + 1), noise * self.root
        along = project(self.basis, scaled)
        self.spread.lerp_(torch.outer(along, along), weight)
        self.left.lerp_(spread_out_(self.basis, -along, scaled).square_(), weight)
        self._look_outside(noise)
        count = self.seen + 1
        if count >= self.least and count & (count - 1) == 0:
            self.residual, self.shared = split(self.basis, self.left, self.spread)
            self._inject()

    def _track(self, scaled: Tensor) -> None:
        """Take a noise vector into this block's power iteration."""
        along = project(self.found, scaled)
        self.block_spread.add_(torch.outer(along, along))
        for row, size in zip(self.image, along.tolist(), strict=True):
            row.add_(scaled, alpha=size)
        if self.blocks < 0:
            self.found_left.lerp_(scaled.square(), 1.0 / (self.in_block + 1))
        else:
            weight = OLD_BLOCKS / (self.blocks * self.block + self.in_block + OLD_BLOCKS)
            self.found_left.lerp_(spread_out_(self.found, -along, scaled).square_(), weight)
        self.in_block += 1
        if self.in_block == self.block:
            self._end_block()

    def _end_block(self) -> None:
        """``image = (what is known + this block) found^T``, made orthonormal again."""
        weight = 1.0 if self.blocks <= 0 else OLD_BLOCKS / (self.blocks + OLD_BLOCKS)
        spread = self.found_spread.lerp_(self.block_spread / self.in_block, weight)
        old, image = self.found, self.image.mul_(weight / self.in_block)
        if weight < 1.0:
            # `spread` already holds both; what is known is the part that is not of this block.
            known = spread - weight * self.block_spread / self.in_block
            spread_out_(old, known, image)
        if self.blocks < 0:
            # Scales in which directions are compared: of the noise of each parameter, floored like Lambda.
            self.unit = self._damped(self.found_left).clamp_min(torch.finfo(self.dtype).tiny).rsqrt()
            image.mul_(self.unit)
        # Along the axes of `spread` each image has its own direction; as mixtures all would show the strongest one.
        axes = torch.linalg.eigh(spread.double())[1].to(spread)
        self.found = orthonormal(axes.mT @ image)
        if self.blocks >= 0:
            # The new directions are better than those along which the noise was measured, and have as much of it.
            left, _, right = torch.linalg.svd(gram(self.found, None, old).double())
            turn = (left @ right).to(spread)
            self.found_spread = turn @ spread @ turn.mT
        self.image = old.zero_()
        self.block_spread.zero_()
        self.in_block = 0
        self.blocks += 1

    def _damped(self, h: Tensor) -> Tensor:
        out = h.clone()
        for slot in self.slots:
            out[slot] += self.damping * h[slot].mean()
        return out

    def forget(self) -> None:
        """At the start of a window look for directions anew, from those that Lambda has on."""
        if self.known and not self.tracking:
            self.unit, self.found_left, self.found_spread = self.root.clone(), self.left.clone(), self.spread.clone()
            self.found = self.basis.to(self.dtype, copy=True)
            self.image = torch.zeros_like(self.found)
            self.in_block, self.blocks = 0, OLD_BLOCKS
        self.looks = min(self.looks, 1)
        super().forget()

    def _look_outside(self, noise: Tensor) -> None:
        """Power iteration on ``Lambda^-1 B``, measured along a direction before the vector is taken into it."""
        if not self.looks:
            self.top = noise.clone()
        else:
            along = dot(noise, self._worst())
            self.most += max(1.0 / self.looks, 0.01) * (0.5 * float(along.square()) - self.most)
            self.top.lerp_(noise * along, max(1.0 / (self.looks + 1), 0.01))
        self.looks += 1

    def _worst(self) -> Tensor:
        """The direction t of most noise known, ``t . Lambda t = 1``."""
        t = self._solve(self.top)
        return t / dot(self.top, t).clamp_min(torch.finfo(self.dtype).tiny).sqrt()

    def excess(self) -> float:
        if self.looks < 2:
            return 0.0
        t = self._worst() / self.root  # in scaled coordinates
        along = project(self.basis, t)
        return self.most - 0.5 * float(dot(t.square(), self.residual) + along @ self.shared @ along)

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if not self.tracking:  # the noise is that of the last time; only the factor may have changed
            self.slow(max(rule.factor(self.stretch) / self.factor, 1.0 / rise))
            self._cover_outside()
            return
        outside = self._worst() if self.looks else None
        psi, shared = split(self.found, self.found_left, self.found_spread)
        curvature = self._damped(rule.batch_size * psi / self.unit.square() + prior.to(self.dtype))
        self.factor, self.scale = rule.factor(self.stretch), rule.temperature / rule.num_data
        lam = self.factor * curvature.clamp_min(torch.finfo(self.dtype).tiny)
        self.lam = torch.maximum(lam, self.lam / rise) if self.known else lam
        self.root = self.lam.rsqrt()
        # The shared noise as the new coordinates show it: Z^T shared Z, Z = found / (unit sqrt(lam)).
        scale = self.root / self.unit
        basis = orthonormal(self.found.mul_(scale))
        seen = gram(basis, None, self.found)
        values, turn = torch.linalg.eigh((seen @ shared @ seen.mT).double())
        order = values.argsort(descending=True)
        self.basis = (turn[:, order].mT.to(basis) @ basis).to(getattr(torch, self.stored_as or "float32"))
        self.shared = torch.diag(values[order].clamp_min(0.0)).to(self.dtype)
        self.strength = self.factor * rule.batch_size * self.shared.diagonal()
        self.residual = psi * scale.square()
        self.left, self.spread = leftover(self.basis, self.residual), self.shared + gram(self.basis, self.residual)
        self.found = self.image = self.unit = self.found_left = self.lam[
            :0
        ].clone()  # memory that a step has no use for
        self.known = True
        self._inject()
        if outside is not None:
            length = outside / self.root
            along = project(self.basis, length)
            self.most /= float(dot(length, length) + dot(along.square(), self.strength))  # over t . Lambda t, the new
        self._cover_outside()

    def _cover_outside(self) -> None:
        beyond = self.excess()
        if beyond > EXCESS:
            self.slow(beyond / EXCESS)

    def slow(self, factor: float) -> None:
        self.factor *= factor
        self.lam, self.root = self.lam * factor, self.root / factor**0.5
        for name in ("left", "residual", "shared", "spread"):
            setattr(self, name, getattr(self, name) / factor)
        self.most /= factor
        self._inject()

    def _inject(self) -> None:
        """The small matrices of a step; exact for any U, so that rounding it to bfloat16 does no harm."""
        basis, one = gram(self.basis).double(), torch.eye(self.k, dtype=torch.float64, device=self.device)
        half = self.strength.double().sqrt()
        # Woodbury: (I + U^T diag(strength) U)^-1 = I + U^T back U
        back = -half[:, None] * torch.linalg.solve(one + half[:, None] * basis * half, torch.diag(half))
        # 2 C = A^2 + U^T (2 strength - shared) U has the root A + U^T core U A^-1.
        inverse = (2.0 - self.residual).clamp_min(2.0 * SMALLEST).reciprocal_()
        values, vectors = torch.linalg.eigh(gram(self.basis, inverse).double())
        values = values.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
        up, down = (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
        missing, axes = torch.linalg.eigh(up @ (2.0 * torch.diag(half.square()) - self.shared.double()) @ up)
        core = down @ (axes * ((1.0 + missing).clamp_min(0.0).sqrt() - 1.0)) @ axes.mT @ down
        self.back, self.add = back.to(self.dtype), (self.scale * (one + back @ basis) @ core).to(self.dtype)
        # The root of T / N goes into the vectors, so that a step has no pass of its own for it.
        self.pace, self.amplitude = self.root * self.scale**0.5, (self.scale / inverse).sqrt_()
        self.speed = self.pace.square() * (1.0 + explained(self.basis, self.back))

    # -- the step -----------------------------------------------------------------------------------------------------

    def _solve(self, x: Tensor) -> Tensor:
        """``Lambda^-1 x``."""
        scaled = x * self.root
        return spread_out_(self.basis, project(self.basis, scaled) @ self.back, scaled).mul_(self.root)

    def direction(self, gradient: Tensor) -> Tensor:
        return self._solve(gradient.to(self.dtype)).mul_(self.scale)

    def displacement(self, gradient: Tensor, xi: Tensor) -> Tensor:
        both = torch.empty(2, *gradient.shape, dtype=self.dtype, device=self.device)
        force = torch.mul(gradient, self.pace, out=both[0]).addcmul_(self.amplitude, xi)
        torch.div(xi, self.amplitude, out=both[1])
        forces, innovations = project(self.basis, both)
        along = forces @ self.back + innovations @ self.add.mT
        return spread_out_(self.basis, along, force).mul_(self.pace)

    def rates(self) -> Tensor:
        return self.speed

    def clipped(self) -> float:
        if not self.known:
            return 0.0
        left = torch.linalg.eigvalsh((2.0 * (gram(self.basis) + torch.diag(self.strength)) - self.spread).double())
        return float((self.residual > 2.0).sum() + (left < 0).sum()) / (self.total + self.k)
