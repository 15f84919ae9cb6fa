"""Bayesian logistic regressions on real data, with a long run of our own Hamiltonian Monte Carlo as reference.

- ``logistic-cancer``: the Wisconsin breast cancer data (569 tumours, 30 features), from ``breast_cancer.npz`` (arrays
  ``x`` and ``y``) in the data root, else from scikit-learn where it is installed. `export` writes that file.
- ``logistic-wine``: whether a red wine is rated above 5 (1,599 wines, 11 features), from ``uci/wine-quality-red``.

Features are standardised; weights and intercept are ``N(0, 1)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from experiments.posteriors.hmc import hmc
from experiments.posteriors.suite import Moments, Problem, moments
from isosgd import Target, priors
from isosgd.target import Params

BATCH_SIZE = 32
REFERENCE: dict[str, Any] = {"chains": 8, "draws": 2000, "warmup": 500, "steps": (6, 18)}
FILE = "breast_cancer.npz"
Arrays = tuple[NDArray[np.float64], NDArray[np.float64]]


def read_cancer(root: Path) -> Arrays | None:
    if (root / FILE).is_file():
        with np.load(root / FILE, allow_pickle=False) as kept:
            return np.asarray(kept["x"], np.float64), np.asarray(kept["y"], np.float64)
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        return None
    found = load_breast_cancer()
    return np.asarray(found.data, np.float64), np.asarray(found.target, np.float64)


def read_wine(root: Path) -> Arrays | None:
    folder = root / "uci" / "wine-quality-red"
    if not (folder / "data.txt").is_file():
        return None
    table = np.loadtxt(folder / "data.txt")
    columns, rating = (np.loadtxt(folder / f"index_{part}.txt", dtype=int, ndmin=1) for part in ("features", "target"))
    return table[:, columns], (table[:, rating[0]] > 5).astype(np.float64)


_DATA: dict[str, Callable[[Path], Arrays | None]] = {"logistic-cancer": read_cancer, "logistic-wine": read_wine}
NAMES = tuple(_DATA)


def names(root: Path | str) -> list[str]:
    """Problems whose data are there."""
    return [name for name, load in _DATA.items() if load(Path(root)) is not None]


def export(folder: Path | str) -> Path:
    """Write the breast cancer data, for a machine without scikit-learn. Returns the file."""
    found = read_cancer(Path(folder))
    if found is None:
        raise ValueError("scikit-learn is not installed here, so there is nothing to export")
    Path(folder).mkdir(parents=True, exist_ok=True)
    np.savez(Path(folder) / FILE, x=found[0], y=found[1])
    return Path(folder) / FILE


def make(name: str, root: Path | str, cache: Path | str | None = None) -> Problem:
    """A problem by its name.

    Args:
        name: one of `NAMES`.
        root: folder of the data sets.
        cache: folder that keeps the moments of the reference, which takes a minute to make.
    """
    if name not in _DATA:
        raise ValueError(f"problem {name!r} is unknown; there are {list(NAMES)}")
    arrays = _DATA[name](Path(root))
    if arrays is None:
        raise ValueError(
            f"the data of {name!r} are not under {root}; see experiments.posteriors.logistic for where they go"
        )
    # Of the data as they come: standardised ones differ in their last bits from machine to machine.
    source = hashlib.sha256(b"".join(a.tobytes() for a in arrays) + repr(REFERENCE).encode()).hexdigest()[:12]
    x, y = (torch.from_numpy(array) for array in arrays)
    x = (x - x.mean(0)) / x.std(0)
    known = _reference(name, x, y, None if cache is None else Path(cache) / f"{name}-{source}.npz")
    unit = torch.ones_like(known.mean)
    return Problem(name, _target(x.float()), (x.float(), y.float()), BATCH_SIZE, _entries, known, unit)


def _target(x: Tensor) -> Target:
    return Target(_log_likelihood, priors.Normal(1.0), init={"w": x.new_zeros(x.shape[1]), "b": x.new_zeros(())})


def _log_likelihood(params: Params, batch: Any) -> Tensor:
    x, y = batch
    return logsigmoid((2 * y - 1) * (x @ params["w"] + params["b"]))


def _entries(params: Params) -> Tensor:
    return torch.cat([params["w"], params["b"].unsqueeze(-1)], -1)


def _reference(name: str, x: Tensor, y: Tensor, file: Path | None) -> Moments:
    if file is not None and file.is_file():
        with np.load(file, allow_pickle=False) as kept:
            numbers = float(kept["ess"]), float(kept["rhat"])
            return Moments(torch.from_numpy(kept["mean"]), torch.from_numpy(kept["covariance"]), *numbers)
    draws, info = hmc(_target(x), (x, y), **REFERENCE)
    known = moments(_entries(draws))
    if not known.rhat < 1.02 or info.diverged:
        raise RuntimeError(
            f"the reference of {name} is no good: R-hat {known.rhat:.3f}, {info.diverged} diverged; run it longer"
        )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, mean=known.mean, covariance=known.covariance, ess=known.ess, rhat=known.rhat)
    return known
