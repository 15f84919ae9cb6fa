"""Stored runs: load them, load several as one, and merge them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from isosgd.differences import as_lines, differences
from isosgd.errors import listed, warn_caller
from isosgd.posterior import Posterior
from isosgd.sampling.request import complete_identity, fingerprint
from isosgd.sampling.weights import Weights, weighted
from isosgd.store import DamagedError, Manifest, Shards, StoredDraws, StoredState, StoreError
from isosgd.store.draws import Damaged, check_file, look, read_tensors
from isosgd.store.files import plain, unpack
from isosgd.store.manifest import NAME, File
from isosgd.target import Params, Target

Info = dict[str, Any]


def load(
    path: str | Path | Sequence[str | Path],
    target: Target | None = None,
    *,
    data: Any = None,
    chains: Sequence[int] | None = None,
    verify: bool = False,
    damaged: Damaged = "refuse",
    as_drawn: bool = False,
) -> Posterior:
    """Open the draws of a run that was written by ``sample(..., store=path)``, finished, running or stopped.

    Draws are read when they are needed. The SHA-256 of a shard is checked when it is first used.

    Of a run around trained networks (``starts=``) that held-out examples have judged, the result is what `sample`
    returned: the networks have their weight among the draws, and predictions are calibrated.

    Args:
        path: folder of the run; or folders of several runs of the same target with different seeds, which become one
            run whose chains are numbered one run after the other (see `isosgd.merge`). Stores of `Collector`, too.
        target: what was sampled, made as before; without it draws can be read, but not predict.
        data: the training data, for ``posterior.summary()`` and ``posterior.trust()``.
        chains: numbers of the chains to load. Chains that ran in turn may have different lengths; by default the chains
            and the common length that give the most draws are loaded, and ``info["lengths"]`` has the length of each.
            If the lengths of several runs differ, a warning names the runs that are left out.
        verify: check the SHA-256 of all shards now.
        damaged: ``refuse`` raises an error that names a damaged shard when it is first used; ``drop`` checks all shards
            now, warns of damaged ones, and leaves their draws out.
        as_drawn: the draws of the chains alone, whatever held-out examples said of them.

    Returns:
        The draws, read when they are needed. ``info["complete"]`` says whether the run is finished.

    Raises:
        isosgd.store.StoreError: if there is no run, or it cannot be read.

    Example:
        >>> import tempfile, torch
        >>> from isosgd import Target, load, priors, sample
        >>> y = torch.randn(200, generator=torch.Generator().manual_seed(0))
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = sample(target, (y,), draws=20, keep_every=5, warmup=400, progress=False, store=folder.name)
        >>> posterior = load(folder.name, target)
        >>> posterior.num_draws, posterior.info["complete"]
        (20, True)
        >>> folder.cleanup()
    """
    if target is not None and not isinstance(target, Target):
        raise TypeError(f"target of type {type(target).__name__}: pass an isosgd.Target, made as it was for the run")
    if damaged not in ("refuse", "drop"):
        raise ValueError(f"damaged = {damaged!r} is unknown; choose 'refuse' or 'drop'")
    folder, manifest = opened(path)
    shards = Shards(folder, manifest, damaged, verify)
    draws = StoredDraws(shards, chains)
    if chains is None and manifest.info.get("runs"):
        _warn_of_lengths(manifest, draws, path if isinstance(path, str | Path) else None)
    if target is not None:
        _check_target(folder, manifest, target)
        about = manifest.info.get("target"), manifest.info.get("options")  # older folders have only the options
        alone = any(isinstance(part, dict) and part.get("tempered") == "likelihood" for part in about)
        target = target.tempered("likelihood" if alone else "both")
    info = {
        **info_of(manifest.info, draws.chains),
        "complete": manifest.complete,
        "lengths": draws.lengths,
        "seconds": manifest.seconds,
        "store": str(path) if isinstance(path, str | Path) else [str(one) for one in path],
    }
    buffers = StoredDraws(shards, draws.chains or None, buffers=True)
    found = Posterior(target, draws, info, data, buffers, _starts(folder, manifest, damaged, verify))
    if as_drawn or target is None:
        return found
    if not manifest.weights and manifest.info.get("runs"):
        if any(Manifest.read(Path(run)).weights for run in manifest.info["runs"]):
            warn_caller(
                "held-out examples weighted the draws of each run on its own: together they are shown as drawn. "
                "posterior.with_starts(share) and posterior.calibrated(x_val, y_val) weight and calibrate them"
            )
        return found
    return weighted(found, Weights.read(manifest))


def _starts(folder: Path, manifest: Manifest, damaged: Damaged, verify: bool) -> list[StoredState] | None:
    """The trained networks at which chains started, read when needed; None if one is damaged and dropped."""
    if verify or damaged == "drop":
        try:
            for about in manifest.starts:
                look(folder, about)
                check_file(folder / about.file, about)
        except DamagedError as error:
            if damaged == "refuse":
                raise
            warn_caller(f"the trained networks that chains began with are left out: {error}")
            return None
    return [StoredState(folder, about) for about in manifest.starts] or None


def opened(path: str | Path | Sequence[str | Path]) -> tuple[Path, Manifest]:
    """Folder and manifest of a run; several runs become one manifest with absolute file names."""
    if not isinstance(path, str | Path):
        return opened(path[0]) if len(path) == 1 else (Path(), joined(folders_of(path)))
    manifest = Manifest.read(Path(path))
    if not manifest.parts:
        return Path(path), manifest
    return Path(), replace(joined(folders_of([path])), weights=manifest.weights)


def folders_of(runs: Sequence[str | Path]) -> list[Path]:
    """The folders of runs, or of their parts if they have parts."""
    if not runs:
        raise ValueError("no runs were given: name the folders of at least one")
    return [Path(run) / part if part else Path(run) for run in runs for part in Manifest.read(Path(run)).parts or [""]]


def joined(folders: Sequence[Path]) -> Manifest:
    """Several runs as one manifest, which is not written. Chains are numbered one run after the other."""
    manifests = [Manifest.read(folder) for folder in folders]
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        _check_alike(folders[0], manifests[0], folder, manifest)
    _check_seeds(folders, manifests)
    whole = replace(manifests[0], info={**manifests[0].info, "gradients": 0, "dropped": {}, "chain_indices": []})
    whole.info |= {name: [] for name in BY_CHAIN} | {"runs": [str(folder) for folder in folders]}
    whole.info["seed"] = list(dict.fromkeys(manifest.info.get("seed") for manifest in manifests))
    if len(whole.info["seed"]) == 1:
        (whole.info["seed"],) = whole.info["seed"]
    whole.shards, whole.lost, whole.checkpoints, end = [], {}, {}, 0
    whole.weights = {}  # each was judged on its own
    starts: dict[str, File] = {}  # by SHA-256: runs may have started at the same network
    for folder, manifest in zip(folders, manifests, strict=True):
        numbers = _numbers(manifest)
        shift, end = end - numbers.start, end + len(numbers)
        home = folder.absolute()
        for shard in manifest.shards:
            others = tuple(replace(one, file=str(home / one.file)) for one in shard.others)
            moved = replace(shard, first=shard.first + shift, file=str(home / shard.file), others=others)
            whole.shards.append(moved)
        for start in manifest.starts:
            starts.setdefault(start.sha256, replace(start, file=str(home / start.file)))
        if manifest.starts:
            order, own = list(starts), [start.sha256 for start in manifest.starts]
            whole.info.setdefault("start_of_chain", []).extend(order.index(own[k % len(own)]) for k in numbers)
        whole.lost |= {chain + shift: length for chain, length in manifest.lost.items()}
        info = manifest.info
        whole.info["chain_indices"] += [k + shift for k in info.get("chain_indices", [])]
        whole.info["dropped"] |= {k + shift: why for k, why in info.get("dropped", {}).items()}
        whole.info["gradients"] += info.get("gradients", 0)
        for name in BY_CHAIN:
            whole.info[name] += info.get(name, [])
        whole.buffers = whole.buffers or manifest.buffers
    whole.info["chains_per_set"], whole.starts = end, list(starts.values())
    if whole.frozen is not None:
        whole.frozen = replace(whole.frozen, file=str(folders[0].absolute() / whole.frozen.file))
    whole.complete = all(manifest.complete for manifest in manifests)
    whole.seconds = sum(manifest.seconds for manifest in manifests)
    return whole


def _warn_of_lengths(manifest: Manifest, draws: StoredDraws, merged: str | Path | None) -> None:
    """Warn which of several runs are left out or cut short because their numbers of draws differ."""
    numbers: dict[str, set[int]] = {str(run): set() for run in manifest.info["runs"]}
    for shard in manifest.shards:
        run = next(run for run in numbers if Path(run).absolute() == Path(shard.file).parent)
        numbers[run] |= set(range(shard.first, shard.first + shard.count)) - set(manifest.lost)
    lengths = {run: min((draws.lengths.get(k, 0) for k in chains), default=0) for run, chains in numbers.items()}
    # A finished run without draws has lost its chains, and has warned of that.
    lengths = {run: n for run, n in lengths.items() if n or not Manifest.read(Path(run)).complete}
    longest = max((n for k, n in draws.lengths.items() if k not in manifest.lost), default=0)
    short = [run for run, n in lengths.items() if n < longest]
    if not short:
        return
    left = [run for run in lengths if not numbers[run] or numbers[run] - set(draws.chains)]
    found = f"left out: {listed([f'{run} ({lengths[run]} draws)' for run in left])}" if left else "none is left out"
    mend = [f"isosgd resume {run} --draws {longest}" for run in ([merged] if merged is not None else short)]
    warn_caller(
        f"runs have different numbers of draws, {min(lengths.values())} to {longest}: {draws.num_draws} draws of each "
        f"of {draws.num_chains} chains are shown; {found}. To level them: {listed(mend)}"
    )


def _numbers(manifest: Manifest) -> range:
    """Numbers of the chains of a run."""
    settings = manifest.identity.get("settings", {})
    first = settings.get("first_chain", 0)
    return range(first, first + settings.get("chains", 1) * manifest.info.get("sets", 1))


def _check_alike(one: Path, first: Manifest, other: Path, second: Manifest) -> None:
    """Check that runs sampled the same density of the same data."""
    if first.info.get("sets", 1) > 1:
        raise ValueError(f"{one} is a run of several data sets, which are compared each on its own: load it alone")

    def known(manifest: Manifest, same_start: bool) -> Info:
        identity, settings = complete_identity(manifest.identity), manifest.identity.get("settings", {})
        at_start = () if same_start else ("loss", "gradient")  # they depend on the start
        about = {k: v for k, v in identity.get("target", {}).items() if k not in ("start", *at_start)}
        specs = {name: asdict(spec) for name, spec in manifest.tensors.items()}
        buffers = sorted(manifest.buffers) if first.shards and second.shards else []  # known from the first draw on
        return {
            "data": identity.get("data"),
            "target": about,
            "loop": identity.get("loop"),
            # For a loop these settings say all about its density; for other runs the target says the rest.
            "settings": {name: settings.get(name) for name in ("method", "temperature", "num_data", "weight_decay")},
            "tensors": specs,
            "buffers": buffers,
        }

    starts = [manifest.identity.get("target", {}).get("start", [None])[0] for manifest in (first, second)]
    same = starts[0] == starts[1]
    found = list(differences(known(first, same), known(second, same)))
    if found:
        raise ValueError(
            f"{one} and {other} are not runs of the same target and data (was: the first, is: the second):"
            f"{as_lines(found)}\nruns can be taken for one when their seeds, starts, draws and chains alone differ"
        )


def _check_seeds(folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    """Check that no two runs have the same seed."""
    owner: dict[tuple[Any, int], Path] = {}
    for folder, manifest in zip(folders, manifests, strict=True):
        for number in _numbers(manifest):
            stream = manifest.identity.get("settings", {}).get("seed"), number
            if stream in owner:
                mend = "generator=, or torch, a seed" if "loop" in manifest.identity else "run a seed="
                raise ValueError(
                    f"{owner[stream]} and {folder} were drawn with the same seed = {stream[0]}: their draws are the "
                    f"same, or depend on each other, and would be counted twice. Give each {mend} of its own"
                )
            owner[stream] = folder


NOTES = ("model.json", "table.json", "script.json", "data.safetensors")
"""Files that estimators and the command line write beside the draws: what was sampled, and the data."""


def merge(runs: Sequence[str | Path], out: str | Path, target: Target | None = None) -> Posterior:
    """Merge several runs of the same target and data with different seeds, such as those of an array job.

    Draws and checkpoints are copied, so that the runs may be deleted; files of `isosgd.sklearn` and the command line
    are copied, too. Diagnostics use all chains, which are numbered one run after the other. A merged run can be merged
    again, and extended by `isosgd.resume`. To load runs together without a copy, pass them to `isosgd.load`.

    Args:
        runs: folders that ``sample(..., store=...)`` wrote, finished or stopped.
        out: folder of the merged run; it must not hold a run.
        target: what was sampled, as for `isosgd.load`.

    Returns:
        The draws, as from `isosgd.load`. If the numbers of draws differ, a warning names the runs that are left out;
        they are copied all the same, and ``isosgd.resume(out, ..., draws=N)`` extends the shorter ones.

    Raises:
        ValueError: if runs differ in target, data, method or temperature (the error lists all differences), or two have
            the same seed.

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
    shown = load(folders).info["chain_indices"]  # first, since it warns of runs by their names
    if Manifest.begun(folder):
        raise FileExistsError(f"{folder} already holds a run: merge into another folder")
    parts = [f"part-{i:04d}" for i in range(len(folders))]
    for source, part in zip(folders, parts, strict=True):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name in [*(file.file for file in Manifest.read(source).files), NAME]:  # the manifest last
            shutil.copyfile(source / name, folder / part / name)
    for name in NOTES:  # the same in all runs
        if (Path(runs[0]) / name).exists():
            shutil.copyfile(Path(runs[0]) / name, folder / name)
    write_parts(folder, parts)
    return load(folder, target, chains=shown or None)


