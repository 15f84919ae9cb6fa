"""What a gradient of one chain costs in `isosgd.sample` on a CPU, against eager loops of torch.optim.SGD.

    python -m benchmarks.one_chain [--rounds 7]

The network is an MLP 20-64-64-5, minibatches have 128 examples. SGD runs with and without oneDNN, whichever is faster;
a gradient of `sample` is the difference of two runs that differ in their number of draws alone, once all is built. All
run in one process on one thread, in turns; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import Tensor, nn

from isosgd import Target, sample

STEPS = 4_000


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def sgd(data: tuple[Tensor, Tensor], steps: int, onednn: bool) -> float:
    """Seconds a step of an eager loop."""
    model, (x, y) = network(), data
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
    began = time.perf_counter()
    for _ in range(steps):
        index = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    torch.backends.mkldnn.enabled = before  # type: ignore[assignment]
    return (time.perf_counter() - began) / steps


def ours(target: Target, data: tuple[Tensor, Tensor], draws: int) -> tuple[float, str]:
    began = time.perf_counter()
    posterior = sample(
        target, data, draws=draws, keep_every=STEPS, warmup=800, batch_size=128, compile=True, progress=False
    )
    return time.perf_counter() - began, posterior.info["engine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    data = torch.randn(2_000, 20), torch.randint(5, (2_000,))
    target = Target.from_module(network(), "categorical")
    _, engine = ours(target, data, 1)  # builds or compiles
    times: dict[str, list[float]] = {"with oneDNN": [], "without": [], "sample": []}
    for _ in range(args.rounds):
        times["with oneDNN"].append(sgd(data, 1_000, True))
        times["without"].append(sgd(data, 1_000, False))
        times["sample"].append((ours(target, data, 3)[0] - ours(target, data, 1)[0]) / (2 * STEPS))
    middle = {name: statistics.median(values) for name, values in times.items()}
    best = min(middle["with oneDNN"], middle["without"])
    print(", ".join(f"{name} {1e6 * value:.0f} us" for name, value in middle.items()))
    print(f"a gradient of one chain takes {middle['sample'] / best:.2f} times that of the faster SGD loop ({engine})")


if __name__ == "__main__":
    main()
