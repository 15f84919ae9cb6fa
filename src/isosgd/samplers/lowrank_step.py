"""A Lambda that is a diagonal and a few directions more, and its step; `isosgd.samplers.lowrank` finds it.

With a diagonal matrix D and k directions, the rows of S,

    Lambda = D + D S^T diag(strength) S D,    U = S D^1/2 with orthonormal rows,

so that a step takes two products with S, O(d k): Lambda^-1 is diagonal plus ``S^T (k x k) S``. The noise is known in
the same form, ``Var(g) = D^1/2 (diag(residual) + U^T shared U) D^1/2``. What ``C = Lambda - Var(g) / 2`` has along the
directions is injected by k innovations of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.native import lowrank
from isosgd.noise import dot
from isosgd.samplers.outside import Outside
from isosgd.samplers.rows import explained, gram, project, spread_out_, symmetric_eigen, times

SMALLEST = 0.01  # injected variance over that of Lambda, in the diagonal part
NEGLIGIBLE = 0.01  # variance over that of the diagonal part that may be injected in excess


class LowRankStep(Outside):
    """A Lambda with a diagonal part and k directions, and what a step makes of it.

    A subclass sets D (``lam``), S (``basis``), ``strength``, ``residual`` and ``shared``, then calls `_inject`.
    """

    kept = (
        *Outside.kept,
        *("lam", "basis", "strength", "residual", "shared"),
        *("pace", "ratio", "inner", "back", "add", "undo", "reach"),
    )
    k: int  # directions

    def prepare(self) -> None:
        super().prepare()
        none = self.full(0.0, 0)
        self.lam = self.basis = self.strength = self.residual = self.shared = none
        self.pace = self.ratio = self.inner = self.back = self.add = none  # vectors and the small matrices of a step
        self.undo = self.reach = none  # empty unless more noise has to be taken out than Lambda has along a direction

    @property
    def extra(self) -> int:
        """Innovations that a step takes besides one for each parameter."""
        return self.k

    def _inject(self) -> None:
        """What a step takes; exact for any S, so that rounding it to bfloat16 does no harm."""
        one = torch.eye(self.k, dtype=torch.float64, device=self.device)
        products, strength = gram(self.basis, self.lam).double(), torch.diag_embed(self.strength.double())
        # Woodbury: Lambda^-1 = D^-1 + S^T inner S
        half = strength.sqrt()
        inner = -half @ torch.linalg.solve(one + half @ products @ half, half)
        # 2 C = D^1/2 (A^2 + U^T missing U) D^1/2: what is positive of `missing` is injected along the directions ...
        square = (2.0 - self.weight * self.residual).clamp_min(2.0 * SMALLEST)
        missing, axes = symmetric_eigen(2.0 * strength - self.weight * self.shared.double())
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

    def inverse(self, x: Tensor) -> Tensor:
        return spread_out_(self.basis, times(self.inner, project(self.basis, x)), x / self.lam)

    def direction(self, gradient: Tensor) -> Tensor:
        return self.inverse(gradient.to(self.dtype)).mul_(self.scale)

    def tensors(self) -> tuple[Tensor, ...]:
        exact = (self.undo, self.reach) if self.undo.numel() else ()
        return self.basis, self.back, self.add, self.pace, self.ratio, *exact

    def reads_rows(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a compiled step of these tensors is one operation, which reads rows as they lie."""
        return len(tensors) == 5 and lowrank.ready(*tensors)  # without `undo` and `reach`

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        basis, back, add, pace, ratio, *exact = tensors
        own, shared = xi[:, : self.total], xi[:, self.total :]
        if torch.compiler.is_compiling() and gradient.dtype == xi.dtype == basis.dtype and self.reads_rows(tensors):
            return lowrank.displace(basis, back, add, pace, ratio, gradient, own, shared)
        force = torch.addcmul(gradient, ratio, own)
        along = times(back, project(basis, force)) + times(add, shared)
        if exact:
            undo, reach = exact
            along = along + times(undo, project(basis, reach * own))
        return spread_out_(basis, along, force.mul_(pace))

    def rates(self) -> Tensor:
        return self.pace + explained(self.basis, self.back)

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


def _root(inverse: Tensor, missing: Tensor) -> Tensor:
    """The core of a root ``A + U^T core U A^-1`` of ``A^2 + U^T missing U``, from ``U A^-2 U^T``."""
    values, vectors = symmetric_eigen(inverse)
    values = values.clamp_min(torch.finfo(torch.float32).tiny).sqrt().unsqueeze(-2)
    up, down = (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
    sizes, axes = symmetric_eigen(up @ missing @ up)
    return down @ (axes * ((1.0 + sizes).clamp_min(0.0).sqrt() - 1.0).unsqueeze(-2)) @ axes.mT @ down
