"""Several steps a call: the same algorithm, the same draws however a run is stopped, and a failing chain is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isosgd import DataSets, DivergedError, Posterior, SamplingWarning, Target, priors, sample
from isosgd.data.sources import TensorBatches
from isosgd.engine.chains import Chains
from isosgd.engine.multistep import MultiStep, unsupported_reason
from isosgd.engine.schedule import Schedule
from isosgd.progress import Progress
from isosgd.samplers.innovations import fill_steps
from isosgd.sampling.settings import sampler_factory
from isosgd.warmup.windows import warmup_of
from tests.crashes import Crash, Tanh, crash_after
from tests.innovations import Planned

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")

ROWS = 60
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1) + 0.1 * torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
FOLDS = torch.stack([torch.randperm(ROWS, generator=torch.Generator().manual_seed(i))[:40] for i in range(2)])
STRUCTURES = ["layer", "single", "diagonal", "lowrank", "kronecker", "full"]
OTHERS: list[dict[str, Any]] = [
    {"method": "sghmc", "lr": 1e-4},
    {"method": "sghmc", "corrected": True},
    {"method": "isgd-momentum"},
    {"method": "sgnht", "lr": 1e-4},
    {"method": "psgld", "lr": 1e-4},
    {"method": "adaptive-sghmc"},
    {"method": "csgld", "lr": 1e-3, "cycle": 6, "decay": 0.5, "offset": 10.0},
    {"method": "csghmc", "cycle": 7},
]
KINDS: list[dict[str, Any]] = [{"method": "sgld", "lr": 1e-3}, *({"structure": name} for name in STRUCTURES), *OTHERS]
# Those whose steps in a call differ from another kind only in what a warm-up sets.
WARMED: list[dict[str, Any]] = [
    *(
        {"structure": "single"},
        {"structure": "layer"},
        {"structure": "lowrank"},
        {"structure": "kronecker"},
        {"method": "sghmc", "corrected": True},
    ),
    *({"method": "isgd-momentum"}, {"method": "adaptive-sghmc"}, {"method": "csghmc", "cycle": 7}),
]
SOME = [{"method": "sgld", "lr": 1e-3}, pytest.param({"structure": "diagonal"}, marks=pytest.mark.long)]


def make_target(activation: type[nn.Module] = Tanh) -> Target:
    model = nn.Sequential(nn.Linear(3, 2), activation(), nn.Linear(2, 1))
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3, generator=generator)
    return Target.from_module(model, "gaussian")


def make_chains(chains: int, options: dict[str, Any], data: Any = (X, Y)) -> Chains:
    given = dict(options)
    method = given.pop("method", "isgd")
    target = make_target(nn.Tanh)  # that can be compiled as a loop
    target.check(target.initial(), (X, Y))  # as `sample` does before anything is compiled
    schedule = Schedule(target, data, None, chains, 10, 0, None, None)
    _, run = next(
        iter(schedule.runs(sampler_factory(method, schedule.num_data, 1.0, 10, schedule.together_sets, given)))
    )
    if "lr" not in options:
        warmup_of(run, 200, Progress(1, show=False)).run(measure_spacing=False)
    return run


def quick(data: Any = (X, Y), **options: Any) -> Posterior:
    settings = {"draws": 5, "keep_every": 7, "warmup": 120, "batch_size": 10, "chains": 3, "progress": False}
    return sample(make_target(), data, compile=True, **{**settings, **options})


@pytest.mark.parametrize(
    ("options", "chains"),
    [
        *((kind, 3) for kind in KINDS if kind not in WARMED),
        *(pytest.param(kind, 3, marks=pytest.mark.long) for kind in WARMED),
        *((KINDS[0], 1), ({"structure": "lowrank"}, 1)),
    ],
    ids=str,
)
def test_the_steps_are_those_of_the_sampler(options: dict[str, Any], chains: int) -> None:
    """One by one, from the same minibatches and innovations, by the sampler's own step."""
    run, other = make_chains(chains, options), make_chains(chains, options)
    assert unsupported_reason(run) == ""
    stride = MultiStep(run, noise_every=1000, compiled=False)
    batches = other.batches
    assert isinstance(batches, TensorBatches)
    steps = 9
    index = batches.indices(steps)
    for leaf in other.leaves:
        leaf.grad = torch.zeros_like(leaf)
    other.sampler.injector.lay_out()
    other.sampler.injector.source.prepare()
    width = other.sampler.injector.source.out.shape[-1]
    xi = fill_steps(torch.empty(steps, chains, width), other.sampler.generator, stride.program.bits)
    stride.take_steps(0, steps, lambda count: None)
    other.sampler.refresh()
    for k in range(steps):
        batch = batches.at(index[k] if other.many is not None else index[k, 0])
        found = other.differentiate(other.params, batch, split=other.tracking is not None)
        if other.tracking is not None:
            assert found.noise is not None
            other.tracking.track_level(other.tracking.flatten(found.noise))
        for leaf, gradient in zip(other.leaves, found.gradients, strict=True):
            leaf.grad = gradient
        drawn = xi[k] if other.many is not None else xi[k, 0]
        with Planned(lambda out, generator, drawn=drawn: drawn):  # type: ignore[misc]
            other.sampler.step()
    for a, b in zip(run.leaves, other.leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.loss, found.loss, rtol=1e-4, atol=1e-5)
    assert (run.tracking is not None) == (options.get("structure") == "full")  # with so few rows the noise changes
    if run.tracking is not None and other.tracking is not None:
        torch.testing.assert_close(run.tracking.level, other.tracking.level, rtol=1e-4, atol=1e-5)
        assert bool((run.tracking.level != 1.0).all())


