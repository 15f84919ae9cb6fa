"""Compiled code: functions that are compiled once it pays, and steps repeated in one compiled call or CUDA graph.

The CPU library for small matrix products is chosen here, too. torch uses oneDNN if it was built with it, which is slow
for small products on ARM: with torch 2.13 on a Neoverse N1 a linear layer of 128 x 13 by 50 x 13 took more than ten
times as long as with BLAS, and no layer was faster. The choice depends only on the machine, not on timings, which
would change the draws.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from isosgd.errors import first_line

# Compiling takes some ten seconds: hundreds of calls, or thousands where there are few products of rows and parameters,
# so that a call is mostly overhead.
COMPILE_AFTER = 500
FEW_PRODUCTS, PATIENCE = 1_000_000, 10
Tensors = tuple[Tensor, ...]
Found = tuple[Tensor, Tensor, Tensor]  # parameters, losses of the last step, sums of losses over all steps
Log = Callable[[str], None]
"""Writes a line to the log."""
WHAT = "the steps of all chains"
WARM_UPS = 3  # runs before a capture, in which libraries choose algorithms and load code
CACHE = 3 << 18  # bytes of the private cache of a core
SHARED = 6 << 20  # bytes of the next cache: fast enough for what a step reads once, and allows fewer calls
# Shapes are fixed and tensors are ours, so that compiled code need not check them at every call.
UNCHECKED: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
# torch caches compiled functions between processes, but loops only if told to.
LOOP: dict[str, Any] = {
    **UNCHECKED,
    "cpp_wrapper": True,
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "1"},
}


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method with its own code object, since torch refuses to compile the same code too often."""
    if not isinstance(function, MethodType):
        return function
    inner = function.__func__
    code = inner.__code__.replace()
    copy = FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    return MethodType(copy, function.__self__)


class Compiled:
    """A function that is compiled by `torch.compile` after a number of calls.

    If it cannot be compiled (there may be no compiler), it runs as it is, and ``unsupported_reason`` says why.

    Args:
        after: calls before it is compiled; None for never, 0 for at once.
        what: its name in the log.

    Attributes:
        products: of a call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        after: int | None,
        log: Log | None = None,
        what: str = "the gradient of all chains",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.after, self.log, self.what, self.options = function, after, log, what, options
        self.calls, self.products = 0, math.inf
        self.unsupported_reason = ""
        self._fast: Callable[..., Any] | None = None

    @property
    def is_due(self) -> bool:
        """Whether there were enough calls."""
        patience = PATIENCE if self.products < FEW_PRODUCTS else 1
        return self.after is not None and self.calls > patience * self.after

    def __call__(self, *args: Any) -> Any:
        """Call the function, compiled if it is time."""
        self.calls += 1
        if self.unsupported_reason or not self.is_due:
            return self.function(*args)
        try:
            return self._first(*args) if self._fast is None else self._fast(*args)
        except Exception as error:  # the compiler may raise anything, also in later calls
            self.unsupported_reason = first_line(error)
            return self.function(*args)

    def _first(self, *args: Any) -> Any:
        """Compile the function, and call it."""
        if self.log is not None:
            self.log(f"compiling {self.what}; the first time takes some seconds")
        options = None if self.options is None else dict(self.options)  # torch removes options that it has read
        fast = torch.compile(_own(self.function), fullgraph=True, dynamic=False, options=options)
        with warnings.catch_warnings():  # the compiler warns of its own internals
            warnings.simplefilter("ignore")
            value = fast(*args)
        self._fast = fast
        return value


def repeat(body: Callable[[int, Tensors], Tensors], count: Tensor, most: int, state: Tensors) -> Tensors:
    """Apply ``body(0, .)``, ``body(1, .)``, ... to a state; the loop is compiled as a loop."""
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
    """Bytes of memory of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def block(count: int, each: float, cache: int) -> int:
    """Number of chains, of ``count``, to step together, so that what they read at every step stays in the cache.

    Args:
        each: bytes that a chain reads and writes in a step.
    """
    return next(size for size in range(count, 0, -1) if count % size == 0 and (size * each <= cache or size == 1))


def _end_capture(generators: Sequence[torch.Generator], stream: torch.cuda.Stream) -> None:
    """Restore torch after a failed capture: it leaves generators unusable and stays on the capture's stream.

    A small successful capture with these generators and the default one restores them for earlier graphs.
    """
    torch.cuda.set_stream(stream)
    empty, one = torch.cuda.CUDAGraph(), torch.zeros(1, device=stream.device)
    for generator in generators:
        empty.register_generator_state(generator)
    with torch.cuda.graph(empty):
        one.add_(1.0)


