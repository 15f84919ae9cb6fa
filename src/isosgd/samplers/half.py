"""Parameters in bfloat16 whose steps are those of float32.

A step of a sampler is mostly smaller than the distance between two numbers of bfloat16, about 1/128 of a value, and
would be lost. Stochastic rounding keeps it on average and adds a variance of its own at every step, which can be larger
than that of the step (`tests/unit/test_sampled_parts.py` measures both). So a parameter is the upper half of a float32,
rounded, and the sampler's state holds the rest as 16-bit integers: together they are the float32, exactly, in six bytes
with the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

LOW = "low"  # its name in the state
NAN = 0x7FC00000
HALF_STEP = 1 << 15  # of the upper half, in units of the lower


def wide(upper: Tensor, low: Tensor) -> Tensor:
    """A float32 from its halves, 16-bit integers.

    Example:
        >>> x = torch.tensor([3.14159265, -1e-3])
        >>> torch.equal(wide(*halves(x)), x)
        True
    """
    return ((upper.to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of the nearest bfloat16, and what is missing to those of the float32."""
    bits = torch.where(x.isnan(), NAN, x.view(torch.int32))  # others would overflow, and look like a number
    upper = (bits + HALF_STEP) >> 16
    return upper.to(torch.int16), (bits - (upper << 16)).to(torch.int16)


def step_halves_(
    upper: Tensor, low: Tensor, grad: Tensor, xi: Tensor, numbers: Tensor, velocity: Tensor | None = None
) -> None:
    """A step of either stepper in place, ``numbers`` being the rate, the kick, the weight decay and the friction.

    That is ``v <- (1 - friction) v - rate (grad + decay theta) - kick xi``, ``theta += v``; without a velocity it is
    zero before each step.
    """
    rate, kick, decay, friction = numbers.unbind()
    theta = wide(upper, low)
    move = -rate * (grad + decay * theta) - kick * xi
    if velocity is not None:
        move = (1.0 - friction) * velocity + move
        velocity.copy_(move)
    found = halves(theta + move)
    upper.copy_(found[0])
    low.copy_(found[1])


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    return torch.compile(step_halves_, dynamic=True)


class HalfParameters:
    """The parameters of a sampler that are in bfloat16.

    Args:
        state: of the optimizer.
        params: all of its parameters.
    """

    def __init__(self, state: Any, params: list[Tensor]) -> None:
        wrong = next((p for p in params if p.dtype == torch.float16), None)
        if wrong is not None:
            raise ValueError(
                "parameters in float16 cannot be sampled in a loop: give them as bfloat16, or as float32 with "
                "torch.autocast"
            )
        self.state, self.params = state, [p for p in params if p.dtype == torch.bfloat16]
        self.every = bool(params) and len(self.params) == len(params)
        self._numbers: dict[tuple[float, ...], Tensor] = {}
        self.unsupported_reason = ""  # of the compiler

    def low(self, p: Tensor) -> Tensor:
        """The lower half of a parameter."""
        if LOW not in self.state[p]:
            self.state[p][LOW] = torch.zeros_like(p, dtype=torch.int16)
        found: Tensor = self.state[p][LOW]
        return found

    @contextmanager
    def widened(self) -> Iterator[None]:
        """While open, parameters and gradients are in float32."""
        before = [(p, p.data, p.grad) for p in self.params]
        for p, data, grad in before:
            p.grad = None
            p.data = wide(data.view(torch.int16), self.low(p))
            p.grad = None if grad is None else grad.float()
        try:
            yield
        finally:
            for p, data, grad in before:
                upper, low = halves(p.data.contiguous())
                p.grad = None
                self.state[p][LOW].copy_(low)
                data.view(torch.int16).copy_(upper)
                p.data, p.grad = data, grad

    def step_(
        self, p: Tensor, numbers: tuple[float, ...], generator: torch.Generator, velocity: Tensor | None = None
    ) -> None:
        """A step of one parameter without a float32 copy of all of them: on a GPU in one pass over memory."""
        assert p.grad is not None
        if numbers not in self._numbers:
            if len(self._numbers) > len(self.params):  # of rates that change there is no end
                self._numbers.clear()
            self._numbers[numbers] = torch.tensor(numbers, device=p.device)
        xi = torch.empty(p.shape, device=p.device).normal_(generator=generator)
        args = [p.detach().view(torch.int16), self.low(p), p.grad, xi, *([] if velocity is None else [velocity])]
        if all(x.is_contiguous() for x in args):  # a flat copy of another layout would take the step in its place
            args = [x.view(-1) for x in args]
        args.insert(4, self._numbers[numbers])
        if p.is_cuda and not self.unsupported_reason:
            try:
                _compiled()(*args)
                return
            except Exception as error:  # whatever a compiler may raise
                self.unsupported_reason = f"{type(error).__name__}: {error}"
        step_halves_(*args)
