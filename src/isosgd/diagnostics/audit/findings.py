"""What keeps a described loop from sampling its target posterior: each finding with its reason and its fix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from isosgd.diagnostics.audit.loop import SCALES, Loop

CLOSE = 0.05  # accepted relative error of a temperature


class Finding(NamedTuple):
    """A reason why the draws of a loop are not from its target posterior."""

    name: str
    explanation: str
    fix: str


def number(value: float) -> str:
    """A number for a sentence: three digits, thousands separated."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def close(found: float, expected: float, within: float = CLOSE) -> bool:
    """Whether two temperatures agree."""
    return math.isclose(found, expected, rel_tol=within)


def findings(loop: Loop) -> list[Finding]:
    """Everything that is wrong with a loop, the temperature first."""
    parts = (_temperature, _refresh, _noise, _prior, _gradient, _discretisation)
    return [finding for part in parts for finding in part(loop)]


# -- the temperature --------------------------------------------------------------------------------------------------


def _temperature(loop: Loop) -> Iterator[Finding]:
    target = loop.target_temperature
    if loop.assumed_num_data is not None and loop.assumed_num_data != loop.num_data:
        factor = loop.num_data / loop.assumed_num_data
        yield Finding(
            "wrong N",
            f"the sampler assumes N = {loop.assumed_num_data} but the data have {loop.num_data} examples, which "
            f"multiplies the temperature by {number(factor)}",
            f"num_data={loop.num_data}",
        )
        target *= factor  # not reported twice
    if loop.noise == 0 and not loop.momentum_noise:
        yield Finding(
            "no noise",
            "no noise is injected: SGD is then driven by its gradient noise alone and draws from a normal with "
            "covariance S, H S + S H = (lr s / a) Var(g) (V-SGD); that is the posterior only at one rate, and only if "
            "Var(g) is proportional to the identity",
            f"add noise of standard deviation {loop.right_noise}, or use isosgd.ISGD",
        )
    if loop.sigma:
        # What is wrong with refreshes, noise used twice and replicas is reported on its own.
        found = replace(_without_refresh(loop), reused=1, replicas=1).noise_temperature()
        if found is not None and not close(found, target):
            yield from wrong_noise(loop, found, target)


def wrong_noise(loop: Loop, found: float, target: float, measured: str = "", within: float = 0.01) -> Iterator[Finding]:
    """Why a noise gives the temperature ``found``, known ``within`` a relative error, as far as can be inferred."""
    name, why = "temperature", "the noise does not match the learning rate and the loss"
    for cause, (factor, words) in _known_factors(loop).items():
        if factor != 1 and close(found / target, factor, within):
            name, why = cause, words
            break
    seen = measured or f"temperature {number(found)} instead of {number(target)}"
    yield Finding(name, f"{why}; {seen}", f"noise of standard deviation {loop.right_noise} in every step")


def _known_factors(loop: Loop) -> dict[str, tuple[float, str]]:
    """Factors by which the temperature of a noise may be off, by what has then been forgotten or done twice."""
    n, a, t = loop.batch_size or 1, loop.friction, loop.temperature or 1.0
    return {
        "N missing in noise": (loop.num_data, "the noise does not depend on the number of examples"),
        "N applied twice": (1 / loop.num_data, "the noise is divided by the number of examples twice"),
        "T missing in noise": (1 / t, "the noise does not depend on the temperature setting"),
        "T applied twice": (t, "the temperature enters squared"),
        "n missing in noise": (1 / n, "the loss is summed over the minibatch, the noise is that of a mean loss"),
        "n applied where it does not belong": (n, "the noise grows with the minibatch, the gradient does not"),
        "friction missing in noise": (1 / a, "momentum carries each noise vector 1/a steps on, noise ignores it"),
        "momentum speeds up the gradient alone": (
            a,
            "each gradient acts 1/a times through the momentum, noise added to the parameters only once",
        ),
    }


def _without_refresh(loop: Loop) -> Loop:
    return replace(loop, refresh_every=None, momentum_noise=None)


