"""The network of tables by its settings: a grid over data sets, seeds and settings, scored on held-out rows.

It needs torch and numpy alone (diabetes scikit-learn). With ``--validate`` a part of the training rows is scored and
test rows play no part: that is how defaults are chosen. All options that take several values make the grid.

    python -m experiments.tables --data airfoil --validate --hidden 64,64,64 16,16,16,16 --scale 1 2 4 --jobs 6 \
        --device cuda --data-root DIR --out results/tables/choice.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isosgd.metrics import rmse
from isosgd.posterior import central
from isosgd.tables.network import Network, sample_network, usual_layers, with_noise

UCI = {
    "boston": "bostonHousing", "concrete": "concrete", "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red", "yacht": "yacht",
}  # fmt: skip
GRID = (
    "data", "split", "seed", "hidden", "likelihood", "scale", "out_scale", "size", "df", "chains",
    "effort", "rows",
)  # fmt: skip
REPEATS = 4  # targets drawn around each draw, for intervals


def rows_of(root: Path, name: str, split: int) -> tuple[np.ndarray, ...]:
    """Training and test inputs and targets. Airfoil has one split, that of bde: 80/20, ``random_state=42``.

    Diabetes, which comes with scikit-learn, is split in the same way.
    """
    if name in ("airfoil", "diabetes"):
        if name == "airfoil":
            table = np.genfromtxt(root / "tabular" / "airfoil.csv", delimiter=",", skip_header=1)
        else:
            from sklearn.datasets import load_diabetes  # not on every machine that runs the others

            table = np.column_stack(load_diabetes(return_X_y=True))
        order = np.random.RandomState(42).permutation(len(table))  # as scikit-learn's train_test_split does
        count = math.ceil(0.2 * len(table))
        test, train = table[order[:count]], table[order[count:]]
        return train[:, :-1], train[:, -1], test[:, :-1], test[:, -1]
    folder = root / "uci" / UCI[name]
    table = np.loadtxt(folder / "data.txt")
    columns, target = (np.loadtxt(folder / f"index_{what}.txt").astype(int) for what in ("features", "target"))
    parts = [table[np.loadtxt(folder / f"index_{what}_{split}.txt").astype(int)] for what in ("train", "test")]
    return tuple(array for part in parts for array in (part[:, columns], part[:, int(target)]))


def run_one(given: dict[str, Any]) -> dict[str, Any]:
    """One fit and its scores, in units of the standardised target and, of the NLL, in its own too."""
    torch.set_num_threads(given["threads"])
    x, y, test_x, test_y = rows_of(Path(given["data_root"]), given["data"], given["split"])
    if given["validate"]:
        order = np.random.default_rng((7, given["split"])).permutation(len(x))
        count = len(x) // 5
        x, y, test_x, test_y = x[order[count:]], y[order[count:]], x[order[:count]], y[order[:count]]
    if given["rows"]:
        order = np.random.default_rng((8, given["split"])).permutation(len(x))[: given["rows"]]
        x, y = x[order], y[order]
    centre, width = x.mean(0), x.std(0)
    width[width == 0] = 1.0
    middle, unit = y.mean(), y.std()

    def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = (x - centre) / width, (y - middle) / unit
        return torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32).unsqueeze(1)

    train, test = tensors(x, y), tensors(test_x, test_y)
    hidden = usual_layers(len(x)) if given["hidden"] == "auto" else tuple(map(int, given["hidden"].split(",")))
    network = Network(
        train[0].shape[1], 1, given["likelihood"], hidden, given["scale"], given["out_scale"],
        given["df"], given["seed"], given["size"],
    )  # fmt: skip
    began, decided = time.time(), list[Network]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = sample_network(
            network, *train, chains=given["chains"], effort=given["effort"], max_seconds=given["max_seconds"],
            seed=given["seed"], device=given["device"], begin=decided.append,
        )  # fmt: skip
    seconds, network = time.time() - began, decided[0]
    found = posterior.predict(test[0], return_draws=True, batch_size=2_000)
    assert found.draws is not None and found.draw_variances is not None
    mean, variance = (t.flatten(0, 1).repeat(REPEATS, 1, 1) for t in (found.draws, found.draw_variances))
    drawn = with_noise(network, mean, variance, torch.Generator().manual_seed(0)).squeeze(-1)
    low, high = torch.quantile(drawn, torch.tensor(central(0.95)), dim=0)
    target = test[1].squeeze(1)
    error = float(rmse(found.mean.flatten(), target))
    nll = -float(posterior.log_predictive(test, batch_size=2_000).double().mean())
    start = None if posterior.starts is None else float(rmse(_start_mean(posterior, test[0]).flatten(), target))
    return {
        **given,
        "hidden": list(hidden),
        "noise": [network.likelihood, network.df],
        "rmse": error,
        "nll": nll,
        "nll_in_units": nll + math.log(unit),
        "rmse_in_units": error * unit,
        "rmse_of_starts": start,
        "coverage": float(((target >= low) & (target <= high)).double().mean()),
        "gate": float(posterior.draws["gate"].abs().mean()),
        "seconds": round(seconds, 1),
        "gradients": posterior.info.get("gradients"),
        "torch": torch.__version__,
    }


def _start_mean(posterior: Any, x: torch.Tensor) -> torch.Tensor:
    """What the trained networks say that chains began with, on average."""
    from isosgd.sampling.weights import start_posterior

    return start_posterior(posterior.target, posterior.starts).predict(x).mean  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["airfoil"], choices=["airfoil", "diabetes", *UCI])
    parser.add_argument(
        "--split", nargs="+", type=int, default=[0], help="of the UCI sets; with --validate also which rows are scored"
    )
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--hidden", nargs="+", default=["auto"], help="units of the layers, such as 64,64,64")
    parser.add_argument("--likelihood", nargs="+", default=["auto"])
    parser.add_argument("--scale", nargs="+", type=float, default=[None], help="of hidden weights' prior")
    parser.add_argument("--out-scale", nargs="+", type=float, default=[None], help="of the output layer's")
    parser.add_argument(
        "--size", nargs="+", type=float, default=[Network.size], help="of that to the size of the noise"
    )
    parser.add_argument("--df", nargs="+", type=float, default=[Network.df])
    parser.add_argument("--chains", nargs="+", type=int, default=[8])
    parser.add_argument("--effort", nargs="+", type=float, default=[1.0])
    parser.add_argument("--rows", nargs="+", type=int, default=[None], help="training rows to keep, chosen at random")
    parser.add_argument("--seconds", dest="max_seconds", type=float, help="bound on the time of a fit")
    parser.add_argument("--validate", action="store_true", help="score a fifth of the training rows, not the test rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="fits at once")
    parser.add_argument("--data-root", required=True, help="folder with uci/ and tabular/")
    parser.add_argument("--out", type=Path, help="file to add a line of JSON to for each fit")
    args = parser.parse_args(argv)
    rest = {name: getattr(args, name) for name in ("max_seconds", "validate", "device", "threads", "data_root")}
    tasks = [
        {**dict(zip(GRID, values, strict=True)), **rest}
        for values in itertools.product(*(getattr(args, name) for name in GRID))
    ]
    varied = [name for name in GRID if len(getattr(args, name)) > 1]
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_one, task) for task in tasks]):
            found = future.result()
            words = ", ".join(f"{name} {found[name]}" for name in varied)
            print(
                f"{found['data']} {words}: RMSE {found['rmse']:.4f} (starts {found['rmse_of_starts']:.4f}), "
                f"NLL {found['nll']:.4f}, in units {found['rmse_in_units']:.4g}, {found['nll_in_units']:.4f}, "
                f"95% {100 * found['coverage']:.1f}, gate {found['gate']:.2f}, {found['seconds']} s",
                flush=True,
            )
            if args.out is not None:
                found.pop("data_root")
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
