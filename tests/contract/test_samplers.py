"""The contract that every sampler keeps, whatever its settings."""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from isosgd import ISGD, PRESETS, SGHMC, SGLD, SGNHT, VSGD, Sampler
from isosgd.noise import AlphaStable
from tests.innovations import Planned
from tests.methods import CSGHMC, CSGLD, PSGLD, SGFS, SGRHMC, SGRLD, AdaptiveSGHMC, FullSGFS, MomentumISGD

SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2, 2)}
CHAINS = 3
COLD = 1e-3  # where scheme c does not warn


@dataclass(frozen=True)
class Case:
    """A sampler with settings; ``warmup`` steps until it moves by itself."""

    kind: type[Sampler] | Callable[..., Sampler]
    settings: dict[str, Any] = field(default_factory=dict)
    warmup: int = 0

    def make(self, params: Any, **changes: Any) -> Sampler:
        own = {"warmup": self.warmup} if self.warmup else {}
        return self.kind(params, **{"num_data": 100, "temperature": COLD, **own, **self.settings, **changes})


def preset(name: str) -> Case:
    """A row of the paper; its alpha-stable fit over smaller blocks, so that it is ready soon."""
    own = {"noise": AlphaStable(2, 3, centred=False)} if "alpha" in name else {}
    return Case(lambda params, **settings: ISGD.preset(name, params, **settings), own, warmup=8)


SHAPED = {
    f"isgd-shaped-{name}": Case(ISGD, {"structure": name, "batch_size": 8, "noise": "paired"})
    for name in ("diagonal", "lowrank", "kronecker", "full")
}
WHOLE = {"sgfs-full": Case(FullSGFS, {"lr": 1e-6}), "sgfs-full-adapted": Case(FullSGFS, {"batch_size": 8})}


def curved(p: Tensor) -> Tensor:
    """A metric that depends on the parameter, entry by entry."""
    return 1.0 / (1.0 + p**2)


def mixed(p: Tensor) -> Tensor:
    """A metric whose entries depend on their neighbours; a leading dimension of chains is left alone."""
    return 1.0 / (1.0 + p**2 + 0.1 * p.roll(1, -1) ** 2)


CASES = {
    "isgd": Case(ISGD),
    "isgd-single": Case(ISGD, {"structure": "single"}),
    "isgd-lam": Case(ISGD, {"lam": 0.7}),
    "isgd-diagonal-max": Case(ISGD, {"correction": "diagonal", "summary": "max"}),
    "isgd-diagonal-top": Case(ISGD, {"correction": "diagonal", "summary": "top", "structure": "single"}),
    "isgd-gaussian": Case(ISGD, {"noise": "gaussian", "summary": "sum", "track_every": 2}),
    "isgd-alpha": Case(ISGD, {"noise": AlphaStable(2, 3), "summary": "max"}),
    "isgd-alpha-uncentred": Case(ISGD, {"noise": AlphaStable(2, 3, centred=False), "summary": "max", "track_every": 1}),
    "isgd-scheme-a": Case(ISGD, {"scheme": "a"}, warmup=8),
    "isgd-scheme-b": Case(ISGD, {"scheme": "b", "noise": "gaussian", "summary": "mean"}, warmup=8),
    "isgd-scheme-c": Case(ISGD, {"scheme": "c"}, warmup=8),
    **{f"preset-{name}": preset(name) for name in PRESETS},
    "sgld": Case(SGLD, {"lr": 0.05}),
    "sgld-annealed": Case(SGLD, {"lr": 0.05, "decay": 0.55, "offset": 3.0}),
    "sgld-adapted": Case(SGLD),
    "sghmc": Case(SGHMC, {"lr": 0.05}),
    "sghmc-corrected": Case(SGHMC, {"lr": 0.05, "corrected": True}),
    "sghmc-adapted": Case(SGHMC, {"corrected": True, "friction": 0.5}),
    "vsgd": Case(VSGD),
    "vsgd-per-layer": Case(VSGD, {"per_layer": True, "noise": "gaussian"}),
    "psgld": Case(PSGLD, {"lr": 0.01}),
    "psgld-adapted": Case(PSGLD),
    "adaptive-sghmc": Case(AdaptiveSGHMC, {"lr": 1e-7, "burn_in": 4}),
    "adaptive-sghmc-adapted": Case(AdaptiveSGHMC),
    "adaptive-sghmc-uncorrected": Case(AdaptiveSGHMC, {"corrected": False}),
    "isgd-momentum": Case(MomentumISGD, {"lam": 0.7}),
    "isgd-momentum-adapted": Case(MomentumISGD),
    "sgnht": Case(SGNHT, {"lr": 0.05}),
    "sgnht-adapted": Case(SGNHT),
    "csgld": Case(CSGLD, {"lr": 0.05, "cycle": 4, "exploration": 0.25}),
    "csgld-adapted": Case(CSGLD),
    "csghmc": Case(CSGHMC, {"lr": 0.05, "cycle": 4, "exploration": 0.25, "corrected": True}),
    "csghmc-adapted": Case(CSGHMC),
    "sgfs": Case(SGFS, {"lr": 1e-6}),
    "sgfs-adapted": Case(SGFS, {"batch_size": 8}),
    "sgfs-gaussian": Case(SGFS, {"noise": "gaussian", "track_every": 2, "floor": 0.5}),
    "sgrld": Case(SGRLD, {"lr": 0.05, "metric": curved}),
    "sgrld-coupled": Case(SGRLD, {"lr": 0.05, "metric": mixed, "coupled": True}),
    "sgrld-adapted": Case(SGRLD),
    "sgrhmc": Case(SGRHMC, {"lr": 0.05, "metric": curved}),
    "sgrhmc-adapted": Case(SGRHMC, {"metric": curved, "corrected": True}),
    **SHAPED,
    **WHOLE,
}
# Schemes and estimators stand alone above; of the rows of the paper, which combine them, two are often enough.
OFTEN = {"preset-alpha-a", "preset-G-c-slr"}
assert set(CASES) > OFTEN


