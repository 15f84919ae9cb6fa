"""Where the data sets live, and finding a file there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "test"]

VARIABLE = "ISOSGD_DATA"


def data_root(given: str | os.PathLike[str] | None = None, *, create: bool = False) -> Path:
    """The folder of the data sets.

    Args:
        given: the folder; None for the one that the environment variable ``ISOSGD_DATA`` names, and without that
            ``isosgd/data`` in the user's cache (``XDG_CACHE_HOME``, else ``~/.cache``).
        create: make it if it does not exist.

    Raises:
        ValueError: the folder that was asked for does not exist or is not a folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data_root(folder) == Path(folder)
        True
    """
    if given is not None and not isinstance(given, str | os.PathLike):
        raise TypeError(f"the data root must be a path or None, got {given!r}")
    if given == "":
        raise ValueError("the data root is an empty string; name a folder, or pass None for the default one")
    if given is not None:
        root, told = Path(given).expanduser(), "the data root"
    elif named := os.environ.get(VARIABLE):
        root, told = Path(named).expanduser(), f"the data root that {VARIABLE} names"
    else:
        root, told = _cache() / "isosgd" / "data", ""
    if create:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"the data root {root} cannot be made: something else than a folder is there") from error
    elif told and not root.is_dir():  # a default that is not there yet is no mistake: the reader says what it misses
        raise ValueError(f"{told}, {root}, is no folder; make it, or name the folder that holds the data sets")
    return root


def check_split(split: str) -> None:
    """Refuse a split that is neither train nor test."""
    if split not in get_args(Split):
        raise ValueError(f"split = {split!r} is not known; choose 'train' or 'test'")


def find(root: Path, places: Sequence[str], mend: str) -> Path:
    """The first of some relative paths that is a file under ``root``.

    Args:
        root: the data root.
        places: paths relative to it, the one to recommend first.
        mend: what the user can do when there is none, told in the error.
    """
    for place in places:
        if (root / place).is_file():
            return root / place
    raise FileNotFoundError(f"{root / places[0]} is not there (looked for {', '.join(places)} in {root}); {mend}")


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return cache if cache.is_absolute() else Path.home() / ".cache"  # the standard says to pass over a relative one
