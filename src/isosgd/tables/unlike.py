"""Is an input unlike the training data? Judged by its distance to the nearest training rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEIGHBOURS = 5
QUANTILE = 0.99
MOST_ROWS = 5_000
HELD = 1 << 24  # distances held at once


@dataclass(frozen=True)
class Familiar:
    """Training rows to compare with, and how far from them is far.

    The distance of a row is the mean over its 5 nearest training rows, in the standard units of the inputs. It is far
    when it exceeds the 99% quantile of the distances that training rows have from each other: of inputs like the
    training data about one in a hundred is called far.

    Attributes:
        rows: ``[m, d]``.
        limit: the distance beyond which an input is far.

    Example:
        >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
        >>> familiar = Familiar.learn(x)
        >>> (familiar.distance(torch.tensor([[0.0, 0.0], [6.0, 0.0]])) > familiar.limit).tolist()
        [False, True]
    """

    rows: Tensor
    limit: float

    @classmethod
    def learn(cls, x: Tensor) -> Familiar:
        """From training inputs ``[n, d]``; of more than 5,000 rows evenly spaced ones are kept."""
        if x.dim() != 2 or len(x) < 2:
            raise ValueError(f"training inputs of shape {list(x.shape)}; expected [n, d] with n >= 2")
        rows = _some(x)
        # Each row is its own nearest neighbour, at distance 0: it is left out.
        own = _nearest(rows, rows, min(NEIGHBOURS + 1, len(rows)))[:, 1:].mean(1)
        return cls(rows, float(torch.quantile(own, QUANTILE)))

    @classmethod
    def among(cls, x: Tensor, limit: float) -> Familiar:
        """The same again, from the same training inputs and the limit that was found."""
        return cls(_some(x), limit)

    def distance(self, x: Tensor) -> Tensor:
        """Mean distance of each input to its nearest training rows, ``[n]``."""
        return _nearest(x, self.rows, min(NEIGHBOURS, len(self.rows))).mean(1)


def _some(x: Tensor) -> Tensor:
    return x[torch.linspace(0, len(x) - 1, min(len(x), MOST_ROWS), dtype=torch.float64).round().long()]


def _nearest(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Distances to the nearest rows, ``[n, count]``, the least first."""
    parts = torch.split(x.double(), max(1, HELD // len(rows)))
    found = [torch.cdist(part, rows.double(), compute_mode="donot_use_mm_for_euclid_dist") for part in parts]
    return torch.cat([part.topk(count, largest=False).values for part in found]) if len(x) else x.new_zeros(0, count)
