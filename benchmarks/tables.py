"""Tables: our estimators against bde, boosting, scikit-learn's own and NGBoost, on the same splits.

    python -m benchmarks.tables [--data airfoil diabetes cancer] [--methods isosgd bde xgboost] [--seeds 0 1 2 3 4]
        [--data-root DIR] [--effort 1] [--validate] [--out FILE]

Regressions are scored in standard units of the training targets: RMSE, NLL, CRPS, share of targets within their 95%
interval; classifications by accuracy, NLL and ECE. Seconds are those of fit and prediction. What is not installed is
left out; the peers live in an environment of their own (`make bench-peers`). Methods run at their defaults, scaled
inputs given to all; bde with the settings of its own benchmark (4 x 16 units, 10 members), since its defaults are those
of a smoke test. A method without a predictive distribution has no NLL, CRPS or coverage. Beside the linear model others
have the difference of their NLL from its, with the standard error over the rows of all splits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import norm
from sklearn import datasets
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

Array = Any
# Names of `experiments.tables.rows_of`, which calls red wine by the name that scikit-learn's wine has here.
UCI = {"boston": "boston", "concrete": "concrete", "yacht": "yacht", "wine-red": "wine", "protein": "protein"}
TOY = {"diabetes": "load_diabetes", "cancer": "load_breast_cancer", "wine": "load_wine", "digits": "load_digits"}
REGRESSIONS = ("airfoil", "diabetes", *UCI)
SAMPLES = 1_000  # of a predictive distribution, for CRPS and intervals
BDE = {"hidden_layers": [16] * 4, "n_members": 10, "epochs": 1000, "patience": 20, "warmup_steps": 50_000,
       "n_samples": 1_000, "n_thinning": 50, "validation_split": 0.15}  # fmt: skip


def rows_of(name: str, seed: int, root: Path | None) -> tuple[Array, ...]:
    """Training and test rows: airfoil by bde's one split, UCI sets by the published ones, others by a seed."""
    if name in TOY:
        x, y = getattr(datasets, TOY[name])(return_X_y=True)
        strata = None if name in REGRESSIONS else y
        return tuple(train_test_split(x, y, test_size=0.2, random_state=seed, stratify=strata))
    if root is None:
        raise ValueError(f"{name} needs --data-root, a folder with uci/ and tabular/")
    from experiments.tables import rows_of as read

    x, y, test_x, test_y = read(root, UCI.get(name, name), seed)
    return x, test_x, y, test_y


# -- methods: from training rows to what is predicted at test rows ----------------------------------------------------


def normal(mean: Array, std: Array) -> dict[str, Array]:
    """A normal predictive distribution."""
    levels = (np.arange(SAMPLES) + 0.5) / SAMPLES
    drawn = mean + std * ndtri(levels)[:, None]
    return {"mean": mean, "density": lambda y: norm.logpdf(y, mean, std), "samples": drawn}


def ours(x: Array, y: Array, test: Array, seed: int, classes: bool, effort: float) -> dict[str, Array]:
    import torch

    from isosgd.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

    if classes:
        return {"proba": BayesianMLPClassifier(effort=effort, random_state=seed).fit(x, y).predict_proba(test)}
    model = BayesianMLPRegressor(effort=effort, random_state=seed).fit(x, y)

    def density(target: Array) -> Array:
        z = torch.tensor((target - model.y_center_) / model.y_scale_).float().unsqueeze(1)
        found = model.posterior_.log_predictive((model._inputs(test).float(), z), batch_size=1_000)
        return found.numpy() - math.log(float(model.y_scale_[0]))

    return {"mean": model.predict(test), "density": density, "samples": model.sample_y(test, SAMPLES).T}


def bde(x: Array, y: Array, test: Array, seed: int, classes: bool, effort: float) -> dict[str, Array]:
    from bde import BdeClassifier, BdeRegressor
    from bde.loss import CategoricalCrossEntropy, GaussianNLL

    if classes:
        model = BdeClassifier(loss=CategoricalCrossEntropy(), activation="relu", seed=seed, **BDE).fit(x, y)
        return {"proba": np.asarray(model.predict_proba(test))}
    raw = np.asarray(BdeRegressor(loss=GaussianNLL(), seed=seed, **BDE).fit(x, y).predict(test, raw=True))
    mean, width = (raw[..., k].reshape(-1, len(test)) for k in (0, 1))
    width = np.logaddexp(0.0, width) + 1e-6

    def density(target: Array) -> Array:
        return np.logaddexp.reduce(norm.logpdf(target, mean, width), axis=0) - math.log(len(mean))

    chosen = np.random.default_rng(0).integers(len(mean), size=SAMPLES)
    noise = np.random.default_rng(1).normal(size=(SAMPLES, len(test)))
    return {"mean": mean.mean(0), "density": density, "samples": mean[chosen] + width[chosen] * noise}


def plain(module: str, regressor: str, classifier: str) -> Callable[..., dict[str, Array]]:
    """A method that predicts a number, or probabilities."""

    def run(x: Array, y: Array, test: Array, seed: int, classes: bool, effort: float) -> dict[str, Array]:
        kind = getattr(__import__(module, fromlist=["_"]), classifier if classes else regressor)
        options = {"random_state": seed} if "random_state" in kind().get_params() else {}
        model = kind(**options, **({"verbose": -1} if module == "lightgbm" else {})).fit(x, y)
        return {"proba": model.predict_proba(test)} if classes else {"mean": model.predict(test)}

    return run


