"""A table of traced quantities: mean, standard deviation, Monte-Carlo error, R-hat and effective draws of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isosgd.diagnostics.traces import LEAST_DRAWS, as_array, ess, rhat

SHOWN = 12  # rows of a printed table


@dataclass(frozen=True)
class SummaryRow:
    """One quantity.

    Attributes:
        name: such as ``prediction[3]``, ``log likelihood`` or the name of a parameter.
        kind: ``prediction``, ``log likelihood`` or ``parameter``.
        mean: over all draws.
        sd: standard deviation over all draws.
        mcse: Monte-Carlo standard error of the mean.
        rhat: rank-normalised split R-hat; not a number for a constant.
        ess_bulk: effective draws for the middle of the distribution.
        ess_tail: effective draws for its 5% and 95% quantiles.
    """

    name: str
    kind: str
    mean: float
    sd: float
    mcse: float
    rhat: float
    ess_bulk: float
    ess_tail: float


@dataclass(frozen=True)
class PosteriorSummary:
    """All traced quantities, and the worst of them.

    Attributes:
        rows: one for each quantity.
        chains: number of chains.
        draws: draws of each.
    """

    rows: tuple[SummaryRow, ...]
    chains: int
    draws: int

    @property
    def rhat(self) -> float:
        """Largest R-hat; not a number if all are constant."""
        return self._worst("rhat", max)

    @property
    def ess_bulk(self) -> float:
        """Least effective number of draws for the middle of a distribution."""
        return self._worst("ess_bulk", min)

    @property
    def ess_tail(self) -> float:
        """Least effective number of draws for the tails of a distribution."""
        return self._worst("ess_tail", min)

    def of(self, *kinds: str) -> PosteriorSummary:
        """The quantities of some kinds."""
        return PosteriorSummary(tuple(row for row in self.rows if row.kind in kinds), self.chains, self.draws)

    def as_dict(self) -> dict[str, Any]:
        """Plain values that strict JSON can hold; numbers that are not finite are None."""
        worst = {"rhat": self.rhat, "ess_bulk": self.ess_bulk, "ess_tail": self.ess_tail}
        found = {"chains": self.chains, "draws": self.draws, "worst": worst, "rows": [asdict(row) for row in self.rows]}
        return json_values(found)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [f"{self.chains} chain{'s' * (self.chains > 1)} of {self.draws} draws; worst first"]
        ordered = sorted(self.rows, key=lambda row: (math.isnan(row.rhat), -row.rhat))
        width = max([len(row.name) for row in ordered[:SHOWN]] + [8])
        lines.append(f"{'':{width}}  {'mean':>10} {'sd':>9} {'mcse':>9} {'R-hat':>6} {'ESS':>6} {'tail':>6}")
        for row in ordered[:SHOWN]:
            lines.append(
                f"{row.name:{width}}  {row.mean:10.4g} {row.sd:9.3g} {row.mcse:9.2g} {row.rhat:6.3f} "
                f"{row.ess_bulk:6.0f} {row.ess_tail:6.0f}"
            )
        if len(ordered) > SHOWN:
            lines.append(f"and {len(ordered) - SHOWN} more")
        return "\n".join(lines)

    def _worst(self, what: str, pick: Any) -> float:
        moving = [row for row in self.rows if not math.isnan(row.rhat)]
        return float(pick(getattr(row, what) for row in moving)) if moving else math.nan


def summary_of(traces: Mapping[str, tuple[str, Any]]) -> PosteriorSummary:
    """Summarise traces.

    Args:
        traces: for each name its kind and its values ``[chains, draws, ...]``; each entry of the rest gets a row.

    Example:
        >>> x = np.random.default_rng(0).standard_normal((4, 200, 2))
        >>> found = summary_of({"mu": ("parameter", x)})
        >>> [row.name for row in found.rows], bool(found.rhat < 1.02)
        (['mu[0]', 'mu[1]'], True)
    """
    if not traces:
        raise ValueError("there is nothing to summarise: give data, inputs or parameters")
    rows: list[SummaryRow] = []
    size = (0, 0)
    for name, (kind, given) in traces.items():
        values = as_array(given)
        size = values.shape[0], values.shape[1]
        if size[1] < LEAST_DRAWS:
            raise ValueError(f"{size[1]} draws of each chain are too few to summarise: {LEAST_DRAWS} at least")
        sd, mean = values.std((0, 1), ddof=1), values.mean((0, 1))
        with np.errstate(invalid="ignore"):
            error = sd / np.sqrt(ess(values, "mean"))
        columns = [np.ravel(x) for x in (mean, sd, error, rhat(values), ess(values), ess(values, "tail"))]
        places = list(np.ndindex(*values.shape[2:]))
        for place, numbers in zip(places, zip(*columns, strict=True), strict=True):
            label = f"{name}[{', '.join(map(str, place))}]" if place else name
            rows.append(SummaryRow(label, kind, *(float(x) for x in numbers)))
    return PosteriorSummary(tuple(rows), *size)


def json_values(value: Any) -> Any:
    """Values that strict JSON can hold: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: json_values(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(x) for x in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
