"""Structures of Lambda, the constant composite noise of I-SGD: how large it must be, and how Lambda - B is injected.

Theorem 1 allows any constant ``Lambda >= B``. It may be one number for each parameter group, as in the paper, or one
for all, its SLR (`PerGroup`). A `Geometry` knows the noise and curvature in each direction: `Diagonal`, `LowRank`,
`Kronecker`, `Full`.
"""

from isosgd.geometry.base import Geometry
from isosgd.geometry.choice import STRUCTURES, StructureName, choose, make_structure
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.kronecker import Kronecker
from isosgd.geometry.layer import Correction, PerGroup
from isosgd.geometry.lowrank import LowRank
from isosgd.geometry.rule import Rule

__all__ = [
    "STRUCTURES",
    "Correction",
    "Diagonal",
    "Full",
    "Geometry",
    "Kronecker",
    "LowRank",
    "PerGroup",
    "Rule",
    "StructureName",
    "choose",
    "make_structure",
]