def write_parts(folder: Path, parts: Sequence[str]) -> None:
    """Write the manifest of a run that consists of parts in its folder."""
    first = Manifest.read(folder / parts[0])
    before = Manifest.read(folder).weights if (folder / NAME).exists() else {}
    Manifest(first.info, first.identity, first.tensors, parts=list(parts), weights=before).write(folder)


BY_CHAIN = ("keep_every", "warmup", "rates")
"""Lists in ``info`` with an item for each of its ``chain_indices``."""


def info_of(info: Info, chains: Sequence[int]) -> Info:
    """The info of a run restricted to some of its chains. Dropped chains have no entries.

    Example:
        >>> info_of({"chain_indices": [0, 1, 3], "rates": [{"w": 0.1}, {"w": 0.2}, {"w": 0.3}]}, [3, 0])
        {'chain_indices': [3, 0], 'rates': [{'w': 0.3}, {'w': 0.1}], 'chains': 2}
    """
    known = info.get("chain_indices")
    if not isinstance(known, list) or not all(type(number) is int for number in known):
        known = []  # a manifest may be edited
    at = {number: place for place, number in enumerate(known)}
    lists = {
        name: info[name] for name in BY_CHAIN if isinstance(info.get(name), list) and len(info[name]) == len(known)
    }
    chosen = {name: [items[at[number]] for number in chains if number in at] for name, items in lists.items()}
    return {**info, **chosen, "chains": len(chains), "chain_indices": list(chains)}


