"""Draws and what they predict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.diagnostics.summary import PosteriorSummary
from isosgd.diagnostics.verdict import ESS, RHAT, Verdict
from isosgd.metrics.checks import between_0_and_1
from isosgd.potential import Params, Target
from isosgd.predictive.arviz import to_arviz
from isosgd.predictive.draws import Draws, batches_of, one_of, part_of, some_of
from isosgd.predictive.examine import summary, trust
from isosgd.predictive.mapped import Mapped, at_once, rows_of, tensors_of
from isosgd.predictive.prediction import Average, Prediction, by_chain, join
from isosgd.predictive.view import Function, View


class Posterior:
    """Posterior draws, what they predict, and whether to believe them.

    Args:
        target: what was sampled; None when it is not at hand: draws can then be looked at, but not predict.
        draws: natural parameters, tensors ``[chains, draws, *shape]`` by name. A mapping with a method
            ``draw(chain, index)`` is read one draw at a time.
        info: how the draws came about.
        data: the training data, for `summary` and `trust`.
        buffers: of the network at each draw, such as BatchNorm statistics; none for most models.

    Attributes:
        draws: natural parameters, tensors ``[chains, draws, *shape]`` by name.
        info: settings, rates, warm-up reports, seed, versions: how the draws came about.
        target: what was sampled.
        data: the training data where they are at hand.
        buffers: tensors ``[chains, draws, *shape]`` by their name in the network.
    """

    def __init__(
        self,
        target: Target | None,
        draws: Draws,
        info: dict[str, Any],
        data: Any = None,
        buffers: Draws | None = None,
    ) -> None:
        self.target, self.draws, self.info, self.data = target, draws, info, data
        self.buffers: Draws = {} if buffers is None else buffers
        self._view: View | None = None

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        found = getattr(self.draws, "num_chains", None)
        return int(next(iter(self.draws.values())).shape[0] if found is None else found)

    @property
    def num_draws(self) -> int:
        """Draws of each chain."""
        found = getattr(self.draws, "num_draws", None)
        return int(next(iter(self.draws.values())).shape[1] if found is None else found)

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Params]:
        """Every draw in turn, as natural parameters."""
        for chain in range(self.num_chains):
            for index in range(self.num_draws):
                yield self.draw(chain, index)

    def draw(self, chain: int, index: int) -> Params:
        """One draw, as natural parameters."""
        return one_of(self.draws, chain, index)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        size = f"{self.num_chains} chains x {self.num_draws} draws"
        return f"Posterior({size} of {shapes}; method={self.info.get('method')!r})"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return {name: tuple(value.shape) for name, value in self.draw(0, 0).items()} if len(self) else {}

    @property
    def view(self) -> View:
        """The target as it is at a draw."""
        if self.target is None:
            raise ValueError(
                "these draws came without their target, which says what they predict: pass it to isosgd.load(path, "
                "target=...)"
            )
        if self._view is None:
            self._view = View(self.target)
        return self._view

    def select(self, chains: Sequence[int] | None = None, draws: slice | None = None) -> Posterior:
        """Some chains and some draws of each, such as ``select(chains=[0, 1], draws=slice(100, None))``."""
        kept = list(range(self.num_chains)) if chains is None else list(chains)
        if not kept or not all(0 <= k < self.num_chains for k in kept):
            raise ValueError(f"chains = {chains!r} must name some of {self.num_chains} chains, counted from 0")
        which = range(self.num_draws)[slice(None) if draws is None else draws]
        if not which:
            raise ValueError(f"draws = {draws!r} leaves none of {self.num_draws} draws")
        by_chain = ("warmup", "rates", "keep_every", "chain_indices")
        info = {
            key: [value[k] for k in kept] if key in by_chain and len(value) == self.num_chains else value
            for key, value in self.info.items()
        } | {"chains": len(kept)}
        parts = (part_of(source, kept, which) for source in (self.draws, self.buffers))
        return Posterior(self.target, next(parts), info, self.data, next(parts))

    def of_set(self, index: int) -> Posterior:
        """The chains of one data set, of draws that are of several (see `isosgd.DataSets`)."""
        sets = int(self.info.get("sets", 1))
        if not 0 <= index < sets:
            raise ValueError(f"there is no data set {index!r}; there are {sets}, counted from 0")
        numbers = self.info.get("chain_indices") or range(self.num_chains)
        # Of draws that were not selected the number of chains tells how many each set has.
        each = self.info.get("chains_per_set") or (self.num_chains + len(self.info.get("dropped", ()))) // sets
        mine = [k for k, number in enumerate(numbers) if number // each == index]
        if not mine:
            raise ValueError(f"all chains of data set {index} diverged, so that none is left")
        chosen = self.select(chains=mine)
        data = self.data.set(index) if hasattr(self.data, "set") else None
        return Posterior(self.target, chosen.draws, chosen.info | {"sets": 1}, data, chosen.buffers)

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
    ) -> Prediction:
        """Average the predictions of all draws; running sums are kept, so that memory does not grow with the draws.

        Args:
            x: inputs, as the model or the target's ``predict`` takes them, on any device: draws go there.
            batch_size: inputs worked on at once; all of them by default.
            function: a user's ``(model, params, x) -> Tensor[n, ...]``, averaged in place of the target's own
                prediction; ``model`` is the network at a draw, to be called with inputs. A dict of ``mean`` and
                ``variance`` counts as normal noise around the mean.
            levels: quantiles of y to find, such as ``(0.025, 0.5, 0.975)``: those of the mixture over draws.
            refresh: batches of training data, or of inputs, over which each draw's BatchNorm statistics are found
                anew.
            return_draws: whether to return what each draw says, too.

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
        levels = tuple(between_0_and_1("levels", level) for level in levels)
        if refresh is not None:
            return self.refreshed(refresh).predict(
                x, batch_size=batch_size, function=function, levels=levels, return_draws=return_draws
            )
        view = self.view
        self._warn_of_batch_statistics(view)
        call = Mapped(view.predict if function is None else lambda p, part: view.apply(function, p, part))
        classes, normal = view.classes and function is None, view.normal or function is not None
        if levels and classes:
            raise ValueError(
                "levels: class labels have no quantiles; for those of a probability give function=, such as "
                "lambda model, params, x: model(x).softmax(1)"
            )
        parts = []
        for part in batches_of(x, batch_size):
            average = Average(classes, keep=return_draws or bool(levels))
            for block in self.blocks(part):
                found = call(block, part)
                if isinstance(found, dict) and "mean" not in found:
                    raise ValueError(f"a prediction must be a tensor or have a 'mean'; it has {list(found)}")
                values, variances = (found["mean"], found.get("variance")) if isinstance(found, dict) else (found, None)
                if batch_size is not None and (values.ndim < 2 or values.shape[1] != rows_of(part)):
                    raise ValueError(
                        f"batch_size = {batch_size} needs predictions with a row for each input: {rows_of(part)} "
                        f"inputs gave shape {list(values.shape[1:])}; leave batch_size out"
                    )
                average.add(values, variances)
            parts.append(average.prediction(self.num_chains, levels, normal, return_draws))
        return join(parts)

    @torch.no_grad()
    def log_likelihood(self, batch: Any, *, batch_size: int | None = None) -> Tensor:
        """Log likelihood of each example at each draw, ``[chains, draws, n]``.

        Args:
            batch: examples as in the data, for instance ``(x, y)``.
            batch_size: examples worked on at once; all of them by default.
        """
        call = Mapped(self.view.log_likelihood)
        parts = [
            torch.cat([_tensor(call(block, part)) for block in self.blocks(part)])
            for part in batches_of(batch, batch_size)
        ]
        return by_chain(torch.cat(parts, 1), self.num_chains)

    @torch.no_grad()
    def log_predictive(self, batch: Any, *, batch_size: int | None = None) -> Tensor:
        """Log density of each example under the model average: ``log mean_draws p(y | x, draw)``, ``[n]``.

        Args:
            batch: examples as in the data, for instance ``(x, y)``.
            batch_size: examples worked on at once; all of them by default.
        """
        call, parts = Mapped(self.view.log_likelihood), []
        for part in batches_of(batch, batch_size):
            total = torch.full((), -torch.inf, dtype=torch.float64)
            for block in self.blocks(part):
                values = _tensor(call(block, part))
                total = torch.logaddexp(total, values.double().logsumexp(0))
            parts.append((total - math.log(len(self))).to(values.dtype))
        return torch.cat(parts)

    @torch.no_grad()
    def refreshed(self, batches: Any) -> Posterior:
        """The same draws with BatchNorm statistics found anew for each: averages over these batches.

        Args:
            batches: an iterable of batches such as a DataLoader or a list, of data or of inputs alone; or one tuple of
                tensors, taken as a single batch. It is gone through once for each draw.
        """
        network = self.view.network
        if network is None:
            raise ValueError("refresh= is for targets made by Target.from_module: this one has no network")
        network.check_refresh()
        if isinstance(batches, Tensor) or (isinstance(batches, tuple) and all(isinstance(t, Tensor) for t in batches)):
            batches = [batches]
        found: list[Params] = []
        for block in self.blocks(None, 1):
            found.append(network.refreshed({name: x[0] for name, x in block.items()}, batches))
        fresh = {name: by_chain(torch.stack([one[name] for one in found]), self.num_chains) for name in found[0]}
        return Posterior(self.target, self.draws, self.info, self.data, {**self.buffers, **fresh})

    def blocks(self, inputs: Any, size: int | None = None) -> Iterator[Params]:
        """All draws in turn, some at a time ``[draws, *shape]``, buffers included, on the device of the inputs.

        Args:
            inputs: what will be evaluated at them.
            size: draws in a block; so many that memory stays bounded by default.
        """
        count, draws = len(self), self.num_draws
        size = size or at_once(list(self.shapes.values()), inputs)
        device = next((t.device for t in tensors_of(inputs)), None)
        for first in range(0, count, size):
            last = min(first + size, count)
            block = some_of(self.draws, first, last, draws) | some_of(self.buffers, first, last, draws)
            yield block if device is None else {name: x.to(device) for name, x in block.items()}

    def _warn_of_batch_statistics(self, view: View) -> None:
        if view.network is not None and not self.buffers and (layer := view.network.batch_statistics):
            warnings.warn(
                f"layer {layer!r} normalises with the statistics of the batch that an input is predicted with; pass "
                "refresh=, batches of training data, for predictions that do not depend on it",
                UserWarning,
                stacklevel=4,
            )

    # ---------------------------------------------------------------- whether to believe them

    def summary(
        self,
        data: Any = None,
        *,
        inputs: Any = None,
        parameters: Sequence[str] | None = None,
        examples: int = 16,
    ) -> PosteriorSummary:
        """R-hat, effective draws and Monte-Carlo errors of predictions, log likelihoods and parameters.

        Args:
            data: examples to predict, such as held-out ones; the training data by default, where they are at hand.
            inputs: inputs for the target's ``predict``, where they are not all but the last tensor of the data.
            parameters: names or shell patterns of parameters to look at, such as ``["likelihood.scale", "*.bias"]``;
                the scales of likelihood and prior, and all parameters where they are few, by default.
            examples: number of examples to look at, evenly spaced in the data.

        Example:
            >>> draws = {"mu": torch.randn(4, 250, generator=torch.Generator().manual_seed(0))}
            >>> found = Posterior(None, draws, {}).summary()
            >>> found.rows[0].name, found.rhat < 1.01, found.as_dict()["chains"]
            ('mu', True, 4)
        """
        return summary(self, data, inputs=inputs, parameters=parameters, examples=examples)

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
    ) -> Verdict:
        """Whether to believe the draws: "trust it", "run longer" or "it samples something else", and why.

        Judged by convergence of predictions, by the temperature meter, and by what the warm-up found.

        Args:
            data: the training data, all of them: the temperature is read from gradients at the draws. Those which were
                sampled by default, where they are at hand.
            temperature: T that the draws should be at; that which was sampled at by default.
            inputs: inputs for the target's ``predict``, where they are not all but the last tensor of the data.
            held_out: examples whose predictions are judged; some of the training data by default.
            rows: examples in each gradient, drawn afresh for every draw; all of them, or as many as are affordable, by
                default.
            rhat: largest R-hat to believe.
            ess: least effective number of draws to believe.
            examples: number of examples whose predictions are judged.
            seed: of the examples in gradients.
        """
        return trust(self, data, temperature, inputs, held_out, rows, rhat, ess, examples, seed)

    def to_arviz(self, data: Any = None, *, parameters: Sequence[str] | None = None) -> Any:
        """The draws as ArviZ takes them: an ``xarray.DataTree``, by ``pip install "isosgd[arviz]"``.

        Args:
            data: examples whose log likelihood at each draw goes along, as model comparison needs it.
            parameters: names or shell patterns of the parameters to take; all by default.
        """
        return to_arviz(self, data, parameters)


def _tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found
