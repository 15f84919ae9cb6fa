"""The width of predictions: their calibration by held-out examples.

The logits of every draw are divided by one number, or the noise scales of a regression multiplied by it, chosen so that
the average over draws predicts the examples best (Guo, Pleiss, Sun and Weinberger, 2017, for one network; there it is
the softmax temperature). This does not change what is sampled, and is not the temperature of a density. Noise is never
made smaller: some dozens of rows often lack the outliers of others.

Without held-out examples, each training example is predicted as if it had been left out (`leave_one_out`), and the
logarithm of the average is divided (`sharpened`), since an average over a wide posterior is less confident than its
draws, and scaling their logits hardly changes that (Rahaman and Thiery, 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from isosgd.errors import warn_caller
from isosgd.target.likelihoods import Bernoulli, Categorical, Likelihood, has_classes
from isosgd.target.params import Params

# From 0.61 to 12 in steps of 10%, with a few beyond.
WIDTHS = tuple(math.exp(k / 10) for k in (-25, -20, -15, -10, *range(-5, 26), 30, 35, 40, 45, 50))
AVERAGES = tuple(math.exp(k / 20) for k in sorted(range(-50, 51), key=abs))  # for averages; ties go to the nearest to 1
FEW = 2  # examples whose gain may be luck, such as those a network got wrong with confidence
UNSEEN = 1  # examples with random labels, added to those left out one by one


def widths_of(likelihood: object) -> tuple[float, ...]:
    """Those that are tried: for noise none below 1; only 1 where predictions have no width."""
    if not (isinstance(likelihood, Likelihood) and likelihood.has_width):
        return (1.0,)
    return WIDTHS if has_classes(likelihood) else tuple(w for w in WIDTHS if w >= 1)


def label_and_mean(likelihood: Likelihood, logits: Tensor, y: Tensor) -> Tensor:
    """Log probability of each example's label, and the mean over all possible labels, ``[n, 2]``."""
    if isinstance(likelihood, Categorical):
        every = logits.log_softmax(1)
        label = every.gather(1, y.long().reshape(len(y), 1, *every.shape[2:])).squeeze(1)
    else:
        every = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], 1)
        label = torch.where(y.reshape(logits.shape) > 0, every[:, 1], every[:, 0])
    possible = every > -math.inf
    mean = every.masked_fill(~possible, 0.0).sum(1) / possible.sum(1)
    return torch.stack([label.reshape(len(y), -1).sum(1), mean.reshape(len(y), -1).sum(1)], -1)


def likelihood_and_mean(likelihood: Likelihood, output: Tensor, y: Tensor, params: Params, width: float) -> Tensor:
    """Log likelihood of each example at a width of predictions, and its mean over labels (numbers: 0), ``[n, 2]``."""
    output, params = likelihood.wider(output, params, width)
    if isinstance(likelihood, Categorical | Bernoulli):
        return label_and_mean(likelihood, output, y)
    found = likelihood.log_prob(output, y, params)
    return torch.stack([found, torch.zeros_like(found)], -1)


@dataclass(frozen=True)
class Densities:
    """Log densities of examples under averages over draws, at several widths of predictions.

    Attributes:
        values: ``[widths, averages, n]``.
        random: ``[widths]``, the mean log density of random labels under single draws.
        widths: softmax temperatures, or factors of the noise scale; only 1 where predictions have neither.
    """

    values: Tensor
    random: Tensor
    widths: tuple[float, ...]

    @classmethod
    def joined(cls, parts: Sequence[Densities]) -> Densities:
        """Concatenate examples."""
        sizes = torch.tensor([len(part) for part in parts], dtype=torch.float64)
        random = (torch.stack([part.random for part in parts]) * sizes[:, None]).sum(0) / sizes.sum()
        return cls(torch.cat([part.values for part in parts], -1), random, parts[0].widths)

    @property
    def one(self) -> int:
        """Index of the width 1."""
        return self.widths.index(1.0)

    def __len__(self) -> int:
        """Number of examples."""
        return self.values.shape[-1]

    def some(self, which: slice) -> Densities:
        """A slice of the examples."""
        return Densities(self.values[..., which], self.random, self.widths)

    def plain(self) -> Densities:
        """Only width 1."""
        only = slice(self.one, self.one + 1)
        return Densities(self.values[only], self.random[only], (1.0,))

    def unlikely(self, index: int, gain: Tensor) -> float:
        """Penalty of a width whose log densities exceed those at width 1 by ``gain``.

        It removes the gains of the `FEW` examples that gain most, and adds as many examples with random labels.
        Otherwise a few dozen examples that are all right would make a network fully confident.
        """
        most = gain.topk(min(FEW, len(gain))).values.clamp_min(0).sum()
        return float(most) - FEW * min(0.0, float(self.random[index] - self.random[self.one]))


