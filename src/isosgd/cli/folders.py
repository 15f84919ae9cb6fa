"""Folders of runs: a network on a table or the target of a script, its data, and its draws."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from isosgd import Posterior, Target, load
from isosgd.diagnostics.verdict import RUN_LONGER
from isosgd.errors import first_line
from isosgd.posterior.starts import STARTS
from isosgd.report import Subject, write_report
from isosgd.samplers import METHODS
from isosgd.sampling.stopping import MOST_DRAWS
from isosgd.sampling.stored import settings_of
from isosgd.store.draws import Damaged
from isosgd.store.manifest import Manifest

MANIFEST, MODEL, TABLE, SCRIPT = "manifest.json", "model.json", "table.json", "script.json"
REPORT = "report.html"
USUAL: dict[str, Any] = {
    "method": "isgd", "draws": 100, "chains": 4, "batch_size": None, "keep_every": "auto", "warmup": "auto",
    "temperature": 1.0, "seed": 0, "store_dtype": None, "budget": None,
}  # fmt: skip
"""Defaults of ``isosgd sample``."""
NOTED = {"target": "y", "source": "Python", "command": "", "longer": ""}  # notes of a table's run, and their defaults
# Command-line options in place of the Python arguments that advice names.
FIT_ADVICE = {
    RUN_LONGER: "more steps (--effort) or more chains (--chains)",
    ", a start closer to a mode (init=) or a larger batch_size=": "",
    " or a start closer to a mode (init=)": "",
    "A larger batch_size= or a longer warmup=": "More steps (--effort)",
    "a longer warmup=": "more steps (--effort)",
    "A longer warmup= or a smaller bias=": "More steps (--effort)",
    "lower the rate (bias=) or use a larger batch": "take more steps (--effort)",
    "max_seconds": "--minutes",
}
SAMPLE_ADVICE = {
    "draws=; in a loop of your own more steps": "--draws",
    "init=": "init in the script",
    "warmup=": "--warmup",
    "chains=": "--chains",
    "keep_every=": "--keep-every",
    "batch_size=": "--batch-size",
    "bias=": "--option bias=NUMBER",
    "structure='": "--option structure='",
    "max_seconds": "--minutes",
}
SEED = 0  # of torch when a script runs, so that a resumed run makes the same network


@dataclass(frozen=True)
class Run:
    """A run, with all that is needed to continue, predict and report.

    Attributes:
        heldout: rows left out, if any.
        init: where chains start, as `isosgd.sample` takes it.
        subject: names and units for the report.
        model: the estimator of a table; None for runs of scripts.
        command: the command that made the run of a table.
        place: ``SCRIPT.py:target`` of the run of a script.
        damaged: what to do with damaged files, as for `isosgd.load`.
    """

    folder: Path
    target: Target
    data: Any
    heldout: Any = None
    init: Any = None
    subject: Subject = field(default_factory=Subject)
    model: Any = None
    command: str = ""
    place: str = ""
    damaged: Damaged = "refuse"

    def posterior(self, as_drawn: bool = False) -> Posterior:
        """The draws so far, as `isosgd.load` gives them."""
        data = self.data if isinstance(self.data, tuple) else None
        found = load(self.folder, self.target, data=data, damaged=self.damaged, as_drawn=as_drawn)
        if not len(found):
            none = "has no draws yet" if self.damaged == "refuse" else "has no draws that are whole"
            raise ValueError(f"{self.folder} {none}; `isosgd resume {self.folder}` goes on")
        return found

    def judged(self) -> Posterior:
        """The draws that a verdict is about: those of the chains where these did not help, and the networks predict."""
        found = self.posterior()
        return self.posterior(as_drawn=True) if found.info.get("method") == STARTS else found

    def report(self, path: Path | None = None) -> Path:
        """Write the report; into the folder of the run by default."""
        data = self.data if isinstance(self.data, tuple) else None
        posterior = self.posterior()
        commands = [shown(line) for line in (*self.commands(), f"isosgd report {shlex.quote(str(self.folder))}")]
        return write_report(
            posterior, path or self.folder / REPORT, data=data, heldout=self.heldout,
            subject=replace(self.scored(), commands=commands, longer=shown(self.longer(posterior))),
        )  # fmt: skip

    def scored(self) -> Subject:
        """The subject, with the softmax temperature of the estimator's averages."""
        return replace(self.subject, softmax_temperature=getattr(self.model, "softmax_temperature_", 1.0))

    def commands(self) -> list[str]:
        """Commands that make the draws again; empty if a command line cannot express the settings."""
        if Manifest.read(self.folder).parts:
            return []
        if not self.command:
            line = command_of(self.place, self.folder) if self.place else ""
            return [line] if line else []
        from isosgd.tables.network import steps_for

        model, draws = self.model, settings_of(self.folder)[0].get("draws")
        begun = steps_for(len(self.data[0]), model.network_, model.chains, model.effort)["draws"]
        more = [f"isosgd resume {shlex.quote(str(self.folder))} --draws {draws}"]  # extensions of the run
        return [self.command, *(more if draws != begun else [])]

    def longer(self, posterior: Posterior) -> str:
        """The command for more draws if the warm-up has settled, else for a longer warm-up."""
        settings, _ = settings_of(self.folder)
        settled = all(report.get("settled", True) for report in posterior.info.get("warmup", []))
        if settings.get("method") not in METHODS or (self.subject.longer and not settled):
            return self.subject.longer
        name = "budget" if settings.get("draws") == "auto" else "draws"
        number = settings.get(name) or MOST_DRAWS
        return f"isosgd resume {shlex.quote(str(self.folder))} --{name} {4 * number}"


