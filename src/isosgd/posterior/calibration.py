"""Softmax temperatures: how sure predictions of classes are, set by examples that were not trained on.

Logits of every draw are divided by one number, so that the average over draws suits the examples best (Guo, Pleiss, Sun
and Weinberger, 2017, for one network). It does not change what is sampled: the temperature of a density is another
thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from isosgd.target.likelihoods import Bernoulli, Categorical, Likelihood

TEMPERATURES = tuple(math.exp(k / 10) for k in range(-5, 26))
ONE = TEMPERATURES.index(1.0)
FEW = 2  # examples that may look better by chance, as those do of which a network was sure and wrong


def can_be_scaled(likelihood: object) -> bool:
    """Whether a likelihood is one of classes whose logits can be divided by a softmax temperature."""
    return isinstance(likelihood, Categorical | Bernoulli)


def mean_over_labels(likelihood: Likelihood, logits: Tensor) -> Tensor:
    """Mean of the log probabilities of all labels, ``[n]``: what an example with a random label would have."""
    if isinstance(likelihood, Categorical):
        each = logits.log_softmax(1).mean(1)
    else:
        each = 0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))
    return each if each.ndim == 1 else each.flatten(1).sum(1)


@dataclass(frozen=True)
class Densities:
    """Log densities of examples under averages over draws, at each of some softmax temperatures.

    Attributes:
        values: ``[temperatures, averages, n]``.
        random: ``[temperatures]``, the mean of what labels at random would have, draw by draw.
        temperatures: logits are divided by them; 1 alone where predictions are not of classes.
    """

    values: Tensor
    random: Tensor
    temperatures: tuple[float, ...]

    @classmethod
    def of(
        cls, likely: Tensor, random: Tensor, temperatures: tuple[float, ...], counts: Sequence[int] = ()
    ) -> Densities:
        """From `Posterior.likelihoods_at` of the same temperatures.

        Averages are over all draws, or one for each of ``counts`` over so many of the first draws of each chain.
        """
        firsts = [likely[:, :count].flatten(0, 1) for count in counts or [likely.shape[1]]]
        values = torch.stack([x.double().logsumexp(0).T - math.log(len(x)) for x in firsts], 1)
        return cls(values, random, temperatures)

    @property
    def one(self) -> int:
        """Index of the temperature 1."""
        return self.temperatures.index(1.0)

    def __len__(self) -> int:
        """Number of examples."""
        return self.values.shape[-1]

    def some(self, which: slice) -> Densities:
        """The same of some of the examples."""
        return Densities(self.values[..., which], self.random, self.temperatures)

    def unlikely(self, index: int, gain: Tensor) -> float:
        """What speaks against a temperature, for log densities that ``gain`` so much beside those of temperature 1.

        The `FEW` examples that gain most gain nothing, and as many more, which nobody has seen, have labels at random.
        Without it some dozens of examples, all of them right, would make a network as sure as can be.
        """
        most = gain.topk(min(FEW, len(gain))).values.clamp_min(0).sum()
        return float(most) - FEW * min(0.0, float(self.random[index] - self.random[self.one]))


def best_temperature(found: Densities) -> int:
    """Index of the softmax temperature that suits the examples best, under the first of the averages.

    Example:
        >>> from isosgd.posterior.calibration import TEMPERATURES
        >>> logits = torch.tensor([8.0, 0.0]).expand(1000, 2)  # sure of the first class, and right in 900 of 1,000
        >>> y = (torch.arange(1000) % 10 == 0).long()
        >>> at = [(logits / t).log_softmax(1) for t in TEMPERATURES]
        >>> values = torch.stack([x.gather(1, y[:, None])[:, 0] for x in at])[:, None]
        >>> random = torch.stack([x.mean() for x in at])
        >>> best = TEMPERATURES[best_temperature(Densities(values, random, TEMPERATURES))]
        >>> round(best, 2), round(8 / math.log(9), 2)
        (3.67, 3.64)
    """
    base = found.values[found.one, 0]

    def total(index: int) -> float:
        gain = found.values[index, 0] - base
        return float(gain.sum()) - (found.unlikely(index, gain) if index != found.one else 0.0)

    return max(range(len(found.temperatures)), key=total)
