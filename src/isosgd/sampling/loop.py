"""The sampling loop: warm chains up, take their steps, and hand each draw to a recorder.

`draw_all` goes through all chains; `draw_from` is the life of chains that run together, from the warm-up to the last
draw.
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
from isosgd.errors import DivergedError
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
        drawing = _Drawing(chains, first, recorder, stream, group[0].first if group else first)
        drawing.steps = draw_from(drawing, plan, bar, saved, note)
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
        _take_turns([one for one in going if one.watch is not None and len(one.watch.traces) < look], "")
        watches = {drawing.first: drawing.watch for drawing in going if drawing.watch is not None}
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
    _take_turns([drawing for drawing in going if drawing.watch is not None], reason)
    if reason:
        bar.note(reason)


class _Drawing:
    """Chains that are being sampled.

    Attributes:
        watch: their predictions, while they pause at a look; else None.
        in_turns: whether they are warmed up and take turns with other chains.
        group: index of the first chain of those that take turns.
        side_by_side: how many take turns.
        deadline: when they must end.
        steps: the generator `draw_from`.
    """

    steps: Generator[Watch | None, str | None, None]

    def __init__(self, chains: Chains, first: int, recorder: Recorder, stream: _Stream, group: int) -> None:
        self.chains, self.first, self.recorder, self.stream, self.group = chains, first, recorder, stream, group
        self.watch: Watch | None = None
        self.in_turns, self.side_by_side, self.deadline = False, 1, math.inf

    def turn(self, stop: str | None) -> bool:
        """Continue until the next pause; returns whether that is a look or the end. ``stop`` answers the last look."""
        target = self.chains.target
        with self.stream, fastest_products(self.chains.alive.device), target.using(self.chains.buffers):
            try:
                self.watch = self.steps.send(None if self.watch is None else stop)
            except StopIteration:
                self.stream.finish()
                self.watch, self.in_turns = None, False
                return True
        return self.watch is not None


def _taking_turns(group: list[_Drawing], plan: DrawPlan) -> list[_Drawing]:
    """Draw from warmed-up chains to their first look or to the end; returns those at a look."""
    in_turns = [drawing for drawing in group if drawing.in_turns]
    for drawing in in_turns:
        drawing.side_by_side = len(in_turns)
        drawn = sum(ended.drawn * ended.count for ended in drawing.recorder.results)
        drawing.deadline = plan.deadline_of(len(in_turns) * drawing.chains.count, group[0].first, drawn)
    _take_turns(in_turns, None)
    return [drawing for drawing in group if drawing.watch is not None]


def _take_turns(drawings: list[_Drawing], stop: str | None) -> None:
    """Draw to the next look or to the end, taking turns."""
    while drawings:
        drawings = [drawing for drawing in drawings if not drawing.turn(stop)]


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


def draw_from(
    drawing: _Drawing, plan: DrawPlan, bar: Progress, saved: State | None = None, note: Note | None = None
) -> Generator[Watch | None, str | None, None]:
    """Warm up chains and draw from them; with ``auto``, pause before the first draw and where convergence is judged.

    Args:
        drawing: the chains and their recorder.
        saved: a state from `Recorder.mark` to resume from.
        note: called with gradients, loss, rates and the first chain's index at every draw.

    Yields:
        The predictions so far; the answer is the reason to stop, empty to continue. Or None where other chains may
        continue.
    """
    chains, first, recorder = drawing.chains, drawing.first, drawing.recorder
    label = f"chain {first + 1}/{plan.total} " if chains.many is None and plan.total > 1 else ""
    result, chains.trained = ChainsResult(first, chains.count), plan.trained
    drawn_before = sum(ended.drawn * ended.count for ended in recorder.results)
    drawing.deadline = plan.deadline_of(chains.count, drawing.group, drawn_before)
    chains.deadline = time.monotonic() + WARMUP_TIME * (drawing.deadline - time.monotonic())
    chains.heating = Heat(plan.draws, drawing.deadline) if plan.heated else None
    done, drawn, levels = 0, 0, list[Tensor]()
    leapfrogs = _leapfrog_steps(chains, plan, bar)
    multi_step: MultiStep | GraphSteps | LeapfrogMultiStep | None = leapfrogs
    watch: Watch | None = None
    if plan.compile_after is not None:
        accelerate(chains)
    if saved is not None:
        saved = moved(saved, chains.alive.device)
        load_state(chains, saved["chains"])
        bar.skip(chains.count * chains.gradients)
    elif first in plan.begin:
        take_over(chains, plan.begin[first])
    try:
        if saved is None or saved["stage"] == "warmup":
            result.reports = _warm_up(chains, first, plan, bar, recorder, saved, leapfrogs)
        else:
            result.reports = [report_from(report) for report in saved["reports"]]
            done, drawn, levels = saved["done"], saved["drawn"], list(saved["levels"].unbind())
            result.lengths = saved["lengths"]
        recorder.warmed(result)
        gap = result.reports[0].keep_every or plan.spacing
        if chains.hmc is not None:
            chains.hmc.recycles = gap < chains.hmc.length
        bar.total = (plan.here or plan.total) * (
            result.reports[0].steps + done + chains.sampler.steps_to(gap, plan.draws - drawn)
        )

        def state() -> State:
            return {
                "stage": "sampling",
                "chains": state_of(chains),
                "reports": [report.as_dict() for report in result.reports],
                "lengths": result.lengths,
                "done": done,
                "drawn": drawn,
                "levels": torch.stack(levels) if levels else torch.empty(0),
                **({} if watch is None else {"traces": torch.stack(watch.traces) if watch.traces else torch.empty(0)}),
            }

        def tick(steps: int) -> None:
            nonlocal done
            done += steps
            bar.advance(label + "sampling", steps * chains.count)

        multi_step, every = multi_step or _many_steps(chains, plan, gap, bar), plan.noise_interval(chains)
        if plan.auto:
            traces = None if saved is None or saved["stage"] == "warmup" else saved["traces"].cpu()
            watch, pauses = Watch(chains, plan.held_out, traces), looks(plan.draws)
            result.stopped = (yield watch) or ""
        recorder.mark(first, state)
        if plan.most_side_by_side > 1 and isinstance(multi_step, GraphSteps):
            drawing.in_turns = True
            yield None
            if drawing.side_by_side > 1:
                label, result.side_by_side = f"{drawing.side_by_side} chains side by side ", drawing.side_by_side

        def late() -> bool:
            scoring = drawn * chains.count * drawing.side_by_side * plan.scoring
            return time.monotonic() + scoring > drawing.deadline

        while drawn < plan.draws and not result.stopped:
            if drawn and late():
                result.stopped = f"max_seconds: {drawn} of {plan.draws} draws were taken"
                break
            steps = left = chains.sampler.steps_to(gap)
            # The first draw may come before its time, unless it belongs to the end of a cycle or trajectory.
            ends_early = drawn > 0 or (chains.hmc is None and steps == gap)
            if isinstance(multi_step, GraphSteps) and drawing.in_turns:
                yield from multi_step.turns(done, steps, tick)
            elif multi_step is not None:
                multi_step.take_steps(done, steps, tick)
            while multi_step is None and left:
                chains.step(split=chains.follows_noise and done % every == 0)
                tick(1)
                left -= 1
                if ends_early and late():
                    break
            if drawn and multi_step is None and left:
                continue
            chains.check_finite()
            levels.append(chains.level)
            recorder.keep(chains, first, drawn)
            if note is not None:
                note(chains.gradients, chains.level, {g["name"]: g["rate"] for g in chains.sampler.param_groups}, first)
            for k in chains.failures:  # draws of a dropped chain end here
                result.lengths.setdefault(k, drawn)
            drawn += 1
            result.drawn = drawn
            if watch is not None:
                watch.take()
            recorder.mark(first, state)
            if watch is not None and drawn in pauses:
                result.stopped = (yield watch) or ""
        warn_of(chains, result.reports, levels[drawn // 2 :], first)
    except DivergedError:
        pass  # of every chain, as `run.failures` says
    for k in chains.failures:
        result.lengths.setdefault(k, drawn)
    result.failures, result.gradients, result.drawn = chains.failures, chains.gradients, drawn
    result.compiled = _engine(chains, multi_step)
    result.batches = chains.batches.state()
    if plan.ends is not None:
        plan.ends[first] = {**state_of(chains), "reports": result.reports}
    recorder.finished(result, state if len(chains.failures) < chains.count else None)


def _engine(chains: Chains, multi_step: MultiStep | GraphSteps | LeapfrogMultiStep | None) -> str:
    """How steps were taken, appended to the name of the engine."""
    if isinstance(multi_step, GraphSteps):
        return ", CUDA graph of whole steps"
    if chains.graph is not None:
        return f", CUDA graph of gradients ({chains.graph_unsupported})"
    if chains.leaves[0].is_cuda and chains.many is None:
        return f", eager ({chains.graph_unsupported})"
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
    if not _pays(chains, plan, plan.draws * gap) or multistep.unsupported_reason(chains):
        return None
    multi_step = MultiStep(chains, plan.noise_interval(chains), log=bar.note)
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


def _warm_up(
    chains: Chains,
    first: int,
    plan: DrawPlan,
    bar: Progress,
    recorder: Recorder,
    saved: State | None,
    leapfrogs: LeapfrogMultiStep | None,
) -> list[WarmupReport]:
    """Warm chains up, or take over their rates; returns a report for each chain."""
    begun = plan.begin.get(first, {})
    if AS_IS in begun:
        measured = plan.keep_every == "auto"
        reports = [replace(report, keep_every=report.keep_every if measured else None) for report in begun[AS_IS]]
        bar.skip(chains.count * reports[0].steps)
    elif plan.warmup == 0:
        _check_rates(chains, plan)
        reports = [WarmupReport(True, "", 0, 0, None) for _ in range(chains.count)]
    else:

        def mark(state: Callable[[], State]) -> None:
            recorder.mark(first, lambda: {"stage": "warmup", "chains": state_of(chains), "warmup": state()})

        warmup = warmup_of(chains, None if plan.warmup == "auto" else int(plan.warmup), bar, mark, leapfrogs)
        if saved is not None:
            warmup.load(saved["warmup"])
        reports = warmup.run(plan.keep_every == "auto")
    if (spacing := reports[0].keep_every) is not None and chains.heating is None:
        chains.sampler.fit_schedule(spacing)
    return reports
