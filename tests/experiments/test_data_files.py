"""Where data lives, streams that lie about their length, and idx files: good, truncated and hostile."""

import gzip
import io
import math
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.data import data_root, read_idx
from experiments.data.files import read_exactly, write_whole


def idx_bytes(values: torch.Tensor) -> bytes:
    sizes = struct.pack(f">{values.dim()}I", *values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + bytes(values.flatten().tolist())


VALUES = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
GOOD = idx_bytes(VALUES)


# The root


def test_the_argument_comes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOSGD_DATA", str(tmp_path / "elsewhere"))
    assert data_root(tmp_path) == tmp_path
    assert data_root(str(tmp_path)) == tmp_path


def test_the_environment_comes_before_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ISOSGD_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("ISOSGD_DATA")
    assert data_root() == tmp_path / "cache" / "isosgd" / "data"


def test_a_relative_cache_is_passed_over(monkeypatch):
    monkeypatch.delenv("ISOSGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_root() == Path.home() / ".cache" / "isosgd" / "data"


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=str(missing)):
        data_root(missing)
    monkeypatch.setenv("ISOSGD_DATA", str(missing))
    with pytest.raises(ValueError, match=f"ISOSGD_DATA names, {missing}"):
        data_root()
    assert data_root(create=True) == missing
    assert missing.is_dir()


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        data_root(file)
    for bad in (file, file / "inside"):
        with pytest.raises(ValueError, match="cannot be made"):
            data_root(bad, create=True)
    with pytest.raises(ValueError, match="empty string"):
        data_root("")
    with pytest.raises(TypeError, match="3"):
        data_root(3)


# Streams and whole files


@pytest.mark.parametrize(("count", "fault"), [(2, "more than the 2 bytes"), (4, "after 3 of 4 bytes")])
def test_read_exactly_refuses_other_lengths(count, fault):
    assert read_exactly(io.BytesIO(b"abc"), 3, Path("x")) == b"abc"
    with pytest.raises(ValueError, match=fault):
        read_exactly(io.BytesIO(b"abc"), count, Path("x"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    def broken():
        yield b"first"
        raise KeyboardInterrupt

    path = tmp_path / "folder" / "file"
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, broken())
    assert list(path.parent.iterdir()) == []
    write_whole(path, [b"first", b"second"])
    assert path.read_bytes() == b"firstsecond"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, broken())
    assert path.read_bytes() == b"firstsecond"  # an older file stays as it was


# idx files


@pytest.mark.parametrize("name", ["plain", "wrong_suffix.gz"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
def test_idx_reads_what_was_written(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(GOOD))
    found = read_idx(path)
    assert found.dtype == torch.uint8
    assert torch.equal(found, VALUES)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "inside its header"),
        (GOOD[:3], "inside its header"),
        (GOOD[:10], "inside its header"),
        (GOOD[:-1], "after 23 of 24|more than a file of its length"),
        (GOOD + b"\0", "more than the 24 bytes"),
        (b"\1" + GOOD[1:], "not an idx file"),
        (b"PK\3\4" + GOOD[4:], "not an idx file"),
        (b"\0\0\x0d" + GOOD[3:], "type 0x0d"),
        (b"\0\0\x08\0", "not an idx file"),
        (b"\0\0\x08\1" + struct.pack(">I", 0), "holds no values"),
        (b"\0\0\x08\1" + struct.pack(">I", 1 << 31), "the limit is"),
        (b"\0\0\x08\3" + struct.pack(">3I", 1 << 31, 1 << 31, 1 << 31), "the limit is"),
        (b"\0\0\x08\xff" + struct.pack(">255I", *[1 << 31] * 255), "the limit is"),
        (b"\0\0\x08\1" + struct.pack(">I", 1 << 29), "more than a file of its length"),
    ],
)
def test_idx_refuses(tmp_path, pack, content, fault):
    path = tmp_path / "file.idx"
    path.write_bytes(pack(content))
    with pytest.raises(ValueError, match=fault) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_idx_refuses_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=str(path)):
            read_idx(path)


@pytest.mark.parametrize("cut", [3, 12, 25, -9, -1])
def test_idx_refuses_a_truncated_gzip(tmp_path, cut):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(GOOD)[:cut])
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_idx(path)


def test_idx_checks_the_checksum_that_gzip_keeps(tmp_path):
    packed = bytearray(gzip.compress(GOOD))
    packed[-8] ^= 1  # first byte of the CRC
    path = tmp_path / "file.gz"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match="CRC"):
        read_idx(path)


@pytest.mark.parametrize("promised", [24, 1 << 25], ids=["small promise", "large promise"])
def test_idx_unpacks_no_more_than_promised(tmp_path, promised):
    """A packed file of 64 MB of zeros, whose header promises less, or whose content is far less than promised."""
    bomb = bytes(1 << 26) if promised == 24 else bytes(1 << 16)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\1" + struct.pack(">I", promised) + bomb))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"more than"):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@given(position=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_idx_survives_any_damage(tmp_path_factory, position, byte, cut):
    damaged = bytearray(GOOD)
    damaged[position] = byte
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(damaged[:cut])
    try:
        found = read_idx(path)
    except ValueError:
        return
    assert math.prod(found.shape) == 24
