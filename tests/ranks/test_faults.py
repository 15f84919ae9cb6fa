"""Ranks that are killed, under torchrun. ``ISOSGD_KILLS=20`` kills more often than the two times of every day."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.launch import CASES, results

KILLS = int(os.environ.get("ISOSGD_KILLS", "2"))
pytestmark = [pytest.mark.long, pytest.mark.timeout(300 + 60 * KILLS)]


@pytest.mark.parametrize(("case", "kinds"), [("killed", 2), ("killed_loops", 1)])
def test_a_killed_rank_comes_back_and_every_run_ends_with_the_same_draws(tmp_path: Path, case: str, kinds: int) -> None:
    chosen = {"KILLS": str(KILLS), "KILL_SEED": os.environ.get("ISOSGD_KILL_SEED", "0")}
    chosen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo finds addresses of processes that are gone
    # An attempt may also end because gloo finds no connection.
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run",
         "--standalone", "--nproc-per-node", "2", "--max-restarts", str(2 * KILLS + 5),
         "--monitor-interval", "0.1", str(CASES), str(tmp_path), case],
        env={**os.environ, **chosen, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240 + 60 * KILLS,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    for found in (rank[case] for rank in results(2, tmp_path)):
        runs = found["runs"]
        for number, one in enumerate(runs):
            assert one["complete"] and one["hashes"] == runs[number % kinds]["hashes"], (number, found["kills"])
    print(f"{len(found['kills'])} kills, {len(runs)} runs, {found['attempts']} attempts:", *found["kills"], sep="\n")
    assert len(found["kills"]) >= KILLS
