"""Time of the fused update and of whole captured steps on a GPU.

    python -m benchmarks.gpu_step [--json FILE] [--sizes 1e6 11e6 100e6 1e9] [--models lenet5 resnet18 resnet56 vgg16]

Updates: I-SGD's step (prior, gradient, injected noise) beside ``torch.optim.SGD(fused=True)`` and
``Adam(fused=True)``, each replayed as a CUDA graph, and the bytes it must move over the bandwidth of a copy that is
measured in the same run. Steps: minibatch, augmentation, forward, backward and update as one graph, with I-SGD's update
and with fused SGD's, on random images.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import CIFAR10_MEAN, CIFAR10_STD, MNIST_MEAN, MNIST_STD
from experiments.images.captured import Chain
from experiments.images.classifiers import RECIPES, Task
from experiments.images.images import Images
from isosgd.samplers.flat import Flat
from isosgd.samplers.fused import FusedStep

BYTES = {"I-SGD": 14, "I-SGD, momentum": 22, "SGD fused": 12, "Adam fused": 28}  # for each parameter


class Plain(Chain):
    """A chain whose update is torch's fused SGD."""

    def _advance(self, key: Tensor) -> None:
        if not hasattr(self, "optimizer"):
            self.optimizer = torch.optim.SGD(self.flat.params, 1e-4, weight_decay=5e-4, fused=True)
        self.optimizer.step()


def captured(body: Callable[[], Any]) -> Callable[[], None]:
    """Warmed up and captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def seconds(run: Callable[[], Any], least: float = 0.2, blocks: int = 7) -> float:
    """Of one call: the median over blocks of many calls."""
    times: list[float] = []
    count = 1
    while len(times) < blocks:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        taken = start.elapsed_time(end) / 1e3
        if taken < least / blocks:
            count = max(2 * count, int(count * least / blocks / max(taken, 1e-6)))
        else:
            times.append(taken / count)
    return statistics.median(times)


def tensors(size: int) -> list[Tensor]:
    """About so many parameters, those of ResNet-18 where that is their number."""
    if size == 11_000_000:
        return [p.detach() for p in resnet_parameters()]
    piece = min(size, 4_000_000)
    return [torch.randn(piece, device="cuda") * 0.1 for _ in range(size // piece)]


def resnet_parameters() -> list[Tensor]:
    """In channels-last order, as they are used."""
    from experiments.models import resnet18

    return list(resnet18().to("cuda", memory_format=torch.channels_last).parameters())


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a copy of 2 GB."""
    source = torch.empty(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def updates(sizes: list[int]) -> dict[str, Any]:
    """Times of updates alone."""
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    found: dict[str, Any] = {"copy_bandwidth": bandwidth, "sizes": {}}
    for size in sizes:
        params = tensors(size)
        for p in params:
            p.grad = 1e-3 * torch.randn_like(p)
        count = sum(p.numel() for p in params)
        times: dict[str, float] = {}
        for label, make in (
            ("SGD fused", lambda params: torch.optim.SGD(params, 1e-6, weight_decay=1e-4, fused=True)),
            ("Adam fused", lambda params: torch.optim.Adam(params, 1e-6, fused=True, capturable=True)),
        ):
            optimizer = make(params)
            times[label] = seconds(captured(optimizer.step))
            del optimizer
        grads = [p.grad for p in params]
        flat = Flat(params)
        for label, friction in (("I-SGD", 1.0), ("I-SGD, momentum", 0.1)):
            update = FusedStep(flat, [[i] for i in range(len(params))], decay=1e-4, friction=friction)
            one = torch.tensor(1e-9, device="cuda")
            update.set([one] * len(params), [one] * len(params), torch.zeros_like(flat.values))
            key = torch.zeros(1, dtype=torch.int64, device="cuda")
            update.step(grads, key)
            times[label] = seconds(captured(lambda update=update, grads=grads, key=key: update.step(grads, key)))
            del update
        found["sizes"][str(size)] = {
            "parameters": count,
            "seconds": times,
            "over_sgd": {label: t / times["SGD fused"] for label, t in times.items()},
            "share_of_bandwidth": {label: BYTES[label] * count / t / bandwidth for label, t in times.items()},
        }
        print(size, json.dumps(found["sizes"][str(size)]), flush=True)
        del params, grads, flat
        torch.cuda.empty_cache()
    return found


def steps(models: list[str]) -> dict[str, Any]:
    """Times of whole steps."""
    found = {}
    for model in models:
        recipe = RECIPES[model]
        digits = recipe.data == "mnist"
        shape = (20_000, 28, 28) if digits else (20_000, 3, 32, 32)
        pixels = torch.randint(256, shape, dtype=torch.uint8)
        stats = (MNIST_MEAN, MNIST_STD) if digits else (CIFAR10_MEAN, CIFAR10_STD)
        images = Images.make(pixels, torch.randint(10, (len(pixels),)), *stats, recipe.augment, "cuda")
        times: dict[str, float] = {}
        runs: dict[str, Callable[[], None]] = {}
        for label, kind in (("SGD", Plain), ("I-SGD", Chain)):
            net: nn.Module = Task(model, recipe, images, {}).fresh(0)
            chain = kind(net, images, recipe.batch_size, decay=recipe.decay)
            chain.update.rates.fill_(1e-6)
            chain.update.kicks.fill_(1e-9)
            runs[label] = chain.step
        for label, run in (*runs.items(), *runs.items()):  # twice, in turn: the less of both
            times[label] = min(times.get(label, 1.0), seconds(run, least=0.5))
        keep = 400
        found[model] = {
            "batch_size": recipe.batch_size,
            "seconds": times,
            "ratio": times["I-SGD"] / times["SGD"],
            "draws_per_second": 1 / (keep * times["I-SGD"]),
            "keep_every": keep,
            "images_per_second": recipe.batch_size / times["I-SGD"],
        }
        print(model, json.dumps(found[model]), flush=True)
        del runs, chain, net
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="*", type=float, default=[1e6, 11e6, 100e6, 1e9])
    parser.add_argument("--models", nargs="*", default=["lenet5", "resnet18", "resnet56", "vgg16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found = {
        "command": "python -m benchmarks.gpu_step",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "updates": updates([int(size) for size in args.sizes]) if args.sizes else {},
        "steps": steps(args.models),
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