def with_std(module: str, regressor: str, classifier: str) -> Callable[..., dict[str, Array]]:
    """A method of scikit-learn that gives mean and standard deviation."""

    def run(x: Array, y: Array, test: Array, seed: int, classes: bool, effort: float) -> dict[str, Array]:
        if classes:
            return plain(module, regressor, classifier)(x, y, test, seed, classes, effort)
        kind = getattr(__import__(module, fromlist=["_"]), regressor)
        options: dict[str, Any] = {}
        if regressor == "GaussianProcessRegressor":
            from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

            kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
            options = {"kernel": kernel, "normalize_y": True, "random_state": seed}
        return normal(*kind(**options).fit(x, y).predict(test, return_std=True))

    return run


def ngboost(x: Array, y: Array, test: Array, seed: int, classes: bool, effort: float) -> dict[str, Array]:
    import ngboost as package
    from ngboost.distns import k_categorical

    if classes:
        kind = package.NGBClassifier(Dist=k_categorical(len(np.unique(y))), verbose=False, random_state=seed)
        return {"proba": kind.fit(x, y).predict_proba(test)}
    found = package.NGBRegressor(verbose=False, random_state=seed).fit(x, y).pred_dist(test)
    return normal(found.params["loc"], found.params["scale"])


METHODS: dict[str, Callable[..., dict[str, Array]]] = {
    "isosgd": ours,
    "bde": bde,
    "xgboost": plain("xgboost", "XGBRegressor", "XGBClassifier"),
    "lightgbm": plain("lightgbm", "LGBMRegressor", "LGBMClassifier"),
    "mlp": plain("sklearn.neural_network", "MLPRegressor", "MLPClassifier"),
    "ngboost": ngboost,
    "linear": with_std("sklearn.linear_model", "BayesianRidge", "LogisticRegression"),
    "gp": with_std("sklearn.gaussian_process", "GaussianProcessRegressor", "GaussianProcessClassifier"),
}


# -- scores -----------------------------------------------------------------------------------------------------------


def scores(found: dict[str, Any], y: Array) -> tuple[dict[str, float | None], Array | None]:
    """Of a prediction; and the NLL of each row, where there is one."""
    if "proba" in found:
        p = np.clip(found["proba"], 1e-12, 1.0)
        sure, right = p.max(1), p.argmax(1) == y
        bins = np.minimum((sure * 15).astype(int), 14)
        gaps = [abs(np.mean(right[bins == b]) - np.mean(sure[bins == b])) * np.mean(bins == b) for b in set(bins)]
        nll = -np.log(p[np.arange(len(y)), y])
        return {"accuracy": float(np.mean(right)), "nll": float(nll.mean()), "ece": float(sum(gaps)),
                "nll_error": float(nll.std() / math.sqrt(len(y)))}, nll  # fmt: skip
    rmse = float(np.sqrt(np.mean((found["mean"] - y) ** 2)))
    if "samples" not in found:
        return {"rmse": rmse, "nll": None, "crps": None, "coverage": None}, None
    ordered = np.sort(found["samples"], 0)
    count = len(ordered)
    weights = (2 * np.arange(1, count + 1) - count - 1)[:, None]
    spread = (weights * ordered).sum(0) / count**2
    low, high = np.quantile(ordered, (0.025, 0.975), axis=0)
    nll = -found["density"](y)
    return {
        "rmse": rmse,
        "nll": float(nll.mean()),
        "crps": float((np.abs(ordered - y).mean(0) - spread).mean()),
        "coverage": float(np.mean((y >= low) & (y <= high))),
        "nll_error": float(nll.std() / math.sqrt(len(y))),
    }, nll


def main(argv: list[str] | None = None) -> int:
    """Run all methods on all sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["diabetes", "cancer", "wine"], choices=[*REGRESSIONS, *TOY])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="of splits and methods")
    parser.add_argument("--effort", type=float, default=1.0, help="of ours")
    parser.add_argument("--validate", action="store_true", help="score a fifth of the training rows, not the test rows")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, help="file to add a line of JSON to for each fit")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    for name in args.data:
        classes = name not in REGRESSIONS
        by_row: dict[str, list[Array]] = {}
        for method in args.methods:
            each = []
            for seed in args.seeds:
                x, test_x, y, test_y = rows_of(name, seed, args.data_root)
                if args.validate:
                    strata = y if classes else None
                    x, test_x, y, test_y = train_test_split(
                        x, y, test_size=0.2, random_state=100 + seed, stratify=strata
                    )
                scaler = StandardScaler().fit(x)
                x, test_x = scaler.transform(x), scaler.transform(test_x)
                if not classes:
                    middle, unit = y.mean(), y.std()
                    y, test_y = (y - middle) / unit, (test_y - middle) / unit
                began = time.perf_counter()
                try:
                    found, losses = scores(METHODS[method](x, y, test_x, seed, classes, args.effort), test_y)
                except ImportError as error:
                    print(f"{name} {method}: left out ({error})", flush=True)
                    break
                line = {"data": name, "method": method, "seed": seed, "effort": args.effort, "validate": args.validate,
                        "rows": len(x), **found,
                        "seconds": round(time.perf_counter() - began, 2)}  # fmt: skip
                each.append(line)
                if losses is not None:
                    by_row.setdefault(method, []).append(losses)
                if args.out is not None:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
            if each:
                keys = [k for k in each[0] if k in ("rmse", "nll", "crps", "coverage", "accuracy", "ece", "seconds")]
                shown = [f"{k} {np.median([e[k] for e in each]):.4g}" for k in keys if each[0][k] is not None]
                print(f"{name} {method}: {', '.join(shown)}", flush=True)
        for method in [m for m in by_row if m != "linear" and "linear" in by_row]:
            less = np.concatenate(by_row[method]) - np.concatenate(by_row["linear"])
            error = less.std() / math.sqrt(len(less))
            print(f"{name} {method}: NLL less the linear model's {less.mean():.4f} ± {error:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
