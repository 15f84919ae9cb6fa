"""The computations of the demo: each function samples one problem and returns plain numbers."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, priors, sample
from isosgd.demo.toy import NOISE_VARIANCE, Toy, compare

POINT, EARLY, ISGD = "Adam", "Adam, stopped early", "I-SGD around Adam's network"


Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Length:
    """Gradients of a chain: ``warmup + draws * keep_every``."""

    warmup: int | Literal["auto"]
    draws: int
    keep_every: int


@dataclass(frozen=True)
class Sizes:
    """Lengths of all runs. Around trained networks `sample` chooses them, unless the number of draws is given."""

    toy: Length = Length(3_000, 1_000, 16)
    adam_steps: int = 2_000
    around: Length | None = None


QUICK = Sizes(Length(300, 40, 5), 100, Length(300, 5, 5))


@dataclass
class Found:
    """The result of a job: numbers for results.json, and arrays for the figures."""

    numbers: dict[str, Any]
    arrays: dict[str, Any]


def toy_job(method: str, seed: int, sizes: Sizes) -> Found:
    """Sample the toy with one method and compare with the exact posterior."""
    toy = Toy.make(seed)
    posterior = sample(
        toy.target, toy.data, method=method, **asdict(sizes.toy), batch_size=32, seed=seed, progress=False
    )
    numbers = compare(posterior.draws["w"], toy) | _costs(posterior)
    grid = torch.linspace(-math.pi, math.pi, 400, dtype=torch.float64)
    exact, found = toy.predict(grid), posterior.predict(grid)
    arrays = {
        "grid": grid.numpy(),
        "x": toy.x.numpy(),
        "y": toy.data[1].numpy(),
        "noise_sd": math.sqrt(NOISE_VARIANCE),
        "exact_mean": exact.mean.numpy(),
        "exact_sd": exact.model_variance.sqrt().numpy(),
        "mean": found.mean.double().numpy(),
        "sd": found.model_variance.double().sqrt().numpy(),
    }
    return Found(numbers, arrays)


def diabetes_job(seed: int, sizes: Sizes) -> Found:
    """Progression of diabetes in 442 patients from 10 measurements; the noise scale is sampled."""
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    x, y = load_diabetes(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=seed)
    x_train, x_held, y_train, y_held = train_test_split(x_train, y_train, test_size=0.2, random_state=seed)
    x_mean, x_sd, y_mean, y_sd = x_train.mean(0), x_train.std(0), y_train.mean(), float(y_train.std())
    train, held_out, test = (
        _tensors((x - x_mean) / x_sd, (y - y_mean) / y_sd)
        for x, y in ((x_train, y_train), (x_held, y_held), (x_test, y_test))
    )

    def score(posterior: Posterior) -> dict[str, float]:
        prediction = posterior.predict(test[0])
        error = (prediction.mean.squeeze(-1) - test[1]).double()
        inside = error.abs() < 1.96 * prediction.std.squeeze(-1)
        return {
            "rmse": y_sd * float(error.square().mean().sqrt()),
            "coverage95": float(inside.double().mean()),
        }

    posteriors, rows = _three_ways(
        _mlp(10, 50, 1), "gaussian", priors.FanInNormal(), (train, held_out, test), seed, sizes
    )
    for name, posterior in posteriors.items():
        rows[name] |= score(posterior)
        rows[name]["mnll"] += math.log(y_sd)
    return Found({**_counts(train, held_out, test), "rows": rows}, {})


def digits_job(seed: int, sizes: Sizes) -> Found:
    """Handwritten digits of 8x8 pixels: 1,797 images, a quarter of them for training and a quarter held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_rest, x_test, y_rest, y_test = train_test_split(x, y, test_size=0.5, random_state=seed, stratify=y)
    x_train, x_held, y_train, y_held = train_test_split(
        x_rest, y_rest, test_size=0.5, random_state=seed, stratify=y_rest
    )
    mean, sd = x_train.mean(0), x_train.std()  # one scale for all pixels, since some are constant
    train, held_out, test = (
        _tensors((x - mean) / sd, y) for x, y in ((x_train, y_train), (x_held, y_held), (x_test, y_test))
    )
    posteriors, rows = _three_ways(
        _mlp(64, 32, 10), "categorical", priors.Normal(1.0), (train, held_out, test), seed, sizes
    )
    for name, posterior in posteriors.items():
        probabilities = posterior.predict(test[0]).mean.double().numpy()
        rows[name]["accuracy"] = float((probabilities.argmax(1) == y_test).mean())
        rows[name]["confidence"] = float(probabilities.max(1).mean())
    return Found({**_counts(train, held_out, test), "rows": rows}, {})


