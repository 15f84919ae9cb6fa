"""Every sampler in the loop that everybody writes: loss, backward, step; told ``num_data`` and ``batch_size`` alone."""

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd import ISGD, METHODS, SamplingWarning

N, SIZE, NOISE, WARMUP = 400, 40, 0.5, 300
OPTIMIZERS = {name: kind for name, kind in METHODS.items() if name != "hmc"}
every_sampler = pytest.mark.parametrize("name", OPTIMIZERS)
with_a_rate = pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.has_lr])
without_one = pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if not kind.has_lr])


class Loop:
    """Linear regression with known noise and a flat prior."""

    def __init__(self, name: str, seed: int = 0, **settings: Any) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(N, 2, generator=self.generator)
        noise = NOISE * torch.randn(N, 1, generator=self.generator)
        self.y = self.x @ torch.tensor([[1.0], [-2.0]]) + 0.5 + noise
        torch.manual_seed(seed)  # of the model and the sampler
        self.model = nn.Linear(2, 1)
        self.optimizer = METHODS[name](self.model.parameters(), **{"num_data": N, "batch_size": SIZE, **settings})

    def loss(self, size: int = SIZE) -> Tensor:
        rows = torch.randint(N, (size,), generator=self.generator)
        return (self.model(self.x[rows]) - self.y[rows]).square().mean() / (2 * NOISE**2)

    def step(self, accumulate: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(accumulate):
            (self.loss(SIZE // accumulate) / accumulate).backward()
        self.optimizer.step()

    def losses(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            found.append(loss.item())
        return found

    def place(self) -> Tensor:
        return torch.cat([self.model.weight.detach().flatten(), self.model.bias.detach()])

    def steps(self, count: int, accumulate: int = 1) -> Tensor:
        """The places that count as draws."""
        found = []
        for _ in range(count):
            self.step(accumulate)
            if self.optimizer.draws_ready:
                found.append(self.place())
        return torch.stack(found) if found else torch.empty(0, 3)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviations of the posterior."""
        x = torch.cat([self.x, torch.ones(N, 1)], 1).double()
        covariance = torch.linalg.inv(x.T @ x) * NOISE**2
        return (covariance @ x.T @ self.y.double() / NOISE**2).flatten(), covariance.diagonal().sqrt()

    def saved(self) -> dict[str, Any]:
        """A copy of all states."""
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**states, "batches": self.generator.get_state()})

    def load(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.generator.set_state(saved["batches"])


def resumed(name: str, saved: dict[str, Any], **settings: Any) -> Loop:
    """A loop whose model, sampler and batches began otherwise, and go on from a saved state."""
    found, data = Loop(name, seed=99, **settings), Loop(name)
    found.x, found.y = data.x, data.y
    found.load(saved)
    return found


class Course:
    """One loop through its warm-up, and ten steps on; tests only read it."""

    def __init__(self, name: str) -> None:
        self.loop = Loop(name, warmup=WARMUP)
        self.phases, self.ready, self.places = list[str](), list[bool](), list[Tensor]()
        self.states = dict[int, dict[str, Any]]()
        for step in range(WARMUP + 11):
            if step:
                self.loop.step()
            self.phases.append(self.loop.optimizer.phase)
            self.ready.append(self.loop.optimizer.draws_ready)
            self.places.append(self.loop.place())
            if step in (0, 30, 160, 200, 250, WARMUP):
                self.states[step] = self.loop.saved()


course = functools.cache(Course)


@pytest.fixture(autouse=True)
def unsettled_is_no_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the warm-up of .* steps did not settle", SamplingWarning)
        yield


@every_sampler
def test_a_plain_loop_comes_to_sample_near_the_posterior(name: str) -> None:
    found = course(name)
    assert list(dict.fromkeys(found.phases)) == ["optimising", "warming up", "sampling"]
    assert found.phases.index("sampling") == WARMUP and not any(found.ready[:WARMUP])
    assert found.loop.optimizer.draws_ready == found.loop.optimizer.sampling
    mean, deviation = found.loop.exact()
    assert (((found.places[WARMUP] - mean) / deviation).abs() < 8).all()
    assert not torch.equal(found.places[WARMUP], found.places[WARMUP + 1])


@every_sampler
def test_a_state_saved_in_the_warmup_resumes_bit_for_bit(name: str) -> None:
    found, seen = course(name), set()
    for at, more in ((0, 30), (30, 10), (160, 10), (200, 40), (250, 60)):
        other = resumed(name, found.states[at], warmup=WARMUP)
        assert other.optimizer.phase == found.phases[at]
        seen.add(other.optimizer.phase)
        other.steps(more)
        assert torch.equal(other.place(), found.places[at + more]), at
        assert other.optimizer.phase == found.phases[at + more]
    assert seen == {"optimising", "warming up"} and other.optimizer.phase == "sampling"


@every_sampler
def test_a_state_from_before_the_first_step_begins_anew(name: str) -> None:
    loop = Loop(name, warmup=WARMUP)
    saved = loop.saved()
    loop.steps(30)
    loop.load(saved)
    loop.steps(30)
    assert torch.equal(loop.place(), course(name).places[30])


@every_sampler
def test_a_trained_start_is_left_as_it_is(name: str) -> None:
    loop = Loop(name, warmup=100, trained=True)
    start, phases = loop.place(), [loop.optimizer.phase]
    loop.steps(12)
    assert torch.equal(loop.place(), start)  # the noise is measured there
    for at in (12, 60):
        loop.steps(at - loop.optimizer.param_groups[0]["step"])
        other = resumed(name, loop.saved(), warmup=100, trained=True)
        for one in (loop, other):
            one.steps(10)
        assert torch.equal(loop.place(), other.place()), at
        phases.append(loop.optimizer.phase)
    loop.steps(30)
    assert [*phases, loop.optimizer.phase] == [*["warming up"] * 3, "sampling"]


@every_sampler
def test_weight_decay_is_added_for_the_step_alone(name: str) -> None:
    """A decay is a term of the loss; the gradients that the user sees stay as they were."""
    places = []
    for decay in (0.0, 0.3):
        loop = Loop(name, weight_decay=decay, warmup=100)
        for _ in range(80):
            loop.optimizer.zero_grad()
            loss = loop.loss()
            if not decay:
                loss = loss + 0.15 * sum(p.square().sum() for p in loop.model.parameters())
            loss.backward()
            seen = [p.grad.clone() for p in loop.model.parameters()]
            loop.optimizer.step()
            assert all(torch.equal(p.grad, g) for p, g in zip(loop.model.parameters(), seen, strict=True))
        places.append(loop.place())
    torch.testing.assert_close(places[0], places[1], rtol=1e-3, atol=1e-4)


@every_sampler
def test_closures_change_nothing(name: str) -> None:
    found = course(name)
    for at, more in ((0, 20), (160, 10), (250, 60)):
        loop = resumed(name, found.states[at], warmup=WARMUP)

        def closure(loop: Loop = loop) -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            return loss

        for _ in range(more):
            assert loop.optimizer.step(closure).item() > 0
        assert torch.equal(loop.place(), found.places[at + more]), at


@pytest.mark.parametrize("name", ["isgd", "sgld", "sgnht"])
def test_compiled_steps_change_nothing(name: str) -> None:
    """Through the phases of the warm-up; compiled steps of others are in test_family.py."""
    plain, compiled = Loop(name, warmup=120), Loop(name, warmup=120)
    step = torch.compile(compiled.optimizer.step, backend="eager")
    for _ in range(130):
        plain.step()
        compiled.optimizer.zero_grad()
        compiled.loss().backward()
        step()
    assert torch.equal(plain.place(), compiled.place())


# ------------------------------------------------------------------------------------------------ rates


@without_one
@pytest.mark.parametrize(
    "make",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, 100, cycle_momentum=False),
        lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt),
        lambda opt: opt.param_groups[0].__setitem__("lr", 0.1),
    ],
    ids=["step", "one cycle", "plateau", "by hand"],
)
def test_a_sampler_that_finds_its_rate_refuses_schedulers(name: str, make: Any) -> None:
    with pytest.raises(ValueError, match="finds its rate itself, from the gradient noise; leave lr and schedulers out"):
        make(Loop(name).optimizer)
    with pytest.raises(ValueError, match=r"lr = 0.1: .* finds its rate itself"):
        Loop(name, lr=0.1)


@with_a_rate
def test_a_scheduler_sets_the_rate_that_a_step_has(name: str) -> None:
    loop = Loop(name, lr=1e-6)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3, gamma=0.5)
    rates = []
    for _ in range(7):
        loop.step()
        rates.append(loop.optimizer.param_groups[0]["rate"])
        scheduler.step()
    assert rates == pytest.approx([1e-6] * 3 + [5e-7] * 3 + [2.5e-7])
    assert loop.optimizer.phase == "sampling"
    other = resumed(name, loop.saved(), lr=1e-6)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-7)


@with_a_rate
def test_a_rate_that_the_warmup_finds_cannot_be_scheduled_before_and_can_be_after(name: str) -> None:
    with pytest.raises(ValueError, match="finds its rate in its warm-up; give lr="):
        torch.optim.lr_scheduler.StepLR(Loop(name, warmup=WARMUP).optimizer, 10)
    loop = resumed(name, course(name).states[WARMUP], warmup=WARMUP)
    found = loop.optimizer.param_groups[0]["lr"]
    assert loop.optimizer.phase == "sampling" and found == loop.optimizer.param_groups[0]["rate"]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    loop.step()
    scheduler.step()
    loop.step()
    assert loop.optimizer.param_groups[0]["rate"] == pytest.approx(0.5 * found)


def test_groups_have_rates_and_decays_of_their_own() -> None:
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1, "weight_decay": 0.5}, {"params": [model.bias]}]
    sampler = isosgd.SGLD(groups, num_data=100, lr=0.01, temperature=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    sampler.step()
    torch.testing.assert_close(model.weight.detach(), before[0] - 0.1 * (1 + 0.5 * before[0]))
    torch.testing.assert_close(model.bias.detach(), before[1] - 0.01)
    with pytest.raises(ValueError, match="group '1' has no lr and others have one"):
        isosgd.SGLD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}], num_data=100)


# ------------------------------------------------------------------------------------------------ groups


def test_parameters_without_names_make_a_group_of_each_layer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    found = isosgd.SGLD(model.parameters(), num_data=10, lr=0.1).param_groups
    assert [[tuple(p.shape) for p in group["params"]] for group in found] == [
        [(4, 1, 3, 3), (4,)], [(4,)], [(4,)], [(3, 4), (3,)], [(2, 3)],
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.can_add_groups])
def test_a_group_can_be_added(name: str) -> None:
    loop = Loop(name, warmup=120, **({"structure": "layer"} if name == "isgd" else {}))
    loop.steps(125)
    assert loop.optimizer.phase == "sampling"
    more = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="two groups have the name '0'"):
        loop.optimizer.add_param_group({"name": "0", "params": [more]})
    loop.optimizer.add_param_group({"params": [more]})
    assert loop.optimizer.phase == "optimising" and not loop.optimizer.draws_ready
    for _ in range(120):
        loop.optimizer.zero_grad()
        (loop.loss() + (more - torch.randn(40, 2).mean(0)).square().sum() / 2).backward()
        loop.optimizer.step()
    assert loop.optimizer.phase == "sampling" and (more != 0).all()


def test_a_model_that_fits_every_example_has_no_noise_and_says_so() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(2, 1), torch.randn(100, 2)
    sampler = ISGD(model.parameters(), num_data=100, batch_size=20)
    with pytest.raises(RuntimeError, match="fits every example exactly"):
        for _ in range(3_000):
            rows = x[torch.randint(100, (20,))]
            sampler.zero_grad()
            (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
            sampler.step()


@with_a_rate
def test_steps_of_a_warmup_at_a_given_rate_are_no_draws(name: str) -> None:
    loop = Loop(name, warmup=120, lr=1e-4)
    assert not len(loop.steps(119))
    loop.steps(2)
    assert loop.optimizer.phase == "sampling"


@pytest.mark.parametrize(("name", "width"), [("isgd", 60), ("isgd", 2), ("sgld", 60)])
def test_a_parameter_that_is_never_used_is_named(name: str, width: int) -> None:
    loop = Loop(name)
    sampler = METHODS[name]([*loop.model.parameters(), nn.Parameter(torch.ones(width, 4))], num_data=N, batch_size=SIZE)
    loop.optimizer = sampler
    with pytest.raises(RuntimeError, match=rf"shape \({width}, 4\) in group '1' had no gradient in 20 steps"):
        loop.steps(100)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.long
def test_a_small_network_does_not_run_away(trained: bool) -> None:
    """With a full matrix, and no curvature to check it by, rates fell to 1e-9 or the loss was not finite."""
    loop = Loop("isgd")
    loop.model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), 1e-2)
    loop.losses(300)
    loop.optimizer = ISGD(
        loop.model.parameters(), num_data=N, batch_size=SIZE, trained=trained, temperature=0.01, warmup=600
    )
    assert sum(loop.losses(800)[-200:]) / 200 < 1.0  # half of the residuals' squares over their variance
    assert min(group["rate"] for group in loop.optimizer.param_groups) > 1e-6


@pytest.mark.parametrize("preset", isosgd.PRESETS)
def test_a_parameter_that_is_never_used_is_named_by_schemes_too(preset: str) -> None:
    """One got a rate of 1e32."""
    loop = Loop("isgd")
    params = [*loop.model.parameters(), nn.Parameter(torch.ones(3, 4))]
    settings = {"num_data": N, "batch_size": SIZE, "temperature": 1e-3}
    for warmup, steps in ((200, 20), (10, 10)):
        loop.optimizer = ISGD.preset(preset, params, warmup=warmup, **settings)
        with pytest.raises(RuntimeError, match=rf"shape \(3, 4\) in group '1' had no gradient in {steps} steps"):
            loop.steps(steps)


def test_parameters_that_are_frozen_or_unfrozen_on_the_way_are_refused() -> None:
    loop = Loop("isgd", lam=1.0)
    loop.steps(10)
    loop.model.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="has no gradient, while others of the group have"):
        loop.steps(1)
    loop.optimizer = isosgd.SGLD(loop.model.parameters(), num_data=N, lr=1e-4)
    before = loop.model.bias.clone()
    loop.steps(10)
    assert torch.equal(loop.model.bias, before)
    loop.model.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"shape \(1,\) was frozen when this SGLD was made"):
        loop.steps(64)


def test_copies_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(TypeError, match="by load_state_dict"):
        copy.deepcopy(Loop("isgd").optimizer)
    layer = nn.Embedding(5, 2, sparse=True)
    sampler = ISGD(layer.parameters(), num_data=N, batch_size=SIZE)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="make its layer with sparse=False"):
        sampler.step()
