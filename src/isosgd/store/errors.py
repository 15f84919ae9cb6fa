"""What can be wrong with a store."""

from __future__ import annotations


class StoreError(ValueError):
    """A store, or a part of it, cannot be read: it is damaged, of another format, or not a store at all."""


class DamagedError(StoreError):
    """A file of a store is not what was written.

    Attributes:
        file: its name in the folder of the run.
    """

    def __init__(self, file: str, what: str) -> None:
        super().__init__(f"{file} is damaged: {what}")
        self.file = file
