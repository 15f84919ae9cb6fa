"""Estimators of scikit-learn for tables: a Bayesian network whose predictions say how sure they are.

Needs the extra ``tables`` (scikit-learn and pandas).

Example:
    >>> from sklearn.datasets import load_diabetes
    >>> from isosgd.sklearn import BayesianMLPRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BayesianMLPRegressor(effort=0.02, chains=2, random_state=0).fit(X[:100], y[:100])
    >>> mean, std = model.predict(X[100:103], return_std=True)
    >>> mean.shape, bool((std > 0).all())
    ((3,), True)
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_y, check_consistent_length, check_is_fitted, validate_data

from isosgd import Posterior
from isosgd.diagnostics.verdict import Verdict
from isosgd.metrics import mixture_quantiles
from isosgd.sampling.settings import memory
from isosgd.tables.network import Network, said_by_draws, sample_network, usual_layers, with_noise

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]

Array = Any
MISSING = "(missing)"
RARE, MOST_LEVELS = 2, 50  # rows that a level of a category needs for an input of its own, and levels at most
BATCH = 2_000  # rows predicted at once


class _BayesianMLP(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: columns become inputs, inputs and targets become draws."""

    hidden_layers: Any
    chains: int
    effort: float
    max_seconds: float | None
    random_state: Any
    device: Any
    posterior_: Posterior
    network_: Network

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # -- columns ------------------------------------------------------------------------------------------------------

    def _read(self, X: Any, reset: bool, y: Any = "no_validation", **checks: Any) -> tuple[Any, Any]:
        """X as an array of numbers or a frame of pandas, and y, both checked."""
        frame = _as_frame(X)
        if frame is None:
            given = {"dtype": np.float64, "ensure_all_finite": "allow-nan", "ensure_min_samples": 2 if reset else 1}
            if isinstance(y, str):
                return validate_data(self, X, reset=reset, **given), None
            return validate_data(self, X, y, reset=reset, **given, **checks)  # type: ignore[no-any-return]
        validate_data(self, frame, y, reset=reset, skip_check_array=True)
        if len(frame) < (2 if reset else 1) or not frame.shape[1]:
            least = 2 if reset else 1
            raise ValueError(f"X has {len(frame)} rows and {frame.shape[1]} columns; {least} and 1 are needed at least")
        if isinstance(y, str):
            return frame, None
        y = _check_y(y, multi_output=checks.get("multi_output", False), y_numeric=checks.get("y_numeric", False))
        check_consistent_length(frame, y)
        return frame, y

    def _fit_inputs(self, X: Any) -> torch.Tensor:
        """Learn how columns become inputs, and the inputs of these rows."""
        numeric, categories = _kinds(X)
        fill = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        # By position, in the order of `_plain`: names may be integers, which would be taken for positions.
        first, last = len(numeric), len(numeric) + len(categories)
        parts = [("number", fill, list(range(first)))]
        parts += [("category", _one_hot(), list(range(first, last)))] if categories else []
        self.encoder_ = ColumnTransformer(parts, sparse_threshold=0.0)
        self.kinds_, self.framed_ = (numeric, categories), hasattr(X, "columns")
        found = np.asarray(self.encoder_.fit_transform(_plain(X, numeric, categories)), dtype=np.float64)
        # A 0-1 input gets the scale of a balanced one: else a rare level would lie far from all others.
        flags = ((found == 0) | (found == 1)).all(0)
        with np.errstate(over="ignore"):
            self.center_, spread = found.mean(0), found.std(0)
        if not np.isfinite(spread).all():
            raise ValueError("X has values so large that their squares overflow; divide its columns by their size")
        self.scale_ = np.where(flags, 0.5, np.where(spread > 1e-12 * np.abs(self.center_), spread, 1.0))
        return self._standard(found)

    def _inputs(self, X: Any) -> torch.Tensor:
        check_is_fitted(self)
        X, _ = self._read(X, reset=False)
        if hasattr(X, "columns") != self.framed_:
            X = _named(X, self) if self.framed_ else np.asarray(X, dtype=np.float64)
        return self._standard(self.encoder_.transform(_plain(X, *self.kinds_)))

    def _standard(self, found: Array) -> torch.Tensor:
        return torch.from_numpy((np.asarray(found, dtype=np.float64) - self.center_) / self.scale_)

    # -- draws --------------------------------------------------------------------------------------------------------

    def _sample(self, x: torch.Tensor, y: torch.Tensor, outputs: int, likelihood: str) -> None:
        if isinstance(self.chains, bool) or not isinstance(self.chains, numbers.Integral) or self.chains < 1:
            raise ValueError(f"chains = {self.chains!r} must be an integer of at least 1")
        if not isinstance(self.effort, numbers.Real) or not (math.isfinite(self.effort) and self.effort > 0):
            raise ValueError(f"effort = {self.effort!r} must be a positive number")
        room, needed = memory(), 8 * x.numel() * 4
        if room is not None and needed > room:
            raise ValueError(
                f"{len(x):,} rows of {x.shape[1]:,} inputs take up more memory than this machine has: fit fewer rows"
            )
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        auto = isinstance(self.hidden_layers, str) and self.hidden_layers == "auto"
        try:
            hidden = usual_layers(len(x)) if auto else tuple(int(units) for units in self.hidden_layers)
        except (TypeError, ValueError):
            raise ValueError(
                f"hidden_layers = {self.hidden_layers!r}: give 'auto', or the units of each, such as (64, 64, 64)"
            ) from None
        self.network_ = Network(x.shape[1], outputs, likelihood, hidden, seed=seed)
        with warnings.catch_warnings():
            # `trust_` says whether chains have met; a fit of some seconds does not warn of it every time.
            warnings.simplefilter("ignore", UserWarning)
            self.posterior_ = sample_network(
                self.network_, x.float(), y, chains=int(self.chains), effort=float(self.effort),
                max_seconds=self.max_seconds, seed=seed, device=self.device,
            )  # fmt: skip

    @property
    def trust_(self) -> Verdict:
        """Whether to believe the draws: "trust it", "run longer" or "it samples something else", and why."""
        check_is_fitted(self)
        return self.posterior_.trust()

    def _said(self, x: torch.Tensor) -> tuple[Array, Array]:
        """Mean and noise variance by each draw, ``[draws, n, outputs]``, as arrays."""
        parts = [said_by_draws(self.network_, self.posterior_, part) for part in torch.split(x, BATCH)]
        mean, variance = (torch.cat(part, 1).numpy() for part in zip(*parts, strict=True))
        return mean, variance

    def __getstate__(self) -> dict[str, Any]:
        """Draws go as plain tensors: the target is made again from the network."""
        state = dict(super().__getstate__())
        if isinstance(found := state.get("posterior_"), Posterior):
            state["posterior_"] = {"draws": dict(found.draws), "info": found.info, "data": found.data}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(found := self.__dict__.get("posterior_"), dict):
            self.posterior_ = Posterior(self.network_.target(), found["draws"], found["info"], found["data"])


