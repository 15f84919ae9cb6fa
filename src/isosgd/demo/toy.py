"""A regression whose posterior is known exactly, and errors of draws from it.

The model is linear in its weights, ``y = w . cos(omega x - pi/4) + noise`` with ``omega = 1, ..., 20``, noise variance
0.1 and prior ``w ~ N(0, I)``, so that its posterior is Gaussian.

References:
    Franzese et al. (2020), Isotropic SGD, appendix on the toy model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isosgd import Prediction, Target, priors
from isosgd.target import Params

NUM_FEATURES = 20
NOISE_VARIANCE = 0.1


def features(x: Tensor) -> Tensor:
    """``cos(omega x - pi/4)`` for ``omega = 1, ..., 20``: shape ``[n, 20]`` from ``[n]``."""
    omega = torch.arange(1, NUM_FEATURES + 1, dtype=x.dtype, device=x.device)
    return torch.cos(x[:, None] * omega - math.pi / 4)


@dataclass(frozen=True)
class Toy:
    """Data of the toy regression, its target, and its exact posterior.

    Attributes:
        x: inputs ``[N]``.
        data: ``(features, y)`` in float32.
        weights: the true weights ``[20]``.
        mean: exact posterior mean ``[20]``, float64.
        covariance: exact posterior covariance ``[20, 20]``, float64.
        target: the posterior as an `isosgd.Target` over ``{"w"}``.

    Example:
        >>> toy = Toy.make(seed=0)
        >>> toy.mean.shape, toy.target.resolve_num_data(toy.data)
        (torch.Size([20]), 200)
        >>> compare(toy.draw(1000, seed=1), toy)["w2"] < 0.02
        True
    """

    x: Tensor
    data: tuple[Tensor, Tensor]
    weights: Tensor
    mean: Tensor
    covariance: Tensor
    target: Target

    @classmethod
    def make(cls, seed: int = 0, num_data: int = 200, half_width: float = math.pi) -> Toy:
        """Draw weights from the prior and data from the model.

        Args:
            seed: of weights, inputs and noise.
            num_data: N.
            half_width: inputs are uniform on ``(-half_width, half_width)``. Over a whole period the features are nearly
                orthogonal; at ``pi / 2`` the posterior is badly conditioned.
        """
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(NUM_FEATURES, generator=generator, dtype=torch.float64)
        x = half_width * (2 * torch.rand(num_data, generator=generator, dtype=torch.float64) - 1)
        noise = math.sqrt(NOISE_VARIANCE) * torch.randn(num_data, generator=generator, dtype=torch.float64)
        phi = features(x).float()
        y = (features(x) @ weights + noise).float()
        # The exact posterior is that of the rounded numbers that samplers see.
        precision = torch.eye(NUM_FEATURES, dtype=torch.float64) + phi.double().T @ phi.double() / NOISE_VARIANCE
        covariance = torch.linalg.inv(precision)
        covariance = (covariance + covariance.T) / 2
        mean = covariance @ (phi.double().T @ y.double()) / NOISE_VARIANCE
        target = Target(ToyLikelihood(), priors.Normal(1.0), init={"w": torch.zeros(NUM_FEATURES)}, predict=predict_y)
        return cls(x, (phi, y), weights, mean, covariance, target)

    def predict(self, x: Tensor) -> Prediction:
        """The exact predictive distribution at inputs ``[n]``, as from ``Posterior.predict``."""
        phi = features(x.double())
        variance = torch.einsum("ni,ij,nj->n", phi, self.covariance, phi)
        return Prediction(phi @ self.mean, variance, torch.full_like(variance, NOISE_VARIANCE))

    def draw(self, count: int, seed: int = 0) -> Tensor:
        """Independent exact posterior draws ``[count, 20]``, float64."""
        xi = torch.randn(count, NUM_FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        root: Tensor = torch.linalg.cholesky(self.covariance)
        return self.mean + xi @ root.T


class ToyLikelihood:
    """Log density of each example in two operations, whose number determines the time of a step of so small a model."""

    def __init__(self) -> None:
        self._constant = torch.tensor(-0.5 * math.log(2 * math.pi * NOISE_VARIANCE))

    def __call__(self, params: Params, batch: Any) -> Tensor:
        phi, y = batch
        residual = torch.addmv(y, phi, params["w"], alpha=-1)
        if self._constant.device != y.device:
            self._constant = self._constant.to(y.device)
        return torch.addcmul(self._constant, residual, residual, value=-0.5 / NOISE_VARIANCE)


def predict_y(params: Params, x: Tensor) -> Params:
    """Mean and noise variance of y at inputs ``[n]``."""
    mean = features(x.to(params["w"].dtype)) @ params["w"]
    return {"mean": mean, "variance": torch.full_like(mean, NOISE_VARIANCE)}


def gaussian_w2(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """The 2-Wasserstein distance between two Gaussians.

    ``W2^2 = |mean1 - mean2|^2 + tr(cov1 + cov2 - 2 (cov1^1/2 cov2 cov1^1/2)^1/2)``.

    Example:
        >>> zero, eye = torch.zeros(3), torch.eye(3)
        >>> round(gaussian_w2(zero, eye, zero, 4 * eye), 6)  # sqrt(3) (2 - 1)
        1.732051
    """
    m1, c1, m2, c2 = (torch.as_tensor(a, dtype=torch.float64) for a in (mean1, cov1, mean2, cov2))
    values, vectors = torch.linalg.eigh(c1)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    between = torch.linalg.eigvalsh(root @ c2 @ root).clamp_min(0).sqrt().sum()
    square = (m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * between
    return float(square.clamp_min(0).sqrt())


def compare(draws: Tensor, toy: Toy) -> dict[str, float]:
    """Errors of draws against the exact posterior.

    Args:
        draws: weights ``[..., 20]``, such as ``posterior.draws["w"]``.
        toy: the problem.

    Returns:
        ``mean_error``: Euclidean distance of the means. ``mean_error_sd``: root mean square over weights of the
        error of the mean in posterior standard deviations; about ``1/sqrt(draws)`` for independent draws.
        ``covariance_error``: Frobenius norm of the difference of covariances over that of the exact one.
        ``trace_ratio``: total variance of the draws over the exact one. ``w2``: 2-Wasserstein distance between
        Gaussians of these means and covariances. ``draws``: their number.
    """
    if draws.ndim < 2 or draws.shape[-1] != NUM_FEATURES:
        raise ValueError(f"draws of shape {list(draws.shape)} must be [..., {NUM_FEATURES}]: draws of the weights")
    flat = draws.detach().double().cpu().reshape(-1, NUM_FEATURES)
    if len(flat) < 2:
        raise ValueError(f"a covariance needs at least 2 draws, got {len(flat)}")
    mean, covariance = flat.mean(0), flat.T.cov()
    difference = mean - toy.mean
    return {
        "mean_error": float(difference.norm()),
        "mean_error_sd": float((difference.square() / toy.covariance.diagonal()).mean().sqrt()),
        "covariance_error": float((covariance - toy.covariance).norm() / toy.covariance.norm()),
        "trace_ratio": float(covariance.trace() / toy.covariance.trace()),
        "w2": gaussian_w2(mean, covariance, toy.mean, toy.covariance),
        "draws": len(flat),
    }
