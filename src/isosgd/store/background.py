"""Work that a thread does, in the order in which it was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Does jobs one after the other in a thread. Once one has failed, those that follow are not done.

    Args:
        most: bytes that jobs may hold while they wait; a single one may hold more, but then waits for no other.

    Example:
        >>> done = []
        >>> background = Background(100)
        >>> for number in range(3):
        ...     background.make_room(80)
        ...     background.give(lambda number=number: done.append(number), 80)
        >>> background.wait()
        >>> done
        [0, 1, 2]
        >>> background.close()
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._pool: ThreadPoolExecutor | None = None
        self._given: deque[tuple[Future[None], int]] = deque()
        self._failed = False

    def make_room(self, size: int) -> None:
        """Wait until there is room for a job that holds so many bytes. What went wrong with earlier ones is raised."""
        while self._given and (self._given[0][0].done() or sum(held for _, held in self._given) + size > self.most):
            self._first_done()

    def give(self, job: Callable[[], None], size: int) -> None:
        """Have a job done that holds so many bytes until then."""
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="isosgd-store")
        self._given.append((self._pool.submit(self._do, job), size))

    def wait(self) -> None:
        """Wait for all of them; what went wrong is raised here."""
        while self._given:
            self._first_done()

    def close(self) -> None:
        """Let the thread end when all is done."""
        if self._pool is not None:
            self._pool.shutdown()

    def _first_done(self) -> None:
        self._given[0][0].result()  # one that failed stays, so that it is raised again
        self._given.popleft()

    def _do(self, job: Callable[[], None]) -> None:
        if not self._failed:
            try:
                job()
            except BaseException:
                self._failed = True
                raise
