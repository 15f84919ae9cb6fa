"""Hugging Face: sampling around the network that `Trainer` has trained (``pip install "isosgd[transformers]"``)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isosgd.target.likelihoods import Tokens
from isosgd.trainers import AfterFit

try:
    import transformers
except ImportError as error:
    raise ImportError('isosgd.transformers needs transformers: pip install "isosgd[transformers]"') from error

SHARDED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"  # set by `accelerate launch`


class Sampling(AfterFit, transformers.TrainerCallback):
    """The last phase of a training: draws around the network, on the training loader.

    Works with trainers of any class, such as those of TRL: ``Trainer(..., callbacks=[Sampling("tokens",
    store="run")])``. When training ends, `isosgd.sample` runs with the network as its start. The draws are those of
    ``sample(target, loader, starts=[model])`` for the same seed and the same batches.

    Args:
        what: the likelihood, ``"tokens"`` for a language model, ``"categorical"`` for classes, under the prior
            ``"empirical"``; or a function from the model to a `Target`, such as
            ``lambda model: Target.from_module(model, "tokens", sampled="*lora_*")``.
        settings: of `isosgd.sample`: ``draws``, ``store``, ``temperature``, ``held_out`` and so on. By default the data
            that the `Trainer` was last evaluated on (a `SamplingTrainer`'s evaluation data) choose the temperature. In
            several processes (DDP) ``parallel`` (what they share) and ``temperature`` are required.

    Attributes:
        posterior: the draws; None before the end of the training.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot be sampled before time is spent on it."""
        sharded = args.fsdp or args.deepspeed or any(os.environ.get(name) == "true" for name in SHARDED)
        self._check_processes(args.world_size, not sharded, "FSDP or DeepSpeed")
        self._check(kwargs["model"], kwargs["train_dataloader"], kwargs["eval_dataloader"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample."""
        self._sample(kwargs["model"], kwargs["train_dataloader"], kwargs["eval_dataloader"])


class SamplingTrainer(transformers.Trainer):
    """A `Trainer` that samples when training ends, and then evaluates and predicts by the average over draws.

    ``evaluate`` reports the loss of the averaged probabilities; ``predict`` returns their logarithms as logits.

    Args:
        args: as of `transformers.Trainer`.
        sampling: what is sampled, and how.
        kwargs: as of `transformers.Trainer`.
    """

    def __init__(self, *args: Any, sampling: Sampling, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampling = sampling
        self.add_callback(sampling)
        if self.eval_dataset is not None and not isinstance(self.eval_dataset, dict):
            self.callback_handler.eval_dataloader = self.get_eval_dataloader()

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, logarithms of the averaged probabilities (the mean of numbers), and labels."""
        posterior = self.sampling.posterior
        if posterior is None:  # still training
            found: tuple[Tensor | None, Any, Any] = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
            return found
        batch = self._prepare_inputs(inputs)
        assert posterior.target is not None and posterior.target.module is not None
        network, mean = posterior.target.module, posterior.predict(batch).mean
        logits = mean
        if posterior.view.classes:
            logits = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
            logits = logits.movedim(1, -1) if logits.ndim > 1 else logits
        loss = labels = None
        if any(name in batch for name in ([network.labels] if network.labels else self.label_names)):
            labels = network.labels_in(batch)
            loss = _loss(network.likelihood, mean, logits, labels)
        return loss, None if prediction_loss_only else logits, labels


def _loss(likelihood: Any, mean: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers' models, for averaged predictions."""
    if isinstance(likelihood, Tokens):
        probabilities, tokens = likelihood.scored(mean, labels)
        return F.nll_loss(probabilities.clamp_min(torch.finfo(mean.dtype).tiny).log(), tokens)
    if mean.ndim > 1 and labels.ndim == 1 and not labels.is_floating_point():
        return F.nll_loss(logits, labels)
    return F.mse_loss(mean.reshape(labels.shape), labels.to(mean))
