"""What all tests share: one thread, no display, fixed generators."""

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn without a display
torch.set_num_threads(1)  # tiny tensors run faster, and sums come out the same on every machine

# Same examples on every run; an example's time says more about the machine than about the code.
settings.register_profile("isosgd", derandomize=True, deadline=None)
settings.load_profile("isosgd")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Code that forgets its generator still gives the same result on every run."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator on the CPU."""
    return torch.Generator().manual_seed(0)
