"""The contract that every baseline keeps: the same draws in the same form as a sampler's, by the same call."""

import copy
import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import isosgd
from isosgd import DataSets, DivergedError, Target, priors
from isosgd.baselines import BASELINES, Baseline
from isosgd.samplers import REGISTRY, Method

# Short versions of each; a new baseline is one file, one line in the registry and one here.
CASES: dict[str, dict[str, Any]] = {
    "mcdropout": {},
    "swag": {"snapshots": 4, "rank": 3},
    "ensemble": {},
    "snapshots": {},
}
every_baseline = pytest.mark.parametrize("method", CASES)
QUICK: dict[str, Any] = {"draws": 3, "warmup": 20, "keep_every": 4, "batch_size": 20, "progress": False}


def data(n: int = 100) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=g)
    return x, x @ torch.tensor([[1.0], [-1.0]]) + 0.5 * torch.randn(n, 1, generator=g)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))


def target(model: nn.Module | None = None, **settings: Any) -> Target:
    return Target.from_module(model or net(), isosgd.likelihoods.Gaussian(scale=0.5), **settings)


def run(method: str, *, of: Target | None = None, on: Any = None, **changes: Any) -> isosgd.Posterior:
    given = {**QUICK, **CASES[method], **changes}
    return isosgd.sample(of or target(), data() if on is None else on, method=method, **given)


@functools.cache
def drawn(method: str, chains: int, seed: int) -> isosgd.Posterior:
    """A run that tests only read."""
    return run(method, chains=chains, seed=seed)


# ------------------------------------------------------------------------------------------------ the registry


def test_every_baseline_has_a_case() -> None:
    assert list(CASES) == list(BASELINES)


def test_the_joined_registry_lists_samplers_and_baselines() -> None:
    rows = {row["name"]: row for row in isosgd.methods()}
    assert list(rows) == [*REGISTRY, *BASELINES]
    assert {name for name, row in rows.items() if row["family"] == "baseline"} == set(CASES)
    for name in CASES:
        row = rows[name]
        assert row["paper"] and row["departures"] and row["settings"]["train_lr"] == 0.01
        assert "exp(-f" not in row["targets"]
    json.dumps(list(rows.values()), default=str)


@pytest.mark.parametrize("entry", BASELINES.values(), ids=BASELINES)
def test_it_says_that_it_is_no_sampler_and_where_it_departs(entry: Method) -> None:
    text = entry.kind.__doc__ or ""
    assert issubclass(entry.kind, Baseline)
    assert "Targets no posterior" in text and "Departures from the paper" in text


@every_baseline
def test_the_settings_it_lists_are_those_it_takes(method: str) -> None:
    BASELINES[method].kind(**BASELINES[method].settings)


# ------------------------------------------------------------------------------------------------ draws


@every_baseline
@pytest.mark.parametrize("chains", [1, 2])
def test_draws_have_the_shape_of_a_samplers(method: str, chains: int) -> None:
    posterior = drawn(method, chains, 0)
    assert isinstance(posterior, isosgd.Posterior) and len(posterior) == 3 * chains
    wanted = {name: (chains, 3, *p.shape) for name, p in net().named_parameters()}
    assert {name: tuple(x.shape) for name, x in posterior.draws.items()} == wanted
    assert all(bool(x.isfinite().all()) and not x.requires_grad for x in posterior.draws.values())
    flat = torch.cat([x.flatten(2) for x in posterior.draws.values()], -1).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in flat}) == 3 * chains  # all different
    found = posterior.predict(data()[0][:7])
    assert found.mean.shape == (7, 1) and bool((found.model_variance > 0).all())


