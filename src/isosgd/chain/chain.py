"""One chain: a target, parameters, a sampler, and a stream of minibatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from isosgd.chain.batches import Batches, batch_length, halves
from isosgd.chain.curvature import Curvature, Stiffness
from isosgd.errors import DivergedError
from isosgd.noise import join_halves
from isosgd.potential import Params, Target
from isosgd.samplers import ISGD, Sampler
from isosgd.samplers.shaped import Shaped


class MakeSampler(Protocol):
    """Builds the sampler of a chain from its groups of parameters."""

    def __call__(self, groups: list[dict[str, Any]], generator: torch.Generator) -> Sampler: ...


class Chain:
    """State of one chain and what one gradient does to it.

    Args:
        target: what is sampled.
        params: free parameters, leaves that require gradients. They are moved in place.
        batches: the minibatches.
        num_data: N.
        make_sampler: builds the sampler.
        seed: of the sampler and of the curvature probes.
    """

    def __init__(
        self, target: Target, params: Params, batches: Batches, num_data: int, make_sampler: MakeSampler, seed: int
    ) -> None:
        self.target, self.params, self.batches, self.num_data = target, params, batches, num_data
        labels = target.layers(params)
        names: dict[str, list[str]] = {}
        for name in params:
            names.setdefault(labels[name], []).append(name)
        # Gradients come in the order of `params`; groups may interleave, so keep the parameters in group order.
        self.order = [name for members in names.values() for name in members]
        self.params = {name: params[name] for name in self.order}
        self.leaves = list(self.params.values())
        groups = [{"name": label, "params": [params[m] for m in members]} for label, members in names.items()]
        generator = torch.Generator(device=self.leaves[0].device).manual_seed(seed)
        self.sampler = make_sampler(groups, generator)
        temperature = self.sampler.param_groups[0]["temperature"]
        self.curvature = Curvature([g["params"] for g in self.sampler.param_groups], temperature, num_data, seed + 1)
        self.stiffness = Stiffness(self.leaves, seed + 2)
        self.gradients = self.probes = 0
        self.loss = math.nan
        self.batch: Any = None

    def evaluate(self, split: bool = False) -> list[Tensor] | None:
        """Gradient on the next minibatch, left in ``.grad``; with ``split`` the noise vector of its halves too."""
        self.batch = self.batches.next()
        noise = None
        if split and batch_length(self.batch) >= 2:
            first, second, sizes = halves(self.batch)
            loss1, g1 = self.target.gradient(self.params, first, self.num_data)
            loss2, g2 = self.target.gradient(self.params, second, self.num_data)
            gradients, noise = join_halves(g1, g2, sizes)
            loss = (sizes[0] * loss1 + sizes[1] * loss2) / sum(sizes)
        else:
            loss, gradients = self.target.gradient(self.params, self.batch, self.num_data)
        self.loss = float(loss)
        self._check(gradients)
        self.gradients += 1
        for leaf, g in zip(self.leaves, gradients, strict=True):
            leaf.grad = g
        return noise

    def step(self, split: bool = False) -> None:
        """One gradient and one step of the sampler."""
        noise = self.evaluate(split)
        self.sampler.step(noise=noise)

    def probe_curvature(self) -> None:
        """One power iteration on the minibatch just evaluated; costs one gradient."""

        def gradient_here() -> Sequence[Tensor]:
            return self.target.gradient(self.params, self.batch, self.num_data)[1]

        before: list[Tensor] = [leaf.grad for leaf in self.leaves]  # type: ignore[misc]
        if self.shaped is not None and self.shaped.known:
            axis = self.shaped.axes and self.probes % 2
            (self.stiffness.probe_axis if axis else self.stiffness.probe)(self.shaped, before, gradient_here)
        else:
            self.curvature.probe(before, gradient_here)
        self.gradients += 1
        self.probes += 1

    @property
    def shaped(self) -> Shaped | None:
        """The sampler's Lambda, where it knows directions."""
        return self.sampler.shaped if isinstance(self.sampler, ISGD) else None

    def curvatures(self) -> list[float]:
        """Top curvature of each group; under a Lambda that knows directions, what makes up ``rate * curvature``."""
        if self.shaped is None or not self.shaped.known:
            return self.curvature.values()
        found = self.stiffness.value(self.shaped)
        return [found / float(group["rate"]) for group in self.sampler.param_groups]

    def adapt(self, curvatures: Sequence[float], rise: float = 2.0) -> None:
        """Set the sampler's rates from the noise it has seen and the curvature."""
        if isinstance(self.sampler, ISGD) and self.shaped is not None:
            prior = self.target.prior_curvature(self.params) if rise > 1.0 else None
            self.sampler.adapt(curvatures, rise, prior)
        else:
            self.sampler.adapt(curvatures, rise)

    def natural(self) -> Params:
        """The parameters as users see them, detached copies."""
        with torch.no_grad():
            return {name: value.detach().clone() for name, value in self.target.constrain(self.params).items()}

    def snapshot(self) -> list[Tensor]:
        """A copy of where the chain is."""
        return [leaf.detach().clone() for leaf in self.leaves]

    @torch.no_grad()
    def restore(self, saved: Sequence[Tensor]) -> None:
        """Go back to a `snapshot`."""
        torch._foreach_copy_(self.leaves, list(saved))

    def _check(self, gradients: Sequence[Tensor]) -> None:
        """Stop before a bad gradient moves anything."""
        bad = None
        if not all(map(math.isfinite, torch.stack(torch._foreach_norm(list(gradients))).tolist())):
            names = [n for n, g in zip(self.order, gradients, strict=True) if not bool(torch.isfinite(g).all())]
            bad = self.target.layers(self.params)[names[0]] if names else "overflow of the gradient's norm"
        if bad is None and math.isfinite(self.loss):
            return
        what = f"the gradient of group {bad!r} is not finite" if bad else f"the loss is {self.loss}"
        raise DivergedError(
            f"after {self.gradients} gradients {what}. The state before it is kept in .state. If it "
            "happens at the start, "
            "check init and data; later, a longer warm-up, a smaller bias= or a lower temperature help.",
            step=self.gradients,
            group=bad,
            state=self.natural(),
        )
