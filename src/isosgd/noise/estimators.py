"""Noise vectors of minibatches, and online estimators of the variance of a gradient.

*Paired halves.* With ``g1``, ``g2`` the mean gradients of two disjoint parts of ``n1`` and ``n2`` examples, the
minibatch gradient is ``g = (n1 g1 + n2 g2) / n`` and the difference ``D = sqrt(n1 n2) / n (g1 - g2)`` has mean zero and
the covariance of ``g``. The prior's gradient cancels. For equal halves ``D = (g1 - g2) / 2``. It costs no extra
gradients: the two halves are the minibatch.

An estimator takes *noise vectors*, one list of tensors per step, and keeps its state in dicts of tensors in the
optimizer's state, with which it is saved:

- ``gaussian``: the gradient itself, uncentred, as the paper assumes near a mode (its assumption 2);
- ``paired``: the difference of the gradients of two halves, centred and unbiased everywhere;
- ``alpha``: either of them, modelled as alpha-stable noise, with the variance of the nearest Gaussian.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isosgd.errors import nearest
from isosgd.noise import stable

State = dict[str, Any]
NoiseName = Literal["gaussian", "paired", "alpha"]


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of estimates: float32 at least."""
    return torch.promote_types(param.dtype, torch.float32)


def check_momentum(momentum: float) -> None:
    """Raise if the momentum is invalid."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum = {momentum} of the noise estimate must lie in [0, 1)")


class NoiseEstimator(ABC):
    """``init`` a parameter's state, ``update`` it with noise vectors, read the ``variance``."""

    centred: bool
    momentum: float

    @abstractmethod
    def init(self, param: Tensor) -> State:
        """Fresh state of one parameter."""

    @abstractmethod
    def update(self, states: Sequence[State], noise: Sequence[Tensor], seen: int) -> None:
        """Update with a noise vector; ``seen`` is the number of those before it."""

    def variance(self, states: Sequence[State]) -> list[Tensor]:
        """Var(g) for each parameter."""
        return [state["variance"] for state in states]

    def ready(self, seen: int) -> bool:
        """Whether ``seen`` noise vectors suffice for a first estimate."""
        return seen > 0


@dataclass(frozen=True)
class MovingAverage(NoiseEstimator):
    """Exponential moving average of the squared noise vector: ``v <- mu v + (1 - mu) d^2``.

    Args:
        momentum: ``mu``. The first ``1 / (1 - mu)`` vectors have equal weights, so that the start value has no effect.
        centred: whether noise vectors are differences (``paired``) or gradients (``gaussian``).
    """

    momentum: float = 0.9
    centred: bool = False

    def __post_init__(self) -> None:
        check_momentum(self.momentum)

    def init(self, param: Tensor) -> State:
        return {"variance": torch.zeros_like(param, dtype=state_dtype(param))}

    def update(self, states: Sequence[State], noise: Sequence[Tensor], seen: int) -> None:
        weight = max(1.0 - self.momentum, 1.0 / (seen + 1))
        vectors = [d.to(s["variance"].dtype) for s, d in zip(states, noise, strict=True)]
        torch._foreach_lerp_([s["variance"] for s in states], torch._foreach_mul(vectors, vectors), weight)