class BayesianMLPRegressor(RegressorMixin, _BayesianMLP):  # type: ignore[misc]
    """Regression by posterior draws of a network: predictions with standard deviations and quantiles.

    Columns are standardised; categories become indicators, missing values are filled and marked. Chains of HMC start
    at trained networks of their own. Same ``random_state``, same predictions.

    Args:
        hidden_layers: units of each hidden layer; ``auto`` takes three whose width grows with the rows. ``()`` is a
            linear model.
        likelihood: ``student_t``, ``gaussian``, or ``heteroscedastic``, whose size depends on the inputs.
        chains: that run side by side.
        effort: times the usual number of steps, which follows from the size of the table.
        max_seconds: bound on the time of a fit; predictions then depend on the clock.
        random_state: as everywhere in scikit-learn.
        device: where to compute, such as ``cuda``; the CPU by default.

    Attributes:
        posterior_: the draws, an `isosgd.Posterior`, in standard units.
        network_: what was sampled.
        trust_: whether to believe the draws.
        n_features_in_: columns of X.
        feature_names_in_: their names, where X has some.

    ``fit`` takes no ``sample_weight``: repeat rows instead.
    """

    def __init__(
        self,
        hidden_layers: Literal["auto"] | Sequence[int] = "auto",
        *,
        likelihood: Literal["student_t", "gaussian", "heteroscedastic"] = "student_t",
        chains: int = 8,
        effort: float = 1.0,
        max_seconds: float | None = None,
        random_state: Any = None,
        device: Any = None,
    ) -> None:
        self.hidden_layers = hidden_layers
        self.likelihood = likelihood
        self.chains = chains
        self.effort = effort
        self.max_seconds = max_seconds
        self.random_state = random_state
        self.device = device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> BayesianMLPRegressor:
        """Sample the posterior given rows and their numbers, ``[n]`` or ``[n, outputs]``."""
        if self.likelihood not in (names := ("student_t", "gaussian", "heteroscedastic")):
            raise ValueError(f"likelihood = {self.likelihood!r} is unknown; choose one of {', '.join(names)}")
        X, y = self._read(X, True, y, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self._flat = y.ndim == 1
        wide = y.reshape(len(y), -1)
        self.y_center_, self.y_scale_ = wide.mean(0), wide.std(0)
        if (constant := self.y_scale_ <= 1e-12 * np.abs(self.y_center_)).any():
            column = int(np.flatnonzero(constant)[0])
            raise ValueError(f"y is always {wide[0, column]:g}, so that there is nothing to learn: choose another")
        target = torch.from_numpy((wide - self.y_center_) / self.y_scale_).float()
        self._sample(self._fit_inputs(X), target, wide.shape[1], self.likelihood)
        return self

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        *,
        quantiles: Sequence[float] | None = None,
        return_draws: bool = False,
    ) -> Any:
        """The mean of the predictive distribution of each row.

        Args:
            X: rows with the columns that were fitted.
            return_std: return ``(mean, std)``: the standard deviation of y, of model and noise.
            quantiles: return these instead, ``[quantiles, n]``: those of the mixture over draws.
            return_draws: return what each draw says instead, ``[draws, n]``.
        """
        if (quantiles is not None) + return_std + return_draws > 1:
            raise ValueError("choose one of return_std=, quantiles= and return_draws=")
        mean, variance = self._said(self._inputs(X))
        if return_draws:
            return self._units(mean)
        if quantiles is not None:
            found = self.network_
            df = found.df if found.likelihood == "student_t" else math.inf
            flat = (torch.from_numpy(part.reshape(len(mean), -1)) for part in (mean, variance))
            return self._units(mixture_quantiles(*flat, list(quantiles), df=df).numpy().reshape(-1, *mean.shape[1:]))
        if not return_std:
            return self._units(mean.mean(0))
        std = np.sqrt(mean.var(0) + variance.mean(0)) * self.y_scale_
        return self._units(mean.mean(0)), std[..., 0] if self._flat else std

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Targets drawn from the predictive distribution: ``[n, n_samples]``, or ``[n, outputs, n_samples]``."""
        mean, variance = self._said(self._inputs(X))
        seed = check_random_state(random_state)
        chosen = seed.randint(len(mean), size=n_samples)
        generator = torch.Generator().manual_seed(int(seed.randint(np.iinfo(np.int32).max)))
        said = torch.from_numpy(mean[chosen]), torch.from_numpy(variance[chosen])
        drawn = with_noise(self.network_, said[0], said[1], generator)
        return np.moveaxis(self._units(drawn.numpy()), 0, -1)

    def _units(self, found: Array) -> Array:
        found = found * self.y_scale_ + self.y_center_
        return found[..., 0] if self._flat else found


class BayesianMLPClassifier(ClassifierMixin, _BayesianMLP):  # type: ignore[misc]
    """Classification by posterior draws of a network: probabilities are averages over draws.

    The arguments and attributes are those of `BayesianMLPRegressor`, without ``likelihood``; ``classes_`` are the
    labels.
    """

    def __init__(
        self,
        hidden_layers: Literal["auto"] | Sequence[int] = "auto",
        *,
        chains: int = 8,
        effort: float = 1.0,
        max_seconds: float | None = None,
        random_state: Any = None,
        device: Any = None,
    ) -> None:
        self.hidden_layers = hidden_layers
        self.chains = chains
        self.effort = effort
        self.max_seconds = max_seconds
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> BayesianMLPClassifier:
        """Sample the posterior given rows and their labels ``[n]``."""
        X, y = self._read(X, True, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs two classes at least")
        self._sample(self._fit_inputs(X), torch.from_numpy(labels).long(), len(self.classes_), "categorical")
        return self

    def predict_proba(self, X: Any, *, return_draws: bool = False) -> Array:
        """Probabilities ``[n, classes]``; with ``return_draws`` what each draw says, ``[draws, n, classes]``."""
        found, _ = self._said(self._inputs(X))
        return found if return_draws else found.mean(0)

    def predict(self, X: Any) -> Array:
        """The likeliest class of each row."""
        found = self.predict_proba(X)
        return self.classes_[found.argmax(1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Labels drawn from the predictive distribution, ``[n, n_samples]``."""
        found = self.predict_proba(X)
        drawn = check_random_state(random_state).uniform(size=(len(found), n_samples))
        index = (drawn[..., None] > found.cumsum(1)[:, None]).sum(-1)
        return self.classes_[np.minimum(index, len(self.classes_) - 1)]


