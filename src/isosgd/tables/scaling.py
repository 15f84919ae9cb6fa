"""Features and targets of a regression in standard units, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Standardiser:
    """Moves features and target to mean 0 and standard deviation 1, and back; made by `standardise`.

    A density of the standardised target is ``y_scale`` times that of the target: subtract ``log(y_scale)`` from a log
    likelihood in standardised units to have it in those of the data.

    Attributes:
        x_mean: ``[d]``.
        x_scale: ``[d]``.
        y_mean: a scalar tensor.
        y_scale: a scalar tensor.
    """

    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor

    def transform_x(self, x: Tensor) -> Tensor:
        """Features in standard units."""
        return (x - self.x_mean) / self.x_scale

    def transform_y(self, y: Tensor) -> Tensor:
        """Targets in standard units."""
        return (y - self.y_mean) / self.y_scale

    def inverse_x(self, x: Tensor) -> Tensor:
        """Features in the units of the data."""
        return x * self.x_scale + self.x_mean

    def inverse_y(self, y: Tensor) -> Tensor:
        """Targets, or predicted means of them, in the units of the data."""
        return y * self.y_scale + self.y_mean


def standardise(train_x: Tensor, train_y: Tensor) -> Standardiser:
    """Mean and standard deviation (over N, not N - 1) of training data; a constant column gets the scale 1.

    Args:
        train_x: features ``[N, d]``.
        train_y: target ``[N]``.

    Example:
        >>> x, y = torch.tensor([[1.0, 7.0], [3.0, 7.0]]), torch.tensor([0.0, 4.0])
        >>> s = standardise(x, y)
        >>> s.transform_x(x), s.inverse_y(s.transform_y(y))
        (tensor([[-1.,  0.], [ 1.,  0.]]), tensor([0., 4.]))
    """
    if train_x.dim() != 2 or train_y.dim() != 1 or len(train_x) != len(train_y) or len(train_x) == 0:
        shapes = tuple(train_x.shape), tuple(train_y.shape)
        raise ValueError(
            f"train_x and train_y have shapes {shapes[0]} and {shapes[1]}; expected [N, d] and [N], N >= 1"
        )
    for name, values in (("train_x", train_x), ("train_y", train_y)):
        if not values.is_floating_point():
            raise TypeError(f"{name} is {values.dtype}; expected a floating-point type")
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite; drop or mend these rows")
    return Standardiser(*_moments(train_x), *_moments(train_y))


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    # A constant column is told by its range: rounding can leave it a standard deviation that is tiny but not zero.
    varies = values.amax(0) > values.amin(0)
    return values.mean(0), torch.where(varies, values.std(0, correction=0), 1.0)
