"""Linear algebra for each chain: products with a few long rows, eigenvectors, and diagonal plus low-rank noise.

U is ``[chains, k, d]``: k rows for each chain; d may be in the millions, k is small. On the CPU products are computed
in blocks, so that intermediate results stay in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 16  # columns at once
SPLITS = 20  # most iterations of `split`
CONVERGED = 1e-3
MOST_RATIO = 10.0  # of an iteration


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    """Views of blocks of columns; a single one where blocks gain nothing."""
    whole = x.is_cuda or x.shape[-1] <= BLOCK or torch.compiler.is_compiling()
    return (x,) if whole else torch.split(x, BLOCK, -1)


def _stacked(x: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a chain's ``[..., d]`` as views ``[blocks, ..., BLOCK]`` and ``[1, ..., the rest]``."""
    end = x.shape[-1] // BLOCK * BLOCK
    return x[..., :end].view(*x.shape[:-1], -1, BLOCK).movedim(-2, 0), x[..., end:].unsqueeze(0)


def project(rows: Tensor, x: Tensor) -> Tensor:
    """``U x`` for a vector ``[d]`` of each chain: ``[chains, k]``."""
    if _reduced(rows, x):
        short = x.to(rows.dtype)
        if len(x) == 1:  # a single product uses the whole device
            return torch.mm(short, rows[0].mT, out_dtype=x.dtype)
        return torch.bmm(short.unsqueeze(1), rows.mT, out_dtype=x.dtype).squeeze(1)
    if len(blocks(x)) == 1:
        return times(rows.to(x.dtype), x)
    out = x.new_zeros(rows.shape[:2])
    for into, vector, matrix in zip(out, x, rows, strict=True):
        for part, block in zip(_stacked(vector), _stacked(matrix), strict=True):
            into.add_(times(block.to(x.dtype), part).sum(0))
    return out


def spread_out_(rows: Tensor, along: Tensor, out: Tensor) -> Tensor:
    """``out += U^T along`` for ``[k]`` of each chain, in place."""
    if _reduced(rows, out):
        # In two parts, since the rounding error of a strong direction, which nearly cancels, would show.
        high = along.to(rows.dtype)
        for part in (high, (along - high).to(rows.dtype)):
            out.add_(times(rows.mT, part))
        return out
    if len(blocks(out)) == 1:
        return out.add_(times(rows.to(out.dtype).mT, along))
    for vector, size, matrix in zip(out, along, rows, strict=True):
        for part, block in zip(_stacked(vector), _stacked(matrix), strict=True):
            part.unsqueeze(1).baddbmm_(size.expand(len(part), 1, -1), block.to(out.dtype))
    return out


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """Matrix times vector, for each chain."""
    return (x.unsqueeze(-2) @ matrix.mT).squeeze(-2)


def _reduced(rows: Tensor, x: Tensor) -> bool:
    """Whether to multiply in the rows' shorter dtype; CPUs have no fast arithmetic for it."""
    return x.is_cuda and rows.dtype != x.dtype


def gram(rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """``U diag(weight) U^T``, in float32 at least."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    out = torch.zeros(*rows.shape[:2], rows.shape[1], dtype=dtype, device=rows.device)
    weights = [None] * len(blocks(rows)) if weight is None else [w.unsqueeze(1) for w in blocks(weight)]
    for block, w in zip(blocks(rows), weights, strict=True):
        block = block.to(dtype)
        out.baddbmm_(block if w is None else block * w, block.mT)
    return out


def mix_(matrix: Tensor, rows: Tensor) -> Tensor:
    """``U <- matrix U``, in place."""
    for block in blocks(rows):
        block.copy_(matrix.to(rows) @ block)
    return rows


def explained(rows: Tensor, core: Tensor) -> Tensor:
    """The diagonal of ``U^T core U``."""
    parts = (block.to(core.dtype) for block in blocks(rows))
    return torch.cat([(block * (core @ block)).sum(1) for block in parts], -1)


def orthonormal_(rows: Tensor) -> Tensor:
    """Make rows orthonormal in place, rotated as little as possible; returns the matrix that does it.

    By their Gram matrix, scaled to a unit diagonal; twice, since one pass loses half of the digits.
    """
    floor, done = rows.shape[1] * torch.finfo(rows.dtype).eps, None
    for _ in range(2):
        products = gram(rows).double()
        unit = diagonal(products).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
        values, vectors = symmetric_eigen(unit.unsqueeze(-1) * products * unit.unsqueeze(-2))
        whiten = (vectors * values.clamp_min(floor).rsqrt().unsqueeze(-2)) @ vectors.mT * unit.unsqueeze(-2)
        mix_(whiten, rows)
        done = whiten if done is None else whiten @ done
    assert done is not None
    return done


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a symmetric matrix for each chain, in float64."""
    matrix = matrix.double()
    # Finite, so that one diverged chain does not stop the others.
    values, vectors = torch.linalg.eigh(torch.nan_to_num(0.5 * (matrix + matrix.mT), posinf=0.0, neginf=0.0))
    return values, vectors


def diagonal(matrix: Tensor) -> Tensor:
    """The diagonal of a matrix for each chain, as a view."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def leftover(rows: Tensor, psi: Tensor) -> Tensor:
    """The diagonal of ``(I - U^T U) diag(psi) (I - U^T U)``: independent noise without its part along the rows."""
    taken = explained(rows, torch.eye(rows.shape[1]).to(psi).expand(len(rows), -1, -1))
    return (psi * (1.0 - 2.0 * taken) + explained(rows, gram(rows, psi))).clamp_min_(0.0)


def split(rows: Tensor, unit: Tensor, left: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The covariance of noise z as ``diag(psi) + U^T shared U``, psi non-negative, ``shared`` positive semi-definite.

    The rows are ``U diag(1 / unit)``, U orthonormal; ``left`` is the variance of each coordinate of ``(I - U^T U) z``,
    and ``spread`` the covariance along U. The former is measured: as a difference of variances it would be lost in
    rounding where the rows explain nearly everything.
    """
    psi = left.clone()
    # With many more coordinates than rows, psi is nearly ``left``; rows that span everything leave rounding error only.
    if CONVERGED * rows.shape[2] < rows.shape[1] < rows.shape[2]:
        _fit(rows.to(left.dtype) * unit.unsqueeze(1), psi)
    values, vectors = symmetric_eigen(spread - gram(rows, psi * unit.square()))
    return psi, ((vectors * values.clamp_min(0.0).unsqueeze(-2)) @ vectors.mT).to(spread)


def _fit(rows: Tensor, psi: Tensor) -> None:
    """Turn ``left`` into psi, in place: non-negative least squares (image space reconstruction).

    A chain that has converged is not changed, so that its result does not depend on the other chains.
    """
    target, going = leftover(rows, psi), torch.ones_like(psi[:, :1], dtype=torch.bool)
    for _ in range(SPLITS):
        image = leftover(rows, leftover(rows, psi))
        # Coordinates of which the rows leave rounding error only are not changed.
        known = image > torch.finfo(psi.dtype).eps * psi.amax(-1, keepdim=True)
        ratio = torch.where(known, target / image, 1.0).clamp_max_(MOST_RATIO)
        psi.copy_(torch.where(going, psi * ratio, psi))
        going = going & ((ratio - 1.0).abs().mean(-1, keepdim=True) >= CONVERGED)
        if not bool(going.any()):
            break