def cases(left_out: Iterable[str] = ()) -> list[Any]:
    rare = {name: pytest.mark.long for name in CASES if name.startswith("preset-") and name not in OFTEN}
    chosen = [name for name in CASES if name not in left_out]
    return [pytest.param(CASES[name], marks=rare.get(name, ()), id=name) for name in chosen]


every_case = pytest.mark.parametrize("case", cases())
# Chains share a Lambda that knows directions, and so do groups: see tests/unit/test_shaped_sampler.py.
every_case_of_its_own = pytest.mark.parametrize("case", cases(SHAPED))
every_case_by_group = pytest.mark.parametrize("case", cases(SHAPED | WHOLE))


def named_params(dtype: torch.dtype = torch.float32, chains: int | None = None) -> dict[str, Tensor]:
    lead = () if chains is None else (chains,)
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(*lead, *s, generator=g).to(dtype).requires_grad_() for n, s in SHAPES.items()}


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Data:
    """A stream of gradients of ``|theta|^2 / 2`` with noise, and their noise vectors."""

    def __init__(self, params: dict[str, Tensor], seed: int = 7) -> None:
        self.params, self.generator = params, seeded(seed)

    def noise(self) -> list[Tensor | None]:
        drawn = [0.3 * torch.randn(p.shape, generator=self.generator).to(p.dtype) for p in self.params.values()]
        return [d if p.requires_grad else None for d, p in zip(drawn, self.params.values(), strict=True)]

    def next(self, sampler: Sampler) -> list[Tensor | None] | None:
        """Put the next gradients in place; noise vectors for the sampler's own parameters if it wants them."""
        for p, d in zip(self.params.values(), self.noise(), strict=True):
            p.grad = p.detach() + d if d is not None else None
        vectors = {id(p): d for p, d in zip(self.params.values(), self.noise(), strict=True)}
        if not sampler.estimator.centred:
            return None
        return [vectors[id(p)] for group in sampler.param_groups for p in group["params"]]


def advance(sampler: Sampler, data: Data, steps: int) -> None:
    """Steps as a training loop makes them; the first ones set the rates of a sampler that waits to be told."""
    if waits(sampler):
        geometry = sampler.geometry
        for _ in range(8 if geometry is None else geometry.min_vectors):
            sampler.observe(data.next(sampler))
        sampler.adapt([1.0 for _ in sampler.param_groups])
    for _ in range(steps):
        sampler.step(noise=data.next(sampler))


def waits(sampler: Sampler) -> bool:
    """Whether something else has to set its rates."""
    warms_itself = (sampler.warmup or 0) > 0
    return not warms_itself and all(group["rate"] is None for group in sampler.param_groups)


