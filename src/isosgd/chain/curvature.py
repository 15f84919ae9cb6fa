"""The largest curvature of ``f / N`` in each group, measured as the chain runs.

A step of size ``rate`` inflates the variance along a direction of curvature h by ``rate h / 2`` (see
`isosgd.samplers.steppers.variance_inflation`), so the largest h bounds the rate. It is found by power iteration. The
Hessian meets a vector as the difference of two gradients *on the same minibatch*, one posterior standard deviation
apart: minibatch noise cancels, any model that has a gradient will do, and kinks (ReLU) count as the chain sees them.

All groups are probed by one gradient, each along its own vector with a random sign, which makes the terms between
groups average out. A second vector over all groups then measures how much they add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isosgd.noise import dot, join
from isosgd.samplers.shaped import Shaped

MEMORY = 0.1  # weight of a new probe, once ten have been taken
LONG_MEMORY = (
    0.03  # the same for `Stiffness`: minibatches differ in their stiffest direction, which looks like stiffness
)
KEPT = 4  # probes that an old estimate counts for in a new window
SMALLEST_MOVE = 1e-3  # of a group's own length: keeps differences of float32 gradients meaningful


class Stiffness:
    """Running estimate of how much larger the curvature is than the H of a Lambda that knows directions.

    The same power iteration, in the metric of H: a vector of gradient changes w stands for the displacement ``H^-1 w``,
    and its length ``sqrt(w . H^-1 w)`` tends to the top eigenvalue of H^-1 times the Hessian.

    Args:
        leaves: the parameters.
        seed: of the start vector.
    """

    def __init__(self, leaves: Sequence[Tensor], seed: int) -> None:
        self.leaves = list(leaves)
        generator = torch.Generator(device=self.leaves[0].device).manual_seed(seed)
        dtype = torch.promote_types(self.leaves[0].dtype, torch.float32)
        size = sum(p.numel() for p in self.leaves)
        self.image = torch.empty(size, dtype=dtype, device=generator.device).normal_(generator=generator)
        self.length: float | None = None  # of the image, when it was last probed
        self.probes = 0
        self.turn = -1

    @torch.no_grad()
    def probe(self, shaped: Shaped, before: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]]) -> None:
        """One power iteration; the arguments are those of `Curvature.probe`, and the Lambda."""
        along, length = self._along(shaped)
        change = self._change(shaped, along / length, before, gradient_here)
        self.image.mul_(length / (self.length or length))  # H may have changed since, and with it what a length is
        self.image.lerp_(change, max(LONG_MEMORY, 1.0 / (self.probes + 1)))
        self.length = self._along(shaped)[1]
        self.probes += 1

    @torch.no_grad()
    def probe_axis(
        self, shaped: Shaped, before: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]]
    ) -> None:
        """The Hessian along the next axis of the shape."""
        self.turn = (self.turn + 1) % shaped.axes
        axis = shaped.axis(self.turn)
        shaped.learn(self.turn, self._change(shaped, axis, before, gradient_here))

    def _change(
        self, shaped: Shaped, axis: Tensor, before: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]]
    ) -> Tensor:
        """The Hessian times a vector along which H says that the curvature is 1."""
        far = shaped.scale**0.5  # times such a vector: a posterior standard deviation
        here = [p.detach().clone() for p in self.leaves]
        parts = torch.split(far * axis, [p.numel() for p in self.leaves])
        moves = [part.view(p.shape).to(p.dtype) for part, p in zip(parts, self.leaves, strict=True)]
        torch._foreach_add_([p.detach() for p in self.leaves], moves)
        change = join(list(gradient_here())) - join(list(before))
        torch._foreach_copy_([p.detach() for p in self.leaves], here)
        return change.to(self.image.dtype).div_(far)

    def forget(self) -> None:
        """Give new probes more weight, since Lambda or the place has changed."""
        self.probes = min(self.probes, KEPT)

    def value(self, shaped: Shaped) -> float:
        """The largest ``rate * curvature``."""
        length = self._along(shaped)[1]
        return length * (length / (self.length or length)) * shaped.unit_rate

    def _along(self, shaped: Shaped) -> tuple[Tensor, float]:
        """``H^-1 w``, and the length of w."""
        along = shaped.direction(self.image).to(self.image.dtype) / shaped.unit_rate
        return along, max(float(dot(self.image, along)), 1e-60) ** 0.5


class Curvature:
    """Running estimate of the top curvature of each group.

    Args:
        groups: the parameters, by group.
        temperature: T.
        num_data: N.
        seed: of the start vectors and the signs.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], temperature: float, num_data: int, seed: int) -> None:
        self.groups = [list(g) for g in groups]
        self.temperature, self.num_data = temperature, num_data
        device = self.groups[0][0].device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.own = [[self._random(p) for p in g] for g in self.groups]
        self.joint = [[self._random(p) for p in g] for g in self.groups]
        self.probes = 0
        self.known = False

    def _random(self, p: Tensor) -> Tensor:
        dtype = torch.promote_types(p.dtype, torch.float32)
        return torch.empty(p.shape, dtype=dtype, device=p.device).normal_(generator=self.generator)

    @torch.no_grad()
    def probe(self, gradients: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]]) -> None:
        """One power iteration.

        Args:
            gradients: at the parameters as they are, in the order of the groups.
            gradient_here: evaluates them again on the same minibatch, after the parameters were moved.
        """
        weight = max(MEMORY, 1.0 / (self.probes // 2 + 1))
        here = [[p.detach().clone() for p in g] for g in self.groups]
        if self.probes % 2 == 0:
            self._probe_own(gradients, gradient_here, weight)
        else:
            self._probe_joint(gradients, gradient_here, weight)
        for group, saved in zip(self.groups, here, strict=True):
            torch._foreach_copy_([p.detach() for p in group], saved)
        self.probes += 1

    def _lengths(self) -> list[float]:
        """How far to move each group: a posterior standard deviation along its stiffest direction, within reason."""
        lengths = []
        for group, h in zip(self.groups, self.own_values() if self.known else [0.0] * len(self.groups), strict=True):
            size = _length([p.detach() for p in group])
            spread = (self.temperature / (self.num_data * h)) ** 0.5 if h > 0 else 0.0
            lengths.append(max(min(spread, max(size, 1.0)), SMALLEST_MOVE * max(size, 1.0)))
        return lengths

    def _probe_own(
        self, before: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]], weight: float
    ) -> None:
        signs = (
            2 * torch.randint(2, (len(self.groups),), generator=self.generator, device=self.generator.device) - 1
        ).tolist()
        moves = [s * e for s, e in zip(signs, self._lengths(), strict=True)]
        for group, image, move in zip(self.groups, self.own, moves, strict=True):
            torch._foreach_add_([p.detach() for p in group], image, alpha=move / _length(image))
        for change, image, move in zip(self._change(before, gradient_here), self.own, moves, strict=True):
            torch._foreach_lerp_(image, [c / move for c in change], weight)
        self.known = True

    def _probe_joint(
        self, before: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]], weight: float
    ) -> None:
        """The same over all groups at once, in coordinates where each group's own top curvature is 1."""
        roots = [max(h, 1e-30) ** 0.5 for h in self.own_values()]
        total = sum(_length(image) ** 2 for image in self.joint) ** 0.5
        move = min(e * r for e, r in zip(self._lengths(), roots, strict=True))
        for group, image, root in zip(self.groups, self.joint, roots, strict=True):
            torch._foreach_add_([p.detach() for p in group], image, alpha=move / (total * root))
        for change, image, root in zip(self._change(before, gradient_here), self.joint, roots, strict=True):
            torch._foreach_lerp_(image, [c / (move * root) for c in change], weight)

    def _change(self, before: Sequence[Tensor], gradient_here: Callable[[], Sequence[Tensor]]) -> list[list[Tensor]]:
        change = iter(torch._foreach_sub(list(gradient_here()), list(before)))
        return [[next(change).to(i.dtype) for i in images] for images in self.own]

    def own_values(self) -> list[float]:
        """Top curvature of each group on its own."""
        return [_length(image) for image in self.own]

    def values(self) -> list[float]:
        """Top curvature of each group, raised so that the groups together keep the bound too."""
        together = sum(_length(image) ** 2 for image in self.joint) ** 0.5 if self.probes > 1 else 1.0
        return [h * max(1.0, together) for h in self.own_values()]


def _length(tensors: Sequence[Tensor]) -> float:
    return max(math.sqrt(sum(float(n) ** 2 for n in torch._foreach_norm(list(tensors)))), 1e-30)
