"""HMC: its mechanics, and what surrounds it."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd import METHODS, DataSets, Target, priors, sample
from isosgd.data.sources import TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.leapfrog import LeapfrogMultiStep, unsupported_reason
from isosgd.engine.state import load_state, state_of
from isosgd.samplers.innovations import BITS_FROM
from isosgd.warmup.hmc import DualAveraging
from tests.crashes import Crash, Tanh, crash_after

HMC = METHODS["hmc"]

G = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=G)
Y = X.sum(1, keepdim=True) + 0.1 * torch.randn(40, 1, generator=G)
# With inputs, targets, and what two layers give, half of these rows fit into a cache, and one is left over.
MANY = torch.randn(22_001, 3, generator=G)
MANY_Y = MANY.sum(1, keepdim=True) + 0.1 * torch.randn(22_001, 1, generator=G)
pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # short warm-ups
QUICK: dict[str, Any] = {
    "batch_size": "all", "draws": 3, "keep_every": 7, "warmup": 500, "compile": False, "progress": False
}  # fmt: skip


def target(scales: bool = True) -> Target:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), Tanh(), nn.Linear(4, 1))
    return Target.from_module(model, "gaussian", priors.HierarchicalNormal() if scales else priors.FanInNormal())


def chains(
    count: int = 2, structure: str = "lowrank", temperature: float = 1.0, data: tuple[Tensor, Tensor] = (X, Y)
) -> Chains:
    """Chains whose Lambda is known."""
    rows = len(data[0])

    def make(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> HMC:
        return HMC(
            groups, num_data=rows, temperature=temperature, generator=generator, chains=chains, batch_size=rows,
            structure=structure,
        )  # fmt: skip

    posterior = target()
    posterior.check(posterior.initial(), data)
    batches = TensorBatches(data, "all", 0, count)
    run = Chains(posterior, [posterior.initial() for _ in range(count)], batches, rows, make, 0, together=True)
    for _ in range(run.geometry.min_vectors):  # type: ignore[union-attr]
        run.sampler.observe(run.evaluate(split=True))
    run.shape()
    return run


def errors(step_size: float, structure: str = "lowrank", temperature: float = 1.0) -> Tensor:
    """Energy that trajectories of one length gain on their way, at a squared step size."""
    run = chains(structure=structure, temperature=temperature)
    sampler = run.hmc
    assert sampler is not None
    sampler.step_size = torch.full_like(sampler.step_size, step_size)
    sampler.length = round(0.3 / step_size**0.5)
    for _ in range(sampler.length + 1):
        run.step()
    assert sampler.ended
    return sampler.error


@pytest.mark.parametrize(
    ("structure", "temperature"), [pytest.param("lowrank", 0.1, marks=pytest.mark.long), ("full", 1.0)]
)
def test_energy_is_kept_the_better_the_shorter_the_steps(structure: str, temperature: float) -> None:
    """Leapfrog steps: the error falls with the square of the step."""
    long, short = errors(4e-3, structure, temperature), errors(2.5e-4, structure, temperature)
    assert (short.abs() < 0.02 / temperature).all()
    assert (short.abs() < long.abs() / 6 + 2e-3).all()  # 16 but for rounding


def test_velocities_are_normal_however_many_there_are() -> None:
    """Steps of large models on a CPU take counted bits, whose fourth moment is 2.75: no velocity may."""
    run = chains(BITS_FROM // 20, "diagonal")
    sampler, shaped = run.hmc, run.geometry
    assert sampler is not None and shaped is not None
    white = []
    for _ in range(10):
        sampler.restart()
        assert run.flat(run.leaves).numel() >= BITS_FROM
        run.step()
        gradient, squared = run.flat([leaf.grad for leaf in run.leaves]), sampler.jittered.unsqueeze(-1)
        fresh = sampler.velocities + squared * shaped.direction(gradient)  # before the first half kick
        white.append(fresh / (2.0 * shaped.scale * squared * shaped.rates()).sqrt())
    z = torch.cat(white).double().flatten()
    assert abs(float(z.square().mean()) - 1.0) < 5 * (2 / len(z)) ** 0.5
    assert abs(float(z.pow(4).mean()) - 3.0) < 5 * (96 / len(z)) ** 0.5  # the variance of a normal fourth power


def test_a_state_of_another_version_is_refused() -> None:
    run = chains()
    with pytest.raises(ValueError, match=r"format 1.*finish the run with the version that began it"):
        load_state(run, {name: value for name, value in state_of(run).items() if name != "format"})


def test_a_trajectory_that_is_rejected_leaves_the_chain_where_it_was() -> None:
    run = chains()
    sampler = run.hmc
    assert sampler is not None
    sampler.step_size, sampler.length = torch.full_like(sampler.step_size, 1e6), 2
    start = {name: x.detach().clone() for name, x in run.params.items()}
    for _ in range(9):
        run.step()
    assert not run.failures  # far out losses are not finite, and no chain is lost
    natural, wanted = run.natural(), run.target.constrain(start)
    for name, x in wanted.items():
        torch.testing.assert_close(natural[name], x.view(natural[name].shape))


def test_draws_are_ends_of_trajectories_not_places_on_the_way() -> None:
    run = chains()
    sampler = run.hmc
    assert sampler is not None
    sampler.step_size, sampler.length = torch.full_like(sampler.step_size, 1e-4), 5
    run.step()
    first = run.natural()
    for _ in range(3):
        run.step()
        assert all(torch.equal(first[name], x) for name, x in run.natural().items())
    run.step()
    run.step()
    assert sampler.place == 1 and not torch.equal(first["0.weight"], run.natural()["0.weight"])


def test_long_trajectories_give_draws_on_the_way() -> None:
    run = chains()
    sampler = run.hmc
    assert sampler is not None
    sampler.step_size, sampler.length, sampler.recycles = torch.full_like(sampler.step_size, 1e-4), 5, True
    seen = []
    for _ in range(5):
        run.step()
        seen.append(run.natural()["0.weight"])
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))  # such short steps are always accepted


def test_a_place_on_the_way_that_would_be_rejected_is_no_draw() -> None:
    run = chains()
    sampler = run.hmc
    assert sampler is not None
    sampler.step_size, sampler.length, sampler.recycles = torch.full_like(sampler.step_size, 1e-4), 5, True
    run.step()
    home = run.natural()["0.weight"]
    sampler.home_energy = sampler.home_energy - 1e4  # as if all places were far less likely than the last end
    run.step()
    assert torch.equal(home, run.natural()["0.weight"])


@pytest.mark.long
def test_trajectories_are_longer_where_that_pays() -> None:
    """Steps of a network are short beside its posterior's width in most directions; a regression's are not."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(60, 3, generator=g)
    y = x[:, :1].sin() + 0.01 * torch.randn(60, 1, generator=g)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    lengths = {}
    for name, model in (("network", network), ("line", nn.Linear(3, 1))):
        posterior = Target.from_module(model, "gaussian", priors.Normal(1.0))
        found = sample(posterior, (x, y), method="hmc", chains=2, draws=2, keep_every=1, warmup=700,
                       compile=False, progress=False, seed=1)  # fmt: skip
        lengths[name] = found.info["warmup"][0]["trajectory"]
    assert lengths["network"] > 2 * lengths["line"]


