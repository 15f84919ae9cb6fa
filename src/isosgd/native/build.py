"""Custom operations in C++, built once by the machine's compiler, which compiled steps need anyway.

Those of ``operations.cpp`` are called from compiled code only, often enough for the build to pay: with torch's headers
it takes half a minute. ``layers.cpp`` takes seconds. Without a compiler, or with ``ISOSGD_NATIVE=0``, everything works
more slowly. Builds are kept for later runs, in torch's folder for extensions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isosgd.errors import first_line

HERE = Path(__file__).parent
OPERATIONS, LAYERS = "operations.cpp", "layers.cpp"
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),  # NaNs stay NaNs
)
FEWEST = 16  # floats that a row must have: the longest vector of a processor (`LANES` in vectors.h)
SHAPES: dict[str, Callable[..., Any]] = {}


def shapes(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that returns empty tensors of an operation's shapes, for the compiler."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        SHAPES[name] = function
        return function

    return keep


def ready(*tensors: Tensor) -> bool:
    """Whether operations take such tensors, and are built or can be."""
    return fits(*tensors) and not unsupported_reason()


def fits(*tensors: Tensor) -> bool:
    """Whether operations take such tensors: float32 on a CPU."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def switched_off() -> str:
    """Why operations are not tried; empty if they are."""
    if os.environ.get("ISOSGD_NATIVE", "1").lower() in ("0", "no", "off", "false"):
        return f"ISOSGD_NATIVE={os.environ['ISOSGD_NATIVE']}"
    return "" if _compiler() else "there is no C++ compiler"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def unsupported_reason() -> str:
    """Builds the operations, unless they are built; returns why there are none. A constant for the compiler."""
    return _load()


@functools.cache
def _load() -> str:
    if reason := switched_off():
        return reason
    try:
        _opened(OPERATIONS, torch.ops.load_library)
        for name, function in SHAPES.items():
            torch.library.register_fake(f"isosgd::{name}", function)
    except Exception as error:  # of the compiler or the loader
        reason = _warned(error)
    return reason


@functools.cache
def layers() -> Any:
    """The library of ``layers.cpp``; None if it cannot be built."""
    if switched_off():
        return None
    try:
        library: ctypes.CDLL = _opened(LAYERS, ctypes.CDLL)
    except Exception as error:  # as above
        _warned(error)
        return None
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}
    calls = {"forward": "pp", "backward": "ppp", "gradient": "pnpppp"}
    calls |= {"steps": "pnppppp", "leapfrog": "pnppnpdnpppppp"}
    for name, more in calls.items():
        function = getattr(library, f"isosgd_{name}")
        function.argtypes, function.restype = [kinds[kind] for kind in "pnnppn" + more], None
    return library


def _opened(source: str, load: Callable[[str], Any]) -> Any:
    place = _built(source)
    try:
        return load(str(place))
    except OSError:  # built on another system, or truncated: build again
        place.unlink()
        return load(str(_built(source)))


def _warned(error: Exception) -> str:
    reason = first_line(error)
    warnings.warn(f"small networks are slower here than they could be: {reason}", RuntimeWarning, stacklevel=3)
    return reason


def _compiler() -> list[str]:
    """The command; empty when there is none."""
    given = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return shlex.split(given) if given else []


def _built(source: str) -> Path:
    root = Path(torch.__file__).parent
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [
        *_compiler(),
        *FLAGS,
        native,
        "-fopenmp" if source == OPERATIONS else "-fopenmp-simd",
        str(HERE / source),
    ]
    if source == OPERATIONS:
        command += [
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"),
            *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
        ]
    # Built for this processor, while home directories may be shared between machines.
    texts = [path.read_text() for path in (HERE / source, *sorted(HERE.glob("*.h")))]
    identity = "\n".join([*texts, torch.__version__, _processor(), *platform.libc_ver(), *command])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or home) / "isosgd"
    place = cache / f"{Path(source).stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / place.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                lines = done.stderr.splitlines() or ["without a message"]
                raise RuntimeError(f"{command[0]} failed: {next((x for x in lines if 'error' in x), lines[0])}")
            os.replace(made, place)
    return place


def _processor() -> str:
    """Its model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.processor()} {platform.node()}"
    fields = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))
