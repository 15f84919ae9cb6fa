"""The networks and image sets of the classification tables: how each is read, trained and sampled."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.data import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_MEAN,
    MNIST_STD,
    cifar10,
    mnist,
    notmnist,
)
from experiments.images.images import Augment, Images
from experiments.models import lenet5, resnet18, resnet56, vgg16_bn
from isosgd import Posterior, Target, priors

State = dict[str, Tensor]
MOMENTUM = 0.9
TURN = 64  # steps of a network before it is the turn of another one
WARM_UPS = 3  # steps before a capture, in which libraries choose and load what they use
BATCH = 5_000  # images that are predicted at once
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
        swag: epochs of SGD that SWAG looks at.
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
    swag: int
    dropout: float
    augment: Augment = "crop-flip"
    compiled: bool = False


_CIFAR = Recipe("cifar10", 60, 128, 0.2, 5e-4, 64, (800, 4000), (1000, 100), 800, 400, 5, 0.1, compiled=True)
RECIPES: dict[str, Recipe] = {
    "lenet5": Recipe("mnist", 15, 128, 0.05, 5e-4, 128, (100, 100), (100, 100), 2000, 200, 5, 0.2, augment="jitter"),
    "resnet18": _CIFAR,
    "resnet56": replace(_CIFAR, peak=0.1, dropout=0.05),
    "vgg16": replace(_CIFAR, peak=0.1),
}
MAKERS: dict[str, Callable[..., nn.Module]] = {
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
            model = MAKERS[self.model](dropout=dropout)
        return model.to(self.train.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def target(self, dropout: float = 0.0, autocast: str | None = "bfloat16") -> Target:
        """The posterior of the network's weights; weight decay is a Gaussian prior of precision decay * N.

        BatchNorm layers normalise by the minibatch, and have statistics of their own at each draw; those of a network
        with dropout, which is not sampled, keep the statistics of its training.
        """
        model = self.fresh(0, dropout).train(not dropout)
        on_gpu = self.train.device.type == "cuda"
        prior = priors.Normal((self.recipe.decay * len(self.train)) ** -0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*the statistics of the minibatch", UserWarning)
            return Target.from_module(
                model, "categorical", prior, autocast=autocast if on_gpu else None, channels_last=on_gpu
            )

    def predictions(self, posterior: Posterior, dropout: float = 0.0) -> dict[str, Tensor]:
        """Class probabilities, averaged over draws, for every set of images."""
        target = self.target(dropout, "float16")  # finer than bfloat16
        posterior = Posterior(target, posterior.draws, posterior.info, buffers=posterior.buffers)
        return {name: posterior.predict(some.plain, batch_size=BATCH).mean for name, some in self.sets.items()}

    def steps(self, epochs: float, batch_size: int) -> int:
        """In which as many examples are seen as so many epochs have."""
        return max(1, round(epochs * len(self.train) / batch_size))

    def start(self, seed: int, dropout: float = 0.0) -> State:
        """A trained model, from the cache where it is there."""
        if (seed, dropout) not in self.known:
            state = self._read(seed, dropout)
            if state is None:
                model = self.fresh(seed, dropout)
                train(model, self.train, self.recipe, seed)
                state = {name: x.detach().contiguous().clone() for name, x in model.state_dict().items()}
                self._write(seed, dropout, state)
            self.known[seed, dropout] = state
        return self.known[seed, dropout]

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


def train(model: nn.Module, images: Images, recipe: Recipe, seed: int) -> None:
    """Train one network; see `training`."""
    train_all([model], images, recipe, [seed])


def train_all(models: Sequence[nn.Module], images: Images, recipe: Recipe, seeds: Sequence[int]) -> None:
    """Train several networks; on a GPU side by side, each on a CUDA stream of its own."""
    device, several = images.device, len(models) > 1 and images.device.type == "cuda"
    streams = [torch.cuda.Stream() if several else None for _ in models]  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeds[0])  # of dropout
        each = [training(model, seed, recipe, images) for model, seed in zip(models, seeds, strict=True)]
        going = list(zip(each, streams, strict=True))
        if several:
            torch.cuda.synchronize()
        while going:
            going = [(steps, stream) for steps, stream in going if _goes_on(steps, stream)]
    if device.type == "cuda":
        torch.cuda.synchronize()


def _goes_on(steps: Iterator[None], stream: torch.cuda.Stream | None) -> bool:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        return next(steps, True) is None


def training(model: nn.Module, seed: int, recipe: Recipe, images: Images) -> Iterator[None]:
    """SGD with momentum in epochs, at a rate that rises and falls once; on a GPU a step is one CUDA graph.

    Images are mirrored in every second epoch, each in its own, which trains a little better than by chance. Yields
    from time to time, so that others may go on.

    References:
        Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024 (mirroring in every second epoch).
    """
    device, n = images.device, min(recipe.train_batch, len(images))
    rates = one_cycle(max(1, round(recipe.epochs * len(images) / n)), recipe.peak).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    order, place = torch.zeros(len(images), dtype=torch.long, device=device), torch.arange(n, device=device)
    mirror = torch.randint(2, (len(images),), generator=generator, device=device).bool()
    params, rate = list(model.parameters()), torch.zeros((), device=device)
    velocity = [torch.zeros_like(p) for p in params]
    on_gpu = device.type == "cuda"
    alike = not any(isinstance(m, nn.Dropout) for m in model.modules())  # one network is not worth compiling
    network: Callable[[Tensor], Tensor] = model
    if on_gpu and recipe.compiled and alike:
        network = torch.compile(model, dynamic=False)

    def step() -> None:
        index = order[place % len(order)]
        place.add_(n)
        x, y = images.transform((images.pixels[index], images.labels[index]), generator, mirror[index])
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            logits = network(x)
        gradients = torch.autograd.grad(cross_entropy(logits.float(), y), params)
        with torch.no_grad():
            torch._foreach_mul_(velocity, MOMENTUM)
            torch._foreach_add_(velocity, gradients)
            torch._foreach_add_(velocity, [p.detach() for p in params], alpha=recipe.decay)
            torch._foreach_sub_(params, torch._foreach_mul(velocity, rate))

    model.train()
    run = captured(step, generator) if on_gpu else step
    for some in (place, *velocity):  # what the steps before the capture, at rate 0, have left
        some.zero_()
    for number, now in enumerate(rates):
        if number % (len(images) // n) == 0:
            order.copy_(torch.randperm(len(images), generator=generator, device=device))
            torch.arange(n, out=place)
            mirror.logical_not_()
        rate.copy_(now)
        run()
        if number % TURN == 0:
            yield
    refresh_statistics(model, images, generator)


def captured(step: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
    """A step as a CUDA graph; it is run a few times before. On a stream of its own it is captured there."""
    here = torch.cuda.current_stream()
    own = None if here == torch.cuda.default_stream() else here
    stream = torch.cuda.Stream() if own is None else own  # type: ignore[no-untyped-call]
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    here.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=own):
        step()
    return graph.replay


def one_cycle(steps: int, peak: float, rise: float = 0.2) -> Tensor:
    """Rates that rise to ``peak`` in the first part of the steps and fall to zero along a cosine.

    Example:
        >>> rates = one_cycle(10, 0.1, rise=0.2)
        >>> float(rates.max()) <= 0.1, float(rates[-1]) < 0.005
        (True, True)
    """
    if steps < 1 or not peak > 0:
        raise ValueError(f"{steps} steps with a rate of at most {peak}: both must be positive")
    at = (torch.arange(steps) + 0.5) / steps
    falling = 0.5 * (1 + torch.cos(torch.pi * (at - rise).clamp_min(0) / (1 - rise)))
    return peak * torch.where(at < rise, at / rise, falling)


@torch.no_grad()
def refresh_statistics(model: nn.Module, images: Images, generator: torch.Generator) -> None:
    """Statistics of the BatchNorm layers of a trained network: means over minibatches of augmented examples."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    size = min(500, len(images))
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over the minibatches
    for _ in range(min(10, len(images) // size) if layers else 0):
        index = torch.randint(len(images), (size,), generator=generator, device=images.device)
        x, _ = images.transform((images.pixels[index], images.labels[index]), generator)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda"):
            model(x.contiguous(memory_format=torch.channels_last))


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
