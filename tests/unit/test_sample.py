"""`sample`: draws that follow the seed, a warm-up that reports or complains, and chains that fail in the open."""

import json
import math
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from isosgd import DivergedError, Posterior, SamplingWarning, Target, likelihoods, load, priors, sample
from isosgd.warmup.base import DRAWS_A_TIME

# Short warm-ups are the rule here, and mostly beside the point; where they are the point they are caught.
pytestmark = pytest.mark.filterwarnings("ignore:.*did not settle:isosgd.errors.SamplingWarning")

N = 200
QUICK: dict[str, Any] = {"draws": 6, "keep_every": 3, "warmup": 200, "progress": False}


def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
    return -0.5 * (batch[0] - params["mu"]).square().sum(-1)


def make_target(function: Callable[[dict[str, Tensor], Any], Tensor] = log_likelihood, **options: Any) -> Target:
    return Target(function, priors.Normal(10.0), **{"init": {"mu": torch.full((2,), 3.0)}, **options})


class Breaks:
    """A log likelihood that turns bad after so many calls."""

    def __init__(self, after: float, bad: Callable[[Tensor], Tensor]) -> None:
        self.calls, self.after, self.bad = 0, after, bad

    def __call__(self, params: dict[str, Tensor], batch: Any) -> Tensor:
        self.calls += 1
        value = log_likelihood(params, batch)
        return self.bad(value) if self.calls > self.after else value


def times_nan(value: Tensor) -> Tensor:
    return value * math.nan  # the gradient is NaN too


