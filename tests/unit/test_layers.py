"""Networks of dense layers in the library: gradients and leapfrog steps are those of torch."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isosgd import Posterior, Target, likelihoods, priors, sample
from isosgd.data.sources import TensorBatches
from isosgd.engine import multistep
from isosgd.engine.chains import TOGETHER, Chains
from isosgd.engine.gradients import Layout, Many, Single
from isosgd.engine.leapfrog import LeapfrogMultiStep, unsupported_reason, without_compiler
from isosgd.engine.multistep import MultiStep
from isosgd.engine.schedule import Schedule
from isosgd.geometry import LowRank
from isosgd.native import build
from isosgd.native.layers import Layers, network_of
from isosgd.progress import Progress
from isosgd.samplers.hmc import HMC
from isosgd.sampling.settings import sampler_factory
from isosgd.warmup.windows import warmup_of


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def built() -> None:
    if build.layers() is None:
        pytest.skip("there is no compiler")


def dense(inputs: int, hidden: tuple[int, ...], outputs: int, kind: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Layers of fixed weights, with an activation between any two."""
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(inputs, units), kind()]
        inputs = units
    net = nn.Sequential(*layers, nn.Linear(inputs, outputs))
    for i, p in enumerate(net.parameters()):
        p.data = drawn(i, *p.shape) / math.sqrt(p.shape[-1])
    return net


def target(net: nn.Module, likelihood: Any = "gaussian", prior: Any = None) -> Target:
    return Target.from_module(net, likelihood, prior or priors.Normal(1.0))


def parameters(posterior: Target, chains: int) -> tuple[Layout, Tensor]:
    """Where parameters are, and some of each chain, ``[chains, d]``."""
    start = posterior.initial()
    layout = Layout(start)
    return layout, layout.flat(start) + 0.1 * drawn(1, chains, sum(layout.sizes))


