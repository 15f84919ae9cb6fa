"""R-hat and effective draws: against arviz-stats, against theory, and as draws arrive."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from isosgd.diagnostics import Convergence, ess, integrated_time, rhat, traces

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


def test_many_traces_are_taken_in_turns() -> None:
    """More than are worked on at once; the last of a turn and the first of the next are of other kinds."""
    x = awkward(4, 30, 0.5)
    many = 1 + traces.HELD // x.size
    for found, expected in ((rhat, rhat(x)), (ess, ess(x)), (partial(ess, kind="tail"), ess(x, "tail"))):
        np.testing.assert_array_equal(found(np.tile(x, many)), np.tile(expected, many))


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


# ---------------------------------------------------------------- all traces of all chains


def test_it_is_the_worst_of_all_traces() -> None:
    x = autoregression((4, 300, 5), 0.5)
    found = Convergence.of(torch.from_numpy(x))
    assert (found.chains, found.draws) == (4, 300)
    assert (found.rhat, found.ess) == (rhat(x).max(), ess(x).min())
    assert str(found) == f"300 draws of 4 chains: R-hat {rhat(x).max():.3f}, ESS {ess(x).min():,.0f}"


def test_convergence_is_reached_and_not_before() -> None:
    x = autoregression((4, 2000, 3), 0.8)
    reached = [t for t in range(100, 2001, 100) if Convergence.of(x[:, :t]).converged()]
    # Draws count for a ninth: 400 effective ones need some 900 of each of four chains.
    assert reached and 600 <= reached[0] <= 1500
    assert not Convergence.of(x).converged(ess=8000)
    assert Convergence.of(x).converged(rhat=1.1, ess=100)


def test_groups_are_compared_within_not_between() -> None:
    """Splits of a data set have predictions of their own."""
    x = autoregression((6, 500, 2), 0.0)
    x[3:] += 100
    groups = [0, 0, 0, 7, 7, 7]
    assert Convergence.of(x).rhat > 1.5
    found = Convergence.of(x, groups)
    assert found.converged() and found.rhat == max(rhat(x[:3]).max(), rhat(x[3:]).max())
    x[5] += 2  # one bad chain in one group is the worst of all
    found = Convergence.of(x, groups)
    assert found.rhat > 1.2 and found.ess < 30 and not found.converged()


def test_nothing_converges_without_chains_or_draws_or_motion() -> None:
    for x in (np.zeros((2, 0, 1)), np.zeros((0, 9, 1)), autoregression((4, 3, 2), 0.0), np.ones((4, 500, 3))):
        found = Convergence.of(x)
        assert math.isnan(found.rhat) and not found.converged()


def test_a_trace_that_never_moves_is_passed_over() -> None:
    """As the probability of a class that is impossible; but a group of which nothing moves is stuck."""
    x = autoregression((4, 500, 3), 0.0)
    x[..., 1] = 0.0
    assert Convergence.of(x).converged()
    found = Convergence.of(np.concatenate([x, np.ones_like(x)]), [0] * 4 + [1] * 4)
    assert math.isnan(found.rhat) and not found.converged()


@pytest.mark.parametrize(
    ("shape", "groups", "words"),
    [((4, 9), None, r"must be \[chains, draws, traces\]"), ((4, 9, 2), [0, 1], "names those of 2")],
)
def test_bad_traces_are_refused(shape: tuple[int, ...], groups: list[int] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Convergence.of(np.ones(shape), groups)