@pytest.mark.usefixtures("eager_compiler", "eager_store")
@pytest.mark.parametrize("options", SOME, ids=str)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    settings = {"noise_every": 5, **({"warmup": 0} if "lr" in options else {}), **options}
    whole = quick(**settings)
    assert whole.info["engine"] == "together, several steps a call"
    with crash_after(3, tmp_path), pytest.raises(Crash):
        quick(store=tmp_path, **settings)
    again = quick(store=tmp_path, resume=True, **settings)
    assert all(torch.equal(whole.draws[name], again.draws[name]) for name in whole.draws)


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.long
def test_data_sets_keep_to_their_own_rows() -> None:
    both = quick(DataSets((X, Y), rows=FOLDS), chains=2, structure="diagonal")
    assert both.info["engine"].endswith("several steps a call") and both.info["chains"] == 4
    run = make_chains(2, {"structure": "diagonal"}, DataSets((X, Y), rows=FOLDS))
    assert isinstance(run.batches, TensorBatches)
    index = run.batches.indices(5)
    for k in range(4):
        assert set(index[:, k].flatten().tolist()) <= set(FOLDS[k // 2].tolist())


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "sgrld", "lr": 1e-3},  # whose noise depends on where the chain is
        {"method": "sgrhmc", "lr": 1e-3},
        {"method": "csghmc", "lr": 1e-3, "corrected": True, "cycle": 4},  # whose rates change from step to step
        {"method": "adaptive-sghmc", "lr": 1e-3},  # which is still adapted
        {"method": "sgld", "lr": 1e-3, "decay": 0.5},
        {"noise": "gaussian", "correction": "diagonal", "lam": 1.0},  # which sees single gradients
    ],
    ids=str,
)
def test_others_take_single_steps(options: dict[str, Any]) -> None:
    assert quick(warmup=0, draws=2, keep_every=2, **options).info["engine"] == "together, compiled"
    assert quick(warmup=0, draws=2, keep_every=2, method="sgld", lr=1e-3).info["engine"].endswith("steps a call")


def cliff(threshold: float) -> Target:
    """Beyond a threshold the log likelihood is not a number."""

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        mu = params["mu"]
        return -0.5 * (batch[0] - mu) ** 2 * torch.where(mu > threshold, torch.nan, 1.0)

    return Target(log_likelihood, priors.Normal(1e3), init={"mu": 0.0})


