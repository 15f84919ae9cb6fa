"""R-hat and effective draws: against arviz-stats, against theory, and as draws arrive."""

import math

import numpy as np
import pytest
import torch

from isosgd.diagnostics import Convergence, convergence, ess, integrated_time, rhat, traces

SIGMAS = 5.0
SHAPES = [(2, 4), (3, 5), (4, 7), (2, 8), (5, 33), (4, 101), (1, 60), (8, 500)]


def autoregression(shape: tuple[int, ...], rho: float, seed: int = 0) -> np.ndarray:
    """Traces ``[chains, draws, ...]`` of unit variance, in their stationary state from the start."""
    x = np.random.default_rng(seed).standard_normal(shape)
    for t in range(1, shape[1]):
        x[:, t] = rho * x[:, t - 1] + math.sqrt(1 - rho**2) * x[:, t]
    return x


def awkward(chains: int, draws: int, rho: float) -> np.ndarray:
    """Six traces: plain, a stray chain, ties, two values only, a drift, widths that differ between chains."""
    x = autoregression((chains, draws, 6), rho, seed=draws)
    x[0, :, 1] += 3
    x[..., 2] = x[..., 2].round()
    x[..., 3] = x[..., 3] > 0
    x[..., 4] += np.linspace(0, 3, draws)
    x[..., 5] *= 1 + np.arange(chains)[:, None]
    return x


# ---------------------------------------------------------------- against arviz-stats


@pytest.mark.parametrize(("chains", "draws"), SHAPES)
@pytest.mark.parametrize("rho", [-0.6, 0.0, 0.9])
def test_the_same_as_arviz_stats(chains: int, draws: int, rho: float) -> None:
    arviz = pytest.importorskip("arviz_stats.base").array_stats
    x = awkward(chains, draws, rho)
    same = {"rtol": 1e-9, "equal_nan": True}
    if chains > 1:  # of one chain arviz-stats has no R-hat
        with np.errstate(invalid="ignore", divide="ignore"):
            np.testing.assert_allclose(rhat(x), arviz.rhat(x, 0, 1), **same)
    np.testing.assert_allclose(ess(x), arviz.ess(x, 0, 1), **same)
    np.testing.assert_allclose(ess(x, "mean"), arviz.ess(x, 0, 1, method="mean"), **same)
    np.testing.assert_allclose(ess(x, "tail"), arviz.ess(x, 0, 1, method="tail", prob=0.05), **same)
    whole = draws / arviz.ess(x[:1], 0, 1, method="identity")
    np.testing.assert_allclose(integrated_time(x[0]), np.maximum(whole, 1), **same)


def test_one_chain_is_judged_by_its_halves() -> None:
    """Of one chain arviz-stats has no R-hat; of its halves as two chains, not cut again, it has."""
    arviz = pytest.importorskip("arviz_stats.base").array_stats
    stats = pytest.importorskip("scipy.stats")
    halves = autoregression((1, 400), 0.5).reshape(2, 200)

    def scores(x: np.ndarray) -> np.ndarray:
        return stats.norm.ppf((stats.rankdata(x).reshape(x.shape) - 3 / 8) / (x.size + 1 / 4))

    both = halves, abs(halves - np.median(halves))
    expected = max(float(arviz.rhat(scores(x), method="identity")) for x in both)
    assert float(rhat(halves.reshape(1, 400))) == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------- against theory


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_ess_of_an_autoregression(rho: float) -> None:
    """The mean has ``N (1 - rho)/(1 + rho)`` effective draws, known to ``sqrt(2 (2 M + 1)/N)``, M the window."""
    x = autoregression((4, 10_000), rho)
    time = (1 + rho) / (1 - rho)
    error = math.sqrt(2 * (2 * 10 * max(time, 1) + 1) / x.size)
    for found in (ess(x), ess(x, "mean")):
        assert abs(x.size / float(found) / time - 1) < SIGMAS * error
    assert abs(float(integrated_time(x[0])) / max(time, 1) - 1) < 2 * SIGMAS * error


def test_chains_that_disagree_have_few_effective_draws() -> None:
    x = autoregression((4, 1000), 0.0)
    assert ess(x) > 3000
    assert ess(x + 20 * np.arange(4)[:, None]) < 8


