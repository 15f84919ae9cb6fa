"""The verdict on a loop: its temperature and prior, what is wrong with it, and all that in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from isosgd.diagnostics.auditing.breaches import Breach, breaches
from isosgd.diagnostics.auditing.causes import say
from isosgd.diagnostics.auditing.conjugate import Factory, Measured, measure
from isosgd.diagnostics.auditing.loop import Loop
from isosgd.diagnostics.auditing.recursion import temperature_at


@dataclass(frozen=True)
class Audit:
    """What a loop samples: ``exp(-(L + p |theta|^2 / 2) / T)``, L the negative log likelihood of all data.

    Attributes:
        loop: the description that was judged.
        temperature: T, with the heat of gradient noise where that is known; None when it is not known at all.
        injected: the part of T that injected noise brings.
        from_gradients: the part that gradient noise brings; None when its variance is not known.
        prior_precision: p; None when the prior is in a loss that was not described.
        prior_temperature: T divided by how many times the prior that is meant is counted; None when not known.
        breaches: what keeps the draws from the posterior that is meant: (name, explanation, mend).
        measured: what a run on a known posterior showed, when there was one.
        name: of the optimizer.
    """

    loop: Loop
    temperature: float | None
    injected: float | None
    from_gradients: float | None
    prior_precision: float | None
    prior_temperature: float | None
    breaches: list[Breach]
    measured: Measured | None = None
    name: str | None = None
    make: Factory | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.breaches

    def measure(self, seed: int = 0, relaxations: float = 40.0) -> Audit:
        """Run the loop on a conjugate Gaussian target, under real minibatch noise, and add what it shows.

        An optimizer that was passed as a function is run itself, otherwise its description is.
        """
        found = measure(self.loop, self.make, seed=seed, relaxations=relaxations)
        return replace(self, measured=found)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it: without NaN and infinities."""
        told = {
            f.name: getattr(self.loop, f.name) for f in fields(self.loop) if getattr(self.loop, f.name) != f.default
        }
        numbers = ("temperature", "injected", "from_gradients", "prior_precision", "prior_temperature")
        return {
            "optimizer": self.name,
            "description": told,
            **{name: _finite(getattr(self, name)) for name in numbers},
            "clean": self.clean,
            "breaches": [breach._asdict() for breach in self.breaches],
            "measured": None if self.measured is None else self.measured.as_dict(),
        }

    def __str__(self) -> str:
        lines = [f"{self._what()}: {self._verdict()}", *self._remarks()]
        if self.clean:
            return "\n".join([*lines, "no breach found"])
        listed = [f"- {b.name}: {b.explanation}.\n  Mend: {b.mend}." for b in self.breaches]
        return "\n".join([*lines, "1 breach:" if len(listed) == 1 else f"{len(listed)} breaches:", *listed])

    def _what(self) -> str:
        loop = self.loop
        if self.name is not None:
            noise = self.name
        elif loop.noise is None:
            noise = "unknown noise"
        else:
            noise = f"noise {loop.noise}" if loop.sigma else "no noise"
        loss = {"mean": "a mean loss", "sum": "a summed loss", "full": "a full-data loss"}[loop.loss_reduction]
        momentum = f", momentum {loop.momentum:g}" if loop.momentum else ""
        return f"{noise} on {loss}{momentum}, N={loop.num_data}"

    def _verdict(self) -> str:
        temperature = "unknown" if self.temperature is None else _heat(self.temperature)
        prior = "that of the loss" if self.prior_precision is None else say(self.prior_precision)
        return f"temperature {temperature}, prior precision {prior}"

    def _remarks(self) -> list[str]:
        found, loop = [], self.loop
        if self.temperature and self.prior_precision:
            law = f"exp(-(L + {say(self.prior_precision)} |theta|^2 / 2) / {_heat(self.temperature)})"
            prior = f"N(0, {say(self.temperature / self.prior_precision)})"
            found.append(
                f"draws are from {law}, L the negative log likelihood of all data: the prior counts as {prior}"
            )
        if self.from_gradients is None and loop.noise is not None:
            each = loop.temperature_of(velocity=(loop.lr * loop.scale) ** 2)
            found.append(f"gradient noise, if Var(g) = v for a mean loss, adds {say(each)} v to the temperature")
        elif self.from_gradients:
            found.append(f"of the temperature, {say(self.from_gradients)} comes from gradient noise")
        if self.measured is not None:
            seen = self.measured
            against = (
                "" if seen.expected is None else f" ({_heat(seen.expected)} expected there, with its gradient noise)"
            )
            found.append(
                f"measured on a conjugate target: temperature {_heat(seen.temperature)} ± {say(seen.error)}{against}"
            )
        return found


def stated(loop: Loop) -> tuple[float | None, float | None, float | None]:
    """The temperature, the part of it that is injected, and the part from gradient noise."""
    injected, added = loop.noise_temperature(), loop.gradient_temperature()
    if injected is None:
        return None, None, added
    if loop.curvature is not None:  # discrete steps reckoned in
        injected = temperature_at(loop, loop.curvature)
        if loop.gradient_noise and not loop.corrected:
            added = (
                temperature_at(loop, loop.curvature, loop.gradient_noise) - injected if math.isfinite(injected) else 0.0
            )
            added *= loop.epoch_share() if loop.minibatches == "epoch" else 1.0
    if not injected and added is None:
        return None, injected, None
    return injected + (added or 0.0), injected, added


def judge(loop: Loop, extra: list[Breach], name: str | None = None, make: Factory | None = None) -> Audit:
    """The verdict on a description; ``extra`` are breaches that it does not show."""
    temperature, injected, added = stated(loop)
    strength = loop.prior_strength()
    prior = temperature / strength if temperature is not None and strength else None
    found = [*breaches(loop), *extra]
    return Audit(loop, temperature, injected, added, loop.precision, prior, found, name=name, make=make)


def _heat(value: float) -> str:
    said = say(value)
    return f"{said}.0" if said.isdigit() else said


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
