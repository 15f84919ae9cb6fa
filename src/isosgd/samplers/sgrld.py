"""Stochastic gradient Riemannian Langevin dynamics (Patterson and Teh 2013), for a diagonal metric.

    theta <- theta - lr (P g - (T / N) div P + P w),    P = G(theta)^-1,    w ~ N(0, 2 T G / (N lr))

In the notation of Theorem 1: C = T G / (N lr), and ``(div P)_i = d P_i / d theta_i`` by autograd. Their step epsilon_t
is ``2 lr_t / N`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isosgd.noise.estimators import state_dtype
from isosgd.noise.model import flat
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import ParamsLike
from isosgd.samplers.metric import DiagonalMetric
from isosgd.samplers.program import StepProgram
from isosgd.samplers.schedules import Annealing

Metric = Callable[[Tensor], Tensor]
LEEWAY = 1e-3  # for rounding errors, in the check that entries are independent


class Field:
    """A metric given by the user: its value and its divergence at a parameter.

    Args:
        metric: a function from a parameter to the diagonal of ``G^-1`` in its shape; by default the identity.
        coupled: whether an entry of the metric depends on other entries of the parameter. The divergence then takes a
            backward pass for each entry, instead of one for all.
        batched: whether parameters have a leading dimension of chains.
    """

    def __init__(self, metric: Metric | None, coupled: bool, batched: bool) -> None:
        if metric is not None and not callable(metric):
            raise TypeError(f"metric of type {type(metric).__name__}: pass a function from a parameter to a tensor")
        self.metric, self.coupled, self.batched = metric or torch.ones_like, coupled, batched
        self.checked: set[int] = set()

    def value(self, p: Tensor) -> Tensor:
        """``G^-1``."""
        if id(p) not in self.checked:
            return self.at(p)[0]
        with torch.no_grad():
            return self.metric(p.detach().to(state_dtype(p)))

    def at(self, p: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
        """``G^-power`` and its divergence."""
        with torch.enable_grad():
            x = p.detach().to(state_dtype(p)).requires_grad_()
            value = self.metric(x)
            if id(p) not in self.checked:
                self._check(x, value)
                self.checked.add(id(p))
            value = value if power == 1.0 else value**power
            divergence = self._divergence(x, value) if value.requires_grad else torch.zeros_like(x)
        return value.detach(), divergence

    def _divergence(self, x: Tensor, value: Tensor) -> Tensor:
        if not self.coupled:
            return torch.autograd.grad(value.sum(), x)[0]
        entries = flat(value, self.batched)
        found = torch.zeros_like(entries)
        for i in range(entries.shape[-1]):
            row = torch.autograd.grad(entries[..., i].sum(), x, retain_graph=True)[0]
            found[..., i] = flat(row, self.batched)[..., i]
        return found.view_as(x)

    def _check(self, x: Tensor, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != x.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the metric of a parameter of shape {tuple(x.shape)} is {found}: it must have its shape")
        worst = value.detach()[~(torch.isfinite(value) & (value > 0))]
        if worst.numel():
            raise ValueError(f"the metric holds {float(worst[0]):.3g}: it must be positive and finite everywhere")
        if self.coupled or not value.requires_grad:
            return
        probe = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view_as(x)
        mixed, own = (torch.autograd.grad((value * w).sum(), x, retain_graph=True)[0] for w in (probe, 1.0))
        if not torch.allclose(mixed, probe * own, rtol=LEEWAY, atol=LEEWAY * float(own.detach().abs().max())):
            raise ValueError("the metric of an entry depends on other entries: pass coupled=True")


def scales(sampler: Sampler) -> dict[Tensor, float]:
    """``T / N`` of each parameter."""
    return {p: g["temperature"] / g["num_data"] for g in sampler.param_groups for p in g["params"]}


class SGRLD(Sampler):
    """SGLD in a metric that the user gives as a function of theta.

    Targets ``exp(-f / T)`` as ``lr -> 0``. At a fixed rate the variance is too large by ``rate h / 2`` and by
    ``rate N b / T``, in the metric; `adapt` keeps each below ``bias`` for the metric at the chain's position then.
    Without a metric it is SGLD.

    Departures from the paper: any diagonal metric; theirs is that of a simplex.

    Args:
        metric: a function from a parameter to the diagonal of ``G^-1`` in its shape, see `Field`. It is not saved.
        coupled: whether an entry of it depends on other entries of the parameter.
        decay: exponent of the annealing, 0 for a fixed rate.
        offset: steps after which the rate begins to fall.
        settings: those of every `Sampler`.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> sampler = SGRLD(net.named_parameters(), num_data=100, lr=1e-3, metric=lambda p: (1 + p**2).sqrt())
        >>> net(torch.ones(5, 2)).square().mean().backward()
        >>> _ = sampler.step()
    """

    paper = "Patterson, Teh 2013"
    departures = "any diagonal metric; the identity by default"

    def __init__(
        self,
        params: ParamsLike,
        *,
        metric: Metric | None = None,
        coupled: bool = False,
        decay: float = 0.0,
        offset: float = 1000.0,
        **settings: Any,
    ) -> None:
        self.field = Field(metric, coupled, settings.get("chains") is not None)
        super().__init__(params, schedule=Annealing(decay, offset), **settings)
        self.metric = DiagonalMetric(self.noise, self.field.value)

    def _program(self) -> StepProgram | str:
        return "its metric depends on the position of the chain"

    def _drift(self, params: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scale, fields = scales(self), [self.field.at(p) for p in params]
        drift = [m * g - scale[p] * d for (m, d), g, p in zip(fields, grads, params, strict=True)]
        return [m for m, _ in fields], drift
