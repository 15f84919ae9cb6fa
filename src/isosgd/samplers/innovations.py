"""The random numbers of a step: independent, mean zero, one variance.

On an accelerator, and for small tensors, they are normal. On the CPU drawing a million normals takes fifteen times as
long as the update they belong to, so large CPU tensors get sums of eight random signs instead, that is the bits of a
byte counted: a binomial variable whose mean, variance and odd moments are those of a normal, and whose fourth moment is
2.75 instead of 3. A scheme of weak order one, as our steppers are, does not see the difference (Kloeden and Platen
1992, section 14.1): means, covariances and the order of the discretisation bias are unchanged. A chain adds up many
such steps before it has moved by a standard deviation, so that its own fourth moment is off by 0.25 rate h only, less
than 0.01.

Both kinds are a function of the `torch.Generator` alone, so that saving the generator saves the stream.
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
UNIT = 0.5**0.5  # eight bits, less their mean of four, have variance two


def make_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator given, if it fits the device; made from torch's seed when there is none."""
    if generator is None:
        generator = torch.Generator(device=device).manual_seed(int(torch.randint(2**62, ())))
    if generator.device.type != device.type:
        raise ValueError(f"the generator lives on {generator.device}, the parameters on {device}; make it there")
    return generator


def as_bits(kind: Innovations, size: int, device: torch.device) -> bool:
    """Whether so many innovations are counted bits rather than normal numbers."""
    return device.type == "cpu" and (kind == "bits" or (kind == "auto" and size >= BITS_FROM))


class Source:
    """Innovations for a flat float tensor ``out``, from a generator; ``auto`` takes bits where they are faster.

    Counted bits, and all that is done to them, can be prefetched by a thread while the next gradient is computed. Where
    they are ``averaged``, each is the mean of a fresh one and that of the last `fill`. A function ``draw`` fills a
    tensor by normal numbers where ``out`` is a part of a longer vector.

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
        self._draws_part = draw
        self.prefetched: Future[None] | None = None
        self._before = generator.get_state()
        self._last: Tensor | None = None  # normal numbers; bits are averaged while they are bytes and cost little
        self._counts: NDArray[np.int8] | None = None
        self._counts_before: NDArray[np.int8] | None = None
        self.prepare()

    def prepare(self, scale: Tensor | None = None, finish: Callable[[], None] | None = None) -> None:
        """Say what `fill` does to innovations of unit variance; what was prefetched is made anew.

        ``scale`` multiplies them; ``finish`` is called then, perhaps in another thread, and may change ``out`` again.
        """
        self.drop_prefetched()
        self._scale, self._finish = scale, finish
        if self.bits:
            kind = self.out.numpy().dtype.type
            self._factor: Any = kind(UNIT) if scale is None else (scale * UNIT).reshape(-1).numpy()

    def drop_prefetched(self) -> None:
        """Give what was prefetched back to the generator."""
        if self.prefetched is not None:
            self.prefetched.result()
            self.prefetched = None
            self.generator.set_state(self._before)
            self._counts = self._counts_before

    def fill(self) -> Tensor:
        """Fresh innovations, in ``out`` unless normal ones are averaged."""
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
        if self._last is None:  # the first step has no other
            self._last = self.out.clone()
        mean = torch.lerp(self._last, self.out, 0.5)
        self._last.copy_(self.out)
        return mean

    def prefetch(self) -> None:
        """Start on the next innovations; ``out`` is written over."""
        if self.bits and self.prefetched is None:
            self.prefetched = self._start()

    def _draw(self, out: Tensor) -> None:
        if self._draws_part is None:
            out.normal_(generator=self.generator)
        else:
            self._draws_part(out)

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
        """Where they are averaged, the innovations of the last `fill` alone; None before the first."""
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
        """State of the generator from which the next `fill` follows: what has to be saved."""
        return self.generator.get_state() if self.prefetched is None else self._before


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="isosgd-innovations")


def stream(seed: NDArray[np.uint64]) -> np.random.Generator:
    """Numpy's generator from three words, the state of an SFC64, which is run until they are mixed."""
    source = np.random.SFC64(0)
    state: Any = {"state": np.append(seed, np.uint64(1))}
    source.state = {"bit_generator": "SFC64", "state": state, "has_uint32": 0, "uinteger": 0}
    source.random_raw(12, output=False)
    return np.random.Generator(source)


def count_bits(seed: NDArray[np.uint64], count: int) -> NDArray[np.int8]:
    """``count`` sums of eight random signs, halved: the bits of random bytes, less four; the seed has three words."""
    # `integers` over their whole range are the raw words, drawn without holding Python's lock.
    words = stream(seed).integers(0, 2**64 - 1, (count + 7) // 8, dtype=np.uint64, endpoint=True)
    ones = np.bitwise_count(words.view(np.uint8)).view(np.int8)
    ones -= 4
    return ones[:count]


def fill_steps(out: Tensor, generator: torch.Generator, bits: bool, scale: Tensor | None = None) -> Tensor:
    """Innovations of several steps at once, ``[steps, chains, width]``, in ``out``: of the generator alone.

    They are normal, or counted ``bits``, times a scale ``[chains, width]`` where there is one.

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
