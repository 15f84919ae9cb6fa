"""Local learning coefficients: models whose coefficient is known, and the sampler that finds its own step size."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd import Target, likelihoods, priors
from isosgd.samplers import LocalSampler

N = 1000


def regression(size: int) -> tuple[Target, tuple[Tensor, Tensor]]:
    """A regular model at its minimum: columns of different sizes, noise of known scale."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, size, generator=g) * torch.logspace(0, 1, size)
    y = x.sum(1) + torch.randn(N, generator=g)
    model = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.T)
    return Target.from_module(model, likelihoods.Gaussian(1.0)), (x, y)


def quartic() -> tuple[Target, tuple[Tensor]]:
    target = Target(lambda p, b: -(p["w"] ** 4).sum().expand(len(b[0])), priors.Flat(), init={"w": torch.zeros(1)})
    return target, (torch.zeros(N, 1),)


def deep_linear(widths: tuple[int, ...], rank: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A linear network at the most singular of its minima: every factor has the rank of the product."""
    g = torch.Generator().manual_seed(0)
    turns = [torch.linalg.qr(torch.randn(h, h, generator=g))[0] for h in widths]
    layers = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        layer = nn.Linear(inputs, outputs, bias=False)
        with torch.no_grad():
            layer.weight.copy_(turns[i + 1][:, :rank] @ turns[i][:, :rank].T)
        layers.append(layer)
    model, x = nn.Sequential(*layers), torch.randn(N, widths[0], generator=g)
    return model, (x, model(x).detach())


def test_a_regular_model_has_half_its_parameters() -> None:
    target, data = regression(10)
    found = isosgd.llc(target, data)
    assert found.mean == pytest.approx(5.0, rel=0.05)
    assert abs(found.plain - 5.0) < 5 * math.sqrt(5.0 / found.ess)  # n_beta L has the variance d / 2
    assert found.verdict.trusted, found
    assert found.gradients == 1000 and found.losses.shape == (4, 150) and found.posterior is None
    assert len(found.values) == 4 and found.std < 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_a_quartic_has_a_quarter(seed: int) -> None:
    found = isosgd.llc(*quartic(), seed=seed)
    assert found.mean == pytest.approx(0.25, rel=0.05)


def test_a_deep_linear_network_has_its_known_coefficient() -> None:
    model, data = deep_linear((10, 5, 10), 2)
    found = isosgd.llc(model, data, likelihood=lambda output, y: -(output - y).square().sum(1))
    assert found.mean == pytest.approx(29.0, rel=0.10)  # Aoyagi (2024)
    assert found.gradients == 1000


@pytest.mark.long
def test_minibatches_give_the_same() -> None:
    target, data = regression(10)
    found = isosgd.llc(target, data, batch_size=200, draws=200)
    assert abs(found.mean - 5.0) < 4 * found.error + 0.25
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=250, shuffle=True)
    assert isosgd.llc(target, loader, draws=10, warmup=20).gradients == 120


@pytest.mark.long
def test_draws_are_kept_where_they_are_asked_for() -> None:
    target, data = regression(4)
    found = isosgd.llc(target, data, draws=200, localization=2.0, keep_draws=True)
    assert found.posterior is not None and found.posterior.target is not None
    draws = found.posterior.draws["weight"].reshape(800, 4)
    assert found.posterior.target.describe()["prior"]["name"] == "Around"
    precision = found.nbeta * (data[0].T @ data[0]) / N + 2.0 * torch.eye(4)
    exact = precision.inverse().diagonal()
    effective = isosgd.diagnostics.ess(found.posterior.draws["weight"].reshape(4, 200, 4).square()).min()
    assert float((draws.var(0) / exact - 1).abs().max()) < 4.5 * math.sqrt(2.0 / float(effective))
    same = isosgd.llc(target, data, draws=200, localization=2.0)
    assert same.mean == found.mean


def test_a_start_that_is_no_minimum_is_found_out() -> None:
    target, data = regression(4)
    found = isosgd.llc(target, data, init={"weight": torch.full((1, 4), 0.5)})
    assert found.mean < 0 and not found.verdict.trusted
    assert "no minimum" in str(found)


def loop(sampler: LocalSampler, w: nn.Parameter, slope: float, noise: float, steps: int) -> Tensor:
    """As devinterp runs a sampling method: backward, step, zero_grad."""
    g, draws = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = 0.5 * slope * (w**2).sum() + noise * (torch.randn(w.shape, generator=g) * w).sum()
        loss.backward()
        if sampler.settled:
            draws.append(w.detach().clone())
        sampler.step()
        sampler.zero_grad()
    return torch.stack(draws)


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.long), 0.3])
def test_the_sampler_has_the_right_variance_in_a_loop(noise: float) -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(200))
    sampler = LocalSampler([w], nbeta=100.0, localization=10.0, metrics=[])
    draws = loop(sampler, w, 2.0, noise, 1500)
    effective = float(isosgd.diagnostics.ess(draws[None].square().mean(2, keepdim=True), "mean")[0]) * 200
    # Noise leaves a share that falls with the step size: two in a hundred are allowed.
    assert abs(float(draws.square().mean()) * 210.0 - 1.0) < 0.02 + 4.5 * math.sqrt(2.0 / effective)


def test_entries_outside_the_mask_stay() -> None:
    torch.manual_seed(0)
    w, mask = nn.Parameter(torch.ones(10)), torch.arange(10) < 5
    sampler = LocalSampler([{"params": w, "optimize_over": mask}], nbeta=100.0, localization=1.0)
    draws = loop(sampler, w, 2.0, 0.0, 200)
    assert bool((draws[:, 5:] == 1).all()) and float(draws[:, :5].std()) > 0


def test_frozen_parameters_stay_and_unused_ones_are_refused() -> None:
    used, frozen, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(2)), torch.zeros(4)
    sampler = LocalSampler([used, frozen.requires_grad_(False)], nbeta=50.0)
    for _ in range(20):
        sampler.zero_grad()
        used.square().sum().backward()
        sampler.step()
    assert (frozen == 1).all() and (used != 0).all()
    with pytest.raises(ValueError, match="make a new LocalSampler"):
        sampler.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match=r"shape \(4,\) has no gradient"):
        LocalSampler([used, torch.nn.Parameter(unused)], nbeta=50.0).step()


def test_a_saved_sampler_goes_on() -> None:
    runs = []
    for stop in (60, 150, None):
        w = nn.Parameter(torch.zeros(5))
        make = lambda w: LocalSampler([w], 100.0, 1.0, generator=torch.Generator().manual_seed(0))  # noqa: E731
        sampler = make(w)
        for step in range(200):
            if step == stop:
                state, numbers = sampler.state_dict(), sampler.generator.get_state()
                sampler = make(w)
                sampler.load_state_dict(state)
                sampler.generator.set_state(numbers)
            w.grad = w.detach() * 2
            sampler.step()
        runs.append(w.detach().clone())
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[1], runs[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbeta": -1.0}, "nbeta = -1.0 must be positive"),
        ({"lr": 1e-3}, "finds its step size"),
        ({"localization": -1.0}, "localization = -1.0"),
        ({"warmup": 3}, "warmup = 3"),
        ({"metrics": ["noise"]}, "no metric 'noise'"),
    ],
)
def test_a_bad_setting_of_the_sampler_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSampler([nn.Parameter(torch.zeros(2))], **{"nbeta": 10.0, **change})


def test_half_precision_is_refused() -> None:
    with pytest.raises(TypeError, match="rounding"):
        LocalSampler([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], nbeta=10.0)


def test_bad_input_is_refused() -> None:
    x, y = torch.randn(50, 3), torch.randn(50)
    with pytest.raises(ValueError, match="likelihood is not known"):
        isosgd.llc(nn.Linear(3, 1), (x, y))
    with pytest.raises(ValueError, match=r"'likelihood\.scale' is positive"):
        isosgd.llc(nn.Linear(3, 1), (x, y), likelihood="gaussian")
    with pytest.raises(TypeError, match="pass a model"):
        isosgd.llc(torch.zeros(3), (x, y))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws = 2"):
        isosgd.llc(nn.Linear(3, 1), (x, y), likelihood=likelihoods.Gaussian(1.0), draws=2)
    norm = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match="BatchNorm1d"), pytest.raises(ValueError, match="BatchNorm in training mode"):
        isosgd.llc(norm, (x, (y > 0).long()))
    assert isosgd.llc(norm.eval(), (x, (y > 0).long()), draws=10, warmup=10).losses.isfinite().all()


def test_around_is_a_normal_at_the_start() -> None:
    g = torch.Generator().manual_seed(0)
    start, x = torch.randn(3, 2, generator=g).double(), torch.randn(3, 2, generator=g).double()
    found = priors.Around({"w": start, "buffer": torch.zeros(1)}, 4.0)
    exact = torch.distributions.Normal(start, 0.5).log_prob(x).sum()
    assert float(found.log_prob({"w": x})) == pytest.approx(float(exact))
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(found.log_prob({"w": leaf}), leaf)
    torch.testing.assert_close(found.grad({"w": x})["w"], slope)
    assert priors.Around({"w": start}, {"w": 9.0}).log_prob({"w": start}) > found.log_prob({"w": start})
    with pytest.raises(ValueError, match="no values of parameter 'v'"):
        found.grad({"v": x})
    with pytest.raises(ValueError, match="precision"):
        priors.Around({"w": start}, -1.0)
    with pytest.raises(ValueError, match="NaN"):
        priors.Around({"w": start * math.nan})
