"""Isotropic SGD (Franzese, Candela, Milios, Filippone, Michiardi 2020).

    theta <- theta - rate_p (g + w),    rate_p = T / (N lam_p),    Cov(w) = 2 lam_p I - Var(g)

Gradient noise and injected noise add up to a constant isotropic covariance in every layer p, so that Theorem 1 holds
at a rate that is neither tuned nor annealed. In the code: ``lam`` is lambda^(p), ``b = v / 2`` the diagonal of B.

Departures from the paper, each an option: noise is centred by default (``noise="paired"``); the injected noise corrects
correlated gradient noise too (``correction="outer"``); lambda also obeys a curvature guard, ``lam >= T h / (N
delta)``, that bounds the discretisation bias; and it is estimated in windows where the chain now is
(``scheme="windowed"``). `PRESETS` names the paper's own rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from isosgd.errors import SamplingWarning
from isosgd.noise import AlphaStable, MovingAverage, Summary, join
from isosgd.samplers.base import Move, Sampler, slow_rise
from isosgd.samplers.groups import Group, ParamsLike
from isosgd.samplers.shaped import EXCESS, Rule, Shaped
from isosgd.samplers.steppers import Number, allowed_rate_curvature
from isosgd.samplers.structure import Correction, Structure, diagonal_scale
from isosgd.samplers.structures import StructureName, choose, make_structure

Scheme = Literal["a", "b", "c", "windowed"]
FIRST_WINDOW = 50
LEAST_STRETCH = 0.25  # true curvature over Fisher information, at the least that is believed
SLACK = 1.2
MOST_RELAXED = 10.0
HOT = 1e-2  # schemes that estimate at a mode were seen to diverge from this temperature on


def _paper(noise: str, scheme: str, structure: str) -> dict[str, Any]:
    common = {"scheme": scheme, "structure": structure, "correction": "diagonal", "track_every": 1}
    if noise == "alpha":
        return {"noise": AlphaStable(momentum=0.5, centred=False), "summary": "max", **common}
    return {"noise": MovingAverage(0.9, centred=False), "summary": "sum", **common}


PRESETS: dict[str, dict[str, Any]] = {
    name + suffix: _paper(noise, scheme, structure)
    for name, noise, scheme in (
        ("alpha-a", "alpha", "a"),
        ("alpha-c", "alpha", "c"),
        ("G-b", "G", "b"),
        ("G-c", "G", "c"),
    )
    for suffix, structure in (("", "layer"), ("-slr", "single"))
}


class ISGD(Sampler):
    """Isotropic SGD: posterior draws at a rate it finds itself.

    Targets ``exp(-f / T)``, f the negative log joint density, when lambda is constant and at least the top eigenvalue
    of B, up to the discretisation bias ``rate h / 2`` (bounded by ``bias`` where the curvature h is known).

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N.
        temperature: T.
        scheme: when lambda is estimated. ``a``, ``b``: while training goes on (from scratch, from a trained model), at
            the rate that the running estimate gives; ``c``: at a frozen trained model; ``windowed``: while sampling, in
            growing windows, so that lambda is that of the typical set.
        structure: the shape of Lambda. ``layer``, ``single`` (the paper's SLR); or one that knows the geometry:
            ``diagonal``, ``lowrank``, ``kronecker``, ``full`` (see `isosgd.samplers.shaped`); ``auto`` for the one of
            these that fits the model; or a `Structure`.
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
        self.warmup, self.batch_size, self.sets = warmup, batch_size, sets
        super().__init__(
            params, num_data=num_data, temperature=temperature, extra={"lam": None, "rate": None}, **settings
        )
        paired = self.estimator.centred and not isinstance(self.estimator, AlphaStable)
        if structure == "auto":
            knows = paired and scheme == "windowed" and batch_size is not None and not (correction or lam or warmup)
            structure = choose(self._shapes(), budget) if knows else "layer"
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

    def _shapes(self) -> list[tuple[int, ...]]:
        lead = 1 if self.batched else 0
        return [tuple(p.shape[lead:]) for group in self.param_groups for p in group["params"]]

    def _bind(self, shaped: Shaped, paired: bool, lam: float | None) -> None:
        if lam is not None:
            raise ValueError(f"lam = {lam} is one number, structure {shaped.name!r} has many: leave one of them out")
        if not paired or self.scheme != "windowed":
            raise ValueError(
                f"structure {shaped.name!r} is estimated from centred noise in windows: it needs noise='paired' and "
                f"scheme='windowed', not {type(self.estimator).__name__} and {self.scheme!r}"
            )
        if self.batch_size is None or self.batch_size < 2:
            raise ValueError(
                f"structure {shaped.name!r} takes the curvature from n Var(g): pass batch_size=n, not {self.batch_size}"
            )
        for name in ("temperature", "num_data"):
            found = {group[name] for group in self.param_groups}
            if len(found) > 1:
                raise ValueError(f"groups with {name} = {sorted(found)}: structure {shaped.name!r} needs one for all")
        shaped.bind(self.param_groups, self.chains, self.sets)
        self._last: Tensor | None = None

    @classmethod
    def preset(cls, name: str, params: ParamsLike, *, num_data: int, **settings: Any) -> ISGD:
        """The paper's rows by name: ``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also with ``-slr``."""
        if name not in PRESETS:
            raise ValueError(f"preset = {name!r} is unknown; choose one of {sorted(PRESETS)}")
        return cls(params, num_data=num_data, **{**PRESETS[name], **settings})

    # -- lambda -------------------------------------------------------------------------------------------------------

    def noise_bound(self, group: Group) -> Tensor:
        """The smallest lambda that leaves a non-negative covariance to inject."""
        if self.correction == "diagonal":
            return self.noise_summary(group, self.summary)
        return self.longest_noise(group)

    def adapt(
        self,
        curvature: Sequence[Number] | None = None,
        rise: float = 2.0,
        prior: Sequence[Tensor] | None = None,
    ) -> None:
        """Lambda from the noise seen and the curvature; it grows at once and shrinks by at most ``rise``.

        Args:
            curvature: the top curvature of ``f / N`` in each group.
            rise: how much rates may rise. With 1 a shape only slows down where the curvature asks for it.
            prior: curvature of the negative log prior for each parameter, which shapes need.
        """
        if self.given:
            return
        if self.shaped is not None:
            self._adapt_shape(self.shaped, curvature, rise, prior)
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

    def rule(self) -> Rule:
        """How large a shape must be."""
        group = self.param_groups[0]
        assert self.batch_size is not None and self.shaped is not None
        n, t = self.batch_size, group["temperature"]
        return Rule(group["num_data"], n, t, self.bias, self.averaged, self.shaped.kappa)

    def _adapt_shape(
        self,
        shaped: Shaped,
        curvature: Sequence[Number] | None,
        rise: float,
        prior: Sequence[Tensor] | None,
    ) -> None:
        rule = self.rule()
        if not shaped.known and shaped.seen < shaped.least:
            raise RuntimeError(
                f"structure {shaped.name!r} has seen {shaped.seen} noise vectors and needs {shaped.least} for a first "
                "Lambda: pass more to observe() before adapt()"
            )
        if curvature is not None:
            found = torch.stack([torch.as_tensor(h).to(shaped.factor).expand_as(shaped.factor) for h in curvature], -1)
            if shaped.known:
                # How much larger the curvature is than the Fisher information says, in the worst direction.
                stretch = (found * shaped.group_rates().to(found)).amax(-1) / shaped.unit_rate
                stretch = torch.where(shaped.unit_rate > 0, stretch, shaped.stretch)
                if rise > 1.0:
                    shaped.stretch = stretch.clamp_min(LEAST_STRETCH)
                if rise == 1.0 or shaped.seen < shaped.least:
                    wanted = rule.factor(stretch)
                    late = wanted > SLACK * shaped.factor
                    shaped.stretch = torch.where(late, stretch, shaped.stretch)
                    if bool(late.any()):
                        shaped.slow(torch.where(late, wanted / shaped.factor, 1.0))
            else:
                for i, slot in enumerate(shaped.slots):
                    shaped.fallback[:, slot] = found[:, i : i + 1]
        if rise > 1.0 and shaped.seen >= shaped.least:
            parts = None if prior is None else shaped.flatten(prior)
            zero = torch.zeros_like(shaped.fallback)
            shaped.settle(rule, zero if parts is None else parts / rule.num_data, rise)
        self._report_rates(shaped)

    def relax(self, stretch: Tensor) -> None:
        """Take back what a new Lambda was stretched too much: it was measured against the old one.

        Args:
            stretch: the true curvature over the new H in the direction where the old one was too small by most.
        """
        shaped, rule = self.shaped, self.rule()
        assert shaped is not None
        stretch = torch.minimum(stretch.to(shaped.stretch).clamp_min(LEAST_STRETCH), shaped.stretch)
        shaped.slow((rule.factor(stretch) / rule.factor(shaped.stretch)).clamp_min(1.0 / MOST_RELAXED))
        shaped.stretch = stretch
        self.cool()

    def cool(self) -> None:
        """Slow down where noise that the shape does not express would raise the temperature."""
        assert self.shaped is not None
        self.shaped.slow((self.shaped.excess() / EXCESS).clamp_min(1.0))
        self._report_rates(self.shaped)

    def _report_rates(self, shaped: Shaped) -> None:
        rule = self.rule()
        for group, rate in zip(self.param_groups, shaped.group_rates().unbind(-1), strict=True):
            group["rate"] = self.number(rate if self.batched else rate.squeeze(0))
            # Without a temperature nothing moves: whatever Lambda is, its rate is zero, and its inverse infinite.
            group["lam"] = self.number(rule.scale / torch.as_tensor(group["rate"]))

    def _set(self, lams: Sequence[Tensor]) -> None:
        tiny = torch.finfo(torch.float32).tiny  # a group without any noise or curvature has no rate of its own
        for group, lam in zip(self.param_groups, lams, strict=True):
            group["lam"] = self.number(lam.clamp_min(tiny))
            group["rate"] = self.structure.rate(group["lam"], group["temperature"], group["num_data"])
        self.refresh()

    def clipped_share(self, group: Group) -> Tensor:
        """Share of the noise that exceeds lambda, so that it could not be made isotropic: a scalar, or ``[chains]``."""
        if self.shaped is not None:
            clipped = self.shaped.clipped()
            return clipped if self.batched else clipped.squeeze(0)
        if group["lam"] is None or self.group_noise(group) is None:
            return torch.zeros(self.chains or ())
        if self.correction == "outer":
            over: Tensor = self.recent_lengths(group) > 2.0 * group["lam"]
            return over.float().mean(0)
        scale = diagonal_scale(group["lam"], join(self._variances(group), self.batched))
        return (scale == 0).float().mean(-1)

    @property
    def _follows(self) -> tuple[bool, bool]:
        if self.shaped is not None:
            return False, False
        return self.correction == "diagonal", self.correction == "outer"

    # -- the step -----------------------------------------------------------------------------------------------------

    @property
    def _extra(self) -> int:
        return 0 if self.shaped is None else self.shaped.extra

    @property
    def warming(self) -> bool:
        """Whether the optimizer's own warm-up is still on."""
        return bool(self.param_groups[0]["step"] < self.warmup)

    def _takes_gradient(self) -> bool:
        return super()._takes_gradient() or (self.warming and not self.estimator.centred)

    def forget_noise(self) -> None:
        super().forget_noise()
        if self.shaped is not None:
            self.shaped.forget()

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        if self.shaped is None:
            super().observe(noise)
        elif noise is not None:  # what the base keeps, number by number, a shape knows better
            self._check_noise(noise)
            self.shaped.observe(noise)
            for group in self.param_groups:
                group["seen"] += 1
        if self.given or not (self.warming and self.noise_ready()):
            return
        step = self.param_groups[0]["step"]
        if self.scheme != "windowed":  # the running summary, with no guard, as in the paper
            bounds = [self.noise_bound(group) for group in self.param_groups]
            self._set(self.structure.solve(bounds, [torch.zeros_like(b) for b in bounds]))
        elif self.shaped is not None and self.shaped.seen < self.shaped.least:
            return
        elif step % FIRST_WINDOW == 0 and (step // FIRST_WINDOW).bit_count() == 1:  # 50, 100, 200, 400, ...
            self.adapt()
            self.forget_noise()

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

    def _update(self) -> None:
        if self.shaped is None:
            super()._update()
            return
        if not self.shaped.known and self.warming:
            return  # no estimate, no step
        if not self.shaped.known:
            raise RuntimeError("Lambda is not known yet: let isosgd.sample warm up, or call adapt() after observe()")
        params = [p for laid in self._laid for p in laid.params]
        if len(params) != sum(len(group["params"]) for group in self.param_groups):
            raise RuntimeError("a parameter has no gradient: shapes of Lambda that know the geometry need all of them")
        xi = self._source.fill()
        if self.averaged:
            last = xi.clone() if self._last is None else self._last  # the first step has no other
            if self.capturable:  # a captured step knows tensors by their place
                mean = torch.lerp(last, xi, 0.5)
                self._last, xi = last.copy_(xi), mean
            else:  # they change places, so that nothing is copied
                self._last, self._source.out = xi, last
                xi = last.lerp_(xi, 0.5)
        gradient = self.shaped.flatten([p.grad for p in params])  # type: ignore[misc]
        moved = self.shaped.displace(self.shaped.tensors(), gradient, xi.view(self.shaped.chains, -1))
        parts = torch.split(moved.to(xi.dtype), self.shaped.sizes, -1)
        torch._foreach_sub_(params, [part.reshape(p.shape) for part, p in zip(parts, params, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.shaped is not None:
            state["structure"] = {"name": self.shaped.name, "shape": self.shaped.state(), "last": self._last}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("structure")
        if (saved or {}).get("name") != (self.shaped.name if self.shaped is not None else None):
            raise ValueError("the state was saved with another structure: make the sampler with the same one")
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "structure"})
        if self.shaped is not None and saved is not None:
            self.shaped.load(saved["shape"])
            self._last = None if saved["last"] is None else saved["last"].clone()

    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, noise: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        was_warming = self.warming
        loss: Tensor | None = super().step(closure, noise=noise)
        if was_warming and not self.warming:
            self.freeze()
            self.refresh()  # from training or estimating to sampling
        return loss
