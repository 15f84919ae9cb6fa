"""The verdict on draws: trust it, run longer, or it samples something else; with the reasons and the fixes.

It combines convergence of predictions (R-hat, effective draws), the temperature meter, and the warm-up's reports.
Thresholds account for standard errors and for the number of tests, so that about one in a thousand verdicts on correct
draws is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from isosgd.diagnostics.meter import Reading, anisotropy
from isosgd.diagnostics.summary import PosteriorSummary, json_values
from isosgd.diagnostics.traces import Array, ess

Conclusion = Literal["trust it", "run longer", "it samples something else"]

RHAT = 1.05  # largest accepted R-hat of a prediction; the literature's 1.01 is for the last digit
ESS = 100.0  # effective draws: the Monte-Carlo error of a mean is then a tenth of its standard deviation
TOLERANCE = 0.10  # accepted relative error of the temperature: discretisation is allowed some percent
DIRECTION_TOLERANCE = 0.25  # the same for a single direction
SHIFT_TOLERANCE = 0.25  # accepted error of the mean, in posterior standard deviations
KNOWN = 0.10  # relative standard error at which the temperature counts as known
CHANGING, CHANGED = 3.0, 2.0  # standard errors, or a factor, between early and late draws
LEAST_FREE = 4.0  # least degrees of freedom of a standard error that can raise an alarm
FALSE_ALARMS = 1e-3
SQUARES = 0.8  # of the largest number of errors by which a mean of squares can exceed its target
NORMAL = 1.5  # error relative to that of a mean of squares, up to which a density counts as normal
COUPLED = 0.5  # correlation of two chains
CLIPPED, BIASED, HEAVY = 0.05, 0.10, 1.5  # of the warm-up's report, from where on they are mentioned


@dataclass(frozen=True)
class Verdict:
    """Whether to believe the draws.

    Attributes:
        summary: "trust it", "run longer" or "it samples something else".
        reasons: why, the most important first.
        fixes: what would help, one for each reason that has one.
        remarks: notes about the warm-up.
        temperature: the target temperature T.
        readings: the temperature over all parameters (first) and for each layer.
        directions: the temperature along single directions.
        anisotropy: standard deviation of the temperature over directions, over T; not a number if unknown.
        rhat: largest R-hat over predictions and log likelihoods.
        ess: smallest effective number of draws over them.
        warmup: for each layer, over chains: the largest predicted bias of variances and share of clipped noise, the
            mean share of gradient noise in the composite noise, the smallest tail index.
        opening: of draws around trained networks, how they compare with these and how the temperature was chosen.
    """

    summary: Conclusion
    reasons: tuple[str, ...]
    fixes: tuple[str, ...]
    remarks: tuple[str, ...]
    temperature: float
    readings: tuple[Reading, ...]
    directions: tuple[Reading, ...] = ()
    anisotropy: float = math.nan
    rhat: float = math.nan
    ess: float = math.nan
    warmup: dict[str, dict[str, float]] = field(default_factory=dict)
    opening: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether the summary is "trust it"."""
        return self.summary == "trust it"

    def as_dict(self) -> dict[str, Any]:
        """Plain values that strict JSON can hold."""
        return json_values(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [*self.opening, self.summary.capitalize() + "."]
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"Fix: {fix}" for fix in self.fixes]
        whole = self.readings[0] if self.readings else None
        if whole is not None:
            lines.append(f"Temperature {whole.temperature:.4g} ± {whole.error:.2g}, target {self.temperature:g}.")
            for r in self.readings[1:]:
                size = f"{r.size:,} parameter{'s' * (r.size != 1)}"
                lines.append(f"  {r.name}: {r.temperature:.4g} ± {r.error:.2g} ({size})")
        lines += [f"Note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def judge(
    temperature: float,
    found: Sequence[Reading],
    along: Sequence[Reading],
    summary: PosteriorSummary,
    traces: Array | None = None,
    reports: Sequence[Mapping[str, Any]] = (),
    rhat: float = RHAT,
    least: float = ESS,
    longer: str = "",
) -> Verdict:
    """The verdict.

    Args:
        temperature: the target temperature T.
        found: the temperature over all parameters, then that of each layer.
        along: temperatures along single directions.
        summary: of predictions and log likelihoods.
        traces: ``[chains, draws, ...]``, to check that chains are independent.
        reports: of each chain's warm-up.
        rhat: largest accepted R-hat.
        least: required effective draws.
        longer: how to run longer, if not in the usual way.
    """
    wrong = _wrong(temperature, found, along) + ([] if traces is None else _coupled(traces))
    short = [] if wrong else _short(temperature, found, along, summary, rhat, least)
    conclusion: Conclusion = "it samples something else" if wrong else "run longer" if short else "trust it"
    whole = found[0]
    good = (
        f"chains agree on predictions (R-hat {summary.rhat:.3f}, {summary.ess_bulk:.0f} effective draws) and the "
        f"temperature agrees with its target: {whole.temperature:.3g} ± {whole.error:.2g}"
    )
    cases = wrong or short or [(good, "")]
    warmup = by_layer(reports)
    return Verdict(
        conclusion,
        tuple(reason for reason, _ in cases),
        tuple(dict.fromkeys(longer if longer and fix == RUN_LONGER else fix for _, fix in cases if fix)),
        tuple(_remarks(warmup, reports, conclusion == "trust it")),
        temperature,
        tuple(found),
        tuple(along),
        anisotropy(along, temperature),
        summary.rhat,
        summary.ess_bulk,
        warmup,
    )


