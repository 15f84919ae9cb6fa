"""Posteriors of posteriordb with the draws of a long Stan run: what a sampler should find on real data.

Data are used as they are: nothing is centred or scaled, so that condition numbers reach 1e11. Twelve of the fourteen
are normal regressions whose examples can be split in minibatches (`REGRESSIONS`). The other two are:

- ``eight_schools-eight_schools_noncentered``: eight examples, one to a school, ``y_i ~ N(mu + tau theta_trans_i,
  sigma_i)`` with known ``sigma_i``. A batch is eight schools. We sample ``theta_trans``, ``mu`` and ``tau``; the
  reference has ``theta = mu + tau theta_trans`` in place of the first.
- ``low_dim_gauss_mix-low_dim_gauss_mix``: two normals in one dimension with ordered means and weight ``theta`` of the
  lower one. We sample ``low``, the lower mean, the positive ``gap`` between the two, ``sigma`` and ``logit``, that of
  the weight; the reference has ``mu``, ``sigma`` and ``theta``.

References:
    Magnusson et al. (2024), posteriordb: testing, benchmarking and developing Bayesian inference algorithms.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isosgd import Target, priors
from isosgd.target import Params, Prior

LOG_2PI = math.log(2 * math.pi)
LEAST_ROWS = 8
Raw = dict[str, Any]  # a data.json
Builder = Callable[[Raw], tuple[Target, tuple[Tensor, ...]]]


def _same(params: Params) -> Params:
    return dict(params)


@dataclass(frozen=True)
class Reference:
    """A posterior and draws from it.

    Attributes:
        name: as in posteriordb.
        target: the posterior, in float64; it starts at a least-squares fit.
        data: what a sampler gets, one row an example.
        draws: reference draws by name, in Stan's parameters, ``[chains, draws, *shape]``, float64.
        batch_size: a tenth of the data, at least 8 rows, even, at most all.
        natural: Stan's parameters from those of the target; leading dimensions are welcome.
        sampled: the inverse of ``natural``.
    """

    name: str
    target: Target
    data: tuple[Tensor, ...]
    draws: Params
    batch_size: int
    natural: Callable[[Params], Params] = _same
    sampled: Callable[[Params], Params] = _same


# ---------------------------------------------------------------- regressions


def normal_log_likelihood(params: Params, batch: Any) -> Tensor:
    """Of ``y ~ N(X beta, sigma)``; the batch is ``(X, y)``."""
    x, y = batch
    return _normal(y, x @ params["beta"], params["sigma"])


def _lagged_log_likelihood(params: Params, batch: Any) -> Tensor:
    """Of ``y_t ~ N(alpha + sum_k beta_k y_(t-k), sigma)``; the batch is ``(lags, y)``."""
    lags, y = batch
    return _normal(y, params["alpha"] + lags @ params["beta"], params["sigma"])


def _normal(y: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    return -0.5 * ((y - mean) / sigma).square() - sigma.log() - 0.5 * LOG_2PI


def _column(raw: Raw, key: str) -> Tensor:
    return torch.tensor(raw[key], dtype=torch.float64)


def _term(raw: Raw, term: str) -> Tensor:
    """A column, a product or ratio of columns such as ``height*male``, or the logarithm of one, ``log height``."""
    value = torch.ones((), dtype=torch.float64)
    for sign, key in re.findall(r"([*/]?)(\w+)", term.removeprefix("log ")):
        value = value / _column(raw, key) if sign == "/" else value * _column(raw, key)
    return value.log() if term.startswith("log ") else value


HALF_CAUCHY: Mapping[str, Prior] = {"beta": priors.Flat(), "sigma": priors.HalfCauchy(2.5)}
FLAT: Mapping[str, Prior] = {"*": priors.Flat()}
WIDE: Mapping[str, Prior] = {"beta": priors.Normal(10.0), "sigma": priors.HalfNormal(10.0)}

# For each regression with an intercept: its response, its covariates, and its prior.
_LINEAR: dict[str, tuple[str, list[str], Mapping[str, Prior]]] = {
    "earnings-earn_height": ("earn", ["height"], FLAT),
    "earnings-logearn_height_male": ("log earn", ["height", "male"], FLAT),
    "earnings-logearn_interaction": ("log earn", ["height", "male", "height*male"], FLAT),
    "kidiq-kidscore_interaction": ("kid_score", ["mom_hs", "mom_iq", "mom_hs*mom_iq"], HALF_CAUCHY),
    "kidiq-kidscore_momhs": ("kid_score", ["mom_hs"], HALF_CAUCHY),
    "kidiq-kidscore_momhsiq": ("kid_score", ["mom_hs", "mom_iq"], HALF_CAUCHY),
    "kidiq-kidscore_momiq": ("kid_score", ["mom_iq"], HALF_CAUCHY),
    "mesquite-logmesquite": (
        "log weight",
        ["log diam1", "log diam2", "log canopy_height", "log total_height", "log density", "group"],
        FLAT,
    ),
    "mesquite-logmesquite_logvash": (  # volume, area and shape of the canopy, and the height
        "log weight",
        ["log diam1*diam2*canopy_height", "log diam1*diam2", "log diam1/diam2", "log total_height", "group"],
        FLAT,
    ),
}


def _linear(name: str) -> Builder:
    response, covariates, prior = _LINEAR[name]

    def build(raw: Raw) -> tuple[Target, tuple[Tensor, ...]]:
        y = _term(raw, response)
        x = torch.stack([torch.ones_like(y), *(_term(raw, covariate) for covariate in covariates)], 1)
        return _fitted(x, y, prior), (x, y)

    return build


def _simulated(raw: Raw) -> tuple[Target, tuple[Tensor, ...]]:
    """The two sets with simulated covariates, correlated (sblrc) and independent (sblri); they have no intercept."""
    x, y = _column(raw, "X"), _column(raw, "y")
    return _fitted(x, y, WIDE), (x, y)


def _fitted(x: Tensor, y: Tensor, prior: Mapping[str, Prior]) -> Target:
    beta, sigma = least_squares(x, y)
    return Target(normal_log_likelihood, prior, positive=["sigma"], init={"beta": beta, "sigma": sigma})


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients and residual standard deviation of a linear fit, on scaled columns so that none is lost.

    To seven digits: the last ones depend on where LAPACK's memory lies, and would make every run another.
    """
    scale = x.square().mean(0).sqrt()
    beta = torch.linalg.lstsq(x / scale, y[:, None]).solution[:, 0] / scale
    beta = beta.float().to(x)
    return beta, ((y - x @ beta).square().sum() / max(len(y) - x.shape[1], 1)).sqrt()


