"""Sampled heads: if only the last part of a network is sampled, its inputs are computed once.

A *head* is a submodule that holds all sampled parameters, is called once, and returns the network's output. Its inputs,
the *features*, do not change between steps, and replace the data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isosgd.target.batches import batch_length, tensors_of, tree_map
from isosgd.target.modules import logits_of
from isosgd.target.params import Params
from isosgd.target.target import Target

ROWS = 256  # examples per batch
MOST = 1 << 31  # bytes of features


class _Found(Exception):
    """Raised before the head is called; holds its inputs."""

    def __init__(self, features: tuple[Any, ...]) -> None:
        self.features = features


class _Shell(nn.Module):
    """A submodule on its own, with parameters named as in the network."""

    def __init__(self, path: str, inner: nn.Module) -> None:
        super().__init__()
        owner: nn.Module = self
        *above, last = path.split(".")
        for name in above:
            owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, inner)
        self._inner = (inner,)  # a tuple, so that it is not registered twice

    def forward(self, *features: Tensor) -> Any:
        """Call the submodule."""
        return self._inner[0](*features)


class Head:
    """The sampled head of a network.

    Attributes:
        target: the target of the head alone, whose batches are ``(*features, y)``.
    """

    def __init__(self, target: Target, path: str) -> None:
        assert target.module is not None
        self.whole, self.path = target.module, path
        inner = self.whole._module.get_submodule(path)
        shared = {id(x): x for x in (*inner.parameters(), *inner.buffers())}
        likelihood = copy.copy(self.whole)
        likelihood.labels = None
        likelihood.place(_Shell(path, copy.deepcopy(inner, shared)))
        self.target = target.of_likelihood(likelihood)

    @staticmethod
    @torch.no_grad()
    def of(target: Target, inputs: Any, inits: Iterable[Mapping[str, Any] | None] = ()) -> Head | None:
        """The head of a target, found by a trial pass; None if there is none, or if something before it may change.

        Args:
            inputs: some inputs of the network.
            inits: start values, which may include buffers.
        """
        module = target.module
        if module is None or module.ties_examples or not module.frozen:
            return None
        path = module.head_path()
        if not path or any(_other_buffers(target, init) for init in inits):
            return None
        place = next((t.device for t in tensors_of(inputs)), None)
        natural = {name: x.detach() for name, x in target.constrain(target.initial(device=place)).items()}
        seen: list[tuple[Any, Any]] = []
        inner = module._module.get_submodule(path)

        def note(layer: nn.Module, args: Any, named: Any, output: Any) -> None:
            seen.append((named or args, output))

        hook = inner.register_forward_hook(note, with_kwargs=True)
        try:
            output = logits_of(module.output(natural, inputs))
        finally:
            hook.remove()
        n = batch_length(inputs)
        if len(seen) != 1 or seen[0][1] is not output or not isinstance(seen[0][0], tuple):
            return None
        if not all(isinstance(x, Tensor) and x.ndim and len(x) == n for x in seen[0][0]):
            return None
        return Head(target, path)

    @torch.no_grad()
    def features(self, inputs: Any, params: Params) -> tuple[Any, ...]:
        """Inputs of the head, from inputs of the network."""

        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            raise _Found(args)

        hook = self.whole._module.get_submodule(self.path).register_forward_pre_hook(stop)
        try:
            self.whole.output(params, inputs)
        except _Found as found:
            return found.features
        finally:
            hook.remove()
        raise AssertionError("the head was not called")

    def batch(self, batch: Any, params: Params) -> tuple[Any, ...]:
        """Examples as features and labels."""
        return (*self.features(self.whole.inputs_in(batch), params), self.whole.labels_in(batch))

    def data(self, tensors: Any, params: Params) -> tuple[Tensor, ...] | None:
        """All data as features and labels; None if they would take too much memory."""
        n, parts = len(tensors_of(tensors)[0]), []
        for first in range(0, n, ROWS):
            part = tree_map(lambda t, first=first: t[first : first + ROWS], tensors)
            found = self.features(self.whole.inputs_in(part), params)
            size = sum(x.numel() * x.element_size() for x in found)
            if size * (n / batch_length(part)) > MOST:  # type: ignore[operator]
                return None
            parts.append(found)
        joined = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
        return (*joined, self.whole.labels_in(tensors))


def _other_buffers(target: Target, init: Mapping[str, Any] | None) -> bool:
    """Whether start values hold buffers that differ from the target's."""
    given = target.split_init(init)[1]
    return any(not torch.equal(x.to(target.buffers[name]), target.buffers[name]) for name, x in given.items())
