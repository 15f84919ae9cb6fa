"""What the demo computes: each function samples one problem and returns plain numbers, so that it can run anywhere."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isosgd import Posterior, Target, priors, sample
from isosgd.demo.toy import NOISE_VARIANCE, Toy, compare

POINT, MAP, ISGD = "Adam, no prior", "Adam, prior of scale 1 (MAP)", "I-SGD, model average"


@dataclass(frozen=True)
class Length:
    """Gradients to spend on a chain: ``warmup + draws * keep_every``."""

    warmup: int | Literal["auto"]
    draws: int
    keep_every: int


@dataclass(frozen=True)
class Sizes:
    """How long everything runs. The digits get most: their chain is the slowest to forget where it started."""

    toy: Length = Length(3_000, 1_000, 16)
    diabetes: Length = Length(7_000, 100, 100)
    digits: Length = Length(7_000, 300, 100)
    adam_steps: int = 2_000


QUICK = Sizes(Length(300, 40, 5), Length(300, 20, 5), Length(300, 20, 5), 100)


@dataclass
class Found:
    """What a job found: numbers for results.json, and arrays for the figures."""

    numbers: dict[str, Any]
    arrays: dict[str, Any]


def toy_job(method: str, seed: int, sizes: Sizes) -> Found:
    """Sample the toy with one method and compare with the truth; the rate is found by the warm-up."""
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
    """Progression of diabetes in 442 patients from 10 measurements; the noise is a sampled parameter."""
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    x, y = load_diabetes(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=seed)
    x_mean, x_sd, y_mean, y_sd = x_train.mean(0), x_train.std(0), y_train.mean(), float(y_train.std())
    train = _tensors((x_train - x_mean) / x_sd, (y_train - y_mean) / y_sd)
    test = _tensors((x_test - x_mean) / x_sd, (y_test - y_mean) / y_sd)

    def score(posterior: Posterior) -> dict[str, float]:
        prediction = posterior.predict(test[0])
        error = (prediction.mean.squeeze(-1) - test[1]).double()
        inside = error.abs() < 1.96 * prediction.std.squeeze(-1)
        return {
            "rmse": y_sd * float(error.square().mean().sqrt()),
            "coverage95": float(inside.double().mean()),
        }

    posteriors, rows = _three_ways(_mlp(10, 50, 1), "gaussian", train, test, seed, sizes.adam_steps, sizes.diabetes)
    for name, posterior in posteriors.items():
        rows[name] |= score(posterior)
        rows[name]["mnll"] += math.log(y_sd)
    return Found({"train": len(train[0]), "test": len(test[0]), "rows": rows}, {})


def digits_job(seed: int, sizes: Sizes) -> Found:
    """Handwritten digits of 8x8 pixels: 1,797 images, half of them for training."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.5, random_state=seed, stratify=y)
    mean, sd = x_train.mean(0), x_train.std()  # one scale for all pixels: some are always dark
    train = _tensors((x_train - mean) / sd, y_train)
    test = _tensors((x_test - mean) / sd, y_test)

    posteriors, rows = _three_ways(_mlp(64, 32, 10), "categorical", train, test, seed, sizes.adam_steps, sizes.digits)
    for name, posterior in posteriors.items():
        probabilities = posterior.predict(test[0]).mean.double().numpy()
        rows[name]["accuracy"] = float((probabilities.argmax(1) == y_test).mean())
        rows[name]["confidence"] = float(probabilities.max(1).mean())
    return Found({"train": len(train[0]), "test": len(test[0]), "rows": rows}, {})


def _three_ways(
    net: nn.Module,
    likelihood: str,
    data: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seed: int,
    adam_steps: int,
    length: Length,
) -> tuple[dict[str, Posterior], dict[str, dict[str, float]]]:
    """A point estimate, a point estimate under a prior, and draws of the posterior, started at the latter.

    I-SGD samples the scales of its prior. A density of weights and scales has its mode where a scale is zero, so the
    point estimate takes the scale 1 instead, the median of their prior.

    Returns:
        The three, and for each its mean negative log likelihood on the test set (MNLL), how much higher that is than
        I-SGD's, standard errors over test examples (of the paired difference too), and what it cost. I-SGD's cost
        includes that of its start.
    """
    point = fit_adam(Target.from_module(net, likelihood, priors.Flat()), data, adam_steps, seed)
    start = fit_adam(Target.from_module(net, likelihood, priors.FanInNormal()), data, adam_steps, seed)
    sampled = sample(
        Target.from_module(net, likelihood, priors.HierarchicalNormal()),
        data,
        init={name: value[0, 0] for name, value in start.draws.items()},
        **asdict(length),
        seed=seed,
        progress=False,
    )
    posteriors = {POINT: point, MAP: start, ISGD: sampled}
    losses = {name: -p.log_predictive(test).double() for name, p in posteriors.items()}
    rows = {}
    for name, posterior in posteriors.items():
        mean, error = _mean(losses[name])
        excess, excess_error = _mean(losses[name] - losses[ISGD])
        rows[name] = {"mnll": mean, "mnll_error": error, "excess": excess, "excess_error": excess_error}
        rows[name] |= _costs(posterior)
    for cost in ("gradients", "seconds"):
        rows[ISGD][cost] += rows[MAP][cost]
    return posteriors, rows


def fit_adam(target: Target, data: tuple[Tensor, Tensor], steps: int, seed: int, batch_size: int = 64) -> Posterior:
    """The usual point estimate, as a posterior of one draw, so that it is scored like the others.

    The noise of a regression is a parameter, so that it is fitted to the residuals along with the rest.
    """
    started = time.monotonic()
    free, num_data = target.initial(), len(data[0])
    optimizer = torch.optim.Adam(free.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(num_data, (batch_size,), generator=generator)
        _, gradients = target.gradient(free, tuple(part[rows] for part in data), num_data)
        for leaf, gradient in zip(free.values(), gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
    draws = {name: value.detach()[None, None] for name, value in target.constrain(free).items()}
    return Posterior(target, draws, {"method": "adam", "gradients": steps, "seconds": time.monotonic() - started})


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    target = torch.as_tensor(y)
    return torch.as_tensor(x, dtype=torch.float32), target.float() if target.is_floating_point() else target


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def _costs(posterior: Posterior) -> dict[str, float]:
    return {"gradients": posterior.info["gradients"], "seconds": round(posterior.info["seconds"], 2)}
