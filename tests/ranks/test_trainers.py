"""Lightning and Hugging Face's Trainer in two processes, under torchrun: what their callbacks sample there."""

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.ranks import cases
from tests.ranks.launch import CASES, results

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["lightning", "transformers"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip(request.param)
    out = tmp_path_factory.mktemp(request.param)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(CASES), str(out),
         request.param],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return [rank[request.param] for rank in results(2, out)]


@pytest.mark.parametrize("parallel", ["data", "chains"])
def test_processes_of_a_trainer_have_the_draws_of_sample(found: list[Any], parallel: str) -> None:
    first, second = (rank[parallel] for rank in found)
    assert first == second  # the network that was trained, too
    assert first["draws"] == first["again"] and len(first["draws"]) == (1 if parallel == "data" else 3)
    assert first["num_data"] == cases.ROWS and first["left"]
    assert first["engine"].startswith("each chain by 2 ranks" if parallel == "data" else "in turn")


def test_what_processes_of_a_trainer_cannot_share_is_refused_on_each(found: list[Any]) -> None:
    for rank in found:
        assert "sampling in 2 processes: say how they share it" in rank["not said"]
        assert "Sampler, which cannot be shared out" in rank["sampler"] or "SamplerWrapper, which" in rank["sampler"]
        assert "chains = 1 are fewer than the 2 ranks" in rank["few chains"]
        assert "Pass the data as tensors, or a temperature" in rank["auto"]


def test_a_sampler_as_the_optimizer_of_a_trainer_draws_one_chain_or_ends_with_an_error(found: list[Any]) -> None:
    assert found[0]["same noise"] == found[1]["same noise"]
    for rank in found:
        assert "give the optimizer of each rank a generator= of the same seed" in rank["own noise"]
