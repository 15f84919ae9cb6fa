"""Public data sets as plain tensors, minibatches and augmentation where the data lives.

Every reader takes a ``root`` folder: the argument, else the environment variable ``ISOSGD_DATA``, else a folder in the
user's cache. Image sets come as uint8; `normalise` makes floats of a minibatch, so that a whole set fits a GPU.
"""

from isosgd.data.augment import crop_flip, jitter, minibatch, normalise
from isosgd.data.cifar import CIFAR10_MEAN, CIFAR10_STD, cifar10
from isosgd.data.download import fetch
from isosgd.data.idx import read_idx
from isosgd.data.mnist import MNIST_MEAN, MNIST_STD, fashion_mnist, mnist
from isosgd.data.notmnist import notmnist
from isosgd.data.root import data_root
from isosgd.data.scaling import Standardiser, standardise
from isosgd.data.uci import UCISet, uci
from isosgd.data.uci import names as uci_names

__all__ = [
    "CIFAR10_MEAN",
    "CIFAR10_STD",
    "MNIST_MEAN",
    "MNIST_STD",
    "Standardiser",
    "UCISet",
    "cifar10",
    "crop_flip",
    "data_root",
    "fashion_mnist",
    "fetch",
    "jitter",
    "minibatch",
    "mnist",
    "normalise",
    "notmnist",
    "read_idx",
    "standardise",
    "uci",
    "uci_names",
]
