"""A progress line with the time left, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TextIO


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


class Progress:
    """``Progress(total)`` with ``advance(stage)``; redraws at most five times a second.

    Args:
        total: steps expected in all; may be corrected as more is known.
        show: False for silence; it is also silent when the stream is not a terminal.
        stream: where to write, standard error by default.
    """

    def __init__(self, total: int, show: bool = True, stream: TextIO | None = None) -> None:
        self.total, self.done = max(total, 1), 0
        self.stream = stream or sys.stderr
        self.show = show and self.stream.isatty()
        self.started = self._drawn = time.monotonic()

    def advance(self, stage: str, steps: int = 1) -> None:
        """Count ``steps`` more and redraw if it is time."""
        self.done += steps
        if self.show and time.monotonic() - self._drawn > 0.2:
            self._drawn = time.monotonic()
            self.stream.write("\r\x1b[K" + self.line(stage))
            self.stream.flush()

    def note(self, text: str) -> None:
        """Leave a line of text above the progress line."""
        if self.show:
            self.stream.write(f"\r\x1b[K{text}\n")
            self.stream.flush()

    def line(self, stage: str) -> str:
        """The line as it would be drawn now."""
        share = min(self.done / self.total, 1.0)
        spent = time.monotonic() - self.started
        left = spent / share - spent if share > 0 else 0.0
        bar = "█" * int(20 * share) + "░" * (20 - int(20 * share))
        speed = self.done / spent if spent > 0 else 0.0
        return f"{stage:<18} {bar} {100 * share:3.0f}%  {self.done:,} steps, {speed:,.0f}/s, {clock(left)} left"

    def close(self) -> None:
        """Wipe the line."""
        if self.show:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
