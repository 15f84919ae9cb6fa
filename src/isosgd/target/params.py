"""Named parameters: the type, and the rules by which a name finds its pattern and its positive values.

*Natural* parameters are what users see. *Free* parameters are what samplers move: the same names, but a positive
parameter is held as its logarithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Parameters by name."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes in which nothing is sampled: steps would be lost to rounding."""

T = TypeVar("T")


def match(name: str, patterns: Iterable[str]) -> str | None:
    """The pattern that matches a name: the name itself if it is there, else the first shell pattern that fits.

    Example:
        >>> match("fc1.bias", ["*.weight", "fc1.*", "fc1.bias"]), match("w", ["b*"])
        ('fc1.bias', None)
    """
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def lookup(name: str, table: Mapping[str, T], what: str) -> T:
    """Entry of a table of names or patterns for one name; a ``ValueError`` when nothing fits."""
    if name in table:  # the fast path, taken at every step once names are resolved
        return table[name]
    pattern = match(name, table)
    if pattern is None:
        raise ValueError(
            f"{what} has no entry for parameter {name!r} (it has {list(table)}); add one, or a '*' for the rest"
        )
    return table[pattern]
