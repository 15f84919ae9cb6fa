"""Lambda for each weight matrix in the eigenbasis of its two noise factors, from the noise itself: no hooks, any model.

For a weight matrix and its noise vectors D, of the same shape, the running means of ``D D^T`` and ``D^T D`` give two
orthogonal bases. In them the noise is nearly uncorrelated, so that the diagonal rule applies there. Which matrices get
bases, and of how many axes, is up to `isosgd.samplers.matrices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, repeat

import torch
from torch import Tensor

from isosgd.samplers.matrices import LEADING, LONGEST_SIDE, Matrix, lay_out
from isosgd.samplers.rotated import Rotated
from isosgd.samplers.rule import Rule
from isosgd.samplers.sides import Basis

RECENT = 1 << 22  # numbers in the noise vectors with which a new basis begins


class Kronecker(Rotated):
    """A basis for each side of each weight matrix.

    Args:
        damping: share of a layer's mean curvature that is added to every direction.
        longest: longest side that gets all axes, in a matrix that is not too large for it.
        leading: how many axes of its inputs a larger matrix gets, or half of them if it is huge; 0 for none.
    """

    name = "kronecker"
    kept = (*Rotated.kept, "factors", "bases", "recent")

    def __init__(self, damping: float = 0.3, longest: int = LONGEST_SIDE, leading: int = LEADING) -> None:
        if not damping >= 0:
            raise ValueError(f"damping = {damping} must not be negative; 0.3 is the default")
        if longest < 1:
            raise ValueError(f"longest = {longest} must be at least 1; structure='diagonal' has no bases")
        if leading < 0:
            raise ValueError(f"leading = {leading} must not be negative; 0 leaves large matrices as they are")
        self.damping, self.longest, self.leading = damping, longest, leading

    def prepare(self) -> None:
        super().prepare()
        self.matrices = lay_out(self.shapes, self.longest, self.leading)
        edges = [0, *(edge for m in self.matrices for edge in (m.slot.start, m.slot.stop)), self.total]
        self.rest = [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        self.factors = [side.start(self.v) for m in self.matrices for side in (m.left, m.right)]
        self.bases: list[Tensor] = []  # none: the parameters' own
        self.recent: list[Tensor] = []

    def _with(self, bases: Sequence[Tensor]) -> Iterator[tuple[Matrix, tuple[Basis, Basis]]]:
        """Every matrix with the two bases among these tensors that are its own."""
        rest = iter(bases)
        for matrix in self.matrices if bases else ():
            yield matrix, (tuple(islice(rest, matrix.left.tensors)), tuple(islice(rest, matrix.right.tensors)))

    def turn(self, x: Tensor) -> Tensor:
        out = x.clone()
        for matrix, bases in self._with(self.bases):
            matrix.of(out).copy_(matrix.turn(x, bases))
        return out

    def back(self, z: Tensor) -> Tensor:
        out = z.clone()
        for matrix, bases in self._with(self.bases):
            matrix.back_(out, bases)
        return out

    # -- the noise ----------------------------------------------------------------------------------------------------

    def take(self, noise: Tensor) -> None:
        weight, factors = 1.0 / (self.seen + 1), iter(self.factors)
        for matrix in self.matrices:
            d = matrix.of(noise)
            matrix.left.take(next(factors), d, weight)
            matrix.right.take(next(factors), d, weight)
        few = max(2, min(64, RECENT // self.total))
        self.recent = [*self.recent[1 - few :], noise]
        super().take(noise)

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if not self.known:
            self._rotate()
        super().settle(rule, prior, rise)

    def forget(self, void: bool = False) -> None:
        """At the start of a window the basis becomes that of the noise seen in the one before."""
        if self.known and self.seen > 1 and not void:
            self._rotate()
        super().forget(void)

    def _rotate(self) -> None:
        before, factors = self.bases, iter(self.factors)
        self.bases = [t for m in self.matrices for side in (m.left, m.right) for t in side.basis(next(factors))]
        if self.known:  # Lambda as seen from the new axes
            self.lam = torch.maximum(self._spread(self.lam, before, self.bases), 1e-3 * self.lam.amin(-1, keepdim=True))
        self._begin()
        self.changed()

    def _begin(self) -> None:
        """Variances in a new basis: what few vectors say, and what the means over rows and columns do, as if of 8."""
        seen, count = torch.zeros_like(self.v), len(self.recent)
        for d in self.recent:
            seen.add_(self.turn(d).square_(), alpha=1.0 / count)
        for matrix in self.matrices:
            m = matrix.of(seen)
            mean = m.mean((-2, -1), keepdim=True).clamp_min(torch.finfo(m.dtype).tiny)
            product = m.mean(-1, keepdim=True) * m.mean(-2, keepdim=True) / mean
            matrix.of(self.v).copy_((count * m + 8.0 * product) / (count + 8.0))

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def turned_prior(self, prior: Tensor) -> Tensor:
        """Exact where one scale rules a matrix, as it nearly always does; its mean stands for it otherwise."""
        out = prior.to(self.dtype, copy=True)
        for matrix in self.matrices:
            out[:, matrix.slot] = out[:, matrix.slot].mean(-1, keepdim=True)
        return out

    def _spread(self, values: Tensor, old: Sequence[Tensor], new: Sequence[Tensor] | None) -> Tensor:
        """The diagonal in new bases (None: of the parameters) of what was diagonal in old ones."""
        out = values.clone()
        others = repeat((None, None)) if new is None else (bases for _, bases in self._with(new))
        for (matrix, (left, right)), (new_left, new_right) in zip(self._with(old), others, strict=False):
            m = matrix.right.spread(matrix.of(values), right, new_right)
            matrix.of(out).copy_(matrix.left.spread(m, left, new_left))
        return out

    def rates(self) -> Tensor:
        return self._spread(self.speed, self.bases, None)

    # -- the step -----------------------------------------------------------------------------------------------------

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), *self.bases)

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        return self.displace_(tensors, gradient.clone(), xi.clone())

    def displace_(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        speed, amplitude, *every = tensors
        z = xi.mul_(amplitude)
        for slot in self.rest:
            z[:, slot].addcmul_(speed[:, slot], gradient[:, slot])
        for matrix, bases in self._with(every):
            matrix.of(z).addcmul_(matrix.of(speed), matrix.turn_(gradient, bases))
            matrix.back_(z, bases)
        return z
