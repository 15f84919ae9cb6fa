"""Lightning: a callback that samples around the network at the end of a fit (``pip install "isosgd[lightning]"``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from isosgd.trainers import AfterFit

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError('isosgd.lightning needs Lightning: pip install "isosgd[lightning]"') from error


class Sampling(AfterFit, pl.Callback):
    """The last phase of a fit: draws around the network that was trained, on the training loader.

    When training ends, `isosgd.sample` runs on the loader of the fit with the network as its start; validation data, if
    there are any, choose the temperature. Then ``trainer.predict`` returns averages over the draws. The draws are those
    of ``sample(target, loader, starts=[module])`` for the same seed and the same batches.

    Args:
        what: the likelihood of the module's ``forward`` (see `isosgd.Target.from_module`), under the prior
            ``"empirical"``; or a function from the `LightningModule` to a `Target`, such as
            ``lambda module: Target.from_module(module.net, "categorical", weight_decay=1e-4)``.
        settings: of `isosgd.sample`: ``draws``, ``store``, ``temperature``, ``seed`` and so on. After a fit by DDP,
            ``parallel`` (what the processes share) and ``temperature`` are required.

    Attributes:
        posterior: the draws; None before the end of the fit.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be sampled before time is spent on it."""
        strategy = trainer.strategy
        replicated = type(strategy) is pl.strategies.DDPStrategy  # DeepSpeed's is one of its kind
        self._check_processes(trainer.world_size, replicated, type(strategy).__name__)
        self._check(pl_module, trainer.train_dataloader, self._validation(trainer))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample."""
        self._sample(pl_module, trainer.train_dataloader, self._validation(trainer))

    @staticmethod
    def _validation(trainer: pl.Trainer) -> Any:
        """The validation data; of a stream, which may be endless, as many batches as the fit is limited to."""
        found, limit = trainer.val_dataloaders, trainer.limit_val_batches
        stream = isinstance(getattr(found, "dataset", None), IterableDataset)
        return _first(found, limit) if stream and isinstance(limit, int) else found

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Predict averages over draws from here on: means of y, or class probabilities."""
        posterior = self.posterior
        if posterior is None:
            raise RuntimeError("there are no draws to predict by: fit first, with this callback")

        def average(batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Tensor:
            assert posterior.target is not None
            inputs = posterior.target.inputs_of(batch)
            return posterior.predict(inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs).mean

        pl_module.predict_step = average  # type: ignore[method-assign]

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the module predict by itself again."""
        del pl_module.predict_step


def _first(loader: Any, count: int) -> Iterator[Any]:
    yield from islice(loader, count)
