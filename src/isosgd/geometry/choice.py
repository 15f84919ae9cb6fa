"""Forms of Lambda by name, and which to take when nobody says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from isosgd.geometry.base import Geometry
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.kronecker import Kronecker
from isosgd.geometry.layer import PerGroup
from isosgd.geometry.lowrank import LowRank

StructureName = Literal["auto", "layer", "single", "diagonal", "lowrank", "kronecker", "full"]
GEOMETRIES: dict[str, type[Geometry]] = {kind.name: kind for kind in (Diagonal, LowRank, Kronecker, Full)}
STRUCTURES = ("layer", "single", *GEOMETRIES)
GRADIENTS_FOR_EACH = 40  # parameter, that a full matrix needs in the warm-up
LEAST_BUDGET = 400  # gradients without which no shape is estimated
FULL_UP_TO = 200  # parameters that get a full matrix, whatever their noise is like: it costs next to nothing
MEASURED_UP_TO = 500  # parameters that get one where the warm-up finds it worth its cost; its eigenvectors take d^3
MOST_NUMBERS = 4_000_000  # in the matrices of all chains together, for that
WORTH = 30.0  # condition number that a low rank must leave for that; of white noise as few vectors show up to 9
LOW_RANK_UP_TO = 1_000_000  # parameters; the directions of more take too much memory


def make_structure(structure: StructureName | Geometry) -> PerGroup | Geometry:
    """The structure a name stands for; ``auto`` must be settled first, see `choose`."""
    if isinstance(structure, Geometry):
        return structure
    if structure == "layer" or structure == "single":
        return PerGroup(structure)
    if structure not in GEOMETRIES:
        raise ValueError(
            f"structure = {structure!r} is unknown; choose 'auto', one of {sorted(STRUCTURES)}, or a Geometry"
        )
    return GEOMETRIES[structure]()


def choose(
    shapes: Sequence[tuple[int, ...]], budget: int | None = None, chains: int = 1, measured: bool = True
) -> StructureName:
    """The structure that mixes best at a cost below that of the gradient.

    Few parameters get a full matrix. More get a rate for each, and one for each of the strongest directions that cross
    all of them: the noise of a network's weights is so correlated that a few directions are a hundred times stiffer
    than a diagonal, or a Kronecker product for each layer, can tell. The largest models get a rate for each parameter.

    Between `FULL_UP_TO` and `MEASURED_UP_TO` parameters the answer is a full matrix for a first look; whether it stays
    is decided by the conditioning that is measured then, see `instead`; where nothing is ``measured``, it is low rank.

    Args:
        shapes: of the parameters.
        budget: gradients that the warm-up may take. A short one does not suffice to estimate many numbers.
        chains: how many run side by side.
        measured: whether there is a first look that decides.

    Example:
        >>> choose([(5,), ()]), choose([(50, 13), (50,), (1, 50), (1,)]), choose([(3000, 3000)])
        ('full', 'lowrank', 'diagonal')
    """
    total = sum(math.prod(shape) for shape in shapes)
    small = total <= FULL_UP_TO or (measured and total <= MEASURED_UP_TO and chains * total**2 <= MOST_NUMBERS)
    if small and (budget is None or budget >= GRADIENTS_FOR_EACH * total):
        return "full"
    if budget is not None and budget < LEAST_BUDGET:
        return "layer"
    return "lowrank" if total <= LOW_RANK_UP_TO else "diagonal"


def provisional(shapes: Sequence[tuple[int, ...]], structure: StructureName) -> bool:
    """Whether a structure that was chosen is for a first look only."""
    return structure == "full" and sum(math.prod(shape) for shape in shapes) > FULL_UP_TO


def instead(full: Full) -> LowRank | None:
    """What to take instead of a full matrix that is not worth its cost, after a first look; None where it is.

    A low rank leaves some conditioning: about so many times longer its slowest direction takes to forget. Seen through
    so few noise vectors it looks up to nine times as large as it is.
    """
    return None if full.conditioning()["lowrank"] >= WORTH else LowRank()
