"""Runs on the disk: draws, checkpoints, and a manifest that says what is there."""

from isosgd.store.draws import Shards, StoredDraws, StoredState, rectangle
from isosgd.store.files import DamagedError, StoreError
from isosgd.store.manifest import Manifest
from isosgd.store.writer import Writer

__all__ = ["DamagedError", "Manifest", "Shards", "StoreError", "StoredDraws", "StoredState", "Writer", "rectangle"]