def open_run(folder: Path, script: str | None = None, drop_damaged: bool = False) -> Run:
    """The run in a folder, written by ``fit``, ``sample`` or `isosgd.sample` with ``store=``.

    Args:
        script: ``SCRIPT.py:target`` that makes target and data, for runs from Python.
        drop_damaged: ignore draws in damaged files.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of a run; `isosgd fit` and `isosgd sample` make one")
    damaged: Damaged = "drop" if drop_damaged else "refuse"
    if script is None and (folder / MODEL).exists():
        if not (folder / MANIFEST).exists():
            again = f"fit again: {command}" if (command := _noted(folder)[1]["command"]) else "fit again"
            raise ValueError(f"{folder} has no {MANIFEST}: it was killed before the first draw: {again}")
        return _tabular(folder, damaged)
    if script is None and not (folder / SCRIPT).exists():
        raise ValueError(f"{folder} does not say what was sampled; name the script: --script SCRIPT.py:target")
    return replace(run_of_script(folder, script or _read_note(folder)), damaged=damaged)


def _tabular(folder: Path, damaged: Damaged) -> Run:
    """The run of an estimator, with the notes of `isosgd fit`."""
    from isosgd import sklearn

    model = sklearn.opened(folder, damaged)
    network, columns = model.network_, model.columns_
    notes, words = _noted(folder)
    classes = [str(name) for name in getattr(model, "classes_", ())]
    single = network.inputs == 1
    layers = ", ".join(map(str, network.hidden))
    subject = Subject(
        title=f"{words['target']}, predicted from {words['source']}",
        target=words["target"],
        inputs=[*columns.numbers, *columns.categories] if single and columns.names else [],
        classes=classes,
        y_mean=0.0 if classes else float(model.y_center_[0]),
        y_scale=1.0 if classes else float(model.y_scale_[0]),
        x_mean=float(columns.center[0]) if single else 0.0,
        x_scale=float(columns.scale[0]) if single else 1.0,
        layers=network.layers(),
        network=f"a network with hidden layers of {layers} units beside a linear path" if layers else "a linear model",
        notes=[*notes, *columns.describe()],
        longer=words["longer"],
        advice=FIT_ADVICE if words["command"] else {},
    )
    return Run(
        folder, network.target(), model.posterior_.data, model.held_out_, None, subject, model, words["command"],
        damaged=damaged,
    )  # fmt: skip


def _noted(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Notes of `isosgd fit`: remarks about the table, and `NOTED`."""
    try:
        note = json.loads((folder / TABLE).read_text(encoding="utf-8")) if (folder / TABLE).exists() else {}
        return [str(line) for line in note.get("notes", [])], {n: str(note.get(n, usual)) for n, usual in NOTED.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / TABLE} cannot be used ({first_line(error)}); fit the table again") from error


