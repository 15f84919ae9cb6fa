"""Isotropic SGD (Franzese, Candela, Milios, Filippone, Michiardi 2020).

    theta <- theta - rate_p (g + w),    rate_p = T / (N lam_p),    Cov(w) = 2 lam_p I - Var(g)

Gradient noise and injected noise add up to a constant isotropic covariance in every layer p, so that Theorem 1 holds
at a rate that is neither tuned nor annealed. In the code ``lam`` is lambda^(p), and ``b = v / 2`` the diagonal of B.

Lambda must be at least the gradient noise. `isosgd.sample` sets it (by `ISGD.adapt`), or the optimizer itself in its
first steps: by one of the paper's schemes, or in windows of growing length (`isosgd.samplers.own_warmup`).

Departures from the paper, each an option: noise is centred by default (``noise="paired"``); the injected noise corrects
for correlations of the gradient noise too (``correction="outer"``); a curvature guard, ``lam >= T h / (N delta)``,
bounds the discretisation bias; lambda is estimated while sampling, in windows (``scheme="windowed"``); and it may be a
matrix (`isosgd.geometry`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isosgd.errors import nearest, warn_caller
from isosgd.geometry.base import Geometry
from isosgd.geometry.choice import FULL_UP_TO, StructureName, choose, lowrank_instead, make_structure, provisional
from isosgd.geometry.full import Full
from isosgd.geometry.layer import Correction, Number, PerGroup, diagonal_scale
from isosgd.geometry.lowrank import LowRank
from isosgd.geometry.rule import Rule, allowed_rate_curvature
from isosgd.noise.estimators import AlphaStable, MovingAverage
from isosgd.noise.model import Summary, Uses, join, split_like
from isosgd.samplers.base import Sampler, limit_rise
from isosgd.samplers.groups import Group, ParamsLike, check_choice, check_if_given, check_same_units
from isosgd.samplers.injection import Move
from isosgd.samplers.own_warmup import OwnWarmup
from isosgd.samplers.program import GeometryProgram, KickProgram, StepProgram

Scheme = Literal["a", "b", "c", "windowed", "online"]
FIRST_ONLINE, UPDATE_EVERY = 100, 20  # steps of the first window, and between updates of lambda in later ones
CAUTION = 64.0  # factor on the first lambda: there is far less noise at a mode than around it
PAPER_STEPS = 2_000  # the paper's warm-up on its regressions
HOT = 1e-2  # temperature from which scheme c was seen to diverge


def _paper(noise: str, scheme: str, structure: str) -> dict[str, Any]:
    common = {"scheme": scheme, "structure": structure, "correction": "diagonal", "track_every": 1}
    if noise == "alpha":
        return {"noise": AlphaStable(momentum=0.5, centred=False), "summary": "max", **common}
    return {"noise": MovingAverage(0.9, centred=False), "summary": "sum", **common}


# The paper's variants: the noise estimator and the scheme; "slr" is one lambda for all layers.
PRESETS: dict[str, dict[str, Any]] = {
    f"{noise}-{scheme}{suffix}": _paper(noise, scheme, structure)
    for noise, scheme in (("alpha", "a"), ("alpha", "c"), ("G", "b"), ("G", "c"))
    for suffix, structure in (("", "layer"), ("-slr", "single"))
}
# For a trained start: four times the largest noise of a layer. Stable at T = 1 on convolutional networks.
PRESETS["windowed"] = {
    **{"scheme": "online", "structure": "layer", "correction": "diagonal"},
    **{"noise": MovingAverage(0.99, centred=True), "summary": "max", "safety": 4.0},
}


class ISGD(Sampler):
    """Isotropic SGD: posterior draws at a rate it finds itself.

    Targets ``exp(-f / T)``, f the negative log joint density, if lambda is constant and at least the top eigenvalue of
    B, up to the discretisation bias ``rate h / 2`` (bounded by ``bias`` if the curvature h is known).

    Departures from the paper, each an option: centred noise, a correction for correlated noise, a curvature guard,
    lambda estimated in windows while sampling, and Lambda as a matrix.

    Args:
        scheme: when lambda is estimated. ``a``, ``b``: during training (from scratch, from a trained model), at the
            rate of the running estimate; ``c``: at a frozen trained model; ``windowed``: while sampling, in growing
            windows, so that lambda is that of the typical set; ``online``: likewise, from a trained start and without
            the curvature guard, in windows of 100, 200, 400, ... steps. In the first of these the parameters stay
            fixed, then lambda is 64 times its bound; after that it is set every 20 steps and at most halves.
        structure: the form of Lambda: ``layer``, ``single`` (the paper's SLR), a geometry: ``diagonal``, ``lowrank``,
            ``kronecker``, ``full`` or a `Geometry` (see `isosgd.geometry`); or ``auto``, which chooses by the size of
            the model (see `decide`). By default ``layer``; in a loop ``full`` for up to 200 parameters in one group.
        averaged: inject the mean of this step's and the last step's innovations (Leimkuhler and Matthews 2013), so that
            only the gradient noise has a discretisation bias; the default for a geometry.
        correction: ``outer`` corrects for correlated noise and needs ``noise="paired"``, for which it is the default;
            ``diagonal`` is the paper's, and the default for other noise.
        summary: how a group's noise bounds lambda with ``correction="diagonal"``: ``max``, ``sum``, ``mean``, ``top``.
        safety: lambda over its bound by the noise, since noise may be larger away from where it was measured.
        budget: gradients that the warm-up of `isosgd.sample` may take, for ``structure="auto"``.
        lam: fixed lambda for all groups; nothing is adapted then.
        sets: with ``chains=K``, the number of data sets. Chains of one data set share the estimate of a full matrix.
        settings: those of every `Sampler`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net, x = torch.nn.Linear(2, 1), torch.randn(100, 2)
        >>> y = x.sum(1, keepdim=True) + torch.randn(100, 1)
        >>> sampler = ISGD(net.parameters(), num_data=100, batch_size=20)
        >>> while not sampler.draws_ready:
        ...     rows = torch.randint(100, (20,))
        ...     loss = (net(x[rows]) - y[rows]).square().mean() / 2
        ...     sampler.zero_grad()
        ...     loss.backward()
        ...     _ = sampler.step()
        >>> sampler.phase
        'sampling'
    """

    paper = "Franzese et al. 2020"
    departures = (
        "centred noise, correlations corrected, curvature guard, windowed warm-up, shapes of Lambda; all optional"
    )
    has_lr = False
    shardable = True
    independent_batches = False  # needed to track the level of the noise from step to step

    def __init__(
        self,
        params: ParamsLike,
        *,
        scheme: Scheme = "windowed",
        structure: StructureName | Geometry | None = None,
        averaged: bool | None = None,
        correction: Correction | None = None,
        summary: Summary = "top",
        safety: float = 1.0,
        budget: int | None = None,
        lam: float | None = None,
        sets: int = 1,
        **settings: Any,
    ) -> None:
        check_choice("scheme", scheme, get_args(Scheme))
        check_choice("summary", summary, get_args(Summary))
        if correction is not None:
            check_choice("correction", correction, get_args(Correction))
        if isinstance(safety, bool) or not (math.isfinite(safety) and safety >= 1):
            raise ValueError(f"safety = {safety} must be a number of at least 1: lambda over the bound by the noise")
        check_if_given("lam", lam, "to have it estimated")
        check_sets(sets, settings.get("chains") or 1)
        self.scheme, self.summary, self.safety = scheme, summary, safety
        self.sets = sets
        super().__init__(params, extra={"lam": None}, **settings)
        self.given, self.undecided = lam is not None, False
        free = self.paired and scheme == "windowed" and self.batch_size is not None and not (correction or lam)
        free = free and safety == 1 and not self.whole.sharded
        self._chooses_structure = free and structure is None
        if structure == "auto":
            shapes = parameter_shapes(self)
            structure = choose(shapes, budget, self.chains or 1) if free else "layer"
            self.undecided = provisional(shapes, structure)
        if correction == "outer" and not self.paired:
            raise ValueError(
                "correction='outer' subtracts centred noise vectors: use it with noise='paired', or choose 'diagonal'"
            )
        self.correction: Correction = correction or ("outer" if self.paired else "diagonal")
        self.noise.uses = Uses(variances=self.correction == "diagonal", vectors=self.correction == "outer")
        if scheme != "windowed" and self.correction == "diagonal" and summary != "top" and len(self.param_groups) > 16:
            self.noise.vectors_every = 8  # with many groups, vectors take longer than the step
        self.structure = make_structure(structure or "layer")
        has_geometry = isinstance(self.structure, Geometry)
        self.averaged = has_geometry if averaged is None else averaged
        if self.averaged and not has_geometry:
            raise ValueError("averaged=True goes with the structures diagonal, lowrank, kronecker and full")
        if isinstance(self.structure, Geometry):
            self._check_geometry(self.structure.name, lam)
            self._use_geometry(self.structure)
        if lam is not None:
            self._set([torch.as_tensor(lam) for _ in self.param_groups])
        temperature = self.defaults["temperature"]
        if scheme == "c" and temperature >= HOT:
            warn_caller(
                f"scheme 'c' estimates the noise at a frozen mode, but at temperature {temperature} the chain leaves "
                f"it for places where the noise is larger; this was seen to diverge from T = {HOT} on. Use "
                "scheme='windowed', or a lower temperature."
            )

    def _check_geometry(self, name: str, lam: float | None) -> None:
        """Raise if other settings do not go with a geometry."""
        if self.whole.sharded:
            raise ValueError(
                f"structure {name!r} of sharded parameters (DTensors) is not supported: choose 'layer' or 'single'"
            )
        if lam is not None:
            raise ValueError(f"lam = {lam} is one number, structure {name!r} has many: leave one of them out")
        if self.safety != 1:
            raise ValueError(
                f"safety = {self.safety} multiplies one lambda for each layer: structure {name!r} has none"
            )
        if not self.paired or self.scheme != "windowed":
            raise ValueError(
                f"structure {name!r} is estimated from centred noise in windows: it needs noise='paired' and "
                f"scheme='windowed', not {type(self.estimator).__name__} and {self.scheme!r}"
            )

    @classmethod
    def preset(cls, name: str, params: ParamsLike, *, num_data: int, **settings: Any) -> ISGD:
        """A preset: ``windowed``, or the paper's ``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also ``-slr``."""
        if name not in PRESETS:
            raise ValueError(f"preset = {name!r} is unknown; choose one of {sorted(PRESETS)}{nearest(name, PRESETS)}")
        return cls(params, num_data=num_data, **{**PRESETS[name], **settings})

    def _use_geometry(self, geometry: Geometry) -> None:
        """Bind and use a new geometry."""
        bind_geometry(self, geometry, self.sets)
        self.structure = self.geometry = geometry
        self.noise.uses = Uses()
        self.injector.averaged = self.averaged
        self.injector.reset(geometry.extra_innovations)

    def _forget_warmup(self) -> None:
        super()._forget_warmup()
        if self._chooses_structure and self.geometry is not None:
            self.structure, self.geometry = make_structure("layer"), None
            self.averaged = self.injector.averaged = False
            self.noise.uses = Uses(vectors=True)
            self.injector.reset(0)

    def decide(self) -> bool:
        """With ``structure="auto"``, after a first estimate: replace a full Lambda if a low rank is as good.

        Returns whether Lambda was replaced; the new one has seen no noise yet.
        """
        before = self.geometry if self.undecided else None
        other = lowrank_instead(before) if isinstance(before, Full) else None
        self.undecided = False
        if before is None or other is None:
            return False
        self._use_geometry(other)
        other.alive = before.alive
        self.forget_noise()
        return True

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def adapt(
        self,
        curvature: Sequence[Number] | None = None,
        rise: float = 2.0,
        prior: Sequence[Tensor] | None = None,
    ) -> None:
        """Set Lambda from the measured noise and the curvature.

        Args:
            curvature: the top curvature of ``f / N`` in each group.
            rise: factor by which rates may rise at most. With 1 a geometry only slows down if the curvature requires
                it.
            prior: curvature of the negative log prior for each parameter; for a geometry.
        """
        if self.geometry is not None:
            self.geometry.resize(self.rule(), curvature, rise, prior)
            report_rates(self)
        elif not self.given:
            if curvature is None and self.batch_size is not None:
                curvature = [2.0 * self.batch_size * self.noise_summary(group, "top") for group in self.param_groups]
            self._adapt_groups(curvature, rise)

    def _adapt_groups(self, curvature: Sequence[Number] | None, rise: float) -> None:
        """Set each group's lambda from its noise and the allowed discretisation bias."""
        assert isinstance(self.structure, PerGroup)
        noise = [self.noise_bound(group) for group in self.param_groups]
        guard = [torch.zeros_like(b) for b in noise]
        if curvature is not None:
            delta = allowed_rate_curvature(self.bias)
            bounds = [
                g["temperature"] * h / (g["num_data"] * delta)
                for g, h in zip(self.param_groups, curvature, strict=True)
            ]
            guard = [torch.as_tensor(x).to(b).expand_as(b) for x, b in zip(bounds, noise, strict=True)]
        lams = self.structure.solve(noise, guard)
        self._set([limit_rise(group["lam"], lam, rise) for group, lam in zip(self.param_groups, lams, strict=True)])

    def noise_bound(self, group: Group) -> Tensor:
        """The smallest lambda for which the covariance of the injected noise is non-negative, times `safety`."""
        outer = self.correction == "outer"
        return self.safety * (self.noise.longest(group) if outer else self.noise_summary(group, self.summary))

    def _set(self, lams: Sequence[Tensor]) -> None:
        tiny = torch.finfo(torch.float32).tiny  # for a group without any noise or curvature
        for group, lam in zip(self.param_groups, lams, strict=True):
            group["lam"] = self.number(lam.clamp_min(tiny))
            group["rate"] = group["temperature"] / (group["num_data"] * group["lam"])  # Theorem 1
        self.refresh()

    def rule(self) -> Rule:
        """The rule for the size of a geometry."""
        group = self.param_groups[0]
        assert self.batch_size is not None and self.geometry is not None
        n, t, kappa = self.batch_size, group["temperature"], self.geometry.kappa
        trackable = self.independent_batches and isinstance(self.geometry, Full)
        return Rule(group["num_data"], n, t, self.bias, self.averaged, kappa, trackable=trackable)

    def relax(self, curvature_ratio: Tensor) -> None:
        """Shrink a new geometry whose curvature ratio, measured against the old one, is too large.

        ``curvature_ratio`` is the true curvature over the new H, in the direction where that over the old H was
        largest.
        """
        assert self.geometry is not None
        self.geometry.relax(self.rule(), curvature_ratio)
        self.limit_excess()

    def limit_excess(self) -> None:
        """Reduce the rates of chains in which noise that the geometry cannot express raises the temperature."""
        assert self.geometry is not None
        self.geometry.limit_excess()
        report_rates(self)

    def clipped_share(self, group: Group) -> Tensor:
        if self.geometry is not None:
            clipped = self.geometry.clipped()
            return clipped if self.batched else clipped.squeeze(0)
        if group["lam"] is None or self.noise.of_group(group) is None:
            return super().clipped_share(group)
        if self.correction == "outer":
            over: Tensor = self.noise.recent_lengths(group) > 2.0 * group["lam"]
            return over.float().mean(0)
        scale = diagonal_scale(group["lam"], join(self.noise.variances(group), self.batched))
        return (scale == 0).float().mean(-1)

    # -- the optimizer's own warm-up ----------------------------------------------------------------------------------

    def _new_warmup(self) -> OwnWarmup:
        if self.scheme == "windowed":
            if self._chooses_structure and self.geometry is None:
                sizes = [math.prod(shape) for shape in parameter_shapes(self)]
                # Not for a network: a loop has only the Fisher information, from which its full matrix would be wrong.
                if sum(sizes) <= FULL_UP_TO and len(self.param_groups) == 1:
                    self.averaged = True
                    self._use_geometry(Full())
            return super()._new_warmup()
        self.warmup = PAPER_STEPS if self.warmup is None else self.warmup
        return OwnWarmup(self, self.warmup, by_scheme=True)

    @property
    def warming(self) -> bool:
        """Whether one of the paper's schemes, or ``online``, is still estimating lambda."""
        return self.scheme != "windowed" and bool(self.param_groups[0]["step"] < (self.warmup or 0))

    def _takes_gradient(self) -> bool:
        return super()._takes_gradient() or (self.warming and not self.estimator.centred)

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        super().observe(noise)
        if self.geometry is None or self.geometry.seen >= self.geometry.min_vectors:
            self._estimate()

    def _estimate(self) -> None:
        """Set lambda from the noise so far, as the scheme says."""
        if self.given or not (self.warming and self.noise.ready()):
            return
        step = self.param_groups[0]["step"]
        if self.scheme == "online":
            assert self.warmup is not None
            ends = online_windows(self.warmup)
            began, first = max((end for end in ends if end <= step), default=0), self.param_groups[0]["lam"] is None
            if step + 1 in ends or (began and (step + 1 - began) % UPDATE_EVERY == 0):
                self._adapt_groups(None, rise=2.0)
            if first and step + 1 == ends[0] < self.warmup:
                self._set([CAUTION * torch.as_tensor(group["lam"]) for group in self.param_groups])
            if step + 1 in ends and step + 1 < self.warmup:
                self.forget_noise()
        else:  # the running estimate, as in the paper
            self._adapt_groups(None, rise=math.inf)

    def restart_scheme(self) -> None:
        """Restart the warm-up of the scheme ``online`` from the present lambda."""
        if self.scheme == "online":
            self.forget_noise()
            for group in self.param_groups:
                group["step"] = 0

    def cut_warmup(self) -> None:
        """End the warm-up of a scheme now, at the rate for the noise so far."""
        if self.scheme == "online" and self.warming and self.noise.ready():
            self._adapt_groups(None, rise=math.inf)
        self.warmup = self.param_groups[0]["step"]
        self.refresh()

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, noise: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        was_warming = self.warming
        loss: Tensor | None = super().step(closure, noise=noise)
        if was_warming and not self.warming:
            self.freeze()
            self.refresh()  # from training or estimating to sampling
        return loss

    def _move(self, group: Group, params: list[Tensor]) -> Move:
        lam = group["lam"]
        if self.warming and (self.scheme == "c" or lam is None):
            return Move(0.0, 0.0)  # there is no estimate yet, or scheme c keeps the model frozen
        if lam is None:
            raise RuntimeError(f"group {group['name']!r} has no lambda: call adapt(), or give lam=")
        if self.warming and self.scheme not in ("windowed", "online"):
            return Move(1.0 / (group["num_data"] * lam), 0.0)  # training, at the rate of T = 1 for any temperature
        rate = self.rate(group)
        if self.correction == "outer":
            return self._outer(lam, rate)
        return self._diagonal(lam, rate, self.estimator.variance([self.noise.state_of(p) for p in params]))

    def _update(self) -> None:
        geometry = self.geometry
        if geometry is None:
            super()._update()
            return
        if not geometry.known:
            raise RuntimeError("Lambda is not known yet: let isosgd.sample warm up, or call adapt() after observe()")
        params = self.all_params(f"structure {geometry.name!r}, unlike 'layer',")
        xi = self.injector.source.fill()
        gradient = geometry.flatten([p.grad for p in params])  # type: ignore[misc]
        moved = geometry.displace(self.injector.fixed(geometry.tensors()), gradient, xi.view(geometry.chains, -1))
        torch._foreach_sub_(params, split_like(moved.to(xi.dtype), params, geometry.chains))

    def _program(self) -> StepProgram | str:
        if self.warming:
            return "the sampler is warming up"
        return KickProgram(self) if self.geometry is None else GeometryProgram(self, self.geometry, self.averaged)

    # -- saving -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.undecided and (state_dict.get("structure") or {}).get("name") == LowRank.name:
            self._use_geometry(LowRank())  # decided before the state was saved
            self.undecided = False
        super().load_state_dict(state_dict)


def online_windows(warmup: int) -> list[int]:
    """Steps after which the windows of an ``online`` warm-up end; the last one takes the remainder.

    Example:
        >>> online_windows(800), online_windows(2000), online_windows(120)
        ([100, 300, 800], [100, 300, 700, 2000], [120])
    """
    ends, end, length = list[int](), 0, FIRST_ONLINE
    while end < warmup:
        end = warmup if warmup - end < 2 * length else end + length
        ends.append(end)
        length *= 2
    return ends


# -- what I-SGD and HMC have in common: a geometry --------------------------------------------------------------------


def parameter_shapes(sampler: Sampler) -> list[tuple[int, ...]]:
    """Shapes of a sampler's parameters, without their chains."""
    lead = 1 if sampler.batched else 0
    return [tuple(p.shape[lead:]) for group in sampler.param_groups for p in group["params"]]


def check_sets(sets: int, chains: int) -> None:
    """Raise if the number of data sets does not divide that of chains."""
    if isinstance(sets, bool) or not isinstance(sets, int) or sets < 1 or chains % sets:
        raise ValueError(f"sets = {sets!r} must divide the number of chains, {chains}; leave it to isosgd.sample")


def bind_geometry(sampler: Sampler, geometry: Geometry, sets: int) -> None:
    """Bind a geometry to a sampler's parameters; raises if no geometry works with the settings."""
    n = sampler.batch_size
    if n is None or n < 2:
        raise ValueError(f"structure {geometry.name!r} takes the curvature from n Var(g): pass batch_size=n, not {n}")
    check_same_units(sampler.param_groups, f"structure {geometry.name!r}")
    geometry.bind(sampler.param_groups, sampler.chains, sets)


def report_rates(sampler: Sampler, step_size: Tensor | float = 1.0) -> None:
    """Set every group's rate, and lambda from it, to the geometry's mean rate times a step size."""
    geometry, first = sampler.geometry, sampler.param_groups[0]
    assert geometry is not None
    scale = first["temperature"] / first["num_data"]
    for group, rate in zip(sampler.param_groups, geometry.group_rates().unbind(-1), strict=True):
        rate = step_size * rate
        group["rate"] = sampler.number(rate if sampler.batched else rate.squeeze(0))
        # At temperature zero rates are zero, and lambda is infinite.
        group["lam"] = sampler.number(scale / torch.as_tensor(group["rate"]))
