"""Isotropic SGD (Franzese, Candela, Milios, Filippone, Michiardi 2020).

    theta <- theta - rate_p (g + w),    rate_p = T / (N lam_p),    Cov(w) = 2 lam_p I - Var(g)

Gradient noise and injected noise add up to a constant isotropic covariance in every layer p, so that Theorem 1 holds
at a rate that is neither tuned nor annealed. In the code: ``lam`` is lambda^(p), ``b = v / 2`` the diagonal of B.

Departures from the paper, each an option: noise is centred by default (``noise="paired"``); the injected noise corrects
correlated gradient noise too (``correction="outer"``); lambda also obeys a curvature guard, ``lam >= T h / (N
delta)``, that bounds the discretisation bias; and it is estimated in windows where the chain now is
(``scheme="windowed"``). `PRESETS` names the paper's own rows.

What a step does is in `isosgd.samplers.lambdas` for one lambda a layer, as in the paper, and in
`isosgd.samplers.shaping` for a Lambda that knows directions.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from isosgd.errors import SamplingWarning
from isosgd.noise import AlphaStable, Summary
from isosgd.samplers.full import Full
from isosgd.samplers.full_step import FullStep
from isosgd.samplers.groups import ParamsLike
from isosgd.samplers.lambdas import Scheme
from isosgd.samplers.lowrank import LowRank
from isosgd.samplers.presets import PRESETS
from isosgd.samplers.rule import Rule
from isosgd.samplers.shaped import Shaped
from isosgd.samplers.shaping import ShapedLambda
from isosgd.samplers.structure import Correction, Structure
from isosgd.samplers.structures import StructureName, choose, instead, make_structure, provisional

HOT = 1e-2  # schemes that estimate at a mode were seen to diverge from this temperature on


class ISGD(ShapedLambda):
    """Isotropic SGD: posterior draws at a rate it finds itself.

    Targets ``exp(-f / T)``, f the negative log joint density, when lambda is constant and at least the top eigenvalue
    of B, up to the discretisation bias ``rate h / 2`` (bounded by ``bias`` where the curvature h is known).

    Departures from the paper, each an option: centred noise, a correction of correlated noise, a curvature guard,
    lambda estimated in windows while sampling (see the top of this module), and shapes of Lambda that know directions.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N.
        temperature: T.
        scheme: when lambda is estimated. ``a``, ``b``: while training goes on (from scratch, from a trained model), at
            the rate that the running estimate gives; ``c``: at a frozen trained model; ``windowed``: while sampling, in
            growing windows, so that lambda is that of the typical set.
        structure: the shape of Lambda. ``layer``, ``single`` (the paper's SLR); or one that knows the geometry:
            ``diagonal``, ``lowrank``, ``kronecker``, ``full`` (see `isosgd.samplers.shaped`); ``auto`` for the one of
            these that fits the model (which a first look may still change, see `decide`); or a `Structure`.
        averaged: inject the mean of this step's and the last step's innovations (Leimkuhler and Matthews 2013), which
            leaves only the discretisation bias of the gradient noise; the default for shapes that know the geometry.
        correction: ``outer`` corrects correlated noise and needs ``noise="paired"``, for which it is the default;
            ``diagonal`` is the paper's, and the default for other noise.
        summary: how a group's noise bounds lambda with ``correction="diagonal"``: ``max``, ``sum``, ``mean``, ``top``.
        warmup: steps of warm-up that the optimizer drives itself; 0 when something else calls `adapt`.
        batch_size: n; lets an optimizer-driven windowed warm-up guard the curvature by the Fisher information n Var(g).
            Shapes that know the geometry need it.
        budget: gradients that the warm-up of `isosgd.sample` may take, which ``structure="auto"`` heeds.
        lam: fixed lambda for all groups; nothing is adapted then.
        sets: with ``chains=K``, of how many data sets they are. Chains of one share what a full matrix is made from.
        settings: the settings common to all samplers, see `Sampler`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net, x = torch.nn.Linear(2, 1), torch.randn(100, 2)
        >>> sampler = ISGD(net.named_parameters(), num_data=100, noise="gaussian", warmup=100, batch_size=20)
        >>> for step in range(200):
        ...     batch = x[torch.randint(100, (20,))]
        ...     loss = (net(batch) - batch.sum(1, keepdim=True)).square().mean() / 2
        ...     sampler.zero_grad()
        ...     loss.backward()
        ...     _ = sampler.step()
        >>> sampler.rate(sampler.param_groups[0]) > 0
        True
    """

    measures = True  # whether its warm-up calls `decide`
    attended = False  # whether every step measures the noise, where a shape asks for it

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        scheme: Scheme = "windowed",
        structure: StructureName | Structure = "layer",
        averaged: bool | None = None,
        correction: Correction | None = None,
        summary: Summary = "top",
        warmup: int = 0,
        batch_size: int | None = None,
        budget: int | None = None,
        lam: float | None = None,
        sets: int = 1,
        **settings: Any,
    ) -> None:
        if scheme not in ("a", "b", "c", "windowed"):
            raise ValueError(f"scheme = {scheme!r} is unknown; choose 'a', 'b', 'c' or 'windowed'")
        if correction not in (None, "diagonal", "outer"):
            raise ValueError(f"correction = {correction!r} is unknown; choose 'diagonal' or 'outer'")
        if summary not in ("max", "sum", "mean", "top"):
            raise ValueError(f"summary = {summary!r} is unknown; choose 'max', 'sum', 'mean' or 'top'")
        if lam is not None and not lam > 0:
            raise ValueError(f"lam = {lam} must be positive; leave it out to have it estimated")
        if warmup < 0:
            raise ValueError(f"warmup = {warmup} must not be negative")
        chains = settings.get("chains") or 1
        if isinstance(sets, bool) or not isinstance(sets, int) or sets < 1 or chains % sets:
            raise ValueError(f"sets = {sets!r} must divide the number of chains, {chains}; leave it to isosgd.sample")
        self.scheme, self.summary, self.given = scheme, summary, lam is not None
        self.undecided = False
        self.warmup, self.batch_size, self.sets = warmup, batch_size, sets
        super().__init__(
            params, num_data=num_data, temperature=temperature, extra={"lam": None, "rate": None}, **settings
        )
        paired = self.estimator.centred and not isinstance(self.estimator, AlphaStable)
        if structure == "auto":
            knows = paired and scheme == "windowed" and batch_size is not None and not (correction or lam or warmup)
            structure = choose(self._shapes(), budget, chains, self.measures) if knows else "layer"
            self.undecided = provisional(self._shapes(), structure)
        self.structure = make_structure(structure)
        if correction == "outer" and not paired:
            raise ValueError(
                "correction='outer' subtracts centred noise vectors: use it with noise='paired', or choose 'diagonal'"
            )
        self.correction: Correction = correction or ("outer" if paired else "diagonal")
        self.shaped = self.structure if isinstance(self.structure, Shaped) else None
        self.averaged = self.shaped is not None if averaged is None else averaged
        if self.averaged and self.shaped is None:
            raise ValueError("averaged=True goes with the structures diagonal, lowrank, kronecker and full")
        if self.shaped is not None:
            self._bind(self.shaped, paired, lam)
        if lam is not None:
            self._set([torch.as_tensor(lam) for _ in self.param_groups])
        if scheme == "c" and temperature >= HOT:
            warnings.warn(
                f"scheme 'c' estimates the noise at a frozen mode, but at temperature {temperature} the "
                "chain leaves it for "
                f"places where the noise is larger; this was seen to diverge from T = {HOT} on. Use "
                "scheme='windowed', or a "
                "lower temperature.",
                SamplingWarning,
                stacklevel=2,
            )

    def rule(self) -> Rule:
        return replace(super().rule(), followed=self.attended and isinstance(self.shaped, FullStep))

    def decide(self) -> bool:
        """After a first look of ``structure="auto"``: go on with a simpler shape where that is as good.

        Returns:
            Whether the shape is another one now, which has seen nothing yet.
        """
        other = instead(self.shaped) if self.undecided and isinstance(self.shaped, Full) else None
        self.undecided = False
        if other is not None:
            self._take_up(other)
        return other is not None

    def _take_up(self, shaped: Shaped) -> None:
        """Go on with another shape, which knows nothing yet."""
        alive = None if self.shaped is None else self.shaped.alive
        self.structure = self.shaped = shaped
        self._bind(shaped, paired=True, lam=None)
        if alive is not None:
            shaped.alive = alive
        self._kept = None
        self._start_plan()  # it may take other innovations
        self.forget_noise()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.undecided and (state_dict.get("structure") or {}).get("name") == LowRank.name:
            self._take_up(LowRank())  # it was decided before the state was saved
            self.undecided = False
        super().load_state_dict(state_dict)

    def _shapes(self) -> list[tuple[int, ...]]:
        lead = 1 if self.batched else 0
        return [tuple(p.shape[lead:]) for group in self.param_groups for p in group["params"]]

    @classmethod
    def preset(cls, name: str, params: ParamsLike, *, num_data: int, **settings: Any) -> ISGD:
        """The paper's rows by name: ``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also with ``-slr``."""
        if name not in PRESETS:
            raise ValueError(f"preset = {name!r} is unknown; choose one of {sorted(PRESETS)}")
        return cls(params, num_data=num_data, **{**PRESETS[name], **settings})
