"""Progress of a run and the time left: a line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

LOGGER = logging.getLogger("isosgd")
LOG_EVERY = 30.0  # seconds between log lines of one stage
LEAST_STAGE = 1.0  # seconds that a stage must last for a log line of its own


def clock(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``.

    Example:
        >>> clock(75), clock(3700)
        ('1:15', '1:01:40')
    """
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def tell(text: str, show: bool = True, stream: TextIO | None = None) -> None:
    """A line about a run: to the logger ``isosgd``, or to the stream if `logging` is not configured and ``show``."""
    if LOGGER.hasHandlers():
        LOGGER.info(text)
    elif show and LOGGER.level <= logging.INFO:  # logging is not configured, not even a level
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(asctime)s isosgd: %(message)s", "%H:%M:%S"))
        handler.handle(LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, text, (), None))


class Progress:
    """``Progress(total)`` with ``advance(stage)``.

    A terminal shows one line, redrawn at most five times a second. Elsewhere (a job, a notebook, a pipe) lines go to
    the logger ``isosgd``: one for each stage that lasts a second, and one every 30 seconds. If `logging` is configured,
    that decides where they go; otherwise they are written to the stream.

    Args:
        total: steps expected in all; may be corrected as more is known.
        show: False for silence.
        stream: where to write, standard error by default.
        beat: called at every step, whether anything is shown or not.
        label: what all stages begin with, such as ``"trial at T = 0.03: "``.
    """

    def __init__(
        self,
        total: int,
        show: bool = True,
        stream: TextIO | None = None,
        beat: Callable[[], None] | None = None,
        label: str = "",
    ) -> None:
        self.total, self.done, self.beat = max(total, 1), 0, beat
        self.stream = stream or sys.stderr
        self.terminal = show and self.stream.isatty()
        self.logs = show and not self.terminal
        self.started = self._drawn = time.monotonic()
        self.label = label
        self._stage = ""  # of the last log line
        self._skipped = 0
        self._now, self._since = "", (self.started, 0)  # the stage, and when and after how many steps it began

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close("done" if kind is None else "stopped")

    def skip(self, steps: int) -> None:
        """Count steps of an earlier session, which are left out of the speed."""
        self.done += steps
        self._skipped += steps

    def advance(self, stage: str, steps: int = 1) -> None:
        """Count ``steps`` more, and show it if it is time."""
        self.done += steps
        if self.beat is not None:
            self.beat()
        if not (self.terminal or self.logs):
            return
        now = time.monotonic()
        stage = self.label + stage
        if stage != self._now:
            self._now, self._since = stage, (now, self.done)
        if self.terminal and now - self._drawn > 0.2:
            self._drawn = now
            self.stream.write("\r\x1b[K" + self.line(stage, now))
            self.stream.flush()
        elif self.logs and now - self._drawn >= (LEAST_STAGE if stage != self._stage else LOG_EVERY):
            self._drawn, self._stage = now, stage
            share, speed, left = self._estimates(now)
            self._log(
                f"{stage}, {self.done:,} of {max(self.total, self.done):,} steps ({100 * share:.0f}%), {speed:,.0f}/s, "
                f"{clock(left)} left"
            )

    def note(self, text: str) -> None:
        """Leave a line of text above the progress line, or in the log."""
        if self.terminal:
            self.stream.write(f"\r\x1b[K{text}\n")
            self.stream.flush()
        elif self.logs:
            self._log(text)

    def line(self, stage: str, now: float | None = None) -> str:
        """The line as it would be drawn now."""
        share, speed, left = self._estimates(time.monotonic() if now is None else now)
        bar = "█" * int(20 * share) + "░" * (20 - int(20 * share))
        return f"{stage:<20} {bar} {100 * share:3.0f}%  {self.done:,} steps, {speed:,.0f}/s, {clock(left)} left"

    def close(self, word: str = "done") -> None:
        """Clear the line; or log how the run ended, if anything was logged before."""
        if self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        elif self._stage:
            self._log(f"{self.label}{word}, {self.done:,} steps in {clock(time.monotonic() - self.started)}")

    def _estimates(self, now: float) -> tuple[float, float, float]:
        """Share of the steps that are done, steps per second (of a stage that has lasted a second), seconds left."""
        began, before = self._since
        spent, steps = now - began, self.done - before
        if spent < LEAST_STAGE or not steps:
            spent, steps = now - self.started, self.done - self._skipped
        speed = steps / spent if spent > 0 else 0.0
        left = max(self.total - self.done, 0) / speed if speed > 0 else 0.0
        return min(self.done / self.total, 1.0), speed, left

    def _log(self, text: str) -> None:
        tell(text, stream=self.stream)