@pytest.mark.usefixtures("eager_compiler")
def test_a_chain_that_diverges_is_dropped_with_its_number_and_cause() -> None:
    """All are drawn upwards, so little stirred that only the one that starts at the cliff comes to it."""
    y = torch.full((20,), 20.0)
    settings = {"method": "sgld", "lr": 1e-4, "warmup": 0, "keep_every": 3, "draws": 40, "progress": False}
    with pytest.warns(SamplingWarning, match="chain 1 was dropped"):
        found = sample(
            cliff(10.0), (y,), chains=3, init=lambda k: {"mu": 9.995 if k == 1 else 8.0},
            temperature=1e-6, batch_size=4, compile=True, **settings,
        )  # fmt: skip
    assert found.info["engine"].endswith("several steps a call")
    assert found.info["chain_indices"] == [0, 2]
    assert "gradient of group 'mu' is not finite" in found.info["dropped"][1]


@pytest.mark.usefixtures("eager_compiler")
def test_the_place_of_failure_is_found_exactly() -> None:
    """The step, and the state before it, are those at which the gradient was not finite."""
    settings: dict[str, Any] = {"method": "sgld", "lr": 0.01, "temperature": 1e-12, "warmup": 0, "batch_size": 4}
    settings |= {"draws": 3, "keep_every": 10, "compile": True, "progress": False}
    y = torch.full((20,), 20.0)
    with pytest.raises(DivergedError) as caught:  # 9.5 + 0.01 * 10.5 a step: beyond 10 after five
        sample(cliff(10.0), (y,), init={"mu": 9.5}, **settings)
    error = caught.value
    assert error.step == 5 and error.group == "mu" and 10.0 < float(error.state["mu"]) < 10.2
    with pytest.warns(SamplingWarning, match="chain 0 was dropped: after 5 gradients the gradient of group 'mu'"):
        found = sample(cliff(10.0), (y,), chains=2, init=lambda k: {"mu": 0.0 if k else 9.5}, **settings)
    assert found.info["engine"].endswith("several steps a call") and found.info["chain_indices"] == [1]
    assert bool((found.draws["mu"].diff(dim=1) > 0.1).all())


def test_where_nothing_can_be_compiled_steps_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **settings: Any) -> Any:
        def fail(*args: Any) -> Any:
            raise RuntimeError("no compiler found")

        return fail

    monkeypatch.setattr(torch, "compile", broken)  # where there is no compiler
    settings = {"method": "sgld", "lr": 1e-3, "warmup": 0}
    a = quick(**settings)
    assert a.info["engine"].startswith("together, not compiled (RuntimeError: no compiler found")
    b = sample(
        make_target(), (X, Y), draws=5, keep_every=7, batch_size=10, chains=3, compile=False, progress=False, **settings
    )
    assert all(torch.equal(a.draws[name], b.draws[name]) for name in a.draws)


@pytest.mark.parametrize("bits", [True, False])
def test_innovations_have_mean_zero_and_unit_variance(bits: bool) -> None:
    out = fill_steps(torch.empty(100, 20, 100), torch.Generator().manual_seed(0), bits)
    count = out.numel()
    assert abs(float(out.double().mean())) < 5 / count**0.5
    assert abs(float(out.double().square().mean()) - 1.0) < 5 * (2 / count) ** 0.5
    scale = torch.rand(20, 100)
    again = fill_steps(torch.empty(100, 20, 100), torch.Generator().manual_seed(0), bits, scale)
    torch.testing.assert_close(again, out * scale)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("chains", [1, 4])
def test_compiled_steps_lead_to_the_same_place(options: dict[str, Any], chains: int) -> None:
    runs = [make_chains(chains, options) for _ in range(2)]
    assert not any(unsupported_reason(run) for run in runs)
    fast, plain = MultiStep(runs[0], 5), MultiStep(runs[1], 5, compiled=False)
    assert not fast.failed
    for stride in (fast, plain):
        stride.take_steps(0, 17, lambda count: None)
        stride.take_steps(17, 4, lambda count: None)  # what a call leaves behind goes into the next
    assert not any(found.unsupported_reason for functions in fast.known.values() for found in functions)
    for a, b in zip(runs[0].leaves, runs[1].leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
