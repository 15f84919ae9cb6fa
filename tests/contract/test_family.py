"""The registry of methods, and what is particular to some samplers.

The contract that they share is in test_samplers.py; a new method is one file, one line in the registry and one case.
"""

import copy
import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isosgd
from isosgd import METHODS, SGNHT, Sampler
from isosgd.samplers import REGISTRY, Method
from isosgd.samplers.schedules import cosine
from isosgd.samplers.sgrld import Field
from tests.methods import CSGHMC, CSGLD, PSGLD, SGFS, SGRHMC, SGRLD, AdaptiveSGHMC, FullSGFS, MomentumISGD

ASKED_FOR = {
    "isgd", "isgd-momentum", "vsgd", "sgld", "psgld", "sgfs", "sgrld", "sghmc", "sgrhmc", "adaptive-sghmc", "sgnht",
    "csgld", "csghmc", "mcdropout", "swag", "ensemble", "snapshots",
}  # fmt: skip
OPTIMIZERS = {name: method for name, method in REGISTRY.items() if name != "hmc"}  # which needs energies, not steps
every_method = pytest.mark.parametrize("method", OPTIMIZERS.values(), ids=OPTIMIZERS)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Loop:
    """A sampler on ``|theta|^2 / 2`` with gradient noise, as a training loop drives it."""

    def __init__(self, kind: type[Sampler], chains: int | None = None, **settings: Any) -> None:
        lead = () if chains is None else (chains,)
        self.g = seeded(1)
        self.params = {
            name: torch.randn(*lead, *shape, generator=self.g).requires_grad_()
            for name, shape in (("a.weight", (3, 2)), ("a.bias", (3,)), ("b.weight", (2, 2)))
        }
        self.sampler = kind(self.params.items(), num_data=100, chains=chains, generator=seeded(), **settings)

    def gradients(self) -> list[Tensor] | None:
        for p in self.params.values():
            p.grad = p.detach() + 0.3 * torch.randn(p.shape, generator=self.g)
        noise = [0.3 * torch.randn(p.shape, generator=self.g) for p in self.params.values()]
        return noise if self.sampler.estimator.centred else None

    def look(self, vectors: int = 30) -> "Loop":
        for _ in range(vectors):
            self.sampler.observe(self.gradients())
        self.sampler.adapt([1.0, 1.0])
        return self

    def steps(self, count: int) -> "Loop":
        for _ in range(count):
            self.sampler.step(noise=self.gradients())
        return self

    def resumed(self, **settings: Any) -> "Loop":
        """A copy from the saved state."""
        other = Loop(type(self.sampler), self.sampler.chains, **settings)
        for p, q in zip(other.params.values(), self.params.values(), strict=True):
            p.detach().copy_(q.detach())
        other.g.set_state(self.g.get_state())
        other.sampler.load_state_dict(self.sampler.state_dict())
        return other

    def same(self, other: "Loop") -> bool:
        return all(map(torch.equal, self.params.values(), other.params.values()))


# ------------------------------------------------------------------------------------------------ the registry


def test_every_method_that_was_asked_for_is_there() -> None:
    assert {row["name"] for row in isosgd.methods()} >= ASKED_FOR
    assert {name: REGISTRY[name].kind for name in METHODS if name in REGISTRY}.items() <= METHODS.items()


def test_methods_lists_them_all_with_their_settings() -> None:
    rows = {row["name"]: row for row in isosgd.methods() if row["family"] != "baseline"}
    assert list(rows) == list(REGISTRY)
    for row in rows.values():
        assert row["family"] in ("langevin", "hamiltonian", "metropolis")
        assert "exp(-f / T)" in row["targets"] or row["name"] == "vsgd"
        assert row["settings"]["bias"] == 0.02 and row["departures"] and row["paper"]
    assert rows["adaptive-sghmc"]["settings"]["friction"] == 0.05 and rows["sghmc"]["settings"]["friction"] == 0.1
    assert rows["csgld"]["settings"]["decay"] == 0.0  # of its base
    assert not {"lr", "corrected", "num_data", "temperature", "extra"} & set(rows["isgd-momentum"]["settings"])