def _refresh(loop: Loop) -> Iterator[Finding]:
    if loop.refresh_every is None or loop.momentum_noise is None:
        return
    right, target = math.sqrt(loop.lr * loop.scale * loop.target_temperature / loop.num_data), loop.target_temperature
    if not close(loop.momentum_noise**2, right**2):
        hint = "" if loop.curvature is not None else "; where depends on the curvature (give it for the exact value)"
        yield Finding(
            "momentum refreshed at the wrong variance",
            f"every {loop.refresh_every} steps the velocity is redrawn with variance {number(loop.momentum_noise**2)} "
            f"instead of lr s T / N = {number(right**2)} for T = {number(target)}: two thermostats with different "
            f"temperatures, and the draws lie between them{hint}",
            f"redraw it with standard deviation {number(right)}, or do not redraw it",
        )
        return
    found, without = loop.noise_temperature(), _without_refresh(loop).noise_temperature()
    if found is not None and without is not None and close(without, target) and not close(found, target):
        yield Finding(
            "few steps between refreshes",
            f"{loop.refresh_every} steps after a refresh the first kick, which is a full one and not the half kick of "
            f"a leapfrog, still matters: temperature {number(found)}",
            "more steps between refreshes, or a half kick first",
        )


# -- the rest ---------------------------------------------------------------------------------------------------------


def _noise(loop: Loop) -> Iterator[Finding]:
    if (k := loop.reused) > 1:
        yield Finding(
            "one random key used twice",
            f"{k} consecutive steps have the same noise: its variance adds up to {k}² times that of one step instead "
            f"of {k} times, which multiplies the temperature by {k}",
            "a fresh key, or an advancing generator, for every step",
        )
    if loop.replicas > 1:
        yield Finding(
            "replicas draw their own noise",
            f"{loop.replicas} replicas average gradients but not noise: the temperature of their mean is divided by "
            f"{loop.replicas}, and they drift apart without bound",
            "the same noise seed on every rank",
        )


def _prior(loop: Loop) -> Iterator[Finding]:
    strength, scale = loop.prior_strength(), SCALES[loop.loss_reduction]
    if not loop.weight_decay and not loop.prior:
        yield Finding(
            "prior dropped",
            "there is neither weight decay nor a prior in the loss: the prior is flat, and parameters that the data do "
            "not determine drift away",
            f"weight decay of p{scale}/N for a normal prior of precision p",
        )
    elif strength is not None and not close(strength, 1.0):
        yield Finding(
            "prior tempered",
            f"the prior counts {number(strength)} times: its temperature is that of the likelihood divided by "
            f"{number(strength)}",
            f"the negative log prior in the loss times {scale.lstrip('*') or '1'}/N"
            if loop.prior
            else f"weight_decay={number(loop.weight_decay / strength)}",
        )


def _gradient(loop: Loop) -> Iterator[Finding]:
    added, injected = loop.gradient_temperature(), loop.noise_temperature()
    if added is not None and injected and abs(added) > CLOSE * injected:
        yield Finding(
            "gradient noise not accounted for",
            f"the loop corrects for gradient noise that cancels: the temperature falls by {number(-added)}"
            if loop.corrected
            else f"it adds {number(added)} to the temperature of the injected noise, {number(injected)}",
            "a lower rate or larger minibatches; or isosgd.ISGD, which counts it as part of the required noise",
        )
    if loop.minibatches == "epoch":
        yield Finding(
            "minibatches without replacement",
            "the noise of successive minibatches cancels over an epoch, so gradients heat the chain less than Var(g) "
            "suggests; what relies on that noise (plain SGD, I-SGD) is too narrow",
            "draw minibatches independently: RandomSampler(data, replacement=True)",
        )


def _discretisation(loop: Loop) -> Iterator[Finding]:
    if loop.curvature is None or not loop.sigma:
        return
    exact, limit = loop.noise_temperature(loop.curvature), loop.noise_temperature()
    assert exact is not None and limit is not None
    if math.isinf(exact):
        yield Finding("unstable", f"at curvature {number(loop.curvature)} the steps diverge", "a lower rate")
    elif loop.refresh_every is None and not close(exact, limit):
        yield Finding(
            "steps too long",
            f"at curvature {number(loop.curvature)} the discrete steps alone make variances {number(exact / limit)} "
            "times too large",
            f"a rate below {number(2 * (2 - loop.friction) * CLOSE / (loop.scale * loop.curvature))}",
        )
