"""Scores against scipy, scikit-learn and torchmetrics, numerical integration, and their own definitions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isosgd import metrics
from isosgd.metrics import regression

SIGMAS = 5.0


@pytest.fixture
def mixture(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws [7, 40] that disagree, of unequal widths, and targets."""
    mean = 3 * torch.randn(7, 40, generator=generator, dtype=torch.float64)
    variance = 0.1 + 2 * torch.rand(7, 40, generator=generator, dtype=torch.float64)
    return mean, variance, 4 * torch.randn(40, generator=generator, dtype=torch.float64)


@pytest.fixture
def classified(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Probabilities [500, 4] and labels."""
    logits = 2 * torch.randn(500, 4, generator=generator, dtype=torch.float64)
    return logits.softmax(1), torch.randint(4, (500,), generator=generator)


# ---------------------------------------------------------------- regression


def test_rmse(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    mean, _, y = mixture
    assert float(metrics.rmse(mean[0], y)) == pytest.approx(sklearn.root_mean_squared_error(y, mean[0]), rel=1e-12)


def test_mixture_mnll(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    stats = pytest.importorskip("scipy.stats")
    mean, variance, y = (x.numpy() for x in mixture)
    density = stats.norm.pdf(y, mean, np.sqrt(variance)).mean(0)
    each = metrics.mixture_mnll(*mixture, reduction="none")
    np.testing.assert_allclose(each, -np.log(density), rtol=1e-10)
    assert float(metrics.mixture_mnll(*mixture)) == pytest.approx(-np.log(density).mean(), rel=1e-12)


def test_scores_of_student_t_mixtures(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    mean, variance, y = (x.numpy() for x in mixture)
    each = stats.t(5.0, mean, np.sqrt(variance * 3 / 5))
    assert float(metrics.mixture_mnll(*mixture, df=5.0)) == pytest.approx(-np.log(each.pdf(y).mean(0)).mean())
    below = metrics.mixture_cdf(*mixture, df=5.0)
    np.testing.assert_allclose(below, each.cdf(y).mean(0))
    low, high = metrics.mixture_interval(*mixture[:2], 0.8, df=5.0)
    np.testing.assert_allclose(each.cdf(low.numpy()).mean(0), 0.1, rtol=1e-9)
    inside = ((mixture[2] >= low) & (mixture[2] <= high)).double().mean()
    assert metrics.mixture_coverage(*mixture, 0.8, df=5.0) == inside
    with pytest.raises(ValueError, match="df = 2: Student-t noise has a variance with more"):
        metrics.mixture_cdf(*mixture, df=2.0)


def test_mixture_mnll_stays_finite_far_out() -> None:
    """A density of exp(-5e9) is zero in floating point; its logarithm is not."""
    mean, variance = torch.tensor([[0.0], [3.0]]), torch.ones(2, 1)
    found = float(metrics.mixture_mnll(mean, variance, torch.tensor([1e5])))
    assert found == pytest.approx(0.5 * (1e5 - 3) ** 2 + 0.5 * math.log(2 * math.pi) + math.log(2), rel=1e-12)


def test_mixture_crps_is_the_integral_of_its_definition(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    """CRPS = integral of (F(x) - [x >= y])^2 dx, on a fine grid cut at y."""
    mean, variance, y = mixture
    each = metrics.mixture_crps(mean, variance, y, reduction="none")
    for i in range(5):
        low, high = torch.tensor(-40.0), torch.tensor(40.0)
        total = 0.0
        for start, end, step in ((low, y[i], 0.0), (y[i], high, 1.0)):
            x = torch.linspace(float(start), float(end), 40_001, dtype=torch.float64)
            f = metrics.mixture_cdf(mean[:, i : i + 1].expand(-1, len(x)), variance[:, i : i + 1].expand(-1, len(x)), x)
            total += float(torch.trapezoid((f - step) ** 2, x))
        assert float(each[i]) == pytest.approx(total, rel=1e-6)
    assert float(metrics.mixture_crps(mean, variance, y)) == pytest.approx(float(each.mean()), rel=1e-12)


def test_mixture_crps_of_one_gaussian(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    """Gneiting and Raftery (2007), equation 21; repeating a draw changes nothing."""
    stats = pytest.importorskip("scipy.stats")
    mean, variance, y = (x[:1] if x.ndim == 2 else x for x in mixture)
    sd = variance[0].sqrt().numpy()
    z = (y.numpy() - mean[0].numpy()) / sd
    exact = sd * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    for copies in (1, 3):
        found = metrics.mixture_crps(mean.expand(copies, -1), variance.expand(copies, -1), y, reduction="none")
        np.testing.assert_allclose(found, exact, rtol=1e-9 if copies == 1 else 2e-6)


@pytest.mark.long  # torchmetrics takes seconds to import
def test_mixture_crps_of_narrow_draws_is_that_of_an_ensemble(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    torchmetrics = pytest.importorskip("torchmetrics.regression")
    mean, _, y = mixture
    score = torchmetrics.ContinuousRankedProbabilityScore()
    expected = score(mean.T.contiguous(), y)
    found = metrics.mixture_crps(mean, torch.full_like(mean, 1e-12), y)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


class Largest(TorchDispatchMode):
    """The numbers in the largest table whose error function is taken."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.erf.default:
            self.numbers = max(self.numbers, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_mixture_crps_in_parts() -> None:
    """Tables of draws by examples that memory should not hold at once are taken in parts, which give the whole."""
    g = torch.Generator().manual_seed(0)
    draws, examples = 50, 1 + 2 * regression.HELD // 50
    mean, variance = torch.randn(2, draws, examples, generator=g, dtype=torch.float64).unbind()
    y, variance = torch.randn(examples, generator=g, dtype=torch.float64), variance.exp_()
    with Largest() as largest:
        found = metrics.mixture_crps(mean, variance, y, reduction="none")
    assert found.shape == (examples,) and 0 < largest.numbers <= regression.HELD
    for some in (slice(0, 3), slice(examples // 2 - 2, examples // 2 + 2), slice(examples - 3, examples)):
        expected = metrics.mixture_crps(mean[:, some], variance[:, some], y[some], reduction="none")
        torch.testing.assert_close(found[some], expected, rtol=1e-6, atol=0)


@given(st.integers(1, 5), st.floats(-50, 50), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_mixture_crps_has_the_units_of_y(draws: int, shift: float, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(draws, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(draws, 3, generator=generator, dtype=torch.float64) + 0.01
    y = torch.randn(3, generator=generator, dtype=torch.float64)
    base = metrics.mixture_crps(mean, variance, y)
    moved = metrics.mixture_crps(scale * mean + shift, scale**2 * variance, scale * y + shift)
    assert float(base) >= 0
    assert float(moved) == pytest.approx(scale * float(base), rel=1e-5, abs=1e-9 * (scale + abs(shift)))


def test_mixture_quantiles_invert_the_distribution(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    mean, variance, _ = mixture
    levels = [1e-6, 0.025, 0.3, 0.5, 0.975]
    found = metrics.mixture_quantiles(mean, variance, levels)
    assert found.shape == (5, 40)
    assert bool((found.diff(dim=0) > 0).all())
    for level, quantile in zip(levels, found, strict=True):
        np.testing.assert_allclose(metrics.mixture_cdf(mean, variance, quantile), level, rtol=1e-8)
    torch.testing.assert_close(metrics.mixture_quantiles(mean, variance, 0.3), found[2])


def test_mixture_quantiles_of_one_gaussian() -> None:
    stats = pytest.importorskip("scipy.stats")
    found = metrics.mixture_quantiles(torch.full((4, 1), 2.0), torch.full((4, 1), 9.0), [0.001, 0.9])
    np.testing.assert_allclose(found[:, 0], stats.norm.ppf([0.001, 0.9], 2, 3), rtol=1e-12)


def test_coverage_with_and_without_the_intervals(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    mean, variance, y = mixture
    for level in (0.5, 0.8, 0.95):
        low, high = metrics.mixture_interval(mean, variance, level)
        inside = ((low <= y) & (y <= high)).double().mean()
        assert inside == metrics.mixture_coverage(mean, variance, y, level)


def test_coverage_of_a_model_that_is_right(generator: torch.Generator) -> None:
    """Targets drawn from the mixtures themselves."""
    n = 4000
    mean = torch.randn(5, n, generator=generator)
    variance = torch.rand(5, n, generator=generator) + 0.05
    which = torch.randint(5, (1, n), generator=generator)
    y = mean.gather(0, which)[0] + variance.gather(0, which)[0].sqrt() * torch.randn(n, generator=generator)
    for level in (0.5, 0.95):
        error = math.sqrt(level * (1 - level) / n)
        assert abs(float(metrics.mixture_coverage(mean, variance, y, level)) - level) < SIGMAS * error


# ---------------------------------------------------------------- classification


def test_accuracy_mnll_and_brier(classified: tuple[Tensor, Tensor]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    p, y = classified
    assert float(metrics.accuracy(p, y)) == pytest.approx(sklearn.accuracy_score(y, p.argmax(1)))
    assert float(metrics.categorical_mnll(p, y)) == pytest.approx(sklearn.log_loss(y, p.numpy()), rel=1e-10)
    each = (p - torch.eye(4, dtype=torch.float64)[y]).square().sum(1)
    torch.testing.assert_close(metrics.brier(p, y, reduction="none"), each)
    expected = sklearn.brier_score_loss(y.numpy(), p.numpy(), scale_by_half=False)
    assert float(metrics.brier(p, y)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.long  # torchmetrics takes seconds to import
@pytest.mark.parametrize("bins", [1, 15])
def test_ece(classified: tuple[Tensor, Tensor], bins: int) -> None:
    torchmetrics = pytest.importorskip("torchmetrics.functional.classification")
    p, y = classified
    expected = torchmetrics.multiclass_calibration_error(p, y, 4, n_bins=bins, norm="l1")
    assert float(metrics.ece(p, y, bins)) == pytest.approx(float(expected), abs=1e-6)


def test_reliability_of_labels_drawn_from_the_probabilities(generator: torch.Generator) -> None:
    p = torch.randn(40_000, 3, generator=generator).softmax(1)
    y = torch.multinomial(p, 1, generator=generator)[:, 0]
    curve = metrics.reliability(p, y, bins=10)
    assert int(curve.count.sum()) == len(p)
    assert len(curve.count) <= 7  # of three classes the predicted one has at least a third
    error = (curve.confidence * (1 - curve.confidence) / curve.count).sqrt()
    assert bool(((curve.accuracy - curve.confidence).abs() < SIGMAS * error).all())
    assert float(metrics.ece(p, y, 10)) == float(curve.ece)


def test_certain_predictions_fall_in_the_last_bin() -> None:
    curve = metrics.reliability(torch.eye(3), torch.tensor([0, 1, 0]))
    assert curve.count.tolist() == [3]
    assert float(curve.ece) == pytest.approx(1 / 3)


def test_entropy_and_mutual_information(generator: torch.Generator) -> None:
    """Mutual information is also the mean divergence of a draw from the average."""
    scipy = pytest.importorskip("scipy.stats")
    draws = (2 * torch.randn(6, 50, 4, generator=generator, dtype=torch.float64)).softmax(-1)
    mean = draws.mean(0)
    np.testing.assert_allclose(metrics.predictive_entropy(mean), scipy.entropy(mean, axis=1), rtol=1e-12)
    divergence = (draws * (draws / mean).log()).sum(-1).mean(0)
    torch.testing.assert_close(metrics.mutual_information(draws), divergence)


def test_a_right_class_of_no_probability_costs_everything() -> None:
    assert float(metrics.categorical_mnll(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))) == math.inf


# ---------------------------------------------------------------- data from outside


@pytest.mark.parametrize("decimals", [0, 8], ids=["ties", "none"])
def test_auroc_and_fpr95(generator: torch.Generator, decimals: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    inside = (3 * torch.randn(200, generator=generator)).round(decimals=decimals)
    outside = (3 * torch.randn(137, generator=generator) + 2).round(decimals=decimals)
    scores = torch.cat([inside, outside])
    outer = torch.cat([torch.zeros(200), torch.ones(137)])
    assert float(metrics.auroc(inside, outside)) == pytest.approx(sklearn.roc_auc_score(outer, scores), rel=1e-12)
    wrong, right, _ = sklearn.roc_curve(1 - outer, -scores, drop_intermediate=False)
    for rate in (0.5, 0.95):
        assert float(metrics.fpr95(inside, outside, rate)) == wrong[np.argmax(right >= rate)]


@pytest.mark.long  # torchmetrics takes seconds to import
def test_auroc_as_torchmetrics_has_it(generator: torch.Generator) -> None:
    torchmetrics = pytest.importorskip("torchmetrics.functional.classification")
    inside, outside = torch.rand(300, generator=generator), torch.rand(200, generator=generator).sqrt()
    labels = torch.cat([torch.zeros(300), torch.ones(200)]).int()
    expected = torchmetrics.binary_auroc(torch.cat([inside, outside]), labels)
    assert float(metrics.auroc(inside, outside)) == pytest.approx(float(expected), abs=1e-6)


def test_fpr95_lets_just_enough_pass() -> None:
    """19 of 20 are 95%: rounding must not let the twentieth pass."""
    for n in range(1, 200):
        scores = torch.arange(float(n))
        assert round(float(metrics.fpr95(scores, scores)) * n) == -(-19 * n // 20), n


# ---------------------------------------------------------------- bad input

ONES = torch.ones(3, 5)
HALVES = torch.full((4, 2), 0.5)
LABELS = torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: metrics.rmse(torch.ones(3, 1), torch.ones(3)), ValueError, r"prediction has shape \[3, 1\].*\[n\]"),
        (lambda: metrics.rmse(torch.ones(3), torch.ones(4)), ValueError, "y has 4 examples, the predictions have 3"),
        (lambda: metrics.rmse(np.ones(3), torch.ones(3)), TypeError, "prediction of type ndarray"),
        (lambda: metrics.rmse(torch.ones(0), torch.ones(0)), ValueError, "empty"),
        (lambda: metrics.rmse(torch.tensor([1.0, math.nan]), torch.ones(2)), ValueError, r"nan at \[1\]"),
        (lambda: metrics.rmse(torch.ones(3, dtype=torch.cfloat), torch.ones(3)), TypeError, "complex"),
        (lambda: metrics.mixture_mnll(torch.ones(5), torch.ones(5), torch.ones(5)), ValueError, r"\[draws, n\]"),
        (lambda: metrics.mixture_mnll(ONES, torch.ones(3, 1), torch.ones(5)), ValueError, "expand_as"),
        (lambda: metrics.mixture_mnll(ONES, ONES, torch.ones(3)), ValueError, "y has 3 examples"),
        (lambda: metrics.mixture_mnll(ONES, 0 * ONES, torch.ones(5)), ValueError, "must be positive"),
        (lambda: metrics.mixture_mnll(ONES, ONES, torch.ones(5), "sum"), ValueError, "reduction = 'sum'"),
        (lambda: metrics.mixture_crps(ONES, -ONES, torch.ones(5)), ValueError, "least variance is -1"),
        (lambda: metrics.mixture_quantiles(ONES, ONES, 1.0), ValueError, "levels = 1.0"),
        (lambda: metrics.mixture_quantiles(ONES, ONES, []), ValueError, "levels is empty"),
        (lambda: metrics.mixture_interval(ONES, ONES, 95), ValueError, "level = 95"),
        (lambda: metrics.mixture_coverage(ONES, ONES, torch.ones(5), 0), ValueError, "level = 0"),
        (lambda: metrics.accuracy(torch.ones(4, 2), LABELS), ValueError, "sum to 1.*softmax"),
        (lambda: metrics.accuracy(torch.tensor([[1.5, -0.5]]), torch.tensor([0])), ValueError, "at least 0"),
        (lambda: metrics.accuracy(HALVES, LABELS.float()), TypeError, "class labels"),
        (lambda: metrics.accuracy(HALVES, LABELS[:, None]), ValueError, r"y has shape \[4, 1\]"),
        (lambda: metrics.accuracy(HALVES, LABELS + 1), ValueError, "2 classes are 0 to 1"),
        (lambda: metrics.accuracy(HALVES, LABELS[:2]), ValueError, "y has 2 examples"),
        (lambda: metrics.accuracy(HALVES[0], LABELS), ValueError, r"\[n, classes\]"),
        (lambda: metrics.brier(HALVES, LABELS, "sum"), ValueError, "reduction"),
        (lambda: metrics.ece(HALVES, LABELS, 0), ValueError, "bins = 0"),
        (lambda: metrics.ece(HALVES, LABELS, True), ValueError, "bins = True"),
        (lambda: metrics.predictive_entropy(HALVES[None]), ValueError, r"\[n, classes\]"),
        (lambda: metrics.mutual_information(HALVES), ValueError, r"\[draws, n, classes\]"),
        (lambda: metrics.auroc(torch.ones(3), torch.ones(3, 1)), ValueError, "outside has shape"),
        (lambda: metrics.fpr95(torch.ones(3), torch.ones(0)), ValueError, "empty"),
        (lambda: metrics.fpr95(torch.ones(3), torch.ones(3), 95), ValueError, "pass_rate = 95"),
    ],
)
def test_bad_input_is_refused(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_half_precision_and_gradients_do_no_harm(mixture: tuple[Tensor, Tensor, Tensor]) -> None:
    mean, variance, y = (x.bfloat16().requires_grad_() for x in mixture)
    found = metrics.mixture_mnll(mean, variance, y)
    assert found.dtype == torch.float64
    assert not found.requires_grad
    p = torch.randn(50, 10, generator=torch.Generator().manual_seed(0)).softmax(1).bfloat16()
    assert bool(metrics.predictive_entropy(p).isfinite().all())
