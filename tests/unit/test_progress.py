"""What a run says while it goes on: a line on a terminal, and elsewhere a log."""

import io
import itertools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Posterior, Target, priors, sample
from isosgd.progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # warm-ups are short here

LINE = re.compile(r"(\d+)%  ([\d,]+) steps, ([\d,]+)/s, (\d+):(\d\d) left")
LOGGED = re.compile(r"isosgd: (.*), ([\d,]+) of ([\d,]+) steps \((\d+)%\), ([\d,]+)/s, (\d+):(\d\d) left")


class Clock:
    """Stands still but where the log likelihood is computed: runs of minutes take no time."""

    def __init__(self) -> None:
        self.now, self.call = 0.0, 0.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """Standard error, and when it was written to."""

    def __init__(self, clock: Clock, terminal: bool) -> None:
        super().__init__()
        self.clock, self.terminal = clock, terminal
        self.times: list[float] = []

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.times.append(self.clock.now)
        return super().write(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


@pytest.fixture
def said(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Stream]]:
    """Standard error, a terminal or none, and no handlers of logs, of which pytest has some."""

    def stream(terminal: bool) -> Stream:
        found = Stream(clock, terminal)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(sys, "stderr", found)
        return found

    yield stream


def run(clock: Clock, seconds: float, stop: float = float("inf"), **settings: Any) -> Posterior:
    """A run whose log likelihood takes so many seconds, and which the user stops after so many."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        clock.now += seconds
        if clock.now > stop:
            raise KeyboardInterrupt
        return -0.5 * (batch[0] - params["mu"]).square()

    target = Target(log_likelihood, priors.Normal(10.0), init={"mu": 0.0})
    rates = {} if settings.get("method") else {"method": "sgld", "lr": 1e-3, "warmup": 0}
    given = {**rates, "draws": 20, "keep_every": 5, "compile": False, **settings}
    return sample(target, (torch.arange(20.0),), **given)


def seconds_in(minutes: str, seconds: str) -> int:
    return 60 * int(minutes) + int(seconds)


def test_the_line_shows_stage_share_speed_and_time_left(clock: Clock, said: Callable[[bool], Stream]) -> None:
    stream = said(True)
    run(clock, 0.5)
    text = stream.getvalue()
    lines = [part for part in text.split("\r\x1b[K") if part]
    assert len(lines) == 100 and all(line.startswith("sampling ") for line in lines) and text.endswith("\r\x1b[K")
    for steps, line in enumerate(lines, 1):
        found = LINE.search(line)
        assert found and int(found[1]) == steps and int(found[2]) == steps  # of a hundred
        assert line.count("█") == steps // 5 and line.count("█") + line.count("░") == 20
    (share, _, speed, *left) = LINE.search(lines[24]).groups()  # type: ignore[union-attr]
    spent = stream.times[24] - stream.times[0]
    assert int(speed) == round(24 / spent) and share == "25"
    assert seconds_in(*left) == pytest.approx(75 * spent / 24, abs=0.1 * 75 * spent / 24)


def test_a_line_is_drawn_five_times_a_second_at_most(clock: Clock, said: Callable[[bool], Stream]) -> None:
    stream = said(True)
    run(clock, 0.01)
    drawn = [now for now, part in zip(stream.times, stream.getvalue().split("\r\x1b[K")[1:], strict=False) if part]
    assert 2 <= len(drawn) < 20 and all(b - a > 0.2 for a, b in itertools.pairwise(drawn))


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_silent_when_told_so(clock: Clock, said: Callable[[bool], Stream], terminal: bool) -> None:
    stream = said(terminal)
    run(clock, 10.0, progress=False)
    assert stream.getvalue() == ""


def test_without_a_terminal_stages_are_logged_and_a_line_every_half_minute(
    clock: Clock, said: Callable[[bool], Stream]
) -> None:
    stream = said(False)
    run(clock, 0.5, method="isgd", warmup=200, structure="layer", draws=40)
    *lines, last = stream.getvalue().splitlines()
    found = [LOGGED.search(line) for line in lines]
    assert all(found), lines
    stages = [match[1] for match in found if match]
    kinds = [re.sub(r" of \d+$", "", stage) for stage, _ in itertools.groupby(stages)]
    kinds = [kind for kind, _ in itertools.groupby(kinds)]
    assert kinds == ["starting", "initial optimisation", "measuring noise", "warm-up window", "sampling"]
    pairs = zip(itertools.pairwise(stages), itertools.pairwise(stream.times), strict=False)
    for (one, other), (before, now) in pairs:
        assert now - before >= (30.0 if one == other else 1.0)
        assert now - before < 35.0
    for match in found:
        assert match and 0 < int(match[2].replace(",", "")) <= int(match[3].replace(",", ""))
    steps = int(re.search(r"done, (\d+) steps in \d+:\d\d$", last)[1])  # type: ignore[index]
    assert steps == 200 + 40 * 5


def test_a_run_that_is_stopped_is_not_called_done(clock: Clock, said: Callable[[bool], Stream]) -> None:
    stream = said(False)
    with pytest.raises(KeyboardInterrupt):
        run(clock, 1.0, stop=50.0)
    assert re.search(r"isosgd: stopped, \d+ steps in 0:\d\d\n$", stream.getvalue())


def test_whoever_configures_logging_decides(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(clock, False)
    monkeypatch.setattr(sys, "stderr", stream)
    for level, logged in ((logging.WARNING, False), (logging.INFO, True)):
        caplog.set_level(level, "isosgd")
        run(clock, 1.0)
        assert any("sampling" in message for message in caplog.messages) is logged and not stream.getvalue()


def test_the_time_left_is_that_of_the_stage(clock: Clock) -> None:
    """Compiled steps are far faster than those of the warm-up, whose speed says nothing about them."""
    progress = Progress(11_000, stream=Stream(clock, terminal=True), label="trial: ")
    for stage, steps in (("warm-up", 100), ("warm-up", 900), ("sampling", 1), ("sampling", 1_999)):
        clock.now += 10.0
        progress.advance(stage, steps)
    line = progress.line("trial: sampling", clock.now)
    assert line.startswith("trial: sampling") and "3,000 steps, 200/s, 0:40 left" in line
