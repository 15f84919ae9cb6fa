"""Local learning coefficients that are known, by `isosgd.llc` and by devinterp 1.x at the best of five rates.

Run it where devinterp 1.3.2 is installed:

    python -W ignore -m benchmarks.llc --seeds 2 --out results/llc

Every estimate takes 1,000 gradients of all 1,000 examples, which is devinterp's default (10 chains of 100 draws, no
burn-in); isosgd's default is 4 chains of 100 + 150. Inverse temperature N / log N and localization 1 for all of them.
devinterp's samplers are run at five rates; the table shows the rate that came closest to the known coefficient, which
nobody knows in practice. `LocalSampler` is ours inside devinterp's own loop (4 chains, 100 burn-in, 150 draws).

Known coefficients: d/2 for regular models; 1/4 for w^4; deep linear networks by Aoyagi (2024), at the most singular of
their minima, where every factor has the rank of the product.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import isosgd
from isosgd.samplers import LocalSampler

N = 1_000
RATES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2)
Loss = Callable[[Tensor, Tensor], Tensor]


class Power(nn.Module):
    """``w^4``, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w**4).expand(len(x))


@dataclass(frozen=True)
class Problem:
    """A model at a minimum, its data, the loss of each example, and its coefficient."""

    name: str
    model: nn.Module
    data: tuple[Tensor, Tensor]
    loss: Loss
    known: float


def aoyagi(widths: tuple[int, ...], rank: int) -> float:
    """Learning coefficient of a deep linear network whose product has this rank (Aoyagi 2024, theorem 1)."""
    rest = sorted(h - rank for h in widths)
    for count in range(2, len(rest) + 1):
        chosen, others, gaps = rest[:count], rest[count:], count - 1
        if sum(chosen) >= gaps * max(chosen) and (not others or sum(chosen) < gaps * min(others)):
            break
    total = sum(chosen)
    a = total - (math.ceil(total / gaps) - 1) * gaps
    pairs = sum(x * y for x, y in combinations(chosen, 2)) / 2
    regular = (rank * (widths[0] + widths[-1]) - rank**2) / 2
    return regular + a * (gaps - a) / (4 * gaps) - gaps * (gaps - 1) / 4 * (total / gaps) ** 2 + pairs


def problems() -> Iterator[Problem]:
    g = torch.Generator().manual_seed(0)
    for size, ratio in ((10, 10.0), (100, 10.0)):
        x = torch.randn(N, size, generator=g) * torch.logspace(0, math.log10(ratio), size)
        y = x.sum(1, keepdim=True) + torch.randn(N, 1, generator=g)
        model = nn.Linear(size, 1, bias=False)
        model.weight.data.copy_(torch.linalg.lstsq(x, y).solution.T)
        name = f"regression, d = {size}, scales 1 to {ratio:g}"
        yield Problem(name, model, (x, y), lambda out, y: 0.5 * (out - y).square().sum(1), size / 2)
    x = torch.zeros(N, 1)
    yield Problem("w^4", Power(), (x, x), lambda out, y: out, 0.25)
    for widths, rank in (((5, 3, 5), 1), ((10, 5, 10), 2), ((8, 8, 8, 8), 3), ((20, 10, 10, 20), 4)):
        turns = [torch.linalg.qr(torch.randn(h, h, generator=g))[0] for h in widths]
        model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
        for i, layer in enumerate(model):
            layer.weight.data.copy_(turns[i + 1][:, :rank] @ turns[i][:, :rank].T)
        x = torch.randn(N, widths[0], generator=g)
        name = f"linear {'-'.join(map(str, widths))}, rank {rank}"
        loss: Loss = lambda out, y: (out - y).square().sum(1)  # noqa: E731
        yield Problem(name, model, (x, model(x).detach()), loss, aoyagi(widths, rank))


def by_devinterp(problem: Problem, method: object, seed: int, settings: dict[str, float], **lengths: int) -> float:
    from devinterp.slt.sampler import estimate_learning_coeff_with_summary

    def evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return problem.loss(model(batch[0]), batch[1]).mean()

    # One batch of all examples, without torch's loop over them.
    loader = torch.utils.data.DataLoader(range(N), batch_size=N, collate_fn=lambda _: problem.data)  # type: ignore[arg-type]
    with torch.no_grad():
        before = evaluate(problem.model, problem.data)
    try:
        found = estimate_learning_coeff_with_summary(
            problem.model, loader, evaluate=evaluate, sampling_method=method, seed=seed, verbose=False,
            optimizer_kwargs={"localization": 1.0, "nbeta": N / math.log(N), **settings},
            init_loss=float(before) or 1e-12, **lengths,  # a loss of 0 would be taken for none
        )  # fmt: skip
    except RuntimeError:  # devinterp's word for a loss that is not a number
        return math.nan
    return float(found["llc/mean"])


def by_isosgd(problem: Problem, seed: int) -> isosgd.LLC:
    return isosgd.llc(problem.model, problem.data, likelihood=lambda out, y: -problem.loss(out, y), seed=seed)


def rows(seeds: int) -> Iterator[dict[str, object]]:
    from devinterp.optim.sgmcmc import SGMCMC

    for problem in problems():
        began = time.monotonic()
        runs = [by_isosgd(problem, seed) for seed in range(seeds)]
        yield {
            "problem": problem.name, "known": problem.known, "method": "isosgd.llc", "rate": None,
            "found": [run.mean for run in runs], "plain": [run.plain for run in runs],
            "verdicts": [run.verdict.summary for run in runs], "seconds": (time.monotonic() - began) / seeds,
        }  # fmt: skip
        inside = [
            by_devinterp(problem, LocalSampler, seed, {}, num_chains=4, num_draws=150, num_burnin_steps=100)
            for seed in range(seeds)
        ]
        yield {"problem": problem.name, "known": problem.known, "method": "LocalSampler", "rate": None, "found": inside}
        for name, method in (("SGLD", SGMCMC.sgld), ("RMSprop-SGLD", SGMCMC.rmsprop_sgld)):
            for rate in RATES:
                began = time.monotonic()
                found = [by_devinterp(problem, method, seed, {"lr": rate}) for seed in range(seeds)]
                yield {
                    "problem": problem.name, "known": problem.known, "method": name, "rate": rate, "found": found,
                    "seconds": (time.monotonic() - began) / seeds,
                }  # fmt: skip


def off(row: dict[str, object]) -> float:
    """Root mean square of the relative error over seeds."""
    known, found = float(row["known"]), row["found"]  # type: ignore[arg-type]
    errors = [x / known - 1 if math.isfinite(x) else math.inf for x in found]  # type: ignore[attr-defined]
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def table(found: list[dict[str, object]]) -> str:
    """Root mean square error in percent of the known coefficient; rates in brackets."""
    methods = ("isosgd.llc", "LocalSampler", "SGLD", "RMSprop-SGLD")
    lines = ["| problem | known | " + " | ".join(methods) + " |", "|---|---|" + "---|" * len(methods)]
    for name in dict.fromkeys(row["problem"] for row in found):
        mine = [row for row in found if row["problem"] == name]
        cells = []
        for method in methods:
            best = min((row for row in mine if row["method"] == method), key=off)
            cells.append(f"{100 * off(best):.1f}%" + (f" ({best['rate']:g})" if best["rate"] else ""))
        lines.append(f"| {name} | {mine[0]['known']:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="folder for llc.jsonl")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for row in rows(asked.seeds):
        found.append(row)
        print(json.dumps(row), flush=True)
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "llc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(table(found))


if __name__ == "__main__":
    main()
