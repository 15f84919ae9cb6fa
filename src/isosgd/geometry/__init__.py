"""What Lambda, the constant composite noise of I-SGD, looks like: how large it must be, and how Lambda - B is injected.

Theorem 1 allows any constant ``Lambda >= B``. It may be one number for each group of parameters, the paper's, or
one for all, its SLR (`PerGroup`). A `Geometry` knows directions, how much noise and curvature the posterior has in
each: `Diagonal`, `LowRank`, `Kronecker`, `Full`.
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
