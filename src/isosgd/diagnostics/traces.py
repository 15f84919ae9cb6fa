"""R-hat and effective numbers of draws for many traces at once. `sample` needs them, so they use numpy and torch only.

A trace is a quantity over the draws of several chains, such as a held-out prediction. Arrays are ``[chains, draws,
...]``; results have the shape of the rest. The estimators are those of arviz-stats and Stan, up to rounding.

References:
    Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), Rank-normalization, folding, and localization: an improved
    R-hat. Geyer (1992), Practical Markov chain Monte Carlo. Blom (1958), Statistical estimates and transformed
    beta-variables (normal scores).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Kind = Literal["bulk", "tail", "mean"]

LEAST_DRAWS = 4  # of a chain; below, halves have no variance
TAIL = 0.05  # quantile of the ESS of the tails, and one minus it
HELD = 1 << 21  # numbers processed at once
CONSTANT = 1e-15  # range below which a trace counts as constant
RHAT, ESS = 1.01, 400.0  # Vehtari et al. (2021)


def rhat(traces: Any) -> Array:
    """Split R-hat with rank normalisation: near 1 if chains, and halves of chains, agree.

    The larger of that of the ranks' normal scores and that of distances from the median, which shows chains that agree
    in location but not in width.

    Args:
        traces: ``[chains, draws, ...]``; a single chain is split in two.

    Returns:
        ``[...]``; not a number if a trace is constant, not finite, or shorter than four draws; huge if constant chains
        differ.

    Example:
        >>> x = np.random.default_rng(0).standard_normal((4, 500, 2))
        >>> x[0, :, 1] += 2  # the second trace has a stray chain
        >>> rhat(x).round(2)
        array([1.  , 1.32])
    """
    return _each(lambda x: _rank_rhat(_halves(x)), traces)


def ess(traces: Any, kind: Kind = "bulk") -> Array:
    """Effective number of draws of all chains together; chains that disagree have few.

    Args:
        traces: ``[chains, draws, ...]``.
        kind: "bulk" for the rank-normalised trace, "tail" for the lesser of the 5% and 95% quantiles, "mean" for the
            mean of the trace.

    Returns:
        ``[...]``; not a number if a trace is not finite or shorter than four draws; all draws for a constant trace.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((4, 500, 2))
        >>> for t in range(1, 500):
        ...     x[:, t, 1] += 0.9 * x[:, t - 1, 1]  # an autocorrelation time of 19
        >>> found = ess(x)
        >>> bool(1500 < found[0] < 2600), bool(60 < found[1] < 160)
        (True, True)
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind = {kind!r} must be one of {', '.join(map(repr, get_args(Kind)))}")
    return _each(partial(_ess, kind=kind), traces)


def integrated_time(traces: Any) -> Array:
    """Integrated autocorrelation time of one chain, in draws: ``1 + 2 sum rho_t``, at least 1.

    Args:
        traces: ``[draws, ...]`` of one chain, not split.

    Returns:
        ``[...]``; 1 for a constant trace, and for fewer than four draws.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal(100_000)
        >>> for t in range(1, x.size):
        ...     x[t] += 0.9 * x[t - 1]
        >>> bool(abs(integrated_time(x) - 19) < 3)
        True
    """
    values = as_array(traces)
    if values.ndim < 1:
        raise ValueError("a single number is not a trace; pass [draws, ...]")
    if len(values) < LEAST_DRAWS:
        return np.ones(values.shape[1:])
    return np.maximum(_each(_time, values[None]), 1.0)


@dataclass(frozen=True)
class Convergence:
    """Whether chains have converged, by traces such as predictions and log likelihoods.

    Weights of a network need not mix: swapping units or signs does not change its predictions.

    Attributes:
        chains: number of chains.
        draws: of each.
        rhat: the largest R-hat over traces; not a number for less than four draws, or if all traces are constant.
        ess: the smallest effective number of draws over traces.
    """

    chains: int
    draws: int
    rhat: float
    ess: float

    @classmethod
    def of(cls, traces: Any, groups: Sequence[int] | None = None) -> Convergence:
        """Judge traces.

        Args:
            traces: ``[chains, draws, traces]``.
            groups: the group of each chain, such as ``[0, 0, 1, 1]``. Only chains of one group, which sample the same
                posterior, are compared. A trace that is constant in a group is ignored, but a group whose traces are
                all constant has not converged.

        Example:
            >>> x = np.random.default_rng(0).standard_normal((8, 500, 3))
            >>> found = Convergence.of(x, groups=[0, 0, 0, 0, 1, 1, 1, 1])
            >>> found.converged(), bool(found.rhat < 1.01), bool(found.ess > 1000)
            (True, True, True)
        """
        values = as_array(traces)
        if values.ndim != 3:
            raise ValueError(f"traces of shape {list(values.shape)} must be [chains, draws, traces]")
        labels = np.zeros(len(values), int) if groups is None else np.asarray(groups)
        if len(labels) != len(values):
            raise ValueError(f"there are {len(values)} chains, but groups names those of {len(labels)}")
        if not values.size:
            return cls(len(values), values.shape[1], math.nan, math.nan)
        parts = [values[labels == label] for label in np.unique(labels)]
        # fmax ignores constant traces, which are not a number; max does not ignore a group of such traces.
        worst = np.max([np.fmax.reduce(rhat(x)) for x in parts])
        least = np.min([np.fmin.reduce(ess(x)) for x in parts])
        return cls(len(values), values.shape[1], float(worst), float(least))

    def converged(self, rhat: float = RHAT, ess: float = ESS) -> bool:
        """Whether all traces have at most this R-hat and at least that many effective draws."""
        return self.ess >= ess and self.rhat <= rhat

    def __str__(self) -> str:
        what = f"{self.draws} draws of {self.chains} chains"
        return f"{what}: R-hat {self.rhat:.3f}, ESS {self.ess:,.0f}"


