"""The pairs of a network and data, and how each network is trained: as its user would have done it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from experiments.data import CIFAR10_MEAN, CIFAR10_STD, cifar10, crop_flip, data_root, mnist, notmnist, read_idx, uci
from experiments.models import lenet5, mlp, resnet18, resnet56, vgg16_bn
from experiments.trained.networks import Transformer, cnn, small_vgg

Examples = tuple[Tensor, Tensor]
Transform = Callable[[Any, torch.Generator], Any]
SPLIT = 2311  # seed of the splits of image sets


@dataclass(frozen=True)
class Sets:
    """Data of a pair.

    Attributes:
        train: inputs (bytes, where there is a transform) and targets.
        held_out: examples that the network is not trained on, to choose settings by.
        test: examples that nothing is chosen by.
        outside: inputs of another kind, which the network should not be sure of.
        transform: what makes a minibatch of ``train`` inputs of the network: augmentation and scaling.
        unit: standard deviation of the target before it was standardised; scores are in the old unit.
    """

    train: Examples
    held_out: Examples
    test: Examples
    outside: Tensor | None = None
    transform: Transform | None = None
    unit: float = 1.0

    def to(self, device: str) -> Sets:
        """All on a device."""
        train, held_out, test = ((x.to(device), y.to(device)) for x, y in (self.train, self.held_out, self.test))
        outside = None if self.outside is None else self.outside.to(device)
        return replace(self, train=train, held_out=held_out, test=test, outside=outside)

    def limited(self, count: int | None) -> Sets:
        """At most so many examples in each part."""
        train, held_out, test = ((x[:count], y[:count]) for x, y in (self.train, self.held_out, self.test))
        outside = None if self.outside is None else self.outside[:count]
        return replace(self, train=train, held_out=held_out, test=test, outside=outside)


@dataclass(frozen=True)
class Pair:
    """A network, data, and how it is trained.

    Attributes:
        name: in the lists.
        read: data by data root and seed.
        model: a new network, by its dropout probability.
        optimizer: from parameters, with the weight decay in it.
        epochs: of training.
        batch: size of minibatches, in training and sampling.
        likelihood: ``categorical``, or ``gaussian`` with a noise scale that is trained along.
        dropout: probability in the training of the network itself.
        one_cycle: whether the rate rises and falls once (the optimizer's own is the highest), or is constant.
        gpu: whether it needs one: mixed precision, channels last, a compiled network.
    """

    name: str
    read: Callable[[Path | None, int], Sets]
    model: Callable[[float], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    epochs: int
    batch: int = 64
    likelihood: Literal["categorical", "gaussian"] = "categorical"
    dropout: float = 0.0
    one_cycle: bool = True
    gpu: bool = False

    @property
    def weight_decay(self) -> float:
        """As the optimizer has it."""
        parameter = nn.Parameter(torch.zeros(1))
        return float(self.optimizer([parameter]).param_groups[0]["weight_decay"])


# -- data -------------------------------------------------------------------------------------------------------------


def rows(count: int, seed: int, *sizes: int) -> list[Tensor]:
    """Disjoint random rows, so many in each part.

    Example:
        >>> [len(part) for part in rows(10, 0, 7, 1, 2)]
        [7, 1, 2]
    """
    if sum(sizes) > count:
        raise ValueError(f"parts of {sizes} rows are more than the {count} that there are")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return list(order[: sum(sizes)].split(list(sizes)))


def table(x: Any, y: Any, seed: int, classes: bool) -> Sets:
    """A table split 70:10:20, standardised by its training part; of a regression, the target too."""
    x, y = torch.as_tensor(np.asarray(x)).double(), torch.as_tensor(np.asarray(y))
    n = len(x)
    parts = rows(n, SPLIT + seed, round(0.7 * n), round(0.1 * n), n - round(0.7 * n) - round(0.1 * n))
    mean, std = x[parts[0]].mean(0), x[parts[0]].std(0)
    x = ((x - mean) / torch.where(std > 0, std, 1.0)).float()
    unit = 1.0
    if classes:
        y = y.long()
    else:
        centre, unit = float(y[parts[0]].double().mean()), float(y[parts[0]].double().std())
        y = ((y.double() - centre) / unit).float()
    train, held_out, test = ((x[part], y[part]) for part in parts)
    return Sets(train, held_out, test, unit=unit)


def scikit(name: str, root: Path | None, seed: int) -> Sets:
    """A table of scikit-learn."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return table(x, y, seed, classes=name != "diabetes")


def benchmark(name: str, root: Path | None, seed: int) -> Sets:
    """A regression of the UCI benchmark, or airfoil."""
    if name == "airfoil":
        found = np.loadtxt(data_root(root) / "tabular" / "airfoil.csv", delimiter=",", skiprows=1)
        return table(found[:, :-1], found[:, -1], seed, classes=False)
    read = uci(name, root)
    return table(read.x, read.y, seed, classes=False)


def robot_arm(root: Path | None, seed: int) -> Sets:
    """Made up after kin8nm: how far the end of an arm of eight joints is from a point, with noise; 3,000 rows."""
    generator = torch.Generator().manual_seed(SPLIT)
    angles = math.pi / 2 * (2 * torch.rand(3000, 8, generator=generator) - 1)
    toward = angles.cumsum(1)
    x, y = toward.cos().sum(1) / 8, toward.sin().sum(1) / 8
    distance = ((x - 0.1) ** 2 + (y - 0.1) ** 2).sqrt()
    return table(angles, distance + 0.05 * torch.randn(3000, generator=generator), seed, classes=False)


def grey(pixels: Tensor) -> Tensor:
    """Bytes ``[N, 28, 28]`` as floats ``[N, 1, 28, 28]`` of mean and deviation of about 0 and 1."""
    return ((pixels.float() / 255 - 0.2) / 0.33).unsqueeze(1)


def grey_augmented(batch: Examples, generator: torch.Generator) -> Examples:
    """Shifts by up to two pixels, mirror images, and scaling."""
    x, y = batch
    return grey(crop_flip(x.unsqueeze(1), generator, padding=2).squeeze(1)), y


def fashion(root: Path | None) -> Examples:
    """The 10,000 images of the test file of Fashion-MNIST."""
    folder = data_root(root) / "FashionMNIST" / "raw"
    return read_idx(folder / "t10k-images-idx3-ubyte.gz"), read_idx(folder / "t10k-labels-idx1-ubyte.gz").long()


def fashion_sets(root: Path | None, seed: int) -> Sets:
    """Fashion-MNIST's test file split 7,000, 1,000 and 2,000; digits are outside."""
    x, y = fashion(root)
    train, held_out, test = ((x[part], y[part]) for part in rows(len(x), SPLIT, 7000, 1000, 2000))
    outside = grey(mnist(root, "test")[0][:2000])
    return Sets(train, (grey(held_out[0]), held_out[1]), (grey(test[0]), test[1]), outside, grey_augmented)


def mnist_sets(root: Path | None, seed: int, *, count: int = 55_000) -> Sets:
    """MNIST with its own test set, 5,000 images held out, ``count`` to train on; letters are outside."""
    x, y = mnist(root, "train")
    train, held_out = ((grey(x[part]), y[part]) for part in rows(len(x), SPLIT, count, 5000))
    x, y = mnist(root, "test")
    return Sets(train, held_out, (grey(x), y), grey(notmnist(root)[0][:5000]))


def mnist_tune(root: Path | None, seed: int) -> Sets:
    """Images of MNIST's training file alone: 5,000, 2,000 and 5,000; letters are outside."""
    x, y = mnist(root, "train")
    train, held_out, test = ((grey(x[part]), y[part]) for part in rows(len(x), SPLIT + 1, 5000, 2000, 5000))
    return Sets(train, held_out, test, grey(notmnist(root)[0][5000:7000]))


def notmnist_sets(root: Path | None, seed: int) -> Sets:
    """Letters: 5,000 to train on, 2,000 held out, 5,000 to test; digits of MNIST's training file are outside."""
    x, y = (part[5000:] for part in notmnist(root))  # the others are outside data of the list of tests
    train, held_out, test = ((grey(x[part]), y[part]) for part in rows(len(x), SPLIT, 5000, 2000, 5000))
    return Sets(train, held_out, test, grey(mnist(root, "train")[0][:2000]))


def few_letters(root: Path | None, seed: int) -> Sets:
    """The first thousand of them to train on."""
    found = notmnist_sets(root, seed)
    return replace(found, train=(found.train[0][:1000], found.train[1][:1000]))


def tiny_letters(root: Path | None, seed: int) -> Sets:
    """Of 8x8 pixels, as many as scikit-learn has digits: 1,258 to train on and 180 held out, others for each seed."""
    found, k = notmnist_sets(root, seed), seed % 3
    parts = (
        (found.train, slice(1258 * k, 1258 * (k + 1))),
        (found.held_out, slice(180 * k, 180 * (k + 1))),
        (found.test, slice(0, None)),
    )
    train, held_out, test = (
        (torch.nn.functional.adaptive_avg_pool2d(x[part], 8).flatten(1), y[part]) for (x, y), part in parts
    )
    return Sets(train, held_out, test)


def as_rows(read: Callable[[Path | None, int], Sets], root: Path | None, seed: int) -> Sets:
    """Images of 14x14 pixels as sequences of their rows."""
    sets = read(root, seed)
    train, held_out, test = ((small(x), y) for x, y in (sets.train, sets.held_out, sets.test))
    return Sets(train, held_out, test, None if sets.outside is None else small(sets.outside))


def small(x: Tensor) -> Tensor:
    """Images ``[N, 1, 28, 28]`` as rows ``[N, 14, 14]``, means of 2x2 pixels."""
    return torch.nn.functional.avg_pool2d(x, 2).squeeze(1)


@lru_cache
def _colours(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel; made once, for a CUDA graph cannot bring numbers to the device."""
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (CIFAR10_MEAN, CIFAR10_STD))
    return mean, std


def colour(pixels: Tensor) -> Tensor:
    """Bytes ``[N, 3, 32, 32]`` as floats of mean 0 and deviation 1."""
    mean, std = _colours(pixels.device)
    return (pixels.float() / 255 - mean) / std


def colour_augmented(batch: Examples, generator: torch.Generator) -> Examples:
    """Shifts by up to four pixels, mirror images, and scaling."""
    x, y = batch
    return colour(crop_flip(x, generator)), y


def cifar_sets(root: Path | None, seed: int, *, tune: int = 0) -> Sets:
    """CIFAR-10: 45,000, 5,000 and its test set; to ``tune`` so many, 2,000 and 5,000 of its training files alone.

    Outside are Fashion-MNIST's images with a border, three times the same colour; to tune, digits.
    """
    x, y = cifar10(root, "train")
    parts = rows(len(x), SPLIT, *((tune, 2000, 5000) if tune else (45_000, 5000)))
    train, held_out = (x[parts[0]], y[parts[0]]), (colour(x[parts[1]]), y[parts[1]])
    last = (x[parts[2]], y[parts[2]]) if tune else cifar10(root, "test")
    others = mnist(root, "train")[0] if tune else fashion(root)[0]
    outside = torch.nn.functional.pad(others[:5000], (2, 2, 2, 2)).unsqueeze(1).expand(-1, 3, -1, -1)
    return Sets(train, held_out, (colour(last[0]), last[1]), colour(outside), colour_augmented)


# -- the two lists ----------------------------------------------------------------------------------------------------

adam, adamw = partial(partial, torch.optim.Adam), partial(partial, torch.optim.AdamW)
sgd = partial(partial, torch.optim.SGD, momentum=0.9)


def dense(features: int, hidden: tuple[int, ...], outputs: int, images: bool = False) -> Callable[[float], nn.Module]:
    """Fully connected networks."""

    def model(dropout: float) -> nn.Module:
        net = mlp(features, hidden, outputs, dropout=dropout)
        return nn.Sequential(nn.Flatten(), *net) if images else net

    return model


def regression(name: str, read: Callable[[Path | None, int], Sets], features: int, epochs: int) -> Pair:
    """Two layers of 50 units with Gaussian noise of a trained scale."""
    return Pair(name, read, dense(features, (50, 50), 1), adam(lr=5e-3, weight_decay=1e-2), epochs, 32, "gaussian")


VGG = Pair(
    "cifar10k-vgg", partial(cifar_sets, tune=10_000), small_vgg, sgd(lr=0.1, weight_decay=5e-4), 30, 128, gpu=True
)
TUNE = (
    Pair("wine-mlp", partial(scikit, "wine"), dense(13, (32,), 3), adam(lr=5e-3, weight_decay=1e-3), 60, 16),
    Pair("cancer-mlp", partial(scikit, "breast_cancer"), dense(30, (32, 32), 2), adamw(lr=5e-3), 20, 32),
    Pair("notmnist-cnn", notmnist_sets, cnn, adamw(lr=3e-3), 12),
    Pair("mnist5k-mlp", mnist_tune, dense(784, (100, 100), 10, True), sgd(lr=0.05, weight_decay=5e-4), 20),
    regression("kin-mlp", robot_arm, 8, 60),
    regression("diabetes-mlp", partial(scikit, "diabetes"), 10, 20),
    regression("boston-mlp", partial(benchmark, "boston"), 13, 40),
    VGG,
    replace(VGG, name="cifar40k-vgg", read=partial(cifar_sets, tune=40_000)),
    replace(VGG, name="cifar20k-resnet56", read=partial(cifar_sets, tune=20_000), model=lambda p: resnet56(dropout=p)),
    Pair("notmnist-bn", notmnist_sets, partial(cnn, norm="batch"), sgd(lr=0.05, weight_decay=5e-4), 20),
    Pair("notmnist-overfitted", few_letters, dense(784, (256, 256), 10, True), adam(lr=1e-3), 400, one_cycle=False),
    Pair("letters-mlp", tiny_letters, dense(64, (32,), 10), adam(lr=5e-3, weight_decay=1e-3), 60),
    Pair("notmnist-gn", notmnist_sets, partial(cnn, norm="group"), adamw(lr=3e-3), 20, dropout=0.1),
    Pair(
        "notmnist-transformer", partial(as_rows, notmnist_sets), lambda p: Transformer(14, 14, dropout=p),
        adamw(lr=2e-3), 15, 128, dropout=0.1,
    ),
    Pair("notmnist-undertrained", notmnist_sets, cnn, adam(lr=1e-3, weight_decay=1e-4), 1, one_cycle=False),
)  # fmt: skip
FASHION = Pair("fashion-bn", fashion_sets, partial(cnn, norm="batch"), sgd(lr=0.05, weight_decay=5e-4), 20)
CIFAR = Pair(
    "cifar10-resnet18",
    cifar_sets,
    _resnet := lambda p: resnet18(dropout=p),
    sgd(lr=0.2, weight_decay=5e-4),
    30,
    128,
    gpu=True,
)
TEST = (
    Pair("digits-mlp", partial(scikit, "digits"), dense(64, (32,), 10), adam(lr=5e-3, weight_decay=1e-3), 60),
    FASHION,
    replace(FASHION, name="fashion-gn", model=partial(cnn, norm="group"), dropout=0.1, optimizer=adamw(lr=3e-3)),
    Pair("mnist-lenet5", mnist_sets, lambda p: lenet5(dropout=p), adamw(lr=1e-3), 10, 128),
    Pair(
        "mnist-transformer",
        partial(as_rows, partial(mnist_sets, count=10_000)),
        lambda p: Transformer(14, 14, dropout=p),
        adamw(lr=2e-3),
        15,
        128,
        dropout=0.1,
    ),
    regression("concrete-mlp", partial(benchmark, "concrete"), 8, 60),
    regression("yacht-mlp", partial(benchmark, "yacht"), 6, 300),
    regression("wine-red-mlp", partial(benchmark, "wine"), 11, 15),
    regression("airfoil-mlp", partial(benchmark, "airfoil"), 5, 150),
    CIFAR,
    replace(CIFAR, name="cifar10-vgg16", model=lambda p: vgg16_bn(dropout=p), optimizer=sgd(lr=0.1, weight_decay=5e-4)),
    Pair(
        "mnist-overfitted",
        partial(mnist_sets, count=1000),
        dense(784, (256, 256), 10, True),
        adam(lr=1e-3),
        400,
        one_cycle=False,
    ),
    replace(
        FASHION,
        name="fashion-undertrained",
        model=cnn,
        optimizer=adam(lr=1e-3, weight_decay=1e-4),
        epochs=1,
        one_cycle=False,
    ),
)
LISTS = {"tune": TUNE, "test": TEST}
