"""`merge`: runs of one target with other seeds become one run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from isosgd.posterior import Posterior
from isosgd.sampling.stored import folders_of, load
from isosgd.store import Manifest
from isosgd.store.manifest import NAME
from isosgd.target import Target

NOTES = ("model.json", "table.json", "script.json", "data.safetensors")
"""What estimators and the command line write beside the draws of a run: what was sampled, and the data."""


def merge(runs: Sequence[str | Path], out: str | Path, target: Target | None = None) -> Posterior:
    """Make one run of several, such as those of an array job: the same target and data, each with a seed of its own.

    Draws and checkpoints are copied, so that the runs may be deleted then; and so are the estimator of
    `isosgd.sklearn` and what the command line noted, if they are there. R-hat and all else are those of all
    chains, which are numbered one run after the other. A merged run can be merged again, and extended by
    `isosgd.resume`. To look at runs together without a copy, pass them to `isosgd.load`.

    Args:
        runs: folders that ``sample(..., store=...)`` wrote; finished ones, or stopped ones.
        out: folder of the merged run, in which there must be none.
        target: what was sampled, as for `isosgd.load`.

    Returns:
        The draws, as `isosgd.load` gives them. Where numbers of draws differ, a warning says which runs are left out;
        they are copied all the same, and ``isosgd.resume(out, ..., draws=N)`` levels them.

    Raises:
        ValueError: when runs are of another target, other data, another method or temperature, each difference in a
            line; or when two have the same seed.

    Example:
        >>> import tempfile, torch
        >>> from isosgd import Target, merge, priors, sample
        >>> y = torch.randn(200, generator=torch.Generator().manual_seed(0))
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
        >>> folder = tempfile.TemporaryDirectory()
        >>> runs = [f"{folder.name}/{seed}" for seed in range(2)]
        >>> for seed, run in enumerate(runs):
        ...     _ = sample(target, (y,), draws=20, keep_every=5, warmup=400, progress=False, store=run, seed=seed)
        >>> merge(runs, f"{folder.name}/all", target).num_chains
        2
        >>> folder.cleanup()
    """
    if isinstance(runs, str | Path):
        raise TypeError(f"runs = {str(runs)!r} must be a list of folders")
    folders, folder = folders_of(runs), Path(out)
    shown = load(folders).info["chain_indices"]  # before anything is written; says by their names which are left out
    if Manifest.begun(folder):
        raise FileExistsError(f"{folder} already holds a run: merge into another folder")
    parts = [f"part-{i:04d}" for i in range(len(folders))]
    for source, part in zip(folders, parts, strict=True):
        copy_run(source, folder / part)
    for name in NOTES:  # what was sampled is the same in all
        if (Path(runs[0]) / name).exists():
            shutil.copyfile(Path(runs[0]) / name, folder / name)
    write_parts(folder, parts)
    return load(folder, target, chains=shown or None)


def copy_run(source: Path, to: Path) -> None:
    """Copy what belongs to a run; the manifest comes last."""
    to.mkdir(parents=True, exist_ok=True)
    manifest = Manifest.read(source)
    for file in manifest.files:
        shutil.copyfile(source / file.file, to / file.file)
    shutil.copyfile(source / NAME, to / NAME)


def write_parts(folder: Path, parts: Sequence[str]) -> None:
    """Say that a folder holds one run, whose parts are there."""
    first = Manifest.read(folder / parts[0])
    Manifest(first.info, first.identity, first.tensors, parts=list(parts)).write(folder)
