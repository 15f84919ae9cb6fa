"""Chain-steps per second: ours against blackjax and posteriors, interleaved in one process on one core.

    make bench-peers
    python -m benchmarks.chains [--chains 1 10 100 1000] [--rounds 15] [--core 0] [--device cuda] [--json FILE]

The posterior is that of an MLP 13-50-1 with Gaussian noise of known scale and a normal prior, minibatches of 128 out
of 455 rows, all in float32. A step is everything: a minibatch drawn for each chain, its gradient, as many random
numbers as there are parameters, and the update.

- ours: several steps a call, as `isosgd.sample` takes them between draws. SGLD with normal numbers, as the
  peers have, and by default (counted bits, see `isosgd.samplers.innovations`). I-SGD after a warm-up, its noise
  estimation included.
- blackjax: its SGLD kernel, mapped over chains by `vmap`, steps in a `scan`, one `jit`. Its gradient is the estimator
  that blackjax brings along; and, since the way it is written matters to XLA, that of the loss of the whole minibatch.
- posteriors: its SGLD, mapped over chains by `torch.vmap`.
- torch: SGD of one network, no noise.

Every round times all of them once, one after the other. The figures are medians over rounds. Ratios of CPU time are
shown too: they are not disturbed by what else runs on the machine. The faster of the two forms of blackjax is what
others are held against. The peers are optional: what is not installed is left out, and on a GPU all of them are.

Memory is what one run of I-SGD takes beside its imports, in a process of its own (on Linux), torch's compiler
included, the C++ compiler not; on a GPU, what is allocated there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = {1: 640, 10: 160, 100: 32, 1000: 12}  # of one timed call
ROWS, FEATURES, HIDDEN, BATCH, NOISE = 455, 13, 50, 128, 0.5
RATE = 1e-6  # in mean-gradient units times N: small, so that all chains stay where they are
Call = Callable[[], None]


def one_core(core: int) -> None:
    """Everything on one core, with one thread; before torch and jax are imported."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def data() -> tuple[Any, Any]:
    """Rows and their targets."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, x[:, 0].sin() + NOISE * torch.randn(ROWS, generator=generator)


def ours(chains: int, steps: int, method: str, warmup: int, options: dict[str, Any], device: str = "cpu") -> Call:
    """Chains of ours."""
    import torch

    from experiments.models import mlp
    from isosgd import Target, likelihoods, priors
    from isosgd.engine.multistep import MultiStep, is_fastest, unsupported_reason
    from isosgd.engine.schedule import Schedule
    from isosgd.progress import Progress
    from isosgd.sampling.plan import DrawPlan
    from isosgd.sampling.settings import sampler_factory
    from isosgd.warmup.windows import warmup_of

    torch.manual_seed(0)
    target = Target.from_module(mlp(FEATURES, HIDDEN, 1), likelihoods.Gaussian(NOISE), priors.FanInNormal())
    schedule = Schedule(target, tuple(t.to(device) for t in data()), None, chains, BATCH, 0, torch.device(device), None)
    make = sampler_factory(method, schedule.num_data, 1.0, BATCH, 1, dict(options))
    _, run = next(iter(schedule.runs(make)))
    if warmup:
        warmup_of(run, warmup, Progress(1, show=False)).run(measure_spacing=False)
    if said := unsupported_reason(run):
        raise SystemExit(f"{method} takes single steps: {said}")
    stride = MultiStep(run, DrawPlan(1, 1, 1, None, chains).noise_interval(run), compiled=not is_fastest(run))
    if stride.failed:
        raise SystemExit(f"the steps of {method} cannot be compiled: {stride.failed}")
    done = 0

    def call() -> None:
        nonlocal done
        stride.take_steps(done, steps, lambda count: None)
        done += steps
        if device != "cpu":
            torch.cuda.synchronize()

    return call


def blackjax_sgld(chains: int, steps: int, estimator: bool) -> Call:
    """Chains of blackjax, scanned."""
    import blackjax
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(t.numpy()) for t in data())
    scales = {"w1": FEATURES**-0.5, "b1": 1.0, "w2": HIDDEN**-0.5, "b2": 1.0}

    def predict(p: Any, rows: Any) -> Any:
        return (jax.nn.relu(rows @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])[..., 0]

    def log_prior(p: Any) -> Any:
        return sum(-0.5 * jnp.sum((value / scales[name]) ** 2) for name, value in p.items())

    def log_likelihood(p: Any, batch: Any) -> Any:
        return -0.5 * ((batch[1] - predict(p, batch[0])) / NOISE) ** 2

    def log_posterior(p: Any, batch: Any) -> Any:
        return log_prior(p) + ROWS * jnp.mean(log_likelihood(p, batch))

    own = blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, ROWS)
    kernel = blackjax.sgld(own if estimator else jax.grad(log_posterior))

    def one(key: Any, p: Any) -> Any:
        first, second = jax.random.split(key)
        index = jax.random.randint(first, (BATCH,), 0, ROWS)
        return kernel.step(second, p, (x[index], y[index]), RATE)

    def body(state: Any, key: Any) -> Any:
        return jax.vmap(one)(jax.random.split(key, chains), state), None

    run = jax.jit(lambda state, key: jax.lax.scan(body, state, jax.random.split(key, steps))[0])
    shapes = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 1), "b2": (1,)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 4), strict=True))
    state = {name: scales[name] * jax.random.normal(keys[name], (chains, *shape)) for name, shape in shapes.items()}
    key = jax.random.key(1)

    def call() -> None:
        nonlocal state, key
        key, now = jax.random.split(key)
        state = jax.block_until_ready(run(state, now))

    return call


def posteriors_sgld(chains: int, steps: int) -> Call:
    """Chains of posteriors, mapped over."""
    import posteriors
    import torch
    from torch.func import functional_call, stack_module_state

    from experiments.models import mlp

    x, y = data()
    nets = [mlp(FEATURES, HIDDEN, 1) for _ in range(chains)]
    params = {name: value.detach() for name, value in stack_module_state(nets)[0].items()}
    scales = {name: value[0].shape[-1] ** -0.5 if value.dim() == 3 else 1.0 for name, value in params.items()}

    def log_posterior(p: Any, batch: Any) -> Any:
        output = functional_call(nets[0], p, (batch[0],))[:, 0]
        prior = sum(-0.5 * (value / scales[name]).square().sum() for name, value in p.items())
        return prior + ROWS * (-0.5 * ((batch[1] - output) / NOISE).square()).mean(), torch.tensor([])

    sgld = posteriors.sgmcmc.sgld.build(log_posterior, lr=RATE)
    state = torch.vmap(sgld.init)(params)
    update = torch.vmap(sgld.update, randomness="different")
    few = max(1, steps // 8)  # they are slow, and all of them take the same time

    def call() -> None:
        nonlocal state
        for _ in range(few):
            index = torch.randint(ROWS, (chains, BATCH))
            state, _ = update(state, (x[index], y[index]))

    call.steps = few  # type: ignore[attr-defined]
    return call


def torch_sgd(steps: int, device: str) -> Call:
    """One network, trained by SGD."""
    import torch

    from experiments.models import mlp

    x, y = (t.to(device) for t in data())
    net = mlp(FEATURES, HIDDEN, 1).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    def call() -> None:
        for _ in range(steps):
            index = torch.randint(ROWS, (BATCH,), device=device)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x[index])[:, 0], y[index]).backward()
            optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()

    return call


def contenders(chains: int, steps: int, device: str) -> dict[str, Call]:
    """All that can run here."""
    from importlib.util import find_spec

    found = {
        "isosgd SGLD, normal": ours(chains, steps, "sgld", 0, {"lr": RATE / ROWS, "innovations": "normal"}, device),
        "isosgd SGLD": ours(chains, steps, "sgld", 0, {"lr": RATE / ROWS}, device),
        "isosgd I-SGD": isgd(chains, steps, device),
    }
    if chains == 1:
        found["torch SGD"] = torch_sgd(steps, device)
    if device != "cpu":
        return found
    if find_spec("blackjax"):
        found["blackjax SGLD"] = blackjax_sgld(chains, steps, estimator=True)
        found["blackjax SGLD, batch loss"] = blackjax_sgld(chains, steps, estimator=False)
    if find_spec("posteriors"):
        found["posteriors SGLD"] = posteriors_sgld(chains, steps)
    return found


def isgd(chains: int, steps: int, device: str) -> Call:
    """Chains of I-SGD after a warm-up."""
    return ours(chains, steps, "isgd", 300 if chains > 100 else 600, {}, device)


def memory(chains: int, device: str) -> float:
    """Megabytes that so many chains take; only the first call in a process tells."""
    import torch

    import isosgd.warmup.windows  # noqa: F401  (what is loaded is not what chains take)

    def now() -> float:
        if device != "cpu":
            return torch.cuda.max_memory_allocated() / 1e6
        # Not getrusage: a process begins there with the peak of the one that started it.
        if not (status := Path("/proc/self/status")).exists():
            return math.nan
        lines = status.read_text().splitlines()
        return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e3

    before = now()
    call = isgd(chains, STEPS[100], device)
    call()
    return now() - before


def measure(chains: int, rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Microseconds for a step of one chain, by the clock and of CPU time."""
    steps = 64 if device != "cpu" else STEPS.get(chains, max(6, 3200 // chains))
    calls = contenders(chains, steps, device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            clock, cpu = time.perf_counter(), time.process_time()
            call()
            if i >= 2:  # the first ones compile and allocate
                each = chains * getattr(call, "steps", steps)
                times[name].append(((time.perf_counter() - clock) / each, (time.process_time() - cpu) / each))
    return {
        name: {
            "microseconds": 1e6 * statistics.median(wall for wall, _ in found),
            "cpu": 1e6 * statistics.median(cpu for _, cpu in found),
        }
        for name, found in times.items()
    }


def show(chains: int, found: dict[str, dict[str, float]]) -> None:
    """A table."""
    print(f"\n{chains} chains {'':<15} {'us/step':>9} {'steps/s':>9} {'of blackjax':>12} {'by CPU time':>12}")
    peers = [name for name in found if name.startswith("blackjax")]
    best = min(peers, key=lambda name: found[name]["cpu"]) if peers else None
    for name, times in found.items():
        ratios = "" if best is None else f"{found[best]['microseconds'] / times['microseconds']:11.2f}x "
        ratios += "" if best is None else f"{found[best]['cpu'] / times['cpu']:11.2f}x"
        print(f"{name:<25} {times['microseconds']:9.1f} {1e6 / times['microseconds']:9,.0f} {ratios}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chains",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 10, 100, 1000], help="how many (1 10 100 1000)")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each (default 15)")
    parser.add_argument("--core", type=int, default=0, help="the core that everything runs on (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--memory", action="store_true", help="only say how many megabytes the chains take")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    if args.device == "cpu":
        one_core(args.core)
    here = Path(__file__).resolve().parent
    sys.path = [path for path in sys.path if Path(path).resolve() != here]  # a file beside this one is named posteriors

    import torch

    import isosgd
    from isosgd.engine.compiled import fastest_products

    torch.set_num_threads(1)
    result: dict[int, Any] = {}
    megabytes: dict[int, float] = {}
    with fastest_products(torch.device(args.device)):
        for chains in args.chains:
            if args.memory:
                print(memory(chains, args.device))
                return
            result[chains] = measure(chains, args.rounds, args.device)
            show(chains, result[chains])
            own = [sys.executable, __file__, "--memory", "--chains", str(chains), "--device", args.device]
            megabytes[chains] = float(subprocess.run(own, check=True, stdout=subprocess.PIPE).stdout.split()[-1])
            print(f"memory of I-SGD: {megabytes[chains]:.0f} MB", flush=True)
    megabytes = {chains: found for chains, found in megabytes.items() if math.isfinite(found)}
    machine = platform.machine() if args.device == "cpu" else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "isosgd": isosgd.__version__, "machine": machine}
    for peer in ("blackjax", "jax", "posteriors"):
        if peer in sys.modules:
            versions[peer] = getattr(sys.modules[peer], "__version__", "")
    if args.json:
        command = "python -m benchmarks.chains " + " ".join(sys.argv[1:])
        about = {"command": command, "versions": versions, "rounds": args.rounds}
        found = {**about, "microseconds a chain-step": result, "megabytes of I-SGD": megabytes}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
