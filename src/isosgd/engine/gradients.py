"""Gradients of minibatches: of one chain, as any model has them, or of many chains in one batched computation.

Chains in one computation are a leading dimension of parameters and batches, mapped over by `torch.func.vmap`. Not every
model can be: `batchable` tries, compares, and says why not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from isosgd.data.sources import Batch, batch_length, halves, rows_of
from isosgd.engine.compiled import Compiled, Tensors, repeat
from isosgd.engine.ranks import Ranks
from isosgd.errors import first_line
from isosgd.native import build
from isosgd.native.layers import Density, Layers, TorchLayers, network_of_tables
from isosgd.noise.estimators import join_halves
from isosgd.target import Params, Target
from isosgd.target.batches import tensors_of, tree_map
from isosgd.target.likelihoods import SCALE, Categorical, Gaussian
from isosgd.target.priors import HalfCauchy
from isosgd.target.space import FlatPrior


class Found(NamedTuple):
    """Results of one minibatch for each chain: losses ``[chains]``; gradients and noise in the parameters' shapes."""

    loss: Tensor
    gradients: list[Tensor]
    noise: list[Tensor] | None


class Single:
    """Gradients of one chain, whose parameters have no chain dimension.

    Networks of dense layers are evaluated as many chains are, of which there is one.

    Args:
        prior_weight: weight of the prior in the loss, see `isosgd.Target.prior_weight`.
    """

    def __init__(self, target: Target, num_data: int, prior_weight: float = 1.0) -> None:
        self.target, self.num_data, self.prior_weight = target, num_data, prior_weight
        self.network = target.network()
        self.one: Many | None = None  # the same of many chains, where the library has their gradients

    def __call__(self, params: Params, batch: Batch, split: bool = False) -> Found:
        """Gradients at the parameters, which require gradients; with ``split`` also the noise vector."""
        if (found := self._by_library(params, batch, split)) is not None:
            return found
        if not (split and batch_length(batch) >= 2):
            loss, gradients = self.target.gradient(params, batch, self.num_data, self.prior_weight)
            return Found(loss.unsqueeze(0), list(gradients), None)
        first, second, sizes = halves(batch)
        loss1, g1 = self.target.gradient(params, first, self.num_data, self.prior_weight)
        loss2, g2 = self.target.gradient(params, second, self.num_data, self.prior_weight)
        gradients, noise = join_halves(list(g1), list(g2), sizes)
        return Found((sizes[0] * loss1 + sizes[1] * loss2).unsqueeze(0) / sum(sizes), gradients, noise)

    def _by_library(self, params: Params, batch: Batch, split: bool) -> Found | None:
        """The same where the library has the gradients; else None."""
        if self.network is None or not self.target.checked or not isinstance(batch, tuple):
            return None
        if self.one is None:
            one = Many(self.target, self.num_data, Layout(params), prior_weight=self.prior_weight)
            if one.layers is None or not one.layers.known:
                self.network = None
                return None
            self.one = one
        if not build.fits(*params.values()):  # on a GPU a copy of them would be part of every captured step
            return None
        theta, rows = self.one.layout.flat(params), tuple(t.unsqueeze(0) for t in batch)
        if not self.one.fits(theta, rows):
            return None
        loss, gradient, noise = self.one.flat(theta, rows, split)
        vectors = None if noise is None else list(self.one.layout.views(noise[0]).values())
        return Found(loss, list(self.one.layout.views(gradient[0]).values()), vectors)


