"""A loop of one's own in a CUDA graph: does it sample the posterior, and how long is a step?

    python -m benchmarks.loop_graph --out results/gpu/loop_graph.json

The regression of docs/loops.md (1,000 examples, 3 slopes, minibatches of 50), on one GPU, once for each of SGLD, SGHMC,
ISGD (full matrix) and ISGD with one rate for the layer. A plain loop warms up; 3,000 of its eager steps are timed; then
minibatch, loss, backward and step are captured together in phase ``sampling`` and replayed 100,000 times, with
``optimizer.replayed()`` after each. Compared with the exact posterior are means and variances of the slopes, with
Monte-Carlo errors from means over 50 batches of draws: ``off`` is the largest deviation in standard errors, of which
4.5 are allowed for 24 numbers, and a bias of .04 of the variance besides (.02 each for step size and gradient noise, as
``bias=`` has it). Less than a minute.

``--device cpu`` runs the same without a graph, to check the script.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import isosgd

N, SIZE, SIGMA = 1_000, 50, 0.5
EAGER, REPLAYS, BATCHES, ALLOWED, BIAS = 3_000, 100_000, 50, 4.5, 0.04
KEEP = 4  # steps between places that are kept
CASES: dict[str, tuple[type[isosgd.samplers.Sampler], dict[str, Any]]] = {
    "sgld": (isosgd.SGLD, {}),
    "sghmc": (isosgd.SGHMC, {}),
    "isgd": (isosgd.ISGD, {}),
    "isgd, layer": (isosgd.ISGD, {"structure": "layer"}),
}


class Loop:
    """The regression, its model and its sampler."""

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        x = torch.randn(N, 3)
        y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + SIGMA * torch.randn(N, 1)
        self.covariance = SIGMA**2 * torch.linalg.inv((x.T @ x).double())
        self.mean = (self.covariance @ (x.T @ y).double()).flatten() / SIGMA**2
        self.x, self.y = x.to(device), y.to(device)
        self.model = nn.Linear(3, 1, bias=False).to(device)
        kind, settings = CASES[name]
        self.optimizer = kind(self.model.parameters(), num_data=N, batch_size=SIZE, capturable=True, **settings)
        self.device = device

    def step(self) -> None:
        rows = torch.randint(N, (SIZE,), device=self.device)
        loss = (self.model(self.x[rows]) - self.y[rows]).square().mean() / (2 * SIGMA**2)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, step: Callable[[], None], count: int) -> tuple[float, Tensor]:
        """Microseconds of a step, and every `KEEP`-th place."""
        kept = torch.empty(count // KEEP, 3, device=self.device)
        began = self.wait()
        for i in range(count):
            step()
            if i % KEEP == 0:
                kept[i // KEEP].copy_(self.model.weight.detach()[0])
        return 1e6 * (self.wait() - began) / count, kept.double().cpu()

    def compared(self, draws: Tensor) -> dict[str, Any]:
        """Means and variances against the exact posterior."""
        exact = self.covariance.diagonal()
        z = (draws - self.mean) / exact.sqrt()
        found = {}
        every = (("mean", z, 0.0, 0.0), ("variance", (z - z.mean(0)).square(), 1.0, BIAS))
        for what, numbers, expected, bias in every:
            batches = numbers.reshape(BATCHES, -1, 3).mean(1)
            error = batches.std(0) / BATCHES**0.5
            found[what] = batches.mean(0).tolist()
            found[f"{what}_error"] = error.tolist()
            found[f"{what}_off"] = float((((batches.mean(0) - expected).abs() - bias).clamp_min(0) / error).max())
        return found


def run(name: str, device: torch.device, replays: int) -> dict[str, Any]:
    loop = Loop(name, device)
    began, stream = time.perf_counter(), None
    if device.type == "cuda":
        # All on one side stream: gradients are accumulated on the stream on which parameters were used first.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
    while not loop.optimizer.draws_ready:
        loop.step()
    warmup = loop.optimizer.param_groups[0]["step"]
    eager, _ = loop.timed(loop.step, EAGER)
    step: Callable[[], None] = loop.step
    if stream is not None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(loop.optimizer.generator)
        with torch.cuda.graph(graph, stream=stream):
            loop.step()

        def step() -> None:
            graph.replay()
            loop.optimizer.replayed()

    micros, draws = loop.timed(step, replays)
    found = {"warmup": warmup, "eager_us": eager, "captured_us": micros, **loop.compared(draws)}
    found["right"] = max(found["mean_off"], found["variance_off"]) < ALLOWED
    return found | {"seconds": time.perf_counter() - began}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.replays < KEEP * BATCHES or args.replays % (KEEP * BATCHES):
        parser.error(f"--replays {args.replays} must be a multiple of {KEEP * BATCHES}")
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "replays": args.replays, "cases": {}}
    for case in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", isosgd.SamplingWarning)
            try:
                one = run(case, device, args.replays)
            except Exception as error:  # the other cases are still worth having
                found["cases"][case] = {"right": False, "error": f"{type(error).__name__}: {error}"}
                print(f"{case:<12} {type(error).__name__}: {error}")
                continue
        found["cases"][case] = one | {"warnings": [str(w.message) for w in caught]}
        variance = " ".join(f"{v:.3f}" for v in one["variance"])
        print(
            f"{case:<12} variance over the exact one {variance} (off {one['variance_off']:.1f} errors), mean off "
            f"{one['mean_off']:.1f}; eager {one['eager_us']:.0f} us, captured {one['captured_us']:.0f} us a step "
            f"({one['eager_us'] / one['captured_us']:.1f} times as fast); {'right' if one['right'] else 'WRONG'}"
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
