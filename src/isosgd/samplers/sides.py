"""Bases for one side of a weight matrix: all of its axes, or the strongest few.

Matrices m, and noise D of them, are ``[chains, rows, columns]``. A basis B of the side of the columns shows a matrix as
``m B``; it is a tuple of tensors. What it is found from, the running mean of ``D^T D`` or what stands for it, is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.samplers.rows import diagonal, symmetric_eigen

Basis = tuple[Tensor, ...]
FORGET = 0.05  # weight of a noise matrix in the search for the strongest axes, at the least


class Side:
    """A side that is left as it is, and what the others have in common."""

    tensors = 0  # in a basis
    work = 0  # multiply-adds for each entry of a matrix that is turned

    def start(self, like: Tensor) -> Tensor:
        """What is kept of the noise, before any is seen, for as many chains and of the kind of ``like``."""
        return like.new_zeros(len(like), 0)

    def take(self, kept: Tensor, noise: Tensor, weight: float) -> None:
        """Average in a noise matrix, in place."""

    def basis(self, kept: Tensor) -> Basis:
        """The basis that fits the noise seen."""
        return ()

    def turn(self, m: Tensor, basis: Basis) -> Tensor:
        """``m B``."""
        return m

    def turn_(self, m: Tensor, basis: Basis) -> Tensor:
        """``m B``; m may be written over."""
        return self.turn(m, basis)

    def back_(self, m: Tensor, basis: Basis) -> None:
        """``m B^T``, in place."""

    def spread(self, values: Tensor, old: Basis, new: Basis | None) -> Tensor:
        """The diagonal in a new basis (None: of the parameters) of what was diagonal in the old one, row by row."""
        return values


class Whole(Side):
    """All axes: eigenvectors of the mean of ``D^T D``, or of ``D D^T`` for the side of the rows.

    Args:
        length: of the side.
        rows: whether it is that of the rows.
    """

    tensors = 1

    def __init__(self, length: int, rows: bool = False) -> None:
        self.length = self.work = length
        self.rows = rows

    def _times(self, m: Tensor, matrix: Tensor) -> Tensor:
        return matrix.mT @ m if self.rows else m @ matrix

    def start(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(like), self.length, self.length)

    def take(self, kept: Tensor, noise: Tensor, weight: float) -> None:
        kept.lerp_(noise @ noise.mT if self.rows else noise.mT @ noise, weight)

    def basis(self, kept: Tensor) -> Basis:
        scale = diagonal(kept).mean(-1).clamp_min(torch.finfo(kept.dtype).tiny)
        return (symmetric_eigen(kept / scale[:, None, None])[1].to(kept),)

    def turn(self, m: Tensor, basis: Basis) -> Tensor:
        return self._times(m, basis[0])

    def back_(self, m: Tensor, basis: Basis) -> None:
        m.copy_(self._times(m, basis[0].mT))

    def spread(self, values: Tensor, old: Basis, new: Basis | None) -> Tensor:
        between = old[0] if new is None else new[0].mT @ old[0]
        return self._times(values, between.square().mT)


class Leading(Side):
    """The strongest axes of a long side, found by orthogonal iteration over the noise matrices.

    They become the first coordinates, and the other parameters turn as little as they must: B is the product of as many
    reflections, ``B = I + V^T C V``, so that turning takes two thin products. Where inputs of a layer are positive, as
    after ReLU, few axes carry most of the noise that parameters share.

    Args:
        length: of the side.
        axes: how many.
    """

    tensors = 3

    def __init__(self, length: int, axes: int) -> None:
        self.length, self.axes = length, min(axes, length)
        self.work = 2 * self.axes

    def start(self, like: Tensor) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(0)  # of the start only its span matters
        start = like.new_empty(self.axes, self.length).normal_(generator=generator)
        return start.repeat(len(like), 1, 1)

    def take(self, kept: Tensor, noise: Tensor, weight: float) -> None:
        along = noise @ orthonormal_rows(kept).mT
        kept.lerp_(along.mT @ noise, max(weight, FORGET))

    def basis(self, kept: Tensor) -> Basis:
        axes = orthonormal_rows(kept)
        turn = symmetric_eigen(kept @ axes.mT)[1].flip(-1).to(kept)
        # Householder's reflections, as LAPACK packs them: their product is I - V^T T V, T^-1 + T^-T = V V^T.
        packed = torch.geqrf((turn.mT @ axes).mT)[0].tril(-1)
        diagonal(packed).fill_(1.0)
        v = packed.mT.contiguous()
        products = (v @ v.mT).double()
        inverse = products.triu(1) + 0.5 * torch.diag_embed(diagonal(products))
        one = torch.eye(self.axes, dtype=inverse.dtype, device=inverse.device)
        core = -torch.linalg.solve_triangular(inverse, one, upper=True).to(kept)
        return v, core @ v, core.mT @ v

    def turn(self, m: Tensor, basis: Basis) -> Tensor:
        v, forth, _ = basis
        return torch.baddbmm(m, _along(m, v), forth)

    def turn_(self, m: Tensor, basis: Basis) -> Tensor:
        v, forth, _ = basis
        return m.baddbmm_(_along(m, v), forth)

    def back_(self, m: Tensor, basis: Basis) -> None:
        v, _, back = basis
        m.baddbmm_(_along(m, v), back)

    def spread(self, values: Tensor, old: Basis, new: Basis | None) -> Tensor:
        # The matrix between the bases is I + L^T R; what squares of its entries do to the values, without making it.
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
    # Two products with a vector take half as long as one with a matrix of two columns.
    return torch.stack([torch.mv(m[0], row) for row in v[0].unbind(0)], -1).unsqueeze(0)


def _pairs(rows: Tensor) -> Tensor:
    """Products of every two rows, entry by entry."""
    return (rows.unsqueeze(1) * rows.unsqueeze(2)).flatten(1, 2)


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows for each chain, the first i of them spanning the first i given; others where these are too few.

    Signs are those of the given rows, so that running means of them stay what they are.
    """
    q, r = torch.linalg.qr(rows.mT)
    sign = torch.where(diagonal(r) < 0, -1.0, 1.0)
    out: Tensor = (q * sign.unsqueeze(-2)).mT
    return out
