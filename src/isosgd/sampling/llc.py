"""The local learning coefficient: how degenerate the loss is around a trained network. No rate needs to be given.

Draws are from ``p(w) ~ exp(-U(w))``, ``U = n_beta L(w) + gamma/2 |w - w0|^2``, with L the mean loss. The coefficient is
``n_beta (E[L(w)] - L(w0))``: d/2 for a quadratic loss, less for a degenerate one.

The mean over draws is noisy: for w^4 the standard deviation of a draw is twice the coefficient. Integration by parts
gives a control variate, ``h(w) = (w - w0) . grad U(w) - d`` with E[h] = 0, from the gradients of the steps. What h
explains of the loss is subtracted: all of it if the loss is a power of the distance.

References:
    Lau, Furman, Wang, Murfet, Wei (2023), The local learning coefficient: a singularity-aware complexity measure.
    Watanabe (2013), A widely applicable Bayesian information criterion. Assaraf, Caffarel (1999), Zero-variance
    principle for Monte Carlo algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from isosgd.data.sources import Batch, IterableBatches, TensorBatches, as_data, as_tensors, batch_length
from isosgd.diagnostics.meter import Reading, readings
from isosgd.diagnostics.traces import Array, as_array, ess, rhat
from isosgd.diagnostics.verdict import Conclusion, Verdict
from isosgd.errors import check_integer
from isosgd.posterior import Posterior
from isosgd.posterior.draws import Mapped, batches_of
from isosgd.posterior.temperature import CHUNK, value_and_slope
from isosgd.posterior.view import View
from isosgd.samplers.local import LocalSampler
from isosgd.sampling.settings import versions
from isosgd.target import Likelihood, Params, Target, priors

WHOLE = 5_000  # up to so many examples gradients use all of them ...
BATCH = 512  # ... else so many
AGREE = 1.1  # largest R-hat of the loss
KNOWN = 0.1  # largest relative standard error of the coefficient
HOT, COLD = 1.15, 0.6  # above HOT draws are of another density; below COLD chains have not spread out
TOLERANCE = 0.15  # the control variate is used if the temperature is so close to 1
SURE = 4.0  # standard errors


@dataclass(frozen=True)
class LLC:
    """A local learning coefficient.

    Attributes:
        mean: the coefficient.
        std: standard deviation over chains.
        error: standard error of the mean.
        values: the coefficient of each chain.
        plain: the mean without the control variate.
        losses: mean loss at each draw, ``[chains, draws]``; of the draw's minibatch if there are minibatches.
        start_loss: mean loss at the start, over the same batches.
        nbeta: inverse temperature.
        localization: gamma, the precision of the pull to the start.
        rhat: R-hat of the losses.
        ess: effective draws of the losses.
        temperature: of the draws, from gradients; it should be 1.
        gradients: of all chains.
        verdict: whether to trust the coefficient, why, and what would help.
        posterior: the draws, with ``keep_draws``.
    """

    mean: float
    std: float
    error: float
    values: tuple[float, ...]
    plain: float
    losses: Tensor = field(repr=False)
    start_loss: float
    nbeta: float
    localization: float
    rhat: float
    ess: float
    temperature: Reading = field(repr=False)
    gradients: int
    verdict: Verdict = field(repr=False)
    posterior: Posterior | None = field(default=None, repr=False)

    def __str__(self) -> str:
        found = f"local learning coefficient {self.mean:.4g} ± {self.error:.2g} ({self.std:.2g} over chains)"
        return f"{found}, {self.gradients:,} gradients\n{self.verdict}"


def llc(
    target: Target | nn.Module,
    data: Any,
    *,
    init: Mapping[str, Any] | None = None,
    likelihood: str | Likelihood | Callable[[Any, Tensor], Tensor] | None = None,
    chains: int = 4,
    draws: int = 150,
    warmup: int = 100,
    keep_every: int = 1,
    nbeta: float | None = None,
    localization: float = 1.0,
    batch_size: int | Literal["all"] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    keep_draws: bool = False,
) -> LLC:
    """The local learning coefficient of a trained model. No rate needs to be given.

    Args:
        target: a model or a `Target`. Its prior is replaced by a pull to the start.
        data: what it was trained on: tensors, arrays or frames as for `isosgd.sample`, or a loader of batches.
        init: a ``state_dict`` to start at; the model's own values by default.
        likelihood: of a model: one of `isosgd.likelihoods`, its name, or a callable ``(output, y) -> Tensor[n]`` that
            returns minus the loss of each example; ``"categorical"`` by default if y are integers.
        chains: independent chains, all from w0.
        draws: of each chain.
        warmup: gradients of each chain before the first draw, which set mass, noise and step size.
        keep_every: gradients between draws.
        nbeta: inverse temperature; N / log N by default.
        localization: gamma, the precision of the pull to w0.
        batch_size: examples in a gradient; by default all up to 5,000, else 512.
        seed: same seed and settings, same draws.
        device: where to sample; by default where the parameters are.
        keep_draws: keep the draws in ``.posterior``, not only their losses.

    Example:
        >>> x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
        >>> target = Target(lambda p, b: -0.5 * (b[0] @ p["w"]) ** 2, priors.Flat(), init={"w": torch.zeros(6)})
        >>> found = llc(target, (x,))
        >>> bool(abs(found.mean - 3) < 0.15), found.gradients  # d / 2
        (True, 1000)
    """
    for name, value in (("chains", chains), ("draws", draws), ("keep_every", keep_every)):
        check_integer(name, value, 4 if name == "draws" else 1)
    place = _Neighbourhood(_as_target(target, likelihood, data), data, init, chains, batch_size, seed, device)
    nbeta = place.num_data / math.log(place.num_data) if nbeta is None else float(nbeta)
    leaves = {name: nn.Parameter(x.expand(chains, *x.shape).clone()) for name, x in place.start.items()}
    generator = torch.Generator(place.device).manual_seed(seed)
    sampler = LocalSampler(
        leaves.values(), nbeta, localization, warmup=warmup, chains=True, noise=not place.whole, generator=generator
    )
    size = sum(x.numel() for x in place.start.values())
    traces: list[Tensor] = []  # loss, excess loss and (w - w0) . grad U of each chain
    kept: list[Params] = []
    steps = warmup + draws * keep_every
    for step in range(steps):
        loss, before, slopes = place.at({name: x.detach() for name, x in leaves.items()}, step >= warmup)
        for name, x in leaves.items():
            x.grad = slopes[name]
        if step >= warmup and (step - warmup) % keep_every == keep_every - 1:
            pairs = zip(leaves.values(), place.start.values(), sampler.slopes(), strict=True)
            parts = [((x.detach() - x0) * slope).flatten(1).double().sum(1) for x, x0, slope in pairs]
            found = torch.stack([loss.double(), nbeta * (loss - before).double(), torch.stack(parts).sum(0)])
            # The sampler takes an unstable step back, so that the chain stays where it was.
            last = traces[-1] if traces else torch.stack([before.double(), 0.0 * found[1], 0.0 * found[2] + size])
            traces.append(torch.where(found.isfinite().all(0), found, last.nan_to_num()))
            if keep_draws:
                kept.append({name: x.detach().cpu().clone() for name, x in leaves.items()})
        sampler.step()
    losses, excess, product = as_array(torch.stack(traces, -1))
    (reading,) = readings(["all"], [size], product[..., None], 1.0)
    # E[h] = 0 holds only for chains that have spread out.
    spread_out = abs(reading.temperature - 1.0) < max(TOLERANCE, SURE * reading.error)
    adjusted = _without_noise(excess, product - size) if spread_out else excess
    spread = float(adjusted.mean(1).std(ddof=1)) if chains > 1 else math.nan
    error = float(adjusted.std(ddof=1) / math.sqrt(max(float(ess(adjusted, "mean")), 1.0)))
    error = max(error, spread / math.sqrt(chains)) if chains > 1 else error
    mean, agreement, effective = float(adjusted.mean()), float(rhat(excess)), float(ess(excess))
    posterior = None
    if keep_draws:
        temperature = place.num_data / nbeta
        pull = priors.Around(place.start, localization * temperature) if localization else priors.Flat()
        stacked = {name: torch.stack([draw[name] for draw in kept], 1) for name in leaves}
        info = {
            "method": "local", "temperature": temperature, "num_data": place.num_data, "draws": draws, "chains": chains,
            "keep_every": [keep_every] * chains, "seed": seed, "gradients": chains * steps, "versions": versions(),
        }  # fmt: skip
        posterior = Posterior(place.target.with_prior(pull, place.start), stacked, info, place.tensors)
    return LLC(
        mean, spread, error, tuple(adjusted.mean(1).tolist()), float(excess.mean()),
        torch.from_numpy(losses), place.start_loss, nbeta, float(localization), agreement, effective, reading,
        chains * steps, _judge(mean, error, agreement, effective, reading), posterior,
    )  # fmt: skip


def _as_target(target: Target | nn.Module, likelihood: Any, data: Any) -> Target:
    if isinstance(target, Target):
        if likelihood is not None:
            raise ValueError("likelihood= goes with a model; a Target has its own")
        return target
    if not isinstance(target, nn.Module):
        raise TypeError(f"target of type {type(target).__name__}: pass a model (nn.Module) or an isosgd.Target")
    if likelihood is None:
        tensors = as_tensors(data)
        y = None if tensors is None or isinstance(tensors, Mapping) else tensors[-1]
        if y is None or y.is_floating_point():
            raise ValueError(
                "the model's likelihood is not known: pass likelihood='categorical', Gaussian(scale), or a callable "
                "(output, y) -> Tensor[n] that is minus the loss of each example"
            )
        likelihood = "categorical"
    return Target.from_module(target, likelihood)


class _Neighbourhood:
    """The mean loss and its gradient around a start, for several chains at once."""

    def __init__(
        self, target: Target, data: Any, init: Any, chains: int, batch_size: Any, seed: int, device: Any
    ) -> None:
        free = target.initial(init, device=device)
        if positive := target.describe()["positive"]:
            raise ValueError(
                f"parameter {positive[0]!r} is positive: a pull to the start is for parameters on the whole line. Give "
                "the likelihood a known scale, such as likelihoods.Gaussian(0.1), or hold the parameter fixed"
            )
        if target.ties_examples:
            raise ValueError("BatchNorm in training mode: the loss depends on the minibatch; call model.eval() first")
        self.target, self.view, self.chains = target, View(target), chains
        self.start: Params = {name: x.detach() for name, x in free.items()}
        self.buffers = target.initial_buffers(init, self.start)
        first = next(iter(self.start.values()))
        self.device = first.device
        data = as_data(data, batch_size, self.device, first.dtype)
        self.num_data = target.resolve_num_data(data)
        if self.num_data < 3:
            raise ValueError(f"N = {self.num_data}: the local learning coefficient needs more examples")
        self.tensors = as_tensors(data)
        self.source: TensorBatches | IterableBatches | None = None
        if self.tensors is None:
            self.source = IterableBatches(data, self.device, first.dtype, seed)
        else:
            rows = batch_length(self.tensors)
            size = (rows if rows <= WHOLE else BATCH) if batch_size is None else batch_size
            if not (size == "all" or size >= rows):
                self.source = TensorBatches(self.tensors, size, seed, chains)
        self._slopes, self._losses = ([Mapped(f, (dim,)) for dim in (None, 0)] for f in (self._slope, self._loss))
        self._seen: list[float] = []
        if self.whole:
            self._seen = [float(self._sum(self._losses[0], self._alike(1))["loss"][0])]
            if not math.isfinite(self._seen[0]):
                raise ValueError("the loss at the start is not finite: look at the data and at init")

    @property
    def whole(self) -> bool:
        """Whether gradients are of all data."""
        return self.source is None

    @property
    def start_loss(self) -> float:
        """Mean loss at the start, over all batches so far."""
        return float(np.mean(self._seen))

    def at(self, params: Params, compared: bool) -> tuple[Tensor, Tensor, Params]:
        """Losses of the chains, losses of the start on the same examples if ``compared``, and gradients."""
        if self.source is None:
            found, before = self._sum(self._slopes[0], params), None
        elif isinstance(self.source, TensorBatches):
            batch = self.source.next()
            found = self._call(self._slopes[1], params, batch)
            before = self._call(self._losses[1], self._alike(self.chains), batch) if compared else None
        else:  # batches may differ in length
            batches = [self.source.next() for _ in range(self.chains)]
            each = [{name: x[k : k + 1] for name, x in params.items()} for k in range(self.chains)]
            found = _joined([self._call(self._slopes[0], x, b) for x, b in zip(each, batches, strict=True)])
            before = _joined([self._call(self._losses[0], self._alike(1), b) for b in batches]) if compared else None
        loss = found.pop("loss")
        if before is not None:
            self._seen.append(float(before["loss"].mean()))
        start = torch.full_like(loss, self._seen[0] if self._seen else 0.0) if before is None else before["loss"]
        return loss, start, found

    def _alike(self, count: int) -> Params:
        return {name: x.expand(count, *x.shape) for name, x in self.start.items()}

    def _loss(self, params: Params, batch: Batch) -> dict[str, Tensor]:
        return {"loss": -self.view.log_likelihood(params | self.buffers, batch).mean()}

    def _slope(self, params: Params, batch: Batch) -> dict[str, Tensor]:
        value, slope = value_and_slope(lambda p: self._loss(p, batch)["loss"], params)
        return {**slope, "loss": value}

    def _call(self, function: Mapped, params: Params, batch: Batch) -> Params:
        found = function(params, batch)
        assert isinstance(found, dict)
        return found

    def _sum(self, function: Mapped, params: Params) -> Params:
        """Mean over all data, in batches."""
        assert self.tensors is not None
        rows, total = batch_length(self.tensors), Params()
        for batch in batches_of(self.tensors, CHUNK):
            found, share = self._call(function, params, batch), batch_length(batch) / rows
            total = {name: share * x + total.get(name, 0.0) for name, x in found.items()}
        return total


def _joined(parts: list[Params]) -> Params:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _without_noise(values: Array, known: Array) -> Array:
    """Values less what a control variate explains of them, both ``[chains, draws]``.

    The coefficient is fitted to differences between draws, since a slow drift of both would bias it.
    """
    steps, known_steps = np.diff(values), np.diff(known)
    square = float((known_steps * known_steps).sum())
    slope = float((known_steps * steps).sum()) / square if square > 0 else 0.0
    found: Array = values - slope * known
    return found


def _judge(mean: float, error: float, agreement: float, effective: float, reading: Reading) -> Verdict:
    wrong, short = [], []
    if mean < -SURE * error:
        wrong.append(
            (
                f"the coefficient is negative, {mean:.3g} ± {error:.2g}: the loss around the start is lower than at it",
                "the start is no minimum: train further, or pass the minimum as init=",
            )
        )
    if reading.temperature - HOT > SURE * reading.error:
        wrong.append(
            (
                f"the draws are too hot: temperature {reading.temperature:.3g} ± {reading.error:.2g}, not 1",
                "a larger batch_size=, or a larger localization=",
            )
        )
    longer = "more draws= and a longer warmup=, or a larger batch_size="
    if COLD - reading.temperature > SURE * reading.error:
        short.append((f"chains have not spread out yet: temperature {reading.temperature:.3g}, not 1", longer))
    if not agreement <= AGREE:
        short.append((f"chains do not agree on the loss: R-hat is {agreement:.2f}, above {AGREE:g}", longer))
    if not error <= KNOWN * abs(mean):
        short.append((f"the coefficient is not known well: {mean:.3g} ± {error:.2g}", longer))
    summary: Conclusion = "it samples something else" if wrong else "run longer" if short else "trust it"
    good = f"chains agree (R-hat {agreement:.2f}), and the temperature is {reading.temperature:.3g}, 1 is right"
    cases = wrong or short or [(good, "")]
    return Verdict(
        summary,
        tuple(reason for reason, _ in cases),
        tuple(dict.fromkeys(fix for _, fix in cases if fix)),
        (),
        1.0,
        (reading,),
        rhat=agreement,
        ess=effective,
    )
