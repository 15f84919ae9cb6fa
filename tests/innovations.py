"""Normal numbers from a table in place of those that a sampler draws, for steps whose outcome is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Planned(TorchFunctionMode):
    """While it is open, a tensor that is filled from a generator has numbers of the test's own.

    Args:
        take: the numbers, given the tensor and the generator that would have filled it.
    """

    def __init__(self, take: Callable[[Tensor, torch.Generator], Tensor]) -> None:
        super().__init__()
        self.take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.normal_ and "generator" in (kwargs or {}):
            return args[0].copy_(self.take(args[0], kwargs["generator"]))
        return func(*args, **(kwargs or {}))
