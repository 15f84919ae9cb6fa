"""Scale-adapted SGHMC (Springenberg, Klein, Falkner, Hutter 2016), the sampler of BOHAMIANN, in velocity form.

    v <- (1 - a) v - lr P (g + w),    theta <- theta + v,    P = 1 / (eps + sqrt(V))
    Cov(w) = 2 a T / (N lr P) - 2 B^

In the notation of Theorem 2: P from a running mean V of g^2, A = a, B^ = V / 2 or measured. V is estimated in the
burn-in, with a memory tau that grows where gradients are mostly noise, then constant:

    tau <- tau + 1 - tau m^2 / V,    m <- m + (g - m) / (tau + 1),    V <- V + (g^2 - V) / (tau + 1)

Their step epsilon is ``sqrt(lr)`` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.noise.estimators import state_dtype
from isosgd.noise.model import Uses, join
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.injection import Move
from isosgd.samplers.metric import DiagonalMetric, check_eps, rms_metric
from isosgd.samplers.program import StepProgram


class AdaptiveSGHMC(Sampler):
    """SGHMC whose scales are adapted in the burn-in, then frozen.

    Targets ``exp(-f / T)`` after the burn-in, up to the discretisation bias ``rate h / (2 (2 - a))`` in the metric, if
    B^ is the variance of the gradient noise and the noise is independent between parameters. Correlations are not
    corrected for; `adapt` keeps their effect below ``bias``.

    Departures from the paper: B^ is measured if noise vectors are passed to `step` or `observe`. Without them it is
    V / 2 as in the paper; V is not centred and exceeds the variance by the squared gradient, so that too little noise
    is injected and variances are too small by about ``rate h / (2 a)`` in the metric. The burn-in also ends when rates
    are frozen, as at the end of the warm-up of `isosgd.sample`. ``eps`` bounds P. Injected noise is clipped at zero
    where B^ is too large for the rate.

    Args:
        friction: a in (0, 1].
        burn_in: steps in which the scales are adapted. Draws count after them.
        eps: bounds P, in the units of a mean gradient.
        corrected: subtract 2 B^ from the injected noise.
        settings: those of every `Sampler`.
    """

    family = "hamiltonian"
    targets = "exp(-f / T) after the burn-in, for independent gradient noise"
    paper = "Springenberg et al. 2016"
    departures = "the noise that is subtracted is measured where it can be; the burn-in ends with the warm-up"
    metric: DiagonalMetric

    def __init__(
        self,
        params: ParamsLike,
        *,
        friction: float = 0.05,
        burn_in: int = 3000,
        eps: float = 1e-5,
        corrected: bool = True,
        **settings: Any,
    ) -> None:
        if burn_in < 1:
            raise ValueError(f"burn_in = {burn_in} must be at least 1: the scales are found in it")
        self.burn_in, self.eps = burn_in, check_eps(eps)
        super().__init__(params, friction=friction, corrected=corrected, **settings)
        self.metric = DiagonalMetric(self.noise, self._metric, self._learn)
        self.noise.uses = Uses(variances=corrected)

    @property
    def adapting(self) -> bool:
        """Whether the burn-in is still running."""
        return self._adapts(self.param_groups[0])

    def _adapts(self, group: Group) -> bool:
        return not group["frozen"] and group["step"] < self.burn_in

    def _learn(self, group: Group, params: list[Tensor]) -> None:
        if not self._adapts(group):
            return
        for p in params:
            g = p.grad.to(state_dtype(p))  # type: ignore[union-attr]
            tau, mean, square = (self.kept_like(p, name, g.dtype) for name in ("tau", "mean", "square"))
            weight = 1.0 / (tau + 1.0)
            tau.add_(1.0 - tau * mean.square() / square.clamp_min(torch.finfo(square.dtype).tiny))
            mean.lerp_(g, weight)
            square.lerp_(g.square(), weight)
        self.refresh()  # the injected noise depends on V

    def _square(self, p: Tensor) -> Tensor:
        return self.kept_like(p, "square", state_dtype(p))

    def _metric(self, p: Tensor) -> Tensor:
        return rms_metric(self._square(p), self.eps)

    def _noise(self, params: list[Tensor]) -> list[Tensor]:
        """``2 B^`` in the metric."""
        return [self._metric(p) * self.state[p].get("variance", self._square(p)) for p in params]

    def noise_bound(self, group: Group) -> Tensor:
        """Covers what is subtracted; correlated noise is at most a small share of it."""
        if not self.corrected:
            return super().noise_bound(group)
        noise = self._noise(group["params"])
        most = 0.5 * join(noise, self.batched).amax(-1)
        return torch.maximum(most, self.metric.excess_noise(group, noise) / self.bias)

    def _program(self) -> StepProgram | str:
        return "its scales are still adapted" if self.adapting else super()._program()

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        if not self.corrected:
            return super()._move(group, params)
        return self._diagonal(self.composite(group), self.rate(group), self._noise(params))
