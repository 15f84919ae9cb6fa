"""What is particular to each sampler: its rate, its noise, its schemes, by the formulas they stand for."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import ISGD, PRESETS, SGHMC, SGLD, VSGD, Sampler, SamplingWarning
from isosgd.geometry.rule import allowed_rate_curvature, variance_inflation
from isosgd.noise import AlphaStable
from isosgd.samplers import layer_groups
from isosgd.samplers.schedules import SPREAD, STAGE_DRAWS, Cycles
from isosgd.samplers.steppers import hamiltonian_, langevin_
from tests.innovations import Planned

N = 100


def one_group(size: int = 4, kind: type[Sampler] = ISGD, **settings: Any) -> tuple[Any, Tensor]:
    theta = torch.zeros(size, requires_grad=True)
    generator = torch.Generator().manual_seed(2)
    return kind([("w", theta)], **{"num_data": N, "generator": generator, **settings}), theta


def feed(sampler: Sampler, vectors: Tensor) -> None:
    """Noise vectors to a sampler of one tensor; as gradients to one that takes those."""
    theta = sampler.param_groups[0]["params"][0]
    for d in vectors:
        theta.grad = d
        sampler.observe([d] if sampler.estimator.centred else None)


def step(sampler: Sampler, theta: Tensor, gradient: Tensor, noise: Tensor | None = None) -> Tensor:
    """One step; returns the move."""
    before, theta.grad = theta.detach().clone(), gradient
    sampler.step(noise=None if noise is None else [noise])
    return theta.detach() - before


@pytest.fixture
def unit_innovations() -> Iterator[Tensor]:
    """Innovations that are known: 1, -2, 3, -4."""
    xi = torch.tensor([1.0, -2.0, 3.0, -4.0])
    with Planned(lambda out, generator: xi):
        yield xi


# ------------------------------------------------------------------------------------------------ groups


def test_named_parameters_form_a_group_a_layer() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    sampler = ISGD(net.named_parameters(), num_data=N)
    assert [(g["name"], len(g["params"])) for g in sampler.param_groups] == [("0", 2), ("2", 2)]
    assert [g["name"] for g in layer_groups([("scale", torch.zeros(1)), ("a.b.w", torch.zeros(1))])] == ["scale", "a.b"]


def test_groups_are_given_as_torch_takes_them() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    groups = [{"params": net[0].parameters()}, {"params": net[2].weight}, {"params": [("bias", net[2].bias)]}]
    assert [p for g in ISGD(groups, num_data=N).param_groups for p in g["params"]] == list(net.parameters())


def test_a_generator_is_made_from_torchs_seed_when_none_is_given() -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        sampler, theta = one_group(kind=SGLD, lr=0.1, generator=None)
        draws.append(step(sampler, theta, torch.zeros(4)))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# ------------------------------------------------------------------------------------------------ steppers


def test_the_steppers_are_their_formulas(generator: torch.Generator) -> None:
    theta, v, g, xi = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(4))
    for rate in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        for kick in (None, xi):
            change = 0.3 * g + (0.0 if kick is None else kick)
            moved = theta.clone()
            langevin_([moved], [g], rate, None if kick is None else [kick])
            torch.testing.assert_close(moved, theta - change)
            moved, velocity = theta.clone(), v.clone()
            hamiltonian_([moved], [velocity], [g], rate, 0.1, None if kick is None else [kick])
            torch.testing.assert_close(velocity, 0.9 * v - change)
            torch.testing.assert_close(moved, theta + velocity)


@pytest.mark.parametrize("friction", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("rate_curvature", [0.02, 0.3, 1.5])
def test_the_predicted_bias_is_that_of_the_linear_recursion(friction: float, rate_curvature: float) -> None:
    """Stationary covariance of (theta, v) for f/N = theta^2 / 2 under composite noise 2 a T / (N rate), solved for."""
    r, a = rate_curvature, friction
    step_matrix = torch.tensor([[1 - r, 1 - a], [-r, 1 - a]], dtype=torch.float64)
    noise = torch.full((2, 2), 2 * r * a, dtype=torch.float64)  # in units of T / N
    system = torch.eye(4, dtype=torch.float64) - torch.kron(step_matrix, step_matrix)
    covariance = torch.linalg.solve(system, noise.flatten()).view(2, 2)
    assert variance_inflation(r, a) == pytest.approx(float(covariance[0, 0]), rel=1e-9)


def test_the_predicted_bias_is_infinite_where_a_step_is_unstable_and_has_an_inverse() -> None:
    assert variance_inflation(2.0) == math.inf
    assert variance_inflation(torch.tensor([0.0, 3.0])).tolist() == [1.0, math.inf]
    for friction in (1.0, 0.1):
        assert variance_inflation(allowed_rate_curvature(0.05, friction), friction) == pytest.approx(1.05)


# ------------------------------------------------------------------------------------------------ I-SGD: lambda


@pytest.mark.parametrize("summary", ["max", "sum", "mean"])
def test_lambda_is_the_summary_of_the_noise(summary: str) -> None:
    sampler, _ = one_group(correction="diagonal", summary=summary, temperature=0.5)
    feed(sampler, torch.tensor([[2.0, 0.0, 0.0, 4.0]]))
    sampler.adapt()
    lam = {"max": 8.0, "sum": 10.0, "mean": 2.5}[summary]
    (group,) = sampler.param_groups
    assert group["lam"] == pytest.approx(lam)
    assert group["rate"] == pytest.approx(0.5 / (N * lam))


def test_lambda_covers_the_longest_outer_product(generator: torch.Generator) -> None:
    """Top eigenvalue of the mean outer product of 16 vectors, over all full rings, but for what is clipped."""
    sampler, _ = one_group()
    vectors = torch.randn(40, 4, generator=generator)
    feed(sampler, vectors)
    rings = [vectors[k - 15 : k + 1] for k in range(16, 40)]
    tops = torch.stack([torch.linalg.eigvalsh(ring.T @ ring / 16).max() for ring in rings])
    sampler.adapt()
    assert sampler.param_groups[0]["lam"] == pytest.approx(float(0.5 * torch.quantile(tops, 0.99)), rel=1e-4)
    assert sampler.clipped_share(sampler.param_groups[0]) == pytest.approx(1 / len(tops))


def test_the_curvature_guard_bounds_the_bias() -> None:
    sampler, _ = one_group(bias=0.05, temperature=2.0)
    feed(sampler, 1e-3 * torch.ones(1, 4))
    sampler.adapt([3.0])
    rate = sampler.param_groups[0]["rate"]
    assert rate * 3.0 == pytest.approx(allowed_rate_curvature(0.05))
    assert variance_inflation(rate * 3.0) == pytest.approx(1.05)


def test_without_a_curvature_the_batch_size_gives_the_fisher_information(generator: torch.Generator) -> None:
    sampler, _ = one_group(batch_size=8, bias=0.05, temperature=5.0)
    feed(sampler, torch.randn(20, 4, generator=generator))
    sampler.adapt()
    (group,) = sampler.param_groups
    fisher = 2.0 * 8 * float(sampler.noise_summary(group, "top"))
    assert group["rate"] * fisher == pytest.approx(allowed_rate_curvature(0.05), rel=1e-5)


@pytest.mark.parametrize("settings", [{"kind": ISGD}, {"kind": SGLD}, {"kind": SGHMC, "corrected": True}], ids=repr)
def test_rates_fall_at_once_and_rise_slowly(settings: dict[str, Any]) -> None:
    sampler, _ = one_group(**settings)
    feed(sampler, 1e-6 * torch.ones(1, 4))
    rates = []
    for curvature, rise in [(1.0, 2.0), (10.0, 2.0), (0.1, 2.0), (0.1, 1.5), (0.1, 1.0)]:
        sampler.adapt([curvature], rise=rise)
        rates.append(sampler.param_groups[0]["rate"])
    first, *rest = rates
    assert [r / first for r in rest] == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_a_given_lambda_is_never_adapted() -> None:
    sampler, _ = one_group(lam=0.5)
    feed(sampler, torch.full((3, 4), 10.0))
    sampler.adapt([100.0])
    assert sampler.param_groups[0]["lam"] == 0.5
    assert sampler.param_groups[0]["rate"] == pytest.approx(1.0 / (N * 0.5))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise": "gaussian", "summary": "sum"},
        {"noise": "gaussian"},
        {"noise": AlphaStable(2, 2), "summary": "sum"},
    ],
    ids=["outer", "sum", "top", "alpha"],
)
def test_a_new_window_forgets_old_noise(settings: dict[str, Any], generator: torch.Generator) -> None:
    """After noise of size 100 the bound is that of a sampler that never saw it."""
    noise, bounds = torch.randn(16, 4, generator=generator), []
    for before in (torch.full((3, 4), 100.0), torch.zeros(0, 4)):
        sampler, _ = one_group(**settings)
        feed(sampler, before)
        sampler.forget_noise()
        feed(sampler, noise)
        bounds.append(float(sampler.noise_bound(sampler.param_groups[0])))
    assert bounds[0] == pytest.approx(bounds[1], rel=0.5)  # the power iteration may start elsewhere


# ------------------------------------------------------------------------------------------------ I-SGD: the step


def test_a_step_with_the_diagonal_correction(unit_innovations: Tensor) -> None:
    sampler, theta = one_group(correction="diagonal", lam=8.0)
    variance = torch.tensor([0.0, 4.0, 16.0, 25.0])
    feed(sampler, variance.sqrt()[None])
    move = step(sampler, theta, torch.ones(4))
    w = (16.0 - variance).clamp_min(0).sqrt() * unit_innovations
    torch.testing.assert_close(move, -(1.0 / (N * 8.0)) * (1.0 + w))
    assert sampler.clipped_share(sampler.param_groups[0]) == 0.5


def test_a_step_with_the_outer_correction(unit_innovations: Tensor) -> None:
    sampler, theta = one_group(lam=8.0)
    d = torch.tensor([2.0, 0.0, 2.0, 0.0])
    move = step(sampler, theta, torch.ones(4), noise=d)
    along = (unit_innovations @ d) / (d @ d) * d
    w = 4.0 * (unit_innovations - (1 - math.sqrt(1 - 8.0 / 16.0)) * along)
    torch.testing.assert_close(move, -(1.0 / (N * 8.0)) * (1.0 + w))


@pytest.mark.parametrize("scheme", ["a", "b"])
def test_schemes_a_and_b_train_at_the_bayesian_rate_then_sample(scheme: str, unit_innovations: Tensor) -> None:
    sampler, theta = one_group(scheme=scheme, noise="gaussian", summary="sum", warmup=2, temperature=0.25)
    gradient = torch.tensor([2.0, 0.0, 0.0, 0.0])
    for _ in range(2):  # |g|^2 / 2 = 2 = lambda
        torch.testing.assert_close(step(sampler, theta, gradient), -gradient / (N * 2.0))
    assert not sampler.warming
    w = torch.tensor([0.0, 2.0, 2.0, 2.0]) * unit_innovations
    torch.testing.assert_close(step(sampler, theta, gradient), -0.25 / (N * 2.0) * (gradient + w))


def test_scheme_c_stays_while_it_estimates() -> None:
    sampler, theta = one_group(scheme="c", noise="gaussian", summary="sum", warmup=2, temperature=1e-3)
    for _ in range(2):
        assert not step(sampler, theta, torch.ones(4)).any()
    assert sampler.param_groups[0]["lam"] == pytest.approx(2.0)
    assert step(sampler, theta, torch.ones(4)).all()


@pytest.mark.parametrize(("temperature", "warns"), [(1.0, True), (1e-2, True), (1e-3, False)])
def test_a_frozen_mode_at_high_temperature_is_warned_of(temperature: float, warns: bool) -> None:
    if warns:
        with pytest.warns(SamplingWarning, match=f"frozen mode, but at temperature {temperature}.*scheme='windowed'"):
            one_group(scheme="c", temperature=temperature)
    else:
        one_group(scheme="c", temperature=temperature)


def test_presets_name_the_papers_rows() -> None:
    rows = {name + suffix for name in ("alpha-a", "alpha-c", "G-b", "G-c") for suffix in ("", "-slr")}
    assert set(PRESETS) == rows | {"windowed"}
    for name in rows:
        sampler = ISGD.preset(name, [("w", torch.zeros(2, requires_grad=True))], num_data=N, temperature=1e-3)
        noise, scheme = name.removesuffix("-slr").split("-")
        assert isinstance(sampler.estimator, AlphaStable) == (noise == "alpha")
        assert (sampler.scheme, sampler.correction, sampler.estimator.centred) == (scheme, "diagonal", False)
        assert sampler.summary == ("max" if noise == "alpha" else "sum")
        assert (sampler.structure.name == "single") == name.endswith("slr")
    changed = ISGD.preset("G-b", [("w", torch.zeros(2, requires_grad=True))], num_data=N, summary="max")
    assert changed.summary == "max"


def test_the_windowed_preset_slows_down_where_noise_leaps(generator: torch.Generator) -> None:
    """A chain that leaves a mode for much noise does not keep its high rate until the window ends."""
    theta = torch.ones(50, requires_grad=True)
    settings: dict[str, Any] = {"num_data": N, "batch_size": 10, "warmup": 800, "temperature": 1.0}
    sampler, rates = ISGD.preset("windowed", [("w", theta)], **settings), list[float]()
    for step in range(160):
        theta.grad = (0.01 if step < 110 else 1.0) * torch.randn(50, generator=generator)
        sampler.step()
        rates.append(sampler.param_groups[0].get("rate") or math.nan)
    assert rates[109] == rates[101] and max(rates[120:]) < 1e-2 * rates[109]


def test_a_windowed_warmup_that_time_cuts_has_the_rate_of_its_noise(generator: torch.Generator) -> None:
    theta = torch.ones(50, requires_grad=True)
    settings: dict[str, Any] = {"num_data": N, "batch_size": 10, "warmup": 800, "temperature": 1.0}
    sampler, sizes = ISGD.preset("windowed", [("w", theta)], **settings), list[float]()
    for _ in range(125):
        theta.grad = torch.randn(50, generator=generator)
        sampler.step()
    sizes.append(sampler.param_groups[0]["lam"])
    sampler.cut_warmup()
    sizes.append(sampler.param_groups[0]["lam"])
    assert sizes[0] > 10 * sizes[1] and sizes[1] == pytest.approx(sampler.noise_bound(sampler.param_groups[0]))
    assert not sampler.warming and sampler.param_groups[0]["rate"] == pytest.approx(1 / (N * sizes[1]))


def test_the_windowed_preset_takes_four_times_the_noise_in_windows(generator: torch.Generator) -> None:
    """No step in the first window; then lambda is 64 times 4 max v / 2, and falls by half at most every 20 steps."""
    theta = torch.zeros(3, requires_grad=True)
    settings = {"num_data": N, "temperature": 0.5, "batch_size": 8, "warmup": 300, "generator": generator}
    sampler = ISGD.preset("windowed", [("w", theta)], **settings)
    spread = torch.tensor([1.0, 2.0, 3.0])
    seen = []
    for step in range(301):
        theta.grad = torch.zeros(3)
        scale = 1.0 if step < 100 else 0.1
        sampler.step(noise=[scale * spread * torch.randn(3, generator=generator)] if step < 300 else None)
        seen.append(sampler.param_groups[0]["lam"])
        assert step < 99 or float(theta.detach().abs().min()) > 0
        assert step >= 99 or torch.equal(theta, torch.zeros(3))
    assert seen[98] is None and len(set(seen[99:])) == 11  # set after 100, 120, ..., 300 steps
    assert seen[99] == pytest.approx(64 * 4 * 9 / 2, rel=0.5) and seen[300] == pytest.approx(seen[99] / 2**10)
    assert sampler.param_groups[0]["rate"] == pytest.approx(0.5 / (N * seen[300])) and sampler.param_groups[0]["frozen"]


def test_safety_multiplies_the_bound_by_the_noise_and_goes_with_layers_only() -> None:
    groups = [("w", torch.zeros(2, requires_grad=True))]
    found = []
    for safety in (1.0, 3.0):
        sampler = ISGD(groups, num_data=N, noise="gaussian", summary="max", safety=safety)
        sampler.observe([torch.tensor([1.0, 2.0])])
        found.append(float(sampler.noise_bound(sampler.param_groups[0])))
    assert found[1] == pytest.approx(3 * found[0])
    with pytest.raises(ValueError, match=r"safety = 0.5 must be a number of at least 1"):
        ISGD(groups, num_data=N, safety=0.5)
    with pytest.raises(ValueError, match=r"safety = 2.0 multiplies one lambda for each layer: structure 'diagonal'"):
        ISGD(groups, num_data=N, safety=2.0, structure="diagonal", batch_size=8)
    assert ISGD(groups, num_data=N, safety=2.0, structure="auto", batch_size=8).structure.name == "layer"


def test_noise_that_is_not_followed_after_the_warm_up_leaves_steps_to_a_program() -> None:
    for every, followed in ((1, True), (None, False)):
        theta = torch.zeros(2, requires_grad=True)
        sampler = ISGD.preset("G-c", [("w", theta)], num_data=N, temperature=1e-3, warmup=5, track_every=every)
        for _ in range(8):
            theta.grad = torch.ones(2)
            sampler.step()
        assert sampler.param_groups[0]["seen"] == (8 if followed else 5)
        assert isinstance(sampler.program(), str) == followed
    with pytest.raises(ValueError, match="track_every = 0 must be at least 1, or None"):
        ISGD([("w", torch.zeros(2, requires_grad=True))], num_data=N, track_every=0)


# ------------------------------------------------------------------------------------------------ SGLD, SGHMC, V-SGD


def test_sgld_and_its_annealing(unit_innovations: Tensor) -> None:
    sampler, theta = one_group(kind=SGLD, lr=0.1, decay=0.55, offset=10.0, temperature=0.3)
    for t in range(3):
        rate = 0.1 * (1 + t / 10) ** -0.55
        expected = -rate * (1.0 + math.sqrt(2 * 0.3 / (N * rate)) * unit_innovations)
        torch.testing.assert_close(step(sampler, theta, torch.ones(4)), expected)


@pytest.mark.parametrize("bounded_by", ["noise", "curvature"])
def test_sgld_keeps_either_bias_small(bounded_by: str) -> None:
    sampler, _ = one_group(kind=SGLD, bias=0.1, temperature=2.0)
    feed(sampler, torch.tensor([[1.0, -1.0, 1.0, 1.0]]).expand(50, 4))  # top eigenvalue 4, b = 2
    curvature = 1e-3 if bounded_by == "noise" else 1e3
    sampler.adapt([curvature])
    rate = sampler.param_groups[0]["rate"]
    if bounded_by == "noise":
        assert rate * N * 2.0 / 2.0 == pytest.approx(0.1, rel=0.05)  # the iteration starts at random
    else:
        assert variance_inflation(rate * curvature) == pytest.approx(1.1)


@pytest.mark.parametrize("corrected", [False, True])
def test_sghmc(corrected: bool, unit_innovations: Tensor) -> None:
    sampler, theta = one_group(kind=SGHMC, lr=0.1, friction=0.2, temperature=0.5, corrected=corrected)
    sigma, d = 0.2 * 0.5 / (N * 0.1), torch.tensor([0.1, 0.0, 0.0, 0.0])
    w = math.sqrt(2 * sigma) * unit_innovations
    if corrected:
        w[0] *= math.sqrt(1 - 0.01 / (2 * sigma))
    velocity = torch.zeros(4)
    for _ in range(3):
        velocity = 0.8 * velocity - 0.1 * (1.0 + w)
        torch.testing.assert_close(step(sampler, theta, torch.ones(4), noise=d), velocity)


@pytest.mark.parametrize("per_layer", [False, True])
def test_vsgd_is_constant_sgd_at_mandts_rate(per_layer: bool) -> None:
    a, b = torch.zeros(4, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    sampler = VSGD([("a.w", a), ("b.w", b)], num_data=N, temperature=0.5, per_layer=per_layer)
    noise = [torch.full((4,), 2.0), torch.full((2, 3), 3.0)]
    sampler.observe(noise)
    sampler.adapt()
    traces, sizes = [4 * 4.0, 6 * 9.0], [4, 6]
    if not per_layer:
        traces, sizes = [sum(traces)] * 2, [sum(sizes)] * 2
    rates = [2 * 0.5 * size / (N * trace) for size, trace in zip(sizes, traces, strict=True)]
    assert [group["rate"] for group in sampler.param_groups] == pytest.approx(rates)
    a.grad, b.grad = torch.ones(4), torch.ones(2, 3)
    sampler.step()
    torch.testing.assert_close(a.detach(), torch.full((4,), -rates[0]))
    torch.testing.assert_close(b.detach(), torch.full((2, 3), -rates[1]))


# ------------------------------------------------------------------------------------------------ cycles


@pytest.mark.parametrize("spacing", [1, 7, 40, 900])
def test_draws_of_cycles_are_equally_far_apart_in_time(spacing: int) -> None:
    """Time is the sum of rates in sampling stages, without their first fifth."""
    schedule = Cycles(200, 0.25)
    group: dict[str, Any] = {**schedule.settings(), "step": 17, "start": 17, "peak": 10.0}
    rates = schedule.factors(group, 200)[50:, 0]
    assert float(rates.sum()) == pytest.approx(schedule.stage(group), rel=0.02)
    late = rates.cumsum(0) >= SPREAD * rates.sum()
    counted = torch.cat([torch.zeros(50), (rates * late).float()]).double().tolist()
    time, total, first = 0.0, 0.0, schedule.steps_to(group, spacing, draws=5)
    for draw in range(1, 6):
        steps = schedule.steps_to(group, spacing)
        before = group["step"] - 17
        passed = [counted[(before + i) % 200] for i in range(steps)]
        group["step"] += steps
        total, time = total + sum(passed), draw * spacing
        assert time - 1e-3 <= total < time + 1.0 and passed[-1] > 0
    assert group["step"] - 17 == first


def test_cycles_are_as_long_as_the_spacing_asks_for() -> None:
    free, given = Cycles(None, 0.25), Cycles(300, 0.25)
    group, own = dict(free.settings()), dict(given.settings())
    free.fit([group], 100)
    given.fit([own], 100)
    assert free.stage(group) * (1 - SPREAD) == pytest.approx(STAGE_DRAWS * 100, rel=1e-3) and own["cycle"] == 300
