"""Tensors of a target's network that are not sampled: frozen parameters, and buffers such as BatchNorm statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.potential import Params, Target
from isosgd.potential.modules import ModuleLikelihood


class Buffers:
    """The buffers of a target's network, which a pass through it may change. None where there is no network.

    Args:
        target: what is sampled.

    Attributes:
        start: copies of their values when this was made.
    """

    def __init__(self, target: Target) -> None:
        likelihood = target._log_likelihood
        self._likelihood = likelihood if isinstance(likelihood, ModuleLikelihood) else None
        self.start = self.now()

    def now(self) -> Params:
        """Copies of their present values, on the CPU."""
        return {name: x.detach().to("cpu", copy=True) for name, x in self._here().items()}

    def _here(self) -> dict[str, Tensor]:
        return {} if self._likelihood is None else dict(self._likelihood._module.named_buffers())

    def frozen(self) -> Params:
        """The network's parameters that are not sampled."""
        if self._likelihood is None:
            return {}
        rest, frozen = self._likelihood._rest[self._likelihood._home], self._likelihood._frozen
        return {name: rest[name].detach() for name in frozen}

    def changed(self) -> list[str]:
        """Names of those that passes through the network change: once there was one, they are other than at first."""
        return [name for name, x in self._here().items() if not torch.equal(x.cpu(), self.start[name])]

    @torch.no_grad()
    def load(self, values: Params) -> None:
        """Give them these values, on every device the network has been on."""
        if self._likelihood is not None:
            for rest in self._likelihood._rest.values():
                for name, value in values.items():
                    rest[name].copy_(value)
