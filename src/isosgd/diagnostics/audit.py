"""What does a script really sample? State the tempered posterior of a sampler, an optimizer or a described loop.

`audit` works it out from the step (see `isosgd.diagnostics.auditing.loop` for the formulas and where they come from),
lists what keeps the loop from the posterior that is meant, and can run it on a posterior that is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.diagnostics.auditing.breaches import Breach
from isosgd.diagnostics.auditing.causes import causes, close, say
from isosgd.diagnostics.auditing.conjugate import Conjugate, Factory, Measured, warm
from isosgd.diagnostics.auditing.loop import NAMES, Loop
from isosgd.diagnostics.auditing.probes import probe
from isosgd.diagnostics.auditing.reading import read
from isosgd.diagnostics.auditing.verdict import Audit, judge, stated
from isosgd.samplers import Sampler

__all__ = ["Audit", "Breach", "Loop", "Measured", "audit"]


def audit(
    optimizer: Optimizer | Callable[[list[Tensor]], Optimizer] | None = None,
    *,
    num_data: Any = None,
    check: bool = False,
    seed: int = 0,
    **description: Any,
) -> Audit:
    """State the tempered posterior that a loop samples, and what is wrong with it.

    Args:
        optimizer: a sampler of ours, a torch optimizer, or a function that makes one from a list of tensors; None when
            everything is described.
        num_data: N, or the data themselves: a data set, a loader, a tensor or a tuple of tensors. A sampler that was
            told another N is found out.
        check: run the optimizer, which must be given as a function, on tensors of our own: measure its temperature on
            a known posterior, and look for noise used twice, counters that miscount and state that is not saved.
        seed: of that run.
        description: the fields of `isosgd.diagnostics.audit.Loop`: ``noise``, ``lr``, ``loss_reduction``,
            ``batch_size``, ``weight_decay`` and so on, and ``friction`` for ``1 - momentum``. They go before what the
            optimizer says of itself.

    Example:
        >>> found = audit(noise="sqrt(2*lr)*0.01", lr=1e-3, loss_reduction="mean", num_data=60000, weight_decay=5e-4)
        >>> print(str(found).splitlines()[0])
        noise sqrt(2*lr)*0.01 on a mean loss, N=60000: temperature 6.0, prior precision 30
        >>> print(*(breach.name for breach in found.breaches))
        N missing in noise
    """
    given = _checked(description)
    make = None if optimizer is None or isinstance(optimizer, Optimizer) else optimizer
    if make is not None and not callable(make):
        raise TypeError(f"optimizer is of type {type(make).__name__}: pass an optimizer, or a function that makes one")
    if check and make is None:
        raise TypeError(
            "check=True runs the optimizer on tensors of its own: pass a function that makes it from a list of tensors,"
            " such as lambda params: MySGLD(params, lr=1e-3)"
        )
    if num_data is not None:
        given["num_data"] = _count(num_data)
    if make is not None:
        optimizer = _made(make, given)
    if optimizer is None:
        return judge(_loop(given), [])
    assert isinstance(optimizer, Optimizer)
    groups, extra = read(optimizer)
    loops = [_loop({**group, **given}, optimizer) for group in groups]
    name = type(optimizer).__name__
    if not check or make is None:
        return judge(loops[0], [*extra, *_differing(loops)], name=name, make=make)
    loop, probed = probe(make, loops[0])
    found = judge(loop, [*extra, *_differing(loops)], name=name, make=make).measure(seed)
    assert found.measured is not None
    known = {breach.name for breach in found.breaches}
    probed = [breach for breach in probed if breach.name not in known]
    return replace(found, breaches=[*found.breaches, *probed, *_contradicted(loop, found.measured)])


def _checked(description: dict[str, Any]) -> dict[str, Any]:
    given = dict(description)
    if "friction" in given:
        if "momentum" in given:
            raise TypeError("friction is 1 - momentum: give one of them")
        friction = given.pop("friction")
        if not 0 < friction <= 1:
            raise ValueError(f"friction = {friction} must lie in (0, 1]; 1 is no momentum")
        given["momentum"] = 1.0 - friction
    for name in given:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            mend = f"did you mean {near[0]}?" if near else f"known are {', '.join(NAMES)}"
            raise TypeError(f"{name} is not part of a description; {mend}")
    return given


def _loop(given: dict[str, Any], optimizer: Optimizer | None = None) -> Loop:
    given = dict(given)
    if isinstance(optimizer, Sampler):
        count = given["num_data"] = given.get("num_data") or given["told_num_data"]
        # The contract of every sampler: the loss has the negative log prior, divided by N.
        given.setdefault("prior", 1.0 / count)
    needed = [f.name for f in fields(Loop) if f.default is MISSING]
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given: a temperature cannot be told without")
    return Loop(**given)


def _count(data: Any) -> int:
    """N of an integer, a tensor, a tuple of tensors, a data set or a loader."""
    if isinstance(data, int):
        return data
    data = getattr(data, "dataset", data)
    if isinstance(data, tuple | list) and data and isinstance(data[0], Tensor):
        data = data[0]
    try:
        return len(data)
    except TypeError as error:
        raise TypeError(f"num_data of type {type(data).__name__} has no length: give the number of examples") from error


def _made(make: Factory, given: dict[str, Any]) -> Optimizer:
    """An optimizer to read, its rate set on a plain target when it is a sampler that has none."""
    theta = torch.zeros(64, dtype=torch.float64).requires_grad_()
    optimizer = make([theta])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the function made a {type(optimizer).__name__}, not an optimizer")
    count = given.get("num_data") or optimizer.param_groups[0].get("num_data")
    if isinstance(optimizer, Sampler) and count:
        curvature = given.get("curvature") or 1.0
        plain = Loop(num_data=count, lr=1e-3, noise=None, curvature=curvature, gradient_noise=curvature / 32)
        with torch.random.fork_rng(devices=[]):
            warm(optimizer, theta, Conjugate(plain, torch.Generator().manual_seed(0), len(theta)))
    return optimizer


def _differing(loops: list[Loop]) -> list[Breach]:
    seen = [(stated(loop)[0], loop.precision) for loop in loops]
    if all(_same(a, b) for pair in seen for a, b in zip(pair, seen[0], strict=True)):
        return []
    listed = "; ".join(
        f"group {i}: temperature {'unknown' if t is None else say(t)}, prior precision {'?' if p is None else say(p)}"
        for i, (t, p) in enumerate(seen)
    )
    return [Breach("groups differ", f"there is no one temperature ({listed})", "the same N and T in all groups")]


def _same(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else close(a, b, 0.01)


def _contradicted(loop: Loop, seen: Measured) -> list[Breach]:
    """What the run says against what is meant, or was described."""
    room = 4.0 * seen.error / max(seen.temperature, 1e-300) + 0.05
    if seen.expected is not None:
        if close(seen.temperature, seen.expected, room):
            return []
        why = f"temperature {say(seen.temperature)} ± {say(seen.error)} was measured and {say(seen.expected)} expected"
        return [Breach("not as described", why, "describe what the optimizer does, or mend it")]
    heat = seen.temperature - loop.temperature_of(velocity=(loop.lr * loop.scale) ** 2 * seen.gradient_noise)
    if close(heat, loop.meant, room):
        return []
    why = f"temperature {say(heat)} ± {say(seen.error)} was measured where {say(loop.meant)} is meant"
    named = causes(loop, heat / loop.meant, room) or [("temperature", "the noise does not fit the rate and the loss")]
    return [Breach(name, f"{cause}; {why}", f"noise of standard deviation {loop.right_noise}") for name, cause in named]
