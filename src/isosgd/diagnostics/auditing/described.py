"""A described loop as an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.diagnostics.auditing.loop import Loop


class Described(Optimizer):
    """A described loop as an optimizer, so that it can be run: gradients in ``.grad`` are those of its loss.

    Of replicas it is the mean.
    """

    def __init__(self, params: Sequence[Tensor], loop: Loop, generator: torch.Generator | None = None) -> None:
        super().__init__(params, {"lr": loop.lr, "step": 0})
        self.loop = loop
        known = (loop.lr * loop.scale) ** 2 * (loop.gradient_noise or 0.0) if loop.corrected else 0.0
        self.sigma = math.sqrt(max(loop.sigma**2 - known, 0.0))  # gradients bring the rest
        self.generator = generator or torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of the description, clipping, weight decay and all."""
        loop, group = self.loop, self.param_groups[0]
        grads = [p.grad for p in group["params"]]
        if loop.clipping is not None:
            length = torch.sqrt(sum((g.square().sum() for g in grads), start=torch.zeros(())))
            grads = [g * (loop.clipping / length).clamp(max=1.0) for g in grads]
        step, once = group["step"], dict[Any, Tensor]()
        for p, g in zip(group["params"], grads, strict=True):
            state = self.state[p]
            if not state:
                state.update(velocity=torch.zeros_like(p), noise=torch.zeros_like(p))
            shared = loop.shared_noise == "tensors"
            if loop.shared_noise != "steps" or step % loop.reused == 0:
                fresh = p.new_empty((loop.replicas, *p.shape)).normal_(generator=self.generator).mean(0)
                last, state["noise"] = state["noise"], once.setdefault(p.shape, fresh) if shared else fresh
            noise = 0.5 * (last + state["noise"]) if loop.averaged else state["noise"]
            self._move(p, g, state["velocity"], self.sigma * noise, step)
        group["step"] += 1

    def _move(self, p: Tensor, g: Tensor, v: Tensor, noise: Tensor, step: int) -> None:
        loop, on_velocity = self.loop, self.loop.noise_on == "velocity"
        # A loop that moves first has its gradient where the last step's move ended: it is refreshed after the kick.
        refreshed = loop.refresh_every is not None and (step + (loop.order == "move")) % loop.refresh_every == 0
        if refreshed and loop.order == "kick":
            v.normal_(0.0, loop.fresh, generator=self.generator)
        v.mul_(loop.momentum).sub_(g if loop.decoupled else g + loop.weight_decay * p, alpha=loop.lr)
        if on_velocity:
            v.add_(noise)
        if refreshed and loop.order == "move":
            v.normal_(0.0, loop.fresh, generator=self.generator)
        if loop.decoupled:
            p.mul_(1.0 - loop.lr * loop.weight_decay)
        p.add_(v)
        if not on_velocity:
            p.add_(noise)

    def at_end(self) -> bool:
        """Whether the last step ended a period."""
        return bool((self.param_groups[0]["step"] + (self.loop.order == "move")) % self.loop.period == 0)
