"""Posteriors with known moments, and how far draws are from them: what `python -m experiments.posteriors` runs.

- ``toy-*``: the linear toy, whose posterior is exact, over a whole period of its features (``well``) and half of it
  (``bad``: condition number in the thousands), with N = 200 and 2000.
- ``gauss-*``: two dimensions with correlation .99 and per-example gradients of a covariance that has nothing to do with
  the curvature: ``anisotropic``, and in one of the two dimensions only (``half``).
- ``cubic-wine``: linear regression of the Wine data on all monomials of their eleven columns up to the third degree:
  364 weights, whose posterior is exact and has a condition number of 170,000.
- ``net-*``: a Bayesian network on a hundred points, and one of the size that the Boston data ask for, against a long
  run of our own `hmc`, compared in what they predict.
- the rest by their names in posteriordb, against the draws of Stan.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from experiments.data.uci import names as uci_names
from experiments.data.uci import uci
from experiments.posteriors import posteriordb
from experiments.posteriors.hmc import hmc
from isosgd import Target, priors
from isosgd.demo.toy import Toy, gaussian_w2
from isosgd.diagnostics import ess, rhat
from isosgd.target import Params

Entries = Callable[[Params], Tensor]


@dataclass(frozen=True)
class Moments:
    """What is known of the entries that are compared.

    Attributes:
        mean: ``[k]``.
        covariance: ``[k, k]``.
        ess: effective number of reference draws behind them; infinite when exact. Errors of the mean below
            ``1/sqrt(ess)`` standard deviations say nothing.
        rhat: the largest over entries, of a reference by sampling.
    """

    mean: Tensor
    covariance: Tensor
    ess: float = math.inf
    rhat: float = 1.0


@dataclass(frozen=True)
class Problem:
    """A posterior to sample and how to score the draws.

    Attributes:
        name: one of `names`.
        target: what to sample.
        data: what a sampler gets.
        batch_size: n.
        entries: what is compared, ``[..., k]``, from natural parameters with leading dimensions.
        reference: its moments.
        unit: of each entry, for the 2-Wasserstein distance: 1 where entries share a scale, else their standard
            deviations.
        init: where chains start; where the target says by default.
    """

    name: str
    target: Target
    data: tuple[Tensor, ...]
    batch_size: int
    entries: Entries
    reference: Moments
    unit: Tensor
    init: Mapping[str, Any] | None = None


def moments(entries: Tensor) -> Moments:
    """Moments of draws ``[chains, draws, k]``, with the least ESS and the largest R-hat."""
    flat = entries.double().flatten(0, 1)
    covariance = flat.T.cov().reshape(flat.shape[1], -1)
    return Moments(flat.mean(0), covariance, float(ess(entries, "mean").min()), float(rhat(entries).max()))


def score(problem: Problem, draws: Params, gradients: int) -> dict[str, float]:
    """How far draws are from a problem's posterior, and how many effective ones the gradients bought.

    Args:
        problem: what was sampled.
        draws: natural parameters ``[chains, draws, *shape]``, such as ``posterior.draws``.
        gradients: spent on them in all, warm-up included.

    Returns:
        ``mean_error``: of the means, in posterior standard deviations, the largest over entries. ``sd_error``: the
        largest ``|log|`` of the ratio of standard deviations. ``w2``: 2-Wasserstein distance of Gaussians with these
        moments over the root of the posterior's total variance. ``ess_per_1000``: effective draws for every 1,000
        gradients, the least over entries. ``rhat``: the largest over entries.
    """
    if gradients < 1:
        raise ValueError(f"gradients = {gradients} must be at least 1: the number spent on these draws")
    entries = problem.entries(draws).detach().double().cpu()
    if entries.shape[0] * entries.shape[1] < 2:
        raise ValueError(f"draws of shape {list(entries.shape[:2])} are too few: two or more have a variance")
    found, true = moments(entries), problem.reference
    sd, unit = true.covariance.diagonal().sqrt(), problem.unit
    scale = unit[:, None] * unit
    w2 = gaussian_w2(found.mean / unit, found.covariance / scale, true.mean / unit, true.covariance / scale)
    return {
        "mean_error": float(((found.mean - true.mean) / sd).abs().max()),
        "sd_error": float((found.covariance.diagonal().sqrt() / sd).log().abs().max()),
        "w2": w2 / math.sqrt(float((true.covariance / scale).trace())),
        "ess_per_1000": 1000 * found.ess / gradients,
        "rhat": found.rhat,
    }


# ---------------------------------------------------------------- exact ones


def _toy(name: str, num_data: int, half_width: float) -> Problem:
    toy = Toy.make(num_data=num_data, half_width=half_width)
    known = Moments(toy.mean, toy.covariance)
    return Problem(name, toy.target, toy.data, 32, lambda p: p["w"], known, torch.ones_like(toy.mean))


CORRELATION = 0.99
NUM_DATA = 1000


def _gauss(name: str, noise: tuple[float, float]) -> Problem:
    """``N(0, S)`` in two dimensions, from examples whose gradients have the covariance ``diag(noise) / N``.

    ``log p_i(theta) = e_i . theta - theta S^-1 theta / (2 N)`` with ``e_i`` that sum to zero and have that very
    covariance. Of a well-specified model it would be ``S^-1 / N``, with eigenvalues .5 and 100.
    """
    covariance = torch.tensor([[1.0, CORRELATION], [CORRELATION, 1.0]], dtype=torch.float64)
    precision = torch.linalg.inv(covariance)
    e = torch.randn(NUM_DATA, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    e = e - e.mean(0)
    e = torch.linalg.solve_triangular(torch.linalg.cholesky(e.T @ e / NUM_DATA), e.T, upper=False).T  # exactly white
    e = e * torch.tensor(noise, dtype=torch.float64).div(NUM_DATA).sqrt()

    def log_likelihood(params: Params, batch: Any) -> Tensor:
        theta = params["theta"]
        value: Tensor = batch[0] @ theta - (0.5 / NUM_DATA) * (theta @ precision @ theta)
        return value

    target = Target(log_likelihood, priors.Flat(), init={"theta": torch.zeros(2, dtype=torch.float64)})
    known = Moments(torch.zeros(2, dtype=torch.float64), covariance)
    return Problem(name, target, (e,), 32, lambda p: p["theta"], known, torch.ones(2, dtype=torch.float64))


# ---------------------------------------------------------------- UCI data


DEGREE = 3
WINE_NOISE = 0.65  # standard deviation of the scores about what can be said of them


def _cubic(root: Path) -> Problem:
    """The quality of red wines by monomials of their measurements, each with unit variance; prior N(0, 1)."""
    wine = uci("wine-quality-red", root)
    x, y = wine.x.float(), wine.y.float()
    x = (x - x.mean(0)) / x.std(0)
    powers = [p for k in range(1, DEGREE + 1) for p in itertools.combinations_with_replacement(range(x.shape[1]), k)]
    x = torch.stack([x[:, list(p)].prod(-1) for p in powers], -1)
    x = torch.cat([torch.ones(len(x), 1), (x - x.mean(0)) / x.std(0)], -1)
    y = y - y.mean()

    def log_likelihood(params: Params, batch: Any) -> Tensor:
        rows, scores = batch
        value: Tensor = -0.5 * ((scores - rows @ params["w"]) / WINE_NOISE).square()
        return value

    rows, scores, unit = x.double() / WINE_NOISE, y.double() / WINE_NOISE, torch.ones(x.shape[1], dtype=torch.float64)
    covariance = torch.linalg.inv(rows.T @ rows + torch.diag(unit))
    target = Target(log_likelihood, priors.Normal(1.0), init={"w": torch.zeros(x.shape[1])})
    known = Moments(covariance @ (rows.T @ scores), covariance)
    return Problem("cubic-wine", target, (x, y), len(x) // 10, lambda p: p["w"], known, unit)


# ---------------------------------------------------------------- posteriordb


def _stan(name: str, root: Path) -> Problem:
    reference = posteriordb.load(name, root)

    def entries(params: Params) -> Tensor:
        natural = reference.natural(params)
        return torch.cat([natural[key].reshape(*natural[key].shape[:2], -1) for key in reference.draws], -1)

    whole = {key: x.reshape(*x.shape[:2], -1) for key, x in reference.draws.items()}
    known = moments(torch.cat(list(whole.values()), -1))
    unit = known.covariance.diagonal().sqrt()
    return Problem(name, reference.target, reference.data, reference.batch_size, entries, known, unit)


# ---------------------------------------------------------------- networks

HIDDEN = 50


@dataclass(frozen=True)
class Run:
    """Settings of the reference run of a network."""

    chains: int = 8
    draws: int = 800
    warmup: int = 400
    steps: tuple[int, int] = (30, 90)
    seed: int = 0


def net(inputs: int, seed: int) -> nn.Sequential:
    """The network of these posteriors, with first weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def _network(name: str, data: tuple[Tensor, Tensor], test: Tensor, cache: Path | None, run: Run) -> Problem:
    """A network with one hidden layer; what is compared is the function at the inputs ``test``."""
    inputs = test.shape[1]
    target = Target.from_module(net(inputs, seed=0), "gaussian")

    def entries(params: Params) -> Tensor:
        lead = next(iter(params.values())).shape[:2]
        flat = {key: x.flatten(0, 1) for key, x in params.items()}
        output = vmap(lambda p: target.predictive(target.unconstrain(p), test)["mean"], chunk_size=256)(flat)
        found: Tensor = output.reshape(*lead, -1)
        return found

    def reference() -> Moments:
        starts = [dict(net(inputs, seed=k).named_parameters()) for k in range(run.chains)]
        draws, _ = hmc(target, data, init=starts, **asdict(run))
        return moments(entries(draws))

    settings = json.dumps([asdict(run), target.describe()], sort_keys=True).encode()
    numbers = [x.numpy().tobytes() for x in (*data, test)]
    known = _cached(cache, name, b"".join([settings, *numbers]), reference)
    unit = known.covariance.diagonal().sqrt()
    return Problem(name, target, data, posteriordb.batch_size(len(data[0])), entries, known, unit)


