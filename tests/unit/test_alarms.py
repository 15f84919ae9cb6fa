"""Alarms after the last draw: each fires for its own fault, is silent otherwise, and is said once for all chains."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import ISGD, SGLD, DivergedError, GroupReport, SamplingWarning, Target, WarmupReport, priors, sample
from isosgd.data.sources import IterableBatches, TensorBatches
from isosgd.engine.chains import Chains
from isosgd.warmup.alarms import CLIPPED_ALARM, EXCESS_ALARM, RISE_ALARM, warn_of

DIM, N, BATCH = 6, 400, 8


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    return -0.5 * (batch[0] - params["theta"]).square().sum(-1)


def make_chains(chains: int | None, kind: type[Any] = ISGD, temperature: float = 1e-3, **settings: Any) -> Chains:
    """Chains that have not moved; cold ones, in which gradient noise is most of Lambda."""
    data = torch.randn(N, DIM, generator=torch.Generator().manual_seed(0))
    target = Target(log_likelihood, priors.Normal(10.0), init={"theta": torch.zeros(DIM)})

    def make(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> Any:
        return kind(
            groups, num_data=N, temperature=temperature, generator=generator, chains=chains, bias=0.3, **settings
        )

    starts = [target.initial() for _ in range(chains or 1)]
    return Chains(target, starts, TensorBatches((data,), BATCH, 0, chains), N, make, 0, chains is not None)


def report(**changes: Any) -> WarmupReport:
    """Of a warm-up in which all went well."""
    group = {
        "name": "theta",
        "rate": 0.1,
        "lam": 1.0,
        "curvature": 1.0,
        "rate_curvature": 0.1,
        "predicted_bias": 0.01,
        "tail_index": 2.0,
        "noise_share": 0.5,
        "clipped_share": 0.0,
    }
    own = {name: changes.pop(name) for name in list(changes) if name in group}
    found = {"settled": True, "reason": "", "steps": 400, "optimisation": 50, "keep_every": None, "loss": (3.0, 0.1)}
    return WarmupReport(**(found | changes), groups=[GroupReport(**(group | own))])


def said(run: Chains, reports: list[WarmupReport], late: list[Tensor] | None = None, first: int = 0) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of(run, reports, [torch.full((run.count,), 3.0)] if late is None else late, first)
    assert all(w.category is SamplingWarning for w in caught)
    return [str(w.message) for w in caught]


# ------------------------------------------------------------------------------------------------ heat


def noise(mixed: Tensor, g: torch.Generator) -> list[Tensor]:
    """Unit variances; of the chains in the mask all along one direction, but for a twentieth."""
    own, common = torch.randn(len(mixed), DIM, generator=g), torch.randn(len(mixed), 1, generator=g)
    return [torch.where(mixed[:, None], math.sqrt(0.95) * common + math.sqrt(0.05) * own, own)]


def after_sampling(mixed: list[bool], structure: str = "diagonal") -> Chains:
    """Chains warmed up under independent noise, and then under whatever noise comes while draws are taken."""
    g, many = torch.Generator().manual_seed(0), len(mixed)
    run = make_chains(many, structure=structure, batch_size=BATCH)
    for _ in range(2):
        run.sampler.forget_noise()
        for _ in range(300):
            run.sampler.observe(noise(torch.zeros(many).bool(), g))
        run.sampler.adapt([1.0])
    run.sampler.freeze()
    for _ in range(300):
        run.sampler.observe(noise(torch.tensor(mixed), g))
    return run


def test_noise_that_a_diagonal_lambda_does_not_express_is_hot() -> None:
    run = after_sampling([False, True, False, True])
    hot = run.geometry.excess_temperature()
    assert bool((hot[[1, 3]] > 2 * EXCESS_ALARM).all()) and bool((hot[[0, 2]] < EXCESS_ALARM).all())
    (message,) = said(run, [report()] * 4, first=10)
    assert "chain 11 (and 1 other of 4 chains): gradient noise that structure 'diagonal' does not express" in message
    assert f"by {100 * float(hot[1]):.0f}% in the worst direction" in message
    assert "batch_size=, structure='full' or 'layer'" in message


def test_independent_noise_is_not_hot() -> None:
    """Of sixty-four chains none; heat is a mean over fifty squares of normals, 0.07 off at one standard error."""
    run = after_sampling([False] * 64)
    assert float(run.geometry.excess_temperature().abs().max()) < EXCESS_ALARM
    assert said(run, [report()] * 64) == []


def test_a_full_lambda_expresses_all_noise() -> None:
    assert said(after_sampling([False, False], "full"), [report()] * 2) == []


def test_a_full_lambda_is_hot_where_noise_is_larger_than_on_average() -> None:
    run, g = after_sampling([False] * 8, "full"), torch.Generator().manual_seed(1)
    larger = torch.ones(8, DIM)
    larger[5, 2] = 4.0
    for _ in range(300):
        run.sampler.observe([larger * torch.randn(8, DIM, generator=g)])
    (message,) = said(run, [report()] * 8)
    assert "chain 5: gradient noise is larger where the chain now is than it was on average" in message
    assert "structure=" not in message


@pytest.mark.long
def test_correlated_noise_in_the_warmup_slows_a_diagonal_lambda_and_is_not_hot_then() -> None:
    """The whole way through `sample`: noise of rank one and a twentieth, known in the warm-up."""
    g = torch.Generator().manual_seed(0)
    data = math.sqrt(0.95) * torch.randn(N, 1, generator=g) + math.sqrt(0.05) * torch.randn(N, DIM, generator=g)
    target = Target(log_likelihood, priors.Normal(10.0), init={"theta": torch.zeros(DIM)})
    settings = {
        "temperature": 1e-3,
        "structure": "diagonal",
        "batch_size": BATCH,
        "draws": 15,
        "keep_every": 10,
        "compile": False,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sample(target, (data,), chains=4, warmup=400, progress=False, **settings)
    assert not any("does not express" in str(w.message) for w in caught)


# ------------------------------------------------------------------------------------------------ the others


def given_rate(chains: int | None = 3) -> Chains:
    return make_chains(chains, SGLD, lr=0.1)


def test_all_is_well() -> None:
    for chains in (None, 3):
        run = given_rate(chains)
        assert said(run, [report(noise_share=0.0)] * run.count) == []


def test_a_warmup_that_did_not_settle() -> None:
    reports = [report(settled=False, reason=f"because of {k}", noise_share=0.0) for k in range(3)]
    assert said(given_rate(), reports) == [
        "chain 0 (and 2 other of 3 chains): the warm-up did not settle; because of 0."
    ]
    reports[0] = reports[1] = report(noise_share=0.0)
    assert said(given_rate(), reports, first=5) == ["chain 7: the warm-up did not settle; because of 2."]


def test_chains_that_were_dropped_say_nothing_more() -> None:
    run = given_rate()
    run.failures[0] = DivergedError("", step=1, group=None, state={})
    reports = [report(settled=False, reason="so", noise_share=0.0) for _ in range(3)]
    assert said(run, reports) == ["chain 1 (and 1 other of 2 chains): the warm-up did not settle; so."]


def test_noise_beyond_lambda() -> None:
    run = make_chains(3, structure="diagonal", batch_size=BATCH)
    g = torch.Generator().manual_seed(0)
    for _ in range(100):
        run.sampler.observe(noise(torch.zeros(3).bool(), g))
    run.sampler.adapt([1.0])
    run.geometry.on_axes.v[2, :2] = 10.0 * run.geometry.on_axes.lam[2, :2]  # a third of its directions
    assert CLIPPED_ALARM < 1 / 3
    (message,) = [m for m in said(run, [report()] * 3) if "exceeds lambda" in m]
    assert message.startswith("chain 2: 33% of the gradient noise of group 'theta' exceeds lambda where the chain now")


@pytest.mark.parametrize(
    ("numbers", "percent"),
    [({"predicted_bias": 0.7, "noise_share": 0.0}, 70), ({"predicted_bias": 0.5, "noise_share": 0.9}, 140)],
)
def test_rates_too_high_for_curvature_and_noise(numbers: dict[str, float], percent: int) -> None:
    """Twice the bias that is allowed; what heats a chain that does not correct its noise counts too."""
    fine = report(noise_share=0.0)
    (message,) = said(given_rate(), [fine, report(**numbers), fine])
    assert message.startswith(
        f"chain 1: posterior variances of group 'theta' come out too large by about {percent}%: its rate of 0.1"
    )


def test_a_chain_whose_loss_rose() -> None:
    reports = [report(noise_share=0.0)] * 3  # the loss was 3.0, with standard deviation 0.1
    late = [torch.tensor([3.0, 3.0 + (RISE_ALARM + 1) * 0.1 + d, math.inf]) for d in (-0.2, 0.2)]
    (message,) = said(given_rate(), reports, late)
    assert message.startswith("chain 1 (and 1 other of 3 chains): the mean loss rose from 3 in the warm-up to 3.6 in")
    below = [torch.full((3,), 3.0 + (RISE_ALARM - 1) * 0.1)]
    assert said(given_rate(), reports, below) == [] == said(given_rate(), reports, [])


def test_batches_that_are_not_drawn_independently() -> None:
    run = given_rate(None)
    run.batches = IterableBatches([(torch.zeros(BATCH, DIM),)], None)
    (message,) = said(run, [report(noise_share=0.04)])
    assert message.startswith("chain 0: the batches are not drawn independently") and "It is 4% of" in message
    assert said(run, [report(noise_share=0.01)]) == []


def test_warnings_point_at_the_line_that_sampled() -> None:
    data = torch.randn(N, DIM, generator=torch.Generator().manual_seed(0))
    target = Target(log_likelihood, priors.Normal(10.0), init={"theta": torch.full((DIM,), 1e3)})
    with pytest.warns(SamplingWarning, match="chain 0 .*did not settle") as caught:
        sample(target, (data,), chains=3, draws=2, keep_every=2, warmup=160, compile=False, progress=False)
    settling = [w for w in caught if "did not settle" in str(w.message)]
    assert len(settling) == 1 and "(and 2 other of 3 chains)" in str(settling[0].message)
    assert settling[0].filename == __file__