def test_the_structure_it_lists_is_the_one_that_sample_takes() -> None:
    (row,) = (row for row in isosgd.methods() if row["name"] == "isgd")
    x = torch.randn(60, 2, generator=seeded())
    prior, start = isosgd.priors.Normal(1.0), {"w": torch.zeros(2)}
    target = isosgd.Target(lambda p, b: -0.5 * (b[0] - p["w"]).square().sum(-1), prior, init=start)
    short = {"draws": 2, "keep_every": 2, "warmup": 400, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", isosgd.SamplingWarning)  # the warm-up is short
        listed = {"structure": row["settings"]["structure"]}
        plain, told = (isosgd.sample(target, (x,), **short, **given) for given in ({}, listed))
    assert torch.equal(plain.draws["w"], told.draws["w"])


@every_method
def test_the_settings_it_lists_are_those_it_takes(method: Method) -> None:
    Loop(method.kind, **method.settings)


@every_method
def test_it_says_what_it_targets_and_where_it_departs(method: Method) -> None:
    texts = [text for kind in method.kind.__mro__ if issubclass(kind, Sampler) for text in [kind.__doc__ or ""]]
    assert any("Targets" in text for text in texts[:2])
    assert any("Departures" in text for text in texts[:2])


@every_method
def test_it_has_a_case_in_the_contract(method: Method) -> None:
    assert f"Case({method.kind.__name__}" in Path(__file__).with_name("test_samplers.py").read_text()


@every_method
@pytest.mark.parametrize("chains", [None, 3])
def test_it_runs_with_nothing_given(method: Method, chains: int | None) -> None:
    loop = Loop(method.kind, chains, **method.options).look()
    loop.sampler.freeze()
    loop.steps(20)
    assert all(bool(torch.isfinite(p).all()) for p in loop.params.values())
    assert all(bool((torch.as_tensor(group["rate"]) > 0).all()) for group in loop.sampler.param_groups)


@every_method
def test_chains_of_a_single_number(method: Method) -> None:
    """A scalar parameter, such as a noise scale, has no dimension but that of the chains."""
    p, g = torch.ones(3, requires_grad=True), seeded(1)
    sampler = method.kind([("scale", p)], num_data=100, chains=3, generator=seeded(), **method.options)
    for _ in range(30):
        p.grad = p.detach() + 0.3 * torch.randn(3, generator=g)
        sampler.observe([0.3 * torch.randn(3, generator=g)])
    sampler.adapt([1.0])
    sampler.step(noise=[0.3 * torch.randn(3, generator=g)])
    assert bool(torch.isfinite(p).all()) and len(set(p.tolist())) == 3


@functools.cache
def drawn(name: str, **settings: Any) -> dict[str, Tensor]:
    """Draws of a regression on features of a layer that is frozen; tests only read them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    torch.nn.init.eye_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    x = torch.randn(100, 2, generator=seeded())
    data = (x, x @ torch.tensor([[1.0], [-1.0]]) + 0.5 * torch.randn(100, 1, generator=seeded(6)))
    target = isosgd.Target.from_module(model, likelihood=isosgd.likelihoods.Gaussian(scale=0.5))
    before = copy.deepcopy(model.state_dict())
    given = {"draws": 8, "keep_every": 8, "warmup": 600 if name == "hmc" else 300, "progress": False, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", isosgd.SamplingWarning)  # the warm-up is short
        draws = isosgd.sample(target, data, method=name, **given).draws
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not torch.equal(draws["1.weight"][0, -1], before["1.weight"])
    return draws


@pytest.mark.parametrize(
    "name",  # cycles at their default length take thousands of steps
    [pytest.param(name, marks=pytest.mark.long) if name in ("csgld", "csghmc") else name for name in REGISTRY],
)
def test_it_runs_through_sample_with_nothing_given(name: str) -> None:
    weight = drawn(name)["1.weight"].flatten(0, 1)
    assert bool((weight.mean(0) - torch.tensor([1.0, -1.0])).abs().max() < 0.3)


@pytest.mark.parametrize("name", ["isgd", "sghmc", "psgld"])
def test_a_compiled_training_step_is_the_same(name: str) -> None:
    """Loss, gradients and the sampler's step in one compiled function; the compiler may leave the step as it is."""

    method = REGISTRY[name]

    def made() -> tuple[Any, Any]:
        loop = Loop(method.kind, **method.options).look()
        loop.sampler.freeze()
        scale = torch.ones(())

        def step(x: Tensor) -> Tensor:
            for p in loop.params.values():
                p.grad = None
            a = torch.tanh(x @ loop.params["a.weight"].T + loop.params["a.bias"])
            loss = (a[:, :2] @ loop.params["b.weight"]).square().mean() * scale
            loss.backward()
            loop.sampler.step()
            return loss.detach()

        return loop, step

    (plain, step), (compiled, other) = made(), made()
    torch._dynamo.reset()
    fast = torch.compile(other, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for k in range(4):
            x = torch.randn(5, 2, generator=seeded(k))
            torch.testing.assert_close(step(x), fast(x))
    for p, q in zip(plain.params.values(), compiled.params.values(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_frozen_parameter_is_left_alone_by_sample(name: str) -> None:
    """What the target freezes is neither moved nor drawn, by any method."""
    assert list(drawn(name, **({"cycle": 10} if "cycle" in REGISTRY[name].settings else {}))) == ["1.weight", "1.bias"]


# ------------------------------------------------------------------------------------------------ cycles


@pytest.mark.parametrize("kind", [CSGLD, CSGHMC])
def test_draws_come_from_the_sampling_stage(kind: type[Sampler]) -> None:
    loop, found, rates = Loop(kind, lr=0.01, cycle=10, exploration=0.6), [], []
    assert not loop.sampler.sampling  # no step, no draw
    for _ in range(20):
        rates.append(loop.sampler.rate(loop.sampler.param_groups[0]))
        loop.steps(1)
        found.append(loop.sampler.sampling)
    assert found == 2 * [i >= 6 for i in range(10)]
    expected = [0.01 * cosine(i / 10) / cosine(0.6) for i in range(10)]
    assert rates == pytest.approx(2 * expected) and rates[6] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", [CSGLD, CSGHMC])
def test_exploration_injects_nothing(kind: type[Sampler]) -> None:
    ends = []
    for seed in (5, 6):
        loop = Loop(kind, lr=0.01, cycle=10, exploration=0.6)
        loop.sampler.generator.manual_seed(seed)
        ends.append([[p.detach().clone() for p in loop.steps(n).params.values()] for n in (6, 1)])
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert not any(map(torch.equal, ends[0][1], ends[1][1]))


@pytest.mark.parametrize("kind", [CSGLD, CSGHMC])
@pytest.mark.parametrize("chains", [None, 2])
def test_cycles_begin_when_rates_are_frozen_and_are_saved(kind: type[Sampler], chains: int | None) -> None:
    settings = {"cycle": 8, "exploration": 0.5}
    loop = Loop(kind, chains, **settings).look().steps(3)
    assert loop.sampler.sampling
    loop.sampler.freeze()
    loop.steps(1)
    assert not loop.sampler.sampling
    loop.steps(2)
    other = loop.resumed(**settings)
    stages = []
    for _ in range(10):
        loop.steps(1)
        other.steps(1)
        assert loop.same(other) and loop.sampler.sampling == other.sampler.sampling
        stages.append(loop.sampler.sampling)
    assert stages == [False, *[True] * 4, *[False] * 4, True]


def test_exploration_stays_stable() -> None:
    """Of a curvature of 1 the peak is at most 1, however large a bias is allowed."""
    sampler = Loop(CSGLD, bias=0.8, exploration=0.9, noise="gaussian", temperature=1e4).look().sampler
    sampler.freeze()
    group = sampler.param_groups[0]
    assert sampler.rate(group) == pytest.approx(1.0)
    assert group["rate"] / cosine(0.9) > 2.0


# ------------------------------------------------------------------------------------------------ adaptive SGHMC


def test_the_burn_in_counts_steps_not_tensors_and_is_saved() -> None:
    settings = {"lr": 1e-4, "burn_in": 6}
    loop = Loop(AdaptiveSGHMC, **settings).steps(4)
    assert loop.sampler.adapting
    other = loop.resumed(**settings)
    for one in (loop, other):
        one.steps(2)
        assert not one.sampler.adapting
        scales = [one.sampler.state[p]["square"].clone() for p in one.params.values()]
        one.steps(3)
        kept = [one.sampler.state[p]["square"] for p in one.params.values()]
        assert all(map(torch.equal, scales, kept))
    assert loop.same(other)


def test_scales_are_those_of_the_gradients_and_end_with_the_rates() -> None:
    loop = Loop(AdaptiveSGHMC, lr=1e-12, burn_in=10_000).steps(400)
    # Where the gradient exceeds its noise the memory is a few steps only, so that single entries are inaccurate.
    expected = sum(float((p.detach().square() + 0.09).sum()) for p in loop.params.values())
    found = sum(float(loop.sampler.state[p]["square"].sum()) for p in loop.params.values())
    assert found == pytest.approx(expected, rel=0.25)
    assert loop.sampler.adapting
    loop.sampler.freeze()
    assert not loop.sampler.adapting


def test_every_gradient_is_taken_in_once() -> None:
    """Whether or not noise vectors come with it."""
    loop = Loop(PSGLD, lr=1e-6)
    for i in range(6):
        noise = loop.gradients()
        loop.sampler.step(noise=noise if i % 2 else None)
    assert [group["gradients"] for group in loop.sampler.param_groups] == [6, 6]


# ------------------------------------------------------------------------------------------------ metrics


def test_divergence_is_the_derivative() -> None:
    x = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    value, divergence = Field(lambda p: 1.0 / (1.0 + p**2), coupled=False, batched=False).at(x)
    torch.testing.assert_close(value, 1.0 / (1.0 + x**2))
    torch.testing.assert_close(divergence, -2 * x / (1.0 + x**2) ** 2)
    root, slope = Field(lambda p: 1.0 / (1.0 + p**2), coupled=False, batched=False).at(x, 0.5)
    torch.testing.assert_close(root, (1.0 + x**2) ** -0.5)
    torch.testing.assert_close(slope, -x * (1.0 + x**2) ** -1.5)


@pytest.mark.parametrize("batched", [False, True])
def test_divergence_of_a_coupled_metric_is_the_diagonal_of_its_jacobian(batched: bool) -> None:
    def metric(p: Tensor) -> Tensor:
        return torch.exp(p.sum(-1, keepdim=True) * p)

    x = torch.randn(2, 3, generator=seeded(), dtype=torch.float64)
    field = Field(metric, coupled=True, batched=batched)
    jacobian = torch.autograd.functional.jacobian(metric, x).view(6, 6)
    torch.testing.assert_close(field.at(x)[1].flatten(), jacobian.diagonal())


@pytest.mark.parametrize("kind", [PSGLD, AdaptiveSGHMC, SGFS, SGRLD, SGRHMC, FullSGFS])
@pytest.mark.parametrize("chains", [None, 2])
def test_whiten_is_the_root_of_what_the_gradient_meets(kind: type[Sampler], chains: int | None) -> None:
    """Without injected noise and velocity a step is ``- rate P g``."""
    own = {"metric": lambda p: 1.0 + p.detach() ** 2} if kind in (SGRLD, SGRHMC) else {}
    loop = Loop(kind, chains, temperature=1e-30, **own).look()
    for group in loop.sampler.param_groups:
        group["rate"] = loop.sampler.number(1e-3 * torch.ones(() if chains is None else chains))
        group["temperature"] = 0.0
    loop.sampler.freeze()
    loop.sampler.refresh()
    loop.gradients()
    params = list(loop.params.values())
    before = [p.detach().clone() for p in params]
    twice = loop.sampler.whitening.whiten(loop.sampler.whitening.whiten([p.grad for p in params]))
    if loop.sampler.metric is not None:
        loop.sampler.metric.learn = None  # the metric as it is
    loop.sampler.step()
    for p, old, expected in zip(params, before, twice, strict=True):
        torch.testing.assert_close(old - p.detach(), 1e-3 * expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", [PSGLD, AdaptiveSGHMC, SGFS, SGRLD, SGRHMC, FullSGFS])
def test_curvature_may_be_told_in_the_metric(kind: type[Sampler]) -> None:
    """A large curvature bounds the rate, and the rate times the curvature in the metric is what the bias allows."""
    plain, told = Loop(kind), Loop(kind)
    told.sampler.whitening.entered = True
    for loop in (plain, told):
        loop.look()
        loop.sampler.adapt([1e6, 1e6])
    for a, b in zip(plain.sampler.param_groups, told.sampler.param_groups, strict=True):
        assert b["rate"] * 1e6 == pytest.approx(2 * (2 - told.sampler.friction) * 0.02 / 1.02, rel=1e-4)
        assert a["rate"] * float(plain.sampler.whitening.curvature_ratio(a)) == pytest.approx(b["rate"], rel=1e-3)


def test_thermostats_are_of_each_group_and_chain() -> None:
    loop = Loop(SGNHT, 2, lr=0.01).steps(30)
    a, b = (loop.sampler.thermostat(group) for group in loop.sampler.param_groups)
    assert a.shape == b.shape == (2,) and len({*a.tolist(), *b.tolist()}) == 4
    assert all(math.isfinite(x) and x <= 1.0 for x in (*a.tolist(), *b.tolist()))


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PSGLD, {"lr": -1.0}, "lr = -1.0"),
        (PSGLD, {"alpha": 1.0}, "alpha = 1.0"),
        (PSGLD, {"eps": 0.0}, "eps = 0.0"),
        (AdaptiveSGHMC, {"burn_in": 0}, "burn_in = 0"),
        (AdaptiveSGHMC, {"eps": -1.0}, "eps = -1.0"),
        (AdaptiveSGHMC, {"friction": 2.0}, "friction = 2.0"),
        (MomentumISGD, {"lam": 0.0}, "lam = 0.0"),
        (MomentumISGD, {"noise": "gaussian"}, "noise='paired'"),
        (SGNHT, {"gain": 0.0}, "gain = 0.0"),
        (CSGLD, {"cycle": 1}, "cycle = 1"),
        (CSGHMC, {"exploration": 1.0}, "exploration = 1.0"),
        (CSGHMC, {"cycle": 10, "exploration": 0.95}, "exploration = 0.95"),
        (SGFS, {"floor": 0.0}, "floor = 0.0"),
        (SGFS, {"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_bad_settings_are_named(kind: type[Sampler], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loop(kind, **settings)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda p: p.sum(), "must have its shape"),
        (lambda p: 3.0, "must have its shape"),
        (lambda p: -(p**2), "must be positive"),
        (lambda p: torch.full_like(p, torch.inf), "must be positive and finite"),
        (lambda p: 1.0 + p.square().sum() * torch.ones_like(p), "coupled=True"),
    ],
)
def test_a_bad_metric_is_named(metric: Any, message: str) -> None:
    for kind in (SGRLD, SGRHMC):
        with pytest.raises(ValueError, match=message):
            Loop(kind, lr=0.01, metric=metric).steps(1)
    with pytest.raises(TypeError, match="metric of type int"):
        Loop(SGRLD, metric=3)


def test_a_full_matrix_has_its_limits() -> None:
    with pytest.raises(ValueError, match="at most 2000"):
        FullSGFS([("w", torch.zeros(2001, requires_grad=True))], num_data=10)
    groups = [
        {"params": [torch.zeros(2, requires_grad=True)]},
        {"params": [torch.zeros(2, requires_grad=True)], "temperature": 0.5},
    ]
    with pytest.raises(ValueError, match="groups with temperature"):
        FullSGFS(groups, num_data=10)
    loop = Loop(FullSGFS).look()
    loop.gradients()
    loop.params["a.bias"].grad = None
    with pytest.raises(RuntimeError, match="no gradient"):
        loop.sampler.step()


@pytest.mark.parametrize("kind", [m.kind for m in OPTIMIZERS.values() if m.kind.__name__ not in ("ISGD", "VSGD")])
def test_rates_come_from_somewhere(kind: type[Sampler]) -> None:
    """Without lr, lam or curvature there is none."""
    loop = Loop(kind)
    loop.sampler.observe(loop.gradients())
    with pytest.raises(ValueError, match="curvature"):
        loop.sampler.adapt()
    with pytest.raises(ValueError, match="pass batch_size=n"):
        loop.sampler.step(noise=loop.gradients())
