"""Structures of Lambda by name, and which to take when nobody says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from isosgd.samplers.full import Full
from isosgd.samplers.kronecker import LONGEST_SIDE, Kronecker
from isosgd.samplers.lowrank import LowRank
from isosgd.samplers.shaped import Diagonal
from isosgd.samplers.structure import Layer, Single, Structure

StructureName = Literal["auto", "layer", "single", "diagonal", "lowrank", "kronecker", "full"]
STRUCTURES: dict[str, type[Structure]] = {
    "layer": Layer,
    "single": Single,
    "diagonal": Diagonal,
    "lowrank": LowRank,
    "kronecker": Kronecker,
    "full": Full,
}
GRADIENTS_FOR_EACH = 40  # parameter, that a full matrix needs in the warm-up
LEAST_BUDGET = 400  # gradients without which no shape is estimated
FULL_UP_TO = 200  # parameters; a matrix over more takes too many noise vectors to estimate


def make_structure(structure: StructureName | Structure) -> Structure:
    """The structure a name stands for; ``auto`` must be settled first, see `choose`."""
    if isinstance(structure, Structure):
        return structure
    if structure not in STRUCTURES:
        raise ValueError(
            f"structure = {structure!r} is unknown; choose 'auto', one of {sorted(STRUCTURES)}, or a Structure"
        )
    return STRUCTURES[structure]()


def choose(shapes: Sequence[tuple[int, ...]], batch_size: int, budget: int | None = None) -> StructureName:
    """The structure that mixes best at a cost below that of the gradient.

    Few parameters get a full matrix. Weight matrices get a basis for each side where turning into it takes fewer
    operations than the gradient, about ``6 n d``. The others get a rate for each parameter.

    Args:
        shapes: of the parameters.
        batch_size: n.
        budget: gradients that the warm-up may take. A short one does not suffice to estimate many numbers.

    Example:
        >>> choose([(5,), ()], 32), choose([(50, 13), (50,), (1, 50), (1,)], 128), choose([(10_000,)], 128)
        ('full', 'kronecker', 'diagonal')
    """
    total = sum(math.prod(shape) for shape in shapes)
    if total <= FULL_UP_TO and (budget is None or budget >= GRADIENTS_FOR_EACH * total):
        return "full"
    if budget is not None and budget < LEAST_BUDGET:
        return "layer"
    work = 0
    for shape in shapes:
        if len(shape) > 1:
            rows, columns = shape[0], math.prod(shape[1:])
            sides = sum(side for side in (rows, columns) if side <= LONGEST_SIDE)
            work += 4 * rows * columns * sides
    return "kronecker" if 0 < work <= 6 * batch_size * total else "diagonal"
