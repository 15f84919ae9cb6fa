"""Named parameters: their type, and how names match patterns.

*Natural* parameters are those of users. *Free* parameters, which samplers move, have the same names, but hold the
logarithm of positive ones.
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
"""Dtypes whose rounding would lose most steps."""

T = TypeVar("T")


def match(name: str, patterns: Iterable[str]) -> str | None:
    """The pattern that matches a name: the name itself if present, else the first matching shell pattern.

    Example:
        >>> match("fc1.bias", ["*.weight", "fc1.*", "fc1.bias"]), match("w", ["b*"])
        ('fc1.bias', None)
    """
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def lookup(name: str, table: Mapping[str, T], what: str) -> T:
    """Entry of a table of names or patterns for a name; a ``ValueError`` if none matches."""
    if name in table:  # at every step, once names are resolved
        return table[name]
    pattern = match(name, table)
    if pattern is None:
        raise ValueError(
            f"{what} has no entry for parameter {name!r} (it has {list(table)}); add one, or a '*' for the rest"
        )
    return table[pattern]