def _three_ways(
    net: nn.Module,
    likelihood: str,
    prior: priors.Prior,
    data: tuple[Examples, Examples, Examples],
    seed: int,
    sizes: Sizes,
) -> tuple[dict[str, Posterior], dict[str, dict[str, float]]]:
    """Scores of a trained network, the same training with early stopping, and draws around the former.

    Returns:
        For each of the three its mean negative log likelihood on the test set (MNLL), the excess over I-SGD's, their
        standard errors over test examples (paired for the excess), and the cost. I-SGD's cost includes its start.
    """
    train, held_out, test = data
    trained, early = fit_adam(Target.from_module(net, likelihood, priors.Flat()), train, held_out, sizes, seed)
    start = {name: value[0, 0] for name, value in trained.draws.items()}
    sampled = sample(
        Target.from_module(net, likelihood, prior), train, starts=[start], held_out=held_out, seed=seed,
        progress=False, **({} if sizes.around is None else asdict(sizes.around)),
    )  # fmt: skip
    posteriors = {POINT: trained, EARLY: early, ISGD: sampled}
    losses = {name: -p.log_predictive(test).double() for name, p in posteriors.items()}
    rows = {}
    for name, posterior in posteriors.items():
        mean, error = _mean(losses[name])
        excess, excess_error = _mean(losses[name] - losses[ISGD])
        rows[name] = {"mnll": mean, "mnll_error": error, "excess": excess, "excess_error": excess_error}
        rows[name] |= _costs(posterior)
    for cost in ("gradients", "seconds"):
        rows[ISGD][cost] += rows[POINT][cost]
    return posteriors, rows


def fit_adam(
    target: Target, data: Examples, held_out: Examples, sizes: Sizes, seed: int
) -> tuple[Posterior, Posterior]:
    """A network trained by Adam, at the end and with early stopping, as posteriors of one draw.

    The noise scale of a regression is a parameter that is fitted, too.
    """
    started = time.monotonic()
    free, num_data, best, early = target.initial(), len(data[0]), math.inf, None
    optimizer = torch.optim.Adam(free.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)

    def found(step: int) -> Posterior:
        draws = {name: value.detach().clone()[None, None] for name, value in target.constrain(free).items()}
        return Posterior(target, draws, {"method": "adam", "gradients": step, "seconds": time.monotonic() - started})

    for step in range(1, sizes.adam_steps + 1):
        rows = torch.randint(num_data, (64,), generator=generator)
        _, gradients = target.gradient(free, tuple(part[rows] for part in data), num_data)
        for leaf, gradient in zip(free.values(), gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
        if step % 20 == 0:
            now = found(step)
            loss = -float(now.log_predictive(held_out).mean())
            if loss < best:
                best, early = loss, now
    last = found(sizes.adam_steps)
    return last, early or last


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _tensors(x: Any, y: Any) -> Examples:
    target = torch.as_tensor(y)
    return torch.as_tensor(x, dtype=torch.float32), target.float() if target.is_floating_point() else target


def _counts(train: Examples, held_out: Examples, test: Examples) -> dict[str, int]:
    return {"train": len(train[0]), "held_out": len(held_out[0]), "test": len(test[0])}


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def _costs(posterior: Posterior) -> dict[str, float]:
    return {"gradients": posterior.info["gradients"], "seconds": round(posterior.info["seconds"], 2)}