@every_baseline
@pytest.mark.parametrize("chains", [1, 2])
def test_draws_follow_the_seed_and_global_random_numbers_are_left_alone(method: str, chains: int) -> None:
    of, first, other = target(), drawn(method, chains, 4).draws, drawn(method, chains, 0).draws
    numbers, more = torch.get_rng_state(), np.random.get_state()[1].copy()
    again = run(method, of=of, chains=chains, seed=4).draws
    assert torch.equal(numbers, torch.get_rng_state())
    assert np.array_equal(more, np.random.get_state()[1])
    for name, x in first.items():
        assert torch.equal(x, again[name])
        assert not torch.isclose(x, other[name], rtol=1e-7, atol=1e-9).all()


@every_baseline
def test_training_goes_to_the_mode(method: str) -> None:
    """Of the loss with its prior: a ridge here."""
    x, y = data()
    of = Target.from_module(nn.Linear(2, 1, bias=False), isosgd.likelihoods.Gaussian(scale=0.5), priors.Normal(0.1))
    best = torch.linalg.solve(x.T @ x + 25 * torch.eye(2), x.T @ y).T
    quiet = {"mcdropout": {"p": 1e-9}, "swag": {"lr": 1e-9}, "snapshots": {"lr": 1e-9}}.get(method, {})
    found = run(method, of=of, warmup=300, train_lr=0.05, batch_size=100, **quiet).draws["weight"]
    torch.testing.assert_close(found, best.expand_as(found), atol=0.02, rtol=0.0)  # some noise of minibatches is left


@every_baseline
def test_without_training_it_starts_at_the_models_values(method: str) -> None:
    model = net()
    quiet = {"mcdropout": {"p": 1e-9}, "swag": {"lr": 1e-12}, "snapshots": {"lr": 1e-12}}.get(method, {})
    start = {name: p.detach() + 1 for name, p in model.named_parameters()}
    for init, wanted in ((None, dict(model.named_parameters())), (start, start), (lambda k: start, start)):
        if method == "ensemble" and init is None:
            continue  # starts of its own
        draws = run(method, of=target(model), warmup=0, init=init, **quiet).draws
        for name, x in draws.items():
            torch.testing.assert_close(x, wanted[name].detach().expand_as(x), atol=1e-5, rtol=0.0)


@every_baseline
def test_information_is_plain_and_complete(method: str) -> None:
    info = json.loads(json.dumps(drawn(method, 2, 4).info, allow_nan=False))
    sampled = isosgd.sample(target(), data(), method="sgld", lr=1e-4, chains=2, **{**QUICK, "warmup": 0}).info
    assert set(info) >= set(sampled)
    assert {key: info[key] for key in ("method", "seed", "draws", "chains", "num_data", "batch_size")} == {
        "method": method, "seed": 4, "draws": 3, "chains": 2, "num_data": 100, "batch_size": 20,
    }  # fmt: skip
    assert info["options"] == CASES[method] and info["engine"].startswith("together")
    assert info["gradients"] >= 2 * 20 and info["warmup"][0]["steps"] == 20 and info["warmup"][0]["loss"][0] > 0


class Counted(nn.Tanh):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x)


@every_baseline
@pytest.mark.parametrize("more", [{"warmup": 50}, {"draws": 5}], ids=str)
def test_every_gradient_is_counted(method: str, more: dict[str, int]) -> None:
    """Calls of the network that do not depend on the length, to look at it, are left out."""
    if method == "ensemble" and "draws" in more:
        more = {"warmup": 70}  # its members are trained side by side
    calls, gradients = [], []
    for changes in ({}, more):
        model, Counted.calls = nn.Sequential(nn.Linear(2, 5), Counted(), nn.Linear(5, 1)), 0
        found = run(method, of=target(model), chains=1, **{"draws": 1 if method == "ensemble" else 3, **changes})
        calls.append(Counted.calls)
        gradients.append(found.info["gradients"])
    assert calls[1] - calls[0] == gradients[1] - gradients[0]
    assert gradients[1] > gradients[0] or (method in ("swag", "mcdropout") and "draws" in more)  # they train once


