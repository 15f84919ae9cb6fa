"""The loop: warm chains up, take their steps, and hand each draw to a keeper, which can also resume a stopped run.

`draw_all` goes through the chains; `draw_from` is the life of chains that run side by side, from their warm-up to the
last draw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from isosgd.engine import leapfrog, multistep
from isosgd.engine.chains import Chains, Heat
from isosgd.engine.compiled import fastest_products
from isosgd.engine.graph import GraphSteps, accelerate
from isosgd.engine.leapfrog import LeapfrogMultiStep
from isosgd.engine.multistep import MultiStep
from isosgd.engine.ranks import Ranks
from isosgd.engine.state import AS_IS, failure_from, failure_state, load_state, moved, state_of, take_over
from isosgd.errors import DivergedError, warn_caller
from isosgd.progress import Progress
from isosgd.sampling.stopping import Watch, looks, verdict
from isosgd.sampling.stored import RunRequest
from isosgd.target import Params
from isosgd.warmup.alarms import warn_of
from isosgd.warmup.reports import GroupReport, WarmupReport
from isosgd.warmup.windows import warmup_of

GUESSED_SPACING = 100  # for the progress bar, until the spacing is known
NOISE_EVERY = 16  # while draws are taken the noise is only followed: one step in 16 is split into halves ...
SHAPED_EVERY = 128  # ... one in 128 if a shape of Lambda averages all noise that it has seen ...
GRAPH_EVERY = 512  # ... and one in 512 of captured steps, since a noise vector costs as much as some of them
MULTI_STEP_FROM = 4_000  # steps from which it pays to compile several in a call ...
SINGLE_CHAIN = 5  # ... times this for one chain, whose single steps take less time

MEMORY_FOR_ANOTHER = 1.5  # of a GPU must be free, times what a chain takes, for another one beside it
WARMUP_TIME = 0.5  # share of the time of a run that has a limit, after which the warm-up begins no other window

State = dict[str, Any]
Auto = Literal["auto"]
Note = Callable[[int, Tensor, dict[str, Any], int], None]


@dataclass(frozen=True)
class DrawPlan:
    """What to draw, and how.

    Attributes:
        draws: of each chain; at most, where they are ``auto``.
        keep_every: steps between draws.
        warmup: gradients of the warm-up.
        noise_every: steps between measurements of the noise while draws are taken; chosen here when None.
        total: chains in all.
        compile_after: gradients after which it pays to compile; None for never, 0 for at once.
        auto: whether drawing ends when predictions have converged.
        chains_per_set: chains of one data set, where they run side by side.
        held_out: inputs at which predictions are watched.
        trained: whether chains start at trained networks.
        deadline: when to end, by `time.monotonic`; chains that run in turn share the time that is left equally.
        scoring: seconds to reserve before the deadline for each draw of a chain, to score it at the end.
        here: chains that this process draws; all when None.
        begin: states, by the first chain, to start from: where chains of another run ended.
        ends: takes the states that these chains end in, by the first chain.
        heated: whether cycles find their rates by heating.
        most_side_by_side: chains that may run at the same time, each on a CUDA stream of its own.
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
    trained: bool = False
    deadline: float | None = None
    here: int | None = None
    begin: Mapping[int, State] = field(default_factory=dict)
    ends: dict[int, State] | None = None
    scoring: float = 0.0
    heated: bool = False
    most_side_by_side: int = 1

    @property
    def ends_early(self) -> bool:
        """Whether there may be fewer draws than `draws`."""
        return self.auto or self.deadline is not None

    def deadline_of(self, count: int, first: int, drawn: int) -> float:
        """When so many chains must end, after those before them that have so many draws in all."""
        if self.deadline is None:
            return math.inf
        now = time.monotonic()
        return now + (self.deadline - drawn * self.scoring - now) * count / max(self.total - first, count)

    @property
    def spacing(self) -> int:
        """Steps between draws, before they are known."""
        return GUESSED_SPACING if self.keep_every == "auto" else self.keep_every

    def noise_interval(self, run: Chains) -> int:
        """Of how many steps one measures the noise."""
        return self.noise_every or (NOISE_EVERY if run.geometry is None else SHAPED_EVERY)


