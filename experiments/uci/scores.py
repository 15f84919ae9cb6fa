"""How well the chains of one split of a UCI set predict what they have not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from experiments.data.uci import UCISet
from experiments.uci.tables import Split
from isosgd import Posterior
from isosgd.diagnostics import traces
from isosgd.metrics import mixture_coverage, mixture_crps, rmse

TRACED = 64  # held-out predictions whose R-hat is taken
VALIDATED = 0.1  # share of the training rows


class Scaled:
    """One split, scaled to mean 0 and standard deviation 1 by the rows that are trained on.

    Args:
        table: the set.
        split: number of the split.
        validate: hold out a share of the training rows, the same in every run, in place of the test rows.

    Attributes:
        split: its number.
        train: features and targets ``[N, 1]``, scaled.
        x: held-out features, scaled.
        y: held-out targets, as they are.
        mean: of the targets trained on.
        scale: their standard deviation.
    """

    def __init__(self, table: UCISet, split: int, validate: bool = False) -> None:
        rows, held_out = table.splits[split]
        if validate:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(split))
            count = round(VALIDATED * len(rows))
            rows, held_out = rows[order[count:]], rows[order[:count]]
        x, y = table.x[rows], table.y[rows]
        # A column that never changes says nothing; it must not become NaN.
        spread = x.std(0, correction=0)
        spread = torch.where(spread > 0, spread, 1.0)
        self.split, self.mean, self.scale = split, y.mean(), y.std(correction=0)
        self.train = ((x - x.mean(0)) / spread).float(), ((y - self.mean) / self.scale).float().unsqueeze(-1)
        self.x, self.y = ((table.x[held_out] - x.mean(0)) / spread).float(), table.y[held_out]


@torch.no_grad()
def predictions(posterior: Posterior, chains: Sequence[int], one: Scaled) -> tuple[Tensor, Tensor]:
    """Mean and variance of the held-out targets, in their units, for each draw: ``[chains, draws, n]``."""
    found = posterior.select(chains=chains).predict(one.x, return_draws=True)
    assert found.draws is not None and found.draw_variances is not None  # asked for, and the likelihood has a variance
    shape = *found.draws.shape[:2], len(one.x)
    mean = found.draws.reshape(shape).double() * one.scale + one.mean
    return mean, found.draw_variances.reshape(*shape[:2], -1).double().expand_as(mean) * one.scale**2


def normal_variances(posterior: Posterior, variance: Tensor) -> Tensor:
    """Variances of normal noise that make up the noise of each draw, if one is drawn for each example.

    A Student-t is normal with a variance that is drawn itself: ``s^2 df / chi^2(df)``. So its quantiles and its CRPS
    are those of a normal mixture, too, to within what chance does to some hundred draws.
    """
    assert posterior.target is not None
    likelihood = posterior.target.describe()["likelihood"]
    if likelihood["name"] != "StudentT":
        return variance
    tails = float(likelihood["df"])
    return variance * (tails - 2) / torch.from_numpy(np.random.default_rng(0).chisquare(tails, tuple(variance.shape)))


def log_density(posterior: Posterior, chains: Sequence[int], one: Scaled) -> Tensor:
    """Of the held-out targets, in their units, averaged over draws: ``[n]``."""
    y = ((one.y - one.mean) / one.scale).to(one.x.dtype).unsqueeze(-1)
    each = posterior.select(chains=chains).log_likelihood((one.x, y)).double().flatten(0, 1)
    return each.logsumexp(0) - math.log(len(each)) - one.scale.double().log()


def measure(posterior: Posterior, one: Scaled, chains: Sequence[int], seconds: float) -> Split:
    """What the chains of one split reached."""
    kept = posterior.info["chain_indices"]
    alive = [kept.index(k) for k in chains if k in kept]
    dropped = tuple(f"chain {k}: {posterior.info['dropped'][k]}" for k in chains if k not in kept)
    gradients = posterior.info["gradients"] / (len(kept) + len(posterior.info["dropped"])) * len(list(chains))
    if not alive:
        return Split(one.split, gradients=gradients, seconds=seconds, dropped=dropped)
    mean, variance = predictions(posterior, alive, one)
    traced = mean[..., :TRACED].numpy()
    rhat = float(np.max(traces.rhat(traced))) if len(alive) > 1 else math.nan
    ess = float(np.min(traces.ess(traced)))
    mean, variance = mean.flatten(0, 1), normal_variances(posterior, variance.flatten(0, 1))
    return Split(
        one.split,
        rmse=float(rmse(mean.mean(0), one.y)),
        mnll=-float(log_density(posterior, alive, one).mean()),
        coverage=float(mixture_coverage(mean, variance, one.y)),
        crps=float(mixture_crps(mean, variance, one.y)),
        rhat=rhat if math.isfinite(rhat) else None,
        ess=ess if math.isfinite(ess) else None,
        gradients=gradients,
        seconds=seconds,
        dropped=dropped,
    )