def refuse_begun(folder: Path) -> None:
    """Refuse to overwrite a run."""
    if Manifest.begun(folder):
        raise ValueError(
            f"{folder} holds a run already: `isosgd resume {folder}` goes on with it; or choose another --out"
        )


def shown(command: str) -> str:
    """A command for others to read, with absolute paths cut to their last name.

    Example:
        >>> shown("isosgd fit /data/houses.csv --target price --out=/data/runs/houses")
        'isosgd fit houses.csv --target price --out=houses'
    """
    words = []
    for word in shlex.split(command):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    return shlex.join(words)


# ---------------------------------------------------------------- targets of scripts


def command_of(place: str, folder: Path) -> str:
    """The command that repeats the run of a script; empty if a command line cannot express its settings."""
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


def write_note(run: Run) -> None:
    """Write where the target of a script's run comes from into its folder."""
    script, _, target = run.place.rpartition(":")
    text = json.dumps({"script": str(Path(script).resolve()), "target": target}, indent=1)
    (run.folder / SCRIPT).write_text(text + "\n", encoding="utf-8")


def _read_note(folder: Path) -> str:
    """``SCRIPT.py:target`` from `write_note`."""
    path = folder / SCRIPT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        script, target = Path(found["script"]), found["target"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a note that isosgd wrote: {first_line(error)}") from error
    if not script.is_absolute() or script.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{path} names the script {script}, which would be run: pass --script {script}:{target} if you trust it"
        )
    return f"{script}:{target}"


def split_place(place: str) -> tuple[Path, str]:
    """Script and name of the target in ``SCRIPT.py:name``; the name is ``target`` by default."""
    file, _, name = place.partition(".py:")
    return (Path(file + ".py"), name) if name else (Path(place.removesuffix(":")), "target")


def run_of_script(folder: Path, place: str) -> Run:
    """Run a script and take its target and data.

    The names ``data``, ``heldout`` and ``init`` are looked up beside the target. ``data`` and ``heldout`` may be
    functions without arguments; ``init`` is passed to `isosgd.sample` as it is.
    """
    path, name = split_place(place)
    if not path.is_file():
        raise ValueError(f"there is no script {path}; name it as SCRIPT.py:target")
    spec = importlib.util.spec_from_file_location(f"isosgd_script_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours
    try:
        torch.manual_seed(SEED)
        spec.loader.exec_module(module)
        target, data, heldout = (_made(getattr(module, what, None)) for what in (name, "data", "heldout"))
    except (Exception, SystemExit) as error:  # users' code may raise anything
        raise ValueError(f"{_where(path, error)}: {first_line(error)}; fix the script") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    if not isinstance(target, Target):
        there = [n for n, value in vars(module).items() if isinstance(value, Target)]
        hint = f"; it has {', '.join(there)}" if there else ""
        raise ValueError(f"{path} has no isosgd.Target named {name!r}, nor a function that makes one{hint}")
    if data is None or isinstance(data, str | bytes) or not hasattr(data, "__iter__"):
        what = "nothing named 'data'" if data is None else f"'data' of type {type(data).__name__}"
        raise ValueError(f"{path} has {what}: make it a tuple of tensors, a DataLoader, or a function that makes one")
    init, subject = getattr(module, "init", None), Subject(f"{name} of {path.name}", advice=SAMPLE_ADVICE)
    return Run(folder, target, data, heldout, init, subject, place=f"{path}:{name}")


def _where(path: Path, error: BaseException) -> str:
    """The script, and its last line in the traceback of an error."""
    frames, whole = traceback.extract_tb(error.__traceback__), path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == whole]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _made(found: Any) -> Any:
    return found() if callable(found) and not isinstance(found, Target) and not hasattr(found, "__iter__") else found
