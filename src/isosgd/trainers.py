"""Sampling around a network that a trainer of another library has just trained: what Lightning and Trainer share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from isosgd.posterior import Posterior
from isosgd.sampling import sample
from isosgd.target import Likelihood, Target

What = str | Likelihood | Callable[[Any], Target]
"""A likelihood; or a function from the trained module to a `Target`."""

OURS = {"starts", "init", "data", "target"}  # of `sample`, which the trainer knows


class AfterFit:
    """What is sampled once a network is trained, and the draws.

    Args:
        what: the likelihood of the trained module, under the prior ``"empirical"``; or a function from the module to a
            `Target`.
        settings: of `isosgd.sample`. Its ``held_out`` is the trainer's validation data by default, and None for none.

    Attributes:
        posterior: the draws; None before there are any.
    """

    def __init__(self, what: What, settings: dict[str, Any]) -> None:
        if not (isinstance(what, str | Likelihood) or callable(what)):
            raise TypeError(f"pass a likelihood, or a function from the module to a Target, not {what!r}")
        if known := sorted(OURS & settings.keys()):
            raise TypeError(f"{known[0]}= is the trainer's: chains begin at the network it has trained, on its data")
        self.what, self.settings = what, settings
        self.posterior: Posterior | None = None

    def target_of(self, module: nn.Module) -> Target:
        """The target of a trained module."""
        with warnings.catch_warnings():  # a module that was just trained is in training mode
            warnings.filterwarnings("ignore", message="dropout is off", category=UserWarning)
            if isinstance(self.what, str | Likelihood):
                return Target.from_module(module, self.what, "empirical")
            target = self.what(module)
        if not isinstance(target, Target) or target.module is None:
            raise TypeError(f"the function from a module gave {target!r}: return Target.from_module(...) of it")
        return target

    def check(self, module: nn.Module) -> None:
        """Find out before the training whether there is a target."""
        self.target_of(module)

    def sample(self, module: nn.Module, data: Any, held_out: Any) -> Posterior:
        """Draw around the network as it is now.

        Args:
            module: the trained one.
            data: the trainer's loader.
            held_out: the trainer's validation loader, if there is one.
        """
        if not isinstance(data, Iterable):
            raise ValueError(f"the training data are {type(data).__name__}: sampling needs one loader")
        target = self.target_of(module)
        assert target.module is not None
        start = {**target.module.values, **target.frozen, **target.buffers}
        settings = dict(self.settings)
        if settings.get("temperature") in (None, "auto"):
            settings.setdefault("held_out", held_out)
        self.posterior = sample(target, data, starts=[start], **settings)
        return self.posterior
