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
    found = [*_temperature(loop), *_refresh(loop)]
    if loop.shared_noise is not None:
        found.append(_shared(loop)[loop.shared_noise])
    if loop.replicas > 1:
        found.append(
            Finding(
                "replicas draw their own noise",
                f"{loop.replicas} replicas average gradients but not noise: the temperature of their mean is divided "
                f"by {loop.replicas}, and they drift apart without bound",
                "the same noise seed on every rank",
            )
        )
    found += [*_prior(loop), *_gradient(loop), *_discretisation(loop)]
    return found + [finding for name, finding in _MODEL.items() if getattr(loop, name)]


# -- the temperature --------------------------------------------------------------------------------------------------

# Why the temperature is wrong, by the power with which a quantity enters it.
_CAUSES: dict[str, dict[float, tuple[str, str]]] = {
    "N": {
        1.0: ("N missing in noise", "the noise does not depend on the number of examples: temperature grows with N"),
        -1.0: ("N applied twice", "the noise is divided by the number of examples twice: temperature falls as 1/N"),
    },
    "T": {
        0.0: ("T missing in noise", "the noise does not depend on the temperature setting"),
        2.0: ("T applied twice", "the temperature enters squared"),
    },
    "lr": {},
    "n": {
        -1.0: ("n missing in noise", "the loss is summed over the minibatch, the noise is that of a mean loss"),
        1.0: ("n applied where it does not belong", "the noise grows with the minibatch, the gradient does not"),
    },
    "a": {
        -1.0: ("friction missing in noise", "momentum carries each noise vector 1/a steps on, which the noise ignores"),
        1.0: (
            "momentum speeds up the gradient alone",
            "each gradient acts 1/a times through the momentum, noise added to the parameters only once",
        ),
    },
}


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
    if loop.sigma == 0 and loop.noise is not None and not loop.refreshed_sd:
        yield Finding(
            "no noise",
            "no noise is injected: SGD is then driven by its gradient noise alone and draws from a normal with "
            "covariance S, H S + S H = (lr s / a) Var(g) (V-SGD); that is the posterior only at one rate, and only if "
            "Var(g) is proportional to the identity",
            f"add noise of standard deviation {loop.right_noise}, or use isosgd.ISGD",
        )
    if loop.sigma:
        # What is wrong with refreshes, noise used twice and replicas is reported on its own.
        found = replace(_without_refresh(loop), shared_noise=None, replicas=1).noise_temperature()
        if found is not None and not close(found, target):
            yield from wrong_noise(loop, found, target)


def wrong_noise(loop: Loop, found: float, target: float, measured: str = "", within: float = 0.01) -> Iterator[Finding]:
    """Why a noise gives the temperature ``found``, known ``within`` a relative error, as far as can be inferred."""
    causes = list(_wrong_powers(loop)) or list(_known_factor(loop, found / target, within))
    seen = measured or f"temperature {number(found)} instead of {number(target)}"
    for name, why in causes or [("temperature", "the noise does not match the learning rate and the loss")]:
        yield Finding(name, f"{why}; {seen}", f"noise of standard deviation {loop.right_noise} in every step")


def _without_refresh(loop: Loop) -> Loop:
    return replace(loop, refresh_every=None, momentum_noise=None)


def _wrong_powers(loop: Loop) -> Iterator[tuple[str, str]]:
    """For noise given as an expression: the quantities that enter the temperature with a wrong power."""
    given = loop.value("temperature")
    for name, causes in _CAUSES.items():
        power, right = _power(loop, name), float(name == "T")
        if power is None or abs(power - right) < 1e-2:
            continue
        if name == "T" and (given == 1.0 or not close(given, loop.target_temperature)):
            continue  # T = 1/N: judged with N
        cause = causes.get(round(power, 1))
        if cause is None and name == "lr":
            cause = "noise not in step with lr", f"the temperature goes with lr^{power:g}: it changes with the rate"
        yield cause or (f"wrong power of {name}", f"the temperature goes with {name}^{power:g}")


