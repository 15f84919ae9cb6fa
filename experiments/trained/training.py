"""Training a pair's network with an ordinary loop, and keeping what was trained."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gaussian_nll_loss

from experiments.data import CIFAR10_MEAN, CIFAR10_STD
from experiments.images import classifiers
from experiments.images.images import Images
from experiments.trained.pairs import Pair, Sets

SCALE = "likelihood.scale"  # the name that `isosgd` gives to the noise of a Gaussian likelihood


@dataclass(frozen=True)
class Start:
    """A trained network: its ``state_dict`` and, of a regression, the noise scale; and the seconds it took."""

    state: Mapping[str, Tensor]
    seconds: float


def train(pair: Pair, sets: Sets, seeds: Sequence[int], dropout: float | None = None) -> list[Start]:
    """Train networks of the pair from scratch, with another dropout probability than its own where one is given.

    Those of CIFAR-10 are trained side by side, and their seconds are an equal part of the time of all.
    """
    device = sets.test[0].device
    models, extras, began = [], [dict[str, Tensor]() for _ in seeds], time.monotonic()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for seed, extra in zip(seeds, extras, strict=True):
            torch.manual_seed(seed)
            model = pair.model(pair.dropout if dropout is None else dropout).to(device).train()
            models.append(model.to(memory_format=torch.channels_last) if pair.gpu else model)  # type: ignore[call-overload]
            if not pair.gpu:
                extra |= _plain(pair, model, sets, seed)
        if pair.gpu:
            _fast(pair, models, sets, seeds)
        if device.type == "cuda":
            torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / len(seeds)
    states = [{name: x.detach().contiguous().clone() for name, x in model.state_dict().items()} for model in models]
    return [Start(state | extra, seconds) for state, extra in zip(states, extras, strict=True)]


def _plain(pair: Pair, model: nn.Module, sets: Sets, seed: int) -> dict[str, Tensor]:
    (x, y), n = sets.train, pair.batch
    generator = torch.Generator(x.device).manual_seed(seed)
    log_scale = torch.zeros((), device=x.device, requires_grad=True)
    optimizer = pair.optimizer(model.parameters())
    if pair.likelihood == "gaussian":
        optimizer.add_param_group({"params": [log_scale], "weight_decay": 0.0})
    steps = pair.epochs * -(-len(x) // n)
    peak = float(optimizer.param_groups[0]["lr"])
    # Not momentum: that of Adam is better left alone. The first rate is set by the scheduler as it is made.
    cycle = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, cycle_momentum=False) if pair.one_cycle else None
    )
    for _ in range(pair.epochs):
        for index in torch.randperm(len(x), generator=generator, device=x.device).split(n):
            batch = x[index], y[index]
            inputs, targets = batch if sets.transform is None else sets.transform(batch, generator)
            loss = _loss(pair, model(inputs), targets, log_scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if cycle is not None:
                cycle.step()
    return {SCALE: log_scale.detach().exp()} if pair.likelihood == "gaussian" else {}


def trained_by_ivon(pair: Pair, sets: Sets, seed: int, rate: float, draws: int) -> list[Start]:
    """Networks drawn from what IVON has learned (``pip install ivon-opt``), with the pair's epochs and weight decay."""
    try:
        from ivon import IVON
    except ImportError as error:
        raise ImportError("--rivals ivon needs ivon-opt, which the environment of `make bench-peers` has") from error

    (x, y), n = sets.train, pair.batch
    torch.manual_seed(seed)
    model = pair.model(0.0).to(x.device).train()
    log_scale = nn.Parameter(torch.zeros((), device=x.device))
    extra = [log_scale] if pair.likelihood == "gaussian" else []
    # That of AdamW is no term of the loss, and would be far too much as one: IVON's own default there.
    plain = not isinstance(pair.optimizer(model.parameters()), torch.optim.AdamW)
    optimizer = IVON(
        [*model.parameters(), *extra], lr=rate, ess=len(x), hess_init=0.5,
        **({"weight_decay": pair.weight_decay} if plain else {}),
    )  # fmt: skip
    steps = pair.epochs * -(-len(x) // n)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, began = torch.Generator(x.device).manual_seed(seed), time.monotonic()
    for _ in range(pair.epochs):
        for index in torch.randperm(len(x), generator=generator, device=x.device).split(n):
            batch = x[index], y[index]
            inputs, targets = batch if sets.transform is None else sets.transform(batch, generator)
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                _loss(pair, model(inputs), targets, log_scale).backward()
            optimizer.step()
            cosine.step()
    found = []
    for _ in range(draws):
        with optimizer.sampled_params():
            state = {name: value.detach().clone() for name, value in model.state_dict().items()}
            found.append(Start(state | ({SCALE: log_scale.detach().exp()} if extra else {}), time.monotonic() - began))
    return found


def _loss(pair: Pair, output: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    if pair.likelihood == "gaussian":
        return gaussian_nll_loss(output.squeeze(-1), targets, (2 * log_scale).exp().expand_as(targets))
    return cross_entropy(output, targets)


def _fast(pair: Pair, models: Sequence[nn.Module], sets: Sets, seeds: Sequence[int]) -> None:
    """CIFAR-10 on a GPU: SGD with momentum at a one-cycle rate, in bfloat16, a step a CUDA graph."""
    group = pair.optimizer(models[0].parameters()).param_groups[0]
    recipe = replace(
        classifiers.RECIPES["resnet18"],
        epochs=pair.epochs, train_batch=pair.batch, peak=group["lr"], decay=group["weight_decay"],
    )  # fmt: skip
    images = Images.make(*sets.train, CIFAR10_MEAN, CIFAR10_STD, "crop-flip", sets.train[0].device)
    classifiers.train_all(models, images, recipe, seeds)


def start(pair: Pair, sets: Sets, seed: int, folder: Path, dropout: float | None = None) -> Start:
    """A trained network; see `starts`."""
    return starts(pair, sets, [seed], folder, dropout)[0]


def starts(pair: Pair, sets: Sets, seeds: Sequence[int], folder: Path, dropout: float | None = None) -> list[Start]:
    """Trained networks, from the folder where the same recipe has left them."""
    device = sets.test[0].device
    used = pair.dropout if dropout is None else dropout
    defaults = pair.optimizer([nn.Parameter(torch.zeros(1))]).defaults
    recipe = {name: defaults[name] for name in ("lr", "weight_decay", "momentum", "betas") if name in defaults}
    abouts = [
        json.dumps(
            {"pair": pair.name, "seed": seed, "dropout": used, "epochs": pair.epochs, "batch": pair.batch,
             "examples": len(sets.train[0]), "one_cycle": pair.one_cycle, "device": device.type, **recipe},
            sort_keys=True,
        )
        for seed in seeds
    ]  # fmt: skip
    ending = f"-dropout{dropout:g}" if dropout is not None else ""
    paths = [folder / f"{pair.name}-{seed}{ending}.safetensors" for seed in seeds]
    found = [_known(path, about, device) for path, about in zip(paths, abouts, strict=True)]
    missing = [i for i, one in enumerate(found) if one is None]
    trained = train(pair, sets, [seeds[i] for i in missing], dropout) if missing else []
    for i, one in zip(missing, trained, strict=True):
        found[i] = one
        folder.mkdir(parents=True, exist_ok=True)
        half = paths[i].with_suffix(".part")
        save_file(dict(one.state), half, {"about": abouts[i], "seconds": str(one.seconds)})
        half.replace(paths[i])
    return [one for one in found if one is not None]


def _known(path: Path, about: str, device: torch.device) -> Start | None:
    if not path.is_file():
        return None
    with safe_open(path, "pt", device=str(device)) as file:
        found = file.metadata() or {}
        if found.get("about") != about:
            return None
        return Start({name: file.get_tensor(name) for name in file.keys()}, float(found["seconds"]))  # noqa: SIM118
