"""Have the chains converged? Judged on functions, such as held-out predictions and the log likelihood.

Weights of a network need not mix: units may be swapped and signs changed without any change to what it computes.
`Convergence` judges draws as they arrive and needs no extra; `summarise` asks arviz-stats about traces that are there.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isosgd.diagnostics.traces import LEAST_DRAWS, Array, as_array, ess, rhat

RHAT = 1.01  # Vehtari et al. (2021) stop at these two
ESS = 400.0


class Convergence:
    """R-hat and effective draws of traces that grow.

    Chains of one group sample the same posterior and are compared with each other; groups, such as the splits of a
    data set, are not. A trace that is the same number in all draws of a group says nothing and is passed over, but a
    group in which no trace moves has not converged.

    Args:
        groups: the group of each chain, such as ``[0, 0, 1, 1]``; None when all chains are of one.

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
        self._found: dict[str, dict[int, Array]] = {}

    @property
    def draws(self) -> int:
        """Draws of each chain so far."""
        return len(self._values)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that have chains left, in the order in which they first appear."""
        return tuple(dict.fromkeys(group for chain, group in enumerate(self._labels) if chain not in self._dropped))

    def append(self, values: Any) -> None:
        """Take one draw of every chain.

        Args:
            values: ``[chains, traces]``; rows of chains that were dropped may hold anything.
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
        self._found = {}

    def drop(self, chain: int) -> None:
        """Leave a chain out, all its draws included, as one that diverged."""
        if not 0 <= chain < len(self._labels):
            raise ValueError(f"there is no chain {chain!r}; there are {len(self._labels)}, numbered from 0")
        self._dropped.add(chain)
        self._found = {}

    def traces(self, group: int | None = None) -> Array:
        """Traces ``[chains, draws, traces]`` of the chains that are left, of one group or of all."""
        left = [k for k, label in enumerate(self._labels) if k not in self._dropped and group in (None, label)]
        if not left:
            raise ValueError(f"no chain is left in group {group!r}; groups with chains are {list(self.groups)}")
        return np.stack([row[left] for row in self._values], 1)

    def rhat(self, group: int | None = None) -> float:
        """Largest R-hat over traces, of one group or the worst; not a number before there are four draws."""
        return self._worst("rhat", group)

    def ess(self, group: int | None = None) -> float:
        """Least effective number of draws over traces, of one group or the worst."""
        return self._worst("ess", group)

    def converged(self, rhat: float = RHAT, ess: float = ESS) -> bool:
        """Whether in every group all traces have at most this R-hat and at least that many effective draws."""
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
        return f"{what}: R-hat {self.rhat():.3f}{self._where('rhat')}, ESS {self.ess():,.0f}{self._where('ess')}"

    @property
    def _labels(self) -> tuple[int, ...]:
        return self._groups or (0,) * (len(self._values[0]) if self._values else 0)

    def _all(self, what: str) -> dict[int, Array]:
        """A measure of each trace ``[traces]`` for each group, kept until the next draw."""
        if what not in self._found:
            measure = {"rhat": rhat, "ess": ess}[what]
            self._found[what] = {group: measure(self.traces(group)) for group in self.groups}
        return self._found[what]

    def _worst(self, what: str, group: int | None) -> float:
        if group is not None and group not in self._labels:
            raise ValueError(f"there is no group {group!r}; there are {list(dict.fromkeys(self._labels))}")
        if self.draws < LEAST_DRAWS:
            return math.nan
        # fmax and fmin pass over traces that are not a number, max and min do not pass over such groups.
        over_traces, over_groups = (np.fmax, np.max) if what == "rhat" else (np.fmin, np.min)
        found = [over_traces.reduce(x) for label, x in self._all(what).items() if group in (None, label)]
        return float(over_groups(found)) if found else math.nan

    def _where(self, what: str) -> str:
        """Where the worst value is, when there is more than one place for it."""
        worst = self._worst(what, None)
        for group, values in self._all(what).items():
            for trace in np.nonzero(values == worst)[0].tolist():
                at = [f"trace {trace}"] * (len(values) > 1) + [f"group {group}"] * (len(self.groups) > 1)
                return f" ({', '.join(at)})" if at else ""
        return ""


@dataclass(frozen=True)
class Summary:
    """What arviz-stats says of traces ``[chains, draws, ...]``; each entry has the shape of the rest.

    Attributes:
        mean: over all draws.
        sd: standard deviation over all draws.
        rhat: rank-normalised split R-hat; not a number for a single chain.
        ess_bulk: effective draws for the middle of the distribution.
        ess_tail: effective draws for its 5% and 95% quantiles.
        mcse_mean: Monte-Carlo standard error of the mean.
        mcse_sd: Monte-Carlo standard error of the standard deviation.
    """

    mean: Array
    sd: Array
    rhat: Array
    ess_bulk: Array
    ess_tail: Array
    mcse_mean: Array
    mcse_sd: Array


def summarise(traces: Any) -> Summary:
    """R-hat, effective draws and Monte-Carlo errors by arviz-stats, which ``pip install "isosgd[diagnostics]"`` brings.

    Args:
        traces: ``[chains, draws, ...]``, at least four draws, all finite.

    Raises:
        ImportError: arviz-stats is not installed.
    """
    values = as_array(traces)
    if values.ndim < 2 or not values.shape[0] or values.shape[1] < LEAST_DRAWS:
        raise ValueError(
            f"traces of shape {list(values.shape)} must be [chains, draws, ...] with {LEAST_DRAWS} draws at least"
        )
    if not np.isfinite(values).all():
        where = np.argwhere(~np.isfinite(values))[0].tolist()
        raise ValueError(f"traces has a value that is not finite at {where}; leave that chain out")
    arviz = _array_stats()
    axes = {"chain_axis": 0, "draw_axis": 1}
    with np.errstate(divide="ignore", invalid="ignore"):  # constant traces
        return Summary(
            mean=values.mean((0, 1)),
            sd=values.std((0, 1), ddof=1),
            rhat=np.asarray(arviz.rhat(values, **axes)),
            ess_bulk=np.asarray(arviz.ess(values, **axes, method="bulk")),
            ess_tail=np.asarray(arviz.ess(values, **axes, method="tail", prob=0.05)),
            mcse_mean=np.asarray(arviz.mcse(values, **axes, method="mean")),
            mcse_sd=np.asarray(arviz.mcse(values, **axes, method="sd")),
        )


def _array_stats() -> Any:
    try:
        return importlib.import_module("arviz_stats.base").array_stats
    except ImportError as error:
        raise ImportError(
            'the summary needs arviz-stats: pip install "isosgd[diagnostics]" (isosgd.diagnostics.rhat and ess do '
            "without it)"
        ) from error