def test_a_batch_of_all_has_every_row_once() -> None:
    rows = torch.stack([torch.arange(0, 30), torch.arange(10, 40)])
    batches = TensorBatches((X, Y), "all", 0, 2, rows)
    x, _ = batches.next()
    torch.testing.assert_close(x, X[rows])
    mixed, also = batches.next(mixed=True)
    assert not torch.equal(mixed, x)
    for k in range(2):
        torch.testing.assert_close(mixed[k].sort(0).values, X[rows[k]].sort(0).values)
        torch.testing.assert_close(also[k].sort(0).values, Y[rows[k]].sort(0).values)
    one = TensorBatches((X,), "all", 0)
    torch.testing.assert_close(one.next()[0], X)
    assert one.next(mixed=True)[0].shape == X.shape


@pytest.mark.long
def test_data_sets_and_a_measured_spacing() -> None:
    rows = torch.stack([torch.arange(0, 30), torch.arange(10, 40)])
    settings = {**QUICK, "keep_every": "auto", "warmup": 600}
    posterior = sample(target(), DataSets((X, Y), rows), chains=2, **settings)
    assert posterior.draws["0.weight"].shape == (4, 3, 4, 3)
    assert all(report["groups"][0]["rate"] > 0 for report in posterior.info["warmup"])
    assert posterior.info["keep_every"][0] >= 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "sgld"}, "no gradient noise"),
        ({"method": "hmc", "batch_size": 10}, "batch_size = 10 does not go with method='hmc'.*energy of all data"),
        ({"structure": "layer"}, "knows no directions"),
        ({"preset": "alpha-a"}, "needs gradient noise"),
        ({"batch_size": "most"}, "'most'"),
        ({"warmup": 100}, "too short"),
        ({"method": "swag"}, "give swag a number"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample(target(), (X, Y), **{**QUICK, **settings})


def test_all_data_are_hmc_by_either_name() -> None:
    short, named = (
        sample(target(False), (X, Y), seed=3, structure="diagonal", **{**QUICK, "warmup": 250, "draws": 2, **given})
        for given in ({"batch_size": "all"}, {"batch_size": None, "method": "hmc"})
    )
    assert short.info["method"] == named.info["method"] == "hmc"
    assert short.info["batch_size"] == named.info["batch_size"] == 40
    assert all(torch.equal(x, named.draws[name]) for name, x in short.draws.items())


def test_hmc_is_among_the_methods() -> None:
    (row,) = [row for row in isosgd.methods() if row["name"] == "hmc"]
    assert row["family"] == "metropolis" and row["targets"] == "exp(-f / T)" and "Duane" in row["paper"]
    assert row["settings"]["structure"] == "auto"
    with pytest.raises(TypeError, match="method 'hmc' has no option 'scheme'"):
        sample(target(), (X, Y), method="hmc", scheme="windowed", warmup=700, draws=1, keep_every=1, progress=False)


def test_a_loader_cannot_give_all() -> None:
    with pytest.raises(ValueError, match="pass tensors"):
        sample(target(), [(X, Y)], **QUICK)


def test_a_start_that_is_not_finite_is_named() -> None:
    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return -0.5 * (batch[0][:, 0] - params["m"]).square() / torch.where(params["m"] < 1e3, 1.0, 0.0)

    bad = Target(log_likelihood, priors.Normal(1e4), init={"m": torch.tensor(2e3)})
    with pytest.raises(isosgd.DivergedError, match="init"):
        sample(bad, (X,), **QUICK)


def test_the_middle_of_a_trajectory_is_saved() -> None:
    run = chains()
    sampler = run.hmc
    assert sampler is not None
    sampler.step_size, sampler.length = torch.full_like(sampler.step_size, 1e-3), 6
    for _ in range(3):
        run.step()
    state, here = copy.deepcopy(sampler.state_dict()), run.snapshot()
    wanted = []
    for _ in range(12):
        run.step()
        wanted.append(run.snapshot())
    sampler.load_state_dict(state)
    run.restore(here)
    for snapshot in wanted:
        run.step()
        assert all(torch.equal(a, b) for a, b in zip(run.snapshot(), snapshot, strict=True))


def test_step_sizes_come_to_the_target_acceptance() -> None:
    """Where the chance of acceptance is exp(-step), half of the trajectories are accepted at a step of log 2."""
    step_sizes = DualAveraging(torch.tensor([0.01, 5.0]), share=0.5)
    for _ in range(400):
        step_sizes.update((-step_sizes.value).exp())
    torch.testing.assert_close(step_sizes.mean, torch.full((2,), 0.693), rtol=0.1, atol=0.0)


# -- several steps in a call --


def after(
    steps: int,
    how: str,
    structure: str = "lowrank",
    count: int = 3,
    length: int = 5,
    temperature: float = 0.3,
    data: tuple[Tensor, Tensor] = (X, Y),
) -> tuple[Any, Any]:
    """Chains that have taken some steps, one by one or several in a call; and the numbers of steps told."""
    run = chains(count, structure, temperature, data)
    run.sampler.length, run.sampler.step_size = length, torch.full((count,), 0.01)  # type: ignore[attr-defined]
    told: list[int] = []
    if how == "single":
        for _ in range(steps):
            run.step()
    else:
        assert unsupported_reason(run) == ""
        LeapfrogMultiStep(run, compiled=how == "compiled").take_steps(0, steps, told.append)
    return run, told


@pytest.mark.parametrize(
    ("structure", "steps"),
    [
        ("lowrank", 5),
        pytest.param("lowrank", 17, marks=pytest.mark.long),
        ("diagonal", 17),
        pytest.param("kronecker", 17, marks=pytest.mark.long),
        ("full", 17),
    ],
)
def test_the_steps_are_those_of_the_sampler(structure: str, steps: int) -> None:
    (one, _), (many, told) = after(steps, "single", structure), after(steps, "loop", structure)
    assert sum(told) == steps and max(told) > 1
    for a, b in zip(one.leaves, many.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for name in ("velocities", "gained", "home", "home_energy", "acceptance"):
        mine, theirs = getattr(many.sampler, name), getattr(one.sampler, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=name)
    assert (many.sampler.place, many.gradients) == (one.sampler.place, one.gradients)
    assert many.sampler.param_groups[0]["step"] == one.sampler.param_groups[0]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["lowrank", "full"])
def test_so_they_are_when_compiled(structure: str) -> None:
    (one, _), (many, _) = after(17, "single", structure), after(17, "compiled", structure)
    for a, b in zip(one.leaves, many.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("how", ["loop", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_steps_are_the_same_when_rows_go_part_by_part(how: str) -> None:
    one, _ = after(7, "single", data=(MANY, MANY_Y))
    assert LeapfrogMultiStep(one, compiled=False).rows == 11_000
    many, _ = after(7, how, data=(MANY, MANY_Y))
    for a, b in zip(one.leaves, many.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("eager_compiler")
def test_parts_are_of_the_rows_there_are() -> None:
    """N may be larger, where rows stand for more; and each of several sets has rows of its own."""
    one = target()
    one.num_data = 4_000_000
    data = DataSets((MANY, MANY_Y), rows=torch.stack([torch.arange(0, 22_000), torch.arange(1, 22_001)]))
    found = sample(one, data, **{**QUICK, "compile": True})
    assert found.info["num_data"] == 4_000_000
    assert all(bool(torch.isfinite(x).all()) for x in found.draws.values())


@pytest.mark.long
@pytest.mark.usefixtures("eager_compiler", "eager_store")
def test_a_run_that_was_stopped_goes_on_the_same(tmp_path: Path) -> None:
    settings = {**QUICK, "compile": True, "draws": 9, "chains": 2}
    whole = sample(target(), (X, Y), **settings)
    assert "several steps a call" in whole.info["engine"]
    with crash_after(4, tmp_path), pytest.raises(Crash):
        sample(target(), (X, Y), store=tmp_path, **settings)
    again = sample(target(), (X, Y), store=tmp_path, resume=True, **settings)
    for name, draws in whole.draws.items():
        torch.testing.assert_close(again.draws[name], draws, rtol=0, atol=0)


@pytest.mark.long
def test_trajectories_stay_short_where_the_mass_fits() -> None:
    """Distances of single trajectories are noisy: doubled whenever chance has it, they would go round and round."""
    deviations = torch.logspace(-1, 1, 10)
    y = deviations * torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
    gaussian = Target(
        lambda p, batch: -0.5 * ((batch[0] - p["mu"]) / deviations).square().sum(-1),
        priors.Normal(10.0),
        init={"mu": torch.zeros(10)},
    )
    for seed in range(3):
        found = sample(gaussian, (y,), method="hmc", draws=1, chains=8, warmup=1000, compile=False, seed=seed)
        assert found.info["warmup"][0]["trajectory"] <= 8