def as_array(values: Any) -> Array:
    """A tensor on any device, or anything that numpy takes, as a float64 array."""
    if isinstance(values, Tensor):
        return values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _each(measure: Callable[[Array], Array], traces: Any) -> Array:
    """Apply a measure of ``[traces, chains, draws]`` to all traces, in parts of bounded memory."""
    values = as_array(traces)
    if values.ndim < 2 or not all(values.shape[:2]):
        raise ValueError(f"traces of shape {list(values.shape)} must be [chains, draws, ...] with at least one of each")
    chains, draws, *rest = values.shape
    flat = values.reshape(chains, draws, -1)
    if draws < LEAST_DRAWS:
        return np.full(rest, np.nan)
    size = max(1, HELD // (chains * draws))
    found = np.full(flat.shape[2], np.nan)
    for first in range(0, flat.shape[2], size):
        part = np.ascontiguousarray(np.moveaxis(flat[..., first : first + size], -1, 0))
        finite = np.isfinite(part).all((1, 2))
        if finite.any():
            found[first : first + size][finite] = measure(part[finite])
    return found.reshape(rest)


def _halves(x: Array) -> Array:
    """Each chain split in two, without the middle draw of an odd number."""
    half = x.shape[2] // 2
    return np.concatenate([x[..., :half], x[..., -half:]], 1)


def _normal_scores(x: Array) -> Array:
    """Normal quantiles of the ranks of all draws of a trace; equal values share their mean rank."""
    flat = x.reshape(len(x), -1)
    size = flat.shape[1]
    order = flat.argsort(1)
    ordered = np.take_along_axis(flat, order, 1)
    rank = np.arange(size, dtype=np.float64)
    differs = ordered[:, 1:] != ordered[:, :-1]
    if not differs.all():
        edge = np.ones((len(x), 1), bool)
        first = np.maximum.accumulate(np.where(np.hstack([edge, differs]), rank, 0), 1)
        last = np.minimum.accumulate(np.where(np.hstack([differs, edge]), rank, size)[:, ::-1], 1)[:, ::-1]
        rank = (first + last) / 2
    quantiles = torch.special.ndtri(torch.from_numpy((rank + 1 - 3 / 8) / (size + 1 / 4))).numpy()
    scores = np.empty_like(flat)
    np.put_along_axis(scores, order, np.broadcast_to(quantiles, flat.shape), 1)
    return scores.reshape(x.shape)


def _rhat(x: Array) -> Array:
    within, between = x.var(2, ddof=1).mean(1), x.mean(2).var(1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.sqrt(1 - 1 / x.shape[2] + between / within)
    return found


def _rank_rhat(halves: Array) -> Array:
    distance = np.abs(halves - np.median(halves, (1, 2), keepdims=True))
    # Distances from the median are constant for a trace of two values; fmax ignores them.
    return np.fmax(_rhat(_normal_scores(halves)), _rhat(_normal_scores(distance)))


def _time(x: Array) -> Array:
    """Integrated autocorrelation time of ``[traces, chains, draws]``.

    Autocovariances are averaged over chains, and the variance of the chains' means is added to the variance. The sum
    stops where adjacent pairs stop being positive, and pairs never grow (Geyer's initial monotone sequence).
    """
    _, chains, draws = x.shape
    centred = x - x.mean(2, keepdims=True)
    # The transform is linear: the mean over chains is taken before the inverse transform.
    length = 1 << (2 * draws - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, length)) ** 2
    covariance = np.fft.irfft(power.mean(1), length)[:, :draws] / draws
    within = covariance[:, :1] * draws / (draws - 1)
    total = covariance[:, :1] + (x.mean(2).var(1, ddof=1)[:, None] if chains > 1 else 0.0)
    moves = np.ptp(x, (1, 2)) >= CONSTANT
    rho = 1 - (within - covariance) / np.where(moves[:, None], total, 1.0)
    rho[:, 0] = 1.0
    count = max(1, (draws - 1) // 2)  # pairs considered
    even = rho[:, 0 : 2 * count : 2]
    pairs = even + rho[:, 1 : 2 * count : 2]
    # The last pair is the first that is not positive; only its even lag counts, once.
    last = np.where((pairs <= 0).any(1), (pairs <= 0).argmax(1), count - 1)[:, None]
    before = np.arange(count) < last
    end, end_pair = np.take_along_axis(even, last, 1), np.take_along_axis(pairs, last, 1)
    end = np.where((end > 0) | (end_pair >= 0), end, 0.0)
    time = 2 * (np.minimum.accumulate(pairs, 1) * before).sum(1) + end[:, 0] - 1
    # Antithetic chains may have more effective draws than draws, up to this bound.
    return np.where(moves, np.maximum(time, 1 / np.log10(chains * draws)), 1.0)


def _ess(x: Array, kind: Kind) -> Array:
    if kind == "tail":
        ends = np.quantile(x, (TAIL, 1 - TAIL), axis=(1, 2), keepdims=True)
        found: Array = np.min([_ess((x <= end).astype(np.float64), "mean") for end in ends], 0)
        return found
    halves = _halves(x)
    found = halves.shape[1] * halves.shape[2] / _time(_normal_scores(halves) if kind == "bulk" else halves)
    return found
