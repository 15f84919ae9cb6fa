"""Runs on the disk: opened, taken together with others or merged, compared with what is asked for now, and extended."""

from __future__ import annotations

import hashlib
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import Data, DataSets, Tensors, Transform, Transformed, as_tensors
from isosgd.differences import as_lines, differences
from isosgd.engine.schedule import Start, start_of
from isosgd.errors import SamplingWarning, check_integer, warn_caller
from isosgd.posterior import Posterior
from isosgd.samplers import METHODS
from isosgd.sampling.settings import versions
from isosgd.sampling.stopping import MOST_DRAWS
from isosgd.store import DamagedError, Manifest, Shards, StoredDraws, StoredState, StoreError, Writer
from isosgd.store.draws import Damaged, check_file, look, read_tensors
from isosgd.store.files import dtype_name, plain, raw, unpack
from isosgd.store.manifest import NAME, File, specs_of
from isosgd.store.writer import STORED, check_new, make_folder
from isosgd.target import Params, Target
from isosgd.target.batches import tensors_of, tree_map

PROBED = 64  # rows at which the loss is compared
PLAIN = str | int | float | bool | None
Info = dict[str, Any]


def load(
    path: str | Path | Sequence[str | Path],
    target: Target | None = None,
    *,
    data: Any = None,
    chains: Sequence[int] | None = None,
    verify: bool = False,
    damaged: Damaged = "refuse",
) -> Posterior:
    """Open the draws of a run that was written by ``sample(..., store=path)``: finished, still running, or stopped.

    Nothing is read before it is needed. A shard's SHA-256 is compared when it is first used.

    Args:
        path: folder of the run; or of several that sampled the same target with other seeds, which are then one: their
            chains are numbered one run after the other (see `isosgd.merge`). Stores of loops (`Collector`), too.
        target: what was sampled, made as it was then; without it the draws can be looked at, but not predict.
        data: the training data, for ``posterior.summary()`` and ``posterior.trust()``.
        chains: numbers of chains, where not all are wanted. Chains that run in turn are stopped at different lengths:
            by default as many are shown as give most draws in all, each with the same number; ``info["lengths"]``
            says how many each has. Of several runs whose lengths differ a warning says which are left out.
        verify: compare the SHA-256 of all shards now.
        damaged: ``refuse`` raises an error that names the shard when one is met that is not as it was written;
            ``drop`` compares all now, warns of such shards, and leaves their draws out.

    Returns:
        The draws, read as they are needed. ``info["complete"]`` says whether the run has come to its end.

    Raises:
        isosgd.store.StoreError: when there is no run, or it cannot be read.

    Example:
        >>> import tempfile
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
    if damaged not in ("refuse", "drop"):
        raise ValueError(f"damaged = {damaged!r} is unknown; choose 'refuse' or 'drop'")
    folder, manifest = opened(path)
    shards = Shards(folder, manifest, damaged, verify)
    draws = StoredDraws(shards, chains)
    if chains is None and manifest.info.get("runs"):
        _warn_of_lengths(manifest, draws, path if isinstance(path, str | Path) else None)
    if target is not None:
        _check_target(folder, manifest, target)
        about = manifest.info.get("target"), manifest.info.get("options")  # the options alone, in earlier folders
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
    return Posterior(target, draws, info, data, buffers, _starts(folder, manifest, damaged, verify))


def _starts(folder: Path, manifest: Manifest, damaged: Damaged, verify: bool) -> list[StoredState] | None:
    """The trained networks that chains began with, read when they are needed; None where one is damaged and dropped."""
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
    """The folder and manifest of a run, or those of several runs as one, whose files are named from the root on."""
    if isinstance(path, str | Path) and not (manifest := Manifest.read(Path(path))).parts:
        return Path(path), manifest
    return Path(), joined(folders_of([path] if isinstance(path, str | Path) else path))


def folders_of(runs: Sequence[str | Path]) -> list[Path]:
    """The folders of runs; of those that have parts, the folders of the parts."""
    if not runs:
        raise ValueError("no runs were given: name the folders of at least one")
    return [Path(run) / part if part else Path(run) for run in runs for part in Manifest.read(Path(run)).parts or [""]]


def joined(folders: Sequence[Path]) -> Manifest:
    """Several runs as one, on no disk. Chains are numbered one run after the other."""
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
    starts: dict[str, File] = {}  # by their contents: runs may have begun with the same network
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
    """Say which of several runs are left out, or cut short, because their numbers of draws differ."""
    numbers: dict[str, set[int]] = {str(run): set() for run in manifest.info["runs"]}
    for shard in manifest.shards:
        run = next(run for run in numbers if Path(run).absolute() == Path(shard.file).parent)
        numbers[run] |= set(range(shard.first, shard.first + shard.count)) - set(manifest.lost)
    lengths = {run: min((draws.lengths.get(k, 0) for k in chains), default=0) for run, chains in numbers.items()}
    # A run that has ended without draws has lost its chains, which is said elsewhere.
    lengths = {run: n for run, n in lengths.items() if n or not Manifest.read(Path(run)).complete}
    longest = max((n for k, n in draws.lengths.items() if k not in manifest.lost), default=0)
    short = [run for run, n in lengths.items() if n < longest]
    if not short:
        return
    left = [run for run in lengths if not numbers[run] or numbers[run] - set(draws.chains)]
    found = f"left out: {_listed([f'{run} ({lengths[run]} draws)' for run in left])}" if left else "none is left out"
    mend = [f"isosgd resume {run} --draws {longest}" for run in ([merged] if merged is not None else short)]
    warn_caller(
        f"runs have different numbers of draws, {min(lengths.values())} to {longest}: {draws.num_draws} draws of each "
        f"of {draws.num_chains} chains are shown; {found}. To level them: {_listed(mend)}"
    )


def _listed(words: list[str], most: int = 6) -> str:
    return ", ".join([*words[:most], *([f"and {len(words) - most} more"] if len(words) > most else [])])


def _numbers(manifest: Manifest) -> range:
    """Numbers of the chains of a run."""
    settings = manifest.identity.get("settings", {})
    first = settings.get("first_chain", 0)
    return range(first, first + settings.get("chains", 1) * manifest.info.get("sets", 1))


def _check_alike(one: Path, first: Manifest, other: Path, second: Manifest) -> None:
    """Refuse to take runs for one that did not sample the same density of the same data."""
    if first.info.get("sets", 1) > 1:
        raise ValueError(f"{one} is a run of several data sets, which are compared each on its own: load it alone")

    def known(manifest: Manifest, same_start: bool) -> Info:
        identity, settings = _complete(manifest.identity), manifest.identity.get("settings", {})
        at_start = () if same_start else ("loss", "gradient")  # where they are taken
        about = {k: v for k, v in identity.get("target", {}).items() if k not in ("start", *at_start)}
        specs = {name: asdict(spec) for name, spec in manifest.tensors.items()}
        buffers = sorted(manifest.buffers) if first.shards and second.shards else []  # known with the first draw
        return {
            "data": identity.get("data"),
            "target": about,
            "loop": identity.get("loop"),
            # Of a loop all that is known of its density; of other runs the target knows the rest.
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
    """Refuse chains that are there twice."""
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


BY_CHAIN = ("keep_every", "warmup", "rates")
"""Lists in ``info`` with an item for each of its ``chain_indices``."""


def info_of(info: Info, chains: Sequence[int]) -> Info:
    """The info of a run as that of some of its chains. Of chains that were dropped there are no such items.

    Example:
        >>> info_of({"chain_indices": [0, 1, 3], "rates": [{"w": 0.1}, {"w": 0.2}, {"w": 0.3}]}, [3, 0])
        {'chain_indices': [3, 0], 'rates': [{'w': 0.3}, {'w': 0.1}], 'chains': 2}
    """
    known = info.get("chain_indices")
    if not isinstance(known, list) or not all(type(number) is int for number in known):
        known = []  # a manifest may be anyone's
    at = {number: place for place, number in enumerate(known)}
    lists = {
        name: info[name] for name in BY_CHAIN if isinstance(info.get(name), list) and len(info[name]) == len(known)
    }
    chosen = {name: [items[at[number]] for number in chains if number in at] for name, items in lists.items()}
    return {**info, **chosen, "chains": len(chains), "chain_indices": list(chains)}


def _check_target(folder: Path, manifest: Manifest, target: Target) -> None:
    """Refuse a target that is not the one of the run: likelihood, prior, parameters, or tensors that it holds fixed."""
    stored, given = manifest.info.get("target"), target.describe()
    then: Info = dict(stored) if isinstance(stored, dict) else {}
    then["parameters"] = {name: list(spec.shape) for name, spec in manifest.tensors.items()}
    now = {name: given[name] for name in then if name in given}
    then = {name: then[name] for name in now}
    if not now["parameters"] or not manifest.tensors:  # known with the first start, or with the first draw
        del then["parameters"], now["parameters"]
    if then.get("num_data") is None:
        then["num_data"] = manifest.info.get("num_data")
    if then["num_data"] is None or now.get("num_data") is None:  # taken from the data, then or now
        now["num_data"] = then["num_data"]
    found = list(differences(then, unpack(plain(now))))
    if found:
        raise ValueError(
            f"the target is not the one that {folder} was drawn from:{as_lines(found)}\nmake it as it was then, or "
            "leave it out to look at the draws alone"
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
    """What was written once: frozen parameters of the network, and its buffers at the start."""
    if manifest.frozen is None:
        return {}
    return read_tensors(folder, manifest.frozen)


@dataclass
class RunRequest:
    """What `sample` was asked for, as far as a store has to know it. The fields are its arguments, checked."""

    target: Target
    data: Data
    init: Start
    device: torch.device | None
    settings: Info
    options: Info
    store: str | Path | None
    resume: bool
    store_dtype: str | None
    held_out: Any = None
    transform: Transform | None = None
    starts: Sequence[Mapping[str, Tensor]] = ()

    def __post_init__(self) -> None:
        if self.store_dtype not in STORED:
            raise ValueError(f"store_dtype = {self.store_dtype!r} is unknown; choose 'float32', 'bfloat16' or None")
        if self.store is None and (self.resume or self.store_dtype is not None):
            raise ValueError("resume and store_dtype go with store=, the folder of a run: give that too")
        check_integer("seed", self.settings["seed"], 0)
        if self.store is not None and not isinstance(self.store, str | Path):
            raise TypeError(f"store = {self.store!r} must be the path of a folder")

    @property
    def tensors(self) -> Tensors | None:
        """The data, where they are tensors of one data set."""
        return None if isinstance(self.data, DataSets) else as_tensors(self.data)

    @property
    def count(self) -> int:
        """Chains in all."""
        return int(self.settings["chains"]) * (self.data.sets if isinstance(self.data, DataSets) else 1)

    def of_chain(self, chain: int) -> RunRequest:
        """What one chain is asked for, whose run is a part of the store."""
        store = None if self.store is None else Path(self.store) / f"part-{chain:04d}"
        settings = {**self.settings, "chains": 1, "first_chain": chain}
        return replace(self, settings=settings, store=store, starts=() if chain else self.starts)  # once for all parts

    def start(self, chain: int) -> Params:
        """Free parameters at which a chain starts."""
        return self.target.initial(start_of(self.init, chain), device=self.device)

    def identity(self) -> Info:
        """What must be the same when the run is resumed."""
        first = self.settings.get("first_chain", 0)
        starts = [self.start(first + k) for k in range(self.count)]
        return {
            "settings": {
                **self.settings,
                "store_dtype": self.store_dtype,
                "options": {name: described(value) for name, value in self.options.items()},
                "opaque": [name for name, value in self.options.items() if not is_plain(value)],
            },
            "data": data_identity(self.data),
            "target": target_identity(self.target, self.data, starts, self.transform),
            "device": next(iter(starts[0].values())).device.type,
            **({} if self.held_out is None else {"held_out": inputs_identity(self.held_out)}),
        }

    def check_store(self) -> None:
        """Refuse a folder in which the run cannot be begun."""
        if self.store is not None:
            make_folder(Path(self.store))
            if not self.resume:
                check_new(Path(self.store))

    def open(self, info: Info) -> Writer | None:
        """Begin the run, or go on with the one that is there; None when that one has all that is asked for.

        Args:
            info: what is known of a run that is begun.
        """
        assert self.store is not None
        folder, identity = Path(self.store), self.identity()
        if not self.resume or not Manifest.begun(folder):
            natural = self.target.constrain(self.target.initial(start_of(self.init, 0)))
            tensors = specs_of(natural, STORED[self.store_dtype])
            fixed = {**self.target.frozen, **self.target.buffers}
            return Writer.create(folder, Manifest(info, identity, tensors), fixed, self.starts)
        if parts := Manifest.read(folder).parts:
            raise ValueError(
                f"{folder} holds a run of {len(parts)} parts, merged or drawn by ranks: in one process they go on by "
                "isosgd.resume(store, target, data, draws=...)"
            )
        writer = Writer.reopen(folder)  # first of all: what follows must be true while no other process writes
        with writer.closed_on_error():
            return self._going_on(writer, identity)

    def _going_on(self, writer: Writer, identity: Info) -> Writer | None:
        """The writer of the run that is there, if it is this one; None, and closed, when nothing is left to do."""
        manifest, folder, now = writer.manifest, writer.folder, unpack(plain(identity))
        same = differences(_without_length(_complete(manifest.identity), now), _without_length(now, now))
        found = [*self._cut_short(manifest, now), *same]
        if found:
            raise ValueError(
                f"{folder} cannot be resumed:{as_lines(found)}\ngive what it was begun with, or another store="
            )
        longer = manifest.identity.get("settings") != now["settings"]
        if manifest.complete and not longer:
            writer.close()
            return None
        then = {**manifest.info.get("versions", {}), "threads": manifest.info.get("threads")}
        changed = list(differences(then, {**versions(), "threads": torch.get_num_threads()}))
        if changed:
            warnings.warn(
                f"{folder} goes on where it was, but other versions may round otherwise, so that its draws need not be "
                f"bit for bit those of a run that was never stopped: {'; '.join(changed)}",
                SamplingWarning,
                stacklevel=4,
            )
        if longer:
            writer.extend(identity)
        return writer

    def _cut_short(self, manifest: Manifest, now: Info) -> list[str]:
        """Why a run cannot be extended to the number of draws that is asked for now; empty where it can."""
        then, asked = manifest.identity.get("settings", {}), now["settings"]
        old, new = then.get("draws"), asked["draws"]
        if (old, then.get("budget")) == (new, asked.get("budget")):
            return []
        change = f"settings.draws was {old!r} and is {new!r}"
        shorter = "a run can be extended, not cut short (posterior.select shows some of its draws)"
        if asked["method"] not in METHODS:
            return [f"{change}, but {asked['method']} makes its draws all at once: begin another run"]
        if new != "auto":
            there = max((shard.stop for shard in manifest.shards), default=0) if old == "auto" else old
            return [f"{change}: {shorter}"] if new < there else []
        if old != "auto":
            return [f"{change}, which watches predictions from the first draw on: give a number"]
        before, after = (MOST_DRAWS if s.get("budget") is None else s["budget"] for s in (then, asked))
        return [f"settings.budget was {before} and is {after}: {shorter}"] if after < before else []


def _complete(identity: Info) -> Info:
    """An identity whose target says what the temperature acts on: in earlier folders only the options said so."""
    target, settings = identity.get("target"), identity.get("settings")
    describes = target.get("describes") if isinstance(target, dict) else None
    options = settings.get("options") if isinstance(settings, dict) else None
    if not (isinstance(target, dict) and isinstance(describes, dict) and isinstance(options, dict)):
        return identity
    if options.get("tempered") != "likelihood":
        return identity
    return {**identity, "target": {**target, "describes": {**describes, "tempered": "likelihood"}}}


def _without_length(identity: Info, now: Info) -> Info:
    """An identity without what may change when a run is extended."""
    settings = {k: v for k, v in identity.get("settings", {}).items() if k not in ("draws", "budget")}
    watched = ("held_out",) if now["settings"]["draws"] != "auto" else ()
    return {**{k: v for k, v in identity.items() if k not in watched}, "settings": settings}


def settings_of(path: str | Path) -> tuple[Info, list[str]]:
    """The settings that a run was begun with, and the names of those options that a manifest cannot hold."""
    identity = Manifest.read(Path(path)).identity
    settings = identity.get("settings")
    if "loop" in identity:
        raise StoreError(f"{path} was written by a loop: go on with it there, Collector(..., store=..., resume=True)")
    if not isinstance(settings, dict) or not isinstance(settings.get("options"), dict):
        raise StoreError(f"{path} does not say which settings it was begun with")
    settings = dict(settings)
    return settings, list(settings.pop("opaque", []))


# -- what must be the same for a run to be resumed --------------------------------------------------------------------


def is_plain(value: Any) -> bool:
    """Whether a manifest holds a value as it is: text and numbers, and lists and dicts of them.

    Example:
        >>> is_plain({"rates": [0.1, None]}), is_plain([object()])
        (True, False)
    """
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and is_plain(item) for key, item in value.items())
    return isinstance(value, PLAIN)


def described(value: Any) -> Any:
    """A setting as something that a manifest holds: itself, or its text without addresses of this process."""
    if is_plain(value):
        return value
    name = getattr(value, "__qualname__", None)
    if callable(value) and name:
        return f"{getattr(value, '__module__', '')}.{name}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def fingerprint(x: Tensor) -> dict[str, Any]:
    """Shape, dtype and SHA-256 of a tensor's bytes."""
    content: Any = raw(x).numpy()
    return {"shape": list(x.shape), "dtype": dtype_name(x.dtype), "sha256": hashlib.sha256(content).hexdigest()}


