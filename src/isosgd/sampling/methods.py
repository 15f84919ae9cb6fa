"""Every method that `isosgd.sample` knows by name: samplers of the posterior, and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from isosgd.baselines import BASELINES
from isosgd.samplers import REGISTRY, Method

EVERY: Mapping[str, Method] = MappingProxyType({**REGISTRY, **BASELINES})


def methods() -> list[dict[str, Any]]:
    """Every method with its family, what it targets, where it departs from its paper, and its settings and defaults.

    Those of the families ``langevin`` and ``hamiltonian`` are also optimizers, the classes in `isosgd.METHODS`. That of
    the family ``metropolis``, HMC, takes all data for every gradient, and runs through `isosgd.sample`. Those of the
    family ``baseline`` are not samplers of the posterior: they yield draws of something else, for comparison.

    Example:
        >>> {row["family"] for row in methods()} == {"langevin", "hamiltonian", "metropolis", "baseline"}
        True
        >>> swag = next(row for row in methods() if row["name"] == "swag")
        >>> swag["settings"]["rank"]
        20
    """
    return [method.row(name) for name, method in EVERY.items()]
