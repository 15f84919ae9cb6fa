"""How large a shaped Lambda is, from the noise that it has seen and the curvature that was measured meanwhile.

The rule says how large it should be (`isosgd.samplers.rule`); here is what is believed of the curvature, and how fast a
Lambda may follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.samplers.rule import Rule
from isosgd.samplers.shaped import EXCESS, Shaped
from isosgd.samplers.steppers import Number

LEAST_STRETCH = 0.25  # true curvature over Fisher information, at the least that is believed
SLACK = 1.2  # by how much Lambda may be too small before it is made larger between two windows
MOST_RELAXED = 10.0  # factor by which Lambda may shrink when it was stretched too much


def resize(
    shaped: Shaped, rule: Rule, curvature: Sequence[Number] | None, rise: float, prior: Sequence[Tensor] | None
) -> None:
    """Lambda from the noise seen and the curvature; the arguments are those of `ShapedLambda.adapt`."""
    if not shaped.known and shaped.seen < shaped.least:
        raise RuntimeError(
            f"structure {shaped.name!r} has seen {shaped.seen} noise vectors and needs {shaped.least} for a first "
            "Lambda: pass more to observe() before adapt()"
        )
    if curvature is not None:
        found = torch.stack([torch.as_tensor(h).to(shaped.factor).expand_as(shaped.factor) for h in curvature], -1)
        if shaped.known:
            _stretch(shaped, rule, found, rise)
        else:
            for i, slot in enumerate(shaped.slots):
                shaped.fallback[:, slot] = found[:, i : i + 1]
    if rise > 1.0 and shaped.seen >= shaped.least:
        parts = None if prior is None else shaped.flatten(prior)
        zero = torch.zeros_like(shaped.fallback)
        shaped.settle(rule, zero if parts is None else parts / rule.num_data, rise)


def _stretch(shaped: Shaped, rule: Rule, curvature: Tensor, rise: float) -> None:
    """Take in how much larger the curvature is than the Fisher information says, in the worst direction."""
    stretch = (curvature * shaped.group_rates().to(curvature)).amax(-1) / shaped.unit_rate
    stretch = torch.where(shaped.unit_rate > 0, stretch, shaped.stretch)
    if rise > 1.0:
        shaped.stretch = stretch.clamp_min(LEAST_STRETCH)
    if rise == 1.0 or shaped.seen < shaped.least:
        wanted = rule.factor(stretch)
        late = wanted > SLACK * shaped.factor
        shaped.stretch = torch.where(late, stretch, shaped.stretch)
        if bool(late.any()):
            shaped.slow(torch.where(late, wanted / shaped.factor, 1.0))


def relax(shaped: Shaped, rule: Rule, stretch: Tensor) -> None:
    """Take back what a new Lambda was stretched too much, see `ShapedLambda.relax`."""
    stretch = torch.minimum(stretch.to(shaped.stretch).clamp_min(LEAST_STRETCH), shaped.stretch)
    shaped.slow((rule.factor(stretch) / rule.factor(shaped.stretch)).clamp_min(1.0 / MOST_RELAXED))
    shaped.stretch = stretch


def cool(shaped: Shaped) -> None:
    """Slow down where noise that the shape does not express would raise the temperature."""
    shaped.slow((shaped.excess() / EXCESS).clamp_min(1.0))
