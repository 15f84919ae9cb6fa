"""A step, repeated: in a loop of compiled code, or as a CUDA graph. Functions of tensors, whose shapes stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from isosgd.engine.compiled import Compiled

Tensors = tuple[Tensor, ...]
Found = tuple[Tensor, Tensor, Tensor]  # parameters, losses of the last step, and sums of losses over all
WHAT = "the steps of all chains"
CACHE = 3 << 18  # bytes, of a core's own ...
SHARED = 6 << 20  # ... and of the next one: fast enough for what a step reads once, and fewer calls are made
# Shapes are fixed and tensors are ours, so that nothing has to be checked at every call.
UNCHECKED: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
# A loop is kept in the compiler's cache, from one process to the next, like all that it holds: torch does so with other
# functions of functions, but asks to be told for this one.
LOOP: dict[str, Any] = {
    **UNCHECKED,
    "cpp_wrapper": True,
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "1"},
}


def repeat(body: Callable[[int, Tensors], Tensors], count: Tensor, most: int, state: Tensors) -> Tensors:
    """What ``body(0, .)``, ``body(1, .)``, ... make of a state: a loop, inside of the code where it is compiled.

    Args:
        body: one step; takes its number.
        count: of steps, a tensor.
        most: steps at most.
        state: tensors, whose shapes stay.
    """
    if not torch.compiler.is_compiling():
        for k in range(int(count)):
            state = body(k, state)
        return state

    def goes_on(i: Tensor, *state: Tensor) -> Tensor:
        return i < count

    def once(i: Tensor, *state: Tensor) -> Tensors:
        k = i.item()
        torch._check(k >= 0)  # type: ignore[no-untyped-call]
        torch._check(k < most)  # type: ignore[no-untyped-call]
        return i + 1, *body(k, state)  # type: ignore[arg-type]

    found = while_loop(goes_on, once, (torch.zeros((), dtype=torch.int64), *state))  # type: ignore[no-untyped-call]
    return tuple(found[1:])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """That they take."""
    return sum(t.numel() * t.element_size() for t in tensors)


def block(count: int, each: float, cache: int) -> int:
    """Chains that take their steps one after the other, so that what they read every time stays in the cache.

    Args:
        count: of all chains.
        each: bytes that a chain reads and writes in a step.
        cache: its size in bytes.
    """
    return next(size for size in range(count, 0, -1) if count % size == 0 and (size * each <= cache or size == 1))


class Kth(Protocol):
    """Step k: from parameters, and from minibatches and innovations of all steps, to new parameters and losses."""

    def __call__(
        self, k: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors, /
    ) -> tuple[Tensor, Tensor]: ...


class Repeated:
    """Calls a step so many times.

    Args:
        step: what is repeated.
        most: how often at most.
        after: None for not compiled, 0 for compiled.
        say: takes a line for the user.
    """

    def __init__(self, step: Kth, most: int, after: int | None, say: Callable[[str], None] | None = None) -> None:
        self.step, self.most, self.compiled = step, most, after is not None
        self.why_not = ""

    def __call__(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        """What ``count`` steps lead to."""
        return self.plain(count, theta, batch, xi, tensors)

    def plain(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        """The same, step by step."""
        loss = total = torch.zeros_like(theta[:, 0])
        for k in range(count):
            theta, loss = self.step(k, theta, batch, xi, tensors)
            total = total + loss
        return theta, loss, total


class Looped(Repeated):
    """The loop is in the compiled code, so that it is compiled as fast as a single step, and called as one.

    Args:
        step: what is repeated.
        most: how often at most.
        after: None for not compiled, 0 for compiled.
        say: takes a line for the user.
        beside: bytes that a chain writes and reads again within a step.
    """

    def __init__(
        self, step: Kth, most: int, after: int | None, say: Callable[[str], None] | None = None, beside: int = 0
    ) -> None:
        super().__init__(step, most, after, say)
        self.beside = beside
        self.loop = Compiled(self._loop, after, say, WHAT, LOOP)
        self._padded: tuple[Tensors, Tensor] | None = None

    def __call__(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        if not self.compiled or self.why_not:
            return self.plain(count, theta, batch, xi, tensors)
        if len(batch[0]) < self.most:  # the compiled code knows one shape
            batch, xi = self._pad(batch, xi)
        each = bytes_of((theta, *tensors, *(t[0] for t in batch))) / len(theta) + self.beside
        number, size = torch.tensor(count), block(len(theta), each, SHARED)
        found: list[Found] = []
        for a in range(0, len(theta), size):
            b = a + size
            own = tuple(t[a:b] for t in tensors)
            found.append(self.loop(number, theta[a:b], tuple(t[:, a:b] for t in batch), xi[:, a:b], own))
        self.why_not = self.loop.why_not
        theta, loss, total = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
        return theta, loss, total

    def _pad(self, batch: Tensors, xi: Tensor) -> tuple[Tensors, Tensor]:
        steps = len(batch[0])
        if self._padded is None:
            every = tuple(t.new_zeros((self.most, *t.shape[1:])) for t in batch)
            self._padded = every, xi.new_zeros((self.most + len(xi) - steps, *xi.shape[1:]))
        every, wide = self._padded
        for into, t in zip((*every, wide), (*batch, xi), strict=True):
            into[: len(t)].copy_(t)
        return every, wide

    def _loop(self, count: Tensor, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        zero = torch.zeros_like(theta[:, 0])

        def body(k: int, state: Tensors) -> Tensors:
            theta, _, total = state
            # Views, lest the compiler take two transposes of one of them for tensors of their own, from outside.
            own = tuple(t.view(t.shape) for t in tensors)
            theta, loss = self.step(k, theta, batch, xi, own)
            return theta, loss, total + loss

        theta, loss, total = repeat(body, count, self.most, (theta, zero, zero.clone()))
        return theta, loss, total


class Captured(Repeated):
    """Full calls are one CUDA graph: no work of the host between its steps. Shorter ones go step by step."""

    def __init__(self, step: Kth, most: int, after: int | None, say: Callable[[str], None] | None = None) -> None:
        super().__init__(step, most, after, say)
        self.single = Compiled(self._single, after, say, WHAT)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.outputs: Found | None = None

    def _single(self, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        return self.step(0, theta, batch, xi, tensors)

    def plain(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        loss = total = torch.zeros_like(theta[:, 0])
        ahead = len(xi) - len(batch[0]) + 1
        for k in range(count):
            part = tuple(t[k : k + 1] for t in batch)
            theta, loss = self.single(theta, part, xi[k : k + ahead], tensors)
            total = total + loss
        return theta, loss, total

    def __call__(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        if not self.compiled or self.why_not or count < self.most:
            return self.plain(count, theta, batch, xi, tensors)
        given = [theta, *batch, xi, *tensors]
        if self.graph is None:
            try:
                self._capture(given, len(batch))
            except Exception as error:  # whatever a capture may raise
                self.why_not = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
                return self.plain(count, theta, batch, xi, tensors)
        assert self.graph is not None and self.outputs is not None
        torch._foreach_copy_(self.inputs, given)
        self.graph.replay()
        theta, loss, total = self.outputs
        return theta.clone(), loss.clone(), total.clone()

    def _capture(self, given: list[Tensor], parts: int) -> None:
        self.inputs = [t.clone() for t in given]
        theta, *rest = self.inputs
        args = self.most, theta, tuple(rest[:parts]), rest[parts], tuple(rest[parts + 1 :])
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.plain(*args)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = self.plain(*args)
        self.graph = graph
