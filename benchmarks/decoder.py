"""What a sampling step of a decoder in bfloat16 costs against one of AdamW: time and peak memory, on one device.

    python -m benchmarks.decoder [--size 0.5b|tiny] [--rounds 5] [--cases adamw sgld sghmc sample] [--json FILE]

A Llama-like decoder is made from a config, with random tokens: only time and memory count. AdamW (fused where there is
a GPU) and the samplers step in the same loop, forward and backward passes included, in turns; times are medians over
rounds of ten steps, and peaks are those of a run of their own, with everything else freed. ``sample`` is
`isosgd.sample(method="sgld")`, which holds float32 parameters: its time is that of the steps between draws.
Wanted: SGLD at most 1.10 times the time of AdamW, and less memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isosgd import SGHMC, SGLD, Target, priors, sample

NUM_DATA, LR, DECAY = 1_000_000, 1e-6, 1e-6
STEPS = 10  # of a round


class Config(NamedTuple):
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    length: int
    batch: int


SIZES = {"0.5b": Config(32_000, 1_024, 4_096, 26, 16, 1_024, 8), "tiny": Config(100, 32, 64, 2, 2, 16, 4)}


class Layer(nn.Module):
    """Attention with rotated positions, and a gated network, each behind an RMS norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width, bias=False), nn.Linear(c.width, c.width, bias=False)
        self.gate, self.up = nn.Linear(c.width, c.inner, bias=False), nn.Linear(c.width, c.inner, bias=False)
        self.down = nn.Linear(c.inner, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(n, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Logits of the next token."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.width), nn.Linear(c.width, c.vocabulary, bias=False)
        each = c.width // c.heads
        angle = torch.arange(c.length)[:, None] * 10_000.0 ** (-torch.arange(0, each, 2) / each)
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = (t[: tokens.shape[1]].to(x.dtype) for t in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=DECAY, fused=_on_gpu(m) or None),
    "sgld": lambda m: SGLD(m.parameters(), num_data=NUM_DATA, lr=LR, weight_decay=DECAY),
    "sghmc": lambda m: SGHMC(m.parameters(), num_data=NUM_DATA, lr=LR, weight_decay=DECAY),
}


def _on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


class Loop:
    """Steps of an optimizer."""

    def __init__(self, name: str, c: Config, device: torch.device) -> None:
        self.model = made(c, device)
        self.optimizer = OPTIMIZERS[name](self.model)
        self.tokens = torch.randint(c.vocabulary, (64, c.length), device=device)
        self.batch = c.batch

    def __call__(self, steps: int) -> float:
        """Seconds of a step."""
        wait(self.tokens.device)
        began = time.perf_counter()
        for _ in range(steps):
            x = self.tokens[torch.randint(len(self.tokens), (self.batch,), device=self.tokens.device)]
            logits = self.model(x)[:, :-1].float()
            F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
            del logits
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        wait(self.tokens.device)
        return (time.perf_counter() - began) / steps


class Sample:
    """The same by `isosgd.sample`."""

    def __init__(self, c: Config, device: torch.device) -> None:
        self.target = Target.from_module(made(c, device), "tokens", priors.WeightDecay(DECAY), num_data=NUM_DATA)
        tokens = torch.randint(c.vocabulary, (64, c.length), device=device)
        self.data, self.batch = (tokens, tokens), c.batch

    def _run(self, draws: int, steps: int) -> float:
        wait(self.data[0].device)
        began = time.perf_counter()
        sample(
            self.target, self.data, method="sgld", lr=LR, warmup=0, draws=draws, keep_every=steps, progress=False,
            batch_size=self.batch,
        )  # fmt: skip
        wait(self.data[0].device)
        return time.perf_counter() - began

    def __call__(self, steps: int) -> float:
        """Seconds of a step: of two runs that differ in the steps before their only draw."""
        short, long = self._run(1, 1), self._run(1, 1 + steps)
        return (long - short) / steps


def made(c: Config, device: torch.device) -> Decoder:
    torch.manual_seed(0)
    with device:
        return Decoder(c).bfloat16()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make(name: str, c: Config, device: torch.device) -> Any:
    return Sample(c, device) if name == "sample" else Loop(name, c, device)


def peak(name: str, c: Config, device: torch.device) -> float | None:
    """Gigabytes at the most, of a run alone; None without a GPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = make(name, c, device)
    run(3)
    found = (torch.cuda.max_memory_allocated() - before) / 1e9
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=[*OPTIMIZERS, "sample"], default=["adamw", "sgld", "sghmc"])
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    c = SIZES[args.size]
    cases = list(dict.fromkeys(["adamw", *args.cases]))
    peaks = {name: peak(name, c, device) for name in cases}
    runs = {name: make(name, c, device) for name in cases}
    for run in runs.values():
        run(3)  # compiles, and fills caches
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(run(STEPS))
    parameters = sum(p.numel() for p in made(c, torch.device("meta")).parameters())
    found: dict[str, Any] = {"parameters": parameters, "device": str(device), "torch": torch.__version__, "cases": {}}
    print(f"{parameters / 1e6:.1f} million parameters in bfloat16, {c.batch} x {c.length} tokens, {found['device']}")
    base = statistics.median(times["adamw"])
    for name in cases:
        seconds, gb = statistics.median(times[name]), peaks[name]
        memory = "" if gb is None else f"  {gb:6.2f} GB ({gb / peaks['adamw']:.2f})"  # type: ignore[operator]
        print(f"{name:<8} {1e3 * seconds:8.2f} ms ({seconds / base:.2f} of AdamW){memory}")
        found["cases"][name] = {"seconds": seconds, "ratio": seconds / base, "peak_gb": gb, "rounds": times[name]}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    return found


if __name__ == "__main__":
    main()
