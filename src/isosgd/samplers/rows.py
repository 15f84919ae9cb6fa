"""Products with k rows of length d, U ``[k, d]``, where d may be in the millions and k is a handful.

On the CPU they go block by block, so that what is made on the way stays in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 16  # columns at once
SPLITS = 20  # rounds of `split` at most; none is needed where there are many more columns than rows
CONVERGED = 1e-3


def project(rows: Tensor, x: Tensor) -> Tensor:
    """``U x`` for vectors ``[..., d]``: ``[..., k]``."""
    vectors = x.reshape(-1, x.shape[-1])
    if _reduced(rows, x):
        out = torch.mm(vectors.to(rows.dtype), rows.mT, out_dtype=x.dtype)
    elif x.is_cuda or x.shape[-1] <= BLOCK:
        out = vectors @ rows.to(x.dtype).mT
    else:
        out = x.new_zeros(len(vectors), len(rows))
        for part, block in zip(torch.split(vectors, BLOCK, 1), torch.split(rows, BLOCK, 1), strict=True):
            block = block.to(x.dtype)
            for into, vector in zip(out, part, strict=True):
                into.addmv_(block, vector)  # not a matrix product, which would copy the rows
    return out.view(*x.shape[:-1], len(rows))


def spread_out_(rows: Tensor, along: Tensor, out: Tensor) -> Tensor:
    """``out += U^T along`` for ``[..., k]``, in place."""
    vectors, sizes = out.view(-1, out.shape[-1]), along.reshape(-1, len(rows))
    if _reduced(rows, out):
        # A strong direction is nearly taken out of the vector, so that an error of its size would show: two parts.
        high = sizes.to(rows.dtype)
        for part in (high, (sizes - high).to(rows.dtype)):
            vectors.add_(part @ rows)
    elif out.is_cuda or out.shape[-1] <= BLOCK:
        vectors.addmm_(sizes, rows.to(out.dtype))
    else:
        for part, block in zip(torch.split(vectors, BLOCK, 1), torch.split(rows, BLOCK, 1), strict=True):
            block = block.to(out.dtype)
            for vector, size in zip(part, sizes, strict=True):
                vector.addmv_(block.mT, size)
    return out


def _reduced(rows: Tensor, x: Tensor) -> bool:
    """Whether an accelerator multiplies in the rows' short type; the CPU has no fast arithmetic for it."""
    return x.is_cuda and rows.dtype != x.dtype


def gram(rows: Tensor, weight: Tensor | None = None, others: Tensor | None = None) -> Tensor:
    """``U diag(weight) W^T``, W = U when not given, in float32 at least."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    out = torch.zeros(len(rows), len(rows), dtype=dtype, device=rows.device)
    for start in range(0, rows.shape[1], BLOCK):
        cut = slice(start, start + BLOCK)
        left = rows[:, cut].to(dtype)
        right = left if others is None else others[:, cut].to(dtype)
        out.addmm_(left if weight is None else left * weight[cut], right.mT)
    return out


def explained(rows: Tensor, core: Tensor) -> Tensor:
    """The diagonal of ``U^T core U``."""
    blocks = (block.to(core.dtype) for block in torch.split(rows, BLOCK, 1))
    return torch.cat([(block * (core @ block)).sum(0) for block in blocks])


def orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows of the same span, turned as little as possible.

    By their Gram matrix, scaled to a unit diagonal; twice, since one pass loses half of the digits.
    """
    floor = len(rows) * torch.finfo(rows.dtype).eps
    for _ in range(2):
        products = gram(rows).double()
        unit = products.diagonal().clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
        values, vectors = torch.linalg.eigh(unit[:, None] * products * unit)
        whiten: Tensor = (vectors * values.clamp_min(floor).rsqrt()) @ vectors.mT * unit
        rows = whiten.to(rows) @ rows
    return rows


def leftover(rows: Tensor, psi: Tensor) -> Tensor:
    """The diagonal of ``(I - U^T U) diag(psi) (I - U^T U)``: what is left of independent noise beside the rows."""
    taken = explained(rows, torch.eye(len(rows)).to(psi))
    return (psi * (1.0 - 2.0 * taken) + explained(rows, gram(rows, psi))).clamp_min_(0.0)


def split(rows: Tensor, left: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Noise as ``diag(psi) + U^T shared U``.

    What is left beside the rows is measured, and not taken for the difference of all noise and that along them: where
    the rows explain nearly everything, the error of such a difference would be larger than what is left.

    Args:
        rows: U, orthonormal.
        left: variance of each coordinate of ``(I - U^T U) z``, z the noise.
        spread: covariance ``[k, k]`` along the rows.

    Returns:
        psi, not negative, and ``shared``, positive semi-definite: together they explain ``left`` and ``spread``.
    """
    # Non-negative least squares by multiplicative steps (image space reconstruction). With many more coordinates than
    # rows, psi is all but ``left``.
    psi, tiny = left.clone(), torch.finfo(left.dtype).tiny
    few = len(rows) > CONVERGED * len(left)
    wanted = leftover(rows, left) if few else left
    for _ in range(SPLITS if few else 0):
        ratio = wanted / leftover(rows, leftover(rows, psi)).clamp_min_(tiny)
        psi.mul_(ratio)
        if float((ratio - 1.0).abs().mean()) < CONVERGED:
            break
    values, vectors = torch.linalg.eigh((spread - gram(rows, psi)).double())
    return psi, ((vectors * values.clamp_min(0.0)) @ vectors.mT).to(spread)