def values(params: dict[str, Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params.values()]


def started(case: Case, params: dict[str, Tensor] | None = None, **settings: Any) -> tuple[Sampler, Data]:
    """A sampler that moves, and its data."""
    params = named_params() if params is None else params
    sampler = case.make(params.items(), **{"generator": seeded(), **settings})
    data = Data(params)
    advance(sampler, data, case.warmup + 2)
    return sampler, data


# ------------------------------------------------------------------------------------------------ moving


@every_case
def test_parameters_move_in_place_and_every_step_counts_once(case: Case) -> None:
    params = named_params()
    before, objects = values(params), list(params.values())
    numbers, more = torch.get_rng_state(), np.random.get_state()[1].copy()
    sampler, data = started(case, params)
    assert torch.equal(numbers, torch.get_rng_state()) and np.array_equal(more, np.random.get_state()[1])
    for p, old, name in zip(params.values(), before, SHAPES, strict=True):
        assert p.shape == SHAPES[name] and p.dtype == torch.float32 and p.requires_grad and p.is_leaf
        assert bool(torch.isfinite(p).all()) and not torch.equal(p.detach(), old)
    assert all(p is o for p, o in zip(params.values(), objects, strict=True))
    assert [group["step"] for group in sampler.param_groups] == [case.warmup + 2] * 2
    advance(sampler, data, 3)
    assert [group["step"] for group in sampler.param_groups] == [case.warmup + 5] * 2


@every_case
def test_same_generator_same_draws(case: Case) -> None:
    runs = []
    for seed in (5, 5, 6):
        _, data = started(case, generator=seeded(seed))
        runs.append(values(data.params))
    assert all(map(torch.equal, runs[0], runs[1]))
    if case.kind is not VSGD:  # it injects nothing
        assert not any(map(torch.equal, runs[0], runs[2]))


@every_case
def test_without_temperature_and_gradient_nothing_moves(case: Case) -> None:
    sampler, data = started(case, temperature=0.0)
    for state in sampler.state.values():
        state.pop("velocity", None)
    before = values(data.params)
    for _ in range(3):
        for p in data.params.values():
            p.grad = torch.zeros_like(p)
        sampler.adapt([1.0, 1.0])
        sampler.step(noise=[torch.zeros_like(p) for p in data.params.values()] if sampler.estimator.centred else None)
    assert all(map(torch.equal, before, values(data.params)))


@every_case
def test_a_closure_is_evaluated_with_gradients_on(case: Case) -> None:
    sampler, data = started(case)
    noise = data.next(sampler)

    def closure() -> Tensor:
        sampler.zero_grad()
        loss = sum(0.5 * p.square().sum() for p in data.params.values())
        loss.backward()
        return loss

    expected = float(sum(0.5 * p.detach().square().sum() for p in data.params.values()))
    before = values(data.params)
    loss = sampler.step(closure, noise=noise)
    assert loss.item() == pytest.approx(expected)
    for p, old in zip(data.params.values(), before, strict=True):
        assert torch.equal(p.grad, old)


# ------------------------------------------------------------------------------------------------ saving


def on_disk(state: dict[str, Any]) -> dict[str, Any]:
    """What a state is after it was written and read without pickle: tensors as safetensors, the rest as JSON."""
    tensors: dict[str, Tensor] = {}

    def strip(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors[str(len(tensors))] = item.detach().contiguous()
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(item, dict):
            return {"items": [[key, strip(value)] for key, value in item.items()]}
        return [strip(value) for value in item] if isinstance(item, list | tuple) else item

    def fill(item: Any) -> Any:
        if isinstance(item, dict):
            return loaded[item["tensor"]] if "tensor" in item else {key: fill(value) for key, value in item["items"]}
        return [fill(value) for value in item] if isinstance(item, list) else item

    text, data = json.dumps(strip(state)), save({name: t.clone() for name, t in tensors.items()})
    loaded = load(data)
    return fill(json.loads(text))


@every_case
@pytest.mark.parametrize(
    ("where", "settings"),
    [("in the middle", {}), ("at the start", {"capturable": True}), ("at the start", {"chains": CHAINS})],
    ids=["plain", "capturable", "chains"],
)
def test_a_saved_state_resumes_bit_for_bit(case: Case, where: str, settings: dict[str, Any]) -> None:
    params = named_params(chains=settings.get("chains"))
    sampler, data = case.make(params.items(), generator=seeded(), **settings), Data(params)
    advance(sampler, data, 3 if where == "at the start" else case.warmup + 3)
    kept = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    state = on_disk(sampler.state_dict())
    fresh = case.make(kept.items(), generator=seeded(99), **settings)
    fresh.load_state_dict(state)
    copied = Data(kept)
    copied.generator.set_state(data.generator.get_state())
    steps = case.warmup + 4
    advance(sampler, data, steps)
    advance(fresh, copied, steps)
    assert all(map(torch.equal, values(params), values(kept)))
    for a, b in zip(sampler.param_groups, fresh.param_groups, strict=True):
        assert {k: torch.as_tensor(v).tolist() for k, v in a.items() if isinstance(v, int | float | Tensor)} == {
            k: torch.as_tensor(v).tolist() for k, v in b.items() if isinstance(v, int | float | Tensor)
        }


@every_case
def test_loading_copies(case: Case) -> None:
    """The state that was loaded is not changed by the sampler that goes on from it."""
    sampler, data = started(case)
    state = sampler.state_dict()
    saved = copy.deepcopy(state)
    fresh = case.make({n: p.detach().clone().requires_grad_() for n, p in data.params.items()}.items())
    fresh.load_state_dict(saved)
    kept = copy.deepcopy(saved)
    advance(fresh, Data(dict(zip(SHAPES, (p for g in fresh.param_groups for p in g["params"]), strict=True))), 3)
    for index, entries in kept["state"].items():
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved["state"][index][name])), name