def plus_nan(value: Tensor) -> Tensor:
    return value + math.nan  # the gradient is as good as before


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, ...]:
    """Rows around (3, 3) with noise one: the posterior has standard deviation 1/sqrt(N)."""
    return (3.0 + torch.randn(N, 2, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture(scope="module")
def quick(data: tuple[Tensor, ...]) -> tuple[Posterior, int]:
    """A run with the quick settings, and how often it called the log likelihood."""
    counter = Breaks(math.inf, times_nan)
    return sample(make_target(counter), data, **QUICK), counter.calls


# ------------------------------------------------------------------------------------------------ draws


def test_draws_have_chains_draws_and_shape(data: tuple[Tensor, ...]) -> None:
    posterior = sample(make_target(), data, chains=2, **QUICK)
    assert isinstance(posterior, Posterior)
    assert {name: tuple(x.shape) for name, x in posterior.draws.items()} == {"mu": (2, 6, 2)}
    assert not torch.equal(posterior.draws["mu"][0], posterior.draws["mu"][1])


def test_same_seed_same_draws(data: tuple[Tensor, ...], quick: tuple[Posterior, int]) -> None:
    """And global random numbers are left alone."""
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, other = (sample(make_target(), data, seed=seed, **QUICK).draws["mu"] for seed in (0, 2))
    assert torch.equal(first, quick[0].draws["mu"])
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numbers, np.random.get_state()[1])


def test_numbers_of_numpy_are_settings_too(data: tuple[Tensor, ...], tmp_path: Path) -> None:
    target, numbers = make_target(), {"draws": 3, "keep_every": 3, "warmup": 200, "temperature": 0.5}
    plain = sample(target, data, progress=False, lr=1e-3, method="sgld", **numbers)
    given: dict[str, Any] = {name: np.asarray(value)[()] for name, value in numbers.items()}
    rate = np.float32(1e-3)
    found = sample(target, data, progress=False, lr=rate, method="sgld", store=tmp_path / "run", **given)
    assert not isinstance(given["draws"], int)
    torch.testing.assert_close(found.draws["mu"], plain.draws["mu"], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"temperature = -1\.0"):
        sample(target, data, temperature=np.float32(-1))  # type: ignore[arg-type]


@pytest.mark.long
def test_numbers_of_numpy_make_a_target(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    settings: tuple[Callable[[Any, Any], dict[str, Any]], ...] = (
        lambda f, i: {"prior": priors.Normal(f(2))},
        lambda f, i: {"weight_decay": f(0.5)},
        lambda f, i: {"weight_decay": {"*": i(1)}, "likelihood": likelihoods.StudentT(df=i(6))},
    )
    for k, made in enumerate(settings):
        ours, plain = (
            Target.from_module(model, **{"likelihood": "gaussian", **made(f, i)}, num_data=i(60))
            for f, i in ((np.float32, np.int64), (float, int))
        )
        call: dict[str, Any] = {"method": "sgld", "lr": 1e-4, **QUICK}
        expected = sample(plain, (x, x[:, :1]), store=tmp_path / str(k), **call)
        found = sample(ours, (x, x[:, :1]), **call)
        assert torch.equal(found.draws["weight"], expected.draws["weight"])
        assert load(tmp_path / str(k), ours).num_draws == QUICK["draws"]  # the same target


def test_a_start_is_respected(data: tuple[Tensor, ...]) -> None:
    start = torch.tensor([7.0, -7.0])
    posterior = sample(
        make_target(), data, init={"mu": start}, method="sgld", lr=1e-9, warmup=0, keep_every=1, draws=2, progress=False
    )
    torch.testing.assert_close(posterior.draws["mu"], start.expand(1, 2, 2), atol=0.01, rtol=0.0)


@pytest.mark.parametrize("preset", ["alpha-a", "G-c-slr"])
def test_the_papers_rows_by_name(preset: str, data: tuple[Tensor, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # these schemes have no guard, and say so
        posterior = sample(
            make_target(), data, preset=preset, temperature=1e-3, warmup=120, draws=2, keep_every=2, progress=False
        )
    assert bool(posterior.draws["mu"].isfinite().all())
    assert posterior.info["options"] == {"preset": preset}


def test_positive_parameters_are_drawn_as_such(data: tuple[Tensor, ...]) -> None:
    target = Target(
        lambda params, batch: (-0.5 * (batch[0][:, 0] - 3) ** 2 / params["sigma"] ** 2) - params["sigma"].log(),
        priors.HalfNormal(2.0),
        positive=["sigma"],
        init={"sigma": 1.0},
    )
    draws = sample(target, data, **QUICK).draws["sigma"]
    assert bool((draws > 0.5).all()) and bool((draws < 2.0).all())


def test_arrays_and_a_device_are_welcome(data: tuple[Tensor, ...], quick: tuple[Posterior, int]) -> None:
    arrays = sample(make_target(), (data[0].numpy(),), device="cpu", **QUICK)
    assert torch.equal(quick[0].draws["mu"], arrays.draws["mu"])


# ------------------------------------------------------------------------------------------------ information


def test_information_is_plain_and_complete(data: tuple[Tensor, ...]) -> None:
    posterior = sample(make_target(), data, chains=2, seed=4, temperature=0.5, bias=0.03, **QUICK)
    info = json.loads(json.dumps(posterior.info, allow_nan=False))
    expected = {
        "method": "isgd",
        "options": {"bias": 0.03},
        "temperature": 0.5,
        "num_data": N,
        "batch_size": 100,
        "draws": 6,
        "chains": 2,
        "chain_indices": [0, 1],
        "sets": 1,
        "engine": "together",
        "keep_every": [3, 3],
        "seed": 4,
        "dropped": {},
    }
    assert {key: info[key] for key in expected} == expected
    assert set(info["versions"]) == {"isosgd", "torch", "numpy", "python", "native"}
    assert info["gradients"] == 2 * (info["warmup"][0]["steps"] + 6 * 3) and info["seconds"] > 0
    assert [list(rates) for rates in info["rates"]] == [["mu"], ["mu"]]
    assert info["target"]["parameters"] == {"mu": [2]}
    assert all(0.95 * QUICK["warmup"] <= report["steps"] <= QUICK["warmup"] for report in info["warmup"])


def test_the_warmup_settles_and_reports_each_group(data: tuple[Tensor, ...]) -> None:
    posterior = sample(
        make_target(), data, init={"mu": torch.zeros(2)}, **{**QUICK, "warmup": "auto"}, structure="layer"
    )
    (report,) = posterior.info["warmup"]
    assert report["settled"] and report["reason"] == "" and report["keep_every"] is None
    assert 0 < report["optimisation"] < report["steps"]
    (group,) = report["groups"]
    assert group["name"] == "mu"
    assert group["rate"] == pytest.approx(1.0 / (N * group["lam"]))
    assert group["curvature"] == pytest.approx(1.0, rel=0.1)
    assert group["rate_curvature"] == pytest.approx(group["rate"] * group["curvature"])
    assert 0 < group["predicted_bias"] <= 0.0201
    # Over seeds 1 / alpha, which is estimated, has a standard error of about .08 here: four and a half of them.
    assert 1.0 / (0.5 + 4.5 * 0.08) < group["tail_index"] <= 2.0
    assert 0 < group["noise_share"] < 1
    assert 0 <= group["clipped_share"] < 0.1


@pytest.mark.long
def test_draws_are_spaced_by_the_autocorrelation(data: tuple[Tensor, ...]) -> None:
    """Here mu is an autoregression with coefficient 1 - rate h, so its integrated time is (2 - rate h) / (rate h).

    Measured over some 600 steps it has a relative standard error of about 0.4. There are two draws in such a time.
    """
    posterior = sample(make_target(), data, draws=2, warmup=1200, batch_size=100, bias=0.2, progress=False)
    (report,), (gap,) = posterior.info["warmup"], posterior.info["keep_every"]
    assert gap == report["keep_every"]
    step = report["groups"][0]["rate_curvature"]
    assert 0.4 < gap / ((2 - step) / step / DRAWS_A_TIME) < 3.0


# ------------------------------------------------------------------------------------------------ complaints


def test_a_warmup_that_cannot_settle_says_so_and_what_would_help(data: tuple[Tensor, ...]) -> None:
    with pytest.warns(SamplingWarning, match=r"chain 0: the warm-up did not settle; .*warmup="):
        posterior = sample(make_target(), data, init={"mu": torch.full((2,), 1e3)}, **{**QUICK, "warmup": 120})
    (report,) = posterior.info["warmup"]
    assert not report["settled"] and "warmup=" in report["reason"]


@pytest.mark.parametrize("keep_every", [3, "auto"])
@pytest.mark.parametrize("steps", [1, 55])
def test_a_warmup_too_short_for_anything_says_so(steps: int, keep_every: Any, data: tuple[Tensor, ...]) -> None:
    """Either a warning with draws, or an error that names the number; nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sample(make_target(), data, draws=2, keep_every=keep_every, warmup=steps, progress=False)
        except ValueError as error:
            assert f"warmup = {steps}" in str(error), error
        else:
            assert any("did not settle" in str(w.message) for w in caught)
    assert {w.category for w in caught} <= {SamplingWarning}


@pytest.mark.parametrize("structure", ["layer", "full"])
def test_a_given_warmup_is_spent_to_the_last_gradient(structure: str, data: tuple[Tensor, ...]) -> None:
    posterior = sample(make_target(), data, structure=structure, **{**QUICK, "warmup": 333})
    assert posterior.info["warmup"][0]["steps"] == 333


@pytest.mark.parametrize("keep_every", [3, "auto"])
@pytest.mark.parametrize("steps", [100, 120])
def test_a_warmup_that_ends_before_its_first_window_says_so(
    steps: int, keep_every: Any, data: tuple[Tensor, ...]
) -> None:
    """All is spent on the way down and on a first look at the noise: rates there are, but nothing else is known."""
    far = {"mu": torch.full((2,), 1e3)}
    settings = {"draws": 2, "keep_every": keep_every, "warmup": steps, "structure": "layer", "progress": False}
    if keep_every == "auto":
        with pytest.raises(ValueError, match=f"warmup = {steps} ends before anything was measured: give at least"):
            sample(make_target(), data, init=far, **settings)
    else:
        with pytest.warns(SamplingWarning, match=r"did not settle; \d+ steps are too few: give warmup at least"):
            sample(make_target(), data, init=far, **settings)


@pytest.mark.parametrize(("bad", "group"), [(times_nan, "mu"), (plus_nan, None)])
def test_a_chain_that_diverges_keeps_what_it_had(
    bad: Callable[[Tensor], Tensor], group: str | None, data: tuple[Tensor, ...], quick: tuple[Posterior, int]
) -> None:
    whole, calls = quick
    broken = Breaks(calls - 5, bad)
    with pytest.raises(DivergedError, match=r"gradients.*not finite|gradients the loss is nan") as caught:
        sample(make_target(broken), data, **QUICK)
    error = caught.value
    assert error.group == group
    assert QUICK["warmup"] < error.step < whole.info["gradients"]
    kept = error.draws["mu"]
    assert 0 < len(kept) < 6 and torch.equal(kept, whole.draws["mu"][0, : len(kept)])
    assert error.state["mu"].shape == (2,) and bool(error.state["mu"].isfinite().all())


def test_a_chain_that_diverges_in_the_warmup_has_no_draws(data: tuple[Tensor, ...]) -> None:
    with pytest.raises(DivergedError, match="check init and data") as caught:
        sample(make_target(Breaks(100, times_nan)), data, **QUICK)
    assert caught.value.draws == {} and bool(caught.value.state["mu"].isfinite().all())


def test_one_of_several_chains_in_turn_may_fail(data: tuple[Tensor, ...]) -> None:
    """Chains on a loader run one after the other; the first is as it would be alone."""
    counter = Breaks(math.inf, times_nan)
    whole = sample(make_target(counter), loader(data, replacement=True), **QUICK)
    broken = Breaks(counter.calls + 60, times_nan)
    with pytest.warns(SamplingWarning, match="chain 1 was dropped: after .* gradients"):
        posterior = sample(make_target(broken), loader(data, replacement=True), chains=2, **QUICK)
    assert posterior.num_chains == 1
    assert posterior.info["chains"] == 1 and list(posterior.info["dropped"]) == [1]
    assert "loader" in posterior.info["engine"]
    assert torch.equal(posterior.draws["mu"], whole.draws["mu"])


# ------------------------------------------------------------------------------------------------ loaders


def loader(data: tuple[Tensor, ...], replacement: bool) -> DataLoader[Any]:
    rows, generator = TensorDataset(*data), torch.Generator().manual_seed(0)
    return DataLoader(
        rows,
        batch_size=20,
        sampler=RandomSampler(rows, replacement=replacement, generator=generator),
        generator=generator,
    )


def test_a_loader_with_replacement_is_as_good_as_tensors(data: tuple[Tensor, ...]) -> None:
    posterior = sample(make_target(), loader(data, replacement=True), **QUICK)
    assert posterior.info["num_data"] == N
    assert float((posterior.draws["mu"] - data[0].mean(0)).abs().max()) < 8 / math.sqrt(N)


def test_a_shuffled_loader_is_warned_of_where_it_matters(data: tuple[Tensor, ...]) -> None:
    with pytest.warns(SamplingWarning, match=r"not drawn independently.*\d+% of the composite noise.*replacement=True"):
        sample(make_target(), loader(data, replacement=False), **QUICK)


def test_a_shuffled_loader_is_fine_where_its_noise_drowns(data: tuple[Tensor, ...]) -> None:
    sample(make_target(), loader(data, replacement=False), bias=1e-3, **QUICK)


def test_any_iterable_of_batches_will_do_once_the_number_of_data_is_known(data: tuple[Tensor, ...]) -> None:
    batches = [(part,) for part in data[0].split(20)]
    with pytest.warns(SamplingWarning, match="not drawn independently"):
        posterior = sample(make_target(num_data=N), batches, **QUICK)
    assert posterior.info["num_data"] == N


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_noise_scales_do_not_leap_where_gradients_say_little(seed: int) -> None:
    """Fifty rows and a scale that starts ten times too large: the warm-up lost chains here."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, 6, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(50, 1, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = Target.from_module(torch.nn.Linear(6, 1), "gaussian")
    posterior = sample(
        target, (x, y), chains=4, draws=10, warmup=1500, keep_every=20, progress=False, seed=seed, compile=False
    )
    assert posterior.info["dropped"] == {}
    scale = posterior.draws["likelihood.scale"].mean(1)
    assert bool(((scale > 0.07) & (scale < 0.16)).all())  # sqrt(50 / 43) * 0.1 and 4.5 standard errors of a tenth


def test_loss_and_rates_are_logged_at_every_draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            noted.append((name, value, step))

        def close(self) -> None:
            noted.append(("closed", 0.0, 0))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    settings = {"draws": 3, "keep_every": 5, "warmup": 200, "structure": "layer", "progress": False}
    posterior = sample(make_target(), (y,), chains=2, log=tmp_path, **settings)
    steps = sorted({step for name, _, step in noted if name.startswith("loss")})
    assert steps == [200 + 5, 200 + 10, 200 + 15]
    assert [name for name, _, step in noted if step == steps[0]] == ["loss/chain 0", "loss/chain 1", "rate/mu"]
    mean = sum(rates["mu"] for rates in posterior.info["rates"]) / 2
    assert all(value == pytest.approx(mean) for name, value, _ in noted if name == "rate/mu")
    assert noted[-1][0] == "closed"
