"""The UCI experiment on a tiny set: what it measures, in which units, what it refuses, chains that were dropped."""

import math
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data import uci as read
from experiments.uci import runs as uci
from experiments.uci import scores as uci_scores
from experiments.uci.model import Model
from isosgd import DataSets, Posterior, SamplingWarning, sample
from isosgd.metrics import mixture_coverage, mixture_crps, mixture_mnll, rmse

# so few steps cannot settle
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")]

ROWS, TRAIN, HIDDEN = 60, 50, 4
TINY = uci.Setting("tiny", chains=2, draws=6, warmup=200, keep_every=5, options={"compile": False})


def write_set(root, name="mine", shift=0.0, scale=1.0, train=(TRAIN, TRAIN)):
    """A set with three features, of which the second never changes, and as many splits as ``train`` has sizes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3))
    x[:, 1] = 7.0
    y = x[:, 0] - 0.5 * x[:, 2] + 0.3 * rng.normal(size=ROWS)
    y = np.round(64 * y) / 64  # so that shift and scale are exact
    folder = root / "uci" / name
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.column_stack([x, shift + scale * y]))
    (folder / "index_features.txt").write_text("0\n1\n2\n")
    (folder / "index_target.txt").write_text("3\n")
    for k, size in enumerate(train):
        order = rng.permutation(ROWS)
        np.savetxt(folder / f"index_train_{k}.txt", order[:size], fmt="%d")
        np.savetxt(folder / f"index_test_{k}.txt", order[size:], fmt="%d")
    return root


def run(root, name="mine", setting=TINY, **more):
    return uci.run(name, setting, root=root, hidden=HIDDEN, progress=False, **more)


def untimed(result):
    return [replace(split, seconds=None) for split in result.splits]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def result(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return run(root, command="made so")


def sampled(root, setting):
    """Two chains on the first split of the set."""
    target = setting.model.target(3, HIDDEN)
    data = DataSets([t.unsqueeze(0) for t in uci_scores.Scaled(read("mine", root), 0).train])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return sample(
            target,
            data,
            init=lambda chain: setting.model.start(3, HIDDEN, 0, chain),
            draws=6,
            chains=2,
            batch_size=TRAIN,
            warmup=200,
            keep_every=5,
            progress=False,
            compile=False,
        )


@pytest.fixture(scope="module")
def posterior(root):
    return sampled(root, TINY)


def test_every_split_is_measured(result):
    assert [split.split for split in result.splits] == [0, 1]
    for split in result.splits:
        assert math.isfinite(split.rmse) and split.rmse > 0
        assert math.isfinite(split.mnll)
        assert 0 <= split.coverage <= 1
        assert split.crps > 0
        assert split.rhat is not None and split.ess > 0
        assert split.gradients == TINY.chains * (TINY.warmup + TINY.draws * TINY.keep_every)
        assert split.seconds > 0
        assert split.dropped == ()
    # The spread of the target is near 1.16 and its noise 0.3: a network that learnt nothing is well above 0.8.
    assert result.mean_and_error("rmse")[0] < 0.8


def test_a_result_says_how_it_was_made(result):
    assert (result.set, result.method, result.command) == ("mine", "isgd", "made so")
    assert result.label == "tiny" and result.settings["noise"] == "student"
    assert result.settings["tails"] == 6 and result.settings["scales"]["name"] == "LogNormal"
    expected = {"chains": 2, "draws": 6, "warmup": 200, "keep_every": 5, "hidden": HIDDEN, "seed": 0, "compile": False}
    assert expected.items() <= result.settings.items()
    assert result.settings["engine"] == "together"
    assert result.settings["batch_size"] == TRAIN  # no more than there are rows
    assert "torch" in result.versions and result.hardware


def test_draws_follow_the_seed(root, result):
    assert untimed(run(root)) == untimed(result)
    assert run(root, seed=1).values("rmse") != result.values("rmse")


@pytest.mark.slow
def test_processes_share_the_splits(root):
    settings = {"root": root, "hidden": HIDDEN, "progress": False, "command": "made so"}
    shared = uci.side_by_side("mine", TINY, 2, 1, **settings)
    alone = [uci.run("mine", TINY, splits=[k], seed=k * uci.SEED_APART, **settings) for k in range(2)]
    assert untimed(shared) == [split for one in alone for split in untimed(one)]
    with pytest.raises(ValueError, match="each once"):
        uci.side_by_side("mine", TINY, 2, 1, splits=[1, 1], **settings)
    assert shared.hardware.endswith("2 processes") and shared.splits[0].seconds == shared.splits[1].seconds > 0


def test_one_chain_has_no_rhat(root):
    (split,) = run(root, setting=replace(TINY, chains=1), splits=[1]).splits
    assert split.split == 1
    assert split.rhat is None
    assert math.isfinite(split.rmse)


def test_the_papers_prior_runs_too(root):
    setting = replace(TINY, model=uci.SETTINGS["isgd-paper"].model)
    (split,) = run(root, setting=setting, splits=[0]).splits
    assert math.isfinite(split.mnll)
    names = setting.model.target(3, HIDDEN).initial()
    assert not any("prior" in name for name in names)


def test_a_choice_is_made_without_the_test_rows(tmp_path, root):
    """Held-out rows are training rows; and whatever the test rows are, the scores are the same."""
    table = read("mine", root)
    one, whole = uci_scores.Scaled(table, 0, validate=True), uci_scores.Scaled(table, 0)
    rows, test = table.splits[0]
    assert len(one.train[0]) == 45 and len(one.y) == 5 and len(whole.y) == 10
    assert set(one.y.tolist()) <= set(table.y[rows].tolist()) and not set(one.y.tolist()) & set(table.y[test].tolist())
    there = torch.cat([one.x[:, 0], one.train[0][:, 0]])
    assert len(there.unique()) == TRAIN  # each training row on one side

    other = write_set(tmp_path)
    path = other / "uci" / "mine" / "data.txt"
    numbers = np.loadtxt(path)
    numbers[test.numpy(), 3] += 100.0
    np.savetxt(path, numbers)
    short = replace(TINY, chains=1, draws=4)
    found = [run(where, setting=short, splits=[0], validate=True) for where in (root, other)]
    assert untimed(found[0]) == untimed(found[1]) != untimed(run(root, setting=short, splits=[0]))
    assert found[0].settings["validate"]


def test_errors_are_in_the_units_of_the_target(tmp_path, result):
    root = write_set(tmp_path, shift=1000.0, scale=50.0)
    ours = run(root)
    for before, after in zip(result.splits, ours.splits, strict=True):
        # The standardised sets differ by rounding only, and a short chain does not blow that up.
        assert after.rmse == pytest.approx(50 * before.rmse, rel=1e-3)
        assert after.crps == pytest.approx(50 * before.crps, rel=1e-3)
        assert after.mnll == pytest.approx(before.mnll + math.log(50), abs=1e-3)
        assert after.coverage == before.coverage
        assert after.rhat == pytest.approx(before.rhat, rel=1e-2)


def test_the_standardised_split_does_not_depend_on_units(root, tmp_path):
    plain = uci_scores.Scaled(read("mine", root), 1)
    other = uci_scores.Scaled(read("mine", write_set(tmp_path, shift=1000.0, scale=50.0)), 1)
    torch.testing.assert_close(other.train, plain.train)
    torch.testing.assert_close(other.x, plain.x)
    torch.testing.assert_close(other.y, 1000 + 50 * plain.y)
    assert float(other.mean) == pytest.approx(1000 + 50 * float(plain.mean))
    assert float(other.scale) == pytest.approx(50 * float(plain.scale))


def test_a_split_is_scaled_by_its_training_part_only(root):
    table = read("mine", root)
    one = uci_scores.Scaled(table, 0)
    x, y = one.train
    assert (x.shape, y.shape, one.x.shape) == ((TRAIN, 3), (TRAIN, 1), (ROWS - TRAIN, 3))
    torch.testing.assert_close(x.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(y.std(correction=0), torch.tensor(1.0))
    assert (x[:, 1] == 0).all() and (one.x[:, 1] == 0).all()  # the column that never changes
    rows, held_out = table.splits[0]
    expected = (table.x[held_out, 0] - table.x[rows, 0].mean()) / table.x[rows, 0].std(correction=0)
    torch.testing.assert_close(one.x[:, 0], expected.float())


@pytest.mark.parametrize("split", [2, -1])
def test_a_split_that_is_not_there_is_refused(root, split):
    with pytest.raises(ValueError, match=f"split {split} is not there: 'mine' has 2"):
        run(root, splits=[0, split])


@pytest.mark.parametrize("splits", [[], [1, 0, 1]])
def test_no_split_and_a_split_twice_are_refused(root, splits):
    with pytest.raises(ValueError, match="at least one, and each once"):
        run(root, splits=splits)


def test_an_unknown_set_is_refused(root):
    with pytest.raises(ValueError, match=r"no set 'yours' .*\['mine'\]"):
        run(root, "yours")


def test_unequal_training_parts_are_refused(tmp_path):
    write_set(tmp_path, train=(50, 45))
    with pytest.raises(ValueError, match=r"'mine' have \[45, 50\] rows"):
        run(tmp_path)


def test_each_chain_starts_at_weights_of_its_own():
    target = TINY.model.target(3, HIDDEN)
    starts = [TINY.model.start(3, HIDDEN, seed, chain) for seed, chain in ((0, 0), (0, 1), (1, 0))]
    weights = [start["0.weight"] for start in starts]
    for i in range(3):
        assert starts[i].keys() <= target.initial().keys()
        for j in range(i):
            assert not torch.isclose(weights[i], weights[j]).any()
    again = TINY.model.start(3, HIDDEN, 0, 1)
    assert all(torch.equal(again[name], x) for name, x in starts[1].items())
    assert not any(x.requires_grad for x in again.values())


def test_a_fresh_start_leaves_global_random_numbers_alone():
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    TINY.model.start(3, HIDDEN, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpys).all()


def looped(posterior, chain, one):
    """Predictions of one chain, a draw at a time."""
    found = []
    for d in range(posterior.num_draws):
        natural = {name: x[chain, d] for name, x in posterior.draws.items()}
        found.append(posterior.target.predictive(posterior.target.unconstrain(natural), one.x))
    mean = torch.stack([one.mean + one.scale * f["mean"].reshape(-1).double() for f in found])
    variance = torch.stack([one.scale**2 * f["variance"].double().reshape(-1).expand(len(one.x)) for f in found])
    return mean, variance


def test_predictions_agree_with_a_plain_loop(root, posterior):
    one = uci_scores.Scaled(read("mine", root), 0)
    mean, variance = uci_scores.predictions(posterior, [1, 0], one)
    assert mean.shape == variance.shape == (2, 6, ROWS - TRAIN)
    for i, chain in enumerate([1, 0]):
        expected_mean, expected_variance = looped(posterior, chain, one)
        torch.testing.assert_close(mean[i], expected_mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(variance[i], expected_variance, rtol=1e-5, atol=1e-5)


def test_a_dropped_chain_is_reported_and_the_others_are_used(root, posterior):
    """Chains 4 to 6 belong to the split; chain 5 was dropped, and 4 and 6 are left."""
    one = uci_scores.Scaled(read("mine", root), 0)
    info = posterior.info | {"chain_indices": [4, 6], "dropped": {5: "the loss became nan"}, "gradients": 300}
    found = uci_scores.measure(Posterior(posterior.target, posterior.draws, info), one, range(4, 7), 2.0)
    assert found.dropped == ("chain 5: the loss became nan",)
    assert (found.gradients, found.seconds) == (300, 2.0)
    assert found.rhat is not None
    parts = [looped(posterior, chain, one) for chain in (0, 1)]
    mean, variance = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert found.rmse == pytest.approx(float(rmse(mean.mean(0), one.y)), rel=1e-5)
    tails = TINY.model.tails
    t = torch.distributions.StudentT(tails, mean, (variance * (1 - 2 / tails)).sqrt())
    log_density = t.log_prob(one.y).logsumexp(0) - math.log(len(mean))
    assert found.mnll == pytest.approx(-float(log_density.mean()), rel=1e-4)
    normal = uci_scores.normal_variances(posterior, variance)
    assert found.coverage == float(mixture_coverage(mean, normal, one.y))
    assert found.crps == pytest.approx(float(mixture_crps(mean, normal, one.y)), rel=1e-4)
    assert found.crps != pytest.approx(float(mixture_crps(mean, variance, one.y)), rel=1e-3)


@pytest.mark.parametrize("noise", ["gaussian", "varying"])
def test_normal_noise_is_scored_as_a_normal_mixture(root, noise):
    posterior, one = sampled(root, replace(TINY, model=Model(noise))), uci_scores.Scaled(read("mine", root), 0)
    found = uci_scores.measure(posterior, one, range(2), 1.0)
    parts = [looped(posterior, chain, one) for chain in range(2)]
    mean, variance = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert found.rmse == pytest.approx(float(rmse(mean.mean(0), one.y)), rel=1e-4)
    assert found.mnll == pytest.approx(float(mixture_mnll(mean, variance, one.y)), rel=1e-4)
    assert found.coverage == float(mixture_coverage(mean, variance, one.y))
    assert (variance.std(-1).max() > 0) == (noise == "varying")


def test_a_student_t_is_a_mixture_of_normal_noise(posterior):
    """Of scale 1 and 6 degrees of freedom, so that its variance is 1.5, at its own quantile of 97.5%."""
    draws, quantile = 100_000, 2.4469118
    variance = uci_scores.normal_variances(posterior, torch.full((draws, 1), 1.5, dtype=torch.float64))
    each = torch.distributions.Normal(0.0, variance.sqrt()).cdf(torch.tensor(quantile))
    assert abs(float(each.mean()) - 0.975) < 4 * float(each.std()) / draws**0.5
    assert float(each.std()) / draws**0.5 < 2e-4


def test_chains_of_other_splits_are_not_used(root, posterior):
    one = uci_scores.Scaled(read("mine", root), 0)
    info = posterior.info | {"chain_indices": [0, 3], "dropped": {1: "diverged", 2: "diverged too"}, "gradients": 400}
    found = uci_scores.measure(Posterior(posterior.target, posterior.draws, info), one, range(2, 4), 1.0)
    assert found.dropped == ("chain 2: diverged too",)
    assert found.gradients == 200  # half of the four chains
    assert found.rhat is None  # one chain is left
    assert found.rmse == pytest.approx(float(rmse(looped(posterior, 1, one)[0].mean(0), one.y)), rel=1e-5)


def test_a_split_that_lost_all_chains_has_no_numbers(root, posterior):
    one = uci_scores.Scaled(read("mine", root), 1)
    info = posterior.info | {"chain_indices": [0, 1], "dropped": {2: "nan", 3: "inf"}, "gradients": 400}
    found = uci_scores.measure(Posterior(posterior.target, posterior.draws, info), one, range(2, 4), 1.0)
    assert found == uci_scores.Split(1, gradients=200, seconds=1.0, dropped=("chain 2: nan", "chain 3: inf"))


POOL = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from experiments.uci.runs import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("fork"), end_with_parent)  # torch is then loaded once
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600).result()
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed by a signal")
def test_processes_that_share_the_splits_end_with_the_one_that_began_them(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    there = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "pool.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": there},
    ) as parent:
        child = int(parent.stdout.readline())
        os.kill(child, 0)  # it is there
        parent.kill()
    state = Path(f"/proc/{child}/stat")
    for _ in range(200):
        try:
            os.kill(child, 0)
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return  # it has ended, and nobody has asked how
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the process outlived the one that began it")
