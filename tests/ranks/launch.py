"""Processes of a group, started and waited for."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("cases.py")


def launch(size: int, out: Path, *cases: str, seconds: float = 300.0) -> list[dict[str, Any]]:
    """Run cases in ``size`` processes; what each rank found."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, str(CASES), str(out), *cases],
        env={name: value for name, value in os.environ.items() if name != "RANK"} | own,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the ranks can be ended with the process that forks them
    )
    try:
        said = job.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGUSR1)  # all ranks say where they are
        time.sleep(2)
        os.killpg(job.pid, signal.SIGKILL)
        done = {path.stem: json.loads(path.read_text())["seconds"] for path in out.glob("?.json")}
        pytest.fail(
            f"no end after {seconds:.0f} s; seconds of each rank's cases: {done}\n{job.communicate()[1][-12000:]}"
        )
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 0, said[-4000:]
    return results(size, out)


def results(size: int, out: Path) -> list[dict[str, Any]]:
    """What each rank has written."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


def launch_once(factory: pytest.TempPathFactory, size: int, *cases: str) -> tuple[list[dict[str, Any]], Path]:
    """As `launch`, once for all workers of pytest: the others wait. Also where files of the cases lie."""
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    out, done = folder / f"ranks-{size}", folder / f"ranks-{size}.done"
    with (folder / f"ranks-{size}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not done.exists():
            try:
                launch(size, out, *cases)
            except BaseException as error:  # said by every worker, but waited for once
                done.write_text(str(error) or type(error).__name__)
                raise
            done.touch()
    if failed := done.read_text():
        pytest.fail(failed)
    return results(size, out), out
