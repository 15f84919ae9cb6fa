"""What Lambda, the constant composite noise of I-SGD, looks like: how large it must be, and how Lambda - B is injected.

Theorem 1 allows any constant ``Lambda >= B``. A `Structure` is one number for each group of parameters (`Layer`, the
paper's; `Single`, its SLR). A `Geometry` knows directions, how much noise and curvature the posterior has in each:
`Diagonal`, `LowRank`, `Kronecker`, `Full`.
"""

from isosgd.geometry.base import Geometry
from isosgd.geometry.choice import STRUCTURES, StructureName, choose, make_structure
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.kronecker import Kronecker
from isosgd.geometry.layer import Correction, Layer, Single, Structure
from isosgd.geometry.lowrank import LowRank
from isosgd.geometry.rule import Rule

__all__ = [
    "STRUCTURES",
    "Correction",
    "Diagonal",
    "Full",
    "Geometry",
    "Kronecker",
    "Layer",
    "LowRank",
    "Rule",
    "Single",
    "Structure",
    "StructureName",
    "choose",
    "make_structure",
]
