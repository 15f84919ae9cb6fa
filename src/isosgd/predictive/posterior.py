"""Draws and what they predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isosgd.potential import Params, Target


@dataclass(frozen=True)
class Prediction:
    """The posterior predictive distribution of y at some inputs, in its first two moments.

    Attributes:
        mean: predictive mean; class probabilities for a classification.
        model_variance: variance over draws of the mean, what more data would take away.
        noise_variance: mean over draws of the variance of y itself; None when the target does not say.
    """

    mean: Tensor
    model_variance: Tensor
    noise_variance: Tensor | None

    @property
    def variance(self) -> Tensor:
        """Variance of y: of the model and of the noise."""
        return self.model_variance if self.noise_variance is None else self.model_variance + self.noise_variance

    @property
    def std(self) -> Tensor:
        """Standard deviation of y."""
        return self.variance.sqrt()


class Posterior:
    """Posterior draws.

    Attributes:
        draws: natural parameters, a dict of tensors ``[chains, draws, *shape]``.
        info: settings, rates, warm-up reports, seed, versions: how the draws came about.
        target: what was sampled.
    """

    def __init__(self, target: Target, draws: Params, info: dict[str, Any]) -> None:
        self.target, self.draws, self.info = target, draws, info

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return int(next(iter(self.draws.values())).shape[0])

    @property
    def num_draws(self) -> int:
        """Draws of each chain."""
        return int(next(iter(self.draws.values())).shape[1])

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Params]:
        """Every draw in turn, as natural parameters."""
        for chain in range(self.num_chains):
            for draw in range(self.num_draws):
                yield {name: value[chain, draw] for name, value in self.draws.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(value.shape[2:])}" for name, value in self.draws.items())
        size = f"{self.num_chains} chains x {self.num_draws} draws"
        return f"Posterior({size} of {shapes}; method={self.info.get('method')!r})"

    @torch.no_grad()
    def predict(self, x: Any) -> Prediction:
        """Average the predictions of all draws; only running sums are kept.

        Args:
            x: inputs, as the model or the target's ``predict`` takes them.
        """
        count, mean, squares, noise = 0, torch.zeros(()), torch.zeros(()), None
        for natural in self:
            found = self.target.predictive(self.target.unconstrain(natural), x)
            value = found["mean"] if isinstance(found, dict) else found
            variance = found.get("variance") if isinstance(found, dict) else None
            count += 1
            step = value.double() - mean
            mean = mean + step / count
            squares = squares + step * (value.double() - mean)
            if variance is not None:
                noise = variance.double() / count + (0.0 if noise is None else noise * ((count - 1) / count))
        dtype = value.dtype
        return Prediction(mean.to(dtype), (squares / count).to(dtype), None if noise is None else noise.to(dtype))

    @torch.no_grad()
    def log_predictive(self, batch: Any) -> Tensor:
        """Log density of each example under the model average: ``log mean_draws p(y | x, draw)``, ``[n]``.

        Args:
            batch: examples as in the data, for instance ``(x, y)``.
        """
        total = torch.full((), -torch.inf, dtype=torch.float64)
        for natural in self:
            values = self.target.log_likelihood(self.target.unconstrain(natural), batch)
            total = torch.logaddexp(total, values.double())
        return (total - torch.log(torch.tensor(float(len(self)), dtype=torch.float64))).to(values.dtype)
