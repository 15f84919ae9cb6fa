"""The library of ``layers.cpp``, built once by the machine's C++ compiler.

Without a compiler, or with ``ISOSGD_NATIVE=0``, everything works more slowly. What was built is kept for later runs, in
torch's folder for extensions.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isosgd.errors import first_line

SOURCE = Path(__file__).with_name("layers.cpp")
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),  # NaNs stay NaNs
)


def fits(*tensors: Tensor) -> bool:
    """Whether the library takes such tensors: float32 on a CPU."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def switched_off() -> str:
    """Why the library is not built; empty if it may be."""
    if os.environ.get("ISOSGD_NATIVE", "1").lower() in ("0", "no", "off", "false"):
        return f"ISOSGD_NATIVE={os.environ['ISOSGD_NATIVE']}"
    return "" if _compiler() else "there is no C++ compiler"


@functools.cache
def layers() -> Any:
    """The library; None if it cannot be built."""
    if switched_off():
        return None
    try:
        library = _opened()
    except Exception as error:  # of the compiler or the loader
        message = f"small networks are slower here than they could be: {first_line(error)}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}
    calls = {"forward": "pp", "backward": "ppp", "gradient": "pnpppp"}
    calls |= {"steps": "pnppppp", "leapfrog": "pnppnpdnpppppp"}
    for name, more in calls.items():
        function = getattr(library, f"isosgd_{name}")
        function.argtypes, function.restype = [kinds[kind] for kind in "pnnppn" + more], None
    return library


def _opened() -> ctypes.CDLL:
    place = _built()
    try:
        return ctypes.CDLL(str(place))
    except OSError:  # built on another system, or truncated: build again
        place.unlink()
        return ctypes.CDLL(str(_built()))


def _compiler() -> list[str]:
    """The command; empty when there is none."""
    given = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return shlex.split(given) if given else []


def _built() -> Path:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [*_compiler(), *FLAGS, native, "-fopenmp-simd", str(SOURCE)]
    # Built for this processor, while home directories may be shared between machines; once for all clones.
    texts = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    identity = "\n".join([*texts, _processor(), *platform.libc_ver(), *command[:-1]])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or home) / "isosgd"
    place = cache / f"{SOURCE.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
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
