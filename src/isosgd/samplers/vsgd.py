"""Constant SGD as approximate inference, "V-SGD" (Mandt, Hoffman, Blei 2017).

    theta <- theta - rate g,    rate = 2 T D / (N tr Var(g))

In the notation of Theorem 1: P = I, C = 0: no noise is injected. The rate minimises the KL divergence to a Gaussian
posterior; it uses the mean of ``b = v / 2`` where I-SGD uses an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.geometry.layer import Number
from isosgd.samplers.base import Sampler, limit_rise
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.injection import Move


class VSGD(Sampler):
    """SGD at the constant rate of Mandt et al. It does not sample the posterior exactly.

    Targets, near a mode with Hessian ``H`` of ``f / N``, a Gaussian whose covariance S solves
    ``H S + S H = rate Var(g)`` (to first order in the rate); S is the posterior's only if ``Var(g)`` is isotropic.

    Departures from the paper: a temperature; gradient noise is measured on halves of a minibatch.

    Args:
        per_layer: one rate for each group, rather than one for all as in the paper.
        settings: those of every `Sampler`.
    """

    targets = "a Gaussian near a mode, covariance from H S + S H = rate Var(g)"
    paper = "Mandt, Hoffman, Blei 2017"
    has_lr = False

    def __init__(self, params: ParamsLike, *, per_layer: bool = False, **settings: Any) -> None:
        self.per_layer = per_layer
        super().__init__(params, **settings)

    def adapt(self, curvature: Sequence[Number] | None = None, rise: float = 2.0) -> None:
        """Set the paper's rate from the measured noise; the curvature is ignored."""
        total = torch.stack([self.noise_summary(group, "sum") for group in self.param_groups])
        counts = [sum(p.numel() for p in g["params"]) / (self.chains or 1) for g in self.param_groups]
        mean_b = [t / c for t, c in zip(total, counts, strict=True)]
        if not self.per_layer:
            mean_b = [total.sum(0) / sum(counts)] * len(counts)
        for group, b in zip(self.param_groups, mean_b, strict=True):
            inverse = b * group["num_data"]
            old = 1.0 / group["rate"] if group["rate"] is not None and group["temperature"] else None
            group["rate"] = self.number(1.0 / limit_rise(old, inverse / group["temperature"], rise))
        self.refresh()

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        return Move(self.rate(group), 0.0)
