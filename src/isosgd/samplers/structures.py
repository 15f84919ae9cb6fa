"""Structures of Lambda by name."""

from __future__ import annotations

from typing import Literal

from isosgd.samplers.full import Full
from isosgd.samplers.kronecker import Kronecker
from isosgd.samplers.shaped import Diagonal
from isosgd.samplers.structure import Layer, Single, Structure

StructureName = Literal["layer", "single", "diagonal", "kronecker", "full"]
STRUCTURES: dict[str, type[Structure]] = {
    "layer": Layer,
    "single": Single,
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "full": Full,
}


def make_structure(structure: StructureName | Structure) -> Structure:
    """The structure a name stands for."""
    if isinstance(structure, Structure):
        return structure
    if structure not in STRUCTURES:
        raise ValueError(f"structure = {structure!r} is unknown; choose one of {sorted(STRUCTURES)} or a Structure")
    return STRUCTURES[structure]()
