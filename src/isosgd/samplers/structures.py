"""Structures of Lambda by name, and which to take when nobody says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from isosgd.samplers.full import Full
from isosgd.samplers.kronecker import Kronecker
from isosgd.samplers.lowrank import LowRank
from isosgd.samplers.rotated import Diagonal
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
LOW_RANK_UP_TO = 1_000_000  # parameters; the directions of more take too much memory


def make_structure(structure: StructureName | Structure) -> Structure:
    """The structure a name stands for; ``auto`` must be settled first, see `choose`."""
    if isinstance(structure, Structure):
        return structure
    if structure not in STRUCTURES:
        raise ValueError(
            f"structure = {structure!r} is unknown; choose 'auto', one of {sorted(STRUCTURES)}, or a Structure"
        )
    return STRUCTURES[structure]()


def choose(shapes: Sequence[tuple[int, ...]], budget: int | None = None) -> StructureName:
    """The structure that mixes best at a cost below that of the gradient.

    Few parameters get a full matrix. More get a rate for each, and one for each of the strongest directions that cross
    all of them: the noise of a network's weights is so correlated that a few directions are a hundred times stiffer
    than a diagonal, or a Kronecker product for each layer, can tell. The largest models get a rate for each parameter.

    Args:
        shapes: of the parameters.
        budget: gradients that the warm-up may take. A short one does not suffice to estimate many numbers.

    Example:
        >>> choose([(5,), ()]), choose([(50, 13), (50,), (1, 50), (1,)]), choose([(3000, 3000)])
        ('full', 'lowrank', 'diagonal')
    """
    total = sum(math.prod(shape) for shape in shapes)
    if total <= FULL_UP_TO and (budget is None or budget >= GRADIENTS_FOR_EACH * total):
        return "full"
    if budget is not None and budget < LEAST_BUDGET:
        return "layer"
    return "lowrank" if total <= LOW_RANK_UP_TO else "diagonal"
