"""What keeps a described loop from sampling the posterior that is meant: each finding with its reason and its mend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from isosgd.diagnostics.auditing.causes import CLOSE, causes, close, say
from isosgd.diagnostics.auditing.loop import SCALES, Loop
from isosgd.diagnostics.auditing.recursion import temperature_at


class Breach(NamedTuple):
    """Something that a loop does, or fails to do, so that its draws are not from the posterior that is meant."""

    name: str
    explanation: str
    mend: str


def breaches(loop: Loop) -> list[Breach]:
    """Everything that is wrong with a loop, the temperature first."""
    found = [*_temperature(loop), *_momentum(loop), *_shared(loop), *_prior(loop), *_gradient(loop)]
    return [*found, *_discretisation(loop), *_layers(loop), *_bookkeeping(loop)]


# -- temperature ------------------------------------------------------------------------------------------------------


def _temperature(loop: Loop) -> Iterator[Breach]:
    found, meant = loop.noise_temperature(with_refresh=False), loop.meant
    if loop.told_num_data not in (None, loop.num_data):
        assert loop.told_num_data is not None
        yield Breach(
            "wrong N",
            f"the sampler was told N = {loop.told_num_data} and the data have {loop.num_data} examples, which "
            f"multiplies the temperature by {say(loop.num_data / loop.told_num_data)}",
            f"num_data={loop.num_data}",
        )
        meant *= loop.num_data / loop.told_num_data  # said once
    if loop.sigma == 0 and loop.noise is not None and not loop.fresh:
        yield Breach(
            "no noise",
            "nothing is injected: where it comes to rest, SGD draws from a normal of covariance S with H S + S H = "
            "(lr s / a) Var(g), its gradient noise alone (V-SGD); that is the posterior only at one rate, and only "
            "where Var(g) is proportional to the identity",
            f"add noise of standard deviation {loop.right_noise}, or use isosgd.ISGD",
        )
        return
    if found is None or not loop.sigma:
        return
    if loop.shared_noise == "steps":
        found /= loop.reused
    found *= loop.replicas
    if close(found, meant):
        return
    ratio = f"temperature {say(found)} where {say(meant)} is meant"
    mend = f"noise of standard deviation {loop.right_noise} in every step"
    named = causes(loop, found / meant)
    for name, why in named or [("temperature", "the noise does not fit the rate and the loss")]:
        yield Breach(name, f"{why}; {ratio}", mend)


# -- the rest ---------------------------------------------------------------------------------------------------------


def _momentum(loop: Loop) -> Iterator[Breach]:
    if loop.refresh_every is None:
        return
    right, found = loop.right_fresh, loop.noise_temperature()
    at = "" if loop.curvature is not None else "; how far depends on the curvature: give it for the exact temperature"
    if not close(loop.fresh**2, right**2):
        yield Breach(
            "momentum refreshed at the wrong variance",
            f"every {loop.refresh_every} steps the velocity is drawn with variance {say(loop.fresh**2)} where that of "
            f"T = {say(loop.meant)} is lr s T / N = {say(right**2)}: two thermostats at different temperatures, and "
            f"the draws lie between{at}",
            f"draw it with standard deviation {say(right)}, or do not draw it anew",
        )
        return
    sound = loop.noise_temperature(with_refresh=False)
    if found is not None and sound is not None and close(sound, loop.meant) and not close(found, loop.meant):
        yield Breach(
            "few steps between refreshes",
            f"{loop.refresh_every} steps after a velocity is drawn the first kick still counts as a whole one, not as "
            f"the half of a leapfrog: temperature {say(found)}",
            "more steps between refreshes, or a half kick first",
        )


def _shared(loop: Loop) -> Iterator[Breach]:
    if loop.shared_noise == "steps":
        yield Breach(
            "one random key used twice",
            f"{loop.reused} steps in a row have the same noise: it adds up to {loop.reused}² times the variance of "
            f"one step where {loop.reused} times is right, so that the temperature is multiplied by {loop.reused}",
            "a fresh key, or a generator that moves on, for every step",
        )
    elif loop.shared_noise == "tensors":
        yield Breach(
            "noise shared between tensors",
            "tensors of the same shape get the same noise: each marginal is as hot as stated, but parameters of "
            "curvatures h and k are correlated by 2 sqrt(h k) / (h + k), fully where h = k",
            "one key for each tensor: split it, or draw from one generator in turn",
        )
    elif loop.shared_noise == "chains":
        yield Breach(
            "noise shared between chains",
            "all chains get the same noise: they forget where they started and become one chain (but for their "
            "minibatches), so that their number promises independent draws, and a low R-hat, that are not there",
            "a generator of its own, seeded differently, for each chain",
        )
    if loop.replicas > 1:
        yield Breach(
            "replicas draw their own noise",
            f"{loop.replicas} replicas average gradients but not noise: the temperature of their mean is divided by "
            f"{loop.replicas}, and they drift apart without bound",
            "the same seed for the noise on every rank",
        )


def _prior(loop: Loop) -> Iterator[Breach]:
    if not loop.weight_decay and not loop.value("prior"):
        yield Breach(
            "prior dropped",
            "neither weight decay nor a prior in the loss: the prior is flat, and where the data say nothing the "
            "parameters wander off",
            f"weight decay of p{SCALES[loop.loss_reduction]}/N for a normal prior of precision p",
        )
        return
    strength = loop.prior_strength()
    if strength is not None and not close(strength, 1.0):
        yield Breach(
            "prior tempered",
            f"the prior counts {say(strength)} times: its temperature is that of the likelihood divided by "
            f"{say(strength)}",
            f"the negative log prior in the loss times {SCALES[loop.loss_reduction].lstrip('*') or '1'}/N"
            if loop.prior is not None
            else f"weight_decay={say(loop.weight_decay / strength)}",
        )


def _gradient(loop: Loop) -> Iterator[Breach]:
    added, injected = loop.gradient_temperature(), loop.noise_temperature()
    if added is not None and injected and abs(added) > CLOSE * injected:
        if loop.corrected:
            why = f"the noise that minibatches do not bring is made up for: the temperature falls by {say(-added)}"
        else:
            why = f"it adds {say(added)} to the temperature of the injected noise, {say(injected)}"
        yield Breach(
            "gradient noise not accounted for",
            why,
            "a lower rate or larger minibatches; or isosgd.ISGD, which makes it part of the noise it needs",
        )
    if loop.clipping is not None:
        yield Breach(
            "gradient clipped",
            f"gradients longer than {say(loop.clipping)} are cut, so that the pull back to the mode stops growing: "
            "tails are too heavy, and clipped minibatch gradients are not unbiased",
            "lower the rate instead, or see that the limit is never reached while draws are kept",
        )
    if loop.minibatches == "epoch":
        yield Breach(
            "minibatches without replacement",
            "the noise of successive minibatches cancels over an epoch, so that gradients heat the chain less than "
            "Var(g) says; what relies on that noise (SGD on its own, I-SGD) comes out too narrow",
            "draw minibatches independently: RandomSampler(data, replacement=True)",
        )


def _discretisation(loop: Loop) -> Iterator[Breach]:
    if loop.curvature is None or loop.noise is None or not loop.sigma:
        return
    exact = temperature_at(loop, loop.curvature)
    limit = loop.noise_temperature()
    if math.isinf(exact):
        yield Breach("unstable", f"at curvature {say(loop.curvature)} the steps diverge", "a lower rate")
    elif limit and loop.refresh_every is None and not close(exact, limit):
        yield Breach(
            "steps too long",
            f"at curvature {say(loop.curvature)} discrete steps alone make variances {say(exact / limit)} times as "
            "large as they should be",
            f"a rate below {say(2 * (2 - loop.friction) * CLOSE / (loop.scale * loop.curvature))}",
        )


def _layers(loop: Loop) -> Iterator[Breach]:
    if loop.batchnorm:
        yield Breach(
            "BatchNorm in training mode",
            "an example's loss depends on the others in its minibatch, so that the loss is no sum over examples and "
            "its gradient not that of any fixed potential; running statistics belong to no draw",
            "GroupNorm or another normalisation by example; or frozen statistics, refreshed for each draw",
        )
    if loop.dropout:
        yield Breach(
            "stochastic layers",
            "dropout draws another network in every step: the potential is an average over networks, and its noise "
            "heats the chain beyond what is stated",
            "leave dropout out: the posterior is the regulariser",
        )
    if loop.augmentation:
        yield Breach(
            "augmentation",
            "augmented inputs are no N observations: the potential is the mean loss over all augmentations, times N, "
            "which is no likelihood (a cold posterior often fits best), and their noise adds to that of minibatches",
            "sample without augmentation, or choose T on held-out data and say so",
        )


def _bookkeeping(loop: Loop) -> Iterator[Breach]:
    if loop.burn_in and loop.counter == "tensor" and loop.num_tensors > 1:
        yield Breach(
            "counter advanced once per tensor",
            f"with {loop.num_tensors} tensors a burn-in of {loop.burn_in} ends after "
            f"{math.ceil(loop.burn_in / loop.num_tensors)} steps, in the middle of one when it does not divide: what "
            "was to be adapted is not, and draws count that should not",
            "count steps outside of the loop over tensors",
        )
    if not loop.counter_saved:
        yield Breach(
            "counter not saved",
            "the count of the burn-in is no part of the state: a chain that is resumed adapts again, or starts to "
            "sample at another time",
            "keep it in the optimizer's state or parameter groups, which state_dict() saves",
        )