# ------------------------------------------------------------------------------------------------ parameters


@every_baseline
def test_the_users_module_and_what_is_frozen_stay_as_they_are(method: str) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    draws = run(method, of=target(model), chains=2).draws
    assert list(draws) == ["0.bias", "2.weight", "2.bias"]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@every_baseline
def test_the_last_layer_alone(method: str) -> None:
    draws = run(method, of=target(sampled="last_layer")).draws
    assert list(draws) == ["2.weight", "2.bias"]


@every_baseline
def test_positive_parameters_are_drawn_as_such(method: str) -> None:
    """The noise scale is trained, too; scales of the prior are held where they start."""
    of = Target.from_module(net(), "gaussian", priors.HierarchicalNormal())
    draws = run(method, of=of).draws
    assert bool((draws["likelihood.scale"] > 0).all()) and bool((draws["likelihood.scale"] != 1).all())
    start = of.constrain(of.initial())["prior.scale"].detach()
    assert torch.allclose(draws["prior.scale"], start.expand_as(draws["prior.scale"]))


@every_baseline
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_parameters_keep_their_type_but_for_half_precision(method: str, dtype: torch.dtype, kept: torch.dtype) -> None:
    x, y = data()
    given = {"lr": 0.01} if method in ("swag", "snapshots") else {}
    draws = run(method, of=target(net().to(dtype)), on=(x.to(dtype), y.to(dtype)), **given).draws
    assert {x.dtype for x in draws.values()} == {kept}


@every_baseline
def test_a_user_s_density_will_do(method: str) -> None:
    of = Target(
        lambda p, b: -0.5 * (b[1][:, 0] - b[0] @ p["w"]).square(), priors.Normal(1.0), init={"w": torch.ones(2)}
    )
    units = {"units": {"w": 0}} if method == "mcdropout" else {}
    assert run(method, of=of, **units).draws["w"].shape == (1, 3, 2)


# ------------------------------------------------------------------------------------------------ data


@every_baseline
def test_a_loader_will_do(method: str) -> None:
    """Chains then run in turn."""
    loader = DataLoader(TensorDataset(*data()), batch_size=20, shuffle=True)
    posterior = run(method, on=loader, batch_size=None, chains=2)
    assert len(posterior) == 6 and posterior.info["batch_size"] is None and "in turn" in posterior.info["engine"]


@every_baseline
def test_data_sets_have_chains_of_their_own(method: str) -> None:
    x, y = data()
    of = Target.from_module(nn.Linear(2, 1, bias=False), isosgd.likelihoods.Gaussian(scale=0.5))
    quiet = {"mcdropout": {"p": 1e-9}, "swag": {"lr": 1e-9}, "snapshots": {"lr": 1e-9}}.get(method, {})
    sets = DataSets((torch.stack([x, x]), torch.stack([y, -y])))
    posterior = run(method, of=of, on=sets, chains=2, warmup=100, train_lr=0.05, **quiet)
    signs = posterior.draws["weight"][:, :, 0, 0].sign()
    assert posterior.info["sets"] == 2 and signs.tolist() == [[1.0] * 3] * 2 + [[-1.0] * 3] * 2


@pytest.mark.slow
@every_baseline
def test_compiled_gradients_give_the_same(method: str) -> None:
    plain, compiled = (run(method, chains=2, compile=on) for on in (False, True))
    assert "not compiled" not in compiled.info["engine"] and "compiled" in compiled.info["engine"]
    for name, x in plain.draws.items():
        torch.testing.assert_close(x, compiled.draws[name], rtol=1e-2, atol=1e-3)


# ------------------------------------------------------------------------------------------------ what goes wrong


