"""The estimators of scikit-learn: what they take, what they give, and that they know how sure they are."""

import _thread
import copy
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from isosgd import SamplingWarning
from isosgd.engine.gradients import Layout, Many
from isosgd.native.build import switched_off
from isosgd.native.layers import THREADED, Layers, network_of_tables
from isosgd.sklearn import BayesianMLPClassifier, BayesianMLPRegressor, load, resume
from isosgd.tables.network import NOISES, Network, fast_arithmetic, steps_for, usual_layers

SHORT: dict[str, Any] = {"hidden_layers": (8,), "effort": 0.05, "chains": 2, "random_state": 0}
OTHER_SIZES = ("loglinear", "loglinear_t", "heteroscedastic", "heteroscedastic_t")
SHORTEST: dict[str, Any] = {**SHORT, "hidden_layers": (4,), "effort": 0.02, "chains": 1}  # where many are fitted


def linear(n: int, seed: int, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    return x, 10 + 4 * (x @ [1.0, -2.0, 0.0] + noise * rng.normal(size=n))


def mixed(n: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(seed)
    size, town = rng.normal(100, 20, n), rng.choice(["Oslo", "Rome"], n)
    y = size + 40 * (town == "Rome") + rng.normal(0, 5, n)
    frame = pd.DataFrame({
        "size": np.where(rng.uniform(size=n) < 0.1, np.nan, size),
        "town": pd.Series(np.where(rng.uniform(size=n) < 0.1, None, town), dtype=object),
        "built": pd.Timestamp("2001-01-01") + pd.to_timedelta(rng.integers(0, 5000, n), unit="D"),
        "garden": rng.uniform(size=n) < 0.5,
    })  # fmt: skip
    return frame, y


@pytest.fixture(scope="module")
def fitted() -> BayesianMLPRegressor:
    return BayesianMLPRegressor(**{**SHORT, "effort": 0.3}).fit(*linear(80, 0))


# -- the contract of scikit-learn -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", [BayesianMLPRegressor, BayesianMLPClassifier])
def test_scikit_learns_own_checks_pass(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's own, of checks that it skips
        found = check_estimator(kind(**SHORTEST))
    assert {check["status"] for check in found} <= {"passed", "skipped"}
    assert not [check for check in found if check["expected_to_fail"]]


def test_copies_and_pickles_predict_the_same(fitted: BayesianMLPRegressor) -> None:
    x, _ = linear(80, 0)
    again = copy.deepcopy(fitted)  # by the same state as a pickle
    assert np.array_equal(again.predict(x), fitted.predict(x))
    assert again.trust_.summary == fitted.trust_.summary


def test_a_clone_is_fitted_to_the_same(frame_model: BayesianMLPRegressor) -> None:
    frame, y = mixed(40, 0)
    assert np.array_equal(clone(frame_model).fit(frame, y).predict(frame), frame_model.predict(frame))


@pytest.mark.long
def test_a_pipeline_is_searched_and_scored() -> None:
    frame, y = mixed(60, 0)
    frame = frame[["size", "town"]].dropna()
    y = y[frame.index]
    encode = ColumnTransformer([("number", StandardScaler(), ["size"]), ("name", OneHotEncoder(), ["town"])])
    model = make_pipeline(encode, BayesianMLPRegressor(**SHORTEST))
    assert np.mean(cross_val_score(model, frame, y, cv=2)) > 0.5
    search = GridSearchCV(model, {"bayesianmlpregressor__likelihood": ["student_t", "gaussian"]}, cv=2)
    assert search.fit(frame, y).best_params_["bayesianmlpregressor__likelihood"] in ("student_t", "gaussian")


# -- what is predicted ------------------------------------------------------------------------------------------------


def test_predictions_come_in_all_forms(fitted: BayesianMLPRegressor) -> None:
    x, y = linear(400, 1)
    mean, std = fitted.predict(x, return_std=True)
    low, middle, high = fitted.predict(x, quantiles=(0.025, 0.5, 0.975))
    draws = fitted.predict(x, return_draws=True)
    assert np.allclose(draws.mean(0), mean) and np.array_equal(mean, fitted.predict(x))
    assert (low < middle).all() and (middle < high).all()
    # 400 rows: a standard error of .011, and the model's own uncertainty from 80 rows.
    assert 0.89 < np.mean((y > low) & (y < high)) < 0.99
    assert 1.6 < std.mean() < 3.0  # the noise has 2
    assert fitted.score(x, y) > 0.9
    with pytest.raises(ValueError, match="choose one of"):
        fitted.predict(x, return_std=True, return_draws=True)
    with pytest.raises(ValueError, match="between 0 and 1"):
        fitted.predict(x, quantiles=[1.5])
    with pytest.raises(ValueError, match="quantiles = 95: give a sequence"):
        fitted.predict(x, quantiles=95)


def test_drawn_targets_have_the_distribution_that_quantiles_say(fitted: BayesianMLPRegressor) -> None:
    x, _ = linear(3, 1)
    drawn = fitted.sample_y(x, 4_000, random_state=1)
    assert drawn.shape == (3, 4_000) and np.array_equal(drawn, fitted.sample_y(x, 4_000, random_state=1))
    levels = np.array([0.1, 0.5, 0.9])
    below = (drawn[None] < fitted.predict(x, quantiles=levels)[..., None]).mean(-1)
    error = np.sqrt(levels * (1 - levels) / 4_000)[:, None]
    assert (np.abs(below - levels[:, None]) < 4.5 * error).all()


@pytest.mark.long
def test_several_targets_have_noise_of_their_own() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 2))
    y = np.stack([x[:, 0] + 0.1 * rng.normal(size=150), x[:, 1] + rng.normal(size=150)], 1)
    model = BayesianMLPRegressor(**{**SHORT, "effort": 0.15}).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == (150, 2) and model.sample_y(x[:4], 5).shape == (4, 2, 5)
    assert std[:, 1].mean() > 3 * std[:, 0].mean()


def test_classes_have_probabilities_and_names() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    y = np.where(x[:, 0] > 0, "yes", "no").astype(object)
    y[0] = "perhaps"  # a class with one row
    model = BayesianMLPClassifier(**SHORT).fit(x, y)
    found = model.predict_proba(x)
    assert list(model.classes_) == ["no", "perhaps", "yes"] and np.allclose(found.sum(1), 1)
    assert model.score(x, y) > 0.9 and set(model.sample_y(x, 20).flat) <= set(model.classes_)
    power = model.predict_proba(x, return_draws=True).mean(0) ** (1 / model.softmax_temperature_)
    assert np.allclose(power / power.sum(1, keepdims=True), found)


def test_averages_of_classes_are_as_sure_as_unseen_rows_want_them() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 6))
    y = (x[:, :3] + 0.05 * rng.normal(size=(900, 3))).argmax(1)  # all but separable
    model = BayesianMLPClassifier(**SHORT).fit(x[:300], y[:300])
    own = np.arange(600), y[300:]
    plain, found = model.predict_proba(x[300:], return_draws=True).mean(0), model.predict_proba(x[300:])
    gain = np.log(found[own]) - np.log(plain[own])
    assert model.softmax_temperature_ < 1
    assert gain.mean() > 3 * gain.std() / np.sqrt(600)


