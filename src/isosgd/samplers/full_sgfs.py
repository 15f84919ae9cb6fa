"""Stochastic gradient Fisher scoring (Ahn, Korattikara, Welling 2012) with a full matrix; see `isosgd.samplers.sgfs`.

theta <- theta - lr P (g + w),    P = Var(g)^-1,    Cov(w) = (2 T / (N lr) - 1 - n T / N) Var(g)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.noise import Summary, join
from isosgd.noise.estimators import state_dtype
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.planning import Move
from isosgd.samplers.sgfs import TINY, Scoring
from isosgd.samplers.steppers import Number, langevin_
from isosgd.samplers.structure import diagonal_scale

MOST_PARAMETERS = 2000


class FullSGFS(Scoring):
    """Fisher scoring with the covariance matrix of all gradient noise: up to 2000 parameters.

    Targets the density of `SGFS`, without its condition of independent noise, as far as the matrix is known: `adapt`
    keeps the heat of what m noise vectors in d dimensions leave unknown, ``(1 + sqrt(d / m))^2 - 1``, below ``bias``.

    Departures from the paper: those of `SGFS`; the matrix is shrunk towards its diagonal by ``d / (m + d)``; and P is
    made anew only when rates are set, or with a given ``lr`` when the number of noise vectors has doubled.

    Args: those of `SGFS`.
    """

    in_metric: bool = False  # whether curvatures are told in the metric, as in `Preconditioned`

    def __init__(self, params: ParamsLike, *, num_data: int, temperature: float = 1.0, **settings: Any) -> None:
        super().__init__(params, num_data=num_data, temperature=temperature, **settings)
        self.size = sum(p.numel() for group in self.param_groups for p in group["params"]) // (self.chains or 1)
        if self.size > MOST_PARAMETERS:
            raise ValueError(f"{self.size} parameters: a full matrix is for at most {MOST_PARAMETERS}, use SGFS")
        if len({(group["temperature"], group["num_data"]) for group in self.param_groups}) > 1:
            raise ValueError("groups differ in temperature or num_data: one matrix over all of them needs one of each")
        for group in (self.defaults, *self.param_groups):
            group["behind"] = 0  # noise vectors behind the matrix in use

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
            self._renew()

    def _renew(self) -> None:
        """Make P of the noise vectors seen."""
        self._seen_noise(self.param_groups[0])
        matrix, m = self._kept["covariance"].double(), self.param_groups[0]["seen"]
        matrix = matrix.lerp(torch.diag_embed(torch.diagonal(matrix, dim1=-2, dim2=-1)), self.size / (m + self.size))
        values, basis = torch.linalg.eigh(torch.nan_to_num(matrix, posinf=0.0))  # lest one chain stop the others
        inverse = 1.0 / torch.maximum(values, self.floor * values.mean(-1, keepdim=True)).clamp_min(TINY)
        found = {"basis": basis, "inverse": inverse, "share": (inverse * values).clamp_min(0.0)}
        self._kept.update({name: t.to(self._kept["covariance"].dtype) for name, t in found.items()})
        for group in self.param_groups:
            group["behind"] = m
        self.refresh()

    def _apply(self, power: float, x: Tensor) -> Tensor:
        """``P^power`` times flat vectors."""
        basis = self._kept["basis"]
        return _times(basis, self._kept["inverse"] ** power * _times(basis.mT, x))

    def whiten(self, vectors: Sequence[Tensor], power: float = 0.5) -> list[Tensor]:
        """``P^power`` times vectors, one for each parameter in their order."""
        flat = self._apply(power, join(list(vectors), self.batched))
        parts = torch.split(flat, [v.numel() // (self.chains or 1) for v in vectors], dim=-1)
        return [part.reshape(v.shape) for part, v in zip(parts, vectors, strict=True)]

    def stretch(self, group: Group) -> Tensor:
        """Curvature in the metric over plain curvature, as in `Preconditioned`."""
        share, inverse = self._kept["share"], self._kept["inverse"]
        top = (share / inverse).amax(-1).clamp_min(TINY)
        return torch.ones_like(top) if self.in_metric else share.amax(-1) / top

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
            self._renew()
        h = torch.stack([torch.as_tensor(h, dtype=torch.float32) for h in curvature]).amax(0)
        for group in self.param_groups:
            taken = 0.5 * self._taken(group) * self._kept["share"].amax(-1)
            self._fit_rate(group, h.to(taken) * self.stretch(group), taken + self._unknown() / self.bias, rise)

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        return Move(self.rate(group), 1.0)  # `_update` does the rest

    def _update(self) -> None:
        params = [p for laid in self._laid for p in laid.params]
        if len(params) != sum(len(group["params"]) for group in self.param_groups):
            raise RuntimeError("a parameter has no gradient: a full matrix needs all of them")
        group = self.param_groups[0]
        if not group["behind"]:
            self._renew()
        self._make_plan()
        inverse, share = self._kept["inverse"], self._kept["share"]
        scale = diagonal_scale(self.composite(group), self._taken(group) * share) * inverse.sqrt()
        self._source.out.copy_(_times(self._kept["basis"], scale * self._source.fill()))
        drift = self._apply(1.0, join([p.grad for p in params], self.batched).to(inverse.dtype))  # type: ignore[misc]
        parts = iter(torch.split(drift, [p.numel() // (self.chains or 1) for p in params], dim=-1))
        for planned in self._plan:
            steps = [next(parts).reshape(p.shape) for p in planned.params]
            langevin_(planned.params, steps, planned.rate, planned.kicks)


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)
