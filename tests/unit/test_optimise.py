"""Initial optimisation: a fit to the data first, and what it is for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import isosgd
from experiments.posteriors import suite
from isosgd import Target
from isosgd.data.sources import TensorBatches
from isosgd.engine.chains import Chains
from isosgd.warmup import optimise


def chains_of(target: Target, data: tuple[Tensor, ...], batch_size: int, count: int = 2) -> Chains:
    rows = len(data[0])
    target.check(target.initial(), data)

    def make(groups: Any, generator: torch.Generator, chains: int | None) -> isosgd.ISGD:
        return isosgd.ISGD(groups, num_data=rows, generator=generator, chains=chains)

    starts = [target.initial() for _ in range(count)]
    return Chains(target, starts, TensorBatches(data, batch_size, 0, count), rows, make, 0, True)


@pytest.mark.long
def test_a_network_fits_the_data_before_it_is_sampled() -> None:
    """With so few data the posterior density has a mode where weights are small and all is noise, far from its mass.

    There, with a straight line and noise of about .6, the mean loss is above .7.
    """
    chains = chains_of(Target.from_module(suite.net(1, seed=0), "gaussian"), suite.wave(), 20)
    chains.evaluate()
    for _ in range(20):
        chains.probe_curvature()
    spent = optimise.InitialOptimisation(chains, 2400, lambda: None).run()
    likely = chains.log_likelihood(tuple(x.expand(2, *x.shape) for x in suite.wave()))
    assert -float(likely.mean(-1).min()) < 0.0 and spent <= 2400 + 120


def started(prior: float, rows: float, start: float) -> optimise.InitialOptimisation:
    """The initial optimisation of two chains to a mean with a normal prior around zero."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0] - params["w"]).square().sum(-1)

    data = (rows + torch.randn(64, 3, generator=torch.Generator().manual_seed(0)),)
    target = Target(log_likelihood, isosgd.priors.Normal(prior), init={"w": torch.full((3,), start)})
    return optimise.InitialOptimisation(chains_of(target, data, 16), 4000, lambda: None)


def fitted(way: optimise.InitialOptimisation, steps: int = 200) -> tuple[Tensor, Any]:
    """Where a fit ends, and the loss that is kept of it."""
    way.chains.evaluate()
    way.best, way.doubt = way._mean_loss(20)
    before = way.best.copy()
    way._fit(steps)
    return way.chains.params["w"].detach(), (before, way.best)


def test_a_fit_goes_to_the_data_where_the_posterior_does() -> None:
    w, (before, after) = fitted(started(prior=10.0, rows=5.0, start=1.0))
    assert bool((after < before - 5).all()) and float((w - 5).abs().max()) < 1.0


def test_a_fit_that_leads_away_from_the_posterior_is_undone() -> None:
    """The prior outweighs the data: what fits them has a far lower density than the start."""
    w, (before, after) = fitted(started(prior=1e-3, rows=5.0, start=1e-3))
    assert torch.equal(w, torch.full((2, 3), 1e-3)) and (before == after).all()


@pytest.mark.slow
def test_a_chain_that_is_lost_at_the_start_stops_no_other() -> None:
    """Under a full matrix, too, which chains share."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0] - params["w"]).square().sum(-1) + params["w"].sum().sqrt() * 0

    data = (3 + torch.randn(200, 3, generator=torch.Generator().manual_seed(0)),)
    target = Target(log_likelihood, isosgd.priors.Normal(10.0), init={"w": torch.ones(3)})
    with pytest.warns(isosgd.SamplingWarning, match="chain 2"):
        found = isosgd.sample(
            target, data, init=lambda k: {"w": torch.full((3,), -1.0 if k == 2 else 1.0)}, draws=200, chains=4,
            batch_size=16, structure="full", progress=False,
        )  # fmt: skip
    assert found.num_chains == 3 and bool(torch.isfinite(found.draws["w"]).all())
    assert float((found.draws["w"].flatten(0, 1).std(0) * math.sqrt(200) - 1).abs().max()) < 0.2
