"""`draws="auto"`: draw until predictions have converged, or to the budget.

The weights of a network do not mix, but predictions may. So R-hat and effective draws
(`isosgd.diagnostics.Convergence`) are those of predictions at a few inputs, and of the mean log likelihood of some of
the data. Both are recorded at every draw and judged over all chains when there are a quarter more draws than at the
last look. Chains that run in turn draw in rounds, each until the next look. Chains of different data sets are not
compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from isosgd.data.sources import TensorBatches
from isosgd.diagnostics import Convergence
from isosgd.engine.chains import Chains
from isosgd.target.batches import tree_map, with_tensors

MOST_DRAWS = 2_000  # of each chain, if no budget is given
FIRST_LOOK = 20  # draws
INPUTS, TRACES, ROWS = 32, 64, 256  # inputs to predict, predicted numbers at most, rows for the log likelihood


def looks(budget: int) -> list[int]:
    """Numbers of draws after which convergence is judged; the last is the budget.

    Example:
        >>> looks(60)
        [20, 25, 32, 40, 50, 60]
    """
    found, look = list[int](), FIRST_LOOK
    while look < budget:
        found.append(look)
        look = math.ceil(1.25 * look)
    return [*found, budget]


class Watch:
    """Records the predictions of chains at each draw.

    Args:
        held_out: inputs at which to predict; some of the training data when None.
        traces: of draws of an earlier session, ``[draws, chains, traces]``.
    """

    def __init__(self, chains: Chains, held_out: Any = None, traces: Tensor | None = None) -> None:
        self.chains = chains
        self.examples = self._some_data()
        if held_out is None and self.examples is None:
            raise ValueError(
                "draws = 'auto' looks at predictions, and the data come from a loader: pass held_out= inputs"
            )
        self.inputs = self._inputs(held_out)
        self.traces: list[Tensor] = [] if traces is None else list(traces.unbind())

    def _some_data(self) -> Any:
        """Evenly spaced rows of the data of each chain; None for a loader."""
        batches = self.chains.batches
        if not isinstance(batches, TensorBatches):
            return None
        every = torch.linspace(0, batches.num_data - 1, min(ROWS, batches.num_data), device=batches.device).long()
        if batches.rows is not None:
            return batches.at(batches.rows[:, every])
        return batches.at(every.expand(self.chains.count, -1) if self.chains.many is not None else every)

    def _inputs(self, held_out: Any) -> Any:
        """Inputs at which to predict, for each chain; None if the target cannot predict."""
        if not self.chains.target.predicts:
            if held_out is not None:
                raise ValueError("held_out are inputs, but the target cannot predict: pass predict= to Target")
            return None
        if held_out is None:
            assert self.examples is not None
            own = self.chains.target.inputs_of(self.examples)
            own = tree_map(lambda t: t[:, :INPUTS] if self.chains.many is not None else t[:INPUTS], own)
        else:
            device = self.chains.alive.device
            given = held_out if isinstance(held_out, tuple | list | Mapping) else (held_out,)
            own = tree_map(lambda t: t.to(device)[:INPUTS], with_tensors(given))
            if self.chains.many is not None:
                own = tree_map(lambda t: t.expand(self.chains.count, *t.shape), own)
        return own[0] if isinstance(own, tuple | list) and len(own) == 1 else own

    def so_far(self, drawn: int) -> dict[int, Tensor]:
        """Traces of the first draws, ``[drawn, traces]``, of each chain that has not failed, by its position."""
        alive = [k for k in range(self.chains.count) if k not in self.chains.failures]
        return {k: torch.stack([row[k] for row in self.traces[:drawn]]) for k in alive}

    @torch.no_grad()
    def take(self) -> None:
        """Record the predictions of the current parameters."""
        chains, parts = self.chains, []
        if self.inputs is not None:
            predict = chains.target.predictive
            found = (
                vmap(predict)(chains.current, self.inputs)
                if chains.many is not None
                else predict(chains.current, self.inputs)
            )
            found = found.get("mean", next(iter(found.values()))) if isinstance(found, dict) else found
            flat = found.reshape(chains.count, -1)
            parts.append(flat[:, :: -(-flat.shape[1] // TRACES)])
        if self.examples is not None:
            likely = chains.log_likelihood(self.examples)
            if self.inputs is None:
                parts.append(likely[:, :INPUTS])
            parts.append(likely.mean(-1, keepdim=True))
        self.traces.append(torch.cat([part.double() for part in parts], -1).cpu())


def verdict(traces: dict[int, Tensor], chains: int, chains_per_set: int, drawn: int, budget: int) -> str:
    """The reason to stop after ``drawn`` draws of each chain; empty to continue.

    Args:
        traces: ``[draws, traces]`` of each chain that has not failed, by its index.
        chains: number of chains, including failed ones.
        chains_per_set: number of chains of one data set.
        budget: the most draws of each chain.
    """
    every = np.nan_to_num(torch.stack(list(traces.values())).numpy())
    judged = Convergence.of(every, [chain // chains_per_set for chain in traces])
    lost = f" ({chains - len(traces)} dropped)" if len(traces) < chains else ""
    found = str(judged).replace(" chains:", f" chains{lost}:")
    if judged.converged():
        return f"converged: {found}"
    return f"not converged when the budget of {budget:,} draws ended: {found}" if drawn >= budget else ""