def by_autograd(
    posterior: Target, layout: Layout, theta: Tensor, batch: tuple[Tensor, ...], prior_weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one chain in float64."""
    free = {name: x.double().requires_grad_() for name, x in layout.views(theta).items()}
    exact = tuple(t.double() if t.is_floating_point() else t for t in batch)
    loss, gradients = posterior.gradient(free, exact, 300, prior_weight)
    return loss, torch.cat([g.flatten() for g in gradients])


# ------------------------------------------------------------------------------------------------ gradients

ACTIVATIONS = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "tanh gelu": lambda: nn.GELU("tanh"),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("hidden", [(16,), (50, 50), (17, 64, 33), (), (3,), (5, 20), (50, 9, 4)], ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradients_are_those_of_autograd(kind: str, hidden: tuple[int, ...]) -> None:
    """Rows come in blocks of 256; with few outputs and with many."""
    for outputs, likelihood in ((1, "gaussian"), (3, "categorical"), (10, "categorical")):
        posterior = target(dense(7, hidden, outputs, ACTIVATIONS[kind]), likelihood)
        layout, theta = parameters(posterior, 2)
        x = drawn(2, 2, 601, 7)
        y = torch.arange(1202).view(2, 601) % 3 if likelihood == "categorical" else drawn(3, 2, 601, 1)
        many = Many(posterior, 300, layout)
        assert many.fits(theta, (x, y))
        found = many.flat(theta, (x, y), False)
        for k in range(2):
            loss, gradient = by_autograd(posterior, layout, theta[k], (x[k], y[k]))
            assert abs(found[0][k] - loss) < 1e-5 * max(1.0, abs(loss))
            assert (found[1][k] - gradient).abs().max() < 3e-6 * gradient.abs().max()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("rows", [600, 601])
@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        ("gaussian", 1), (likelihoods.Gaussian(0.3), 2), (likelihoods.Gaussian(priors.HalfNormal(1.0)), 1),
        (likelihoods.Gaussian(priors.HalfNormal(1.0)), 3), (likelihoods.Gaussian(outputs=2), 2), ("student_t", 1),
        ("student_t", 3), (likelihoods.StudentT(outputs=2), 2), ("heteroscedastic", 2), ("categorical", 4),
        ("bernoulli", 1), ("poisson", 1),
    ],
)  # fmt: skip
def test_halves_and_likelihoods(likelihood: Any, outputs: int, rows: int) -> None:
    """The gradient of the whole, and the noise between halves, with the prior's part, whatever the likelihood."""
    posterior = target(dense(5, (20, 16), outputs, nn.Tanh), likelihood, priors.Normal(0.7))
    layout, theta = parameters(posterior, 1)
    x, y = drawn(2, rows, 5), drawn(3, rows, 1 if likelihood == "heteroscedastic" else outputs)
    if likelihood in ("bernoulli", "poisson"):
        y = (y > 0).float()
    if likelihood == "categorical":
        y = torch.arange(rows) % 4
    weight = 0.3  # of the prior, as where the likelihood alone is tempered
    single = Single(posterior, 300, weight)
    posterior.check(layout.views(theta[0]), (x, y))
    loss, gradients, noise = single(layout.views(theta[0]), (x, y), split=True)
    assert single.one is not None and single.one.fits(theta, (x.unsqueeze(0), y.unsqueeze(0)))
    wanted, gradient = by_autograd(posterior, layout, theta[0], (x, y), weight)
    assert noise is not None and abs(loss[0] - wanted) < 1e-5 * max(1.0, abs(wanted))
    found = torch.cat([g.flatten() for g in gradients])
    assert (found - gradient).abs().max() < 3e-6 * gradient.abs().max()
    half = rows // 2
    first, second = (
        by_autograd(posterior, layout, theta[0], (x[cut], y[cut]), weight)[1]
        for cut in (slice(half), slice(half, None))
    )
    apart = (first - second) * math.sqrt(half * (rows - half)) / rows
    assert (torch.cat([v.flatten() for v in noise]) - apart).abs().max() < 1e-5 * apart.abs().max()


class Operations(TorchDispatchMode):
    """Names of the operations of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("built")
def test_where_the_library_has_no_gradients_there_is_nothing_else_to_do() -> None:
    """As in double precision, or on a GPU, where it would be done in every captured step."""
    posterior, batch = target(dense(5, (20,), 1).double()), (drawn(2, 300, 5).double(), drawn(3, 300, 1).double())
    single, start = Single(posterior, 300), posterior.initial()
    posterior.check(start, batch)
    single(start, batch)  # the first call looks for the library
    with Operations() as wanted:
        posterior.gradient(start, batch, 300)
    with Operations() as found:
        single(start, batch)
    assert single.one is not None and sorted(found.names) == sorted([*wanted.names, "aten.unsqueeze.default"])


@pytest.mark.usefixtures("built")
def test_images_are_flattened() -> None:
    net = nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(32, 3)
    ).eval()
    posterior = target(net, "categorical")
    layout, theta = parameters(posterior, 1)
    x, y = drawn(2, 400, 1, 3, 4), torch.arange(400) % 3
    many = Many(posterior, 300, layout)
    assert many.fits(theta, (x.unsqueeze(0), y.unsqueeze(0)))
    found, gradient = (
        many.flat(theta, (x.unsqueeze(0), y.unsqueeze(0)), False)[1][0],
        by_autograd(posterior, layout, theta[0], (x, y))[1],
    )
    assert (found - gradient).abs().max() < 3e-6 * gradient.abs().max()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_what_is_not_finite_shows(kind: str, bad: float) -> None:
    posterior = target(dense(3, (16, 16), 1, ACTIVATIONS[kind]))
    layout, theta = parameters(posterior, 3)
    theta[1, layout.slots["0.bias"]] = math.nan
    theta[2, layout.slots["4.bias"]] = bad
    loss = Many(posterior, 300, layout).flat(theta, (drawn(2, 3, 300, 3), drawn(3, 3, 300, 1)), False)[0]
    assert loss.isfinite().tolist() == [True, False, False]


# ------------------------------------------------------------------------------------------------ which modules


class Twice(nn.Identity):
    """Looks like nothing, and is something."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Pulled(likelihoods.Gaussian):
    """A likelihood that looks at the weights of the network, too."""

    def log_prob(self, output: Tensor, y: Tensor, params: Any) -> Tensor:
        return super().log_prob(output, y, params) - params["0.weight"].square().sum()


def test_which_modules_are_meant() -> None:
    found = network_of(dense(3, (50, 20), 1, nn.Tanh))
    assert found is not None and [layer.activation for layer in found.hidden] == ["tanh", "tanh"]
    without = network_of(nn.Sequential(nn.Linear(3, 16, bias=False), nn.ReLU(), nn.Linear(16, 1)))
    assert without is not None and without.names == ["0.weight", "2.weight", "2.bias"]
    hooked, patched, square = dense(3, (50,), 1), dense(3, (50,), 1), nn.Linear(50, 50)
    hooked[1].register_forward_hook(lambda module, given, output: output + 1)
    patched[0].forward = lambda x: torch.zeros(len(x), 50)
    for other in (
        hooked,
        patched,
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), square, nn.ReLU(), square, nn.ReLU(), nn.Linear(50, 1)),
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), Twice(), nn.Linear(50, 1)),
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1)).train(),
        nn.Sequential(nn.Linear(3, 50), nn.BatchNorm1d(50), nn.Linear(50, 1)),
        nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1), nn.ReLU()),
        nn.Sequential(nn.Flatten(0), nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1)),
        type("Own", (nn.Sequential,), {})(*dense(3, (50,), 1)),  # whose forward may be anything
    ):
        assert network_of(other) is None
    assert Target.from_module(dense(3, (50,), 1), "gaussian", sampled="last_layer").network() is None
    assert target(dense(3, (50,), 1), Pulled(0.5)).network() is None
    assert target(dense(3, (50,), 1), lambda output, y: -((output - y) ** 2).squeeze(-1)).network() is None
    alone = network_of(nn.Linear(3, 1))
    assert alone is not None and alone.names == ["weight", "bias"] and not alone.hidden


