"""What can go wrong while sampling, as types a caller can catch."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SamplingWarning(UserWarning):
    """The draws may be off; the message says by how much, why, and what would help."""


_PACKAGE = str(Path(__file__).parent)


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message, for a sentence."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:500]}".removesuffix(": ")


def warn_caller(message: str) -> None:
    """A `SamplingWarning` at the line that called the library, however deep in it the warning is issued."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, SamplingWarning, stacklevel=level)


def nearest(given: object, known: Iterable[str]) -> str:
    """The known name that a wrong one is close to, as the end of a message; empty where there is none.

    Example:
        >>> nearest("I-SGD", ["isgd", "sgld"]), nearest("cat", ["categorical"]), nearest("nuts", ["isgd"])
        ("; did you mean 'isgd'?", "; did you mean 'categorical'?", '')
    """
    text, names = str(given).strip().lower(), {name.lower(): name for name in known}
    close = [name for name in names if text and name.startswith(text)] or get_close_matches(text, names, 1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def listed(words: Iterable[str], most: int = 6) -> str:
    """Words in a sentence, at most ``most`` of them.

    Example:
        >>> listed("abcd", most=2)
        'a, b and 2 more'
    """
    every = list(words)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def check_integer(name: str, value: object, least: int, more: str = "") -> None:
    """Raise unless the value is an integer of at least ``least``; ``more`` continues the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {value!r} must be an integer of at least {least}{more}")


def check_positive(what: str, value: object) -> float:
    """The value as a float, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, Real):  # those of numpy, too
        raise TypeError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what} must be positive and finite, got {value!r}")
    return number


class DivergedError(RuntimeError):
    """A chain met a loss or a gradient that is not finite and was stopped.

    Nothing is lost: the state before the bad step is kept.

    Attributes:
        step: gradient evaluations made before the bad one.
        group: layer whose gradient was not finite, or None when it was the loss.
        state: natural parameters before the bad step.
        draws: draws kept so far, a dict of tensors ``[draws, *shape]`` (empty during warm-up).
        gradients: of all chains of the run, where all of them have diverged.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        group: str | None,
        state: Mapping[str, Tensor],
        draws: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.group = group
        self.state = dict(state)
        self.draws = dict(draws or {})
        self.gradients = step


class OutOfTimeError(DivergedError):
    """A chain was stopped by ``max_seconds`` before its warm-up had measured what the first draw needs."""


class RankError(RuntimeError):
    """Something went wrong on another rank, or it does not answer.

    Attributes:
        rank: its number.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankValueError(RankError, ValueError):
    """Another rank was given something that cannot be right."""