def _check_target(folder: Path, manifest: Manifest, target: Target) -> None:
    """Check that the target is that of the run: likelihood, prior, parameters and fixed tensors."""
    stored, given = manifest.info.get("target"), target.describe()
    then: Info = dict(stored) if isinstance(stored, dict) else {}
    then["parameters"] = {name: list(spec.shape) for name, spec in manifest.tensors.items()}
    now = {name: given[name] for name in then if name in given}
    then = {name: then[name] for name in now}
    if not now["parameters"] or not manifest.tensors:  # known from the first start or draw on
        del then["parameters"], now["parameters"]
    if then.get("num_data") is None:
        then["num_data"] = manifest.info.get("num_data")
    if then["num_data"] is None or now.get("num_data") is None:  # taken from the data, now or before
        now["num_data"] = then["num_data"]
    found = list(differences(then, unpack(plain(now))))
    if found:
        how = " (an empirical prior: from the trained weights)" if target.prior_is_empirical else ""
        raise ValueError(
            f"the target is not the one that {folder} was drawn from:{as_lines(found)}\nmake it as it was then{how}, "
            "or leave it out to look at the draws alone"
        )
    fixed = {name: x for name, x in frozen_tensors(folder, manifest).items() if name not in manifest.buffers}
    here = {**target.frozen, **target.buffers}
    for name, x in fixed.items():
        if name in here and fingerprint(x) != fingerprint(here[name]):
            raise ValueError(
                f"{name!r} of the target's model is not as it was when {folder} was drawn: give the model its frozen "
                "tensors back, model.load_state_dict(safetensors.torch.load_file(path / 'frozen.safetensors'), "
                "strict=False), and make the target from it"
            )


def frozen_tensors(folder: Path, manifest: Manifest) -> Params:
    """The tensors that are stored once: frozen parameters of the network, and its initial buffers."""
    if manifest.frozen is None:
        return {}
    return read_tensors(folder, manifest.frozen)


def settings_of(path: str | Path) -> tuple[Info, list[str]]:
    """The settings of a run, and the names of the options that a manifest cannot hold."""
    identity = Manifest.read(Path(path)).identity
    settings = identity.get("settings")
    if "loop" in identity:
        raise StoreError(f"{path} was written by a loop: go on with it there, Collector(..., store=..., resume=True)")
    if not isinstance(settings, dict) or not isinstance(settings.get("options"), dict):
        raise StoreError(f"{path} does not say which settings it was begun with")
    settings = dict(settings)
    return settings, list(settings.pop("opaque", []))
