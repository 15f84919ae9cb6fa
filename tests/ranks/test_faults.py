"""Ranks that are killed, under torchrun, and ranks that hang."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import CASES, launch, results

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]  # kills and hangs take minutes


def torchrun(out: Path, parallel: str, kills: int, seed: int = 0, within: float = 6.0) -> list[dict[str, Any]]:
    """A run of two ranks of which some rank is killed so many times."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = {"KILLS": str(kills), "KILL_SEED": str(seed), "KILL_WITHIN": str(within), "PARALLEL": parallel}
    chosen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo finds addresses of processes that are gone
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run",
         "--standalone", "--nproc-per-node", "2", "--max-restarts", str(3 * kills + 5),
         "--monitor-interval", "0.2", str(CASES), str(out), "killed"],
        env={**os.environ, **chosen, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120 + 90 * kills,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return results(2, out)


@pytest.mark.parametrize("parallel", ["chains", "data"])
def test_a_killed_rank_comes_back_and_the_run_ends_with_the_same_draws(tmp_path: Path, parallel: str) -> None:
    kills = int(os.environ.get("ISOSGD_KILLS", "2"))
    calm = torchrun(tmp_path / "calm", parallel, 0)
    disturbed = torchrun(tmp_path / "disturbed", parallel, kills)
    for rank in disturbed:
        assert rank["killed"]["hashes"] == calm[0]["killed"]["hashes"] and rank["killed"]["complete"]
    assert disturbed[0]["killed"]["kills"] > 0  # else nothing was tested


@pytest.mark.parametrize("case", ["hang_chains", "hang_data"])
def test_a_rank_that_hangs_is_named(tmp_path: Path, case: str) -> None:
    found = launch(2, tmp_path, case)
    assert found[0][case].startswith("RankError: rank 1 "), found[0][case]
