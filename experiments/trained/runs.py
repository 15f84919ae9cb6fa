"""What a start scores, what the average of the draws from it scores, and what its rivals do."""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

import isosgd
from experiments.trained.pairs import Pair, Sets
from experiments.trained.training import SCALE, Start, start, trained_by_ivon
from experiments.trained.training import starts as networks
from isosgd import DivergedError, Posterior, Target, priors
from isosgd.metrics import accuracy, auroc, brier, ece, predictive_entropy, rmse
from isosgd.posterior.comparison import ensemble_curve, worth
from isosgd.posterior.starts import with_noise_scale
from isosgd.sampling.weights import start_posterior

BATCH = 2000  # examples that are predicted at once
EPOCHS, LEAST, WARMUP, DRAWS = 10, 1500, 0.4, 30  # of a run at a given temperature, see `lengths`
SNAPSHOTS = 20  # of SWAG
MASKS = 30  # of MC-dropout
DROPOUT = 0.1  # of the network that is trained for MC-dropout where the pair's own has none
RIVALS = ("calibrated", "swag", "mcdropout", "last_layer", "ivon", "ensemble")
RATES = (0.03, 0.1, 0.3)  # of IVON, of which held-out examples choose
PRIORS = ("default", "fan-in", "normal", "empirical", "weight-decay")


# -- targets ----------------------------------------------------------------------------------------------------------


def target_of(
    pair: Pair, sets: Sets, begun: Start, *, prior: str = "default", sampled: str = "all",
    dropout: float | None = None, autocast: str = "bfloat16",
) -> Target:  # fmt: skip
    """The posterior of a trained network's weights. Dropout is off; BatchNorm normalises by the minibatch.

    Args:
        pair: of the network.
        sets: its data.
        begun: the trained network.
        prior: one of `PRIORS`.
        sampled: ``all`` or ``last_layer``.
        dropout: of the network for MC-dropout, which is not sampled: BatchNorm then keeps the training's statistics.
        autocast: precision of forward passes of the pairs that need a GPU.
    """
    model = pair.model(pair.dropout if dropout is None else dropout).to(sets.test[0].device)
    model.load_state_dict({name: x for name, x in begun.state.items() if name != SCALE})
    model.eval()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and dropout is None:
            layer.train()
    mixed: dict[str, Any] = {"autocast": autocast, "channels_last": True} if pair.gpu else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the statistics of the minibatch", UserWarning)
        return Target.from_module(model, pair.likelihood, prior_of(prior, pair, sets, model), sampled=sampled, **mixed)


def prior_of(name: str, pair: Pair, sets: Sets, model: torch.nn.Module) -> Any:
    """A prior by its name; None for the library's own choice.

    ``weight-decay`` is what the training had: of Adam and SGD a precision of decay * N, of AdamW that times the root of
    the mean squared gradient, by which AdamW divides the gradient of the loss, but not the decay.
    """
    if name not in PRIORS:
        raise ValueError(f"prior = {name!r} is unknown; choose one of {list(PRIORS)}")
    if name == "empirical":
        return priors.Empirical()
    if name == "weight-decay":
        decay, parameters = pair.weight_decay * len(sets.train[0]), dict(model.named_parameters())
        if not decay:
            return priors.Flat()
        roots = dict.fromkeys(parameters, 1.0)
        if isinstance(pair.optimizer(model.parameters()), torch.optim.AdamW):
            roots = gradient_sizes(pair, sets, model)
        return priors.Normal({key: max(decay * roots[key], 1e-6) ** -0.5 for key in parameters})
    return {"default": None, "fan-in": priors.FanInNormal(), "normal": priors.Normal(1.0)}[name]


def gradient_sizes(pair: Pair, sets: Sets, model: torch.nn.Module, batches: int = 50) -> dict[str, float]:
    """Root mean square of each tensor's gradient over minibatches; of classifiers."""
    parameters = dict(model.named_parameters())
    generator = torch.Generator(sets.train[0].device).manual_seed(0)
    squares = dict.fromkeys(parameters, 0.0)
    for _ in range(batches):
        index = torch.randint(len(sets.train[0]), (pair.batch,), generator=generator, device=sets.train[0].device)
        batch = sets.train[0][index], sets.train[1][index]
        x, y = batch if sets.transform is None else sets.transform(batch, generator)
        found = torch.autograd.grad(cross_entropy(model(x), y), list(parameters.values()))
        for key, g in zip(parameters, found, strict=True):
            squares[key] += float(g.square().mean()) / batches
    return {key: math.sqrt(value) for key, value in squares.items()}


# -- scores -----------------------------------------------------------------------------------------------------------


