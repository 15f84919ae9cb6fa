"""Structures of Lambda by name, and the default choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from isosgd.errors import nearest
from isosgd.geometry.base import Geometry
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.kronecker import Kronecker
from isosgd.geometry.layer import PerGroup
from isosgd.geometry.lowrank import LowRank

StructureName = Literal["auto", "layer", "single", "diagonal", "lowrank", "kronecker", "full"]
GEOMETRIES: dict[str, type[Geometry]] = {kind.name: kind for kind in (Diagonal, LowRank, Kronecker, Full)}
STRUCTURES = ("layer", "single", *GEOMETRIES)
GRADIENTS_FOR_EACH = 40  # gradients per parameter that a full matrix needs in the warm-up
LEAST_BUDGET = 400  # gradients below which no structure is estimated
FULL_UP_TO = 200  # parameters up to which a full matrix is always chosen: it costs little
MEASURED_UP_TO = 500  # parameters up to which it is tried and kept if worth its cost; its eigenvectors take d^3
MOST_NUMBERS = 4_000_000  # in the matrices of all chains, for that
WORTH = 30.0  # least condition number that a low rank leaves, for that; white noise shows up to 9
LOW_RANK_UP_TO = 1_000_000  # parameters; with more, the directions take too much memory


def make_structure(structure: StructureName | Geometry) -> PerGroup | Geometry:
    """The structure of that name; ``auto`` must be resolved by `choose` first."""
    if isinstance(structure, Geometry):
        return structure
    if structure == "layer" or structure == "single":
        return PerGroup(structure)
    if structure not in GEOMETRIES:
        raise ValueError(
            f"structure = {structure!r} is unknown; choose 'auto', one of {sorted(STRUCTURES)}, or a Geometry"
            + nearest(structure, STRUCTURES)
        )
    return GEOMETRIES[structure]()


def choose(
    shapes: Sequence[tuple[int, ...]], budget: int | None = None, chains: int = 1, measured: bool = True
) -> StructureName:
    """The structure that mixes best at a cost below that of the gradient.

    Small models get a full matrix; larger ones a diagonal and the strongest directions across all parameters (low
    rank), since the noise of a network's weights is so correlated that a few directions are a hundred times stiffer
    than a diagonal, or a Kronecker product for each layer, can express. The largest models get a diagonal.

    Between `FULL_UP_TO` and `MEASURED_UP_TO` parameters the choice is a full matrix if its conditioning will be
    ``measured``, see `lowrank_instead`, and else low rank.

    Args:
        shapes: of the parameters.
        budget: gradients that the warm-up may take.
        chains: how many run side by side.
        measured: whether conditioning will be measured.

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
    """Whether a choice depends on a measurement of the conditioning."""
    return structure == "full" and sum(math.prod(shape) for shape in shapes) > FULL_UP_TO


def lowrank_instead(full: Full) -> LowRank | None:
    """A low rank to replace a full matrix that, as measured, is not worth its cost; None if it is.

    The condition number that a low rank leaves is about the factor by which its slowest direction mixes more slowly.
    From few noise vectors it is estimated up to nine times too large.
    """
    return None if full.conditioning()["lowrank"] >= WORTH else LowRank()
