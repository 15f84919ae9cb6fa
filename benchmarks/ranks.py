"""Several processes: chain-steps a second of `parallel="chains"`, bytes moved by steps of `parallel="data"` and FSDP2.

``python -m benchmarks.ranks`` starts groups of 1, 2 and 4 gloo processes on this machine, one thread each, and prints
the best of ``--rounds`` for speed: by the clock, which needs two idle cores, and by the CPU time of a process, which
does not. Bytes are those that a rank writes to its sockets (``/proc/self/io``, Linux), beside what a ring all-reduce
should move: ``2 (R - 1) / R`` times the gradient, twice that in steps that measure the noise; for FSDP2, parameters
gathered twice, ``(R - 1) / R`` times them each, and a reduce-scatter of gradients, for which gloo takes an all-reduce.

With ``--memory`` it prints what a short run of I-SGD with ``structure="layer"`` takes at its peak, a warm-up and a draw
that is written included: the resident memory of a process (Linux), in numbers a parameter, beside the same of a small
network.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from isosgd import ISGD, Target, likelihoods, sample

ROWS, INPUTS, HIDDEN, EVERY = 2_000, 64, 256, 16


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))
    for p in model.parameters():
        p.data.normal_(0.0, 0.1, generator=generator)
    return model


def target() -> Target:
    return Target.from_module(network(), "categorical")


def sharded(steps: int) -> float:
    """Bytes that this rank writes in a step of a loop over a model that FSDP2 shards."""
    model, generator = network(), torch.Generator().manual_seed(1)
    fully_shard(model, reshard_after_forward=True)
    optimizer = ISGD(model.parameters(), num_data=ROWS, lam=1e-3, structure="layer")
    x, y = torch.randn(64, INPUTS, generator=generator), torch.randint(10, (64,), generator=generator)
    before = 0
    for step in range(steps + 20):
        before = written() if step == 20 else before
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return (written() - before) / steps


def draw(parallel: Any, chains: int, steps: int) -> float:
    """Seconds that steps of each chain take, none of a warm-up."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(ROWS, INPUTS, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    began = time.monotonic()
    sample(
        target(), data, chains=chains, parallel=parallel, method="sgld", lr=1e-5, warmup=0, draws=4,
        keep_every=steps // 4, noise_every=EVERY, batch_size=128, progress=False, compile=False,
    )  # fmt: skip
    return time.monotonic() - began


def memory(folder: str, width: int = 1_000) -> float:
    """Numbers a parameter that this process holds at the peak of a run on this many ranks."""
    found = []
    for size in (20, width):  # what comes with the first run is there before the second
        torch.manual_seed(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        layers = [layer for _ in range(4) for layer in (nn.Linear(size, size, bias=False), nn.Tanh())]
        model, x = nn.Sequential(*layers), torch.randn(64, size)
        sample(
            Target.from_module(model, likelihoods.Gaussian(1.0)), (x, x), chains=1, batch_size=16, structure="layer",
            parallel="data" if dist.get_world_size() > 1 else None, warmup=100, draws=1, keep_every=4, compile=False,
            progress=False, store=f"{folder}/{size}",
        )  # fmt: skip
        found.append((resident("VmHWM") - before) / (4 * 4 * size**2))
    return found[-1]


def resident(which: str) -> int:
    """Bytes of memory of this process: now (``VmRSS``), or the most that there were (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(which)))


def written() -> int:
    """Bytes that this process has written, to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def on_rank(steps: int, rounds: int, folder: str) -> None:
    """What each process does; rank 0 prints a line of JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    if folder:
        numbers = memory(folder)
        if dist.get_rank() == 0:
            print(json.dumps({"numbers": numbers}))
        dist.destroy_process_group()
        return
    times = []
    for _ in range(rounds if size != 4 else 0):
        busy = time.process_time()
        times.append((draw("chains", 4, steps), time.process_time() - busy))
    seconds, cpu = (min(x) for x in zip(*times, strict=True)) if times else (None, None)
    before = written()
    draw("data", 1, 4)
    few = written() - before
    draw("data", 1, 4 + steps)
    bytes_a_step = (written() - before - 2 * few) / steps
    fsdp = sharded(steps)
    if dist.get_rank() == 0:
        print(json.dumps({"size": size, "seconds": seconds, "cpu": cpu, "bytes": bytes_a_step, "fsdp": fsdp}))
    dist.destroy_process_group()


def launch(size: int, steps: int, rounds: int, folder: str = "") -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    if folder:
        given["MALLOC_MMAP_THRESHOLD_"] = "65536"  # memory of tensors that are freed goes back to the system
    words = [sys.executable, "-m", "benchmarks.ranks", "--steps", str(steps), "--rounds", str(rounds)]
    words += ["--folder", folder]
    jobs = [
        subprocess.Popen(
            words, env={**given, "RANK": str(rank), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    first, *_ = [job.communicate()[0] for job in jobs]
    found: dict[str, Any] = json.loads(first.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="of each chain (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts (%(default)s)")
    parser.add_argument("--memory", action="store_true", help="only say what memory a process takes")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        on_rank(args.steps, args.rounds, args.folder)
        return
    if args.memory:
        for ranks in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                numbers = launch(ranks, 0, 0, folder)["numbers"]
            print(f"{ranks} processes: {numbers:.1f} numbers a parameter at the peak", flush=True)
        return
    size = sum(x.numel() for x in target().initial().values())
    found = {ranks: launch(ranks, args.steps, args.rounds) for ranks in (1, 2, 4)}
    print(f"{size:,} parameters, {args.steps} steps of 4 chains, torch {torch.__version__}, {os.cpu_count()} cores")
    for ranks in (1, 2):
        print(f"{ranks} processes: {4 * args.steps / found[ranks]['seconds']:,.0f} chain-steps a second")
    print(
        f"ratio: {found[1]['seconds'] / found[2]['seconds']:.2f}, by CPU time {found[1]['cpu'] / found[2]['cpu']:.2f}"
    )
    for ranks in (2, 4):
        formula = 2 * (ranks - 1) / ranks * 4 * (size + 2) * (1 + 1 / EVERY)
        print(
            f"{ranks} ranks: {found[ranks]['bytes']:,.0f} bytes written by a rank each step, {formula:,.0f} by formula"
            f"; FSDP2 {found[ranks]['fsdp']:,.0f}, {4 * (ranks - 1) / ranks * 4 * size:,.0f} by formula"
        )


if __name__ == "__main__":
    main()
