"""The loop: warm chains up and draw from them, so that a run that was stopped can go on from a state of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from isosgd.chain.alarms import warn_of
from isosgd.chain.chain import Chains
from isosgd.chain.progress import Progress
from isosgd.chain.reports import GroupReport, WarmupReport
from isosgd.chain.state import failure_from, failure_state, load_state, moved, state_of
from isosgd.chain.warmup import Mark, warm_up
from isosgd.errors import DivergedError

GUESSED_SPACING = 100  # for the progress bar, until the spacing is known

State = dict[str, Any]
Auto = Literal["auto"]


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        draws: of each chain.
        keep_every: steps between draws.
        warmup: gradients of the warm-up.
        noise_every: how often the noise is measured while draws are taken.
        total: chains in all.
    """

    draws: int
    keep_every: int | Auto
    warmup: int | Auto
    noise_every: int
    total: int

    @property
    def spacing(self) -> int:
        """Steps between draws, before they are known."""
        return GUESSED_SPACING if self.keep_every == "auto" else self.keep_every


@dataclass
class Outcome:
    """What came of chains that ran side by side.

    Attributes:
        first: index of the first of them.
        count: how many.
        reports: of their warm-up.
        lengths: good draws of those that were given up before the end.
        failures: why.
        gradients: spent on each.
        compiled: whether gradients came to be compiled, in words.
        batches: where in the data they ended.
    """

    first: int
    count: int
    reports: list[WarmupReport] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    failures: dict[int, DivergedError] = field(default_factory=dict)
    gradients: int = 0
    compiled: str = ""
    batches: State = field(default_factory=dict)

    def state(self) -> State:
        """As nested tensors and plain values."""
        return {
            **vars(self),
            "reports": [report.as_dict() for report in self.reports],
            "failures": {k: failure_state(error) for k, error in self.failures.items()},
        }

    @staticmethod
    def from_state(state: State) -> Outcome:
        """The same again."""
        reports = [report_from(report) for report in state["reports"]]
        failures = {k: failure_from(saved) for k, saved in state["failures"].items()}
        return Outcome(**{**state, "reports": reports, "failures": failures})


def report_from(state: State) -> WarmupReport:
    """A report from its `as_dict`."""
    return WarmupReport(**{**state, "groups": [GroupReport(**group) for group in state["groups"]]})


class Keeper(Protocol):
    """Where draws go."""

    def keep(self, run: Chains, first: int, number: int) -> None:
        """Take draw ``number``, where the chains are now."""

    def warmed(self, outcome: Outcome) -> None:
        """Told when chains have warmed up."""

    def mark(self, state: Callable[[], State]) -> None:
        """Told wherever the chains could go on from later, with what gives their state."""


def draw_from(
    run: Chains,
    first: int,
    plan: Plan,
    bar: Progress,
    keeper: Keeper,
    saved: State | None = None,
    note: Callable[[int, Tensor, dict[str, Any], int], None] | None = None,
) -> Outcome:
    """Warm up chains and draw from them.

    Args:
        run: the chains.
        first: index of the first of them.
        plan: what is asked for.
        bar: told of every step.
        keeper: where draws go.
        saved: a state that `keeper` was told of, from which to go on.
        note: told of gradients, loss and rates at every draw, and of the first chain's index.
    """
    label = f"chain {first + 1}/{plan.total} " if run.many is None and plan.total > 1 else ""
    outcome = Outcome(first, run.count)
    done, drawn, late = 0, 0, list[Tensor]()
    if saved is not None:
        saved = moved(saved, run.alive.device)
        load_state(run, saved["chains"])
        bar.advance(label + "resuming", run.count * run.gradients)
    try:
        if saved is None or saved["stage"] == "warmup":

            def mark(state: Callable[[], State]) -> None:
                keeper.mark(lambda: {"stage": "warmup", "chains": state_of(run), "warmup": state()})

            outcome.reports = _find_rates(run, plan, bar, mark, None if saved is None else saved["warmup"])
        else:
            outcome.reports = [report_from(report) for report in saved["reports"]]
            done, drawn, late = saved["done"], saved["drawn"], list(saved["late"].unbind())
            outcome.lengths = saved["lengths"]
        keeper.warmed(outcome)
        gap = outcome.reports[0].keep_every or plan.spacing
        bar.total = plan.total * (outcome.reports[0].steps + plan.draws * gap)

        def state() -> State:
            return {
                "stage": "sampling",
                "chains": state_of(run),
                "reports": [report.as_dict() for report in outcome.reports],
                "lengths": outcome.lengths,
                "done": done,
                "drawn": drawn,
                "late": torch.stack(late) if late else torch.empty(0),
            }

        keeper.mark(state)
        while drawn < plan.draws:
            left = gap
            while left:
                run.step(split=run.follows and done % plan.noise_every == 0)
                done += 1
                left -= run.sampler.sampling
                bar.advance(label + "sampling", run.count)
            if drawn >= plan.draws // 2:
                late.append(run.level)
            keeper.keep(run, first, drawn)
            if note is not None:
                note(run.gradients, run.level, {g["name"]: g["rate"] for g in run.sampler.param_groups}, first)
            for k in run.failures:  # draws of a chain end where it was given up
                outcome.lengths.setdefault(k, drawn)
            drawn += 1
            keeper.mark(state)
        warn_of(run, outcome.reports, late, first)
    except DivergedError:
        pass  # every chain has
    for k in run.failures:
        outcome.lengths.setdefault(k, drawn)
    outcome.failures, outcome.gradients, outcome.compiled = run.failures, run.gradients, run.compiled
    outcome.batches = run.batches.state()
    return outcome


def _find_rates(run: Chains, plan: Plan, bar: Progress, mark: Mark, saved: State | None) -> list[WarmupReport]:
    measure_spacing = plan.keep_every == "auto"
    if plan.warmup == 0:
        if any(group["rate"] is None for group in run.sampler.param_groups):
            raise ValueError("warmup = 0 leaves no rate: give lr (or lam) to the method, or let warmup be 'auto'")
        if measure_spacing:
            raise ValueError("keep_every='auto' is measured in the warm-up: give a number, or let warmup be 'auto'")
        return [WarmupReport(True, "", 0, 0, None) for _ in range(run.count)]
    return warm_up(run, None if plan.warmup == "auto" else int(plan.warmup), bar, measure_spacing, mark, saved)
