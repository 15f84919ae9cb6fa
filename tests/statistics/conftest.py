"""A posterior known exactly, sampled by many chains at once under the noise of real minibatches.

Data y_i in R^d with any covariance; the model says y_i ~ N(theta, I), theta ~ N(0, 1). The posterior is then
N(m, I / (N + 1)), the curvature of f / N is h = 1 + 1/N in every direction, and the gradient of a minibatch has exactly
the noise covariance Cov(y) / n, whatever that is: correlated, or missing in half of the directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Sampler
from isosgd.geometry.rule import variance_inflation

DIM = 6
CHAINS = 256


def covariance(kind: str) -> Tensor:
    """Covariance of the data, and so of the gradient noise times n."""
    if kind == "independent":
        return torch.diag(torch.linspace(0.5, 2.0, DIM))
    if kind == "correlated":  # equal variances, nearly one direction
        return 0.95 * torch.ones(DIM, DIM) + 0.05 * torch.eye(DIM)
    if kind == "half":  # no noise at all in half of the space
        return torch.diag((torch.arange(DIM) < DIM // 2).float())
    raise ValueError(kind)


@dataclass
class Result:
    """What the chains did: for each chain and direction the mean square distance from the posterior mean."""

    squares: Tensor  # [chains, directions], over the target's variance T / (N h)
    predicted: Tensor  # [directions], what theory says of it at this rate
    rate_curvature: float

    def z(self) -> float:
        """Standard errors between the mean over directions and theory; chains are independent."""
        off = (self.squares / self.predicted).mean(1) - 1.0
        return float(off.mean() / (off.std() / math.sqrt(len(off))))

    def z_each(self) -> Tensor:
        """The same for each direction."""
        off = self.squares / self.predicted - 1.0
        return off.mean(0) / (off.std(0) / math.sqrt(len(off)))


@dataclass
class GaussianPosterior:
    """K chains on the posterior above."""

    kind: str = "independent"
    level: float = 0.125  # of the noise: how far the data spread
    num_data: int = 200
    batch: int = 8
    seed: int = 0
    data: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        values, vectors = torch.linalg.eigh(covariance(self.kind))
        y = torch.randn(self.num_data, DIM, generator=g)
        y = (y - y.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(y.T, correction=0))).T  # exactly white
        self.data = y @ (vectors * (self.level * values.clamp_min(0)).sqrt()).T + 1.0
        self.curvature = 1.0 + 1.0 / self.num_data
        self.mean = self.data.mean(0) / self.curvature
        self.noise = self.level * covariance(self.kind) / self.batch  # Var(g), minibatches drawn with replacement

    def gradients(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Minibatch gradient and paired-halves noise vector, a minibatch of its own for each chain."""
        index = torch.randint(self.num_data, (theta.shape[0], self.batch), generator=generator)
        halves = self.data[index].view(theta.shape[0], 2, self.batch // 2, DIM).mean(2)
        first, second = theta - halves[:, 0], theta - halves[:, 1]
        return (first + second) / 2 + theta / self.num_data, (first - second) / 2

    def run(
        self,
        kind: type[Sampler],
        *,
        temperature: float = 1.0,
        relaxations: float = 15.0,
        directions: Tensor | None = None,
        noisy: bool = True,
        curvature: float | None = None,
        seen: float = 1.0,
        fault: Callable[[dict[str, Any]], None] = lambda group: None,
        **settings: Any,
    ) -> Result:
        """Run chains from exact draws of the target for so many relaxation times and measure their spread.

        Args:
            kind: the sampler.
            temperature: T.
            relaxations: how long, in units of 1 / (rate h) steps.
            directions: orthonormal rows to measure along; the axes by default.
            noisy: whether gradients are of minibatches.
            curvature: what the sampler is told; the truth by default.
            seen: scale of the noise vectors that the sampler is told of.
            fault: changes the sampler's parameter group, once its rate is set.
            settings: of the sampler.
        """
        g = torch.Generator().manual_seed(self.seed + 1)
        exact = temperature / (self.num_data * self.curvature)
        theta = (self.mean + math.sqrt(exact) * torch.randn(CHAINS, DIM, generator=g)).requires_grad_()
        sampler = kind(
            [("theta", theta)],
            num_data=self.num_data,
            temperature=temperature,
            chains=CHAINS,
            generator=torch.Generator().manual_seed(self.seed + 2),
            **settings,
        )
        for _ in range(100):
            theta.grad, noise = self.gradients(theta.detach(), g)
            sampler.observe([seen * noise])
        sampler.adapt([curvature or self.curvature])
        group = sampler.param_groups[0]
        # One rate for all chains, that of the slowest: theory is then the same for all.
        group["rate"] = group["rate"].min().expand(CHAINS).clone()
        if "lam" in group:
            group["lam"] = temperature / (self.num_data * group["rate"])
        fault(group)
        sampler.freeze()
        sampler.refresh()
        rate = float(group["rate"][0])
        steps = max(int(relaxations * sampler.friction / (rate * self.curvature)), 500)
        rotate = torch.eye(DIM) if directions is None else directions
        total = torch.zeros(CHAINS, DIM)
        for step in range(steps):
            theta.grad, noise = self.gradients(theta.detach(), g)
            if not noisy:
                theta.grad = (theta.detach() - self.mean) * self.curvature
            sampler.step(noise=[seen * noise] if noisy and step % 8 == 0 else None)
            total += ((theta.detach() - self.mean) @ rotate.T).square()
        # Gradient noise that is not corrected adds its own heat: b over the composite noise a T / (N rate).
        sigma = sampler.friction * temperature / (self.num_data * rate)
        left_over = torch.einsum("ij,jk,ik->i", rotate, self.noise, rotate) / 2.0 / sigma
        corrected = hasattr(sampler, "correction") or getattr(sampler, "corrected", False)
        heat = 1.0 + (0.0 if corrected or not noisy else left_over)
        inflation = variance_inflation(rate * self.curvature, sampler.friction)
        predicted = torch.as_tensor(heat) * inflation * torch.ones(DIM)
        return Result(total / steps / exact, predicted, rate * self.curvature)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder are long, unless they say that they are quick."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.long)


@pytest.fixture
def gaussian_posterior() -> type[GaussianPosterior]:
    return GaussianPosterior
