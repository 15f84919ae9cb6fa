"""`isosgd.audit`, and its result."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.diagnostics.audit.findings import Finding, close, findings, number, wrong_noise
from isosgd.diagnostics.audit.loop import NAMES, Loop
from isosgd.diagnostics.audit.measure import Measured, measure
from isosgd.diagnostics.audit.reading import UNSET, read
from isosgd.diagnostics.summary import json_values
from isosgd.samplers import Sampler


@dataclass(frozen=True)
class Audit:
    """What a loop samples: ``exp(-(L + p |theta|^2 / 2) / T)``, L the negative log likelihood of all data.

    Attributes:
        loop: the description that was judged.
        temperature: T, including gradient noise if its variance is known; None if unknown.
        injected: the part of T from injected noise.
        from_gradients: the part of T from gradient noise; None if its variance is unknown.
        prior_precision: p; None if the prior is in a loss that was not described.
        prior_temperature: T divided by how many times the intended prior is counted; None if unknown.
        findings: why the draws are not from the target posterior: (name, explanation, fix).
        measured: what a run on a known posterior showed, if there was one.
        name: of the optimizer.
    """

    loop: Loop
    temperature: float | None
    injected: float | None
    from_gradients: float | None
    prior_precision: float | None
    prior_temperature: float | None
    findings: list[Finding]
    measured: Measured | None = None
    name: str | None = None

    @property
    def clean(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Plain values that strict JSON can hold; numbers that are not finite are None."""
        values = asdict(self.loop)
        numbers = ("temperature", "injected", "from_gradients", "prior_precision", "prior_temperature")
        found = {
            "optimizer": self.name,
            "description": {f.name: values[f.name] for f in fields(self.loop) if values[f.name] != f.default},
            **{name: getattr(self, name) for name in numbers},
            "clean": self.clean,
            "findings": [finding._asdict() for finding in self.findings],
            "measured": None if self.measured is None else asdict(self.measured),
        }
        return json_values(found)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        loop = self.loop
        described = "unknown noise" if loop.noise is None else f"noise {number(loop.noise)}"
        loss = {"mean": "a mean loss", "sum": "a summed loss", "full": "a full-data loss"}[loop.loss_reduction]
        momentum = f", momentum {loop.momentum:g}" if loop.momentum else ""
        temperature = "unknown" if self.temperature is None else _degrees(self.temperature)
        prior = "that of the loss" if self.prior_precision is None else number(self.prior_precision)
        lines = [
            f"{self.name or described} on {loss}{momentum}, N={loop.num_data}: "
            f"temperature {temperature}, prior precision {prior}"
        ]
        if self.temperature and self.prior_precision:
            density = f"exp(-(L + {prior} |theta|^2 / 2) / {temperature})"
            normal = f"N(0, {number(self.temperature / self.prior_precision)})"
            lines.append(f"draws are from {density}, L the negative log likelihood of all data: the prior is {normal}")
        if self.from_gradients is None and loop.noise is not None and loop.lr != UNSET:
            each = number(loop.temperature_of(gradients=1.0))
            lines.append(f"gradient noise of variance v (of a mean loss) adds {each} v to the temperature")
        elif self.from_gradients:
            lines.append(f"{number(self.from_gradients)} of the temperature comes from gradient noise")
        if (seen := self.measured) is not None:
            expected = f" (expected {_degrees(seen.expected)}, with its gradient noise)" if seen.expected else ""
            found = f"{_degrees(seen.temperature)} ± {number(seen.error)}"
            lines.append(f"measured on a conjugate target: {found}{expected}")
        count = len(self.findings)
        lines.append("no findings" if not count else "1 finding:" if count == 1 else f"{count} findings:")
        return "\n".join([*lines, *(f"- {f.name}: {f.explanation}.\n  Fix: {f.fix}." for f in self.findings)])


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
        optimizer: a sampler of ours, a torch optimizer, or a function that makes one from a list of tensors; None if
            everything is described.
        num_data: N, or the data themselves: a data set, a loader, a tensor or a tuple of tensors. Finds a sampler that
            was given another N.
        check: run the optimizer, which must be given as a function, and measure its temperature on a known posterior.
        seed: of that run.
        description: the fields of `isosgd.diagnostics.audit.Loop`: ``noise``, ``lr``, ``loss_reduction``,
            ``batch_size``, ``weight_decay`` and so on, and ``friction`` for ``1 - momentum``. They take precedence over
            what the optimizer says about itself.

    Example:
        >>> found = audit(noise=(2 * 1e-3) ** 0.5, lr=1e-3, loss_reduction="mean", num_data=60000, weight_decay=5e-4)
        >>> print(str(found).splitlines()[0])
        noise 0.0447 on a mean loss, N=60000: temperature 60,000, prior precision 30
        >>> print(*(finding.name for finding in found.findings))
        N missing in noise
    """
    given = _checked(description)
    if num_data is not None:
        given["num_data"] = _count(num_data)
    if check and (optimizer is None or isinstance(optimizer, Optimizer)):
        raise TypeError(
            "check=True runs the optimizer on its own tensors: pass a function that makes it from a list of tensors,"
            " such as lambda params: MySGLD(params, lr=1e-3)"
        )
    if optimizer is None:
        return _judged(_loop(given), [])
    make = None
    if not isinstance(optimizer, Optimizer):
        make = optimizer
        if not callable(make):
            kind = type(make).__name__
            raise TypeError(f"optimizer is of type {kind}: pass an optimizer, or a function that makes one")
        optimizer = make([torch.zeros(64, dtype=torch.float64).requires_grad_()])
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"the function made a {type(optimizer).__name__}, not an optimizer")
    groups, extra = read(optimizer)
    loops = [_loop({**group, **given}, optimizer) for group in groups]
    found = _judged(loops[0], [*extra, *_differing(loops)], type(optimizer).__name__)
    if not check or make is None:
        return found
    measured = measure(found.loop, make, seed)
    contradicted = _contradicted(found.loop, measured)
    return replace(found, measured=measured, findings=[*found.findings, *contradicted])


def _judged(loop: Loop, extra: list[Finding], name: str | None = None) -> Audit:
    """The audit of a description; ``extra`` are findings that it does not show."""
    temperature, injected, added = loop.temperatures()
    strength = loop.prior_strength()
    prior = temperature / strength if temperature is not None and strength else None
    found = [*findings(loop), *extra]
    return Audit(loop, temperature, injected, added, loop.precision, prior, found, name=name)


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
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(NAMES)}"
            raise TypeError(f"{name} is not a field of a description; {hint}")
    return given


def _loop(given: dict[str, Any], optimizer: Optimizer | None = None) -> Loop:
    given = dict(given)
    if isinstance(optimizer, Sampler):
        count = given["num_data"] = given.get("num_data") or given["assumed_num_data"]
        # The contract of every sampler: the loss contains the negative log prior, divided by N, or weight_decay is it.
        given.setdefault("prior", 0.0 if given["weight_decay"] else 1.0 / count)
    missing = [f.name for f in fields(Loop) if f.default is MISSING and given.get(f.name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given: the temperature depends on it")
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


def _differing(loops: list[Loop]) -> list[Finding]:
    def same(a: float | None, b: float | None) -> bool:
        return a == b if a is None or b is None else close(a, b, 0.01)

    seen = [(loop.temperatures()[0], loop.precision) for loop in loops]
    if all(same(a, b) for pair in seen for a, b in zip(pair, seen[0], strict=True)):
        return []
    listed = "; ".join(
        f"group {i}: temperature {'unknown' if t is None else number(t)}, prior precision "
        f"{'unknown' if p is None else number(p)}"
        for i, (t, p) in enumerate(seen)
    )
    return [Finding("groups differ", f"there is no single temperature ({listed})", "the same N and T in all groups")]


def _contradicted(loop: Loop, seen: Measured) -> list[Finding]:
    """Where the run contradicts the description or the target temperature."""
    room = 4.0 * seen.error / max(seen.temperature, 1e-300) + 0.05
    measured = f"measured temperature {number(seen.temperature)} ± {number(seen.error)}"
    if seen.expected is not None:
        if close(seen.temperature, seen.expected, room):
            return []
        why = f"{measured}, expected {number(seen.expected)}"
        return [Finding("not as described", why, "correct the description, or the optimizer")]
    heat = seen.temperature - loop.temperature_of(gradients=seen.gradient_noise)
    if close(heat, loop.target_temperature, room):
        return []
    instead = f"{measured} instead of {number(loop.target_temperature)}"
    return list(wrong_noise(loop, heat, loop.target_temperature, instead, room))


def _degrees(value: float) -> str:
    text = number(value)
    return f"{text}.0" if text.isdigit() else text