def data_identity(data: Data) -> dict[str, Any]:
    """What can be told of data. Of a loader that is little: what kind it is and how much it holds."""
    if isinstance(data, DataSets):
        return {"tensors": [fingerprint(t) for t in data.tensors], "rows": fingerprint(data.rows)}
    tensors = as_tensors(data)
    if tensors is not None:
        return {"tensors": tree_map(fingerprint, tensors if isinstance(tensors, dict) else list(tensors))}
    source = getattr(data, "dataset", None)
    return {
        "loader": type(data).__name__,
        "batches": _length(data),
        "dataset": None if source is None else type(source).__name__,
        "examples": _length(source),
    }


def inputs_identity(given: Any) -> list[dict[str, Any]]:
    """What can be told of inputs: of a tensor, or of several."""
    every = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple | list) else (given,)
    return [fingerprint(torch.as_tensor(x)) for x in every]


def _length(of: Any) -> int | None:
    try:
        return len(of)
    except TypeError:
        return None


def target_identity(
    target: Target, data: Data, starts: list[Params], transform: Transform | None = None
) -> dict[str, Any]:
    """What can be told of a target: how it describes itself, where chains start, and what it says at some data.

    Args:
        starts: free parameters of each chain.
    """
    found: dict[str, Any] = {
        "describes": target.describe(),
        "frozen": {name: fingerprint(x) for name, x in target.frozen.items()},
        "start": [{name: fingerprint(x)["sha256"] for name, x in start.items()} for start in starts],
    }
    tensors = as_tensors(data.set(0) if isinstance(data, DataSets) else data)
    if tensors is not None:
        batch = tree_map(lambda t: t[:PROBED], tensors)
        first = tensors_of(tensors)[0]
        batch = Transformed(transform, 0, first.device)(batch)
        checked = target._checked
        with target.using(target.initial_buffers(None, starts[0])):
            loss, gradients = target.gradient(starts[0], batch, len(first))
        target._checked = checked  # the first look is to be at a whole minibatch
        norms = torch.stack([g.double().norm().cpu() for g in gradients])
        found["loss"], found["gradient"] = float(loss), float(norms.square().sum().sqrt())
    return found
