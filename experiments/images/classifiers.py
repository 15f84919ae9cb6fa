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

from experiments.data import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_MEAN,
    MNIST_STD,
    cifar10,
    mnist,
    notmnist,
)
from experiments.images.captured import Chain, descend, one_cycle, refresh_statistics
from experiments.images.images import Augment, Images
from experiments.models import lenet5, resnet18, resnet56, vgg16_bn
from isosgd.progress import Progress

State = dict[str, Tensor]
SIDE_BY_SIDE = 5  # models that are trained at a time
PILOT = 1000  # the first of the starts whose held-out tenth temperatures are chosen on


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
        compiled: whether the network is compiled for its training on a GPU.
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
    compiled: bool = False


_CIFAR = Recipe("cifar10", 60, 128, 0.2, 5e-4, 64, (800, 4000), (1000, 100), 800, 400, (5, 0.01), 0.1, compiled=True)
RECIPES: dict[str, Recipe] = {
    "lenet5": Recipe(
        "mnist", 15, 128, 0.05, 5e-4, 128, (100, 100), (100, 100), 2000, 200, (5, 0.01), 0.2, augment="jitter"
    ),
    "resnet18": _CIFAR,
    "resnet56": replace(_CIFAR, peak=0.1, dropout=0.05),
    "vgg16": replace(_CIFAR, peak=0.1),
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

    def prepare(self, seeds: Sequence[int], dropout: float = 0.0) -> None:
        """Have starts ready."""
        prepare([(self, seed, dropout) for seed in seeds])

    def has(self, seed: int, dropout: float) -> bool:
        """Whether a start is known, or in the cache, from where it is then read."""
        if (seed, dropout) not in self.known and (state := self._read(seed, dropout)) is not None:
            self.known[seed, dropout] = state
        return (seed, dropout) in self.known

    def keep(self, seed: int, dropout: float, model: nn.Module) -> None:
        """Take in a trained model."""
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


def prepare(starts: Sequence[tuple[Task, int, float]], side_by_side: int = SIDE_BY_SIDE) -> None:
    """Have starts of tasks ready, by seed and dropout; those that are missing are trained, several side by side."""
    missing = [(task, seed, dropout) for task, seed, dropout in starts if not task.has(seed, dropout)]
    for first in range(0, len(missing), side_by_side):
        some = missing[first : first + side_by_side]
        models = [task.fresh(seed, dropout) for task, seed, dropout in some]
        train([task for task, _, _ in some], models, [seed for _, seed, _ in some])
        for (task, seed, dropout), model in zip(some, models, strict=True):
            task.keep(seed, dropout, model)


def train(tasks: Sequence[Task], models: Sequence[nn.Module], seeds: Sequence[int]) -> None:
    """SGD with momentum .9 in epochs, a rate that rises and falls once."""
    own: dict[str, Any] = {"friction": 0.1, "noise": False, "shuffled": True}
    chains, rates = [], []
    for task, model, seed in zip(tasks, models, seeds, strict=True):
        recipe = task.recipe
        alike = not any(isinstance(module, nn.Dropout) for module in model.modules())  # one network is not worth it
        own |= {"decay": recipe.decay, "compiled": recipe.compiled and alike, "seed": seed}
        chains.append(Chain(model, task.train, recipe.train_batch, **own))
        rates.append(one_cycle(task.steps(recipe.epochs, recipe.train_batch), recipe.peak))
    progress = Progress(sum(len(some) for some in rates))
    descend(chains, rates, lambda steps: progress.advance(f"training {len(chains)}", steps))
    progress.close()
    for chain in chains:
        refresh_statistics(chain.model, chain.images, chain.generator)
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
