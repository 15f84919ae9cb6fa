"""Snapshots of SGD: at the end of cycles (Huang et al. 2017), or at a constant rate (Mandt, Hoffman, Blei 2017).

    theta <- theta - rate_t g,    rate_t = lr (1 + cos(pi r)) / 2,    r = (t mod keep_every) / keep_every

or ``rate_t = lr``; a draw every ``keep_every`` steps.
"""

from __future__ import annotations

from typing import Literal

from isosgd.baselines.base import LOOKS, PROBES, STABLE, Baseline, Training, TrainingPlan
from isosgd.errors import check_positive
from isosgd.samplers.schedules import cosine
from isosgd.target import Params

Schedule = Literal["cyclical", "constant"]
EPOCHS, LEAST_CYCLE = 2, 100  # of a cycle


class Snapshots(Baseline):
    """The state of SGD at the end of each cycle of its rate, or every ``keep_every`` steps at a constant rate.

    Targets no posterior. On a quadratic potential with Hessian ``H`` of ``f / N`` the covariance S of the draws follows
    ``S <- (I - rate_t H) S (I - rate_t H) + rate_t^2 Var(g)`` from step to step: at a constant rate that of V-SGD, at
    the end of a cycle far smaller, since the rate has fallen to zero. Otherwise, cycles may end in different modes,
    with frequencies that depend on SGD.

    Departures from the papers: SGD has no momentum, as that of Huang et al. has; all snapshots come after a first
    training with Adam; the rate is chosen unless ``lr`` is given: 1 / curvature at the start of a cycle, and for
    constant rates that of V-SGD, at most half of 1 / curvature.

    Args:
        schedule: ``cyclical`` or ``constant``.
        lr: the highest rate of a cycle, or the constant one; chosen when None.
        train_lr: the initial rate of Adam in the first training.
    """

    targets = "where SGD stops: minima, or at a constant rate the Gaussian of vsgd"
    paper = "Huang et al. 2017; Mandt, Hoffman, Blei 2017"
    departures = "the rate is chosen; plain SGD, no momentum; a first training with Adam"

    def __init__(self, *, schedule: Schedule = "cyclical", lr: float | None = None, train_lr: float = 0.01) -> None:
        super().__init__(train_lr=train_lr)
        if schedule not in ("cyclical", "constant"):
            raise ValueError(f"schedule = {schedule!r} is unknown; choose one of 'cyclical', 'constant'")
        self.schedule = schedule
        self.lr = None if lr is None else check_positive("lr", lr)

    def spacing(self, plan: TrainingPlan) -> int:
        if plan.keep_every is not None:
            return plan.keep_every
        return max(EPOCHS * plan.epoch, LEAST_CYCLE) if self.schedule == "cyclical" else plan.epoch

    def expected(self, plan: TrainingPlan) -> int:
        return plan.training + (LOOKS + PROBES) * (self.lr is None) + plan.draws * self.spacing(plan)

    def run(self, training: Training, plan: TrainingPlan) -> list[Params]:
        training.train(plan.training, self.train_lr)
        cyclical, length = self.schedule == "cyclical", self.spacing(plan)
        rates = training.choose_rate(self.lr, 2 * STABLE if cyclical else STABLE, mandt=not cyclical)
        found = []
        for _ in range(plan.draws):
            training.run_sgd(length, rates, (lambda step: cosine(step / length)) if cyclical else None)
            found.append(training.chains.natural())
        return found
