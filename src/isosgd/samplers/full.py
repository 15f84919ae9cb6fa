"""Lambda as a full matrix: every direction of a small posterior at its own rate, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from isosgd.samplers.shaped import Rule, Shaped

SINGULAR = 1e-12  # eigenvalues of H, scaled to a unit diagonal, below which the noise says nothing of a direction
BELIEVED = 3.0  # curvature over Fisher information that is put down to the direction; less may be chance


class Full(Shaped):
    """One matrix over all parameters; for up to a few hundred of them.

    The Fisher information is checked against the Hessian, axis by axis of the basis in which H is the identity (see
    `learn`), and gives way where it is far too small: gradient noise may lack directions that the posterior has.

    Everything is kept in float64, since raw regressions have condition numbers of 1e11 and more. The noise covariance
    goes on being averaged while draws are taken, so that ``C = Lambda - B`` gets better and better; Lambda is fixed.
    """

    name = "full"
    kappa = 1.25  # all of the noise is known, and its correlations

    def prepare(self) -> None:
        d, kind = self.total, {"dtype": torch.float64, "device": self.device}
        self.cov = torch.zeros(d, d, **kind)
        self.hessian = torch.eye(d, **kind)  # in the basis of the last `settle`
        self.probed = torch.zeros(d, **kind)
        self.root = torch.zeros(d, d, **kind)
        self.inverse_root = torch.zeros(d, d, **kind)
        self.pull = torch.zeros(d, d, **kind)
        self.push = torch.zeros(d, d, **kind)
        self.share = 0.0

    @property
    def least(self) -> int:
        return max(20, 4 * self.total)  # eigenvalues are then right within a factor of (1 - 1/2)^2

    def take(self, noise: Tensor) -> None:
        d = noise.double()
        self.cov.lerp_(torch.outer(d, d), 1.0 / (self.seen + 1))
        count = self.seen + 1
        if self.known and count >= self.least and count & (count - 1) == 0:
            self._inject()

    # -- the Hessian ----------------------------------------------------------------------------------------------

    @property
    def axes(self) -> int:
        return self.total

    def axis(self, i: int) -> Tensor:
        return self.root[:, i]

    def learn(self, i: int, change: Tensor) -> None:
        self.probed[i] += 1
        self.hessian[:, i].lerp_(self.root.mT @ change.double(), 1.0 / float(self.probed[i]))

    def _curvature(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """A root R of the inverse of H, ``R R^T = H^-1``, and its own inverse."""
        # Scaled to a unit diagonal first: parameters may have units that are many powers of ten apart.
        unit = torch.where(h.diagonal() > 0, h.diagonal(), self.fallback.double()).rsqrt()
        values, vectors = torch.linalg.eigh(unit[:, None] * h * unit)
        values = torch.where(values > SINGULAR, values, 1.0)
        return unit[:, None] * vectors * values.rsqrt(), (vectors * values.sqrt()).mT / unit

    def settle(self, rule: Rule, prior: Tensor, rise: float) -> None:
        root, inverse = self._curvature(rule.batch_size * self.cov + torch.diag(prior.double()))
        if self.known:
            old = self.inverse_root  # rates fall at once and rise slowly
            root, inverse = _lift(root, inverse, old.mT @ old / rise, 1.0)
            if bool((self.probed > 0).all()):
                found = old.mT @ (0.5 * (self.hessian + self.hessian.mT)) @ old
                root, inverse = _lift(root, inverse, found, BELIEVED)
        self.root, self.inverse_root = root, inverse
        self.hessian = torch.eye(self.total).to(root)
        self.probed.zero_()
        self.factor, self.scale, self.known = rule.factor(self.stretch), rule.temperature / rule.num_data, True
        self._inject()

    # -- the step -------------------------------------------------------------------------------------------------

    def _inject(self) -> None:
        """The matrices of a step. In coordinates ``R^-1 theta`` Lambda is q I, and noise is nearly so."""
        noise = self.root.mT @ self.cov @ self.root
        values, vectors = torch.linalg.eigh(2.0 * self.factor * torch.eye(self.total).to(noise) - noise)
        self.share = float((values < 0).double().mean())
        missing = (vectors * values.clamp_min(0.0).sqrt()) @ vectors.mT
        self.pull = self.unit_rate * (self.root @ self.root.mT)
        self.push = self.unit_rate * (self.root @ missing)

    def slow(self, factor: float) -> None:
        self.factor *= factor
        self._inject()

    def direction(self, gradient: Tensor) -> Tensor:
        return torch.matmul(gradient.double(), self.pull)

    def displacement(self, gradient: Tensor, xi: Tensor) -> Tensor:
        return torch.matmul(gradient.double(), self.pull) + torch.matmul(xi.double(), self.push.mT)

    def rates(self) -> Tensor:
        return self.pull.diagonal()

    def clipped(self) -> float:
        return self.share


def _lift(root: Tensor, inverse: Tensor, other: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """H, as a root of its inverse and the inverse of that, raised to another matrix where that is larger.

    Larger means: by more than a factor of ``least``, along an axis that is common to both.
    """
    values, vectors = torch.linalg.eigh(root.mT @ other @ root)
    values = torch.where(values > least, values, 1.0)
    return root @ (vectors * values.rsqrt()), (vectors * values.sqrt()).mT @ inverse