@every_baseline
@pytest.mark.parametrize("chains", [1, 2])
def test_a_loss_that_is_not_finite_ends_it_with_a_clear_word(method: str, chains: int) -> None:
    of = Target(lambda p, b: -(p["w"] / 0.0) * b[0][:, 0], priors.Normal(1.0), init={"w": torch.ones(1)})
    units = {"units": {"w": 0}, "p": 0.01} if method == "mcdropout" else {}
    with pytest.raises(DivergedError, match=rf"{method}: after \d+ gradients .* not finite.*train_lr") as found:
        run(method, of=of, chains=chains, **units)
    assert list(found.value.state) == ["w"]


@every_baseline
def test_a_chain_that_diverges_is_dropped(method: str) -> None:
    """The other goes on."""
    of = Target(lambda p, b: -(p["w"][0] ** 2) * b[0][:, 0].abs(), priors.Flat(), init={"w": torch.ones(1)})
    units = {"units": {"w": 0}} if method == "mcdropout" else {}
    each = 3 if method == "ensemble" else 1
    start = lambda k: {"w": torch.tensor([1e30 if k // each == 1 else 1.0])}  # noqa: E731
    with pytest.warns(isosgd.SamplingWarning, match="chain 1 was dropped"):
        posterior = run(method, of=of, chains=3, init=start, **units)
    assert posterior.info["chain_indices"] == [0, 2] and posterior.draws["w"].shape == (2, 3, 1)


@every_baseline
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"train_lr": 0.0}, ValueError, "train_lr must be positive and finite, got 0.0"),
        ({"train_lr": math.nan}, ValueError, "train_lr must be positive and finite, got nan"),
        ({"structure": "layer"}, TypeError, "has no option 'structure'; it takes"),
        ({"draws": 0}, ValueError, "draws = 0"),
        ({"warmup": -1}, ValueError, "warmup = -1"),
        ({"batch_size": 101}, ValueError, "batch_size = 101"),
        ({"temperature": -1.0}, ValueError, "temperature = -1.0"),
        ({"compile": "often"}, ValueError, "compile = 'often'"),
    ],
)
def test_bad_settings_are_named(method: str, settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(method, **settings)


@pytest.mark.parametrize("method", [name for name in CASES if name != "swag"])
def test_a_temperature_without_meaning_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=f"temperature = 0.5 has no meaning for method '{method}'"):
        run(method, temperature=0.5)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("swag", {"rank": 1}, "rank = 1"),
        ("swag", {"rank": -1}, "rank = -1"),
        ("swag", {"snapshots": 1}, "snapshots = 1"),
        ("swag", {"lr": -1.0}, "lr must be positive and finite, got -1.0"),
        ("snapshots", {"lr": 0}, "lr must be positive and finite, got 0"),
        ("snapshots", {"schedule": "often"}, "schedule = 'often' is unknown; choose one of"),
        ("mcdropout", {"p": 1.0}, "p = 1.0"),
        ("mcdropout", {"p": {"0": -0.1}}, "p = -0.1"),
        ("mcdropout", {"p": {"7": 0.1}}, "p has '7', which fits no layer"),
        ("mcdropout", {"p": 0.0}, "nothing is ever dropped"),
        ("mcdropout", {"units": {"2.weight": 1}}, "units is for targets that are not modules"),
    ],
)
def test_bad_settings_of_its_own_are_named(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(method, **settings)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (None, "pass units="),
        ({"v": 0}, "units has 'v'"),
        ({"s": 0}, "units has 's', which is not a weight"),
        ({"w": 1}, "is not an axis of a weight of shape"),
    ],
)
def test_units_that_do_not_fit_are_named(units: dict[str, int] | None, message: str) -> None:
    of = Target(
        lambda p, b: -0.5 * (b[1][:, 0] - b[0] @ p["w"]).square() * p["s"],
        {"w": priors.Normal(1.0), "s": priors.HalfNormal(1.0)},
        positive=["s"],
        init={"w": torch.ones(2), "s": 1.0},
    )
    with pytest.raises(ValueError, match=message):
        run("mcdropout", of=of, units=units)