# -- frames -----------------------------------------------------------------------------------------------------------


def _as_frame(X: Any) -> Any:
    """A frame of pandas or polars as one of pandas; None for anything else."""
    if not hasattr(X, "columns") or not hasattr(X, "dtypes"):
        return None
    import pandas as pd

    if isinstance(X, pd.DataFrame):
        return X
    return pd.DataFrame({name: X[name].to_list() for name in X.columns})


def _named(X: Any, model: Any) -> Any:
    """An array as the frame that was fitted."""
    import pandas as pd

    return pd.DataFrame(X, columns=list(model.feature_names_in_))


def _kinds(X: Any) -> tuple[Any, Any]:
    """Columns that are numbers, and those that are categories."""
    if not hasattr(X, "columns"):
        return list(range(X.shape[1])), []
    from pandas.api import types

    numeric = [c for c in X.columns if types.is_numeric_dtype(X[c]) or types.is_datetime64_any_dtype(X[c])]
    return numeric, [c for c in X.columns if c not in numeric]


def _plain(X: Any, numeric: Any, categories: Any) -> Any:
    """A frame with numbers as floats, dates as days, and categories as text."""
    if not hasattr(X, "columns"):
        return X
    import pandas as pd
    from pandas.api import types

    found = {}
    for name in numeric:
        column = X[name]
        if types.is_datetime64_any_dtype(column):
            column = (pd.to_datetime(column, utc=True) - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
        try:
            found[name] = column.to_numpy(dtype=np.float64, na_value=np.nan)
        except (TypeError, ValueError):
            raise ValueError(f"column {name!r} was one of numbers when the model was fitted; now it is not") from None
        if np.isinf(found[name]).any():
            raise ValueError(f"column {name!r} has infinite values; make them missing (NaN), or drop these rows")
    for name in categories:
        found[name] = np.array([MISSING if pd.isna(v) else str(v) for v in X[name]], dtype=object)
    return pd.DataFrame(found, columns=[*numeric, *categories])


def _one_hot() -> OneHotEncoder:
    return OneHotEncoder(
        handle_unknown="ignore", min_frequency=RARE, max_categories=MOST_LEVELS, sparse_output=False, dtype=np.float64
    )
