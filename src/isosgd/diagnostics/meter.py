"""The temperature meter: the temperature of draws, from the draws and the gradients at them.

For a density ``exp(-f/T)`` over free parameters, integration by parts gives, for every constant c,

    E[(theta - c) . grad f] = d T                        (all directions, or those of one layer)
    E[(v . (theta - c)) (v . grad f)] = T                (one direction v of length 1)
    E[v . grad f] = 0

for any f whose density vanishes at infinity. A sampler whose noise is too large, too small, or not the same in all
directions fails the first two; one that follows the wrong gradient fails the third.

Two choices reduce the error. The centre c is the mean of the *other half* of the same chain: close to the draws, which
keeps the variance low even if chains are in different modes, and (almost) independent of them, which avoids the bias of
a mean of the same draws; the rest falls with the square of the number of effective draws. Directions, too, are found on
one half and measured on the other, since otherwise sampling error would raise the temperature.

Gradients may be those of minibatches if these are drawn independently of the run.

References:
    Rugh (1997), Dynamical approach to temperature. Gorham and Mackey (2015), Measuring sample quality with Stein's
    method (the identities above are instances of it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from isosgd.diagnostics.traces import Array, as_array, ess, rhat

DIRECTIONS = 8  # of each kind
MOST_DRAWS = 1000  # from which directions are found
LEAST = 8  # draws of a chain
MIXED_RHAT, MIXED_ESS = 1.1, 30.0  # a direction in which the chains have mixed


@dataclass(frozen=True)
class Reading:
    """One reading of the temperature.

    Attributes:
        name: ``all``, the name of a layer, or ``flat 1``, ``stiff 1`` and so on for directions.
        size: number of dimensions it is averaged over.
        temperature: the reading.
        error: its standard error, from effective draws or from the spread over chains, whichever is larger.
        ess: effective draws behind it.
        early: the reading of the earlier halves of the chains.
        late: that of the later halves.
        mixed: whether the chains have mixed in this direction; a temperature can only be read if they have.
        shift: for a direction, the mean gradient along it over its standard deviation; for a normal density, the error
            of the draws' mean in posterior standard deviations.
        shift_error: its standard error.
    """

    name: str
    size: int
    temperature: float
    error: float
    ess: float
    early: float
    late: float
    mixed: bool = True
    shift: float = 0.0
    shift_error: float = 0.0


def readings(names: Sequence[str], sizes: Sequence[int], series: Array, temperature: float) -> tuple[Reading, ...]:
    """Temperatures from series of products.

    A series is ``(theta - c) . grad f`` over ``sizes`` dimensions, ``[chains, draws, readings]``. The smallest possible
    error of so many draws follows from the target temperature.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> theta = rng.standard_normal((4, 500, 10))  # f = |theta|^2 / 2, so that grad f = theta
        >>> found, = readings(["all"], [10], (theta * theta).sum(-1, keepdims=True), 1.0)
        >>> bool(abs(found.temperature - 1.0) < 4 * found.error), bool(found.error < 0.02)
        (True, True)
    """
    size = np.asarray(sizes, dtype=np.float64)
    each = series / size
    effective = np.maximum(ess(each, "mean"), 1.0)
    error = np.maximum(each.std((0, 1), ddof=1) / np.sqrt(effective), _error_over_chains(each))
    # Draws that are too cold also have too small a spread: use at least the error for a normal density at T.
    error = np.maximum(error, temperature * np.sqrt(2.0 / (size * effective)))
    half = each.shape[1] // 2
    whole, early, late = (x.mean((0, 1)).tolist() for x in (each, each[:, :half], each[:, half:]))
    columns = zip(whole, error.tolist(), effective.tolist(), early, late, strict=True)
    return tuple(Reading(name, n, *row) for name, n, row in zip(names, sizes, columns, strict=True))


def directions(theta: Tensor, gradients: Tensor, temperature: float) -> tuple[Reading, ...]:
    """Temperatures along the principal directions of the draws (the flat ones) and of the gradients (the stiff ones).

    They show noise that is too strong in some directions and missing in others, which the mean over all directions
    hides; and an error of the mean of the draws, above all along the mean gradient (the push).

    ``theta`` are the free parameters of draws, ``[chains, draws, d]``, and ``gradients`` those of f there.
    """
    draws, size = theta.shape[1:]
    halves = slice(0, draws // 2), slice(draws // 2, draws)
    every = size <= 2 * DIRECTIONS  # few enough to use all
    names: list[str] = []
    products, slopes, mixed = list[Array](), list[Array](), list[bool]()
    for part, here, there in (("early", *halves), ("late", *halves[::-1])):
        kinds = {"flat": principal(theta[:, there], size if every else DIRECTIONS)}
        if not every:
            kinds["stiff"] = principal(gradients[:, there], DIRECTIONS)
        kinds["push"] = torch.nn.functional.normalize(gradients[:, there].double().mean((0, 1)), dim=0)[None]
        axes = torch.cat(list(kinds.values())).to(theta.dtype)
        names += [f"{kind} {i + 1}, {part}" for kind, vectors in kinds.items() for i in range(len(vectors))]
        centre = theta[:, there].mean(1, keepdim=True)
        slope = gradients[:, here] @ axes.T
        slopes.append(as_array(slope)[:, : draws // 2])
        products.append(as_array(((theta[:, here] - centre) @ axes.T) * slope)[:, : draws // 2])
        whole = as_array(theta @ axes.T)
        with np.errstate(invalid="ignore"):
            mixed += ((rhat(whole) < MIXED_RHAT) & (ess(whole) > MIXED_ESS)).tolist()
    force = np.concatenate(slopes, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.nan_to_num(force.mean((0, 1)) / force.std((0, 1)))
        error = np.maximum(1.0 / np.sqrt(ess(force, "mean")), _error_over_chains(force) / force.std((0, 1)))
    found = readings(names, [1] * len(names), np.concatenate(products, -1), temperature)
    columns = zip(found, mixed, shift.tolist(), error.tolist(), strict=True)
    return tuple(replace(r, mixed=m, shift=s, shift_error=e) for r, m, s, e in columns)


def principal(values: Tensor, count: int) -> Tensor:
    """Principal directions ``[count, d]`` of the variation within chains, ``[chains, draws, d]``."""
    centred = (values - values.mean(1, keepdim=True)).flatten(0, 1).double()
    rows, size = centred.shape
    if rows > MOST_DRAWS:
        centred = centred[torch.linspace(0, rows - 1, MOST_DRAWS).long()]
    count = min(count, size, len(centred))
    if size <= len(centred):
        axes: Tensor = torch.linalg.eigh(centred.T @ centred)[1].flip(1)[:, :count].T
        return axes
    vectors = torch.linalg.eigh(centred @ centred.T)[1].flip(1)[:, :count]
    basis: Tensor = torch.linalg.qr(centred.T @ vectors)[0].T
    return basis


def anisotropy(found: Sequence[Reading], temperature: float) -> float:
    """Standard deviation of the temperature over directions, relative to T, with sampling errors removed."""
    used = [r for r in found if r.mixed and not r.name.startswith("push")]
    if len(used) < 2:
        return math.nan
    spread = float(np.var([r.temperature for r in used], ddof=1) - np.mean([r.error**2 for r in used]))
    return math.sqrt(max(spread, 0.0)) / temperature


def _error_over_chains(values: Array) -> Array:
    """Standard error of a mean from the spread of the chains' means, ``[...]``; 0 for a single chain."""
    if len(values) < 2:
        return np.zeros(values.shape[2:])
    error: Array = values.mean(1).std(0, ddof=1) / math.sqrt(len(values))
    return error
