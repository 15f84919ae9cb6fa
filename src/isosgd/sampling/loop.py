"""The loop: warm chains up and draw from them, so that a run that was stopped can go on from a state of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from isosgd.engine import leapfrog, multistep
from isosgd.engine.chains import Chains
from isosgd.engine.graph import GraphSteps, accelerate
from isosgd.engine.leapfrog import LeapfrogMultiStep
from isosgd.engine.multistep import MultiStep
from isosgd.engine.state import failure_from, failure_state, load_state, moved, state_of
from isosgd.errors import DivergedError
from isosgd.progress import Progress
from isosgd.sampling.stopping import Watch
from isosgd.warmup.alarms import warn_of
from isosgd.warmup.reports import GroupReport, WarmupReport
from isosgd.warmup.windows import warm_up

GUESSED_SPACING = 100  # for the progress bar, until the spacing is known
NOISE_EVERY = 16  # in sampling the noise is followed, not found: every 16th step is split in halves ...
SHAPED_EVERY = 128  # ... and fewer where a shape of Lambda averages all that it has seen
MULTI_STEP_FROM = 4_000  # steps, for which it pays to compile several in a call ...
SINGLE_CHAIN = 5  # ... and so many times more for one chain, whose single steps take less time

State = dict[str, Any]
Steps = MultiStep | GraphSteps | LeapfrogMultiStep  # what takes many steps in a call
Auto = Literal["auto"]


@dataclass(frozen=True)
class DrawPlan:
    """How many draws to take of chains, and how.

    Attributes:
        draws: of each chain; at most, where they are ``auto``.
        keep_every: steps between draws.
        warmup: gradients of the warm-up.
        noise_every: how often the noise is measured while draws are taken, where that is said.
        total: chains in all.
        compile_after: gradients after which it pays to compile; None for never, 0 for at once.
        auto: whether draws end when predictions have converged.
        chains_per_set: chains of one data set, where they run side by side.
        held_out: inputs at which predictions are watched.
    """

    draws: int
    keep_every: int | Auto
    warmup: int | Auto
    noise_every: int | None
    total: int
    compile_after: int | None = None
    auto: bool = False
    chains_per_set: int = 1
    held_out: Any = None

    @property
    def spacing(self) -> int:
        """Steps between draws, before they are known."""
        return GUESSED_SPACING if self.keep_every == "auto" else self.keep_every

    def noise_interval(self, chains: Chains) -> int:
        """Steps from one measurement of the noise to the next."""
        return self.noise_every or (NOISE_EVERY if chains.geometry is None else SHAPED_EVERY)


@dataclass
class ChainsResult:
    """Reports, failures and costs of chains that ran side by side.

    Attributes:
        first: index of the first of them.
        count: how many.
        reports: of their warm-up.
        lengths: good draws of those that were dropped before the end.
        failures: why.
        gradients: spent on each.
        compiled: how their steps were executed, to be added to the name of the engine.
        batches: where in the data they ended.
        drawn: how many draws were taken of each.
        stopped: why no more, where that was not said before.
    """

    first: int
    count: int
    reports: list[WarmupReport] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    failures: dict[int, DivergedError] = field(default_factory=dict)
    gradients: int = 0
    compiled: str = ""
    batches: State = field(default_factory=dict)
    drawn: int = 0
    stopped: str = ""

    def state(self) -> State:
        """As nested tensors and plain values."""
        return {
            **vars(self),
            "reports": [report.as_dict() for report in self.reports],
            "failures": {k: failure_state(error) for k, error in self.failures.items()},
        }

    @staticmethod
    def from_state(state: State) -> ChainsResult:
        """The same again."""
        reports = [report_from(report) for report in state["reports"]]
        failures = {k: failure_from(saved) for k, saved in state["failures"].items()}
        return ChainsResult(**{**state, "reports": reports, "failures": failures})


def report_from(state: State) -> WarmupReport:
    """A report from its `as_dict`."""
    unknown = sorted(set(state) - set(WarmupReport.__dataclass_fields__))
    if unknown:
        raise ValueError(
            f"a report of the warm-up has {unknown[0]!r}: the run was begun by another version of isosgd; finish it "
            "with that version"
        )
    return WarmupReport(**{**state, "groups": [GroupReport(**group) for group in state["groups"]]})


class Keeper(Protocol):
    """Where draws go."""

    def keep(self, run: Chains, first: int, number: int) -> None:
        """Take draw ``number``, where the chains are now."""

    def warmed(self, result: ChainsResult) -> None:
        """Told when chains have warmed up."""

    def mark(self, state: Callable[[], State]) -> None:
        """Told wherever the chains could go on from later, with what gives their state."""


def run_chains(
    chains: Chains,
    first: int,
    plan: DrawPlan,
    bar: Progress,
    keeper: Keeper,
    saved: State | None = None,
    note: Callable[[int, Tensor, dict[str, Any], int], None] | None = None,
) -> ChainsResult:
    """Warm up chains and draw from them.

    Args:
        chains: that run side by side.
        first: index of the first of them.
        plan: how many draws, and how.
        bar: told of every step.
        keeper: where draws go.
        saved: a state that `keeper` was told of, from which to go on.
        note: told of gradients, loss and rates at every draw, and of the first chain's index.
    """
    label = f"chain {first + 1}/{plan.total} " if chains.many is None and plan.total > 1 else ""
    result = ChainsResult(first, chains.count)
    done, drawn, late = 0, 0, list[Tensor]()
    steps: Steps | None = None
    watch: Watch | None = None
    if plan.compile_after is not None:
        accelerate(chains)
    if saved is not None:
        saved = moved(saved, chains.alive.device)
        load_state(chains, saved["chains"])
        bar.advance(label + "resuming", chains.count * chains.gradients)
    sampling = saved if saved is not None and saved["stage"] == "sampling" else None

    def state() -> State:
        return {
            "stage": "sampling",
            "chains": state_of(chains),
            "reports": [report.as_dict() for report in result.reports],
            "lengths": result.lengths,
            "done": done,
            "drawn": drawn,
            "late": torch.stack(late) if late else torch.empty(0),
            **({} if watch is None else {"traces": torch.stack(watch.traces) if watch.traces else torch.empty(0)}),
        }

    def tick(count: int) -> None:
        nonlocal done
        done += count
        bar.advance(label + "sampling", count * chains.count)

    try:
        steps = _leapfrog_steps(chains, plan, bar)
        if sampling is None:
            result.reports = _warmed_up(chains, plan, bar, keeper, None if saved is None else saved["warmup"], steps)
        else:
            result.reports = [report_from(report) for report in sampling["reports"]]
            done, drawn, late = sampling["done"], sampling["drawn"], list(sampling["late"].unbind())
            result.lengths = sampling["lengths"]
        keeper.warmed(result)
        gap = result.reports[0].keep_every or plan.spacing
        bar.total = plan.total * (result.reports[0].steps + plan.draws * gap)
        steps = steps or _many_steps(chains, plan, gap, bar)
        if plan.auto:
            traces = None if sampling is None else sampling["traces"].cpu()
            watch = Watch(chains, plan.chains_per_set if chains.many is not None else 1, plan.held_out, traces)
            result.stopped = watch.verdict(plan.draws) if drawn else ""
        keeper.mark(state)
        while drawn < plan.draws and not result.stopped:
            if steps is not None:
                steps.take_steps(done, gap, tick)
            else:
                _single_steps(chains, plan.noise_interval(chains), done, gap, tick)
            chains.check_finite()
            if plan.auto or drawn >= plan.draws // 2:
                late.append(chains.level)
            keeper.keep(chains, first, drawn)
            if note is not None:
                rates = {group["name"]: group["rate"] for group in chains.sampler.param_groups}
                note(chains.gradients, chains.level, rates, first)
            for k in chains.failures:  # draws of a chain end where it was dropped
                result.lengths.setdefault(k, drawn)
            drawn += 1
            result.drawn = drawn
            if watch is not None:
                watch.take()
                result.stopped = watch.verdict(plan.draws)
            keeper.mark(state)
        if result.stopped:
            bar.note(label + result.stopped)
        warn_of(chains, result.reports, late[drawn // 2 :] if plan.auto else late, first)
    except DivergedError:
        pass  # every chain has
    for k in chains.failures:
        result.lengths.setdefault(k, drawn)
    result.failures, result.gradients, result.drawn = chains.failures, chains.gradients, drawn
    result.compiled, result.batches = _execution(chains, steps), chains.batches.state()
    return result


def _warmed_up(
    chains: Chains, plan: DrawPlan, bar: Progress, keeper: Keeper, saved: State | None, steps: LeapfrogMultiStep | None
) -> list[WarmupReport]:
    """Find rates and freeze them, in as many gradients as the plan says."""
    measure_spacing = plan.keep_every == "auto"
    if plan.warmup == 0:
        if any(group["rate"] is None for group in chains.sampler.param_groups):
            raise ValueError("warmup = 0 leaves no rate: give lr (or lam) to the method, or let warmup be 'auto'")
        if measure_spacing:
            raise ValueError("keep_every='auto' is measured in the warm-up: give a number, or let warmup be 'auto'")
        return [WarmupReport(True, "", 0, 0, None) for _ in range(chains.count)]

    def mark(state: Callable[[], State]) -> None:
        keeper.mark(lambda: {"stage": "warmup", "chains": state_of(chains), "warmup": state()})

    budget = None if plan.warmup == "auto" else int(plan.warmup)
    return warm_up(chains, budget, bar, measure_spacing, mark, saved, steps)


# -- how steps are executed -------------------------------------------------------------------------------------------


def _single_steps(chains: Chains, noise_every: int, done: int, count: int, tick: Callable[[int], None]) -> None:
    """So many steps, one by one; those in which a sampler only explores do not count."""
    while count:
        chains.step(split=chains.follows_noise and done % noise_every == 0)
        count -= chains.sampler.sampling
        done += 1
        tick(1)


def _leapfrog_steps(chains: Chains, plan: DrawPlan, bar: Progress) -> LeapfrogMultiStep | None:
    """What takes several steps of HMC in a call, where that can be done and pays."""
    if chains.hmc is None or not _pays(chains, plan, plan.draws * plan.spacing) or leapfrog.unsupported_reason(chains):
        return None
    return LeapfrogMultiStep(chains, log=bar.note)


def _many_steps(chains: Chains, plan: DrawPlan, gap: int, bar: Progress) -> MultiStep | GraphSteps | None:
    """What takes several steps in a call, where that can be done and pays."""
    if chains.graph is not None:
        try:
            return GraphSteps(chains, plan.noise_every or SHAPED_EVERY)
        except RuntimeError as error:
            chains.graph_unsupported = str(error)
            return None
    if not _pays(chains, plan, plan.draws * gap) or multistep.unsupported_reason(chains):
        return None
    steps = MultiStep(chains, plan.noise_interval(chains), log=bar.note)
    return None if steps.failed else steps


def _pays(chains: Chains, plan: DrawPlan, steps: int) -> bool:
    """Whether it pays to compile so many steps. It follows from the settings alone."""
    least = MULTI_STEP_FROM * (1 if chains.many is not None else SINGLE_CHAIN)
    return plan.compile_after is not None and (plan.compile_after == 0 or steps >= least)


def _execution(chains: Chains, steps: Steps | None) -> str:
    """How steps were executed, to be added to the name of the engine."""
    if isinstance(steps, GraphSteps):
        return ", CUDA graph of whole steps"
    if chains.graph is not None:
        return f", CUDA graph of gradients ({chains.graph_unsupported})"
    if chains.leaves[0].is_cuda and chains.many is None:
        return f", eager ({chains.graph_unsupported})"
    if steps is None or (isinstance(steps, LeapfrogMultiStep) and steps.unsupported_reason):
        return chains.compiled
    return ", several steps a call"
