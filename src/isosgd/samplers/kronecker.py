"""Lambda for each weight matrix in the eigenbasis of its two noise factors, from the noise itself: no hooks, any model.

For a weight matrix and its noise vectors D, of the same shape, the running means of ``D D^T`` and ``D^T D`` give two
orthogonal bases. In them the noise is nearly uncorrelated, so that the diagonal rule applies there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.samplers.shaped import Rotated, Rule

LONGEST_SIDE = 512  # a longer side of a matrix is left as it is: its basis would cost more than it gains


class Kronecker(Rotated):
    """A basis for each side of each weight matrix; convolutions count as matrices ``[out, in * height * width]``.

    Args:
        damping: share of a layer's mean curvature that is added to every direction.
        longest: longest side that gets a basis.
    """

    name = "kronecker"

    def __init__(self, damping: float = 0.3, longest: int = LONGEST_SIDE) -> None:
        self.damping, self.longest = damping, longest

    def prepare(self) -> None:
        super().prepare()
        self.matrices = [
            (slice(end - size, end), shape[0], size // shape[0])
            for size, shape, end in zip(self.sizes, self.shapes, _ends(self.sizes), strict=True)
            if len(shape) > 1
        ]
        make = {"dtype": self.dtype, "device": self.device}
        self.left = [self._zeros(rows, make) for _, rows, _ in self.matrices]
        self.right = [self._zeros(columns, make) for _, _, columns in self.matrices]
        self.bases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self.matrices)
        self.recent: list[Tensor] = []  # a few noise vectors, to begin with when the basis changes
        self.kept = max(2, min(64, (1 << 22) // self.total))

    def _zeros(self, side: int, make: dict[str, object]) -> Tensor | None:
        return torch.zeros(side, side, **make) if 1 < side <= self.longest else None  # type: ignore[call-overload]

    def turn(self, x: Tensor) -> Tensor:
        return self._apply(x, transpose=True)

    def back(self, z: Tensor) -> Tensor:
        return self._apply(z, transpose=False)

    def _apply(self, x: Tensor, transpose: bool) -> Tensor:
        out = x.clone()
        for (slot, rows, columns), (u, w) in zip(self.matrices, self.bases, strict=True):
            m = x[..., slot].reshape(*x.shape[:-1], rows, columns)
            if u is not None:
                m = (u.mT if transpose else u) @ m
            if w is not None:
                m = m @ (w if transpose else w.mT)
            out[..., slot] = m.flatten(-2)
        return out

    def take(self, noise: Tensor) -> None:
        weight = 1.0 / (self.seen + 1)
        for (slot, rows, columns), left, right in zip(self.matrices, self.left, self.right, strict=True):
            d = noise[slot].view(rows, columns)
            if left is not None:
                left.lerp_(d @ d.mT, weight)
            if right is not None:
                right.lerp_(d.mT @ d, weight)
        self.recent = [*self.recent[-self.kept + 1 :], noise]
        super().take(noise)

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        if not self.known:
            self._rotate()
        super().settle(rule, prior, rise)

    def forget(self) -> None:
        """At the start of a window the basis becomes that of the noise seen in the one before."""
        if self.known and self.seen > 1:
            self._rotate()
        super().forget()

    def _rotate(self) -> None:
        old = self.lam
        before = self.bases
        self.bases = [(_basis(a), _basis(b)) for a, b in zip(self.left, self.right, strict=True)]
        if self.known:  # Lambda as seen from the new axes
            spread = self._squared(old, before)
            self.lam = torch.maximum(spread, 1e-3 * old.min())
        seen = torch.stack([self.turn(d).square() for d in self.recent]).mean(0)
        self.v = self._product(seen, len(self.recent))
        self.top = torch.zeros(0)
        self.changed()

    def _squared(self, values: Tensor, before: list[tuple[Tensor | None, Tensor | None]]) -> Tensor:
        """The diagonal, in the new basis, of a matrix that was diagonal in the old one."""
        out = values.clone()
        for (slot, rows, columns), new, old in zip(self.matrices, self.bases, before, strict=True):
            m = values[slot].view(rows, columns)
            if new[0] is not None:
                m = (new[0].mT @ (old[0] if old[0] is not None else torch.eye(rows).to(m))).square() @ m
            if new[1] is not None:
                m = m @ (new[1].mT @ (old[1] if old[1] is not None else torch.eye(columns).to(m))).square().mT
            out[slot] = m.reshape(-1)
        return out

    def _product(self, seen: Tensor, count: int) -> Tensor:
        """Variances in a new basis: what few vectors say, and the product of the factors as if of eight more."""
        v = seen.clone()
        for (slot, _, _), (u, w), left, right in zip(self.matrices, self.bases, self.left, self.right, strict=True):
            if u is None or w is None or left is None or right is None:
                continue
            a, b = (u.mT @ left @ u).diagonal(), (w.mT @ right @ w).diagonal()
            model = torch.outer(a, b).clamp_min(0.0) / left.trace().clamp_min(torch.finfo(v.dtype).tiny)
            v[slot] = (count * seen[slot] + 8.0 * model.view(-1)) / (count + 8.0)
        return v

    def turned_prior(self, prior: Tensor) -> Tensor:
        """Exact where one scale rules a matrix, as it nearly always does; its mean stands for it otherwise."""
        out = prior.to(self.dtype).clone()
        for slot, _, _ in self.matrices:
            out[slot] = out[slot].mean()
        return out

    def rates(self) -> Tensor:
        here, self.bases = (
            self.bases,
            [
                (None if u is None else torch.eye(len(u)).to(u), None if w is None else torch.eye(len(w)).to(w))
                for u, w in self.bases
            ],
        )
        try:
            return self._squared(self.speed, here)
        finally:
            self.bases = here


def _ends(sizes: list[int]) -> list[int]:
    total, ends = 0, []
    for size in sizes:
        total += size
        ends.append(total)
    return ends


def _basis(factor: Tensor | None) -> Tensor | None:
    """Eigenvectors, in float64, of a factor scaled to a unit trace."""
    if factor is None:
        return None
    trace = factor.trace().clamp_min(torch.finfo(factor.dtype).tiny)
    _, vectors = torch.linalg.eigh((factor / trace).double())
    return torch.as_tensor(vectors, dtype=factor.dtype)
