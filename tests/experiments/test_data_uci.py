"""Regression sets in the layout of the UCI benchmark: packed and open, incomplete and hostile."""

import io
import lzma
import tarfile

import numpy as np
import pytest
import torch

from experiments.data import uci, uci_names

TABLE = np.random.default_rng(0).normal(size=(10, 4))
SPLITS = [([0, 1, 2, 3, 4, 5, 6, 7], [8, 9]), ([9, 8, 7, 6, 5, 4, 3], [0, 1, 2])]
GAL = "gal_results/test_{}_100_xepochs_1_hidden_layers.txt"


def write(folder, **changes):
    """A good set; ``changes`` replace a file's text, or leave it out when None."""
    lines = {
        "data": "\n".join(" ".join(map(repr, row)) for row in TABLE.tolist()),
        "index_features": "0\n3\n1",
        "index_target": "2",
        "n_splits": "2",
    }
    for k, (train, test) in enumerate(SPLITS):
        lines[f"index_train_{k}"] = "\n".join(map(str, train))
        lines[f"index_test_{k}"] = "\n".join(f"{i:.6e}" for i in test)  # some of the published files are like this
    folder.mkdir(parents=True)
    for name, text in (lines | changes).items():
        if text is not None:
            (folder / f"{name}.txt").write_text(text + "\n")
    return folder


def pack(folder, change=lambda info: None):
    """Pack a set as the compact copies are: data.txt.xz, and the splits in one archive."""
    data = folder / "data.txt"
    (folder / "data.txt.xz").write_bytes(lzma.compress(data.read_bytes()))
    data.unlink()
    with tarfile.open(folder / "splits.tar.xz", "w:xz") as tar:
        for path in sorted(folder.glob("index_t*_*.txt")):
            info = tarfile.TarInfo(path.name)
            info.size = path.stat().st_size
            change(info)
            tar.addfile(info, io.BytesIO(path.read_bytes()) if info.isreg() else None)
            path.unlink()


@pytest.mark.parametrize("packed", [False, True], ids=["open", "packed"])
@pytest.mark.parametrize("place", ["uci/mine", "mine"])
def test_a_set_is_read(tmp_path, place, packed):
    folder = write(tmp_path / place)
    if packed:
        pack(folder)
    found = uci("mine", tmp_path)
    assert uci_names(tmp_path) == ["mine"]
    assert found.name == "mine"
    assert (found.x.dtype, found.y.dtype) == (torch.float64, torch.float64)
    assert torch.equal(found.x, torch.from_numpy(TABLE[:, [0, 3, 1]]))
    assert torch.equal(found.y, torch.from_numpy(TABLE[:, 2]))
    assert [(a.tolist(), b.tolist()) for a, b in found.splits] == SPLITS
    assert found.splits[0][0].dtype == torch.int64
    assert found.gal == {}


def test_splits_are_counted_without_a_file_that_says_so(tmp_path):
    write(tmp_path / "mine", n_splits=None)
    assert len(uci("mine", tmp_path).splits) == 2


def test_published_results_come_along(tmp_path):
    folder = write(tmp_path / "uci" / "mine")
    (folder / "gal_results").mkdir()
    (folder / GAL.format("MC_rmse")).write_text("1.5\n2.5\n")
    (folder / GAL.format("ll")).write_text("-1\n-2\n")
    gal = uci("mine", tmp_path).gal
    assert {key: value.tolist() for key, value in gal.items()} == {"MC_rmse": [1.5, 2.5], "ll": [-1.0, -2.0]}
    (folder / GAL.format("tau")).write_text("1\n2\n3\n")
    with pytest.raises(ValueError, match="3 values for 2 splits"):
        uci("mine", tmp_path)


def test_names_are_found_in_both_places_and_short_names_work(tmp_path):
    write(tmp_path / "uci" / "bostonHousing")
    write(tmp_path / "mine")
    (tmp_path / "uci" / "empty").mkdir()
    (tmp_path / "uci" / "file.txt").write_text("")
    assert uci_names(tmp_path) == ["bostonHousing", "mine"]
    assert uci("Boston", tmp_path).name == "bostonHousing"
    assert uci("bostonHousing", tmp_path).name == "bostonHousing"