def threshold(tests: int, effective: float) -> float:
    """The number of standard errors that the worst of so many tests may be off by chance, at `FALSE_ALARMS`.

    Larger for standard errors from few effective draws (Student's t, by its expansion).
    """
    z, free = NormalDist().inv_cdf(1.0 - FALSE_ALARMS / (2.0 * max(tests, 1))), effective - 1.0
    if not free >= LEAST_FREE:
        return math.inf
    return z * (1.0 + (z**2 + 1.0) / (4.0 * free) + (5.0 * z**4 + 16.0 * z**2 + 3.0) / (96.0 * free**2))


def off(reading: Reading, temperature: float, tests: int, tolerance: float) -> int:
    """1 if a reading is too hot, -1 if it is too cold, by more than chance and tolerance allow; else 0."""
    z = threshold(tests, reading.ess)
    ratio, error = reading.temperature / temperature, reading.error / temperature
    # Hot readings are compared by logarithms, since the error of a mean of squares grows with it: it cannot be more
    # than sqrt(ess / 2) errors too high. For a density far from normal, errors are large at every temperature, and the
    # reading must also be many errors too high.
    normal = error <= NORMAL * ratio * math.sqrt(2.0 / reading.ess)
    far = normal or ratio - 1.0 - tolerance > min(z, SQUARES * math.sqrt(reading.ess / 2.0)) * error
    if ratio > 1.0 and far and math.log(ratio) > math.log1p(tolerance) + z * error / ratio:
        return 1
    return -1 if ratio < 1.0 - tolerance - z * error else 0


Case = tuple[str, str]  # a reason and its fix


def _wrong(temperature: float, found: Sequence[Reading], along: Sequence[Reading]) -> list[Case]:
    """Evidence that another density is sampled."""
    tests = len(found) + 2 * len(along)
    mixed = [r for r in along if r.mixed]
    signs = [off(r, temperature, tests, DIRECTION_TOLERANCE) for r in mixed]
    for reading in found:  # all parameters come first
        sign = off(reading, temperature, tests, TOLERANCE)
        # Readings along directions that have not mixed are too cold: cold counts only if the chains have mixed.
        if sign and not _approaching(reading, sign) and (sign > 0 or len(mixed) == len(along) or -1 in signs):
            return [(_temperature(reading, temperature), TOO_HOT if sign > 0 else TOO_COLD)]
    if not any(signs):
        return _off_centre(mixed, tests)
    uneven = [r for r, sign in zip(mixed, signs, strict=True) if sign]
    worst = max(uneven, key=lambda r: abs(math.log(max(r.temperature / temperature, 1e-9))))
    reason = (
        f"the temperature is not the same in all directions: {worst.temperature:.3g} ± {worst.error:.2g} along the "
        f"direction '{worst.name}', target {temperature:g} ({len(uneven)} of {len(mixed)} directions are off)"
    )
    return [(reason, UNEVEN)]


def _off_centre(mixed: Sequence[Reading], tests: int) -> list[Case]:
    """A mean gradient that is not zero: the draws are in the wrong place."""
    worst = max(mixed, key=lambda r: abs(r.shift) / max(r.shift_error, 1e-9), default=None)
    if worst is None or not abs(worst.shift) > SHIFT_TOLERANCE + threshold(tests, worst.ess) * worst.shift_error:
        return []
    reason = (
        f"the draws are off centre: the mean gradient along the direction '{worst.name}' is not zero, which means an "
        f"error of the mean of {abs(worst.shift):.2g} ± {worst.shift_error:.1g} standard deviations"
    )
    return [(reason, OFF_CENTRE)]


def _approaching(reading: Reading, sign: int) -> bool:
    """Whether the reading moves towards its target: hot after a bad start, or cold before the chain has spread."""
    change = sign * (reading.late - reading.early)
    far = max(reading.late, reading.early) > CHANGED * max(min(reading.late, reading.early), 0.0)
    return change < 0 and (far or change < -2.0 * CHANGING * reading.error)