def averaged(blocks: Iterable[Tensor], widths: tuple[float, ...], counts: Sequence[int], draws: int) -> Densities:
    """Running averages over blocks ``[draws, n, widths, 2]`` from `likelihood_and_mean`.

    Args:
        blocks: draws in order, one chain after the other.
        widths: of the predictions.
        counts: for each average, the number of first draws of each chain in it.
        draws: number of draws of each chain.
    """
    sums: list[Tensor | None] = [None] * len(counts)
    random, done, taken = torch.zeros(len(widths), dtype=torch.float64), 0, [0] * len(counts)
    for block in blocks:
        each, place = block[..., 0].double(), torch.arange(done, done + len(block)) % draws
        for i, count in enumerate(counts):
            if bool((mine := place < count).any()):
                found, before = each[mine.to(each.device)].logsumexp(0), sums[i]
                sums[i] = found if before is None else torch.logaddexp(before, found)
                taken[i] += int(mine.sum())
        random += block[..., 1].double().mean(1).sum(0).cpu()
        done += len(block)
    least = torch.finfo(torch.float32).min  # of impossible examples: differences must be numbers
    values = [(x.T.cpu() - math.log(n)).clamp_min(least) for x, n in zip(sums, taken, strict=True) if x is not None]
    return Densities(torch.stack(values, 1), random / done, widths)


def best_width(found: Densities) -> int:
    """Index of the width that predicts the examples best, under the first average.

    Example:
        >>> from isosgd.posterior.calibration import WIDTHS
        >>> logits = torch.tensor([8.0, 0.0]).expand(1000, 2)  # sure of the first class, and right in 900 of 1,000
        >>> y = (torch.arange(1000) % 10 == 0).long()
        >>> at = [(logits / t).log_softmax(1) for t in WIDTHS]
        >>> values = torch.stack([x.gather(1, y[:, None])[:, 0] for x in at])[:, None]
        >>> random = torch.stack([x.mean() for x in at])
        >>> best = WIDTHS[best_width(Densities(values, random, WIDTHS))]
        >>> round(best, 2), round(8 / math.log(9), 2)
        (3.67, 3.64)
    """
    base = found.values[found.one, 0]

    def total(index: int) -> float:
        gain = found.values[index, 0] - base
        return float(gain.sum()) - (found.unlikely(index, gain) if index != found.one else 0.0)

    return max(range(len(found.widths)), key=lambda index: (total(index), index == found.one))


def leave_one_out(probabilities: Tensor, y: Tensor) -> Tensor:
    """Log probabilities ``[n, classes]`` of each example under a posterior that has not seen it.

    Draws ``[draws, n, classes]`` of a posterior that has are weighted by the inverse likelihood of the example. Weights
    are capped at the root of the number of draws over the mean likelihood, so that a draw that is confident of another
    class does not dominate.

    Example:
        >>> said = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).unsqueeze(1)  # two draws of one example, of the first class
        >>> leave_one_out(said, torch.tensor([0])).exp()
        tensor([[0.7200, 0.2800]])
    """
    logs = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
    likely = logs[:, torch.arange(len(y)), y]
    random = likely.logsumexp(0) - math.log(len(likely))
    weights = torch.minimum(-likely, 0.5 * math.log(len(likely)) - random)
    return (logs + (weights - weights.logsumexp(0)).unsqueeze(-1)).logsumexp(0)


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Probabilities ``[..., classes]`` at a softmax temperature; below 1 is more confident.

    Example:
        >>> sharpened(torch.tensor([0.8, 0.2]), 0.5)
        tensor([0.9412, 0.0588])
    """
    if temperature == 1:
        return probabilities
    logs = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
    return (logs / temperature).softmax(-1)


def sharpest(logs: Tensor, y: Tensor) -> float:
    """The softmax temperature under which averages predict best, from their logarithms ``[n, classes]`` and labels.

    `UNSEEN` further examples with random labels penalise temperatures below 1, so that a few dozen examples that are
    all right do not make an average fully confident.

    Example:
        >>> logs = torch.tensor([[0.7, 0.3]]).log()  # of examples of which nine in ten are of the first class
        >>> y = (torch.arange(1000) % 10 == 0).long()
        >>> found = sharpest(logs.expand(1000, 2), y)
        >>> bool(abs(sharpened(logs.exp(), found)[0, 0] - 0.9) < 0.03)
        True
    """
    plain = label_and_mean(Categorical(), logs, y).double().mean(0)

    def gain(temperature: float) -> float:
        label, random = (label_and_mean(Categorical(), logs / temperature, y).double().mean(0) - plain).tolist()
        return float(len(y) * label + UNSEEN * min(0.0, random))

    return max(AVERAGES, key=gain)


def name_of_width(classes: bool) -> str:
    """What the width of predictions is called."""
    return "softmax temperature" if classes else "noise factor"


def warn_of_end(width: float, classes: bool) -> None:
    """Warn of a width at the end of the grid."""
    if width in (WIDTHS[0], WIDTHS[-1]):
        sure, low = "sure" if width > 1 else "unsure", WIDTHS[0] if classes else 1.0
        warn_caller(
            f"the {name_of_width(classes)} {width:.3g} is the last of those that are tried, {low:.2g} to "
            f"{WIDTHS[-1]:.3g}: predictions are far too {sure} for these examples; do inputs and what is to be "
            "predicted belong together?"
        )
