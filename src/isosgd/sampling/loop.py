"""The sampling loop: warm chains up, take their steps, and hand each draw to a recorder.

`draw_all` goes through all chains; `_Drawing` takes chains that run together from the warm-up to the last draw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isosgd.engine import leapfrog, multistep
from isosgd.engine.chains import Chains, Heat
from isosgd.engine.compiled import fastest_products
from isosgd.engine.graph import GraphSteps, accelerate
from isosgd.engine.leapfrog import LeapfrogMultiStep
from isosgd.engine.multistep import MultiStep
from isosgd.engine.ranks import Ranks
from isosgd.engine.state import AS_IS, load_state, moved, state_of, take_over
from isosgd.errors import DivergedError, OutOfTimeError
from isosgd.progress import Progress
from isosgd.sampling.plan import ChainsResult, DrawPlan, State, report_from
from isosgd.sampling.recorders import Recorder
from isosgd.sampling.stopping import Watch, looks, verdict
from isosgd.warmup.alarms import warn_of
from isosgd.warmup.reports import WarmupReport
from isosgd.warmup.windows import warmup_of

GRAPH_EVERY = 512  # of captured steps one in 512 measures the noise, since that takes as long as several steps
MULTI_STEP_FROM = 4_000  # steps from which it pays to compile several in a call ...
SINGLE_CHAIN = 5  # ... times this for one chain, whose single steps take less time
MEMORY_FOR_ANOTHER = 1.5  # free GPU memory that another chain needs, relative to what a chain takes
QUICK = 0.1  # seconds in which it is not worth to look at the clock
GRACE = 2.0  # seconds after the time limit, in which a warm-up may still come to a first draw
WARMUP_TIME = 0.5  # share of the time limit after which the warm-up begins no further window

Note = Callable[[int, Tensor, dict[str, Any], int], None]


def draw_all(
    runs: Iterable[tuple[int, Chains, Recorder]],
    plan: DrawPlan,
    bar: Progress,
    note: Note | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Draw from all chains.

    Chains that run in turn are finished one after the other, or on a GPU as many at a time as its memory holds. With
    ``draws="auto"`` all chains draw in rounds, since convergence is judged over all of them.

    Args:
        runs: chains that run together, with the index of the first of them, and their recorder.
        note: called with gradients, loss, rates and the first chain's index at every draw.
        ranks: the other processes of the run, whose chains count for convergence too.
    """
    going: list[_Drawing] = []  # paused where convergence is judged
    before: dict[int, str] = {}  # why chains of an earlier session ended, by their number of draws
    group: list[_Drawing] = []  # warmed up, to run side by side
    streams = _Streams(plan.most_side_by_side)
    remaining = iter(runs)
    while True:
        stream = streams.next(len(group))
        with stream:
            item = next(remaining, None)  # its memory belongs to the stream
        if item is None:
            break
        first, chains, recorder = item
        ended, saved = recorder.restored(first, chains, plan)
        if ended is not None:
            if plan.auto and ended.stopped.startswith("converged"):
                before[ended.drawn] = ended.stopped
            continue
        chains.log_to(bar.note)
        leader = group[0].first if group else first
        drawing = _Drawing(chains, first, recorder, plan, bar, note, stream, leader, saved)
        drawing.turn(None)  # the warm-up; chains that do not wait for others continue to the first look or the end
        del chains, item
        group.append(drawing)
        if drawing.in_turns and streams.has_room_for(len(group) + 1):
            continue
        going += _taking_turns(group, plan)
        group = []
    going += _taking_turns(group, plan)
    reason = ""
    for look in looks(plan.draws) if plan.auto else ():
        _take_turns([one for one in going if one.at_look and one.drawn < look], "")
        watches = {one.first: one.watch for one in going if one.at_look and one.watch is not None}
        traces = {first + k: x for first, watch in watches.items() for k, x in watch.so_far(look).items()}
        if ranks is not None:
            every = ranks.gather({"traces": traces if ranks.leads else {}, "before": before})
            traces = {chain: x for found in every for chain, x in found["traces"].items()}
            before |= {drawn: why for found in every for drawn, why in found["before"].items()}
        reason = before.get(look, "")
        if traces and not before:  # else all of them continued at every earlier look
            reason = verdict(dict(sorted(traces.items())), plan.total, plan.chains_per_set, look, plan.draws)
        if reason or not traces:
            break
    _take_turns([drawing for drawing in going if drawing.at_look], reason)
    if reason:
        bar.note(reason)


