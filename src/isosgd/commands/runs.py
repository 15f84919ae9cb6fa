"""Folders of runs: what was sampled, with which data, and the draws."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isosgd import Posterior, Target, load
from isosgd.commands import scripts
from isosgd.commands.network import Network
from isosgd.data.tables import Table, load_table
from isosgd.data.unlike import Familiar
from isosgd.report import Subject
from isosgd.store.manifest import Manifest

MANIFEST, TABLE, DATA, REPORT = "manifest.json", "table.json", "data.safetensors", "report.html"
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Run:
    """A run and what it takes to go on with it, to predict and to report.

    Attributes:
        folder: of the run.
        target: what is sampled.
        data: training data.
        heldout: rows left out, if any.
        init: where chains start, as `isosgd.sample` takes it.
        subject: names and units for the report.
        table: how columns become inputs; None for runs of scripts.
        familiar: tells inputs that are unlike the training data; None for runs of scripts.
    """

    folder: Path
    target: Target
    data: Any
    heldout: Any = None
    init: Any = None
    subject: Subject = field(default_factory=Subject)
    table: Table | None = None
    familiar: Familiar | None = None

    def posterior(self) -> Posterior:
        """The draws that are there."""
        found = load(self.folder, self.target, data=self.data if isinstance(self.data, tuple) else None)
        if not len(found):
            raise ValueError(f"{self.folder} has no draws yet; `isosgd resume {self.folder}` goes on")
        return found

    def report(self, path: Path | None = None) -> Path:
        """Write the report; into the folder of the run by default."""
        from isosgd.report import write_report

        data = self.data if isinstance(self.data, tuple) else None
        outside = None
        # Of a single column shuffling leaves the distribution as it is.
        several = self.table is not None and len(self.table.columns) > 1
        if self.table is not None and several and self.table.classes and self.heldout is not None:
            outside = shuffled_columns(self.heldout[0])
        return write_report(
            self.posterior(), path or self.folder / REPORT, data=data, heldout=self.heldout, outside=outside,
            subject=self.subject,
        )  # fmt: skip


def add_run(parser: argparse.ArgumentParser) -> None:
    """The argument RUN, and where its target comes from when the folder does not say."""
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument(
        "--script", metavar="SCRIPT.py:target",
        help="what makes target and data, for a run that was begun from Python or whose script has moved",
    )  # fmt: skip


def open_run(folder: Path, script: str | None = None) -> Run:
    """The run in a folder.

    Args:
        folder: that ``fit`` or ``sample`` wrote, or `isosgd.sample` with ``store=``.
        script: ``SCRIPT.py:target`` that makes target and data, for runs that were begun from Python.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of a run; `isosgd fit` and `isosgd sample` make one")
    if script is None and (folder / TABLE).exists():
        return _tabular(folder)
    if script is None and not (folder / scripts.FILE).exists():
        raise ValueError(f"{folder} does not say what was sampled; name the script: --script SCRIPT.py:target")
    found = scripts.load_script(script or scripts.read_note(folder))
    place = f"{found.path}:{found.name}"
    subject = Subject(
        title=f"{found.name} of {found.path.name}",
        commands=[f"isosgd sample {place} --out {folder}", f"isosgd report {folder}"],
    )
    return Run(folder, found.target, found.data, found.heldout, found.init, subject)


def save_tabular(
    folder: Path,
    table: Table,
    network: Network,
    train: tuple[Tensor, Tensor],
    heldout: tuple[Tensor, Tensor] | None,
    **words: str,
) -> Run:
    """Write everything about a table's run but its draws, so that it can be resumed, used and reported later.

    Args:
        folder: of the run.
        table: how columns become inputs.
        network: what is sampled.
        train: training rows.
        heldout: rows left out, if any.
        words: for the report: ``source``, the name of the table's file; ``command``; and ``longer``, one that runs
            longer.
    """
    if Manifest.begun(folder):
        raise ValueError(
            f"{folder} holds a run already: `isosgd resume {folder}` goes on with it; or choose another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"x": train[0], "y": train[1]}
    if heldout is not None:
        tensors |= {"heldout_x": heldout[0], "heldout_y": heldout[1]}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / DATA)
    limit = Familiar.learn(train[0]).limit
    table.save(folder / TABLE, network=network.as_dict(), unlike={"limit": limit}, **words)
    return _tabular(folder)


def _tabular(folder: Path) -> Run:
    table, more = load_table(folder / TABLE)
    network = Network.from_dict(more.get("network"))
    if (network.inputs, network.outputs) != (len(table.inputs), len(table.classes) or 1):
        raise ValueError(f"{folder / TABLE}: the network has not as many inputs and outputs as the table")
    try:
        tensors = load_file(folder / DATA)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{folder / DATA} cannot be read ({error}); fit the table again") from error
    for part in ("", "heldout_"):
        x, y = tensors.get(f"{part}x"), tensors.get(f"{part}y")
        if x is None and part:
            continue
        if x is None or y is None or x.ndim != 2 or x.shape[1] != network.inputs or len(x) != len(y):
            raise ValueError(f"{folder / DATA} does not hold {part}x [n, {network.inputs}] and {part}y; fit again")
    limit = more.get("unlike", {}).get("limit")
    if not isinstance(limit, float):
        raise ValueError(f"{folder / TABLE} does not say from which distance on an input is unlike the training data")
    source, command = str(more.get("source", "")), str(more.get("command", ""))
    alone = len(table.inputs) == 1
    subject = Subject(
        title=f"{table.target}, predicted from {source}",
        target=table.target,
        inputs=table.inputs,
        classes=table.classes,
        y_mean=table.y_mean,
        y_scale=table.y_scale,
        x_mean=table.x_mean[0] if alone else 0.0,
        x_scale=table.x_scale[0] if alone else 1.0,
        layers=network.layers(),
        network=network.describe(),
        notes=table.describe(),
        commands=[command, f"isosgd report {folder}"],
        outside="columns shuffled",
        longer=str(more.get("longer", "")),
    )
    heldout = (tensors["heldout_x"], tensors["heldout_y"]) if "heldout_x" in tensors else None
    return Run(
        folder, network.target(), (tensors["x"], tensors["y"]), heldout, network.start, subject, table,
        Familiar.among(tensors["x"], limit),
    )  # fmt: skip


def shuffled_columns(x: Tensor) -> Tensor:
    """The same values in each column, but put together at random: rows that never were.

    Example:
        >>> x = torch.arange(6.0).reshape(3, 2)
        >>> shuffled_columns(x).sort(0).values.equal(x)
        True
    """
    generator = torch.Generator().manual_seed(SHUFFLE_SEED)
    return torch.stack([x[torch.randperm(len(x), generator=generator), k] for k in range(x.shape[1])], 1)
