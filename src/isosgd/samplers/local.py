"""Langevin dynamics around a trained network, with its own step size, mass and noise correction.

It draws from ``p(w) ~ exp(-n_beta L(w) - gamma/2 |w - w0|^2)``, L the mean loss, w0 the parameters when the sampler is
made. With ``U = -log p``, a diagonal mass M and momenta p of unit variance, a step from a gradient at w is

    p -= eps M^-1/2 grad U;    w += eps/2 M^-1/2 p;    p = c p + s xi;    w += eps/2 M^-1/2 p

with ``c = exp(-eps)``: the splitting BAOAB, whose draws of w have the right variance for a quadratic loss at any stable
step size, with one gradient per step. Three quantities are measured in the first steps and then fixed:

- the mass, ``M = E[(grad U)^2]``, which is the mean curvature (by integration by parts) plus the minibatch noise, so
  that the noise never exceeds it;
- that noise, from differences of successive gradients; ``s^2 = 1 - c^2 (1 + eps^2 noise / M)`` corrects for it;
- the step size, such that ``eps^2 |M^-1/2 dg| / |M^1/2 dw|``, the squared frequency in units of eps, equals `BEND`.

References:
    Leimkuhler, Matthews (2013), Rational construction of stochastic numerical methods for molecular sampling. Lau,
    Furman, Wang, Murfet, Wei (2023), The local learning coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.errors import check_integer
from isosgd.samplers.groups import trained_groups

BEND = 0.25
UNSTABLE = 2.0  # the same quantity above which a step is undone and later ones are shorter ...
JUMP = 30.0  # ... if it also changes gradients this many times more than noise does
FIRST_STEP, MOST_STEP = 0.1, 1.0
GROWTH = 1.25  # largest growth of the step size per step
RESPONSE = 0.25  # exponent of the ratio by which it changes
FORGET = 0.97  # decay of sums over earlier steps
SHRINK = 10.0  # weight, in gradients, of the mean over all entries in the mass of each
PROBE = 1e-3  # of the size of the parameters: the first move


class LocalSampler(Optimizer):
    """Draws around the parameters' present values, at a step size that it finds. Targets ``exp(-U)``, see above.

    It can be the ``sampling_method`` in devinterp 1.x. Gradients are those of the mean loss of a minibatch.

    Args:
        params: parameters or groups of them; a group's ``optimize_over`` is a mask of the entries to sample.
        nbeta: inverse temperature, N / log N for the local learning coefficient.
        localization: gamma, precision of the Gaussian around the start.
        warmup: steps in which mass, noise and step size are estimated; draws begin after them.
        chains: whether the first dimension of every parameter is that of chains, which share these estimates.
        noise: whether gradients are those of minibatches; False for gradients of all data.
        generator: of random numbers; torch's own by default.
        lr: not supported; here for a clear error message.
        metrics: those that devinterp requests; none is supported.

    Attributes:
        step_size: eps.
        settled: whether the warm-up is over, so that steps are draws.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> w = torch.nn.Parameter(torch.zeros(20))
        >>> sampler, losses = LocalSampler([w], nbeta=100.0), []
        >>> for step in range(2000):
        ...     loss = (w**2).sum()
        ...     sampler.zero_grad()
        ...     loss.backward()
        ...     sampler.step()
        ...     losses += [100.0 * loss.item()] if sampler.settled else []
        >>> abs(sum(losses) / len(losses) - 10) < 1  # d / 2
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        nbeta: float,
        localization: float = 0.0,
        *,
        warmup: int = 100,
        chains: bool = False,
        noise: bool = True,
        generator: torch.Generator | None = None,
        lr: float | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        if lr is not None:
            raise ValueError(f"lr = {lr}: LocalSampler finds its step size; leave lr out of optimizer_kwargs")
        if metrics:
            raise ValueError(f"LocalSampler has no metric {metrics[0]!r}: leave out the callback that asks for it")
        if not (math.isfinite(nbeta) and nbeta > 0):
            raise ValueError(f"nbeta = {nbeta!r} must be positive and finite: N / log N")
        if not (math.isfinite(localization) and localization >= 0):
            raise ValueError(f"localization = {localization!r} must be finite and at least 0")
        check_integer("warmup", warmup, 10)
        self.warmup, self.chains, self.noise, self.generator = warmup, chains, noise, generator
        self.step_size, self.steps, self._weight, self._log_step = FIRST_STEP, 0, SHRINK, 0.0
        super().__init__(params, {"nbeta": nbeta, "localization": localization, "optimize_over": None})
        self.param_groups = trained_groups(self.param_groups)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype in (torch.bfloat16, torch.float16):
                    raise TypeError(f"parameters are {p.dtype}, whose steps are lost in rounding: use model.float()")
                self.state[p] |= {"start": p.detach().clone(), "mask": group["optimize_over"]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.state:
            raise ValueError("a group cannot be added: make a new LocalSampler with all of the parameters")
        super().add_param_group(param_group)

    @property
    def settled(self) -> bool:
        """Whether the warm-up is over, so that steps are draws."""
        return self.steps > self.warmup

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "found": [self.step_size, self.steps, self._weight, self._log_step]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step_size, self.steps, self._weight, self._log_step = state_dict["found"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "found"})

    def slopes(self) -> list[Tensor]:
        """``grad U`` at the present values, from the gradients of the loss."""
        found = []
        for group in self.param_groups:
            for p in group["params"]:
                slope = group["localization"] * (p.detach() - self.state[p]["start"])
                found.append(self._masked(p, slope if p.grad is None else slope + group["nbeta"] * p.grad))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step from the gradients at the present values."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params, slopes = [p for group in self.param_groups for p in group["params"]], self.slopes()
        if not self.steps:
            for p in params:
                if p.grad is None:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(p.shape)} has no gradient: leave it out, or requires_grad_(False)"
                    )
            size = math.sqrt(sum(float(p.square().sum()) for p in params) / sum(p.numel() for p in params)) or 1.0
            for p, slope in zip(params, slopes, strict=True):
                self.state[p] |= {"momentum": self._normal(p), "slope": slope, "place": p.detach().clone()}
                p.add_(self._normal(p), alpha=PROBE * size)
        else:
            self._learn(params, slopes)
            self._move(params)
        self.steps += 1
        return loss

    def _move(self, params: list[Tensor]) -> None:
        """Kick, drift, noise, drift."""
        keep, eps = math.exp(-self.step_size), self.step_size
        for p in params:
            state = self.state[p]
            root, share = state["mass"].rsqrt(), state["noise"] / (self._weight * state["mass"])
            fresh = (1.0 - keep**2 * (1.0 + eps**2 * share)).clamp_min(0.0).sqrt()
            state["place"] = p.detach().clone()
            kicked = state["momentum"] - eps * root * state["slope"]
            state["momentum"] = keep * kicked + fresh * self._normal(p)
            p.add_(root * (kicked + state["momentum"]), alpha=0.5 * eps)

    def _learn(self, params: list[Tensor], slopes: list[Tensor]) -> None:
        """Undo the last step where it was unstable; in the warm-up, update mass, noise and step size from it."""
        states = [self.state[p] for p in params]
        first = self.steps == 1
        turns = [slope - state["slope"] for slope, state in zip(slopes, states, strict=True)]
        masses = [torch.ones_like(turn[0] if self.chains else turn) if first else state["mass"]
                  for turn, state in zip(turns, states, strict=True)]  # fmt: skip
        bent = self._sum([turn.square() / mass for turn, mass in zip(turns, masses, strict=True)])
        moved = self._sum([(p - s["place"]).square() * m for p, s, m in zip(params, states, masses, strict=True)])
        curvature = (bent / moved).sqrt()
        if first:
            level = float(curvature.square().mean().sqrt())
            level = level if math.isfinite(level) and level > 0 else 1.0
            for state, mass, slope in zip(states, masses, slopes, strict=True):
                state |= {"mass": level * mass, "square": SHRINK * level * mass, "slope": slope}
                state["noise"] = torch.zeros_like(mass)
            return
        # Noise changes gradients, too; an unstable step changes them far more than the steps before it.
        usual = 2.0 / self._weight * sum(float((s["noise"] / m).sum()) for s, m in zip(states, masses, strict=True))
        stable = (self.step_size**2 * curvature < UNSTABLE) | (bent < JUMP * usual)  # which NaN is not
        if not bool(stable.all()):
            self.step_size *= 0.7
        for p, state, slope in zip(params, states, slopes, strict=True):
            good = stable.reshape(-1, *[1] * (p.ndim - 1)) if self.chains else stable[0]
            p.copy_(torch.where(good, p, state["place"]))
            state["momentum"] = torch.where(good, state["momentum"], self._normal(p))
            state["slope"] = torch.where(good, slope, state["slope"])
        if self.settled or not bool(stable.any()):
            return
        self._weight = FORGET * self._weight + 1.0
        for state, turn in zip(states, turns, strict=True):
            state["square"].mul_(FORGET).add_(self._mean(state["slope"].square()))
            turn = torch.where(turn.isfinite(), turn, 0.0)
            state["noise"].mul_(FORGET).add_(0.5 * self._mean(turn.square()) if self.noise else 0.0)
        entries = sum(state["square"].numel() for state in states)
        shared = sum(float(state["square"].sum()) for state in states) / entries / self._weight
        for state in states:
            state["mass"] = (state["square"] + SHRINK * shared) / (self._weight + SHRINK)
        bend = self.step_size**2 * math.sqrt(float(bent[stable].sum() / moved[stable].sum()))
        factor = min(max((BEND / max(bend, 1e-12)) ** RESPONSE, 0.5), GROWTH)
        self.step_size = min(self.step_size * factor, MOST_STEP)
        last = self.warmup // 3
        if self.warmup - self.steps < last:
            self._log_step += math.log(self.step_size) / last
            if self.steps == self.warmup:
                self.step_size = math.exp(self._log_step)

    def _normal(self, p: Tensor) -> Tensor:
        return self._masked(p, torch.randn(p.shape, generator=self.generator, device=p.device, dtype=p.dtype))

    def _masked(self, p: Tensor, x: Tensor) -> Tensor:
        mask = self.state[p]["mask"]
        return x if mask is None else x * mask

    def _sum(self, tensors: list[Tensor]) -> Tensor:
        """The sum over all entries, for each chain."""
        return torch.stack([x.reshape(len(x) if self.chains else 1, -1).sum(1) for x in tensors]).sum(0)

    def _mean(self, x: Tensor) -> Tensor:
        return x.mean(0) if self.chains else x
