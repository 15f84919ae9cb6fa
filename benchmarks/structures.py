"""Time and memory of one I-SGD update, without the gradient, by the structure of Lambda, on ResNet-18's tensors.

    python -m benchmarks.structures [--device cpu] [--rounds 150] [--threads 1] [--structures NAME ...]
        [--leading K ...] [--json FILE]

Lambda is set up from synthetic noise vectors, then every round steps every sampler once, so that all meet the same load
on the machine. The noise is looked at in every fiftieth step, as samplers do by default; what is shown is the mean over
such a cycle, of medians over rounds. Innovations of a CPU chain are made by a thread during the next gradient; there is
none here, so that their time stands in a column of its own ("ahead"). "total" is both, against that of the plain update
(``layer``, the paper's, with the correction of correlated noise), and "processor" the same in processor time of the
process, which other work on the machine disturbs less. The issue asks for at most 3 times the plain update for
``lowrank`` with ten directions, and at most 2 times for ``kronecker``. "kept" counts the tensors that a sampler holds
besides parameters and gradients: those of its state, of its structure, and of its innovations.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import isosgd
from experiments.models import resnet18
from isosgd.geometry import Kronecker, LowRank
from isosgd.geometry.choice import STRUCTURES

CYCLE = 50  # steps between two looks at the noise, the samplers' default
ALLOWED = {"lowrank": 3.0, "kronecker": 2.0}
NUM_DATA, BATCH = 50_000, 128


class Candidate(NamedTuple):
    """A sampler with Lambda known, the noise vector it looks at, and what its set-up took (the first for a vector)."""

    sampler: isosgd.ISGD
    noise: list[Tensor]
    observe_ms: float
    adapt_ms: float


def make(structure: Any, device: torch.device, seed: int = 0) -> Candidate:
    """A sampler of ResNet-18's parameters, as it is after the warm-up."""
    torch.manual_seed(seed)
    net = resnet18().to(device)
    generator = torch.Generator(device).manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.empty_like(p).normal_(generator=generator).mul_(1e-3)
    sampler = isosgd.ISGD(
        net.named_parameters(), num_data=NUM_DATA, batch_size=BATCH, structure=structure, generator=generator
    )
    noise = [torch.empty_like(p) for p in net.parameters()]
    vectors = 4 if sampler.geometry is None else sampler.geometry.min_vectors
    start = _now(device)
    for _ in range(vectors):
        sampler.observe([d.normal_(generator=generator).mul_(1e-3) for d in noise])
    observed = _now(device)
    sampler.adapt([10.0] * len(sampler.param_groups), prior=[torch.ones_like(p) for p in net.parameters()])
    sampler.freeze()
    return Candidate(sampler, noise, 1e3 * (observed - start) / vectors, 1e3 * (_now(device) - observed))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def kept(sampler: isosgd.ISGD) -> int:
    """Bytes of the tensors that a sampler holds besides parameters and gradients."""
    given = {t.untyped_storage().data_ptr() for g in sampler.param_groups for p in g["params"] for t in (p, p.grad)}
    found: dict[int, int] = {}
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in given:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)
        elif type(value).__module__.startswith("isosgd"):
            walk(vars(value))

    walk(vars(sampler) | {"state": dict(sampler.state)})
    return sum(found.values())


class Cost(NamedTuple):
    """Milliseconds of a step, of what its thread then still does, and of processor time for both."""

    step: float
    ahead: float
    processor: float


def measure(candidates: dict[str, Candidate], rounds: int, device: torch.device) -> dict[str, Cost]:
    """Cost of a step of each sampler, over a cycle."""
    times: dict[str, dict[bool, list[Cost]]] = {name: {True: [], False: []} for name in candidates}
    for i in range(-3, rounds):  # the first rounds allocate
        for name, (sampler, noise, _, _) in candidates.items():
            # Looks come more often here than in a chain, so that few rounds have enough of them; weights below.
            look = i % 5 == 0
            busy, start = time.process_time(), _now(device)
            sampler.step(noise=noise if look else None)
            done = _now(device)
            if sampler.injector.source.prefetched is not None:
                sampler.injector.source.prefetched.result()
            end = time.perf_counter()
            if i >= 0:
                times[name][look].append(Cost(done - start, end - done, time.process_time() - busy))
    found = {}
    for name, by_look in times.items():
        plain, looking = ([statistics.median(x) for x in zip(*by_look[look], strict=True)] for look in (False, True))
        found[name] = Cost(*(1e3 * (p + (q - p) / CYCLE) for p, q in zip(plain, looking, strict=True)))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--rounds", type=int, default=150, help="steps of each sampler (default 150, at least 10)")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use (default 1)")
    parser.add_argument("--structures", nargs="+", default=["layer", "single", "diagonal", "lowrank", "kronecker"])
    parser.add_argument("--leading", type=int, nargs="*", default=[], help="also Kronecker with so many leading axes")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    if unknown := sorted(set(args.structures) - set(STRUCTURES)):
        parser.error(f"structures {unknown} are unknown; choose among {sorted(STRUCTURES)}")
    if "full" in args.structures:
        parser.error("structure 'full' is a matrix over all parameters: eleven million are too many")
    if args.rounds < 10:
        parser.error(f"rounds = {args.rounds} must be at least 10, for medians")
    if args.threads < 1:
        parser.error(f"threads = {args.threads} must be at least 1")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    wanted: dict[str, Any] = {name: LowRank(10) if name == "lowrank" else name for name in args.structures}
    wanted |= {f"kronecker, {k} leading": Kronecker(leading=k) for k in args.leading}
    candidates = {name: make(structure, device) for name, structure in wanted.items()}
    gc.collect()
    found = measure(candidates, args.rounds, device)
    total = sum(p.numel() for group in next(iter(candidates.values())).sampler.param_groups for p in group["params"])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    print(f"{total:,} parameters; {args.rounds} rounds, {where}, {args.threads} threads")
    print(f"torch {torch.__version__}, isosgd {isosgd.__version__}")
    heads = ("step", "ahead", "total", "processor", "asked", "kept", "observe", "adapt")
    print(f"{'':<22}" + "".join(f"{head:>11}" for head in heads))
    plain = found.get("layer", next(iter(found.values())))
    rows = {}
    for name, cost in found.items():
        one, size = candidates[name], kept(candidates[name].sampler)
        asked = next((f"{limit:.0f} x" for kind, limit in ALLOWED.items() if name.startswith(kind)), "")
        ratio = (cost.step + cost.ahead) / (plain.step + plain.ahead)
        busy = cost.processor / plain.processor
        print(
            f"{name:<22}{cost.step:8.1f} ms{cost.ahead:8.1f} ms{ratio:9.2f} x{busy:9.2f} x{asked:>11}"
            f"{size / 2**20:7.0f} MiB{one.observe_ms:8.0f} ms{one.adapt_ms:8.0f} ms"
        )
        rows[name] = {"step_ms": cost.step, "ahead_ms": cost.ahead, "ratio": ratio, "processor_ms": cost.processor,
                      "processor_ratio": busy, "kept_bytes": size, "observe_ms": one.observe_ms,
                      "adapt_ms": one.adapt_ms}  # fmt: skip
    if args.json:
        about = {"torch": torch.__version__, "machine": where, "rounds": args.rounds, "threads": args.threads}
        args.json.write_text(json.dumps({**about, "structures": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
