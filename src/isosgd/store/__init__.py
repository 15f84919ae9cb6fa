"""Stored runs: draws, checkpoints, and the manifest that lists their files."""

from isosgd.store.draws import Shards, StoredDraws, StoredState, rectangle
from isosgd.store.files import DamagedError, StoreError
from isosgd.store.manifest import Manifest
from isosgd.store.writer import Writer

__all__ = ["DamagedError", "Manifest", "Shards", "StoreError", "StoredDraws", "StoredState", "Writer", "rectangle"]
