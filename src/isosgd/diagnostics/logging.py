"""Loss and rates of a run, for TensorBoard."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isosgd.diagnostics.traces import as_array


class Log:
    """Writes logs for ``tensorboard --logdir FOLDER`` (``pip install "isosgd[tensorboard]"``)."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self._make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise ImportError('logging for TensorBoard needs it: pip install "isosgd[tensorboard]"') from error
        self._writer: Any = None

    def step(self, step: int, loss: Any, rates: Mapping[str, Any] | None = None, first_chain: int = 0) -> None:
        """Log a step.

        Args:
            step: gradients of each chain so far.
            loss: of the minibatch, a number or one for each chain.
            rates: learning rate of each layer, a number or one for each chain; the mean over chains is logged.
            first_chain: number of the first of these chains.
        """
        for k, value in enumerate(as_array(loss).reshape(-1).tolist()):
            self._scalar(f"loss/chain {first_chain + k}", value, step)
        for layer, rate in (rates or {}).items():
            self._scalar(f"rate/{layer}", float(as_array(rate).mean()), step)

    def close(self) -> None:
        """Flush and close; a later entry opens the folder again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):  # of a chain that was dropped
            return
        if self._writer is None:
            self._writer = self._make(str(self.folder))
        self._writer.add_scalar(name, value, step)
