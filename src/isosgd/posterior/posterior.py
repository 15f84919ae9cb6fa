"""`Posterior`: draws, predictions from them, comparisons with trained networks, and diagnostics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isosgd.data.sources import as_tensors, joined
from isosgd.diagnostics.meter import LEAST
from isosgd.diagnostics.summary import PosteriorSummary, summary_of
from isosgd.diagnostics.traces import as_array
from isosgd.diagnostics.verdict import ESS, IN_CYCLES, RHAT, Verdict, judge
from isosgd.errors import check_integer
from isosgd.metrics.checks import between_0_and_1
from isosgd.posterior.arviz import to_datatree
from isosgd.posterior.calibration import (
    Densities,
    averaged,
    best_width,
    name_of_width,
    warn_of_end,
    widths_of,
)
from isosgd.posterior.comparison import Comparison, compare
from isosgd.posterior.draws import (
    Device,
    Draws,
    Headed,
    Mapped,
    Stack,
    batches_of,
    by_chain,
    device_of,
    evenly,
    moved,
    place_of,
)
from isosgd.posterior.prediction import Average, Prediction, join
from isosgd.posterior.quantities import chosen_parameters, followed
from isosgd.posterior.starts import STARTS, State, as_states, stacked, with_noise_scale
from isosgd.posterior.temperature import DrawGradients, measure
from isosgd.posterior.view import Function, View
from isosgd.samplers.shards import is_sharded, rows_here
from isosgd.target import Likelihood, Params, Target
from isosgd.target.batches import (
    batch_length,
    inputs_of,
    label_name,
    labels_of,
    tensors_of,
    with_labels,
    with_tensors,
)
from isosgd.target.heads import Head
from isosgd.target.likelihoods import Tokens
from isosgd.target.modules import unwrapped


class Posterior:
    """Posterior draws, predictions from them, and diagnostics.

    Args:
        target: what was sampled; without it (None) draws cannot predict.
        draws: natural parameters, tensors ``[chains, draws, *shape]`` by name. A mapping with a method
            ``draw(chain, index)`` is read one draw at a time.
        info: how the draws were made: settings, rates, warm-up reports, seed, versions.
        data: the training data, for `summary` and `trust`.
        buffers: of the network at each draw, such as BatchNorm statistics, if it has any.
        starts: the trained networks at which chains started, or their state_dicts; for `against_start`.

    Attributes:
        target: what was sampled, or None.
        info: how the draws were made.
        data: the training data, or None.
        starts: state_dicts of the trained networks at which chains started, or None.
    """

    def __init__(
        self,
        target: Target | None,
        draws: Draws,
        info: dict[str, Any],
        data: Any = None,
        buffers: Draws | None = None,
        starts: Sequence[State] | None = None,
    ) -> None:
        self.target, self.info, self.data = target, info, data
        self.starts = None if starts is None else as_states(starts)
        self._stack = Stack(draws, buffers)
        self._view: View | None = None

    # ---------------------------------------------------------------- draws

    @property
    def draws(self) -> Draws:
        """Natural parameters, tensors ``[chains, draws, *shape]`` by name."""
        return self._stack.draws

    @property
    def buffers(self) -> Draws:
        """Buffers of the network at each draw, tensors ``[chains, draws, *shape]`` by name."""
        return self._stack.buffers

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return self._stack.num_chains

    @property
    def num_draws(self) -> int:
        """Draws of each chain."""
        return self._stack.num_draws

    def __len__(self) -> int:
        return len(self._stack)

    def __iter__(self) -> Iterator[Params]:
        """All draws as natural parameters, one chain after the other."""
        for chain in range(self.num_chains):
            for index in range(self.num_draws):
                yield self.draw(chain, index)

    def draw(self, chain: int, index: int) -> Params:
        """One draw, as natural parameters."""
        return self._stack.draw(chain, index)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        size = f"{self.num_chains} chains x {self.num_draws} draws"
        return f"Posterior({size} of {shapes}; method={self.info.get('method')!r})"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return self._stack.shapes

    @torch.no_grad()
    def load_into(self, model: nn.Module, chain: int = 0, index: int = -1) -> None:
        """Copy the parameters and buffers of a draw into a model, which DDP or `torch.compile` may wrap.

        For a model sharded over ranks (`fully_shard`), every rank makes this call and reads only its rows. Sampled
        scales are left out.

        Args:
            model: the network that was sampled, or another one with parameters of the same names and shapes.
            chain: number of the chain.
            index: of the draw.
        """
        model = unwrapped(model)
        if dist.is_available() and dist.is_initialized():
            from torch.distributed.fsdp import FSDPModule  # a slow import

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # whole parameters may be left from a forward pass
        held = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
        shapes = self.shapes | (Stack(self.buffers).shapes if self.buffers else {})
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(("likelihood.", "prior."))}
        for name, shape in shapes.items():
            if name not in held:
                raise ValueError(
                    f"the draws have {name!r}, which the model has not: pass one like that which was drawn"
                )
            if tuple(held[name].shape) != shape:
                raise ValueError(
                    f"{name!r} has the shape {tuple(held[name].shape)} in the model, and {shape} in the draws"
                )
        rows = {name: rows_here(held[name]) for name in self.draws if name in shapes and is_sharded(held[name])}
        draw = self._stack.draw(chain, index, rows)
        draw |= Stack(self.buffers).draw(chain, index) if self.buffers else {}
        for name in shapes:
            to: Any = held[name]
            (to.to_local() if name in rows else to).copy_(draw[name])

    def select(self, chains: Sequence[int] | None = None, draws: slice | None = None) -> Posterior:
        """Some chains and some of their draws, such as ``select(chains=[0, 1], draws=slice(100, None))``."""
        if isinstance(chains, int) or not isinstance(draws, slice | None):
            raise TypeError(
                f"chains = {chains!r} must be a list such as [0, 1], and draws = {draws!r} a slice such as slice(10)"
            )
        kept = list(range(self.num_chains)) if chains is None else list(chains)
        if not kept or not all(0 <= k < self.num_chains for k in kept):
            raise ValueError(f"chains = {chains!r} must name some of {self.num_chains} chains, counted from 0")
        which = range(self.num_draws)[slice(None) if draws is None else draws]
        if not which:
            raise ValueError(f"draws = {draws!r} leaves none of {self.num_draws} draws")
        info: dict[str, Any] = {**self.info, "chains": len(kept), "draws": len(which), **_counted(self.info, which)}
        for key in ("warmup", "rates", "keep_every", "chain_indices"):
            if key in info and len(info[key]) == self.num_chains:
                info[key] = [info[key][k] for k in kept]
        part = self._stack.select(kept, which)
        return Posterior(self.target, part.draws, info, self.data, part.buffers, self.starts)

    def of_set(self, index: int) -> Posterior:
        """The chains of one of several data sets (see `isosgd.DataSets`)."""
        sets = int(self.info.get("sets", 1))
        if not 0 <= index < sets:
            raise ValueError(f"there is no data set {index!r}; there are {sets}, counted from 0")
        numbers = self.info.get("chain_indices") or range(self.num_chains)
        # Without a selection, the number of chains gives that of each set.
        each = self.info.get("chains_per_set") or (self.num_chains + len(self.info.get("dropped", ()))) // sets
        mine = [k for k, number in enumerate(numbers) if number // each == index]
        if not mine:
            raise ValueError(f"all chains of data set {index} diverged, so that none is left")
        chosen = self.select(chains=mine)
        data = self.data.set(index) if hasattr(self.data, "set") else None
        return Posterior(self.target, chosen.draws, chosen.info | {"sets": 1}, data, chosen.buffers, self.starts)

    @property
    def view(self) -> View:
        """The target, to be evaluated at draws."""
        if self.target is None:
            raise ValueError(
                "these draws came without their target, which says what they predict: pass it to isosgd.load(path, "
                "target=...)"
            )
        if self._view is None:
            self._view = View(self.target, self.width)
        return self._view

    # ---------------------------------------------------------------- predictions

    @torch.no_grad()
    def predict(
        self,
        x: Any,
        *,
        batch_size: int | None = None,
        function: Function | None = None,
        levels: Sequence[float] = (),
        refresh: Any = None,
        return_draws: bool = False,
        device: Device = None,
    ) -> Prediction:
        """Average the predictions of all draws. Running sums keep memory independent of the number of draws.

        Args:
            x: inputs, as the model or the target's ``predict`` takes them. Predictions are on their device.
            batch_size: inputs per batch; all by default.
            function: your own ``(model, params, x) -> Tensor[n, ...]`` to average instead of the target's prediction.
                ``model`` is the network at a draw; its outputs and ``params`` are not calibrated (`width`). A dict of
                ``mean`` and ``variance`` means normal noise around the mean.
            levels: quantiles of y to compute, such as ``(0.025, 0.5, 0.975)``, of the mixture over draws.
            refresh: batches of training data or inputs that give each draw its BatchNorm statistics.
            return_draws: also return the prediction of each draw.
            device: where to compute; by default the device of the target's model if it is an accelerator, else that of
                the inputs.

        Example:
            >>> from isosgd import Target, priors
            >>> target = Target(
            ...     lambda p, b: -0.5 * (b[1] - p["w"] * b[0]) ** 2, priors.Normal(1.0), init={"w": 0.0},
            ...     predict=lambda p, x: {"mean": p["w"] * x, "variance": torch.ones_like(x)},
            ... )
            >>> posterior = Posterior(target, {"w": torch.tensor([[1.0, 2.0, 3.0]])}, {})
            >>> found = posterior.predict(torch.tensor([0.0, 1.0]), levels=(0.025, 0.975))
            >>> found.mean, found.variance
            (tensor([0., 2.]), tensor([1.0000, 1.6667]))
            >>> low, high = found.interval(0.95)
            >>> low, high
            (tensor([-1.9600, -0.4883]), tensor([1.9600, 4.4883]))
        """
        if isinstance(levels, int | float):
            raise TypeError(f"levels = {levels!r} must be a tuple such as ({levels!r},)")
        levels = tuple(between_0_and_1("levels", level) for level in levels)
        x = with_tensors(x, self.view.target.dtype)
        view, place = self.view, self._place(device, x)
        if refresh is not None:
            fresh = self.refreshed(refresh, device=place)
            return fresh.predict(
                x, batch_size=batch_size, function=function, levels=levels, return_draws=return_draws, device=place
            )
        self._warn_of_batch_statistics(view)
        if function is None:
            call, classes, df = Mapped(view.predict), view.classes, view.df
        else:
            call, classes, df = Mapped(partial(view.apply, function)), False, math.inf
        if levels and classes:
            raise ValueError(
                "levels: class labels have no quantiles; for those of a probability give function=, such as "
                "lambda model, params, x: model(x).softmax(1)"
            )
        if function is None and view.network is not None:
            view.network.check_inputs(self._first(place), x)
        head = None if function is not None else self._head(x, place)
        if head is not None:
            call, first = Mapped(head[1].predict), moved(self.draw(0, 0), place)
        done: list[Prediction] = []
        for parts in self._groups(x, batch_size, bounded=bool(levels)):
            if head is not None:
                assert view.network is not None
                parts = [head[0].features(view.network.as_inputs(moved(part, place)), first) for part in parts]
            averages = [Average(classes, keep=return_draws or bool(levels)) for _ in parts]
            for block, times in self._stack.blocks(parts[0], device=place):
                for part, average in zip(parts, averages, strict=True):
                    part = moved(part, place)
                    average.add(*_mean_and_variance(call(block, part), part, batch_size), times)
            done += [a.prediction(self.num_chains, levels, df, return_draws).to(device_of(x)) for a in averages]
        return join(done)

    @torch.no_grad()
    def simulate(self, x: Any, *, seed: int = 0, batch_size: int | None = None, device: Device = None) -> Tensor:
        """Simulated outcomes, one for each input at each draw, ``[chains, draws, n]``.

        Args:
            x: inputs, as for `predict`.
            seed: of the outcomes.
            batch_size: inputs per batch; all by default.
            device: where to compute, as for `predict`.

        Example:
            >>> from isosgd import Target, likelihoods
            >>> target = Target.from_module(torch.nn.Linear(1, 1, bias=False), likelihoods.Gaussian(0.1))
            >>> posterior = Posterior(target, {"weight": torch.full((2, 500, 1, 1), 3.0)}, {})
            >>> y = posterior.simulate(torch.ones(4, 1))
            >>> y.shape, abs(float(y.mean()) - 3) < 0.01, abs(float(y.std()) - 0.1) < 0.01
            (torch.Size([2, 500, 4, 1]), True, True)
        """
        network, x = self.view.network, with_tensors(x, self.view.target.dtype)
        if network is None or not isinstance(network.likelihood, Likelihood):
            raise ValueError(
                "outcomes can be simulated under one of isosgd.likelihoods only: make the target by Target.from_module "
                "with one of them"
            )
        self._warn_of_batch_statistics(self.view)
        likelihood, place = network.likelihood, self._place(device, x)
        generator = torch.Generator(place).manual_seed(seed)
        network.check_inputs(self._first(place), x)
        outputs = Mapped(lambda p, part: network.logits(network.output(p, network.as_inputs(part)), p))
        parts = []
        for part in batches_of(x, batch_size):
            part, drawn = moved(part, place), []
            for block, times in self._stack.blocks(part, device=place):
                for k, output in list(enumerate(outputs(block, part))) * times:
                    wide = network.widened(output, {name: t[k] for name, t in block.items()})
                    drawn.append(likelihood.simulate(*wide, generator))
            parts.append(torch.stack(drawn).to(device_of(x)))
        return by_chain(torch.cat(parts, 1), self.num_chains)

    @torch.no_grad()
    def log_likelihood(self, batch: Any, *, batch_size: int | None = None, device: Device = None) -> Tensor:
        """Log likelihood of each example at each draw, ``[chains, draws, n]``.

        Args:
            batch: examples as in the data, for instance ``(x, y)``.
            batch_size: examples per batch; all by default.
            device: where to compute, as for `predict`.
        """
        batch = with_tensors(batch, self.view.target.dtype)
        home, parts = device_of(batch), self._log_likelihoods(batch, batch_size, device)
        return by_chain(torch.cat([torch.cat([x.to(home) for x in blocks]) for blocks in parts], 1), self.num_chains)

    @torch.no_grad()
    def log_predictive(self, batch: Any, *, batch_size: int | None = None, device: Device = None) -> Tensor:
        """Log density of each example under the model average: ``log mean_draws p(y | x, draw)``, ``[n]``.

        Args:
            batch: examples as in the data, for instance ``(x, y)``.
            batch_size: examples per batch; all by default.
            device: where to compute, as for `predict`.
        """
        batch, parts = with_tensors(batch, self.view.target.dtype), []
        for blocks in self._log_likelihoods(batch, batch_size, device):
            total = torch.tensor(-math.inf, dtype=torch.float64)
            for values in blocks:
                total = torch.logaddexp(total.to(values.device), values.double().logsumexp(0))
            parts.append((total - math.log(len(self))).to(device_of(batch), values.dtype))
        return torch.cat(parts)

    @torch.no_grad()
    def refreshed(self, batches: Any, *, device: Device = None) -> Posterior:
        """The same draws with BatchNorm statistics recomputed for each, as averages over these batches.

        Args:
            batches: an iterable of batches such as a DataLoader or a list, of data or of inputs; a tuple of tensors is
                one batch. Each draw makes one pass over it.
            device: where to compute, as for `predict`; "inputs" are tensors given as such or in a list.
        """
        network = self.view.network
        if network is None:
            raise ValueError("refresh= is for targets made by Target.from_module: this one has no network")
        network.check_refresh()
        if isinstance(batches, Tensor | Mapping) or (
            isinstance(batches, tuple) and all(isinstance(t, Tensor) for t in batches)
        ):
            batches = [batches]
        found: list[Params] = []
        for block, times in self._stack.blocks(None, 1, self._place(device, batches)):
            fresh = network.refreshed({name: x[0] for name, x in block.items()}, batches)
            found += [{name: x.cpu() for name, x in fresh.items()}] * times
        each = {name: by_chain(torch.stack([one[name] for one in found]), self.num_chains) for name in found[0]}
        return Posterior(self.target, self.draws, self.info, self.data, {**self.buffers, **each}, self.starts)

    @torch.no_grad()
    def densities(
        self, batch: Any, counts: Sequence[int] = (), *, batch_size: int | None = None, device: Device = None
    ) -> Densities:
        """Log densities of examples under averages over draws, at many widths of predictions if they have one.

        Args:
            batch: examples as in the data, for instance ``(x, y)``.
            counts: for each average, the number of first draws of each chain in it; all draws by default.
            batch_size: examples per batch; all by default.
            device: where to compute, as for `predict`.
        """
        batch, network = with_tensors(batch, self.view.target.dtype), self.view.network
        widths = widths_of(network and network.likelihood)
        found = [
            averaged(every, widths, counts or [self.num_draws], self.num_draws)
            for every in self._log_likelihoods(batch, batch_size, device, widths)
        ]
        return Densities.joined(found)

    @property
    def softmax_temperature(self) -> float:
        """Divisor of the logits of every draw in class predictions; see `calibrated`."""
        return float(self.info.get("softmax_temperature", 1.0))

    @property
    def noise_factor(self) -> float:
        """Factor of the noise scale of every draw in predictions of a regression; see `calibrated`."""
        return float(self.info.get("noise_factor", 1.0))

    @property
    def width(self) -> float:
        """Of predictions: the `softmax_temperature` of classes, or the `noise_factor` of a regression."""
        return self.softmax_temperature * self.noise_factor  # one of them is 1

    def at_softmax_temperature(self, temperature: float) -> Posterior:
        """The same draws with logits divided by ``temperature`` in predictions.

        `summary` and `trust` still judge the draws as they were sampled.

        Args:
            temperature: above 1 for less confident predictions; 1 changes nothing.
        """
        return self._at_width(temperature, classes=True)

    def at_noise_factor(self, factor: float) -> Posterior:
        """The same draws with their noise scales multiplied by ``factor`` in predictions of a regression.

        `summary` and `trust` still judge the draws as they were sampled.

        Args:
            factor: above 1 for less confident predictions; 1 changes nothing.
        """
        return self._at_width(factor, classes=False)

    def at_width(self, width: float) -> Posterior:
        """The same draws `at_softmax_temperature`, or `at_noise_factor` for a regression."""
        return self._at_width(width, self.view.classes)

    def _at_width(self, width: float, classes: bool) -> Posterior:
        name, network = name_of_width(classes), self.view.network
        if not isinstance(width, Real) or not (math.isfinite(width) and float(width) > 0):
            raise ValueError(f"{name} = {width!r} must be a positive number; 1 changes nothing")
        if network is None or len(widths_of(network.likelihood)) == 1:
            what = "of this target" if network is None else f"under {self.view.target.describe()['likelihood']['name']}"
            raise ValueError(
                f"predictions {what} have no {name}: make the target by Target.from_module, for classes with "
                "'categorical' or 'bernoulli', for numbers with noise whose scale is sampled or predicted"
            )
        if classes != self.view.classes:
            kind = "classes" if classes else "regressions"
            raise ValueError(f"a {name} is for {kind}; here there is a {name_of_width(not classes)}")
        info = {**self.info, name.replace(" ", "_"): float(width)}
        return Posterior(self.target, self.draws, info, self.data, self.buffers, self.starts)

    def calibrated(self, x: Any, y: Any = None, *, batch_size: int | None = None, device: Device = None) -> Posterior:
        """The same draws at the `softmax_temperature` or `noise_factor` that predicts held-out examples best.

        ``sample(starts=..., held_out=...)`` does this. A few examples change little: those that gain most are left out,
        and as many with random labels are added. Noise is never made smaller.

        Args:
            x: inputs that no network was trained on, as for `predict`; or a loader of inputs and ``y``.
            y: what is to be predicted; not needed if ``x`` is a loader or a dict that has it.
            batch_size: examples per batch; all by default.
            device: where to compute, as for `predict`.
        """
        plain, examples = self.at_width(1.0), self._examples(x, y, "calibrated")[1]
        if batch_length(examples) == 0:
            name = name_of_width(self.view.classes)
            raise ValueError(f"calibrated was given no examples: there is nothing to choose a {name} by")
        found = plain.densities(examples, batch_size=batch_size, device=device)
        width = found.widths[best_width(found)]
        warn_of_end(width, self.view.classes)
        return plain.at_width(width)

    def _groups(self, x: Any, batch_size: int | None, bounded: bool = False) -> Iterator[list[Any]]:
        """Batches that share a pass over the draws.

        All batches share one if a draw is larger than the inputs, so that it is read once. Otherwise, and if memory
        must be ``bounded`` by one batch, each batch has its own pass.
        """
        parts = batches_of(x, batch_size)
        size = sum(math.prod(shape) for shape in self.shapes.values())
        if batch_size is None or bounded or size < sum(t.numel() for t in tensors_of(x)):
            yield from ([part] for part in parts)
        else:
            yield list(parts)

    def _log_likelihoods(
        self, batch: Any, batch_size: int | None, device: Device, widths: tuple[float, ...] = ()
    ) -> Iterator[Iterator[Tensor]]:
        """For each batch of the examples, their log likelihoods at each block of draws, ``[draws, n]``.

        With widths of predictions ``[draws, n, widths, 2]``, as from `View.log_likelihoods_at`.
        """
        view, place = self.view, self._place(device, batch)
        if view.network is not None and batch_length(batch) != 0:
            view.network.check(self._first(place), batch)
        head = None if view.network is None else self._head(view.target.inputs_of(batch), place)
        at_draw = view if head is None else head[1]
        call = Mapped(partial(at_draw.log_likelihoods_at, widths=widths) if widths else at_draw.log_likelihood)
        for parts in self._groups(batch, batch_size):
            if head is not None:
                parts = [head[0].batch(moved(part, place), moved(self.draw(0, 0), place)) for part in parts]

            def at(block: Params, parts: list[Any] = parts) -> Tensor:
                return torch.cat([call(block, moved(part, place)) for part in parts], 1)

            blocks = self._stack.blocks(parts[0], device=place)
            yield (found for block, times in blocks for found in repeat(at(block), times))

    def _first(self, place: torch.device) -> Params:
        """The first draw with its buffers."""
        block, _ = next(self._stack.blocks(None, 1, place))
        return {name: x[0] for name, x in block.items()}

    def _head(self, x: Any, place: torch.device) -> tuple[Head, View] | None:
        """The sampled head of the network, if all other parameters are the same at all draws."""
        network = self.view.network
        return None if network is None or self.buffers else self.view.head(moved(network.as_inputs(x), place))

    def _place(self, device: Device, inputs: Any) -> torch.device:
        return place_of(device, self.view.target.device, inputs)

    def _warn_of_batch_statistics(self, view: View) -> None:
        if view.network is not None and not self.buffers and (layer := view.network.batch_statistics):
            warnings.warn(
                f"layer {layer!r} normalises with the statistics of the batch that an input is predicted with; pass "
                "refresh=, batches of training data, for predictions that do not depend on it",
                UserWarning,
                stacklevel=4,
            )

    def _examples(self, x: Any, y: Any, caller: str) -> tuple[Any, Any]:
        """Inputs, and a batch of inputs and labels."""
        view = self.view
        labels = None if view.network is None else view.network.labels
        if y is None:
            if isinstance(x, Iterable) and not isinstance(x, str | Mapping) and as_tensors(x) is None:
                batch: Any = joined(x, view.target, caller)
                return view.target.inputs_of(batch), batch
            if not isinstance(x, Mapping):
                raise TypeError(
                    f"{caller}(x, y) needs y, what is to be predicted; only a dict or the batches of a loader may have "
                    "it in x"
                )
            y = x[label_name(x, labels)]
        inputs = with_tensors(inputs_of(x, labels) if isinstance(x, Mapping) else x, view.target.dtype)
        return inputs, with_tensors(with_labels(inputs, y, labels), view.target.dtype)

    # ---------------------------------------------------------------- trained starts

    def with_starts(self, share: float, starts: Any = None) -> Posterior:
        """The draws together with the trained networks at which chains started, which get a ``share`` of predictions.

        A network stands in front of each chain and counts ``info["from_start"]`` times, the whole number nearest to the
        share; it is stored and evaluated once. With a share above 1/2, up to half of the draws are left out, evenly
        spaced, which makes predictions faster. `summary` and `trust` judge only the chains.

        Args:
            share: weight of the networks in every average, between 0 and 1.
            starts: trained networks or their state_dicts; those of ``sample(starts=...)`` by default.

        Example:
            >>> from isosgd import Target
            >>> start = torch.nn.Linear(1, 1, bias=False)
            >>> posterior = Posterior(Target.from_module(start, "gaussian"), {
            ...     "weight": torch.zeros(1, 6, 1, 1), "likelihood.scale": torch.ones(1, 6)}, {}, starts=[start])
            >>> both = posterior.with_starts(0.25)
            >>> both.num_draws, both.info["from_start"]
            (8, 2)
        """
        share = between_0_and_1("share", share)
        if self.info.get("from_start"):
            return self._without_starts().with_starts(share, starts)
        states = self._states(starts)
        if starts is not None and len(states) > self.num_chains:  # chains of own starts may have been dropped
            raise ValueError(f"{len(states)} starts for {self.num_chains} chains: each chain has one at its head")
        count = math.ceil(self.num_draws * min(1.0, max(0.5, (1 - share) / share)))
        copies = round(count * share / (1 - share))
        which = evenly(self.num_draws, count).tolist()
        part = self._stack.select(list(range(self.num_chains)), which)
        known = {} if starts is not None else dict(enumerate(self.info.get("start_of_chain", ())))  # merged runs
        chains = self.info.get("chain_indices") or range(self.num_chains)
        own = [known.get(k, k % len(states)) for k in chains]
        heads, draws, buffers = self.start_draws(states), part.draws, part.buffers
        if copies:
            like = part.draw(0, 0)
            draws = Headed({name: heads.draws[name][own].to(x) for name, x in like.items()}, copies, draws)
            like = Stack(buffers).draw(0, 0) if buffers else {}
            buffers = Headed({name: heads.buffers[name][own].to(x) for name, x in like.items()}, copies, buffers)
        info = {**self.info, **_counted(self.info, which), "draws": copies + count, "from_start": copies}
        return Posterior(self.target, draws, info, self.data, buffers, states)

    def start_draws(self, starts: Any = None) -> Posterior:
        """Trained networks as draws, one per chain. A noise scale that they lack is the geometric mean over the draws.

        Args:
            starts: trained networks or their state_dicts; those of ``sample(starts=...)`` by default.
        """
        target, states = self.view.target, self._states(starts)
        if not self.num_draws:
            raise ValueError("the posterior has no draws yet: isosgd.resume(store, target, data) goes on with its run")
        free = target.unconstrain(self.draw(0, 0))
        scales = {name: self.draws[name].double().log().mean((0, 1)).exp() for name in target.extras(free)}
        params, buffers = stacked(states, target, scales)
        return Posterior(target, params, {}, None, buffers)

    @torch.no_grad()
    def against_start(
        self, x: Any, y: Any = None, *, starts: Any = None, batch_size: int | None = None, device: Device = None
    ) -> Comparison:
        """Scores on new examples: the trained networks at which chains started against the average over draws.

        A network without a noise scale gets the one under which it predicts these examples best.

        Args:
            x: inputs that were not trained on, as for `predict`; or a loader of inputs and ``y``.
            y: what is to be predicted; not needed if ``x`` is a loader or a dict that has it.
            starts: trained networks or their state_dicts, one or several; those of ``sample(starts=...)`` by default.
            batch_size: inputs per batch; all by default.
            device: where to compute, as for `predict`.

        Example:
            >>> from isosgd import Target
            >>> start = torch.nn.Linear(1, 2)
            >>> _ = start.load_state_dict({"weight": torch.tensor([[4.0], [-4.0]]), "bias": torch.zeros(2)})
            >>> draws = {"weight": torch.tensor([[1.0], [-1.0]]).expand(1, 3, 2, 1), "bias": torch.zeros(1, 3, 2)}
            >>> posterior = Posterior(Target.from_module(start, "categorical"), draws, {})
            >>> x, y = torch.tensor([[1.0], [-1.0], [0.5], [0.5]]), torch.tensor([0, 1, 0, 1])
            >>> found = posterior.against_start(x, y, starts=[start])
            >>> print(found)
                                   NLL  accuracy     Brier       ECE
            start               1.0092    75.00%    0.4823    0.2408
            average of draws    0.4701    75.00%    0.3176    0.1751
            NLL -0.5391 +- 0.7230 an example (ratio 0.466): no difference in the mean of 4 examples, 3 draws
        """
        self._check_sets()
        view = self.view
        states = self._states(starts)
        inputs, batch = self._examples(x, y, "against_start")
        if batch_length(batch) == 0:
            raise ValueError("against_start was given no examples: there is nothing to compare")
        if self.num_draws and view.target.noise_scales():
            states = [with_noise_scale(view.target, state, batch, device) for state in states]
        began = self.start_draws(states)
        each = began.log_likelihood(batch, batch_size=batch_size, device=device)[:, 0]
        average = self.log_predictive(batch, batch_size=batch_size, device=device)
        predicted = None
        # The meaning of the output of a callable likelihood is unknown, so that it is not scored.
        if view.target.predicts and (view.network is None or isinstance(view.network.likelihood, Likelihood)):
            found = began.predict(inputs, batch_size=batch_size, return_draws=True, device=device).draws
            assert found is not None
            mean = self.predict(inputs, batch_size=batch_size, device=device).mean
            predicted = [*(one.cpu() for one in found[:, 0]), mean.cpu()]
        y = (labels_of(batch) if view.network is None else view.network.labels_in(batch)).cpu()
        if view.network is not None and isinstance(view.network.likelihood, Tokens) and predicted is not None:
            pairs = [view.network.likelihood.scored(one, y) for one in predicted]
            predicted, y = [one for one, _ in pairs], pairs[0][1]
        drawn = self.num_chains * (self.num_draws - int(self.info.get("from_start", 0)))  # without copies of networks
        return compare(each, average, predicted, y, view.classes, drawn)

    def _states(self, starts: Any) -> Sequence[State]:
        """Trained networks as given, or those at which chains started."""
        states = self.starts if starts is None else as_states(starts)
        if states is None:
            raise ValueError("the networks that chains began with are not at hand: pass them, starts=[model]")
        return states

    def _without_starts(self) -> Posterior:
        """The draws without the trained networks in front of each chain."""
        found = self.select(draws=slice(self.info.get("from_start", 0), None))
        found.info.pop("from_start", None)
        return found

    def _own(self) -> Posterior:
        """The draws as they were sampled: without trained networks, at width 1."""
        if not self.info.get("from_start") and self.width == 1:
            return self
        found = self._without_starts()
        for name in ("softmax_temperature", "noise_factor"):
            found.info.pop(name, None)
        return found

    # ---------------------------------------------------------------- diagnostics

    def summary(
        self,
        data: Any = None,
        *,
        inputs: Any = None,
        parameters: Sequence[str] | None = None,
        examples: int = 16,
        device: Device = None,
    ) -> PosteriorSummary:
        """R-hat, effective draws and Monte-Carlo errors of predictions, log likelihoods and parameters.

        Args:
            data: examples to predict, such as held-out ones; the training data by default, if they are known.
            inputs: inputs for the target's ``predict``, where they are not all but the last tensor of the data.
            parameters: names or shell patterns of parameters to look at, such as ``["likelihood.scale", "*.bias"]``;
                the scales of likelihood and prior, and all parameters where they are few, by default.
            examples: number of examples to look at, evenly spaced in the data.
            device: where to compute, as for `predict`.

        Example:
            >>> draws = {"mu": torch.randn(4, 250, generator=torch.Generator().manual_seed(0))}
            >>> found = Posterior(None, draws, {}).summary()
            >>> found.rows[0].name, found.rhat < 1.01, found.as_dict()["chains"]
            ('mu', True, 4)
        """
        check_integer("examples", examples, 1)
        self._check_sets()
        own = self._own()
        traces = followed(own, data, inputs, examples, device)
        for name in chosen_parameters(own.shapes, parameters):
            traces[name] = ("parameter", own.draws[name])
        return summary_of(traces)

    def trust(
        self,
        data: Any = None,
        *,
        temperature: float | None = None,
        inputs: Any = None,
        held_out: Any = None,
        rows: int | None = None,
        rhat: float = RHAT,
        ess: float = ESS,
        examples: int = 16,
        seed: int = 0,
        device: Device = None,
    ) -> Verdict:
        """Whether to believe the draws: "trust it", "run longer" or "it samples something else", and why.

        Judged by convergence of predictions, by the temperature meter, and by what the warm-up found.

        Args:
            data: all training data; gradients at the draws give the temperature. The sampled data by default, if they
                are known.
            temperature: the target temperature T; by default that of the run.
            inputs: inputs for the target's ``predict``, if they are not all but the last tensor of the data.
            held_out: examples whose predictions are judged; some of the training data by default. Draws around trained
                networks are also compared with these, as by `against_start`.
            rows: examples in each gradient, drawn anew for every draw; by default all, or as many as are affordable.
            rhat: largest R-hat to believe.
            ess: least effective number of draws to believe.
            examples: number of examples whose predictions are judged.
            seed: of the examples in gradients.
            device: where to compute, as for `predict`.
        """
        self._check_sets()
        assert self.view  # raises an error without a target
        data = self.data if data is None else data
        if data is None:
            raise ValueError(
                "the temperature is read from gradients of the training data: pass them, posterior.trust(data); "
                "posterior.summary() does without"
            )
        if self.info.get("method") == STARTS:
            raise ValueError(
                "the draws are the trained networks themselves, since no temperature was better: there is nothing to "
                "judge. posterior.info['temperature_choice'] says what was tried"
            )
        wanted = float(self.info.get("temperature", 1.0) if temperature is None else temperature)
        if not wanted > 0:
            raise ValueError(f"temperature = {wanted} must be positive: the draws cannot be compared with a point")
        own = self._own()
        if own.num_draws < LEAST:
            raise ValueError(
                f"{own.num_draws} draws of a chain are too few for a verdict, which takes {LEAST} at least: sample for "
                "longer, or go on with a stored run (isosgd.resume)"
            )
        num_data = self.info.get("num_data")
        found, along = measure(DrawGradients(own._stack, own.view, data, num_data, rows, seed, device, wanted))
        traces = followed(own, held_out if held_out is not None else data, inputs, examples, device)
        every = [as_array(x).reshape(own.num_chains, own.num_draws, -1) for _, x in traces.values()]
        reports = self.info.get("warmup", [])
        longer = IN_CYCLES if self.info.get("options", {}).get("lr") == "heated" else ""  # they take no other
        verdict = judge(wanted, found, along, summary_of(traces), np.concatenate(every, -1), reports, rhat, ess, longer)
        return replace(verdict, opening=self._opening(held_out, device))

    def to_arviz(self, data: Any = None, *, parameters: Sequence[str] | None = None, seed: int = 0) -> Any:
        """The draws as an ``xarray.DataTree`` for ArviZ (``pip install "isosgd[arviz]"``).

        Groups are ``posterior`` and ``sample_stats`` (temperature, and rates by layer if known), and with data
        ``log_likelihood``, ``observed_data``, ``posterior_predictive`` (under one of `isosgd.likelihoods`, see
        `simulate`), and the mean negative log likelihood as ``loss`` in ``sample_stats``.

        Args:
            data: examples such as ``(x, y)``.
            parameters: names or shell patterns of the parameters to take; all by default.
            seed: of simulated outcomes.
        """
        names = list(self.shapes) if parameters is None else chosen_parameters(self.shapes, parameters)
        return to_datatree(self._own(), data, names, seed)

    def _opening(self, held_out: Any, device: Device) -> tuple[str, ...]:
        """First lines of the verdict: comparison with trained starts on given examples, choice of temperature."""
        lines = []
        if self.starts is not None and isinstance(held_out, tuple | list | Mapping) and len(held_out) > 1:
            inputs = self.view.target.inputs_of(held_out)
            one = isinstance(inputs, tuple) and len(inputs) == 1
            y = self.view.target.labels_of(held_out)
            compared = self.against_start(inputs[0] if one else inputs, y, device=device)
            lines.append(f"Against the start: {str(compared).splitlines()[-1 if compared.worth is None else -2]}.")
        choice = self.info.get("temperature_choice", {}).get("reason", "given")
        return (*lines, *([] if choice == "given" else [f"Temperature: {choice}."]))

    def _check_sets(self) -> None:
        if (sets := int(self.info.get("sets", 1))) > 1:
            raise ValueError(
                f"these draws are of {sets} data sets, which have different posteriors: choose the chains of one, "
                "posterior.of_set(i)"
            )


def _counted(info: Mapping[str, Any], which: Sequence[int]) -> dict[str, int]:
    """Among selected draws, the number of trained starts and the number from a trial of temperatures."""
    first = int(info.get("from_start", 0))
    parts = {"from_start": range(first), "from_rung": range(first, first + int(info.get("from_rung", 0)))}
    return {name: sum(i in part for i in which) for name, part in parts.items() if name in info}


def _mean_and_variance(found: Any, x: Any, batch_size: int | None) -> tuple[Tensor, Tensor | None]:
    """Mean and variance of predictions, ``[draws, *shape]``."""
    if isinstance(found, dict) and "mean" not in found:
        raise ValueError(f"a prediction must be a tensor or have a 'mean'; it has {list(found)}")
    mean, variance = (found["mean"], found.get("variance")) if isinstance(found, dict) else (found, None)
    if batch_size is not None and (mean.ndim < 2 or mean.shape[1] != batch_length(x)):
        raise ValueError(
            f"batch_size = {batch_size} needs predictions with a row for each input: {batch_length(x)} inputs gave "
            f"shape {list(mean.shape[1:])}; leave batch_size out"
        )
    return mean, variance
