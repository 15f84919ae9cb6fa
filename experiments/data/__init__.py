"""Public data sets as plain tensors, and augmentation where the data lives.

Every reader takes a ``root`` folder: the argument, else the environment variable ``ISOSGD_DATA``, else a folder in the
user's cache. Image sets come as uint8, so that a whole set fits a GPU.
"""

from experiments.data.augment import crop_flip, jitter
from experiments.data.cifar import CIFAR10_MEAN, CIFAR10_STD, cifar10
from experiments.data.download import fetch
from experiments.data.idx import read_idx
from experiments.data.mnist import MNIST_MEAN, MNIST_STD, mnist
from experiments.data.notmnist import notmnist
from experiments.data.root import data_root
from experiments.data.uci import UCISet, uci
from experiments.data.uci import names as uci_names

__all__ = [
    "CIFAR10_MEAN",
    "CIFAR10_STD",
    "MNIST_MEAN",
    "MNIST_STD",
    "UCISet",
    "cifar10",
    "crop_flip",
    "data_root",
    "fetch",
    "jitter",
    "mnist",
    "notmnist",
    "read_idx",
    "uci",
    "uci_names",
]
