"""The library in C++: built once, done without where it cannot be built, and draws the same with and without it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isosgd import load
from isosgd.native import build

pytestmark = pytest.mark.long  # it is built first
needs_compiler = pytest.mark.usefixtures("built")


@pytest.fixture
def built() -> None:
    if build.layers() is None:
        pytest.skip("there is no compiler")


def in_process(code: str, **environment: Any) -> str:
    """What another process prints, in which nothing has been built or loaded yet."""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout + found.stderr


RUN = """
import sys, warnings, torch
from isosgd import Target, likelihoods, priors, sample
from experiments.models import mlp
warnings.simplefilter("ignore")  # the warm-up is short, and `native` another
g = torch.Generator().manual_seed(0)
x, noise = torch.randn(200, 6, generator=g), torch.randn(200, 1, generator=g)
torch.manual_seed(0)
target = Target.from_module(mlp(6, 50, 1), likelihoods.Gaussian(0.1), priors.FanInNormal())
settings = {"chains": 10, "keep_every": 4, "warmup": 700, "seed": 1, "progress": False, "compile": True}
sample(target, (x, x[:, :1].sin() + 0.1 * noise), batch_size=100, structure="lowrank", **settings,
       store=sys.argv[1], draws=int(sys.argv[2]), resume=True)
"""


@pytest.mark.slow
@needs_compiler
def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    """Up to rounding: the same random numbers, the same steps, a Lambda with directions.

    Rounding grows with the steps: both go on from one and the same draw, and not for long.
    """

    def run(folder: Path, draws: int, switch: str) -> Tensor:
        code = f"import sys; sys.argv[1:] = {[str(folder), str(draws)]}\n" + RUN
        in_process(code, ISOSGD_NATIVE=switch)
        return load(folder).draws["0.weight"]

    run(tmp_path / "0", 1, "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    with_, without = (run(tmp_path / switch, 3, switch) for switch in "10")
    assert not torch.equal(with_, without)
    torch.testing.assert_close(with_, without, rtol=1e-5, atol=1e-5)


CACHED = """
import json, torch
from torch._dynamo.utils import counters
from isosgd import Target, likelihoods, priors, sample
from experiments.models import mlp
torch.manual_seed(0)
x = torch.randn(200, 6)
target = Target.from_module(mlp(6, 50, 1), likelihoods.Gaussian(0.1), priors.FanInNormal())
settings = {"chains": 10, "draws": 2, "keep_every": 4, "warmup": 600, "seed": 1, "progress": False, "compile": True}
sample(target, (x, x[:, :1]), batch_size=100, structure="lowrank", **settings)
print(json.dumps(counters["inductor"]))
"""


@pytest.mark.slow
@needs_compiler
def test_the_next_process_does_not_compile_again(tmp_path: Path) -> None:
    """Compiled loops are kept in the compiler's cache like other code."""
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CACHED],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ISOSGD_NATIVE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    first, second = found
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_hit"] >= first["fxgraph_cache_miss"]
    assert not second.get("fxgraph_cache_miss") and not second.get("fxgraph_cache_bypass")


# ------------------------------------------------------------------------------------------------ how it is built


LIBRARY = "from isosgd.native import build; print(build.layers() is not None)"


def test_it_can_be_switched_off() -> None:
    assert in_process(LIBRARY, ISOSGD_NATIVE=0).strip() == "False"


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_everything_goes_on(tmp_path: Path, compiler: str) -> None:
    said = in_process(LIBRARY, CXX=compiler, TORCH_EXTENSIONS_DIR=tmp_path)
    assert "RuntimeWarning: small networks are slower" in said and compiler in said and said.startswith("False")
    assert not list(tmp_path.glob("*/*.so"))


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that notes its calls; the first result is cut short where there is a file ``fails`` beside it."""
    real = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    script = tmp_path / "compiler"
    script.write_text(
        f"""#!/bin/sh
cd "$(dirname "$0")" && echo call >> calls
for last; do :; done
if [ -e fails ]; then rm fails; echo cut short > "$last"; else exec {real} "$@"; fi
"""
    )
    script.chmod(0o755)
    return script


def calls(compiler: Path) -> int:
    return len((compiler.parent / "calls").read_text().splitlines())


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path, compiler: Path) -> None:
    """As after a crash, or from another system."""
    (tmp_path / "fails").touch()
    assert in_process(LIBRARY, CXX=compiler, TORCH_EXTENSIONS_DIR=tmp_path / "built").strip() == "True"
    assert calls(compiler) == 2


ELSEWHERE = """
from pathlib import Path
read = Path.read_text
Path.read_text = lambda path, *given, **named: read(path, *given, **named) + (
    "\\nflags : other\\n" if str(path) == "/proc/cpuinfo" else ""
)
"""


@needs_compiler
def test_what_was_built_is_found_again(tmp_path: Path, compiler: Path) -> None:
    """One call of the compiler for all runs on a machine; nothing is found that another processor's would have made."""
    for code, times in ((LIBRARY, 1), (LIBRARY, 1), (ELSEWHERE + LIBRARY, 2)):
        assert in_process(code, CXX=compiler, TORCH_EXTENSIONS_DIR=tmp_path / "built").strip() == "True"
        assert calls(compiler) == times
