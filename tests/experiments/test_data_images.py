"""Readers of the image sets on files made here: good, incomplete and hostile."""

import gzip
import importlib
import io
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from experiments.data import cifar10, mnist, notmnist

cifar = importlib.import_module("experiments.data.cifar")


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


IMAGES = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
LABELS = np.array([9, 0, 4], np.uint8)


def lay(folder, images=IMAGES, labels=LABELS, part="train", pack=gzip.compress, suffix=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
    (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))


# MNIST


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist"])
@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, ".gz"), (bytes, "")])
def test_mnist_reads_every_layout(tmp_path, folder, pack, suffix):
    lay(tmp_path / folder, pack=pack, suffix=suffix)
    lay(tmp_path / folder, 255 - IMAGES[:2], LABELS[:2], "t10k", pack, suffix)
    images, labels = mnist(tmp_path, "train")
    assert torch.equal(images, torch.from_numpy(IMAGES))
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert labels.tolist() == [9, 0, 4]
    assert torch.equal(mnist(tmp_path, "test")[0], torch.from_numpy(255 - IMAGES[:2]))


def test_mnist_takes_its_root_from_the_environment(tmp_path, monkeypatch):
    lay(tmp_path / "mnist")
    monkeypatch.setenv("ISOSGD_DATA", str(tmp_path))
    assert mnist()[1].tolist() == [9, 0, 4]


def test_a_missing_set_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pass download=True, or get https://\S+train-images") as caught:
        mnist(tmp_path, "train")
    assert str(tmp_path) in str(caught.value)


def test_a_default_root_that_is_not_there_yet_says_so_too(tmp_path, monkeypatch):
    monkeypatch.delenv("ISOSGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="download=True"):
        mnist()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("images", "labels", "fault"),
    [
        (IMAGES, LABELS[:2], "labels of sizes"),
        (IMAGES, LABELS[:, None], "labels of sizes"),
        (IMAGES[:, :27], LABELS, r"expected \[N, 28, 28\]"),
        (IMAGES[0], LABELS, r"expected \[N, 28, 28\]"),
        (IMAGES, LABELS + 1, "a label 10"),
    ],
)
def test_mnist_refuses_parts_that_do_not_fit(tmp_path, images, labels, fault):
    lay(tmp_path / "mnist", images, labels)
    with pytest.raises(ValueError, match=fault):
        mnist(tmp_path, "train")


@pytest.mark.parametrize("reader", [mnist, cifar10])
def test_only_train_and_test_exist(tmp_path, reader):
    with pytest.raises(ValueError, match="split = 'validation'"):
        mnist(tmp_path, "validation")


# notMNIST


def save_notmnist(root, folder="notMNIST_small", **arrays):
    (root / folder).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(root / folder / "notmnist_small.npz", **arrays)


@pytest.mark.parametrize("folder", ["notMNIST_small", "notmnist"])
def test_notmnist_reads_both_layouts(tmp_path, folder):
    save_notmnist(tmp_path, folder, images=IMAGES, labels=LABELS)
    images, labels = notmnist(tmp_path)
    assert torch.equal(images, torch.from_numpy(IMAGES))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [9, 0, 4]


def test_a_missing_notmnist_says_what_to_put_where(tmp_path):
    with pytest.raises(FileNotFoundError, match="savez_compressed"):
        notmnist(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        ({"images": IMAGES}, "no array 'labels'"),
        ({"images": IMAGES.astype(np.float32), "labels": LABELS}, "is float32"),
        ({"images": IMAGES[:, :5], "labels": LABELS}, r"expected uint8, \['N', 28, 28\]"),
        ({"images": IMAGES[0], "labels": LABELS}, r"expected uint8"),
        ({"images": np.asfortranarray(IMAGES), "labels": LABELS}, "row-major"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "expected uint8"),
        ({"images": IMAGES, "labels": LABELS[:2]}, "labels of sizes"),
        ({"images": IMAGES, "labels": LABELS + 5}, "a label 14"),
        ({"images": np.array([{}], dtype=object), "labels": LABELS}, "is object"),
    ],
)
def test_notmnist_refuses(tmp_path, arrays, fault):
    save_notmnist(tmp_path, **arrays)
    with pytest.raises(ValueError, match=fault):
        notmnist(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"\x80\x04]\x94."], ids=["empty", "text", "pickle"])
def test_notmnist_refuses_what_is_no_archive(tmp_path, content):
    (tmp_path / "notmnist").mkdir()
    (tmp_path / "notmnist" / "notmnist_small.npz").write_bytes(content)
    with pytest.raises(ValueError, match="not a readable npz file"):
        notmnist(tmp_path)


@pytest.mark.parametrize("member", [b"text", b"\x93NUMPY\x09\x09", b"\x80\x04]\x94."])
def test_notmnist_refuses_what_is_no_array(tmp_path, member):
    (tmp_path / "notmnist").mkdir()
    with zipfile.ZipFile(tmp_path / "notmnist" / "notmnist_small.npz", "w") as archive:
        archive.writestr("images.npy", member)
    with pytest.raises(ValueError, match=r"not a plain npy array"):
        notmnist(tmp_path)


