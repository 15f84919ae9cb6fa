"""Download of one file whose checksum is known."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from experiments.data.files import CHUNK, write_whole

LIMIT = 1 << 30


def fetch(
    url: str,
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    md5: str | None = None,
    timeout: float = 30.0,
    limit: int = LIMIT,
) -> Path:
    """Download ``url`` to ``path``; the file gets its name only once its checksum is right.

    A file that is there already is checked and kept. Progress goes to standard error.

    Args:
        url: an http or https address.
        path: the file to write; its folder is made.
        sha256: expected checksum in hexadecimal; exactly one of this and ``md5``.
        md5: likewise. Good against damage in transit, and all that some publishers give.
        timeout: seconds to wait for the server to say something.
        limit: stop after so many bytes.

    Returns:
        The path.

    Raises:
        ConnectionError: the server could not be reached, or broke off. Names where to put the file by hand.
        ValueError: what came, or what is there already, is not the file expected.
    """
    path = Path(path)
    name, expected = _checksum(sha256, md5)
    if not isinstance(url, str) or not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"url = {url!r} must start with http:// or https://")
    if path.exists():
        found = _digest(path, name)
        if found != expected:
            raise ValueError(
                f"{path} is there, but its {name} is {found}, expected {expected}; move it away to get it again"
            )
        return path
    write_whole(path, _verified(url, path, name, expected, timeout, limit))
    return path


def _checksum(sha256: str | None, md5: str | None) -> tuple[str, str]:
    given = {name: text for name, text in (("sha256", sha256), ("md5", md5)) if text is not None}
    if len(given) != 1:
        raise ValueError(f"give exactly one of sha256 and md5, got {' and '.join(given) or 'neither'}")
    ((name, text),) = given.items()
    length = 2 * hashlib.new(name, usedforsecurity=False).digest_size
    if not re.fullmatch(f"[0-9a-fA-F]{{{length}}}", text):
        raise ValueError(f"{name} = {text!r} must be {length} hexadecimal digits")
    return name, text.lower()


def _digest(path: Path, name: str) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is there, but it is not a file; move it away")
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False)).hexdigest()


def _verified(url: str, path: Path, name: str, expected: str, timeout: float, limit: int) -> Iterator[bytes]:
    """The chunks of the answer, then an error if their checksum is wrong."""
    digest = hashlib.new(name, usedforsecurity=False)
    for chunk in _body(url, path, timeout, limit):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != expected:
        raise ValueError(
            f"{url} gave a file with {name} {digest.hexdigest()}, expected {expected}: it was changed or damaged, and "
            f"nothing was kept; try again, or put the right file at {path}"
        )


def _body(url: str, path: Path, timeout: float, limit: int) -> Iterator[bytes]:
    """The chunks of the answer; every fault of the network becomes one error that says what to do."""
    by_hand = f"download {url} elsewhere and put it at {path}"
    done = 0
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            header = answer.headers.get("Content-Length") or ""
            length = int(header) if header.isdecimal() else None
            print(f"downloading {url}", file=sys.stderr)
            while chunk := answer.read(CHUNK):
                done += len(chunk)
                if done > limit:
                    raise ValueError(f"{url} sends more than {limit:,} bytes: it is not the file expected")
                _show(done, length)
                yield chunk
    except urllib.error.HTTPError as error:
        error.close()
        raise ConnectionError(f"{url} cannot be downloaded: the server says {error}; {by_hand}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url} cannot be downloaded: {reason}; without a network, {by_hand}") from error
    if length is not None and done != length:  # read() with a size does not complain by itself
        raise ConnectionError(f"{url} broke off after {done:,} of {length:,} bytes; try again, or {by_hand}")


def _show(done: int, length: int | None) -> None:
    """Redraw how far it is, on a terminal only."""
    if sys.stderr.isatty():
        share = f" of {length / 1e6:.1f}" if length else ""
        print(f"\r  {done / 1e6:.1f}{share} MB", end="\n" if done == length else "", file=sys.stderr, flush=True)
