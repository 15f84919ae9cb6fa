"""Lambda, diagonal in the eigenbases of each weight matrix's two noise factors.

For a weight matrix and its noise vectors D, of the same shape, the running means of ``D D^T`` and ``D^T D`` give two
orthogonal bases. In them the noise is nearly uncorrelated, so that the diagonal rule applies. This needs no hooks.

All axes of a large matrix would cost too much. Only the strongest few of its input side are used (`LeadingAxes`): they
have most of the correlated noise, and the outputs add little.

Matrices m and their noise D are ``[chains, rows, columns]``. The basis B of the column side, a tuple of tensors, turns
m into ``m B``. It is found from a single tensor, the running mean of ``D^T D`` or a substitute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry
from isosgd.geometry.diagonal import AxisRates
from isosgd.geometry.linalg import diagonal, symmetric_eigen
from isosgd.geometry.rule import Rule

Basis = tuple[Tensor, ...]
FORGET = 0.05  # least weight of a noise matrix in the search for the strongest axes
LONGEST_SIDE = 512  # up to which a side gets all axes ...
MOST_WORK = 1 << 24  # ... if its rotation takes at most so many multiply-adds
LEADING = 4  # axes of the inputs of a larger matrix; half as many ...
HUGE = 1 << 20  # ... if it has more entries than this
RECENT = 1 << 22  # numbers in the recent noise vectors that give the first variances in a new basis


class FixedSide:
    """A side of a matrix with the standard basis, and the base class of other sides."""

    tensors = 0  # number of tensors in a basis

    def start(self, like: Tensor) -> Tensor:
        """The initial statistic of the noise, with the chains, dtype and device of ``like``."""
        return like.new_zeros(len(like), 0)

    def update(self, kept: Tensor, noise: Tensor, weight: float) -> None:
        """Update the statistic with a noise matrix, in place; ``weight`` is that of a plain mean."""

    def basis(self, kept: Tensor) -> Basis:
        """The basis for the statistic."""
        return ()

    def rotate(self, m: Tensor, basis: Basis) -> Tensor:
        """``m B``."""
        return m

    def back_(self, m: Tensor, basis: Basis) -> None:
        """``m B^T``, in place."""

    def spread(self, values: Tensor, old: Basis, new: Basis | None) -> Tensor:
        """The diagonal, in a new basis (None: the standard basis), of a matrix that is diagonal in the old one."""
        return values


class AllAxes(FixedSide):
    """All axes: eigenvectors of the mean of ``D^T D``, or of ``D D^T`` for the ``rows``."""

    tensors = 1

    def __init__(self, length: int, rows: bool = False) -> None:
        self.length, self.rows = length, rows

    def _times(self, m: Tensor, matrix: Tensor) -> Tensor:
        return matrix.mT @ m if self.rows else m @ matrix

    def start(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(like), self.length, self.length)

    def update(self, kept: Tensor, noise: Tensor, weight: float) -> None:
        kept.lerp_(noise @ noise.mT if self.rows else noise.mT @ noise, weight)

    def basis(self, kept: Tensor) -> Basis:
        scale = diagonal(kept).mean(-1).clamp_min(torch.finfo(kept.dtype).tiny)
        return (symmetric_eigen(kept / scale[:, None, None])[1].to(kept),)

    def rotate(self, m: Tensor, basis: Basis) -> Tensor:
        return self._times(m, basis[0])

    def back_(self, m: Tensor, basis: Basis) -> None:
        m.copy_(self._times(m, basis[0].mT))

    def spread(self, values: Tensor, old: Basis, new: Basis | None) -> Tensor:
        between = old[0] if new is None else new[0].mT @ old[0]
        return self._times(values, between.square().mT)


class LeadingAxes(FixedSide):
    """The strongest axes of a long side, found by orthogonal iteration over the noise matrices.

    They become the first coordinates, and the others rotate as little as possible: B is a product of reflections, one
    for each axis, ``B = I + V^T C V``, so that a rotation takes two thin products. If the inputs of a layer are
    positive, as after ReLU, a few axes have most of the correlated noise.
    """

    tensors = 3

    def __init__(self, length: int, axes: int) -> None:
        self.length, self.axes = length, min(axes, length)

    def start(self, like: Tensor) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(0)  # only the span of the start matters
        start = like.new_empty(self.axes, self.length).normal_(generator=generator)
        return start.repeat(len(like), 1, 1)

    def update(self, kept: Tensor, noise: Tensor, weight: float) -> None:
        along = noise @ orthonormal_rows(kept).mT
        kept.lerp_(along.mT @ noise, max(weight, FORGET))

    def basis(self, kept: Tensor) -> Basis:
        axes = orthonormal_rows(kept)
        turn = symmetric_eigen(kept @ axes.mT)[1].flip(-1).to(kept)
        # Householder reflections as LAPACK packs them: their product is I - V^T T V, with T^-1 + T^-T = V V^T.
        packed = torch.geqrf((turn.mT @ axes).mT)[0].tril(-1)
        diagonal(packed).fill_(1.0)
        v = packed.mT.contiguous()
        products = (v @ v.mT).double()
        inverse = products.triu(1) + 0.5 * torch.diag_embed(diagonal(products))
        one = torch.eye(self.axes, dtype=inverse.dtype, device=inverse.device)
        core = -torch.linalg.solve_triangular(inverse, one, upper=True).to(kept)
        return v, core @ v, core.mT @ v

    def rotate(self, m: Tensor, basis: Basis) -> Tensor:
        v, forth, _ = basis
        return torch.baddbmm(m, _along(m, v), forth)

    def back_(self, m: Tensor, basis: Basis) -> None:
        v, _, back = basis
        m.baddbmm_(_along(m, v), back)

    def spread(self, values: Tensor, old: Basis, new: Basis | None) -> Tensor:
        # The matrix between the bases is I + L^T R: multiply by its squared entries without forming it.
        v, forth, _ = old
        left, right = v, forth
        if new is not None:
            w, _, back = new
            left, right = torch.cat([w, v], 1), torch.cat([torch.baddbmm(back, back @ v.mT, forth), forth], 1)
        pairs = values @ _pairs(right).mT @ _pairs(left)
        return (values * (1.0 + 2.0 * (left * right).sum(1, keepdim=True)) + pairs).clamp_min(0.0)


def _along(m: Tensor, v: Tensor) -> Tensor:
    """``m V^T``, for few rows of V."""
    if v.shape[1] > 2 or len(m) > 1 or m.is_cuda:
        return m @ v.mT
    # Two products with vectors take half the time of one with a matrix of two columns.
    return torch.stack([torch.mv(m[0], row) for row in v[0].unbind(0)], -1).unsqueeze(0)


def _pairs(rows: Tensor) -> Tensor:
    """Elementwise products of all pairs of rows."""
    return (rows.unsqueeze(1) * rows.unsqueeze(2)).flatten(1, 2)


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows for each chain; the first i span the first i given rows. Signs are kept, for running means."""
    q, r = torch.linalg.qr(rows.mT)
    sign = torch.where(diagonal(r) < 0, -1.0, 1.0)
    out: Tensor = (q * sign.unsqueeze(-2)).mT
    return out


