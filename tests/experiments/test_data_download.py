"""Downloads from a server in a thread: right, wrong, broken off, endless, and no server at all."""

import contextlib
import gzip
import hashlib
import http.server
import importlib
import io
import socket
import struct
import tarfile
import threading

import pytest
import torch

from experiments.data import cifar10, fetch, mnist

BODY = bytes(range(256)) * 8192  # more than one chunk
SHA256, MD5 = hashlib.sha256(BODY).hexdigest(), hashlib.md5(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path in self.server.files:
            self.answer(self.server.files[self.path])
        elif self.path == "/truncated":
            self.answer(BODY[:-1], length=len(BODY))
        elif self.path == "/truncated-unannounced":
            self.answer(BODY[:-1], length=None)
        elif self.path == "/endless":
            self.answer(BODY * 8, length=None)
        elif self.path == "/silent":
            self.server.release.wait(10)
        elif self.path == "/nonsense":
            self.wfile.write(b"this is not HTTP\r\n\r\n")
        else:
            self.send_error(404)

    def answer(self, body: bytes, length: int | None = -1) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length == -1 else length))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client may have heard enough
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.files, served.asked, served.release = {"/good": BODY}, [], threading.Event()
    served.url = f"http://127.0.0.1:{served.server_address[1]}"
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.release.set()
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.mark.parametrize("checksum", [{"sha256": SHA256}, {"md5": MD5}, {"md5": MD5.upper()}], ids=str)
def test_a_good_file_gets_its_name(server, tmp_path, capsys, checksum):
    path = tmp_path / "new" / "file"
    assert fetch(f"{server.url}/good", path, **checksum) == path
    assert path.read_bytes() == BODY
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    assert f"downloading {server.url}/good" in capsys.readouterr().err


def test_a_file_that_is_there_is_checked_and_kept(server, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(BODY)
    fetch(f"{server.url}/good", path, sha256=SHA256)
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="move it away"):
        fetch(f"{server.url}/good", path, sha256=SHA256)
    assert path.read_bytes() == b"mine"
    assert server.asked == []
    with pytest.raises(ValueError, match="not a file"):
        fetch(f"{server.url}/good", tmp_path, sha256=SHA256)


@pytest.mark.parametrize(
    ("page", "error", "fault"),
    [
        ("/truncated", ConnectionError, "broke off after 2,097,151 of 2,097,152 bytes"),
        ("/truncated-unannounced", ValueError, f"expected {SHA256}"),
        ("/endless", ValueError, "more than 4,000,000 bytes"),
        ("/absent", ConnectionError, "404"),
        ("/silent", ConnectionError, "timed out"),
        ("/nonsense", ConnectionError, "cannot be downloaded"),
    ],
)
def test_a_bad_answer_leaves_nothing(server, tmp_path, page, error, fault):
    path = tmp_path / "file"
    with pytest.raises(error, match=fault) as caught:
        fetch(server.url + page, path, sha256=SHA256, timeout=0.3, limit=4_000_000)
    assert server.url + page in str(caught.value)
    if page != "/endless":
        assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(ValueError, match=f"{SHA256}, expected {'0' * 64}") as caught:
        fetch(f"{server.url}/good", tmp_path / "file", sha256="0" * 64)
    assert str(tmp_path / "file") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_error_says_where_to_put_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/file"
        with pytest.raises(ConnectionError, match="without a network") as caught:
            fetch(url, tmp_path / "file", md5=MD5)
    assert f"download {url} elsewhere and put it at {tmp_path / 'file'}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "neither"),
        ({"md5": MD5, "sha256": SHA256}, "sha256 and md5"),
        ({"md5": SHA256}, "32 hexadecimal digits"),
        ({"sha256": "x" * 64}, "64 hexadecimal digits"),
        ({"md5": MD5, "url": "file:///etc/hostname"}, "must start with http"),
        ({"md5": MD5, "url": None}, "must start with http"),
    ],
    ids=str,
)
def test_bad_arguments(tmp_path, arguments, fault):
    with pytest.raises(ValueError, match=fault):
        fetch(**{"url": "http://127.0.0.1:1/x", "path": tmp_path / "file", **arguments})


# The sets that can be downloaded, with files of our own in place of the published ones


def test_mnist_downloads_what_is_missing(server, tmp_path, monkeypatch):
    module = importlib.import_module("experiments.data.mnist")
    images = gzip.compress(b"\0\0\x08\3" + struct.pack(">3I", 2, 28, 28) + bytes(2 * 28 * 28))
    labels = gzip.compress(b"\0\0\x08\1" + struct.pack(">I", 2) + b"\7\1")
    files = {"t10k-images-idx3-ubyte.gz": images, "t10k-labels-idx1-ubyte.gz": labels}
    server.files = {f"/{name}": body for name, body in files.items()}
    md5 = {name: hashlib.md5(body).hexdigest() for name, body in files.items()}
    monkeypatch.setattr(module, "URL", f"{server.url}/")
    monkeypatch.setattr(module, "MD5", md5)
    root = tmp_path / "root"
    for _ in range(2):
        found = mnist(root, "test", download=True)
        assert found[0].shape == (2, 28, 28)
        assert found[1].tolist() == [7, 1]
    assert server.asked == [f"/{name}" for name in files]  # the second time nothing was missing
    assert sorted(p.name for p in (root / "MNIST" / "raw").iterdir()) == sorted(files)


def test_cifar_downloads_and_unpacks(server, tmp_path, monkeypatch):
    module = importlib.import_module("experiments.data.cifar")
    monkeypatch.setattr(module, "ROWS", 1)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for i, name in enumerate([*module.FILES["train"], "test_batch.bin", "../escaped.bin", "batches.meta.txt"]):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 3073
            tar.addfile(info, io.BytesIO(bytes([i]) + bytes([10 * i]) * 3072))
    server.files["/cifar-10-binary.tar.gz"] = content.getvalue()
    monkeypatch.setattr(module, "URL", f"{server.url}/cifar-10-binary.tar.gz")
    monkeypatch.setattr(module, "MD5", hashlib.md5(content.getvalue()).hexdigest())
    images, labels = cifar10(tmp_path, "train", download=True)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(images[:, 0, 0, 0], torch.tensor([0, 10, 20, 30, 40], dtype=torch.uint8))
    assert cifar10(tmp_path, "test", download=True)[1].tolist() == [5]
    assert server.asked == ["/cifar-10-binary.tar.gz"]
    written = sorted(p.name for p in (tmp_path / "cifar-10-batches-bin").iterdir())
    assert written == sorted([*module.FILES["train"], "test_batch.bin"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
