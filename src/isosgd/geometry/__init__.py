"""Structures of Lambda, the constant composite noise of I-SGD: its size, and how Lambda - B is injected.

Theorem 1 allows any constant ``Lambda >= B``: one number for each parameter group, as in the paper, or for all groups,
the paper's SLR (`PerGroup`); or a `Geometry`, a matrix: `Diagonal`, `LowRank`, `Kronecker`, `Full`.
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
