"""Targets and data that a user's script makes."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isosgd import Target
from isosgd.commands.common import said
from isosgd.sampling.stored import settings_of

FILE = "script.json"
LARGEST = 1 << 20
USUAL: dict[str, Any] = {
    "method": "isgd", "draws": 100, "chains": 4, "batch_size": None, "keep_every": "auto", "warmup": "auto",
    "temperature": 1.0, "seed": 0, "store_dtype": None, "budget": None,
}  # fmt: skip
"""Settings of ``isosgd sample`` where nothing is said."""
SEED = 0  # of torch when a script is run, so that a network it makes is the same again when its run is resumed


@dataclass(frozen=True)
class Script:
    """What a script holds.

    Attributes:
        path: of the script.
        name: of the target in it.
        target: what to sample.
        data: to sample with.
        heldout: rows for the report, if the script has any.
        init: where chains start, if the script says.
    """

    path: Path
    name: str
    target: Target
    data: Any
    heldout: Any = None
    init: Any = None

    def save(self, folder: Path) -> None:
        """Leave a note in the folder of a run of where its target comes from."""
        text = json.dumps({"script": str(self.path.resolve()), "target": self.name}, indent=1)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def command_of(place: str, folder: Path) -> str:
    """The command that samples a script again with the settings of a run; empty where a command line cannot say them.

    Args:
        place: ``SCRIPT.py:name``.
        folder: of the run.
    """
    settings, opaque = settings_of(folder)
    if opaque:
        return ""
    words = ["isosgd", "sample", place, "--out", str(folder)]
    for name, usual in USUAL.items():
        if settings.get(name, usual) != usual:
            words += [f"--{name.replace('_', '-')}", str(settings[name])]
    for name, value in settings["options"].items():
        words += ["--option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def read_note(folder: Path) -> str:
    """``SCRIPT.py:target`` of a run, as `Script.save` left it."""
    path = folder / FILE
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        script, target = found["script"], found["target"]
        if not (isinstance(script, str) and isinstance(target, str)):
            raise TypeError("it does not name a script and a target")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not a note that isosgd wrote: {error or type(error).__name__}") from error
    place = Path(script)
    if not place.is_absolute() or place.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{path} names the script {script}, which would be run: pass --script {script}:{target} if you trust it"
        )
    return f"{script}:{target}"


def load_script(place: str) -> Script:
    """Run a script and take its target and data.

    The names ``data``, ``heldout`` and ``init`` are looked up beside the target. Each may be a function without
    arguments that makes it, but for ``init``, which `isosgd.sample` takes as it is.

    Args:
        place: ``SCRIPT.py:name`` of the target; ``target`` when no name is given.
    """
    file, _, name = place.partition(".py:")
    path, name = (Path(file + ".py"), name) if name else (Path(place.removesuffix(":")), "target")
    if not path.is_file():
        raise ValueError(f"there is no script {path}; name it as SCRIPT.py:target")
    spec = importlib.util.spec_from_file_location(f"isosgd_script_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import what lies beside it
    try:
        torch.manual_seed(SEED)
        spec.loader.exec_module(module)
        target = _made(getattr(module, name, None))
        data, heldout = (_made(getattr(module, what, None)) for what in ("data", "heldout"))
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise ValueError(f"{_where(path, error)}: {said(error)}; mend the script") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    if not isinstance(target, Target):
        there = [n for n, value in vars(module).items() if isinstance(value, Target)]
        hint = f"; it has {', '.join(there)}" if there else ""
        raise ValueError(f"{path} has no isosgd.Target named {name!r}, nor a function that makes one{hint}")
    if data is None or isinstance(data, str | bytes) or not hasattr(data, "__iter__"):
        what = "nothing named 'data'" if data is None else f"'data' of type {type(data).__name__}"
        raise ValueError(f"{path} has {what}: make it a tuple of tensors, a DataLoader, or a function that makes one")
    return Script(path, name, target, data, heldout, getattr(module, "init", None))


def _where(path: Path, error: BaseException) -> str:
    """The script, and the last of its lines that an error came through."""
    frames, whole = traceback.extract_tb(error.__traceback__), path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == whole]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _made(found: Any) -> Any:
    return found() if callable(found) and not isinstance(found, Target) and not hasattr(found, "__iter__") else found
