"""The strongest directions of the noise of many parameters, found by power iteration, several of them at once.

A round takes a block of noise vectors and what is known from earlier blocks (history PCA). The noise along the
directions is measured on vectors that had no part in finding them: with millions of parameters and a hundred vectors,
the noise along a direction made of those vectors would look a thousand times too large.

References:
    Yang, Hsieh, Wang (2018), History PCA: a new algorithm for streaming PCA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.rows import blocks, mix_, orthonormal_, project, spread_out_, symmetric_eigen

OLD_BLOCKS = 3  # for how many blocks the directions of an earlier search count


class Directions:
    """A search, for each chain.

    Directions are compared, and are orthonormal, in coordinates ``unit * parameters``. The noise found there has the
    covariance ``spread`` along them, and beside them variances ``left``.

    Args:
        rows: directions to start from, orthonormal, ``[chains, k, d]``; they are written over.
        unit: ``[chains, d]``; None to find it, from the noise of each parameter.
        left: what is known of the noise beside the rows, ``[chains, d]``.
        spread: and along them, ``[chains, k, k]``.
        damped: keeps variances of parameters off zero.
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
        self.in_block, self.blocks = 0, -1 if unit is None else OLD_BLOCKS  # a first block only says what the unit is

    @property
    def block(self) -> int:
        """Noise vectors in a block."""
        return max(self.rows.shape[1], 8)

    def take(self, noise: Tensor) -> None:
        """Take in a noise vector of each chain."""
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
        """``image = (what is known + this block) rows^T``, made orthonormal: the next directions."""
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
        # Along the axes of `spread` each image has its own direction; as mixtures all would show the strongest one.
        mix_(symmetric_eigen(spread)[1].mT, image)
        orthonormal_(image)
        if self.blocks >= 0:
            # The new directions are better than those along which the noise was measured, and have as much of it.
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

    def state(self) -> dict[str, Any]:
        """All that the search needs to go on."""
        return {name: getattr(self, name) for name in self.kept}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        for name in self.kept:
            value = state[name]
            setattr(self, name, value.to(self.rows.device, copy=True) if isinstance(value, Tensor) else value)
