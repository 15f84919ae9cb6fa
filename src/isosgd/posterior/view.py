"""A target evaluated at draws, with the buffers of its network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from isosgd.posterior.calibration import likelihood_and_mean
from isosgd.posterior.draws import moved
from isosgd.target import Likelihood, Params, Target
from isosgd.target.batches import inputs_of, tree_map, with_tensors
from isosgd.target.heads import Head
from isosgd.target.likelihoods import has_classes
from isosgd.target.modules import ModuleLikelihood

NUMBERS = {"Gaussian", "StudentT", "Heteroscedastic"}  # y is normal or Student-t around each draw's mean
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of a BatchNorm layer

Function = Callable[[Callable[..., Any], Params, Any], Any]
"""A user's ``(model, params, x) -> Tensor``: ``model`` is the network at a draw, ``params`` its natural parameters."""


class View:
    """Predictions and log likelihoods of a target at natural parameters and buffers.

    Args:
        target: what was sampled.
        width: of predictions, see `isosgd.posterior.calibration`.
    """

    def __init__(self, target: Target, width: float = 1.0) -> None:
        self.target, self.width, self._tried = target, width, False
        self._head: tuple[Head, View] | None = None
        likelihood = target._log_likelihood
        self.network = Network(likelihood, width) if isinstance(likelihood, ModuleLikelihood) else None
        about = target.describe()["likelihood"]
        name = str(about["name"])
        self.classes = self.network is not None and has_classes(self.network.likelihood)
        # A user's predict that gives mean and variance means normal noise.
        self.df: float | None = math.inf if self.network is None else None
        if self.network is not None and name in NUMBERS and (df := about.get("df") or math.inf) > 2:
            self.df = float(df)  # else there is no variance

    def head(self, inputs: Any) -> tuple[Head, View] | None:
        """The sampled head of the network and its view, if there is one; its inputs are the same at all draws.

        Args:
            inputs: examples to trace the network with.
        """
        if not self._tried:
            few = tree_map(lambda t: t[:2] if t.ndim else t, inputs)
            found = None if self.network is None else Head.of(self.target, few)
            self._tried, self._head = True, None
            if found is not None:
                self._head = found, View(found.target, self.width)
        return self._head

    def _network_at(self, natural: Params) -> Network | None:
        """The network, if at these parameters it differs from the target's own."""
        other = self.network is not None and (self.width != 1 or self.network.holds(natural))
        return self.network if other else None

    def log_likelihood(self, natural: Params, batch: Any) -> Tensor:
        """Log likelihood of each example."""
        if (network := self._network_at(natural)) is not None:
            return network(natural, batch)
        return self.target.log_likelihood(self.target.unconstrain(natural), batch)

    def log_likelihoods_at(self, natural: Params, batch: Any, widths: Sequence[float]) -> Tensor:
        """`likelihood_and_mean` of each example at several widths of the prediction, ``[n, widths, 2]``.

        With width 1 alone the second number is 0.
        """
        if tuple(widths) == (1.0,):
            found = self.log_likelihood(natural, batch)
            return torch.stack([found, torch.zeros_like(found)], -1)[:, None]
        assert self.network is not None
        likelihood = self.network.likelihood
        assert isinstance(likelihood, Likelihood)
        output = self.network.output(natural, self.network.inputs_in(batch))
        output, natural = self.network.for_likelihood(output, natural)
        y = self.network.labels_in(batch)
        return torch.stack([likelihood_and_mean(likelihood, output, y, natural, w) for w in widths], 1)

    def predict(self, natural: Params, x: Any) -> Any:
        """The target's prediction."""
        if (network := self._network_at(natural)) is not None:
            return network.predict(natural, x)
        return self.target.predictive(self.target.unconstrain(natural), x)

    def apply(self, function: Function, natural: Params, x: Any) -> Any:
        """A user's function of the network at a draw, the draw, and inputs."""
        if self.network is None:
            return function(lambda inputs: self.predict(natural, inputs), natural, x)
        network = self.network
        return function(lambda *args, **kwargs: network.output(natural, kwargs or args), natural, x)


