"""Why a noise has the temperature it has: which of N, n, T, lr and the friction stands in it with a wrong power."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from isosgd.diagnostics.auditing.loop import Loop

CLOSE = 0.05  # relative error of a temperature that is let pass


def say(value: float) -> str:
    """A number for a sentence: three figures, and thousands told apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.3g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def close(found: float, wanted: float, within: float = CLOSE) -> bool:
    """Whether two temperatures are one."""
    return math.isclose(found, wanted, rel_tol=within)


def causes(loop: Loop, ratio: float, within: float = 0.01) -> list[tuple[str, str]]:
    """Names and explanations of what is wrong with a noise.

    Args:
        loop: the rule.
        ratio: its temperature over the one that is meant.
        within: how well it is known.

    Example:
        >>> causes(Loop(num_data=100, lr=0.1, noise="sqrt(2*lr)"), 100.0)[0][0]
        'N missing in noise'
    """
    return list(_by_power(loop)) or list(_by_value(loop, ratio, within))


def power(loop: Loop, name: str) -> float | None:
    """The power of one quantity in the temperature of a noise that is written as a rule; None for a plain number."""
    if not isinstance(loop.noise, str) or not loop.sigma:
        return None
    fixed = replace(loop, refresh_every=None, momentum_noise=None, curvature=None, told_num_data=None)
    if name == "N":
        other = replace(fixed, num_data=2 * loop.num_data)
    elif name == "n":
        if loop.batch_size is None:
            return None
        other = replace(fixed, batch_size=2 * loop.batch_size, num_data=2 * loop.num_data)
        fixed = replace(fixed, num_data=2 * loop.num_data)  # a batch never exceeds the data
    elif name == "T":
        told = loop.value("temperature")
        fixed, other = replace(fixed, temperature=told), replace(fixed, temperature=2 * told)
    elif name == "lr":
        other = replace(fixed, lr=2 * loop.lr)
    elif loop.momentum:
        other = replace(fixed, momentum=(1 + loop.momentum) / 2)
    else:
        return None
    first, second = fixed.noise_temperature(), other.noise_temperature()
    assert first is not None and second is not None
    step = math.log(0.5 if name == "a" else 2.0)
    return round(math.log(second / first) / step, 3) if first and second else None


_CAUSES: dict[str, dict[float, tuple[str, str]]] = {
    "N": {
        1.0: ("N missing in noise", "the noise leaves out the number of examples: the temperature grows with N"),
        -1.0: ("N applied twice", "the number of examples is divided out twice: the temperature falls as 1/N"),
    },
    "T": {
        0.0: ("T missing in noise", "the noise does not depend on the temperature that is set"),
        2.0: ("T applied twice", "the temperature enters squared"),
    },
    "lr": {},
    "n": {
        -1.0: ("n missing in noise", "the loss is summed over the minibatch, and the noise is that of a mean loss"),
        1.0: ("n applied where it does not belong", "the noise grows with the minibatch, the gradient does not"),
    },
    "a": {
        -1.0: ("friction missing in noise", "momentum 1 - a carries each noise 1/a steps on, which the noise ignores"),
        1.0: (
            "momentum speeds up the gradient alone",
            "each gradient acts 1/a times over through the momentum, and the noise, added to the parameters, once",
        ),
    },
}
_WANTED = {"N": 0.0, "T": 1.0, "lr": 0.0, "n": 0.0, "a": 0.0}


def _by_power(loop: Loop) -> Iterator[tuple[str, str]]:
    for name, wanted in _WANTED.items():
        found = power(loop, name)
        if found is None or abs(found - wanted) < 1e-2 or (name == "T" and loop.value("temperature") == 1.0):
            continue
        if name == "T" and not close(loop.value("temperature"), loop.meant):
            continue  # T = 1/N: its place is judged with that of N
        told = _CAUSES[name].get(round(found, 1))
        if told is None and name == "lr":
            told = "noise not in step with lr", f"the temperature goes with lr^{found:g}: it changes with the rate"
        yield told or (f"wrong power of {name}", f"the temperature goes with {name}^{found:g}")


def _by_value(loop: Loop, ratio: float, within: float) -> Iterator[tuple[str, str]]:
    """For a noise that is a plain number: whether it is off by a factor that has a name."""
    told = loop.value("temperature")
    values = {("N", 1.0): loop.num_data, ("N", -1.0): 1 / loop.num_data}
    if told and told != 1:
        values |= {("T", 2.0): told, ("T", 0.0): 1 / told}
    if loop.batch_size:
        values |= {("n", -1.0): 1 / loop.batch_size, ("n", 1.0): loop.batch_size}
    if loop.momentum:
        values |= {("a", -1.0): 1 / loop.friction, ("a", 1.0): loop.friction}
    for (name, exponent), value in values.items():
        if value != 1 and close(ratio, value, within):
            yield _CAUSES[name][exponent]
            return
