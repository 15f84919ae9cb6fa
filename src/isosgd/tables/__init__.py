"""Tables of ``isosgd fit``: their columns, encoded as inputs of a network, and scaling."""

from isosgd.tables.scaling import Standardiser, standardise

__all__ = ["Standardiser", "standardise"]
