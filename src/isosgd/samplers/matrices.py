"""The weight matrices among a model's parameters, and which of their sides get a basis.

All axes of a large matrix would cost too much. The strongest few of its inputs become axes instead (`Leading`): they
carry most of the noise that parameters share, while the outputs say little more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from isosgd.samplers.sides import Basis, Leading, Side, Whole

LONGEST_SIDE = 512  # that gets all axes ...
MOST_WORK = 1 << 24  # ... if turning it takes no more multiply-adds than these
LEADING = 4  # axes of the inputs of a larger matrix; half as many ...
HUGE = 1 << 20  # ... where it has more entries than these


class Matrix(NamedTuple):
    """A weight matrix in a flat tensor, and its two sides: of the outputs and of the inputs."""

    slot: slice
    rows: int
    columns: int
    left: Side
    right: Side

    @property
    def work(self) -> int:
        """Multiply-adds for turning."""
        return self.rows * self.columns * (self.left.work + self.right.work)

    def of(self, x: Tensor) -> Tensor:
        """The matrix in a flat tensor, as a view ``[chains, rows, columns]``."""
        return x[:, self.slot].view(len(x), self.rows, self.columns)

    def turn(self, x: Tensor, bases: tuple[Basis, Basis]) -> Tensor:
        """The matrix in a flat tensor as its bases show it."""
        return self.left.turn(self.right.turn(self.of(x), bases[1]), bases[0])

    def turn_(self, x: Tensor, bases: tuple[Basis, Basis]) -> Tensor:
        """The same; the flat tensor may be written over."""
        return self.left.turn_(self.right.turn_(self.of(x), bases[1]), bases[0])

    def back_(self, x: Tensor, bases: tuple[Basis, Basis]) -> None:
        """Undo `turn`, in place."""
        self.left.back_(self.of(x), bases[0])
        self.right.back_(self.of(x), bases[1])


def lay_out(shapes: Sequence[tuple[int, ...]], longest: int = LONGEST_SIDE, leading: int = LEADING) -> list[Matrix]:
    """The weight matrices that get bases; convolutions count as matrices ``[out, in * height * width]``."""
    found, end = [], 0
    for shape in shapes:
        start, end = end, end + math.prod(shape)
        if len(shape) < 2 or start == end:
            continue
        rows, columns = shape[0], math.prod(shape[1:])
        most = min(longest, MOST_WORK // (rows * columns))
        left, right = Side(), Side()
        if columns > most:
            right = Leading(columns, (leading + 1) // 2 if rows * columns > HUGE else leading)
        else:
            right = Whole(columns) if columns > 1 else right
            left = Whole(rows, rows=True) if 1 < rows <= most else left
        if left.work or right.work:
            found.append(Matrix(slice(start, end), rows, columns, left, right))
    return found


def rotation_work(shapes: Sequence[tuple[int, ...]]) -> int:
    """Multiply-adds that a step takes for turning these parameters into their bases and back.

    Example:
        >>> rotation_work([(50, 13), (50,)]), rotation_work([(256, 256, 3, 3)])
        (81900, 9437184)
    """
    return 2 * sum(matrix.work for matrix in lay_out(shapes))
