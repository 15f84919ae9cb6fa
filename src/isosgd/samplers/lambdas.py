"""One lambda for each group of parameters: what bounds it, when it is estimated, and the step that goes with it.

    theta <- theta - rate_p (g + w),    rate_p = T / (N lam_p),    Cov(w) = 2 lam_p I - Var(g)

Lambda covers the gradient noise, and with the curvature h of ``f / N`` it obeys ``lam >= T h / (N delta)``, so that the
discretisation bias is as allowed. It may be estimated from outside (`adapt`), or by the optimizer itself in its first
``warmup`` steps: by one of the paper's schemes, or in windows of growing length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from isosgd.noise import Summary, join
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group
from isosgd.samplers.planning import Move
from isosgd.samplers.rates import slow_rise
from isosgd.samplers.steppers import Number, allowed_rate_curvature
from isosgd.samplers.structure import Correction, Structure, diagonal_scale

Scheme = Literal["a", "b", "c", "windowed"]
FIRST_WINDOW = 50


class GroupLambdas(Sampler):
    """The part of I-SGD that has one lambda for each group; the settings are those of `isosgd.samplers.isgd.ISGD`."""

    scheme: Scheme
    structure: Structure
    correction: Correction
    summary: Summary
    warmup: int
    batch_size: int | None
    given: bool  # whether lambda is the user's

    # -- lambda -------------------------------------------------------------------------------------------------------

    def noise_bound(self, group: Group) -> Tensor:
        """The smallest lambda that leaves a non-negative covariance to inject."""
        if self.correction == "diagonal":
            return self.noise_summary(group, self.summary)
        return self.longest_noise(group)

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        """Lambda from the noise seen and the curvature; it grows at once and shrinks by at most ``rise``.

        Args:
            curvature: the top curvature of ``f / N`` in each group.
            rise: how much rates may rise.
        """
        if self.given:
            return
        noise = [self.noise_bound(group) for group in self.param_groups]
        if curvature is None and self.batch_size is not None:
            curvature = [2.0 * self.batch_size * self.noise_summary(group, "top") for group in self.param_groups]
        delta = allowed_rate_curvature(self.bias)
        guard = [torch.zeros_like(b) for b in noise]
        if curvature is not None:
            guard = [
                torch.as_tensor(
                    g["temperature"] * h / (g["num_data"] * delta), dtype=b.dtype, device=b.device
                ).expand_as(b)
                for g, h, b in zip(self.param_groups, curvature, noise, strict=True)
            ]
        lams = self.structure.solve(noise, guard)
        self._set([slow_rise(group["lam"], lam, rise) for group, lam in zip(self.param_groups, lams, strict=True)])

    def _set(self, lams: Sequence[Tensor]) -> None:
        tiny = torch.finfo(torch.float32).tiny  # a group without any noise or curvature has no rate of its own
        for group, lam in zip(self.param_groups, lams, strict=True):
            group["lam"] = self.number(lam.clamp_min(tiny))
            group["rate"] = self.structure.rate(group["lam"], group["temperature"], group["num_data"])
        self.refresh()

    def clipped_share(self, group: Group) -> Tensor:
        """Share of the noise that exceeds lambda, so that it could not be made isotropic: a scalar, or ``[chains]``."""
        if group["lam"] is None or self.group_noise(group) is None:
            return torch.zeros(self.chains or ())
        if self.correction == "outer":
            over: Tensor = self.recent_lengths(group) > 2.0 * group["lam"]
            return over.float().mean(0)
        scale = diagonal_scale(group["lam"], join(self._variances(group), self.batched))
        return (scale == 0).float().mean(-1)

    # -- the optimizer's own warm-up ----------------------------------------------------------------------------------

    @property
    def warming(self) -> bool:
        """Whether the optimizer's own warm-up is still on."""
        return bool(self.param_groups[0]["step"] < self.warmup)

    @property
    def _follows(self) -> tuple[bool, bool]:
        return self.correction == "diagonal", self.correction == "outer"

    def _takes_gradient(self) -> bool:
        return super()._takes_gradient() or (self.warming and not self.estimator.centred)

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        super().observe(noise)
        self._estimate()

    def _estimate(self) -> None:
        """Lambda from the noise seen so far, when the scheme says so."""
        if self.given or not (self.warming and self.noise_ready()):
            return
        step = self.param_groups[0]["step"]
        if self.scheme != "windowed":  # the running summary, with no guard, as in the paper
            bounds = [self.noise_bound(group) for group in self.param_groups]
            self._set(self.structure.solve(bounds, [torch.zeros_like(b) for b in bounds]))
        elif step % FIRST_WINDOW == 0 and (step // FIRST_WINDOW).bit_count() == 1:  # 50, 100, 200, 400, ...
            self.adapt()
            self.forget_noise()

    # -- the step -----------------------------------------------------------------------------------------------------

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        lam = group["lam"]
        if self.warming and (self.scheme == "c" or lam is None):
            return Move(0.0, 0.0)  # no estimate, no step; and scheme c estimates at a frozen model
        if lam is None:
            raise RuntimeError(
                f"group {group['name']!r} has no lambda: let the optimizer warm up (warmup=), call adapt(), or give "
                "lam="
            )
        if self.warming and self.scheme != "windowed":
            # Training goes on, at the Bayesian rate whatever temperature is sampled later.
            return Move(1.0 / (group["num_data"] * lam), 0.0)
        rate = self.rate(group)
        return self._outer(lam, rate) if self.correction == "outer" else self._diagonal(params, lam, rate)

    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, noise: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        was_warming = self.warming
        loss: Tensor | None = super().step(closure, noise=noise)
        if was_warming and not self.warming:
            self.freeze()
            self.refresh()  # from training or estimating to sampling
        return loss
