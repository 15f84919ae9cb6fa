"""CIFAR-10 from its official binary files: a label byte, then 3,072 bytes of red, green and blue planes, a row."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.data.download import fetch
from experiments.data.files import BROKEN, read_exactly, write_whole
from experiments.data.mnist import check_labels
from experiments.data.root import Split, check_split, data_root, find

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of the training pixels on the scale 0 to 1, one for each colour."""

FOLDER = "cifar-10-batches-bin"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FILES: dict[str, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test": ("test_batch.bin",),
}
ROWS = 10_000  # in every file
ROW_BYTES = 1 + 3 * 32 * 32


def cifar10(
    root: str | os.PathLike[str] | None = None, split: Split = "train", *, download: bool = False
) -> tuple[Tensor, Tensor]:
    """Small colour photographs of ten kinds: 50,000 to train on and 10,000 to test.

    Args:
        root: data root (see `data_root`); the files lie in ``cifar-10-batches-bin`` there.
        split: ``"train"`` or ``"test"``.
        download: get and unpack the official archive (162 MB) when a file is missing. An archive that lies in the
            data root already is used; it is kept.

    Returns:
        Images, uint8 ``[N, 3, 32, 32]``, and labels 0 to 9, int64 ``[N]``.

    References:
        Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """
    check_split(split)
    folder = data_root(root, create=download)
    if download and not all((folder / FOLDER / name).is_file() for name in FILES[split]):
        archive = fetch(URL, folder / URL.rpartition("/")[2], md5=MD5)
        unpack(archive, folder)
    mend = f"pass download=True, or get {URL} and unpack it there"
    parts = [_rows(find(folder, [f"{FOLDER}/{name}"], mend)) for name in FILES[split]]
    rows = torch.cat(parts)
    labels = rows[:, 0].to(torch.int64)
    images = rows[:, 1:].reshape(-1, 3, 32, 32)
    check_labels(images, labels, folder / FOLDER)
    return images.contiguous(), labels


def _rows(path: Path) -> Tensor:
    size = path.stat().st_size
    if size != ROWS * ROW_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, expected {ROWS * ROW_BYTES:,} ({ROWS:,} rows of {ROW_BYTES:,}): it is "
            "truncated or not CIFAR-10's binary format; remove it and get it again"
        )
    return torch.from_numpy(np.fromfile(path, np.uint8).reshape(ROWS, ROW_BYTES))


def unpack(archive: Path, root: Path) -> None:
    """Unpack the data files of the official archive, and nothing else, into the root's folder.

    Only the six expected names are written, each a regular file of the right size; links and every other member are
    left alone, so that no archive can write elsewhere.
    """
    wanted = {f"{FOLDER}/{name}": root / FOLDER / name for names in FILES.values() for name in names}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if (path := wanted.pop(member.name, None)) is None:
                    continue
                stream = tar.extractfile(member) if member.isreg() else None
                if stream is None or member.size != ROWS * ROW_BYTES:
                    raise ValueError(f"{archive}: {member.name} is not a file of {ROWS * ROW_BYTES:,} bytes")
                write_whole(path, [read_exactly(stream, member.size, archive)])
    except (tarfile.TarError, *BROKEN) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}; remove it and get it again") from error
    if wanted:
        raise ValueError(f"{archive} does not hold {', '.join(sorted(wanted))}; remove it and get it again")
