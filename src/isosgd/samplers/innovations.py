"""The innovations of a step: independent random numbers of mean zero and one variance.

On an accelerator, and for small tensors, they are normal. On a CPU, drawing a million normals takes fifteen times as
long as the update, so large CPU tensors get sums of eight random signs instead, from counting the bits of a byte: a
binomial variable with the mean, variance and odd moments of a normal, and a fourth moment of 2.75 instead of 3. Schemes
of weak order one, such as our steppers, keep their order (Kloeden and Platen 1992, section 14.1): means, covariances
and the order of the discretisation bias are unchanged. A chain sums many steps before it has moved by a standard
deviation, so its fourth moment is off by 0.25 rate h only, less than 0.01.

Both kinds depend on the `torch.Generator` alone, so saving the generator saves the stream. Kernels on a GPU draw
normals from a key and a counter (Philox), so that these never pass through memory.

References:
    Salmon, Moraes, Dror, Shaw (2011), Parallel random numbers: as easy as 1, 2, 3.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Innovations = Literal["auto", "normal", "bits"]
BITS_FROM = 1 << 14  # elements; below it normals cost less than the rest of the step
CHUNK = 1024  # values of one program of a kernel: four for each count
UNIT = 0.5**0.5  # the sum of eight bits has variance two


def make_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator, checked; by default a new one, seeded from torch's."""
    if generator is None:
        generator = torch.Generator(device=device).manual_seed(int(torch.randint(2**62, ())))
    if generator.device.type != device.type:
        raise ValueError(f"the generator lives on {generator.device}, the parameters on {device}; make it there")
    return generator


def as_bits(kind: Innovations, size: int, device: torch.device) -> bool:
    """Whether ``size`` innovations are counted bits rather than normal numbers."""
    return device.type == "cpu" and (kind == "bits" or (kind == "auto" and size >= BITS_FROM))


class Source:
    """Innovations for a flat float tensor ``out``; ``auto`` takes bits where they are faster.

    Counted bits can be prefetched by a thread while the next gradient is computed. If ``averaged``, each innovation
    is the mean of a new one and that of the last `fill`. If ``out`` is a shard of a longer vector, ``draw`` fills it
    with normal numbers.

    Example:
        >>> source = Source(torch.empty(1 << 16), torch.Generator().manual_seed(0))
        >>> round(float(source.fill().var()), 1)
        1.0
    """

    def __init__(
        self,
        out: Tensor,
        generator: torch.Generator,
        kind: Innovations = "auto",
        averaged: bool = False,
        draw: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.out, self.generator, self.averaged = out, generator, averaged
        self.bits = draw is None and as_bits(kind, out.numel(), out.device)
        self._draws_shard = draw
        self.prefetched: Future[None] | None = None
        self._before = generator.get_state()
        self._last: Tensor | None = None  # normal numbers; bits are averaged as bytes, which is cheaper
        self._counts: NDArray[np.int8] | None = None
        self._counts_before: NDArray[np.int8] | None = None
        self.prepare()

    def prepare(self, scale: Tensor | None = None, finish: Callable[[], None] | None = None) -> None:
        """Set the scale of the innovations, and drop prefetched ones.

        ``finish`` is called after scaling, perhaps in another thread, and may change ``out``.
        """
        self.drop_prefetched()
        self._scale, self._finish = scale, finish
        if self.bits:
            kind = self.out.numpy().dtype.type
            self._factor: Any = kind(UNIT) if scale is None else (scale * UNIT).reshape(-1).numpy()

    def drop_prefetched(self) -> None:
        """Drop prefetched innovations and reset the generator to before them."""
        if self.prefetched is not None:
            self.prefetched.result()
            self.prefetched = None
            self.generator.set_state(self._before)
            self._counts = self._counts_before

    def fill(self) -> Tensor:
        """Draw innovations, into ``out`` unless they are averaged normals."""
        if self.bits:
            (self.prefetched or self._start()).result()
            self.prefetched = None
            return self.out
        self._draw(self.out)
        if self._scale is not None:
            self.out.mul_(self._scale)
        if self._finish is not None:
            self._finish()
        if not self.averaged:
            return self.out
        if self._last is None:  # the first step
            self._last = self.out.clone()
        mean = torch.lerp(self._last, self.out, 0.5)
        self._last.copy_(self.out)
        return mean

    def prefetch(self) -> None:
        """Start on the next innovations, which overwrite ``out``."""
        if self.bits and self.prefetched is None:
            self.prefetched = self._start()

    def _draw(self, out: Tensor) -> None:
        if self._draws_shard is None:
            out.normal_(generator=self.generator)
        else:
            self._draws_shard(out)

    def _start(self) -> Future[None]:
        self._before, self._counts_before = self.generator.get_state(), self._counts
        words = torch.empty(3, dtype=torch.int64).random_(generator=self.generator)
        return _pool().submit(self._make, words.numpy().view(np.uint64))

    @torch.no_grad()
    def _make(self, seed: NDArray[np.uint64]) -> None:
        out = self.out.view(-1).numpy()
        counts, factor = count_bits(seed, out.size), self._factor
        if self.averaged:
            last, self._counts = counts if self._counts is None else self._counts, counts
            counts, factor = counts + last, factor * out.dtype.type(0.5)
        # numpy, not torch: torch would start a second pool of threads here.
        np.multiply(counts, factor, out=out, casting="unsafe")
        if self._finish is not None:
            self._finish()

    @property
    def last(self) -> Tensor | None:
        """If averaged, the new innovations of the last `fill`; None before the first."""
        if not self.bits:
            return self._last
        counts = self._counts if self.prefetched is None else self._counts_before
        return None if counts is None else torch.from_numpy(counts).to(self.out.dtype).mul_(UNIT).view(self.out.shape)

    @last.setter
    def last(self, value: Tensor | None) -> None:
        if not self.bits:
            self._last = value
            return
        self.prepare(self._scale, self._finish)
        self._counts = None if value is None else value.detach().div(UNIT).round_().to(torch.int8).view(-1).numpy()

    def state(self) -> Tensor:
        """The generator's state before the next `fill`, to be saved."""
        return self.generator.get_state() if self.prefetched is None else self._before


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="isosgd-innovations")


