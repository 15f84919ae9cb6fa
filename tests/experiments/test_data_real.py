"""The published data sets themselves, where they are: in ISOSGD_DATA, or as shared data beside the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.data import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_MEAN,
    MNIST_STD,
    cifar10,
    mnist,
    notmnist,
    uci,
    uci_names,
)
from experiments.uci.scores import Scaled

SHARED = Path(__file__).resolve().parents[3] / "shared"

# Rows, features, splits, and the mean RMSE and log likelihood of tuned MC-dropout.
UCI = {
    "bostonHousing": (506, 13, 20, 2.90, -2.402),
    "concrete": (1030, 8, 20, 4.83, -2.937),
    "protein-tertiary-structure": (45730, 9, 5, 4.27, -2.871),
    "wine-quality-red": (1599, 11, 20, 0.622, -0.928),
    "yacht": (308, 6, 20, 0.666, -1.250),
}


@pytest.fixture(scope="module")
def root() -> Path:
    folder = Path(os.environ.get("ISOSGD_DATA") or SHARED / "data")
    if not folder.is_dir():
        pytest.skip("no data: set ISOSGD_DATA to the folder of the data sets (no shared data beside the checkout)")
    return folder


def need(root: Path, *folders: str) -> None:
    if not any((root / folder).is_dir() for folder in folders):
        pytest.skip(f"no {' or '.join(folders)} in the data root: set ISOSGD_DATA to a folder that has it")


@pytest.mark.parametrize(("split", "rows"), [("train", 60_000), ("test", 10_000)])
def test_mnist(root, split, rows):
    need(root, "MNIST", "mnist")
    images, labels = mnist(root, split)
    assert images.shape == (rows, 28, 28)
    assert labels[:5].tolist() == ([5, 0, 4, 1, 9] if split == "train" else [7, 2, 1, 0, 4])
    if split == "train":
        assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert float(images.float().mean() / 255) == pytest.approx(MNIST_MEAN, abs=5e-5)
        assert float(images.float().std() / 255) == pytest.approx(MNIST_STD, abs=5e-5)


def test_notmnist(root):
    need(root, "notMNIST_small", "notmnist")
    images, labels = notmnist(root)
    assert images.shape == (18_724, 28, 28)
    assert set(labels.bincount().tolist()) == {1872, 1873}


@pytest.mark.parametrize("name", UCI)
def test_uci(root, name):
    need(root, "uci")
    rows, features, splits, rmse, ll = UCI[name]
    assert name in uci_names(root)
    found = uci(name, root)
    assert found.x.shape == (rows, features)
    assert len(found.splits) == splits
    assert all(abs(len(train) - 0.9 * rows) <= 1 for train, _ in found.splits)
    assert float(found.gal["MC_rmse"].mean()) == pytest.approx(rmse, abs=6e-3)
    assert float(found.gal["ll"].mean()) == pytest.approx(ll, abs=6e-4)
    assert bool(Scaled(found, 0).x.isfinite().all())


@pytest.mark.slow
def test_cifar10(root, tmp_path):
    """From the binary files, which the shared data's own tool unpacks first."""
    if not (root / "cifar-10-batches-bin").is_dir():
        tool = SHARED / "tools" / "lay_data.py"
        if not tool.exists():
            pytest.skip("no cifar-10-batches-bin in the data root: set ISOSGD_DATA to a folder that has it")
        subprocess.run([sys.executable, str(tool), str(tmp_path), "cifar10"], check=True, capture_output=True)
        root = tmp_path
    images, labels = cifar10(root, "train")
    assert images.shape == (50_000, 3, 32, 32)
    assert labels.bincount().tolist() == [5000] * 10
    pixels = images.float() / 255
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(CIFAR10_MEAN), atol=5e-5)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(CIFAR10_STD), atol=1e-4)
    test_images, test_labels = cifar10(root, "test")
    assert test_images.shape == (10_000, 3, 32, 32)
    assert test_labels[:5].tolist() == [3, 8, 8, 0, 6]
