"""Functions that are compiled once they have been called so often that it pays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

COMPILE_AFTER = 500  # calls: compiling takes about as long as a few thousand do


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own: the compiler gives up on code that was compiled for too many runs."""
    if not isinstance(function, MethodType):
        return function
    inner = function.__func__
    code = inner.__code__.replace()
    copy = FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    return MethodType(copy, function.__self__)


class Compiled:
    """A function that is compiled by `torch.compile` after a number of calls, and says so.

    What cannot be compiled (there may be no compiler on the machine) goes on as it is; ``why_not`` says why.

    Args:
        function: of tensors.
        after: calls before it is compiled; None for never, 0 for at once.
        say: takes a line for the user.
        what: is compiled, in words.
        options: of the compiler.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        after: int | None,
        say: Callable[[str], None] | None = None,
        what: str = "the gradient of all chains",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.after, self.say, self.what, self.options = function, after, say, what, options
        self.calls = 0
        self.why_not = ""
        self._fast: Callable[..., Any] | None = None
        self._ready = False

    def __call__(self, *args: Any) -> Any:
        """The function's value."""
        self.calls += 1
        if self.after is None or self.why_not or self.calls <= self.after:
            return self.function(*args)
        try:
            return self._fast(*args) if self._fast is not None and self._ready else self._first(*args)
        except Exception as error:  # whatever the compiler may raise; it may also be called upon later
            self.why_not = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            return self.function(*args)

    def _first(self, *args: Any) -> Any:
        """Compile it, and call it for the first time."""
        if self.say is not None:
            self.say(f"compiling {self.what}; the first time takes some seconds")
        options = None if self.options is None else dict(self.options)  # torch takes out what it has read
        self._fast = torch.compile(_own(self.function), fullgraph=True, dynamic=False, options=options)
        with warnings.catch_warnings():  # the compiler's own, of its innards
            warnings.simplefilter("ignore")
            value = self._fast(*args)
        self._ready = True
        return value