def stream(seed: NDArray[np.uint64]) -> np.random.Generator:
    """Numpy's SFC64 generator seeded with three words, advanced until they are mixed."""
    source = np.random.SFC64(0)
    state: Any = {"state": np.append(seed, np.uint64(1))}
    source.state = {"bit_generator": "SFC64", "state": state, "has_uint32": 0, "uinteger": 0}
    source.random_raw(12, output=False)
    return np.random.Generator(source)


def count_bits(seed: NDArray[np.uint64], count: int) -> NDArray[np.int8]:
    """``count`` halved sums of eight random signs: the number of bits in random bytes, less four."""
    # `integers` over the whole range gives raw words without holding the GIL.
    words = stream(seed).integers(0, 2**64 - 1, (count + 7) // 8, dtype=np.uint64, endpoint=True)
    ones = np.bitwise_count(words.view(np.uint8)).view(np.int8)
    ones -= 4
    return ones[:count]


def fill_steps(out: Tensor, generator: torch.Generator, bits: bool, scale: Tensor | None = None) -> Tensor:
    """Innovations of several steps at once, ``[steps, chains, width]``, in ``out``.

    They are normal, or counted bits, times an optional scale ``[chains, width]``.

    Example:
        >>> out = fill_steps(torch.empty(50, 10, 20), torch.Generator().manual_seed(0), bits=False)
        >>> round(float(out.var()), 1)
        1.0
    """
    if out.device.type != "cpu":
        out.normal_(generator=generator)
        return out if scale is None else out.mul_(scale)
    words = torch.empty(3, dtype=torch.int64).random_(generator=generator).numpy().view(np.uint64)
    flat = out.view(len(out), -1).numpy()
    if bits:
        factor: Any = flat.dtype.type(UNIT) if scale is None else (scale * UNIT).reshape(-1).to(out.dtype).numpy()
        np.multiply(count_bits(words, flat.size).reshape(flat.shape), factor, out=flat, casting="unsafe")
        return out
    # numpy draws normal numbers in half the time that torch takes on one core.
    stream(words).standard_normal(flat.shape, flat.dtype.type, flat)
    return out if scale is None else out.mul_(scale)


@lru_cache(maxsize=1)
def make_normals() -> Any:
    """A Triton function of a key and counters that gives four normals for each counter; None without Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit  # type: ignore[untyped-decorator]
    def normals(key, counter, QUARTER: tl.constexpr):  # type: ignore[no-untyped-def]
        a, b, c, d = tl.randn4x(key, counter)
        return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [4 * QUARTER])

    return normals
