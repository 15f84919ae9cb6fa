"""Have the chains converged? Judged as draws arrive, on functions such as predictions and the log likelihood.

Weights of a network need not mix: units can be swapped and signs changed without changing what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isosgd.diagnostics.traces import LEAST_DRAWS, Array, as_array, ess, rhat

RHAT, ESS = 1.01, 400.0  # Vehtari et al. (2021)


class Convergence:
    """R-hat and effective draws of traces that grow.

    Chains of one group sample the same posterior and are compared with each other; groups, such as the splits of a
    data set, are not. A trace that is constant in a group is ignored, but a group in which no trace moves has not
    converged.

    Args:
        groups: the group of each chain, such as ``[0, 0, 1, 1]``; None for a single group.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> watch = Convergence(groups=[0, 0, 0, 0, 1, 1, 1, 1])
        >>> for _ in range(500):
        ...     watch.append(rng.standard_normal((8, 3)))  # 8 chains, 3 traces
        >>> watch.converged(), bool(watch.rhat() < 1.01), bool(watch.ess() > 1000)
        (True, True, True)
    """

    def __init__(self, groups: Sequence[int] | None = None) -> None:
        self._groups = None if groups is None else tuple(groups)
        if groups is not None and not self._groups:
            raise ValueError("groups is empty; name the group of each chain, or pass None")
        self._values: list[Array] = []
        self._dropped: set[int] = set()

    @property
    def draws(self) -> int:
        """Draws of each chain so far."""
        return len(self._values)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups with chains left, in order of first appearance."""
        return tuple(dict.fromkeys(group for chain, group in enumerate(self._labels) if chain not in self._dropped))

    def append(self, values: Any) -> None:
        """Add one draw of every chain.

        Args:
            values: ``[chains, traces]``; rows of dropped chains can hold anything.
        """
        row = as_array(values)
        if row.ndim != 2 or not row.size:
            raise ValueError(f"values of shape {list(row.shape)} must be [chains, traces]")
        if self._groups and len(row) != len(self._groups):
            raise ValueError(f"values has {len(row)} chains, but groups names those of {len(self._groups)}")
        if self._values and row.shape != self._values[0].shape:
            raise ValueError(f"values has shape {list(row.shape)}, but earlier draws {list(self._values[0].shape)}")
        bad = [chain for chain in np.nonzero(~np.isfinite(row).all(1))[0].tolist() if chain not in self._dropped]
        if bad:
            raise ValueError(f"chain {bad[0]} has values that are not finite; drop({bad[0]}) takes a chain out")
        self._values.append(row.copy())

    def drop(self, chain: int) -> None:
        """Leave a chain out, with all its draws, because it diverged."""
        if not 0 <= chain < len(self._labels):
            raise ValueError(f"there is no chain {chain!r}; there are {len(self._labels)}, numbered from 0")
        self._dropped.add(chain)

    def traces(self, group: int | None = None) -> Array:
        """Traces ``[chains, draws, traces]`` of the chains that are left, of one group or of all."""
        left = [k for k, label in enumerate(self._labels) if k not in self._dropped and group in (None, label)]
        if not left:
            raise ValueError(f"no chain is left in group {group!r}; groups with chains are {list(self.groups)}")
        return np.stack([row[left] for row in self._values], 1)

    def rhat(self, group: int | None = None) -> float:
        """Largest R-hat over traces, of one group or of all; not a number before there are four draws."""
        # fmax ignores constant traces, which are not a number; max does not ignore a group of such traces.
        return self._worst(lambda x: np.fmax.reduce(rhat(x)), np.max, group)

    def ess(self, group: int | None = None) -> float:
        """Smallest effective number of draws over traces, of one group or of all."""
        return self._worst(lambda x: np.fmin.reduce(ess(x)), np.min, group)

    def converged(self, rhat: float = RHAT, ess: float = ESS) -> bool:
        """Whether all traces of every group have at most this R-hat and at least that many effective draws."""
        if not rhat > 1:
            raise ValueError(f"rhat = {rhat!r} must be above 1, the value of chains that agree fully")
        if not ess > 0:
            raise ValueError(f"ess = {ess!r} must be positive")
        return self.ess() >= ess and self.rhat() <= rhat  # the cheaper one first

    def __str__(self) -> str:
        chains = len(self._labels) - len(self._dropped)
        dropped = f" ({len(self._dropped)} dropped)" if self._dropped else ""
        what = f"{self.draws} draws of {chains} chains{dropped}"
        if self.draws < LEAST_DRAWS or not chains:
            return f"{what}: too few to tell"
        return f"{what}: R-hat {self.rhat():.3f}, ESS {self.ess():,.0f}"

    @property
    def _labels(self) -> tuple[int, ...]:
        return self._groups or (0,) * (len(self._values[0]) if self._values else 0)

    def _worst(self, measure: Callable[[Array], Any], pick: Callable[..., Any], group: int | None) -> float:
        if group is not None and group not in self._labels:
            raise ValueError(f"there is no group {group!r}; there are {list(dict.fromkeys(self._labels))}")
        chosen = [label for label in self.groups if group in (None, label)]
        if self.draws < LEAST_DRAWS or not chosen:
            return math.nan
        return float(pick([measure(self.traces(label)) for label in chosen]))
