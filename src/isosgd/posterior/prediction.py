"""Predictions averaged over draws in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from isosgd.metrics import mixture_quantiles
from isosgd.metrics.checks import between_0_and_1
from isosgd.posterior.draws import by_chain

CLOSE = 1e-9  # levels closer than this are equal


@dataclass(frozen=True)
class Prediction:
    """The posterior predictive distribution of y at some inputs, averaged over all draws.

    Attributes:
        mean: predictive mean; class probabilities for a classification.
        model_variance: variance of the mean over draws, which more data would reduce.
        noise_variance: mean over draws of the variance of y; None if unknown.
        expected_entropy: mean over draws of the entropy of y, ``[n]``; only for classification.
        levels: probabilities of the quantiles.
        quantiles: at these levels, ``[levels, *shape]``; None without levels.
        draws: per-draw predictions ``[chains, draws, *shape]``, if requested.
        draw_variances: per-draw noise variances ``[chains, draws, *shape]``, if requested.
        df: degrees of freedom of Student-t noise around each draw's mean, infinite for normal noise; None for any
            other.
    """

    mean: Tensor
    model_variance: Tensor
    noise_variance: Tensor | None
    expected_entropy: Tensor | None = None
    levels: tuple[float, ...] = ()
    quantiles: Tensor | None = None
    draws: Tensor | None = None
    draw_variances: Tensor | None = None
    df: float | None = math.inf

    @property
    def variance(self) -> Tensor:
        """Variance of y: model variance plus noise variance."""
        return self.model_variance if self.noise_variance is None else self.model_variance + self.noise_variance

    @property
    def std(self) -> Tensor:
        """Standard deviation of y."""
        return self.variance.sqrt()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged class probabilities, ``[n]``."""
        self._check_classes()
        return entropy_of(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        """The part of the entropy that comes from disagreement of draws, ``[n]``, which more data would reduce."""
        self._check_classes()
        assert self.expected_entropy is not None
        return (entropy_of(self.mean) - self.expected_entropy).clamp_min(0)

    def quantile(self, levels: float | Sequence[float]) -> Tensor:
        """Quantiles of y, ``[*shape]`` for one level and ``[levels, *shape]`` for several.

        They come from ``predict(levels=...)``, or from the returned draws.
        """
        many = levels if isinstance(levels, Sequence) else [levels]
        found = [next((i for i, own in enumerate(self.levels) if abs(own - level) < CLOSE), None) for level in many]
        if self.quantiles is not None and None not in found:
            values = torch.stack([self.quantiles[i] for i in found if i is not None])
        elif self.draws is not None:
            variances = None if self.draw_variances is None else self.draw_variances.flatten(0, 1)
            values = quantiles_over_draws(self.draws.flatten(0, 1), variances, many, self.df)
        else:
            raise ValueError(
                f"quantiles at {[round(level, 6) for level in many]} were not requested (there are "
                f"{list(self.levels)}): predict(x, levels=...) finds some, predict(x, return_draws=True) lets you "
                "choose later"
            )
        return values if isinstance(levels, Sequence) else values[0]

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the central interval of y, with equal probability below and above.

        It needs ``predict(x, levels=central(level))`` or ``predict(x, return_draws=True)``.
        """
        low, high = self.quantile(central(level))
        return low, high

    def to(self, device: torch.device | str) -> Prediction:
        """The prediction on a device."""
        there: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **there)

    def __repr__(self) -> str:
        there = [f"{f.name} {list(x.shape)}" for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)]
        return f"Prediction({', '.join(there)})"

    def _check_classes(self) -> None:
        if self.expected_entropy is None:
            raise ValueError(
                "these predictions are not class probabilities of a 'categorical' or 'bernoulli' likelihood, so they "
                "have no entropy; look at model_variance and noise_variance"
            )


def central(level: float) -> tuple[float, float]:
    """The two probabilities at the ends of a central interval.

    Example:
        >>> [round(p, 3) for p in central(0.95)]
        [0.025, 0.975]
    """
    tail = (1 - between_0_and_1("level", level)) / 2
    return tail, 1 - tail


def entropy_of(probabilities: Tensor) -> Tensor:
    """Entropy over the classes in dimension 1; with one column or none, of a binary y."""
    if probabilities.ndim > 1 and probabilities.shape[1] > 1:
        parts: Tensor = torch.special.entr(probabilities)
        return parts.sum(1)
    one = probabilities.flatten(1).squeeze(1) if probabilities.ndim > 1 else probabilities
    both: Tensor = torch.special.entr(one) + torch.special.entr(1 - one)
    return both


def quantiles_over_draws(means: Tensor, variances: Tensor | None, levels: Sequence[float], df: float | None) -> Tensor:
    """Quantiles ``[levels, *shape]`` of y from per-draw predictions ``[draws, *shape]``.

    If each draw predicts a normal or Student-t distribution, these are quantiles of the mixture; if it predicts a
    number, quantiles of these numbers.
    """
    if variances is None:
        at = torch.tensor([between_0_and_1("levels", p) for p in levels], dtype=torch.float64, device=means.device)
        return torch.quantile(means.double(), at, dim=0).to(means.dtype)
    if df is None:
        raise ValueError(
            "y has no normal noise around each draw's mean, so its quantiles are not those of a normal mixture; give "
            "predict(x, function=...) the number you want quantiles of"
        )
    mean, variance = (x.reshape(len(x), -1) for x in (means, variances.expand_as(means)))
    return mixture_quantiles(mean, variance, list(levels), df=df).reshape(len(levels), *means.shape[1:]).to(means.dtype)


class Average:
    """Running moments over draws of predictions for one batch of inputs.

    Args:
        classes: whether predictions are class probabilities.
        keep: whether to keep per-draw predictions.
    """

    def __init__(self, classes: bool, keep: bool) -> None:
        self.classes, self.keep, self.count = classes, keep, 0
        self._mean = self._squares = torch.zeros(())
        self._noise: Tensor | None = None
        self._entropy = torch.zeros(())
        self._kept: list[Tensor] = []
        self._kept_variances: list[Tensor] = []

    def add(self, values: Tensor, variances: Tensor | None, times: int = 1) -> None:
        """Add draws ``[draws, *shape]``, ``times`` times; moments are combined as in Chan, Golub and LeVeque (1979)."""
        wide = values.double()
        number, mean = len(wide) * times, wide.mean(0)
        total = self.count + number
        step = mean - self._mean
        within = (wide - mean).square().sum(0) * times
        self._squares = self._squares + within + step.square() * (self.count * number / total)
        self._mean = self._mean + step * (number / total)
        if variances is not None:
            before = self._noise if self._noise is not None else 0.0
            self._noise = before + (variances.double().mean(0) - before) * (number / total)
        if self.classes:
            each = torch.stack([entropy_of(x) for x in wide]).mean(0)
            self._entropy = self._entropy + (each - self._entropy) * (number / total)
        if self.keep:
            self._kept += [values] * times
            if variances is not None:
                self._kept_variances += [variances.expand_as(values)] * times
        self.count, self._dtype = total, values.dtype

    def prediction(self, chains: int, levels: Sequence[float], df: float | None, return_draws: bool) -> Prediction:
        """The average over the draws so far."""
        dtype = self._dtype
        found = Prediction(
            self._mean.to(dtype),
            (self._squares / self.count).to(dtype),
            None if self._noise is None else self._noise.to(dtype),
            self._entropy.to(dtype) if self.classes else None,
            levels=tuple(levels),
            df=df,
        )
        if not self._kept:
            return found
        every, variances = torch.cat(self._kept), torch.cat(self._kept_variances) if self._kept_variances else None
        if levels:
            found = replace(found, quantiles=quantiles_over_draws(every, variances, levels, df))
        if return_draws:
            shaped = None if variances is None else by_chain(variances, chains)
            found = replace(found, draws=by_chain(every, chains), draw_variances=shaped)
        return found


def join(parts: Sequence[Prediction]) -> Prediction:
    """Concatenate predictions for several batches of inputs."""
    if len(parts) == 1:
        return parts[0]
    leading = {"quantiles": 1, "draws": 2, "draw_variances": 2}  # position of the dimension of inputs
    tensors = [name for name, x in vars(parts[0]).items() if isinstance(x, Tensor)]
    whole: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts], leading.get(name, 0)) for name in tensors
    }
    return replace(parts[0], **whole)