def test_rhat_of_chains_that_agree() -> None:
    """``rhat^2 - 1`` is ``(chi^2/df - 1)/half`` of the halves' means, twice over: the larger of two."""
    x = autoregression((4, 1000, 50), 0.0)
    error = math.sqrt(2 / 7) / 500 / 2
    assert rhat(x).max() < 1 + 2 * SIGMAS * error
    assert rhat(x).min() > 1 - SIGMAS * error


@pytest.mark.parametrize(("trace", "what"), [(1, "stray"), (4, "drift"), (5, "width")])
def test_rhat_sees(trace: int, what: str) -> None:
    found = rhat(awkward(4, 1000, 0.0))
    assert found[trace] > 1.1, what
    assert found[0] < 1.01


def test_traces_that_say_nothing() -> None:
    x = autoregression((4, 100, 4), 0.0)
    x[..., 1] = 7.0
    x[2, 50, 2] = np.nan
    x[..., 3] = np.arange(4)[:, None]  # no chain moves, and they differ
    np.testing.assert_array_equal(np.isnan(rhat(x)), [False, True, True, False])
    assert rhat(x)[3] > 1e6
    np.testing.assert_array_equal(np.isnan(ess(x)), [False, False, True, False])
    assert ess(x)[1] == 400
    assert ess(x)[3] < 16
    assert np.isnan(rhat(x[:, :3])).all()
    assert np.isnan(ess(x[:, :3])).all()
    np.testing.assert_array_equal(integrated_time(x[0, :3]), 1)
    assert integrated_time(np.ones(50)) == 1


def test_shapes_devices_and_types() -> None:
    x = autoregression((3, 40, 2, 5), 0.3)
    assert rhat(x).shape == ess(x).shape == (2, 5)
    assert rhat(x[..., 0, 0]).shape == ()
    assert integrated_time(x[0]).shape == (2, 5)
    tensor = torch.from_numpy(x).bfloat16().requires_grad_()
    np.testing.assert_array_equal(rhat(tensor), rhat(tensor.detach().double().numpy()))


def test_many_traces_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    x = awkward(4, 30, 0.5)
    whole = rhat(x), ess(x), ess(x, "tail")
    monkeypatch.setattr(traces, "HELD", 250)  # two of the six at once
    for found, expected in zip((rhat(x), ess(x), ess(x, "tail")), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("values", [1.0, np.ones(5), np.ones((0, 5)), np.ones((3, 0, 2))], ids=np.shape)
def test_wrong_shapes_are_refused(values: np.ndarray) -> None:
    for measure in (rhat, ess):
        with pytest.raises(ValueError, match=r"must be \[chains, draws, ...\]"):
            measure(values)


def test_unknown_kinds_and_single_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="kind = 'best' must be one of 'bulk', 'tail', 'mean'"):
        ess(np.ones((2, 5)), "best")
    with pytest.raises(ValueError, match="not a trace"):
        integrated_time(1.0)


# ---------------------------------------------------------------- as draws arrive


def fed(x: np.ndarray, groups: list[int] | None = None) -> Convergence:
    watch = Convergence(groups)
    for t in range(x.shape[1]):
        watch.append(x[:, t])
    return watch


def test_as_draws_arrive_it_says_what_the_whole_says() -> None:
    x = autoregression((4, 300, 5), 0.5)
    watch = fed(x)
    assert watch.draws == 300
    assert watch.rhat() == rhat(x).max()
    assert watch.ess() == ess(x).min()
    np.testing.assert_array_equal(watch.traces(), x)
    watch.append(torch.zeros(4, 5))
    assert watch.rhat() != rhat(x).max()


def test_convergence_is_reached_and_not_before() -> None:
    x = autoregression((4, 2000, 3), 0.8)
    watch, reached = Convergence(), []
    for t in range(2000):
        watch.append(torch.from_numpy(x[:, t]))
        if t % 100 == 99 and watch.converged():
            reached.append(t + 1)
    # Draws count for a ninth: 400 effective ones need some 900 of each of four chains.
    assert reached
    assert 600 <= reached[0] <= 1500
    assert not watch.converged(ess=8000)
    assert watch.converged(rhat=1.1, ess=100)


