"""Draws of fixed seeds, frozen: whoever moves or merges code must leave every bit of them as it is.

Everything goes through the public API, on one thread of a CPU, without a compiler or the C++ library. `golden.json`
holds for each configuration a SHA-256 of all draws and some plain numbers, which show how far off changed draws are.
The hashes are those of one kind of machine, for matrix products round otherwise on another; there the numbers are
compared.

A change of draws that is meant is named in CHANGELOG.md, and its entries alone are renewed:

    python tests/golden/test_golden.py --renew NAME...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import isosgd
from isosgd import DataSets, Target, likelihoods, priors, sample

GOLDEN = Path(__file__).with_name("golden.json")
Draws = dict[str, Tensor]

# Short warm-ups are the rule here and beside the point.
pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")

# ------------------------------------------------------------------------------------------------ data and models

QUICK: dict[str, Any] = {"draws": 6, "keep_every": 3, "warmup": 150, "progress": False, "compile": False, "seed": 1}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


X = normal(80, 3, seed=0)
Y = X.sum(1, keepdim=True) + 0.1 * normal(80, 1, seed=1)
LABELS = (X @ normal(3, 4, seed=2)).argmax(1)


def filled(model: nn.Module) -> nn.Module:
    """A model whose parameters do not depend on torch's own initialisation."""
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return model


def mlp(out: int = 1, width: int = 8, **options: Any) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, width, **options), nn.Tanh(), nn.Linear(width, out, **options)))


def linear_likelihood(params: Draws, batch: Any) -> Tensor:
    x, y = batch
    return -0.5 * (y[..., 0] - x @ params["slope"] - params["level"]).square() / 0.25


def regression(**options: Any) -> Target:
    """Three slopes and a level under known noise: the posterior is Gaussian."""
    init = {"slope": torch.zeros(3), "level": torch.tensor(0.0)}
    return Target(options.pop("function", linear_likelihood), priors.Normal(3.0), init=init, **options)


def network(likelihood: Any = "gaussian", prior: Any = None, **options: Any) -> Target:
    return Target.from_module(mlp(4 if likelihood == "categorical" else 1, **options), likelihood, prior)


def run(target: Target, data: Any = (X, Y), **options: Any) -> Draws:
    return dict(sample(target, data, **{**QUICK, **options}).draws)


# ------------------------------------------------------------------------------------------------ configurations

CASES: dict[str, Callable[[], Draws]] = {}


def case(function: Callable[[], Draws]) -> Callable[[], Draws]:
    CASES[function.__name__] = function
    return function


@case
def isgd_regression_full() -> Draws:
    return run(regression(), warmup=500)


@case
def isgd_two_chains_together() -> Draws:
    return run(network(), chains=2, structure="diagonal")


def _structure(name: str, **options: Any) -> None:
    def isgd() -> Draws:
        return run(network(), structure=name, **options)

    CASES[f"isgd_{name}"] = isgd


_structure("layer")
_structure("single")
_structure("diagonal", warmup=200)
_structure("kronecker", warmup=250)
_structure("lowrank", warmup=500, keep_every="auto", draws=3)


@case
def isgd_lowrank_chains() -> Draws:
    return run(network(), structure="lowrank", warmup=250, chains=2)


@case
def chains_in_turn() -> Draws:
    """A module that looks at its parameters on the host cannot be mapped over chains."""

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            float(self.weight.detach().sum())
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="chains run in turn")
        return run(Target.from_module(filled(Looks(3, 1)), "gaussian"), chains=2, warmup=200)


@case
def batch_norm() -> Draws:
    """Statistics of the minibatch tie its examples together: noise is that of successive gradients."""
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*uses the statistics of the minibatch")
        target = Target.from_module(model, "gaussian")
    return run(target, chains=2, warmup=100)


@case
def data_sets() -> Draws:
    rows = torch.stack([torch.randperm(80, generator=torch.Generator().manual_seed(i))[:60] for i in range(2)])
    return run(network(), DataSets((X, Y), rows), chains=2)


@case
def data_loader() -> Draws:
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True, drop_last=True, generator=generator)
    return run(network(), loader)


@case
def all_data() -> Draws:
    return run(regression(), batch_size="all", structure="diagonal", warmup=600)


@case
def all_data_network() -> Draws:
    return run(network(width=3), batch_size="all", structure="diagonal", warmup=560, draws=3)


METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("sgld", "sghmc", "psgld", "sgfs", "sgfs-full", "sgrld", "sgrhmc", "sgnht")},
    **{name: {} for name in ("isgd-momentum", "adaptive-sghmc")},
    "vsgd": {"temperature": 1e-2},
    "csgld": {"cycle": 10},
    "csghmc": {"cycle": 10},
}


