"""Online estimates of the variance of a minibatch gradient, one number for each parameter, in O(d).

An estimator is fed *noise vectors*, one list of tensors a step, and keeps its state in plain dicts of tensors (the
optimizer's state), so that saving and loading an optimizer saves it too:

- ``gaussian``: the gradient itself, uncentred, as the paper assumes near a mode (its assumption 2);
- ``paired``: the scaled difference of the gradients of the two halves of a minibatch (see `isosgd.noise.paired`),
  centred and unbiased wherever the chain is, at no extra gradient;
- ``alpha``: either of them, read as alpha-stable noise, with the variance of the nearest Gaussian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isosgd.noise import stable

State = dict[str, Any]
NoiseName = Literal["gaussian", "paired", "alpha"]


def state_dtype(param: Tensor) -> torch.dtype:
    """Estimates are kept in float32 at least, whatever the parameter's dtype."""
    return torch.promote_types(param.dtype, torch.float32)


def check_momentum(momentum: float) -> None:
    """Refuse a momentum that does not average."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum = {momentum} of the noise estimate must lie in [0, 1)")


class NoiseEstimator(ABC):
    """One interface: ``init`` a parameter's state, ``update`` it with noise vectors, read the ``variance``."""

    centred: bool
    momentum: float

    @abstractmethod
    def init(self, param: Tensor) -> State:
        """Fresh state of one parameter."""

    @abstractmethod
    def update(self, states: Sequence[State], noise: Sequence[Tensor], seen: int) -> None:
        """Take in one noise vector; ``seen`` have been taken in before it."""

    def variance(self, states: Sequence[State]) -> list[Tensor]:
        """Var(g) for each parameter, in the units of the gradients that were fed."""
        return [state["variance"] for state in states]

    def ready(self, seen: int) -> bool:
        """Whether ``seen`` noise vectors suffice for a first estimate."""
        return seen > 0


@dataclass(frozen=True)
class MovingAverage(NoiseEstimator):
    """Exponential moving average of the squared noise vector: ``v <- mu v + (1 - mu) d^2``.

    Args:
        momentum: ``mu``. The first ``1 / (1 - mu)`` vectors are averaged with equal weights, so that the start
            value leaves no trace.
        centred: whether it is fed differences (``paired``) or plain gradients (``gaussian``).
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
        centred: whether it is fed differences or plain gradients. Block sums of a drifting gradient grow like
            ``N1`` whatever the noise is, which fakes ``alpha -> 1``: centre wherever you can.
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
            if position == 1:  # also after a new start in the middle of a block
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
    """The estimator a name stands for, at its default or the given momentum."""
    if isinstance(noise, NoiseEstimator):
        return noise
    if noise == "gaussian":
        return MovingAverage(0.9 if momentum is None else momentum, centred=False)
    if noise == "paired":
        return MovingAverage(0.99 if momentum is None else momentum, centred=True)
    if noise == "alpha":
        return AlphaStable(momentum=0.5 if momentum is None else momentum)
    raise ValueError(f"noise = {noise!r} is unknown; choose 'gaussian', 'paired', 'alpha' or a NoiseEstimator")