def _cached(cache: Path | None, name: str, source: bytes, make: Callable[[], Moments]) -> Moments:
    """Moments kept in a folder, made anew when what they come from has changed."""
    if cache is None:
        return make()
    file = cache / f"{name}-{hashlib.sha256(source).hexdigest()[:12]}.npz"
    if not file.exists():
        known = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, mean=known.mean, covariance=known.covariance, ess=known.ess, rhat=known.rhat)
    with np.load(file, allow_pickle=False) as kept:
        return Moments(
            torch.from_numpy(kept["mean"]),
            torch.from_numpy(kept["covariance"]),
            float(kept["ess"]),
            float(kept["rhat"]),
        )


def wave() -> tuple[Tensor, Tensor]:
    """A hundred points of a wave with a gap in the middle."""
    generator = torch.Generator().manual_seed(0)
    x = 0.3 + 0.7 * torch.rand(100, 1, generator=generator)
    x[::2] *= -1
    return x, torch.sin(4 * x) + 0.1 * torch.randn(100, 1, generator=generator)


def _small_network(cache: Path | None) -> Problem:
    """The wave, compared on both sides of the gap and inside."""
    return _network("net-small", wave(), torch.linspace(-1, 1, 41)[:, None], cache, Run())


def _boston(root: Path, cache: Path | None) -> Problem:
    """The Boston data, standardised, 455 examples to learn from and the rest to predict."""
    boston = uci("bostonHousing", root)
    x, y = boston.x.float(), boston.y.float().unsqueeze(-1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held = order[:455], order[455:]
    test = (x[held] - x[train].mean(0)) / x[train].std(0)
    x, y = ((z[train] - z[train].mean(0)) / z[train].std(0) for z in (x, y))
    return _network("net-boston", (x, y), test, cache, Run())


# ---------------------------------------------------------------- all of them

_EXACT: dict[str, Callable[[str], Problem]] = {
    "toy-well-200": lambda name: _toy(name, 200, math.pi),
    "toy-bad-200": lambda name: _toy(name, 200, math.pi / 2),
    "toy-well-2000": lambda name: _toy(name, 2000, math.pi),
    "toy-bad-2000": lambda name: _toy(name, 2000, math.pi / 2),
    "gauss-anisotropic": lambda name: _gauss(name, (100.0, 1.0)),
    "gauss-half": lambda name: _gauss(name, (100.0, 0.0)),
}


def names(root: Path | str | None = None) -> list[str]:
    """Problems that can be made: all that need no data, and those whose data are under ``root``."""
    found = [*_EXACT, "net-small"]
    if root is not None:
        needed = {"cubic-wine": "wine-quality-red", "net-boston": "bostonHousing"}
        found += [name for name, data in needed.items() if data in uci_names(root)]
        found += posteriordb.names(root)
    return found


def make(name: str, root: Path | str | None = None, cache: Path | str | None = None) -> Problem:
    """A problem by its name.

    Args:
        name: one of `names`.
        root: folder of the data sets, with ``posteriordb`` and ``uci`` in it.
        cache: folder that keeps the reference moments of the networks, which take minutes to make.

    Example:
        >>> problem = make("gauss-half")
        >>> draws = torch.distributions.MultivariateNormal(torch.zeros(2), problem.reference.covariance.float())
        >>> _ = torch.manual_seed(0)
        >>> score(problem, {"theta": draws.sample((4, 2500))}, gradients=10_000)["w2"] < 0.05
        True
    """
    if name not in names(root):
        raise ValueError(f"problem {name!r} is unknown or has no data under {root}; there are {names(root)}")
    kept = None if cache is None else Path(cache)
    if name in _EXACT:
        return _EXACT[name](name)
    if name == "net-small":
        return _small_network(kept)
    assert root is not None
    if name == "cubic-wine":
        return _cubic(Path(root))
    return _boston(Path(root), kept) if name == "net-boston" else _stan(name, Path(root))