def test_notmnist_unpacks_no_more_than_its_header_promises(tmp_path):
    (tmp_path / "notmnist").mkdir()
    header = io.BytesIO()
    np.save(header, IMAGES)
    path = tmp_path / "notmnist" / "notmnist_small.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(1 << 26))
    del header
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than the 2,352 bytes"):
            notmnist(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


# CIFAR-10


@pytest.fixture
def four_rows(monkeypatch):
    """Files of four rows instead of ten thousand."""
    monkeypatch.setattr(cifar, "ROWS", 4)


def lay_cifar(root, label=None):
    rows = np.random.default_rng(1).integers(0, 256, (6, 4, 3073), dtype=np.uint8)
    rows[:, :, 0] %= 10
    if label is not None:
        rows[0, 2, 0] = label
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name, part in zip([*cifar.FILES["train"], *cifar.FILES["test"]], rows, strict=True):
        part.tofile(folder / name)
    return rows


def test_cifar_reads_the_binary_layout(tmp_path, four_rows):
    rows = lay_cifar(tmp_path)
    images, labels = cifar10(tmp_path, "train")
    assert images.shape == (20, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert labels.dtype == torch.int64
    assert labels.tolist() == rows[:5, :, 0].reshape(-1).tolist()
    # row 6 is row 2 of the second file; its green plane starts at byte 1 + 1024
    assert int(images[6, 1, 3, 5]) == rows[1, 2, 1 + 1024 + 3 * 32 + 5]
    test_images, test_labels = cifar10(tmp_path, "test")
    assert torch.equal(test_images.reshape(4, -1), torch.from_numpy(rows[5, :, 1:]))
    assert test_labels.tolist() == rows[5, :, 0].tolist()


@pytest.mark.parametrize("change", [-1, -3073, 1, 3073])
def test_cifar_refuses_a_file_of_another_length(tmp_path, four_rows, change):
    lay_cifar(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ValueError, match=f"data_batch_3.bin has {4 * 3073 + change:,} bytes, expected 12,292"):
        cifar10(tmp_path, "train")


def test_cifar_refuses_labels_and_missing_files(tmp_path, four_rows):
    lay_cifar(tmp_path, label=10)
    with pytest.raises(ValueError, match="a label 10"):
        cifar10(tmp_path, "train")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_5.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_5.bin is not there .* download=True"):
        cifar10(tmp_path, "train")


def archive(path, change=None):
    """An archive of the six files, the third of them as ``change(info)`` makes it."""
    with tarfile.open(path, "w:gz") as tar:
        for i, name in enumerate([*cifar.FILES["train"], *cifar.FILES["test"]]):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 4 * 3073
            if i == 2 and change is not None:
                info = change(info)
            tar.addfile(info, io.BytesIO(bytes(info.size)) if info.isreg() else None)
    return path


def _symlink(info):
    info.type, info.linkname, info.size = tarfile.SYMTYPE, "../../secret", 0
    return info


def _hardlink(info):
    info.type, info.linkname, info.size = tarfile.LNKTYPE, "cifar-10-batches-bin/data_batch_1.bin", 0
    return info


def _elsewhere(info):
    info.name = "cifar-10-batches-bin/../../" + info.name
    return info


def _absolute(info):
    info.name = "/" + info.name
    return info


def _long(info):
    info.size += 1
    return info


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_symlink, "data_batch_3.bin is not a file"),
        (_hardlink, "data_batch_3.bin is not a file"),
        (_long, "data_batch_3.bin is not a file of 12,292 bytes"),
        (_elsewhere, "does not hold cifar-10-batches-bin/data_batch_3.bin"),
        (_absolute, "does not hold cifar-10-batches-bin/data_batch_3.bin"),
    ],
)
def test_a_hostile_archive_writes_nothing_elsewhere(tmp_path, four_rows, change, fault):
    root = tmp_path / "outer" / "root"
    root.mkdir(parents=True)
    path = archive(tmp_path / "archive.tar.gz", change)
    with pytest.raises(ValueError, match=fault):
        cifar.unpack(path, root)
    assert not (root / "cifar-10-batches-bin" / "data_batch_3.bin").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["archive.tar.gz", "outer"]
    assert [p.name for p in (tmp_path / "outer").iterdir()] == ["root"]
    assert [p.name for p in root.iterdir()] == ["cifar-10-batches-bin"]


@pytest.mark.parametrize("content", [b"", b"text", gzip.compress(b"text", mtime=0)])
def test_what_is_no_archive_is_refused(tmp_path, four_rows, content):
    path = tmp_path / "archive.tar.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be unpacked|does not hold"):
        cifar.unpack(path, tmp_path)


def test_a_truncated_archive_is_refused(tmp_path, four_rows):
    path = archive(tmp_path / "archive.tar.gz")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"archive\.tar\.gz"):
        cifar.unpack(path, tmp_path)
