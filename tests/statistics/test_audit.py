"""An audit's verdicts against what loops do: faults of published code, rewritten small, run on a known posterior.

Each faulty rule stands here twice: as an optimizer of our own writing, and as the description that a user would give.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.optim import Optimizer

import isosgd
from isosgd.diagnostics.audit import Loop, audit
from isosgd.diagnostics.audit.measure import ConjugateTarget, measure

pytestmark = pytest.mark.quick


def agrees(seen, within=0.05):
    """Measured and expected agree, by 4 standard errors and by a relative error."""
    off = abs(seen.temperature - seen.expected)
    return off <= max(4 * seen.error, 1e-3 * seen.expected) and off <= within * seen.expected


class DescribedLoop(Optimizer):
    """A description as an optimizer; gradients in ``.grad`` are those of its loss. For replicas it is their mean."""

    def __init__(self, params, loop, seed=0):
        super().__init__(params, {"lr": loop.lr, "step": 0})
        self.loop = loop
        known = (loop.lr * loop.scale) ** 2 * (loop.gradient_noise or 0.0) if loop.corrected else 0.0
        self.sigma = math.sqrt(max(loop.sigma**2 - known, 0.0))  # the gradients contribute the rest
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self):
        loop, group = self.loop, self.param_groups[0]
        step = group["step"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update(velocity=torch.zeros_like(p), noise=torch.zeros_like(p))
            last = state["noise"]
            if step % loop.reused == 0:
                state["noise"] = p.new_empty((loop.replicas, *p.shape)).normal_(generator=self.generator).mean(0)
            noise = 0.5 * (last + state["noise"]) if loop.averaged else state["noise"]
            self._move(p, p.grad, state["velocity"], self.sigma * noise, step)
        group["step"] += 1

    def _move(self, p, g, v, noise, step):
        loop = self.loop
        # A loop that moves first has its gradient where the last step's move ended: it is refreshed after the kick.
        refreshed = loop.refresh_every is not None and (step + (loop.order == "move")) % loop.refresh_every == 0
        if refreshed and loop.order == "kick":
            v.normal_(0.0, loop.momentum_noise, generator=self.generator)
        v.mul_(loop.momentum).sub_(g if loop.decoupled else g + loop.weight_decay * p, alpha=loop.lr)
        if loop.noise_on == "velocity":
            v.add_(noise)
        if refreshed and loop.order == "move":
            v.normal_(0.0, loop.momentum_noise, generator=self.generator)
        if loop.decoupled:
            p.mul_(1.0 - loop.lr * loop.weight_decay)
        p.add_(v)
        if loop.noise_on == "parameters":
            p.add_(noise)


class Langevin(Optimizer):
    """SGLD as it should be, for a mean loss; the faults below change one thing each."""

    def __init__(self, params, lr, num_data):
        super().__init__(params, {"lr": lr})
        self.num_data = num_data

    def sigma(self):
        return math.sqrt(2 * self.defaults["lr"] / self.num_data)

    def draw(self, p):
        return torch.randn_like(p)

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.defaults["lr"] * p.grad)
            p.add_(self.sigma() * self.draw(p))


class WithoutN(Langevin):
    """The noise knows nothing of the data."""

    def sigma(self):
        return math.sqrt(2 * self.defaults["lr"])


class Momentum(Optimizer):
    """SGHMC with N in the noise, at a temperature that the script sets to 1/N."""

    def __init__(self, params, lr, num_data, friction, weight_decay):
        super().__init__(params, {"lr": lr, "momentum": 1 - friction, "weight_decay": weight_decay})
        self.variance = 2 * lr * friction * (1 / num_data) / num_data

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for p in group["params"]:
            v = self.state[p].setdefault("v", torch.zeros_like(p))
            v.mul_(group["momentum"]).sub_(group["lr"] * (p.grad + group["weight_decay"] * p))
            v.add_(self.variance**0.5 * torch.randn_like(p))
            p.add_(v)


class Refreshing(Optimizer):
    """Trajectories of ten steps that move, then kick; each starts from a velocity of unit variance, whatever T is."""

    def __init__(self, params, lr, friction, temperature, length):
        super().__init__(params, {"lr": lr, "momentum": 1 - friction, "count": 0})
        self.sigma, self.length = math.sqrt(2 * lr * friction * temperature), length

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        group["count"] += 1
        for p in group["params"]:
            v = self.state[p].setdefault("v", torch.zeros_like(p))
            v.mul_(group["momentum"]).sub_(group["lr"] * p.grad).add_(self.sigma * torch.randn_like(p))
            if group["count"] % self.length == 0:
                v.copy_(math.sqrt(group["lr"]) * torch.randn_like(p))
            p.add_(v)


class KeyTwice(Langevin):
    """A key is made every other step."""

    def __init__(self, params, lr, num_data):
        super().__init__(params, lr, num_data)
        self.param_groups[0]["count"] = 0
        self.seed = int(torch.randint(2**40, ()))

    def step(self):
        count = self.param_groups[0]["count"]
        self.key = torch.Generator().manual_seed(self.seed + count // 2)
        self.param_groups[0]["count"] = count + 1
        super().step()

    def draw(self, p):
        return torch.randn(p.shape, generator=self.key, dtype=p.dtype)


N = 2000
SGLD = {"num_data": N, "noise": math.sqrt(2e-3 / N), "prior": 1 / N}
# Optimizer, description, the temperature that it amounts to, the fault's name.
FAULTS = {
    "noise without N": (
        lambda p: WithoutN(p, 1e-3, N),
        {**SGLD, "noise": math.sqrt(2e-3)},
        N,
        "N missing in noise",
    ),
    "T and N twice": (
        lambda p: Momentum(p, 1e-2, N, 0.2, 1e-3),
        {"num_data": N, "noise": math.sqrt(2 * 0.2 * 1e-2) / N, "temperature": 1 / N},
        1 / N,
        "N applied twice",
    ),
    "momentum at unit variance": (
        lambda p: Refreshing(p, 1e-5, 0.1, 0.01, 10),
        {
            "num_data": 100,
            "noise": math.sqrt(2 * 0.1 * 1e-5 * 0.01),
            "temperature": 0.01,
            "loss_reduction": "full",
            "momentum_noise": math.sqrt(1e-5),
            "refresh_every": 10,
            "order": "move",
            "prior": 1,
        },
        0.613,
        "momentum refreshed at the wrong variance",
    ),
    "key twice": (
        lambda p: KeyTwice(p, 1e-3, N),
        {**SGLD, "reused": 2},
        2.0,
        "one random key used twice",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_stated_temperature_is_the_one_measured(fault):
    """Within 5% of what the optimizer shows, gradient noise and discretisation included or not, and within errors."""
    make, description, temperature, name = FAULTS[fault]
    found = audit(make, check=True, **description)
    seen = found.measured
    assert found.temperature == pytest.approx(temperature, rel=2e-3)
    assert name in [b.name for b in found.findings]
    assert seen.error < 0.02 * seen.temperature  # so that 5% can be told
    assert abs(seen.temperature / found.temperature - 1) < 0.05
    assert agrees(seen), seen


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_target_has_the_gradients_it_says(reduction):
    loop = Loop(num_data=N, lr=1e-3, noise=0, gradient_noise=0.3, batch_size=16, loss_reduction=reduction)
    target = ConjugateTarget(loop, torch.Generator().manual_seed(0))
    theta = torch.full((target.data.shape[1],), 0.2, dtype=torch.float64)
    pairs = [target.gradient(theta) for _ in range(2000)]
    g, noise = (torch.stack(found) / loop.scale for found in zip(*pairs, strict=True))
    wanted = target.likelihood * (theta - target.data.mean(0))
    error = math.sqrt(0.3 / len(g))
    assert float(((g.mean(0) - wanted) / error).square().mean()) == pytest.approx(1.0, abs=0.3)
    for found in (g.var(0), noise.square().mean(0)):  # the noise vector has the variance of the gradient
        assert abs(found.mean() - 0.3) < 4 * found.std() / math.sqrt(len(found))


@pytest.mark.parametrize(
    "fault", ["noise without N", pytest.param("momentum at unit variance", marks=pytest.mark.long)]
)
def test_the_description_alone_runs_alike(fault):
    make, description, *_ = FAULTS[fault]
    lr = make([torch.zeros(1)]).defaults["lr"]
    momentum = make([torch.zeros(1)]).defaults.get("momentum", 0.0)
    loop = Loop(lr=lr, momentum=momentum, **description)
    seen = measure(loop, lambda p: DescribedLoop(p, loop), seed=3)
    assert agrees(seen), seen


OTHERS = {
    "summed": {
        "loss_reduction": "sum",
        "batch_size": 32,
        "noise": math.sqrt(2e-3 / N),
        "prior": 1,
        "prior_precision": 2.0,
    },
    "noise on parameters": {"noise": math.sqrt(2e-3 / N), "noise_on": "parameters", "momentum": 0.8},
    "decoupled decay": {"noise": math.sqrt(0.4e-3 / N), "momentum": 0.8, "weight_decay": 1e-2, "decoupled": True},
    "loud gradients": {"noise": math.sqrt(2e-3 / N), "gradient_noise": 0.4, "batch_size": 50},
    "replicas": {"noise": math.sqrt(2e-3 / N), "replicas": 4},
    "corrected": {"noise": math.sqrt(2e-3 / N), "corrected": True, "gradient_noise": 0.5},
    "averaged": {"noise": math.sqrt(2e-3 / N), "averaged": True, "gradient_noise": 0.3, "curvature": 300.0},
}


OFTEN = {"summed", "decoupled decay", "corrected"}


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in OTHERS]
)
def test_other_descriptions_do_what_is_stated(name):
    """Each at its own seed: the tests are independent."""
    seed, loop = sorted(OTHERS).index(name), Loop(num_data=N, lr=1e-3, **OTHERS[name])
    seen = measure(loop, lambda p: DescribedLoop(p, loop, seed), seed)
    assert agrees(seen), seen


def test_a_wrong_description_does_not_agree():
    """These tests can fail: noise halved."""
    right = Loop(num_data=N, lr=1e-3, momentum=0.8, noise=math.sqrt(0.4e-3 / N))
    halved = replace(right, noise=0.5 * right.noise)
    seen = measure(right, lambda p: DescribedLoop(p, halved))
    assert not agrees(seen) and abs(seen.temperature - seen.expected) > 10 * seen.error


# -- faults found by running ------------------------------------------------------------------------------------------


def checked(make, **description):
    return audit(make, check=True, num_data=N, prior=1 / N, **description)


def names(found):
    return {finding.name for finding in found.findings}


def test_a_right_optimizer_passes_the_check():
    found = checked(lambda p: Langevin(p, 1e-3, N))
    assert found.clean, found
    assert found.temperature is None  # the optimizer does not say what its noise is ...
    assert abs(found.measured.temperature - 1) < 0.05  # ... but shows it


@pytest.mark.parametrize(
    ("make", "description", "wanted"),
    [
        (lambda p: WithoutN(p, 1e-3, N), {}, {"N missing in noise"}),
        (lambda p: WithoutN(p, 1e-3, N), {"noise": math.sqrt(2e-3 / N)}, {"not as described"}),
        (lambda p: KeyTwice(p, 1e-3, N), {"noise": math.sqrt(2e-3 / N)}, {"not as described"}),
    ],
    ids=["without N", "not as described", "key twice"],
)
def test_running_finds_the_fault(make, description, wanted):
    found = checked(make, **description)
    assert names(found) == wanted, found


SAMPLERS = {
    "sgld": lambda p: isosgd.SGLD(p, num_data=N, lr=1e-3),
    "sghmc": lambda p: isosgd.SGHMC(p, num_data=N, lr=1e-3, temperature=0.3, friction=0.4),
    "isgd": lambda p: isosgd.ISGD(p, num_data=N),
    "isgd diagonal": lambda p: isosgd.ISGD(p, num_data=N, structure="diagonal", batch_size=64),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_our_samplers_pass_the_check(name):
    found = audit(SAMPLERS[name], check=True)
    assert found.clean, found
    assert agrees(found.measured), found.measured


def test_a_wrong_n_shows_in_the_draws():
    found = audit(SAMPLERS["sgld"], num_data=10 * N, check=True)
    assert names(found) == {"wrong N"}
    assert found.temperature == pytest.approx(10.0)
    assert abs(found.measured.temperature / 10.0 - 1) < 0.05