class Matrix(NamedTuple):
    """A weight matrix in a flat tensor, and its two sides: outputs and inputs."""

    slot: slice
    rows: int
    columns: int
    left: FixedSide
    right: FixedSide

    def view(self, x: Tensor) -> Tensor:
        """The matrix in a flat tensor, as a view ``[chains, rows, columns]``."""
        return x[:, self.slot].view(len(x), self.rows, self.columns)

    def rotate(self, x: Tensor, bases: tuple[Basis, Basis]) -> Tensor:
        """The matrix, in its bases."""
        return self.left.rotate(self.right.rotate(self.view(x), bases[1]), bases[0])

    def back_(self, x: Tensor, bases: tuple[Basis, Basis]) -> None:
        """Undo `rotate`, in place."""
        self.left.back_(self.view(x), bases[0])
        self.right.back_(self.view(x), bases[1])


def weight_matrices(
    shapes: Sequence[tuple[int, ...]], longest: int = LONGEST_SIDE, leading: int = LEADING
) -> list[Matrix]:
    """The weight matrices that get bases; convolutions are matrices ``[out, in * height * width]``."""
    found, end = [], 0
    for shape in shapes:
        start, end = end, end + math.prod(shape)
        if len(shape) < 2 or start == end:
            continue
        rows, columns = shape[0], math.prod(shape[1:])
        most = min(longest, MOST_WORK // (rows * columns))
        left, right = FixedSide(), FixedSide()
        if columns > most and leading:
            right = LeadingAxes(columns, (leading + 1) // 2 if rows * columns > HUGE else leading)
        elif columns <= most:
            right = AllAxes(columns) if columns > 1 else right
            left = AllAxes(rows, rows=True) if 1 < rows <= most else left
        if left.tensors or right.tensors:
            found.append(Matrix(slice(start, end), rows, columns, left, right))
    return found


class Kronecker(Geometry):
    """A basis for each side of each weight matrix.

    Args:
        damping: share of a layer's mean curvature that is added to every direction.
        longest: longest side that gets all axes, in a matrix that is not too large for it.
        leading: axes for the inputs of a larger matrix, half as many if it is huge; 0 for none.
    """

    name = "kronecker"
    kept = (*Geometry.kept, "on_axes", "factors", "bases", "recent")

    def __init__(self, damping: float = 0.3, longest: int = LONGEST_SIDE, leading: int = LEADING) -> None:
        if not damping >= 0:
            raise ValueError(f"damping = {damping} must not be negative; 0.3 is the default")
        if longest < 1:
            raise ValueError(f"longest = {longest} must be at least 1; structure='diagonal' has no bases")
        if leading < 0:
            raise ValueError(f"leading = {leading} must not be negative; 0 leaves large matrices as they are")
        self.damping, self.longest, self.leading = damping, longest, leading

    def prepare(self) -> None:
        self.on_axes = AxisRates(self, self.damping)
        self.matrices = weight_matrices(self.shapes, self.longest, self.leading)
        edges = [0, *(edge for m in self.matrices for edge in (m.slot.start, m.slot.stop)), self.total]
        self.rest = [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        self.factors = [side.start(self.on_axes.v) for m in self.matrices for side in (m.left, m.right)]
        self.bases: list[Tensor] = []  # empty for the standard basis
        self.recent: list[Tensor] = []

    def _with(self, bases: Sequence[Tensor]) -> Iterator[tuple[Matrix, tuple[Basis, Basis]]]:
        """Every matrix with its two bases, from the tensors of all bases."""
        rest = iter(bases)
        for matrix in self.matrices if bases else ():
            yield matrix, (tuple(islice(rest, matrix.left.tensors)), tuple(islice(rest, matrix.right.tensors)))

    def rotate(self, x: Tensor) -> Tensor:
        """A flat vector in the bases."""
        out = x.clone()
        for matrix, bases in self._with(self.bases):
            matrix.view(out).copy_(matrix.rotate(x, bases))
        return out

    def back(self, z: Tensor) -> Tensor:
        """Undo `rotate`."""
        out = z.clone()
        for matrix, bases in self._with(self.bases):
            matrix.back_(out, bases)
        return out

    # -- the noise ----------------------------------------------------------------------------------------------------

    def update(self, noise: Tensor) -> None:
        weight, factors = 1.0 / (self.seen + 1), iter(self.factors)
        for matrix in self.matrices:
            d = matrix.view(noise)
            matrix.left.update(next(factors), d, weight)
            matrix.right.update(next(factors), d, weight)
        few = max(2, min(64, RECENT // self.total))
        self.recent = [*self.recent[1 - few :], noise]
        self.on_axes.update(self.rotate(noise))

    def set_lambda(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if not self.known:
            self._renew_bases()
        own = prior.to(self.dtype, copy=True)
        for matrix in self.matrices:  # their means are exact if a matrix has a single prior scale, as nearly always
            own[:, matrix.slot] = own[:, matrix.slot].mean(-1, keepdim=True)
        self.on_axes.set_lambda(rule, own, rise)

    def forget(self, void: bool = False) -> None:
        """At the start of a window, set the bases from the noise of the last window."""
        if self.known and self.seen > 1 and not void:
            self._renew_bases()
        super().forget(void)
        self.on_axes.looks = 0

    def _renew_bases(self) -> None:
        axes, before, factors = self.on_axes, self.bases, iter(self.factors)
        self.bases = [t for m in self.matrices for side in (m.left, m.right) for t in side.basis(next(factors))]
        if self.known:  # express Lambda along the new axes
            axes.lam = torch.maximum(self._spread(axes.lam, before, self.bases), 1e-3 * axes.lam.amin(-1, keepdim=True))
        self._begin()
        axes.refresh()

    def _begin(self) -> None:
        """Set variances in a new basis: of recent vectors, shrunk to the product of row and column means."""
        seen, count = torch.zeros_like(self.on_axes.v), len(self.recent)
        for d in self.recent:
            seen.add_(self.rotate(d).square_(), alpha=1.0 / count)
        for matrix in self.matrices:
            m = matrix.view(seen)
            mean = m.mean((-2, -1), keepdim=True).clamp_min(torch.finfo(m.dtype).tiny)
            product = m.mean(-1, keepdim=True) * m.mean(-2, keepdim=True) / mean
            matrix.view(self.on_axes.v).copy_((count * m + 8.0 * product) / (count + 8.0))

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def _spread(self, values: Tensor, old: Sequence[Tensor], new: Sequence[Tensor] | None) -> Tensor:
        """The diagonal, in new bases (None: the standard basis), of a matrix that is diagonal in the old ones."""
        out = values.clone()
        others = repeat((None, None)) if new is None else (bases for _, bases in self._with(new))
        for (matrix, (left, right)), (new_left, new_right) in zip(self._with(old), others, strict=False):
            m = matrix.right.spread(matrix.view(values), right, new_right)
            matrix.view(out).copy_(matrix.left.spread(m, left, new_left))
        return out

    def rates(self) -> Tensor:
        return self._spread(self.on_axes.rate, self.bases, None)

    def principal_rates(self) -> Tensor:
        return self.on_axes.rate

    def slow(self, factor: Tensor) -> None:
        self.on_axes.slow(factor)

    def excess_temperature(self) -> Tensor:
        return self.on_axes.excess_temperature()

    def clipped(self) -> Tensor:
        return self.on_axes.clipped()

    # -- the step -----------------------------------------------------------------------------------------------------

    def direction(self, gradient: Tensor) -> Tensor:
        return self.back(self.on_axes.rate * self.rotate(gradient))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.on_axes.rate, self.on_axes.amplitude, *self.bases)

    def displace(self, tensors: Sequence[Tensor], gradient: Tensor, xi: Tensor) -> Tensor:
        rate, amplitude, *every = tensors
        z = xi * amplitude
        for slot in self.rest:
            z[:, slot].addcmul_(rate[:, slot], gradient[:, slot])
        for matrix, bases in self._with(every):
            matrix.view(z).addcmul_(matrix.view(rate), matrix.rotate(gradient, bases))
            matrix.back_(z, bases)
        return z