def together(pair: Pair, sets: Sets, starts: Sequence[Start]) -> Posterior:
    """Trained networks as if they were draws: one, or an ensemble."""
    target = target_of(pair, sets, starts[0], autocast="float16")
    every = {name: torch.stack([one.state[name] for one in starts]).unsqueeze(1).cpu() for name in starts[0].state}
    parameters = set(target.initial())
    values = {name: x for name, x in every.items() if name in parameters}
    return Posterior(target, values, {}, buffers={name: x for name, x in every.items() if name not in parameters})


def calibrated(pair: Pair, sets: Sets, starts: Sequence[Start]) -> Posterior:
    """The same at the softmax temperature, or the noise scale, under which they predict held-out examples best."""
    if pair.likelihood != "gaussian":
        return together(pair, sets, starts).calibrated(*sets.held_out, batch_size=BATCH)
    target = target_of(pair, sets, starts[0])
    bare = [{name: x for name, x in one.state.items() if name != SCALE} for one in starts]
    return start_posterior(target, [with_noise_scale(target, state, sets.held_out, None) for state in bare])


def negative_log_likelihoods(posterior: Posterior, sets: Sets, part: str = "test") -> Tensor:
    """Of each example at each draw, ``[draws, n]``, in the target's own unit."""
    found = -posterior.log_likelihood(getattr(sets, part), batch_size=BATCH).double().flatten(0, 1)
    return found + math.log(sets.unit)


def averaged(each: Tensor) -> float:
    """Mean negative log likelihood of the average over draws, from that of each draw ``[draws, n]``."""
    return float((math.log(len(each)) - (-each).logsumexp(0)).mean())


def scores(pair: Pair, sets: Sets, posterior: Posterior) -> dict[str, float]:
    """NLL of test and held-out data, and accuracy, Brier score, calibration error and AUROC, or RMSE."""
    x, y = sets.test
    found = {
        "nll": averaged(negative_log_likelihoods(posterior, sets)),
        "held_out_nll": averaged(negative_log_likelihoods(posterior, sets, "held_out")),
    }
    mean = posterior.predict(x, batch_size=BATCH).mean
    if pair.likelihood == "gaussian":
        return found | {"rmse": sets.unit * float(rmse(mean.reshape(-1), y))}
    measures: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"accuracy": accuracy, "brier": brier, "ece": ece}
    found |= {name: float(measure(mean, y)) for name, measure in measures.items()}
    if sets.outside is not None:
        outside = posterior.predict(sets.outside, batch_size=BATCH).mean
        found["auroc"] = float(auroc(predictive_entropy(mean), predictive_entropy(outside)))
    return found


def ratio(pair: Pair, found: Mapping[str, float], before: Mapping[str, float], measure: str = "nll") -> float:
    """NLL over that of the start. Of a density, whose NLL has no zero and may be negative: exp of the difference.

    Both are below 1 where the average is better. The second is the ratio of the geometric means of the densities at
    the data, and does not depend on the unit of the target.
    """
    after, start_nll = found[measure], before[measure]
    return math.exp(after - start_nll) if pair.likelihood == "gaussian" else after / start_nll


# -- methods ----------------------------------------------------------------------------------------------------------


def lengths(pair: Pair, sets: Sets, epochs: float = EPOCHS, draws: int = DRAWS) -> dict[str, int]:
    """Warm-up, draws and steps between them that come to so many epochs of gradients, and `LEAST` at least."""
    steps = max(LEAST, round(epochs * len(sets.train[0]) / pair.batch))
    return {"warmup": round(WARMUP * steps), "draws": draws, "keep_every": max(1, round((1 - WARMUP) * steps / draws))}


def sampled(
    pair: Pair, sets: Sets, starts: Sequence[Start], settings: Mapping[str, Any], seed: int, part: str = "all"
) -> Posterior:
    """Draws from one trained network or around several: the one place where the public call is made.

    Args:
        pair: of the network.
        sets: its data; the held-out examples are given where the temperature is to be found.
        starts: trained networks.
        settings: of `isosgd.sample`, and ``prior`` and ``epochs`` of this module. Without a ``temperature`` the call is
            the one that a user would make, ``temperature="auto"`` with held-out data and nothing else.
        seed: of everything.
        part: ``all`` weights, or those of the ``last_layer``.
    """
    given = dict(settings)
    target = target_of(pair, sets, starts[0], prior=given.pop("prior", "empirical"), sampled=part)
    epochs = given.pop("epochs", EPOCHS)
    if given.setdefault("temperature", "auto") == "auto":
        given.setdefault("held_out", sets.held_out)
    else:
        given = lengths(pair, sets, epochs) | given
    given["starts"] = [dict(one.state) for one in starts]
    if pair.likelihood != "gaussian":  # a regression of few rows is sampled on all of them
        given.setdefault("batch_size", pair.batch)
    given = {"transform": sets.transform, "seed": seed, "progress": False} | given
    posterior = isosgd.sample(target, sets.train, **given)
    if not pair.gpu:
        return posterior
    precise = target_of(pair, sets, starts[0], sampled=part, autocast="float16")  # finer than bfloat16
    return Posterior(precise, posterior.draws, posterior.info, buffers=posterior.buffers)


