"""One run: a method on a posterior for a number of gradients, how near it came, and the best of a grid of rates."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

import isosgd
from experiments.posteriors import suite
from isosgd.geometry.choice import StructureName

CHAINS = 8
LEAST_DRAWS = 4  # of each chain, even where the budget does not hold them
WHOLE = "isgd-all"  # I-SGD on all data
ORACLE_RATES = 7
MOST_BEYOND = 8  # further rates, beyond the ends of that grid
CURVE_POINTS = 15
RIVALS = ("sgld", "sghmc", "adaptive-sghmc", "psgld")
Row = dict[str, Any]


def default_methods() -> list[str]:
    """I-SGD with every structure it has, on all data, and the rivals."""
    return [*(f"isgd:{name}" for name in get_args(StructureName)), f"{WHOLE}:auto", *RIVALS]


def spend(problem: suite.Problem, method: str, options: dict[str, Any], gradients: int, seed: int) -> isosgd.Posterior:
    """Sample with so many gradients in all, warm-up included: the one place where a budget becomes a number of draws.

    A first call for one draw says what the warm-up costs and how far apart draws are; the second, of the same seed,
    does the same again and draws as often as the budget allows. A warm-up that would take more than half of the budget
    is told to take half (``info["capped"]``).
    """
    whole = method == WHOLE or (method == "isgd" and problem.batch_size >= len(problem.data[0]))

    def sample(draws: int, warmup: Any) -> isosgd.Posterior:
        return isosgd.sample(
            problem.target,
            problem.data,
            init=problem.init,
            method="isgd" if whole else method,
            draws=draws,
            chains=CHAINS,
            batch_size="all" if whole else problem.batch_size,
            warmup=warmup,
            seed=seed,
            progress=False,
            **options,
        )

    share, warmup = gradients // CHAINS, "auto"
    pilot = sample(1, warmup).info
    if capped := pilot["warmup"][0]["steps"] > share // 2:
        warmup = share // 2
        pilot = sample(1, warmup).info
    draws = (share - pilot["warmup"][0]["steps"]) // pilot["keep_every"][0]
    posterior = sample(max(LEAST_DRAWS, draws), warmup)
    posterior.info["capped"] = capped
    return within(posterior, share)


def within(posterior: isosgd.Posterior, share: int) -> isosgd.Posterior:
    """The draws that so many gradients of each chain bought: a run may space them wider than its pilot did."""
    info = posterior.info
    steps, gap = info["warmup"][0]["steps"], info["keep_every"][0]
    most = max(LEAST_DRAWS, (share - steps) // gap)
    if most >= posterior.num_draws:
        return posterior
    spent = info["gradients"] - sum(info["keep_every"]) * (posterior.num_draws - most)
    draws = {name: x[:, :most] for name, x in posterior.draws.items()}
    return isosgd.Posterior(posterior.target, draws, info | {"gradients": spent})


def curve(problem: suite.Problem, posterior: isosgd.Posterior) -> list[Row]:
    """Scores of the first few draws, of more, and of all, with the gradients spent until then."""
    total, gap, most = posterior.info["gradients"], sum(posterior.info["keep_every"]), posterior.num_draws
    counts = np.unique(np.geomspace(min(4, most), most, CURVE_POINTS).astype(int))
    rows = []
    for count in map(int, counts):
        spent = total - gap * (most - count)
        draws = {name: x[:, :count] for name, x in posterior.draws.items()}
        rows.append({"gradients": spent, **suite.score(problem, draws, spent)})
    return rows


def measure(problem: suite.Problem, label: str, options: dict[str, Any], gradients: int, seed: int) -> Row:
    """One run: its scores, or why there are none."""
    method, _, structure = label.partition("@")[0].partition(":")
    given = options | ({"structure": structure} if structure else {})
    row: Row = {"problem": problem.name, "method": label, "options": given, "seed": seed}
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            posterior = spend(problem, method, given, gradients, seed)
        except isosgd.DivergedError as error:
            return row | {"failed": str(error), "seconds": time.monotonic() - started}
    points = curve(problem, posterior)
    if not math.isfinite(points[-1]["w2"]):
        return row | {"failed": "the draws are not finite", "seconds": time.monotonic() - started}
    return row | points[-1] | {
        "curve": points,
        "draws": posterior.num_draws,
        "chains": posterior.num_chains,
        "keep_every": posterior.info["keep_every"],
        "rates": posterior.info["rates"],
        "warmup_capped": posterior.info["capped"],
        "warnings": sorted({str(warning.message) for warning in heard}),
        "sampling_seconds": posterior.info["seconds"],
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def oracle(
    problem: suite.Problem, method: str, options: dict[str, Any], found: list[Row], gradients: int, seeds: int
) -> list[Row]:
    """Runs at the best rate of a grid that spans the rates a method set for its groups, and four times beyond.

    While the best is the lowest or the highest of them, the grid goes on in that direction.
    """
    rates = [rate for row in found for chain in row.get("rates", []) for rate in chain.values()]
    if not rates:
        return []

    def error(lr: float) -> float:
        given = options | {"lr": lr}
        tried[lr] = [measure(problem, f"{method}@oracle", given, gradients, seed) for seed in range(seeds)]
        return mean(tried[lr], "w2") if all("w2" in row for row in tried[lr]) else math.inf

    tried: dict[float, list[Row]] = {}
    grid = np.geomspace(min(rates) / 4, max(rates) * 4, ORACLE_RATES).tolist()
    best = walk(error, grid)
    return [] if best is None else tried[best]


def walk(error: Callable[[float], float], grid: Sequence[float]) -> float | None:
    """The rate with the least error, on a grid that grows at an end for as long as the best is there.

    Example:
        >>> round(walk(lambda lr: (math.log2(lr) - 5) ** 2, [1.0, 2.0, 4.0]))
        32
    """
    ratio = grid[1] / grid[0]
    errors = {lr: error(lr) for lr in grid}
    for _ in range(MOST_BEYOND):
        best = min(errors, key=lambda lr: errors[lr])
        if best not in (min(errors), max(errors)) or math.isinf(errors[best]):
            break
        further = best * ratio if best == max(errors) else best / ratio
        errors[further] = error(further)
    best = min(errors, key=lambda lr: errors[lr])
    return None if math.isinf(errors[best]) else best


def mean(rows: list[Row], key: str) -> float:
    """Mean of a column."""
    return float(np.mean([row[key] for row in rows]))
