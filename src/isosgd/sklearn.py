"""Estimators of scikit-learn for tables: a Bayesian network whose predictions say how sure they are.

Needs the extra ``tables`` (scikit-learn, pandas, pyarrow).

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

import json
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.neighbors import NearestNeighbors
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_y, check_consistent_length, check_is_fitted, validate_data
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError('tables need scikit-learn and pandas: pip install "isosgd[tables]"') from missing

import isosgd
from isosgd import Posterior
from isosgd.diagnostics.verdict import Verdict
from isosgd.errors import OutOfTimeError, SamplingWarning
from isosgd.metrics import mixture_quantiles
from isosgd.posterior.calibration import leave_one_out, sharpened, sharpest
from isosgd.posterior.draws import evenly
from isosgd.sampling.settings import check_seconds, memory
from isosgd.store import Manifest
from isosgd.store.draws import Damaged
from isosgd.tables.columns import Columns
from isosgd.tables.network import (
    NOISES,
    Network,
    predicted_by_draws,
    resume_network,
    sample_network,
    usual_layers,
    with_noise,
)

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor", "load", "resume"]

Array = Any
BATCH = 2_000  # rows per batch
CALIBRATED, PART = 2_000, 250  # most training rows that calibrate averages of classes, and rows per batch
REPEATED = 0.05  # share of repeated rows above which they are not used
OF_AVERAGES = "softmax_temperature_of_averages"  # key in the info of a posterior
FEW_DRAWS = 10  # warn if max_seconds leaves fewer draws of each chain
COPIES = 4  # of the inputs in memory during a fit
MODEL, DATA, VERSION = "model.json", "data.safetensors", 1  # files beside the draws of a run
LARGEST = 64 << 20  # largest size in bytes of MODEL
CLASSES: dict[str, Any] = {"O": object, "U": str, "i": np.int64, "u": np.uint64, "f": np.float64, "b": np.bool_}
ROUNDING = 1e-5  # of distances in standard units
NEIGHBOURS, FAR, COMPARED = 5, 0.99, 5_000  # nearest training rows, quantile of their distances, most rows compared


class _BayesianMLP(BaseEstimator):  # type: ignore[misc]
    """Base of both estimators: turns columns into inputs, and inputs and targets into draws."""

    posterior_: Posterior
    network_: Network
    columns_: Columns
    held_out_: tuple[torch.Tensor, torch.Tensor] | None

    def __init__(
        self,
        hidden_layers: Literal["auto"] | Sequence[int] = "auto",
        *,
        chains: int = 8,
        effort: float = 1.0,
        max_seconds: float | None = None,
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layers = hidden_layers
        self.chains = chains
        self.effort = effort
        self.max_seconds = max_seconds
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # -- columns ------------------------------------------------------------------------------------------------------

    def _read(self, X: Any, reset: bool, y: Any = "no_validation", **checks: Any) -> tuple[Any, Any]:
        """X as an array of numbers or a pandas frame, and y, both checked."""
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

    def _checked(self, X: Any) -> Any:
        """Rows to predict, checked against the fitted columns."""
        check_is_fitted(self, "posterior_")
        return self._as_fitted(X)

    def _as_fitted(self, X: Any) -> Any:
        columns, framed = self.columns_, _as_frame(X) is not None
        if not framed and (others := [*columns.categories, *columns.dates]):
            raise ValueError(f"column {others[0]!r} is not one of numbers: give X as a frame with the fitted columns")
        X, _ = self._read(X, reset=False)
        if framed == (columns.names is not None):
            return X
        return np.asarray(X, dtype=np.float64) if framed else columns.named(X)

    def unlike(self, X: Any) -> list[list[str]]:
        """Why each row is unlike the training data; empty for those that are like them.

        A value lies beyond the training range by more than a tenth of it, a level was never seen, a value is missing
        in a column that never lacked one; or the row is far from all training rows: its mean distance to the five
        nearest, in standard units, exceeds that of 99% of the training rows from each other.
        """
        X = self._checked(X)
        # Rounded like the training rows, so that distances of equal rows are zero.
        x, known = (t.float().double().cpu().numpy() for t in (self.columns_.inputs(X), self.posterior_.data[0]))
        rows = known[evenly(len(known), COMPARED)]
        near = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(rows) - 1)).fit(rows)
        limit = np.quantile(near.kneighbors()[0].mean(1), FAR)
        far = near.kneighbors(x)[0].mean(1) > limit + ROUNDING
        return [
            [*why, "far from all training rows"] if beyond else why
            for why, beyond in zip(self.columns_.unusual(X), far, strict=True)
        ]

    # -- draws --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop draws of an earlier fit, whose units may differ."""
        self.__dict__.pop("posterior_", None)

    def _sample(self, X: Any, y: Any, likelihood: str, store: str | Path | None, held_out: Any) -> None:
        if isinstance(self.chains, bool) or not isinstance(self.chains, numbers.Integral) or self.chains < 1:
            raise ValueError(f"chains = {self.chains!r} must be an integer of at least 1")
        if not isinstance(self.effort, numbers.Real) or not (math.isfinite(self.effort) and self.effort > 0):
            raise ValueError(f"effort = {self.effort!r} must be a positive number")
        if self.max_seconds is not None:
            check_seconds(self.max_seconds)
        if store is not None and Manifest.begun(Path(store)):
            raise ValueError(f"store = {str(store)!r} holds a run already: choose another folder")
        _check_room(*X.shape)
        self.columns_, x = Columns.learn(X)
        _check_room(*x.shape)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        auto = isinstance(self.hidden_layers, str) and self.hidden_layers == "auto"
        hidden = usual_layers(len(x)) if auto else _units(self.hidden_layers)
        network = Network(x.shape[1], self._outputs, likelihood, hidden, seed=seed)
        x, shape, y = x.float(), np.shape(y), self._encoded(y)
        self.held_out_ = None if held_out is None else self._held_out(held_out, shape)

        def begin(network: Network) -> None:
            self.network_ = network
            if store is not None:
                self._save(Path(store), x, y)

        try:
            with self._quietly():
                self.posterior_ = sample_network(
                    network, x, y, begin=begin, chains=int(self.chains), effort=float(self.effort),
                    max_seconds=self.max_seconds, seed=seed, device=self.device, store=store,
                    progress=bool(self.verbose),
                )  # fmt: skip
        except OutOfTimeError as error:
            raise ValueError(
                f"max_seconds = {self.max_seconds:g} was over before a first draw: allow more seconds, or give a "
                "smaller effort="
            ) from error
        drawn = self.posterior_.num_draws
        if self.max_seconds is not None and drawn < FEW_DRAWS:
            warnings.warn(
                f"max_seconds = {self.max_seconds:g} left time for {drawn} draws of each chain, too few for good "
                "averages: allow more seconds, or give a smaller effort=",
                SamplingWarning, stacklevel=3,
            )  # fmt: skip

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Suppress warnings of convergence unless verbose; `trust_` tells it."""
        with warnings.catch_warnings():
            if not self.verbose:
                warnings.filterwarnings("ignore", r"chain \d+\b(?! was dropped)", SamplingWarning)
            yield

    def _held_out(self, given: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Held-out rows and targets in the form of the fitted ones, whose targets have this shape."""
        if not isinstance(given, Sequence) or len(given) != 2:
            raise ValueError("held_out must be a pair (X, y) of rows that are not learnt from")
        X, numeric = self._as_fitted(given[0]), isinstance(self, RegressorMixin)
        y = _check_y(given[1], multi_output=numeric, y_numeric=numeric)
        check_consistent_length(X, y)
        if y.shape[1:] != shape[1:]:
            raise ValueError(f"held_out y has the shape {y.shape} and y has {shape}: give it the same columns")
        return self.columns_.inputs(X).float(), self._encoded(y)

    def _save(self, folder: Path, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write everything but the draws before sampling, so that a killed fit can be resumed."""
        params = self.get_params(deep=False)
        seed = params["random_state"]
        params |= {
            "hidden_layers": self.hidden_layers if isinstance(self.hidden_layers, str) else list(self.hidden_layers),
            "random_state": int(seed) if isinstance(seed, numbers.Integral) else None,
            "device": None if self.device is None else str(self.device),
        }
        state = {
            "version": VERSION, "estimator": type(self).__name__, "params": params, "target": self._learnt(),
            "network": asdict(self.network_), "columns": self.columns_.as_dict(),
        }  # fmt: skip
        try:
            text = json.dumps(state, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"store=: names of columns and classes must be text or numbers ({error})") from None
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"x": x, "y": y}
        if self.held_out_ is not None:
            tensors |= {"held_out_x": self.held_out_[0], "held_out_y": self.held_out_[1]}
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / DATA)
        (folder / MODEL).write_text(text + "\n", encoding="utf-8")

    @property
    def trust_(self) -> Verdict:
        """Whether to believe the draws: "trust it", "run longer" or "it samples something else", and why."""
        check_is_fitted(self, "posterior_")
        return self.posterior_.trust(held_out=self.held_out_)

    def _predicted(self, X: Any, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Array:
        """A function of means and noise variances ``[draws, n, outputs]`` of all draws, in batches of rows."""
        X = self._checked(X)  # first: without a fit there are no columns
        parts = torch.split(self.columns_.inputs(X), BATCH)
        return torch.cat([of(*predicted_by_draws(self.network_, self.posterior_, part)) for part in parts], -2).numpy()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle draws as plain tensors; the target is made again from the network."""
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
        hidden_layers: units of each hidden layer; ``auto`` takes three of 16, from 500 rows on four of 16, and
            beyond 20,000 three of 64. ``()`` is a linear model.
        likelihood: of the noise. ``student_t`` and ``gaussian`` have one scale; ``loglinear_t`` and ``loglinear`` a
            scale whose logarithm is linear in the inputs; ``heteroscedastic_t`` and ``heteroscedastic`` a scale that
            is an output of the network. ``auto`` chooses among the first four on held-out rows, before sampling.
        chains: that run side by side.
        effort: multiplies the default number of steps, which follows from the size of the table.
        max_seconds: time limit of a fit; predictions then depend on the clock.
        random_state: as everywhere in scikit-learn.
        device: where to compute, such as ``cuda``; the CPU by default.
        verbose: show a progress line.

    Attributes:
        posterior_: the draws, an `isosgd.Posterior`, in standard units.
        network_: what was sampled.
        columns_: how columns become inputs.
        trust_: whether to believe the draws.
        n_features_in_: columns of X.
        feature_names_in_: their names, where X has some.

    ``fit`` takes no ``sample_weight``: repeat rows instead.
    """

    def __init__(
        self,
        hidden_layers: Literal["auto"] | Sequence[int] = "auto",
        *,
        likelihood: Literal[
            "auto", "student_t", "gaussian", "loglinear_t", "loglinear", "heteroscedastic_t", "heteroscedastic"
        ] = "auto",
        chains: int = 8,
        effort: float = 1.0,
        max_seconds: float | None = None,
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            hidden_layers, chains=chains, effort=effort, max_seconds=max_seconds, random_state=random_state,
            device=device, verbose=verbose,
        )  # fmt: skip
        self.likelihood = likelihood

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self, X: Any, y: Any, *, store: str | Path | None = None, held_out: Any = None, **given: Any
    ) -> BayesianMLPRegressor:
        """Sample the posterior given rows and their numbers, ``[n]`` or ``[n, outputs]``.

        Args:
            X: rows: an array of numbers, or a frame of pandas or polars.
            y: what to predict.
            store: a folder for draws and all that `load` and `resume` need, also after the fit was killed. It includes
                the rows, in standard units.
            held_out: ``(X, y)`` that is not trained on, for `trust_` and the report.
            given: ``sample_weight`` is refused, and so is anything else.
        """
        _refuse(given)
        if self.likelihood not in NOISES:
            raise ValueError(f"likelihood = {self.likelihood!r} is unknown; choose one of {', '.join(NOISES)}")
        self._forget()
        if np.asarray(y).dtype.kind in "mM":
            raise ValueError("y holds dates or times: give numbers, such as days since a date")
        if np.asarray(y).dtype.kind in "USO":
            text = [str(v) for v in np.asarray(y).flat if isinstance(v, str)]
            if text:
                raise ValueError(f"y holds text, such as {text[0]!r}: BayesianMLPClassifier predicts classes")
        X, y = self._read(X, True, y, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self._flat = y.ndim == 1
        wide = y.reshape(len(y), -1)
        self.y_center_, self.y_scale_ = wide.mean(0), wide.std(0)
        if (constant := self.y_scale_ <= 1e-12 * np.abs(self.y_center_)).any():
            column = int(np.flatnonzero(constant)[0])
            raise ValueError(f"y is always {wide[0, column]:g}, so that there is nothing to learn: choose another")
        self._sample(X, y, self.likelihood, store, held_out)
        return self

    def _encoded(self, y: Any) -> torch.Tensor:
        wide = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        return torch.from_numpy((wide - self.y_center_) / self.y_scale_).float()

    @property
    def _outputs(self) -> int:
        return len(self.y_scale_)

    def _learnt(self) -> dict[str, Any]:
        return {"center": self.y_center_.tolist(), "scale": self.y_scale_.tolist(), "flat": self._flat}

    def _take(self, learnt: dict[str, Any]) -> None:
        self.y_center_, self.y_scale_ = (np.array(learnt[name], dtype=np.float64) for name in ("center", "scale"))
        self._flat = bool(learnt["flat"])
        if self.y_center_.shape != self.y_scale_.shape or not (self.y_scale_ > 0).all():
            raise ValueError("a scale of the target is lacking, or not positive")

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
            return_draws: return the prediction of each draw instead, ``[draws, n]``.
        """
        if (quantiles is not None) + return_std + return_draws > 1:
            raise ValueError("choose one of return_std=, quantiles= and return_draws=")
        if quantiles is not None and (
            not isinstance(quantiles, Sequence | np.ndarray) or not all(0 < level < 1 for level in quantiles)
        ):
            raise ValueError(
                f"quantiles = {quantiles!r}: give a sequence of numbers between 0 and 1, such as (0.05, 0.95)"
            )
        if return_draws:
            return self._units(self._predicted(X, lambda mean, variance: mean))
        if quantiles is not None:

            def at(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
                every = mixture_quantiles(mean.flatten(1), variance.flatten(1), list(quantiles), df=self.network_.tails)
                return every.reshape(-1, *mean.shape[1:])

            return self._units(self._predicted(X, at))
        if not return_std:
            return self._units(self._predicted(X, lambda mean, variance: mean.mean(0)))
        mean, square = self._predicted(X, lambda m, v: torch.stack([m.mean(0), m.var(0, correction=0) + v.mean(0)]))
        std = np.sqrt(square) * self.y_scale_
        return self._units(mean), std[..., 0] if self._flat else std

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Targets drawn from the predictive distribution: ``[n, n_samples]``, or ``[n, outputs, n_samples]``."""
        check_is_fitted(self, "posterior_")
        seed = check_random_state(random_state)
        chosen = torch.from_numpy(seed.randint(len(self.posterior_), size=n_samples))
        generator = torch.Generator().manual_seed(int(seed.randint(np.iinfo(np.int32).max)))
        drawn = self._predicted(X, lambda mean, v: with_noise(self.network_, mean[chosen], v[chosen], generator))
        return np.moveaxis(self._units(drawn), 0, -1)

    def _units(self, found: Array) -> Array:
        found = found * self.y_scale_ + self.y_center_
        return found[..., 0] if self._flat else found


class BayesianMLPClassifier(ClassifierMixin, _BayesianMLP):  # type: ignore[misc]
    """Classification by posterior draws of a network: probabilities are averages over draws, then calibrated.

    The arguments and attributes are those of `BayesianMLPRegressor`, without ``likelihood``.

    Attributes:
        classes_: the labels.
        softmax_temperature_: divides the logarithms of the averages.
    """

    def fit(
        self, X: Any, y: Any, *, store: str | Path | None = None, held_out: Any = None, **given: Any
    ) -> BayesianMLPClassifier:
        """Sample the posterior given rows and their labels ``[n]``; the rest is as in the regressor."""
        _refuse(given)
        self._forget()
        X, y = self._read(X, True, y)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_.tolist()[0]!r}; a classifier needs two classes at least")
        self._sample(X, y, "categorical", store, held_out)
        return self

    @property
    def softmax_temperature_(self) -> float:
        """Divides the logarithms of averages over draws; above 1 where these are overconfident.

        It minimises the leave-one-out loss of the training rows (`isosgd.posterior.calibration`), and is computed once,
        on first use. It is 1 for tables with many repeated rows, which cannot be left out one at a time.
        """
        check_is_fitted(self, "posterior_")
        info = self.posterior_.info
        if OF_AVERAGES not in info:
            x, y = (t.cpu() for t in self.posterior_.data)
            rows, copies = np.unique(torch.cat([x, y.unsqueeze(1).to(x)], 1).numpy(), axis=0, return_counts=True)
            single = torch.from_numpy(rows[copies == 1])
            info[OF_AVERAGES] = 1.0 if len(single) < (1 - REPEATED) * len(x) else self._calibrated_on(single)
        return float(info[OF_AVERAGES])

    def _calibrated_on(self, rows: torch.Tensor) -> float:
        """The softmax temperature of averages from rows whose last column is the class."""
        rows = rows[evenly(len(rows), CALIBRATED)]
        y = rows[:, -1].long()
        found = [
            leave_one_out(predicted_by_draws(self.network_, self.posterior_, inputs)[0], labels)
            for inputs, labels in zip(torch.split(rows[:, :-1], PART), torch.split(y, PART), strict=True)
        ]
        return sharpest(torch.cat(found), y)

    def _encoded(self, y: Any) -> torch.Tensor:
        y = np.asarray(y)
        if (new := ~np.isin(y, self.classes_)).any():
            raise ValueError(f"held_out has the class {y[new].tolist()[0]!r}, which no training row has: leave it out")
        return torch.from_numpy(np.searchsorted(self.classes_, y)).long()

    @property
    def _outputs(self) -> int:
        return len(self.classes_)

    def _learnt(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.kind}

    def _take(self, learnt: dict[str, Any]) -> None:
        self.classes_ = np.array(learnt["classes"], dtype=CLASSES[learnt["dtype"]])

    def predict_proba(self, X: Any, *, return_draws: bool = False) -> Array:
        """Probabilities ``[n, classes]``: the average over draws, calibrated by `softmax_temperature_`.

        With ``return_draws`` those of each draw, ``[draws, n, classes]``, uncalibrated.
        """
        if return_draws:
            return self._predicted(X, lambda found, _: found)
        scale = self.softmax_temperature_
        return self._predicted(X, lambda found, _: sharpened(found.mean(0), scale))

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        found = self._predicted(X, lambda found, _: found.mean(0))
        return self.classes_[found.argmax(1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Labels drawn from the predictive distribution, ``[n, n_samples]``."""
        found = self.predict_proba(X)
        drawn = check_random_state(random_state).uniform(size=(len(found), n_samples))
        index = (drawn[..., None] > found.cumsum(1)[:, None]).sum(-1)
        return self.classes_[np.minimum(index, len(self.classes_) - 1)]


# -- folders ----------------------------------------------------------------------------------------------------------


def load(folder: str | Path, *, damaged: Damaged = "refuse") -> BayesianMLPRegressor | BayesianMLPClassifier:
    """Load an estimator that was fitted with ``store=folder``, with its draws so far.

    No code in the folder is run: it holds only JSON and safetensors.

    Args:
        folder: of the run; finished, or stopped.
        damaged: what to do with damaged files of draws, as `isosgd.load` takes it.
    """
    found = opened(folder, damaged)
    if not len(found.posterior_):
        none = "has no draws yet" if damaged == "refuse" else "has no draws that are whole"
        raise ValueError(f"{folder} {none}; isosgd.sklearn.resume({str(folder)!r}) goes on")
    return found


def resume(
    folder: str | Path, *, draws: int | None = None, device: Any = None, verbose: bool = False
) -> BayesianMLPRegressor | BayesianMLPClassifier:
    """Continue a stopped fit, on a CPU bit for bit, or take more draws of each chain.

    Args:
        folder: the ``store`` of ``fit``.
        draws: of each chain, to extend a finished run.
        device: where to compute.
        verbose: show a progress line.
    """
    found = opened(folder)
    x, y = found.posterior_.data
    more: dict[str, Any] = {"draws": draws, "device": device, "progress": verbose}
    with found._quietly():
        found.posterior_ = resume_network(found.network_, x, y, folder, **more)
    return found


def opened(folder: str | Path, damaged: Damaged = "refuse") -> BayesianMLPRegressor | BayesianMLPClassifier:
    """`load`, also where there are no draws yet."""
    path = Path(folder) / MODEL
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["version"] != VERSION:
            raise ValueError(f"it is of version {state['version']!r}, not {VERSION}")
        kind = {kind.__name__: kind for kind in (BayesianMLPRegressor, BayesianMLPClassifier)}[state["estimator"]]
        made = kind(**state["params"])
        made.columns_ = Columns.from_dict(state["columns"])
        names = made.columns_.names
        made.n_features_in_ = len(made.columns_.numbers if names is None else names)
        if names is not None and all(isinstance(name, str) for name in names):
            made.feature_names_in_ = np.array(names, dtype=object)
        made.network_ = Network(**{**state["network"], "hidden": tuple(state["network"]["hidden"])})
        made._take(state["target"])
        if made.network_.inputs != len(made.columns_.scale) or made.network_.outputs != made._outputs:
            raise ValueError("the network has not as many inputs and outputs as the columns")
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no estimator; fit(X, y, store=...) and `isosgd fit` write one") from None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} cannot be used ({why}); fit the table again") from error
    try:
        tensors = load_file(Path(folder) / DATA)
        data = tensors["x"], tensors["y"]
        made.held_out_ = (tensors["held_out_x"], tensors["held_out_y"]) if "held_out_x" in tensors else None
    except (SafetensorError, OSError, KeyError) as error:
        raise ValueError(f"{Path(folder) / DATA} cannot be read ({error}); fit the table again") from error
    made.posterior_ = isosgd.load(folder, made.network_.target(), data=data, damaged=damaged)
    return made


def _as_frame(X: Any) -> Any:
    """A frame of pandas or polars as one of pandas; None for anything else."""
    if hasattr(X, "column_names") and hasattr(X, "to_pandas"):  # a table of pyarrow
        return X.to_pandas()
    if hasattr(X, "collect"):
        raise TypeError(f"X is a {type(X).__name__}, which has no rows yet: give X.collect()")
    if not hasattr(X, "columns") or not hasattr(X, "dtypes"):
        return None
    import pandas as pd

    if isinstance(X, pd.DataFrame):
        return X
    return pd.DataFrame({name: X[name].to_list() for name in X.columns})


def _units(hidden_layers: Any) -> tuple[int, ...]:
    """Units of each hidden layer, as given."""
    listed = isinstance(hidden_layers, Sequence | np.ndarray) and not isinstance(hidden_layers, str)
    if not listed or any(isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in hidden_layers):
        raise ValueError(
            f"hidden_layers = {hidden_layers!r}: give 'auto', or the units of each layer, such as (64, 64, 64)"
        )
    return tuple(int(n) for n in hidden_layers)


def _check_room(rows: int, inputs: int) -> None:
    room = memory()
    if room is not None and 8 * rows * inputs * COPIES > room:
        raise ValueError(
            f"{rows:,} rows of {inputs:,} inputs take up more memory than this machine has: fit fewer rows"
        )


def _refuse(given: dict[str, Any]) -> None:
    """Of what ``fit`` does not take."""
    if "sample_weight" in given:
        raise TypeError("sample_weight is not supported, since draws are those of equal rows: repeat rows instead")
    if given:
        raise TypeError(f"fit() got an unexpected argument {next(iter(given))!r}; it takes X, y, store and held_out")