def _taking_turns(group: list[_Drawing], plan: DrawPlan) -> list[_Drawing]:
    """Draw from warmed-up chains to their first look or to the end; returns those at a look."""
    in_turns = [drawing for drawing in group if drawing.in_turns]
    for drawing in in_turns:
        drawing.side_by_side = len(in_turns)
        drawn = sum(ended.drawn * ended.count for ended in drawing.recorder.results)
        drawing.deadline = plan.deadline_of(len(in_turns) * drawing.chains.count, group[0].first, drawn)
    _take_turns(in_turns, None)
    return [drawing for drawing in group if drawing.at_look]


def _take_turns(drawings: list[_Drawing], stop: str | None) -> None:
    """Draw to the next look or to the end, taking turns."""
    while drawings:
        drawings = [drawing for drawing in drawings if not drawing.turn(stop)]


class _Drawing:
    """Chains that run together, from their warm-up to the last draw.

    Args:
        first: index of the first chain.
        note: called with gradients, loss, rates and the first chain's index at every draw.
        group: index of the first chain of those that take turns.
        saved: a state from `Recorder.mark` to resume from.

    Attributes:
        at_look: whether they pause where convergence is judged.
        watch: records predictions, with ``draws="auto"``.
        in_turns: whether they are warmed up and take turns with other chains.
        side_by_side: how many take turns.
        deadline: when they must end.
    """

    def __init__(
        self, chains: Chains, first: int, recorder: Recorder, plan: DrawPlan, bar: Progress, note: Note | None,
        stream: _Stream, group: int, saved: State | None,
    ) -> None:  # fmt: skip
        self.chains, self.first, self.recorder, self.plan = chains, first, recorder, plan
        self.bar, self.note, self.stream, self.group = bar, note, stream, group
        self.label = f"chain {first + 1}/{plan.total} " if chains.many is None and plan.total > 1 else ""
        self.result = ChainsResult(first, chains.count)
        self.at_look = self.in_turns = False
        self.side_by_side, self.deadline = 1, math.inf
        self.watch: Watch | None = None
        self.multi_step: MultiStep | GraphSteps | LeapfrogMultiStep | None = None
        self.noise_every = 0
        self.done = self.drawn = 0  # steps and draws since the warm-up
        self.levels: list[Tensor] = []  # loss at each draw
        self._turns = self._run(saved)

    def turn(self, stop: str | None) -> bool:
        """Continue until the next pause; returns whether that is a look or the end. ``stop`` answers the last look."""
        target = self.chains.target
        with self.stream, fastest_products(self.chains.alive.device), target.using(self.chains.buffers):
            try:
                self.at_look = self._turns.send(stop if self.at_look else None)
            except StopIteration:
                self.stream.finish()
                self.at_look = self.in_turns = False
                return True
        return self.at_look

    def _run(self, saved: State | None) -> Generator[bool, str | None, None]:
        """Warm up and draw.

        Yields:
            True at a look, which is answered by the reason to stop, empty to continue; False where other chains may
            continue.
        """
        try:
            gap = self._warm_up(None if saved is None else moved(saved, self.chains.alive.device))
            yield from self._draw(gap, saved)
        except DivergedError as error:  # of every chain, as `chains.failures` says
            if isinstance(error, OutOfTimeError) and self.recorder.request.store is not None:
                self.recorder.out_of_time[self.first] = error  # it can go on in another session
                return
        self._finish()

    def _warm_up(self, saved: State | None) -> float:
        """Warm up, take over, or resume; returns the steps between draws."""
        chains, plan, result = self.chains, self.plan, self.result
        chains.trained = plan.trained
        drawn_before = sum(ended.drawn * ended.count for ended in self.recorder.results)
        self.deadline = plan.deadline_of(chains.count, self.group, drawn_before)
        chains.deadline = time.monotonic() + WARMUP_TIME * (self.deadline - time.monotonic())
        chains.latest = plan.latest + GRACE
        if plan.heated is not None:
            chains.heating = Heat(plan.draws, self.deadline, plan.heated.setdefault((self.first, chains.count), {}))
        self.multi_step = leapfrogs = _leapfrog_steps(chains, plan, self.bar)
        if plan.compile_after is not None:
            accelerate(chains)
        if saved is not None:
            load_state(chains, saved["chains"])
            self.bar.skip(chains.count * chains.gradients)
        elif self.first in plan.begin:
            take_over(chains, plan.begin[self.first])
        if saved is None or saved["stage"] == "warmup":
            result.reports = self._find_rates(saved, leapfrogs)
        else:
            result.reports = [report_from(report) for report in saved["reports"]]
            self.done, self.drawn, self.levels = saved["done"], saved["drawn"], list(saved["levels"].unbind())
            result.lengths = saved["lengths"]
        self.recorder.warmed(result)
        gap = result.reports[0].keep_every or plan.spacing
        if chains.hmc is not None:
            chains.hmc.recycles = gap < chains.hmc.length
        self.bar.total = (plan.here or plan.total) * (
            result.reports[0].steps + self.done + chains.sampler.steps_to(gap, plan.draws - self.drawn)
        )
        self.multi_step = leapfrogs
        if leapfrogs is None and (chains.graph is not None or chains.has_seen_noise):
            self.multi_step = _many_steps(chains, plan, gap, self.bar)
        self.noise_every = plan.noise_interval(chains)
        return gap

    def _find_rates(self, saved: State | None, leapfrogs: LeapfrogMultiStep | None) -> list[WarmupReport]:
        """Find the rates in a warm-up, or take those that are known; returns a report for each chain."""
        chains, plan = self.chains, self.plan
        begun = plan.begin.get(self.first, {})
        if AS_IS in begun:
            measured = plan.keep_every == "auto"
            reports = [replace(report, keep_every=report.keep_every if measured else None) for report in begun[AS_IS]]
            self.bar.skip(chains.count * reports[0].steps)
        elif plan.warmup == 0:
            _check_rates(chains, plan)
            reports = [WarmupReport(True, "", 0, 0, None) for _ in range(chains.count)]
        else:

            def mark(state: Callable[[], State]) -> None:
                self.recorder.mark(
                    self.first, lambda: {"stage": "warmup", "chains": state_of(chains), "warmup": state()}
                )

            warmup = warmup_of(chains, None if plan.warmup == "auto" else int(plan.warmup), self.bar, mark, leapfrogs)
            if saved is not None:
                warmup.load(saved["warmup"])
            reports = warmup.run(plan.keep_every == "auto")
        if (spacing := reports[0].keep_every) is not None and chains.heating is None:
            chains.sampler.fit_schedule(spacing)
        return reports

    def _draw(self, gap: float, saved: State | None) -> Generator[bool, str | None, None]:
        """Take all draws; with ``auto``, pause before the first draw and where convergence is judged."""
        plan, result, pauses = self.plan, self.result, list[int]()
        if plan.auto:
            traces = None if saved is None or saved["stage"] == "warmup" else saved["traces"].cpu()
            self.watch, pauses = Watch(self.chains, plan.held_out, traces), looks(plan.draws)
            result.stopped = (yield True) or ""
        self.recorder.mark(self.first, self._state)
        if plan.most_side_by_side > 1 and isinstance(self.multi_step, GraphSteps):
            self.in_turns = True
            yield False
            if self.side_by_side > 1:
                self.label, result.side_by_side = f"{self.side_by_side} chains side by side ", self.side_by_side
        while self.drawn < plan.draws and not result.stopped:
            if self.drawn and self._is_late():
                result.stopped = f"max_seconds: {self.drawn} of {plan.draws} draws were taken"
            elif (yield from self._reach_draw(gap)):
                self._keep_draw()
                if self.drawn in pauses:
                    result.stopped = (yield True) or ""
        warn_of(self.chains, result.reports, self.levels[self.drawn // 2 :], self.first)

    def _reach_draw(self, gap: float) -> Generator[bool, str | None, bool]:
        """Take the steps to the next draw; returns whether it is reached before the deadline."""
        chains = self.chains
        steps = left = chains.sampler.steps_to(gap)
        # The first draw may come before its time, unless it belongs to the end of a cycle or trajectory.
        ends_early = self.drawn > 0 or (chains.hmc is None and steps == gap)
        if isinstance(self.multi_step, GraphSteps) and self.in_turns:
            for _ in self.multi_step.turns(self.done, steps, self._tick):
                yield False
            left = 0
        if self.multi_step is None and not chains.has_seen_noise:  # the steps of a call use what was seen before it
            chains.step(split=True)
            self._tick(1)
            left -= 1
            self.multi_step = _many_steps(chains, self.plan, gap, self.bar)
        most = self._most_steps()
        while left:
            count, began = int(min(left, most)), time.monotonic()
            if self.multi_step is None:
                chains.step(split=chains.follows_noise and self.done % self.noise_every == 0)
                self._tick(1)
            else:
                self.multi_step.take_steps(self.done, count, self._tick)
            left -= count
            if ends_early and self._is_late():
                break
            if time.monotonic() - began < QUICK and self.multi_step is not None:
                most *= 2
        return not (self.drawn and left)

    def _most_steps(self) -> float:
        """Steps before the next look at the clock; at first, since later ones may be more."""
        if self.multi_step is None or (isinstance(self.multi_step, MultiStep) and math.isfinite(self.deadline)):
            return 1
        return math.inf

    def _tick(self, steps: int) -> None:
        self.done += steps
        self.bar.advance(self.label + "sampling", steps * self.chains.count)

    def _is_late(self) -> bool:
        """Whether no time is left but that to score the draws."""
        scoring = self.drawn * self.chains.count * self.side_by_side * self.plan.scoring
        return time.monotonic() + scoring > self.deadline

    def _keep_draw(self) -> None:
        """Hand the current parameters to the recorder as a draw."""
        chains = self.chains
        chains.check_finite()
        self.levels.append(chains.level)
        self.recorder.keep(chains, self.first, self.drawn)
        if self.note is not None:
            rates = {group["name"]: group["rate"] for group in chains.sampler.param_groups}
            self.note(chains.gradients, chains.level, rates, self.first)
        for k in chains.failures:  # draws of a dropped chain end here
            self.result.lengths.setdefault(k, self.drawn)
        self.drawn += 1
        self.result.drawn = self.drawn
        if self.watch is not None:
            self.watch.take()
        self.recorder.mark(self.first, self._state)

    def _state(self) -> State:
        """From which `_warm_up` resumes."""
        found = {
            "stage": "sampling",
            "chains": state_of(self.chains),
            "reports": [report.as_dict() for report in self.result.reports],
            "lengths": self.result.lengths,
            "done": self.done,
            "drawn": self.drawn,
            "levels": torch.stack(self.levels) if self.levels else torch.empty(0),
        }
        if self.watch is not None:
            found["traces"] = torch.stack(self.watch.traces) if self.watch.traces else torch.empty(0)
        return found

    def _finish(self) -> None:
        """Complete the result and hand it to the recorder."""
        chains, result = self.chains, self.result
        for k in chains.failures:
            result.lengths.setdefault(k, self.drawn)
        result.failures, result.gradients, result.drawn = chains.failures, chains.gradients, self.drawn
        result.compiled = _engine(chains, self.multi_step)
        result.batches = chains.batches.state()
        if self.plan.ends is not None:
            self.plan.ends[self.first] = {**state_of(chains), "reports": result.reports}
        self.recorder.finished(result, self._state if len(chains.failures) < chains.count else None)


def _engine(chains: Chains, multi_step: MultiStep | GraphSteps | LeapfrogMultiStep | None) -> str:
    """How steps were taken, appended to the name of the engine."""
    if isinstance(multi_step, GraphSteps):
        return ", CUDA graph of whole steps"
    if chains.graph is not None:
        return f", CUDA graph of gradients ({chains.graph_unsupported})"
    if chains.leaves[0].is_cuda and chains.many is None:
        return f", eager ({chains.graph_unsupported})"
    if isinstance(multi_step, MultiStep) and not multi_step.compiled:
        return ", C++ library, several steps a call" if multi_step.program.in_library else chains.compiled
    if isinstance(multi_step, LeapfrogMultiStep):
        return chains.compiled if multi_step.unsupported_reason else multi_step.engine
    return chains.compiled if multi_step is None else ", several steps a call"


def _leapfrog_steps(chains: Chains, plan: DrawPlan, bar: Progress) -> LeapfrogMultiStep | None:
    """Takes several leapfrog steps in a call, if that is possible and pays."""
    if chains.hmc is None:
        return None
    quick = chains.target.batched or leapfrog.without_compiler(chains)
    compiled = chains.leaves[0].device.type == "cpu" and _pays(chains, plan, plan.draws * plan.spacing)
    compiled &= chains.target.batched or not quick
    if not (compiled or quick) or leapfrog.unsupported_reason(chains):
        return None
    return LeapfrogMultiStep(chains, compiled, bar.note)


def _many_steps(chains: Chains, plan: DrawPlan, gap: float, bar: Progress) -> MultiStep | GraphSteps | None:
    """Takes several steps in a call, if that is possible and pays."""
    if chains.graph is not None:
        try:
            return GraphSteps(chains, plan.noise_every or GRAPH_EVERY)
        except RuntimeError as error:
            chains.graph_unsupported = str(error)
            return None
    compiled = _pays(chains, plan, plan.draws * gap) and not multistep.is_fastest(chains)
    quick = multistep.without_compiler(chains)
    if not (compiled or quick) or multistep.unsupported_reason(chains):
        return None
    multi_step = MultiStep(chains, plan.noise_interval(chains), compiled, bar.note)
    if multi_step.failed and quick:
        multi_step = MultiStep(chains, plan.noise_interval(chains), False, bar.note)
    return None if multi_step.failed else multi_step


def _pays(chains: Chains, plan: DrawPlan, steps: float) -> bool:
    """Whether it pays to compile so many steps. Depends on the settings only, so that a resumed run does the same."""
    if plan.deadline is not None:  # the number of steps is unknown, and compiling takes a minute
        return plan.compile_after == 0
    least = MULTI_STEP_FROM * (1 if chains.many is not None else SINGLE_CHAIN)
    return plan.compile_after is not None and (plan.compile_after == 0 or steps >= least)


def check_warmup(chains: Chains, plan: DrawPlan) -> None:
    """Check before the first gradient that the warm-up can find the rates."""
    if plan.warmup == 0:
        _check_rates(chains, plan)
    elif plan.warmup != "auto":
        warmup_of(chains, plan.warmup, Progress(0, show=False)).check()


def _check_rates(chains: Chains, plan: DrawPlan) -> None:
    """Without a warm-up, rates and spacing must be given."""
    if any(group["rate"] is None for group in chains.sampler.param_groups):
        raise ValueError("warmup = 0 leaves no rate: give lr (or lam) to the method, or let warmup be 'auto'")
    if plan.keep_every == "auto":
        raise ValueError("keep_every='auto' is measured in the warm-up: give a number, or let warmup be 'auto'")


class _Stream:
    """A CUDA stream as a context that can be entered repeatedly; without a stream it does nothing."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._entered.append(nullcontext() if self.stream is None else torch.cuda.stream(self.stream))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def finish(self) -> None:
        """Wait until all work on the stream is done."""
        if self.stream is not None:
            self.stream.synchronize()


class _Streams:
    """Makes a stream for each chain, and tells whether there is memory for another chain."""

    def __init__(self, most: int) -> None:
        self.most, self.reserved = most, torch.cuda.memory_reserved() if most > 1 else 0

    def next(self, others: int) -> _Stream:
        """The stream of the next chain, which runs beside ``others``."""
        if self.most == 1:
            return _Stream()
        if not others:
            torch.cuda.empty_cache()
            self.reserved = torch.cuda.memory_reserved()
        found = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        found.wait_stream(torch.cuda.current_stream())
        return _Stream(found)

    def has_room_for(self, count: int) -> bool:
        """Whether ``count`` chains fit, if the last takes as much memory as each of the others, with some to spare."""
        if count > self.most:
            return False
        each = (torch.cuda.memory_reserved() - self.reserved) / (count - 1)
        return torch.cuda.mem_get_info()[0] > MEMORY_FOR_ANOTHER * each
