"""When to write: not too often for what it costs, and not while another process does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isosgd.store.errors import StoreError

MOST_WAIT = 60.0  # seconds between two writes
WAIT_SHARE = 0.02  # of the time of the run so far, so that a long run does not end up in countless shards
COST_SHARE = 0.03  # of the time, for writes that can wait
LOCK_WAIT = 5.0  # seconds: workers of a data loader hold the lock a little longer than the process that was killed


class Waiting:
    """Decides when the next write of a kind is due: not too often for what it costs.

    Args:
        least: seconds to wait, at the least; 0 for a write whenever there is something to write.
    """

    def __init__(self, least: float) -> None:
        self.least, self.started = least, time.monotonic()
        self.last, self.cost = self.started, 0.0

    def due(self) -> bool:
        """Whether it is time."""
        now = time.monotonic()
        wait = min(max(self.least, WAIT_SHARE * (now - self.started)), MOST_WAIT)
        return not self.least or now - self.last >= max(wait, self.cost / COST_SHARE)

    def sent(self) -> None:
        """A write is being made; what it costs is known later."""
        self.last = time.monotonic()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a write, wherever it is made: how long it takes is what it costs."""
        began = time.monotonic()
        yield
        self.cost = time.monotonic() - began


def lock(folder: Path) -> int | None:
    """Hold the folder against other writers until this one is closed or its process ends."""
    try:
        import fcntl
    except ImportError:  # Windows: there the user has to take care
        return None
    handle, end = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError as error:
            if time.monotonic() > end:
                os.close(handle)
                raise StoreError(f"{folder} is being written by another process: let it end, or end it") from error
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return handle
