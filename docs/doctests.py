"""For the API reference: examples of docstrings are shown as code, which griffe does under `Examples:` alone."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Read `Example:` like `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
