"""notMNIST: letters A to J in many typefaces, the usual data from elsewhere for a model of MNIST."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.data.files import BROKEN, read_exactly
from experiments.data.mnist import check_labels
from experiments.data.root import data_root, find

LIMIT = 1 << 30
PLACES = ("notMNIST_small/notmnist_small.npz", "notmnist/notmnist_small.npz")


def notmnist(root: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """The small, hand-cleaned notMNIST set: 18,724 images.

    It is read from ``notMNIST_small/notmnist_small.npz`` or ``notmnist/notmnist_small.npz`` under the data root, which
    holds the arrays ``images``, uint8 ``[N, 28, 28]``, and ``labels``, uint8 ``[N]``. There is no download: the set is
    published as a folder of PNG files, some of them broken, without a checksum.

    Returns:
        Images, uint8 ``[N, 28, 28]``, and labels, int64 ``[N]``, 0 to 9 for A to J.

    References:
        Bulatov, notMNIST dataset, 2011.
    """
    mend = (
        "notMNIST has no download with a checksum: save the images of notMNIST_small there by "
        "numpy.savez_compressed(path, images=..., labels=...)"
    )
    path = find(data_root(root), PLACES, mend)
    try:
        with zipfile.ZipFile(path) as archive:
            images = _array(archive, "images.npy", (None, 28, 28), path)
            labels = _array(archive, "labels.npy", (None,), path)
    except BROKEN as error:
        raise ValueError(f"{path} is not a readable npz file ({error}); {mend}") from error
    check_labels(images, labels, path)
    return images, labels.to(torch.int64)


def _array(archive: zipfile.ZipFile, member: str, like: tuple[int | None, ...], path: Path) -> Tensor:
    """One uint8 array of an npz file. Its header is judged before anything is unpacked, which numpy.load would not."""
    try:
        info = archive.getinfo(member)
    except KeyError:
        raise ValueError(
            f"{path} has no array {member.removesuffix('.npy')!r}; it holds {archive.namelist()}"
        ) from None
    with archive.open(info) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = read_header[version](stream)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{member} in {path} is not a plain npy array: {error}") from error
        sizes_match = len(shape) == len(like) and all(
            want in (None, size) for want, size in zip(like, shape, strict=True)
        )
        if dtype != np.uint8 or fortran or not sizes_match or not 0 < math.prod(shape) <= LIMIT:
            want = ["N" if size is None else size for size in like]
            raise ValueError(
                f"{member} in {path} is {dtype} of sizes {shape}; expected uint8, {want}, in row-major order"
            )
        return torch.frombuffer(read_exactly(stream, math.prod(shape), path), dtype=torch.uint8).reshape(shape)
