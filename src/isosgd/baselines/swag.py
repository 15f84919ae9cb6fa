"""SWAG, stochastic weight averaging - Gaussian (Maddox, Garipov, Izmailov, Vetrov, Wilson 2019).

After training, plain SGD runs at a constant rate. With its snapshots theta_1, ..., theta_S

    mean = sum_i theta_i / S
    V = diag(sum_i (theta_i - mean)^2 / S)
    D = [theta_i - mean_i], i the last K, mean_i the average up to then

and draws come from ``N(mean, T (V + D D^T / (K - 1)) / 2)``, or ``N(mean, T V)`` without the low-rank part.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from isosgd.baselines.base import LOOKS, PROBES, STABLE, Baseline, Training, TrainingPlan
from isosgd.errors import check_integer, check_positive
from isosgd.target import Params


class Moments:
    """Running mean, variances and last ``rank`` deviations of snapshots."""

    def __init__(self, rank: int) -> None:
        self.count = 0
        self.mean = self._squares = torch.empty(0)
        self.columns: deque[Tensor] = deque(maxlen=rank)

    def add(self, theta: Tensor) -> None:
        """Add a snapshot ``[chains, d]``."""
        theta = theta.to(torch.promote_types(theta.dtype, torch.float32))
        if self.count == 0:
            self.mean, self._squares = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count += 1
        # Welford's algorithm: the mean square less the squared mean, as in the paper, loses all digits of a variance
        # that is small relative to the mean.
        before = theta - self.mean
        self.mean = self.mean + before / self.count
        self._squares += before * (theta - self.mean)
        self.columns.append(theta - self.mean)

    @property
    def variance(self) -> Tensor:
        """V, ``[chains, d]``."""
        return self._squares / self.count

    def draw(self, temperature: float, generator: torch.Generator) -> Tensor:
        """One draw of the Gaussian for each chain, ``[chains, d]``."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)

        move = self.variance.sqrt() * normal(*self.mean.shape)
        if len(self.columns) > 1:
            weights = normal(len(self.columns), self.mean.shape[0], 1) / math.sqrt(len(self.columns) - 1)
            for column, weight in zip(self.columns, weights, strict=True):  # no copy of D
                move = torch.addcmul(move, column, weight)
            move = move / math.sqrt(2.0)
        return self.mean + math.sqrt(temperature) * move


class SWAG(Baseline):
    """A Gaussian fitted to the iterates of SGD at a constant rate.

    Targets no posterior. Near a mode with Hessian ``H`` of ``f / N`` the covariance S of the snapshots solves
    ``H S + S H = rate Var(g)`` to first order in the rate, for any posterior; the default rate makes the mean variance
    right if ``Var(g) = H / n``. Correlated snapshots make the fit narrower than S, and V, half of the fit, has no
    correlations.

    Departures from the paper: the constant rate is chosen (Mandt's, and at most half of 1 / curvature) unless ``lr`` is
    given; SGD without momentum (.9 in the paper, which to first order is plain SGD at ten times the rate); V is centred
    as it is computed; a temperature scales the covariance; positive parameters are Gaussian as logarithms. BatchNorm
    layers get statistics of all data for each draw, as in the paper.

    Args:
        lr: the constant rate; chosen when None.
        rank: K, columns of the low-rank part; 0 for a diagonal Gaussian.
        snapshots: S, ``keep_every`` steps apart, by default an epoch.
        train_lr: the initial rate of Adam in the first training.

    Example:
        >>> from isosgd import Target, priors, sample
        >>> y = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) + 3.0
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]).square().sum(-1), priors.Normal(10.0),
        ...                 init={"mu": torch.zeros(2)})
        >>> posterior = sample(target, (y,), method="swag", draws=50, warmup=1000, progress=False)
        >>> posterior.draws["mu"].shape, bool((posterior.draws["mu"].mean((0, 1)) - y.mean(0)).abs().max() < 0.1)
        (torch.Size([1, 50, 2]), True)
    """

    targets = "a Gaussian around SGD's mean, covariance from H S + S H = rate Var(g)"
    paper = "Maddox et al. 2019"
    departures = "the rate is chosen; plain SGD, no momentum; variances centred as they come"
    tempered = True

    def __init__(self, *, lr: float | None = None, rank: int = 20, snapshots: int = 40, train_lr: float = 0.01) -> None:
        super().__init__(train_lr=train_lr)
        self.lr = None if lr is None else check_positive("lr", lr)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 or rank == 1:
            raise ValueError(f"rank = {rank!r} must be 0 or an integer of at least 2: a part is divided by rank - 1")
        check_integer("snapshots", snapshots, 2)
        self.rank, self.snapshots = rank, snapshots

    def spacing(self, plan: TrainingPlan) -> int:
        return plan.keep_every or plan.epoch

    def expected(self, plan: TrainingPlan) -> int:
        return plan.training + (LOOKS + PROBES) * (self.lr is None) + self.snapshots * self.spacing(plan)

    def run(self, training: Training, plan: TrainingPlan) -> list[Params]:
        training.train(plan.training, self.train_lr)
        rates = training.choose_rate(self.lr, STABLE, mandt=True)
        moments = Moments(self.rank)
        for _ in range(self.snapshots):
            training.run_sgd(self.spacing(plan), rates)
            moments.add(training.chains.flat(training.chains.leaves))
        return [training.natural(moments.draw(plan.temperature, training.generator)) for _ in range(plan.draws)]