def swag(pair: Pair, sets: Sets, begun: Start, seed: int) -> Posterior:
    """SWAG from the trained network: so many epochs of SGD at a constant rate."""
    apart = max(1, round(EPOCHS * len(sets.train[0]) / pair.batch / SNAPSHOTS))
    return isosgd.sample(
        target_of(pair, sets, begun, prior="weight-decay"), sets.train, method="swag", init=dict(begun.state),
        warmup=0, draws=DRAWS, keep_every=apart, snapshots=SNAPSHOTS, batch_size=pair.batch, transform=sets.transform,
        seed=seed, progress=False,
    )  # fmt: skip


def mc_dropout(pair: Pair, sets: Sets, begun: Start, seed: int, folder: Path) -> Posterior:
    """MC-dropout: masks on the network itself where it was trained with dropout, else on one that was."""
    rate = pair.dropout or DROPOUT
    trained = begun if pair.dropout else start(pair, sets, seed, folder, rate)
    return isosgd.sample(
        target_of(pair, sets, trained, dropout=rate), sets.train, method="mcdropout", init=dict(trained.state),
        warmup=0, draws=MASKS, batch_size=pair.batch, transform=sets.transform, seed=seed, progress=False,
    )  # fmt: skip


def ivon(pair: Pair, sets: Sets, seed: int) -> Posterior:
    """IVON in the place of the pair's optimizer, from scratch; of three rates the one that held-out examples prefer."""
    found = [together(pair, sets, trained_by_ivon(pair, sets, seed, rate, DRAWS)) for rate in RATES]
    return min(found, key=lambda p: averaged(negative_log_likelihoods(p, sets, "held_out")))


def measured(pair: Pair, sets: Sets, before: Mapping[str, float], draw: Callable[[], Posterior]) -> dict[str, Any]:
    """Scores of what a method draws, its ratio to the start, seconds, warnings and how it came about."""
    began, found = time.monotonic(), dict[str, Any]()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            posterior = draw()
            found["seconds"] = time.monotonic() - began
            found |= scores(pair, sets, posterior)
            found |= {"ratio": ratio(pair, found, before)}
            kept = ("method", "temperature", "density", "engine", "gradients", "keep_every", "options", "stopped")
            found["info"] = {name: posterior.info[name] for name in kept if name in posterior.info}
            if "temperature_choice" in posterior.info:
                found["info"]["temperature_choice"] = posterior.info["temperature_choice"]
        except DivergedError as error:
            found |= {"seconds": time.monotonic() - began, "diverged": str(error), "ratio": math.inf}
    found["warnings"] = sorted({str(w.message) for w in heard if issubclass(w.category, UserWarning)})
    return found


def run(
    pair: Pair, sets: Sets, seed: int, folder: Path, settings: Mapping[str, Any],
    rivals: Sequence[str] = (), members: int = 4, starts: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """One pair with one seed: the start, the average of the draws, and the rivals asked for."""
    count = max(starts, members if "ensemble" in rivals else 1)
    every = networks(pair, sets, [seed + 1000 * i for i in range(count)], folder)
    first = every[0]
    before = scores(pair, sets, together(pair, sets, [first]))
    found: dict[str, Any] = {"seed": seed, "training_seconds": first.seconds, "start": before}
    found["average"] = measured(pair, sets, before, lambda: sampled(pair, sets, every[:starts], settings, seed))
    others: dict[str, Callable[[], Posterior]] = {
        "calibrated": lambda: calibrated(pair, sets, every[:starts]),
        "swag": lambda: swag(pair, sets, first, seed),
        "mcdropout": lambda: mc_dropout(pair, sets, first, seed, folder),
        "last_layer": lambda: sampled(pair, sets, [first], settings, seed, "last_layer"),
        "ivon": lambda: ivon(pair, sets, seed),
    }
    found["rivals"] = {name: measured(pair, sets, before, others[name]) for name in rivals if name in others}
    if "ensemble" in rivals:
        curve = ensemble_curve(-negative_log_likelihoods(together(pair, sets, every[:members]), sets))
        found["ensemble"] = curve
        found["worth"] = worth(found["average"].get("nll", math.inf), curve)
    return found


def about(device: str) -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "versions": {
            "isosgd": isosgd.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, one CPU",
        "threads": torch.get_num_threads(),
    }