class Parted:
    """Gradients of one chain whose minibatches are shared by several ranks, which add up the gradients of their parts.

    The first half of the ranks has the first half of a minibatch. So noise vectors are differences between ranks, the
    same as those of `Single` (up to rounding), and cost no further gradient.

    Args:
        single: gradients of a part.
        ranks: the ranks that share minibatches.
        cut: True if every rank gets the whole minibatch and takes its part; False if it gets its part alone.
    """

    def __init__(self, single: Single, ranks: Ranks, cut: bool) -> None:
        self.single, self.ranks, self.cut = single, ranks, cut

    def __call__(self, params: Params, batch: Batch, split: bool = False) -> Found:
        """As `Single`, for the whole minibatch."""
        if self.cut:
            batch = self._part(batch)
        n = batch_length(batch)
        loss, gradients, _ = self.single(params, batch)
        row = torch.cat([g.reshape(-1) for g in gradients] + [loss, torch.ones_like(loss)]).mul_(n)
        sums = row.new_zeros(2 if split else 1, len(row))
        sums[int(split and self.ranks.place >= self.ranks.shares // 2)] = row
        del row  # of a large model every copy counts
        self.ranks.sum_(sums)
        sizes, means = sums[:, -1].clone(), sums[:, :-1]
        means.div_(sizes.unsqueeze(-1))
        noise = None
        if split:
            n1, n2 = (round(size) for size in sizes.tolist())
            (whole,), (difference,) = join_halves([means[0]], [means[1]], (n1, n2))
            noise = self._like(gradients, difference)
        else:
            whole = means[0]
        # The loss is kept for longer than the gradient, in whose memory it lies.
        return Found(whole[-1:].clone(), self._like(gradients, whole), noise)

    def _part(self, batch: Batch) -> Batch:
        """This rank's examples."""
        n, place, shares = batch_length(batch), self.ranks.place, self.ranks.shares
        if n < shares:
            raise ValueError(f"{shares} ranks share a minibatch of {n} examples: give a batch_size of {shares} or more")
        return rows_of(batch, slice(n * place // shares, n * (place + 1) // shares))

    @staticmethod
    def _like(gradients: Sequence[Tensor], row: Tensor) -> list[Tensor]:
        """A flat vector cut into the shapes and dtypes of the gradients."""
        parts = torch.split(row[:-1], [g.numel() for g in gradients])
        return [part.view(g.shape).to(g.dtype) for part, g in zip(parts, gradients, strict=True)]


class Layout:
    """Places of named parameters in a flat vector."""

    def __init__(self, params: Params) -> None:
        self.shapes = {name: tuple(x.shape) for name, x in params.items()}
        self.sizes = [x.numel() for x in params.values()]
        ends = list(itertools.accumulate(self.sizes))
        self.slots = {name: slice(end - size, end) for name, size, end in zip(params, self.sizes, ends, strict=True)}

    def between(self, rows: int, dtype: torch.dtype) -> int:
        """Estimated bytes of the activations of so many rows, as if every matrix belonged to a linear layer."""
        return rows * dtype.itemsize * sum(shape[0] for shape in self.shapes.values() if len(shape) == 2)

    @staticmethod
    def flat(params: Params) -> Tensor:
        """Parameters of one chain as ``[1, d]``, detached."""
        return torch.cat([x.detach().reshape(1, -1) for x in params.values()], -1)

    def views(self, flat: Tensor) -> Params:
        """The parameters as views of ``[*lead, d]``."""
        parts = torch.split(flat, self.sizes, dim=-1)
        lead = flat.shape[:-1]
        return {
            name: part.view((*lead, *shape)) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


class Many:
    """Gradients of many chains at once; parameters and batches have a leading chain dimension.

    Args:
        compile_after: number of calls after which the computation is compiled; None for never.
    """

    def __init__(
        self,
        target: Target,
        num_data: int,
        layout: Layout,
        compile_after: int | None = None,
        prior_weight: float = 1.0,
    ) -> None:
        self.target, self.num_data, self.layout, self.prior_weight = target, num_data, layout, prior_weight
        self.batched = target.batched  # parameters of all chains in one pass
        network = network_of_tables(layout.shapes) if target.layered else target.network()
        self.layers = None if network is None else Layers(network, layout.shapes)
        self.in_torch = TorchLayers(layout.shapes) if target.layered else None
        self.own = [] if target.module is None else list(target.module.extra())
        self.prior: FlatPrior | None = None
        self.evaluate = Compiled(self.flat, compile_after)

    def __call__(self, params: Params, batch: Batch, split: bool = False) -> Found:
        """As `Single`."""
        theta = torch.cat([x.detach().reshape(len(x), -1) for x in params.values()], dim=-1)
        if self.fits(theta, batch):
            loss, gradient, noise = self.flat(theta, batch, split)
        else:
            self.evaluate.products = theta.numel() * tensors_of(batch)[0].shape[1]
            loss, gradient, noise = self.evaluate(theta, batch, split)
        vectors = None if noise is None else list(self.layout.views(noise).values())
        return Found(loss, list(self.layout.views(gradient).values()), vectors)

    def fits(self, theta: Tensor, batch: Batch) -> bool:
        """Whether the library has gradients at flat parameters ``[chains, d]``, without compiler and autograd."""
        if self.layers is None or torch.compiler.is_compiling() or not isinstance(batch, tuple) or len(batch) != 2:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(theta) or batch[1].shape[:2] != batch[0].shape[:2]:
            return False
        return self.layers.fits(theta, batch[0])

    def flat(self, theta: Tensor, batch: Batch, split: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss, gradient and noise vector at flat parameters ``[chains, d]``."""
        n = tensors_of(batch)[0].shape[1]
        sizes = (n // 2, n - n // 2) if split and n >= 2 else None
        if self.fits(theta, batch):
            return self._by_library(theta, batch, sizes)
        noise = None
        if sizes is None:
            gradient, loss = self._each(theta, batch)
        else:
            if n % 2:
                first, second = (
                    tree_map(lambda t, cut=cut: t[:, cut], batch) for cut in (slice(sizes[0]), slice(sizes[0], n))
                )
                (g1, loss1), (g2, loss2) = self._each(theta, first), self._each(theta, second)
            else:  # both halves at once
                both = tree_map(lambda t: t.unflatten(1, (2, n // 2)), batch)
                (g1, g2), (loss1, loss2) = (x.unbind(1) for x in self._each(theta, both, halves=True))
            (gradient,), (noise,) = join_halves([g1], [g2], sizes)
            loss = (sizes[0] * loss1 + sizes[1] * loss2) / n
        return loss, gradient - self._scores(theta) * (self.prior_weight / self.num_data), noise

    def in_parts(self, theta: Tensor, parts: Tensors, rest: Tensors) -> tuple[Tensor, Tensor]:
        """Loss and gradient at flat parameters, one part of the batch after the other: activations stay in the cache.

        Args:
            parts: equal parts of the batch, ``[parts, chains, rows, ...]``.
            rest: the remaining rows, ``[chains, rows, ...]``; empty when there are none.
        """
        count, _, rows = parts[0].shape[:3]
        more = rest[0].shape[1] if rest else 0
        share = rows / (count * rows + more)

        def add(k: int, state: Tensors) -> Tensors:
            gradient, loss = self._each(theta, tuple(t[k] for t in parts))
            return state[0] + share * loss, state[1] + share * gradient

        none = torch.zeros_like(theta[:, 0]), torch.zeros_like(theta)
        loss, gradient = repeat(add, torch.tensor(count), count, none)
        if rest:
            last_gradient, last_loss = self._each(theta, rest)
            loss, gradient = loss + share * more / rows * last_loss, gradient + share * more / rows * last_gradient
        return loss, gradient - self._scores(theta) * (self.prior_weight / self.num_data)

    def _each(self, theta: Tensor, batch: Batch, halves: bool = False) -> tuple[Tensor, Tensor]:
        """Gradients and mean negative log likelihoods of the chains, or of both halves of their batches."""
        if self.batched:
            if not halves:
                return self._batched(theta, batch)
            both = self._batched(theta.repeat_interleave(2, 0), tree_map(lambda t: t.flatten(0, 1), batch))
            return both[0].view(len(theta), 2, -1), both[1].view(-1, 2)
        each = grad_and_value(self._loss)
        found: tuple[Tensor, Tensor] = vmap(vmap(each, (None, 0)) if halves else each)(theta, batch)
        return found

    def _batched(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same by one pass of a module through the parameters of all chains, whose losses are independent."""
        if self.in_torch is not None and not torch.compiler.is_compiling():
            return self._without_autograd(self.in_torch, theta, batch)

        def total(theta: Tensor) -> tuple[Tensor, Tensor]:
            losses = -self.target.log_likelihood_by_chain(self.layout.views(theta), batch).mean(-1)
            return losses.sum(), losses

        if torch.compiler.is_compiling():
            gradient, (_, losses) = grad_and_value(total, has_aux=True)(theta)
            return gradient, losses
        with torch.enable_grad():  # without functorch a step of a small network takes half the time
            leaf = theta.detach().requires_grad_()
            whole, losses = total(leaf)
            (gradient,) = torch.autograd.grad(whole, leaf)
        return gradient, losses.detach()

    @torch.no_grad()
    def _without_autograd(self, layers: Layers | TorchLayers, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same for networks of dense layers, whose derivatives are known in closed form."""
        (x, y), theta = batch, theta.contiguous()
        x = x.flatten(2) if x.dim() > 3 else x
        x = x if x[0].is_contiguous() else x.contiguous()  # chains may share them
        slots, shapes = self.layout.slots, self.layout.shapes
        own = {name: theta[:, slots[name]].view(len(theta), *shapes[name]) for name in self.own}
        each, slope, rest = self.target.slopes_by_chain(layers.forward(theta, x), own, y)
        gradient = layers.backward(theta, x, slope.contiguous())
        for name, found in rest.items():
            gradient[:, slots[name]] = found.reshape(len(theta), -1)
        return gradient / -y.shape[1], -each.mean(-1)

    def _loss(self, theta: Tensor, batch: Batch) -> Tensor:
        return -self.target.log_likelihood(self.layout.views(theta), batch).mean()

    def _scores(self, theta: Tensor, flat: bool = False) -> Tensor:
        """Gradients of the log prior of the chains, in closed form where there is one; if it is ``flat``, as that."""
        if self.batched or (flat and self.target.has_flat_prior):
            return self.flat_prior(theta).score(theta)
        return vmap(self._score)(theta)

    def density(self, theta: Tensor, batch: Batch) -> Density | None:
        """The whole density as the library has it, for such parameters and batches; None where it has not."""
        if not self.fits(theta, batch) or (found := self._known) is None:
            return None
        assert self.layers is not None
        y, outs = batch[1], 1 if found.classes else self.layers.outs
        fits = (
            y.dtype == (torch.int64 if found.classes else theta.dtype) and y.numel() == y.shape[1] * len(theta) * outs
        )
        return found if fits else None

    @functools.cached_property
    def _known(self) -> Density | None:
        module, slot = self.target.module, self.layout.slots.get(SCALE)
        if module is None or module.network() is None or not self.target.has_flat_prior:
            return None
        prior, likelihood = self.flat_prior(torch.empty(0, dtype=torch.float32)), module.likelihood
        weight, others = self.prior_weight / self.num_data, [(place, type(kind)) for place, kind, _ in prior.others]
        if type(likelihood) is Categorical and not others:
            return Density(-1, 1.0, weight, 1.0, True, prior.precisions)
        if type(likelihood) is not Gaussian:
            return None
        if isinstance(likelihood.scale, float) and not others:
            return Density(-1, likelihood.scale, weight, 1.0, False, prior.precisions)
        if slot is None or slot.stop - slot.start > 1 or others != [(slot, HalfCauchy)]:
            return None
        return Density(slot.start, 0.0, weight, prior.others[0][2], False, prior.precisions)

    @staticmethod
    def rows(batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs ``[chains, n, .]`` and targets as the library reads them; chains may share them."""
        x, y = batch
        x = x.flatten(2) if x.dim() > 3 else x
        if y.dtype == torch.int64:
            y = y.flatten(1) if y.dim() == 3 and y.shape[2] == 1 else y
        else:
            y = y.flatten(2) if y.dim() > 2 else y.unsqueeze(2)
        return x if x[0].is_contiguous() else x.contiguous(), y if y[0].is_contiguous() else y.contiguous()

    def _by_library(
        self, theta: Tensor, batch: Batch, sizes: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`flat` by one call; with ``sizes`` by one for each half."""
        assert self.layers is not None
        theta, density = theta.contiguous(), self.density(theta, batch)
        rows = batch if density is None else self.rows(batch)
        cuts = [slice(None)] if sizes is None else [slice(sizes[0]), slice(sizes[0], None)]
        parts = [(rows[0][:, cut], rows[1][:, cut]) for cut in cuts]
        if density is not None:
            found = [self.layers.gradient(density, theta, part) for part in parts]
        else:
            found = [self._without_autograd(self.layers, theta, part)[::-1] for part in parts]
        (loss, gradient), noise = found[0], None
        if sizes is not None:
            (gradient,), (noise,) = join_halves([gradient], [found[1][1]], sizes)
            loss = (sizes[0] * loss + sizes[1] * found[1][0]) / sum(sizes)
        if density is None:
            gradient = gradient - self._scores(theta, flat=True) * (self.prior_weight / self.num_data)
        return loss, gradient, noise

    def flat_prior(self, like: Tensor) -> FlatPrior:
        """The log prior of a target that has one."""
        if self.prior is None or self.prior.precisions.dtype != like.dtype:
            self.prior = self.target.flat_prior(self.layout.shapes, like)
        return self.prior

    def _score(self, theta: Tensor) -> Tensor:
        scores = self.target.prior_score(self.layout.views(theta))
        return torch.cat([scores[name].reshape(-1) for name in self.layout.shapes])


def batchable(target: Target, params: Params, batch: Batch, num_data: int) -> str:
    """Why chains of this target cannot run in one batched computation; empty if they can."""
    dtypes = {x.dtype for x in params.values()}
    if len(dtypes) > 1:
        return f"its parameters have several dtypes ({', '.join(sorted(map(str, dtypes)))})"
    if target.module is not None and (layer := target.module.recurrent):
        return f"torch maps the recurrent layer {layer!r} over chains by a slow loop, or not at all"
    theta = torch.cat([x.detach().reshape(-1) for x in params.values()]).expand(2, -1)
    two = tree_map(lambda t: t.expand(2, *t.shape), batch)
    for split in (False, True):  # halves of a batch are mapped, too
        wanted = Single(target, num_data)(params, batch, split)
        try:
            loss, gradient, _ = Many(target, num_data, Layout(params)).flat(theta, two, split)
        except Exception as error:  # whatever a user's code may raise under vmap
            return f"the model cannot be mapped over chains ({first_line(error)})"
        expected = torch.cat([g.reshape(-1) for g in wanted.gradients])
        scale = expected.abs().amax().clamp_min(1e-4)  # vanishing gradients differ by rounding alone
        loss_off = (loss - wanted.loss).abs().amax() / wanted.loss.abs().amax().clamp_min(1.0)
        off = max(float((gradient - expected).abs().amax() / scale), float(loss_off))
        if not off < 1e-2 and bool(torch.isfinite(expected).all()):
            return f"mapped over chains the model gives other gradients (off by {off:.1g} of their largest)"
    return ""


def stacked(starts: Sequence[Params]) -> Params:
    """Parameters of many chains as one set ``[chains, *shape]``, views of one flat buffer."""
    flat = torch.stack([torch.cat([x.detach().reshape(-1) for x in params.values()]) for params in starts])
    return {name: x.requires_grad_() for name, x in Layout(starts[0]).views(flat).items()}