@dataclass(frozen=True)
class AlphaStable(NoiseEstimator):
    """Alpha-stable fit over ``block x blocks`` noise vectors, then the variance of the l2-nearest Gaussian.

    Args:
        block: N1, vectors summed in one block.
        blocks: N2, blocks in one estimate.
        momentum: ``mu`` of the filter over successive estimates.
        centred: whether noise vectors are differences or gradients. Block sums of a drifting gradient grow like ``N1``,
            which looks like ``alpha -> 1``: centre if possible.
    """

    block: int = 10
    blocks: int = 10
    momentum: float = 0.5
    centred: bool = True

    def __post_init__(self) -> None:
        check_momentum(self.momentum)
        if self.block < 2:
            raise ValueError(f"block = {self.block} must be at least 2: one vector is no sum")
        if self.blocks < 1:
            raise ValueError(f"blocks = {self.blocks} must be at least 1")

    def init(self, param: Tensor) -> State:
        zeros = torch.zeros_like(param, dtype=state_dtype(param))
        names = ("variance", "alpha", "logs", "block", "block_logs")
        return {name: zeros.clone() for name in names}

    def ready(self, seen: int) -> bool:
        return seen >= self.block * self.blocks

    def update(self, states: Sequence[State], noise: Sequence[Tensor], seen: int) -> None:
        position = seen % (self.block * self.blocks) + 1
        for state, d in zip(states, noise, strict=True):
            if position == 1:  # also after a restart in the middle of a block
                for name in ("logs", "block", "block_logs"):
                    state[name].zero_()
            state["block"].add_(d)
            state["logs"].add_(stable.log_abs(d))
            if position % self.block == 0:
                state["block_logs"].add_(stable.log_abs(state["block"]))
                state["block"].zero_()
            if position == self.block * self.blocks:
                self._finish(state, first=seen < self.block * self.blocks)

    def _finish(self, state: State, first: bool) -> None:
        alpha, scale = stable.fit_from_logs(
            state["logs"] / (self.block * self.blocks), state["block_logs"] / self.blocks, self.block
        )
        weight = 1.0 if first else 1.0 - self.momentum
        state["variance"].lerp_(stable.matched_variance(alpha, scale), weight)
        state["alpha"].lerp_(alpha, weight)


def make_estimator(noise: NoiseName | NoiseEstimator, momentum: float | None = None) -> NoiseEstimator:
    """The estimator of that name, with the given momentum or its default."""
    if isinstance(noise, NoiseEstimator):
        return noise
    if noise == "gaussian":
        return MovingAverage(0.9 if momentum is None else momentum, centred=False)
    if noise == "paired":
        return MovingAverage(0.99 if momentum is None else momentum, centred=True)
    if noise == "alpha":
        return AlphaStable(momentum=0.5 if momentum is None else momentum)
    close = nearest(noise, ["gaussian", "paired", "alpha"])
    raise ValueError(f"noise = {noise!r} is unknown; choose 'gaussian', 'paired', 'alpha' or a NoiseEstimator{close}")


def join_halves(
    first: Sequence[Tensor], second: Sequence[Tensor], sizes: tuple[int, int] = (1, 1)
) -> tuple[list[Tensor], list[Tensor]]:
    """Minibatch gradient and noise vector from the mean gradients of two parts; ``sizes`` are their examples.

    Example:
        >>> g, d = join_halves([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 2.0])])
        >>> g[0].tolist(), d[0].tolist()
        ([2.0, 2.0], [-1.0, 0.0])
    """
    n1, n2 = sizes
    if min(n1, n2) < 1:
        raise ValueError(
            f"sizes = {sizes}: each part of a minibatch needs at least one example; use a batch of 2 or more"
        )
    n = n1 + n2
    difference = torch._foreach_sub(list(first), list(second))
    gradient = torch._foreach_add(list(second), difference, alpha=n1 / n)
    # Not in place, for compiled loops over steps.
    return list(gradient), list(torch._foreach_mul(difference, math.sqrt(n1 * n2) / n))


def paired_backward(
    params: Sequence[Tensor], first: Callable[[], Tensor], second: Callable[[], Tensor], sizes: tuple[int, int] = (1, 1)
) -> list[Tensor]:
    """For your own training loop: backpropagate both halves, write the mean to ``.grad``, return the noise vector.

    Args:
        params: the parameters, in the sampler's order.
        first: returns the loss of the first half (mean over its examples).
        second: returns the loss of the second half.
        sizes: examples in each half.

    Returns:
        The noise vector, for ``sampler.step(noise=...)``.
    """
    params = list(params)
    a = torch.autograd.grad(first(), params)
    b = torch.autograd.grad(second(), params)
    gradient, difference = join_halves(a, b, sizes)
    for p, g in zip(params, gradient, strict=True):
        p.grad = g
    return difference
