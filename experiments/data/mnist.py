"""MNIST from its idx files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from experiments.data.download import fetch
from experiments.data.idx import read_idx
from experiments.data.root import Split, check_split, data_root, find

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
"""Mean and standard deviation of MNIST's training pixels on the scale 0 to 1."""

CLASSES = 10


FOLDERS = ("MNIST/raw", "mnist")  # where the files may lie under the root, the usual place first
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # PyTorch's mirror; the first home of MNIST is gone
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def mnist(
    root: str | os.PathLike[str] | None = None, split: Split = "train", *, download: bool = False
) -> tuple[Tensor, Tensor]:
    """Handwritten digits: 60,000 images to train on and 10,000 to test.

    Args:
        root: data root (see `data_root`); the files lie in ``MNIST/raw`` or ``mnist`` there, compressed or not.
        split: ``"train"`` or ``"test"``.
        download: get the files that are missing, with their checksums verified.

    Returns:
        Images, uint8 ``[N, 28, 28]``, and labels 0 to 9, int64 ``[N]``.

    References:
        LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, 1998.
    """
    check_split(split)
    folder = data_root(root, create=download)
    part = {"train": "train", "test": "t10k"}[split]
    image_path = _file(folder, f"{part}-images-idx3-ubyte.gz", download)
    label_path = _file(folder, f"{part}-labels-idx1-ubyte.gz", download)
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.dim() != 3 or images.shape[1:] != (28, 28):
        raise ValueError(f"{image_path} has sizes {tuple(images.shape)}, expected [N, 28, 28]")
    check_labels(images, labels, label_path)
    return images, labels.to(torch.int64)


def _file(root: Path, name: str, download: bool) -> Path:
    places = [f"{folder}/{file}" for folder in FOLDERS for file in (name, name.removesuffix(".gz"))]
    try:
        return find(root, places, f"pass download=True, or get {URL}{name} and put it there")
    except FileNotFoundError:
        if not download:
            raise
    return fetch(URL + name, root / places[0], md5=MD5[name])


def check_labels(images: Tensor, labels: Tensor, path: Path) -> None:
    """Refuse labels that are not one class of ten for each image."""
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"{path} has labels of sizes {tuple(labels.shape)} for {len(images)} images; one each is needed"
        )
    if int(labels.max()) >= CLASSES:
        raise ValueError(f"{path} has a label {int(labels.max())}; classes are 0 to {CLASSES - 1}")
