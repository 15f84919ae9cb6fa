"""Time of one update, without the gradient: our samplers against torch's optimizers, interleaved in one process.

    python -m benchmarks.step [--rounds 500] [--threads 2] [--json FILE]

The model has 167 tensors and about a million parameters, in 56 layers (the shape of a ResNet-56 without its
buffers). Every round calls every optimizer once, so that all of them meet cold caches and the same load on the
machine. Noise for the next step of a large CPU model is made by a thread while the next gradient is computed; there is
no gradient here, so the next optimizer waits for it, and that time stands in a column of its own ("ahead"). Samplers
follow the gradient noise in some steps only (every fiftieth, their default); what is shown is the mean over such a
cycle of the medians over rounds, so that those steps count too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import isosgd

CYCLE = 50  # steps between two looks at the noise, the samplers' default


def make_params(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    """Named parameters with gradients: 55 convolutions with a normalisation each, and a classifier."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for i in range(55):
        shapes += [(f"{i}.weight", (64, 32, 3, 3)), (f"{i}.scale", (64,)), (f"{i}.shift", (64,))]
    shapes += [("out.weight", (10, 64)), ("out.bias", (10,))]
    params = [(name, nn.Parameter(0.1 * torch.randn(shape, generator=generator))) for name, shape in shapes]
    for _, p in params:
        p.grad = 1e-3 * torch.randn(p.shape, generator=generator)
    return params


class Step(NamedTuple):
    """A step, and what waits for the work it has left to a thread."""

    step: Callable[[int], None]
    wait: Callable[[], None] = lambda: None


def torch_step(kind: type[torch.optim.Optimizer], **settings: object) -> Step:
    """A step of one of torch's optimizers."""
    optimizer = kind([p for _, p in make_params()], foreach=True, **settings)  # type: ignore[call-arg]

    def step(i: int) -> None:
        optimizer.step()

    return Step(step)


def sampler_step(kind: type[isosgd.Sampler], **settings: object) -> Step:
    """A step of one of our samplers, with the noise looked at every CYCLE steps."""
    params = make_params()
    generator = torch.Generator().manual_seed(1)
    sampler = kind(params, num_data=50_000, generator=generator, **settings)
    noise: list[Tensor] = [1e-3 * torch.randn(p.shape, generator=generator) for _, p in params]
    sampler.observe(noise)
    sampler.adapt([10.0] * len(sampler.param_groups))
    sampler.freeze()

    def step(i: int) -> None:
        sampler.step(noise=noise if sampler.estimator.centred and i % CYCLE == 0 and kind is not isosgd.SGLD else None)

    def wait() -> None:
        if sampler.injector.source.prefetched is not None:
            sampler.injector.source.prefetched.result()

    return Step(step, wait)


def measure(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds a step, and milliseconds until its thread is done, for each optimizer."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(CYCLE)] for name in steps}
    ahead: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + CYCLE):
        for name, (step, wait) in steps.items():
            start = time.perf_counter()
            step(i)
            done = time.perf_counter()
            wait()
            if i >= CYCLE:  # the first cycle allocates
                times[name][i % CYCLE].append(done - start)
                ahead[name].append(time.perf_counter() - done)
    return {
        name: (1e3 * statistics.mean(map(statistics.median, cycle)), 1e3 * statistics.median(ahead[name]))
        for name, cycle in times.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=500, help="steps of each optimizer (default 500)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use (default 2)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    steps = {
        "SGD": torch_step(torch.optim.SGD, lr=1e-6),
        "SGD, momentum 0.9": torch_step(torch.optim.SGD, lr=1e-6, momentum=0.9),
        "Adam": torch_step(torch.optim.Adam, lr=1e-6),
        "SGLD": sampler_step(isosgd.SGLD),
        "SGHMC": sampler_step(isosgd.SGHMC),
        "V-SGD": sampler_step(isosgd.VSGD),
        "I-SGD, diagonal": sampler_step(isosgd.ISGD, noise="gaussian", correction="diagonal", summary="sum"),
        "I-SGD, outer": sampler_step(isosgd.ISGD),
        "I-SGD, outer, normal innovations": sampler_step(isosgd.ISGD, innovations="normal"),
    }
    found = measure(steps, args.rounds)
    count = sum(p.numel() for _, p in make_params())
    print(f"{count:,} parameters, {len(make_params())} tensors; {args.rounds} rounds, {args.threads} threads")
    print(f"torch {torch.__version__}, isosgd {isosgd.__version__}, {platform.machine()}")
    print(f"{'':<34} {'step':>10}   {'':>11} {'ahead':>10}")
    for name, (ms, ahead) in found.items():
        print(f"{name:<34} {ms:7.3f} ms   {ms / found['SGD'][0]:5.2f} x SGD {ahead:7.3f} ms")
    if args.json:
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "rounds": args.rounds,
            "threads": args.threads,
        }
        args.json.write_text(json.dumps({**about, "milliseconds [step, ahead]": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
