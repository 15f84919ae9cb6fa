"""How fast chains forget where they were, direction by direction, and what another batch size would do to it.

Along a direction of curvature h, a step of the rate r takes the share ``a = r h`` of the distance to the mean away: the
past is forgotten within ``1 / a`` steps, ``n / (N a)`` epochs, and an effective draw costs ``2 / a`` gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry
from isosgd.geometry.rule import Rule

SHOWN = 9  # rates, from the largest to the smallest
OCTAVES = 3  # how often a batch is halved and doubled


def directions(geometry: Geometry, rule: Rule) -> list[dict[str, Any]]:
    """Of each chain, what is known of its directions.

    Args:
        geometry: Lambda.
        rule: by which it was sized.

    Returns:
        ``count``: of directions. ``rates``: a few, from the largest to the smallest, in the parameters' own units.
        ``epochs_to_forget``: along the direction that forgets fastest and along the slowest, as far as curvature was
        measured along directions (``full``); by the curvature H that Lambda was made of for other shapes.
    """
    rates, shares = geometry.principal_rates(), geometry.rate_curvatures()
    found = []
    for own, pulls in zip(rates.double().cpu(), shares.double().cpu(), strict=True):
        falling = own.sort(descending=True).values
        picked = falling[
            torch.linspace(0, len(falling) - 1, min(SHOWN, len(falling)), dtype=torch.float64).round().long()
        ]
        ends = (rule.batch_size / (rule.num_data * a) for a in (float(pulls.max()), float(pulls.min())))
        found.append({"count": len(own), "rates": picked.tolist(), "epochs_to_forget": list(ends)})
    return found


def batch_sizes(rule: Rule, curvature_ratio: Tensor) -> list[dict[str, float]]:
    """What minibatches of other sizes would cost and gain, by the rule, for directions whose curvature is H.

    Args:
        rule: of the size there is.
        curvature_ratio: the true curvature over H in the worst direction, of one chain.

    Returns:
        For each ``batch_size``: ``rate_curvature``, a; ``noise_share``, that of gradient noise in Lambda; and
        ``epochs_to_forget``, ``gradients_per_draw`` and ``examples_per_draw``, for each effective draw.

    Example:
        >>> rule = Rule(num_data=1000, batch_size=32, temperature=1.0, bias=0.02, averaged=True)
        >>> for row in batch_sizes(rule, torch.ones(()))[::2]:
        ...     print(row["batch_size"], round(row["gradients_per_draw"]), round(row["examples_per_draw"]))
        4 500 2000
        16 125 2000
        64 31 2000
        256 14 3578
    """
    least, most = max(2, rule.batch_size >> OCTAVES), min(rule.num_data, rule.batch_size << OCTAVES)
    sizes = {rule.batch_size << k for k in range(OCTAVES + 1)} | {rule.batch_size >> k for k in range(OCTAVES + 1)}
    rows = []
    for n in sorted({rule.batch_size} | {min(max(n, least), most) for n in sizes}):
        factor = float(replace(rule, batch_size=n).factor(curvature_ratio))
        a = rule.scale / factor
        rows.append(
            {
                "batch_size": n,
                "rate_curvature": a,
                "noise_share": 0.5 / (n * factor),
                "epochs_to_forget": n / (rule.num_data * a),
                "gradients_per_draw": 2.0 / a,
                "examples_per_draw": 2.0 * n / a,
            }
        )
    return rows