@every_case
def test_estimates_of_small_types_stay_float32_when_loaded(case: Case) -> None:
    params = named_params(torch.bfloat16)
    sampler, _ = started(case, params)
    assert all(p.dtype == torch.bfloat16 for p in params.values())
    fresh = case.make(named_params(torch.bfloat16).items())
    fresh.load_state_dict(on_disk(sampler.state_dict()))
    for kept in (sampler, fresh):
        found = {
            name: value.dtype
            for state in kept.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        assert found.pop("low") == torch.int16  # what a parameter lacks to float32
        assert set(found.values()) <= {torch.float32}, found
    assert [list(s) for s in sampler.state.values()] == [list(s) for s in fresh.state.values()]


# ------------------------------------------------------------------------------------------------ parameters


@every_case
def test_a_frozen_parameter_stays_and_the_rest_moves(case: Case) -> None:
    params = named_params()
    params["a.bias"].requires_grad_(False)
    before = values(params)
    started(case, params)
    moved = [not torch.equal(p.detach(), old) for p, old in zip(params.values(), before, strict=True)]
    assert moved == [True, False, True]


@every_case
def test_a_frozen_layer_stays_and_the_rest_moves(case: Case) -> None:
    params, frozen = named_params(), "ab"[list(CASES.values()).index(case) % 2]
    for name, p in params.items():
        p.requires_grad_(not name.startswith(frozen))
    before = values(params)
    sampler, _ = started(case, params)
    for (name, p), old in zip(params.items(), before, strict=True):
        assert torch.equal(p.detach(), old) == name.startswith(frozen), name
    assert not getattr(sampler, "warming", False)


WIDE = {"temperature": 4 * COLD, "num_data": 50}  # a target eight times as wide


def grouped(case: Case, **settings: Any) -> tuple[Sampler, dict[str, Tensor]]:
    """A sampler whose second layer has a wider target."""
    params = named_params()
    groups = [
        {"name": "a", "params": [params["a.weight"], params["a.bias"]]},
        {"name": "b", "params": [params["b.weight"]], **settings},
    ]
    return case.make(groups, generator=seeded()), params


@every_case_by_group
def test_groups_keep_their_own_temperature_and_number_of_data(case: Case) -> None:
    rates = []
    for own in ({}, WIDE):
        sampler, params = grouped(case, **own)
        advance(sampler, Data(params), case.warmup + 2)
        for group, settings in zip(sampler.param_groups, ({}, own), strict=True):
            expected = {"temperature": COLD, "num_data": 100} | settings
            assert {key: group[key] for key in expected} == expected
            if isinstance(sampler, ISGD):
                assert sampler.rate(group) * group["lam"] == pytest.approx(group["temperature"] / group["num_data"])
        rates.append([float(sampler.rate(group)) for group in sampler.param_groups])
    if not isinstance(sampler, ISGD):
        assert rates[1][0] == pytest.approx(rates[0][0])
        if isinstance(sampler, VSGD):
            assert rates[1][1] == pytest.approx(8 * rates[0][1])
        else:  # a wider target allows a larger rate, unless it was given or the curvature bounds it
            assert rates[1][1] >= rates[0][1]


@pytest.mark.parametrize("name", ["sgld", "sgld-annealed", "sghmc", "sgnht", "isgd-lam", "isgd-momentum"])
def test_the_noise_of_a_group_goes_with_its_own_target(name: str) -> None:
    """Without a gradient a step is the injected noise alone; its variance is 2 rate T / N."""
    moves = []
    for own in ({}, WIDE):
        sampler, params = grouped(CASES[name], **own)
        before = values(params)
        for p in params.values():
            p.grad = torch.zeros_like(p)
        sampler.step(noise=[torch.zeros_like(p) for p in params.values()])
        moves.append([p.detach() - old for p, old in zip(params.values(), before, strict=True)])
    for plain, wide, factor in zip(*moves, (1.0, 1.0, 8.0 if "isgd" in name else 8.0**0.5), strict=True):
        torch.testing.assert_close(wide, factor * plain, rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------------ equal ways


@every_case
def test_foreach_changes_nothing(case: Case) -> None:
    """Up to rounding: one call for all tensors multiplies in another order."""
    runs = [values(started(case, foreach=foreach)[1].params) for foreach in (True, False)]
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


@every_case
def test_capturable_changes_nothing(case: Case) -> None:
    """Rates are then float32 tensors, so the last digits may differ."""
    (plain, data), (captured, data2) = (started(case, capturable=capturable) for capturable in (False, True))
    for a, b in zip(values(data.params), values(data2.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(plain.param_groups, captured.param_groups, strict=True):
        assert isinstance(a["rate"], float) and isinstance(b["rate"], Tensor)
        assert float(b["rate"]) == pytest.approx(a["rate"], rel=1e-4)


@every_case_of_its_own
def test_chains_together_are_chains_alone(case: Case) -> None:
    """On the same innovations."""
    steps, curvature = case.warmup + 3, torch.tensor([1.0, 5.0, 0.2])
    streams = [Data(named_params(), seed=k) for k in range(CHAINS)]
    drawn = [[(s.noise(), s.noise()) for _ in range(steps + 8)] for s in streams]

    def run(chain: int | None) -> tuple[Sampler, dict[str, Tensor]]:
        table = seeded(3)

        def planned(out: Tensor, generator: torch.Generator) -> Tensor:
            size = out.numel() if chain is None else CHAINS * out.numel()
            rows = torch.randn(size, generator=table).view(CHAINS, -1)
            return (rows if chain is None else rows[chain]).view_as(out)

        params = named_params(chains=CHAINS)
        if chain is not None:
            params = {name: p.detach()[chain].clone().requires_grad_() for name, p in params.items()}
        sampler = case.make(params.items(), generator=seeded(), chains=CHAINS if chain is None else None)

        def take(t: int, which: int) -> list[Tensor]:
            if chain is not None:
                return drawn[chain][t][which]
            return [torch.stack(parts) for parts in zip(*(d[t][which] for d in drawn), strict=True)]

        for t in range(steps + 8):
            for p, d in zip(params.values(), take(t, 0), strict=True):
                p.grad = p.detach() + d
            noise = take(t, 1) if sampler.estimator.centred else None
            if t < 8:
                sampler.observe(noise)
                if t == 0:  # the power iteration starts at random: the same for all here
                    for group in sampler.param_groups:
                        top = sampler.noise.of_group(group)["top"]
                        top.copy_(torch.arange(1.0, top.shape[-1] + 1).expand_as(top))
            else:
                if t == 8 and waits(sampler):
                    sampler.adapt([curvature if chain is None else float(curvature[chain])] * 2)
                with Planned(planned):
                    sampler.step(noise=noise)
        return sampler, params

    together, params = run(None)
    for k in range(CHAINS):
        alone, own = run(k)
        for group, single in zip(together.param_groups, alone.param_groups, strict=True):
            rate = torch.as_tensor(together.rate(group)).expand(CHAINS)
            assert float(rate[k]) == pytest.approx(float(alone.rate(single)), rel=1e-3)
        for name, p in own.items():
            torch.testing.assert_close(params[name].detach()[k], p.detach(), rtol=1e-3, atol=1e-4)
