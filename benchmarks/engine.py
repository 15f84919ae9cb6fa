"""What a gradient costs in `isosgd.sample` on a GPU, against a captured step of SGD of the same network and minibatch.

    python benchmarks/engine.py [--rounds 5] [--json FILE]

Both run in one process, in turns; the figures are medians. Data are random: only the time counts. A gradient of
`sample` is the time of 2,000 steps between draws, from two runs that differ in their number of draws alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import crop_flip
from experiments.models import lenet5, resnet18
from isosgd import Target, sample

STEPS = 2_000


def crop(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shifts and mirror images of bytes, made floats."""
    return crop_flip(batch[0], generator).float().mul_(1 / 64).sub_(2), batch[1]


def plain(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return batch[0].float().mul_(1 / 64).sub_(2), batch[1]


CASES: dict[str, dict[str, Any]] = {
    "lenet5": {"make": lenet5, "shape": (1, 28, 28), "batch": 128, "transform": plain, "settings": {}},
    "resnet18": {
        "make": resnet18,
        "shape": (3, 32, 32),
        "batch": 64,
        "transform": crop,
        "settings": {"autocast": "bfloat16", "channels_last": True},
    },
}


class Sgd:
    """A step of SGD with its minibatch, transform and network in one CUDA graph."""

    def __init__(self, case: dict[str, Any], data: tuple[Tensor, Tensor]) -> None:
        self.model = case["make"]().cuda().train()
        self.bf16 = "autocast" in case["settings"]
        if self.bf16:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.case, self.data = case, data
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, weight_decay=1e-5, foreach=True)
        self.generator = torch.Generator("cuda").manual_seed(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        n = self.case["batch"]
        index = torch.randint(len(self.data[0]), (n,), generator=self.generator, device="cuda")
        x, y = self.case["transform"]((self.data[0][index], self.data[1][index]), self.generator)
        if self.bf16:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            out = self.model(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


def random_images(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Images of bytes, and labels, on the GPU; torch is seeded."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (10_000, *case["shape"]), dtype=torch.uint8, device="cuda")
    return pixels, torch.randint(10, (10_000,), device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--structures", nargs="*", default=["auto", "diagonal", "layer"])
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in args.cases:
        case = CASES[name]
        data = random_images(case)
        model = case["make"]().cuda().train()
        target = Target.from_module(model, "categorical", **case["settings"])
        sgd = Sgd(case, data)
        for structure in args.structures:
            more: dict[str, Any] = {"structure": structure}
            if structure == "layer":
                more["correction"] = "diagonal"
            times: dict[str, list[float]] = {"sgd": [], "sample": []}
            engine = ""
            for _ in range(args.rounds):
                times["sgd"].append(sgd.seconds(STEPS))
                spans = []
                for draws in (1, 4):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    posterior = sample(
                        target, data, draws=draws, warmup=600, keep_every=STEPS, batch_size=case["batch"],
                        transform=case["transform"], temperature=1e-3, progress=False, **more,
                    )  # fmt: skip
                    spans.append(time.perf_counter() - began)
                    engine = posterior.info["engine"]
                times["sample"].append((spans[1] - spans[0]) / (3 * STEPS))
            middle = {key: 1e3 * statistics.median(values) for key, values in times.items()}
            ratio = middle["sample"] / middle["sgd"]
            print(f"{name} {structure}: SGD {middle['sgd']:.3f} ms, sample {middle['sample']:.3f} ms, {ratio:.3f}; "
                  f"a draw in {spans[0]:.1f} s; {engine}", flush=True)  # fmt: skip
            found[f"{name} {structure}"] = {**middle, "ratio": ratio, "engine": engine, "first draw": spans[0]}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
