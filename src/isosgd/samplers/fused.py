"""The step of both theorems in one pass over memory: prior, gradient, friction and injected noise.

    theta <- theta - rate (g + decay theta) - kick share xi                       (Theorem 1)
    v <- (1 - a) v - rate (g + decay theta) - kick share xi,  theta <- theta + v  (Theorem 2)

Each group has its ``rate`` and its ``kick = rate sqrt(2 lam)``. What makes up for gradient noise of variance v is each
parameter's ``share = sqrt(1 - v / (2 lam))`` of it, in [0, 1], so that 16 bits hold it: their rounding changes the
injected variance by less than 1e-3 of itself. The innovations xi come from a counter-based generator inside the kernel
(Philox, keyed anew each step), so that they never pass through memory. A step so reads and writes 14 bytes for each
parameter (22 with a velocity) where SGD moves 12 (20 with momentum).

On a GPU with Triton it is one launch for all tensors, which may be captured in a CUDA graph; elsewhere the library's
steppers do the same.

References:
    Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.geometry.layer import diagonal_scale
from isosgd.samplers.flat import Flat
from isosgd.samplers.kernel import make_kernel
from isosgd.samplers.steppers import hamiltonian_, langevin_

CHUNK = 1024  # values of one program of the kernel
WARPS = 4  # of one program


class FusedStep:
    """Steps of parameters in a flat layout.

    Args:
        flat: their layout.
        groups: numbers of the parameters in each group.
        decay: precision of the Gaussian prior over N, added to the gradient.
        friction: a of Theorem 2; 1 for Theorem 1.
        noise: whether noise is injected.

    Attributes:
        rates: of each group.
        kicks: of each group.
        share: of the injected noise, float16, in the flat layout.
        pace: two numbers that rates and kicks are multiplied by, to be written over by a schedule.
    """

    def __init__(
        self,
        flat: Flat,
        groups: Sequence[Sequence[int]],
        *,
        decay: float = 0.0,
        friction: float = 1.0,
        noise: bool = True,
    ) -> None:
        if not 0 < friction <= 1:
            raise ValueError(f"friction = {friction} must lie in (0, 1]")
        if not decay >= 0:
            raise ValueError(f"decay = {decay} must not be negative")
        if sorted(i for group in groups for i in group) != list(range(len(flat.params))):
            raise ValueError(f"groups = {groups} must name each of the {len(flat.params)} parameters once")
        self.flat, self.groups, self.decay, self.friction, self.noise = flat, groups, decay, friction, noise
        device = flat.values.device
        self.group_of = [next(k for k, group in enumerate(groups) if i in group) for i in range(len(flat.params))]
        self.rates, self.kicks = torch.zeros(len(groups), device=device), torch.zeros(len(groups), device=device)
        self.share = torch.ones_like(flat.values, dtype=torch.float16) if noise else torch.empty(0, device=device)
        self.velocity = torch.zeros_like(flat.values) if friction < 1 else torch.empty(0, device=device)
        self.pace = torch.ones(2, device=device)
        self._known = [0]  # where the gradients lie
        self.kernel = make_kernel() if device.type == "cuda" else None
        if self.kernel is not None:
            self._lay_out(device)

    def set(
        self, rates: Sequence[Tensor], lams: Sequence[Tensor] | None = None, variance: Tensor | None = None
    ) -> None:
        """Take rates, and from the composite noise lam and the variance of the gradient what is to be injected.

        Args:
            rates: of each group.
            lams: of each group; None injects nothing.
            variance: of the gradient noise that is made up for, in the flat layout; None for none.
        """
        self.rates.copy_(torch.stack(list(rates)))
        if lams is None:
            self.kicks.zero_()
            return
        whole = (2.0 * torch.stack(list(lams))).sqrt()
        self.kicks.copy_(self.rates * whole)
        self.share.fill_(1.0)
        if variance is not None:
            for lam, root, members in zip(lams, whole, self.groups, strict=True):
                for share, v in zip(
                    self.flat.parts(self.share, members), self.flat.parts(variance, members), strict=True
                ):
                    share.copy_(diagonal_scale(lam, v) / root)

    def step(self, grads: Sequence[Tensor], key: Tensor, generator: torch.Generator | None = None) -> None:
        """One step.

        Args:
            grads: gradients, in the shapes and strides of the parameters.
            key: an int64 drawn anew for this step, the seed of the kernel's noise.
            generator: of the noise where there is no kernel.
        """
        if self.kernel is None:
            self._plain(grads, generator)
            return
        addresses = self._addresses_of(grads)
        if addresses != self._known:
            self._known = addresses
            if not torch.cuda.is_current_stream_capturing():  # what is captured gets them by `settle`
                self.settle()
        self.kernel[(self.chunks,)](
            self.flat.values, self.velocity, self.share, self.addresses, self.starts, self.counts, self.owners,
            self.rates, self.kicks, self.pace, key, self.decay, 1.0 - self.friction,
            NOISE=self.noise, MOMENTUM=self.friction < 1, QUARTER=CHUNK // 4, num_warps=WARPS,
        )  # fmt: skip

    def settle(self) -> None:
        """Tell the kernel where the gradients lie that the last step was given; to be called after a capture."""
        if self.kernel is not None and len(self._known) == len(self.flat.params):
            self.addresses.copy_(torch.tensor(self._known, dtype=torch.int64)[self._tensor_of] + self._inside)

    @torch.no_grad()
    def _plain(self, grads: Sequence[Tensor], generator: torch.Generator | None) -> None:
        pace = self.pace.tolist()
        rates = [float(self.rates[k]) * pace[0] for k in self.group_of]
        params = [p.data for p in self.flat.params]
        full = torch._foreach_add(list(grads), params, alpha=self.decay)
        kicks = None
        if self.noise:
            xi = torch.randn(self.share.shape, generator=generator, device=self.share.device)
            kicks = self.flat.views(xi.mul_(self.share))
            torch._foreach_mul_(kicks, [float(self.kicks[k]) * pace[1] for k in self.group_of])
        if self.friction < 1:
            hamiltonian_(params, self.flat.views(self.velocity), list(full), rates, self.friction, kicks)
        else:
            langevin_(params, list(full), rates, kicks)

    def _lay_out(self, device: torch.device) -> None:
        """Cut the tensors into chunks: of each, its place, its length, its group, and where its gradient lies."""
        tensor_of, inside, starts, counts, owners = [], [], [], [], []
        for i, p in enumerate(self.flat.params):
            for start in range(0, p.numel(), CHUNK):
                tensor_of.append(i)
                inside.append(4 * start)
                starts.append(self.flat.offsets[i] + start)
                counts.append(min(CHUNK, p.numel() - start))
                owners.append(self.group_of[i])
        self.chunks = len(starts)
        self._tensor_of, self._inside = torch.tensor(tensor_of), torch.tensor(inside)
        self.addresses = torch.zeros(self.chunks, dtype=torch.int64, device=device)
        self.starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self.counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)

    def _addresses_of(self, grads: Sequence[Tensor]) -> list[int]:
        for p, g in zip(self.flat.params, grads, strict=True):
            strides = [(a, b) for size, a, b in zip(p.shape, p.stride(), g.stride(), strict=True) if size > 1]
            if g.dtype != torch.float32 or any(a != b for a, b in strides):
                raise ValueError(
                    f"a gradient is {g.dtype} with strides {g.stride()}; it must be float32 with those of its "
                    f"parameter, {p.stride()}"
                )
        return [g.data_ptr() for g in grads]