def _short(
    temperature: float,
    found: Sequence[Reading],
    along: Sequence[Reading],
    summary: PosteriorSummary,
    rhat: float,
    least: float,
) -> list[Case]:
    """Reasons to run longer."""
    reasons = []
    whole = found[0]
    if not summary.rhat <= rhat:
        who = "chains do not agree" if summary.chains > 1 else "the halves of the chain do not agree"
        reasons.append(f"{who} on predictions: R-hat is {summary.rhat:.3f}, above {rhat:g}")
    if not summary.ess_bulk >= least:
        reasons.append(f"the slowest prediction has {summary.ess_bulk:.0f} effective draws, below {least:g}")
    if not whole.error <= KNOWN * max(temperature, whole.temperature):
        reasons.append(
            f"the temperature is only known to {100 * whole.error / temperature:.0f}%: {whole.temperature:.3g} ± "
            f"{whole.error:.2g}"
        )
    elif off(whole, temperature, len(found) + len(along), TOLERANCE):
        slow = sum(not r.mixed for r in along)
        where = f", and chains have not mixed in {slow} of {len(along)} directions" if slow else " so far"
        reasons.append(_temperature(whole, temperature) + where)
    return [(reason, RUN_LONGER) for reason in reasons]


def _coupled(traces: Array) -> list[Case]:
    """Chains that are correlated with each other."""
    chains, draws = traces.shape[:2]
    if chains < 2 or draws < 20:
        return []
    flat = traces.reshape(chains, draws, -1)
    moving = flat[..., (flat.std(1) > 0).all(0)]
    if not moving.shape[-1]:
        return []
    effective = max(float(np.min(ess(moving, "mean"))) / chains, 4.0)
    unit = (moving - moving.mean(1, keepdims=True)) / moving.std(1, keepdims=True)
    correlation = np.einsum("adk,bdk->abk", unit, unit) / draws
    # Two chains are coupled if all traces move together, not one by chance.
    together = correlation.mean(-1)
    np.fill_diagonal(together, 0.0)
    pairs = chains * (chains - 1) // 2
    z = NormalDist().inv_cdf(1.0 - FALSE_ALARMS / (2 * pairs)) / math.sqrt(effective)
    a, b = (int(i) for i in np.unravel_index(np.abs(together).argmax(), together.shape))
    if abs(together[a, b]) <= max(COUPLED, z):
        return []
    pair, found = f"chains {min(a, b)} and {max(a, b)}", f"correlation {together[a, b]:.2f}"
    return [(f"{pair} move together ({found}): they are not independent", "give every chain its own random generator")]


def _temperature(reading: Reading, temperature: float) -> str:
    ratio = reading.temperature / temperature
    where = "" if reading.name == "all" else f" of layer {reading.name!r}"
    times = f", {ratio:.3g} times its target {temperature:g}" if ratio > 0 else f", target {temperature:g}"
    return f"the temperature{where} is {reading.temperature:.3g} ± {reading.error:.2g}{times}"


def _remarks(warmup: dict[str, dict[str, float]], reports: Sequence[Mapping[str, Any]], trusted: bool) -> list[str]:
    remarks = []
    unsettled = [report for report in reports if not report.get("settled", True)]
    if unsettled:
        what = f"the warm-up of {len(unsettled)} of {len(reports)} chains did not settle"
        remarks.append(f"{what}; the draws agree nevertheless" if trusted else f"{what}: {unsettled[0].get('reason')}")
    for layer, found in warmup.items():
        if found["clipped_share"] > CLIPPED:
            remarks.append(f"{100 * found['clipped_share']:.0f}% of the gradient noise of {layer!r} exceeds lambda")
        if found["predicted_bias"] > BIASED:
            remarks.append(f"variances of {layer!r} are predicted to be {100 * found['predicted_bias']:.0f}% too large")
        if found["tail_index"] < HEAVY:
            remarks.append(f"the gradient noise of {layer!r} is heavy-tailed (index {found['tail_index']:.2f})")
    return remarks


def by_layer(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The warm-up reports of all chains for each layer, the worst over chains."""
    picks: dict[str, Any] = {
        "predicted_bias": np.max,
        "clipped_share": np.max,
        "noise_share": np.mean,
        "tail_index": np.min,
    }
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for report in reports:
        for group in report.get("groups", ()):
            layers.setdefault(str(group["name"]), []).append(group)
    found: dict[str, dict[str, float]] = {}
    for layer, groups in layers.items():
        found[layer] = {}
        for what, pick in picks.items():
            values = [float(g[what]) for g in groups if g.get(what) is not None and math.isfinite(g[what])]
            found[layer][what] = float(pick(values)) if values else math.nan
    return found


TOO_HOT = (
    "the noise is too large for the step: check that injected noise is divided by the number of data N and that N is "
    "right; lower the rate (bias=) or use a larger batch"
)
TOO_COLD = (
    "the noise is too small for the step: check that N and the temperature enter once, and that batches are drawn "
    "independently"
)
UNEVEN = (
    "noise is missing in some directions and too strong in others: use structure='full', 'lowrank' or 'kronecker', a "
    "larger batch, and independent noise for every parameter"
)
OFF_CENTRE = (
    "check that the sampler used the gradient of this target: the same data, number of data N, prior and likelihood; "
    "otherwise use a longer warmup="
)
IN_CYCLES = "more draws (draws=) or more chains (chains=)"
RUN_LONGER = (
    "more draws (draws=; in a loop of your own more steps), more chains (chains=), a larger spacing (keep_every=) or a "
    "longer warmup="
)
