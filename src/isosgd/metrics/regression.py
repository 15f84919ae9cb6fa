"""Scores of a regression whose predictive distribution is a mixture with a component, normal or Student-t, per draw.

All draws have the same weight. ``mean`` and ``variance`` ``[draws, n]`` are those of each draw's prediction of y;
``y`` ``[n]`` are the observations. The variance is that of the noise; the model's uncertainty is the spread of the
means. A variance that is the same for all inputs takes no memory as ``variance[:, None].expand_as(mean)``.
``reduction="none"`` gives the score of each example, ``[n]``. ``df`` > 2 are the degrees of freedom of Student-t noise
of that variance, which needs scipy; noise is normal by default.

References:
    Gneiting and Raftery (2007), Strictly proper scoring rules, prediction, and estimation. Grimit, Gneiting, Berrocal
    and Johnson (2006), The continuous ranked probability score for circular variables (CRPS of a Gaussian mixture).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isosgd.metrics.checks import Reduction, between_0_and_1, numbers, reduce, same_length

NEAR, MOST_STEPS = 1e-13, 100  # accuracy of quantiles, over bracket and noise; far more steps than needed
HELD = 1 << 17  # most numbers in a table of draws by examples


def rmse(prediction: Tensor, y: Tensor) -> Tensor:
    """Root mean square error of predictions ``[n]``, such as the mean over draws.

    Example:
        >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0]))
        tensor(3.5355, dtype=torch.float64)
    """
    prediction, y = numbers("prediction", prediction, "n"), numbers("y", y, "n")
    same_length("y", y, len(prediction))
    return (prediction - y).square().mean().sqrt()


def mixture_mnll(
    mean: Tensor, variance: Tensor, y: Tensor, reduction: Reduction = "mean", *, df: float = math.inf
) -> Tensor:
    """Mean negative log likelihood: ``-log mean_draws N(y; mean, variance)``, averaged over examples.

    Example:
        >>> mean = torch.tensor([[0.0], [1000.0]])  # one draw is right, the other hopeless
        >>> mixture_mnll(mean, torch.ones(2, 1), torch.zeros(1))  # log(2) + log(2 pi)/2
        tensor(1.6121, dtype=torch.float64)
    """
    mean, variance, y = _mixture(mean, variance, y)
    width = _width(variance, df)
    log_density = _log_density((y - mean) / width, df) - width.log()
    return reduce(math.log(len(mean)) - log_density.logsumexp(0), reduction)


def mixture_crps(mean: Tensor, variance: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Continuous ranked probability score in the units of y: ``E|X - y| - E|X - X'|/2``, both in closed form.

    Accurate to about six digits. Memory is bounded; time grows with the square of the number of draws: 100 draws of
    5,000 examples take a second, 500 draws about ten.

    Example:
        >>> mixture_crps(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(1))  # (sqrt(2) - 1) / sqrt(pi)
        tensor(0.2337, dtype=torch.float64)
    """
    mean, variance, y = _mixture(mean, variance, y)
    columns = max(1, HELD // len(mean))
    parts = zip(*(torch.split(x, columns, dim=-1) for x in (mean, variance, y)), strict=True)
    return reduce(torch.cat([_crps(*part) for part in parts]), reduction)


def mixture_cdf(mean: Tensor, variance: Tensor, y: Tensor, *, df: float = math.inf) -> Tensor:
    """Probability of at most y, ``[n]``; uniform on (0, 1) if the model is right.

    Example:
        >>> mixture_cdf(torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1), torch.zeros(1))
        tensor([0.5000], dtype=torch.float64)
    """
    mean, variance, y = _mixture(mean, variance, y)
    return _below((y - mean) / _width(variance, df), df).mean(0)


def mixture_quantiles(
    mean: Tensor, variance: Tensor, levels: float | Sequence[float], *, df: float = math.inf
) -> Tensor:
    """Quantiles of y at each input: ``[n]`` for one level, ``[levels, n]`` for several.

    Example:
        >>> far_apart = torch.tensor([[-1.0], [1.0]])
        >>> mixture_quantiles(far_apart, torch.full((2, 1), 1e-4), [0.25, 0.75]).T  # the median of each half
        tensor([[-1.,  1.]], dtype=torch.float64)
    """
    mean, variance = _components(mean, variance)
    width = _width(variance, df)
    if isinstance(levels, Sequence):
        if not levels:
            raise ValueError("levels is empty; name one probability at least, such as 0.5")
        return torch.stack([_quantile(mean, width, between_0_and_1("levels", level), df) for level in levels])
    return _quantile(mean, width, between_0_and_1("levels", levels), df)


def mixture_interval(
    mean: Tensor, variance: Tensor, level: float = 0.95, *, df: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Ends ``[n]`` of the central interval of y, with equal probability below and above.

    Example:
        >>> low, high = mixture_interval(torch.zeros(4, 1), torch.ones(4, 1))
        >>> round(float(low), 2), round(float(high), 2)
        (-1.96, 1.96)
    """
    tail = (1 - between_0_and_1("level", level)) / 2
    low, high = mixture_quantiles(mean, variance, [tail, 1 - tail], df=df)
    return low, high


def mixture_coverage(mean: Tensor, variance: Tensor, y: Tensor, level: float = 0.95, *, df: float = math.inf) -> Tensor:
    """Share of y in the central intervals of `mixture_interval`, by `mixture_cdf`.

    Example:
        >>> y = torch.tensor([-2.0, -1.9, 0.0, 3.0])
        >>> mixture_coverage(torch.zeros(5, 4), torch.ones(5, 4), y)
        tensor(0.5000, dtype=torch.float64)
    """
    tail = (1 - between_0_and_1("level", level)) / 2
    below = mixture_cdf(mean, variance, y, df=df)
    return ((below >= tail) & (below <= 1 - tail)).double().mean()


def _components(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = numbers("mean", mean, "draws", "n"), numbers("variance", variance, "draws", "n")
    if mean.shape != variance.shape:
        raise ValueError(
            f"mean has shape {list(mean.shape)} and variance {list(variance.shape)}; both must be [draws, n] "
            "(variance.expand_as(mean) repeats it without copying)"
        )
    if not bool((variance > 0).all()):
        raise ValueError(f"the least variance is {float(variance.min()):g}; it must be positive: add that of the noise")
    return mean, variance


def _mixture(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = _components(mean, variance)
    y = numbers("y", y, "n")
    same_length("y", y, mean.shape[1])
    return mean, variance, y


# One component of scale 1: its density, distribution function and quantiles.


def _width(variance: Tensor, df: float) -> Tensor:
    """Scale of the noise that has this variance."""
    if not df > 2:
        raise ValueError(f"df = {df:g}: Student-t noise has a variance with more than 2 degrees of freedom")
    return variance.sqrt() if df == math.inf else (variance * ((df - 2.0) / df)).sqrt()


def _log_density(z: Tensor, df: float) -> Tensor:
    if df == math.inf:
        return -0.5 * (z * z + math.log(2 * math.pi))
    log_of_whole = math.lgamma(df / 2) - math.lgamma((df + 1) / 2) + 0.5 * math.log(df * math.pi)
    return -0.5 * (df + 1) * torch.log1p(z * z / df) - log_of_whole


def _below(z: Tensor, df: float) -> Tensor:
    if df == math.inf:
        normal: Tensor = torch.special.ndtr(z)
        return normal
    from scipy.special import stdtr

    return torch.from_numpy(stdtr(df, z.cpu().numpy())).to(z.device)


def _at(level: float, df: float) -> float:
    if df == math.inf:
        return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    from scipy.special import stdtrit

    return float(stdtrit(df, level))


def _quantile(mean: Tensor, width: Tensor, level: float, df: float) -> Tensor:
    columns = max(1, HELD // len(mean))
    parts = zip(torch.split(mean, columns, dim=-1), torch.split(width, columns, dim=-1), strict=True)
    return torch.cat([_root(centre, scale, level, df) for centre, scale in parts])


def _root(mean: Tensor, width: Tensor, level: float, df: float) -> Tensor:
    """Where the distribution function is ``level``, by Newton's method with bisection (Numerical Recipes, section 9.4).

    A Newton step must stay within the bracket and be at most half of the last but one.
    """
    z = _at(level, df)
    ends = mean + z * width  # the quantile of a mixture lies between those of its components
    low, high = ends.amin(0), ends.amax(0)
    near = NEAR * (high - low + width.amin(0))
    x = (mean.mean(0) + z * (width.square().mean(0) + mean.var(0, correction=0)).sqrt()).clamp(low, high)
    last = before = high - low
    for _ in range(MOST_STEPS):
        off = (x - mean) / width
        over = _below(off, df).mean(0) - level
        density = _log_density(off, df).exp().div_(width).mean(0)
        low, high = torch.where(over < 0, x, low), torch.where(over < 0, high, x)
        newton = x - over / density
        good = (newton >= low) & (newton <= high) & ((newton - x).abs() <= 0.5 * before)
        there = torch.where(good, newton, (low + high) / 2)
        before, last, x = last, (there - x).abs(), there
        if bool((last <= near).all()):
            break
    return x


def _crps(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    draws = len(mean)
    near = _absolute(mean - y, variance.sqrt()).mean(0)
    # All pairs of draws take most of the time. In units of the example's spread, float32 suffices for six digits and is
    # several times as fast as float64.
    centre = mean.mean(0)
    unit = ((mean - centre).square() + variance).mean(0).sqrt()
    place, square = ((mean - centre) / unit).float(), (variance / unit**2).float()
    spread = (2 / math.sqrt(math.pi)) * (variance.sqrt().sum(0) / unit)  # pairs of a draw with itself
    for k in range(draws - 1):
        later = slice(k + 1, None)
        spread += 2 * _absolute(place[k] - place[later], (square[k] + square[later]).sqrt()).sum(0)
    return near - unit * spread / (2 * draws**2)


def _absolute(mean: Tensor, sd: Tensor) -> Tensor:
    """Mean of ``|X|`` for a normal X."""
    z = mean / sd
    return sd * (math.sqrt(2 / math.pi) * torch.exp(-0.5 * z * z) + z * torch.erf(z * math.sqrt(0.5)))
