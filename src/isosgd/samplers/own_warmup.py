"""The warm-up of a sampler in a loop that only calls ``backward`` and ``step``.

It sees only gradients: no loss, and no second gradient on the same minibatch.

- *Noise vectors* are differences of successive gradients over sqrt(2). They are centred wherever the chain is, so that
  the gradient of a poor start does not count as noise. Better ones can be passed by ``step(noise=...)``.
- *Optimising* uses Adam. Its steps grow while successive gradients agree, and shrink when these no longer correlate
  (Pflug 1990), until they are shorter than the posterior is wide. Then the iterates are averaged. With
  ``trained=True`` this stage is skipped.
- *Warming up* first holds the parameters fixed to measure the noise at one point. The chain then samples, in windows
  whose length doubles. Rates fall at once where they must, and rise by at most a factor of 2 between windows.
- *Curvature* is the Fisher information ``n Var(g)``, unless a regression of gradients on parameters, along the
  directions with most noise, gives significantly more.
- *Batches without replacement*, as from a shuffled loader, have noise that cancels over an epoch, as the epoch means of
  the regression's residuals show. Then only the noise that does not cancel is corrected for.
- *Sampling* begins when, in two successive windows, rates hardly changed and the mean gradient was as small as
  stationarity allows. Rates are then frozen.

References:
    Pflug (1990), Non-asymptotic confidence bounds for stochastic approximation algorithms with constant step size.
    Kingma, Ba (2015), Adam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isosgd.errors import DivergedError, warn_caller
from isosgd.geometry.base import FIRST_RATIO, Geometry
from isosgd.noise.model import Uses, join
from isosgd.samplers.groups import Group
from isosgd.samplers.injection import capturing

if TYPE_CHECKING:
    from isosgd.samplers.base import Sampler

OPTIMISING, WARMING_UP, SAMPLING = "optimising", "warming up", "sampling"

MOST_STEPS = 20_000  # of the whole warm-up, by default
MOST_OPTIMISATION_SHARE = 0.5
OPTIMISATION_WINDOW = 100
LEAST_OPTIMISED, OPTIMISED_EPOCHS = 2_000, 50  # steps and epochs after which optimisation ends unless the mode is far
FIRST_LENGTH, LENGTH_AT_ZERO = 0.03, 0.006  # of Adam's first steps: relative to a group's RMS; if that is zero
ADAM_MEMORY = 0.9, 0.99
STRAIGHT = 0.1  # net displacement over path length, below which steps oscillate (a random walk has 0.3)
AGREEMENT = 0.5  # correlation of successive gradients above which the optimum is far away
SHORT = 0.5  # posterior standard deviations: steps need not be shorter
SHORTEST = 2.0**-12  # times the longest step
FIRST_WINDOW, LEAST_LAST_WINDOW, ADAPT_EVERY = 50, 400, 20
FIRST_CAUTION = 100.0  # factor on the first curvature, until it is measured along the chain
EARLY_RISE = 10.0  # of rates, in windows shorter than LEAST_LAST_WINDOW
SILENT = 1e-12  # times the squared gradient at the start: less is rounding error
RUNAWAY = 100.0  # times the squared gradient that stationarity allows plus that of the held parameters
UNUSED_FOR = 20  # steps without a gradient after which a parameter counts as unused
LEAST_POINTS = 5  # for a regression line
LEAST_EPOCHS = 4  # whose means are compared
PAIR_EVERY = 2  # steps between noise vectors in a window
FOLLOW_EVERY, FOLLOW_GEOMETRY_EVERY = 16, 128  # steps between noise vectors, once rates are frozen
SETTLED_RATIO, SIGNAL_RATIO, RELAXATIONS = 1.5, 2.0, 5.0
SURE = 3.0  # standard errors
DRIFTING = 4.0  # standard errors
PROBES = 8  # directions along which a geometry's curvature is checked
SAFE = 2.0  # factor on the curvature found along them
MOST_RESTARTS = 10
CANCELLING = 0.8  # variance of epoch means over that of independent batches, below which noise cancels
SLOWER = 4.0  # factor by which steps shrink


class OwnWarmup:
    """The warm-up of a sampler in the user's loop. `step` is called once for each step of the sampler.

    Args:
        budget: its length in steps; None for as many as it needs, up to `MOST_STEPS`.
        by_scheme: whether one of I-SGD's schemes estimates the rates, or the user gave them: this class then only
            provides noise vectors.

    Attributes:
        phase: ``optimising``, ``warming up`` or ``sampling``.
        spent: steps so far.
        reason: why rates were frozen before they settled; empty if they had settled.
        curvatures: of ``f / N`` in each group, from which rates were set.
        optimisation: steps of the initial optimisation.
    """

    kept = (
        *("phase", "spent", "holding", "length", "place", "settled_before", "optimisation", "reason", "factor"),
        *("longest", "mean", "square", "lengths", "centre", "pflug", "noise_square", "before", "start", "halves"),
        *("line", "signal", "joint", "curvatures", "caution", "restarts", "old_rates", "images", "axes", "corrected"),
        *("structure", "recent", "levels", "looked", "noise_weight", "steepest", "used"),
    )

    def __init__(self, sampler: Sampler, budget: int | None, by_scheme: bool = False) -> None:
        if sampler.batch_size is None and not by_scheme:
            raise ValueError(
                f"{type(sampler).__name__} finds its own rate in a loop from the gradient noise of minibatches: pass "
                "batch_size=n, the examples behind each step, or a rate of your own"
            )
        if budget is not None and budget < 2 * FIRST_WINDOW and not by_scheme:
            raise ValueError(
                f"warmup = {budget} is too short to measure anything: give at least {2 * FIRST_WINDOW} "
                f"({8 * FIRST_WINDOW} or more to settle), or leave it out"
            )
        self.sampler, self.budget, self.by_scheme = sampler, budget, by_scheme
        self.whole = sampler.whole
        self.total = MOST_STEPS if budget is None else budget
        first = sampler.param_groups[0]["params"][0]
        self.device = first.device
        count = len(sampler.param_groups)
        self.phase: str = OPTIMISING
        self.spent = self.place = self.optimisation = self.restarts = 0
        self.holding, self.settled_before = False, False
        self.length = max(min(OPTIMISATION_WINDOW, self.total // 16), 5)
        self.reason, self.caution = "", 1.0
        self.factor = self.longest = 1.0  # of Adam's steps
        self.mean: list[Tensor] = []
        self.square: list[Tensor] = []
        self.noise_square: list[Tensor] = []  # of successive differences, while optimising
        self.lengths: list[float] = []
        self.centre: list[Tensor] = []  # mean of the iterates in the second half of a window
        # Sums over a window: the product of successive gradients, its square, squared gradients, the path length.
        self.pflug = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.used: list[bool] = []  # whether a parameter had a gradient
        self.before: list[Tensor] = []  # the gradient of the last step
        self.last: list[Tensor] = []  # the same, in the step after it
        self.start: list[Tensor] = []  # where a window began
        self.halves: list[list[Tensor]] = []  # sums of the gradients in the halves of a window
        self.line = Regression(count, self.device)
        self.recent = torch.zeros(count, dtype=torch.float64, device=self.device)  # squared gradients since `looked`
        self.levels: list[float] = []  # mean squared gradients while the parameters were held fixed
        self.steepest = 0.0  # squared gradient at the start
        self.looked = 0  # step of the window at which the last runaway check was made
        self.signal = torch.zeros(3, count, dtype=torch.float64, device=self.device)
        self.joint = torch.zeros(count, count, dtype=torch.float64, device=self.device)
        self.curvatures: list[float] = []
        self.old_rates: list[float] = []
        self.images: list[Tensor] = []  # a window's regression: projections of the parameters ...
        self.axes: list[Tensor] = []  # ... and of the gradients
        self.noise_weight = 1.0  # share of the gradient noise that is corrected for once rates are frozen
        self._remember_settings()
        if sampler.trained:
            self._hold_here()

    def _remember_settings(self) -> None:
        self.corrected = self.sampler.corrected
        self.structure = "" if self.sampler.geometry is None else self.sampler.geometry.name

    # -- what the sampler has -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[Group]:
        return self.sampler.param_groups

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.groups for p in group["params"]]

    def gradients(self) -> list[Tensor]:
        """All gradients; zeros where a parameter has none."""
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.params]

    @property
    def geometry(self) -> Geometry | None:
        return self.sampler.geometry

    def by_group(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One flat vector for each group, of tensors shaped like the parameters."""
        found, vectors = [], iter(tensors)
        for group in self.groups:
            found.append(join([next(vectors) for _ in group["params"]]).float())
        return found

    def dots(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """Inner products within each group."""
        return self._sums(self.by_group(a), self.by_group(b))

    def _sums(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return self.whole.total(torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)])).double()

    # -- noise vectors ------------------------------------------------------------------------------------------------

    def noise(self, given: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        """The noise vector of this step, if one is due: the one given, or a difference of gradients."""
        if self.by_scheme:
            self.phase = WARMING_UP if self.sampler.warming else SAMPLING
        if self.phase != SAMPLING:
            self._look_for_unused()
        if self.by_scheme and (given is not None or not self.sampler.estimator.centred):
            return given
        if self.phase != SAMPLING:
            now = [g.clone() for g in self.gradients()]
            self.last, self.before = self.before, now
            return self._difference(now, self.last) if given is None and self.last else given
        if not (self.sampler.needs_vectors or self.geometry is not None):
            return None  # steps no longer depend on noise
        if given is not None:
            return self._weighted(given)
        if capturing():
            return None
        every = FOLLOW_EVERY if self.geometry is None else FOLLOW_GEOMETRY_EVERY
        turn, now = self.groups[0]["step"] % every, self.gradients()
        first = self.by_scheme and not self.sampler.noise.ready()  # then every step gives one
        last, self.before = self.before, [g.clone() for g in now] if turn == every - 1 or first else []
        return self._weighted(self._difference(now, last)) if last and (first or turn == 0) else None

    def _look_for_unused(self) -> None:
        """Raise if the loss does not depend on a parameter: without noise there is no rate for it."""
        last = min(UNUSED_FOR, self.total)
        if self.spent >= last:
            return
        if not self.used:
            self.used = [False] * len(self.params)
        self.used = [used or p.grad is not None for used, p in zip(self.used, self.params, strict=True)]
        if self.spent == last - 1 and not all(self.used):
            unused = self.params[self.used.index(False)]
            name = next(g["name"] for g in self.groups if any(p is unused for p in g["params"]))
            raise RuntimeError(
                f"a parameter of shape {tuple(unused.shape)} in group {name!r} had no gradient in {last} steps: "
                "leave it out of params, or requires_grad_(False)"
            )

    def _weighted(self, noise: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.noise_weight == 1.0 or self.geometry is not None:
            return noise
        return list(torch._foreach_mul(list(noise), math.sqrt(self.noise_weight)))

    @staticmethod
    def _difference(now: list[Tensor], last: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_mul(torch._foreach_sub(now, last), math.sqrt(0.5)))

    # -- the phases ---------------------------------------------------------------------------------------------------

    def step(self, noise: Sequence[Tensor] | None) -> bool:
        """Process the gradients of a step. Returns whether the sampler makes its own move."""
        self.spent += 1
        if self.phase == OPTIMISING:
            self._optimise(noise)
            return False
        if self.holding:
            self._hold(noise)
            return False
        self._in_window(noise)
        return True

    def stepped(self) -> None:
        """Called after the sampler has made its move."""
        if self.by_scheme:
            self.spent += 1
            self.phase = WARMING_UP if self.sampler.warming else SAMPLING
            return
        if self.phase != WARMING_UP or self.holding:
            return
        self.place += 1
        ended = self.place >= self.length
        every = ADAPT_EVERY // 4 if self.length <= FIRST_WINDOW else ADAPT_EVERY
        if ended or self.place % every == 0:
            if self._ran_away():
                self._restart()
            elif ended:
                self._end_window()
            else:
                self._adapt(rise=1.0)

    # -- initial optimisation -----------------------------------------------------------------------------------------

    def _optimise(self, noise: Sequence[Tensor] | None) -> None:
        params, grads = self.params, self.gradients()
        if not self.mean:
            self.mean, self.square, self.noise_square, self.centre = (
                [torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(4)
            )
            for group in self.groups:
                place = join([p.detach().float() for p in group["params"]])
                size = float(self.whole.mean(place.square(), group["params"]).sqrt())
                self.lengths += [FIRST_LENGTH * size if size > 0 else LENGTH_AT_ZERO] * len(group["params"])
            self.steepest = float(self.whole.total(torch.stack(torch._foreach_norm(grads)).square().sum()))
        first, second = ADAM_MEMORY
        last = self.last
        grads = [g.float() for g in grads]
        torch._foreach_lerp_(self.mean, grads, 1.0 - first)
        torch._foreach_lerp_(self.square, torch._foreach_mul(grads, grads), 1.0 - second)
        if noise is not None:
            vectors = [d.float() for d in noise]
            weight = max(1.0 - second, 1.0 / self.spent)
            torch._foreach_lerp_(self.noise_square, torch._foreach_mul(vectors, vectors), weight)
        mean_factor, square_factor = 1.0 - first**self.spent, 1.0 - second**self.spent
        begun = min(self.spent / self.length, 1.0)  # full first steps could leave the minimum of a trained network
        if self.place == 0:
            self.start = [p.detach().float().clone() for p in params]
        agreement = torch.zeros(3, dtype=torch.float64, device=self.device)
        for i, (p, m, s, g) in enumerate(zip(params, self.mean, self.square, grads, strict=True)):
            scale = (s / square_factor).sqrt().add_(1e-20)
            share = begun * m / scale / mean_factor
            before = last[i].float() if last else torch.zeros_like(g)
            agreement += torch.stack([(g * before / scale).sum(), (g * g / scale).sum(), share.abs().sum()]).double()
            p.sub_((self.factor * self.lengths[i] * share).to(p.dtype))
        agreement = self.whole.total(agreement)
        self.pflug += torch.stack([agreement[0], agreement[0] ** 2, agreement[1], agreement[2]])
        self.place += 1
        if self.place > self.length // 2:
            weight = 1.0 / (self.place - self.length // 2)
            torch._foreach_lerp_(self.centre, [p.float() for p in params], weight)
        if self.place >= self.length:
            self._end_optimisation_window()

    def _end_optimisation_window(self) -> None:
        total, squares, lengths, way = self.pflug.tolist()
        moved = zip(self.params, self.start, self.lengths, strict=True)
        gone = sum(float((p - q).abs().sum()) / (self.factor * length) for p, q, length in moved)
        gone = float(self.whole.total(torch.tensor(gone, dtype=torch.float64, device=self.device)))
        if not math.isfinite(total):
            raise DivergedError(
                f"after {self.spent} steps a gradient is not finite: check the loss, the data and the start",
                step=self.spent, group=None, state={},
            )  # fmt: skip
        self.pflug.zero_()
        far = total > AGREEMENT * lengths
        enough = max(LEAST_OPTIMISED, OPTIMISED_EPOCHS * self.epoch)
        over = self.spent >= MOST_OPTIMISATION_SHARE * self.total or (self.spent >= enough and not far)
        self.place = 0
        # Without noise, successive gradients agree even if steps oscillate.
        significant = gone > STRAIGHT * way and total > 2.0 * math.sqrt(max(squares - total**2 / self.length, 0.0))
        if not over and significant:
            if far:
                self.factor *= 2.0
                self.longest = max(self.longest, self.factor)
            return
        if not over and not self._short_enough() and self.factor > SHORTEST * self.longest:
            self.factor /= SLOWER
            return
        if not significant:  # steps surround a mode, to which their mean is closest
            torch._foreach_copy_(self.params, self.centre)
        self.mean = self.square = self.noise_square = self.centre = []
        self.before, self.lengths = [], []
        self._hold_here()

    def _short_enough(self) -> bool:
        """Whether steps are shorter than the posterior width that the Fisher information implies."""
        first = 0  # parameter of the group; all of a group have one step length
        for group, square in zip(self.groups, self.by_group(self.noise_square), strict=True):
            length, first = self.lengths[first], first + len(group["params"])
            information = group["num_data"] * self._batch_size * float(self.whole.mean(square, group["params"]))
            deviation = math.sqrt(max(group["temperature"], 1e-12) / information) if information > 0 else math.inf
            if self.factor * length > SHORT * deviation:
                return False
        return True

    @property
    def _batch_size(self) -> int:
        assert self.sampler.batch_size is not None
        return self.sampler.batch_size

    # -- the noise at one point ---------------------------------------------------------------------------------------

    def _hold_here(self) -> None:
        """End the optimisation and hold the parameters fixed."""
        self.optimisation, self.phase, self.holding = self.spent, WARMING_UP, True
        self.length = FIRST_WINDOW if self.geometry is None else max(FIRST_WINDOW, self.geometry.min_vectors)

    def _hold(self, noise: Sequence[Tensor] | None) -> None:
        if noise is not None:
            self.sampler.observe(list(noise))
            self.place += 1
            self.recent += self.dots(self.before, self.before)
        ready = self.geometry is not None or self.sampler.noise.ready()
        if self.place < self.length or not ready:
            return
        if float(self.recent.sum()) / self.place <= SILENT * self.steepest:
            raise RuntimeError(
                "the gradients of all minibatches are zero where the loss is least: the model fits every example "
                "exactly, and without gradient noise there is nothing to set a rate by. Sample with isosgd.sample, "
                "which measures the curvature, or give a sampler that has one its lr="
            )
        self.curvatures = [FIRST_RATIO * FIRST_CAUTION * h for h in self._fisher()]
        self._choose_correction()
        if self.geometry is not None:
            self.geometry.curvature_ratio *= FIRST_CAUTION
        self.sampler.adapt(self.curvatures, **self._prior())
        self.levels = (self.recent / self.place).tolist()
        self.holding = False
        self._begin_window(FIRST_WINDOW)

    def _ran_away(self) -> bool:
        """Whether gradients are far larger than they can be on the posterior."""
        if not bool(torch.isfinite(self.whole.total(torch.stack(torch._foreach_norm(self.params)).sum()))):
            return True
        if self.line.count >= LEAST_POINTS:
            self.curvatures = self._measured()
        found, self.looked = (self.recent / max(self.place - self.looked, 1)).tolist(), self.place
        self.recent.zero_()
        for square, level, bound in zip(found, self.levels, self._bounds(), strict=True):
            if not square <= RUNAWAY * (level + bound):
                return True
        return False

    def _bounds(self) -> list[float]:
        """Upper bound of each group's squared mean gradient at stationarity, ``T tr(H) / N``."""
        found = []
        for group, h in zip(self.groups, self.curvatures, strict=True):
            size = self.whole.size(sum(p.numel() for p in group["params"]), group["params"])
            found.append(group["temperature"] * h * size / group["num_data"])
        return found

    def _prior(self) -> dict[str, Any]:
        """The curvature of the prior (weight decay) as an argument of `adapt`, for a geometry."""
        if self.geometry is None:
            return {}
        decays = [(p, group["weight_decay"] * group["num_data"]) for group in self.groups for p in group["params"]]
        return {"prior": [torch.full_like(p, decay) for p, decay in decays]}

    def _fisher(self) -> list[float]:
        """The largest curvature of each group, from the noise of its gradients."""
        if self.geometry is not None:
            return [1.0] * len(self.groups) if not self.geometry.known else self.curvatures
        tops = [float(self.sampler.noise.summary(group, "top")) for group in self.groups]
        return [2.0 * self._batch_size * b + g["weight_decay"] for b, g in zip(tops, self.groups, strict=True)]

    def _choose_correction(self) -> None:
        """If the user has left the choice, correct for gradient noise if that allows larger rates."""
        sampler = self.sampler
        if sampler.chooses_correction:
            ratio = 0.0
            for group in self.groups:
                top = float(sampler.noise.summary(group, "top")) / sampler.bias
                longest = float(sampler.noise.longest(group))
                ratio += math.log(max(top, 1e-300) / max(longest, 1e-300))
            sampler.corrected = ratio > 0
            sampler.noise.uses = Uses(vectors=sampler.corrected)
        self._remember_settings()

    # -- windows ------------------------------------------------------------------------------------------------------

    def _begin_window(self, length: int) -> None:
        left = self.total - self.spent
        self.length = left if self.budget is not None and left < 3 * length else min(length, max(left, 1))
        self.place = self.looked = 0
        self.recent.zero_()
        self.start = [p.detach().clone() for p in self.params]
        self.halves = []
        self.signal.zero_()
        self.joint.zero_()
        self.old_rates = [float(group["rate"]) for group in self.groups]
        self._choose_directions()
        self.sampler.forget_noise()
        self.before = []

    def _choose_directions(self) -> None:
        """Choose the directions along which this window measures the curvature."""
        geometry = self.geometry
        if geometry is None:
            found = [self.sampler.noise.seen_of_group(group)["top"].clone() for group in self.groups]
            self.images = self.axes = [u / self.whole.norm(u).clamp_min(1e-30) for u in found]
        else:
            # Directions t, scaled so that the curvature along them is 1 by H, and their images w = H t.
            shape = (min(PROBES, geometry.total), geometry.total)
            drawn = torch.randn(shape, generator=self.sampler.generator, device=self.device, dtype=geometry.dtype)
            axes = [geometry.direction(x.unsqueeze(0)).squeeze(0) / geometry.unit_rate for x in drawn]
            scales = [(x * t).sum().clamp_min(1e-36).sqrt() for x, t in zip(drawn, axes, strict=True)]
            self.images = [x / s for x, s in zip(drawn, scales, strict=True)]
            self.axes = [t / s for t, s in zip(axes, scales, strict=True)]
        self.line = Regression(len(self.axes), self.device)

    def _in_window(self, noise: Sequence[Tensor] | None) -> None:
        self.recent += self.dots(self.before, self.before)
        i, grads = self.place, self.gradients()
        moved = torch._foreach_sub([p.detach() for p in self.params], self.start)
        if self.geometry is None:
            places, pulls = self.by_group(moved), self.by_group(grads)
        else:
            places, pulls = ([join([t.float() for t in each])] * len(self.axes) for each in (moved, grads))
        x, y = self._sums(self.images, places), self._sums(self.axes, pulls)
        self.line.add(x, y, self.epoch, (self.spent - 1) % self.epoch if self.epoch else 0)
        half = min(2 * i // max(self.length, 1), 1)
        if half == len(self.halves):
            self.halves.append([torch.zeros_like(g, dtype=torch.float32) for g in grads])
        torch._foreach_add_(self.halves[half], [g.float() for g in grads])
        if noise is None or not self.last:
            return
        if i % PAIR_EVERY == 1 or self.length < PAIR_EVERY:
            self.sampler.observe(list(noise))
        # The noise of successive gradients is independent: their product estimates the squared mean gradient.
        product = self._whitened_dots(grads, self.last)
        self.signal += torch.stack([product, product**2, torch.ones_like(product)])
        if self.geometry is None:
            z = self._sums(self.axes, self.by_group(list(noise)))
            self.joint += torch.outer(z, z)

    def _whitened_dots(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        if self.geometry is None:
            return self.dots(a, b)
        flat_a, flat_b = (join([t.float() for t in each]).unsqueeze(0) for each in (a, b))
        whole = (flat_a * self.geometry.direction(flat_b)).sum().double()
        return whole.expand(len(self.groups))

    def _measured(self) -> list[float]:
        """The curvature of each group, from the noise and the regression of gradients on parameters."""
        slope, error = self.line.slopes(pooled=self.geometry is not None)
        sure = slope > SURE * error
        if self.geometry is not None:
            # Relative to H. Where the slope is not significant, a moderate curvature does not matter at these rates.
            ratio = SAFE * float(slope) if bool(sure) and self.line.count >= LEAST_POINTS else FIRST_RATIO
            share = max(ratio, 1.0) * self.caution * float(self.geometry.unit_rate)
            return [share / float(group["rate"]) for group in self.groups]
        beyond = (
            torch.where(sure, slope - error, 0.0).tolist() if self.line.count >= LEAST_POINTS else [0.0] * len(slope)
        )
        factor = self._joint_factor() * self.caution
        return [factor * max(h, s) for h, s in zip(self._fisher(), beyond, strict=True)]

    def _joint_factor(self) -> float:
        """Top curvature of all groups together over that of single groups, from the correlation of their noise."""
        scale = self.joint.diagonal().clamp_min(1e-300).rsqrt()
        if len(self.groups) == 1 or not bool((self.joint.diagonal() > 0).all()):
            return 1.0
        return max(1.0, float(torch.linalg.eigvalsh(self.joint * scale[:, None] * scale[None, :])[-1]))

    def _adapt(self, rise: float) -> None:
        if self.geometry is None and not self.sampler.noise.ready():
            return
        self.curvatures = self._measured()
        self.sampler.adapt(self.curvatures, rise, **(self._prior() if rise > 1.0 else {}))

    def _restart(self) -> None:
        """Return to the start of the window, with smaller rates."""
        self.restarts += 1
        if self.restarts > MOST_RESTARTS:
            raise DivergedError(
                f"the chain ran away {self.restarts} times in its warm-up, at ever smaller rates: check the data, and "
                "the loss, which must be a mean over examples",
                step=self.spent, group=None, state={},
            )  # fmt: skip
        torch._foreach_copy_(self.params, self.start)
        for p in self.params:
            if "velocity" in self.sampler.state[p]:
                self.sampler.state[p]["velocity"].zero_()
        self.caution *= SLOWER
        self.sampler.forget_noise(void=True)
        if self.geometry is not None:
            self.geometry.slow(torch.full_like(self.geometry.factor, SLOWER))
        else:
            self.curvatures = [SLOWER * h for h in self.curvatures]
            self.sampler.adapt(self.curvatures, rise=1.0)
        self.settled_before = False
        self._begin_window(self.length)

    def _end_window(self) -> None:
        self._choose_correction()
        self._adapt(rise=EARLY_RISE if self.length < LEAST_LAST_WINDOW else 2.0)
        over = self.spent >= self.total
        self.reason = self._unsettled(over)
        least = LEAST_LAST_WINDOW if self.geometry is None else max(LEAST_LAST_WINDOW, 8 * self.geometry.min_vectors)
        done = self.budget is None and not self.reason and self.settled_before and self.length >= least
        if over or done:
            self._finish()
            return
        self.settled_before = not self.reason
        self._begin_window(2 * self.length)

    def _finish(self) -> None:
        ratio, error = self.line.block_noise()
        if ratio * (1.0 + SURE * error) < CANCELLING:
            self._weigh_noise(uncancelled(1.0 / max(self.relaxation, 1.0), self.epoch))
        if self.reason:
            temperature = self.groups[0]["temperature"]
            warn_caller(
                f"the warm-up of {self.spent} steps did not settle: {self.reason}; draws may be off. Give it more "
                f"steps (warmup=) or, around a trained network, a temperature= below {temperature:g}: then the chain "
                "stays near it"
            )
        self.phase = SAMPLING
        self.start, self.halves, self.images, self.axes, self.before = [], [], [], [], []
        self.sampler.fit_schedule(self.spacing)
        self.sampler.freeze()
        self.sampler.refresh()
        self.sampler.hand_over_rates()

    @property
    def epoch(self) -> int:
        """Steps in an epoch; 0 if it has a single one."""
        found = round(self.groups[0]["num_data"] / self._batch_size)
        return found if found > 1 else 0

    def _weigh_noise(self, weight: float) -> None:
        """Correct for only a share of the gradient noise."""
        self.noise_weight = weight
        if self.geometry is not None:
            self.geometry.noise_weight = weight
            self.geometry.slow(torch.ones_like(self.geometry.factor))
        for state in self.sampler.state.values():
            for name, power in (("variance", 1.0), ("longest", 1.0), ("ring", 0.5)):
                if name in state and self.geometry is None:
                    state[name].mul_(weight**power)
        self.sampler.noise.reset()

    @property
    def relaxation(self) -> float:
        """Relaxation time in steps, along the stiffest direction of the slowest group."""
        pulls = [float(group["rate"]) * h for group, h in zip(self.groups, self.curvatures, strict=True)]
        return self.sampler.friction / max(min(pulls), 1e-12)

    @property
    def spacing(self) -> int:
        """Steps between draws: an estimate of half the autocorrelation time."""
        return max(1, math.ceil(max(self.relaxation, 1.0 / self.sampler.friction)))

    def _unsettled(self, last: bool) -> str:
        """Why the chain has not settled, or an empty string."""
        groups = self.groups
        if not groups[0]["temperature"]:
            return ""
        rates = [float(group["rate"]) for group in groups]
        ratios = [rate / old for rate, old in zip(rates, self.old_rates, strict=True)]
        if last:
            ratios = [min(ratio, 1.0) for ratio in ratios]
        bounds = self._bounds()
        if self.geometry is not None:  # the same, in the metric and over all groups
            bounds = [sum(b * rate for b, rate in zip(bounds, rates, strict=True))] * len(bounds)
        signals = []
        for total, squares, count, bound in zip(*self.signal.tolist(), bounds, strict=True):
            n = max(count, 1.0)
            mean = total / n
            signals.append((mean, SURE * math.sqrt(max(squares / n - mean**2, 0.0) / n), bound))
        return unsettled(groups, ratios, signals, self.length, self.relaxation) or self._drifting()

    def _drifting(self) -> str:
        """Why the chain has not settled: the mean gradients of the window's halves agree. An empty string if not."""
        if len(self.halves) < 2 or self.geometry is not None:
            return ""
        half = self.length / 2
        products = self.dots(*self.halves) / half**2
        for group, found in zip(self.groups, products.tolist(), strict=True):
            noise = self.sampler.noise
            spread = 2.0 * math.sqrt(float(noise.summary(group, "top")) * float(noise.summary(group, "sum"))) / half
            if found > DRIFTING * spread:
                return f"the gradient of group {group['name']!r} points the same way all through the last window"
        return ""


def unsettled(
    groups: Sequence[Group],
    ratios: Sequence[float],
    signals: Sequence[tuple[float, float, float]],
    steps: int,
    relaxation: float,
) -> str:
    """Why a chain has not settled in its last window of ``steps`` steps, or an empty string.

    Args:
        groups: parameter groups.
        ratios: each group's rate after the window over that before it.
        signals: each group's squared mean gradient, `SURE` standard errors of it, and its bound at stationarity:
            there ``E|grad f / N|^2 = T tr(H) / N``, with top curvature h at most ``T d h / N``.
        steps: length of the window.
        relaxation: relaxation time of the slowest group along its stiffest direction, in steps.
    """
    for group, ratio in zip(groups, ratios, strict=True):
        if max(ratio, 1.0 / ratio) > SETTLED_RATIO:
            name = group["name"]
            return f"the rate of group {name!r} still changes (by {ratio:.2f} in the last window of {steps} steps)"
    for group, (square, error, bound) in zip(groups, signals, strict=True):
        if square - error > SIGNAL_RATIO * bound:
            times = math.sqrt(square / bound)
            return (
                f"the gradient of group {group['name']!r} is still {times:.1f} times what it can be at stationarity: "
                "the chain is still on its way"
            )
    if steps < RELAXATIONS * relaxation:
        return (
            f"the last window of {steps} steps is short beside the {relaxation:.0f} in which the chain forgets where "
            "it was, even along the stiffest direction of its slowest group"
        )
    return ""


# -- regression of gradients on parameters, and noise that cancels over an epoch ------------------------------------


def uncancelled(pull: float, epoch: int) -> float:
    """Share of the gradient noise that acts on a chain if batches are drawn without replacement.

    Noise then sums to zero over an epoch of E steps: at lag k < E its covariance is ``-V / (E - 1)``, for the share
    ``1 - k / E`` of all steps. A chain that contracts by ``1 - a`` in a step, a = ``pull``, weights it by
    ``(1 - a)^k``.

    Example:
        >>> round(uncancelled(1e-6, 20), 2), round(uncancelled(0.05, 20), 2), round(uncancelled(1.0, 20), 2)
        (0.0, 0.28, 1.0)
    """
    lags = range(1, epoch)
    return 1.0 - 2.0 / (epoch - 1) * sum((1.0 - k / epoch) * max(1.0 - pull, 0.0) ** k for k in lags)


class Regression:
    """Several simple linear regressions, updated point by point: slopes and their standard errors.

    Example:
        >>> line = Regression(1, torch.device("cpu"))
        >>> for x in range(10):
        ...     line.add(torch.tensor([float(x)]), torch.tensor([3.0 * x + (-1) ** x]))
        >>> [round(float(found), 1) for found in line.slopes()]
        [2.9, 0.1]
    """

    kept = ("count", "sums", "block", "blocks")

    def __init__(self, lines: int, device: torch.device) -> None:
        self.count, self.sums = 0, torch.zeros(5, lines, dtype=torch.float64, device=device)
        self.block = torch.zeros(3, lines, dtype=torch.float64, device=device)  # sums of x, y and 1 in this epoch
        self.blocks: list[Tensor] = []  # of complete epochs

    def add(self, x: Tensor, y: Tensor, epoch: int = 0, place: int = 0) -> None:
        """Add a point to each line; ``place`` is its position in an epoch of ``epoch`` points."""
        x, y = x.double(), y.double()
        self.sums += torch.stack([x, y, x * x, x * y, y * y])
        self.count += 1
        if not epoch:
            return
        if place == 0:
            self.block = torch.zeros_like(self.block)
        self.block += torch.stack([x, y, torch.ones_like(x)])
        if place == epoch - 1 and int(self.block[2, 0]) == epoch:
            self.blocks.append(self.block)

    def block_noise(self) -> tuple[float, float]:
        """Variance of the epoch means of residuals, over that of independent ones, and its relative error."""
        if len(self.blocks) < LEAST_EPOCHS:
            return 1.0, math.inf
        x, y, _, xy, yy = self.sums
        slope = self.slopes()[0]
        every = torch.stack(self.blocks)  # [epochs, 3, lines]
        left = (every[:, 1] - slope * every[:, 0]) / every[:, 2]
        noise = (yy - y * y / self.count - slope * (xy - x * y / self.count)).clamp_min(0.0) / (self.count - 2)
        found = (left.var(0) * every[0, 2]).sum() / noise.sum().clamp_min(torch.finfo(noise.dtype).tiny)
        return float(found), math.sqrt(2.0 / ((len(self.blocks) - 1) * len(slope)))

    def slopes(self, pooled: bool = False) -> tuple[Tensor, Tensor]:
        """Slope of each line and its standard error; one for all lines if ``pooled``."""
        x, y, xx, xy, yy = self.sums
        xx, xy, yy = xx - x * x / self.count, xy - x * y / self.count, yy - y * y / self.count
        if pooled:
            xx, xy, yy = (total.sum().reshape(1) for total in (xx, xy, yy))
        slope = xy / xx.clamp_min(torch.finfo(xx.dtype).tiny)
        freedom = max(self.count - 2, 1) * (self.sums.shape[1] if pooled else 1)
        error = ((yy - slope * xy).clamp_min(0.0) / freedom / xx.clamp_min(torch.finfo(xx.dtype).tiny)).sqrt()
        return slope, error