@dataclass
class ChainsResult:
    """The result of chains that ran side by side.

    Attributes:
        first: index of the first of them.
        count: how many.
        reports: of their warm-up.
        lengths: good draws of chains that were dropped before the end.
        failures: why they were dropped.
        gradients: spent on each.
        compiled: how steps were taken, to be added to the name of the engine.
        batches: state of the source of minibatches at the end.
        drawn: draws taken of each.
        stopped: why drawing ended early; empty if it did not.
        side_by_side: how many such runs there were at the same time.
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
    side_by_side: int = 1

    def is_end(self, plan: DrawPlan) -> bool:
        """Whether nothing is left to draw, by a plan that may ask for more than the one before."""
        failed, converged = len(self.failures) == self.count, self.stopped.startswith("converged")
        return failed or self.drawn >= plan.draws or (plan.auto and converged)

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


About = Callable[[list[ChainsResult]], dict[str, Any]]


def why_stopped(outcomes: list[ChainsResult]) -> str:
    """Why drawing ended early; the same for all chains that have not failed."""
    return next((outcome.stopped for outcome in outcomes if outcome.stopped), "")


def gradients_of(outcomes: list[ChainsResult]) -> int:
    """Of all chains, also of those that were dropped."""
    return sum(outcome.gradients * outcome.count for outcome in outcomes)


def report_end(
    plan: DrawPlan, failures: Mapping[int, DivergedError], outcomes: list[ChainsResult], warns: bool = True
) -> None:
    """Raise where every chain has failed; warn of those that were dropped, and of draws that have not converged."""
    if len(failures) == plan.total:
        error = next(iter(failures.values()))
        error.gradients = gradients_of(outcomes)
        raise error
    if not warns:
        return
    for chain, failure in sorted(failures.items()):
        warn_caller(f"chain {chain} was dropped: {failure}")
    if plan.auto and not (stopped := why_stopped(outcomes)).startswith("converged"):
        warn_caller(f"draws = 'auto': {stopped}")


def report_from(state: State) -> WarmupReport:
    """A report from its `as_dict`."""
    unknown = sorted(set(state) - set(WarmupReport.__dataclass_fields__))
    if unknown:
        raise ValueError(
            f"a report of the warm-up has {unknown[0]!r}: the run was begun by another version of isosgd; finish it "
            "with that version"
        )
    return WarmupReport(**{**state, "groups": [GroupReport(**group) for group in state["groups"]]})


class Keeper:
    """Takes draws, and knows where chains resume. This one keeps no draws: another rank has those of a shared chain.

    Args:
        request: what is drawn from.
        about: says how the draws come about, from what has been found out so far.
    """

    def __init__(self, request: RunRequest, about: About) -> None:
        self.request, self.about = request, about
        self.ended: dict[int, ChainsResult] = {}  # by the first of chains that run side by side
        self.current: dict[int, ChainsResult] = {}
        self.saved: dict[int, State] = {}  # from where chains go on
        self.started = time.monotonic()

    @property
    def outcomes(self) -> list[ChainsResult]:
        """Of chains that have come to their end."""
        return [self.ended[first] for first in sorted(self.ended)]

    def every(self) -> list[ChainsResult]:
        """Of all chains that have been warmed up."""
        both = {**self.current, **self.ended}
        return [both[first] for first in sorted(both)]

    def adopt(self, saved: dict[int, State]) -> None:
        """Take checkpoints for where chains go on from, or have come to their end."""
        self.saved = saved
        outcomes = {first: state["outcome"] for first, state in saved.items() if state["outcome"] is not None}
        self.ended = {first: ChainsResult.from_state(state) for first, state in outcomes.items()}

    def restored(self, first: int, run: Chains, plan: DrawPlan) -> tuple[ChainsResult | None, State | None]:
        """What came of these chains, if they have come to their end already, or from where they go on."""
        saved = self.saved.get(first)
        if first in self.ended and self.ended[first].is_end(plan):
            run.batches.load_state(self.ended[first].batches)  # what follows takes its data from where they ended
            return self.ended[first], None
        self.ended.pop(first, None)
        return None, None if saved is None else saved["current"]

    def warmed(self, outcome: ChainsResult) -> None:
        """These chains are being drawn from."""
        self.current[outcome.first] = outcome

    def keep(self, run: Chains, first: int, number: int) -> None:
        """Take draw ``number``, where the chains are now, and the buffers that go with it."""

    def mark(self, first: int, state: Callable[[], State]) -> None:
        """Chains could go on from here later, from their state."""

    def finished(self, outcome: ChainsResult, state: Callable[[], State] | None) -> None:
        """These chains have come to their end, in a state; None when all of them failed."""
        self.ended[outcome.first] = outcome
        self.current.pop(outcome.first, None)

    def failures(self) -> dict[int, DivergedError]:
        """Why chains were given up, with the draws they had."""
        found = {}
        for outcome in self.outcomes:
            for k, error in outcome.failures.items():
                error.draws = self.draws_of(outcome, k)
                found[outcome.first + k] = error
        return found

    def draws_of(self, outcome: ChainsResult, k: int) -> Params:
        """The good draws of a chain that was given up, ``[draws, *shape]``."""
        return {}

    def close(self) -> None:
        """Let go of everything."""


def draw_all(
    runs: Iterable[tuple[int, Chains, Keeper]],
    plan: DrawPlan,
    bar: Progress,
    note: Note | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Draw from all chains.

    Chains that run in turn are finished one after the other, or on a GPU as many at a time as its memory holds. With
    ``draws="auto"`` they are drawn from in rounds, so that convergence is judged over all of them.

    Args:
        runs: chains that run together, with the index of the first of them, and where their draws go.
        note: told of gradients, loss and rates at every draw, and of the first chain's index.
        ranks: other processes that draw chains of the same run, by which convergence is judged too.
    """
    going: list[_Drawing] = []  # at a look
    before: dict[int, str] = {}  # why chains of an earlier session ended, by the number of draws after which they did
    group: list[_Drawing] = []  # warmed up, to be drawn from side by side
    streams = _Streams(plan.most_side_by_side)
    remaining = iter(runs)
    while True:
        stream = streams.next(len(group))
        with stream:
            item = next(remaining, None)  # its memory belongs to the stream
        if item is None:
            break
        first, run, keeper = item
        ended, saved = keeper.restored(first, run, plan)
        if ended is not None:
            if plan.auto and ended.stopped.startswith("converged"):
                before[ended.drawn] = ended.stopped
            continue
        run.log_to(bar.note)
        drawing = _Drawing(run, first, keeper, stream, group[0].first if group else first)
        drawing.steps = draw_from(drawing, plan, bar, saved, note)
        drawing.turn(None)  # its warm-up; chains that others do not wait for go on to the first look, or to the end
        del run, item
        group.append(drawing)
        if drawing.in_turns and streams.has_room_for(len(group) + 1):
            continue
        going += _taking_turns(group, plan)
        group = []
    going += _taking_turns(group, plan)
    reason = ""
    for look in looks(plan.draws) if plan.auto else ():
        _take_turns([one for one in going if one.watch is not None and len(one.watch.traces) < look], "")
        watches = {drawing.first: drawing.watch for drawing in going if drawing.watch is not None}
        traces = {first + k: x for first, watch in watches.items() for k, x in watch.so_far(look).items()}
        if ranks is not None:
            every = ranks.gather({"traces": traces if ranks.leads else {}, "before": before})
            traces = {chain: x for found in every for chain, x in found["traces"].items()}
            before |= {drawn: why for found in every for drawn, why in found["before"].items()}
        reason = before.get(look, "")
        if traces and not before:  # else all of them went on at the looks before that one
            reason = verdict(dict(sorted(traces.items())), plan.total, plan.chains_per_set, look, plan.draws)
        if reason or not traces:
            break
    _take_turns([drawing for drawing in going if drawing.watch is not None], reason)
    if reason:
        bar.note(reason)