def test_groups_are_compared_within_not_between() -> None:
    """Splits of a data set have predictions of their own."""
    x = autoregression((6, 500, 2), 0.0)
    x[3:] += 100
    groups = [0, 0, 0, 7, 7, 7]
    assert fed(x).rhat() > 1.5
    watch = fed(x, groups)
    assert watch.groups == (0, 7)
    assert watch.converged()
    assert watch.rhat() == max(watch.rhat(0), watch.rhat(7)) == max(rhat(x[:3]).max(), rhat(x[3:]).max())
    x[5] += 2  # one bad chain in one group is the worst of all
    watch = fed(x, groups)
    assert watch.rhat() == watch.rhat(7) > 1.2
    assert watch.ess() == watch.ess(7) < 30
    assert watch.rhat(0) < 1.01
    assert not watch.converged()


def test_a_dropped_chain_no_longer_counts() -> None:
    x = autoregression((5, 300, 2), 0.0)
    x[2] += 5
    watch = fed(x, [0, 0, 0, 0, 1])
    assert watch.rhat(0) > 1.2
    watch.drop(2)
    assert watch.rhat(0) == rhat(x[[0, 1, 3]]).max()
    assert watch.traces().shape == (4, 300, 2)
    values = x[:, 0].copy()
    values[2] = np.nan
    watch.append(values)  # whatever it holds
    watch.drop(4)
    assert watch.groups == (0,)
    assert math.isfinite(watch.rhat())
    assert math.isnan(watch.rhat(1))
    assert "(2 dropped)" in str(watch)
    with pytest.raises(ValueError, match="no chain is left in group 1"):
        watch.traces(1)


def test_nothing_converges_without_chains_or_draws_or_motion() -> None:
    watch = Convergence([0, 0])
    assert math.isnan(watch.rhat())
    assert not watch.converged()
    assert "too few to tell" in str(watch)
    for chain in (0, 1):
        watch.drop(chain)
    for _ in range(500):
        watch.append(np.zeros((2, 1)))
    assert not watch.converged()
    assert "too few to tell" in str(watch)
    assert not fed(np.ones((4, 500, 3))).converged()  # all stuck at one place


def test_a_trace_that_never_moves_is_passed_over() -> None:
    """As the probability of a class that is impossible; but a group of which nothing moves is stuck."""
    x = autoregression((4, 500, 3), 0.0)
    x[..., 1] = 0.0
    assert fed(x).converged()
    y = np.concatenate([x, np.ones_like(x)])
    watch = fed(y, [0] * 4 + [1] * 4)
    assert math.isnan(watch.rhat())
    assert watch.rhat(0) < 1.01
    assert not watch.converged()


def test_it_reads_as_one_line() -> None:
    x = autoregression((4, 300, 3), 0.0)
    x[0, :, 1] += 2
    assert str(fed(x)) == f"300 draws of 4 chains: R-hat {rhat(x).max():.3f}, ESS {ess(x).min():,.0f}"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda watch: watch.append(np.ones(4)), r"shape \[4\] must be \[chains, traces\]"),
        (lambda watch: watch.append(np.ones((4, 0))), r"must be \[chains, traces\]"),
        (lambda watch: watch.append(np.ones((3, 2))), "3 chains, but groups names those of 4"),
        (lambda watch: watch.append(np.ones((4, 3))), r"earlier draws \[4, 2\]"),
        (lambda watch: watch.append([[1, 2], [3, np.inf], [5, 6], [7, 8]]), r"chain 1.*drop\(1\)"),
        (lambda watch: watch.drop(4), "no chain 4; there are 4"),
        (lambda watch: watch.rhat(9), r"no group 9; there are \[0, 1\]"),
        (lambda watch: watch.converged(rhat=1.0), "rhat = 1.0 must be above 1"),
        (lambda watch: watch.converged(ess=0), "ess = 0 must be positive"),
        (lambda watch: Convergence([]), "groups is empty"),
    ],
)
def test_bad_input_is_refused(act, words: str) -> None:
    watch = Convergence([0, 0, 1, 1])
    watch.append(np.ones((4, 2)))
    with pytest.raises(ValueError, match=words):
        act(watch)
    assert watch.draws == 1


def test_defaults_are_those_of_the_literature() -> None:
    assert (convergence.RHAT, convergence.ESS) == (1.01, 400)