def _autoregression(raw: Raw) -> tuple[Target, tuple[Tensor, ...]]:
    """A regression of a series on its last K values: the rows are those of which all K are known."""
    series, order = _column(raw, "y"), int(raw["K"])
    y = series[order:]
    lags = torch.stack([series[order - k : -k] for k in range(1, order + 1)], 1)
    fit, sigma = least_squares(torch.cat([torch.ones_like(y)[:, None], lags], 1), y)
    prior: Mapping[str, Prior] = {
        "alpha": priors.Normal(10.0),
        "beta": priors.Normal(10.0),
        "sigma": priors.HalfCauchy(2.5),
    }
    init = {"alpha": fit[0], "beta": fit[1:], "sigma": sigma}
    return Target(_lagged_log_likelihood, prior, positive=["sigma"], init=init), (lags, y)


# ---------------------------------------------------------------- eight schools

SCHOOLS_PRIOR: Mapping[str, Prior] = {
    "theta_trans": priors.Normal(1.0),
    "mu": priors.Normal(5.0),
    "tau": priors.HalfCauchy(5.0),
}


def schools_log_likelihood(params: Params, batch: Any) -> Tensor:
    """Of the observed effects; the batch is ``(y, sigma, which school)``."""
    y, sigma, school = batch
    return _normal(y, params["mu"] + params["tau"] * params["theta_trans"][school], sigma)


def _schools(raw: Raw) -> tuple[Target, tuple[Tensor, ...]]:
    y, sigma = _column(raw, "y"), _column(raw, "sigma")
    start = {"theta_trans": torch.zeros_like(y), "mu": y.mean(), "tau": y.std()}
    target = Target(schools_log_likelihood, SCHOOLS_PRIOR, positive=["tau"], init=start)
    return target, (y, sigma, torch.arange(len(y)))


def _schools_natural(params: Params) -> Params:
    mu, tau = params["mu"], params["tau"]
    return {"theta": mu[..., None] + tau[..., None] * params["theta_trans"], "mu": mu, "tau": tau}


def _schools_sampled(params: Params) -> Params:
    mu, tau = params["mu"], params["tau"]
    return {"theta_trans": (params["theta"] - mu[..., None]) / tau[..., None], "mu": mu, "tau": tau}


# ---------------------------------------------------------------- a mixture of two normals


def mixture_log_likelihood(params: Params, batch: Any) -> Tensor:
    """Of a mixture of two normals; the batch is ``(y,)``."""
    (y,) = batch
    weights = torch.nn.functional.logsigmoid(torch.stack([params["logit"], -params["logit"]]))
    means = torch.stack([params["low"], params["low"] + params["gap"]])
    return torch.logsumexp(weights + _normal(y[:, None], means, params["sigma"]), 1)


def mixture_log_prior(params: Params) -> Tensor:
    """Both means ``N(0, 2)`` in order, both sigmas half-normal(2), the weight beta(5, 5), as a density of its logit."""
    means = torch.stack([params["low"], params["low"] + params["gap"]])
    squares = (means / 2).square().sum() + (params["sigma"] / 2).square().sum()
    logit = params["logit"]  # theta^4 (1 - theta)^4, and theta (1 - theta) for the change of variables
    weight = 5 * (torch.nn.functional.logsigmoid(logit) + torch.nn.functional.logsigmoid(-logit))
    return -0.5 * squares + weight