def _power(loop: Loop, name: str) -> float | None:
    """The power of one quantity in the temperature: by what it changes when that is doubled; None for a number."""
    if not isinstance(loop.noise, str) or not loop.sigma:
        return None
    base = replace(_without_refresh(loop), assumed_num_data=None)
    factor = 2.0
    if name == "N":
        other = replace(base, num_data=2 * loop.num_data)
    elif name == "n" and loop.batch_size is not None:
        base = replace(base, num_data=2 * loop.num_data)  # a batch never exceeds the data
        other = replace(base, batch_size=2 * loop.batch_size)
    elif name == "T":
        given = loop.value("temperature")
        base, other = replace(base, temperature=given), replace(base, temperature=2 * given)
    elif name == "lr":
        other = replace(base, lr=2 * loop.lr)
    elif name == "a" and loop.momentum:
        other, factor = replace(base, momentum=(1 + loop.momentum) / 2), 0.5
    else:
        return None
    first, second = base.noise_temperature(), other.noise_temperature()
    return round(math.log(second / first) / math.log(factor), 3) if first and second else None


def _known_factor(loop: Loop, ratio: float, within: float) -> Iterator[tuple[str, str]]:
    """For noise given as a plain number: whether it is off by a factor that has a name."""
    given = loop.value("temperature")
    factors = {("N", 1.0): loop.num_data, ("N", -1.0): 1 / loop.num_data}
    if given and given != 1:
        factors |= {("T", 2.0): given, ("T", 0.0): 1 / given}
    if loop.batch_size:
        factors |= {("n", -1.0): 1 / loop.batch_size, ("n", 1.0): loop.batch_size}
    if loop.momentum:
        factors |= {("a", -1.0): 1 / loop.friction, ("a", 1.0): loop.friction}
    for (name, power), factor in factors.items():
        if factor != 1 and close(ratio, factor, within):
            yield _CAUSES[name][power]
            return


def _refresh(loop: Loop) -> Iterator[Finding]:
    if loop.refresh_every is None:
        return
    right, target = math.sqrt(loop.lr * loop.scale * loop.target_temperature / loop.num_data), loop.target_temperature
    if not close(loop.refreshed_sd**2, right**2):
        hint = "" if loop.curvature is not None else "; where depends on the curvature (give it for the exact value)"
        yield Finding(
            "momentum refreshed at the wrong variance",
            f"every {loop.refresh_every} steps the velocity is redrawn with variance {number(loop.refreshed_sd**2)} "
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


def _shared(loop: Loop) -> dict[str, Finding]:
    k = loop.reused
    return {
        "steps": Finding(
            "one random key used twice",
            f"{k} consecutive steps have the same noise: its variance adds up to {k}² times that of one step instead "
            f"of {k} times, which multiplies the temperature by {k}",
            "a fresh key, or an advancing generator, for every step",
        ),
        "tensors": Finding(
            "noise shared between tensors",
            "tensors of the same shape get the same noise: marginals have the stated temperature, but parameters with "
            "curvatures h and k are correlated by 2 sqrt(h k) / (h + k), fully if h = k",
            "one key per tensor: split it, or draw from one generator in turn",
        ),
        "chains": Finding(
            "noise shared between chains",
            "all chains get the same noise: they forget their starts and become one chain (except for their "
            "minibatches), so their number suggests independent draws, and a low R-hat, that do not exist",
            "a generator with its own seed for each chain",
        ),
    }


def _prior(loop: Loop) -> Iterator[Finding]:
    strength, scale = loop.prior_strength(), SCALES[loop.loss_reduction]
    if not loop.weight_decay and not loop.value("prior"):
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
            if loop.prior is not None
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
    if loop.clipping is not None:
        yield Finding(
            "gradient clipped",
            f"gradients with a norm above {number(loop.clipping)} are cut, so the pull towards the mode stops growing: "
            "tails are too heavy, and clipped minibatch gradients are biased",
            "lower the rate instead, or check that the limit is never reached while draws are kept",
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


_MODEL = {
    "batchnorm": Finding(
        "BatchNorm in training mode",
        "an example's loss depends on the rest of its minibatch, so the loss is not a sum over examples and its "
        "gradient not that of a fixed potential; running statistics belong to no draw",
        "GroupNorm or another per-example normalisation; or frozen statistics, recomputed for each draw",
    ),
    "dropout": Finding(
        "stochastic layers",
        "dropout uses another network in every step: the potential is an average over networks, and its noise "
        "adds to the stated temperature",
        "remove dropout: the posterior is the regulariser",
    ),
    "augmentation": Finding(
        "augmentation",
        "augmented inputs are not N observations: the potential is N times the mean loss over all augmentations, "
        "which is not a likelihood (a cold posterior often fits best), and their noise adds to that of minibatches",
        "sample without augmentation, or choose T on held-out data and report it",
    ),
}
