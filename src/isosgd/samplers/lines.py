"""Lines through gradients over places, and noise that cancels over an epoch: for the warm-up in a loop of one's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_EPOCHS = 4  # to compare means over


def uncancelled(pull: float, epoch: int) -> float:
    """Share of the gradient noise that acts on a chain where batches go through the data without replacement.

    Noise sums up to zero over an epoch of E steps: at the lag k < E its covariance is ``-V / (E - 1)``, in the share
    ``1 - k / E`` of all places. A chain that forgets the share a = ``pull`` of its past in a step weighs it with
    ``(1 - a)^k``.

    Example:
        >>> round(uncancelled(1e-6, 20), 2), round(uncancelled(0.05, 20), 2), round(uncancelled(1.0, 20), 2)
        (0.0, 0.28, 1.0)
    """
    lags = range(1, epoch)
    return 1.0 - 2.0 / (epoch - 1) * sum((1.0 - k / epoch) * max(1.0 - pull, 0.0) ** k for k in lags)


class Line:
    """Straight lines through points that come one after the other, several at once: slopes and their errors.

    Example:
        >>> line = Line(1, torch.device("cpu"))
        >>> for x in range(10):
        ...     line.take(torch.tensor([float(x)]), torch.tensor([3.0 * x + (-1) ** x]))
        >>> [round(float(found), 1) for found in line.slopes()]
        [2.9, 0.1]
    """

    kept = ("count", "sums", "block", "blocks")

    def __init__(self, lines: int, device: torch.device) -> None:
        self.count, self.sums = 0, torch.zeros(5, lines, dtype=torch.float64, device=device)
        self.block = torch.zeros(3, lines, dtype=torch.float64, device=device)  # sums of x, y and 1 in this epoch
        self.blocks: list[Tensor] = []  # of epochs that were seen as a whole

    def take(self, x: Tensor, y: Tensor, epoch: int = 0, place: int = 0) -> None:
        """Take in a point of each line, at its place in an epoch of so many points."""
        x, y = x.double(), y.double()
        self.sums += torch.stack([x, y, x * x, x * y, y * y])
        self.count += 1
        if not epoch:
            return
        if place == 0:
            self.block = torch.zeros_like(self.block)
        self.block += torch.stack([x, y, torch.ones_like(x)])
        if place == epoch - 1 and int(self.block[2, 0]) == epoch:
            self.blocks.append(self.block)

    def block_noise(self) -> tuple[float, float]:
        """Variance of the means over epochs, over what independent points would have, and its relative error."""
        if len(self.blocks) < LEAST_EPOCHS:
            return 1.0, math.inf
        x, y, _, xy, yy = self.sums
        slope = self.slopes()[0]
        every = torch.stack(self.blocks)  # [epochs, 3, lines]
        left = (every[:, 1] - slope * every[:, 0]) / every[:, 2]
        noise = (yy - y * y / self.count - slope * (xy - x * y / self.count)).clamp_min(0.0) / (self.count - 2)
        found = (left.var(0) * every[0, 2]).sum() / noise.sum().clamp_min(torch.finfo(noise.dtype).tiny)
        return float(found), math.sqrt(2.0 / ((len(self.blocks) - 1) * len(slope)))

    def slopes(self, pooled: bool = False) -> tuple[Tensor, Tensor]:
        """Slope of each line and its standard error; ``pooled`` for one slope of all."""
        x, y, xx, xy, yy = self.sums
        xx, xy, yy = xx - x * x / self.count, xy - x * y / self.count, yy - y * y / self.count
        if pooled:
            xx, xy, yy = (total.sum().reshape(1) for total in (xx, xy, yy))
        slope = xy / xx.clamp_min(torch.finfo(xx.dtype).tiny)
        freedom = max(self.count - 2, 1) * (self.sums.shape[1] if pooled else 1)
        error = ((yy - slope * xy).clamp_min(0.0) / freedom / xx.clamp_min(torch.finfo(xx.dtype).tiny)).sqrt()
        return slope, error
