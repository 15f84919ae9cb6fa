"""The networks and image sets of the classification tables: how each is read, trained and sampled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from isosgd.data import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_MEAN,
    MNIST_STD,
    cifar10,
    mnist,
    notmnist,
)
from isosgd.experiments.captured import Chain, descend, one_cycle, refresh_statistics
from isosgd.experiments.images import Augment, Images
from isosgd.models import lenet5, resnet18, resnet56, vgg16_bn

State = dict[str, Tensor]
PILOT = 1000  # the start whose held-out tenth temperatures are chosen on


@dataclass(frozen=True)
class Recipe:
    """How a network is trained and sampled. Times are in steps, unless they are epochs.

    Attributes:
        data: ``mnist`` or ``cifar10``.
        epochs: of the training of a starting model.
        train_batch: its minibatches.
        peak: its highest rate, with momentum .9.
        decay: precision of the Gaussian prior over N, in training and sampling alike.
        batch_size: of samplers.
        alpha: warm-up and steps between draws of the alpha-stable variants, as the paper has them.
        gauss: the same of the Gaussian variants.
        warmup: of our own settings.
        keep_every: likewise.
        swag: epochs of SGD that SWAG looks at, and their rate.
        dropout: probability of the network of MC-dropout.
        augment: of training and sampling.
    """

    data: str
    epochs: int
    train_batch: int
    peak: float
    decay: float
    batch_size: int
    alpha: tuple[int, int]
    gauss: tuple[int, int]
    warmup: int
    keep_every: int
    swag: tuple[int, float]
    dropout: float
    augment: Augment = "crop-flip"


_CIFAR = Recipe("cifar10", 40, 128, 0.1, 5e-4, 64, (800, 4000), (1000, 100), 800, 400, (5, 0.01), 0.1)
RECIPES: dict[str, Recipe] = {
    "lenet5": Recipe(
        "mnist", 15, 128, 0.05, 5e-4, 128, (100, 100), (100, 100), 2000, 200, (5, 0.01), 0.2, augment="jitter"
    ),
    "resnet18": _CIFAR,
    "resnet56": replace(_CIFAR, dropout=0.05),
    "vgg16": replace(_CIFAR, peak=0.05),
}
_MAKERS: dict[str, Callable[..., nn.Module]] = {
    "lenet5": lenet5,
    "resnet18": resnet18,
    "resnet56": resnet56,
    "vgg16": vgg16_bn,
}


@dataclass(frozen=True)
class Task:
    """A network, a training set, and what predictions are made for.

    Attributes:
        model: name of the network.
        recipe: how it is trained and sampled.
        train: the training set.
        sets: what is predicted: ``test``, its images ``mirrored``, ``held-out`` or ``outside``, by name.
        cache: folder of trained models, None to keep none there.
        known: trained models by seed and dropout.
    """

    model: str
    recipe: Recipe
    train: Images
    sets: dict[str, Images]
    cache: Path | None = None
    known: dict[tuple[int, float], State] = field(default_factory=dict, repr=False)

    def fresh(self, seed: int, dropout: float = 0.0) -> nn.Module:
        """A network with first weights of its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _MAKERS[self.model](dropout=dropout)
        return model.to(self.train.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def restored(self, state: State, dropout: float = 0.0) -> nn.Module:
        """The network of a start."""
        model = self.fresh(0, dropout)
        model.load_state_dict(state)
        return model

    def steps(self, epochs: float, batch_size: int) -> int:
        """In which as many examples are seen as so many epochs have."""
        return max(1, round(epochs * len(self.train) / batch_size))

    def start(self, seed: int, dropout: float = 0.0) -> State:
        """A trained model, from the cache where it is there."""
        self.prepare([seed], dropout)
        return self.known[seed, dropout]

    def prepare(self, seeds: Sequence[int], dropout: float = 0.0, side_by_side: int = 8) -> None:
        """Have starts ready; those that are not in the cache are trained, several side by side."""
        missing = []
        for seed in seeds:
            if (seed, dropout) not in self.known:
                state = self._read(seed, dropout)
                if state is None:
                    missing.append(seed)
                else:
                    self.known[seed, dropout] = state
        for first in range(0, len(missing), side_by_side):
            some = missing[first : first + side_by_side]
            models = [self.fresh(seed, dropout) for seed in some]
            train(self, models, some)
            for seed, model in zip(some, models, strict=True):
                state = {name: x.detach().contiguous().clone() for name, x in model.state_dict().items()}
                self.known[seed, dropout] = state
                self._write(seed, dropout, state)

    def _file(self, seed: int, dropout: float) -> tuple[Path | None, str]:
        """Where a start is kept, and what is said of it there."""
        trained = ("epochs", "train_batch", "peak", "decay", "augment")
        recipe = {name: getattr(self.recipe, name) for name in trained}
        about = {"model": self.model, "seed": seed, "dropout": dropout, "examples": len(self.train), **recipe}
        name = f"{self.model}-{seed}-{len(self.train)}{f'-dropout{dropout:g}' if dropout else ''}.safetensors"
        return None if self.cache is None else self.cache / name, json.dumps(about, sort_keys=True)

    def _read(self, seed: int, dropout: float) -> State | None:
        path, about = self._file(seed, dropout)
        if path is None or not path.is_file():
            return None
        with safe_open(path, "pt", device=str(self.train.device)) as file:
            if (file.metadata() or {}).get("about") != about:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def _write(self, seed: int, dropout: float, state: State) -> None:
        path, about = self._file(seed, dropout)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(".part")
            save_file(state, half, {"about": about})
            os.replace(half, path)


def train(task: Task, models: Sequence[nn.Module], seeds: Sequence[int]) -> None:
    """SGD with momentum .9 in epochs, a rate that rises and falls once."""
    recipe = task.recipe
    own: dict[str, Any] = {"decay": recipe.decay, "friction": 0.1, "noise": False, "shuffled": True}
    chains = [
        Chain(model, task.train, recipe.train_batch, seed=seed, **own)
        for model, seed in zip(models, seeds, strict=True)
    ]
    descend(chains, one_cycle(task.steps(recipe.epochs, recipe.train_batch), recipe.peak))
    for chain in chains:
        refresh_statistics(chain.model, task.train, chain.generator)
        detach(chain.model)


def detach(model: nn.Module) -> None:
    """Parameters with memory of their own again, so that a flat tensor or a graph's memory can go."""
    for p in model.parameters():
        p.grad = None
        p.data = p.data.clone(memory_format=torch.preserve_format)


def read(
    model: str,
    root: str | os.PathLike[str] | None,
    device: str,
    *,
    recipe: Recipe | None = None,
    limit: int | None = None,
    cache: Path | None = None,
) -> tuple[Task, Task]:
    """The task of a network on all training images, and that of the pilot, with a tenth of them held out.

    Args:
        model: name of the network.
        root: data root.
        device: where to work.
        recipe: in place of the network's own.
        limit: take only so many images of each set.
        cache: folder of trained models.
    """
    if model not in RECIPES:
        raise ValueError(f"model = {model!r} is unknown; choose one of {sorted(RECIPES)}")
    recipe = recipe or RECIPES[model]
    reader, mean, std = (
        (mnist, MNIST_MEAN, MNIST_STD) if recipe.data == "mnist" else (cifar10, CIFAR10_MEAN, CIFAR10_STD)
    )

    def images(pixels: Tensor, labels: Tensor, augment: Augment) -> Images:
        return Images.make(pixels[:limit], labels[:limit], mean, std, augment, device)

    train_set, test = images(*reader(root, "train"), recipe.augment), images(*reader(root, "test"), "none")
    sets = {"test": test}
    if recipe.data == "mnist":
        sets["outside"] = images(*notmnist(root), "none")
    else:
        sets["mirrored"] = replace(test, pixels=test.pixels.flip(-1))
    part, held_out = train_set.split(0.1, seed=0)
    return (
        Task(model, recipe, train_set, sets, cache),
        Task(model, recipe, part, {"held-out": held_out}, cache),
    )
