"""What several chains of a network cost on a GPU: side by side, each a CUDA graph on a stream of its own, against one.

    python -m benchmarks.side_by_side [--cases lenet5 resnet18] [--chains 1 4] [--json FILE]

Data are random: only the time counts. The figures are those of 1,200 steps between draws, from two runs that differ in
their number of draws alone.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import torch

from benchmarks.engine import CASES, random_images
from experiments.models import resnet56, vgg16_bn
from isosgd import Target, sample

STEPS = 400


def main() -> None:
    cases = CASES | {
        name: CASES["resnet18"] | {"make": make} for name, make in (("vgg16", vgg16_bn), ("resnet56", resnet56))
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["lenet5", "resnet18", "vgg16"], choices=list(cases))
    parser.add_argument("--chains", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in args.cases:
        case = cases[name]
        data = random_images(case)
        for chains in args.chains:
            networks = [case["make"]().cuda().train() for _ in range(chains)]
            target = Target.from_module(networks[0], "categorical", **case["settings"])
            spans = []
            for draws in (1, 1, 4):  # the first run loads and compiles
                torch.cuda.synchronize()
                began = time.perf_counter()
                posterior = sample(
                    target, data, starts=networks, method="sghmc", lr=1e-6, warmup=0, temperature=1e-3, draws=draws,
                    keep_every=STEPS, batch_size=case["batch"], transform=case["transform"], progress=False,
                )  # fmt: skip
                spans.append(time.perf_counter() - began)
            each = 1e3 * (spans[2] - spans[1]) / (3 * STEPS)
            engine = posterior.info["engine"]
            print(
                f"{name}, {chains} chains: {each:.3f} ms a step of all, {each / chains:.3f} of one; {engine}",
                flush=True,
            )
            found[f"{name} {chains}"] = {"all": each, "one": each / chains, "engine": engine}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
