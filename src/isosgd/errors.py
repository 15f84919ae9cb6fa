"""What can go wrong while sampling, as types a caller can catch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SamplingWarning(UserWarning):
    """The draws may be off; the message says by how much, why, and what would help."""


class DivergedError(RuntimeError):
    """A chain met a loss or a gradient that is not finite and was stopped.

    Nothing is lost: the state before the bad step is kept.

    Attributes:
        step: gradient evaluations made before the bad one.
        group: layer whose gradient was not finite, or None when it was the loss.
        state: natural parameters before the bad step.
        draws: draws kept so far, a dict of tensors ``[draws, *shape]`` (empty during warm-up).
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
