"""Targets and data that a user's script makes."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isosgd import Target

FILE = "script.json"
LARGEST = 1 << 20
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
    finally:
        sys.path.remove(str(path.resolve().parent))
    if not isinstance(target, Target):
        there = [n for n, value in vars(module).items() if isinstance(value, Target)]
        hint = f"; it has {', '.join(there)}" if there else ""
        raise ValueError(f"{path} has no isosgd.Target named {name!r}, nor a function that makes one{hint}")
    if data is None:
        raise ValueError(
            f"{path} has nothing named 'data': a tuple of tensors, a DataLoader, or a function that makes one"
        )
    return Script(path, name, target, data, heldout, getattr(module, "init", None))


def _made(found: Any) -> Any:
    return found() if callable(found) and not isinstance(found, Target) and not hasattr(found, "__iter__") else found