class _Drawing:
    """Chains that are being drawn from.

    Attributes:
        watch: what they predict, at a look; None at any other time.
        in_turns: whether they have been warmed up and take their steps some at a time, so that others may go on.
        group: index of the first of those chains that take turns with them.
        side_by_side: how many take turns.
        deadline: when they must end.
        steps: `draw_from` them.
    """

    steps: Generator[Watch | None, str | None, None]

    def __init__(self, run: Chains, first: int, keeper: Keeper, stream: _Stream, group: int) -> None:
        self.run, self.first, self.keeper, self.stream, self.group = run, first, keeper, stream, group
        self.watch: Watch | None = None
        self.in_turns, self.side_by_side, self.deadline = False, 1, math.inf

    def turn(self, stop: str | None) -> bool:
        """Go on for a turn. Returns whether they are at a look or at their end; at a look ``stop`` says what to do."""
        target = self.run.target
        with self.stream, fastest_products(self.run.alive.device), target.using(self.run.buffers):
            try:
                self.watch = self.steps.send(None if self.watch is None else stop)
            except StopIteration:
                self.stream.finish()
                self.watch, self.in_turns = None, False
                return True
        return self.watch is not None


def _taking_turns(group: list[_Drawing], plan: DrawPlan) -> list[_Drawing]:
    """Draw from warmed up chains to their first look or to their end; those that are at a look."""
    in_turns = [drawing for drawing in group if drawing.in_turns]
    for drawing in in_turns:
        drawing.side_by_side = len(in_turns)
        drawn = sum(ended.drawn * ended.count for ended in drawing.keeper.outcomes)
        drawing.deadline = plan.deadline_of(len(in_turns) * drawing.run.count, group[0].first, drawn)
    _take_turns(in_turns, None)
    return [drawing for drawing in group if drawing.watch is not None]


