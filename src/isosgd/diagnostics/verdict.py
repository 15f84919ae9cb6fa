"""The verdict on draws, in words: trust it, run longer, or it samples something else; why, and what would mend it.

It joins three things: convergence of predictions (R-hat, effective draws), the temperature meter, and what the warm-up
found. Thresholds grow with the standard errors and with the number of things looked at, so that all is well with draws
that are right in all but about one case of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from isosgd.diagnostics.meter import Reading, anisotropy
from isosgd.diagnostics.summary import PosteriorSummary, strict
from isosgd.diagnostics.traces import Array, ess

Words = Literal["trust it", "run longer", "it samples something else"]

RHAT = 1.05  # largest R-hat of a prediction that is believed; the literature's 1.01 is for the last digit
ESS = 100.0  # effective draws: the Monte-Carlo error of a mean is then a tenth of its standard deviation
TOLERANCE = 0.10  # by which the temperature may be off: discretisation is allowed some percent
DIRECTION_TOLERANCE = 0.25  # the same of a single direction
SHIFT_TOLERANCE = 0.25  # posterior standard deviations by which the mean may be off
KNOWN = 0.10  # standard error at which the temperature counts as known
CHANGING, CHANGED = 3.0, 2.0  # standard errors, or a factor, between earlier and later draws
LEAST_FREE = 4.0  # effective draws, less one, that a standard error must come from to raise an alarm
FALSE_ALARMS = 1e-3
SQUARES = 0.8  # of the most errors that a mean of squares can be above what was asked for
NORMAL = 1.5  # errors over those of a mean of squares, up to which a density is taken for normal
COUPLED = 0.5  # correlation of two chains, draw by draw
CLIPPED, BIASED, HEAVY = 0.05, 0.10, 1.5  # what is worth a remark in the warm-up's report


@dataclass(frozen=True)
class Verdict:
    """Whether to believe the draws.

    Attributes:
        words: "trust it", "run longer" or "it samples something else".
        reasons: why, the weightiest first.
        mends: what would help, one for each reason that has one.
        remarks: what is worth knowing beside it.
        temperature: T that was asked for.
        readings: the temperature over all parameters (first) and for each layer.
        directions: the temperature along single directions.
        anisotropy: standard deviation of the temperature over directions, over T; not a number when not known.
        rhat: largest R-hat over predictions and log likelihoods.
        ess: least effective number of draws over them.
        warmup: for each layer, over chains: the largest predicted bias of variances and share of clipped noise, the
            mean share of gradient noise in the composite noise, the least tail index.
    """

    words: Words
    reasons: tuple[str, ...]
    mends: tuple[str, ...]
    remarks: tuple[str, ...]
    temperature: float
    readings: tuple[Reading, ...]
    directions: tuple[Reading, ...] = ()
    anisotropy: float = math.nan
    rhat: float = math.nan
    ess: float = math.nan
    warmup: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def trusted(self) -> bool:
        """Whether the words are "trust it"."""
        return self.words == "trust it"

    def as_dict(self) -> dict[str, Any]:
        """Plain values that strict JSON can hold."""
        return strict(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [self.words.capitalize() + "."]
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"To mend it: {mend}" for mend in self.mends]
        whole = self.readings[0] if self.readings else None
        if whole is not None:
            lines.append(f"Temperature {whole.temperature:.4g} ± {whole.error:.2g}, asked for {self.temperature:g}.")
            for r in self.readings[1:]:
                lines.append(f"  {r.name}: {r.temperature:.4g} ± {r.error:.2g} ({r.size} parameters)")
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
) -> Verdict:
    """Put it into words.

    Args:
        temperature: T that was asked for.
        found: the temperature over all parameters, then that of each layer.
        along: temperatures along single directions.
        summary: of predictions and log likelihoods.
        traces: ``[chains, draws, ...]``, to tell whether chains are independent.
        reports: of each chain's warm-up.
        rhat: largest R-hat to believe.
        least: effective draws to ask for.
    """
    wrong = _wrong(temperature, found, along) + ([] if traces is None else _coupled(traces))
    short = [] if wrong else _short(temperature, found, along, summary, rhat, least)
    words: Words = "it samples something else" if wrong else "run longer" if short else "trust it"
    reasons = wrong or short or [_praise(temperature, found[0], summary)]
    warmup = by_layer(reports)
    return Verdict(
        words,
        tuple(reason for reason, _ in reasons),
        tuple(dict.fromkeys(mend for _, mend in reasons if mend)),
        tuple(_remarks(warmup, reports, words == "trust it")),
        temperature,
        tuple(found),
        tuple(along),
        anisotropy(along, temperature),
        summary.rhat,
        summary.ess_bulk,
        warmup,
    )


def threshold(tests: int, effective: float) -> float:
    """Standard errors that something may be off by chance.

    For so many tests that one in a thousand verdicts on right draws is wrong, with what a standard error from few
    effective draws needs more than one that is known (Student's t, by its expansion).
    """
    z, free = NormalDist().inv_cdf(1.0 - FALSE_ALARMS / (2.0 * max(tests, 1))), effective - 1.0
    if not free >= LEAST_FREE:
        return math.inf
    return z * (1.0 + (z**2 + 1.0) / (4.0 * free) + (5.0 * z**4 + 16.0 * z**2 + 3.0) / (96.0 * free**2))


def off(reading: Reading, temperature: float, tests: int, tolerance: float) -> int:
    """1 when a reading is hot and -1 when it is cold by more than chance and tolerance allow; else 0."""
    z = threshold(tests, reading.ess)
    ratio, error = reading.temperature / temperature, reading.error / temperature
    # On the hot side by logarithms, since the error of a large reading is itself large; that of squares is, so that
    # such a reading cannot be more than sqrt(ess / 2) errors above. Where a density is far from normal errors are large
    # at every temperature, and then it must be many of them above, too.
    normal = error <= NORMAL * ratio * math.sqrt(2.0 / reading.ess)
    far = normal or ratio - 1.0 - tolerance > min(z, SQUARES * math.sqrt(reading.ess / 2.0)) * error
    if ratio > 1.0 and far and math.log(ratio) > math.log1p(tolerance) + z * error / ratio:
        return 1
    return -1 if ratio < 1.0 - tolerance - z * error else 0


Case = tuple[str, str]  # a reason and what would mend it


def _wrong(temperature: float, found: Sequence[Reading], along: Sequence[Reading]) -> list[Case]:
    """Reasons to think that another density is sampled."""
    tests = len(found) + 2 * len(along)
    mixed = [r for r in along if r.mixed]
    signs = [off(r, temperature, tests, DIRECTION_TOLERANCE) for r in mixed]
    for reading in found:  # that over all parameters comes first
        sign = off(reading, temperature, tests, TOLERANCE)
        # In directions where chains have not come round they cannot show their heat: cold counts where they have.
        if sign and not _on_its_way(reading, sign) and (sign > 0 or len(mixed) == len(along) or -1 in signs):
            return [(_temperature(reading, temperature), HOT if sign > 0 else COLD)]
    if not any(signs):
        return _pushed(mixed, tests)
    crooked = [r for r, sign in zip(mixed, signs, strict=True) if sign]
    worst = max(crooked, key=lambda r: abs(math.log(max(r.temperature / temperature, 1e-9))))
    reason = (
        f"the temperature is not the same in all directions: {worst.temperature:.3g} ± {worst.error:.2g} along the "
        f"direction '{worst.name}', where {temperature:g} was asked for ({len(crooked)} of {len(mixed)} directions "
        "are off)"
    )
    return [(reason, CROOKED)]


def _pushed(mixed: Sequence[Reading], tests: int) -> list[Case]:
    """A gradient that is not zero on average: the draws are not where the density is."""
    worst = max(mixed, key=lambda r: abs(r.shift) / max(r.shift_error, 1e-9), default=None)
    if worst is None or not abs(worst.shift) > SHIFT_TOLERANCE + threshold(tests, worst.ess) * worst.shift_error:
        return []
    reason = (
        f"the draws are off centre: along the direction '{worst.name}' the gradient is not zero on average, as if "
        f"their mean were {abs(worst.shift):.2g} ± {worst.shift_error:.1g} standard deviations off"
    )
    return [(reason, PUSHED)]


def _on_its_way(reading: Reading, sign: int) -> bool:
    """A chain that comes down from a bad start is hot, and one that has not spread yet is cold: both change."""
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
        reasons.append(f"chains do not agree about predictions: R-hat is {summary.rhat:.3f}, above {rhat:g}")
    if not summary.ess_bulk >= least:
        reasons.append(f"the slowest prediction has {summary.ess_bulk:.0f} effective draws, below {least:g}")
    if not whole.error <= KNOWN * max(temperature, whole.temperature):
        reasons.append(
            f"the temperature is known to {100 * whole.error / temperature:.0f}% only, as {whole.temperature:.3g} ± "
            f"{whole.error:.2g}"
        )
    elif off(whole, temperature, len(found) + len(along), TOLERANCE):
        slow = sum(not r.mixed for r in along)
        where = f", and chains have not come round in {slow} of {len(along)} directions" if slow else " so far"
        reasons.append(_temperature(whole, temperature) + where)
    return [(reason, LONGER) for reason in reasons]


def _coupled(traces: Array) -> list[Case]:
    """Chains that move together."""
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
    # Two chains are coupled when all that is traced moves together, not one thing by chance.
    together = correlation.mean(-1)
    np.fill_diagonal(together, 0.0)
    pairs = chains * (chains - 1) // 2
    z = NormalDist().inv_cdf(1.0 - FALSE_ALARMS / (2 * pairs)) / math.sqrt(effective)
    a, b = (int(i) for i in np.unravel_index(np.abs(together).argmax(), together.shape))
    if abs(together[a, b]) <= max(COUPLED, z):
        return []
    return [
        (
            f"chains {min(a, b)} and {max(a, b)} move together (correlation {together[a, b]:.2f}): "
            "they are not independent",
            "give every chain a random generator of its own",
        )
    ]


def _temperature(reading: Reading, temperature: float) -> str:
    ratio = reading.temperature / temperature
    where = "" if reading.name == "all" else f" of layer {reading.name!r}"
    much = f"{ratio:.3g} times" if ratio > 0 else "nothing like"
    return (
        f"the temperature{where} is {reading.temperature:.3g} ± {reading.error:.2g}, {much} the {temperature:g} that "
        "was asked for"
    )


def _praise(temperature: float, whole: Reading, summary: PosteriorSummary) -> Case:
    return (
        f"chains agree about predictions (R-hat {summary.rhat:.3f}, {summary.ess_bulk:.0f} effective draws), and the "
        f"draws are at temperature {whole.temperature:.3g} ± {whole.error:.2g}, as asked for",
        "",
    )


def _remarks(warmup: dict[str, dict[str, float]], reports: Sequence[Mapping[str, Any]], trusted: bool) -> list[str]:
    remarks = []
    unsettled = [report for report in reports if not report.get("settled", True)]
    if unsettled and trusted:
        remarks.append(
            f"the warm-up of {len(unsettled)} of {len(reports)} chains had not settled when draws began; the draws "
            "agree all the same"
        )
    elif unsettled:
        remarks.append(
            f"the warm-up of {len(unsettled)} of {len(reports)} chains did not settle: {unsettled[0].get('reason', '')}"
        )
    for layer, found in warmup.items():
        if found["clipped_share"] > CLIPPED:
            remarks.append(f"{100 * found['clipped_share']:.0f}% of the gradient noise of {layer!r} exceeds lambda")
        if found["predicted_bias"] > BIASED:
            remarks.append(
                f"variances of {layer!r} are predicted to be {100 * found['predicted_bias']:.0f}% too large at its rate"
            )
        if found["tail_index"] < HEAVY:
            remarks.append(f"the gradient noise of {layer!r} is heavy-tailed (index {found['tail_index']:.2f})")
    return remarks


def by_layer(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What the warm-ups of all chains found for each layer, the worst over chains."""
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


HOT = (
    "the noise is too large for the step: check that injected noise is divided by the number of data N, that N is that "
    "of the data, and lower the rate (bias=) or enlarge the batch"
)
COLD = (
    "the noise is too small for the step: check that N and the temperature enter once, and that batches are drawn "
    "independently"
)
CROOKED = (
    "noise is missing in some directions and too strong in others: use structure='full', 'lowrank' or 'kronecker', a "
    "larger batch, and noise of its own for every parameter"
)
PUSHED = (
    "check that the sampler followed the gradient of this target: the same data, number of data N, prior and "
    "likelihood; else a longer warmup="
)
LONGER = "draw more (draws=), from more chains (chains=), further apart (keep_every=), or after a longer warmup="
