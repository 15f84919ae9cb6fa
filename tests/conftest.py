"""What all tests share: one thread, no display, fixed generators."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# A run begun in the background of a script ignores Ctrl-C, and so would everything it starts; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn without a display
torch.set_num_threads(1)  # tiny tensors run faster, and sums come out the same on every machine

# Same examples on every run; an example's time says more about the machine than about the code.
settings.register_profile("isosgd", derandomize=True, deadline=None)
settings.load_profile("isosgd")


LONG_DOCTESTS = {"isosgd"}  # the package's own: `sample` with nothing given; README.md begins in the same way


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Doctests have no marks of their own."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name in LONG_DOCTESTS:
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Code that forgets its generator still gives the same result on every run."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator on the CPU."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def written_at_once() -> Callable[[], AbstractContextManager[None]]:
    """A context in which a store writes every draw, and a checkpoint wherever there may be one.

    Otherwise a second passes between two writes, more than the runs of these tests take: no setting changes that.
    """

    @contextmanager
    def context() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("isosgd.store.writer.LEAST_WAIT", 0.0)
            yield

    return context


@pytest.fixture
def eager_store(written_at_once: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """`written_at_once` for a whole test."""
    with written_at_once():
        yield


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that leaves functions as they are: torch's takes tens of seconds. Slow tests compare the two."""
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the public data sets in their usual formats: ISOSGD_DATA, or laid out from beside the clone."""
    if root := os.environ.get("ISOSGD_DATA"):
        return Path(root)
    tool = Path(__file__).parents[2] / "shared" / "tools" / "lay_data.py"
    if not tool.exists():
        pytest.skip("no data: set ISOSGD_DATA to a folder that holds uci/<set>/data.txt and so on")
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(tool), str(folder), "uci"], check=True, capture_output=True)
    return folder