@pytest.mark.parametrize("name", ["missing", "../mine", "uci/mine", "", ".", None])
def test_an_unknown_set_lists_those_there_are(tmp_path, name):
    write(tmp_path / "uci" / "mine")
    with pytest.raises(ValueError, match=r"there is no set .* it has \['mine'\]"):
        uci(name, tmp_path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"data": ""}, "data.txt is empty"),
        ({"data": "1 2 3 4\n1 2 3"}, "not a table of numbers"),
        ({"data": "1 2 x 4"}, "not a table of numbers"),
        ({"data": "1 2 3 4\n1 2 nan 4"}, "row 1: not all values are finite"),
        ({"data": "1 2 inf 4"}, "row 0: not all values are finite"),
        ({"index_features": "0\n1\n2"}, "must not be a feature"),
        ({"index_features": "0\n4"}, "expected indices from 0 to 3"),
        ({"index_features": "0\n-1"}, "expected indices from 0 to 3"),
        ({"index_features": "0\n0.5"}, "expected indices from 0 to 3"),
        ({"index_features": "0\nnan"}, "expected indices from 0 to 3"),
        ({"index_features": "0\n0"}, "names an index twice"),
        ({"index_target": "2\n3"}, "must be one target"),
        ({"n_splits": "0"}, "expected one number of splits"),
        ({"n_splits": "1.5"}, "expected one number of splits"),
        ({"n_splits": "1e9"}, "expected one number of splits"),
        ({"index_test_1": "0\n1"}, "split 1: row 2 is in neither part"),
        ({"index_test_1": "0\n1\n2\n3"}, "split 1: row 3 is in both"),
        ({"index_test_0": "8\n9\n10"}, "expected indices from 0 to 9"),
        ({"index_test_0": ""}, "index_test_0.txt is empty"),
        ({"index_train_0": "0\n0\n1\n2\n3\n4\n5\n6\n7"}, "names an index twice"),
    ],
    ids=str,
)
def test_a_faulty_set_is_refused(tmp_path, changes, fault):
    folder = write(tmp_path / "uci" / "mine", **changes)
    with pytest.raises(ValueError, match=fault) as caught:
        uci("mine", tmp_path)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("missing", ["index_features", "index_train_1", "index_test_0"])
def test_an_incomplete_set_names_the_file(tmp_path, missing):
    write(tmp_path / "uci" / "mine", **{missing: None})
    with pytest.raises(FileNotFoundError, match=f"{missing}.txt is not there"):
        uci("mine", tmp_path)


def test_a_set_without_splits_is_refused(tmp_path):
    names = [f"index_{part}_{k}" for part in ("train", "test") for k in (0, 1)]
    write(tmp_path / "uci" / "mine", n_splits=None, **dict.fromkeys(names))
    with pytest.raises(FileNotFoundError, match="needs one split at least"):
        uci("mine", tmp_path)


@pytest.mark.parametrize("file", ["data.txt.xz", "splits.tar.xz"])
def test_a_damaged_archive_is_refused(tmp_path, file):
    folder = write(tmp_path / "uci" / "mine")
    pack(folder)
    whole = (folder / file).read_bytes()
    for content in (whole[:-20], whole[:4], b"text", lzma.compress(b"x" * 5000)):
        (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=file.removesuffix(".xz")):
            uci("mine", tmp_path)


def test_an_archive_of_links_gives_no_files(tmp_path):
    def link(info):
        info.type, info.linkname, info.size = tarfile.SYMTYPE, "../../../secret", 0

    folder = write(tmp_path / "uci" / "mine")
    pack(folder, link)
    with pytest.raises(FileNotFoundError, match=r"index_train_0\.txt is not there"):
        uci("mine", tmp_path)


def test_an_archive_too_large_is_refused(tmp_path, monkeypatch):
    import importlib

    monkeypatch.setattr(importlib.import_module("experiments.data.uci"), "LIMIT", 1000)
    folder = write(tmp_path / "uci" / "mine")
    pack(folder)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        uci("mine", tmp_path)