def _method(name: str, options: dict[str, Any]) -> None:
    def method() -> Draws:
        return run(network(), method=name, **options)

    CASES[name.replace("-", "_")] = method


for _name, _options in METHOD_OPTIONS.items():
    _method(_name, _options)


@case
def sghmc_chains() -> Draws:
    return run(network(), method="sghmc", chains=2)


@case
def preset_alpha_c() -> Draws:
    return run(network(), preset="alpha-c", temperature=1e-3, warmup=100)


@case
def preset_g_b() -> Draws:
    return run(network(), preset="G-b", temperature=1e-3)


@case
def preset_windowed() -> Draws:
    return run(network(), preset="windowed", temperature=0.1, warmup=320)


@case
def categorical() -> Draws:
    return run(network("categorical"), (X, LABELS), structure="layer")


@case
def hierarchical() -> Draws:
    return run(network(prior=priors.HierarchicalNormal()), structure="diagonal")


@case
def student_t() -> Draws:
    return run(network(likelihoods.StudentT()), structure="diagonal")


@case
def cold() -> Draws:
    return run(network(), temperature=0.1, structure="diagonal")


@case
def doubles() -> Draws:
    data = (X.double(), Y.double())
    return run(network(dtype=torch.float64), data, structure="diagonal")


@case
def last_layer() -> Draws:
    return run(Target.from_module(mlp(), "gaussian", sampled="last_layer"))


@case
def swag() -> Draws:
    return run(network(), method="swag", keep_every=2)


@case
def mcdropout() -> Draws:
    model = filled(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))).eval()
    return run(Target.from_module(model, "gaussian"), method="mcdropout")


@case
def ensemble() -> Draws:
    return run(network(), method="ensemble", draws=3, warmup=100)


@case
def snapshots() -> Draws:
    return run(network(), method="snapshots")


class Stops:
    """A log likelihood during which Ctrl-C is pressed once."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, params: Draws, batch: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return linear_likelihood(params, batch)


@case
def stored_and_resumed() -> Draws:
    """Stopped in its warm-up and again among its draws; the draws are those of a run that was never stopped."""
    settings: dict[str, Any] = {"method": "sgld", "warmup": 200, "draws": 40}
    with tempfile.TemporaryDirectory() as folder:
        for after in (150, 90):
            with pytest.raises(isosgd.Interrupted):
                run(regression(function=Stops(after)), store=folder, resume=True, **settings)
        found = run(regression(), store=folder, resume=True, **settings)
        loaded = isosgd.load(folder).draws
        assert all(torch.equal(loaded[name], found[name]) for name in found)
        found = {name: value.clone() for name, value in found.items()}
    whole = run(regression(), **settings)
    assert all(torch.equal(whole[name], found[name]) for name in found)
    return found


def _loop(kind: type[torch.optim.Optimizer], steps: int = 160, **options: Any) -> Draws:
    """A training loop of the user's own; the last forty steps are kept."""
    model, generator = mlp(), torch.Generator().manual_seed(5)
    sampler: Any = kind(model.named_parameters(), num_data=80, generator=torch.Generator().manual_seed(6), **options)  # type: ignore[call-arg]

    def loss(rows: Tensor) -> Tensor:
        fit = (model(X[rows]) - Y[rows]).square().mean() / 2 / 0.25
        return fit + sum(p.square().sum() for p in model.parameters()) / 2 / 80

    kept: list[Draws] = []
    for step in range(steps):
        rows = torch.randint(80, (20,), generator=generator)
        sampler.zero_grad()
        loss(rows).backward()
        sampler.step()
        if step >= steps - 40:
            kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return {name: torch.stack([draw[name] for draw in kept]) for name in kept[0]}


@case
def loop_isgd() -> Draws:
    return _loop(isosgd.ISGD, noise="gaussian", warmup=100, batch_size=20)


@case
def loop_isgd_preset() -> Draws:
    return _loop(isosgd.ISGD, **isosgd.PRESETS["G-b"], temperature=1e-3, warmup=100)


@case
def loop_sghmc() -> Draws:
    return _loop(isosgd.SGHMC, lr=1e-3)


@case
def loop_psgld() -> Draws:
    return _loop(isosgd.METHODS["psgld"], lr=1e-3)


# ------------------------------------------------------------------------------------------------ what is compared

# Without vector instructions the numbers of most configurations came out within 2e-4. Not those of matrices that are
# taken apart (the sign of an eigenvector is anybody's) and of trajectories (a refusal may turn into an acceptance).
TOLERANCE = 0.01
FRAGILE = {
    *("isgd_regression_full", "isgd_kronecker", "isgd_lowrank", "isgd_lowrank_chains", "chains_in_turn"),
    "sgfs_full",
    *("all_data", "all_data_network"),
}


