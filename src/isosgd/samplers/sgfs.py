"""Stochastic gradient Fisher scoring (Ahn, Korattikara, Welling 2012), with a diagonal or a full matrix.

    theta <- theta - lr P (g + w),    P = Var(g)^-1,    Cov(w) = (2 T / (N lr) - 1 - n T / N) Var(g)

In the notation of Theorem 1: P ~ B^-1, C = (T / (N lr) - 1/2 - n T / (2 N)) Var(g). Their step is ``2 (gamma N I +
4 B / epsilon)^-1`` for the full gradient, with ``gamma = (n + N) / n`` and I the Fisher information: the same step if
I = n Var(g), T = 1, and their matrix B, which sets the rate, is a multiple of I. The term ``n T / N`` makes it exact at
any rate if the curvature of f / N is I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.geometry.layer import Number, diagonal_scale
from isosgd.geometry.linalg import times
from isosgd.noise.estimators import state_dtype
from isosgd.noise.model import Summary, join, split_like
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import Group, ParamsLike, check_same_units
from isosgd.samplers.injection import Move
from isosgd.samplers.metric import DiagonalMetric
from isosgd.samplers.program import StepProgram
from isosgd.samplers.schedules import Annealing
from isosgd.samplers.steppers import langevin_

TINY = 1e-30  # a variance that has no inverse
MOST_PARAMETERS = 2000  # of a full matrix


def subtracted_share(batch_size: int | None, group: Group) -> float:
    """The noise to subtract, in units of Var(g): ``1 + n T / N``."""
    return 1.0 + float((batch_size or 0) * group["temperature"] / group["num_data"])


def check_scoring(floor: float) -> None:
    """Raise if the floor is invalid."""
    if not 0 < floor < 1:
        raise ValueError(f"floor = {floor} must lie in (0, 1): the least variance, over the mean of its tensor")


class SGFS(Sampler):
    """Fisher scoring with the variance of each parameter's gradient noise.

    Targets ``exp(-f / T)`` if P is constant, gradient noise is independent between parameters, and the curvature k of
    f / N is the Fisher information ``n Var(g)``. Otherwise variances are off by the factor
    ``(2 - rate n) / (2 - rate k)``, both in the metric (n = 0 if ``batch_size`` is not given); `adapt` keeps that, and
    the excess temperature of correlated noise, below ``bias``.

    Departures from the paper: P comes from the running mean of squared noise vectors and is constant once rates are
    frozen; the matrix B is a multiple of Var(g) that the rate sets; the variances in P have a floor; there is a
    temperature.

    Args:
        floor: least variance in P, over the mean of its tensor (of the matrix), for directions without noise.
        decay: exponent of the annealing, 0 for a fixed rate.
        offset: steps after which the rate begins to fall.
        settings: those of every `Sampler`; ``lr`` must be below ``2 T / N``, and without ``batch_size`` the step is
            exact to first order in the rate only.
    """

    targets = "exp(-f / T) where the curvature is the Fisher information"
    paper = "Ahn, Korattikara, Welling 2012"
    departures = "P from noise vectors, with a floor, constant once frozen; B a multiple of Var(g); T"
    metric: DiagonalMetric

    def __init__(
        self,
        params: ParamsLike,
        *,
        floor: float = 0.01,
        decay: float = 0.0,
        offset: float = 1000.0,
        **settings: Any,
    ) -> None:
        check_scoring(floor)
        super().__init__(params, schedule=Annealing(decay, offset), **settings)
        self.floor = floor
        self.metric = DiagonalMetric(self.noise, self._metric)

    @property
    def needs_vectors(self) -> bool:
        return not self.param_groups[0]["frozen"]  # a frozen metric no longer changes

    def _variance(self, p: Tensor) -> Tensor:
        if "variance" not in self.state.get(p, {}):
            self.noise.seen_of_group(next(group for group in self.param_groups if any(p is q for q in group["params"])))
        return self.estimator.variance([self.state[p]])[0]

    def _metric(self, p: Tensor) -> Tensor:
        v = self._variance(p)
        mean = v.reshape(len(v), -1).mean(1).view(-1, *([1] * (v.dim() - 1))) if self.batched else v.mean()
        return 1.0 / torch.maximum(v, self.floor * mean).clamp_min(TINY)

    def noise_bound(self, group: Group) -> Tensor:
        """Covers what is subtracted; correlated noise is at most a small share of it."""
        noise = self.metric.variances(group)
        subtracted = 0.5 * subtracted_share(self.batch_size, group) * join(noise, self.batched).amax(-1)
        return subtracted + self.metric.excess_noise(group, noise) / self.bias

    def _program(self) -> StepProgram | str:
        frozen = self.param_groups[0]["frozen"]
        return super()._program() if frozen else "its metric is still estimated"

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        share = subtracted_share(self.batch_size, group)
        noise = [share * (self._metric(p) * self._variance(p)) for p in params]
        return self._diagonal(self.composite(group), self.rate(group), noise)


class FullSGFS(Sampler):
    """Fisher scoring with the covariance matrix of the gradient noise, for up to 2000 parameters.

    Targets the density of `SGFS`, for correlated noise too. The matrix is estimated from m noise vectors in d
    dimensions; `adapt` keeps the excess temperature of its error, ``(1 + sqrt(d / m))^2 - 1``, below ``bias``.

    Departures from the paper: those of `SGFS`; the matrix is shrunk towards its diagonal by ``d / (m + d)``; P is
    updated only when rates are set, or with a given ``lr`` when the number of noise vectors has doubled.

    Args: those of `SGFS`.
    """

    targets, paper = SGFS.targets, SGFS.paper
    departures = "those of sgfs; shrunk towards its diagonal; made anew only when rates are set"
    can_add_groups = False
    entered: bool = False  # see `isosgd.samplers.metric.Metric`

    def __init__(
        self,
        params: ParamsLike,
        *,
        floor: float = 0.01,
        decay: float = 0.0,
        offset: float = 1000.0,
        **settings: Any,
    ) -> None:
        check_scoring(floor)
        counter = {"behind": 0}  # noise vectors in the matrix that P was made from
        super().__init__(params, schedule=Annealing(decay, offset), extra=counter, **settings)
        self.floor = floor
        self.size = sum(p.numel() for group in self.param_groups for p in group["params"]) // (self.chains or 1)
        if self.size > MOST_PARAMETERS:
            raise ValueError(f"{self.size} parameters: a full matrix is for at most {MOST_PARAMETERS}, use SGFS")
        check_same_units(self.param_groups, "a full matrix")

    @property
    def needs_vectors(self) -> bool:
        return not self.param_groups[0]["frozen"]  # a frozen metric no longer changes

    @property
    def _kept(self) -> dict[str, Any]:
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        super().observe(noise)
        seen = self.param_groups[0]["seen"]
        if self.param_groups[0]["frozen"]:
            return
        vectors = [p.grad for group in self.param_groups for p in group["params"]] if noise is None else list(noise)
        d = join([v.to(state_dtype(v)) for v in vectors if v is not None], self.batched)
        square = d.unsqueeze(-1) * d.unsqueeze(-2)
        self._kept.setdefault("covariance", torch.zeros_like(square)).lerp_(square, 1.0 / seen)
        if self.given and seen.bit_count() == 1:
            self._update_metric()

    def _update_metric(self) -> None:
        self.noise.seen_of_group(self.param_groups[0])
        matrix, m = self._kept["covariance"].double(), self.param_groups[0]["seen"]
        matrix = matrix.lerp(torch.diag_embed(torch.diagonal(matrix, dim1=-2, dim2=-1)), self.size / (m + self.size))
        values, basis = torch.linalg.eigh(torch.nan_to_num(matrix, posinf=0.0))  # one chain may diverge
        inverse = 1.0 / torch.maximum(values, self.floor * values.mean(-1, keepdim=True)).clamp_min(TINY)
        found = {"basis": basis, "inverse": inverse, "share": (inverse * values).clamp_min(0.0)}
        self._kept.update({name: t.to(self._kept["covariance"].dtype) for name, t in found.items()})
        for group in self.param_groups:
            group["behind"] = m
        self.refresh()

    def _apply(self, power: float, x: Tensor) -> Tensor:
        """``P^power`` times flat vectors."""
        basis = self._kept["basis"]
        return times(basis, self._kept["inverse"] ** power * times(basis.mT, x))

    @property
    def whitening(self) -> FullSGFS:
        return self

    def whiten(self, vectors: Sequence[Tensor], power: float = 0.5) -> list[Tensor]:
        return split_like(self._apply(power, join(list(vectors), self.batched)), vectors, self.chains)

    def curvature_ratio(self, group: Group) -> Tensor:
        share, inverse = self._kept["share"], self._kept["inverse"]
        top = (share / inverse).amax(-1).clamp_min(TINY)
        return torch.ones_like(top) if self.entered else share.amax(-1) / top

    def noise_summary(self, group: Group, how: Summary) -> Tensor:
        return self._unknown() + 0.5 if how == "top" and group["behind"] else super().noise_summary(group, how)

    def _unknown(self) -> Tensor:
        excess = (1.0 + (self.size / self.param_groups[0]["behind"]) ** 0.5) ** 2 - 1.0
        return torch.full_like(self._kept["share"][..., 0], 0.5 * excess)

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        if self.given or curvature is None:
            super().adapt(curvature, rise)
            return
        group = self.param_groups[0]
        if not group["behind"] or (rise > 1.0 and group["seen"] >= self.size):
            self._update_metric()
        h = torch.stack([torch.as_tensor(h, dtype=torch.float32) for h in curvature]).amax(0)
        for group in self.param_groups:
            subtracted = 0.5 * subtracted_share(self.batch_size, group) * self._kept["share"].amax(-1)
            bound = subtracted + self._unknown() / self.bias
            self._fit_rate(group, h.to(subtracted) * self.curvature_ratio(group), bound, rise)

    def _program(self) -> StepProgram | str:
        return "a full matrix is applied step by step"

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        return Move(self.rate(group), 1.0)  # `_update` injects the noise

    def _update(self) -> None:
        params = self.all_params("a full matrix")
        group = self.param_groups[0]
        if not group["behind"]:
            self._update_metric()
        self._make_plan()
        inverse, share = self._kept["inverse"], self._kept["share"]
        scale = diagonal_scale(self.composite(group), subtracted_share(self.batch_size, group) * share) * inverse.sqrt()
        source = self.injector.source
        source.out.copy_(times(self._kept["basis"], scale * source.fill()))
        drift = self._apply(1.0, join([p.grad for p in params], self.batched).to(inverse.dtype))  # type: ignore[misc]
        drifts = iter(split_like(drift, params, self.chains))
        for planned in self.injector.plan:
            langevin_(planned.params, [next(drifts) for _ in planned.params], planned.rate, planned.kicks)
