"""The temperature meter on samplers that are right, and on each faulty rule that was seen in the field.

Every rule is a small loop over a linear regression whose posterior is known; chains start in equilibrium at the
temperature asked for, so that nothing but the rule can be wrong. The faults are those of other libraries: noise without
N, N and T applied twice, momentum refreshed at unit variance whatever T is, one random key used twice, chains that
share their state, burn-in that ends too early.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import Posterior, SamplingWarning, Target, priors, sample
from isosgd.demo.toy import Toy
from isosgd.diagnostics import Verdict

NUM_DATA, DIM, CHAINS, DRAWS, BATCH = 200, 10, 4, 200, 40
State = dict[str, Any]
Rule = Callable[[Tensor, Tensor, float, float, torch.Generator, State], Tensor]
TEMPERATURES = [1.0, 0.1, 0.01]


class Regression:
    """Data, target and exact posterior N(mean, T inv(N curvature))."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_DATA, DIM, generator=g) * torch.linspace(1.0, 0.6, DIM)
        self.y = self.x @ torch.randn(DIM, generator=g) + torch.randn(NUM_DATA, generator=g)
        self.curvature = (self.x.T @ self.x + torch.eye(DIM)) / NUM_DATA
        self.mean = torch.linalg.solve(self.curvature, self.x.T @ self.y / NUM_DATA)
        half = DIM // 2

        def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
            x, y = batch
            return -0.5 * (y - x[:, :half] @ params["a"] - x[:, half:] @ params["b"]) ** 2

        start = {"a": torch.zeros(half), "b": torch.zeros(DIM - half)}
        self.target = Target(log_likelihood, priors.Normal(1.0), init=start)

    def gradient(self, theta: Tensor, batch: int | None, g: torch.Generator) -> Tensor:
        """Of the mean loss, of all data or of a minibatch for each chain."""
        if batch is None:
            return (theta - self.mean) @ self.curvature
        rows = torch.randint(NUM_DATA, (len(theta), batch), generator=g)
        x = self.x[rows]
        residual = torch.einsum("cnd,cd->cn", x, theta) - self.y[rows]
        return torch.einsum("cnd,cn->cd", x, residual) / batch + theta / NUM_DATA

    def run(
        self,
        rule: Rule,
        temperature: float,
        *,
        chains: int = CHAINS,
        seed: int = 1,
        delta: float = 0.04,
        batch: int | None = None,
        start: float | None = None,
    ) -> Posterior:
        """Draws of chains that follow a rule.

        Args:
            rule: from parameters, mean gradient, rate, temperature, generator and a state to parameters.
            temperature: T that was asked for.
            chains: number of chains.
            seed: of everything.
            delta: rate times the largest curvature.
            batch: examples in a gradient; all of them when None.
            start: where chains start, in every parameter; in equilibrium when None.
        """
        g = torch.Generator().manual_seed(seed)
        values = torch.linalg.eigvalsh(self.curvature)
        rate = float(delta / values[-1])
        root = torch.linalg.cholesky(torch.linalg.inv(self.curvature) * temperature / NUM_DATA)
        theta = self.mean + torch.randn(chains, DIM, generator=g) @ root.T
        theta = theta if start is None else torch.full_like(theta, start)
        every = math.ceil(0.5 / (rate * float(values[0])))
        kept, state = [], State()
        for step in range((DRAWS if start is not None else DRAWS + 5) * every):
            theta = rule(theta, self.gradient(theta, batch, g), rate, temperature, g, state)
            if step % every == every - 1:
                kept.append(theta)
        draws = torch.stack(kept[-DRAWS:], 1)
        info = {"temperature": temperature, "num_data": NUM_DATA}
        return Posterior(
            self.target, {"a": draws[..., : DIM // 2], "b": draws[..., DIM // 2 :]}, info, (self.x, self.y)
        )


@pytest.fixture(scope="module")
def regression() -> Regression:
    return Regression()


def normal(theta: Tensor, g: torch.Generator) -> Tensor:
    return torch.randn(theta.shape, generator=g)


def langevin(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    return theta - rate * grad + math.sqrt(2 * rate * t / NUM_DATA) * normal(theta, g)


def hamiltonian(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    """SGHMC with friction 0.1 and mass 1; every 20 steps the momentum is drawn anew, from N(0, T)."""
    return _momentum(theta, grad, rate, t, g, state, refreshed=math.sqrt(t))


def unit_momentum(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    """The same, with momentum from N(0, 1)."""
    return _momentum(theta, grad, rate, t, g, state, refreshed=1.0)


def _momentum(
    theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State, refreshed: float
) -> Tensor:
    step, friction = math.sqrt(rate / NUM_DATA), 0.1
    if state.setdefault("step", 0) % 20 == 0:
        state["p"] = refreshed * normal(theta, g)
    state["step"] += 1
    state["p"] = (1 - friction) * state["p"] - step * NUM_DATA * grad
    state["p"] = state["p"] + math.sqrt(2 * friction * t) * normal(theta, g)
    return theta + step * state["p"]


def without_n(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    return theta - rate * grad + math.sqrt(2 * rate * t) * normal(theta, g)


def n_and_t_twice(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    return theta - rate * grad + math.sqrt(2 * rate) * t / NUM_DATA * normal(theta, g)


def n_twice(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    return theta - rate * grad + math.sqrt(2 * rate * t) / NUM_DATA * normal(theta, g)


def without_two(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    return theta - rate * grad + math.sqrt(rate * t / NUM_DATA) * normal(theta, g)


def one_key_for_both_tensors(
    theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State
) -> Tensor:
    noise = torch.randn(len(theta), DIM // 2, generator=g).repeat(1, 2)
    return theta - rate * grad + math.sqrt(2 * rate * t / NUM_DATA) * noise


def one_key_for_two_steps(
    theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State
) -> Tensor:
    state["step"] = state.get("step", -1) + 1
    if state["step"] % 2 == 0:
        state["noise"] = normal(theta, g)
    return theta - rate * grad + math.sqrt(2 * rate * t / NUM_DATA) * state["noise"]


def one_generator_for_all_chains(
    theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State
) -> Tensor:
    return theta - rate * grad + math.sqrt(2 * rate * t / NUM_DATA) * torch.randn(DIM, generator=g)


def half_the_prior(theta: Tensor, grad: Tensor, rate: float, t: float, g: torch.Generator, state: State) -> Tensor:
    """A weight decay that is not the prior's: it pulls 20 times as hard."""
    return langevin(theta, grad + 20 * theta / NUM_DATA, rate, t, g, state)


FAULTS: dict[str, tuple[Rule, list[float]]] = {
    "noise without N": (without_n, TEMPERATURES),
    "N twice": (n_twice, TEMPERATURES),
    "N and T twice": (n_and_t_twice, [0.1]),
    "noise without its factor 2": (without_two, [1.0]),
    "momentum of unit variance": (unit_momentum, [0.1, 0.01]),  # at T = 1 it is right
    "one key for two tensors": (one_key_for_both_tensors, [1.0, 0.01]),
    "one key for two steps": (one_key_for_two_steps, [1.0]),
    "one generator for all chains": (one_generator_for_all_chains, [1.0]),
    "another prior": (half_the_prior, [0.1]),
}


@pytest.mark.quick
@pytest.mark.parametrize(("rule", "temperature"), [(langevin, 1.0), (hamiltonian, 0.1)])
def test_the_true_temperature_is_read(regression: Regression, rule: Rule, temperature: float) -> None:
    found = regression.run(rule, temperature, chains=16, delta=0.02).trust()
    whole = found.readings[0]
    assert whole.error < 0.0125 * temperature  # 5% are four of it
    assert abs(whole.temperature - temperature) < 0.05 * temperature, str(found)
    assert found.trusted, str(found)


@pytest.mark.parametrize(
    ("name", "temperature"), [(name, t) for name, (_, temperatures) in FAULTS.items() for t in temperatures]
)
def test_a_faulty_rule_raises_the_alarm(regression: Regression, name: str, temperature: float) -> None:
    found = regression.run(FAULTS[name][0], temperature).trust()
    assert found.summary == "it samples something else", str(found)


def test_gradient_noise_that_is_left_in_raises_the_alarm(regression: Regression) -> None:
    """Minibatches at a large rate and a low temperature: their noise heats, and no rule takes it out."""
    found = regression.run(langevin, 0.1, batch=BATCH, delta=0.2).trust()
    assert found.summary == "it samples something else" and found.readings[0].temperature > 0.13, str(found)


def test_burn_in_that_ends_too_early_is_not_trusted(regression: Regression) -> None:
    """Kept from the first step on, far from the mode: the counter ran ahead."""
    found = regression.run(langevin, 0.01, start=3.0).trust()
    assert not found.trusted, str(found)


@pytest.mark.quick
def test_right_draws_are_hardly_ever_called_wrong(regression: Regression) -> None:
    """Exact draws, correlated in time, of several lengths. Of 30 verdicts, each wrong once in a thousand, none is."""
    root = torch.linalg.cholesky(torch.linalg.inv(regression.curvature) / NUM_DATA)
    verdicts: list[Verdict] = []
    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        chains, draws, rho = [(1, 40, 0.3), (4, 60, 0.5), (4, 150, 0.8)][seed % 3]
        z = torch.randn(chains, draws, DIM, generator=g)
        for t in range(1, draws):
            z[:, t] = rho * z[:, t - 1] + math.sqrt(1 - rho**2) * z[:, t]
        theta = regression.mean + z @ root.T
        parts = {"a": theta[..., : DIM // 2], "b": theta[..., DIM // 2 :]}
        info = {"num_data": NUM_DATA}
        verdicts.append(Posterior(regression.target, parts, info, (regression.x, regression.y)).trust())
    assert [str(v) for v in verdicts if v.summary == "it samples something else"] == []


# ---------------------------------------------------------------- the exact toy


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.make(seed=0)


@pytest.fixture(scope="module")
def sampled(toy: Toy) -> Posterior:
    """I-SGD at its defaults, but for lengths that keep the run short."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # so short a warm-up does not settle
        return sample(
            toy.target, toy.data, draws=40, chains=16, keep_every=40, warmup=2000, compile=False, progress=False
        )


def test_toy_exact_draws_are_trusted(toy: Toy) -> None:
    draws = toy.draw(1000, seed=1).float().unflatten(0, (4, 250))
    found = Posterior(toy.target, {"w": draws}, {}, toy.data).trust()
    assert found.trusted, str(found)


def test_toy_isgd_is_trusted(toy: Toy, sampled: Posterior) -> None:
    found = sampled.trust(toy.data)
    assert found.trusted, str(found)
    assert abs(found.readings[0].temperature - 1.0) < 0.05 + 2 * found.readings[0].error


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_toy_at_another_temperature_is_not(toy: Toy, sampled: Posterior, factor: float) -> None:
    """Draws spread around their mean as they would be at another temperature."""
    mean = sampled.draws["w"].mean((0, 1))
    draws = mean + math.sqrt(factor) * (sampled.draws["w"] - mean)
    found = Posterior(toy.target, {"w": draws}, sampled.info, toy.data).trust()
    assert found.summary == "it samples something else", str(found)
    assert found.readings[0].temperature == pytest.approx(factor, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_toy_isgd_at_its_defaults(toy: Toy, temperature: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # of one chain whose warm-up has not settled
        posterior = sample(toy.target, toy.data, draws=250, chains=4, temperature=temperature, progress=False)
    found = posterior.trust(toy.data)
    assert found.trusted, str(found)
    assert abs(found.readings[0].temperature / temperature - 1) < 0.05
    wrong = posterior.trust(toy.data, temperature=1.5 * temperature)
    assert wrong.summary == "it samples something else"


@pytest.mark.slow
def test_toy_sgld_at_a_large_rate_is_too_hot(toy: Toy) -> None:
    """At a rate far too high for the gradient noise of small batches, which it does not take out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        posterior = sample(
            toy.target, toy.data, method="sgld", lr=0.02, batch_size=8, draws=200, chains=4, keep_every=20,
            temperature=0.1, warmup=2000, progress=False,
        )  # fmt: skip
    found = posterior.trust(toy.data)
    assert found.summary == "it samples something else", str(found)