class Network(ModuleLikelihood):
    """A module's likelihood at parameters that may include buffers, by their names in the module.

    It shares all tensors with the original likelihood. BatchNorm uses the given running statistics in any mode.
    """

    def __init__(self, of: ModuleLikelihood, width: float = 1.0) -> None:
        vars(self).update(vars(of))
        self._plain, self._width = of, width
        tensors = [*of._module.parameters(), *of._module.buffers()]
        self._module = copy.deepcopy(of._module, {id(x): x for x in tensors})
        self._buffers = {name for name, _ in of._module.named_buffers()}
        for _, layer in self._named_norms():
            layer.eval()
            layer.track_running_stats = layer.running_mean is not None

    @property
    def batch_statistics(self) -> str:
        """Name of a layer that normalises with the statistics of the batch; empty if there is none."""
        for name, layer in self._plain._module.named_modules():
            if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
                return str(name)
        return ""

    def holds(self, natural: Params) -> bool:
        """Whether there are buffers among the parameters."""
        return not self._buffers.isdisjoint(natural)

    def for_likelihood(self, output: Any, params: Params) -> tuple[Any, Params]:
        """Output and parameters as the likelihood takes them, at the width of predictions."""
        return self.widened(*super().for_likelihood(output, params))

    def widened(self, output: Any, params: Params) -> tuple[Any, Params]:
        """Output and parameters at the width of predictions."""
        if self._width == 1:
            return output, params
        assert isinstance(self.likelihood, Likelihood)
        return self.likelihood.wider(output, params, self._width)

    def output(self, params: Params, inputs: Sequence[Any] | Mapping[str, Any]) -> Any:
        """The module's output at these parameters and buffers."""
        if not self.holds(params):
            return self._plain.output(params, inputs)
        first = params[next(iter(self.values))]
        state = dict(self._rest_as((first.device, first.dtype)))
        low = self.lowered({name: params[name] for name in self.values})
        state |= low | {n: params[n] for n in self._buffers if n in params}
        args, kwargs = self.arguments(inputs)
        return functional_call(self._module, state, args, kwargs)

    def refreshed(self, natural: Params, batches: Iterable[Any]) -> Params:
        """Running statistics of every BatchNorm at these parameters: plain averages over batches.

        This is what `torch.optim.swa_utils.update_bn` does.
        """
        norms = [(name, layer) for name, layer in self._named_norms() if layer.running_mean is not None]
        first = natural[next(iter(self.values))]
        rest = self._rest_as((first.device, first.dtype))
        names = [f"{name}.{kind}" if name else kind for name, _ in norms for kind in STATISTICS]
        found = {name: torch.zeros_like(rest[name]) for name in names}
        before = [layer.momentum for _, layer in norms]
        count = 0
        try:
            for _, layer in norms:
                layer.train()
                layer.momentum = None  # a plain average over batches
            for batch in batches:
                self.output(
                    natural | found, moved(with_tensors(inputs_of(batch, self.labels), first.dtype), first.device)
                )
                count += 1
        finally:
            for (_, layer), momentum in zip(norms, before, strict=True):
                layer.eval()
                layer.momentum = momentum
        if not count:
            raise ValueError("refresh yields no batches: it is empty, or an iterator that was gone through already")
        return found

    def check_refresh(self) -> None:
        """Raise an error if there are no statistics to refresh."""
        if not any(layer.running_mean is not None for _, layer in self._named_norms()):
            raise ValueError(
                f"{self._class_name} has no BatchNorm with running statistics: leave refresh= out, there is nothing "
                "to refresh"
            )

    def _named_norms(self) -> Iterator[tuple[str, _BatchNorm]]:
        for name, layer in self._module.named_modules():
            if isinstance(layer, _BatchNorm):
                yield name, layer
