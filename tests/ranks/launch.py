"""Processes of a group, started and waited for."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("cases.py")


def launch(size: int, out: Path, *cases: str, seconds: float = 800.0, **more: str) -> list[dict[str, Any]]:
    """Run cases in ``size`` processes; what each rank found."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(CASES), str(out), *cases],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), **more},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [job.communicate(timeout=seconds)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert not any(job.returncode for job in jobs), "\n".join(said)[-4000:]
    return results(size, out)


def results(size: int, out: Path) -> list[dict[str, Any]]:
    """What each rank has written."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]