def test_rows_that_are_repeated_do_not_say_how_sure_averages_should_be() -> None:
    """Copies of a row are in the posterior that one of them is left out of: it has seen the row."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 3))
    y = (x[:, 0] > 0).astype(int)
    once, often = (BayesianMLPClassifier(**SHORTEST).fit(np.repeat(x, k, 0), np.repeat(y, k)) for k in (1, 3))
    assert once.softmax_temperature_ != 1 == often.softmax_temperature_


@pytest.mark.long
def test_how_sure_averages_are_comes_back_with_the_draws(tmp_path: Path) -> None:
    """And is found anew from more of them; it is on a grid, so that it may come out the same for some data."""
    changed = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, folder = rng.normal(size=(80, 3)), tmp_path / str(seed)
        y = (x + rng.normal(size=x.shape)).argmax(1)
        model = BayesianMLPClassifier(**SHORTEST).fit(x, y, store=folder)
        found = model.predict_proba(x)
        for other in (load(folder), copy.deepcopy(model)):
            assert other.softmax_temperature_ == model.softmax_temperature_
            assert np.array_equal(other.predict_proba(x), found)
        longer = resume(folder, draws=4 * model.posterior_.num_draws)
        assert load(folder).softmax_temperature_ == longer.softmax_temperature_
        changed.append(longer.softmax_temperature_ != model.softmax_temperature_)
    assert any(changed)


@pytest.mark.long
def test_linear_data_lose_little_to_a_linear_model() -> None:
    x, y = linear(100, 2)
    test_x, test_y = linear(2_000, 3)
    model = BayesianMLPRegressor(random_state=0).fit(x, y)  # at its defaults: the gate takes time to close
    ridge = BayesianRidge().fit(x, y)

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.mean((found - test_y) ** 2)))

    assert error(model.predict(test_x)) < 1.1 * error(ridge.predict(test_x))


# -- what is given ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_frames_are_taken_as_they_are() -> None:
    frame, y = mixed(150, 0)
    model = BayesianMLPRegressor(**{**SHORT, "effort": 0.3}).fit(frame, y)
    new, target = mixed(100, 1)
    assert model.score(new, target) > 0.5 and list(model.feature_names_in_) == list(frame.columns)
    new.loc[0, "town"] = "Paris"  # a level that was never seen
    assert np.isfinite(model.predict(new)).all()
    told = polars.DataFrame({name: new[name].to_list() for name in new.columns})
    assert np.allclose(model.predict(told.with_columns(polars.col("size").fill_nan(None))), model.predict(new))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda frame: frame.drop(columns="town"), "feature names"),
        (lambda frame: frame[["town", "size", "built", "garden"]], "feature names"),
        (lambda frame: frame.assign(colour="red"), "feature names"),
        (
            lambda frame: frame.assign(size="big"),
            "'size' was one of numbers when the model was fitted; now it holds 'big'",
        ),
        (lambda frame: frame.assign(size=frame["built"]), "'size' was one of numbers"),
        (lambda frame: frame.assign(built=3.5), "'built' was one of dates when the model was fitted; now it holds 3.5"),
        (lambda frame: frame.assign(town=3.5), "'town' was one of categories when .* now it holds the number 3.5"),
        (lambda frame: frame.to_numpy(), "column 'town' is not one of numbers: give X as a frame"),
        (lambda frame: frame.assign(size=np.inf), "'size' has infinite values"),
        (lambda frame: frame.iloc[:0], "0 rows"),
    ],
)
def test_other_columns_are_refused(change: Any, why: str, frame_model: BayesianMLPRegressor) -> None:
    with pytest.raises(ValueError, match=why):
        frame_model.predict(change(mixed(20, 1)[0]))


@pytest.fixture(scope="module")
def frame_model() -> BayesianMLPRegressor:
    return BayesianMLPRegressor(**SHORT).fit(*mixed(40, 0))


@pytest.mark.parametrize(
    ("settings", "target", "why"),
    [
        ({}, lambda y: np.ones_like(y), "y is always 1"),
        ({}, lambda y: np.where(y > 0, np.inf, y), "infinity"),
        ({"chains": 0}, None, "chains = 0"),
        ({"effort": -1.0}, None, "effort = -1.0"),
        ({"hidden_layers": "deep"}, None, "hidden_layers = 'deep'"),
        ({"hidden_layers": "64"}, None, "hidden_layers = '64'"),
        ({"hidden_layers": (16.5, 16)}, None, r"hidden_layers = \(16.5, 16\): give 'auto'"),
        ({"hidden_layers": (0,)}, None, "hidden layers"),
        ({}, lambda y: np.where(y > 0, "high", "low"), "y holds text, such as '.*': BayesianMLPClassifier"),
        ({"likelihood": "categorical"}, None, "likelihood = 'categorical'"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, Any], target: Any, why: str) -> None:
    x, y = linear(30, 0)
    with pytest.raises(ValueError, match=why):
        BayesianMLPRegressor(**{**SHORT, **settings}).fit(x, y if target is None else target(y))


@pytest.mark.parametrize("kind", [BayesianMLPRegressor, BayesianMLPClassifier])
def test_what_fit_does_not_take_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = linear(30, 0)
    labels = (y > y.mean()).astype(int)
    with pytest.raises(TypeError, match=r"sample_weight is not supported.*: repeat rows instead"):
        kind(**SHORT).fit(x, labels, sample_weight=np.ones(30))
    with pytest.raises(TypeError, match="unexpected argument 'eval_set'; it takes X, y, store and held_out"):
        kind(**SHORT).fit(x, labels, eval_set=[(x, y)])
    with pytest.raises(ValueError, match="max_seconds = -1 must be"):
        kind(**{**SHORT, "max_seconds": -1}).fit(x, labels)
    with pytest.raises(ValueError, match="chains = 1,000,000,000 need"):
        kind(**{**SHORT, "chains": 10**9}).fit(x, labels)
    monkeypatch.setattr("isosgd.sklearn.memory", lambda: 1_000)  # rows that no memory holds cannot be made
    with pytest.raises(ValueError, match="30 rows of 3 inputs take up more memory than this machine has: fit fewer"):
        kind(**SHORT).fit(x, labels)


def test_a_fit_that_is_left_few_draws_warns() -> None:
    x, y = linear(60, 0)
    with pytest.warns(SamplingWarning, match=r"max_seconds = 0.05 left time for \d draws of each chain"):
        model = BayesianMLPRegressor(chains=2, max_seconds=0.05, random_state=0).fit(x, y)
    with pytest.raises(ValueError, match="too few for a verdict, which takes 8 at least"):
        _ = model.trust_


def test_one_class_and_infinite_inputs_are_refused() -> None:
    x, _ = linear(30, 0)
    with pytest.raises(ValueError, match="one class"):
        BayesianMLPClassifier(**SHORT).fit(x, ["a"] * 30)
    with pytest.raises(ValueError, match="infinity"):
        BayesianMLPClassifier(**SHORT).fit(np.where(x > 1, np.inf, x), np.arange(30) % 2)


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the library", "torch"])
@pytest.mark.parametrize("hidden", [(), (5, 4), (17, 16, 34)])  # the last is wide enough for the library in C++
@pytest.mark.parametrize("likelihood", [*NOISES, "categorical"])
def test_one_pass_for_all_chains_gives_the_gradients_of_each(likelihood: str, hidden: tuple[int, ...], by: str) -> None:
    outputs = 3 if likelihood == "categorical" else 2
    network = Network(3, outputs, likelihood, hidden)
    target, draw = network.target(), torch.Generator().manual_seed(0)
    starts = [target.initial(network.start(chain)) for chain in range(3)]
    layout = Layout(starts[0])
    theta = torch.stack([torch.cat([p.detach().flatten() for p in start.values()]) for start in starts])
    theta += 0.3 * torch.randn(theta.shape, generator=draw)  # no weight is zero
    many, n = Many(target, 300, layout), 301
    x = 3 * torch.randn(3, n, 3, generator=draw)
    labels = torch.randint(3, (3, n), generator=draw)
    y = labels if likelihood == "categorical" else torch.randn(3, n, outputs, generator=draw)
    assert many.layers is not None and many.layers.fits(theta, x) == (bool(hidden) and not switched_off())
    if by == "torch":
        many.layers = None
    for split in (False, True):
        loss, gradient, noise = many.flat(theta, (x, y), split)
        assert (noise is not None) == split
        for k in range(3):
            free = {name: p.double().requires_grad_() for name, p in layout.views(theta[k]).items()}
            batch = x[k].double(), y[k] if likelihood == "categorical" else y[k].double()
            one, wanted = target.gradient(free, batch, 300)
            flat = torch.cat([g.flatten() for g in wanted])
            assert abs(loss[k] - one) < 1e-5 * one.abs()
            assert (gradient[k] - flat).abs().max() < 1e-5 * flat.abs().max(), "more than rounding"
            prior = many.flat_prior(theta).log_prob(theta)[k]
            assert torch.isclose(prior.double(), target.log_prior(free), rtol=1e-5)


@pytest.mark.long
def test_threads_of_the_library_share_chains() -> None:
    shapes = {name: tuple(p.shape) for name, p in Network(3, 1, "student_t", (16, 20)).start(0).items()}
    layers, draw = Layers(network_of_tables(shapes), shapes), torch.Generator().manual_seed(0)
    theta = torch.randn(5, layers.total, generator=draw)
    rows = 1 + THREADED // theta.numel()  # so many that threads pay
    x, slope = torch.randn(5, rows, 3, generator=draw), torch.randn(5, rows, 1, generator=draw)
    if not layers.fits(theta, x):
        pytest.skip("there is no compiler")
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append((layers.forward(theta, x), layers.backward(theta, x, slope)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_chains_that_have_diverged_show_it() -> None:
    network = Network(3, 1, "student_t", (16, 16))
    target = network.target()
    layout = Layout(target.initial(network.start(0)))
    theta = torch.cat([p.detach().flatten() for p in target.initial(network.start(0)).values()]).repeat(3, 1)
    theta[1, layout.slots["hidden.0.weight"]] = math.nan
    theta[2, layout.slots["hidden.0.weight"]] = math.inf
    loss, gradient, _ = Many(target, 50, layout).flat(theta, (torch.ones(3, 50, 3), torch.ones(3, 50, 1)), False)
    assert loss.isfinite().tolist() == [True, False, False]
    assert gradient.isfinite().all(1).tolist() == [True, False, False]


def test_effort_lengthens_chains_and_size_shortens_them() -> None:
    network = Network(10, 1, hidden=usual_layers(500))
    one, four = (steps_for(500, network, 8, effort) for effort in (1.0, 4.0))
    assert four["warmup"] == 4 * one["warmup"] and four["keep_every"] == 4 * one["keep_every"]
    large = Network(10, 1, hidden=usual_layers(20_000))
    assert steps_for(20_000, large, 8, 1.0)["warmup"] < steps_for(5_000, large, 8, 1.0)["warmup"]


def test_denormals_and_threads_are_as_they_were_afterwards() -> None:
    tiny, threads = torch.tensor([1e-40]), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for products, used in ((1_000, 1), (1 << 30, 2)):
            with fast_arithmetic(torch.device("cpu"), products):
                assert float(tiny * 1.0) == 0 and torch.get_num_threads() == used
            assert float(tiny * 1.0) > 0 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_rows_that_repeat_are_like_themselves() -> None:
    frame = pd.DataFrame({"a": list("uvwu") * 20, "b": [0, 1, 1, 1] * 20})
    model = BayesianMLPRegressor(**SHORTEST).fit(frame, np.arange(80.0))
    assert not any(model.unlike(frame))


def test_a_fit_that_was_interrupted_predicts_nothing() -> None:
    x, y = linear(40, 0)
    model = BayesianMLPRegressor(**SHORTEST).fit(x, y)
    ctrl_c = threading.Timer(1.0, _thread.interrupt_main)
    ctrl_c.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            model.set_params(effort=1000.0).fit(x, 100 * y)
    finally:
        ctrl_c.cancel()
    with pytest.raises(NotFittedError):
        model.predict(x)


@pytest.mark.parametrize(
    ("rows", "target", "why"),
    [
        (10, lambda y: y[:7], r"inconsistent numbers of samples: \[10, 7\]"),
        (10, lambda y: y[:10] * np.nan, "contains NaN"),
        (10, lambda y: np.stack([y[:10]] * 2, 1), r"held_out y has the shape \(10, 2\) and y has \(40,\)"),
    ],
    ids=["rows", "missing", "columns"],
)
def test_held_out_targets_are_checked_before_a_fit(rows: int, target: Any, why: str) -> None:
    x, y = linear(40, 0)
    with pytest.raises(ValueError, match=why):
        BayesianMLPRegressor(**SHORT).fit(x, y, held_out=(x[:rows], target(y)))
    with pytest.raises(ValueError, match="must be a pair"):
        BayesianMLPRegressor(**SHORT).fit(x, y, held_out=x)


def test_durations_are_numbers_and_periods_are_dates() -> None:
    frame = pd.DataFrame({
        "waited": pd.to_timedelta(np.arange(40), "h"), "month": pd.period_range("2020-01", periods=40, freq="M")
    })  # fmt: skip
    model = BayesianMLPRegressor(**SHORT).fit(frame, np.arange(40.0))
    assert model.columns_.numbers == ["waited"] and model.columns_.dates == ["month"]
    assert np.corrcoef(model.predict(frame), np.arange(40))[0, 1] > 0.5
    with pytest.raises(ValueError, match="column 'l' holds a list: make columns of"):
        model.fit(pd.DataFrame({"l": [[1, 2]] * 40}), np.arange(40.0))
    with pytest.raises(TypeError, match=r"give X.collect\(\)"):
        model.fit(polars.DataFrame({"x": np.arange(40.0)}).lazy(), np.arange(40.0))
    with pytest.raises(ValueError, match="y holds dates or times"):
        model.fit(frame[["waited"]], frame["month"].dt.to_timestamp())


def test_predictions_of_many_rows_are_made_in_parts(fitted: BayesianMLPRegressor) -> None:
    x = np.random.default_rng(0).normal(size=(4_500, 3))
    few = slice(1_990, 2_010)
    for given in ({}, {"return_std": True}, {"quantiles": (0.1, 0.9)}, {"return_draws": True}):
        parts, whole = (np.asarray(fitted.predict(rows, **given)) for rows in (x[few], x))
        np.testing.assert_allclose(whole[..., few], parts, rtol=1e-9)


def test_noise_has_the_tails_of_what_networks_leave() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    for noise, found in (
        (rng.uniform(-1, 1, 400), ("gaussian", 6.0)),
        (rng.standard_cauchy(400), ("student_t", 6.0)),
    ):
        network = BayesianMLPRegressor(**SHORT).fit(x, x.sum(1) + noise).network_
        assert (network.likelihood, network.df) == found


@pytest.mark.parametrize(
    "likelihood",
    ["auto", *(pytest.param(name, marks=pytest.mark.long) for name in OTHER_SIZES)],
)
def test_noise_of_a_size_that_depends_on_the_inputs(likelihood: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(300, 2))
    y = np.column_stack([x[:, 0] + np.exp(x[:, 1] / 2) * rng.normal(size=300), 10 * x[:, 1] + rng.normal(size=300)])
    model = BayesianMLPRegressor(**{**SHORT, "hidden_layers": (), "effort": 0.2}, likelihood=likelihood).fit(x, y)
    rows = np.array([[0.0, -1.5], [0.0, 1.5]])
    mean, std = model.predict(rows, return_std=True)
    assert mean.shape == std.shape == (2, 2)
    assert std[1, 0] / std[0, 0] > 2  # the truth is exp(1.5) = 4.5
    assert 0.5 < std[1, 1] / std[0, 1] < 2  # and 1
    drawn = model.sample_y(rows, 4_000)
    assert drawn.shape == (2, 2, 4_000)
    # Of quantiles of the mixture as many draws lie below as they say, within 4.5 standard errors.
    for level in (0.05, 0.5, 0.95):
        below = (drawn < model.predict(rows, quantiles=(level,))[0][..., None]).mean(-1)
        assert np.abs(below - level).max() < 4.5 * np.sqrt(level * (1 - level) / 4_000)
    scores = model.posterior_.against_start(*model.posterior_.data).average
    assert scores.rmse is not None and scores.rmse < 1  # of standard units: no row is held against another


def test_columns_named_by_integers_are_names() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({2019: rng.normal(size=40), 2020: rng.choice(["a", "b"], 40), 2021: rng.normal(size=40)})
    fitted = BayesianMLPRegressor(**SHORTEST).fit(frame, frame[2019] + (frame[2020] == "a"))
    with pytest.raises(ValueError, match="lacks the column 2019, with which the model was fitted"):
        fitted.predict(frame.rename(columns={2019: 2018}))
    assert fitted.predict(frame).shape == (40,) and fitted.columns_.numbers == [2019, 2021]
    numbers = BayesianMLPRegressor(**SHORTEST).fit(frame[[2019, 2021]], frame[2019])
    assert np.array_equal(numbers.predict(frame[[2019, 2021]].to_numpy()), numbers.predict(frame[[2019, 2021]]))


@pytest.mark.long
def test_little_time_is_enough_for_a_fit() -> None:
    x, y = linear(400, 0)
    model = BayesianMLPRegressor(max_seconds=2, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.5 and model.posterior_.num_draws >= 1