class Captured:
    """A function without arguments as a CUDA graph.

    It is captured on the current stream unless that is the default one. Libraries have work space for each stream, so
    graphs that run side by side must be captured on different streams.

    Args:
        body: must not wait for the device; all that it reads and writes must keep its address.
        generators: random generators that it uses.
        keep: tensors that the runs before the capture must not change.
    """

    def __init__(self, body: Callable[[], None], generators: Sequence[torch.Generator], keep: Sequence[Tensor]) -> None:
        # every graph knows the default generator
        every = [*generators, torch.cuda.default_generators[torch.cuda.current_device()]]
        before, values = [generator.get_state() for generator in every], [x.detach().clone() for x in keep]
        place, self.graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        own = None if place == torch.cuda.default_stream() else place
        try:
            self._warm_up(body, own)
            for generator in generators:
                self.graph.register_generator_state(generator)
            try:
                with torch.cuda.graph(self.graph, stream=own):
                    body()
            except BaseException:
                with suppress(RuntimeError):  # the first of two errors has the reason
                    _end_capture(generators, place)
                raise
        finally:
            with torch.no_grad():
                for x, value in zip(keep, values, strict=True):
                    x.copy_(value)
            for generator, state in zip(every, before, strict=True):
                generator.set_state(state)

    def _warm_up(self, body: Callable[[], None], own: torch.cuda.Stream | None) -> None:
        stream = torch.cuda.Stream() if own is None else own  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self) -> None:
        """Replay the graph."""
        self.graph.replay()


IndexedStep = Callable[[int, Tensor, Tensors, Tensor, Tensors], tuple[Tensor, Tensor]]
"""Step k, from parameters, minibatches and innovations of all steps to new parameters and losses."""


class Looped:
    """Several steps of chains in one call: a compiled loop, which compiles as fast as a single step.

    Args:
        step: a single step.
        most: the most steps in a call.
        after: 0 to compile, None for not.
        between: bytes that a chain writes and reads again within a step.
    """

    def __init__(self, step: IndexedStep, most: int, after: int | None, log: Log | None, between: int) -> None:
        self.step, self.most, self.between = step, most, between
        self.loop = Compiled(self._loop, after, log, WHAT, LOOP)
        self._padded: tuple[Tensors, Tensor] | None = None

    @property
    def unsupported_reason(self) -> str:
        """Why the loop could not be compiled; empty if it could."""
        return self.loop.unsupported_reason

    def __call__(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        """The result of ``count`` steps."""
        number = torch.tensor(count)
        if self.loop.after is None or self.unsupported_reason:
            return self._loop(number, theta, batch, xi, tensors)
        if len(batch[0]) < self.most:  # compiled code has one shape
            batch, xi = self._pad(batch, xi)
        each = bytes_of((theta, *tensors, *(t[0] for t in batch))) / len(theta) + self.between
        size = block(len(theta), each, SHARED)
        found: list[Found] = []
        for a in range(0, len(theta), size):
            b = a + size
            own = tuple(t[a:b] for t in tensors)
            found.append(self.loop(number, theta[a:b], tuple(t[:, a:b] for t in batch), xi[:, a:b], own))
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
            # Views, so that the compiler does not take two transposes of a tensor for separate inputs.
            own = tuple(t.view(t.shape) for t in tensors)
            theta, loss = self.step(k, theta, batch, xi, own)
            return theta, loss, total + loss

        theta, loss, total = repeat(body, count, self.most, (theta, zero, zero.clone()))
        return theta, loss, total


class GraphLoop:
    """Several steps of chains on a GPU: a full call is one CUDA graph, a shorter one takes single steps.

    The arguments are those of `Looped`.
    """

    def __init__(self, step: IndexedStep, most: int, after: int | None, log: Log | None) -> None:
        self.step, self.most, self.compiled = step, most, after is not None
        self.single = Compiled(self._single, after, log, WHAT)
        self.unsupported_reason = ""
        self.graph: Captured | None = None
        self.inputs: list[Tensor] = []
        self.outputs: Found | None = None

    def _single(self, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        return self.step(0, theta, batch, xi, tensors)

    def _one_by_one(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        loss = total = torch.zeros_like(theta[:, 0])
        lead = len(xi) - len(batch[0]) + 1
        for k in range(count):
            part = tuple(t[k : k + 1] for t in batch)
            theta, loss = self.single(theta, part, xi[k : k + lead], tensors)
            total = total + loss
        return theta, loss, total

    def __call__(self, count: int, theta: Tensor, batch: Tensors, xi: Tensor, tensors: Tensors) -> Found:
        """The result of ``count`` steps."""
        if not self.compiled or self.unsupported_reason or count < self.most:
            return self._one_by_one(count, theta, batch, xi, tensors)
        given = [theta, *batch, xi, *tensors]
        if self.graph is None:
            try:
                self._capture(given, len(batch))
            except Exception as error:  # a capture may raise anything
                self.unsupported_reason = first_line(error)
                return self._one_by_one(count, theta, batch, xi, tensors)
        assert self.graph is not None and self.outputs is not None
        torch._foreach_copy_(self.inputs, given)
        self.graph()
        theta, loss, total = self.outputs
        return theta.clone(), loss.clone(), total.clone()

    def _capture(self, given: list[Tensor], parts: int) -> None:
        self.inputs = [t.clone() for t in given]
        theta, *rest = self.inputs
        args = self.most, theta, tuple(rest[:parts]), rest[parts], tuple(rest[parts + 1 :])

        def body() -> None:
            self.outputs = self._one_by_one(*args)

        self.graph = Captured(body, [], [])


@contextmanager
def fastest_products(device: torch.device) -> Iterator[None]:
    """Context in which matrix products on the CPU use the faster library."""
    before = bool(torch.backends.mkldnn.enabled)
    if not (before and device.type == "cpu" and _onednn_is_slow()):
        yield
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


def _onednn_is_slow() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")