# ------------------------------------------------------------------------------------------------ leapfrog steps


def chains(structure: Any, count: int, likelihood: Any, hidden: tuple[int, ...] = (24, 16)) -> Chains:
    """Chains of HMC on a network that the library takes, whose mass is known; one of them is on its own."""
    posterior = target(dense(4, hidden, 1, nn.SiLU), likelihood)
    x = drawn(5, 300, 4)
    data, together = (x, x[:, :1].sin() + 0.1 * drawn(6, 300, 1)), count > 1

    def sampler(groups: list[dict[str, Any]], generator: torch.Generator, number: int | None) -> HMC:
        return HMC(groups, structure=structure, num_data=300, batch_size=300, generator=generator, chains=number)  # type: ignore[arg-type]

    batches = TensorBatches(data, "all", 0, count if together else None)
    posterior.check(posterior.initial(), data)
    run = Chains(posterior, [posterior.initial()] * count, batches, 300, sampler, 1, together)
    assert run.hmc is not None
    for _ in range(run.hmc.geometry.min_vectors):
        run.hmc.observe(run.evaluate(split=True))
    run.shape()
    run.hmc.length, run.hmc.step_size = 7, torch.full((count,), 0.01)
    return run


def moved(
    structure: Any, count: int, likelihood: Any, how: str, patch: pytest.MonkeyPatch, hidden: tuple[int, ...] = (24, 16)
) -> Chains:
    """The same after some steps: by calls of the library, or one by one with gradients of autograd."""
    run = chains(structure, count, likelihood, hidden)
    if how == "library":
        assert without_compiler(run) and unsupported_reason(run) == ""
        LeapfrogMultiStep(run, compiled=False).take_steps(0, 17, lambda steps: None)
        return run
    with patch.context() as inside:
        inside.setattr(Layers, "fits", lambda *given: False)
        for _ in range(17):
            run.step()
    return run


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("structure", "likelihood"),
    [
        ("lowrank", "gaussian"), ("diagonal", "gaussian"), ("lowrank", likelihoods.Gaussian(0.2)),
        pytest.param("full", "gaussian", marks=pytest.mark.long), ("lowrank", "student_t"),
        (LowRank(dtype=torch.bfloat16), "gaussian"),
    ],
)  # fmt: skip
def test_steps_are_those_without_the_library(
    structure: Any, likelihood: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trajectories and a part of a third. Lambda of the last three is not the library's, or the noise is not."""
    one, other = (moved(structure, count, likelihood, how, monkeypatch) for how in ("library", "autograd"))
    for a, b in zip(one.leaves, other.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
    for name in ("velocities", "gained", "home_energy", "acceptance"):
        torch.testing.assert_close(getattr(one.hmc, name), getattr(other.hmc, name), rtol=1e-3, atol=2e-3, msg=name)
    assert one.gradients == other.gradients


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("structure", ["lowrank", "diagonal"])
@pytest.mark.parametrize("hidden", [(), (3,), (20, 2)], ids=str)
def test_steps_of_narrow_networks_too(structure: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest has six parameters, fewer than a vector of the processor."""
    one, other = (moved(structure, 2, "gaussian", how, monkeypatch, hidden) for how in ("library", "autograd"))
    for a, b in zip(one.leaves, other.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(one.hmc.gained, other.hmc.gained, rtol=1e-3, atol=2e-3)  # type: ignore[union-attr]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("inputs", "hidden", "fits"),
    [(784, (), True), (784, (32, 8), True), (784, (128, 8), False), (784, (128, 32), True), (784, (128,), True)],
)
def test_large_networks_with_a_narrow_layer_are_left_to_torch(inputs: int, hidden: tuple[int, ...], fits: bool) -> None:
    """With 128 rows the library took 1.8 times as long for 784-128-8-10."""
    posterior = target(dense(inputs, hidden, 10), "categorical")
    layout, theta = parameters(posterior, 2)
    batch = drawn(2, 2, 128, inputs), torch.zeros(2, 128, dtype=torch.int64)
    assert Many(posterior, 300, layout).fits(theta, batch) == fits


@pytest.mark.usefixtures("built")
def test_noise_of_many_minibatches_at_once_is_that_of_one_after_the_other() -> None:
    one, other = (chains("diagonal", 1, "gaussian") for _ in range(2))
    before = one.gradients
    count = TOGETHER + 5
    together = list(one.noise_vectors(count))
    assert one.gradients - before == len(together) == count
    for loss, noise in together:
        alone = other.evaluate(split=True)
        torch.testing.assert_close(loss, other.loss)
        assert alone is not None
        for a, b in zip(noise, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for _, noise in one.noise_vectors(2):  # other minibatches
        assert not torch.allclose(noise[0], together[0][1][0], rtol=1e-3)
    torch.testing.assert_close(one.flat(one.leaves), other.flat(other.leaves), rtol=0.0, atol=0.0)


# ------------------------------------------------------------------------------------------ steps on minibatches

STEPPED: list[dict[str, Any]] = [
    {"method": "sgld", "lr": 1e-4},
    {"structure": "single"},
    {"structure": "diagonal"},
    {"structure": "lowrank"},
    {"method": "sghmc", "lr": 1e-4},
    {"method": "adaptive-sghmc"},  # whose metric is a number for each element
    {"method": "csghmc", "lr": 1e-3, "cycle": 7},  # whose rates change from step to step
    {"structure": "lowrank", "hidden": ()},
    {"structure": "diagonal", "hidden": (5,)},
    {"method": "sghmc", "lr": 1e-4, "hidden": (20, 3)},
    # Of these two the library has the gradients alone.
    {"method": "psgld", "lr": 1e-4},
    {"structure": "kronecker"},
]
FULL = {"structure": "full"}  # which may measure the noise in every step


def stepped(options: dict[str, Any], count: int, classes: bool, temperature: float) -> Chains:
    """Chains on a network that the library takes, after a warm-up. With few rows a full Lambda follows the noise."""
    full = options.get("structure") == "full"
    hidden, rows, size = ((24,), 60, 40) if full else ((24, 16), 300, 50)
    given, x = dict(options), drawn(5, rows, 4)
    net = dense(4, given.pop("hidden", hidden), 3 if classes else 1, nn.SiLU)
    posterior = target(net, "categorical" if classes else "gaussian")
    data = x, (torch.arange(rows) % 3 if classes else x[:, :1].sin() + 0.1 * drawn(6, rows, 1))
    schedule = Schedule(posterior, data, None, count, size, 0, None, None)
    method = given.pop("method", "isgd")
    make = sampler_factory(method, rows, temperature, size, schedule.together_sets, given)
    _, run = next(iter(schedule.runs(make)))
    if "lr" not in options:
        warmup_of(run, 8000 if full else 400, Progress(1, show=False)).run(measure_spacing=False)
    return run


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("options", "count", "classes", "temperature"),
    [
        *[(options, 1, True, 0.1) for options in STEPPED],
        *[pytest.param(options, 3, False, 1.0, marks=pytest.mark.long) for options in STEPPED],
        pytest.param(FULL, 1, False, 1.0, marks=pytest.mark.long),
        pytest.param(FULL, 1, True, 0.1, marks=pytest.mark.slow),  # minutes, and three chains twice as many
        pytest.param(FULL, 3, False, 1.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_steps_in_a_call_are_those_without_the_library(
    options: dict[str, Any], count: int, classes: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those that measure the noise, of calls of different lengths; only rounding differs."""
    runs = [stepped(options, count, classes, temperature) for _ in range(2)]
    taken: list[int] = []
    library = Layers.steps

    def counted(layers: Layers, density: Any, theta: Tensor, rest: Any, batch: Any, updates: Any) -> Any:
        taken.append(len(batch[0]))
        return library(layers, density, theta, rest, batch, updates)

    monkeypatch.setattr(Layers, "steps", counted)
    for run, by_library in zip(runs, (True, False), strict=True):
        with monkeypatch.context() as inside:
            if not by_library:
                inside.setattr(Layers, "fits", lambda *given: False)
            assert multistep.without_compiler(run) == by_library
            assert multistep.unsupported_reason(run) == ""
            steps = MultiStep(run, noise_every=5, compiled=False)
            steps.take_steps(0, 17, lambda number: None)
            steps.take_steps(17, 4, lambda number: None)
        if by_library:
            split = 4 if run.sampler.program().follows_noise else 0  # type: ignore[union-attr]
            assert sum(taken) == (0 if options in STEPPED[-2:] else 21 - split)
    one, other = runs
    for a, b in zip(one.leaves, other.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-3, atol=1e-5)
    assert one.gradients == other.gradients
    assert (one.tracking is not None) == (options.get("structure") == "full" and not classes)
    if one.tracking is not None and other.tracking is not None:
        torch.testing.assert_close(one.tracking.level, other.tracking.level, rtol=1e-3, atol=1e-5)
    begun = stepped(options, count, classes, temperature).leaves
    moved = [float((a - b).detach().abs().max()) for a, b in zip(one.leaves, begun, strict=True)]
    assert min(moved) > 1e-4  # far more than rounding


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "isgd", "warmup": 200},
        {"method": "isgd", "warmup": 0, "lam": 2.0, "structure": "layer"},  # no noise is known before the first step
        {"method": "csghmc", "warmup": 0, "lr": 1e-3, "cycle": 20},
    ],
    ids=["warm", "cold", "cycles"],
)
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_draws_of_a_plain_network_take_many_steps_a_call_without_the_compiler(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing is compiled for so few steps. A run that is extended has the draws of a longer one."""
    net, x = dense(7, (64,), 3), drawn(1, 600, 7)

    def run(draws: int, **more: Any) -> Posterior:
        return sample(
            Target.from_module(net, "categorical", priors.Normal(1.0)), (x, torch.arange(600) % 3), draws=draws,
            keep_every=10, temperature=0.1, progress=False, seed=2, **options, **more,
        )  # fmt: skip

    whole = run(6)
    assert whole.info["engine"].endswith(", several steps a call")
    run(3, store=tmp_path)
    again = run(6, store=tmp_path, resume=True)
    assert all(torch.equal(whole.draws[name], again.draws[name]) for name in whole.draws)


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_directions_of_another_dtype_are_left_to_torch(dtype: torch.dtype) -> None:
    x = drawn(1, 600, 7)
    found = sample(
        target(dense(7, (64,), 3), "categorical"), (x, torch.arange(600) % 3), structure=LowRank(dtype=dtype), chains=2,
        draws=2, keep_every=5, warmup=400, progress=False,
    )  # fmt: skip
    assert all(bool(x.isfinite().all()) for x in found.draws.values())
    assert "library" not in found.info["engine"]


def jittered(batch: Any, generator: torch.Generator) -> Any:
    x, y = batch
    return x + 0.1 * torch.randn(x.shape, generator=generator), y


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
@pytest.mark.parametrize("chains", [1, 2])
def test_a_random_transform_goes_on_where_it_was(chains: int, tmp_path: Path) -> None:
    """What is tried before the steps takes none of its random numbers."""
    net, x = dense(7, (64,), 3), drawn(1, 600, 7)

    def run(draws: int, **more: Any) -> Posterior:
        return sample(
            target(net, "categorical"), (x, torch.arange(600) % 3), method="sgld", lr=1e-3, warmup=0, draws=draws,
            keep_every=5, chains=chains, transform=jittered, progress=False, **more,
        )  # fmt: skip

    whole = run(4)
    run(2, store=tmp_path)
    again = run(4, store=tmp_path, resume=True)
    assert whole.info["engine"].endswith("C++ library, several steps a call")
    assert all(torch.equal(whole.draws[name], again.draws[name]) for name in whole.draws)


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_the_time_is_looked_at_between_draws_far_apart() -> None:
    """Such a gap would take minutes."""
    x, began = drawn(1, 600, 7), time.monotonic()
    found = sample(
        target(dense(7, (256, 256), 3), "categorical"), (x, torch.arange(600) % 3), method="sgld", lr=1e-3, warmup=0,
        draws=5, keep_every=300_000, max_seconds=2, progress=False,
    )  # fmt: skip
    assert time.monotonic() - began < 20.0  # on a machine however busy
    assert found.num_draws == 1 and "max_seconds" in found.info["stopped"]


@pytest.mark.usefixtures("built")
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
@pytest.mark.parametrize(("temperature", "variance"), [(1.0, 0.25), (0.25, 0.0625)])
@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"structure": "lowrank"}, (16, 64)), ({"method": "sghmc", "lr": 0.5}, (16, 64)),
        ({"structure": "lowrank"}, ()), ({"method": "sghmc", "lr": 0.5}, (5,)),
    ],
    ids=str,
)  # fmt: skip
def test_with_data_that_say_nothing_steps_sample_the_prior(
    options: dict[str, Any], hidden: tuple[int, ...], temperature: float, variance: float
) -> None:
    """As below, on minibatches; also without hidden layers, or with a narrow one."""
    posterior = target(dense(20, hidden, 1, nn.Tanh), likelihoods.Gaussian(1e3), priors.Normal(0.5))
    x = drawn(0, 500, 20)
    found = sample(
        posterior, (x, x[:, :1]), draws=150, keep_every=40, warmup=1000, chains=4, seed=0, progress=False,
        temperature=temperature, compile=False, **options,
    )  # fmt: skip
    assert found.info["engine"].endswith("several steps a call")
    squares = torch.cat([v.flatten(2) for v in found.draws.values()], 2).square().double()  # [chains, draws, d]
    means = squares.mean((1, 2))
    error = float(means.std() / math.sqrt(len(means)))
    assert abs(float(means.mean()) - variance) < 5 * max(error, variance * math.sqrt(2 / squares.numel()))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("label", [-1, 3, 1 << 40])
def test_labels_that_there_are_not_raise_an_error(label: int) -> None:
    """As with torch, and no other memory is read."""
    posterior = target(dense(3, (16, 16), 3), "categorical")
    layout, theta = parameters(posterior, 1)
    y = torch.zeros(1, 300, dtype=torch.int64)
    y[0, 299] = label
    with pytest.raises(IndexError, match="labels"):
        Many(posterior, 300, layout).flat(theta, (drawn(2, 1, 300, 3), y), False)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("later", "message"),
    [
        ((drawn(2, 100, 7), torch.full((100,), 3)), "y has the label 3, but the output has 3 classes"),
        ((drawn(2, 100, 6), torch.zeros(100).long()), r"cannot take inputs of shape \[100, 6\]"),
        ((drawn(2, 100, 7), torch.zeros(99).long()), "the inputs have 100 examples and y has 99"),
        ((drawn(2, 100, 7).double(), torch.zeros(100).long()), "The inputs are torch.float64"),
    ],
    ids=["label", "width", "rows", "dtype"],
)
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_later_batches_that_are_wrong_are_named(later: tuple[Tensor, Tensor], message: str, trained: bool) -> None:
    """Also among those of which the noise is measured at once."""
    net, good = dense(7, (64,), 3), (drawn(1, 100, 7), torch.arange(100) % 3)
    posterior = Target.from_module(net, "categorical", priors.Normal(1.0), num_data=600)
    with pytest.raises(ValueError, match=message):
        sample(posterior, [good] * 5 + [later], starts=[net] if trained else None, draws=2, warmup=300, progress=False)


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_noise_around_a_trained_network_is_measured_with_a_short_last_batch() -> None:
    net, x = dense(7, (64,), 3), drawn(1, 210, 7)
    batches = [(part, torch.arange(len(part)) % 3) for part in x.split(50)]
    posterior = Target.from_module(net, "categorical", priors.Normal(1.0), num_data=210)
    found = sample(posterior, batches, starts=[net], method="isgd", draws=2, keep_every=5, warmup=300, progress=False)
    assert all(bool(x.isfinite().all()) for x in found.draws.values())


@pytest.mark.usefixtures("built")
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
@pytest.mark.parametrize(
    ("temperature", "tempered", "variance"),
    [(1.0, "both", 0.25), (0.25, "both", 0.0625), (0.25, "likelihood", 0.25)],
    ids=["T = 1", "T = 1/4", "likelihood at T = 1/4"],
)
def test_without_data_the_posterior_is_the_prior(temperature: float, tempered: str, variance: float) -> None:
    """Noise so large that the data say nothing, so that all moments are known, and steps of the library."""
    posterior = target(dense(2, (16,), 1, nn.Tanh), likelihoods.Gaussian(1e4), priors.Normal(0.5))
    x = drawn(0, 500, 2)
    found = sample(
        posterior, (x, x[:, :1]), method="hmc", draws=150, keep_every=20, warmup=1000, chains=4, seed=0, progress=False,
        structure="diagonal", temperature=temperature, tempered=tempered,
    )  # fmt: skip
    assert found.info["engine"].endswith("several steps a call")
    squares = torch.cat([v.flatten(2) for v in found.draws.values()], 2).square().double()  # [chains, draws, d]
    means = squares.mean((1, 2))  # of each chain, independent of the others
    error = float(means.std() / math.sqrt(len(means)))
    assert abs(float(means.mean()) - variance) < 5 * max(error, variance * math.sqrt(2 / squares.numel()))