def _take_turns(drawings: list[_Drawing], stop: str | None) -> None:
    """Draw to the next look or to the end, a turn of each after the other."""
    while drawings:
        drawings = [drawing for drawing in drawings if not drawing.turn(stop)]


class _Stream:
    """A CUDA stream as a context that can be entered again and again; on another device, or alone, none."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._entered.append(nullcontext() if self.stream is None else torch.cuda.stream(self.stream))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def finish(self) -> None:
        """Wait until all is done."""
        if self.stream is not None:
            self.stream.synchronize()


class _Streams:
    """Streams of chains side by side, and whether there is memory for another chain."""

    def __init__(self, most: int) -> None:
        self.most, self.reserved = most, torch.cuda.memory_reserved() if most > 1 else 0

    def next(self, others: int) -> _Stream:
        """For the next chain, beside so many others."""
        if self.most == 1:
            return _Stream()
        if not others:
            torch.cuda.empty_cache()
            self.reserved = torch.cuda.memory_reserved()
        found = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        found.wait_stream(torch.cuda.current_stream())
        return _Stream(found)

    def has_room_for(self, count: int) -> bool:
        """Whether so many chains fit, if the last one takes as much memory as each before, and some is left."""
        if count > self.most:
            return False
        each = (torch.cuda.memory_reserved() - self.reserved) / (count - 1)
        return torch.cuda.mem_get_info()[0] > MEMORY_FOR_ANOTHER * each


def draw_from(
    drawing: _Drawing, plan: DrawPlan, bar: Progress, saved: State | None = None, note: Note | None = None
) -> Generator[Watch | None, str | None, None]:
    """Warm up chains and draw from them; with ``auto``, pause before the first draw and where convergence is judged.

    Args:
        drawing: the chains, and where their draws go.
        saved: a state that the keeper was told of, from which to go on.
        note: told of gradients, loss and rates at every draw, and of the first chain's index.

    Yields:
        What the chains have predicted so far, to be given the reason to stop, empty to go on; or None where other
        chains may go on.
    """
    run, first, keeper = drawing.run, drawing.first, drawing.keeper
    label = f"chain {first + 1}/{plan.total} " if run.many is None and plan.total > 1 else ""
    outcome, run.trained, before = ChainsResult(first, run.count), plan.trained, keeper.outcomes
    drawn_before = sum(ended.drawn * ended.count for ended in before)
    drawing.deadline = plan.deadline_of(run.count, drawing.group, drawn_before)
    run.deadline = time.monotonic() + WARMUP_TIME * (drawing.deadline - time.monotonic())
    run.heating = Heat(plan.draws, drawing.deadline) if plan.heated else None
    done, drawn, levels = 0, 0, list[Tensor]()
    leapfrogs = _leapfrog_steps(run, plan, bar)
    stride: MultiStep | GraphSteps | LeapfrogMultiStep | None = leapfrogs
    watch: Watch | None = None
    if plan.compile_after is not None:
        accelerate(run)
    if saved is not None:
        saved = moved(saved, run.alive.device)
        load_state(run, saved["chains"])
        bar.skip(run.count * run.gradients)
    elif first in plan.begin:
        take_over(run, plan.begin[first])
    try:
        if saved is None or saved["stage"] == "warmup":
            outcome.reports = _warm_up(run, first, plan, bar, keeper, saved, leapfrogs)
        else:
            outcome.reports = [report_from(report) for report in saved["reports"]]
            done, drawn, levels = saved["done"], saved["drawn"], list(saved["levels"].unbind())
            outcome.lengths = saved["lengths"]
        keeper.warmed(outcome)
        gap = outcome.reports[0].keep_every or plan.spacing
        if run.hmc is not None:
            run.hmc.recycles = gap < run.hmc.length
        bar.total = (plan.here or plan.total) * (
            outcome.reports[0].steps + done + run.sampler.steps_to(gap, plan.draws - drawn)
        )

        def state() -> State:
            return {
                "stage": "sampling",
                "chains": state_of(run),
                "reports": [report.as_dict() for report in outcome.reports],
                "lengths": outcome.lengths,
                "done": done,
                "drawn": drawn,
                "levels": torch.stack(levels) if levels else torch.empty(0),
                **({} if watch is None else {"traces": torch.stack(watch.traces) if watch.traces else torch.empty(0)}),
            }

        def tick(steps: int) -> None:
            nonlocal done
            done += steps
            bar.advance(label + "sampling", steps * run.count)

        stride, every = stride or _many_steps(run, plan, gap, bar), plan.noise_interval(run)
        if plan.auto:
            traces = None if saved is None or saved["stage"] == "warmup" else saved["traces"].cpu()
            watch, pauses = Watch(run, plan.held_out, traces), looks(plan.draws)
            outcome.stopped = (yield watch) or ""
        keeper.mark(first, state)
        if plan.most_side_by_side > 1 and isinstance(stride, GraphSteps):
            drawing.in_turns = True
            yield None
            if drawing.side_by_side > 1:
                label, outcome.side_by_side = f"{drawing.side_by_side} chains side by side ", drawing.side_by_side
        while drawn < plan.draws and not outcome.stopped:
            scoring = drawn * run.count * drawing.side_by_side * plan.scoring
            if drawn and time.monotonic() + scoring > drawing.deadline:
                outcome.stopped = f"max_seconds: {drawn} of {plan.draws} draws were taken"
                break
            steps = run.sampler.steps_to(gap)
            if isinstance(stride, GraphSteps) and drawing.in_turns:
                yield from stride.turns(done, steps, tick)
            elif stride is not None:
                stride.take_steps(done, steps, tick)
            for _ in range(0 if stride is not None else steps):
                run.step(split=run.follows_noise and done % every == 0)
                tick(1)
            run.check_finite()
            levels.append(run.level)
            keeper.keep(run, first, drawn)
            if note is not None:
                note(run.gradients, run.level, {g["name"]: g["rate"] for g in run.sampler.param_groups}, first)
            for k in run.failures:  # draws of a chain end where it was given up
                outcome.lengths.setdefault(k, drawn)
            drawn += 1
            outcome.drawn = drawn
            if watch is not None:
                watch.take()
            keeper.mark(first, state)
            if watch is not None and drawn in pauses:
                outcome.stopped = (yield watch) or ""
        warn_of(run, outcome.reports, levels[drawn // 2 :], first)
    except DivergedError:
        pass  # every chain has
    for k in run.failures:
        outcome.lengths.setdefault(k, drawn)
    outcome.failures, outcome.gradients, outcome.drawn = run.failures, run.gradients, drawn
    outcome.compiled = _engine(run, stride)
    outcome.batches = run.batches.state()
    if plan.ends is not None:
        plan.ends[first] = {**state_of(run), "reports": outcome.reports}
    keeper.finished(outcome, state if len(run.failures) < run.count else None)


def _engine(run: Chains, stride: MultiStep | GraphSteps | LeapfrogMultiStep | None) -> str:
    """How steps were taken, to be added to the name of the engine."""
    if isinstance(stride, GraphSteps):
        return ", CUDA graph of whole steps"
    if run.graph is not None:
        return f", CUDA graph of gradients ({run.graph_unsupported})"
    if run.leaves[0].is_cuda and run.many is None:
        return f", eager ({run.graph_unsupported})"
    if isinstance(stride, LeapfrogMultiStep):
        return run.compiled if stride.unsupported_reason else stride.engine
    return run.compiled if stride is None else ", several steps a call"


def _leapfrog_steps(run: Chains, plan: DrawPlan, bar: Progress) -> LeapfrogMultiStep | None:
    """What takes several steps of trajectories in a call, where that can be done and pays."""
    compiled = run.leaves[0].device.type == "cpu" and _pays(run, plan, plan.draws * plan.spacing)
    if run.hmc is None or not (compiled or run.target.batched) or leapfrog.unsupported_reason(run):
        return None
    return LeapfrogMultiStep(run, compiled, bar.note)


def _many_steps(run: Chains, plan: DrawPlan, gap: float, bar: Progress) -> MultiStep | GraphSteps | None:
    """What takes several steps in a call, where that can be done and pays."""
    if run.graph is not None:
        try:
            return GraphSteps(run, plan.noise_every or GRAPH_EVERY)
        except RuntimeError as error:
            run.graph_unsupported = str(error)
            return None
    if not _pays(run, plan, plan.draws * gap) or multistep.unsupported_reason(run):
        return None
    stride = MultiStep(run, plan.noise_interval(run), log=bar.note)
    return None if stride.failed else stride


def _pays(run: Chains, plan: DrawPlan, steps: float) -> bool:
    """Whether it pays to compile so many steps. It follows from the settings alone."""
    if plan.deadline is not None:  # it is not known how many steps there will be, and compiling takes a minute
        return plan.compile_after == 0
    least = MULTI_STEP_FROM * (1 if run.many is not None else SINGLE_CHAIN)
    return plan.compile_after is not None and (plan.compile_after == 0 or steps >= least)


def check_warmup(run: Chains, plan: DrawPlan) -> None:
    """Refuse a warm-up by which rates cannot be found, before a gradient is taken."""
    if plan.warmup == 0:
        _check_rates(run, plan)
    elif plan.warmup != "auto":
        warmup_of(run, plan.warmup, Progress(0, show=False)).check()


def _check_rates(run: Chains, plan: DrawPlan) -> None:
    """Refuse to do without a warm-up where it would have to find something."""
    if any(group["rate"] is None for group in run.sampler.param_groups):
        raise ValueError("warmup = 0 leaves no rate: give lr (or lam) to the method, or let warmup be 'auto'")
    if plan.keep_every == "auto":
        raise ValueError("keep_every='auto' is measured in the warm-up: give a number, or let warmup be 'auto'")


def _warm_up(
    run: Chains,
    first: int,
    plan: DrawPlan,
    bar: Progress,
    keeper: Keeper,
    saved: State | None,
    leapfrogs: LeapfrogMultiStep | None,
) -> list[WarmupReport]:
    """Find the rates of chains, or take those they have; a report for each chain."""
    begun = plan.begin.get(first, {})
    if AS_IS in begun:
        measured = plan.keep_every == "auto"
        reports = [replace(report, keep_every=report.keep_every if measured else None) for report in begun[AS_IS]]
        bar.skip(run.count * reports[0].steps)
    elif plan.warmup == 0:
        _check_rates(run, plan)
        reports = [WarmupReport(True, "", 0, 0, None) for _ in range(run.count)]
    else:

        def mark(state: Callable[[], State]) -> None:
            keeper.mark(first, lambda: {"stage": "warmup", "chains": state_of(run), "warmup": state()})

        warmup = warmup_of(run, None if plan.warmup == "auto" else int(plan.warmup), bar, mark, leapfrogs)
        if saved is not None:
            warmup.load(saved["warmup"])
        reports = warmup.run(plan.keep_every == "auto")
    if (spacing := reports[0].keep_every) is not None and run.heating is None:
        run.sampler.fit_schedule(spacing)
    return reports