def machine() -> dict[str, str]:
    """What the last bits of a matrix product depend on."""
    found = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    keys = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {**found, "processor": platform.processor()}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            found.setdefault(key.strip(), value.strip())
    return found


def digest(draws: Draws) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(draws):
        x = draws[name].detach().cpu().contiguous()
        found.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        found.update(x.numpy().tobytes())
    return found.hexdigest()


def numbers(draws: Draws) -> dict[str, list[float]]:
    """Mean and root mean square of each of the first parameters, over all draws."""
    return {
        name: [float(f"{v:.6g}") for v in (x.double().mean().item(), x.double().square().mean().sqrt().item())]
        for name, x in sorted(draws.items())[:4]
    }


def computed(name: str) -> dict[str, Any]:
    """The entry of a configuration, as it is now."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch("isosgd.native.build.layers", lambda: None):
            draws = CASES[name]()
    finally:
        torch.set_num_threads(threads)
    return {"sha256": digest(draws), "numbers": numbers(draws)}


def distance(found: dict[str, list[float]], kept: dict[str, list[float]]) -> float:
    """The largest difference of two entries' numbers, relative to the size of the parameter."""
    if found.keys() != kept.keys():
        return float("inf")
    pairs = ((a, b, kept[name][1]) for name in kept for a, b in zip(found[name], kept[name], strict=True))
    return max(abs(a - b) / max(size, 1e-12) for a, b, size in pairs)


def kept_entries() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text())) if GOLDEN.exists() else {"machine": machine(), "draws": {}}


# In seconds: each structure, one of each other kind of step, and what differs in how chains are run.
QUICK_CASES = {
    "isgd_regression_full", "isgd_two_chains_together", "isgd_layer", "isgd_single", "isgd_diagonal", "isgd_kronecker",
    "sgld", "sghmc", "all_data", "batch_norm", "chains_in_turn", "data_loader",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in QUICK_CASES else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_draws_are_those_that_were_frozen(name: str) -> None:
    kept = kept_entries()
    assert name in kept["draws"], f"no entry: python tests/golden/test_golden.py --renew {name}"
    frozen, here = kept["draws"][name], machine()
    other = {key: (here.get(key), value) for key, value in kept["machine"].items() if here.get(key) != value}
    where = f"the hashes are those of another machine (here, there): {other}"
    if other and (name in FRAGILE or here["torch"].split("+")[0] != kept["machine"]["torch"].split("+")[0]):
        pytest.skip(where)
    found = computed(name)
    off = distance(found["numbers"], frozen["numbers"])
    numbers = f"their numbers are off by {off:.2g}:\nnow    {found['numbers']}\nfrozen {frozen['numbers']}"
    if other:
        assert off < TOLERANCE, f"the draws of {name} are not those that were frozen; {numbers}\n{where}"
    else:
        assert found["sha256"] == frozen["sha256"], f"the draws of {name} are not those that were frozen; {numbers}"


def test_every_entry_is_that_of_a_configuration() -> None:
    assert set(kept_entries()["draws"]) == set(CASES)


# ------------------------------------------------------------------------------------------------ renewing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare draws with the frozen ones, or renew entries by name.")
    parser.add_argument("--renew", nargs="*", metavar="NAME", help="entries to write anew; never all by default")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore", isosgd.SamplingWarning)
    kept = kept_entries()
    if chosen.renew is None:
        changed = 0
        for name in CASES:
            began = time.process_time()
            found, frozen = computed(name), kept["draws"].get(name, {"sha256": "", "numbers": {}})
            same = found["sha256"] == frozen["sha256"]
            changed += not same
            off = "" if same else f"  off by {distance(found['numbers'], frozen['numbers']):.2g}"
            print(f"{'same' if same else 'CHANGED':8}{name:28}{time.process_time() - began:6.2f} s{off}", flush=True)
        return int(bool(changed))
    unknown = sorted(set(chosen.renew) - set(CASES))
    if not chosen.renew or unknown:
        parser.error(f"name the entries to renew{f', not {unknown[0]!r}' if unknown else ''}: {', '.join(CASES)}")
    if kept["machine"] != machine() and set(chosen.renew) != set(CASES):
        parser.error(
            f"the other entries are those of another machine, {kept['machine']}: renew there, or name them all"
        )
    kept["machine"] = machine()
    for name in chosen.renew:
        kept["draws"][name] = computed(name)
    kept["draws"] = {name: kept["draws"][name] for name in CASES if name in kept["draws"]}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