class MixturePrior(Prior):
    """`mixture_log_prior`, with its gradient in closed form."""

    def log_prob(self, params: Params) -> Tensor:
        return mixture_log_prior(params)

    def grad(self, params: Params) -> Params:
        low, high, logit = params["low"], params["low"] + params["gap"], params["logit"]
        weight = 5 - 10 * logit.sigmoid()
        return {"low": -(low + high) / 4, "gap": -high / 4, "sigma": -params["sigma"] / 4, "logit": weight}


def _mixture(raw: Raw) -> tuple[Target, tuple[Tensor, ...]]:
    y = _column(raw, "y")
    low, high = y[y < y.mean()], y[y >= y.mean()]
    start = {
        "low": low.mean(),
        "gap": high.mean() - low.mean(),
        "sigma": torch.stack([low.std(), high.std()]),
        "logit": y.new_zeros(()),
    }
    return Target(mixture_log_likelihood, MixturePrior(), positive=["gap", "sigma"], init=start), (y,)


def _mixture_natural(params: Params) -> Params:
    low, gap = params["low"], params["gap"]
    return {"mu": torch.stack([low, low + gap], -1), "sigma": params["sigma"], "theta": params["logit"].sigmoid()}


def _mixture_sampled(params: Params) -> Params:
    low, high = params["mu"].unbind(-1)
    return {"low": low, "gap": high - low, "sigma": params["sigma"], "logit": params["theta"].logit()}


# ---------------------------------------------------------------- all of them

_BUILDERS: dict[str, Builder] = {
    "arK-arK": _autoregression,
    **{name: _linear(name) for name in _LINEAR},
    "sblrc-blr": _simulated,
    "sblri-blr": _simulated,
    "eight_schools-eight_schools_noncentered": _schools,
    "low_dim_gauss_mix-low_dim_gauss_mix": _mixture,
}
_MAPS = {
    "eight_schools-eight_schools_noncentered": (_schools_natural, _schools_sampled),
    "low_dim_gauss_mix-low_dim_gauss_mix": (_mixture_natural, _mixture_sampled),
}
NAMES = tuple(sorted(_BUILDERS))
REGRESSIONS = tuple(name for name in NAMES if name not in _MAPS)


def default_root() -> Path | None:
    """Where data sets are: the folder in ISOSGD_DATA, else shared data beside the checkout; None without any."""
    if given := os.environ.get("ISOSGD_DATA"):
        return Path(given)
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    return beside if beside.is_dir() else None


def names(root: Path | str) -> list[str]:
    """The posteriors that are there, of those known here.

    Args:
        root: folder of the data sets; it has ``posteriordb/<name>/data.json`` and ``draws.npz``.
    """
    return [name for name in NAMES if (Path(root) / "posteriordb" / name / "data.json").exists()]


def load(name: str, root: Path | str) -> Reference:
    """A posterior with its data and reference draws.

    Args:
        name: as in posteriordb, see `NAMES`.
        root: folder of the data sets, as for `names`.
    """
    if name not in _BUILDERS:
        raise ValueError(f"name = {name!r} is not a posterior known here; choose one of {list(NAMES)}")
    folder = Path(root) / "posteriordb" / name
    for file in ("data.json", "draws.npz"):
        if not (folder / file).exists():
            raise ValueError(f"there is no {folder / file}: root must be the folder that holds posteriordb/{name}")
    target, data = _BUILDERS[name](json.loads((folder / "data.json").read_text()))
    natural, sampled = _MAPS.get(name, (_same, _same))
    with np.load(folder / "draws.npz", allow_pickle=False) as stored:
        draws = gather([str(entry) for entry in stored["names"]], torch.from_numpy(stored["draws"]).double())
    return Reference(name, target, data, draws, batch_size(len(data[0])), natural, sampled)


def batch_size(num_data: int) -> int:
    """A tenth of the data, at least 8 rows, even, at most all.

    Example:
        >>> batch_size(1192), batch_size(46), batch_size(8)
        (118, 8, 8)
    """
    return min(max(num_data // 10, LEAST_ROWS) // 2 * 2, num_data)


def gather(entries: list[str], values: Tensor) -> Params:
    """Draws ``[..., entries]`` by parameter: ``beta[1], beta[2], ...`` become one ``beta`` of shape ``[..., K]``.

    Example:
        >>> found = gather(["beta[1]", "beta[2]", "sigma"], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> found["beta"], found["sigma"]
        (tensor([[1., 2.]]), tensor([3.]))
    """
    columns: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        columns.setdefault(re.sub(r"\[\d+\]$", "", entry), []).append(i)
    return {
        name: values[..., index] if "[" in entries[index[0]] else values[..., index[0]]
        for name, index in columns.items()
    }
